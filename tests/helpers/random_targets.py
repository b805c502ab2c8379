"""Random targets of every family, built from a ``config.json`` without transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import families
import jax
import tiny

from eagle3_jax import LoadedTarget
from eagle3_jax.conversion.families import FAMILIES
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.layers import BFLOAT16, FLOAT32, MIXED, cast, stored_type
from eagle3_jax.models.quantised import quantised

# Parameters that are zeros or ones in a random model. Random values make their effect visible.
_GROWN = ("bias", "correction", "sinks", "gate_up_bias", "down_bias")


def of_family(recipe: families.Recipe, vocab_size: int = 13, **options: Any) -> LoadedTarget:
    """Returns a random target with the last two layers of a family; no bias is zero.

    Layers that share keys come with all layers before them.

    Args:
        recipe: The family and its sizes.
        vocab_size: Size of the vocabulary.
        options: Further options of ``tiny.target``.
    """
    values = families.BASE | recipe.fields | {"vocab_size": vocab_size, "rms_norm_eps": 1e-6}
    if values.get("vocab_size_per_layer_input"):
        values["vocab_size_per_layer_input"] = vocab_size
    config = FAMILIES[recipe.model_type].read_config(Fields(values, recipe.model_type))
    layers = (
        config.layers
        if getattr(config.layers[-1].mixer, "shares_keys", False)
        else config.layers[-2:]
    )
    target = tiny.target(**vars(config) | {"layers": layers} | options)
    keys = iter(jax.random.split(jax.random.key(1), 64))

    def grown(path: tuple, leaf: jax.Array) -> jax.Array:
        if path[-1].key == "embedding" and config.tie_embeddings:
            # Larger, the model would only repeat its last token.
            return leaf * 0.2 / config.embedding_scale
        if path[-1].key not in _GROWN:
            return leaf
        return (leaf + 0.3 * jax.random.normal(next(keys), leaf.shape)).astype(leaf.dtype)

    return dataclasses.replace(
        target, params=jax.tree_util.tree_map_with_path(grown, target.params)
    )


def in_eight_bits(target: LoadedTarget, weights: str) -> LoadedTarget:
    """Returns the same target with kernels in ``fp8`` or ``int8``."""
    params = quantised(target.params, target.model.param_products(), weights)
    return dataclasses.replace(target, params=cast(params, FLOAT32), weights=weights)


PRECISIONS = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    "mixed": MIXED,
    "fp8": FLOAT32,
    "int8": FLOAT32,
}


def in_precision(recipe: families.Recipe, precision: str, **options: Any) -> LoadedTarget:
    """Returns the target of :func:`of_family`, stored in one of :data:`PRECISIONS`."""
    dtypes = PRECISIONS[precision]
    target = of_family(recipe, precision=dtypes, **options)
    if precision in ("fp8", "int8"):
        return in_eight_bits(target, precision)
    stored = lambda path, leaf: leaf.astype(stored_type(path, leaf.ndim, dtypes))
    return dataclasses.replace(
        target, params=jax.tree_util.tree_map_with_path(stored, target.params)
    )
