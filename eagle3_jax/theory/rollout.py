"""A staged plan for turning speculation on in production, with gates computed from the model and its traffic."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from eagle3_jax.theory.bounds import best_chain, break_even_batch, round_bound
from eagle3_jax.theory.memory import Deployment, MemoryPlan, memory_plan
from eagle3_jax.theory.speedup import Rates, rates, round_cost, tau_from_conditional_rate

_P99_SHARE, _P99_HALF_WIDTH = 0.01, 0.0025
_NORMAL_95 = 1.96
_STAGES = ((0.01, 1.0), (0.1, 24.0), (0.5, 24.0), (1.0, 168.0))  # share of traffic, least hours


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """The load of the deployment.

    Attributes:
        requests_per_second: Average over a day.
        prompt_tokens: Mean length of a prompt.
        output_tokens: Mean length of an answer.
        concurrency: Sequences decoded at once at the daily peak, on one replica.
    """

    requests_per_second: float
    prompt_tokens: int
    output_tokens: int
    concurrency: int

    def __post_init__(self) -> None:
        if not 0 < self.requests_per_second < math.inf:
            raise ValueError(f"requests_per_second is {self.requests_per_second:g}; expected a positive number")
        for name in ("prompt_tokens", "output_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")


class MeasuredCosts(NamedTuple):
    """Costs ``v`` and ``c`` of a round at the daily peak, in plain steps."""

    verify_cost: float
    draft_cost: float


class Stage(NamedTuple):
    """One step of the rollout.

    Attributes:
        share: Share of the requests that the speculative pool serves.
        hours: Minimum duration.
        requests: Number of requests that it serves in that time.
    """

    share: float
    hours: float
    requests: float


class BatchRange(NamedTuple):
    """Chain length ``K`` for batches from ``first`` to ``last``, both included; 0 is plain decoding."""

    first: int
    last: int
    num_draft_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """Every number of the plan.

    Attributes:
        deployment: Models and accelerators of one replica.
        traffic: Its load.
        num_draft_tokens: ``K``.
        expected: Rates that offline measurement must confirm.
        verify_cost: ``v`` at the daily peak.
        draft_cost: ``c`` at the daily peak.
        measured: Whether both costs were measured; otherwise they are the roofline's, the best case.
        memory: On each accelerator at the peak.
        break_even_batch: Batch at which speculation stops paying off on the roofline; ``None`` if there is none.
        schedule: Chain length by batch.
        stages: Shares of traffic and their minimum duration.
        requests_for_p99: Number of requests needed to judge a 99th percentile.
        tau_standard_error: Standard error of τ after the first stage.
    """

    deployment: Deployment
    traffic: Traffic
    num_draft_tokens: int
    expected: Rates
    verify_cost: float
    draft_cost: float
    measured: bool
    memory: MemoryPlan
    break_even_batch: int | None
    schedule: list[BatchRange]
    stages: list[Stage]
    requests_for_p99: int
    tau_standard_error: float

    @property
    def predicted_speedup(self) -> float:
        """``S = τ / (v + K·c)`` at the peak; at most that, where costs are the roofline's."""
        return self.expected.mean_acceptance_length / self.break_even_tau

    @property
    def break_even_tau(self) -> float:
        """``v + K·c`` at the peak: with a smaller τ speculation slows the service down."""
        return round_cost(self.num_draft_tokens, verify_cost=self.verify_cost, draft_cost=self.draft_cost)

    @property
    def least_tau(self) -> float:
        """The gate on τ: halfway from break-even to the expected τ."""
        return (self.break_even_tau + self.expected.mean_acceptance_length) / 2

    @property
    def largest_time_ratio(self) -> float:
        """The gate on the median time per output token over that of the plain pool: half of the predicted saving."""
        return 1.0 - (1.0 - 1.0 / self.predicted_speedup) / 2

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the deployment, its traffic and its memory."""
        kept = ("expected", "verify_cost", "draft_cost", "measured", "break_even_tau", "least_tau")
        kept += ("largest_time_ratio", "predicted_speedup", "break_even_batch", "obstacles")
        schedule = [list(part) for part in self.schedule]
        stages = [stage._asdict() for stage in self.stages]
        found = {name: getattr(self, name) for name in kept} | {"schedule": schedule, "stages": stages}
        return found | {"expected": dataclasses.asdict(self.expected)}

    @property
    def obstacles(self) -> list[str]:
        """Reasons not to start the rollout; empty if there are none."""
        found = []
        if not self.memory.fits:
            found.append(
                f"memory: {self.memory.total / 1e9:.1f} GB needed, {self.memory.budget / 1e9:.1f} GB may be used"
            )
        if self.predicted_speedup <= 1.0:
            found.append(
                f"speed: τ {self.expected.mean_acceptance_length:.2f} is below the {self.break_even_tau:.2f} that a "
                f"round costs at {self.traffic.concurrency} sequences"
            )
        return found


def accepted_variance(conditional_acceptance_rate: float, num_draft_tokens: int) -> float:
    """Variance of the accepted tokens of a round, ``P(j) = α^j (1-α)`` for ``j < K`` and ``P(K) = α^K``.

    With ``P(A >= j) = α^j``: ``E[A] = Σ α^j`` and ``E[A²] = Σ (2j - 1) α^j`` over ``j = 1…K``.
    """
    tails = [conditional_acceptance_rate**j for j in range(1, num_draft_tokens + 1)]
    mean = math.fsum(tails)
    return math.fsum((2 * j - 1) * tail for j, tail in enumerate(tails, 1)) - mean * mean


def requests_to_judge_p99() -> int:
    """``n = z² p(1-p) / h²`` with ``p`` = 1 % and ``h`` = 0.25 %.

    The share of requests slower than the plain pool's 99th percentile is then known to a quarter of a percent, with
    95 % confidence: 0.75 to 1.25 % is no change.
    """
    return math.ceil(_NORMAL_95**2 * _P99_SHARE * (1 - _P99_SHARE) / _P99_HALF_WIDTH**2)


def draft_schedule(
    deployment: Deployment,
    *,
    conditional_acceptance_rate: float,
    most_draft_tokens: int,
    context: int,
    largest: int,
) -> list[BatchRange]:
    """The best ``K`` up to a limit for every batch, by the roofline; neighbours with the same ``K`` are one range.

    Each range reaches from a power of two to the next and takes the smaller ``K`` of both ends.
    """
    ranges: list[BatchRange] = []
    first = 1
    while first <= largest:
        last = min(2 * first - 1, largest)
        best = min(
            best_chain(
                deployment,
                batch=batch,
                context=context,
                conditional_acceptance_rate=conditional_acceptance_rate,
                longest=most_draft_tokens,
            )
            for batch in {first, last}
        )
        if ranges and ranges[-1].num_draft_tokens == best:
            ranges[-1] = BatchRange(ranges[-1].first, last, best)
        else:
            ranges.append(BatchRange(first, last, best))
        first = last + 1
    return ranges


def plan_rollout(
    deployment: Deployment,
    traffic: Traffic,
    *,
    num_draft_tokens: int,
    conditional_acceptance_rate: float,
    measured: MeasuredCosts | None = None,
) -> RolloutPlan:
    """Derive gates, schedule and durations.

    A stage lasts until the speculative pool has served enough requests to judge a 99th percentile, and at least an
    hour, a day, a day and a week: the mix of requests changes over them.

    Args:
        deployment: Target, head and accelerators of one replica.
        traffic: Its load.
        num_draft_tokens: ``K``, at most.
        conditional_acceptance_rate: ``α`` as measured offline, or as expected.
        measured: Measured costs at the peak, which replace the roofline's.

    Raises:
        ValueError: There is no head to roll out.
    """
    if deployment.head is None:
        raise ValueError("a rollout needs a head; leave --drafter out for the usual one")
    tau = tau_from_conditional_rate(conditional_acceptance_rate, num_draft_tokens)
    context = traffic.prompt_tokens + traffic.output_tokens // 2  # mean number of earlier tokens
    longest = traffic.prompt_tokens + traffic.output_tokens
    needed = requests_to_judge_p99()
    stages = []
    for share, least_hours in _STAGES:
        per_hour = share * traffic.requests_per_second * 3600
        hours = max(least_hours, float(math.ceil(needed / per_hour)))
        stages.append(Stage(share, hours, hours * per_hour))
    rounds = stages[0].requests * max(traffic.output_tokens - 1, 1) / tau
    peak = round_bound(deployment, batch=traffic.concurrency, context=context, num_draft_tokens=num_draft_tokens)
    costs = measured or MeasuredCosts(peak.verify_cost, peak.draft_cost)
    return RolloutPlan(
        deployment=deployment,
        traffic=traffic,
        num_draft_tokens=num_draft_tokens,
        expected=rates(tau, num_draft_tokens),
        verify_cost=costs.verify_cost,
        draft_cost=costs.draft_cost,
        measured=measured is not None,
        memory=memory_plan(deployment, batch=traffic.concurrency, context=longest, num_draft_tokens=num_draft_tokens),
        break_even_batch=break_even_batch(
            deployment, context=context, num_draft_tokens=num_draft_tokens, mean_acceptance_length=tau
        ),
        schedule=draft_schedule(
            deployment,
            conditional_acceptance_rate=conditional_acceptance_rate,
            most_draft_tokens=num_draft_tokens,
            context=context,
            largest=2 * traffic.concurrency,
        ),
        stages=stages,
        requests_for_p99=needed,
        tau_standard_error=math.sqrt(accepted_variance(conditional_acceptance_rate, num_draft_tokens) / rounds),
    )


def to_markdown(plan: RolloutPlan, *, target: str, head: str) -> str:
    """The page of a staged plan: its numbers, commands and queries in the text of ``rollout.md``.

    Args:
        plan: The numbers.
        target: Directory or hub id of the target, for the commands.
        head: Directory or hub id of the head.
    """
    traffic, deployment, k = plan.traffic, plan.deployment, plan.num_draft_tokens
    obstacles = "".join(f"- **Do not start.** {text}\n" for text in plan.obstacles)
    expected, memory = plan.expected, plan.memory
    end = "no batch" if plan.break_even_batch is None else f"{plan.break_even_batch} sequences"
    table = f"""\
