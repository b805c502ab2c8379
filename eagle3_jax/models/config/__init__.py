"""What a target or a draft head is: a frozen, hashable description from which every shape follows. Needs no JAX."""

from __future__ import annotations

from eagle3_jax.models.config.mixers import (
    GatedDelta,
    GroupedQuery,
    Latent,
    QKNorm,
    QueryScaling,
    RopeConfig,
    RopeType,
)
from eagle3_jax.models.config.mlps import Activation, Experts, GatedMLP, Router
from eagle3_jax.models.config.ranges import MOST, MOST_LAYERS
from eagle3_jax.models.config.stacks import (
    MLP,
    DecoderConfig,
    Eagle3Config,
    LayerConfig,
    Layered,
    Mixer,
    NormKind,
    NormPlaces,
    check_head,
    check_stack,
    default_aux_layers,
    gated,
    grouped,
    uniform,
    usual_head,
    usual_layers,
    with_window,
)

__all__ = [
    "MLP",
    "MOST",
    "MOST_LAYERS",
    "Activation",
    "DecoderConfig",
    "Eagle3Config",
    "Experts",
    "GatedDelta",
    "GatedMLP",
    "GroupedQuery",
    "Latent",
    "LayerConfig",
    "Layered",
    "Mixer",
    "NormKind",
    "NormPlaces",
    "QKNorm",
    "QueryScaling",
    "RopeConfig",
    "RopeType",
    "Router",
    "check_head",
    "check_stack",
    "default_aux_layers",
    "gated",
    "grouped",
    "uniform",
    "usual_head",
    "usual_layers",
    "with_window",
]
