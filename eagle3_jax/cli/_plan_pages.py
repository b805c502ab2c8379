"""The pages of ``eagle3 plan``: tables and sentences for people, plain values for ``--json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from eagle3_jax.theory.bounds import Claim, RoundBound
    from eagle3_jax.theory.cost import Cost
    from eagle3_jax.theory.memory import Deployment, MemoryPlan, Remedy
    from eagle3_jax.theory.rollout import RolloutPlan
    from eagle3_jax.theory.speedup import Rates, Simulation

_CHAINS = range(1, 9)
_NODES = (1, 2, 4, 8, 16, 32, 60)

_MEMORY_NOTE = """\
Divided between GPUs: the layers' matrices, embedding, output projection, key/value heads. On each in full: norms,
biases, the head's fusion, and a key/value head where there are fewer of them than GPUs. Activations are an estimate."""


def rates_json(found: Rates | None) -> dict[str, float] | None:
    """The rates as plain values; ``None`` stays ``None``."""
    return None if found is None else dataclasses.asdict(found)


def speedup_row(alpha: float, *, verify_cost: float, draft_cost: float) -> dict[str, Any]:
    """τ and S of every chain length at one conditional acceptance rate."""
    from eagle3_jax.theory import speedup as theory

    taus = [theory.tau_from_conditional_rate(alpha, k) for k in _CHAINS]
    return {
        "conditional_acceptance_rate": alpha,
        "mean_acceptance_length": taus,
        "speedup": [
            theory.speedup(tau, num_draft_tokens=k, verify_cost=verify_cost, draft_cost=draft_cost)
            for k, tau in zip(_CHAINS, taus, strict=True)
        ],
        "best_num_speculative_tokens": theory.best_chain_length(
            alpha, verify_costs=[verify_cost] * len(_CHAINS), draft_costs=[draft_cost] * len(_CHAINS)
        ),
    }


def break_even_row(verify_cost: float, *, draft_cost: float) -> dict[str, Any]:
    """Rates at which every chain length breaks even, for one verification cost."""
    from eagle3_jax.theory import speedup as theory

    found = [
        theory.rates_for_speedup(1.0, num_draft_tokens=k, verify_cost=verify_cost, draft_cost=draft_cost)
        for k in _CHAINS
    ]
    return {"verify_cost": verify_cost, "break_even": [rates_json(one) for one in found]}


def print_speedup(result: dict[str, Any], simulation: Simulation | None) -> None:
    """Prints the result, the table by α and K, the break-even map, and the tail if it was simulated."""
    say(
        f"K = {result['num_speculative_tokens']}, v = {result['verify_cost']:g}, c = {result['draft_cost']:g}\n"
        f"here         {rates_text(result)}: S = {result['speedup']:.2f}\n"
        f"break-even   {rates_text(result['break_even'])}"
    )
    if result["wanted"] is not None:
        say(f"for S = {result['wanted']['speedup']:<5g} {rates_text(result['wanted']['rates'])}")
    say("\nτ and S by conditional acceptance rate α (rows) and K (columns); * is the best K")
    rows = [
        (
            f"{row['conditional_acceptance_rate']:.1f}",
            *(
                f"{tau:.2f} {gain:.2f}{'*' if row['best_num_speculative_tokens'] == k else ' '}"
                for k, tau, gain in zip(_CHAINS, row["mean_acceptance_length"], row["speedup"], strict=True)
            ),
        )
        for row in result["table"]
    ]
    print_table(("α", *(f"K={k}  " for k in _CHAINS)), rows)
    say(
        "\nbreak-even by verification cost v (rows) and K (columns): draft acceptance rate, conditional acceptance rate"
    )
    rows = [
        (f"{row['verify_cost']:g}", *(_break_even_cell(found) for found in row["break_even"]))
        for row in result["break_even_map"]
    ]
    print_table(("v", *(f"K={k}" for k in _CHAINS)), rows)
    if simulation is not None:
        tail = simulation.time_per_output_token
        say(
            f"\n{simulation.num_requests:,} requests simulated: τ {simulation.mean_acceptance_length:.3f}, "
            f"S {simulation.speedup:.3f}\ntime per output token in plain steps: P50 {tail.p50:.2f}, "
            f"P90 {tail.p90:.2f}, P99 {tail.p99:.2f}; "
            f"{simulation.slower_than_plain:.1%} of the requests are slower than plain decoding"
        )


def _break_even_cell(found: dict[str, float] | None) -> str:
    if found is None:
        return "never"
    return f"{found['draft_acceptance_rate']:.2f} {found['conditional_acceptance_rate']:.2f}"


