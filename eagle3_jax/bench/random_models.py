"""Models of real shapes with random weights: speed and memory without a download.

Their text is meaningless and their drafts are accepted by chance, but a step costs as much as a
step of the real model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.decode import LoadedDrafter, LoadedTarget
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform, usual_head
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import BFLOAT16, Precision
from eagle3_jax.models.quantised import (
    INT8_LARGEST,
    LARGEST,
    QuantisedKernel,
    check_weights,
    quantised_shapes,
)
from eagle3_jax.theory.known_models import KNOWN_MODELS, known_name

_TINY = GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=8)
_SMALL = {
    # Small models with the proportions of Llama for a few CPU cores; the last two are for
    # experiments.
    "Llama-100M": DecoderConfig(
        vocab_size=32_000,
        width=768,
        layers=uniform(
            12, GroupedQuery(num_heads=12, num_kv_heads=4, head_dim=64), GatedMLP(width=2048)
        ),
        max_positions=8192,
        tie_embeddings=True,
    ),
    "Llama-tiny": DecoderConfig(
        vocab_size=512,
        width=32,
        layers=uniform(8, _TINY, GatedMLP(width=48)),
        max_positions=512,
        tie_embeddings=True,
    ),
    "Qwen3-tiny": DecoderConfig(
        vocab_size=512,
        width=32,
        layers=uniform(8, dataclasses.replace(_TINY, qk_norm=True), GatedMLP(width=48)),
        max_positions=512,
    ),
}
SHAPES = KNOWN_MODELS | _SMALL
# More positions do not change the measurements.
_MOST_POSITIONS = 8192
# Standard deviations; about one in 16,000 normal numbers is farther out.
_CUT = 4.0
# Share added for activations and programs.
_HEADROOM = 0.1


def shape_name(name: str) -> str:
    """Returns the name of a shape in its usual spelling, from a name in any case.

    Raises:
        ValueError: There is no such shape.
    """
    if known := known_name(name, SHAPES):
        return known
    raise ValueError(f"there is no shape {name!r}; use one of {', '.join(SHAPES)}")


def shape_named(name: str) -> DecoderConfig:
    """Returns the configuration of a shape by its name, in any case.

    Raises:
        ValueError: There is no such shape.
    """
    return SHAPES[shape_name(name)]


def random_pair(
    shape: str | DecoderConfig,
    *,
    precision: Precision = BFLOAT16,
    num_layers: int | None = None,
    weights: str = "dense",
) -> tuple[LoadedTarget, LoadedDrafter]:
    """Makes a target of a shape and its usual EAGLE-3 head on the device.

    Args:
        shape: A name of :data:`SHAPES`, or a configuration.
        precision: Precision of weights and activations.
        num_layers: Number of layers, at least 2, for experiments; ``None`` for those of the shape.
        weights: How the kernels of both are stored, one of ``models.quantised.WEIGHTS``. Those in
            few bits are sampled so, so that they never take more memory.

    Raises:
        ValueError: There is no such shape, or no such way to store kernels.
    """
    check_weights(weights)
    name = "a model" if isinstance(shape, DecoderConfig) else shape_name(shape)
    config = shape if isinstance(shape, DecoderConfig) else SHAPES[name]
    positions = min(config.max_positions, _MOST_POSITIONS)
    config = dataclasses.replace(config, layers=config.layers[:num_layers], max_positions=positions)

    head = usual_head(config, aux_layers=None if num_layers is None else (0, 1, 2))
    model = DecoderTarget(config, precision)
    drafter = Eagle3Drafter(head, precision=precision)
    target_key, head_key = jax.random.split(jax.random.key(0))

    params = _sample(_shapes(model, weights), target_key, precision)
    target = LoadedTarget(
        model,
        params,
        config.vocab_size,
        config.max_positions,
        name=f"{name}, random weights",
        weights=weights,
    )

    head_params = {
        "head": _sample(_shapes(drafter, weights), head_key, precision),
        "embedding": params["embedding"],
        "draft_to_target": jnp.arange(drafter.config.draft_vocab_size, dtype=jnp.int32),
    }
    return target, LoadedDrafter(drafter, head_params, f"EAGLE-3 head of {name}, random weights")


def bytes_needed(
    config: DecoderConfig, *, batch: int, capacity: int, precision: Precision = BFLOAT16
) -> int:
    """Counts the device memory of a random pair and its caches.

    Args:
        config: Configuration of the target.
        batch: Number of rows.
        capacity: Slots of a row.
        precision: Precision of weights and activations.
    """
    model = DecoderTarget(config, precision)
    drafter = Eagle3Drafter(usual_head(config), precision=precision)
    shapes = jax.tree.leaves((model.param_shapes(), drafter.param_shapes()))
    weights = sum(leaf.size for leaf in shapes) * jnp.dtype(precision.operands).itemsize

    def states() -> list[jax.Array]:
        return jax.tree.leaves(
            (model.init_cache(batch, capacity), drafter.init({}, batch, capacity))
        )

    caches = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.eval_shape(states))
    # Of the largest draft, in float32.
    logits = 4 * batch * 64 * config.vocab_size
    return int((weights + caches + logits) * (1 + _HEADROOM))


def why_not(needed: int, stats: Mapping[str, int] | None) -> str | None:
    """Returns the reason why some bytes do not fit on a device; ``None`` if they fit.

    Args:
        needed: Number of bytes.
        stats: The device's ``memory_stats()``; ``None`` if it keeps none.
    """
    if stats is None or "bytes_limit" not in stats:
        return "the device does not tell how much memory it has"
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if needed <= free:
        return None
    return (
        f"it needs {needed / 2**30:.1f} GiB and the device has {max(free, 0) / 2**30:.1f} GiB left"
    )


def _shapes(part: DecoderTarget | Eagle3Drafter, weights: str) -> Any:
    """Returns the shapes of parameters, with :class:`QuantisedKernel` for quantised weights."""
    shapes = part.param_shapes()
    if weights == "dense":
        return shapes
    return quantised_shapes(shapes, part.param_products(), weights)


def _sample(shapes: Any, key: jax.Array, precision: Precision) -> Any:
    """Samples one array at a time, so that at most one temporary copy exists."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=_is_kernel)

    arrays = []
    for (path, leaf), leaf_key in zip(leaves, jax.random.split(key, len(leaves)), strict=True):
        name = getattr(path[-1], "key", str(path[-1]))
        # Outputs of a product then have the variance of its inputs.
        deviation = 1.0 if name == "embedding" else leaf.shape[0] ** -0.5
        if isinstance(leaf, QuantisedKernel):
            arrays.append(_few_bits(leaf, leaf_key, deviation))
        elif len(leaf.shape) == 1:
            value = 1.0 if name == "scale" else 0.0
            arrays.append(jnp.full(leaf.shape, value, precision.activations))
        else:
            dtype = jnp.dtype(precision.operands).name
            arrays.append(_normal(leaf_key, shape=leaf.shape, scale=deviation, dtype=dtype))

    return jax.tree.unflatten(tree, arrays)


