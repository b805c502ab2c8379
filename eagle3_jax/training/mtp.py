"""Training an MTP module for a target that is there already.

DeepSeek-V3 trains its modules together with the model, each on the text's next token (arXiv 2412.19437, equation 25).
Here the target is frozen and there is one module, so it learns what it will be asked for: ``K`` steps of itself, each
fed its own output, with the keys and values of every step kept apart (:mod:`eagle3_jax.training.ttt`)::

    L = Σ_k 0.8^k · CE(target's distribution after x_{t+1+k}, q_k)

The target's distribution in place of the text's token is what distillation gives for nothing; FastMTP (arXiv
2509.18362) takes the token, weights of 0.6^k, and leaves every step at the position and under the mask of the first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from eagle3_jax.drafters.mtp import MTPConfig, MTPDrafter
from eagle3_jax.loaded import LoadedTarget
from eagle3_jax.models.config import DecoderConfig, usual_layers
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.training.batches import Frozen, TTTBatch
from eagle3_jax.training.recipe import HeadOptions, Loss, Recipe
from eagle3_jax.training.ttt import TTTConfig, ttt_loss


def _config(target: DecoderConfig, options: HeadOptions) -> MTPConfig:
    options.refuse("mtp", "width", "draft_vocab_size", "num_layers")
    return MTPConfig(
        vocab_size=target.vocab_size,
        width=target.width,
        layers=usual_layers(target, options.mlp_width),
        num_target_layers=target.num_layers,
        max_positions=target.max_positions,
        norm_eps=target.norm_eps,
    )


def _start(
    drafter: MTPDrafter, target: LoadedTarget, draft_to_target: Int[np.ndarray, " W"] | None, key: jax.Array
) -> Params:
    """Random, but for the last norm, which starts as the target's: the target's output matrix reads what it gives."""
    del draft_to_target
    params = drafter.init_params(key)
    params["norm"]["scale"] = jnp.asarray(target.params["norm"]["scale"], jnp.float32)
    return params


def _loss(
    drafter: MTPDrafter,
    target: DecoderTarget,
    params: Params,
    frozen: Frozen,
    batch: TTTBatch,
    options: HeadOptions,
) -> Loss:
    config = TTTConfig(num_steps=options.depth, decay=0.8, denominator="supervised")
    return ttt_loss(drafter, target, params, frozen, batch, config)


RECIPE = Recipe(drafter=MTPDrafter, config=_config, start=_start, loss=_loss, depths="5")