def rates_text(found: dict[str, Any] | None) -> str:
    """One acceptance under its three names."""
    if found is None:
        return "out of reach, even if every draft token were accepted"
    return (
        f"τ {found['mean_acceptance_length']:.2f}, draft acceptance rate {found['draft_acceptance_rate']:.3f}, "
        f"conditional acceptance rate {found['conditional_acceptance_rate']:.3f}"
    )


def print_exercises(*, as_json: bool) -> None:
    """Prints questions with their answers."""
    from eagle3_jax.theory.exercises import exercises

    found = exercises()
    if as_json:
        typer.echo(json.dumps([one._asdict() for one in found]))
        return
    say("\n\n".join(f"{number}. {one.question}\n\n   {one.answer}" for number, one in enumerate(found, 1)))


# Memory and roofline


def title(deployment: Deployment, *, accelerator: bool = True) -> str:
    """The deployment in one line."""
    head = deployment.head_name if deployment.head else "no head"
    where = f" on {deployment.num_accelerators} x {deployment.accelerator.name}" if accelerator else ""
    return f"{deployment.target_name} ({deployment.weights}) with {head}{where}"


def deployment_json(deployment: Deployment) -> dict[str, Any]:
    """The deployment as plain values."""
    from eagle3_jax.theory.sizes import sizes_of

    target, head = sizes_of(deployment.target), None if deployment.head is None else sizes_of(deployment.head)
    return {
        "target": deployment.target_name,
        "target_parameters": target.owned.total,
        "target_active_parameters": target.active,
        "drafter": None if head is None else deployment.head_name,
        "drafter_method": None if head is None else head.method,
        "drafter_parameters": None if head is None else head.owned.total,
        "drafter_cache_bytes_per_token": None if head is None else deployment.cache_bytes_per_token(head),
        "accelerator": dataclasses.asdict(deployment.accelerator),
        "num_gpus": deployment.num_accelerators,
        "weights": deployment.weights,
        "cache": deployment.cache,
    }


def _memory_rows(deployment: Deployment, plan: MemoryPlan, *, tokens: int) -> list[tuple[str, str, str]]:
    """The table's rows, the total last."""
    from eagle3_jax.theory.sizes import sizes_of

    target, head = sizes_of(deployment.target), None if deployment.head is None else sizes_of(deployment.head)

    def per_token(model: Any) -> str:
        return f"{deployment.cache_bytes_per_token(model):,.0f} bytes a token, {tokens:,} tokens"

    billions = f"{target.owned.total / 1e9:.3f} billion"
    if target.has_experts:
        billions += f", {target.active / 1e9:.3f} of them active"
    rows = [("target", plan.target_weights, f"{billions}, {deployment.weights}")]
    if head is not None:
        owned = head.owned
        shared = "embedding shared" if owned.total and not owned.embedding else ""
        what = f"{owned.total / 1e9:.3f} billion" if owned.total else "no weights of its own"
        note = "; ".join(part for part in (what, shared, head.method) if part)
        rows.append(("head", plan.head_weights, note))
    rows.append(("target's cache", plan.target_cache, per_token(deployment.target)))
    if head is not None:
        rows.append(("head's cache", plan.head_cache, per_token(deployment.head)))
    if plan.states:
        rows.append(("states", plan.states, "of recurrent layers, whatever the length"))
    rows += [("activations", plan.activations, "estimate"), ("reserve", plan.reserve, "given")]
    digits = 2 if plan.target_weights > 1e9 else 4
    return [(name, f"{size / 1e9:.{digits}f}", note) for name, size, note in [*rows, ("total", plan.total, "")]]


def print_memory(
    deployment: Deployment,
    plan: MemoryPlan,
    remedy: Remedy | None,
    *,
    context: int,
    k: int,
    batch_size: int,
    utilization: float,
) -> None:
    """Prints the table, whether it fits, and what would make it fit."""
    rows = _memory_rows(deployment, plan, tokens=batch_size * (context + k + 1))
    say(title(deployment), f"{batch_size} sequences of {context} tokens, K = {k}; GB (10^9 bytes) on each GPU\n")
    print_table(("", "GB", ""), rows, left=(0, 2))
    say_if_long(context, deployment)
    left = plan.budget - plan.total
    say(
        f"\n{'fits' if plan.fits else 'DOES NOT FIT'}: {plan.total / 1e9:.2f} of {plan.budget / 1e9:.2f} GB "
        f"({utilization:.0%} of {deployment.accelerator.memory_bytes / 1e9:g}), "
        f"{abs(left) / 1e9:.2f} {'left' if left >= 0 else 'too much'}. The caches can hold "
        f"{plan.cache_capacity_tokens:,.0f} tokens of all sequences together.",
        *([] if remedy is None else [_remedy_text(remedy, deployment)]),
        _MEMORY_NOTE,
    )


