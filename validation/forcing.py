"""Given tokens judged by the target, in one pass or block by block, with no drafter at all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from eagle3_jax import LoadedTarget
from eagle3_jax.cache import Cache
from eagle3_jax.models.layers import BFLOAT16, MIXED
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import TargetModel
from validation.device import exact_options
from validation.engines.vllm.bridge import Scored, Tokens

_ROWS = 16
_BUCKET = 64
# Fields of Scored: what stays of the logits of the token after each position.
Opinion = dict[str, Array]


def reference(
    target: LoadedTarget,
    prompts: Sequence[Tokens],
    outputs: Sequence[Tokens],
    judged: Sequence[Tokens] | None = None,
) -> list[Scored]:
    """Judge tokens along given outputs in one pass, with the same weights but every sum in float32.

    ``judged`` has a token for each position of each output; the outputs themselves are judged
    without it.
    """
    if target.model.precision is BFLOAT16:  # type: ignore[attr-defined]
        target = dataclasses.replace(
            target, model=dataclasses.replace(target.model, precision=MIXED)
        )  # type: ignore[type-var]
    return _judge(_compiled(_one_pass), target, prompts, outputs, judged or outputs)


def forced_logits(target: LoadedTarget, sequences: Sequence[Tokens]) -> list[np.ndarray]:
    """Logits after every token of each sequence, ``[T V]`` in float32; small vocabularies."""
    width = -(-max(map(len, sequences)) // _BUCKET) * _BUCKET
    logits_of_rows = []
    for start in range(0, len(sequences), _ROWS):
        rows = sequences[start : start + _ROWS]
        logits = np.asarray(_all_logits(target.model, target.params, padded(rows, width, _ROWS)))
        logits_of_rows += [logits[index, : len(row)] for index, row in enumerate(rows)]
    return logits_of_rows


def log_probabilities(target: LoadedTarget, texts: Sequence[Tokens]) -> list[np.ndarray]:
    """Log-probabilities along texts, from their second tokens on, ``[2 T-1]``.

    Of each token, and of the likeliest one at its place.
    """
    width = -(-max(map(len, texts)) // _BUCKET) * _BUCKET
    pairs = np.asarray(_log_probs(target.model, target.params, padded(texts, width)))
    return [pair[:, : len(text) - 1] for pair, text in zip(pairs, texts, strict=True)]


def by_blocks(
    target: LoadedTarget, prompts: Sequence[Tokens], outputs: Sequence[Tokens], *, block: int
) -> list[Scored]:
    """Judge outputs ``block`` tokens at a time over a cache, in the target's precision.

    ``block=1`` is plain decoding and ``block=K+1`` verification of a chain, both along tokens that
    are given.
    """
    return _judge(
        functools.partial(_compiled(_blocks, "block"), block=block),
        target,
        prompts,
        outputs,
        outputs,
        multiple=block,
    )


def _judge(
    function: Any,
    target: LoadedTarget,
    prompts: Sequence[Tokens],
    outputs: Sequence[Tokens],
    judged: Sequence[Tokens],
    *,
    multiple: int = 1,
) -> list[Scored]:
    fed = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    judged_ids = [[*prompt[1:], *tokens] for prompt, tokens in zip(prompts, judged, strict=True)]
    width = -(-max(map(len, fed)) // _BUCKET) * _BUCKET  # one for all, so that there is one program
    width = -(-width // multiple) * multiple

    scored = []
    for start in range(0, len(fed), _ROWS):
        rows = slice(start, start + _ROWS)
        opinions = jax.device_get(
            function(
                target.model,
                target.params,
                padded(fed[rows], width, _ROWS),
                padded(judged_ids[rows], width, _ROWS),
            )
        )
        for index, (prompt, output) in enumerate(zip(prompts[rows], outputs[rows], strict=True)):
            positions = slice(len(prompt) - 1, len(prompt) - 1 + len(output))
            scored.append(
                Scored(**{name: leaf[index, positions].tolist() for name, leaf in opinions.items()})
            )
    return scored


def padded(rows: Sequence[Tokens], width: int, count: int | None = None) -> Int[Array, "B T"]:
    """Returns rows of ``width`` tokens, padded with zeros; as many rows as given, or ``count``."""
    tokens = np.zeros((count or len(rows), width), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return jnp.asarray(tokens)


@functools.partial(jax.jit, static_argnums=0)
def _all_logits(model: TargetModel, params: Any, fed: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    positions = jnp.broadcast_to(jnp.arange(fed.shape[1], dtype=jnp.int32), fed.shape)
    return model.unembed(params, model(params, fed, positions, causal_mask(fed.shape[1])).final)


@functools.partial(jax.jit, static_argnums=0)
def _log_probs(model: TargetModel, params: Any, fed: Int[Array, "B T"]) -> Float[Array, "B 2 T"]:
    positions = jnp.broadcast_to(jnp.arange(fed.shape[1], dtype=jnp.int32), fed.shape)
    final = model(params, fed, positions, causal_mask(fed.shape[1])).final

    def pair(row: tuple[Array, Array]) -> Float[Array, "2 T"]:
        log_probs = jax.nn.log_softmax(model.unembed(params, row[0]))
        following = jnp.roll(row[1], -1)[:, None]
        return jnp.stack(
            [jnp.take_along_axis(log_probs, following, -1)[:, 0], jnp.max(log_probs, -1)]
        )

    return lax.map(pair, (final, fed))


@functools.cache
def _compiled(function: Any, *static: str) -> Any:
    """Jitted with the compiler's options of the decoding that is judged."""
    return jax.jit(
        function, static_argnums=0, static_argnames=static, compiler_options=exact_options()
    )


