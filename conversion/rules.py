"""Rule tables between a foreign checkpoint's tensor names and our nested parameters, applied strictly both ways.

A table is a list of exact pairs, generated for one configuration. It lists every expected tensor, so a tensor that is
missing, unknown, given twice or of another shape is an error and never a default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.quantised.arrays import kept_as, stored_kernel
from eagle3_jax.models.quantised import Fp8Kernel, Int8Kernel

Array = Any  # of numpy, or computed from quantised tensors (quantised.arrays.Dequantised)
Params = dict[Any, Any]

# PyTorch keeps linear weights [out, in]; our kernels are [in, out].
FLOATS = ("float32", "float16", "bfloat16")

# Buffers that old versions of transformers saved. They follow from the configuration.
DERIVED_BUFFERS = (r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",)


class Part(NamedTuple):
    """The part of an array that one of several tensors fills.

    The last axis of the array is read as ``[outer, slots, inner]``. The tensor fills the slots from ``start`` to
    ``stop`` of every outer index.
    """

    outer: int  #: Number of times that the tensors take turns.
    slots: int  #: Number of slots in a turn, for all tensors together.
    inner: int  #: Number of columns of a slot; 0 for all columns of a single slot.
    start: int  #: The first slot of the tensor.
    stop: int  #: The slot after its last.
    leading: tuple[int, ...] = ()  #: The tensor's index on the leading axes, such as the number of an expert.
    turned: bool = False  #: Whether the last two axes are exchanged first.

    def view(self, array: Array) -> Array:
        """Returns the tensor as a view into the array, ``[..., outer, slots, inner]``."""
        matrix = array[self.leading]
        if self.turned:
            matrix = matrix.swapaxes(-1, -2)
        inner = self.inner or matrix.shape[-1]
        slots = matrix.reshape(*matrix.shape[:-1], self.outer, self.slots, inner)
        return slots[..., self.start : self.stop, :]

    def shape(self, array_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the tensor, from that of the array."""
        shape = array_shape[len(self.leading) :]
        if self.turned:
            shape = _transposed_shape(shape)
        inner = self.inner or shape[-1]
        return (*shape[:-1], self.outer * (self.stop - self.start) * inner)


