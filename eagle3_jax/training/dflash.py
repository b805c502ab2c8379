"""Training block drafters: many blocks of a sequence in one pass, each behind the features before its anchor.

A block starts at an anchor ``x_a`` that is drawn from the text which the target wrote. It is fed as when drafting, with
masks behind the anchor, and sees the features of ``x_0 .. x_{a-1}`` and itself, but no other block. Its ``k``-th
prediction, of ``x_{a+k}``, weighs ``exp(-(k - 1) / gamma)``; ``p`` is the target's distribution after ``x_{a+k-1}``:

* DFlash (arXiv 2602.06036): ``CE(x_{a+k}, q)`` on the text itself; ``gamma`` 7, 5 and 4 for blocks of 16, 10 and 8.
* DSpark (arXiv 2607.05147): ``0.1 CE(x_{a+k}, q) + 0.9 |p - q|_1``, the bias read off the text's own tokens, and the
  confidence by ``BCE(c, sum_v min(p, q))``.
* JetSpec (arXiv 2606.18394): ``T^2 KL(p_T, q_T)``, all positions alike, in causal blocks.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.drafters.dflash import DFlashConfig, DFlashDrafter, DFlashHead
from eagle3_jax.models.attention import Segment
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.models.layers import embed
from eagle3_jax.models.memory import BlockMemory
from eagle3_jax.training.batches import Frozen, Loss, TTTBatch, draft_ids, extend, greedy_tau, share
from eagle3_jax.training.ttt import Teacher, teacher_forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockObjective:
    """What a block is trained on."""

    text: float = 0.0  #: Weight of the cross-entropy on the text's own tokens.
    distance: float = 0.0  #: Weight of ``|p - q|_1``.
    divergence: float = 0.0  #: Weight of ``T^2 KL(p_T, q_T)``.
    confidence: float = 0.0  #: Weight of the confidence's cross-entropy.
    temperature: float = 1.0  #: ``T`` of the divergence.
    decays: bool = True  #: Whether later positions weigh less.
    num_anchors: int = 64  #: Blocks of a sequence; fewer where the text allows fewer.


def block_loss(
    drafter: DFlashDrafter,
    target: DecoderTarget,
    head_params: Params,
    frozen: Frozen,
    batch: TTTBatch,
    objective: BlockObjective,
) -> Loss:
    """The weighted sum of each term's mean over the supervised predictions; see :func:`.ttt_loss`.

    A batch without a ``key`` takes the first anchors.

    Returns:
        The loss; ``accuracy_k`` and ``acceptance_k`` of the prediction ``k + 1`` tokens after the anchor; and
        ``simulated_tau``.
    """
    frozen = lax.stop_gradient(frozen)
    count = drafter.config.num_predicted
    teacher, features = teacher_forward(drafter, target, frozen, batch, count)
    anchors, is_anchor = choose_anchors(batch, objective.num_anchors)
    logits, survival = run_blocks(drafter, target, head_params, frozen, features, batch, anchors)

    at = anchors[:, :, None] + jnp.arange(count)  # the token before each prediction
    label = Teacher(*(_take(leaf, at) for leaf in teacher))
    real, learn = (extend(mask, count + 1) for mask in (batch.attention_mask, batch.loss_mask))
    supervised = is_anchor[:, :, None] & _take(learn, at - 1) & _take(real, at)
    gamma = decay_of(drafter.config) if objective.decays else jnp.inf
    weight = jnp.exp(-jnp.arange(count, dtype=jnp.float32) / gamma)

    def mean(values: Float[Array, "B A K"], mask: Bool[Array, "B A K"] = supervised) -> Float[Array, ""]:
        return jnp.sum(jnp.where(mask, weight * values, 0.0)) / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)

    p = label.probs * label.mass[..., None]
    log_q = jax.nn.log_softmax(logits)
    overlap = jnp.minimum(p, jnp.exp(log_q)).sum(-1)
    loss = jnp.zeros((), jnp.float32)
    if objective.text:
        ids = draft_ids(frozen, target.vocab_size)[batch.tokens]
        word = _take(extend(ids, count + 1, -1), at + 1)
        chosen = jnp.take_along_axis(log_q, jnp.maximum(word, 0)[..., None], axis=-1)[..., 0]
        loss += objective.text * mean(-chosen, supervised & (word >= 0) & _take(real, at + 1))
    if objective.distance:
        loss += objective.distance * mean(jnp.abs(p - jnp.exp(log_q)).sum(-1) + 1 - label.mass)
    if objective.divergence:
        loss += objective.divergence * mean(_divergence(label.probs, logits, objective.temperature))
    if objective.confidence and survival is not None:
        loss += objective.confidence * mean(jax.nn.softplus(survival) - lax.stop_gradient(overlap) * survival)

    hit = jnp.argmax(logits, axis=-1) == label.best
    steps = [(hit[..., k], overlap[..., k], supervised[..., k]) for k in range(count)]
    metrics = {f"accuracy_{k}": share(right, counted) for k, (right, _, counted) in enumerate(steps)}
    metrics |= {f"acceptance_{k}": share(shared, counted) for k, (_, shared, counted) in enumerate(steps)}
    metrics["simulated_tau"] = greedy_tau((right, counted) for right, _, counted in steps)
    return loss, lax.stop_gradient(metrics)


def choose_anchors(batch: TTTBatch, count: int) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Up to ``count`` places whose next token is worth learning, ascending, and which of them there are."""
    size = batch.tokens.shape[1]
    allowed = batch.attention_mask & jnp.pad(batch.loss_mask, ((0, 0), (1, 0)))[:, :size]
    order = -jnp.arange(size, dtype=jnp.float32)
    if batch.key is not None:
        order = jax.random.uniform(batch.key, batch.tokens.shape)
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
) -> tuple[Float[Array, "B A K W"], Float[Array, "B A K"] | None]:
    """Logits (with the bias, if any) and confidence logits of all blocks; both are given the text's own tokens."""
    config = drafter.config
    count = drafter.config.num_predicted
    rows = config.block_size
    rowcount, num = anchors.shape
    params = drafter.assemble(head_params, target.tables(frozen["target_params"]), embedding=frozen["embedding"])
    head: DFlashHead = drafter.bind(params)
    context = head.context(features, batch.positions)

    place = anchors[:, :, None] + jnp.arange(rows, dtype=jnp.int32)
    first = jnp.take_along_axis(batch.tokens, anchors, axis=1)
    tokens = jnp.full((rowcount, num, rows), config.mask_token, jnp.int32).at[:, :, 0].set(first)
    before = (batch.positions[:, None] < anchors[:, :, None]) & batch.attention_mask[:, None]
    memories = [BlockMemory((Segment(kv, jnp.repeat(before, rows, axis=1)),), own_block(num, config)) for kv in context]
    flat = (rowcount, num * rows)
    embedded = embed(params["embedding"], tokens.reshape(flat), drafter.precision)
    hidden = head(embedded, place.reshape(flat), memories).reshape(rowcount, num, rows, -1)[:, :, rows - count :]

    logits = drafter.logits(params, head, hidden.reshape(rowcount, num * count, -1)).reshape(rowcount, num, count, -1)
    given = _take(extend(batch.tokens, count), anchors[:, :, None] + jnp.arange(count))
    if config.markov is not None:
        state = jnp.zeros((rowcount, num, config.markov.rank), hidden.dtype)
        bias = []
        for k in range(count):
            step, state = head.markov(given[:, :, k], hidden[:, :, k], state)
            bias.append(step)
        logits = logits + jnp.stack(bias, axis=2)
    survival = None
    if config.confidence is not None:
        survival = jax.vmap(head.survival, (2, 2), 2)(hidden, given)
    return logits, survival


def own_block(num: int, config: DFlashConfig) -> Bool[Array, "1 R R"]:
    """Which rows of ``num`` blocks side by side see each other: those of one block, causally where it is."""
    row = jnp.arange(num * config.block_size)
    block = row // config.block_size
    same = block[:, None] == block[None, :]
    return (same & (row[:, None] >= row[None, :]) if config.causal else same)[None]


def decay_of(config: DFlashConfig) -> float:
    """``gamma``: 7, 5 and 4 are published for blocks of 16, 10 and 8."""
    return 7.0 if config.block_size >= 16 else 5.0 if config.block_size >= 10 else 4.0


def _divergence(p: Float[Array, "*n W"], logits: Float[Array, "*n W"], temperature: float) -> Float[Array, "*n"]:
    log_p = jax.nn.log_softmax(jnp.log(jnp.maximum(p, jnp.finfo(jnp.float32).tiny)) / temperature)
    log_q = jax.nn.log_softmax(logits / temperature)
    return temperature**2 * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def _take(x: Array, at: Int[Array, "B A K"]) -> Array:
    """``x[b, at[b]]`` for every row."""
    return jax.vmap(lambda row, index: row[index])(x, at)
