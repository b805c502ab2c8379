"""Training of an EAGLE-1 head (Li et al., 2024, arXiv 2401.15077, section 3.2), and HASS.

The head regresses the target's next final state, and learns the distribution that the target
computes from it::

    L = 1.0 · SmoothL1(f'_{t+1}, f_{t+1}) + 0.1 · CE(softmax(W f_{t+1}), softmax(W f'_{t+1}))

``W`` is the target's output matrix, frozen. The regression is a mean over the width (beta 1). The
true states ``f_t`` that the head reads carry uniform noise of ±0.1, as in the paper; the official
code scales that by 512 over the length.

The paper trains one step. With more (``--unroll K``) the head also learns on its own output, all
steps with the same weight: the alignment of HASS (Zhang et al., 2024, arXiv 2408.15766), by the
rows and masks of :mod:`eagle3_jax.training.ttt`, with gradients through all steps and without
HASS's loss on the ten likeliest tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import lax

from eagle3_jax.drafters.eagle1 import Eagle1Drafter
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.training.batches import Frozen, Loss, TTTBatch, share
from eagle3_jax.training.ttt import (
    TTTConfig,
    borrowed_output,
    labelled_rows,
    loss_and_metrics,
    teacher_forward,
    unroll_head,
)

REGRESSION = 1.0
CROSS_ENTROPY = 0.1
NOISE = 0.1


def eagle1_loss(
    drafter: Eagle1Drafter,
    target: DecoderTarget,
    head_params: Params,
    frozen: Frozen,
    batch: TTTBatch,
    num_steps: int = 1,
) -> Loss:
    """Returns the mean over supervised rows, summed over steps; see :func:`.ttt_loss`.

    The paper has one step. A batch without a ``key`` has no noise.

    Returns:
        The loss and the metrics of :func:`.ttt_loss`, whose ``loss_k`` is the cross-entropy; and
        ``regression_k``.
    """
    frozen = lax.stop_gradient(frozen)
    teacher, states = teacher_forward(drafter, target, frozen, batch, num_steps)
    output = borrowed_output(drafter, target, frozen)
    params = {"head": head_params, "embedding": frozen["embedding"], "output": output}
    head = drafter.bind(params)

    inputs = states
    if batch.key is not None:
        inputs = states + jax.random.uniform(batch.key, states.shape, states.dtype, -NOISE, NOISE)

    predictions = unroll_head(drafter, params, inputs, batch, num_steps)
    logits = [drafter.logits(params, head, prediction) for prediction in predictions]
    config = TTTConfig(num_steps=num_steps, decay=1.0, denominator="supervised")
    cross_entropy, metrics = loss_and_metrics(teacher, logits, batch, config)

    regression = jnp.zeros((), jnp.float32)
    for step, prediction in enumerate(predictions):
        # No state follows the last one: rows without a label are left out, here as in the
        # cross-entropy.
        label = jnp.roll(states[:, :, 0], -step - 1, axis=1)
        difference = optax.huber_loss(prediction.astype(jnp.float32), label.astype(jnp.float32))
        distance = difference.mean(axis=-1)
        metrics[f"regression_{step}"] = share(distance, labelled_rows(batch, step))
        regression = regression + metrics[f"regression_{step}"]
    return REGRESSION * regression + CROSS_ENTROPY * cross_entropy, metrics
