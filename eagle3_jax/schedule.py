"""Draft lengths by batch size, as in vLLM, and a loop whose drafters share one state."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from eagle3_jax.checks import configured
from eagle3_jax.devices.sharding import divides_rows, to_host
from eagle3_jax.drafters.plain import Silent
from eagle3_jax.loop import SpeculativeLoop
from eagle3_jax.state import GenerationState, LoopParams, Round
from eagle3_jax.topology import Chain
from eagle3_jax.types import Draft, Drafter, FinishReason

# Rows are counted in 32 bits on the device.
_MOST_ROWS = 2**31 - 2


@dataclasses.dataclass(frozen=True)
class SpeculationSchedule:
    """Draft lengths by the number of active rows: vLLM's ``num_speculative_tokens_per_batch_size``.

    ``((1, 4, 5), (5, 16, 3))`` drafts 5 tokens for 1 to 4 active rows, 3 for 5 to 16, and none for
    more. As in vLLM, a gap between two entries has the length of the entry before it. After the
    last entry decoding is plain. (vLLM continues with the last length; a last entry such as ``(17,
    512, 0)`` means the same in both.)

    Attributes:
        entries: ``(first, last, K)``: batch sizes ``first`` to ``last`` draft ``K`` tokens. Sizes
            start at 1 and ascend; ``K`` may be 0.
    """

    entries: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        reached = 0
        for entry in self.entries:
            first, last, length = entry
            if first <= reached or last < first or (reached == 0 and first != 1):
                raise ValueError(
                    f"schedule entry {list(entry)} is out of place; expected [first, last, K] with"
                    " ascending batch sizes that start at 1 and do not overlap, as in [[1, 4, 5],"
                    " [5, 16, 3], [17, 512, 0]]"
                )
            if last > _MOST_ROWS:
                raise ValueError(
                    f"schedule entry {list(entry)} reaches {last} rows; expected at most"
                    f" {_MOST_ROWS}"
                )
            if length < 0:
                raise ValueError(
                    f"schedule entry {list(entry)} drafts {length} tokens; expected 0 (none) or"
                    " more"
                )
            reached = last

        if self.max_length == 0:
            raise ValueError(
                f"the schedule {self.to_lists()} never drafts; leave it and the drafter out"
            )

    @classmethod
    def from_lists(cls, entries: Sequence[Any]) -> SpeculationSchedule:
        """Reads vLLM's configuration.

        Raises:
            ValueError: An entry is not three whole numbers, or out of place.
        """
        for entry in entries:
            are_integers = isinstance(entry, list | tuple) and all(
                type(number) is int for number in entry
            )
            if not are_integers or len(entry) != 3:
                raise ValueError(
                    f"schedule entry {entry!r} is not [first, last, K], three whole numbers"
                )
        return cls(tuple((entry[0], entry[1], entry[2]) for entry in entries))

    def to_lists(self) -> list[list[int]]:
        """Returns the schedule as vLLM's configuration."""
        return [list(entry) for entry in self.entries]

    @property
    def max_length(self) -> int:
        """The longest draft, vLLM's ``num_speculative_tokens``."""
        return max((length for _, _, length in self.entries), default=0)

    def length_at(self, batch: int) -> int:
        """Returns ``K`` for a number of active rows."""
        if batch > self.entries[-1][1]:
            return 0
        return next(length for first, _, length in reversed(self.entries) if first <= batch)

    def steps(self, largest: int) -> list[tuple[int, int]]:
        """Returns ``(most rows, K)`` for each change of ``K``, from ``largest`` rows down to 1."""
        borders = {border for first, last, _ in self.entries for border in (first - 1, last)}
        batches = {largest, *(border for border in borders if 0 < border < largest)}
        steps: list[tuple[int, int]] = []
        for batch in sorted(batches, reverse=True):
            length = self.length_at(batch)
            if not steps or steps[-1][1] != length:
                steps.append((batch, length))
        return steps


@dataclasses.dataclass(frozen=True)
class Stage:
    """A draft length and the number of active rows at which it begins."""

    max_running: int  #: Largest number of active rows.
    drafter: Drafter[Any]  #: The loop's drafter with another draft; both have the same state.


