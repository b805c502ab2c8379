"""Adaptive verification: how many drafted tokens are verified is decided on the device, anew in every round.

A round of width ``w`` emits ``1 + S_1 + ... + S_w`` tokens of each row, where ``S_k`` is the probability that the first
``k`` drafted tokens are all accepted, and costs what was measured for that width. The width that gives most for its
cost is taken. ``S`` comes from how sure the drafter is of its tokens (:mod:`eagle3_jax.calibration`).

To cut a draft short is not exact by itself: a token that is dropped *because of what it is* is missing from the output.
A rule is exact when it decides whether a token is verified before the token is known: from the committed text, the
tokens before it in the draft, and rounds that are over. Then, whatever was decided, the next token emitted has the
target's distribution given all that was looked at. So

* where every ``q`` follows from the committed text alone (``is_parallel``), and where nothing is drawn (no ``probs``),
  the whole draft is made first and its own survivals choose the width;
* where a drafted token decides about the ``q`` of those behind it, those survivals would drop a token because of what
  followed from it. There the survivals of earlier rounds choose, and only as many tokens are drafted;
* a row's own tokens can be cut off from the first whose ``S_k`` is below a threshold: ``S_k`` looks at ``q_1 ... q_k``,
  which are known before ``d_k`` is drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.boundary import Drafting, configured, declares_chain
from eagle3_jax.calibration import Calibration, feature_of
from eagle3_jax.loop import SpeculativeLoop
from eagle3_jax.stages import padded
from eagle3_jax.state import GenerationState, LoopParams, Prompts, Round
from eagle3_jax.tree import Chain
from eagle3_jax.types import Draft, Drafter, Observation, SamplingParams

WIDTHS = (1, 2, 4, 6, 8, 12, 16)


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """What a round of each width costs at each batch size, in steps of plain decoding.

    Attributes:
        measured: ``(batch, ((K, cost), ...))``, both ascending: ``cost = v + K·c``, drafting included. A round of width
            0 is a plain step and costs 1. Between sizes and between widths costs are straight lines, above the
            largest width they go on as before it, and outside the sizes measured the nearest size counts.
    """

    measured: tuple[tuple[int, tuple[tuple[int, float], ...]], ...]

    def __post_init__(self) -> None:
        sizes = [batch for batch, _ in self.measured]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"costs are given for batches of {sizes}; expected ascending sizes of 1 or more")
        for batch, costs in self.measured:
            lengths, values = [length for length, _ in costs], [cost for _, cost in costs]
            if not lengths or lengths != sorted(set(lengths)) or lengths[0] < 1:
                raise ValueError(
                    f"at batch {batch} costs are given for K = {lengths}; expected ascending K of 1 or more"
                )
            if not all(np.isfinite(value) and value > 0 for value in values):
                raise ValueError(f"at batch {batch} costs are {values}; expected numbers above 0, in plain steps")

    @classmethod
    def from_tuning(cls, tuning: Mapping[str, Any]) -> RoundCosts:
        """From what ``eagle3 tune --output`` writes.

        Raises:
            ValueError: It holds no measured chains.
        """
        try:
            measured = {
                int(one["batch"]): {
                    int(each["shape"]["num_draft_tokens"]): float(each["verify_cost"])
                    + int(each["shape"]["num_draft_steps"]) * float(each["draft_cost"])
                    for each in one["candidates"]
                    if each["shape"]["is_chain"]
                }
                for one in tuning["batches"]
            }
        except (KeyError, TypeError, ValueError):
            raise ValueError("no costs of chains by batch size; expected what `eagle3 tune --output` writes") from None
        return cls(tuple((batch, tuple(sorted(costs.items()))) for batch, costs in sorted(measured.items())))

    def of(self, batch: int, widths: Sequence[int]) -> Float[np.ndarray, " W"]:
        """Costs of these widths for a batch of that size; never falling."""
        sizes = [size for size, _ in self.measured]
        curves = np.array([_line(costs, widths) for _, costs in self.measured])
        costs = np.array([np.interp(batch, sizes, curve) for curve in curves.T])
        return np.maximum.accumulate(costs)


def _line(costs: Sequence[tuple[int, float]], widths: Sequence[int]) -> list[float]:
    """Straight from point to point, from a plain step on, and beyond the last as between the last two."""
    points = [(0, 1.0), *costs]
    (before, low), (last, high) = points[-2:]
    slope = max(0.0, (high - low) / (last - before))
    xs, ys = zip(*points, strict=True)
    return [float(np.interp(width, xs, ys)) + slope * max(0, width - last) for width in widths]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveVerification:
    """What is adapted, and how.

    Attributes:
        costs: Of a round by width. Those of memory-bound hardware when left out: verification is free, a draft step a
            tenth of a plain step. ``eagle3 tune`` measures them.
        widths: Of the stages, ascending; 1, 2, 4, 6, 8, 12, 16 up to the drafter's length when left out. At least one
            token is always verified, or nothing more would be learnt.
        least_survival: A row's tokens are cut off from the first whose estimated survival is below this. With static
            shapes that saves no time by itself.
        rounds_per_update: Rounds between two improvements of the estimate.
    """

    costs: RoundCosts = RoundCosts(((1, ((10, 2.0),)),))
    widths: tuple[int, ...] | None = None
    least_survival: float = 0.0
    rounds_per_update: int = 4

    def __post_init__(self) -> None:
        widths = self.widths
        if widths is not None and (not widths or widths[0] < 1 or list(widths) != sorted(set(widths))):
            raise ValueError(f"widths are {widths}; expected ascending whole numbers of 1 or more, such as (1, 2, 4)")
        if not 0 <= self.least_survival < 1:
            raise ValueError(f"least_survival is {self.least_survival:g}; expected 0 (no cut) or more, and below 1")
        if self.rounds_per_update < 1:
            raise ValueError(f"rounds_per_update is {self.rounds_per_update}; expected at least 1")

    def widths_up_to(self, length: int) -> tuple[int, ...]:
        """Of the stages for drafts of that length, which is the last one.

        Raises:
            ValueError: A width is asked for that is longer.
        """
        if self.widths is not None and self.widths[-1] > length:
            raise ValueError(f"a width of {self.widths[-1]} was asked for, and drafts have {length} tokens")
        widths = WIDTHS if self.widths is None else self.widths
        return (*(width for width in widths if width < length), length)


@dataclasses.dataclass(frozen=True)
class Narrowed:
    """The first tokens of another drafter's chain.

    Attributes:
        drafter: Whose chain it is.
        width: How many of them.
    """

    drafter: Drafter[Any]
    width: int

    @property
    def num_nodes(self) -> int:
        """``N``."""
        return self.width + 1

    @property
    def max_depth(self) -> int:
        """``G``."""
        return self.width

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Those of the other drafter."""
        return self.drafter.aux_layers

    @property
    def is_chain(self) -> bool:
        """As the other drafter is."""
        return True

    def init(self, params: Any, batch: int, capacity: int) -> Any:
        """See :class:`eagle3_jax.types.Drafter`."""
        return self.drafter.init(params, batch, capacity)

    def observe(self, params: Any, state: Any, seen: Observation) -> Any:
        """As the other drafter does."""
        return self.drafter.observe(params, state, seen)

    def propose(self, params: Any, state: Any, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        """The beginning of the other's proposal."""
        return narrowed(self.drafter.propose(params, state, keys, sampling), self.width)


def narrowed(draft: Draft, width: int) -> Draft:
    """The root and the first nodes of a chain."""
    fields = ("tokens", "parents", "valid", "probs", "confidence")
    kept = {name: getattr(draft, name) for name in fields}
    return draft.replace(  # type: ignore[attr-defined]
        **{name: None if value is None else value[:, : width + 1] for name, value in kept.items()}
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Round(SpeculativeLoop):
    """A round of one width; built while another loop is traced.

    Attributes:
        given: The draft and the drafter's state after proposing, where they are there already.
    """

    given: tuple[Draft, Any] | None = None

    reads_confidence: ClassVar[bool] = True

    def _propose(self, params: LoopParams, state: GenerationState) -> tuple[Draft, Any]:
        return super()._propose(params, state) if self.given is None else self.given


@dataclasses.dataclass(frozen=True)
class AdaptiveLoop(SpeculativeLoop):
    """A loop whose rounds are as wide as pays; ``drafter`` is the one of the longest draft.

    Attributes:
        adaptive: The rule.
    """

    adaptive: AdaptiveVerification = AdaptiveVerification()

    reads_confidence: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not declares_chain(self.drafter):
            raise ValueError(
                f"{type(self.drafter).__name__} drafts a tree (or does not say `is_chain`), and only chains are cut to "
                "a width; draft a chain (num_speculative_tokens=K) or leave `adaptive` out"
            )
        for width in self.widths:
            self._at(width)

    @property
    def widths(self) -> tuple[int, ...]:
        """Drafted tokens verified in each stage, ascending."""
        return self.adaptive.widths_up_to(self.drafter.num_nodes - 1)

    @property
    def drafts_whole(self) -> bool:
        """Whether every draft is made in full and then cut; else only what is verified is drafted."""
        return bool(getattr(self.drafter, "is_parallel", False)) or not isinstance(self.drafter, Drafting)

    def prefill(self, params: LoopParams, prompts: Prompts, capacity: int) -> GenerationState:
        """See :class:`eagle3_jax.loop.SpeculativeLoop`."""
        state = super().prefill(params, prompts, capacity)
        calibration = Calibration.start(state.length.shape[0], self.widths[-1])
        return state.replace(calibration=calibration)  # type: ignore[attr-defined]

    def step(self, params: LoopParams, state: GenerationState) -> Round:
        """One round of the width that pays, padded to the largest draft. One program for all widths."""
        survival, whole = state.calibration.survival, None
        if self.drafts_whole:
            whole = draft, _ = self._propose(params, state)
            if self._is_known_before_drawing(draft):
                survival = state.calibration.expected(self._accepted(state, draft)[1])
        index = self._chosen(survival, state.running)
        branches = [lambda state, width=width: self._round(width, params, state, whole) for width in self.widths]
        return lax.switch(index, branches, state)

    def _is_known_before_drawing(self, draft: Draft) -> bool:
        """Whether no survival of this draft says anything of a drawn token: the current ones may choose the width."""
        return draft.probs is None or bool(getattr(self.drafter, "is_parallel", False))

    def _chosen(self, survival: Float[Array, "B K"], running: Bool[Array, " B"]) -> Int[Array, ""]:
        """The stage that emits most for its cost, by the rows that run."""
        widths = np.array(self.widths)
        emitted = 1.0 + jnp.cumsum(survival, axis=1)[:, widths - 1]
        gain = jnp.sum(jnp.where(running[:, None], emitted, 0.0), axis=0)
        return jnp.argmax(gain / jnp.asarray(self.adaptive.costs.of(running.shape[0], self.widths), jnp.float32))

    def _round(self, width: int, params: LoopParams, state: GenerationState, whole: tuple[Draft, Any] | None) -> Round:
        """One round of a width, and what is learnt from it."""
        drafter = self._at(width)
        if whole is None:
            draft, after = _Round(self.target, drafter, warping=self.warping)._propose(params, state)
        else:
            draft, after = narrowed(whole[0], width), whole[1]
        feature, accepted = self._accepted(state, draft)
        survival = state.calibration.expected(accepted)
        kept = survival[:, :width] >= self.adaptive.least_survival
        kept = jnp.pad(kept.at[:, 0].set(True), ((0, 0), (1, 0)), constant_values=True)
        draft = draft.replace(valid=draft.valid & (jnp.cumprod(kept, axis=1) > 0))  # type: ignore[attr-defined]
        given = draft.replace(confidence=None), after  # type: ignore[attr-defined]
        one = _Round(self.target, drafter, self.verifier, self.warping, given=given).step(params, state)
        verified = draft.valid[:, 1:] & state.running[:, None]
        calibration = state.calibration.observed(feature, accepted, verified, one.verdict.num_accepted)
        calibration = calibration.remembering(survival, state.running)
        due = jnp.max(calibration.rounds) >= self.adaptive.rounds_per_update
        calibration = lax.cond(due, Calibration.improved, lambda same: same, calibration)
        after_round = one.state.replace(calibration=calibration)  # type: ignore[attr-defined]
        return padded(dataclasses.replace(one, state=after_round), self.drafter)

    def _accepted(self, state: GenerationState, draft: Draft) -> tuple[Float[Array, "B k"], Float[Array, "B k"]]:
        """What is predicted of every drafted token, and from what; 0 for those that are none."""
        valid = draft.valid[:, 1:]
        feature = feature_of(None if draft.confidence is None else draft.confidence[:, 1:], valid)
        return feature, jnp.where(valid, state.calibration.predicted(feature), 0.0)

    def _at(self, width: int) -> Drafter[Any]:
        """The drafter of a stage, all of one state."""
        if width == self.drafter.num_nodes - 1:
            return self.drafter
        return Narrowed(self.drafter, width) if self.drafts_whole else configured(self.drafter, Chain(width), None)
