"""``eagle3 plan roofline``: the upper bound of tokens/s that hardware allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from typer import Option

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import JsonOption
from eagle3_jax.cli._printing import Page, print_page, table_of
from eagle3_jax.cli.plan.options import (
    ContextOption,
    DeploymentOptions,
    DraftOptions,
    deployment_json,
    read_context,
    title_of,
)
from eagle3_jax.measure.tables import Table
from eagle3_jax.theory.accelerators import KNOWN_ACCELERATORS
from eagle3_jax.theory.bounds import (
    best_chain,
    check_claim,
    experts_read,
    largest_batch,
    paying_batches,
    round_bound,
)
from eagle3_jax.theory.memory import Deployment
from eagle3_jax.theory.sizes import sizes_of

EXAMPLE = "Example: eagle3 plan roofline --target Llama-3.3-70B --weights fp8 --gpu H200"
_BATCHES = tuple(2**power for power in range(10))
# Batch sizes of the table of all accelerators.
_COMPARED = (1, 8, 64)
_NODES = (1, 2, 4, 8, 16, 32, 60)
_BOUNDS = {
    "batch": "batch",
    "bytes read": "plain_bytes",
    "operations": "plain_flops",
    "plain": "plain_seconds",
    "limit": "plain_limit",
    "tokens/s": "plain_tokens_per_second",
    "verify": "verify_seconds",
    "verify limit": "verify_limit",
    "v": "verify_cost",
    "c": "draft_cost",
    "speculative": "tokens_per_second",
    "S": "speedup",
    "fits": "fits",
}
# Bytes of the largest last-level caches of accelerators.
_ON_CHIP = 256e6
_LIMITS = (
    "No hardware is faster: the longer of bytes/bandwidth and operations/peak, communication left"
    " out."
)
_ACCELERATOR_NOTES = """
tokens/s of a batch: plain, speculative. fits: the largest batch that memory holds.
Peaks are dense bfloat16; datasheets are named in --json."""


def roofline(
    *,
    deployed: DeploymentOptions,
    draft: DraftOptions,
    context: ContextOption = None,
    batch_size: Annotated[
        int | None, Option(help="Sequences at once. Default: a table of 1 to 512.", min=1)
    ] = None,
    claim: Annotated[
        float | None,
        Option(help="Published tokens/s at --batch-size; prints whether they are possible."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """The upper bound of tokens/s that hardware allows.

    Bytes and operations of every step by batch; without --gpu a table of all known accelerators.
    """
    deployment = deployed.read()
    k, tau = draft.read_for(deployment)
    context = read_context(context, 1024, deployment)
    is_comparison = deployed.gpu is None and deployed.bandwidth_gb_per_s is None
    if claim is not None and batch_size is None:
        raise Misuse("--claim is about one batch; add --batch-size")
    if claim is not None and is_comparison:
        raise Misuse("--claim is about one accelerator; add --gpu or --bandwidth-gb-per-s")

    batches = [batch_size] if batch_size else _BATCHES
    accelerators = KNOWN_ACCELERATORS.values() if is_comparison else [deployment.accelerator]
    deployments = [
        dataclasses.replace(deployment, accelerator=accelerator) for accelerator in accelerators
    ]
    results = [
        _bounds_of(placed, context=context, k=k, tau=tau, batches=batches) for placed in deployments
    ]

    setting = f"context {context}, K = {k}, τ = {tau:.2f}"
    gpu = "each GPU" if is_comparison else deployment.accelerator.name
    text: list[str | Table] = [title_of(deployment, context, f"{setting}\n{_LIMITS}", gpu=gpu)]
    if is_comparison:
        text += _accelerators(results)
    else:
        text += _batches(results[0], deployment)
        text += _nodes(results[0], deployment, alpha=draft.acceptance().conditional_acceptance_rate)

    if claim is not None:
        verdict = check_claim(
            deployment,
            tokens_per_second=claim,
            batch=batches[0],
            context=context,
            num_draft_tokens=k,
        )
        results[0]["claim"] = dataclasses.asdict(verdict) | {"possible": verdict.possible}
        needed = "at no batch"
        if verdict.batch_needed is not None:
            needed = f"from batch {verdict.batch_needed} on"
        drafted = ""
        if k:
            drafted = f" if all {k} draft tokens were always accepted and drafting took no time"
        text.append(
            f"\n{'possible' if verdict.possible else 'IMPOSSIBLE'}: {claim:,.0f} tokens/s is"
            f" {verdict.share_of_bound:.2g}x the upper bound at batch {batch_size},"
            f" {verdict.bound:,.0f}{drafted}. Plain decoding could reach it {needed}."
        )

    if deployment.streamed_bytes(deployment.target) < _ON_CHIP:
        text.append(
            "\nThis target fits into on-chip caches, which are faster than the memory assumed here:"
            " no bound for it."
        )
    print_page(Page({"accelerators": results}, text), as_json=as_json)


def _bounds_of(
    deployment: Deployment, *, context: int, k: int, tau: float, batches: Sequence[int]
) -> dict[str, Any]:
    """Returns the bounds of one accelerator, its largest batch, and where speculation pays off."""
    start = None
    end = None
    if deployment.head is not None:
        start, end = paying_batches(
            deployment, context=context, num_draft_tokens=k, mean_acceptance_length=tau
        )
    sizes = _NODES if sizes_of(deployment.target).read.experts else ()

    return {
        **deployment_json(deployment),
        "context": context,
        "num_speculative_tokens": k,
        "mean_acceptance_length": tau,
        "largest_batch": largest_batch(deployment, context=max(context, 1), num_draft_tokens=k),
        "pays_from_batch": start,
        "break_even_batch": end,
        "bounds": [
            _bound_json(deployment, batch=batch, context=context, k=k, tau=tau) for batch in batches
        ],
        "nodes": [
            _nodes_json(deployment, size, batch=batches[0], context=context) for size in sizes
        ],
    }


def _bound_json(
    deployment: Deployment, *, batch: int, context: int, k: int, tau: float
) -> dict[str, Any]:
    bound = round_bound(deployment, batch=batch, context=context, num_draft_tokens=k)
    return dataclasses.asdict(bound) | {
        "verify_cost": bound.verify_cost,
        "draft_cost": bound.draft_cost,
        "plain_tokens_per_second": bound.plain_tokens_per_second,
        "tokens_per_second": bound.tokens_per_second(tau),
        "speedup": bound.speedup(tau),
    }


def _nodes_json(deployment: Deployment, size: int, *, batch: int, context: int) -> dict[str, Any]:
    experts = experts_read(deployment, batch=batch, nodes=size)
    bound = round_bound(deployment, batch=batch, context=context, num_draft_tokens=size - 1)
    return {"num_nodes": size, "experts": experts, "verify_cost": bound.verify_cost}


def _accelerators(results: Sequence[dict[str, Any]]) -> list[str | Table]:
    """Returns a table with a row for every accelerator."""
    batches = [bound["batch"] for bound in results[0]["bounds"]]
    compared = [batch for batch in _COMPARED if batch in batches] or batches[:1]
    rows = []
    for result in results:
        accelerator = result["accelerator"]
        row = {
            "GPU": accelerator["name"],
            "GB/s": f"{accelerator['bandwidth_bytes_per_second'] / 1e9:,.0f}",
            "TFLOPS": f"{accelerator['peak_flops'] / 1e12:,.0f}",
            "GB": f"{accelerator['memory_bytes'] / 1e9:g}",
            "fits": _batch_text(result["largest_batch"]),
        }

        for bound in result["bounds"]:
            if bound["batch"] in compared:
                drafted = f" {bound['tokens_per_second']:,.0f}" if bound["num_draft_tokens"] else ""
                row[f"batch {bound['batch']}"] = f"{bound['plain_tokens_per_second']:,.0f}{drafted}"

        row["pays below"] = _batch_text(result["break_even_batch"]) if result["drafter"] else ""
        rows.append(row)
    return [table_of("", rows, {name: name for name in rows[0]}), _ACCELERATOR_NOTES]


def _batches(result: dict[str, Any], deployment: Deployment) -> list[str | Table]:
    """Returns a table with a row for every batch size on one accelerator."""
    largest = result["largest_batch"]
    rows = [{**bound, "fits": bound["batch"] <= largest} for bound in result["bounds"]]
    notes = (
        f"\n{deployment.accelerator.source}\nMemory holds {_batch_text(largest)} such sequences."
    )
    if deployment.head is not None:
        notes += (
            f"\nSpeculation pays {_paying(result['pays_from_batch'], result['break_even_batch'])}."
        )
    return [table_of("", rows, _BOUNDS), notes]


def _paying(start: int | None, end: int | None) -> str:
    """Returns the batch sizes at which speculation pays off, in words."""
    if start is None:
        return "at no batch"
    parts = []
    if start > 1:
        parts.append(f"from batch {start:,} on")
    if end is not None:
        parts.append(f"below batch {end:,}; a real engine stops earlier")
    return ", ".join(parts) or "at every batch"


def _nodes(result: dict[str, Any], deployment: Deployment, *, alpha: float) -> list[str | Table]:
    """Returns, of a target with experts, verification's cost by draft size, and the best chain."""
    if not result["nodes"]:
        return []

    batch = result["bounds"][0]["batch"]
    columns = {"nodes": "num_nodes", "experts read": "experts", "v": "verify_cost"}
    title = (
        f"Verification at batch {batch} by nodes of the draft, root included: more nodes read more"
        " experts"
    )
    notes = (
        "As if tokens chose independently and evenly; neighbors choose alike, so a real forward"
        " reads fewer."
    )

    if deployment.head is not None:
        k = best_chain(
            deployment, batch=batch, context=result["context"], conditional_acceptance_rate=alpha
        )
        advice = f"a chain of K = {k} gains most" if k else "no chain gains anything"
        notes += (
            f"\nOn this roofline, at batch {batch} and α = {alpha:.2f}, {advice}; measure with"
            " `eagle3 tune`."
        )
    return [table_of(title, result["nodes"], columns), notes]


def _batch_text(batch: int | None) -> str:
    """Returns a batch size; ``any`` if there is no limit."""
    return "any" if batch is None or batch >= 65_536 else f"{batch:,}"