def _is_kernel(leaf: Any) -> bool:
    return isinstance(leaf, QuantisedKernel)


def _few_bits(shapes: QuantisedKernel, key: jax.Array, deviation: float) -> QuantisedKernel:
    """Samples a kernel of normal numbers, cut off at :data:`_CUT` standard deviations."""
    dtype = shapes.values.dtype.name
    largest = {"int4": 7.0, "int8": INT8_LARGEST}.get(dtype, LARGEST)
    values = _rounded_normal(
        key, shape=shapes.values.shape, scale=largest / _CUT, largest=largest, dtype=dtype
    )
    scale = jnp.full(shapes.scale.shape, deviation * _CUT / largest, jnp.float32)
    return dataclasses.replace(shapes, values=values, scale=scale)


@functools.partial(jax.jit, static_argnames=("shape", "scale", "dtype"))
def _normal(key: jax.Array, *, shape: tuple[int, ...], scale: float, dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


@functools.partial(jax.jit, static_argnames=("shape", "scale", "largest", "dtype"))
def _rounded_normal(
    key: jax.Array, *, shape: tuple[int, ...], scale: float, largest: float, dtype: str
) -> jax.Array:
    numbers = jax.random.normal(key, shape, jnp.bfloat16) * jnp.asarray(scale, jnp.bfloat16)
    numbers = jnp.clip(numbers, -largest, largest)
    return (jnp.round(numbers) if dtype.startswith("int") else numbers).astype(dtype)
