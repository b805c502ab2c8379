"""Log-probabilities of the tokens of a prompt, from one forward pass of the target."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eagle3_jax.decode import SpeculativeDecoder, padded_prompt
from eagle3_jax.devices.sharding import to_host, under
from eagle3_jax.stats import LogProbs, TokenLogProb
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import TargetModel


def score(decoder: SpeculativeDecoder, tokens: list[int], count: int) -> list[TokenLogProb | None]:
    """Returns the log-probability of each token after those before it, and the likeliest tokens.

    There are ``count`` likeliest tokens at each position. The first token of ``tokens`` has no
    log-probability.
    """
    target = decoder.target
    padded_length = min(padded_prompt(len(tokens)), target.max_positions)
    row = np.zeros((1, padded_length), np.int32)
    row[0, : len(tokens)] = tokens

    with under(decoder.mesh):
        scores = to_host(_scores(target.model, decoder.params.target, row, count=count))
    return [None, *scores.row(0, 0, len(tokens) - 1)]


@functools.partial(jax.jit, static_argnames=("model", "count"))
def _scores(
    model: TargetModel, params: Any, tokens: Int[Array | np.ndarray, "1 T"], *, count: int
) -> LogProbs:
    """Returns the log-probability of the token after each position, and of the likeliest ones."""
    tokens = jnp.asarray(tokens)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    output = model(params, tokens, positions, causal_mask(tokens.shape[1]))
    logits = model.unembed(params, output.final)
    following = jnp.roll(tokens, -1, axis=1)
    return LogProbs.from_logits(logits, following, count)
