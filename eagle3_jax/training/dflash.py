"""Training of block drafters: many blocks of a sequence in one pass.

A block starts at an anchor ``x_a``, a random token of the text that the target wrote. Its inputs
are those of drafting, mask tokens after the anchor. It attends to the features of ``x_0 ..
x_{a-1}`` and to itself, but to no other block. Its ``k``-th prediction, of ``x_{a+k}``, weighs
``exp(-(k - 1) / gamma)``. With the target's distribution ``p`` after ``x_{a+k-1}`` the objectives
are:

* DFlash (arXiv 2602.06036): ``CE(x_{a+k}, q)`` on the text itself; ``gamma`` 7, 5 and 4 for blocks
  of 16, 10 and 8.
* DSpark (arXiv 2607.05147): ``0.1 CE(x_{a+k}, q) + 0.9 |p - q|_1``, with the bias after the tokens
  of the text. The confidence has the loss ``BCE(c, sum_v min(p, q))``.
* DFlash2: DFlash's, and ``CE(x_{a+k}, q)`` of the scores after the tokens of the text, where
  ``x_{a+k}`` is a candidate. DFlash's own term has the logits without the scores.
* JetSpec (arXiv 2606.18394): ``T^2 KL(p_T, q_T)``, with the same weight at all positions, in causal
  blocks.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.drafters.dflash import DFlashConfig, DFlashDrafter, DFlashHead, is_near
from eagle3_jax.models.attention import Segment
from eagle3_jax.models.context import BlockContext
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.training.batches import (
    Frozen,
    Loss,
    TTTBatch,
    draft_ids,
    extend,
    greedy_tau,
    share,
    take,
)
from eagle3_jax.training.ttt import Teacher, teacher_forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockObjective:
    """Weights of the terms of a block's loss."""

    text: float = 0.0  #: Weight of the cross-entropy on the tokens of the text.
    selector: float = 0.0  #: Weight of the cross-entropy on those that are among the candidates.
    distance: float = 0.0  #: Weight of ``|p - q|_1``.
    divergence: float = 0.0  #: Weight of ``T^2 KL(p_T, q_T)``.
    confidence: float = 0.0  #: Weight of the confidence's cross-entropy.
    temperature: float = 1.0  #: ``T`` of the divergence.
    decays: bool = True  #: Whether later positions weigh less.
    num_anchors: int = 64  #: Largest number of blocks of a sequence.


def block_loss(
    drafter: DFlashDrafter,
    target: DecoderTarget,
    head_params: Params,
    frozen: Frozen,
    batch: TTTBatch,
    objective: BlockObjective,
) -> Loss:
    """Returns the weighted sum of the means of the terms; see :func:`.ttt_loss`.

    The means are over the supervised predictions. Without a ``key`` the first anchors are taken.

    Returns:
        The loss; ``accuracy_k`` and ``acceptance_k`` of the prediction ``k + 1`` tokens after the
        anchor; and ``simulated_tau``.
    """
    frozen = lax.stop_gradient(frozen)
    count = drafter.config.num_predicted
    teacher, features = teacher_forward(drafter, target, frozen, batch, count)
    anchors, is_anchor = choose_anchors(batch, objective.num_anchors)
    blocks = run_blocks(drafter, target, head_params, frozen, features, batch, anchors)
    logits, survival, unary = blocks

    # The token before each prediction.
    at = anchors[:, :, None] + jnp.arange(count)[None, None]
    label = Teacher(*(take(leaf, at) for leaf in teacher))
    real = extend(batch.attention_mask, count + 1)
    learn = extend(batch.loss_mask, count + 1)
    supervised = is_anchor[:, :, None] & take(learn, at - 1) & take(real, at)

    gamma = decay_of(drafter.config) if objective.decays else jnp.inf
    weight = jnp.exp(-jnp.arange(count, dtype=jnp.float32) / gamma)

    def mean(values: Array, mask: Array = supervised) -> Array:
        return share(weight[None, None] * values, mask)

    p = label.full_probs
    log_q = jax.nn.log_softmax(logits)
    q = jnp.exp(log_q)
    overlap = jnp.minimum(p, q).sum(-1)

    loss = jnp.zeros((), jnp.float32)
    ids = draft_ids(frozen, target.vocab_size)[batch.tokens]
    word = take(extend(ids, count + 1, -1), at + 1)
    is_word = supervised & (word >= 0) & take(real, at + 1)

    def entropy_of(log_q: Array) -> Array:
        chosen = jnp.take_along_axis(log_q, jnp.maximum(word, 0)[..., None], axis=-1)[..., 0]
        # Tokens that are not candidates have probability zero. NaN stays NaN.
        is_possible = ~jnp.isneginf(chosen)
        return mean(jnp.where(is_possible, -chosen, 0.0), is_word & is_possible)

    if objective.text:
        loss += objective.text * entropy_of(jax.nn.log_softmax(unary))
    if objective.selector:
        loss += objective.selector * entropy_of(log_q)
    # Of the tokens outside the draft vocabulary q has none, and p has 1 - mass.
    if objective.distance:
        loss += objective.distance * mean(jnp.abs(p - q).sum(-1) + 1 - label.mass)
    if objective.divergence:
        loss += objective.divergence * mean(_divergence(label.probs, logits, objective.temperature))
    if objective.confidence and survival is not None:
        # BCE of a logit s and a label y: softplus(s) - y s.
        entropy = jax.nn.softplus(survival) - lax.stop_gradient(overlap) * survival
        loss += objective.confidence * mean(entropy)

    hit = jnp.argmax(logits, axis=-1) == label.best
    metrics = {f"accuracy_{k}": share(hit[..., k], supervised[..., k]) for k in range(count)}
    metrics |= {f"acceptance_{k}": share(overlap[..., k], supervised[..., k]) for k in range(count)}
    metrics["simulated_tau"] = greedy_tau((hit[..., k], supervised[..., k]) for k in range(count))
    return loss, lax.stop_gradient(metrics)


