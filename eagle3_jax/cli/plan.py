"""``eagle3 plan``: the gains, the memory and the costs of speculation, before anything is bought or served."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import JsonOption, check_writable, finite, grouped, print_json, print_table
from eagle3_jax.cli._planning import read_head, read_target
from eagle3_jax.files.sources import FORMS
from eagle3_jax.files.writing import whole_file
from eagle3_jax.theory import speedup as theory
from eagle3_jax.theory.accelerators import (
    CACHE_BYTES,
    KNOWN_ACCELERATORS,
    WEIGHT_BITS,
    accelerator_named,
    custom_accelerator,
)
from eagle3_jax.theory.bounds import best_chain, check_claim, experts_read, largest_batch, paying_batches, round_bound
from eagle3_jax.theory.cost import cost_of
from eagle3_jax.theory.known_models import KNOWN_MODELS, known_name
from eagle3_jax.theory.memory import Deployment, MemoryPlan, memory_plan, remedy_of
from eagle3_jax.theory.rollout import MeasuredCosts, Traffic, plan_rollout, to_markdown
from eagle3_jax.theory.sizes import sizes_of

app = typer.Typer(
    help="Plan speculation: speed-up, memory, roofline, cost, rollout.",
    epilog="Example: eagle3 plan roofline --target Llama-3.3-70B --weights fp8 --gpu H200",
    rich_markup_mode=None,
)

_CHAINS = range(1, 9)
_ALPHAS = tuple(tenths / 10 for tenths in range(3, 10))
_BATCHES = tuple(2**power for power in range(10))
_NODES = (1, 2, 4, 8, 16, 32, 60)
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_ON_CHIP = 256e6  # bytes of the largest last-level caches of accelerators

LengthOption = Annotated[int, Option("--num-speculative-tokens", "-K", help="Draft length K.", min=1, max=4096)]
ContextOption = Annotated[
    int | None, Option(help="Earlier tokens of each sequence. Default: 1024, or all positions of the target.", min=0)
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeploymentOptions:
    """A target and its head on accelerators."""

    target: Annotated[
        str | None, Option(help=f"Directory with a config.json, hub id, {', '.join(KNOWN_MODELS)}. Default: bundled.")
    ] = None
    drafter: Annotated[
        str | None,
        Option(
            help=f"Directory with the config.json of a head of any method or of a draft model, hub id, {FORMS}. "
            "Default: the bundled head for the bundled target; for others a usual EAGLE-3 head (one layer like the "
            "target's, draft vocabulary 32000)."
        ),
    ] = None
    gpu: Annotated[str | None, Option(help="Accelerator, such as H100, H200, L40S, MI300X or TPU-v6e.")] = None
    bandwidth_gb_per_s: Annotated[
        float | None, Option(help="Memory bandwidth, of an accelerator without a name or as measured on a named one.")
    ] = None
    peak_tflops: Annotated[float | None, Option(help="Dense bfloat16 peak of the accelerator.")] = None
    memory_gb: Annotated[float | None, Option(help="Memory of the accelerator.")] = None
    num_gpus: Annotated[int, Option(help="Tensor-parallel size.", min=1)] = 1
    weights: Annotated[
        str, Option(help=f"Type of the target's layers: {', '.join(WEIGHT_BITS)}, or bf16, fp16, fp32.")
    ] = "bfloat16"
    cache: Annotated[str, Option(help=f"Type of both caches: {', '.join(CACHE_BYTES)}.")] = "bfloat16"

    def read(self) -> Deployment:
        """The deployment that the options describe.

        Raises:
            ValueError: They describe nothing that can be planned; the message names the option.
        """
        target = read_target(self.target)
        head = read_head(self.drafter, target, bundled=self.target is None)
        if self.bandwidth_gb_per_s is not None:
            accelerator = custom_accelerator(
                gb_per_s=self.bandwidth_gb_per_s,
                tflops=self.peak_tflops,
                memory_gb=self.memory_gb,
                base=None if self.gpu is None else accelerator_named(self.gpu),
            )
        elif self.peak_tflops is None and self.memory_gb is None:
            accelerator = accelerator_named("H100" if self.gpu is None else self.gpu)
        else:
            raise Misuse("--peak-tflops and --memory-gb describe an accelerator by hand; add --bandwidth-gb-per-s")
        return Deployment(
            target=target.config,
            head=head.config,
            accelerator=accelerator,
            num_accelerators=self.num_gpus,
            weights=_SHORT.get(self.weights, self.weights),
            cache=_SHORT.get(self.cache, self.cache),
            target_name=target.name,
            head_name=head.name,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """A chain of drafts and its acceptance."""

    num_speculative_tokens: LengthOption = 5
    mean_acceptance_length: Annotated[float | None, Option(help="τ: tokens per round, the target's own included.")] = (
        None
    )
    draft_acceptance_rate: Annotated[
        float | None, Option(help="r: accepted over drafted tokens, as in vLLM's log.")
    ] = None
    conditional_acceptance_rate: Annotated[
        float | None,
        Option(
            "--conditional-acceptance-rate",
            "--alpha",
            help="Probability that a token is accepted if all before it were. Default: 0.7, or as τ or r says.",
        ),
    ] = None

    def acceptance(self, classes: Sequence[theory.TrafficClass] = ()) -> theory.Rates:
        """The acceptance of some classes of traffic, or of one of three options, or a conditional rate of 0.7.

        Raises:
            ValueError: More than one was given, or no chain can have this acceptance.
        """
        k = self.num_speculative_tokens
        tau = self.mean_acceptance_length
        draft_rate = self.draft_acceptance_rate
        alpha = self.conditional_acceptance_rate
        given = sum(value is not None for value in (tau, draft_rate, alpha))
        if classes:
            if given:
                raise Misuse("--traffic has the acceptance of every class; leave the other options of acceptance out")
            taus = [theory.tau_from_conditional_rate(kind.conditional_acceptance_rate, k) for kind in classes]
            tau = theory.blended_tau([kind.share for kind in classes], taus)
        elif given > 1:
            raise Misuse(
                "--mean-acceptance-length, --draft-acceptance-rate and --conditional-acceptance-rate say the same in "
                "three ways; give one"
            )
        elif draft_rate is not None:
            tau = theory.tau_from_draft_rate(draft_rate, k)
        elif tau is None:
            tau = theory.tau_from_conditional_rate(0.7 if alpha is None else alpha, k)
        return theory.rates(tau, k)

    def read_for(self, deployment: Deployment) -> tuple[int, float]:
        """``K`` and ``τ`` of a deployment; 0 and 1 without a head."""
        tau = self.acceptance().mean_acceptance_length
        return _draft_length(self.num_speculative_tokens, deployment), tau if deployment.head else 1.0


@app.command("speedup", epilog="Example: eagle3 plan speedup -K 5 --alpha 0.7 --verify-cost 1.18 --draft-cost 0.144")
@grouped
def speedup(
    *,
    draft: DraftOptions,
    verify_cost: Annotated[
        float,
        Option(
            help="v: time of a verification in plain steps; `eagle3 bench` measures it. The defaults of v and c are "
            "fitted to vLLM, Llama-3.1-8B on one H100, batch 1 (vllm-project/vllm 20780)."
        ),
    ] = 1.18,
    draft_cost: Annotated[float, Option(help="c: time of a draft pass in plain steps.")] = 0.144,
    wanted: Annotated[float | None, Option(help="Speed-up to reach; prints the rates that it takes.")] = None,
    traffic: Annotated[
        str | None, Option(help="SHARE:ALPHA,...: shares of the output tokens and their conditional acceptance rates.")
    ] = None,
    simulate: Annotated[int, Option(help="Number of requests to simulate, for the tail.", min=0, max=100_000)] = 0,
    output_tokens: Annotated[int, Option(help="Output tokens of a simulated request.", min=2, max=100_000)] = 256,
    seed: Annotated[int, Option(help="Random seed of the simulation.", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Turn acceptance into speed-up and back: S = τ / (v + K·c).

    τ = 1 + K·r for the draft acceptance rate r, and (1 - α^(K+1)) / (1 - α) for the conditional acceptance rate α.
    """
    k = draft.num_speculative_tokens
    costs = {"verify_cost": verify_cost, "draft_cost": draft_cost}
    classes = _parse_traffic(traffic)
    found = draft.acceptance(classes)

    def rates_at(gain: float) -> dict[str, float] | None:
        rates = theory.rates_for_speedup(gain, num_draft_tokens=k, **costs)
        return None if rates is None else dataclasses.asdict(rates)

    simulation = None
    if simulate:
        alike = theory.TrafficClass(share=1.0, conditional_acceptance_rate=found.conditional_acceptance_rate)
        size = {"num_requests": simulate, "output_tokens": output_tokens, "seed": seed}
        simulation = dataclasses.asdict(theory.simulate(classes or [alike], num_draft_tokens=k, **costs, **size))
    result = {
        "num_speculative_tokens": k,
        **costs,
        **dataclasses.asdict(found),
        "speedup": theory.speedup(found.mean_acceptance_length, num_draft_tokens=k, **costs),
        "break_even": rates_at(1.0),
        "wanted": None if wanted is None else {"speedup": wanted, "rates": rates_at(wanted)},
        "table": [_speedup_row(alpha, costs) for alpha in _ALPHAS],
        "simulation": simulation,
    }
    if as_json:
        print_json(result)
    else:
        _print_speedup(result)


