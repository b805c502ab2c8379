"""Sizes of targets and drafters, counted from the shapes of their parameters and caches."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from eagle3_jax.models.config import MOST, DecoderConfig, Eagle3Config, Experts, LayerConfig

# Fields that only configurations of heads that draft in one pass have: Medusa, P-EAGLE, DFlash.
ONE_PASS = ("num_heads", "mask_token_id", "block_size")


class Parameters(NamedTuple):
    """Numbers of parameters by their use.

    The use decides whether they are quantized, divided, or read in every step.
    """

    #: Projections divided by query heads (queries, outputs, and what expands a latent).
    query_output: int = 0
    #: Projections that are divided by key heads, and those that lead to a latent.
    key_value: int = 0
    mlp: int = 0  #: Gate, up and down projections that every token goes through.
    #: The projection that fuses target features in a draft head, and its other matrices outside of
    #: layers.
    fusion: int = 0
    vectors: int = 0  #: Norms, biases and other small parameters.
    #: The embedding table; 0 if it is tied to the output projection or borrowed from another model.
    embedding: int = 0
    output: int = 0  #: The projection to logits.
    experts: int = 0  #: All experts together, of which a token goes through a few.
    routers: int = 0  #: Projections that choose experts, and gates of shared experts.

    @property
    def total(self) -> int:
        """Sum over all uses."""
        return sum(self)


class EqualLayers(NamedTuple):
    """Layers of one description and size; every size is the sum over all of them."""

    layer: LayerConfig  #: Description of one layer.
    number: int  #: Number of layers.
    sizes: Parameters  #: Parameters.
    #: Numbers that one token adds to the caches (a key and a value, or a latent). A layer with a
    #: window counts like any other, since its buffers are as long.
    cache_values_per_token: int
    #: Numbers in the recurrent states of a sequence, in float32 and independent of its length.
    state_values: int
    window_values: int  #: Inputs that the convolutions of a recurrent layer look back at.

    def experts_read(self, tokens: int | None) -> float:
        """Counts the parameters of the experts that some tokens go through; ``None``: of all.

        It is the mean ``E·(1 - (1 - k/E)^tokens)`` for tokens that choose independently and evenly.
        Neighbors in a text choose alike and experts are not equally popular, so a real forward
        reads fewer.
        """
        mlp = self.layer.mlp
        if tokens is None or not isinstance(mlp, Experts):
            return float(self.sizes.experts)
        return self.sizes.experts * (1.0 - (1.0 - mlp.per_token / mlp.num_experts) ** tokens)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a target or a drafter."""

    method: str  #: Name of the drafting method for tables.
    target_width: int  #: Width of the target that it drafts for.
    layers: tuple[EqualLayers, ...] = ()  #: The layers that keep keys and values, or a state.
    read: Parameters = Parameters()  #: Parameters that a pass reads, borrowed ones included.
    owned: Parameters = Parameters()  #: Parameters that the model adds to memory.
    num_features: int = 0  #: ``A``, the number of target features that a drafter reads.
    max_positions: int = MOST  #: Longest sequence that it was built for.
    is_parallel: bool = False  #: Whether one pass proposes the whole draft.
    fuses_once: bool = False  #: Whether only the first pass of a draft reads ``fusion``.
    #: Maximum number of draft tokens. The root of a draft takes a position too.
    longest: int = MOST
    #: Whether it is a draft head, every kernel of which may be stored in FP8, its output matrix
    #: included.
    is_head: bool = False

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with: ``k`` experts of ``E``.

        The embedding table is left out. Publishers differ in what they count; some add the
        embedding.
        """
        unread = sum(equal.sizes.experts - equal.experts_read(1) for equal in self.layers)
        return self.read.total - self.read.embedding - round(unread)


Model = DecoderConfig | Eagle3Config | Sizes


@functools.lru_cache(maxsize=64)
def sizes_of(model: Model) -> Sizes:
    """Counts the sizes of a target or an EAGLE-3 head; :class:`Sizes` are returned unchanged."""
    from eagle3_jax.drafters.eagle3 import Eagle3Drafter
    from eagle3_jax.models.decoder import DecoderTarget

    if isinstance(model, Sizes):
        return model
    if isinstance(model, Eagle3Config):
        return head_sizes(Eagle3Drafter(model), "EAGLE-3 head")

    # Each kind of layer is traced once, however many layers there are.
    kinds = tuple(dict.fromkeys(model.layers))
    network = DecoderTarget(dataclasses.replace(model, layers=kinds))
    numbers = [model.layers.count(kind) for kind in kinds]
    layers, owned = _count(network.param_shapes(), network.param_axes(), kinds, numbers)
    positions = model.max_positions
    return Sizes(
        method="draft model",
        target_width=model.width,
        layers=layers,
        read=owned,
        owned=owned,
        max_positions=positions,
        longest=positions - 1,
    )


def parameters(model: Model) -> Parameters:
    """Counts the parameters that a pass of the model reads; for a target, all of them."""
    return sizes_of(model).read


def head_sizes(drafter: Any, method: str, borrowed_output: int = 0) -> Sizes:
    """Counts the sizes of a draft head, without an embedding table.

    Args:
        drafter: The drafter, with ``config``, ``param_shapes`` and ``param_axes``.
        method: Name of the method.
        borrowed_output: Parameters of the target's output projection, which some heads read.
    """
    config = drafter.config
    kinds = getattr(drafter.config, "layers", ())
    layers, owned = _count(
        drafter.param_shapes(), drafter.param_axes()["head"], kinds, [1] * len(kinds)
    )
    borrows = drafter.borrows_output and not getattr(config, "own_output", False)

    return Sizes(
        method=method,
        target_width=config.target_width,
        layers=layers,
        read=owned._replace(output=owned.output + borrowed_output) if borrows else owned,
        owned=owned,
        num_features=len(config.aux_layers),
        max_positions=config.max_positions,
        is_parallel=any(hasattr(config, name) for name in ONE_PASS),
        fuses_once=isinstance(config, Eagle3Config),
        longest=min(getattr(drafter, "longest", MOST), config.max_positions - 1),
        is_head=True,
    )


def _count(
    shapes: Any, axes: Any, layers: tuple[LayerConfig, ...], numbers: Sequence[int]
) -> tuple[tuple[EqualLayers, ...], Parameters]:
    """Counts the sizes of the layers and all parameters, also those outside of layers.

    Args:
        shapes: Shapes of the parameters, with every kind of layer once.
        axes: Their named axes.
        layers: The kinds of layers.
        numbers: Number of layers of each kind.
    """
    import jax

    counts: dict[int | None, Any] = collections.defaultdict(collections.Counter)
    cached = [_cache_values(layer) for layer in layers]
    leaf_axes = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, leaf), named_axes in zip(leaves, leaf_axes, strict=True):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        index = _layer_index(names) if layers else None
        # One matrix, the last columns of which give keys and values.
        if "qkv" in names and len(leaf.shape) == 2:
            mixer = layers[index or 0].mixer
            values = leaf.shape[0] * sum(cached[index or 0].values())
            # The values of some layers are their keys.
            values //= 2 if getattr(mixer, "keys_as_values", False) else 1
            counts[index] += {"query_output": leaf.size - values, "key_value": values}
        else:
            axis_names = {axis.name for axis in named_axes if axis}
            counts[index][_use(names, leaf.shape, axis_names)] += leaf.size

    equal_layers = []
    for index, (layer, number) in enumerate(zip(layers, numbers, strict=True)):
        sizes = Parameters(**{use: number * count for use, count in counts[index].items()})
        values = {name: number * size for name, size in cached[index].items()}
        state = values.pop("state", 0)
        window = values.pop("window", 0)
        equal_layers.append(EqualLayers(layer, number, sizes, sum(values.values()), state, window))

    by_part = [Parameters(**counts[None]), *(equal.sizes for equal in equal_layers)]
    total = Parameters(*map(sum, zip(*by_part, strict=True)))
    return tuple(equal_layers), total


def _layer_index(names: list[str]) -> int | None:
    """Returns the layer of a parameter.

    ``blocks.2`` of a target is layer 2. Of a head, ``upper_layers.0`` is layer 1, and so is
    ``later.0.block`` of its further modules.
    """
    if names[0] in ("first", "block"):
        return 0
    if names[0] == "blocks":
        return int(names[1])
    if names[0] == "upper_layers" or (names[0] == "later" and "block" in names):
        return int(names[1]) + 1
    return None


def _use(names: list[str], shape: tuple[int, ...], axes: set[str]) -> str:
    """Returns the field of :class:`Parameters` that counts a parameter."""
    from eagle3_jax.devices.sharding import EXPERTS, HEADS, MLP, VOCAB

    if EXPERTS in axes:
        return "experts"
    if len(shape) < 2 or "convolution" in names:
        return "vectors"
    for axis, use in ((VOCAB, "output"), (MLP, "mlp"), (HEADS, "query_output")):
        if axis in axes:
            return use
    if "attention" in names:
        return "key_value"
    # Tables that are looked up; `before` is DSpark's and DFlash2's, `after` DFlash2's.
    if names[-1] in ("embedding", "input_embedding", "before", "after"):
        return "embedding"
    return "routers" if "mlp" in names else "fusion"


def _cache_values(layer: LayerConfig) -> dict[str, int]:
    """Counts the numbers in every buffer of a layer's cache for one token of one sequence."""
    import jax

    from eagle3_jax.models.context import empty_cache

    def buffers() -> dict[str, jax.Array]:
        (cache,) = empty_cache((layer,), batch=1, capacity=1, dtype="float32").layers
        leaves = jax.tree_util.tree_leaves_with_path(cache)
        return {path[-1].name: buffer for path, buffer in leaves}

    return {name: math.prod(buffer.shape) for name, buffer in jax.eval_shape(buffers).items()}