| target, head | {deployment.target_name}, {deployment.head_name if deployment.head else "none"} |
| replica | {deployment.num_accelerators} x {deployment.accelerator.name}, weights {deployment.weights}, \
cache {deployment.cache} |
| traffic | {traffic.requests_per_second:g} requests/s, {traffic.prompt_tokens} + {traffic.output_tokens} tokens, \
{traffic.concurrency} sequences at the peak |
| draft | chain of K = {k} |
| expected | τ {expected.mean_acceptance_length:.2f}: draft acceptance rate {expected.draft_acceptance_rate:.2f}, \
conditional acceptance rate {expected.conditional_acceptance_rate:.2f} |
| costs at the peak | v {plan.verify_cost:.2f}, c {plan.draft_cost:.3f}, \
{"measured" if plan.measured else "from datasheets"}: break-even τ {plan.break_even_tau:.2f}, \
S {plan.predicted_speedup:.2f} |
| roofline stops paying at | {end} |
| memory at the peak | {memory.total / 1e9:.1f} of {memory.budget / 1e9:.1f} GB on each; the caches hold \
{memory.cache_capacity_tokens:,.0f} tokens |"""
    template = Path(__file__).with_name("rollout.md").read_text(encoding="utf-8")
    return template.format(
        title=deployment.target_name,
        obstacles=f"{obstacles}\n" if obstacles else "",
        facts=table,
        validate=f"pytest validation --gpu --target {shlex.quote(target)} --drafter {shlex.quote(head)}",
        doctor=f"eagle3 doctor --target {shlex.quote(target)} --drafter {shlex.quote(head)}",
        serve=_serve(plan, target=target, head=head),
        plain=_serve(plan, target=target, head=None),
        tau=plan.expected.mean_acceptance_length,
        least_tau=plan.least_tau,
        break_even=plan.break_even_tau,
        least_rate=(plan.least_tau - 1) / k,
        error=plan.tau_standard_error,
        ratio=plan.largest_time_ratio,
        needed=plan.requests_for_p99,
        stages="\n".join(f"| {stage.share:.0%} | {stage.hours:g} h | {stage.requests:,.0f} |" for stage in plan.stages),
        **_queries(plan),
    )


def _serve(plan: RolloutPlan, *, target: str, head: str | None) -> str:
    words = ["vllm", "serve", target]
    if plan.deployment.cache == "fp8":
        words += ["--kv-cache-dtype", plan.deployment.cache]
    if plan.deployment.num_accelerators > 1:
        words += ["--tensor-parallel-size", str(plan.deployment.num_accelerators)]
    if head is not None:
        settings = {"method": "eagle3", "model": head, "num_speculative_tokens": plan.num_draft_tokens}
        settings["num_speculative_tokens_per_batch_size"] = [list(part) for part in plan.schedule]
        words += ["--speculative-config", json.dumps(settings)]
    return shlex.join(words)


def _queries(plan: RolloutPlan) -> dict[str, str]:
    def rate(name: str) -> str:
        return f'sum(rate(vllm:spec_decode_{name}_total{{job="vllm-spec"}}[15m]))'

    def quantile(q: float, name: str, job: str) -> str:
        return f'histogram_quantile({q:g}, sum by (le) (rate(vllm:{name}_seconds_bucket{{job="{job}"}}[15m])))'

    accepted, drafts, drafted = rate("num_accepted_tokens"), rate("num_drafts"), rate("num_draft_tokens")
    time, first = "request_time_per_output_token", "time_to_first_token"
    per_position = 'sum by (position) (rate(vllm:spec_decode_num_accepted_tokens_per_pos_total{job="vllm-spec"}[15m]))'
    return {
        "tau_query": f"1 + {accepted}\n  / {drafts}",
        "rate_query": f"{accepted}\n  / {drafted}",
        "position_query": f"{per_position}\n  / scalar({drafts})",
        "median_query": f"{quantile(0.5, time, 'vllm-spec')}\n  / {quantile(0.5, time, 'vllm-plain')}",
        "tail_query": f"{quantile(0.99, time, 'vllm-spec')}\n  / {quantile(0.99, time, 'vllm-plain')}",
        "first_query": f"{quantile(0.99, first, 'vllm-spec')}\n  / {quantile(0.99, first, 'vllm-plain')}",
        "tau_alert": f"1 + {accepted} / {drafts} < {plan.break_even_tau:.2f}",
        "silent_alert": f'{drafts} == 0\n  and sum(rate(vllm:generation_tokens_total{{job="vllm-spec"}}[15m])) > 0',
    }
