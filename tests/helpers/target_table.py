"""Every target by name: of every family, and those without a family."""

from __future__ import annotations

import functools
from collections.abc import Callable

import families
import numpy as np
import random_targets
import recurrent
import tables
import tiny

from eagle3_jax import LoadedTarget
from eagle3_jax.models.layers import BFLOAT16

ALL_TARGETS: dict[str, Callable[[], LoadedTarget]] = {
    **{
        name: functools.partial(random_targets.of_family, recipe)
        for name, recipe in families.RECIPES.items()
    },
    "muse_glimmer": functools.partial(random_targets.of_family, families.MUSE_GLIMMER),
    "llama, bfloat16": lambda: tiny.target(13, precision=BFLOAT16, layers=tiny.layers(1)),
    "a window, and no rotation": lambda: tiny.target(
        13, layers=tiny.layers(1, window=3) + tiny.layers(1, rope=None, qk_norm=True)
    ),
    "a table": lambda: tables.target(np.random.default_rng(0).normal(0, 1.5, (13**2, 13)), 2),
    "attention and a recurrence": recurrent.target,
}
# Next to targets without a family: experts, latent attention, a recurrence. The others are slow.
FEW = {"qwen3_moe", "deepseek_v3", "qwen3_5_text", *(ALL_TARGETS.keys() - families.RECIPES.keys())}
