"""P-EAGLE's objective: every draft position of a text in one forward (AWS, 2026, arXiv 2602.01469).

At depth 0 a row is a true pair: token ``x_{a+1}`` and ``fc(f_a)``, at position ``a``, as EAGLE-3 has it. At depth
``d`` it is what drafting puts there behind the anchor ``a``: the mask token and the learned state, at position
``a + d``. All depths of all anchors would be ``K`` times the text, so each depth keeps some of the one before:

=================  ==================================================================================================
depth 0            every position
depth ``d``        ``⌊max(0, n - d) · max(r^d, r_min)⌋`` of the ``n`` supervised positions, drawn among those whose
                   neighbour before was kept at depth ``d - 1``: what is kept is chains without gaps
attention          all true pairs at ``j <= a``, and the mask rows of the same anchor up to its own depth
label              ``y_{a+d+1}``, the target's distribution after ``x_{a+d+1}``
loss               mean of ``KL(p ‖ q)`` over all rows that are supervised, whatever their depth
=================  ==================================================================================================
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.drafters.p_eagle import PEagleDrafter, PEagleHead
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params, bind
from eagle3_jax.models.layers import embed
from eagle3_jax.models.memory import memories
from eagle3_jax.training.batches import Frozen, Loss, TTTBatch, greedy_tau, share
from eagle3_jax.training.ttt import Teacher, teacher_forward

# r and r_min, as in speculators
RATIO = 0.7
LEAST = 0.2


class Chains(struct.PyTreeNode, kw_only=True):
    """Rows to run, those of depth 0 first and in order: the text itself."""

    anchors: Int[Array, "B S"]  #: Position of the last true pair that a row stands behind; its own at depth 0.
    present: Bool[Array, "B S"]  #: False at padding, where fewer were kept than there is room for.
    depths: tuple[int, ...] = struct.field(pytree_node=False)  #: ``S`` depths, ascending.

    @property
    def positions(self) -> Int[Array, "B S"]:
        """Where each row stands."""
        return self.anchors + jnp.asarray(self.depths, jnp.int32)

    def of_depth(self, depth: int) -> slice:
        """The rows of one depth."""
        return slice(self.depths.index(depth), len(self.depths) - self.depths[::-1].index(depth))


def draw_chains(key: Key[Array, ""], valid: Bool[Array, "B T"], num_depths: int, ratio: float = RATIO) -> Chains:
    """Chooses the rows that each depth keeps, among the supervised positions."""

    def kept(num_valid: int, depth: int) -> int:
        return int(max(0, num_valid - depth) * max(ratio**depth, LEAST))

    batch, size = valid.shape
    index = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    anchors = [index]
    present = [jnp.ones_like(valid)]
    depths = [0] * size
    num_valid = jnp.sum(valid, axis=1)
    pool = valid & (index > 0)
    for depth in range(1, num_depths):
        room = kept(size, depth)
        if room == 0:
            break
        sizes = jnp.asarray([kept(count, depth) for count in range(size + 1)])[num_valid]
        dice = jax.random.uniform(jax.random.fold_in(key, depth), (batch, size))
        best, chosen = lax.top_k(jnp.where(pool, dice, -1.0), room)
        taken = (best >= 0) & (jnp.arange(room) < sizes[:, None])
        anchors.append(jnp.where(taken, chosen - depth, 0))
        present.append(taken)
        depths += [depth] * room
        follows = jax.vmap(lambda at: jnp.zeros((size,), jnp.bool_).at[at].set(True, mode="drop"))
        pool = valid & follows(jnp.where(taken, chosen + 1, size))
    return Chains(
        anchors=jnp.concatenate(anchors, axis=1), present=jnp.concatenate(present, axis=1), depths=tuple(depths)
    )


def chain_mask(chains: Chains, real: Bool[Array, "B T"]) -> Bool[Array, "B S S"]:
    """Who sees whom: the true pairs up to the anchor, and what stands before a row in its own chain."""
    depth = jnp.asarray(chains.depths)
    padding = len(chains.depths) - real.shape[1]
    context = jnp.pad(real, ((0, 0), (0, padding)))[:, None, :] & (
        chains.anchors[:, None] <= chains.anchors[:, :, None]
    )
    own = (chains.anchors[:, None] == chains.anchors[:, :, None]) & (depth <= depth[:, None])
    return chains.present[:, None, :] & (context | own)


def parallel_logits(
    drafter: PEagleDrafter,
    head_params: Params,
    embedding: Float[Array, "V D"],
    features: Float[Array, "B T A Dt"],
    batch: TTTBatch,
    chains: Chains,
) -> Float[Array, "B S W"]:
    """Draft logits of all rows, in one forward."""
    head = bind(PEagleHead, drafter.config, drafter.precision, head_params)
    masks = (batch.tokens.shape[0], len(chains.depths) - batch.tokens.shape[1])
    # The last pair has no token; no row that is supervised sees it.
    tokens = jnp.concatenate(
        [batch.tokens[:, 1:], batch.tokens[:, :1], jnp.full(masks, drafter.config.mask_token_id, jnp.int32)], axis=1
    )
    fused_mask = jnp.broadcast_to(head.fused_mask(), (*masks, drafter.config.width))
    stream = jnp.concatenate([head.fuse(features), fused_mask], axis=1)
    mask = chain_mask(chains, batch.attention_mask)
    positions = chains.positions
    seen = memories(drafter.config.layers, mask, positions)
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
    """The mean of ``KL(p ‖ q)`` over supervised rows of all depths; see :func:`.ttt_loss`.

    The key of the batch draws the rows; without it they are always the same.

    Returns:
        The loss, and for every depth ``k`` ``accuracy_k`` and ``acceptance_k`` of the rows that were drawn; and
        ``simulated_tau`` over the chains that were drawn as deep.
    """
    frozen = lax.stop_gradient(frozen)
    size = batch.tokens.shape[1]
    teacher, features = teacher_forward(drafter, target, frozen, batch, 1)
    real = batch.attention_mask
    valid = batch.loss_mask & real & jnp.pad(real[:, 1:], ((0, 0), (0, 1)))
    chains = draw_chains(jax.random.key(0) if batch.key is None else batch.key, valid, num_depths)
    logits = parallel_logits(drafter, head_params, frozen["embedding"], features, batch, chains)

    place = jnp.where(chains.present, chains.positions, 0)
    take = jax.vmap(lambda leaf, at: leaf[at])
    label = Teacher(*(take(leaf, place + 1) for leaf in teacher))
    counted = chains.present & take(valid, place)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    divergence = jnp.sum(jax.scipy.special.xlogy(label.probs, label.probs) - label.probs * logprobs, axis=-1)
    loss = share(divergence, counted)

    logprobs = lax.stop_gradient(logprobs)
    metrics = {}
    chain = []
    hits = jnp.argmax(logprobs, axis=-1) == label.best
    overlap = jnp.minimum(label.probs * label.mass[..., None], jnp.exp(logprobs)).sum(-1)
    for depth in range(chains.depths[-1] + 1):
        part = chains.of_depth(depth)
        hit = hits[:, part]
        here = counted[:, part]
        anchor = chains.anchors[:, part]
        metrics[f"accuracy_{depth}"] = share(hit, here)
        metrics[f"acceptance_{depth}"] = share(overlap[:, part], here)
        at_anchors = jax.vmap(lambda at, one: jnp.zeros((size,), jnp.bool_).at[at].set(one, mode="drop"))
        anchor = jnp.where(here, anchor, size)
        chain.append((at_anchors(anchor, hit), at_anchors(anchor, here)))
    return loss, {**metrics, "simulated_tau": greedy_tau(chain)}
