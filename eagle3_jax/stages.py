"""Draft lengths by the number of running rows: a loop of several drafters with one state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from eagle3_jax.boundary import configured
from eagle3_jax.drafters.silent import Silent
from eagle3_jax.loop import SpeculativeLoop
from eagle3_jax.schedule import SpeculationSchedule
from eagle3_jax.sharding import divides_rows
from eagle3_jax.state import GenerationState, LoopParams, Round
from eagle3_jax.tree import Chain
from eagle3_jax.types import Draft, Drafter


@dataclasses.dataclass(frozen=True)
class Stage:
    """Who drafts while few enough rows are running.

    Attributes:
        max_running: Most rows at which this stage begins.
        drafter: The loop's own drafter with another draft; the state of both is the same.
    """

    max_running: int
    drafter: Drafter[Any]


@dataclasses.dataclass(frozen=True)
class StagedLoop(SpeculativeLoop):
    """A loop whose drafter depends on how many rows are running.

    Attributes:
        stages: Most rows first; ``drafter`` is the one of the deepest draft.
    """

    stages: tuple[Stage, ...] = ()

    def step(self, params: LoopParams, state: GenerationState) -> Round:
        """One round by the stage that the number of running rows asks for, padded to the largest draft.

        One program for all stages, so nothing is compiled when rows come and go.
        """
        stages = self._reached(state.finish.shape[0])
        running = jnp.sum(state.running)
        # Most rows first, so the stage is the last one that has begun.
        index = jnp.sum(jnp.stack([running <= stage.max_running for stage in stages[1:]]).astype(jnp.int32))
        branches = [
            lambda state, loop=self._at(stage): padded(loop.step(params, state), self.drafter) for stage in stages
        ]
        return lax.switch(index, branches, state)

    def run(self, params: LoopParams, state: GenerationState, *, more_than: int = 0) -> GenerationState:
        """Rounds until every row has finished, or as many as ``more_than`` are left.

        Each stage works on as many rows as it begins with: those that have finished leave the batch. On a mesh that
        divides rows they stay where they are, and no cache moves between devices.
        """
        stages = self._reached(state.finish.shape[0])
        ends = [max(stage.max_running, more_than) for stage in stages[1:]] + [more_than]
        for stage, end in zip(stages, ends, strict=True):
            rows = stage.max_running
            loop = self._at(stage)
            if rows == state.finish.shape[0] or divides_rows():
                state = loop.run(params, state, more_than=end)
                continue
            chosen = jnp.argsort(~state.running, stable=True)[:rows]  # at most so many are running by now
            few = loop.run(params, jax.tree.map(lambda leaf: leaf[chosen], state), more_than=end)  # noqa: B023
            state = jax.tree.map(lambda leaf, new: leaf.at[chosen].set(new), state, few)  # noqa: B023
        return state

    def _reached(self, batch: int) -> list[Stage]:
        """The stages that a batch of this size can reach; the first one begins with all rows."""
        reached = [stage for stage in self.stages if stage.max_running < batch]
        first = [stage for stage in self.stages if stage.max_running >= batch][-1]
        return [dataclasses.replace(first, max_running=batch), *reached]

    def _at(self, stage: Stage) -> SpeculativeLoop:
        return SpeculativeLoop(self.target, stage.drafter, self.verifier, self.warping, self.rounds_per_check)


def padded(one: Round, largest: Drafter[Any]) -> Round:
    """A round with as many nodes and levels as the largest draft has, and without what some drafts lack."""
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
        verdict=verdict.replace(path=pad(verdict.path, levels, -1)),  # type: ignore[attr-defined]
        positions=pad(one.positions, nodes, 0),
    )


def stages_of(drafter: Drafter[Any], schedule: SpeculationSchedule) -> tuple[Stage, ...]:
    """A schedule as drafters of one state; above its last entry nothing is drafted.

    Raises:
        ValueError: The drafter cannot draft chains of another length.
    """
    above = schedule.entries[-1][1] + 1
    stages = []
    for batch, length in schedule.steps(above):
        one = configured(drafter, Chain(length), None) if length else Silent(drafter)
        stages.append(Stage(batch if batch < above else np.iinfo(np.int32).max, one))
    return tuple(stages)
