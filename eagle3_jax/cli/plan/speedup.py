"""``eagle3 plan speedup``: speed-up from acceptance and costs, and acceptance from a speed-up."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from typer import Option

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import JsonOption
from eagle3_jax.cli._printing import Page, print_page
from eagle3_jax.cli.plan.options import DraftOptions
from eagle3_jax.measure.tables import Table
from eagle3_jax.theory import speedup as theory

EXAMPLE = "Example: eagle3 plan speedup -K 5 --alpha 0.7 --verify-cost 1.18 --draft-cost 0.144"
_CHAINS = range(1, 9)
_ALPHAS = tuple(tenths / 10 for tenths in range(3, 10))


def speedup(
    *,
    draft: DraftOptions,
    verify_cost: Annotated[
        float,
        Option(
            help=(
                "v: time of a verification in plain steps; `eagle3 bench` measures it. The defaults"
                " of v and c are fitted to vLLM, Llama-3.1-8B on one H100, batch 1"
                " (vllm-project/vllm 20780)."
            )
        ),
    ] = 1.18,
    draft_cost: Annotated[float, Option(help="c: time of a draft pass in plain steps.")] = 0.144,
    desired: Annotated[
        float | None,
        Option("--wanted", help="Speed-up to reach; prints the acceptance that it takes."),
    ] = None,
    traffic: Annotated[
        str | None,
        Option(
            help=(
                "SHARE:ALPHA,...: shares of the output tokens and their conditional acceptance"
                " rates."
            )
        ),
    ] = None,
    simulate: Annotated[
        int, Option(help="Number of requests to simulate, for the tail.", min=0, max=100_000)
    ] = 0,
    output_tokens: Annotated[
        int, Option(help="Output tokens of a simulated request.", min=2, max=100_000)
    ] = 256,
    seed: Annotated[int, Option(help="Random seed of the simulation.", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Turn acceptance into speed-up and back: S = τ / (v + K·c).

    τ = 1 + K·r for the draft acceptance rate r, and (1 - α^(K+1)) / (1 - α) for the conditional
    acceptance rate α.
    """
    costs = {"verify_cost": verify_cost, "draft_cost": draft_cost}
    chain: dict[str, Any] = {"num_draft_tokens": draft.num_speculative_tokens, **costs}
    classes = _parse_traffic(traffic)
    acceptance = draft.acceptance(classes)

    break_even = theory.rates_for_speedup(1.0, **chain)
    result: dict[str, Any] = {
        "num_speculative_tokens": draft.num_speculative_tokens,
        **costs,
        **dataclasses.asdict(acceptance),
        "speedup": theory.speedup(acceptance.mean_acceptance_length, **chain),
        "break_even": break_even and dataclasses.asdict(break_even),
        "wanted": None,
        "table": [_speedup_row(alpha, costs) for alpha in _ALPHAS],
        "simulation": None,
    }

    if desired is not None:
        rates = theory.rates_for_speedup(desired, **chain)
        result["wanted"] = {"speedup": desired, "rates": rates and dataclasses.asdict(rates)}
    if simulate:
        rate = acceptance.conditional_acceptance_rate
        average = theory.TrafficClass(share=1.0, conditional_acceptance_rate=rate)
        size = {"num_requests": simulate, "output_tokens": output_tokens, "seed": seed}
        simulation = theory.simulate(classes or [average], **chain, **size)
        result["simulation"] = dataclasses.asdict(simulation)
    print_page(Page(result, _text(result)), as_json=as_json)


def _parse_traffic(text: str | None) -> list[theory.TrafficClass]:
    classes = []
    for part in [] if text is None else text.split(","):
        share, _, rate = part.partition(":")
        try:
            kind = theory.TrafficClass(share=float(share), conditional_acceptance_rate=float(rate))
        except ValueError:
            raise Misuse(
                f"--traffic {text!r}: {part!r} is not SHARE:ALPHA, as in '0.7:0.7,0.3:0.4'"
            ) from None
        classes.append(kind)
    return classes


def _speedup_row(alpha: float, costs: dict[str, float]) -> dict[str, Any]:
    """Returns τ and S of every chain length at one conditional acceptance rate."""
    taus = [theory.tau_from_conditional_rate(alpha, k) for k in _CHAINS]
    repeated = {f"{name}s": [cost] * len(_CHAINS) for name, cost in costs.items()}
    return {
        "conditional_acceptance_rate": alpha,
        "mean_acceptance_length": taus,
        "speedup": [
            theory.speedup(tau, num_draft_tokens=k, **costs)
            for k, tau in zip(_CHAINS, taus, strict=True)
        ],
        "best_num_speculative_tokens": theory.best_chain_length(alpha, **repeated),
    }


def _text(result: dict[str, Any]) -> list[str | Table]:
    """Returns the acceptance, the table by α and K, and the tail if it was simulated."""
    k = result["num_speculative_tokens"]
    rates = [
        ["here", *_cells(result), f"{result['speedup']:.2f}"],
        ["break-even", *_cells(result["break_even"]), "1"],
    ]
    if result["wanted"] is not None:
        goal = result["wanted"]
        rates.append(["--wanted", *_cells(goal["rates"]), f"{goal['speedup']:g}"])

    columns = ["", "τ", "draft acceptance rate", "conditional acceptance rate", "S"]
    rows = []
    for row in result["table"]:
        pairs = zip(_CHAINS, row["mean_acceptance_length"], row["speedup"], strict=True)
        best = row["best_num_speculative_tokens"]
        cells = [f"{row['conditional_acceptance_rate']:.1f}"]
        for length, tau, gain in pairs:
            cells.append(f"{tau:.2f} {gain:.2f}{'*' if length == best else ' '}")
        rows.append(cells)

    title = "τ and S by α (rows) and K (columns); * is the best K"
    text: list[str | Table] = [
        f"K = {k}, v = {result['verify_cost']:g}, c = {result['draft_cost']:g}\n",
        Table("", columns, rates),
        Table(title, ["α", *(f"K={k}" for k in _CHAINS)], rows),
    ]

    simulation = result["simulation"]
    if simulation is not None:
        tail = simulation["time_per_output_token"]
        text.append(
            f"\n{simulation['num_requests']:,} requests simulated: τ"
            f" {simulation['mean_acceptance_length']:.3f}, S {simulation['speedup']:.3f}\ntime per"
            f" output token in plain steps: P50 {tail['p50']:.2f}, P90 {tail['p90']:.2f}, P99"
            f" {tail['p99']:.2f}; {simulation['slower_than_plain']:.1%} of the requests are slower"
            " than plain decoding"
        )
    return text


def _cells(rates: dict[str, Any] | None) -> list[str]:
    """Returns one acceptance under its three names."""
    if rates is None:
        return ["out of reach", "", ""]
    return [
        f"{rates['mean_acceptance_length']:.2f}",
        f"{rates['draft_acceptance_rate']:.3f}",
        f"{rates['conditional_acceptance_rate']:.3f}",
    ]
