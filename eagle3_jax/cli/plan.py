"""``eagle3 plan``: the gains, the memory and the costs of speculation, before anything is bought or served."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3_jax.cli import _plan_pages as pages
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import JsonOption, PlotOption, check_plot, check_writable, finite, grouped, print_json
from eagle3_jax.named import FORMS
from eagle3_jax.theory import speedup as theory
from eagle3_jax.theory.accelerators import (
    CACHE_BYTES,
    KNOWN_ACCELERATORS,
    WEIGHT_BITS,
    Accelerator,
    accelerator_named,
    custom_accelerator,
)
from eagle3_jax.theory.known_models import KNOWN_MODELS, known_name
from eagle3_jax.writing import whole_file

if TYPE_CHECKING:
    from eagle3_jax.theory.memory import Deployment

app = typer.Typer(
    help="Plan speculation: speed-up, memory, roofline, cost, rollout.",
    epilog="Example: eagle3 plan roofline --target Llama-3.3-70B --weights fp8 --gpu H200",
    rich_markup_mode=None,
)

_ALPHAS = tuple(tenths / 10 for tenths in range(3, 10))
_VERIFY_COSTS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
_BATCHES = tuple(2**power for power in range(10))
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_ON_CHIP = 256e6  # bytes of the largest last-level caches of accelerators

LengthOption = Annotated[int, typer.Option("--num-speculative-tokens", "-K", help="Draft length K.", min=1, max=4096)]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--context", help="Earlier tokens of each sequence. Default: 1024, or all positions of the target.", min=0
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeploymentOptions:
    """A target and its head on accelerators."""

    target: Annotated[
        str | None,
        typer.Option(
            help=f"Directory with a config.json, hub id, or one of {', '.join(KNOWN_MODELS)}. Default: the bundled "
            "target."
        ),
    ] = None
    drafter: Annotated[
        str | None,
        typer.Option(
            help=f"Directory with the config.json of a head of any method or of a draft model, hub id, {FORMS}. "
            "Default: the bundled head for the bundled target; for others a usual EAGLE-3 head (one layer like the "
            "target's, draft vocabulary 32000)."
        ),
    ] = None
    gpu: Annotated[str | None, typer.Option(help="Accelerator, such as H100, H200, L40S, MI300X or TPU-v6e.")] = None
    bandwidth_gb_per_s: Annotated[
        float | None,
        typer.Option(help="Memory bandwidth, of an accelerator without a name here or as measured on a named one."),
    ] = None
    peak_tflops: Annotated[float | None, typer.Option(help="Dense bfloat16 peak of the accelerator.")] = None
    memory_gb: Annotated[float | None, typer.Option(help="Memory of the accelerator.")] = None
    num_gpus: Annotated[int, typer.Option(help="Tensor-parallel size.", min=1)] = 1
    weights: Annotated[
        str, typer.Option(help=f"Type of the target's layers: {', '.join(WEIGHT_BITS)}, or bf16, fp16, fp32.")
    ] = "bfloat16"
    cache: Annotated[str, typer.Option(help=f"Type of both caches: {', '.join(CACHE_BYTES)}.")] = "bfloat16"

    def read(self) -> Deployment:
        """The deployment that the options describe.

        Raises:
            ValueError: They describe nothing that can be planned; the message names the option.
        """
        from eagle3_jax.cli._planning import read_head, read_target
        from eagle3_jax.theory.memory import Deployment

        target = read_target(self.target)
        head = read_head(self.drafter, target, bundled=self.target is None)
        return Deployment(
            target=target.config,
            head=head.config,
            accelerator=self._accelerator(),
            num_accelerators=self.num_gpus,
            weights=_SHORT.get(self.weights, self.weights),
            cache=_SHORT.get(self.cache, self.cache),
            target_name=target.name,
            head_name=head.name,
        )

    def _accelerator(self) -> Accelerator:
        """The accelerator that is named, the one that is described, or an H100."""
        if self.bandwidth_gb_per_s is None:
            if self.peak_tflops is not None or self.memory_gb is not None:
                raise Misuse("--peak-tflops and --memory-gb describe an accelerator by hand; add --bandwidth-gb-per-s")
            return accelerator_named("H100" if self.gpu is None else self.gpu)
        return custom_accelerator(
            gb_per_s=self.bandwidth_gb_per_s,
            tflops=self.peak_tflops,
            memory_gb=self.memory_gb,
            base=None if self.gpu is None else accelerator_named(self.gpu),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """A chain of drafts and its acceptance."""

    num_speculative_tokens: LengthOption = 5
    mean_acceptance_length: Annotated[
        float | None, typer.Option(help="τ: tokens per round, the target's own included.")
    ] = None
    draft_acceptance_rate: Annotated[
        float | None, typer.Option(help="Accepted over drafted tokens, as vLLM logs it.")
    ] = None
    conditional_acceptance_rate: Annotated[
        float | None,
        typer.Option(
            "--conditional-acceptance-rate",
            "--alpha",
            help="Probability that a token is accepted if all before it were. Default: 0.7, unless τ or the draft "
            "acceptance rate is given.",
        ),
    ] = None

    @property
    def given(self) -> list[float]:
        """The options of acceptance that were given."""
        three = (self.mean_acceptance_length, self.draft_acceptance_rate, self.conditional_acceptance_rate)
        return [value for value in three if value is not None]

    def acceptance(self) -> theory.Rates:
        """The acceptance that one of three options gives, or a conditional acceptance rate of 0.7.

        Raises:
            ValueError: More than one was given, or no chain has such an acceptance.
        """
        k, tau = self.num_speculative_tokens, self.mean_acceptance_length
        if len(self.given) > 1:
            raise Misuse(
                "--mean-acceptance-length, --draft-acceptance-rate and --conditional-acceptance-rate say the same in "
                "three ways; give one"
            )
        if self.draft_acceptance_rate is not None:
            tau = theory.tau_from_draft_rate(self.draft_acceptance_rate, k)
        elif tau is None:
            alpha = self.conditional_acceptance_rate
            tau = theory.tau_from_conditional_rate(0.7 if alpha is None else alpha, k)
        return theory.rates(tau, k)

    def for_deployment(self, deployment: Deployment) -> tuple[int, float]:
        """``K`` and ``τ`` of a deployment; 0 and 1 without a head.

        Raises:
            ValueError: The head cannot draft so many tokens, or no chain has such an acceptance.
        """
        _check_draft_length(self.num_speculative_tokens, deployment)
        found = self.acceptance()
        return (self.num_speculative_tokens, found.mean_acceptance_length) if deployment.head else (0, 1.0)


@app.command("speedup", epilog="Example: eagle3 plan speedup -K 5 --alpha 0.7 --verify-cost 1.18 --draft-cost 0.144")
@grouped
def speedup(
    *,
    draft: DraftOptions,
    verify_cost: Annotated[
        float,
        typer.Option(
            help="v: time of a verification in plain steps; `eagle3 bench` measures it. The defaults of v and c are "
            "fitted to vLLM, Llama-3.1-8B on one H100, batch 1 (vllm-project/vllm 20780)."
        ),
    ] = 1.18,
    draft_cost: Annotated[float, typer.Option(help="c: time of a draft pass in plain steps.")] = 0.144,
    wanted: Annotated[float | None, typer.Option(help="Speed-up to reach; prints the rates that it takes.")] = None,
    traffic: Annotated[
        str | None,
        typer.Option(help="SHARE:ALPHA,...: shares of the output tokens and their conditional acceptance rates."),
    ] = None,
    simulate: Annotated[
        int, typer.Option(help="Number of requests to simulate, for the tail; 0 for none.", min=0, max=100_000)
    ] = 0,
    output_tokens: Annotated[
        int, typer.Option(help="Output tokens of every simulated request.", min=2, max=100_000)
    ] = 256,
    seed: Annotated[int, typer.Option(help="Random seed of the simulation.", min=0)] = 0,
    exercises: Annotated[bool, typer.Option("--exercises", help="Print exercises with their answers instead.")] = False,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Turn acceptance into speed-up and back: S = τ / (v + K·c).

    τ = 1 + K·r for the draft acceptance rate r, and (1 - α^(K+1)) / (1 - α) for the conditional acceptance rate α.
    """
    if exercises:
        pages.print_exercises(as_json=as_json)
        return
    check_plot(plot)
    k, cost = draft.num_speculative_tokens, {"verify_cost": verify_cost, "draft_cost": draft_cost}
    classes = _parse_traffic(traffic)
    if classes is not None:
        if draft.given:
            raise Misuse("--traffic has the acceptance of every class; leave the other options of acceptance out")
        taus = [theory.tau_from_conditional_rate(kind.conditional_acceptance_rate, k) for kind in classes]
        found = theory.rates(theory.blended_tau([kind.share for kind in classes], taus), k)
    else:
        found = draft.acceptance()
        classes = [theory.TrafficClass(share=1.0, conditional_acceptance_rate=found.conditional_acceptance_rate)]

    def rates_at(gain: float) -> dict[str, float] | None:
        return pages.rates_json(theory.rates_for_speedup(gain, num_draft_tokens=k, **cost))

    simulation = None
    if simulate:
        simulation = theory.simulate(
            classes, num_draft_tokens=k, **cost, num_requests=simulate, output_tokens=output_tokens, seed=seed
        )
    result = {
        "num_speculative_tokens": k,
        **cost,
        **dataclasses.asdict(found),
        "speedup": theory.speedup(found.mean_acceptance_length, num_draft_tokens=k, **cost),
        "break_even": rates_at(1.0),
        "wanted": None if wanted is None else {"speedup": wanted, "rates": rates_at(wanted)},
        "table": [pages.speedup_row(alpha, **cost) for alpha in _ALPHAS],
        "break_even_map": [pages.break_even_row(v, draft_cost=draft_cost) for v in _VERIFY_COSTS],
        "simulation": None if simulation is None else dataclasses.asdict(simulation),
    }
    if plot is not None:
        from eagle3_jax.cli._plots import plot_speedup

        plot_speedup(plot, found, num_draft_tokens=k, **cost)
    if as_json:
        print_json(result)
    else:
        pages.print_speedup(result, simulation)


