"""The roofline of a decoding step: the time that no implementation on this hardware can beat.

A forward reads every weight once, for any number of tokens, and each sequence's keys and values. It
computes two operations for every weight and token. It takes at least the longer of the two times
(Williams et al., 2009, "the roofline model"). Verification of ``K + 1`` tokens reads what a plain
step reads, which is why speculation pays off until arithmetic is the limit. Experts are the
exception: more tokens go through more of them. Communication between accelerators, kernel launches
and the host are left out; they only add time. Data that stays in an on-chip cache between steps is
left out too; only models of some hundred megabytes can profit from it.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from functools import partial

from eagle3_jax.models.config import GatedDelta, GroupedQuery, Latent, Mixer
from eagle3_jax.theory.memory import Deployment, memory_plan
from eagle3_jax.theory.sizes import Model, sizes_of
from eagle3_jax.theory.speedup import best_chain_length

# Upper end of the search for a batch size.
_MOST_ROWS = 65_536


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes and operations of one forward on each accelerator."""

    num_bytes: float  #: Read from and written to its memory.
    #: Operations in the layers, which run in FP8 where weights are FP8 and the hardware can.
    layer_flops: float
    other_flops: float  #: Operations in attention and output projection, in bfloat16.

    def memory_seconds(self, deployment: Deployment) -> float:
        """``bytes / bandwidth``."""
        return self.num_bytes / deployment.accelerator.bandwidth_bytes_per_second

    def compute_seconds(self, deployment: Deployment) -> float:
        """``operations / peak``; int8 and int4 weights are widened, their products are bfloat16."""
        accelerator = deployment.accelerator
        fp8_peak = accelerator.peak_flops_fp8 if deployment.weights == "fp8" else None
        return (
            self.layer_flops / (fp8_peak or accelerator.peak_flops)
            + self.other_flops / accelerator.peak_flops
        )

    def seconds(self, deployment: Deployment) -> float:
        """Returns the longer of the two times."""
        return max(self.memory_seconds(deployment), self.compute_seconds(deployment))

    def limit(self, deployment: Deployment) -> str:
        """Returns ``memory`` or ``compute``, the one that takes longer."""
        is_memory = self.memory_seconds(deployment) >= self.compute_seconds(deployment)
        return "memory" if is_memory else "compute"


def forward_work(
    deployment: Deployment,
    model: Model,
    *,
    batch: int,
    context: int,
    tokens: int,
    logits: int,
    fuse: bool = False,
    same_experts: bool = False,
) -> Work:
    """Counts bytes and operations of one forward on each accelerator.

    ``bytes = weights + B·(context + tokens)·kv``. ``operations = 2·B·(tokens·layers + logits·V·D)``
    in matrices and ``4·B·tokens·(context + (tokens + 1)/2)·L·heads·H`` in attention: a token's
    query meets every earlier key and its own, and as many values, two operations each. A layer with
    a window reads no more than its tokens see; a recurrent layer reads and writes each sequence's
    state. Of experts ``E·(1 - (1 - k/E)^(B·tokens))`` a layer are read and every token is
    multiplied with ``k``.

    Args:
        deployment: Models and accelerators.
        model: The target or the head.
        batch: ``B`` sequences, which share no prefix.
        context: Earlier tokens of each sequence.
        tokens: New tokens of each sequence.
        logits: Number of new tokens that need logits.
        fuse: Whether target features are fused, as in the first pass of an EAGLE-3 draft. Other
            drafters fuse in every pass, with either value.
        same_experts: Whether all tokens choose the same experts, in which case the fewest possible
            are read.
    """
    sizes = sizes_of(model)
    n = deployment.num_accelerators
    read = sizes.read
    fuse = fuse or not sizes.fuses_once
    weights = deployment.streamed_bytes(
        model, tokens=1 if same_experts else batch * tokens, fuse=fuse
    )

    # The fusion is not divided: every accelerator multiplies with all of it.
    matrices = read.query_output + read.key_value + read.mlp + (n * read.fusion if fuse else 0)
    keys = mixing = 0.0
    for equal in sizes.layers:
        mixer = equal.layer.mixer
        matrices += equal.experts_read(1)
        keys += keys_read(mixer, context, tokens) * deployment.layer_cache_bytes(equal)
        mixing += equal.number * mixing_flops(mixer, context, tokens)

    return Work(
        num_bytes=weights + batch * (keys + 2 * deployment.state_bytes(model)),
        layer_flops=2 * batch * tokens * matrices / n,
        other_flops=batch * (mixing + 2 * logits * read.output) / n,
    )


def _keys_of_each(mixer: GroupedQuery | Latent, context: int, tokens: int) -> list[int]:
    """Counts the keys that each new token attends to, its own included."""
    seen = range(context + 1, context + tokens + 1)
    if isinstance(mixer, GroupedQuery) and mixer.chunk is not None:
        return [(number - 1) % mixer.chunk + 1 for number in seen]
    if isinstance(mixer, GroupedQuery) and mixer.window is not None:
        return [min(number, mixer.window) for number in seen]
    return list(seen)


