"""The inputs of every objective of a draft head: batches, and arrays that are not trained."""

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

# A loss and its metrics.
Loss = tuple[Float[Array, ""], dict[str, Float[Array, ""]]]


class TTTBatch(struct.PyTreeNode, kw_only=True):
    """Sequences to learn from."""

    tokens: Int[Array, "B T"]
    attention_mask: Bool[Array, "B T"]  #: False at padding.
    #: True where the token *after the next* is worth learning: entry ``t + k`` supervises row ``t``
    #: of step ``k``: its label is ``x_{t+k+2}``. For an assistant turn at ``s .. e`` these are
    #: entries ``s - 1 .. e - 2``: its first token always comes from the target.
    loss_mask: Bool[Array, "B T"]
    #: Random key of objectives that add noise or sample rows; every batch has another.
    key: Key[Array, ""] | None = None
    #: The target's stored features and states; ``None``: the objective runs the target.
    known: Known | None = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        """Position of each token, counted from the first column, padding or not."""
        return jnp.broadcast_to(
            jnp.arange(self.tokens.shape[1], dtype=jnp.int32), self.tokens.shape
        )

    @property
    def learns_next(self) -> Bool[Array, "B T"]:
        """True at tokens whose next token is worth learning."""
        return jnp.pad(self.loss_mask[:, :-1], ((0, 0), (1, 0))) & self.attention_mask

    @property
    def seen(self) -> Bool[Array, "B T T"]:
        """Attention mask: each token attends to the text up to itself."""
        return causal_mask(self.tokens.shape[1]) & self.attention_mask[:, None, :]


class Frozen(TypedDict):
    """Arrays that the objective reads and never trains."""

    target_params: Params  #: Parameters of the target.
    embedding: Float[Array, "V D"]  #: The head's token embedding, usually the target's.
    #: Target id of every draft id; ``None`` if these are the same.
    draft_to_target: Int[Array, " W"] | None


def final_states(target: DecoderTarget, params: Params, batch: TTTBatch) -> Float[Array, "B T D"]:
    """Returns the target's states after its final norm, from the batch or else from a forward."""
    if batch.known is None:
        return target(params, batch.tokens, batch.positions, batch.seen).final
    return jnp.asarray(batch.known.final, target.precision.activations)


def draft_ids(frozen: Frozen, vocab_size: int) -> Int[Array, " V"]:
    """Returns the draft id of every target id; -1 if the head has none."""
    ids = frozen["draft_to_target"]
    if ids is None:
        return jnp.arange(vocab_size, dtype=jnp.int32)
    none = jnp.full((vocab_size,), -1, jnp.int32)
    return none.at[ids].set(jnp.arange(ids.shape[0], dtype=jnp.int32))


def extend(x: Array, count: int, fill: Array | int | float = 0) -> Array:
    """Appends ``count`` columns of ``fill``, so that every shift is a slice."""
    tail = jnp.broadcast_to(jnp.asarray(fill, x.dtype), (x.shape[0], count, *x.shape[2:]))
    return jnp.concatenate([x, tail], axis=1)


def later(x: Array, shift: int, fill: int = 0) -> Array:
    """Returns ``x`` at ``t + shift`` in column ``t``; ``fill`` past the end."""
    return extend(x, shift, fill)[:, shift:]


def take(x: Array, index: Int[Array, "B ..."]) -> Array:
    """Returns ``x[b, index[b]]`` for every row ``b``."""
    return jax.vmap(lambda row, index: row[index])(x, index)


def share(values: Array, mask: Bool[Array, "*n"]) -> Float[Array, ""]:
    """Returns the mean of the values where the mask is True; 0 if it is True nowhere."""
    total = jnp.sum(jnp.where(mask, values.astype(jnp.float32), 0.0))
    return total / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)


def greedy_tau(steps: Iterable[tuple[Array, Bool[Array, "*n"]]]) -> Float[Array, ""]:
    """Returns the tokens per target forward of a greedy chain of drafts.

    They are 1 plus, for each draft position, the share of rows in which this draft and all before
    it hit.

    Args:
        steps: For each draft position, the rows in which it hits, and the rows that count. A row
            counts at a position if it counts at all positions before.
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
    """Returns batches of texts as a function of the step only.

    So an interrupted run continues with the same ones. Each pass sees every text once. Texts of
    similar length share a batch. Batches have about as many tokens, so those of shorter texts have
    more rows.

    Args:
        texts: The texts.
        batch: Rows of a batch of the longest texts.
        seed: Random seed of the order.
        features: The stored features of the texts. Default: the objective runs the target.

    Returns:
        The function from a step to its batch, and the number of steps of a pass.
    """
    buckets = buckets_of(texts.length)
    rows = [max(1, batch * buckets[-1].length // bucket.length) for bucket in buckets]
    chunks = [
        (index, offset)
        for index, bucket in enumerate(buckets)
        for offset in range(0, len(bucket.texts), rows[index])
    ]

    @functools.lru_cache(maxsize=1)
    def orders(number: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Returns the order of the texts of each bucket, and that of the chunks."""
        random = np.random.default_rng((seed, number))
        orders_of_texts = [random.permutation(bucket.texts) for bucket in buckets]
        return orders_of_texts, random.permutation(len(chunks))

    def batch_at(step: int) -> TTTBatch:
        number, index = divmod(step, len(chunks))
        order, order_of_chunks = orders(number)
        bucket, offset = chunks[order_of_chunks[index]]
        chosen = order[bucket][offset : offset + rows[bucket]]

        key = jax.random.fold_in(jax.random.key(seed), step)
        return batch_of(
            texts,
            chosen,
            length=buckets[bucket].length,
            count=rows[bucket],
            key=key,
            features=features,
        )

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
    """Returns a batch of chosen texts.

    Args:
        texts: The texts.
        chosen: Indices of at most ``count`` texts.
        length: ``T``, tokens of a row.
        count: ``B``; rows without a text learn nothing.
        key: Random key of the batch.
        features: The stored features of the texts.
    """
    tokens, real = padded(texts, chosen, length, count)
    learn = np.zeros_like(real)
    for row, index in enumerate(chosen):
        answer = texts.learn[texts.span(index)]
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
