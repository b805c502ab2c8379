"""Distilling a draft model from its target (DistillSpec, Zhou et al., 2023, arXiv 2310.08461).

At every position ``t`` of a text that the target wrote, the small model ``q`` learns the target's
distribution ``p``:

    ``loss = mean_t KL(p(. | x_0 .. x_t) || q(. | x_0 .. x_t))``

This is the forward divergence on text of the target, one of the combinations that the paper
compares. The paper gains more from texts that the draft model writes itself while it learns, which
is not implemented here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from eagle3_jax.drafters.draft_model import DraftModel
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.training.batches import (
    Frozen,
    Loss,
    TTTBatch,
    final_states,
    greedy_tau,
    later,
    share,
)


def distillation_loss(
    drafter: DraftModel,
    target: DecoderTarget,
    params: Params,
    frozen: Frozen,
    batch: TTTBatch,
    depth: int,
) -> Loss:
    """Returns the mean divergence over supervised positions, in nats; see :func:`.ttt_loss`.

    Position ``t`` is supervised if the target wrote ``x_{t+1}`` and it is worth learning: entry ``t
    - 1`` of the batch's ``loss_mask``.

    Returns:
        The loss, and for each of ``depth`` draft positions ``k`` the share ``accuracy_k`` of
        positions ``t + k`` whose argmax is the target's; ``acceptance_0``, the mean of ``Σ_v
        min(p_v, q_v)``; and ``simulated_tau``.
    """
    log_p = lax.stop_gradient(_logprobs(target, frozen["target_params"], batch))
    log_q = _logprobs(drafter.model, params, batch.replace(known=None))
    p = jnp.exp(log_p)
    supervised = batch.learns_next
    loss = share(jnp.sum(p * (log_p - log_q), axis=-1), supervised)

    hit = jnp.argmax(log_q, axis=-1) == jnp.argmax(log_p, axis=-1)
    overlap = jnp.sum(jnp.minimum(p, jnp.exp(lax.stop_gradient(log_q))), axis=-1)
    chain = [(later(hit, k), later(supervised, k)) for k in range(depth)]
    metrics = {f"accuracy_{k}": share(*step) for k, step in enumerate(chain)}
    return loss, {
        **metrics,
        "acceptance_0": share(overlap, supervised),
        "simulated_tau": greedy_tau(chain),
    }


def _logprobs(model: DecoderTarget, params: Params, batch: TTTBatch) -> Float[Array, "B T V"]:
    return jax.nn.log_softmax(model.unembed(params, final_states(model, params, batch)), axis=-1)