def _one_pass(
    model: TargetModel, params: Any, fed: Int[Array, "B T"], judged_ids: Int[Array, "B T"]
) -> Opinion:
    positions = jnp.broadcast_to(jnp.arange(fed.shape[1], dtype=jnp.int32), fed.shape)
    final = model(params, fed, positions, causal_mask(fed.shape[1])).final
    # A row at a time: with a vocabulary of 128,256 the logits of one row are a quarter of a
    # gigabyte already.
    return lax.map(lambda row: _opinion(model.unembed(params, row[0]), row[1]), (final, judged_ids))


def _blocks(
    model: TargetModel,
    params: Any,
    fed: Int[Array, "B T"],
    judged_ids: Int[Array, "B T"],
    *,
    block: int,
) -> Opinion:
    batch, width = fed.shape

    def split(row: Int[Array, "B T"]) -> Int[Array, "blocks B block"]:
        return row.reshape(batch, width // block, block).swapaxes(0, 1)

    def feed(cache: Cache, tokens: tuple[Array, Array]) -> tuple[Cache, Opinion]:
        positions = cache.length[:, None] + jnp.arange(block, dtype=jnp.int32)[None]
        output = model(params, tokens[0], positions, causal_mask(block), cache)
        judged = _opinion(model.unembed(params, output.final), tokens[1])
        return cache.commit(output.written, jnp.full((batch,), block, jnp.int32)), judged

    judged = lax.scan(feed, model.init_cache(batch, width), (split(fed), split(judged_ids)))[1]
    return jax.tree.map(lambda leaf: leaf.swapaxes(0, 1).reshape(batch, width), judged)


def _opinion(logits: Float[Array, "*rows V"], judged_ids: Int[Array, "*rows"]) -> Opinion:
    logit = jnp.take_along_axis(logits, judged_ids[..., None], axis=-1)
    highest = jnp.max(logits, axis=-1)
    return {
        "best": jnp.argmax(logits, axis=-1).astype(jnp.int32),  # the lowest id of equals
        "rank": 1 + jnp.sum(logits > logit, axis=-1, dtype=jnp.int32),
        "gap": highest - logit[..., 0],
        "best_value": highest,
    }
