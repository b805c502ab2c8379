"""Training of Medusa heads for a frozen target (Cai et al., 2024, section 2.2.1: Medusa-1).

Head ``k`` (from 0) learns the token ``x_{t+2+k}`` of the text from the target's final state
``h_t``::

    loss = Σ_k decay^k · mean_t CE(logits_k(h_t), x_{t+2+k})

with a decay of 0.8. The paper counts heads from 1, which scales the whole loss. Labels are the
tokens of the text, so the heads learn the target best from text that it wrote itself. The heads
start as the target's output layer: their residual blocks are zero, and their output projections are
copies of its output matrix.
"""

from __future__ import annotations

import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from eagle3_jax.drafters.medusa import MedusaDrafter
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.training.batches import (
    Frozen,
    Loss,
    TTTBatch,
    draft_ids,
    final_states,
    greedy_tau,
    later,
    share,
)

_DECAY = 0.8


def medusa_loss(
    drafter: MedusaDrafter,
    target: DecoderTarget,
    head_params: Params,
    frozen: Frozen,
    batch: TTTBatch,
    num_heads: int,
) -> Loss:
    """Returns the loss of the first ``num_heads`` heads; see :func:`.ttt_loss`.

    Returns:
        The loss, and for every head ``k`` ``loss_k``, its unweighted term, and ``accuracy_k``, the
        share of rows whose likeliest token is that of the text; and ``simulated_tau``. A token
        outside the draft vocabulary has no loss and is a miss.
    """
    frozen = lax.stop_gradient(frozen)
    states = lax.stop_gradient(final_states(target, frozen["target_params"], batch))
    to_draft = draft_ids(frozen, drafter.config.vocab_size)
    heads = drafter.bind({"head": head_params})

    metrics: dict[str, Float[Array, ""]] = {}
    loss = jnp.zeros((), jnp.float32)
    chain = []
    for head in range(num_heads):
        label = to_draft[later(batch.tokens, head + 2)]
        labelled = later(batch.loss_mask, head) & later(batch.attention_mask, head + 2)
        scores = heads.logits(states, head)
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels(
            scores, jnp.maximum(label, 0)
        )
        term = share(cross_entropy, labelled & (label >= 0))
        loss = loss + _DECAY**head * term

        hit = jnp.argmax(lax.stop_gradient(scores), axis=-1) == label
        chain.append((hit, labelled))
        metrics |= {f"loss_{head}": term, f"accuracy_{head}": share(hit, labelled)}
    return loss, {**metrics, "simulated_tau": greedy_tau(chain)}
