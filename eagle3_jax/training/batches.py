"""What every objective of a draft head is given: sequences that the target wrote, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.models.functional import Params
from eagle3_jax.models.memory import causal_mask
from eagle3_jax.training.regenerate import Rows

Loss = tuple[Float[Array, ""], dict[str, Float[Array, ""]]]  # a loss and its metrics


class TTTBatch(struct.PyTreeNode, kw_only=True):
    """Sequences to learn from."""

    tokens: Int[Array, "B T"]
    attention_mask: Bool[Array, "B T"]  #: False at padding.
    #: True where the token *after the next* is worth learning: row ``t`` of step ``k`` is supervised by entry ``t + k``
    #: and predicts ``x_{t+k+2}``. For an assistant turn at ``s .. e`` these are entries ``s - 1 .. e - 2``: its first
    #: token always comes from the target.
    loss_mask: Bool[Array, "B T"]
    #: Random key of objectives that sample what they train on; another one for every batch.
    key: Key[Array, ""] | None = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        """Counted from the first column, padding or not."""
        return jnp.broadcast_to(jnp.arange(self.tokens.shape[1], dtype=jnp.int32), self.tokens.shape)

    @property
    def seen(self) -> Bool[Array, "B T T"]:
        """What each token sees: the text up to itself."""
        return causal_mask(self.tokens.shape[1]) & self.attention_mask[:, None, :]


class Frozen(TypedDict):
    """What the objective reads and never trains."""

    target_params: Params  #: Parameters of the target.
    embedding: Float[Array, "V D"]  #: The head's token embedding, mostly the target's own.
    draft_to_target: Int[Array, " W"] | None  #: Target id of every draft id; ``None`` where these are the same.


def draft_ids(frozen: Frozen, vocab_size: int) -> Int[Array, " V"]:
    """Draft id of every target id; -1 where the head has none."""
    ids = frozen["draft_to_target"]
    if ids is None:
        return jnp.arange(vocab_size, dtype=jnp.int32)
    return jnp.full((vocab_size,), -1, jnp.int32).at[ids].set(jnp.arange(ids.shape[0], dtype=jnp.int32))


def extend(x: Array, count: int, fill: Array | int | float = 0) -> Array:
    """Append ``count`` columns of ``fill``, so that every shift is a slice."""
    tail = jnp.broadcast_to(jnp.asarray(fill, x.dtype), (x.shape[0], count, *x.shape[2:]))
    return jnp.concatenate([x, tail], axis=1)


def share(values: Array, mask: Bool[Array, "*n"]) -> Float[Array, ""]:
    """Mean of the values where the mask holds; 0 where it holds nowhere."""
    total = jnp.sum(jnp.where(mask, values.astype(jnp.float32), 0.0))
    return total / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)


def greedy_tau(steps: Iterable[tuple[Array, Bool[Array, "*n"]]]) -> Float[Array, ""]:
    """Tokens per target forward of a greedy chain: 1 plus the share of rows in which each draft and all before it hit.

    Args:
        steps: For each draft position, in which rows it hits and which rows count. A row counts while it has always.
    """
    tau, alive, counted = jnp.ones((), jnp.float32), jnp.bool_(True), jnp.bool_(True)
    for hit, counts in steps:
        alive, counted = alive & hit, counted & counts
        tau = tau + share(alive, counted)
    return tau


def row_batches(rows: Rows, batch: int, seed: int) -> Callable[[int], TTTBatch]:
    """Batches of regenerated rows as a function of the step alone; each pass sees every row once.

    Supervised are the rows whose label the target itself wrote. Its first token never is: it comes from the target.
    """
    real, _ = rows.masks
    index = np.arange(rows.tokens.shape[1])[None, :]
    learn = (index >= rows.prompt_length[:, None] - 1) & (index < rows.length[:, None] - 1)
    count = len(rows.tokens) // batch
    if count == 0:
        raise ValueError(f"{len(rows.tokens)} rows do not fill a batch of {batch}; regenerate more or lower it")

    def batch_at(step: int) -> TTTBatch:
        order = np.random.default_rng((seed, step // count)).permutation(len(rows.tokens))
        chosen = order[(step % count) * batch : (step % count + 1) * batch]

        def take(array: Array | np.ndarray) -> jax.Array:
            return jax.device_put(np.asarray(array)[chosen])

        tokens = take(rows.tokens.astype(np.int32))
        key = jax.random.fold_in(jax.random.key(seed), step)
        return TTTBatch(tokens=tokens, attention_mask=take(real), loss_mask=take(learn), key=key)

    return batch_at
