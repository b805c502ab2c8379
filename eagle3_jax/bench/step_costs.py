"""Times of the parts of a round: drafting, verification and commit, each measured separately."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from eagle3_jax.bench.contenders import Tokens
from eagle3_jax.bench.rounds import timed_rounds
from eagle3_jax.cache import Cache, KeyValue, KeyValues, LayerCache
from eagle3_jax.checks import propose
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.drafters.plain import Plain
from eagle3_jax.loop import GenerationState, LoopParams, SpeculativeLoop
from eagle3_jax.measure.timing import timed
from eagle3_jax.models.latent_keys import LatentKeys
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import Observation, TargetOutput


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Times of the parts of a round, ``verify + G · draft``."""

    verify_seconds: float  #: One target forward over a draft, with acceptance and commit.
    #: One draft step: observing committed tokens and proposing, over the depth of the draft.
    draft_seconds: float
    #: The part of ``verify_seconds`` in which the draft's keys and values are written to the cache
    #: and those of the accepted path moved together.
    commit_seconds: float


def step_costs(
    decoder: SpeculativeDecoder, prompts: Sequence[Tokens], *, max_new_tokens: int, rounds: int = 32
) -> StepCosts:
    """Times verification, drafting and commits of a decoder separately.

    Each is a loop in a program of its own, launched once: verification of drafts that are all
    rejected, drafting that continues from its own drafts, and commits of a whole path of real keys
    and values. The compiler can fuse adjacent parts of a whole round, so the parts may add up to a
    little more than a round.

    Args:
        decoder: The decoder.
        prompts: Prompts, a row each.
        max_new_tokens: Fixes the capacity, which the cost of attention depends on.
        rounds: Rounds averaged over.
    """
    drafter = decoder.loop.drafter
    rounds = min(rounds, max_new_tokens - 1)

    # Plain decoding with padding in place of a draft, which is rejected like one.
    verifying = SpeculativeDecoder(decoder.target, Plain(drafter.num_nodes), stop_tokens=())
    pace = timed_rounds(verifying, prompts, max_new_tokens=max_new_tokens, tokens=rounds)

    block = _first_output(decoder, prompts, drafter.num_nodes).written

    def commit_rounds(state: GenerationState) -> Cache:
        return _commit_rounds(state.cache, block, loop=decoder.loop, rounds=rounds)

    commit = _seconds(commit_rounds, decoder, prompts, max_new_tokens) / rounds
    draft = draft_seconds(decoder, prompts, max_new_tokens=max_new_tokens, rounds=rounds)
    return StepCosts(pace.seconds_per_round, draft, commit)


def draft_seconds(
    decoder: SpeculativeDecoder, prompts: Sequence[Tokens], *, max_new_tokens: int, rounds: int = 32
) -> float:
    """Times a draft step; 0 without a drafter. Arguments as in :func:`step_costs`."""
    drafter = decoder.loop.drafter
    if isinstance(drafter, Plain):
        return 0.0

    features = _first_output(decoder, prompts, drafter.max_depth + 1).features

    def draft_rounds(state: GenerationState) -> Any:
        return _draft_rounds(decoder.loop, decoder.params, state, features, rounds=rounds)

    return _seconds(draft_rounds, decoder, prompts, max_new_tokens) / rounds / drafter.max_depth


def target_seconds(
    decoder: SpeculativeDecoder, prompts: Sequence[Tokens], *, max_new_tokens: int, rounds: int = 32
) -> float:
    """Times the target over a draft, logits included, without acceptance, commit and bookkeeping.

    A round without these seconds and its draft steps is the cost of the loop itself.

    Args:
        decoder: The decoder with the target and the number of nodes.
        prompts: Prompts, a row each.
        max_new_tokens: Fixes the capacity, which the cost of attention depends on.
        rounds: Forwards averaged over.
    """
    tokens = _some_tokens(prompts, decoder.loop.drafter.num_nodes)

    def target_rounds(state: GenerationState) -> Any:
        return _target_rounds(decoder.params, state.cache, tokens, loop=decoder.loop, rounds=rounds)

    return _seconds(target_rounds, decoder, prompts, max_new_tokens) / rounds


def _seconds(
    launch: Callable[[GenerationState], Any],
    decoder: SpeculativeDecoder,
    prompts: Sequence[Tokens],
    max_new_tokens: int,
) -> float:
    """Times a program that is launched with the state after the prompts."""
    # One program at a time: two of them can starve each other of the few threads that a CPU has.
    state = jax.block_until_ready(decoder.prefill(prompts, max_new_tokens=max_new_tokens))
    _, seconds = timed(launch, state)
    return seconds