def _parse_traffic(text: str | None) -> list[theory.TrafficClass]:
    classes = []
    for part in [] if text is None else text.split(","):
        share, _, rate = part.partition(":")
        try:
            classes.append(theory.TrafficClass(share=float(share), conditional_acceptance_rate=float(rate)))
        except ValueError:
            raise Misuse(f"--traffic {text!r}: {part!r} is not SHARE:ALPHA, as in '0.7:0.7,0.3:0.4'") from None
    return classes


def _speedup_row(alpha: float, costs: dict[str, float]) -> dict[str, Any]:
    """τ and S of every chain length at one conditional acceptance rate."""
    taus = [theory.tau_from_conditional_rate(alpha, k) for k in _CHAINS]
    repeated = {f"{name}s": [cost] * len(_CHAINS) for name, cost in costs.items()}
    return {
        "conditional_acceptance_rate": alpha,
        "mean_acceptance_length": taus,
        "speedup": [theory.speedup(tau, num_draft_tokens=k, **costs) for k, tau in zip(_CHAINS, taus, strict=True)],
        "best_num_speculative_tokens": theory.best_chain_length(alpha, **repeated),
    }


def _print_speedup(result: dict[str, Any]) -> None:
    """Prints the result, the table by α and K, and the tail if it was simulated."""
    typer.echo(
        f"K = {result['num_speculative_tokens']}, v = {result['verify_cost']:g}, c = {result['draft_cost']:g}\n"
        f"here         {_rates_text(result)}: S = {result['speedup']:.2f}\n"
        f"break-even   {_rates_text(result['break_even'])}"
    )
    if result["wanted"] is not None:
        typer.echo(f"for S = {result['wanted']['speedup']:<5g} {_rates_text(result['wanted']['rates'])}")
    typer.echo("\nτ and S by conditional acceptance rate α (rows) and K (columns); * is the best K")
    rows = []
    for row in result["table"]:
        by_length = zip(_CHAINS, row["mean_acceptance_length"], row["speedup"], strict=True)
        best = row["best_num_speculative_tokens"]
        cells = [f"{tau:.2f} {gain:.2f}{'*' if k == best else ' '}" for k, tau, gain in by_length]
        rows.append((f"{row['conditional_acceptance_rate']:.1f}", *cells))
    print_table(("α", *(f"K={k}  " for k in _CHAINS)), rows)
    if result["simulation"] is not None:
        found = result["simulation"]
        tail = result["simulation"]["time_per_output_token"]
        typer.echo(
            f"\n{found['num_requests']:,} requests simulated: τ {found['mean_acceptance_length']:.3f}, "
            f"S {found['speedup']:.3f}\ntime per output token in plain steps: P50 {tail['p50']:.2f}, "
            f"P90 {tail['p90']:.2f}, P99 {tail['p99']:.2f}; "
            f"{found['slower_than_plain']:.1%} of the requests are slower than plain decoding"
        )


