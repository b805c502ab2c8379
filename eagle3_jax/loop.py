"""The speculative loop as pure functions. A whole generation runs on the device.

A round (:meth:`SpeculativeLoop.step`): the drafter *proposes* a tree of tokens, the target scores
all of them in one forward, the verifier *accepts* a path and gives one more token, both are
*committed* to the text and to the target's cache, and the drafter *observes* them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.acceptance import Exact
from eagle3_jax.checks import (
    check_draft,
    check_parts,
    check_rows,
    check_verdict,
    checked_state,
    declares_chain,
    propose,
    takes_argument,
)
from eagle3_jax.devices.groups import map_groups, rows_per_group
from eagle3_jax.devices.kernels import entry_of_rows, indices
from eagle3_jax.devices.sharding import on_rows
from eagle3_jax.sampling import argmax, draw, keys_at, largest, num_digits, probabilities, uniforms
from eagle3_jax.state import GenerationState, LoopParams, Outcome, Prompts, Round
from eagle3_jax.stats import LogProbs, SpeculationStats
from eagle3_jax.tree import (
    ancestor_mask,
    causal_mask,
    depths,
    drop_unreachable_nodes,
    sanitize_draft,
    take_nodes,
)
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


class _Verification(NamedTuple):
    """The target's side of a round.

    Attributes:
        verdict: The decision of the verifier.
        broken: ``[B]``, whether the target has no distribution after the accepted path.
        logits: ``[B N V]``, the target's logits after each node.
    """

    verdict: Verdict
    broken: Bool[Array, " B"]
    logits: Float[Array, "B N V"]


@dataclasses.dataclass(frozen=True)
class SpeculativeLoop:
    """A target, a drafter and an acceptance rule.

    It is hashable: compiled functions take it as a static argument.

    Attributes:
        target: The model whose output distribution is preserved.
        drafter: The proposal method.
        verifier: The acceptance rule.
        sampling_mode: The work that the rows' sampling parameters need.
        rounds_per_check: Rounds between two checks whether every row has finished. On GPUs each
            check is a read by the host, so a few wasted rounds at the end can be cheaper.
    """

    target: TargetModel
    drafter: Drafter[Any]
    verifier: Verifier = Exact()
    sampling_mode: SamplingMode = SamplingMode.GREEDY
    rounds_per_check: int = 1

    def __post_init__(self) -> None:
        check_parts(self.target, self.drafter, self.verifier)
        if self.rounds_per_check < 1:
            raise ValueError(f"rounds_per_check is {self.rounds_per_check}; expected at least 1")

    @property
    def is_chain(self) -> bool:
        """Whether drafts never branch, as the drafter declares. Nodes are then in text order."""
        return declares_chain(self.drafter)

    @property
    def target_options(self) -> dict[str, Any]:
        """The arguments by name of a target forward over a draft."""
        options: dict[str, Any] = {"aux_layers": self.drafter.aux_layers}
        if self.is_chain and takes_argument(self.target, "is_chain"):
            options["is_chain"] = True
        return options

    def at(self, state: GenerationState) -> SpeculativeLoop:
        """Returns the loop for the next round of a state, chosen by the host.

        A loop with stages overrides this.
        """
        del state
        return self

    def prefill(self, params: LoopParams, prompts: Prompts, capacity: int) -> GenerationState:
        """Runs the prompts, chooses the first token of each row and shows both to the drafter.

        Args:
            params: Arrays of both models.
            prompts: The batch. Many long prompts are run a few at a time, to bound the memory.
            capacity: ``S``, slots per row; ``limit + num_nodes`` never loses a node.
        """
        batch, longest = prompts.tokens.shape
        size = rows_per_group(batch, longest, capacity)

        def prefill_group(rows: Prompts) -> GenerationState:
            return self._prefill(params, rows, capacity)

        return on_rows(map_groups(prefill_group, prompts, size))

    def _prefill(self, params: LoopParams, prompts: Prompts, capacity: int) -> GenerationState:
        """Prefills rows that run together; see :meth:`prefill`."""
        batch, longest = prompts.tokens.shape
        positions = jnp.broadcast_to(indices(longest), (batch, longest))
        output = self.target(
            params.target,
            prompts.tokens,
            positions,
            causal_mask(longest),
            aux_layers=self.drafter.aux_layers,
            length=prompts.length,
        )

        # Logits over the vocabulary are large, and only those after the last token are needed.
        last = (prompts.length - 1)[:, None, None]
        final = jnp.take_along_axis(output.final, last, axis=1)
        logits = self.target.unembed(params.target, final)
        first = self._choose_first(prompts, logits)

        state = self.empty(params, prompts, capacity)
        seen = Observation(
            tokens=prompts.tokens, features=output.features, length=prompts.length, next_token=first
        )
        cache = state.cache.fill(output.written, prompts.length)
        state = state.replace(cache=cache, drafter=self._observe(params, state.drafter, seen))

        broken = ~_has_distribution(logits)[:, 0]
        emitted = first[:, None]
        count = jnp.where(broken, 0, 1).astype(jnp.int32)
        return self._emit(state, emitted, count, broken, logits)

    def empty(self, params: LoopParams, prompts: Prompts, capacity: int) -> GenerationState:
        """Returns rows whose prompts have not run yet; :meth:`extend` runs them."""
        batch, longest = prompts.tokens.shape
        empty_state = self.drafter.init(params.drafter, batch, capacity)
        check_rows(self.drafter, empty_state, batch)

        slots = jnp.zeros((batch, capacity), jnp.int32)
        return GenerationState(
            tokens=slots.at[:, :longest].set(prompts.tokens),
            length=prompts.length,
            limit=prompts.limit,
            limit_reason=prompts.limit_reason,
            stop_tokens=prompts.stop_tokens,
            finish=jnp.zeros((batch,), jnp.int32),
            cache=self.target.init_cache(batch, capacity),
            # Without the barrier XLA spends seconds of compilation on folding attention over an
            # empty cache.
            drafter=lax.optimization_barrier(empty_state),
            sampling=prompts.sampling,
            keys=prompts.keys,
            stats=SpeculationStats.zeros(batch, self.drafter.max_depth),
            logprobs=None
            if prompts.logprobs is None
            else LogProbs.zeros(
                batch, capacity, prompts.logprobs, sampled=prompts.sampling_logprobs
            ),
        )

    def extend(
        self,
        params: LoopParams,
        state: GenerationState,
        prompt_length: Int[Array, " B"],
        *,
        size: int,
        until: Int[Array, " B"] | None = None,
    ) -> GenerationState:
        """Runs the next tokens of each prompt, behind those that have run.

        The logits after a prompt's last token choose the row's first token.

        Args:
            params: Arrays of both models.
            state: Rows of :meth:`empty`, or of the chunk before.
            prompt_length: ``[B]``, tokens of each prompt. Rows whose prompts have run do not
                change.
            size: Most tokens of a row that run. After all chunks the state is that of
                :meth:`prefill` up to rounding.
            until: ``[B]``, tokens of each prompt that have run afterwards, if ``size`` allows it.
                Default: all.
        """
        start = state.cache.length
        end = prompt_length if until is None else jnp.minimum(until, prompt_length)
        count = jnp.clip(end - start, 0, size)
        positions = start[:, None] + indices(size)[None, :]
        tokens = jax.vmap(lambda tokens, slots: tokens.at[slots].get(mode="clip"))(
            state.tokens, positions
        )

        options: dict[str, Any] = {"aux_layers": self.drafter.aux_layers}
        if takes_argument(self.target, "is_chain"):
            options["is_chain"] = True
        output = self.target(
            params.target,
            tokens,
            positions,
            causal_mask(size),
            state.cache,
            **options,
        )
        final = jnp.take_along_axis(output.final, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        logits = self.target.unembed(params.target, final)

        # The token after this chunk: the next one of the prompt, or the row's first token.
        has_ended = (count > 0) & (start + count == prompt_length)
        first = self._choose_first(state, logits)
        following = entry_of_rows(
            state.tokens, jnp.minimum(start + count, state.tokens.shape[1] - 1)
        )
        next_token = jnp.where(has_ended, first, following)

        seen = Observation(
            tokens=tokens, features=output.features, length=count, next_token=next_token
        )
        cache = state.cache.commit(output.written, count)
        state = state.replace(cache=cache, drafter=self._observe(params, state.drafter, seen))

        broken = has_ended & ~_has_distribution(logits)[:, 0]
        num_first = jnp.where(has_ended & ~broken, 1, 0).astype(jnp.int32)
        return self._emit(state, first[:, None], num_first, broken, logits)

    def _choose_first(
        self, rows: Prompts | GenerationState, logits: Float[Array, "B 1 V"]
    ) -> Int[Array, " B"]:
        """Returns the first token of each row, from the logits after its prompt."""
        if self.sampling_mode is SamplingMode.GREEDY:
            return argmax(logits[:, 0])
        probs = probabilities(logits, rows.sampling, self.sampling_mode)[:, 0]
        keys = keys_at(rows.keys, rows.length, _VERIFY)
        dice = uniforms(keys, num_digits(probs.shape[-1]))
        return draw(probs, dice)

    def step(self, params: LoopParams, state: GenerationState) -> Round:
        """Runs one round: propose, verify, commit, observe.

        Rows that have finished do not change.
        """
        # The names of the scopes appear in profiles.
        with jax.named_scope("propose"):
            draft, drafter = self._propose(params, state)

        # Each node attends to its ancestors. All nodes of one level share a position: only one of
        # them can become the token there.
        batch, num_nodes = draft.tokens.shape
        if self.is_chain:
            mask = causal_mask(num_nodes)
            depth = jnp.broadcast_to(indices(num_nodes), (batch, num_nodes))
        else:
            mask = ancestor_mask(draft.parents, self.drafter.max_depth)
            draft = drop_unreachable_nodes(draft, mask)
            depth = depths(mask)
        positions = state.cache.length[:, None] + depth

        with jax.named_scope("target"):
            output = self.target(
                params.target, draft.tokens, positions, mask, state.cache, **self.target_options
            )
        with jax.named_scope("verify"):
            verdict, broken, logits = self._verify(params, state, draft, output)

        # nodes[j] is the j-th node of the committed path, the root first. Padding points at the
        # root and is never counted. The path of a chain is a prefix of its nodes: a slice.
        root = jnp.zeros((batch, 1), jnp.int32)
        nodes = jnp.concatenate([root, jnp.maximum(verdict.path, 0)], axis=1)
        selection = slice(nodes.shape[1]) if self.is_chain else nodes
        on_path = functools.partial(take_nodes, nodes=selection)
        committed = on_path(draft.tokens)

        # emitted[j] is the token after the j-th node: the next node's, and after the last one the
        # token that the verifier gives.
        emitted = jnp.concatenate([committed[:, 1:], verdict.next_token[:, None]], axis=1)
        index = indices(emitted.shape[1])[None, :]
        is_last = index == verdict.num_accepted[:, None]
        emitted = jnp.where(is_last, verdict.next_token[:, None], emitted)

        # A stop token or the limit can cut what is emitted. The caches take as many tokens as the
        # text: the old root, and all new tokens except the newest, which is the next root.
        active = state.running
        scored = None if state.logprobs is None else on_path(logits)
        count = jnp.where(broken, verdict.num_accepted, verdict.num_accepted + 1)
        after = self._emit(state, emitted, count, broken, scored)
        count = after.length - state.length
        newest = entry_of_rows(emitted, jnp.maximum(count - 1, 0))

        seen = Observation(
            tokens=committed, features=on_path(output.features), length=count, next_token=newest
        )
        num_likeliest = getattr(self.drafter, "num_likeliest", 0)
        if num_likeliest:
            was_verified = draft.valid & active[:, None]
            drafted = jnp.where(was_verified, draft.tokens, -1)
            likeliest = lax.top_k(logits, num_likeliest)[1]
            seen = seen.replace(drafted=drafted, likeliest=likeliest)

        with jax.named_scope("commit"):
            cache = state.cache.commit(output.written, count, None if self.is_chain else nodes)
        with jax.named_scope("observe"):
            drafter = self._observe(params, drafter, seen)
        stats = state.stats.count(draft, verdict, active)
        after = after.replace(cache=cache, drafter=drafter, stats=stats)
        return Round(state=on_rows(after), draft=draft, verdict=verdict, positions=positions)

    def run(
        self, params: LoopParams, state: GenerationState, *, more_than: int = 0
    ) -> GenerationState:
        """Runs rounds while more than ``more_than`` rows are active, by default until none is."""

        def next_state(_: Any, state: GenerationState) -> GenerationState:
            return self.step(params, state).state

        def rounds(state: GenerationState) -> GenerationState:
            if self.rounds_per_check == 1:
                return next_state(0, state)
            return lax.fori_loop(0, self.rounds_per_check, next_state, state)

        def goes_on(state: GenerationState) -> Bool[Array, ""]:
            if more_than == 0:
                return jnp.any(state.running)
            return jnp.sum(state.running) > more_than

        return lax.while_loop(goes_on, rounds, state)

    def generate(self, params: LoopParams, prompts: Prompts, capacity: int) -> Outcome:
        """Runs the prefill and all rounds, as one program."""
        state = self.run(params, self.prefill(params, prompts, capacity))
        return Outcome(
            tokens=state.tokens,
            length=state.length,
            finish=state.finish,
            stats=state.stats,
            logprobs=state.logprobs,
        )

    def _propose(self, params: LoopParams, state: GenerationState) -> tuple[Draft, Any]:
        """Returns the draft, sanitized, and the drafter's state after proposing."""
        keys = keys_at(state.keys, state.length, _DRAFT)
        sampling = state.sampling
        vocab_size = self.target.vocab_size
        if self.sampling_mode is SamplingMode.GREEDY:
            # With a constant temperature the compiler drops everything that a drafter computes for
            # sampled rows.
            sampling = sampling.replace(temperature=jnp.zeros_like(sampling.temperature))

        draft = propose(self.drafter, params.drafter, state.drafter, keys, sampling, state.cache)
        check_draft(self.drafter, draft, batch=state.length.shape[0], vocab_size=vocab_size)
        after = state.drafter
        if draft.state is not None:
            after = checked_state(self.drafter, state.drafter, draft.state, "propose")
        draft = draft.replace(state=None)

        # Greedy verification compares with the argmax and reads no proposal distribution.
        if self.sampling_mode is SamplingMode.GREEDY:
            draft = draft.replace(probs=None)
        root = entry_of_rows(state.tokens, state.length - 1)
        draft = sanitize_draft(draft, root, vocab_size=vocab_size, is_chain=self.is_chain)
        return draft, after

    def _observe(self, params: LoopParams, state: Any, seen: Observation) -> Any:
        """Returns the drafter's state after it has observed committed tokens."""
        after = self.drafter.observe(params.drafter, state, seen)
        return checked_state(self.drafter, state, after)

    def _verify(
        self, params: LoopParams, state: GenerationState, draft: Draft, output: TargetOutput
    ) -> _Verification:
        """Decides about the draft, from the target's output."""
        logits = self.target.unembed(params.target, output.final)

        # No rule may accept anything below a node without a distribution.
        known = _has_distribution(logits)
        parents = jnp.maximum(draft.parents, 0)
        known_at_parent = jnp.take_along_axis(known, parents, axis=1) | (draft.parents < 0)
        draft = draft.replace(valid=draft.valid & known_at_parent)

        keys = keys_at(state.keys, state.length, _VERIFY)
        depth = self.drafter.max_depth
        verdict = self.verifier(
            draft, logits, state.sampling, keys, sampling_mode=self.sampling_mode, max_depth=depth
        )
        check_verdict(self.verifier, verdict, batch=logits.shape[0], max_depth=depth)

        # The nodes of a path ascend, so the last one is the largest.
        last = jnp.max(verdict.path, axis=1, initial=0)
        broken = ~entry_of_rows(known, last)
        return _Verification(verdict, broken, logits)

    def _emit(
        self,
        state: GenerationState,
        emitted: Int[Array, "B T"],
        count: Int[Array, " B"],
        broken: Bool[Array, " B"],
        logits: Float[Array, "B T V"] | None,
    ) -> GenerationState:
        """Appends up to ``count`` tokens to active rows.

        A row ends exactly at its first stop token, which is kept, or at its limit.

        Args:
            state: The state before the round.
            emitted: ``[B T]``, the tokens that verification gives.
            count: ``[B]``, how many of them are to be appended.
            broken: ``[B]``, whether the row ends after them because the target has no next token.
            logits: ``[B T V]``, the target's logits that each token was chosen by, if
                log-probabilities are recorded.
        """
        index = indices(emitted.shape[1])[None, :]
        is_stop = emitted[:, :, None] == state.stop_tokens[:, None, :]
        first_stop = jnp.min(
            index[:, :, None], axis=(1, 2), where=is_stop, initial=emitted.shape[1]
        )
        until_stop = first_stop + 1
        room = state.limit - state.length
        num_new = jnp.minimum(jnp.minimum(count, until_stop), room)
        num_new = jnp.where(state.running, jnp.maximum(num_new, 0), 0).astype(jnp.int32)

        # Tokens that are not new go to a slot beyond the capacity, where writes are dropped.
        capacity = state.tokens.shape[1]
        is_new = index < num_new[:, None]
        slots = jnp.where(is_new, state.length[:, None] + index, capacity)

        # Of several reasons to end, a stop token comes first, then the limit.
        unlimited = jnp.where(broken, int(FinishReason.NOT_FINITE), state.finish)
        has_stopped = until_stop <= num_new
        reason = jnp.where(num_new >= room, state.limit_reason, unlimited)
        reason = jnp.where(has_stopped, int(FinishReason.STOP), reason)

        # By vmap, so that a device that holds some of the rows writes only those.
        append = jax.vmap(lambda tokens, slots, new: tokens.at[slots].set(new, mode="drop"))
        logprobs = state.logprobs
        if logprobs is not None and logits is not None:
            scored = LogProbs.from_logits(logits, emitted, logprobs.top.shape[-1])
            if logprobs.sampled is not None:
                scored = scored.replace(sampled=self._sampling_logprobs(state, emitted, logits))
            logprobs = jax.tree.map(lambda old, new: append(old, slots, new), logprobs, scored)
        tokens = append(state.tokens, slots, emitted)

        length = state.length + num_new
        finish = jnp.where(state.running, reason, state.finish).astype(jnp.int32)
        return state.replace(tokens=tokens, logprobs=logprobs, length=length, finish=finish)

    def _sampling_logprobs(
        self, state: GenerationState, tokens: Int[Array, "B T"], logits: Float[Array, "B T V"]
    ) -> Float[Array, "B T"]:
        """Returns the log-probability of tokens under the distributions of their rows."""
        if self.sampling_mode is SamplingMode.GREEDY:
            return jnp.zeros(tokens.shape)
        probs = probabilities(logits, state.sampling, self.sampling_mode)
        return jnp.log(jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0])


