"""Training an EAGLE-3 head for a target: its shape, its starting point and its batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eagle3_jax.drafters.eagle3 import Eagle3Config, Eagle3Drafter, default_aux_layers
from eagle3_jax.models.config import DecoderConfig, RopeConfig
from eagle3_jax.models.functional import Params
from eagle3_jax.training.regenerate import Rows
from eagle3_jax.training.ttt import TTTBatch


def head_config(target: DecoderConfig, draft_vocab_size: int, mlp_width: int | None = None) -> Eagle3Config:
    """A head in the official layout: one layer of the target's geometry, rotary base 10000, the default features.

    Args:
        target: What it drafts for.
        draft_vocab_size: ``W``.
        mlp_width: Inner width of its SwiGLU; the target's when left out.

    Raises:
        ValueError: The official layout cannot hold it (explicit head size, or a target of fewer than 8 layers).
    """
    if target.head_dim * target.num_heads != target.width:
        raise ValueError(
            f"a head of {target.num_heads} heads of {target.head_dim} is not {target.width} wide; the official layout "
            "derives the head size from the width"
        )
    layer = dataclasses.replace(
        target,
        num_layers=1,
        mlp_width=mlp_width or target.mlp_width,
        rope=RopeConfig(),
        tie_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
    )
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        target_width=target.width,
        aux_layers=default_aux_layers(target.num_layers),
    )


def initial_head(
    drafter: Eagle3Drafter, target_params: Params, draft_to_target: Int[np.ndarray, " W"], key: jax.Array
) -> Params:
    """Random parameters, but for the final norm and the output projection, which start as the target's own rows."""
    params = drafter.init_params(key)
    if "head" in target_params:
        rows = target_params["head"]["kernel"][:, draft_to_target]
    else:
        rows = target_params["embedding"][draft_to_target].T
    params["head"]["kernel"] = jnp.asarray(rows, jnp.float32)
    params["norm"]["scale"] = jnp.asarray(target_params["norm"]["scale"], jnp.float32)
    return params


def row_batches(rows: Rows, batch: int, seed: int) -> Callable[[int], TTTBatch]:
    """Batches of regenerated rows as a function of the step alone; each pass sees every row once.

    Supervised are the rows whose label the target itself wrote. Its first token never is: it comes from the target.
    """
    real, _ = rows.masks
    index = np.arange(rows.tokens.shape[1])[None, :]
    learn = (index >= rows.prompt_length[:, None] - 1) & (index < rows.length[:, None] - 1)
    count = len(rows.tokens) // batch
    if count == 0:
        raise ValueError(f"{len(rows.tokens)} rows do not fill a batch of {batch}; regenerate more or lower it")

    def batch_at(step: int) -> TTTBatch:
        order = np.random.default_rng((seed, step // count)).permutation(len(rows.tokens))
        chosen = order[(step % count) * batch : (step % count + 1) * batch]

        def take(array: Array | np.ndarray) -> jax.Array:
            return jax.device_put(np.asarray(array)[chosen])

        tokens = take(rows.tokens.astype(np.int32))
        return TTTBatch(tokens=tokens, attention_mask=take(real), loss_mask=take(learn))

    return batch_at