def _some_tokens(prompts: Sequence[Tokens], count: int) -> Int[Array, "B T"]:
    """Returns the first ``count`` tokens of every prompt, repeated where it is shorter."""
    return jnp.stack([jnp.resize(jnp.asarray(prompt, jnp.int32), (count,)) for prompt in prompts])


def _first_output(
    decoder: SpeculativeDecoder, prompts: Sequence[Tokens], count: int
) -> TargetOutput:
    """Returns the target's output for the first ``count`` tokens of every prompt."""
    return jax.block_until_ready(
        _first_forward(decoder.loop, decoder.params, _some_tokens(prompts, count))
    )


@functools.partial(jax.jit, static_argnames=("loop", "rounds"), donate_argnames=("cache",))
def _target_rounds(
    params: LoopParams,
    cache: Cache,
    tokens: Int[Array, "B N"],
    *,
    loop: SpeculativeLoop,
    rounds: int,
) -> tuple[Cache, Float[Array, "B N V"]]:
    """Runs forwards after the same committed slots."""
    target = loop.target
    length = cache.length
    batch, num_nodes = tokens.shape
    positions = length[:, None] + jnp.arange(num_nodes, dtype=jnp.int32)[None]

    def verify(index: Array, carry: tuple[Cache, Array]) -> tuple[Cache, Array]:
        cache, _ = carry
        # Different tokens every time, or XLA would run the target only once.
        draft = (tokens + index) % target.vocab_size
        output = target(
            params.target, draft, positions, causal_mask(num_nodes), cache, **loop.target_options
        )
        logits = target.unembed(params.target, output.final)
        return cache.commit(output.written, jnp.zeros_like(length)), logits

    logits = jnp.zeros((batch, num_nodes, target.vocab_size), jnp.float32)
    return lax.fori_loop(0, rounds, verify, (cache, logits))


@functools.partial(jax.jit, static_argnames=("loop",))
def _first_forward(
    loop: SpeculativeLoop, params: LoopParams, tokens: Int[Array, "B T"]
) -> TargetOutput:
    """Runs the target with an empty cache.

    Its output has features, and keys and values or changes of a state.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    empty = loop.target.init_cache(*tokens.shape)
    mask = causal_mask(tokens.shape[1])
    return loop.target(
        params.target, tokens, positions, mask, empty, aux_layers=loop.drafter.aux_layers
    )


def _written(layer: LayerCache, new: Any, length: Int[Array, " B"]) -> Any:
    """Writes a block after the committed slots, as a forward does.

    A layer without slots is not changed.
    """
    if isinstance(layer, KeyValues):
        return layer.write(new, length)
    if isinstance(layer, LatentKeys):
        return layer.write(KeyValue(new, new), length).keys
    return new


@functools.partial(jax.jit, static_argnames=("loop", "rounds"), donate_argnames=("cache",))
def _commit_rounds(
    cache: Cache, block: tuple[Any, ...], *, loop: SpeculativeLoop, rounds: int
) -> Cache:
    """Writes a draft and commits a path of full depth, repeatedly after the same slots."""
    length = cache.length
    depth = min(loop.drafter.max_depth, loop.drafter.num_nodes - 1)
    path = jnp.broadcast_to(jnp.arange(depth + 1, dtype=jnp.int32), (length.shape[0], depth + 1))
    count = jnp.full_like(length, depth + 1)

    def commit(index: Array, cache: Cache) -> Cache:
        # Different nodes every time, or XLA would gather them only once.
        nodes = None if loop.is_chain else jnp.roll(path, index, axis=1)
        written = tuple(
            _written(layer, new, length) for layer, new in zip(cache.layers, block, strict=True)
        )
        return cache.commit(written, count, nodes).replace(length=length)

    return lax.fori_loop(0, rounds, commit, cache)


@functools.partial(jax.jit, static_argnames=("loop", "rounds"))
def _draft_rounds(
    loop: SpeculativeLoop,
    params: LoopParams,
    state: GenerationState,
    features: Float[Array, "B T A D"],
    *,
    rounds: int,
) -> Any:
    """Drafts without a target: the drafter observes its own proposals as committed tokens."""
    drafter = loop.drafter

    def draft_and_observe(index: Array, drafter_state: Any) -> Any:
        draft = propose(
            drafter, params.drafter, drafter_state, state.keys, state.sampling, state.cache
        )
        tokens = draft.tokens[:, : features.shape[1]]
        seen = Observation(
            tokens=tokens,
            # Different features every time, or XLA would fuse them only once.
            features=jnp.roll(features, index, axis=1),
            length=jnp.ones_like(state.length),
            # A function of every node, or XLA would leave out heads of the others.
            next_token=draft.tokens.max(axis=1),
        )
        proposed = drafter_state if draft.state is None else draft.state
        return drafter.observe(params.drafter, proposed, seen)

    return lax.fori_loop(0, rounds, draft_and_observe, state.drafter)
