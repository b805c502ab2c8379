"""A loop whose draft length depends on the number of active rows: several drafters share one state."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from eagle3_jax.checks import configured
from eagle3_jax.drafters.silent import Silent
from eagle3_jax.loop import SpeculativeLoop
from eagle3_jax.schedule import SpeculationSchedule
from eagle3_jax.sharding import divides_rows, to_host
from eagle3_jax.state import GenerationState, LoopParams, Round
from eagle3_jax.topology import Chain
from eagle3_jax.types import Draft, Drafter, FinishReason


@dataclasses.dataclass(frozen=True)
class Stage:
    """A draft length and the number of active rows at which it begins.

    Attributes:
        max_running: Largest number of active rows.
        drafter: The loop's drafter with another draft; both have the same state.
    """

    max_running: int
    drafter: Drafter[Any]


@dataclasses.dataclass(frozen=True)
class StagedLoop(SpeculativeLoop):
    """A loop whose drafter depends on the number of active rows.

    Attributes:
        stages: All stages, most rows first. ``drafter`` is the one with the deepest draft.
    """

    stages: tuple[Stage, ...] = ()

    def at(self, state: GenerationState) -> SpeculativeLoop:
        """Returns the loop of the present stage; its rounds are padded to the largest draft.

        The host reads the number of active rows, so a round is the program of one stage. A switch inside one program
        copied every cache (104 copies per round of eight rows), because its branches do not share buffers.
        """
        first, *later = self._reached(state.finish.shape[0])  # most rows first
        # With a single stage nothing is read. `finish` is read because the host caches arrays that it has read.
        running = np.sum(to_host(state.finish) == FinishReason.RUNNING) if later else 0
        begun = [first, *(stage for stage in later if running <= stage.max_running)]
        return _padded_loop(self, begun[-1].drafter)

    def step(self, params: LoopParams, state: GenerationState) -> Round:
        """Runs one round of :meth:`at`, for a state with known values.

        Raises:
            ValueError: The state is traced, so the number of running rows is unknown.
        """
        if isinstance(state.finish, Tracer):
            raise ValueError(
                "which stage of a schedule plays a round depends on how many rows run, which is not known while a "
                "program is traced; call `decoder.step(state)`, or compile `loop.at(state).step`"
            )
        return self.at(state).step(params, state)

    def run(self, params: LoopParams, state: GenerationState, *, more_than: int = 0) -> GenerationState:
        """Runs rounds while more than ``more_than`` rows are active.

        Finished rows leave the batch when a stage begins. On a mesh that divides rows they stay, so that no cache moves
        between devices.
        """
        stages = self._reached(state.finish.shape[0])
        ends = [max(stage.max_running, more_than) for stage in stages[1:]] + [more_than]
        for stage, end in zip(stages, ends, strict=True):
            rows = stage.max_running
            loop = SpeculativeLoop(self.target, stage.drafter, self.verifier, self.sampling_mode, self.rounds_per_check)
            if rows == state.finish.shape[0] or divides_rows():
                state = loop.run(params, state, more_than=end)
                continue
            chosen = jnp.argsort(~state.running, stable=True)[:rows]  # no more rows than these are active
            few = loop.run(params, jax.tree.map(lambda leaf: leaf[chosen], state), more_than=end)  # noqa: B023
            state = jax.tree.map(lambda leaf, new: leaf.at[chosen].set(new), state, few)  # noqa: B023
        return state

    def _reached(self, batch: int) -> list[Stage]:
        """The stages that a batch of this size can reach; the first begins with all rows."""
        reached = [stage for stage in self.stages if stage.max_running < batch]
        first = [stage for stage in self.stages if stage.max_running >= batch][-1]
        return [dataclasses.replace(first, max_running=batch), *reached]


@dataclasses.dataclass(frozen=True)
class _PaddedLoop(SpeculativeLoop):
    """A stage whose rounds are padded to the size of the largest stage.

    Attributes:
        largest: The drafter with the deepest draft.
    """

    largest: Drafter[Any] = None  # type: ignore[assignment]

    def step(self, params: LoopParams, state: GenerationState) -> Round:
        return padded(super().step(params, state), self.largest)


@functools.lru_cache(maxsize=64)
def _padded_loop(loop: StagedLoop, drafter: Drafter[Any]) -> _PaddedLoop:
    """Cached, because its checks take longer than all other work of the host between two rounds."""
    return _PaddedLoop(
        loop.target, drafter, loop.verifier, loop.sampling_mode, loop.rounds_per_check, largest=loop.drafter
    )


def padded(one: Round, largest: Drafter[Any]) -> Round:
    """Pads a round to the nodes and levels of the largest draft, and drops fields that not all drafts have."""
    nodes = largest.num_nodes - one.draft.tokens.shape[1]
    levels = largest.max_depth - one.verdict.path.shape[1]

    def pad(values: Array, width: int, value: Any) -> Array:
        return jnp.pad(values, ((0, 0), (0, width)), constant_values=value)

    draft, verdict = one.draft, one.verdict
    return Round(
        state=one.state,
        draft=Draft(
            tokens=pad(draft.tokens, nodes, 0),
            parents=pad(draft.parents, nodes, -1),
            valid=pad(draft.valid, nodes, False),
        ),
        verdict=verdict.replace(path=pad(verdict.path, levels, -1)),
        positions=pad(one.positions, nodes, 0),
    )


def stages_of(drafter: Drafter[Any], schedule: SpeculationSchedule) -> tuple[Stage, ...]:
    """Converts a schedule to drafters with one shared state. After its last entry nothing is drafted.

    Raises:
        ValueError: The drafter cannot draft chains of another length.
    """
    above = schedule.entries[-1][1] + 1
    stages = []
    for batch, length in schedule.steps(above):
        one = configured(drafter, Chain(length), None) if length else Silent(drafter)
        stages.append(Stage(batch if batch < above else np.iinfo(np.int32).max, one))
    return tuple(stages)
