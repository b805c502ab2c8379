"""A staged plan for a rollout of speculation, with gates from the model and its traffic."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import NamedTuple

from eagle3_jax.theory.bounds import best_chain, break_even_batch, round_bound
from eagle3_jax.theory.memory import Deployment, MemoryPlan, memory_plan
from eagle3_jax.theory.speedup import Rates, rates, round_cost, tau_from_conditional_rate

#: Number of requests after which the share that is slower than the plain pool's 99th percentile is
#: known to a quarter of a percent with 95 % confidence, ``n = z² p(1-p) / h²`` with ``p`` = 1 % and
#: ``h`` = 0.25 %.
REQUESTS_FOR_P99 = math.ceil(1.96**2 * 0.01 * (1 - 0.01) / 0.0025**2)
# Share of traffic, and least hours.
_STAGES = ((0.01, 1.0), (0.1, 24.0), (0.5, 24.0), (1.0, 168.0))


class Traffic(NamedTuple):
    """The load of the deployment."""

    requests_per_second: float  #: Average over a day.
    prompt_tokens: int  #: Mean length of a prompt.
    output_tokens: int  #: Mean length of an answer.
    concurrency: int  #: Sequences decoded at once at the daily peak, on one replica.


class MeasuredCosts(NamedTuple):
    """Costs ``v`` and ``c`` of a round at the daily peak, in plain steps."""

    verify_cost: float
    draft_cost: float


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of the rollout."""

    share: float  #: Share of the requests that the speculative pool serves.
    hours: float  #: Minimum duration.
    requests: float  #: Number of requests that the pool serves in that time.


class BatchRange(NamedTuple):
    """Chain length ``K`` for batches from ``first`` to ``last``, both included; 0: no draft."""

    first: int
    last: int
    num_draft_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """Every number of the plan."""

    deployment: Deployment  #: Models and accelerators of one replica.
    traffic: Traffic  #: Its load.
    num_draft_tokens: int  #: ``K``.
    memory: MemoryPlan  #: On each accelerator at the peak.
    expected: Rates  #: Rates that offline measurement must confirm.
    verify_cost: float  #: ``v`` at the daily peak.
    draft_cost: float  #: ``c`` at the daily peak.
    #: Whether both costs were measured; otherwise they are the roofline's, the best case.
    measured: bool
    #: ``v + K·c`` at the peak; with a smaller τ speculation slows the service down.
    break_even_tau: float
    least_tau: float  #: The gate on τ, halfway from break-even to the expected τ.
    #: The gate on the median time per output token over that of the plain pool, half of the
    #: predicted saving.
    largest_time_ratio: float
    #: ``S = τ / (v + K·c)`` at the peak; at most that, where costs are the roofline's.
    predicted_speedup: float
    #: Batch at which speculation stops paying off on the roofline; ``None`` if there is none.
    break_even_batch: int | None
    obstacles: list[str]  #: Reasons not to start the rollout.
    schedule: list[BatchRange]  #: Chain length by batch.
    stages: list[Stage]  #: Shares of traffic and their minimum duration.


def draft_schedule(
    deployment: Deployment,
    *,
    conditional_acceptance_rate: float,
    most_draft_tokens: int,
    context: int,
    largest: int,
) -> list[BatchRange]:
    """Returns the best ``K`` up to a limit for every batch, by the roofline.

    Each range reaches from a power of two to the next and takes the smaller ``K`` of both ends.
    """
    options = {
        "conditional_acceptance_rate": conditional_acceptance_rate,
        "longest": most_draft_tokens,
    }

    ranges: list[BatchRange] = []
    for power in range(largest.bit_length()):
        first = 2**power
        last = min(2 * first - 1, largest)
        best = min(
            best_chain(deployment, batch=batch, context=context, **options)
            for batch in {first, last}
        )
        # Equal neighbors are one range.
        start = ranges.pop().first if ranges and ranges[-1].num_draft_tokens == best else first
        ranges.append(BatchRange(start, last, best))
    return ranges


