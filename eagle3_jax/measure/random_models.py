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

from eagle3_jax.decode import LoadedDrafter, LoadedTarget
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform, usual_head
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import BFLOAT16, Precision
from eagle3_jax.theory.shapes import KNOWN_MODELS, ModelShape

_MADE_UP = (
    # Of the proportions of Llama, small enough for a few CPU cores; the last two for trying things out.
    ModelShape(
        name="Llama-100M", vocab_size=32_000, width=768, mlp_width=2048, num_layers=12, num_heads=12, num_kv_heads=4,
        head_dim=64, tie_embeddings=True, max_positions=8192,
    ),
    ModelShape(
        name="Llama-tiny", vocab_size=512, width=32, mlp_width=48, num_layers=8, num_heads=4, num_kv_heads=2,
        head_dim=8, tie_embeddings=True, max_positions=512,
    ),
    ModelShape(
        name="Qwen3-tiny", vocab_size=512, width=32, mlp_width=48, num_layers=8, num_heads=4, num_kv_heads=2,
        head_dim=8, qk_norm=True, max_positions=512,
    ),
)  # fmt: skip
SHAPES = KNOWN_MODELS | {shape.name.lower(): shape for shape in _MADE_UP}
_MOST_POSITIONS = 8192  # longer ones change nothing that is measured here
_HEADROOM = 0.1  # of what a model needs: activations, and programs


def shape_named(name: str) -> ModelShape:
    """The shape of that name, whatever its case.

    Raises:
        ValueError: There is none.
    """
    if name.lower() not in SHAPES:
        raise ValueError(f"there is no shape {name!r}; use one of {', '.join(shape.name for shape in SHAPES.values())}")
    return SHAPES[name.lower()]


def config_of(shape: ModelShape) -> DecoderConfig:
    """A decoder of a shape. Rotary frequencies and epsilons are the defaults: no step costs more for others."""
    return DecoderConfig(
        vocab_size=shape.vocab_size,
        width=shape.width,
        layers=uniform(
            shape.num_layers,
            GroupedQuery(
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                qk_norm=shape.qk_norm,
            ),
            GatedMLP(width=shape.mlp_width),
        ),
        max_positions=min(shape.max_positions, _MOST_POSITIONS),
        tie_embeddings=shape.tie_embeddings,
    )


def random_pair(
    shape: ModelShape, *, precision: Precision = BFLOAT16, seed: int = 0
) -> tuple[LoadedTarget, LoadedDrafter]:
    """A target and an EAGLE-3 head of a shape; nothing of it ever lies on the host."""
    config = config_of(shape)
    model, drafter = DecoderTarget(config, precision), Eagle3Drafter(usual_head(config), precision=precision)
    target_key, head_key = jax.random.split(jax.random.key(seed))
    params = _draw(model.param_shapes(), target_key, precision)
    target = LoadedTarget(model, params, config.vocab_size, config.max_positions, name=f"{shape.name}, random weights")
    head = {
        "head": _draw(drafter.param_shapes(), head_key, precision),
        "embedding": params["embedding"],
        "draft_to_target": jnp.arange(drafter.config.draft_vocab_size, dtype=jnp.int32),
    }
    return target, LoadedDrafter(drafter, head, f"EAGLE-3 head of {shape.name}, random weights")


def bytes_needed(shape: ModelShape, *, batch: int, capacity: int, precision: Precision = BFLOAT16) -> int:
    """Device memory of a random pair and its caches for ``batch`` rows of ``capacity`` slots, with headroom."""
    config = config_of(shape)
    head = Eagle3Drafter(usual_head(config), precision=precision)
    shapes = DecoderTarget(config, precision).param_shapes(), head.param_shapes()
    weights = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
    cache = batch * capacity * (shape.num_layers + 1) * 2 * shape.num_kv_heads * shape.head_dim
    logits = 4 * batch * 64 * config.vocab_size  # of the largest draft, in float32
    operand, activation = jnp.dtype(precision.operands).itemsize, jnp.dtype(precision.activations).itemsize
    return int((weights * operand + cache * activation + logits) * (1 + _HEADROOM))


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


def _draw(shapes: Any, key: jax.Array, precision: Precision) -> Any:
    """One array at a time, so that no more than one is ever there twice."""
    flat, structure = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(key, len(flat))
    leaves = []
    for (path, leaf), one in zip(flat, keys, strict=True):
        name = getattr(path[-1], "key", str(path[-1]))
        if len(leaf.shape) == 1:
            leaves.append(jnp.full(leaf.shape, 1.0 if name == "scale" else 0.0, precision.activations))
        else:
            scale = 1.0 if name == "embedding" else leaf.shape[0] ** -0.5
            leaves.append(_normal(one, shape=leaf.shape, scale=scale, dtype=jnp.dtype(precision.operands).name))
    return jax.tree_util.tree_unflatten(structure, leaves)


@functools.partial(jax.jit, static_argnames=("shape", "scale", "dtype"))
def _normal(key: jax.Array, *, shape: tuple[int, ...], scale: float, dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)
