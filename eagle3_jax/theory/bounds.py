"""The roofline of a decoding step: the time that no implementation on this hardware can beat.

A forward reads every weight once, however many tokens it is given, and each sequence's keys and values. It computes two
operations for every weight and token. It takes at least the longer of the two times (Williams et al., 2009, "the
roofline model"). Verification of ``K + 1`` tokens reads what a plain step reads, which is why speculation pays off
until arithmetic is the limit. Experts are the exception: more tokens go through more of them. Communication between
accelerators, kernel launches and the host are left out; they only make things slower. Data that stays in an on-chip
cache between steps is left out too; only models of some hundred megabytes can profit from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from eagle3_jax.models.config import GatedDelta, GroupedQuery, Latent, Mixer
from eagle3_jax.theory.memory import Deployment, memory_plan
from eagle3_jax.theory.sizes import Model, sizes_of
from eagle3_jax.theory.speedup import best_chain_length

_MOST_ROWS = 65_536  # upper end of the search for a batch size


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes and operations of one forward on each accelerator.

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

    def seconds(self, deployment: Deployment) -> float:
        """The longer of the two times."""
        return max(self.memory_seconds(deployment), self.compute_seconds(deployment, quantised=True))

    def limit(self, deployment: Deployment) -> str:
        """``memory`` or ``compute``, whichever takes longer."""
        compute = self.compute_seconds(deployment, quantised=True)
        return "memory" if self.memory_seconds(deployment) >= compute else "compute"


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
    own, and as many values, two operations each. A layer with a window reads no more than its tokens see; a recurrent
    layer reads and writes each sequence's state. Of experts ``E·(1 - (1 - k/E)^(B·tokens))`` a layer are read and every
    token is multiplied with ``k``.

    Args:
        deployment: Models and accelerators.
        model: The target or the head.
        batch: ``B`` sequences, which share no prefix.
        context: Earlier tokens of each sequence.
        tokens: New tokens of each sequence.
        logits: Number of new tokens that need logits.
        fuse: Whether target features are fused: in the first pass of an EAGLE-3 draft. Other drafters fuse in every
            pass, whatever this says.
        alike: Whether all tokens choose the same experts, in which case the fewest possible are read.
    """
    sizes, n = sizes_of(model), deployment.num_accelerators
    read, fuse = sizes.read, fuse or not sizes.fuses_once
    fusion = 0 if fuse else deployment.fusion_bytes(model)
    cache = sum(
        batch * keys_read(run.layer.mixer, context, tokens) * deployment.run_cache_bytes(run)
        for run in sizes.runs
        if run.cache_values_per_token
    )
    weights = deployment.streamed_bytes(model, tokens=1 if alike else batch * tokens)
    layers = read.query_output + read.key_value + read.mlp + (n * read.fusion if fuse else 0)
    layers += sum(run.experts_read(1) for run in sizes.runs)
    mixing = sum(batch * run.count * mixing_flops(run.layer.mixer, context, tokens) for run in sizes.runs)
    return Work(
        num_bytes=weights - fusion + cache + 2 * batch * deployment.state_bytes(model),
        layer_flops=2 * batch * tokens * layers / n,
        other_flops=(mixing + 2 * batch * logits * read.output) / n,
    )


def keys_read(mixer: Mixer, context: int, tokens: int) -> int:
    """Keys of a sequence that any of its new tokens attends to, the new ones included; none in a recurrent layer."""
    if isinstance(mixer, GatedDelta):
        return 0
    if isinstance(mixer, GroupedQuery) and mixer.window is not None:
        return min(context, mixer.window - 1) + tokens
    if isinstance(mixer, GroupedQuery) and mixer.chunk is not None:
        return context % mixer.chunk + tokens
    return context + tokens