def _has_distribution(logits: Float[Array, "B N V"]) -> Bool[Array, "B N"]:
    """Returns whether logits give a distribution: no NaN, and not minus infinity everywhere.

    The maximum shows both.
    """
    return largest(logits).value > -jnp.inf


@functools.partial(jax.jit, static_argnames=("loop", "capacity"))
def prefill(
    loop: SpeculativeLoop, params: LoopParams, prompts: Prompts, *, capacity: int
) -> GenerationState:
    """Compiled ``SpeculativeLoop.prefill``."""
    return loop.prefill(params, prompts, capacity)


@functools.partial(jax.jit, static_argnames=("loop", "capacity"))
def empty(
    loop: SpeculativeLoop, params: LoopParams, prompts: Prompts, *, capacity: int
) -> GenerationState:
    """Compiled ``SpeculativeLoop.empty``."""
    return loop.empty(params, prompts, capacity)


@functools.partial(jax.jit, static_argnames=("loop", "size"), donate_argnames=("state",))
def extend(
    loop: SpeculativeLoop,
    params: LoopParams,
    state: GenerationState,
    prompt_length: Int[Array, " B"],
    *,
    size: int,
    until: Int[Array, " B"] | None = None,
) -> GenerationState:
    """Compiled ``SpeculativeLoop.extend``. It consumes the state, to update caches in place."""
    return loop.extend(params, state, prompt_length, size=size, until=until)


@functools.partial(jax.jit, static_argnames=("loop",), donate_argnames=("state",))
def step(loop: SpeculativeLoop, params: LoopParams, state: GenerationState) -> Round:
    """Compiled ``SpeculativeLoop.step``. It consumes the state, to update caches in place."""
    return loop.step(params, state)


@functools.partial(jax.jit, static_argnames=("loop",), donate_argnames=("state",))
def run(loop: SpeculativeLoop, params: LoopParams, state: GenerationState) -> GenerationState:
    """Compiled ``SpeculativeLoop.run``. It consumes the state, to update caches in place."""
    return loop.run(params, state)


@functools.partial(jax.jit, static_argnames=("loop", "capacity"))
def generate(
    loop: SpeculativeLoop, params: LoopParams, prompts: Prompts, *, capacity: int
) -> Outcome:
    """Compiled ``SpeculativeLoop.generate``: a whole generation is one executable."""
    return loop.generate(params, prompts, capacity)