class Rule(NamedTuple):
    """The name of a tensor in a foreign checkpoint and its path in our parameters; or those of a piece of a tensor."""

    source: str  #: Name in the foreign checkpoint.
    path: str  #: Path in our parameters, joined by dots, as in ``blocks.0.attention.o.kernel``.
    transpose: bool = False  #: Whether the tensor is the transpose of our array, on the last two axes.
    part: Part | None = None  #: The part of our array that the tensor fills; ``None`` for all of it.
    #: The piece of the tensor, after ``transpose``; ``None`` for all of it. The other pieces have rules with the same
    #: source.
    cut: Part | None = None
    reverse: bool = False  #: Whether all axes are in the opposite order, as those of a convolution's kernel.

    def filled_shape(self, array_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the part that the tensor fills, from the shape of our array."""
        return self.part.shape(array_shape) if self.part else array_shape

    def stored_shape(self, array_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the tensor in the checkpoint, from the shape of our array."""
        shape = self.filled_shape(array_shape)
        if self.cut:
            columns = self.cut.outer * self.cut.slots * self.cut.inner
            shape = (*shape[:-1], columns)
        if self.reverse:
            return shape[::-1]
        return _transposed_shape(shape) if self.transpose else shape


def _transposed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def linear(
    source: str, path: str, *, bias: bool = False, part: Part | None = None, cut: Part | None = None
) -> list[Rule]:
    """Returns the rules of a linear layer, or of some outputs of one."""
    kernel = Rule(f"{source}.weight", f"{path}.kernel", transpose=True, part=part, cut=cut)
    return [kernel, Rule(f"{source}.bias", f"{path}.bias", part=part, cut=cut)] if bias else [kernel]


def in_turns(outer: int, inner: int, sizes: Mapping[str, int]) -> Iterator[tuple[str, Part]]:
    """Yields the part of each of several linear layers in the one that we store for all of them.

    Args:
        outer: Number of times that the layers take turns.
        inner: Number of columns of a slot.
        sizes: Number of slots of each layer in a turn, by name.
    """
    slots = sum(sizes.values())
    start = 0
    for name, size in sizes.items():
        yield name, Part(outer, slots, inner, start, start + size)
        start += size


def norm(source: str, path: str) -> Rule:
    """Returns the rule of an RMSNorm."""
    return Rule(f"{source}.weight", f"{path}.scale")


def flatten(params: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields pairs of dotted path and leaf."""
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def unflatten(leaves: Mapping[str, Any], shapes: Params) -> Params:
    """Nests leaves by dotted path as ``shapes`` is nested (whose list indices are integers, not strings)."""

    def build(node: Mapping[Any, Any], prefix: str) -> Params:
        params = {}
        for key, value in node.items():
            path = f"{prefix}{key}"
            params[key] = build(value, f"{path}.") if isinstance(value, Mapping) else leaves[path]
        return params

    return build(shapes, "")


def renamed(tensors: Mapping[str, Array], rename: Callable[[str], str], where: object) -> dict[str, Array]:
    """Returns the tensors under the names that ``rename`` gives them.

    Raises:
        CheckpointError: Two tensors get the same name.
    """
    origin: dict[str, str] = {}
    for name in tensors:
        first = origin.setdefault(rename(name), name)
        if first != name:
            raise CheckpointError(
                f"{where} holds {first} and {name}, which mean the same tensor {rename(name)}; remove one"
            )
    return {new: tensors[name] for new, name in origin.items()}


def read_params(
    rules: Sequence[Rule], tensors: Mapping[str, Array], shapes: Params, *, where: str, known: Sequence[str] = ()
) -> Params:
    """Builds our parameters from foreign tensors: views of them, or a :class:`Joined` of several.

    Args:
        rules: The table.
        tensors: The tensors of the checkpoint, by name.
        shapes: The shapes that our model expects, nested.
        where: The name of the checkpoint in messages.
        known: Patterns of further names that are allowed and not needed.

    Raises:
        CheckpointError: Tensors are missing, unexpected, given twice, mis-shaped or not floats.
    """
    sources = dict.fromkeys(rule.source for rule in rules)
    expected = {path: tuple(leaf.shape) for path, leaf in flatten(shapes)}
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in (*DERIVED_BUFFERS, *known)))
    unexpected = [name for name in tensors if name not in sources and not ignored.fullmatch(name)]
    missing = [source for source in sources if source not in tensors]
    _check_names(where, missing, unexpected)
    pieces: dict[str, list[tuple[Rule, Array]]] = {}
    filled: set[tuple[str, Part | None]] = set()
    for rule in rules:
        if (rule.path, rule.part) in filled:
            raise CheckpointError(f"{where} gives {rule.path} twice, the second time as {rule.source}")
        filled.add((rule.path, rule.part))
        tensor = tensors[rule.source]
        check_matrix(tensor, rule.stored_shape(expected[rule.path]), f"{where}: {rule.source}")
        pieces.setdefault(rule.path, []).append((rule, _transposed(tensor, rule)))
    _check_table(rules, expected)
    leaves = {path: _joined(parts, expected[path]) for path, parts in pieces.items()}
    return unflatten(leaves, shapes)


def write_params(rules: Sequence[Rule], params: Params, shapes: Params, *, where: str) -> dict[str, np.ndarray]:
    """Builds foreign tensors from our parameters; the inverse of :func:`read_params`.

    Raises:
        CheckpointError: The parameters are not those that the configuration describes.
    """
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(params)}
    expected = {path: tuple(leaf.shape) for path, leaf in flatten(shapes)}
    missing = sorted(set(expected) - set(leaves))
    unexpected = sorted(set(leaves) - set(expected))
    _check_names(f"the head or target of {where}", missing, unexpected)
    for path, leaf in leaves.items():
        check_matrix(leaf, expected[path], f"{where}: {path}")
    _check_table(rules, expected)
    tensors: dict[str, np.ndarray] = {}
    for rule in rules:
        leaf = leaves[rule.path]
        part = leaf
        if rule.part is not None:
            part = rule.part.view(leaf).reshape(rule.filled_shape(leaf.shape))
        if rule.cut is None:
            tensors[rule.source] = _transposed(part, rule)
        else:
            empty = np.empty(rule.stored_shape(leaf.shape), leaf.dtype)
            tensor = tensors.setdefault(rule.source, empty)
            piece = rule.cut.view(_transposed(tensor, rule))
            piece[...] = part.reshape(piece.shape)
    return tensors


def check_layers(num_layers: int, names: Iterable[str], pattern: str, label: str, unit: str = "layers") -> None:
    """Refuses a number of layers that the names of the tensors contradict, before anything of that size is built."""
    indices = {int(match[1]) for name in names if (match := re.match(pattern, name))}
    if len(indices) != num_layers:
        raise CheckpointError(f"{label} is {short(num_layers)}; the file holds {len(indices)} {unit}")


def check_float(value: Array, label: str) -> None:
    """Refuses all types but float32, float16 and bfloat16; ``label`` is the array's name in messages."""
    if str(value.dtype) not in FLOATS:
        raise CheckpointError(
            f"{label} is stored as {value.dtype}; expected float32, float16 or bfloat16 "
            "(config.json describes no quantisation that would decode it)"
        )


def check_matrix(value: Array, shape: tuple[int, ...], label: str) -> None:
    """Refuses an array of another shape or of no floats; ``label`` is the array's name in messages."""
    if value.shape != shape:
        raise CheckpointError(f"{label} has shape {list(value.shape)}; config.json asks for {list(shape)}")
    check_float(value, label)


def main_dtype(params: Mapping[Any, Any]) -> str:
    """Returns the dtype that holds most of the parameters."""
    sizes: dict[str, int] = {}
    for _, leaf in flatten(params):
        dtype = str(leaf.dtype)
        sizes[dtype] = sizes.get(dtype, 0) + leaf.size
    return max(sizes, key=lambda name: sizes[name])


def _transposed(value: Array, rule: Rule) -> Array:
    if rule.reverse:
        return value.T
    return value.swapaxes(-1, -2) if rule.transpose else value


class Joined:
    """An array that several tensors fill. It is assembled at every read, so that memory never holds all of them.

    Attributes:
        shape: Shape of the assembled array.
        dtype: A dtype that holds the values of every tensor.
        ndim: Number of axes.
        size: Number of entries.
    """

    def __init__(self, parts: Sequence[tuple[Rule, Array]], shape: tuple[int, ...]):
        """See the class."""
        self._parts = parts
        self.shape = shape
        self.dtype = np.result_type(*(value.dtype for _, value in parts))
        self.ndim = len(shape)
        self.size = math.prod(shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Assembles a new array. Its order in memory is that of the tensors: row by row, copies are fast."""
        first = self._parts[0][0]
        turned = first.part is not None and first.part.turned
        exchanged = first.transpose != turned
        shape = _transposed_shape(self.shape) if exchanged else self.shape
        array = np.empty(shape, dtype or self.dtype)
        if exchanged:
            array = array.swapaxes(-1, -2)
        for rule, value in self._parts:
            view = array if rule.part is None else rule.part.view(array)
            piece = value if rule.cut is None else rule.cut.view(value)
            view[...] = piece.reshape(view.shape)
        return array

    @property
    def computed(self) -> bool:
        """Whether some entries are computed from quantised tensors."""
        return any(getattr(value, "computed", False) for _, value in self._parts)

    @property
    def kept_as(self) -> str:
        """The kind of kernel that keeps the stored values: ``fp8``, ``int8``, or empty for none."""
        return kept_as([value for _, value in self._parts])

    def stored_kernel(self) -> Fp8Kernel | Int8Kernel | None:
        """Returns the kernel of kind ``kept_as``, bit for bit; ``None`` if there is none."""
        pieces = []
        for rule, value in self._parts:
            view = _all_of if rule.part is None else rule.part.view
            piece = value if rule.cut is None else rule.cut.view(value)
            pieces.append((view, piece))
        return stored_kernel(pieces, self.shape)


def _all_of(array: Array) -> Array:
    return array


def _joined(parts: list[tuple[Rule, Array]], shape: tuple[int, ...]) -> Array | Joined:
    rule, value = parts[0]
    return value if rule.part is None and rule.cut is None else Joined(parts, shape)


def _check_table(rules: Sequence[Rule], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Checks that the rules fill every array and every tensor; otherwise the fault is ours, not the checkpoint's."""
    filled = dict.fromkeys(expected, 0)
    needed = {path: math.prod(shape) for path, shape in expected.items()}
    for rule in rules:
        shape = expected[rule.path]
        size = math.prod(rule.filled_shape(shape))
        filled[rule.path] += size
        if rule.cut is not None:
            filled[rule.source] = filled.get(rule.source, 0) + size
            needed[rule.source] = math.prod(rule.stored_shape(shape))
    wrong = sorted(name for name in needed if filled[name] != needed[name])
    if wrong:
        raise AssertionError(f"the rule table and the model differ: {wrong}")


def _check_names(where: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    parts = []
    for verb, names in (("misses", missing), ("holds unexpected", unexpected)):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        if names:
            parts.append(f"{verb} {', '.join(names[:3])}{more}")
    if parts:
        raise CheckpointError(
            f"{where} {' and '.join(parts)}; its tensors must be exactly those that its config.json describes"
        )
