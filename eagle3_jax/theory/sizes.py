"""Sizes of targets and drafters, counted from the shapes that their networks say their parameters and caches have."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.models.config import MOST, DecoderConfig, Eagle3Config, Experts, LayerConfig
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.memory import empty_cache
from eagle3_jax.sharding import EXPERTS, HEADS, MLP, VOCAB

# Fields that only configurations of heads that draft in one pass have: Medusa, P-EAGLE, DFlash.
ONE_PASS = ("num_heads", "mask_token_id", "block_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters by their use, which decides whether they are quantized, divided or read in every step.

    Attributes:
        query_output: Projections that are divided by query heads: queries, outputs, and what expands a latent.
        key_value: Projections that are divided by key heads, and those that lead to a latent.
        mlp: Gate, up and down projections that every token goes through.
        fusion: The projection that fuses target features in a draft head, and its other matrices outside of layers.
        vectors: Norms, biases and other small parameters.
        embedding: The embedding table; 0 if it is tied to the output projection or borrowed from another model.
        output: The projection to logits.
        experts: All experts together, of which a token goes through a few.
        routers: Projections that choose experts, and gates of shared experts.
    """

    query_output: int = 0
    key_value: int = 0
    mlp: int = 0
    fusion: int = 0
    vectors: int = 0
    embedding: int = 0
    output: int = 0
    experts: int = 0
    routers: int = 0

    @property
    def total(self) -> int:
        """Sum over all uses."""
        return sum(dataclasses.astuple(self))


