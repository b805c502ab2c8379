"""Next-token training of small targets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.tree import causal_mask


class Phase(NamedTuple):
    """A phase of training with one batch shape. Short sequences first make early steps cheap."""

    until_step: int  #: First step that does not belong to it.
    batch: int  #: Rows.
    length: int  #: Tokens per row.


def next_token_loss(
    target: DecoderTarget, params: Params, tokens: Int[Array, "B T"]
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns the mean cross-entropy of tokens given those before them, and the share of hits.

    The cross-entropy is in nats. A hit is a token that is the likeliest one.
    """
    labels = tokens[:, 1:]
    tokens = tokens[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    output = target(params, tokens, positions, causal_mask(tokens.shape[1]))
    logits = target.unembed(params, output.final)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, {"accuracy": (jnp.argmax(logits, -1) == labels).mean()}


def random_windows(
    data: np.ndarray, phases: tuple[Phase, ...], seed: int
) -> Callable[[int], Int[Array, "B T"]]:
    """Returns batches of random windows of one long token row, as a function of the step only.

    Windows tile the row from a random offset, and each pass visits every tile once in a random
    order, so that no text is seen twice before all has been seen once.
    """
    for phase in phases:
        # The offset costs up to one window.
        if 2 * phase.length + 1 > len(data):
            raise ValueError(
                f"the data holds {len(data)} tokens; windows of {phase.length} need at least"
                f" {2 * phase.length + 1}"
            )
    return functools.partial(_windows_at, data, phases, seed)


def _windows_at(
    data: np.ndarray, phases: tuple[Phase, ...], seed: int, step: int
) -> Int[Array, "B T"]:
    phase = next(phase for phase in phases if step < phase.until_step)
    start = max((earlier.until_step for earlier in phases if earlier.until_step <= step), default=0)
    tiles = (len(data) - 1) // phase.length - 1

    # Rows are counted from the start of the phase; each pass over the tiles has its own order.
    rows = np.arange(phase.batch) + (step - start) * phase.batch
    starts = np.empty(phase.batch, np.int64)
    for passed in np.unique(rows // tiles):
        rng = np.random.default_rng((seed, phase.length, int(passed)))
        offset = rng.integers(phase.length)
        order = rng.permutation(tiles)
        in_pass = rows // tiles == passed
        starts[in_pass] = offset + phase.length * order[rows[in_pass] % tiles]

    windows = starts[:, None] + np.arange(phase.length + 1)[None, :]
    return jax.device_put(data[windows].astype(np.int32))
