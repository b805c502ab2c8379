"""Training an EAGLE-3 head for a target: its shape and its starting point."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eagle3_jax.drafters._network import NetworkDrafter
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.loaded import LoadedTarget
from eagle3_jax.models.config import DecoderConfig, Eagle3Config, grouped, usual_head
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.training.batches import Frozen, TTTBatch
from eagle3_jax.training.recipe import HeadOptions, Loss, Recipe
from eagle3_jax.training.ttt import TTTConfig, ttt_loss


def official_head(target: DecoderConfig, draft_vocab_size: int, mlp_width: int | None = None) -> Eagle3Config:
    """The usual head, where the official layout can hold it.

    Args:
        target: What it drafts for.
        draft_vocab_size: ``W``.
        mlp_width: Inner width of its SwiGLU; the target's when left out.

    Raises:
        ValueError: It cannot (explicit head size), or the target has fewer than 8 layers.
    """
    head = usual_head(target, draft_vocab_size=draft_vocab_size, mlp_width=mlp_width)
    mixer = grouped(head.layers[0])
    if mixer.head_dim * mixer.num_heads != head.width:
        raise ValueError(
            f"a head of {mixer.num_heads} heads of {mixer.head_dim} is not {head.width} wide; the official layout "
            "derives the head size from the width"
        )
    return head


def initial_head(
    drafter: NetworkDrafter,
    unembedding: Float[Array, "D V"],
    final_norm: Float[Array, " D"],
    draft_to_target: Int[np.ndarray, " W"],
    key: jax.Array,
) -> Params:
    """Random parameters, but for ``norm`` and ``head``, the final norm and the output projection: the target's own."""
    params = drafter.init_params(key)
    params["head"]["kernel"] = jnp.asarray(unembedding[:, draft_to_target], jnp.float32)
    params["norm"]["scale"] = jnp.asarray(final_norm, jnp.float32)
    return params


def _config(target: DecoderConfig, options: HeadOptions) -> Eagle3Config:
    options.refuse("eagle3", "width", "num_layers")
    return official_head(target, options.draft_vocab_size or target.vocab_size, options.mlp_width)


def start(
    drafter: NetworkDrafter, target: LoadedTarget, draft_to_target: Int[np.ndarray, " W"] | None, key: jax.Array
) -> Params:
    """The first parameters of a head with an output projection of its own: :func:`initial_head` of this target."""
    ids = np.arange(target.vocab_size) if draft_to_target is None else draft_to_target
    unembedding = target.model.tables(target.params).unembedding  # type: ignore[attr-defined]
    return initial_head(drafter, unembedding, target.params["norm"]["scale"], ids, key)


def _loss(
    drafter: Eagle3Drafter,
    target: DecoderTarget,
    params: Params,
    frozen: Frozen,
    batch: TTTBatch,
    options: HeadOptions,
) -> Loss:
    config = TTTConfig(num_steps=options.depth, denominator="supervised")
    return ttt_loss(drafter, target, params, frozen, batch, config)


RECIPE = Recipe(drafter=Eagle3Drafter, config=_config, start=start, loss=_loss, depths="300:2,5", draft_vocab_size=2048)