def _rates_text(found: dict[str, Any] | None) -> str:
    """One acceptance under its three names."""
    if found is None:
        return "out of reach, even if every draft token were accepted"
    return (
        f"τ {found['mean_acceptance_length']:.2f}, draft acceptance rate {found['draft_acceptance_rate']:.3f}, "
        f"conditional acceptance rate {found['conditional_acceptance_rate']:.3f}"
    )


@app.command(
    "memory",
    epilog="Example: eagle3 plan memory --target Llama-3.3-70B --weights fp8 --gpu H200 --batch-size 16 --context 8192",
)
@grouped
def memory(
    *,
    given: DeploymentOptions,
    num_speculative_tokens: LengthOption = 5,
    batch_size: Annotated[int, Option(help="Sequences at once.", min=1)] = 8,
    context: Annotated[
        int | None, Option(help="Tokens of each sequence. Default: 4096, or all positions of the target.", min=1)
    ] = None,
    prefill_tokens: Annotated[int, Option(help="Maximum number of prompt tokens in one forward.", min=1)] = 8192,
    utilization: Annotated[float, Option(help="Share of the memory that may be used.")] = 0.9,
    reserve_gb: Annotated[float, Option(help="Memory kept for context, graphs and workspaces.")] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Weights, both caches and activations on each GPU.

    Reads config.json alone; nothing else is read or downloaded. Ends with exit code 1 if it does not fit, and names the
    number of GPUs or the type of weights that would do.
    """
    deployment = given.read()
    k = _draft_length(num_speculative_tokens, deployment)
    context = _read_context(context, 4096, deployment)
    asked = {
        "batch": batch_size,
        "context": context,
        "num_draft_tokens": k,
        "prefill_tokens": prefill_tokens,
        "utilization": utilization,
        "reserve_bytes": reserve_gb * 1e9,
    }
    plan = memory_plan(deployment, **asked)
    remedy = None if plan.fits else remedy_of(deployment, **asked)
    if as_json:
        print_json(
            _deployment_json(deployment)
            | {
                "batch_size": batch_size,
                "context": context,
                "bytes": dataclasses.asdict(plan) | {"total": plan.total},
                "fits": plan.fits,
                "remedy": remedy,
                "cache_capacity_tokens": plan.cache_capacity_tokens,
            }
        )
    else:
        _print_title(deployment, context, f"{batch_size} sequences of {context} tokens, K = {k}; GB on each GPU")
        print_table(("", "GB", ""), _memory_rows(deployment, plan, batch_size * (context + k + 1)), left=(0, 2))
        left = plan.budget - plan.total
        typer.echo(
            f"\n{'fits' if plan.fits else 'DOES NOT FIT'}: {plan.total / 1e9:.2f} of {plan.budget / 1e9:.2f} GB "
            f"({utilization:.0%} of {deployment.accelerator.memory_bytes / 1e9:g}), "
            f"{abs(left) / 1e9:.2f} {'left' if left >= 0 else 'too much'}. The caches can hold "
            f"{plan.cache_capacity_tokens:,.0f} tokens of all sequences together."
        )
        if remedy is not None:
            number = remedy["num_accelerators"]
            weights = remedy["weights"]
            ways = [number and f"{number} x {deployment.accelerator.name}", weights and f"--weights {weights}"]
            typer.echo(f"What would do: {', or '.join(filter(None, ways)) or 'a lower --batch-size or --context'}.")
    if not plan.fits:
        raise typer.Exit(1)


def _memory_rows(deployment: Deployment, plan: MemoryPlan, tokens: int) -> list[tuple[str, str, str]]:
    """The table's rows, the total last."""
    target = sizes_of(deployment.target)
    head = None if deployment.head is None else sizes_of(deployment.head)
    active = f", {target.active / 1e9:.3f} of them active" if target.read.experts else ""
    rows = [("target", plan.target_weights, f"{target.owned.total / 1e9:.3f} billion{active}, {deployment.weights}")]
    if head is not None:
        rows.append(("head", plan.head_weights, f"{head.owned.total / 1e9:.3f} billion; {head.method}"))
    for name, size, model in (("target's", plan.target_cache, target), ("head's", plan.head_cache, head)):
        if model is not None:
            per_token = f"{deployment.cache_bytes_per_token(model):,.0f} bytes a token, {tokens:,} tokens"
            rows.append((f"{name} cache", size, per_token))
    if plan.states:
        rows.append(("states", plan.states, "of recurrent layers, whatever the length"))
    rows += [
        ("activations", plan.activations, "estimate"),
        ("reserve", plan.reserve, "given"),
        ("total", plan.total, ""),
    ]
    digits = 2 if plan.target_weights > 1e9 else 4
    return [(name, f"{size / 1e9:.{digits}f}", note) for name, size, note in rows]


@app.command("roofline", epilog="Example: eagle3 plan roofline --target Llama-3.3-70B --weights fp8 --gpu H200")
@grouped
def roofline(
    *,
    given: DeploymentOptions,
    draft: DraftOptions,
    context: ContextOption = None,
    batch_size: Annotated[int | None, Option(help="Sequences at once. Default: a table of 1 to 512.", min=1)] = None,
    claim: Annotated[
        float | None, Option(help="Published tokens/s at --batch-size; says if they are possible.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """The most tokens/s that hardware allows.

    Bytes and operations of every step by batch; without --gpu a table of all known accelerators.
    """
    deployment = given.read()
    k, tau = draft.read_for(deployment)
    context = _read_context(context, 1024, deployment)
    every = given.gpu is None and given.bandwidth_gb_per_s is None
    if claim is not None and batch_size is None:
        raise Misuse("--claim is about one batch; add --batch-size")
    if claim is not None and every:
        raise Misuse("--claim is about one accelerator; add --gpu or --bandwidth-gb-per-s")
    batches = [batch_size] if batch_size else _BATCHES
    results = [
        _roofline_json(dataclasses.replace(deployment, accelerator=one), context=context, k=k, tau=tau, batches=batches)
        for one in (KNOWN_ACCELERATORS.values() if every else [deployment.accelerator])
    ]
    verdict = None
    if claim is not None:
        asked = {"batch": batches[0], "context": context, "num_draft_tokens": k}
        verdict = check_claim(deployment, tokens_per_second=claim, **asked)
        results[0]["claim"] = dataclasses.asdict(verdict) | {"possible": verdict.possible}
    if as_json:
        print_json({"accelerators": results})
        return
    _print_title(
        deployment,
        context,
        f"context {context}, K = {k}, τ = {tau:.2f}\n"
        "No hardware is faster: the longer of bytes/bandwidth and operations/peak, communication left out.",
        gpu="each GPU" if every else deployment.accelerator.name,
    )
    if every:
        _print_accelerators(results)
    else:
        _print_bounds(results[0], deployment)
        _print_nodes(results[0], deployment, alpha=draft.acceptance().conditional_acceptance_rate)
    if verdict is not None:
        needed = "at no batch" if verdict.batch_needed is None else f"from batch {verdict.batch_needed} on"
        drafted = f" if all {k} draft tokens were always accepted and drafting took no time" if k else ""
        typer.echo(
            f"\n{'possible' if verdict.possible else 'IMPOSSIBLE'}: {claim:,.0f} tokens/s is "
            f"{verdict.share_of_bound:.2g}x the upper bound at batch {batch_size}, {verdict.bound:,.0f}{drafted}. "
            f"Plain decoding could reach it {needed}."
        )
    if deployment.streamed_bytes(deployment.target) < _ON_CHIP:
        typer.echo(
            "\nThis target fits into on-chip caches, which are faster than the memory assumed here: no bound for it."
        )


def _roofline_json(
    deployment: Deployment, *, context: int, k: int, tau: float, batches: Sequence[int]
) -> dict[str, Any]:
    """The rooflines of one accelerator, with the largest batch in memory and those where speculation pays off."""

    def bound_of(batch: int, num_draft_tokens: int) -> dict[str, Any]:
        bound = round_bound(deployment, batch=batch, context=context, num_draft_tokens=num_draft_tokens)
        return dataclasses.asdict(bound) | {
            "verify_cost": bound.verify_cost,
            "draft_cost": bound.draft_cost,
            "plain_tokens_per_second": bound.plain_tokens_per_second,
            "tokens_per_second": bound.tokens_per_second(tau),
            "speedup": bound.speedup(tau),
        }

    def nodes_of(size: int) -> dict[str, Any]:
        experts = experts_read(deployment, batch=batches[0], nodes=size)
        return {"num_nodes": size, "experts": experts, "verify_cost": bound_of(batches[0], size - 1)["verify_cost"]}

    start = end = None
    if deployment.head is not None:
        start, end = paying_batches(deployment, context=context, num_draft_tokens=k, mean_acceptance_length=tau)
    return {
        **_deployment_json(deployment),
        "context": context,
        "num_speculative_tokens": k,
        "mean_acceptance_length": tau,
        "largest_batch": largest_batch(deployment, context=max(context, 1), num_draft_tokens=k),
        "pays_from_batch": start,
        "break_even_batch": end,
        "bounds": [bound_of(batch, k) for batch in batches],
        "nodes": [nodes_of(size) for size in _NODES if sizes_of(deployment.target).read.experts],
    }


def _print_accelerators(results: Sequence[dict[str, Any]]) -> None:
    """Prints one row for every accelerator."""
    batches = [bound["batch"] for bound in results[0]["bounds"]]
    shown = [batches.index(batch) for batch in (1, 8, 64) if batch in batches] or [0]

    def speeds(bound: dict[str, Any]) -> str:
        plain = f"{bound['plain_tokens_per_second']:,.0f}"
        return f"{plain} {bound['tokens_per_second']:,.0f}" if bound["num_draft_tokens"] else plain

    rows = [
        (
            result["accelerator"]["name"],
            f"{result['accelerator']['bandwidth_bytes_per_second'] / 1e9:,.0f}",
            f"{result['accelerator']['peak_flops'] / 1e12:,.0f}",
            f"{result['accelerator']['memory_bytes'] / 1e9:g}",
            _batch_text(result["largest_batch"]),
            *(speeds(result["bounds"][index]) for index in shown),
            _batch_text(result["break_even_batch"]) if result["drafter"] else "",
        )
        for result in results
    ]
    titles = ("GPU", "GB/s", "TFLOPS", "GB", "fits", *(f"batch {batches[index]}" for index in shown), "pays below")
    print_table(titles, rows)
    typer.echo(
        "\ntokens/s of a batch: plain, speculative. fits: the largest batch that memory holds.\n"
        "Peaks are dense bfloat16; datasheets are named in --json."
    )


def _print_bounds(result: dict[str, Any], deployment: Deployment) -> None:
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
            f"{bound['tokens_per_second']:,.0f}",
            f"{bound['speedup']:.2f}",
            "" if bound["batch"] <= result["largest_batch"] else "not in memory",
        )
        for bound in result["bounds"]
    ]
    titles = ("batch", "GB", "GFLOP", "plain ms", "tokens/s", "verify ms", "v", "c", "speculative", "S", "")
    print_table(titles, rows)
    typer.echo(
        f"\n{deployment.accelerator.source}\nMemory holds {_batch_text(result['largest_batch'])} such sequences."
    )
    if deployment.head is not None:
        start = result["pays_from_batch"]
        end = result["break_even_batch"]
        first = "" if start == 1 else "at no batch" if start is None else f"from batch {start:,} on"
        last = "" if start is None or end is None else f"below batch {end:,}; a real engine stops earlier"
        typer.echo(f"Speculation pays {', '.join(filter(None, (first, last))) or 'at every batch'}.")


def _print_nodes(result: dict[str, Any], deployment: Deployment, *, alpha: float) -> None:
    """Prints the cost of verification by draft size for a target with experts, and the best chain."""
    if not result["nodes"]:
        return
    batch = result["bounds"][0]["batch"]
    context = result["context"]
    typer.echo(
        f"\nverification at batch {batch} by nodes of the draft, root included: the more of them, the more experts"
    )
    rows = [(f"{one['num_nodes']}", f"{one['experts']:.1%}", f"{one['verify_cost']:.2f}") for one in result["nodes"]]
    print_table(("nodes", "experts read", "v"), rows)
    typer.echo("As if tokens chose independently and evenly; neighbours choose alike, so a real forward reads fewer.")
    if deployment.head is not None:
        k = best_chain(deployment, batch=batch, context=context, conditional_acceptance_rate=alpha)
        advice = f"a chain of K = {k} gains most" if k else "no chain gains anything"
        typer.echo(f"On this roofline, at batch {batch} and α = {alpha:.2f}, {advice}; measure with `eagle3 tune`.")


@app.command(
    "cost",
    epilog="Example: eagle3 plan cost --price-per-hour 1.40 --tokens-per-second 1700 --tokens-per-second 6200",
)
@grouped
def cost(
    *,
    price_per_hour: Annotated[float, Option(help="Price of the whole machine, in any currency.")],
    tokens_per_second: Annotated[
        list[float] | None,
        Option(help="Measured speed; repeat the option to compare several. Default: the roofline's bounds."),
    ] = None,
    busy: Annotated[float, Option(help="Share of the paid hours in which the machine works.")] = 1.0,
    given: DeploymentOptions,
    draft: DraftOptions,
    context: ContextOption = None,
    batch_size: Annotated[int, Option(help="Sequences at once.", min=1)] = 8,
    as_json: JsonOption = False,
) -> None:
    """Cost per million tokens, tokens per dollar.

    Of measured speeds, or of the best that hardware allows. Only output tokens are counted.
    """
    about = f"{price_per_hour:g} an hour, busy {busy:.0%} of the hours"
    deployment = None
    if tokens_per_second:
        speeds = {f"{speed:g} tokens/s": speed for speed in tokens_per_second}
    else:
        deployment = given.read()
        k, tau = draft.read_for(deployment)
        context = _read_context(context, 1024, deployment)
        bound = round_bound(deployment, batch=batch_size, context=context, num_draft_tokens=k)
        about = f"batch {batch_size}, context {context}; {about}\nFrom the roofline, so real costs are higher."
        speeds = {"plain": bound.plain_tokens_per_second}
        if deployment.head is not None:
            speeds[f"K = {k}, τ = {tau:.2f}"] = bound.tokens_per_second(tau)
    costs = {name: cost_of(speed, price_per_hour=price_per_hour, busy=busy) for name, speed in speeds.items()}
    if as_json:
        rows = [{"name": name, **found._asdict()} for name, found in costs.items()]
        print_json(
            {"price_per_hour": price_per_hour, "busy": busy, "from_roofline": not tokens_per_second, "costs": rows}
        )
        return
    if deployment is None:
        typer.echo(f"measured; {about}\n")
    else:
        _print_title(deployment, context or 0, about)
    first = next(iter(costs.values())).per_million_tokens
    rows = [
        (name, f"{speed:,.0f}", f"{per_million:.3f}", f"{tokens:,.0f}", f"{first / per_million:.2f}x")
        for name, (speed, per_million, tokens) in costs.items()
    ]
    print_table(("", "tokens/s", "per million tokens", "tokens for 1", "for the same money"), rows)


@app.command(
    "rollout",
    epilog="Example: eagle3 plan rollout --target Llama-3.3-70B --weights fp8 --gpu H200 --concurrency 16 "
    "--requests-per-second 5 --alpha 0.75 -K 4 --out rollout.md",
)
@grouped
def rollout(
    *,
    given: DeploymentOptions,
    draft: DraftOptions,
    requests_per_second: Annotated[float, Option(help="Average over a day.")] = 5.0,
    prompt_tokens: Annotated[int, Option(help="Mean length of a prompt.", min=1)] = 1024,
    output_tokens: Annotated[int, Option(help="Mean length of an answer.", min=1)] = 256,
    concurrency: Annotated[int, Option(help="Sequences at once on a replica at the daily peak.", min=1)] = 16,
    verify_cost: Annotated[
        float | None,
        Option(help="v as measured at the peak; with --draft-cost it replaces the roofline's."),
    ] = None,
    draft_cost: Annotated[float | None, Option(help="c as measured at the peak.")] = None,
    out: Annotated[Path | None, Option(help="File to write. Default: the standard output.")] = None,
    as_json: JsonOption = False,
) -> None:
    """A staged plan in Markdown, with gates.

    Offline proof, shadow, 1, 10, 50 and 100 % of the traffic; gates, PromQL, alerts and the way back.
    """
    check_writable(out)
    if (verify_cost is None) != (draft_cost is None):
        raise Misuse("--verify-cost and --draft-cost are measured together; give both or neither")
    deployment = given.read()
    draft.read_for(deployment)
    plan = plan_rollout(
        deployment,
        Traffic(requests_per_second, prompt_tokens, output_tokens, concurrency),
        num_draft_tokens=draft.num_speculative_tokens,
        conditional_acceptance_rate=draft.acceptance().conditional_acceptance_rate,
        measured=None if verify_cost is None or draft_cost is None else MeasuredCosts(verify_cost, draft_cost),
    )
    if as_json:
        found = dataclasses.asdict(plan)
        for name in ("deployment", "traffic", "num_draft_tokens", "memory"):
            del found[name]
        text = json.dumps(finite(_deployment_json(deployment) | found))
    else:
        name = "TARGET" if given.target is None or known_name(given.target, KNOWN_MODELS) else given.target
        text = to_markdown(plan, target=name, head=given.drafter or "HEAD").rstrip("\n")
    if out is None:
        typer.echo(text)
        return
    with whole_file(out) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
    typer.echo(f"wrote {out}", err=True)


# Shared by several plans


def _draft_length(num_draft_tokens: int, deployment: Deployment) -> int:
    """``K``, which the head must be able to draft; 0 without a head."""
    if deployment.head is None:
        return 0
    head = sizes_of(deployment.head)
    if num_draft_tokens > head.longest:
        by_positions = f" has {head.max_positions} positions, so K is" * (head.longest + 1 == head.max_positions)
        raise Misuse(
            f"--num-speculative-tokens {num_draft_tokens} is above the limit of the head: "
            f"{deployment.head_name}{by_positions or ' drafts'} at most {head.longest}"
        )
    return num_draft_tokens


def _read_context(context: int | None, usual: int, deployment: Deployment) -> int:
    """The length that was asked for, or the usual one as far as the target reaches."""
    target = deployment.target
    if context is None:
        return min(usual, target.max_positions)
    if context > target.max_positions:
        raise Misuse(f"--context {context} is beyond the {target.max_positions} positions of {deployment.target_name}")
    return context


def _deployment_json(deployment: Deployment) -> dict[str, Any]:
    """The deployment as plain values."""
    target = sizes_of(deployment.target)
    head = None if deployment.head is None else sizes_of(deployment.head)
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


def _print_title(deployment: Deployment, context: int, text: str, gpu: str | None = None) -> None:
    """Prints the deployment, and a warning of a context beyond the positions of the head."""
    head = deployment.head
    on = f"{deployment.num_accelerators} x {gpu or deployment.accelerator.name}"
    with_head = f"with {deployment.head_name if head else 'no head'} on {on}"
    typer.echo(f"{deployment.target_name} ({deployment.weights}) {with_head}; {text}")
    if head is not None and context > head.max_positions:
        typer.echo(
            f"Beyond the {head.max_positions:,} positions that the head was built for, expect it to draft worse."
        )
    typer.echo("")


def _batch_text(batch: int | None) -> str:
    """A batch size; ``any`` if there is no limit."""
    return "any" if batch is None or batch >= 65_536 else f"{batch:,}"
