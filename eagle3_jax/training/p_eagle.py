"""P-EAGLE's objective: every draft position of a text in one forward (AWS, 2026, arXiv 2602.01469).

At depth 0 a row is a true pair: token ``x_{a+1}`` and ``fc(f_a)``, at position ``a``, as in
EAGLE-3. At depth ``d`` its inputs are those of drafting after the anchor ``a``: the mask token and
the learned state, at position ``a + d``. All depths of all anchors would be ``K`` times the text,
so each depth keeps some rows of the depth before:

=================  =====================================================================
depth 0            every position
depth ``d``        ``⌊max(0, n - d) · max(r^d, r_min)⌋`` of the ``n`` supervised positions,
                   sampled from those whose predecessor was kept at depth ``d - 1``, so that
                   chains have no gaps
attention          all true pairs at ``j <= a``, and the mask rows of the same anchor up to
                   the row's depth
label              ``y_{a+d+1}``, the target's distribution after ``x_{a+d+1}``
loss               mean of ``KL(p ‖ q)`` over all supervised rows of all depths
=================  =====================================================================
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.drafters.p_eagle import PEagleDrafter, PEagleHead
from eagle3_jax.models.context import attention_contexts
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params, bind
from eagle3_jax.models.layers import embed
from eagle3_jax.training.batches import Frozen, Loss, TTTBatch, greedy_tau, share, take
from eagle3_jax.training.ttt import Teacher, teacher_forward

# r and r_min, as in speculators.
RATIO = 0.7
LEAST = 0.2


class Chains(struct.PyTreeNode, kw_only=True):
    """The rows of a forward. Those of depth 0 come first, in order: they are the text."""

    #: Position of the last true pair before a row; at depth 0 that of the row.
    anchors: Int[Array, "B S"]
    present: Bool[Array, "B S"]  #: False at padding.
    depths: tuple[int, ...] = struct.field(pytree_node=False)  #: The ``S`` depths, ascending.

    @property
    def positions(self) -> Int[Array, "B S"]:
        """Position of each row."""
        return self.anchors + jnp.asarray(self.depths, jnp.int32)[None]

    def rows_of_depth(self, depth: int) -> slice:
        """Returns the slice of the rows of one depth."""
        return slice(self.depths.index(depth), len(self.depths) - self.depths[::-1].index(depth))


def sample_chains(
    key: Key[Array, ""], valid: Bool[Array, "B T"], num_depths: int, ratio: float = RATIO
) -> Chains:
    """Samples the rows that each depth keeps, from the supervised positions."""

    def count_kept(num_valid: int, depth: int) -> int:
        return int(max(0, num_valid - depth) * max(ratio**depth, LEAST))

    batch, size = valid.shape
    index = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    anchors = [index]
    present = [jnp.ones_like(valid)]
    depths = [0] * size
    num_valid = jnp.sum(valid, axis=1)

    # The positions that a row of the next depth may have.
    pool = valid & (index > 0)
    for depth in range(1, num_depths):
        room = count_kept(size, depth)
        if room == 0:
            break

        # The `sizes` highest of random numbers; `room` is the most that any row of the batch keeps.
        sizes = jnp.asarray([count_kept(count, depth) for count in range(size + 1)])[num_valid]
        uniforms = jax.random.uniform(jax.random.fold_in(key, depth), (batch, size))
        best, chosen = lax.top_k(jnp.where(pool, uniforms, -1.0), room)
        taken = (best >= 0) & (jnp.arange(room)[None] < sizes[:, None])

        anchors.append(jnp.where(taken, chosen - depth, 0))
        present.append(taken)
        depths += [depth] * room
        pool = valid & _scatter(jnp.where(taken, chosen + 1, size), True, size)

    return Chains(
        anchors=jnp.concatenate(anchors, axis=1),
        present=jnp.concatenate(present, axis=1),
        depths=tuple(depths),
    )


def _scatter(
    index: Int[Array, "B n"], values: Bool[Array, "B n"] | bool, size: int
) -> Bool[Array, "B T"]:
    """Returns rows of ``size`` entries with the values at some indices, and False elsewhere."""
    rows = jnp.arange(len(index))[:, None]
    return jnp.zeros((len(index), size), jnp.bool_).at[rows, index].set(values, mode="drop")


def chain_mask(chains: Chains, real: Bool[Array, "B T"]) -> Bool[Array, "B S S"]:
    """Returns the attention mask: rows attend to pairs up to their anchor, and to their chain."""
    depth = jnp.asarray(chains.depths)
    padding = len(chains.depths) - real.shape[1]
    key_anchor = chains.anchors[:, None]
    query_anchor = chains.anchors[:, :, None]
    is_pair = jnp.pad(real, ((0, 0), (0, padding)))[:, None, :]
    context = is_pair & (key_anchor <= query_anchor)
    chain = (key_anchor == query_anchor) & (depth[None] <= depth[:, None])[None]
    return chains.present[:, None, :] & (context | chain)


def parallel_logits(
    drafter: PEagleDrafter,
    head_params: Params,
    embedding: Float[Array, "V D"],
    features: Float[Array, "B T A Dt"],
    batch: TTTBatch,
    chains: Chains,
) -> Float[Array, "B S W"]:
    """Returns the draft logits of all rows, in one forward."""
    head = bind(PEagleHead, drafter.config, drafter.precision, head_params)
    config = drafter.config

    masks = (batch.tokens.shape[0], len(chains.depths) - batch.tokens.shape[1])
    mask_tokens = jnp.full(masks, config.mask_token_id, jnp.int32)
    # The last pair has no token; no supervised row attends to it.
    tokens = jnp.concatenate([batch.tokens[:, 1:], batch.tokens[:, :1], mask_tokens], axis=1)
    fused_mask = jnp.broadcast_to(head.fused_mask(), (*masks, config.width))
    stream = jnp.concatenate([head.fuse(features), fused_mask], axis=1)

    mask = chain_mask(chains, batch.attention_mask)
    positions = chains.positions
    seen = attention_contexts(config.layers, mask, positions)
    output, _ = head(embed(embedding, tokens, drafter.precision), stream, positions, seen)
    return head.logits(output)


def p_eagle_loss(
    drafter: PEagleDrafter,
    target: DecoderTarget,
    head_params: Params,
    frozen: Frozen,
    batch: TTTBatch,
    num_depths: int = 8,
) -> Loss:
    """Returns the mean of ``KL(p ‖ q)`` over supervised rows of all depths; see :func:`.ttt_loss`.

    The key of the batch chooses the rows; without a key they are always the same.

    Returns:
        The loss, and for every depth ``k`` ``accuracy_k`` and ``acceptance_k`` of the sampled rows;
        and ``simulated_tau``, at each depth over the chains that reach it.
    """
    frozen = lax.stop_gradient(frozen)
    size = batch.tokens.shape[1]
    teacher, features = teacher_forward(drafter, target, frozen, batch, 1)
    real = batch.attention_mask
    valid = batch.loss_mask & real & jnp.pad(real[:, 1:], ((0, 0), (0, 1)))
    chains = sample_chains(jax.random.key(0) if batch.key is None else batch.key, valid, num_depths)
    logits = parallel_logits(drafter, head_params, frozen["embedding"], features, batch, chains)

    position = jnp.where(chains.present, chains.positions, 0)
    label = Teacher(*(take(leaf, position + 1) for leaf in teacher))
    counted = chains.present & take(valid, position)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    divergence = jnp.sum(
        jax.scipy.special.xlogy(label.probs, label.probs) - label.probs * logprobs, axis=-1
    )
    loss = share(divergence, counted)

    logprobs = lax.stop_gradient(logprobs)
    metrics = {}
    chain = []
    hits = jnp.argmax(logprobs, axis=-1) == label.best
    overlap = jnp.minimum(label.full_probs, jnp.exp(logprobs)).sum(-1)
    for depth in range(chains.depths[-1] + 1):
        rows = chains.rows_of_depth(depth)
        hit = hits[:, rows]
        counts = counted[:, rows]
        metrics[f"accuracy_{depth}"] = share(hit, counts)
        metrics[f"acceptance_{depth}"] = share(overlap[:, rows], counts)
        # A chain is the column of its anchor, at all depths.
        anchor = jnp.where(counts, chains.anchors[:, rows], size)
        chain.append((_scatter(anchor, hit, size), _scatter(anchor, counts, size)))
    return loss, {**metrics, "simulated_tau": greedy_tau(chain)}
