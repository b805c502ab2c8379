"""``eagle3 plan memory``: weights, caches and activations on each accelerator."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import typer
from typer import Option

from eagle3_jax.cli._options import JsonOption
from eagle3_jax.cli._printing import Page, print_page
from eagle3_jax.cli.plan.options import (
    DeploymentOptions,
    LengthOption,
    deployment_json,
    draft_length,
    read_context,
    title_of,
)
from eagle3_jax.measure.tables import Table
from eagle3_jax.theory.memory import Deployment, MemoryPlan, memory_plan, remedy_of
from eagle3_jax.theory.sizes import Sizes, sizes_of

EXAMPLE = (
    "Example: eagle3 plan memory --target Llama-3.3-70B --weights fp8 --gpu H200 --batch-size 16"
    " --context 8192"
)


def memory(
    *,
    deployed: DeploymentOptions,
    num_speculative_tokens: LengthOption = 5,
    batch_size: Annotated[int, Option(help="Sequences at once.", min=1)] = 8,
    context: Annotated[
        int | None,
        Option(
            help="Tokens of each sequence. Default: 4096, or all positions of the target.", min=1
        ),
    ] = None,
    prefill_tokens: Annotated[
        int, Option(help="Maximum number of prompt tokens in one forward.", min=1)
    ] = 8192,
    utilization: Annotated[float, Option(help="Share of the memory that may be used.")] = 0.9,
    reserve_gb: Annotated[
        float, Option(help="Memory kept for context, graphs and workspaces.")
    ] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Weights, both caches and activations on each GPU.

    Reads config.json only; nothing else is read or downloaded. Ends with exit code 1 if it does not
    fit, and names the number of GPUs or the type of weights with which it fits.
    """
    deployment = deployed.read()
    k = draft_length(num_speculative_tokens, deployment)
    context = read_context(context, 4096, deployment)
    load = {
        "batch": batch_size,
        "context": context,
        "num_draft_tokens": k,
        "prefill_tokens": prefill_tokens,
        "utilization": utilization,
        "reserve_bytes": reserve_gb * 1e9,
    }

    plan = memory_plan(deployment, **load)
    remedy = None if plan.fits else remedy_of(deployment, **load)
    values = deployment_json(deployment) | {
        "batch_size": batch_size,
        "context": context,
        "bytes": dataclasses.asdict(plan) | {"total": plan.total},
        "fits": plan.fits,
        "remedy": remedy,
        "cache_capacity_tokens": plan.cache_capacity_tokens,
    }

    size = f"{batch_size} sequences of {context} tokens, K = {k}"
    rows = _rows(deployment, plan, batch_size * (context + k + 1))
    text: list[str | Table] = [
        title_of(deployment, context, f"{size}; GB on each GPU"),
        Table("", ["memory", "GB", "note"], rows),
        _verdict(deployment, plan, utilization),
    ]
    if remedy is not None:
        text.append(_remedy(deployment, remedy))

    print_page(Page(values, text), as_json=as_json)
    if not plan.fits:
        raise typer.Exit(1)


def _verdict(deployment: Deployment, plan: MemoryPlan, utilization: float) -> str:
    excess = plan.total - plan.budget
    return (
        f"\n{'fits' if plan.fits else 'DOES NOT FIT'}: {plan.total / 1e9:.2f} of"
        f" {plan.budget / 1e9:.2f} GB ({utilization:.0%} of"
        f" {deployment.accelerator.memory_bytes / 1e9:g}), {abs(excess) / 1e9:.2f}"
        f" {'too much' if excess > 0 else 'left'}. The caches can hold"
        f" {plan.cache_capacity_tokens:,.0f} tokens of all sequences together."
    )


def _remedy(deployment: Deployment, remedy: dict[str, Any]) -> str:
    ways = []
    if remedy["num_accelerators"]:
        ways.append(f"{remedy['num_accelerators']} x {deployment.accelerator.name}")
    if remedy["weights"]:
        ways.append(f"--weights {remedy['weights']}")
    return f"What would do: {', or '.join(ways) or 'a lower --batch-size or --context'}."


class _Part(NamedTuple):
    """A part of the memory of an accelerator."""

    name: str
    size: float  #: In bytes.
    note: str


def _rows(deployment: Deployment, plan: MemoryPlan, tokens: int) -> list[list[str]]:
    """Returns the rows of the table, the total last."""
    target = sizes_of(deployment.target)
    head = None if deployment.head is None else sizes_of(deployment.head)

    active = f", {_billions(target.active)} of them active" if target.read.experts else ""
    parameters = f"{_billions(target.owned.total)} billion{active}"
    parts = [_Part("target", plan.target_weights, f"{parameters}, {deployment.weights}")]
    if head is not None:
        note = f"{_billions(head.owned.total)} billion; {head.method}"
        parts.append(_Part("head", plan.head_weights, note))

    def cache_of(name: str, size: float, model: Sizes) -> _Part:
        per_token = deployment.cache_bytes_per_token(model)
        return _Part(name, size, f"{per_token:,.0f} bytes a token, {tokens:,} tokens")

    parts.append(cache_of("target's cache", plan.target_cache, target))
    if head is not None:
        parts.append(cache_of("head's cache", plan.head_cache, head))
    if plan.states:
        parts.append(_Part("states", plan.states, "of recurrent layers, whatever the length"))
    parts += [
        _Part("activations", plan.activations, "estimate"),
        _Part("reserve", plan.reserve, "--reserve-gb"),
        _Part("total", plan.total, ""),
    ]

    digits = 2 if plan.target_weights > 1e9 else 4
    return [[part.name, f"{part.size / 1e9:.{digits}f}", part.note] for part in parts]


def _billions(count: int | float) -> str:
    return f"{count / 1e9:.3f}"
