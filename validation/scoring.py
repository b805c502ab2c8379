"""Our own teacher-forced pass over given tokens: the counterpart of vLLM's ``prompt_logprobs``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eagle3_jax import LoadedTarget
from eagle3_jax.models.decoder import causal_mask
from eagle3_jax.types import TargetModel
from validation.vllm.bridge import Scored, Tokens

_ROWS, _BUCKET = 8, 64


def forced_logits(target: LoadedTarget, sequences: Sequence[Tokens]) -> list[np.ndarray]:
    """Logits after every token of each sequence, ``[T V]`` in float32, one forward for a few rows at a time."""
    found = []
    for start in range(0, len(sequences), _ROWS):
        rows = sequences[start : start + _ROWS]
        width = -(-max(map(len, rows)) // _BUCKET) * _BUCKET
        tokens = np.zeros((_ROWS, width), np.int32)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row
        logits = np.asarray(_forward(target.model, target.params, jnp.asarray(tokens)))
        found += [logits[index, : len(row)] for index, row in enumerate(rows)]
    return found


def score(target: LoadedTarget, prompts: Sequence[Tokens], outputs: Sequence[Tokens]) -> list[Scored]:
    """What our target thinks of outputs behind their prompts; see :class:`validation.vllm.bridge.Scored`."""
    sequences = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    scored = []
    for logits, prompt, output in zip(forced_logits(target, sequences), prompts, outputs, strict=True):
        before = logits[len(prompt) - 1 : -1]
        given = np.take_along_axis(before, np.array(output)[:, None], axis=1)[:, 0]
        highest = before.max(axis=1)
        scored.append(
            Scored(
                best=before.argmax(axis=1).tolist(),
                rank=(1 + (before > given[:, None]).sum(axis=1)).tolist(),
                gap=(highest - given).tolist(),
                best_value=highest.tolist(),
            )
        )
    return scored


@functools.partial(jax.jit, static_argnums=0)
def _forward(model: TargetModel, params: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    output = model(params, tokens, positions, causal_mask(tokens.shape[1]))
    return model.unembed(params, output.final)
