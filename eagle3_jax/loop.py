"""The speculative loop as pure functions: draft, verify, accept, commit and stop, all on the device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from eagle3_jax.acceptance import verify, verify_greedy
from eagle3_jax.boundary import (
    declares_chain,
    like_before,
    made_safe,
    require_draft,
    require_drafter,
    require_rows,
    within_reach,
)
from eagle3_jax.models.decoder import causal_mask
from eagle3_jax.sampling import Warping, draw, keys_at, num_digits, probabilities, uniforms
from eagle3_jax.simulated import SimulatedAcceptance
from eagle3_jax.state import GenerationState, LoopParams, Outcome, Prompts, Round
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.tree import ancestor_mask, depths
from eagle3_jax.types import (
    Draft,
    Drafter,
    FinishReason,
    Observation,
    TargetModel,
    TargetOutput,
    Verdict,
)

# What a row's randomness at one position is used for.
_DRAFT, _VERIFY, _SIMULATE = 0, 1, 2


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
class SpeculativeLoop:
    """A target, a drafter and when to stop: hashable, the static argument of everything compiled here.

    Attributes:
        target: The model whose output distribution is preserved.
        drafter: The proposal method.
        stop_tokens: Ids that end a row; the stop token itself is kept.
        warping: How much the rows' sampling parameters ask for.
        rounds_per_check: Rounds between two looks at whether every row has finished. On GPUs each look is a
            read by the host, so a few wasted rounds at the end can be cheaper.
        stages: Drafts by number of running rows, most rows first; empty when ``drafter`` always drafts. With stages
            ``drafter`` is the one of the deepest draft.
        simulated: Accept by dice instead of by the target's wish: **not lossless**, for measuring speed.
    """

    target: TargetModel
    drafter: Drafter[Any]
    stop_tokens: tuple[int, ...] = ()
    warping: Warping = Warping.GREEDY
    rounds_per_check: int = 1
    stages: tuple[Stage, ...] = ()
    simulated: SimulatedAcceptance | None = None

    def __post_init__(self) -> None:
        require_drafter(self.drafter)
        if self.rounds_per_check < 1:
            raise ValueError(f"rounds_per_check is {self.rounds_per_check}; expected at least 1")
        if self.simulated is not None and len(self.simulated.rates) < self.drafter.max_depth:
            raise ValueError(
                f"{len(self.simulated.rates)} simulated acceptance rates for drafts of depth {self.drafter.max_depth}; "
                "give one for each depth"
            )

    @property
    def is_chain(self) -> bool:
        """Whether the drafter declares that its drafts never branch, so that masks, depths and commits are in order."""
        return declares_chain(self.drafter)

    def prefill(self, params: LoopParams, prompts: Prompts, capacity: int) -> GenerationState:
        """Run the prompts, choose the first token of each row and show both to the drafter.

        Args:
            params: Of both models.
            prompts: The batch.
            capacity: ``S``, slots per row; ``limit + num_nodes`` never loses a node.
        """
        batch, fed = prompts.tokens.shape
        positions = jnp.broadcast_to(jnp.arange(fed, dtype=jnp.int32), (batch, fed))
        output = self.target(
            params.target, prompts.tokens, positions, causal_mask(fed), aux_layers=self.drafter.aux_layers
        )
        last = jnp.take_along_axis(output.final, (prompts.length - 1)[:, None, None], axis=1)
        logits = self.target.unembed(params.target, last)
        if self.warping is Warping.GREEDY:
            first = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
        else:
            probs = probabilities(logits, prompts.sampling, self.warping)[:, 0]
            keys = keys_at(prompts.keys, prompts.length, _VERIFY)
            first = draw(probs, uniforms(keys, num_digits(probs.shape[-1])))

        cache = self.target.init_cache(batch, capacity)
        written = tuple(cache.write(layer, block) for layer, block in enumerate(output.written))
        cache = cache.commit(written, prompts.length)
        seen = Observation(tokens=prompts.tokens, features=output.features, length=prompts.length, next_token=first)
        # The barrier keeps XLA from spending seconds on folding attention over an empty cache at compile time.
        fresh = self.drafter.init(params.drafter, batch, capacity)
        require_rows(self.drafter, fresh, batch)
        drafter = lax.optimization_barrier(fresh)
        tokens = jnp.zeros((batch, capacity), jnp.int32).at[:, :fed].set(prompts.tokens)
        empty = jnp.zeros((batch,), jnp.int32)
        state = GenerationState(
            tokens=tokens,
            length=prompts.length,
            limit=prompts.limit,
            limit_reason=prompts.limit_reason,
            finish=empty,
            cache=cache,
            drafter=self._observe(params, drafter, seen),
            sampling=prompts.sampling,
            keys=prompts.keys,
            stats=SpeculationStats.zeros(batch, self.drafter.max_depth),
        )
        return self._emit(state, first[:, None], jnp.ones_like(empty))

    def step(self, params: LoopParams, state: GenerationState) -> Round:
        """One round: propose, verify, commit, observe. Rows that have finished stay as they are."""
        with jax.named_scope("propose"):  # the names by which profilers show where a round goes
            draft = self._propose(params, state)
        batch, num_nodes = draft.tokens.shape
        if self.is_chain:
            mask = causal_mask(num_nodes)
            depth = jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32), (batch, num_nodes))
        else:
            mask = ancestor_mask(draft.parents, self.drafter.max_depth)
            draft = within_reach(draft, mask)
            depth = depths(mask)
        positions = state.cache.length[:, None] + depth
        with jax.named_scope("target"):
            output = self.target(
                params.target, draft.tokens, positions, mask, state.cache, aux_layers=self.drafter.aux_layers
            )
        with jax.named_scope("verify"):
            verdict = self._verify(params, state, draft, output)

        # nodes[j] is the j-th token of the committed path, the root first; emitted[j] is the token after it.
        nodes = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), jnp.maximum(verdict.path, 0)], axis=1)
        committed = jnp.take_along_axis(draft.tokens, nodes, axis=1)
        emitted = jnp.concatenate([committed[:, 1:], verdict.next_token[:, None]], axis=1)
        index = jnp.arange(emitted.shape[1])[None, :]
        emitted = jnp.where(index == verdict.num_accepted[:, None], verdict.next_token[:, None], emitted)

        active = state.running
        after = self._emit(state, emitted, verdict.num_accepted + 1)
        count = after.length - state.length
        newest = jnp.take_along_axis(emitted, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        features = jnp.take_along_axis(output.features, nodes[:, :, None, None], axis=1)
        seen = Observation(tokens=committed, features=features, length=count, next_token=newest)
        with jax.named_scope("commit"):
            cache = state.cache.commit(output.written, count, None if self.is_chain else nodes)
        with jax.named_scope("observe"):
            drafter = self._observe(params, state.drafter, seen)
        stats = state.stats.count(draft, verdict, active)
        after = after.replace(cache=cache, drafter=drafter, stats=stats)  # type: ignore[attr-defined]
        return Round(state=after, draft=draft, verdict=verdict, positions=positions)

    def staged_step(self, params: LoopParams, state: GenerationState) -> Round:
        """:meth:`step` by the stage that the number of running rows asks for, padded to the largest draft.

        One program for all stages, so nothing is compiled when rows come and go.
        """
        stages = self._stages(state.finish.shape[0])
        running = jnp.sum(state.running)
        # Most rows first, so the stage is the last one that has begun.
        index = jnp.sum(jnp.stack([running <= stage.max_running for stage in stages[1:]]).astype(jnp.int32))
        branches = [lambda state, loop=self._at(stage): self._padded(loop.step(params, state)) for stage in stages]
        return lax.switch(index, branches, state)

    def run(self, params: LoopParams, state: GenerationState) -> GenerationState:
        """Rounds until every row has finished.

        With stages, each works on as many rows as it begins with: those that have finished leave the batch.
        """
        if not self.stages:
            return self._run_while(params, state, more_than=0)
        stages = self._stages(state.finish.shape[0])
        ends = [stage.max_running for stage in stages[1:]] + [0]
        for stage, end in zip(stages, ends, strict=True):
            rows = stage.max_running
            loop = self._at(stage)
            if rows == state.finish.shape[0]:
                state = loop._run_while(params, state, more_than=end)
                continue
            chosen = jnp.argsort(~state.running, stable=True)[:rows]  # at most so many are running by now
            few = loop._run_while(params, jax.tree.map(lambda leaf: leaf[chosen], state), more_than=end)  # noqa: B023
            state = jax.tree.map(lambda leaf, new: leaf.at[chosen].set(new), state, few)  # noqa: B023
        return state

    def _run_while(self, params: LoopParams, state: GenerationState, *, more_than: int) -> GenerationState:
        """Rounds while more rows than these are running."""

        def rounds(state: GenerationState) -> GenerationState:
            if self.rounds_per_check == 1:
                return self.step(params, state).state
            return lax.fori_loop(0, self.rounds_per_check, lambda _, s: self.step(params, s).state, state)

        def goes_on(state: GenerationState) -> Bool[Array, ""]:
            return jnp.any(state.running) if more_than == 0 else jnp.sum(state.running) > more_than

        return lax.while_loop(goes_on, rounds, state)

    def _stages(self, batch: int) -> list[Stage]:
        """The stages that a batch of this size can reach; the first one begins with all rows."""
        reached = [stage for stage in self.stages if stage.max_running < batch]
        first = [stage for stage in self.stages if stage.max_running >= batch][-1]
        return [dataclasses.replace(first, max_running=batch), *reached]

    def _at(self, stage: Stage) -> SpeculativeLoop:
        return dataclasses.replace(self, drafter=stage.drafter, stages=())

    def _padded(self, one: Round) -> Round:
        """A round with as many nodes and levels as the largest draft has, and without ``probs``, which some lack."""
        nodes = self.drafter.num_nodes - one.draft.tokens.shape[1]
        levels = self.drafter.max_depth - one.verdict.path.shape[1]

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

    def generate(self, params: LoopParams, prompts: Prompts, capacity: int) -> Outcome:
        """Prefill and every round, as one program."""
        state = self.run(params, self.prefill(params, prompts, capacity))
        return Outcome(tokens=state.tokens, length=state.length, finish=state.finish, stats=state.stats)

    def _propose(self, params: LoopParams, state: GenerationState) -> Draft:
        keys, sampling = keys_at(state.keys, state.length, _DRAFT), state.sampling
        vocab_size = self.target.vocab_size
        if self.warping is Warping.GREEDY:
            # With a temperature that is a constant to the compiler, whatever a drafter computes for sampled rows is
            # dropped from the program.
            sampling = sampling.replace(temperature=jnp.zeros_like(sampling.temperature))  # type: ignore[attr-defined]
        draft = self.drafter.propose(params.drafter, state.drafter, keys, sampling)
        require_draft(self.drafter, draft, batch=state.length.shape[0], vocab_size=vocab_size)
        if self.warping is Warping.GREEDY:  # verification then reads no proposal distribution
            draft = draft.replace(probs=None)  # type: ignore[attr-defined]
        root = jnp.take_along_axis(state.tokens, (state.length - 1)[:, None], axis=1)[:, 0]
        return made_safe(draft, root, vocab_size=vocab_size, is_chain=self.is_chain)

    def _observe(self, params: LoopParams, state: Any, seen: Observation) -> Any:
        return like_before(self.drafter, state, self.drafter.observe(params.drafter, state, seen))

    def _verify(self, params: LoopParams, state: GenerationState, draft: Draft, output: TargetOutput) -> Verdict:
        logits = self.target.unembed(params.target, output.final)
        depth = self.drafter.max_depth
        simulated = None if self.simulated is None else SimulatedAcceptance(self.simulated.rates[:depth])
        if simulated is not None:
            chance = uniforms(keys_at(state.keys, state.length, _SIMULATE), 1)[:, 0]
        if self.warping is Warping.GREEDY:
            wanted = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            if simulated is not None:
                draft, wanted = simulated.steer_greedy(draft, wanted, chance)
            return verify_greedy(draft, wanted, max_depth=depth)
        probs = probabilities(logits, state.sampling, self.warping)
        num_nodes, vocab_size = probs.shape[1:]
        dice = uniforms(keys_at(state.keys, state.length, _VERIFY), num_nodes + num_digits(vocab_size))
        if simulated is not None:
            draft, probs = simulated.steer(draft, probs, chance)
        return verify(draft, probs, accept=dice[:, :num_nodes], choose=dice[:, num_nodes:], max_depth=depth)

    def _emit(self, state: GenerationState, emitted: Int[Array, "B T"], count: Int[Array, " B"]) -> GenerationState:
        """Append up to ``count`` tokens to running rows, ending exactly at a stop token or at the limit."""
        index = jnp.arange(emitted.shape[1])[None, :]
        stops = jnp.zeros(emitted.shape, jnp.bool_)
        for token in self.stop_tokens:
            stops |= emitted == token
        stops &= index < count[:, None]
        until_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, emitted.shape[1] + 1)
        room = state.limit - state.length
        kept = jnp.minimum(jnp.minimum(count, until_stop), room)
        kept = jnp.where(state.running, jnp.maximum(kept, 0), 0).astype(jnp.int32)

        capacity = state.tokens.shape[1]
        slots = jnp.where(index < kept[:, None], state.length[:, None] + index, capacity)
        rows = jnp.arange(emitted.shape[0])[:, None]
        reason = jnp.where(
            until_stop <= kept, int(FinishReason.STOP), jnp.where(kept >= room, state.limit_reason, state.finish)
        )
        return state.replace(  # type: ignore[attr-defined]
            tokens=state.tokens.at[rows, slots].set(emitted, mode="drop"),
            length=state.length + kept,
            finish=jnp.where(state.running, reason, state.finish).astype(jnp.int32),
        )


@functools.partial(jax.jit, static_argnames=("loop", "capacity"))
def prefill(loop: SpeculativeLoop, params: LoopParams, prompts: Prompts, *, capacity: int) -> GenerationState:
    """Compiled :meth:`SpeculativeLoop.prefill`."""
    return loop.prefill(params, prompts, capacity)


@functools.partial(jax.jit, static_argnames=("loop",), donate_argnames=("state",))
def step(loop: SpeculativeLoop, params: LoopParams, state: GenerationState) -> Round:
    """Compiled :meth:`SpeculativeLoop.step`; the state given is consumed, its caches are updated in place."""
    return loop.staged_step(params, state) if loop.stages else loop.step(params, state)


@functools.partial(jax.jit, static_argnames=("loop",), donate_argnames=("state",))
def run(loop: SpeculativeLoop, params: LoopParams, state: GenerationState) -> GenerationState:
    """Compiled :meth:`SpeculativeLoop.run`; the state given is consumed, its caches are updated in place."""
    return loop.run(params, state)


@functools.partial(jax.jit, static_argnames=("loop", "capacity"))
def generate(loop: SpeculativeLoop, params: LoopParams, prompts: Prompts, *, capacity: int) -> Outcome:
    """Compiled :meth:`SpeculativeLoop.generate`: a whole generation is one executable and one launch."""
    return loop.generate(params, prompts, capacity)


__all__ = [
    "GenerationState",
    "LoopParams",
    "Outcome",
    "Prompts",
    "Round",
    "SpeculativeLoop",
    "Stage",
    "generate",
    "prefill",
    "run",
    "step",
]