@dataclasses.dataclass(frozen=True)
class StagedLoop(SpeculativeLoop):
    """A loop whose drafter depends on the number of active rows."""

    #: All stages, most rows first. ``drafter`` is the one with the deepest draft.
    stages: tuple[Stage, ...] = ()

    def at(self, state: GenerationState) -> SpeculativeLoop:
        """Returns the loop of the current stage. Its rounds are padded to the largest draft.

        The host reads the number of active rows, so a round is the program of one stage. A switch
        inside one program would copy every cache, because its branches do not share buffers (104
        copies per round of eight rows).
        """
        first, *later = self._reached(state.finish.shape[0])
        # With a single stage nothing is read. `finish` is read because the host caches arrays that
        # it has read.
        running = np.sum(to_host(state.finish) == FinishReason.RUNNING) if later else 0
        begun = [first, *(stage for stage in later if running <= stage.max_running)]
        return _padded_loop(self, begun[-1].drafter)

    def reachable(self, batch: int) -> list[SpeculativeLoop]:
        """Returns the loops that :meth:`at` may return for a batch of this size."""
        return [_padded_loop(self, stage.drafter) for stage in self._reached(batch)]

    def step(self, params: LoopParams, state: GenerationState) -> Round:
        """Runs one round of :meth:`at`, for a state with known values.

        Raises:
            ValueError: The state is traced, so the number of running rows is unknown.
        """
        if isinstance(state.finish, Tracer):
            raise ValueError(
                "the stage of a schedule depends on the number of active rows, which is not known"
                " while a program is traced; call `decoder.step(state)`, or compile"
                " `loop.at(state).step`"
            )
        return self.at(state).step(params, state)

    def run(
        self, params: LoopParams, state: GenerationState, *, more_than: int = 0
    ) -> GenerationState:
        """Runs rounds while more than ``more_than`` rows are active, stage by stage.

        Finished rows leave the batch when a stage begins. On a mesh that divides rows they stay, so
        that no cache moves between devices.
        """
        stages = self._reached(state.finish.shape[0])
        # A stage ends where the next one begins.
        limits = [max(stage.max_running, more_than) for stage in stages[1:]] + [more_than]

        for stage, limit in zip(stages, limits, strict=True):
            rows = stage.max_running
            loop = SpeculativeLoop(
                self.target, stage.drafter, self.verifier, self.sampling_mode, self.rounds_per_check
            )
            if rows == state.finish.shape[0] or divides_rows():
                state = loop.run(params, state, more_than=limit)
                continue

            # At most `rows` rows are active when the stage begins, so these are all of them.
            active = jnp.argsort(~state.running, stable=True)[:rows]
            active_state = jax.tree.map(operator.itemgetter(active), state)
            active_state = loop.run(params, active_state, more_than=limit)
            put_back = functools.partial(_replace_rows, rows=active)
            state = jax.tree.map(put_back, state, active_state)
        return state

    def _reached(self, batch: int) -> list[Stage]:
        """Returns the stages that a batch of this size can reach, most rows first.

        The first one begins with all rows.
        """
        reached = [stage for stage in self.stages if stage.max_running < batch]
        first = [stage for stage in self.stages if stage.max_running >= batch][-1]
        return [dataclasses.replace(first, max_running=batch), *reached]


@dataclasses.dataclass(frozen=True)
class _PaddedLoop(SpeculativeLoop):
    """A stage whose rounds have the nodes and levels of the largest draft.

    They have only fields that all drafts have.
    """

    largest: Drafter[Any] = None  # type: ignore[assignment]

    def step(self, params: LoopParams, state: GenerationState) -> Round:
        """Runs one round and pads it."""
        unpadded = super().step(params, state)
        draft = unpadded.draft
        verdict = unpadded.verdict

        def pad(values: Array, width: int, value: Any) -> Array:
            return jnp.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=value)

        nodes = self.largest.num_nodes
        levels = self.largest.max_depth
        padded_draft = Draft(
            tokens=pad(draft.tokens, nodes, 0),
            parents=pad(draft.parents, nodes, -1),
            valid=pad(draft.valid, nodes, False),
        )
        return Round(
            state=unpadded.state,
            draft=padded_draft,
            verdict=verdict.replace(path=pad(verdict.path, levels, -1)),
            positions=pad(unpadded.positions, nodes, 0),
        )


def _replace_rows(leaf: Array, new: Array, *, rows: Array) -> Array:
    return leaf.at[rows].set(new)


@functools.lru_cache(maxsize=64)
def _padded_loop(loop: StagedLoop, drafter: Drafter[Any]) -> _PaddedLoop:
    """Returns the loop of a stage, padded.

    It is cached: building it takes the host longer than all else in a round.
    """
    return _PaddedLoop(
        loop.target,
        drafter,
        loop.verifier,
        loop.sampling_mode,
        loop.rounds_per_check,
        largest=loop.drafter,
    )


def stages_of(drafter: Drafter[Any], schedule: SpeculationSchedule) -> tuple[Stage, ...]:
    """Converts a schedule to drafters with one shared state.

    After its last entry nothing is drafted.

    Raises:
        ValueError: The drafter cannot draft chains of another length.
    """
    above = schedule.entries[-1][1] + 1
    stages = []
    for batch, length in schedule.steps(above):
        stage_drafter = configured(drafter, Chain(length), None) if length else Silent(drafter)
        max_running = batch if batch < above else np.iinfo(np.int32).max
        stages.append(Stage(max_running, stage_drafter))
    return tuple(stages)
