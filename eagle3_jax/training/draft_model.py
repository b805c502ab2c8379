"""Distilling a draft model from its target (DistillSpec, Zhou et al., 2023, arXiv 2310.08461).

At every position ``t`` of a text that the target wrote, the small model ``q`` learns the target's distribution ``p``:

    ``loss = mean_t KL(p(. | x_0 .. x_t) || q(. | x_0 .. x_t))``

The forward divergence on the target's own text, one of the combinations that the paper compares. The paper gains more
from texts that the draft model writes itself while it learns, which is not done here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from eagle3_jax.drafters.draft_model import DraftModel
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.training.batches import Frozen, Loss, TTTBatch, share


def distillation_loss(
    drafter: DraftModel,
    target: DecoderTarget,
    params: Params,
    frozen: Frozen,
    batch: TTTBatch,
    depth: int,
) -> Loss:
    """The mean divergence over supervised positions, in nats, differentiable in ``params`` alone.

    Position ``t`` is supervised where the target wrote ``x_{t+1}`` and it is worth learning: entry ``t - 1`` of the
    batch's ``loss_mask``.

    Args:
        drafter: The draft model.
        target: The target, whose distribution is learned.
        params: Parameters of the draft model, which are trained.
        frozen: The target's parameters; the rest is not used.
        batch: Sequences; positions are counted from the first column.
        depth: Number of draft positions in the metrics.

    Returns:
        The loss, and for each draft position ``k`` the share ``accuracy_k`` of positions ``t + k`` whose argmax is the
        target's; ``acceptance_0``, the mean of ``Σ_v min(p_v, q_v)``; and ``simulated_tau``, tokens per target forward
        of a greedy chain of ``depth`` drafts on this text.
    """

    def logprobs(model: DecoderTarget, params: Params) -> Float[Array, "B T V"]:
        output = model(params, batch.tokens, batch.positions, batch.seen)
        return jax.nn.log_softmax(model.unembed(params, output.final), axis=-1)

    log_p = lax.stop_gradient(logprobs(target, frozen["target_params"]))
    log_q, p = logprobs(drafter.model, params), jnp.exp(log_p)
    supervised = jnp.pad(batch.loss_mask[:, :-1], ((0, 0), (1, 0))) & batch.attention_mask
    loss = share(jnp.sum(p * (log_p - log_q), axis=-1), supervised)

    hit = (jnp.argmax(log_q, axis=-1) == jnp.argmax(log_p, axis=-1)).astype(jnp.float32)
    overlap = jnp.sum(jnp.minimum(p, jnp.exp(lax.stop_gradient(log_q))), axis=-1)
    metrics = {"acceptance_0": share(overlap, supervised)}
    tau, alive, chain = 1.0, jnp.ones_like(hit), jnp.ones_like(supervised)
    for k in range(depth):
        behind = batch.tokens.shape[1] - k
        metrics[f"accuracy_{k}"] = share(hit[:, k:], supervised[:, k:])
        alive, chain = alive[:, :behind] * hit[:, k:], chain[:, :behind] & supervised[:, k:]
        tau = tau + share(alive, chain)
    return loss, {**metrics, "simulated_tau": jnp.asarray(tau)}
