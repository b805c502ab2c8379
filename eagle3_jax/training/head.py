"""Training an EAGLE-3 head for a target: its shape, its starting point and its batches."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.models.config import DecoderConfig, Eagle3Config, usual_head
from eagle3_jax.models.functional import Params
from eagle3_jax.training.regenerate import Rows
from eagle3_jax.training.ttt import TTTBatch


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
    mixer = head.layers[0].mixer
    if mixer.head_dim * mixer.num_heads != head.width:
        raise ValueError(
            f"a head of {mixer.num_heads} heads of {mixer.head_dim} is not {head.width} wide; the official layout "
            "derives the head size from the width"
        )
    return head


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