def keys_read(mixer: Mixer, context: int, tokens: int) -> int:
    """Counts the keys that new tokens attend to, the new ones included.

    A recurrent layer has none.
    """
    if isinstance(mixer, GatedDelta):
        return 0
    # Each later token adds its own key to those that the first one attends to.
    (of_first_token,) = _keys_of_each(mixer, context, 1)
    return of_first_token + tokens - 1


def mixing_flops(mixer: Mixer, context: int, tokens: int) -> float:
    """Counts the operations of attention, or of a recurrent state, for new tokens.

    In attention ``4·heads·H`` for every pair of a query and a key that it attends to: a product
    with the key and one with the value. With latents ``2·heads·(2·r + dr)``, in the absorbed form.
    In a recurrent layer ``6·Hv·dk·dv`` for every token: reading the state for its key, updating it,
    and reading it for its query.
    """
    if isinstance(mixer, GatedDelta):
        return 6.0 * tokens * mixer.num_value_heads * mixer.key_dim * mixer.value_dim
    width = 2 * mixer.kv_rank + mixer.rope_dim if isinstance(mixer, Latent) else 2 * mixer.head_dim
    return 2.0 * sum(_keys_of_each(mixer, context, tokens)) * mixer.num_heads * width


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundBound:
    """The shortest possible times of a plain step and of a round of speculation."""

    batch: int  #: Sequences at once.
    num_draft_tokens: int  #: ``K``.
    plain_seconds: float  #: One token for every sequence.
    verify_seconds: float  #: One forward of ``K + 1`` tokens for every sequence.
    draft_seconds: float  #: All passes of the drafter; 0 without one.
    draft_bytes: float  #: Bytes that the drafter's passes move on each accelerator.
    plain_bytes: float  #: Bytes that the plain step reads on each accelerator.
    plain_flops: float  #: Operations of the plain step on each accelerator.
    plain_limit: str  #: ``memory`` or ``compute``.
    verify_limit: str  #: The same for verification.

    @property
    def verify_cost(self) -> float:
        """``v``: verification over plain step."""
        return self.verify_seconds / self.plain_seconds

    @property
    def draft_cost(self) -> float:
        """``c``: a draft pass over plain step, the mean of the ``K``; 0 when nothing is drafted."""
        if not self.num_draft_tokens:
            return 0.0
        return self.draft_seconds / self.plain_seconds / self.num_draft_tokens

    @property
    def plain_tokens_per_second(self) -> float:
        """Upper bound of plain decoding, all sequences together."""
        return self.batch / self.plain_seconds

    def tokens_per_second(self, mean_acceptance_length: float) -> float:
        """Upper bound at this τ, all sequences together: ``B·τ / (t_verify + t_draft)``."""
        return self.batch * mean_acceptance_length / (self.verify_seconds + self.draft_seconds)

    def speedup(self, mean_acceptance_length: float) -> float:
        """``S = τ / (v + K·c)`` of the two bounds."""
        return (
            mean_acceptance_length * self.plain_seconds / (self.verify_seconds + self.draft_seconds)
        )


def round_bound(
    deployment: Deployment,
    *,
    batch: int,
    context: int,
    num_draft_tokens: int,
    same_experts: bool = False,
) -> RoundBound:
    """Computes the roofline of a round.

    A round is a forward of the target over ``K + 1`` tokens and ``K`` passes of the drafter. The
    drafter's first pass takes in the up to ``K + 1`` tokens that the last round committed and fuses
    their features; the others take one token each. A drafter that proposes the whole draft in one
    pass has only the first. It takes as many rows, or a single one if the drafter has no layers
    that keep anything (Medusa).

    Args:
        deployment: Models and accelerators.
        batch: Sequences at once.
        context: Earlier tokens of each sequence.
        num_draft_tokens: ``K``; 0 for plain decoding, in which case verification is the plain step.
        same_experts: As in :func:`forward_work`. With experts, the result bounds every text only if
            this is true.
    """
    k = num_draft_tokens
    work = partial(forward_work, deployment, batch=batch, same_experts=same_experts)
    target = deployment.target
    plain = work(target, context=context, tokens=1, logits=1)
    verify = work(target, context=context, tokens=k + 1, logits=k + 1)

    passes: list[Work] = []
    if deployment.head is not None and k > 0:
        head = sizes_of(deployment.head)
        rows = k + 1
        logits = k if head.is_parallel else 1
        if head.is_parallel and not head.layers:
            # The outputs of all heads are counted as one.
            rows = logits = 1
        passes = [work(head, context=context, tokens=rows, logits=logits, fuse=True)]
        if not head.is_parallel:
            passes += [work(head, context=context + k + 1, tokens=1, logits=1)] * (k - 1)

    return RoundBound(
        batch=batch,
        num_draft_tokens=k,
        plain_seconds=plain.seconds(deployment),
        verify_seconds=verify.seconds(deployment),
        draft_seconds=sum((forward.seconds(deployment) for forward in passes), 0.0),
        draft_bytes=sum((forward.num_bytes for forward in passes), 0.0),
        plain_bytes=plain.num_bytes,
        plain_flops=plain.layer_flops + plain.other_flops,
        plain_limit=plain.limit(deployment),
        verify_limit=verify.limit(deployment),
    )


