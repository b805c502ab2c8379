"""Which draft is fastest at which batch size: measured costs and acceptance combined into a decision.

A draft that is accepted for a mean acceptance length ``τ`` and takes ``v + G·c`` plain steps (``v`` to verify it, ``c``
for each of its ``G`` draft steps) is faster than plain decoding by ``S = τ / (v + G·c)``. ``τ`` is a property of the
text and the head and does not change with the batch; ``v`` and ``c`` grow with it, so the best draft gets shorter and
from some batch on there is none. Nothing here measures anything: see :mod:`eagle3_jax.measure.tune_measure`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from eagle3_jax.measure.timing import Spread
from eagle3_jax.schedule import SpeculationSchedule
from eagle3_jax.theory.speedup import Rates, rates, rates_for_speedup

_LARGEST = 512  # the last, plain entry of a schedule names at least this many rows, as people expect to read it

# What articles on serving tell people to do; each is printed beside what was measured.
RULE_BATCH = 32
RULE_OUTPUT_TOKENS = 50
RULE_ACCEPTANCE = 0.55


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A draft and how much of it is accepted.

    Attributes:
        name: In reports: ``K=3``, or the size of a tree.
        num_draft_tokens: ``K`` of a chain, all nodes but the root of a tree.
        num_draft_steps: ``G``, draft steps in a round; ``K`` for a chain.
        is_chain: Only chains fit into a schedule.
        mean_acceptance_length: ``τ``, tokens per round, measured with this very shape.
        acceptance_per_position: Share of rounds in which the token at each depth was accepted.
    """

    name: str
    num_draft_tokens: int
    num_draft_steps: int
    is_chain: bool
    mean_acceptance_length: float
    acceptance_per_position: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """What a draft costs and gains at one batch size.

    Attributes:
        shape: The draft.
        verify_cost: ``v``, a verification in plain steps.
        draft_cost: ``c``, a draft step in plain steps.
        speedup: ``S``, paired by repeat.
    """

    shape: Shape
    verify_cost: float
    draft_cost: float
    speedup: Spread

    @classmethod
    def of(cls, shape: Shape, *, plain: Sequence[float], verify: Sequence[float], draft: Sequence[float]) -> Candidate:
        """From seconds of every repeat.

        Costs are ratios within a repeat: a machine that slows down for a while slows the plain step as well.

        Args:
            shape: The draft.
            plain: A step of plain decoding.
            verify: A verification.
            draft: A draft step.
        """
        verify_cost = [ours / step for ours, step in zip(verify, plain, strict=True)]
        draft_cost = [ours / step for ours, step in zip(draft, plain, strict=True)]
        gains = [
            shape.mean_acceptance_length / (v + shape.num_draft_steps * c)
            for v, c in zip(verify_cost, draft_cost, strict=True)
        ]
        return cls(
            shape=shape,
            verify_cost=Spread.of(verify_cost).median,
            draft_cost=Spread.of(draft_cost).median,
            speedup=Spread.of(gains),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchTuning:
    """All drafts at one batch size.

    Attributes:
        batch: Rows decoded at once.
        plain_step: Seconds of a step of plain decoding.
        extra_prefill_seconds: What drafting adds to the prefill of such a batch.
        candidates: Every draft that was measured.
    """

    batch: int
    plain_step: Spread
    extra_prefill_seconds: float
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The draft to use; ``None`` for plain decoding."""
        return choose(self.candidates)

    @property
    def best_chain(self) -> Candidate | None:
        """The same among chains, which is what a schedule can say."""
        return choose([one for one in self.candidates if one.shape.is_chain])

    @property
    def fastest(self) -> Candidate:
        """The draft of the largest ``S``, whether or not it pays."""
        return max(self.candidates, key=lambda one: one.speedup.median)


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """The draft of the largest ``S``, or a shorter one that is as good; ``None``, plain decoding, where none pays.

    As good is whatever reaches the first quartile of the largest ``S``: a difference within the spread of the repeats
    is none, and a shorter draft loses less when acceptance turns out lower. Plain decoding is the shortest, ``S = 1``.
    """
    if not candidates:
        return None
    bar = max(candidates, key=lambda one: one.speedup.median).speedup.low
    if bar <= 1.0:
        return None
    as_good = [one for one in candidates if one.speedup.median >= bar]
    return min(as_good, key=lambda one: (one.shape.num_draft_tokens, -one.speedup.median))


def schedule_of(lengths: Sequence[tuple[int, int]]) -> SpeculationSchedule | None:
    """A schedule from the best chain at each measured batch size; ``None`` when drafting pays at none.

    An entry reaches from behind the size before up to the size measured. Costs grow with the batch, so what was
    best at the upper end is the cautious choice for the sizes between. Above the largest size nothing is known and
    nothing is drafted, which is said in an entry of its own: vLLM would carry the last length on.

    Args:
        lengths: ``(batch, K)`` with ascending batches; 0 is plain decoding.
    """
    if not any(length for _, length in lengths):
        return None
    entries: list[tuple[int, int, int]] = []
    reached = 0
    for batch, length in [*lengths, (max(_LARGEST, lengths[-1][0] + 1), 0)]:
        if entries and entries[-1][2] == length:
            entries[-1] = (entries[-1][0], batch, length)
        else:
            entries.append((reached + 1, batch, length))
        reached = batch
    return SpeculationSchedule(tuple(entries))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BreakEven:
    """The acceptance from which a chain is faster than plain decoding.

    Attributes:
        mean_acceptance_length: ``τ`` at which ``S`` is 1: the cost of a round in plain steps.
        needed: The rates that give it; ``None`` where even a chain accepted in full would not do.
        measured: The rates of the measured ``τ``.
    """

    mean_acceptance_length: float
    needed: Rates | None
    measured: Rates


def break_even(candidate: Candidate) -> BreakEven:
    """``τ = v + K·c`` of a chain, and what it means as a draft and as a conditional acceptance rate."""
    shape, v, c = candidate.shape, candidate.verify_cost, candidate.draft_cost
    return BreakEven(
        mean_acceptance_length=v + shape.num_draft_steps * c,
        needed=rates_for_speedup(1.0, num_draft_tokens=shape.num_draft_tokens, verify_cost=v, draft_cost=c),
        measured=rates(shape.mean_acceptance_length, shape.num_draft_tokens),
    )


def crossover_tokens(*, extra_prefill_seconds: float, plain_step_seconds: float, speedup: float) -> int | None:
    """How many tokens an answer must have for speculation to win back the prefill of its drafter.

    Each token after the first is written ``t·(1 - 1/S)`` sooner, ``t`` being a plain step. ``None`` when ``S`` is
    not above 1.
    """
    if speedup <= 1.0:
        return None
    gain = plain_step_seconds * (1.0 - 1.0 / speedup)
    return 1 + max(1, math.ceil(max(0.0, extra_prefill_seconds) / gain))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule of thumb beside the measurement.

    Attributes:
        batch: Where.
        rule: What articles say.
        rule_says: ``plain`` or ``speculate``; for short answers, below how many tokens plain.
        measured: What the measurement says, with its numbers.
        agrees: Whether both lead to the same decision.
    """

    batch: int
    rule: str
    rule_says: str
    measured: str
    agrees: bool


def rules_of_thumb(found: BatchTuning) -> list[Rule]:
    """The rules of the articles at one batch size, each against what was measured there."""
    speculates, fastest = found.best is not None, found.best or found.fastest
    gain = fastest.speedup.median
    decision = f"{'speculate' if speculates else 'plain'}: S = {gain:.2f} with {fastest.shape.name}"
    over = found.batch > RULE_BATCH
    accepted = (fastest.shape.mean_acceptance_length - 1.0) / fastest.shape.num_draft_tokens
    low = accepted < RULE_ACCEPTANCE
    tokens = crossover_tokens(
        extra_prefill_seconds=found.extra_prefill_seconds,
        plain_step_seconds=found.plain_step.median,
        speedup=gain if speculates else 1.0,
    )
    by_length = "plain at any length" if tokens is None else f"speculation pays from {tokens} tokens on"
    return [
        Rule(
            batch=found.batch,
            rule=f"batch > {RULE_BATCH}: plain",
            rule_says="plain" if over else "speculate",
            measured=decision,
            agrees=over != speculates,
        ),
        Rule(
            batch=found.batch,
            rule=f"fewer than {RULE_OUTPUT_TOKENS} new tokens: plain",
            rule_says=f"plain below {RULE_OUTPUT_TOKENS} tokens",
            measured=by_length,
            agrees=tokens is None or tokens >= RULE_OUTPUT_TOKENS,
        ),
        Rule(
            batch=found.batch,
            rule=f"draft acceptance rate < {RULE_ACCEPTANCE}: plain",
            rule_says=f"{'plain' if low else 'speculate'}: it is {accepted:.2f}",
            measured=decision,
            agrees=low != speculates,
        ),
    ]