def _remedy_text(remedy: Remedy, deployment: Deployment) -> str:
    """The changes that would make a plan fit."""
    ways = []
    if remedy.num_accelerators is not None:
        ways.append(f"{remedy.num_accelerators} x {deployment.accelerator.name}")
    if remedy.weights is not None:
        ways.append(f"--weights {remedy.weights}")
    if not ways:
        return "No number of GPUs and no type of weights would do; lower --batch-size or --context."
    return f"What would do: {', or '.join(ways)}."


def say_if_long(context: int, deployment: Deployment) -> None:
    """Warns of a context beyond the positions of the head."""
    head = deployment.head
    if head is not None and context > head.max_positions:
        say(f"\nBeyond the {head.max_positions:,} positions that the head was built for, expect it to draft worse.")


def claim_text(claim: Claim, *, batch_size: int | None, k: int) -> str:
    """The verdict on a published throughput."""
    needed = "at no batch" if claim.batch_needed is None else f"from batch {claim.batch_needed} on"
    drafted = f" if all {k} draft tokens were always accepted and drafting took no time" if k else ""
    verdict = "possible" if claim.possible else "IMPOSSIBLE"
    return (
        f"{verdict}: {claim.tokens_per_second:,.0f} tokens/s is {claim.share_of_bound:.2g}x the upper bound at batch "
        f"{batch_size}, {claim.bound:,.0f}{drafted}. Plain decoding could reach it {needed}."
    )


def bound_json(bound: RoundBound, tau: float) -> dict[str, Any]:
    """A roofline with the speeds that follow from it at this τ."""
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
    """The rooflines of one accelerator, with the largest batch in memory and those where speculation pays off."""
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
            dataclasses.asdict(one) for one in nodes_bounds(deployment, batch=batches[0], context=context, nodes=_NODES)
        ],
    }


def print_nodes(result: dict[str, Any], deployment: Deployment, *, alpha: float) -> None:
    """Prints the cost of verification by draft size for a target with experts, and the best chain."""
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
    """Prints one row for every accelerator."""
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
    """Prints one row for every batch on one accelerator."""
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
    """The largest batch; ``any`` if there is no limit."""
    return "any" if batch >= 65_536 else f"{batch:,}"


def break_even_text(batch: int | None) -> str:
    """The smallest batch that does not pay off; ``any`` if there is none."""
    return "any" if batch is None else f"{batch:,}"


# Cost and rollout


def print_costs(names: Sequence[str], costs: Sequence[Cost]) -> None:
    """Prints one row for every speed, compared with the first."""
    cells = [
        (
            name,
            f"{found.tokens_per_second:,.0f}",
            f"{found.per_million_tokens:.3f}",
            f"{found.tokens_per_unit:,.0f}",
            f"{costs[0].per_million_tokens / found.per_million_tokens:.2f}x",
        )
        for name, found in zip(names, costs, strict=True)
    ]
    print_table(("", "tokens/s", "per million tokens", "tokens for 1", "for the same money"), cells)


def rollout_json(deployment: Deployment, plan: RolloutPlan) -> dict[str, Any]:
    """A plan of stages, as plain values."""
    return deployment_json(deployment) | {
        "expected": dataclasses.asdict(plan.expected),
        "verify_cost": plan.verify_cost,
        "draft_cost": plan.draft_cost,
        "measured": plan.measured,
        "break_even_tau": plan.break_even_tau,
        "least_tau": plan.least_tau,
        "largest_time_ratio": plan.largest_time_ratio,
        "predicted_speedup": plan.predicted_speedup,
        "break_even_batch": plan.break_even_batch,
        "schedule": [dataclasses.astuple(part) for part in plan.schedule],
        "stages": [dataclasses.asdict(stage) for stage in plan.stages],
        "obstacles": plan.obstacles,
    }


# Printing


def say(*lines: str) -> None:
    """Prints lines for people."""
    typer.echo("\n".join(lines))


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> None:
    """Prints a table without borders; all columns but those in ``left`` are aligned to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for index, title in enumerate(titles):
        table.add_column(Text(title), justify="left" if index in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False, width=max(Console().width, 120)).print(table)