@app.command(
    "memory",
    epilog="Example: eagle3 plan memory --target Llama-3.3-70B --weights fp8 --gpu H200 --batch-size 16 --context 8192",
)
@grouped
def memory(
    *,
    given: DeploymentOptions,
    num_speculative_tokens: LengthOption = 5,
    batch_size: Annotated[int, typer.Option(help="Sequences at once.", min=1)] = 8,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of each sequence, prompt and answer. Default: 4096, or all positions of the target.", min=1
        ),
    ] = None,
    prefill_tokens: Annotated[int, typer.Option(help="Maximum number of prompt tokens in one forward.", min=1)] = 8192,
    utilization: Annotated[float, typer.Option(help="Share of the memory that may be used.")] = 0.9,
    reserve_gb: Annotated[float, typer.Option(help="Memory kept for context, graphs and workspaces.")] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Weights, both caches and activations on each GPU.

    Reads config.json alone; nothing else is read or downloaded. Ends with exit code 1 if it does not fit, and names the
    number of GPUs or the type of weights that would do.
    """
    from eagle3_jax.theory.memory import memory_plan, remedy_of

    deployment = given.read()
    _check_draft_length(num_speculative_tokens, deployment)
    context = _read_context(context, 4096, deployment)
    k = num_speculative_tokens if deployment.head else 0
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
        result = pages.deployment_json(deployment) | {
            "batch_size": batch_size,
            "context": context,
            "bytes": dataclasses.asdict(plan) | {"total": plan.total},
            "fits": plan.fits,
            "remedy": None if remedy is None else dataclasses.asdict(remedy),
            "cache_capacity_tokens": plan.cache_capacity_tokens,
        }
        print_json(result)
    else:
        pages.print_memory(
            deployment, plan, remedy, context=context, k=k, batch_size=batch_size, utilization=utilization
        )
    if not plan.fits:
        raise typer.Exit(1)


@app.command("roofline", epilog="Example: eagle3 plan roofline --target Llama-3.3-70B --weights fp8 --gpu H200")
@grouped
def roofline(
    *,
    given: DeploymentOptions,
    draft: DraftOptions,
    context: ContextOption = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences at once. Default: a table of 1 to 512.", min=1)
    ] = None,
    claim: Annotated[
        float | None, typer.Option(help="Published tokens/s at --batch-size; prints whether they are possible.")
    ] = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """The most tokens/s that hardware allows.

    Bytes and operations of every step by batch; without --gpu a table of all known accelerators.
    """
    from eagle3_jax.theory.bounds import check_claim, round_bound

    check_plot(plot)
    if claim is not None and batch_size is None:
        raise Misuse("--claim is about one batch; add --batch-size")
    deployment = given.read()
    k, tau = draft.for_deployment(deployment)
    context = _read_context(context, 1024, deployment)
    every = given.gpu is None and given.bandwidth_gb_per_s is None
    if every and (plot is not None or claim is not None):
        raise Misuse("--plot and --claim are about one accelerator; add --gpu or --bandwidth-gb-per-s")
    accelerators = list(KNOWN_ACCELERATORS.values()) if every else [deployment.accelerator]
    batches = [batch_size] if batch_size else _BATCHES
    results = [
        pages.roofline_json(
            dataclasses.replace(deployment, accelerator=one), context=context, k=k, tau=tau, batches=batches
        )
        for one in accelerators
    ]
    verdict = None
    if claim is not None and batch_size is not None:
        verdict = check_claim(
            deployment, tokens_per_second=claim, batch=batch_size, context=context, num_draft_tokens=k
        )
        results[0]["claim"] = dataclasses.asdict(verdict) | {"possible": verdict.possible}
    if plot is not None:
        from eagle3_jax.cli._plots import plot_roofline

        plot_roofline(
            plot,
            [round_bound(deployment, batch=batch, context=context, num_draft_tokens=k) for batch in _BATCHES],
            tau=tau,
            title=pages.title(deployment),
            largest_batch=results[0]["largest_batch"],
        )
    if as_json:
        print_json({"accelerators": results})
        return
    pages.say(
        f"{pages.title(deployment, accelerator=not every)}; context {context}, K = {k}, τ = {tau:.2f}",
        "No hardware is faster: the longer of bytes/bandwidth and operations/peak, communication left out.\n",
    )
    if every:
        pages.print_accelerators(results)
    else:
        pages.print_bounds(results[0], deployment)
        pages.print_nodes(results[0], deployment, alpha=draft.acceptance().conditional_acceptance_rate)
    pages.say_if_long(context, deployment)
    if verdict is not None:
        pages.say("\n" + pages.claim_text(verdict, batch_size=batch_size, k=k))
    if deployment.streamed_bytes(deployment.target) < _ON_CHIP:
        pages.say(
            "\nThis target fits into on-chip caches, which are faster than the memory assumed here: no bound for it."
        )


@app.command(
    "cost",
    epilog="Example: eagle3 plan cost --price-per-hour 1.40 --tokens-per-second 1700 --tokens-per-second 6200",
)
@grouped
def cost(
    *,
    price_per_hour: Annotated[float, typer.Option(help="Price of the whole machine, in any currency.")],
    tokens_per_second: Annotated[
        list[float] | None,
        typer.Option(help="Measured speed; repeat the option to compare several. Default: the roofline's bounds."),
    ] = None,
    busy: Annotated[float, typer.Option(help="Share of the paid hours in which the machine works.")] = 1.0,
    given: DeploymentOptions,
    draft: DraftOptions,
    context: ContextOption = None,
    batch_size: Annotated[int, typer.Option(help="Sequences at once.", min=1)] = 8,
    as_json: JsonOption = False,
) -> None:
    """Cost per million tokens, tokens per dollar.

    Of measured speeds, or of the best that hardware allows. Only output tokens are counted.
    """
    from eagle3_jax.theory.cost import cost_of

    if tokens_per_second:
        about = f"measured, {price_per_hour:g} an hour"
        speeds = [(f"{speed:g} tokens/s", speed) for speed in tokens_per_second]
    else:
        from eagle3_jax.theory.bounds import round_bound

        deployment = given.read()
        k, tau = draft.for_deployment(deployment)
        context = _read_context(context, 1024, deployment)
        bound = round_bound(deployment, batch=batch_size, context=context, num_draft_tokens=k)
        about = (
            f"{pages.title(deployment)}; batch {batch_size}, context {context}; {price_per_hour:g} an hour.\n"
            "From the roofline, so real costs are higher; prefill is not counted"
        )
        speeds = [("plain", bound.plain_tokens_per_second)]
        if deployment.head is not None:
            speeds.append((f"K = {k}, τ = {tau:.2f}", bound.tokens_per_second(tau)))
    costs = [cost_of(speed, price_per_hour=price_per_hour, busy=busy) for _, speed in speeds]
    if as_json:
        rows = [{"name": name, **dataclasses.asdict(found)} for (name, _), found in zip(speeds, costs, strict=True)]
        found = {"price_per_hour": price_per_hour, "busy": busy, "from_roofline": not tokens_per_second, "costs": rows}
        print_json(found)
        return
    pages.say(about + (f"; busy {busy:.0%} of the hours\n" if busy < 1 else "\n"))
    pages.print_costs([name for name, _ in speeds], costs)


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
    requests_per_second: Annotated[float, typer.Option(help="Average over a day.")] = 5.0,
    prompt_tokens: Annotated[int, typer.Option(help="Mean length of a prompt.", min=1)] = 1024,
    output_tokens: Annotated[int, typer.Option(help="Mean length of an answer.", min=1)] = 256,
    concurrency: Annotated[int, typer.Option(help="Sequences at once on a replica at the daily peak.", min=1)] = 16,
    verify_cost: Annotated[
        float | None,
        typer.Option(help="v as measured at the peak; with --draft-cost it replaces the roofline's."),
    ] = None,
    draft_cost: Annotated[float | None, typer.Option(help="c as measured at the peak.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write. Default: the standard output.")] = None,
    as_json: JsonOption = False,
) -> None:
    """A staged plan in Markdown, with gates.

    Offline proof, shadow, 1, 10, 50 and 100 % of the traffic; gates, PromQL, alerts and the way back.
    """
    from eagle3_jax.theory.rollout import MeasuredCosts, Traffic, plan_rollout, to_markdown

    check_writable(out)
    if (verify_cost is None) != (draft_cost is None):
        raise Misuse("--verify-cost and --draft-cost are measured together; give both or neither")
    measured = None if verify_cost is None or draft_cost is None else MeasuredCosts(verify_cost, draft_cost)
    deployment = given.read()
    draft.for_deployment(deployment)
    plan = plan_rollout(
        deployment,
        Traffic(
            requests_per_second=requests_per_second,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            concurrency=concurrency,
        ),
        num_draft_tokens=draft.num_speculative_tokens,
        conditional_acceptance_rate=draft.acceptance().conditional_acceptance_rate,
        measured=measured,
    )
    if as_json:
        text = json.dumps(finite(pages.rollout_json(deployment, plan)))
    else:
        name = "TARGET" if given.target is None or known_name(given.target, KNOWN_MODELS) else given.target
        text = to_markdown(plan, target=name, head=given.drafter or "HEAD").rstrip("\n")
    if out is None:
        typer.echo(text)
        return
    with whole_file(out) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
    typer.echo(f"wrote {out}", err=True)


def _check_draft_length(num_draft_tokens: int, deployment: Deployment) -> None:
    """Refuses a chain that is longer than the head can draft."""
    head = deployment.head
    longest = getattr(head, "longest", None)
    if longest is not None and num_draft_tokens > longest:
        raise Misuse(
            f"--num-speculative-tokens {num_draft_tokens} is above what {deployment.head_name} drafts at once; give at "
            f"most -K {longest}"
        )
    if head is not None and num_draft_tokens >= head.max_positions:  # the root needs one too
        raise Misuse(
            f"--num-speculative-tokens {num_draft_tokens} is above the limit of the head: {deployment.head_name} has "
            f"{head.max_positions} positions, so K is at most {head.max_positions - 1}"
        )


def _read_context(context: int | None, usual: int, deployment: Deployment) -> int:
    """The length that was asked for, or the usual one as far as the target reaches."""
    target = deployment.target
    if context is None:
        return min(usual, target.max_positions)
    if context > target.max_positions:
        raise Misuse(f"--context {context} is beyond the {target.max_positions} positions of {deployment.target_name}")
    return context


def _parse_traffic(text: str | None) -> list[theory.TrafficClass] | None:
    if text is None:
        return None
    classes = []
    for part in text.split(","):
        share, _, rate = part.partition(":")
        try:
            classes.append(theory.TrafficClass(share=float(share), conditional_acceptance_rate=float(rate)))
        except ValueError:
            raise Misuse(f"--traffic {text!r}: {part!r} is not SHARE:ALPHA, as in '0.7:0.7,0.3:0.4'") from None
    return classes
