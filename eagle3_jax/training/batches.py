"""What every objective of a draft head is given: sequences that the target wrote, and what stays as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.training.features import Features, Known
from eagle3_jax.training.texts import Texts, buckets_of, padded
from eagle3_jax.tree import causal_mask

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
    known: Known | None = None  #: What the target gives at each token; ``None``: the objective runs the target.

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


def final_states(target: DecoderTarget, params: Params, batch: TTTBatch) -> Float[Array, "B T D"]:
    """The target's states after its final norm: those that the batch holds, or else those of a forward."""
    if batch.known is None:
        return target(params, batch.tokens, batch.positions, batch.seen).final
    return jnp.asarray(batch.known.final, target.precision.activations)


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
    tau = jnp.ones((), jnp.float32)
    alive = jnp.bool_(True)
    counted = jnp.bool_(True)
    for hit, counts in steps:
        alive = alive & hit
        counted = counted & counts
        tau = tau + share(alive, counted)
    return tau


def text_batches(
    texts: Texts, batch: int, seed: int, features: Features | None = None
) -> tuple[Callable[[int], TTTBatch], int]:
    """Batches of texts as a function of the step alone, so that an interrupted run goes on with the same ones.

    Each pass sees every text once. Texts of similar length share a batch. Batches have about as many tokens, so those
    of shorter texts have more rows.

    Args:
        texts: The texts.
        batch: Rows of a batch of the longest texts.
        seed: Random seed of the order.
        features: What the target gives at each token. Default: the objective runs the target.

    Returns:
        The function from a step to its batch, and the number of steps of a pass.
    """
    buckets = buckets_of(texts.length)
    rows = [max(1, batch * buckets[-1].length // bucket.length) for bucket in buckets]
    chunks = [
        (index, offset) for index, bucket in enumerate(buckets) for offset in range(0, len(bucket.texts), rows[index])
    ]

    @functools.lru_cache(maxsize=1)
    def orders(number: int) -> tuple[list[np.ndarray], np.ndarray]:
        """The order of the texts of each bucket, and that of the chunks."""
        random = np.random.default_rng((seed, number))
        return [random.permutation(bucket.texts) for bucket in buckets], random.permutation(len(chunks))

    def batch_at(step: int) -> TTTBatch:
        number, place = divmod(step, len(chunks))
        order, order_of_chunks = orders(number)
        index, offset = chunks[order_of_chunks[place]]
        chosen = order[index][offset : offset + rows[index]]
        key = jax.random.fold_in(jax.random.key(seed), step)
        return batch_of(texts, chosen, length=buckets[index].length, count=rows[index], key=key, features=features)

    return batch_at, len(chunks)


def batch_of(
    texts: Texts,
    chosen: Int[np.ndarray, " b"],
    *,
    length: int,
    count: int,
    key: Key[Array, ""] | None = None,
    features: Features | None = None,
) -> TTTBatch:
    """A batch of chosen texts.

    Args:
        texts: The texts.
        chosen: Indices of at most ``count`` texts.
        length: ``T``, tokens of a row.
        count: ``B``; rows without a text learn nothing.
        key: Random key of the batch.
        features: What the target gives at each token.
    """
    tokens, real = padded(texts, chosen, length, count)
    learn = np.zeros_like(real)
    start = texts.start
    for row, index in enumerate(chosen):
        answer = texts.learn[start[index] : start[index] + texts.length[index]]
        # The first token of an answer always comes from the target.
        entries = answer[1:-1] & answer[2:]
        learn[row, : len(entries)] = entries
    return TTTBatch(
        tokens=jnp.asarray(tokens),
        attention_mask=jnp.asarray(real),
        loss_mask=jnp.asarray(learn),
        key=key,
        known=None if features is None else features.of(chosen, length, count),
    )
