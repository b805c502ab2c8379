"""Models of real shapes with random weights, made on the device: speed and memory without a download.

Their text means nothing and their drafts are accepted by chance, but a step of theirs costs what a step of the real
model costs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import LoadedDrafter, LoadedTarget
from eagle3_jax.drafters import Eagle3Config, Eagle3Drafter
from eagle3_jax.drafters.eagle3 import default_aux_layers
from eagle3_jax.models.config import DecoderConfig, RopeConfig
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import BFLOAT16

_LLAMA3_ROPE = RopeConfig(theta=500_000.0, type="llama3", factor=8.0, original_max_positions=8192)
_LLAMA32_ROPE = RopeConfig(theta=500_000.0, type="llama3", factor=32.0, original_max_positions=8192)

SHAPES = {
    "Llama-3.1-8B": DecoderConfig(
        vocab_size=128_256, width=4096, mlp_width=14_336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        rope=_LLAMA3_ROPE, max_positions=8192, norm_eps=1e-5,
    ),
    "Llama-3.2-1B": DecoderConfig(
        vocab_size=128_256, width=2048, mlp_width=8192, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64,
        rope=_LLAMA32_ROPE, max_positions=8192, norm_eps=1e-5, tie_embeddings=True,
    ),
    "Qwen3-8B": DecoderConfig(
        vocab_size=151_936, width=4096, mlp_width=12_288, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128,
        rope=RopeConfig(theta=1_000_000.0), max_positions=8192, qk_norm=True,
    ),
}  # fmt: skip
REHEARSAL_SHAPES = {
    "tiny Llama": DecoderConfig(
        vocab_size=512, width=32, mlp_width=48, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=8,
        max_positions=512, norm_eps=1e-5, tie_embeddings=True,
    ),
    "tiny Qwen3": DecoderConfig(
        vocab_size=512, width=32, mlp_width=48, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=8,
        max_positions=512, qk_norm=True,
    ),
}  # fmt: skip
DRAFT_VOCAB = 32_000
_HEADROOM = 0.1  # of what a model needs: activations, and programs


def random_pair(name: str, config: DecoderConfig, *, seed: int = 0) -> tuple[LoadedTarget, LoadedDrafter]:
    """A target and an EAGLE-3 head of a shape, in bfloat16; nothing of it ever lies on the host."""
    model, drafter = DecoderTarget(config, BFLOAT16), Eagle3Drafter(head_config(config), precision=BFLOAT16)
    target_key, head_key = jax.random.split(jax.random.key(seed))
    params = _draw(model.param_shapes(), target_key)
    target = LoadedTarget(model, params, config.vocab_size, config.max_positions, name=f"{name}, random weights")
    head = {
        "head": _draw(drafter.param_shapes(), head_key),
        "embedding": params["embedding"],
        "draft_to_target": jnp.arange(drafter.config.draft_vocab_size, dtype=jnp.int32),
    }
    return target, LoadedDrafter(drafter, head, f"EAGLE-3 head of {name}, random weights")


def head_config(target: DecoderConfig) -> Eagle3Config:
    """The head that is published for a target of this shape: one layer of its geometry, 32,000 draft tokens."""
    layer = DecoderConfig(
        vocab_size=target.vocab_size,
        width=target.width,
        mlp_width=target.mlp_width,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_positions=target.max_positions,
        norm_eps=target.norm_eps,
    )
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=min(DRAFT_VOCAB, target.vocab_size),
        target_width=target.width,
        aux_layers=default_aux_layers(target.num_layers),
    )


def bytes_needed(config: DecoderConfig, *, batch: int, capacity: int) -> int:
    """Device memory of a random pair and its caches for ``batch`` rows of ``capacity`` slots, with headroom."""
    head = head_config(config)
    shapes = DecoderTarget(config, BFLOAT16).param_shapes(), Eagle3Drafter(head, precision=BFLOAT16).param_shapes()
    weights = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
    cache = batch * capacity * (config.num_layers + 1) * 2 * config.num_kv_heads * config.head_dim
    logits = (
        2 * batch * 64 * config.vocab_size
    )  # of the largest draft, in float32: two more bfloat16 arrays of this size
    return int((weights + cache + logits) * 2 * (1 + _HEADROOM))


def why_not(needed: int, stats: Mapping[str, int] | None) -> str | None:
    """Why so many bytes do not fit on a device; ``None`` where they do.

    Args:
        needed: Bytes.
        stats: The device's ``memory_stats()``; ``None`` where it keeps none.
    """
    if stats is None or "bytes_limit" not in stats:
        return "the device does not tell how much memory it has"
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if needed <= free:
        return None
    return f"it needs {needed / 2**30:.1f} GiB and the device has {max(free, 0) / 2**30:.1f} GiB left"


def _draw(shapes: Any, key: jax.Array) -> Any:
    """One array at a time, so that no more than one is ever there twice."""
    flat, structure = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(key, len(flat))
    leaves = []
    for (path, leaf), one in zip(flat, keys, strict=True):
        name = getattr(path[-1], "key", str(path[-1]))
        if len(leaf.shape) == 1:
            leaves.append(jnp.full(leaf.shape, 1.0 if name == "scale" else 0.0, jnp.bfloat16))
        else:
            scale = 1.0 if name == "embedding" else leaf.shape[0] ** -0.5
            leaves.append(_normal(one, shape=leaf.shape, scale=scale))
    return jax.tree_util.tree_unflatten(structure, leaves)


@functools.partial(jax.jit, static_argnames=("shape", "scale"))
def _normal(key: jax.Array, *, shape: tuple[int, ...], scale: float) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(scale)
