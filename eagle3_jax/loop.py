"""The speculative loop as pure functions: propose, verify, accept, commit, observe and stop, all on the device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.acceptance import Exact
from eagle3_jax.checks import (
    check_same_state,
    declares_chain,
    require_draft,
    require_parts,
    require_rows,
    require_verdict,
)
from eagle3_jax.devices.groups import map_groups, rows_per_group
from eagle3_jax.devices.sharding import on_rows
from eagle3_jax.sampling import argmax, draw, keys_at, largest, num_digits, probabilities, uniforms
from eagle3_jax.state import GenerationState, LoopParams, Outcome, Prompts, Round
from eagle3_jax.stats import LogProbs, SpeculationStats
from eagle3_jax.tree import ancestor_mask, causal_mask, depths, drop_unreachable_nodes, sanitize_draft, take_nodes
from eagle3_jax.types import (
    Draft,
    Drafter,
    FinishReason,
    Observation,
    SamplingMode,
    TargetModel,
    TargetOutput,
    Verdict,
    Verifier,
)

# Purposes of a row's random keys at one position.
_DRAFT = 0
_VERIFY = 1


@dataclasses.dataclass(frozen=True)
class SpeculativeLoop:
    """A target, a drafter and an acceptance rule. It is hashable, and the static argument of the compiled functions.

    Attributes:
        target: The model whose output distribution is preserved.
        drafter: The proposal method.
        verifier: The acceptance rule.
        sampling_mode: The work that the rows' sampling parameters need.
        rounds_per_check: Rounds between two checks whether every row has finished. On GPUs each check is a read by the
            host, so a few wasted rounds at the end can be cheaper.
    """

    target: TargetModel
    drafter: Drafter[Any]
    verifier: Verifier = Exact()
    sampling_mode: SamplingMode = SamplingMode.GREEDY
    rounds_per_check: int = 1

    def __post_init__(self) -> None:
        require_parts(self.target, self.drafter, self.verifier)
        if self.rounds_per_check < 1:
            raise ValueError(f"rounds_per_check is {self.rounds_per_check}; expected at least 1")

    @property
    def is_chain(self) -> bool:
        """Whether the drafter declares that its drafts never branch. Masks, depths and commits are then in order."""
        return declares_chain(self.drafter)

    def at(self, state: GenerationState) -> SpeculativeLoop:
        """The loop for the next round of a state, chosen by the host. A loop with stages overrides this."""
        del state
        return self

    def prefill(self, params: LoopParams, prompts: Prompts, capacity: int) -> GenerationState:
        """Runs the prompts, chooses the first token of each row and shows both to the drafter.

        Args:
            params: Arrays of both models.
            prompts: The batch. Many long prompts are run a few at a time, to bound the memory.
            capacity: ``S``, slots per row; ``limit + num_nodes`` never loses a node.
        """
        size = rows_per_group(prompts.tokens.shape[0], prompts.tokens.shape[1], capacity)
        return on_rows(map_groups(lambda rows: self._prefill(params, rows, capacity), prompts, size))

    def _prefill(self, params: LoopParams, prompts: Prompts, capacity: int) -> GenerationState:
        """:meth:`prefill` of rows that are run together."""
        batch, fed = prompts.tokens.shape
        positions = jnp.broadcast_to(jnp.arange(fed, dtype=jnp.int32), (batch, fed))
        output = self.target(
            params.target,
            prompts.tokens,
            positions,
            causal_mask(fed),
            aux_layers=self.drafter.aux_layers,
            length=prompts.length,
        )
        last = jnp.take_along_axis(output.final, (prompts.length - 1)[:, None, None], axis=1)
        logits = self.target.unembed(params.target, last)
        if self.sampling_mode is SamplingMode.GREEDY:
            first = argmax(logits[:, 0])
        else:
            probs = probabilities(logits, prompts.sampling, self.sampling_mode)[:, 0]
            keys = keys_at(prompts.keys, prompts.length, _VERIFY)
            first = draw(probs, uniforms(keys, num_digits(probs.shape[-1])))

        cache = self.target.init_cache(batch, capacity).fill(output.written, prompts.length)
        seen = Observation(tokens=prompts.tokens, features=output.features, length=prompts.length, next_token=first)
        # Without the barrier XLA spends seconds of compilation on folding attention over an empty cache.
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
            stop_tokens=prompts.stop_tokens,
            finish=empty,
            cache=cache,
            drafter=self._observe(params, drafter, seen),
            sampling=prompts.sampling,
            keys=prompts.keys,
            stats=SpeculationStats.zeros(batch, self.drafter.max_depth),
            logprobs=None if prompts.logprobs is None else LogProbs.zeros(batch, capacity, prompts.logprobs),
        )
        broken = ~_has_distribution(logits)[:, 0]
        return self._emit(state, first[:, None], jnp.where(broken, 0, 1).astype(jnp.int32), broken, logits)

    def step(self, params: LoopParams, state: GenerationState) -> Round:
        """One round: propose, verify, commit, observe. Rows that have finished do not change."""
        with jax.named_scope("propose"):  # these names appear in profiles
            draft, drafter = self._propose(params, state)
        batch, num_nodes = draft.tokens.shape
        if self.is_chain:
            mask = causal_mask(num_nodes)
            depth = jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32), (batch, num_nodes))
        else:
            mask = ancestor_mask(draft.parents, self.drafter.max_depth)
            draft = drop_unreachable_nodes(draft, mask)
            depth = depths(mask)
        positions = state.cache.length[:, None] + depth
        with jax.named_scope("target"):
            output = self.target(
                params.target, draft.tokens, positions, mask, state.cache, aux_layers=self.drafter.aux_layers
            )
        with jax.named_scope("verify"):
            verdict, broken, logits = self._verify(params, state, draft, output)

        # nodes[j] is the j-th node of the committed path, the root first; emitted[j] is the token after it.
        nodes = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), jnp.maximum(verdict.path, 0)], axis=1)
        on_path = functools.partial(take_nodes, nodes=slice(nodes.shape[1]) if self.is_chain else nodes)
        committed = on_path(draft.tokens)
        emitted = jnp.concatenate([committed[:, 1:], verdict.next_token[:, None]], axis=1)
        index = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None, :]
        emitted = jnp.where(index == verdict.num_accepted[:, None], verdict.next_token[:, None], emitted)

        active = state.running
        scored = None if state.logprobs is None else on_path(logits)
        count = jnp.where(broken, verdict.num_accepted, verdict.num_accepted + 1)
        after = self._emit(state, emitted, count, broken, scored)
        count = after.length - state.length
        newest = jnp.take_along_axis(emitted, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        seen = Observation(tokens=committed, features=on_path(output.features), length=count, next_token=newest)
        if likeliest := getattr(self.drafter, "num_likeliest", 0):
            drafted = jnp.where(draft.valid & active[:, None], draft.tokens, -1)
            seen = seen.replace(drafted=drafted, likeliest=lax.top_k(logits, likeliest)[1])
        with jax.named_scope("commit"):
            cache = state.cache.commit(output.written, count, None if self.is_chain else nodes)
        with jax.named_scope("observe"):
            drafter = self._observe(params, drafter, seen)
        stats = state.stats.count(draft, verdict, active)
        after = after.replace(cache=cache, drafter=drafter, stats=stats)
        return Round(state=on_rows(after), draft=draft, verdict=verdict, positions=positions)

    def run(self, params: LoopParams, state: GenerationState, *, more_than: int = 0) -> GenerationState:
        """Runs rounds while more than ``more_than`` rows are active (default: until all rows finish)."""

        def rounds(state: GenerationState) -> GenerationState:
            if self.rounds_per_check == 1:
                return self.step(params, state).state
            return lax.fori_loop(0, self.rounds_per_check, lambda _, s: self.step(params, s).state, state)

        def goes_on(state: GenerationState) -> Bool[Array, ""]:
            return jnp.any(state.running) if more_than == 0 else jnp.sum(state.running) > more_than

        return lax.while_loop(goes_on, rounds, state)

    def generate(self, params: LoopParams, prompts: Prompts, capacity: int) -> Outcome:
        """Prefill and all rounds, as one program."""
        state = self.run(params, self.prefill(params, prompts, capacity))
        return Outcome(**{name: getattr(state, name) for name in ("tokens", "length", "finish", "stats", "logprobs")})

    def _propose(self, params: LoopParams, state: GenerationState) -> tuple[Draft, Any]:
        """Returns the draft, sanitized, and the drafter's state after proposing."""
        keys = keys_at(state.keys, state.length, _DRAFT)
        sampling = state.sampling
        vocab_size = self.target.vocab_size
        if self.sampling_mode is SamplingMode.GREEDY:
            # With a constant temperature the compiler drops everything that a drafter computes for sampled rows.
            sampling = sampling.replace(temperature=jnp.zeros_like(sampling.temperature))
        draft = self.drafter.propose(params.drafter, state.drafter, keys, sampling)
        require_draft(self.drafter, draft, batch=state.length.shape[0], vocab_size=vocab_size)
        after = state.drafter
        if draft.state is not None:
            after = check_same_state(self.drafter, state.drafter, draft.state, "propose")
        draft = draft.replace(state=None)
        if self.sampling_mode is SamplingMode.GREEDY:  # verification then reads no proposal distribution
            draft = draft.replace(probs=None)
        root = jnp.take_along_axis(state.tokens, (state.length - 1)[:, None], axis=1)[:, 0]
        return sanitize_draft(draft, root, vocab_size=vocab_size, is_chain=self.is_chain), after

    def _observe(self, params: LoopParams, state: Any, seen: Observation) -> Any:
        return check_same_state(self.drafter, state, self.drafter.observe(params.drafter, state, seen))

    def _verify(
        self, params: LoopParams, state: GenerationState, draft: Draft, output: TargetOutput
    ) -> tuple[Verdict, Bool[Array, " B"], Float[Array, "B N V"]]:
        """Returns the verdict, whether the target has no distribution at the end of the path, and the logits."""
        logits = self.target.unembed(params.target, output.final)
        known = _has_distribution(logits)
        # No rule may accept anything below a node without a distribution.
        parent = jnp.take_along_axis(known, jnp.maximum(draft.parents, 0), axis=1) | (draft.parents < 0)
        draft = draft.replace(valid=draft.valid & parent)
        keys = keys_at(state.keys, state.length, _VERIFY)
        depth = self.drafter.max_depth
        verdict = self.verifier(draft, logits, state.sampling, keys, sampling_mode=self.sampling_mode, max_depth=depth)
        require_verdict(self.verifier, verdict, batch=logits.shape[0], max_depth=depth)
        last = jnp.max(verdict.path, axis=1, initial=0)  # nodes of a path ascend
        return verdict, ~jnp.take_along_axis(known, last[:, None], axis=1)[:, 0], logits

    def _emit(
        self,
        state: GenerationState,
        emitted: Int[Array, "B T"],
        count: Int[Array, " B"],
        broken: Bool[Array, " B"],
        logits: Float[Array, "B T V"] | None,
    ) -> GenerationState:
        """Appends up to ``count`` tokens to active rows, and ends rows exactly at a stop token or at the limit.

        A ``broken`` row ends after them, because the target has no next token. Log-probabilities are of ``logits``.
        """
        index = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None, :]
        stops = emitted[:, :, None] == state.stop_tokens[:, None, :]
        until_stop = jnp.min(index[:, :, None], axis=(1, 2), where=stops, initial=emitted.shape[1]) + 1
        room = state.limit - state.length
        kept = jnp.minimum(jnp.minimum(count, until_stop), room)
        kept = jnp.where(state.running, jnp.maximum(kept, 0), 0).astype(jnp.int32)

        capacity = state.tokens.shape[1]
        slots = jnp.where(index < kept[:, None], state.length[:, None] + index, capacity)
        # By vmap, so that a device that holds some of the rows writes only those.
        append = jax.vmap(lambda tokens, slots, new: tokens.at[slots].set(new, mode="drop"))
        going_on = jnp.where(broken, int(FinishReason.NOT_FINITE), state.finish)
        reason = jnp.where(
            until_stop <= kept, int(FinishReason.STOP), jnp.where(kept >= room, state.limit_reason, going_on)
        )
        logprobs = state.logprobs
        if logprobs is not None and logits is not None:
            scored = LogProbs.from_logits(logits, emitted, logprobs.top.shape[-1])
            logprobs = jax.tree.map(lambda old, new: append(old, slots, new), logprobs, scored)
        return state.replace(
            tokens=append(state.tokens, slots, emitted),
            logprobs=logprobs,
            length=state.length + kept,
            finish=jnp.where(state.running, reason, state.finish).astype(jnp.int32),
        )