def plan_rollout(
    deployment: Deployment,
    traffic: Traffic,
    *,
    num_draft_tokens: int,
    conditional_acceptance_rate: float,
    measured: MeasuredCosts | None = None,
) -> RolloutPlan:
    """Computes gates, schedule and durations.

    A stage lasts until the speculative pool has served enough requests to judge a 99th percentile,
    and at least an hour, a day, a day and a week: the mix of requests changes over them.

    Args:
        deployment: Target, head and accelerators of one replica.
        traffic: Its load.
        num_draft_tokens: ``K``, at most.
        conditional_acceptance_rate: ``α`` as measured offline, or as expected.
        measured: Measured costs at the peak, which replace the roofline's.

    Raises:
        ValueError: There is no head to roll out, or no request.
    """
    if deployment.head is None:
        raise ValueError("a rollout needs a head; leave --drafter out for the usual one")
    if traffic.requests_per_second <= 0:
        raise ValueError(
            f"requests_per_second is {traffic.requests_per_second:g}; expected a positive number"
        )

    k = num_draft_tokens
    alpha = conditional_acceptance_rate
    batch = traffic.concurrency
    tau = tau_from_conditional_rate(alpha, k)
    # The mean number of earlier tokens.
    context = traffic.prompt_tokens + traffic.output_tokens // 2
    bound = round_bound(deployment, batch=batch, context=context, num_draft_tokens=k)
    v, c = measured or (bound.verify_cost, bound.draft_cost)
    even = round_cost(k, verify_cost=v, draft_cost=c)
    longest = traffic.prompt_tokens + traffic.output_tokens
    memory = memory_plan(deployment, batch=batch, context=longest, num_draft_tokens=k)

    obstacles = []
    if not memory.fits:
        obstacles.append(
            f"memory: {memory.total / 1e9:.1f} GB needed, {memory.budget / 1e9:.1f} GB may be used"
        )
    if tau <= even:
        obstacles.append(
            f"speed: τ {tau:.2f} is below the {even:.2f} that a round costs at {batch} sequences"
        )

    return RolloutPlan(
        deployment=deployment,
        traffic=traffic,
        num_draft_tokens=k,
        memory=memory,
        expected=rates(tau, k),
        verify_cost=v,
        draft_cost=c,
        measured=measured is not None,
        break_even_tau=even,
        least_tau=(even + tau) / 2,
        largest_time_ratio=1.0 - (1.0 - even / tau) / 2,
        predicted_speedup=tau / even,
        break_even_batch=break_even_batch(
            deployment, context=context, num_draft_tokens=k, mean_acceptance_length=tau
        ),
        obstacles=obstacles,
        schedule=draft_schedule(
            deployment,
            conditional_acceptance_rate=alpha,
            most_draft_tokens=k,
            context=context,
            largest=2 * batch,
        ),
        stages=[_stage(share, least_hours, traffic) for share, least_hours in _STAGES],
    )


def _stage(share: float, least_hours: float, traffic: Traffic) -> Stage:
    per_hour = share * traffic.requests_per_second * 3600
    hours = max(least_hours, float(math.ceil(REQUESTS_FOR_P99 / per_hour)))
    return Stage(share, hours, hours * per_hour)


def to_markdown(plan: RolloutPlan, *, target: str, head: str) -> str:
    """Returns the page of a staged plan: its numbers and commands in the text of ``rollout.md``.

    Args:
        plan: The numbers.
        target: Directory or hub id of the target, for the commands.
        head: Directory or hub id of the head.
    """
    plain = ["vllm", "serve", target]
    if plan.deployment.cache == "fp8":
        plain += ["--kv-cache-dtype", plan.deployment.cache]
    if plan.deployment.num_accelerators > 1:
        plain += ["--tensor-parallel-size", str(plan.deployment.num_accelerators)]

    settings = {"method": "eagle3", "model": head, "num_speculative_tokens": plan.num_draft_tokens}
    settings["num_speculative_tokens_per_batch_size"] = [list(part) for part in plan.schedule]
    obstacles = "".join(f"- **Do not start.** {text}\n" for text in plan.obstacles)
    stages = [
        f"| {stage.share:.0%} | {stage.hours:g} h | {stage.requests:,.0f} |"
        for stage in plan.stages
    ]

    template = Path(__file__).with_name("rollout.md").read_text(encoding="utf-8")
    return template.format(
        plan=plan,
        obstacles=f"{obstacles}\n" if obstacles else "",
        source="measured" if plan.measured else "from datasheets",
        end="no batch" if plan.break_even_batch is None else f"{plan.break_even_batch} sequences",
        needed_gb=plan.memory.total / 1e9,
        budget_gb=plan.memory.budget / 1e9,
        pair=shlex.join(["--target", target, "--drafter", head]),
        plain=shlex.join(plain),
        serve=shlex.join([*plain, "--speculative-config", json.dumps(settings)]),
        least_rate=(plan.least_tau - 1) / plan.num_draft_tokens,
        requests_for_p99=REQUESTS_FOR_P99,
        stages="\n".join(stages),
    )