def mixing_flops(mixer: Mixer, context: int, tokens: int) -> float:
    """Operations in which new tokens meet earlier tokens and each other, or a recurrent state.

    In attention ``4·heads·H`` for every pair of a query and a key that it attends to: a product with the key and one
    with the value. With latents ``2·heads·(2·r + dr)``, in the absorbed form. In a recurrent layer ``6·Hv·dk·dv`` for
    every token: reading the state for its key, updating it, and reading it for its query.
    """
    if isinstance(mixer, GatedDelta):
        return 6.0 * tokens * mixer.num_value_heads * mixer.key_dim * mixer.value_dim
    pairs = _pairs(mixer, context, tokens)
    if isinstance(mixer, Latent):
        return 2.0 * pairs * mixer.num_heads * (2 * mixer.kv_rank + mixer.rope_dim)
    return 4.0 * pairs * mixer.num_heads * mixer.head_dim


def _pairs(mixer: GroupedQuery | Latent, context: int, tokens: int) -> float:
    """Number of pairs of a query and a key that it attends to."""
    window = mixer.window if isinstance(mixer, GroupedQuery) else None
    if isinstance(mixer, GroupedQuery) and mixer.chunk is not None:
        return float(sum(position % mixer.chunk + 1 for position in range(context, context + tokens)))
    whole = tokens if window is None else min(max(window - context, 0), tokens)  # the first ones, which see everything
    return whole * (context + (whole + 1) / 2) + (tokens - whole) * (window or 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundBound:
    """The shortest possible times of a plain step and of a round of speculation.

    Attributes:
        batch: Sequences at once.
        num_draft_tokens: ``K``.
        plain_seconds: One token for every sequence.
        verify_seconds: One forward of ``K + 1`` tokens for every sequence.
        draft_seconds: All passes of the drafter; 0 without one.
        draft_bytes: Bytes that the drafter's passes move on each accelerator.
        plain_bytes: Bytes that the plain step reads on each accelerator.
        plain_flops: Operations of the plain step on each accelerator.
        plain_limit: ``memory`` or ``compute``.
        verify_limit: The same for verification.
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
        """Upper bound of plain decoding, all sequences together."""
        return self.batch / self.plain_seconds

    def tokens_per_second(self, mean_acceptance_length: float) -> float:
        """Upper bound at this τ, all sequences together: ``B·τ / (t_verify + t_draft)``."""
        return self.batch * mean_acceptance_length / (self.verify_seconds + self.draft_seconds)

    def speedup(self, mean_acceptance_length: float) -> float:
        """``S = τ / (v + K·c)`` of the two bounds."""
        return mean_acceptance_length * self.plain_seconds / (self.verify_seconds + self.draft_seconds)


def round_bound(
    deployment: Deployment, *, batch: int, context: int, num_draft_tokens: int, alike: bool = False
) -> RoundBound:
    """The roofline of a round: a forward of the target over ``K + 1`` tokens and ``K`` passes of the drafter.

    The drafter's first pass takes in the up to ``K + 1`` tokens that the last round committed and fuses their features;
    the others take one token each. A drafter that proposes the whole draft in one pass has only the first. It takes as
    many rows, or a single one if the drafter has no layers that keep anything (Medusa).

    Args:
        deployment: Models and accelerators.
        batch: Sequences at once.
        context: Earlier tokens of each sequence.
        num_draft_tokens: ``K``; 0 for plain decoding, in which case verification is the plain step.
        alike: See :func:`forward_work`; with experts, the result is a bound for every text only if this is true.
    """
    if batch < 1 or context < 0 or num_draft_tokens < 0:
        raise ValueError(
            f"batch {batch}, context {context} and {num_draft_tokens} draft tokens; expected at least 1, 0 and 0"
        )
    target, head, k = deployment.target, deployment.head, num_draft_tokens
    of_batch: dict[str, Any] = {"batch": batch, "alike": alike}
    plain = forward_work(deployment, target, **of_batch, context=context, tokens=1, logits=1)
    verify = forward_work(deployment, target, **of_batch, context=context, tokens=k + 1, logits=k + 1)
    passes: list[Work] = []
    if head is not None and k > 0:
        sizes = sizes_of(head)
        rows, logits = k + 1, k if sizes.is_parallel else 1
        if sizes.is_parallel and not sizes.runs:
            rows = logits = 1  # the outputs of all heads are counted as one
        passes = [forward_work(deployment, head, **of_batch, context=context, tokens=rows, logits=logits, fuse=True)]
        if not sizes.is_parallel:
            later = forward_work(deployment, head, **of_batch, context=context + k + 1, tokens=1, logits=1)
            passes += [later] * (k - 1)
    return RoundBound(
        batch=batch,
        num_draft_tokens=k,
        plain_seconds=plain.seconds(deployment),
        verify_seconds=verify.seconds(deployment),
        draft_seconds=sum((one.seconds(deployment) for one in passes), 0.0),
        draft_bytes=sum((one.num_bytes for one in passes), 0.0),
        plain_bytes=plain.num_bytes,
        plain_flops=plain.layer_flops + plain.other_flops,
        plain_limit=plain.limit(deployment),
        verify_limit=verify.limit(deployment),
    )


def experts_read(deployment: Deployment, *, batch: int, nodes: int) -> float:
    """Share of the target's experts that verification of drafts of ``nodes`` tokens reads, the root included."""
    target = sizes_of(deployment.target)
    return sum(run.experts_read(batch * nodes) for run in target.runs) / target.read.experts


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


def pays_from_batch(
    deployment: Deployment, *, context: int, num_draft_tokens: int, mean_acceptance_length: float
) -> int | None:
    """The smallest batch at which speculation pays off, ``τ > v(B) + K·c(B)``; ``None`` if there is none.

    It is 1 for dense targets. With experts verification reads more of them than a plain step does, until a batch reads
    most of them anyway.
    """
    pays = _pays(deployment, context, num_draft_tokens, mean_acceptance_length)
    power = next((2**exponent for exponent in range(17) if pays(2**exponent)), None)
    return None if power is None else _first(pays, after=power // 2)


def break_even_batch(
    deployment: Deployment, *, context: int, num_draft_tokens: int, mean_acceptance_length: float
) -> int | None:
    """The batch from which speculation no longer pays off: ``τ <= v(B) + K·c(B)``, and it did before.

    ``v`` grows with the batch from 1 towards ``K + 1`` as arithmetic becomes the limit; long contexts delay that, since
    every sequence brings keys and values to be read. The times are rooflines: a real engine reaches the point earlier.

    Returns:
        The batch, 1 when speculation pays off at none, or ``None`` when it pays off up to 65,536.
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
    """The smallest batch above ``after`` for which a condition holds, which stays true from there on."""
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
    """A published throughput compared with the roofline.

    Attributes:
        tokens_per_second: The claimed throughput, all sequences together.
        bound: Upper bound at this batch, every draft token accepted.
        batch_needed: Smallest batch at which plain decoding could reach it; ``None`` when none could.
    """

    tokens_per_second: float
    bound: float
    batch_needed: int | None

    @property
    def share_of_bound(self) -> float:
        """The claim over the bound; above 1 the claim, or its description, is wrong."""
        return self.tokens_per_second / self.bound

    @property
    def possible(self) -> bool:
        """Whether the claim is within the bound."""
        return self.share_of_bound <= 1.0


def check_claim(
    deployment: Deployment, *, tokens_per_second: float, batch: int, context: int, num_draft_tokens: int
) -> Claim:
    """Compare a claimed throughput with the roofline at ``τ = K + 1``, which no drafter can exceed.

    The time of drafting is left out, so that the verdict holds for every drafter. Only the experts that a single token
    needs are counted, so that it holds for every text.
    """
    if not 0 < tokens_per_second < math.inf:
        raise ValueError(f"a claim of {tokens_per_second:g} tokens/s; expected a positive number")
    asked: dict[str, Any] = {"context": context, "alike": True}

    def reached(rows: int) -> bool:
        plain = round_bound(deployment, batch=rows, num_draft_tokens=0, **asked)
        return plain.plain_tokens_per_second >= tokens_per_second

    verify_seconds = round_bound(deployment, batch=batch, num_draft_tokens=num_draft_tokens, **asked).verify_seconds
    return Claim(
        tokens_per_second=tokens_per_second,
        bound=batch * (num_draft_tokens + 1) / verify_seconds,
        batch_needed=_first(reached),
    )