def choose_anchors(batch: TTTBatch, count: int) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Returns up to ``count`` ascending positions whose next token is worth learning.

    The second result is a mask of the real entries.
    """
    size = batch.tokens.shape[1]
    allowed = batch.learns_next
    order = -jnp.arange(size, dtype=jnp.float32)
    if batch.key is not None:
        order = jax.random.uniform(batch.key, batch.tokens.shape)

    # Entries that are not allowed go past the end, so that sorting moves them behind the others.
    _, chosen = lax.top_k(jnp.where(allowed, order, -jnp.inf), min(count, size))
    chosen = jnp.sort(jnp.where(jnp.take_along_axis(allowed, chosen, axis=1), chosen, size), axis=1)
    return jnp.minimum(chosen, size - 1), chosen < size


def run_blocks(
    drafter: DFlashDrafter,
    target: DecoderTarget,
    head_params: Params,
    frozen: Frozen,
    features: Float[Array, "B T A_aux Dt"],
    batch: TTTBatch,
    anchors: Int[Array, "B A"],
) -> tuple[Float[Array, "B A K W"], Float[Array, "B A K"] | None, Float[Array, "B A K W"]]:
    """Returns the logits and the confidence logits of all blocks, after the tokens of the text.

    The logits have the bias of the Markov head or the scores of the selector, if there is one. Of
    the third result, the logits for the cross-entropy on the text, a selector has no part.
    """
    config = drafter.config
    count = drafter.config.num_predicted
    rows = config.block_size
    batch_size, num = anchors.shape
    params = drafter.assemble(
        head_params, target.tables(frozen["target_params"]), embedding=frozen["embedding"]
    )
    head: DFlashHead = drafter.bind(params)
    context = head.context(features, batch.positions)

    positions = anchors[:, :, None] + jnp.arange(rows, dtype=jnp.int32)[None, None]
    first = jnp.take_along_axis(batch.tokens, anchors, axis=1)
    tokens = jnp.full((batch_size, num, rows), config.mask_token, jnp.int32).at[:, :, 0].set(first)
    before = (batch.positions[:, None] < anchors[:, :, None]) & batch.attention_mask[:, None]
    context_mask = jnp.repeat(before, rows, axis=1)
    flat = (batch_size, num * rows)
    masks = {}
    for window in dict.fromkeys(config.windows):
        seen = context_mask
        if window is not None:
            seen = seen & is_near(positions.reshape(flat), batch.positions, window)
        masks[window] = (seen, same_block(num, config, window))

    contexts = []
    for kv, window in zip(context, config.windows, strict=True):
        seen, block_mask = masks[window]
        contexts.append(BlockContext((Segment(kv, seen),), block_mask))
    embedded = drafter.embedded(params, tokens.reshape(flat))
    hidden = head(embedded, positions.reshape(flat), contexts).reshape(batch_size, num, rows, -1)
    hidden = hidden[:, :, rows - count :]

    before_prediction = anchors[:, :, None] + jnp.arange(count)[None, None]
    previous = take(extend(batch.tokens, count), before_prediction)

    # The logits of a token depend on the token before it and, through the carry, on all before.
    flat_hidden = hidden.reshape(batch_size * num, count, -1)
    base = drafter.logits(params, head, flat_hidden)
    level = drafter.level(head, flat_hidden, base)
    rank = 0 if config.markov is None else config.markov.rank
    carry = jnp.zeros((batch_size * num, 1, rank), hidden.dtype)
    steps = []
    for k in range(count):
        step = level(k, previous[:, :, k].reshape(-1, 1), carry)
        carry = step.carry
        steps.append(step.logits)
    shape = (batch_size, num, count, -1)
    logits = jnp.concatenate(steps, axis=1).reshape(shape)

    survival = None
    if config.confidence is not None:
        survival = jax.vmap(head.survival, (2, 2), 2)(hidden, previous)
    return logits, survival, logits if config.markov is not None else base.reshape(shape)


def same_block(num: int, config: DFlashConfig, window: int | None) -> Bool[Array, "1 R R"]:
    """Returns the attention mask of ``num`` blocks in layers with a window.

    Rows attend to their own block only.
    """
    row = jnp.arange(num * config.block_size)
    block = row // config.block_size
    mask = block[:, None] == block[None, :]
    if config.is_causal(window):
        mask &= row[:, None] >= row[None, :]
    if window is not None:
        mask &= is_near(row[None], row[None], window)[0]
    return mask[None]


def decay_of(config: DFlashConfig) -> float:
    """Returns ``gamma``: 7, 5 and 4 are published for blocks of 16, 10 and 8."""
    return 7.0 if config.block_size >= 16 else 5.0 if config.block_size >= 10 else 4.0


def _divergence(
    p: Float[Array, "*n W"], logits: Float[Array, "*n W"], temperature: float
) -> Float[Array, "*n"]:
    log_p = jax.nn.log_softmax(jnp.log(jnp.maximum(p, jnp.finfo(jnp.float32).tiny)) / temperature)
    log_q = jax.nn.log_softmax(logits / temperature)
    return temperature**2 * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