def _has_distribution(logits: Float[Array, "B N V"]) -> Bool[Array, "B N"]:
    """Whether logits give a distribution: no NaN, and not minus infinity everywhere. The maximum shows both."""
    return largest(logits).value > -jnp.inf


@functools.partial(jax.jit, static_argnames=("loop", "capacity"))
def prefill(loop: SpeculativeLoop, params: LoopParams, prompts: Prompts, *, capacity: int) -> GenerationState:
    """Compiled ``SpeculativeLoop.prefill``."""
    return loop.prefill(params, prompts, capacity)


@functools.partial(jax.jit, static_argnames=("loop",), donate_argnames=("state",))
def step(loop: SpeculativeLoop, params: LoopParams, state: GenerationState) -> Round:
    """Compiled ``SpeculativeLoop.step``. It consumes the given state and updates its caches in place."""
    return loop.step(params, state)


@functools.partial(jax.jit, static_argnames=("loop",), donate_argnames=("state",))
def run(loop: SpeculativeLoop, params: LoopParams, state: GenerationState) -> GenerationState:
    """Compiled ``SpeculativeLoop.run``. It consumes the given state and updates its caches in place."""
    return loop.run(params, state)


@functools.partial(jax.jit, static_argnames=("loop", "capacity"))
def generate(loop: SpeculativeLoop, params: LoopParams, prompts: Prompts, *, capacity: int) -> Outcome:
    """Compiled ``SpeculativeLoop.generate``: a whole generation is one executable."""
    return loop.generate(params, prompts, capacity)
