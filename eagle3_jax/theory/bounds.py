"""The roofline of a decoding step: no hardware is faster, whoever measured it.

A forward reads every weight once, however many tokens it is given, and each sequence's keys and values; it computes
two operations for every weight and token. It takes at least the longer of the two times (Williams et al., 2009, "the
roofline model"). Verification of ``K + 1`` tokens reads what a plain step reads, which is why speculation pays until
arithmetic is short. Experts are the exception: more tokens go through more of them. Communication between accelerators,
kernel launches and the host are left out: they only make things slower. Data that stays in an on-chip cache between
steps is left out too; only models of some hundred megabytes can profit from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from eagle3_jax.theory.layer_sizes import keys_read, mixing_flops
from eagle3_jax.theory.memory import Deployment, memory_plan
from eagle3_jax.theory.sizes import DrafterSizes, Model, layer_runs, parameters
from eagle3_jax.theory.speedup import best_chain_length

_MOST_ROWS = 65_536  # batches beyond this are not searched


@dataclasses.dataclass(frozen=True)
class Work:
    """What one forward asks of each accelerator.

    Attributes:
        num_bytes: Read from and written to its memory.
        layer_flops: Operations in the layers, which run in FP8 where weights are FP8 and the hardware can.
        other_flops: Operations in attention and output projection, in bfloat16.
    """

    num_bytes: float
    layer_flops: float
    other_flops: float

    def memory_seconds(self, deployment: Deployment) -> float:
        """``bytes / bandwidth``."""
        return self.num_bytes / deployment.accelerator.bandwidth_bytes_per_second

    def compute_seconds(self, deployment: Deployment, *, quantised: bool) -> float:
        """``operations / peak``; int8 and int4 weights are widened, their products are bfloat16."""
        accelerator = deployment.accelerator
        fp8_peak = accelerator.peak_flops_fp8 if quantised and deployment.weights == "fp8" else None
        return self.layer_flops / (fp8_peak or accelerator.peak_flops) + self.other_flops / accelerator.peak_flops


def forward_work(
    deployment: Deployment,
    model: Model,
    *,
    batch: int,
    context: int,
    tokens: int,
    logits: int,
    fuse: bool = False,
    alike: bool = False,
) -> Work:
    """Bytes and operations of one forward on each accelerator.

    ``bytes = weights + B·(context + tokens)·kv``. ``operations = 2·B·(tokens·layers + logits·V·D)`` in matrices and
    ``4·B·tokens·(context + (tokens + 1)/2)·L·heads·H`` in attention: a token's query meets every earlier key and its
    own, and as many values, two operations each. A layer with a window reads no more than what its tokens see, one of
    recurrences reads and writes each sequence's state. Of experts ``E·(1 - (1 - k/E)^(B·tokens))`` a layer are read and
    every token is multiplied with ``k``.

    Args:
        deployment: Where it runs.
        model: The target or the head.
        batch: ``B`` sequences, which share no prefix.
        context: Tokens that each has behind it.
        tokens: New tokens of each.
        logits: How many of those need logits.
        fuse: Whether target features are fused, which only the first pass of an EAGLE-3 draft does, and every pass of
            other drafters.
        alike: Whether all tokens choose the same experts, in which case the fewest are read that can be.
    """
    fuse |= isinstance(model, DrafterSizes)
    n, of, runs = deployment.num_accelerators, parameters(model), layer_runs(model)
    fusion = 0 if fuse else deployment.plain_bytes * of.fusion
    cache = sum(
        batch * keys_read(run.layer.mixer, context, tokens) * deployment.run_cache_bytes(run)
        for run in runs
        if run.sizes.cache_values_per_token
    )
    weights = deployment.streamed_bytes(model, tokens=1 if alike else batch * tokens)
    layers = of.query_output + of.key_value + of.mlp + (n * of.fusion if fuse else 0)
    layers += sum(run.experts_read(1) for run in runs)
    mixing = sum(batch * run.count * mixing_flops(run.layer.mixer, context, tokens) for run in runs)
    return Work(
        num_bytes=weights - fusion + cache + 2 * batch * deployment.state_bytes(model),
        layer_flops=2 * batch * tokens * layers / n,
        other_flops=(mixing + 2 * batch * logits * of.output) / n,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundBound:
    """The least that a plain step and a round of speculation can take.

    Attributes:
        batch: Sequences at once.
        num_draft_tokens: ``K``.
        plain_seconds: One token for every sequence.
        verify_seconds: One forward of ``K + 1`` tokens for every sequence.
        draft_seconds: All passes of the drafter; 0 without one.
        draft_bytes: Read and written by them on each accelerator.
        plain_bytes: Read by the plain step on each accelerator.
        plain_flops: Computed by it.
        plain_limit: ``memory`` or ``compute``.
        verify_limit: The same of verification.
    """

    batch: int
    num_draft_tokens: int
    plain_seconds: float
    verify_seconds: float
    draft_seconds: float
    draft_bytes: float
    plain_bytes: float
    plain_flops: float
    plain_limit: str
    verify_limit: str

    @property
    def verify_cost(self) -> float:
        """``v``: verification over plain step."""
        return self.verify_seconds / self.plain_seconds

    @property
    def draft_cost(self) -> float:
        """``c``: a draft pass over plain step, the mean of the ``K``; 0 when nothing is drafted."""
        return self.draft_seconds / self.plain_seconds / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def plain_tokens_per_second(self) -> float:
        """Of all sequences together, at most."""
        return self.batch / self.plain_seconds

    def tokens_per_second(self, mean_acceptance_length: float) -> float:
        """Of all sequences together at this τ, at most: ``B·τ / (t_verify + t_draft)``."""
        return self.batch * mean_acceptance_length / (self.verify_seconds + self.draft_seconds)

    def speedup(self, mean_acceptance_length: float) -> float:
        """``S = τ / (v + K·c)`` of the two bounds."""
        return mean_acceptance_length * self.plain_seconds / (self.verify_seconds + self.draft_seconds)


def round_bound(
    deployment: Deployment, *, batch: int, context: int, num_draft_tokens: int, alike: bool = False
) -> RoundBound:
    """The roofline of a round: a forward of the target over ``K + 1`` tokens and ``K`` passes of the drafter.

    The drafter's first pass takes in the up to ``K + 1`` tokens that the last round committed and fuses their features;
    the others take one token each. Where one pass gives the whole draft it is the only one: as many rows, or a single
    one where there are no layers to keep anything (Medusa).

    Args:
        deployment: What runs where.
        batch: Sequences at once.
        context: Tokens that each has behind it.
        num_draft_tokens: ``K``; 0 for plain decoding, in which case verification is the plain step.
        alike: See :func:`forward_work`; with experts, only then is nothing faster.
    """
    if batch < 1 or context < 0 or num_draft_tokens < 0:
        raise ValueError(
            f"batch {batch}, context {context} and {num_draft_tokens} draft tokens; expected at least 1, 0 and 0"
        )
    target, head, k = deployment.target, deployment.head, num_draft_tokens
    of_batch: dict[str, Any] = {"batch": batch, "alike": alike}
    plain = forward_work(deployment, target, **of_batch, context=context, tokens=1, logits=1)
    verify = forward_work(deployment, target, **of_batch, context=context, tokens=k + 1, logits=k + 1)
    plain_times = plain.memory_seconds(deployment), plain.compute_seconds(deployment, quantised=True)
    verify_times = verify.memory_seconds(deployment), verify.compute_seconds(deployment, quantised=True)
    draft_seconds = draft_bytes = 0.0
    if head is not None and k > 0:
        at_once = isinstance(head, DrafterSizes) and head.is_parallel
        rows, logits = k + 1, k if at_once else 1
        if at_once and not layer_runs(head):
            rows = logits = 1  # the outputs of all heads are counted as one
        first = forward_work(deployment, head, **of_batch, context=context, tokens=rows, logits=logits, fuse=True)
        later = forward_work(deployment, head, **of_batch, context=context + k + 1, tokens=1, logits=1)
        more = 0 if at_once else k - 1
        draft_seconds = _seconds(first, deployment) + more * _seconds(later, deployment)
        draft_bytes = first.num_bytes + more * later.num_bytes
    return RoundBound(
        batch=batch,
        num_draft_tokens=k,
        plain_seconds=max(plain_times),
        verify_seconds=max(verify_times),
        draft_seconds=draft_seconds,
        draft_bytes=draft_bytes,
        plain_bytes=plain.num_bytes,
        plain_flops=plain.layer_flops + plain.other_flops,
        plain_limit=_limit(*plain_times),
        verify_limit=_limit(*verify_times),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodesBound:
    """What a verification of so many nodes costs where there are experts.

    Attributes:
        num_nodes: Tokens of each sequence in one forward, the root included.
        experts: The share of all experts that they read.
        num_bytes: Read on each accelerator.
        cost: ``v``: of the forward over the plain step.
    """

    num_nodes: int
    experts: float
    num_bytes: float
    cost: float


def nodes_bounds(deployment: Deployment, *, batch: int, context: int, nodes: Sequence[int]) -> list[NodesBound]:
    """The verification of drafts of several sizes, chains or trees: the more nodes, the more experts are read.

    Args:
        deployment: What runs where.
        batch: Sequences at once.
        context: Tokens that each has behind it.
        nodes: Sizes of drafts, roots included.
    """
    runs = [run for run in layer_runs(deployment.target) if run.sizes.experts]
    held = sum(run.sizes.experts for run in runs)
    bounds = [round_bound(deployment, batch=batch, context=context, num_draft_tokens=size - 1) for size in nodes]
    return [
        NodesBound(
            num_nodes=size,
            experts=sum(run.experts_read(batch * size) for run in runs) / held if held else 1.0,
            num_bytes=forward_work(
                deployment, deployment.target, batch=batch, context=context, tokens=size, logits=size
            ).num_bytes,
            cost=bound.verify_cost,
        )
        for size, bound in zip(nodes, bounds, strict=True)
    ]


def best_chain(
    deployment: Deployment, *, batch: int, context: int, conditional_acceptance_rate: float, longest: int = 8
) -> int:
    """The ``K`` of the largest speed-up on the roofline, up to ``longest``; 0 where none exceeds 1."""
    bounds = [round_bound(deployment, batch=batch, context=context, num_draft_tokens=k) for k in range(1, longest + 1)]
    return best_chain_length(
        conditional_acceptance_rate,
        verify_costs=[bound.verify_cost for bound in bounds],
        draft_costs=[bound.draft_cost for bound in bounds],
    )


def _seconds(work: Work, deployment: Deployment) -> float:
    return max(work.memory_seconds(deployment), work.compute_seconds(deployment, quantised=False))


def _limit(memory_seconds: float, compute_seconds: float) -> str:
    return "memory" if memory_seconds >= compute_seconds else "compute"


def pays_from_batch(
    deployment: Deployment, *, context: int, num_draft_tokens: int, mean_acceptance_length: float
) -> int | None:
    """The smallest batch at which speculation pays, ``τ > v(B) + K·c(B)``; ``None`` when it pays at none.

    It is 1 for dense targets. With experts verification reads more of them than a plain step does, until a batch reads
    most of them anyway.
    """
    pays = _pays(deployment, context, num_draft_tokens, mean_acceptance_length)
    power = next((2**exponent for exponent in range(17) if pays(2**exponent)), None)
    return None if power is None else _first(pays, after=power // 2)


def break_even_batch(
    deployment: Deployment, *, context: int, num_draft_tokens: int, mean_acceptance_length: float
) -> int | None:
    """The batch from which speculation no longer pays: ``τ <= v(B) + K·c(B)``, and it did before.

    ``v`` grows with the batch from 1 towards ``K + 1`` as arithmetic becomes the limit; long contexts delay that, since
    every sequence brings keys and values to be read. The times are rooflines: a real engine reaches the point earlier.

    Returns:
        The batch, 1 when speculation pays at none, or ``None`` when it pays up to 65,536.
    """
    pays = _pays(deployment, context, num_draft_tokens, mean_acceptance_length)
    first = pays_from_batch(
        deployment,
        context=context,
        num_draft_tokens=num_draft_tokens,
        mean_acceptance_length=mean_acceptance_length,
    )
    return 1 if first is None else _first(lambda batch: not pays(batch), after=first)


def _pays(deployment: Deployment, context: int, num_draft_tokens: int, tau: float) -> Callable[[int], bool]:
    def pays(batch: int) -> bool:
        bound = round_bound(deployment, batch=batch, context=context, num_draft_tokens=num_draft_tokens)
        return bound.speedup(tau) > 1.0

    return pays


def batch_needed(deployment: Deployment, *, tokens_per_second: float, context: int) -> int | None:
    """The smallest batch whose plain roofline reaches a throughput, experts alike; ``None`` when none does."""

    def reaches(batch: int) -> bool:
        bound = round_bound(deployment, batch=batch, context=context, num_draft_tokens=0, alike=True)
        return bound.plain_tokens_per_second >= tokens_per_second

    return _first(reaches)


def largest_batch(deployment: Deployment, *, context: int, num_draft_tokens: int, utilization: float = 0.9) -> int:
    """The most sequences of ``context`` tokens that fit into memory; 0 when none does, 65,536 when there is no end."""

    def too_large(batch: int) -> bool:
        plan = memory_plan(
            deployment, batch=batch, context=context, num_draft_tokens=num_draft_tokens, utilization=utilization
        )
        return not plan.fits

    first = _first(too_large)
    return _MOST_ROWS if first is None else first - 1


def _first(holds: Callable[[int], bool], *, after: int = 0) -> int | None:
    """The smallest batch for which a condition holds that stays true once it is, among those after one."""
    low, high = after, max(2 * after, 1)
    while not holds(high):
        if high >= _MOST_ROWS:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A published throughput beside what physics allows.

    Attributes:
        tokens_per_second: What is claimed, of all sequences together.
        bound: The most that is possible at this batch, every draft token accepted.
        batch_needed: Smallest batch at which plain decoding could reach it; ``None`` when none could.
    """

    tokens_per_second: float
    bound: float
    batch_needed: int | None

    @property
    def share_of_bound(self) -> float:
        """Above 1 the claim, or its description, is wrong."""
        return self.tokens_per_second / self.bound

    @property
    def possible(self) -> bool:
        """Whether it could be true."""
        return self.share_of_bound <= 1.0


def check_claim(
    deployment: Deployment, *, tokens_per_second: float, batch: int, context: int, num_draft_tokens: int
) -> Claim:
    """Compare a claimed throughput with the roofline at ``τ = K + 1``, which no drafter can exceed.

    The time of drafting is left out, so that the verdict holds for every drafter, and of experts only those are counted
    that a single token needs, so that it holds for every text.
    """
    if not 0 < tokens_per_second < math.inf:
        raise ValueError(f"a claim of {tokens_per_second:g} tokens/s; expected a positive number")
    bound = round_bound(deployment, batch=batch, context=context, num_draft_tokens=num_draft_tokens, alike=True)
    return Claim(
        tokens_per_second=tokens_per_second,
        bound=batch * (num_draft_tokens + 1) / bound.verify_seconds,
        batch_needed=batch_needed(deployment, tokens_per_second=tokens_per_second, context=context),
    )
