"""Rules between a foreign checkpoint's tensor names and our parameters, applied strictly both ways.

A table is a list of exact pairs, generated for one configuration. It lists every expected tensor,
so a tensor that is missing, unknown, given twice or of another shape is an error and never a
default.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.quantised.arrays import Shaped, kept_as, stored_kernel
from eagle3_jax.devices.host import copy_blocks
from eagle3_jax.models.quantised import QuantisedKernel

Array = Any  # of numpy, or computed from quantised tensors (quantised.arrays.Dequantised)
Params = dict[Any, Any]

# PyTorch keeps linear weights [out, in]; our kernels are [in, out].
FLOATS = ("float32", "float16", "bfloat16")

# Buffers that old versions of transformers saved. They follow from the configuration.
DERIVED_BUFFERS = (r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",)


class Part(NamedTuple):
    """The part of an array that one of several tensors fills; by default all of it.

    The last axis of the array is read as ``[outer, slots, inner]``. The tensor fills the slots from
    ``start`` to ``stop`` of every outer index.
    """

    outer: int = 1  #: Number of times that the tensors take turns.
    slots: int = 1  #: Number of slots in a turn, for all tensors together.
    inner: int = 0  #: Number of columns of a slot; 0 for all columns of a single slot.
    start: int = 0  #: The first slot of the tensor.
    stop: int = 1  #: The slot after its last.
    #: The tensor's index on the leading axes, such as the number of an expert.
    leading: tuple[int, ...] = ()
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


COMPLETE = Part()  #: All of an array.


class Rule(NamedTuple):
    """The name of a tensor in a foreign checkpoint and its path in our parameters.

    Or those of a piece of a tensor.
    """

    source: str  #: Name in the foreign checkpoint.
    path: str  #: Path in our parameters, joined by dots, as in ``blocks.0.attention.o.kernel``.
    #: Whether the tensor is the transpose of our array, on the last two axes.
    transpose: bool = False
    part: Part = COMPLETE  #: The part of our array that the tensor fills.
    #: The piece of the tensor, after ``transpose``. Other pieces have rules with the same source.
    cut: Part = COMPLETE
    #: Whether all axes are in the opposite order, as those of a convolution's kernel.
    reverse: bool = False

    def stored_shape(self, array_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the tensor in the checkpoint, from the shape of our array."""
        shape = self.part.shape(array_shape)
        if self.cut != COMPLETE:
            shape = (*shape[:-1], self.cut.outer * self.cut.slots * self.cut.inner)
        if self.reverse:
            return shape[::-1]
        return _transposed_shape(shape) if self.transpose else shape


def _transposed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def linear(
    source: str, path: str, *, bias: bool = False, part: Part = COMPLETE, cut: Part = COMPLETE
) -> list[Rule]:
    """Returns the rules of a linear layer, or of some outputs of one."""
    kernel = Rule(f"{source}.weight", f"{path}.kernel", transpose=True, part=part, cut=cut)
    return (
        [kernel, Rule(f"{source}.bias", f"{path}.bias", part=part, cut=cut)] if bias else [kernel]
    )


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


