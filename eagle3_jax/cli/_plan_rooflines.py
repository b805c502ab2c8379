"""What `eagle3 plan roofline` prints: tables by accelerator, by batch and by nodes of a draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eagle3_jax.cli._plan_pages import deployment_json, print_table, say
from eagle3_jax.theory.sizes import has_experts

if TYPE_CHECKING:
    from eagle3_jax.theory.bounds import RoundBound
    from eagle3_jax.theory.memory import Deployment

_NODES = (1, 2, 4, 8, 16, 32, 60)


def bound_json(bound: RoundBound, tau: float) -> dict[str, Any]:
    """A roofline with what follows from it at this τ."""
    return {
        **dataclasses.asdict(bound),
        "verify_cost": bound.verify_cost,
        "draft_cost": bound.draft_cost,
        "draft_bytes": bound.draft_bytes,
        "plain_tokens_per_second": bound.plain_tokens_per_second,
        "tokens_per_second": bound.tokens_per_second(tau),
        "speedup": bound.speedup(tau),
    }


def roofline_json(
    deployment: Deployment, *, context: int, k: int, tau: float, batches: Sequence[int]
) -> dict[str, Any]:
    """The rooflines of one accelerator, with the batches at which memory and gain end."""
    from eagle3_jax.theory.bounds import break_even_batch, largest_batch, nodes_bounds, pays_from_batch, round_bound

    start = end = None
    if deployment.head is not None:
        asked = {"context": context, "num_draft_tokens": k, "mean_acceptance_length": tau}
        start, end = pays_from_batch(deployment, **asked), break_even_batch(deployment, **asked)
    return {
        **deployment_json(deployment),
        "context": context,
        "num_speculative_tokens": k,
        "mean_acceptance_length": tau,
        "largest_batch": largest_batch(deployment, context=max(context, 1), num_draft_tokens=k),
        "pays_from_batch": start,
        "break_even_batch": end,
        "bounds": [
            bound_json(round_bound(deployment, batch=batch, context=context, num_draft_tokens=k), tau)
            for batch in batches
        ],
        "nodes": [
            dataclasses.asdict(one)
            for one in nodes_bounds(deployment, batch=batches[0], context=context, nodes=_NODES)
            if has_experts(deployment.target)
        ],
    }


def print_nodes(result: dict[str, Any], deployment: Deployment, *, alpha: float) -> None:
    """Verification by the size of the draft where the target has experts, and the chain that follows from it."""
    from eagle3_jax.theory.bounds import best_chain

    if not result["nodes"]:
        return
    batch, context = result["bounds"][0]["batch"], result["context"]
    say(f"\nverification at batch {batch} by nodes of the draft, root included: the more of them, the more experts")
    rows = [
        (f"{one['num_nodes']}", f"{one['experts']:.1%}", f"{one['num_bytes'] / 1e9:.2f}", f"{one['cost']:.2f}")
        for one in result["nodes"]
    ]
    print_table(("nodes", "experts read", "GB", "v"), rows)
    say("As if tokens chose independently and evenly; neighbours choose alike, so a real forward reads fewer.")
    if deployment.head is not None:
        k = best_chain(deployment, batch=batch, context=context, conditional_acceptance_rate=alpha)
        advice = f"a chain of K = {k} gains most" if k else "no chain gains anything"
        say(f"On this roofline, at batch {batch} and α = {alpha:.2f}, {advice}; measure with `eagle3 tune`.")


def print_accelerators(results: Sequence[dict[str, Any]]) -> None:
    """One row for every accelerator."""
    columns = (1, 8, 64)
    rows = []
    for result in results:
        hardware, bounds = result["accelerator"], {bound["batch"]: bound for bound in result["bounds"]}
        shown = [bounds[batch] for batch in columns if batch in bounds] or result["bounds"]
        rows.append(
            (
                hardware["name"],
                f"{hardware['bandwidth_bytes_per_second'] / 1e9:,.0f}",
                f"{hardware['peak_flops'] / 1e12:,.0f}",
                f"{hardware['memory_bytes'] / 1e9:g}",
                batch_text(result["largest_batch"]),
                f"{shown[0]['plain_seconds'] * 1e3:.2f}",
                *(_both_speeds(bound) for bound in shown),
                break_even_text(result["break_even_batch"]) if result["drafter"] else "",
            )
        )
    batches = [bound["batch"] for bound in results[0]["bounds"]]
    shown = [batch for batch in columns if batch in batches] or batches
    titles = ("GPU", "GB/s", "TFLOPS", "GB", "fits", "ms/step", *(f"batch {batch}" for batch in shown), "pays below")
    print_table(titles, rows)
    say(
        "\ntokens/s of a batch: plain, speculative. fits: the largest batch that memory holds. ms/step: plain, batch "
        f"{shown[0]}.\nPeaks are dense bfloat16; datasheets are named in --json."
    )


def _both_speeds(bound: dict[str, Any]) -> str:
    plain = f"{bound['plain_tokens_per_second']:,.0f}"
    return f"{plain} {bound['tokens_per_second']:,.0f}" if bound["num_draft_tokens"] else plain


def print_bounds(result: dict[str, Any], deployment: Deployment) -> None:
    """One row for every batch on one accelerator."""
    rows = [
        (
            str(bound["batch"]),
            f"{bound['plain_bytes'] / 1e9:.2f}",
            f"{bound['plain_flops'] / 1e9:,.0f}",
            f"{bound['plain_seconds'] * 1e3:.2f} {bound['plain_limit']}",
            f"{bound['plain_tokens_per_second']:,.0f}",
            f"{bound['verify_seconds'] * 1e3:.2f} {bound['verify_limit']}",
            f"{bound['verify_cost']:.2f}",
            f"{bound['draft_cost']:.3f}",
            f"{bound['tokens_per_second']:,.0f}" if deployment.head else "",
            f"{bound['speedup']:.2f}" if deployment.head else "",
            "" if bound["batch"] <= result["largest_batch"] else "not in memory",
        )
        for bound in result["bounds"]
    ]
    titles = ("batch", "GB", "GFLOP", "plain ms", "tokens/s", "verify ms", "v", "c", "speculative", "S", "")
    print_table(titles, rows)
    say(f"\n{deployment.accelerator.source}\nMemory holds {batch_text(result['largest_batch'])} such sequences.")
    if deployment.head is not None:
        say(f"Speculation pays {_where_it_pays(result['pays_from_batch'], result['break_even_batch'])}.")


def _where_it_pays(start: int | None, end: int | None) -> str:
    if start is None:
        return "at no batch"
    below = "" if end is None else f"below batch {end:,}; a real engine stops earlier"
    if start == 1:
        return below or "at every batch"
    return f"from batch {start:,} on{', ' * bool(below)}{below}"


def batch_text(batch: int) -> str:
    """The largest batch, or that there is none."""
    return "any" if batch >= 65_536 else f"{batch:,}"


def break_even_text(batch: int | None) -> str:
    """The smallest batch that does not pay, or that there is none."""
    return "any" if batch is None else f"{batch:,}"