class LayerRun(NamedTuple):
    """Equal layers that follow each other; every size is the sum over all of them.

    Attributes:
        layer: Description of one layer.
        count: Number of layers.
        sizes: Parameters.
        cache_values_per_token: Numbers that one token adds to the caches: a key and a value, or a latent. A layer with
            a window counts like any other, since its buffers are as long.
        state_values: Numbers in the recurrent states of a sequence, in float32 and independent of its length.
        window_values: Inputs that the convolutions of a recurrent layer look back at.
    """

    layer: LayerConfig
    count: int
    sizes: Parameters
    cache_values_per_token: int
    state_values: int
    window_values: int

    def experts_read(self, tokens: int | None) -> float:
        """Parameters of the experts that ``tokens`` tokens go through, or of all experts for ``None``.

        It is the mean ``E·(1 - (1 - k/E)^tokens)`` for tokens that choose independently and evenly. Neighbors in a
        text choose alike and experts are not equally popular, so a real forward reads fewer.
        """
        mlp = self.layer.mlp
        if tokens is None or not isinstance(mlp, Experts):
            return float(self.sizes.experts)
        return self.sizes.experts * (1.0 - (1.0 - mlp.per_token / mlp.num_experts) ** tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a target or a drafter.

    Attributes:
        method: Name of the drafting method for tables.
        runs: The layers that keep keys and values.
        read: Parameters that a pass reads, borrowed ones included.
        owned: Parameters that the model adds to memory.
        num_features: ``A``, the number of target features that a drafter reads.
        target_width: Width of the target that it drafts for.
        max_positions: Longest sequence that it was built for.
        is_parallel: Whether one pass proposes the whole draft.
        fuses_once: Whether only the first pass of a draft reads ``fusion``.
        longest: Maximum number of draft tokens; ``None`` without a limit.
        is_head: Whether it is a draft head, every kernel of which may be stored in FP8, its output matrix included.
    """

    method: str
    runs: tuple[LayerRun, ...] = ()
    read: Parameters = Parameters()
    owned: Parameters = Parameters()
    num_features: int = 0
    target_width: int
    max_positions: int = MOST
    is_parallel: bool = False
    fuses_once: bool = False
    longest: int | None = None
    is_head: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether any layer chooses between experts."""
        return self.read.experts > 0

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with: ``k`` experts of ``E``, and no embedding table.

        Publishers differ in what they count; some add the embedding.
        """
        unread = sum(run.sizes.experts - run.experts_read(1) for run in self.runs)
        return self.read.total - self.read.embedding - round(unread)


Model = DecoderConfig | Eagle3Config | Sizes


def sizes_of(model: Model) -> Sizes:
    """Sizes of a target or an EAGLE-3 head from its configuration; :class:`Sizes` are returned as they are."""
    return model if isinstance(model, Sizes) else _sizes_of_config(model)


def parameters(model: Model) -> Parameters:
    """Parameters that a pass of the model reads; for a target, all of them."""
    return sizes_of(model).read


@functools.lru_cache(maxsize=64)
def _sizes_of_config(config: DecoderConfig | Eagle3Config) -> Sizes:
    if isinstance(config, Eagle3Config):
        return head_sizes(Eagle3Drafter(config), "EAGLE-3 head")
    kinds = tuple(dict.fromkeys(config.layers))  # each kind of layer is traced once, however many layers there are
    network = DecoderTarget(dataclasses.replace(config, layers=kinds))
    counted = _count(network.param_shapes(), network.param_axes(), kinds)
    times = [config.layers.count(kind) for kind in kinds]
    owned = _sum([counted[None], *(counted[index] for index, time in enumerate(times) for _ in range(time))])
    return Sizes(
        method="draft model",
        runs=_runs(config.layers, [counted[kinds.index(layer)] for layer in config.layers]),
        read=owned,
        owned=owned,
        target_width=config.width,
        max_positions=config.max_positions,
    )


def head_sizes(drafter: Any, method: str, borrowed_output: int = 0) -> Sizes:
    """Sizes of a draft head, without the embedding table that it may bring.

    Args:
        drafter: The drafter, with ``config``, ``param_shapes`` and ``param_axes``.
        method: Name of the method.
        borrowed_output: Parameters of the target's output projection, which some heads read.
    """
    config = drafter.config
    layers = getattr(config, "layers", ())
    counted = _count(drafter.param_shapes(), drafter.param_axes()["head"], layers)
    owned = _sum(list(counted.values()))
    borrows = drafter.borrows_output and not getattr(config, "own_output", False)
    return Sizes(
        method=method,
        runs=_runs(layers, [counted[index] for index in range(len(layers))]),
        read=dataclasses.replace(owned, output=owned.output + borrowed_output) if borrows else owned,
        owned=owned,
        num_features=len(config.aux_layers),
        target_width=config.target_width,
        max_positions=config.max_positions,
        is_parallel=any(hasattr(config, name) for name in ONE_PASS),
        fuses_once=isinstance(config, Eagle3Config),
        longest=getattr(drafter, "longest", None),
        is_head=True,
    )


def _count(shapes: Any, axes: Any, layers: tuple[LayerConfig, ...]) -> dict[int | None, Parameters]:
    """Parameters of each layer by its index, and under ``None`` those outside of layers."""
    counts: dict[int | None, Any] = {index: collections.Counter() for index in (None, *range(len(layers)))}
    of_axes = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    for (path, leaf), named in zip(jax.tree_util.tree_leaves_with_path(shapes), of_axes, strict=True):
        names = [str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in path]
        index = _layer_index(names) if layers else None
        if "qkv" in names and len(leaf.shape) == 2:  # one matrix, the last columns of which give keys and values
            values = leaf.shape[0] * sum(_cache_values(layers[index or 0]).values())
            counts[index] += {"query_output": leaf.size - values, "key_value": values}
        else:
            counts[index][_use(names, leaf.shape, {axis.name for axis in named if axis})] += leaf.size
    return {index: Parameters(**count) for index, count in counts.items()}


def _layer_index(names: list[str]) -> int | None:
    """The layer that a parameter belongs to: ``blocks.2`` of a target, ``first`` or ``rest.0`` of a head."""
    if names[0] in ("first", "block"):
        return 0
    return int(names[1]) + (names[0] == "rest") if names[0] in ("blocks", "rest") else None


def _use(names: list[str], shape: tuple[int, ...], axes: set[str]) -> str:
    """The field of :class:`Parameters` that counts a parameter, by its axes where it names them."""
    if EXPERTS in axes:
        return "experts"
    if len(shape) < 2 or "convolution" in names:
        return "vectors"
    for axis, use in ((VOCAB, "output"), (MLP, "mlp"), (HEADS, "query_output")):
        if axis in axes:
            return use
    if "attention" in names:
        return "key_value"
    if names[-1] in ("embedding", "before"):  # tables that are looked up; `before` is DSpark's
        return "embedding"
    return "routers" if "mlp" in names else "fusion"


def _sum(parts: list[Parameters]) -> Parameters:
    return Parameters(**{name: sum(getattr(part, name) for part in parts) for name in Parameters.__dataclass_fields__})


def _runs(layers: tuple[LayerConfig, ...], counted: list[Parameters]) -> tuple[LayerRun, ...]:
    runs = []
    for (layer, sizes), equal in itertools.groupby(zip(layers, counted, strict=True)):
        count = len(list(equal))
        held = _cache_values(layer)
        state, window = count * held.pop("state", 0), count * held.pop("window", 0)
        runs.append(LayerRun(layer, count, _sum([sizes] * count), count * sum(held.values()), state, window))
    return tuple(runs)


def _cache_values(layer: LayerConfig) -> dict[str, int]:
    """Numbers in every buffer of a layer's cache for one token of one sequence."""

    def buffers() -> dict[str, jax.Array]:
        (cache,) = empty_cache((layer,), batch=1, capacity=1, dtype=jnp.float32).layers
        return {path[-1].name: buffer for path, buffer in jax.tree_util.tree_leaves_with_path(cache)}

    return {name: math.prod(buffer.shape) for name, buffer in jax.eval_shape(buffers).items()}