def flatten(params: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yields pairs of dotted path and leaf."""
    for path, leaf in jax.tree.leaves_with_path(params):
        yield _dotted(path), leaf


def _dotted(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def renamed(
    tensors: Mapping[str, Array], rename: Callable[[str], str], where: object
) -> dict[str, Array]:
    """Returns the tensors under the names that ``rename`` gives them.

    Raises:
        CheckpointError: Two tensors get the same name.
    """
    origin: dict[str, str] = {}
    for name in tensors:
        first = origin.setdefault(rename(name), name)
        if first != name:
            raise CheckpointError(
                f"{where} holds {first} and {name}, which mean the same tensor {rename(name)};"
                " remove one"
            )
    return {new: tensors[name] for new, name in origin.items()}


def read_params(
    rules: Sequence[Rule],
    tensors: Mapping[str, Array],
    shapes: Params,
    *,
    where: str,
    known: Sequence[str] = (),
) -> Params:
    """Builds our parameters from foreign tensors: views of them, or a :class:`Joined` of several.

    Args:
        rules: The table.
        tensors: The tensors of the checkpoint, by name.
        shapes: The shapes that our model expects, nested.
        where: The name of the checkpoint in messages.
        known: Patterns of further names that are allowed and not needed.

    Raises:
        CheckpointError: Tensors are missing, unexpected, mis-shaped or not floats.
    """
    sources = dict.fromkeys(rule.source for rule in rules)
    ignored = any_of(*DERIVED_BUFFERS, *known)
    names = dict.fromkeys(
        name for name in tensors if name in sources or not ignored.fullmatch(name)
    )
    _check_names(where, sources, names)

    expected = {path: tuple(leaf.shape) for path, leaf in flatten(shapes)}
    parts: dict[str, list[tuple[Rule, Array]]] = collections.defaultdict(list)
    for rule in rules:
        tensor = tensors[rule.source]
        check_matrix(tensor, rule.stored_shape(expected[rule.path]), f"{where}: {rule.source}")
        parts[rule.path].append((rule, _transposed(tensor, rule)))

    _check_table(rules, expected)
    arrays = {path: _joined(parts[path], shape) for path, shape in expected.items()}
    return jax.tree.map_with_path(lambda path, _: arrays[_dotted(path)], shapes)


def write_params(
    rules: Sequence[Rule], params: Params, shapes: Params, *, where: str
) -> dict[str, Written]:
    """Returns foreign tensors that are built from our parameters when they are read.

    The inverse of :func:`read_params`. Tensors that are parts of one parameter are neighbours, so
    reading them in this order holds few parameters in memory.

    Raises:
        CheckpointError: The parameters are not those that the configuration describes.
    """
    leaves = dict(flatten(params))
    expected = {path: tuple(leaf.shape) for path, leaf in flatten(shapes)}
    _check_names(f"the head or target of {where}", expected, leaves)
    for path, leaf in leaves.items():
        check_matrix(leaf, expected[path], f"{where}: {path}")
    _check_table(rules, expected)

    of_tensor: dict[str, list[Rule]] = collections.defaultdict(list)
    for rule in rules:
        of_tensor[rule.source].append(rule)
    order = {path: index for index, path in enumerate(dict.fromkeys(rule.path for rule in rules))}
    read = _Leaves(rules, leaves)
    return {
        source: Written(table, read)
        for source, table in sorted(of_tensor.items(), key=lambda entry: order[entry[1][0].path])
    }


class _Leaves:
    """Parameters that are read from a file, each until all tensors of it are built."""

    def __init__(self, rules: Sequence[Rule], leaves: Mapping[str, Array]):
        self._leaves = leaves
        self._uses = collections.Counter(rule.path for rule in rules)
        self._read: dict[str, np.ndarray] = {}

    def __getitem__(self, path: str) -> Array:
        """Returns a parameter without reading it."""
        return self._leaves[path]

    def matrix(self, rule: Rule) -> np.ndarray:
        """Reads the array that the part of a rule is in, without leading axes."""
        leaf = self._leaves[rule.path]
        # Experts are read one by one.
        if rule.part.leading and getattr(leaf, "sliceable", False):
            return np.asarray(leaf[rule.part.leading])

        array = self._read.pop(rule.path, None)
        if array is None:
            array = np.asarray(leaf)
        self._uses[rule.path] -= 1
        if self._uses[rule.path] > 0:
            self._read[rule.path] = array
        return array[rule.part.leading]


class Written(Shaped):
    """A tensor of a foreign checkpoint, built from our parameters at every read.

    Attributes:
        shape: Shape of the tensor.
        dtype: Its type.
    """

    def __init__(self, rules: Sequence[Rule], leaves: _Leaves):
        """See the class; ``rules`` are those of this tensor."""
        leaf = leaves[rules[0].path]
        self._rules = rules
        self._leaves = leaves
        self.shape = rules[0].stored_shape(leaf.shape)
        self.dtype = np.dtype(leaf.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Builds a new array, or returns a view of a parameter."""
        tensor = self._build()
        return tensor if dtype is None else tensor.astype(dtype, copy=False)

    def _build(self) -> np.ndarray:
        rule = self._rules[0]
        if rule.cut == COMPLETE:
            return _transposed(self._part(rule), rule)

        tensor = np.empty(self.shape, self.dtype)
        for rule in self._rules:
            piece = rule.cut.view(_transposed(tensor, rule))
            piece[...] = self._part(rule).reshape(piece.shape)
        return tensor

    def _part(self, rule: Rule) -> np.ndarray:
        """Returns the part of a parameter that the tensor fills, or a piece of the tensor."""
        matrix = self._leaves.matrix(rule)
        part = rule.part._replace(leading=())
        return part.view(matrix).reshape(part.shape(matrix.shape))


def check_layers(
    num_layers: int, names: Iterable[str], pattern: str, label: str, unit: str = "layers"
) -> None:
    """Refuses a number of layers that the names of the tensors contradict.

    Callers check this before they build anything of that size.
    """
    stored = len(numbers_in(names, pattern))
    if stored != num_layers:
        raise CheckpointError(f"{label} is {short(num_layers)}; the file holds {stored} {unit}")


def any_of(*patterns: str) -> re.Pattern[str]:
    """Returns the pattern of texts that match one of several patterns."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")


def numbers_in(names: Iterable[str], pattern: str) -> set[int]:
    """Returns the numbers, which are the group of ``pattern``, in names that begin with a match."""
    return {int(match[1]) for name in names if (match := re.match(pattern, name))}


def check_float(value: Array, label: str) -> None:
    """Refuses types other than float32, float16 and bfloat16; ``label`` names the array."""
    if str(value.dtype) not in FLOATS:
        raise CheckpointError(
            f"{label} is stored as {value.dtype}; expected float32, float16 or bfloat16 "
            "(config.json describes no quantisation that would decode it)"
        )


def check_matrix(value: Array, shape: tuple[int, ...], label: str) -> None:
    """Refuses another shape, and numbers that are not floats; ``label`` names the array."""
    if value.shape != shape:
        raise CheckpointError(
            f"{label} has shape {list(value.shape)}; config.json asks for {list(shape)}"
        )
    check_float(value, label)


def main_dtype(params: Mapping[Any, Any]) -> str:
    """Returns the dtype that holds most of the parameters."""
    sizes = collections.Counter[str]()
    for leaf in jax.tree.leaves(params):
        sizes[str(leaf.dtype)] += leaf.size
    return max(sizes, key=sizes.__getitem__)


def _transposed(value: Array, rule: Rule) -> Array:
    if rule.reverse:
        return value.T
    return value.swapaxes(-1, -2) if rule.transpose else value


class Joined(Shaped):
    """An array that several tensors fill. It is assembled at every read: memory never holds all.

    Attributes:
        shape: Shape of the assembled array.
        dtype: A dtype that holds the values of every tensor.
    """

    def __init__(
        self, parts: Sequence[tuple[Part, Array]], shape: tuple[int, ...], *, is_exchanged: bool
    ):
        """See the class.

        Args:
            parts: Pieces of tensors, each with the part of the array that it fills.
            shape: Shape of the assembled array.
            is_exchanged: Whether the tensors have its last two axes in the opposite order.
        """
        self._parts = list(parts)
        self._is_exchanged = is_exchanged
        self.shape = shape
        self.dtype = np.result_type(*(piece.dtype for _, piece in parts))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Assembles a new array."""
        # Its order in memory is that of the tensors: row by row, copies are fast.
        shape = _transposed_shape(self.shape) if self._is_exchanged else self.shape
        array = np.empty(shape, dtype or self.dtype)
        if self._is_exchanged:
            array = array.swapaxes(-1, -2)
        self.copy_to(array)
        return array

    @property
    def sliceable(self) -> bool:
        """Whether a slice on the first axis reads no other tensors, as of a stack of experts."""
        return all(part.leading for part, _ in self._parts)

    def copy_to(self, array: np.ndarray) -> None:
        """Assembles into an array of this shape."""
        for part, piece in self._parts:
            view = part.view(array)
            copy_blocks(view, np.asarray(piece).reshape(view.shape))

    def __getitem__(self, index: Any) -> Any:
        """Returns a part of the array; if it is ``sliceable``, without reading other matrices."""
        indices = index if isinstance(index, tuple) else (index,)
        if not self.sliceable or not indices:
            return np.asarray(self)[index]

        first, *inner = indices
        is_range = isinstance(first, slice)
        numbers = range(self.shape[0])[first] if is_range else (first,)
        positions = {
            number: (position,) if is_range else () for position, number in enumerate(numbers)
        }
        parts = [
            (part._replace(leading=(*positions[part.leading[0]], *part.leading[1:])), piece)
            for part, piece in self._parts
            if part.leading[0] in positions
        ]
        shape = (len(numbers), *self.shape[1:]) if is_range else self.shape[1:]
        selected = Joined(parts, shape, is_exchanged=self._is_exchanged)
        if all(entry == slice(None) for entry in inner):
            return selected
        return np.asarray(selected)[(slice(None), *inner) if is_range else tuple(inner)]

    @property
    def computed(self) -> bool:
        """Whether some entries are computed from quantised tensors."""
        return any(getattr(piece, "computed", False) for _, piece in self._parts)

    @property
    def kept_as(self) -> str:
        """The kind of kernel that keeps the stored values; empty for none."""
        return kept_as([piece for _, piece in self._parts])

    def stored_kernel(self) -> QuantisedKernel | None:
        """Returns the kernel of kind ``kept_as``, bit for bit; ``None`` if there is none."""
        return stored_kernel([(part.view, piece) for part, piece in self._parts], self.shape)


class Decoded(Shaped):
    """A quantised parameter that is decoded to a type at every read."""

    def __init__(self, source: Array, dtype: Any):
        """See the class."""
        self._source = source
        self.shape = tuple(source.shape)
        self.dtype = np.dtype(dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Decodes a new array."""
        return np.asarray(self._source).astype(dtype or self.dtype)

    @property
    def sliceable(self) -> bool:
        """Whether a slice on the first axis decodes no other tensors."""
        return getattr(self._source, "sliceable", False)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Returns a part of the array."""
        return np.asarray(self._source[index]).astype(self.dtype)


def _joined(parts: list[tuple[Rule, Array]], shape: tuple[int, ...]) -> Array | Joined:
    rule, value = parts[0]
    if rule.part == rule.cut == COMPLETE:
        return value
    pieces = [(rule.part, rule.cut.view(value)) for rule, value in parts]
    return Joined(pieces, shape, is_exchanged=rule.transpose != rule.part.turned)


def _check_table(rules: Sequence[Rule], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Checks that the rules fill every array and every tensor; the fault is ours if they do not."""
    filled = collections.Counter[str]()
    needed = {path: math.prod(shape) for path, shape in expected.items()}
    for rule in rules:
        shape = expected[rule.path]
        size = math.prod(rule.part.shape(shape))
        filled[rule.path] += size
        if rule.cut != COMPLETE:
            filled[rule.source] += size
            needed[rule.source] = math.prod(rule.stored_shape(shape))

    wrong = sorted(name for name in needed if filled[name] != needed[name])
    if wrong:
        raise AssertionError(f"the rule table and the model differ: {wrong}")


def _check_names(where: str, expected: Collection[str], names: Collection[str]) -> None:
    """Refuses missing and unexpected names."""
    missing = [name for name in expected if name not in names]
    unexpected = [name for name in names if name not in expected]

    parts = []
    for verb, wrong in (("misses", missing), ("holds unexpected", unexpected)):
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        if wrong:
            parts.append(f"{verb} {', '.join(wrong[:3])}{more}")

    if parts:
        raise CheckpointError(
            f"{where} {' and '.join(parts)}; its tensors must be exactly those that its config.json"
            " describes"
        )