def experts_read(deployment: Deployment, *, batch: int, nodes: int) -> float:
    """Returns the share of the target's experts that verification reads.

    ``nodes`` counts the tokens of a sequence that are verified, the root included.
    """
    target = sizes_of(deployment.target)
    return sum(equal.experts_read(batch * nodes) for equal in target.layers) / target.read.experts


def best_chain(
    deployment: Deployment,
    *,
    batch: int,
    context: int,
    conditional_acceptance_rate: float,
    longest: int = 8,
) -> int:
    """Returns the ``K`` of the largest speed-up on the roofline, up to ``longest``.

    It is 0 where no speed-up exceeds 1.
    """
    bounds = [
        round_bound(deployment, batch=batch, context=context, num_draft_tokens=k)
        for k in range(1, longest + 1)
    ]
    return best_chain_length(
        conditional_acceptance_rate,
        verify_costs=[bound.verify_cost for bound in bounds],
        draft_costs=[bound.draft_cost for bound in bounds],
    )


def paying_batches(
    deployment: Deployment, *, context: int, num_draft_tokens: int, mean_acceptance_length: float
) -> tuple[int | None, int | None]:
    """Returns the batches between which speculation pays off on the roofline.

    It pays off where ``τ > v(B) + K·c(B)``.

    It pays off from batch 1 for dense targets. With experts verification reads more of them than a
    plain step does, until a batch reads most of them anyway. ``v`` grows with the batch from 1
    towards ``K + 1`` as arithmetic becomes the limit; long contexts delay that, since every
    sequence brings keys and values to be read. A real engine reaches the end earlier.

    Returns:
        The smallest batch at which it pays off, or ``None``. The smallest larger one at which it no
        longer does: 1 if it pays off at none, ``None`` if it does up to 65,536.
    """
    bound = partial(round_bound, deployment, context=context, num_draft_tokens=num_draft_tokens)

    def pays_off(batch: int) -> bool:
        return bound(batch=batch).speedup(mean_acceptance_length) > 1.0

    start = _first(pays_off)
    if start is None:
        return None, 1
    return start, _first(lambda batch: not pays_off(batch), after=start)


def break_even_batch(
    deployment: Deployment, *, context: int, num_draft_tokens: int, mean_acceptance_length: float
) -> int | None:
    """Returns the batch from which speculation no longer pays off; see :func:`paying_batches`."""
    draft = {"num_draft_tokens": num_draft_tokens, "mean_acceptance_length": mean_acceptance_length}
    return paying_batches(deployment, context=context, **draft)[1]


def largest_batch(
    deployment: Deployment, *, context: int, num_draft_tokens: int, utilization: float = 0.9
) -> int:
    """Returns the most sequences of ``context`` tokens that fit into memory, from 0 to 65,536."""
    load = {"context": context, "num_draft_tokens": num_draft_tokens, "utilization": utilization}
    too_large = _first(lambda batch: not memory_plan(deployment, batch=batch, **load).fits)
    return _MOST_ROWS if too_large is None else too_large - 1


def _first(holds: Callable[[int], bool], *, after: int = 0) -> int | None:
    """Returns the smallest batch above ``after`` for which a condition holds.

    It is ``None`` if there is none up to 65,536. ``after`` is doubled until the condition holds,
    and the batches up to there are bisected.
    """
    doubles = (min(max(after, 1) << power, _MOST_ROWS) for power in range(17))
    end = next(filter(holds, doubles), None)
    if end is None:
        return None
    return bisect.bisect_left(range(end), True, lo=after + 1, key=holds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A published throughput compared with the roofline."""

    tokens_per_second: float  #: The claimed throughput, all sequences together.
    bound: float  #: Upper bound at this batch, every draft token accepted.
    #: Smallest batch at which plain decoding could reach it; ``None`` if there is none.
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
    deployment: Deployment,
    *,
    tokens_per_second: float,
    batch: int,
    context: int,
    num_draft_tokens: int,
) -> Claim:
    """Compares a claimed throughput with the roofline at ``τ = K + 1``, the most of any drafter.

    The time of drafting is left out, so that the verdict holds for every drafter. Only the experts
    that a single token needs are counted, so that it holds for every text.

    Raises:
        ValueError: The claim is not positive.
    """
    if not tokens_per_second > 0:
        raise ValueError(f"a claim of {tokens_per_second:g} tokens/s; expected a positive number")

    bound = partial(round_bound, deployment, context=context, same_experts=True)

    def plain_reaches_it(rows: int) -> bool:
        plain = bound(batch=rows, num_draft_tokens=0)
        return plain.plain_tokens_per_second >= tokens_per_second

    verify_seconds = bound(batch=batch, num_draft_tokens=num_draft_tokens).verify_seconds
    return Claim(
        tokens_per_second=tokens_per_second,
        bound=batch * (num_draft_tokens + 1) / verify_seconds,
        batch_needed=_first(plain_reaches_it),
    )
