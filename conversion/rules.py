"""Rule tables between a foreign checkpoint's tensor names and our nested parameters, applied strictly both ways.

A table is a list of exact pairs, generated for one configuration. Everything that is expected is in it, so a tensor
that is missing, unknown, given twice or of another shape is an error and never a default.
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

    The last axis is read as ``[outer, slots, inner]``, and the tensor is some of the slots of every outer index.
    """

    outer: int  #: Number of times that the tensors take turns.
    slots: int  #: Places in a turn, for all tensors together.
    inner: int  #: Columns of a place; 0 for all columns of a single place.
    start: int  #: The tensor's first place.
    stop: int  #: The place after its last.
    leading: tuple[int, ...] = ()  #: Its index on the leading axes, such as the number of an expert.
    turned: bool = False  #: Whether the last two axes are exchanged first.

    def of(self, whole: Array) -> Array:
        """The tensor as a view into the array, ``[..., outer, places, inner]``."""
        one = whole[self.leading]
        one = one.swapaxes(-1, -2) if self.turned else one
        inner = self.inner or one.shape[-1]
        return one.reshape(*one.shape[:-1], self.outer, self.slots, inner)[..., self.start : self.stop, :]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's own shape."""
        one = whole[len(self.leading) :]
        one = (*one[:-2], one[-1], one[-2]) if self.turned else one
        return (*one[:-1], self.outer * (self.stop - self.start) * (self.inner or one[-1]))


class Rule(NamedTuple):
    """One tensor under both names, or a piece of one."""

    source: str  #: Name in the foreign checkpoint.
    path: str  #: Its place in our parameters, joined by dots, as in ``blocks.0.attention.o.kernel``.
    transpose: bool = False  #: Whether the two are transposes of each other, on their last two axes.
    part: Part | None = None  #: The part of our array that it fills; ``None`` for all of it.
    #: The piece of the tensor, after ``transpose``; ``None`` for all of it. The other pieces have rules with the same
    #: source.
    cut: Part | None = None
    reverse: bool = False  #: Whether all axes are in the opposite order, as those of a convolution's kernel.

    def ours(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what it fills in our array, as a tensor of its own."""
        return self.part.shape(whole) if self.part else whole

    def stored(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor."""
        shape = self.ours(whole)
        if self.cut:
            shape = (*shape[:-1], self.cut.outer * self.cut.slots * self.cut.inner)
        if self.reverse:
            return shape[::-1]
        return (*shape[:-2], shape[-1], shape[-2]) if self.transpose else shape


def linear(
    source: str, path: str, *, bias: bool = False, part: Part | None = None, cut: Part | None = None
) -> list[Rule]:
    """A linear layer, or some outputs of one."""
    kernel = Rule(f"{source}.weight", f"{path}.kernel", transpose=True, part=part, cut=cut)
    return [kernel, Rule(f"{source}.bias", f"{path}.bias", part=part, cut=cut)] if bias else [kernel]


def in_turns(outer: int, inner: int, places: Mapping[str, int]) -> Iterator[tuple[str, Part]]:
    """The part of each of several linear layers in the one that we store for all of them."""
    slots = sum(places.values())
    start = 0
    for name, size in places.items():
        yield name, Part(outer, slots, inner, start, start + size)
        start += size


def norm(source: str, path: str) -> Rule:
    """An RMSNorm."""
    return Rule(f"{source}.weight", f"{path}.scale")


def flatten(params: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Pairs of dotted path and leaf."""
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def unflatten(leaves: Mapping[str, Any], shapes: Params) -> Params:
    """Leaves by dotted path, in the nesting of ``shapes`` (whose list indices are integers, not strings)."""

    def build(node: Mapping[Any, Any], prefix: str) -> Params:
        return {
            key: build(value, f"{prefix}{key}.") if isinstance(value, Mapping) else leaves[f"{prefix}{key}"]
            for key, value in node.items()
        }

    return build(shapes, "")


def renamed(tensors: Mapping[str, Array], rename: Callable[[str], str], where: object) -> dict[str, Array]:
    """The tensors under other names."""
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
    """Our parameters from foreign tensors: views of those, and :class:`Joined` where we store several in one.

    Args:
        rules: The table.
        tensors: What the checkpoint holds.
        shapes: What our model expects, nested.
        where: Names the checkpoint in messages.
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
    found: dict[str, list[tuple[Rule, Array]]] = {}
    filled: set[tuple[str, Part | None]] = set()
    for rule in rules:
        if (rule.path, rule.part) in filled:
            raise CheckpointError(f"{where} gives {rule.path} twice, the second time as {rule.source}")
        filled.add((rule.path, rule.part))
        value = _checked(tensors[rule.source], rule, expected[rule.path], f"{where}: {rule.source}")
        found.setdefault(rule.path, []).append((rule, value))
    _check_table(rules, expected)
    leaves = {path: _joined(parts, expected[path]) for path, parts in found.items()}
    return unflatten(leaves, shapes)


def write_params(rules: Sequence[Rule], params: Params, shapes: Params, *, where: str) -> dict[str, np.ndarray]:
    """Foreign tensors from our parameters; the inverse of :func:`read_params`.

    Raises:
        CheckpointError: The parameters are not those that the configuration describes.
    """
    given = {path: np.asarray(leaf) for path, leaf in flatten(params)}
    expected = {path: tuple(leaf.shape) for path, leaf in flatten(shapes)}
    missing = sorted(set(expected) - set(given))
    unexpected = sorted(set(given) - set(expected))
    _check_names(f"the head or target of {where}", missing, unexpected)
    for path, leaf in given.items():
        check_matrix(leaf, expected[path], f"{where}: {path}")
    _check_table(rules, expected)
    tensors: dict[str, np.ndarray] = {}
    for rule in rules:
        whole = given[rule.path]
        ours = whole if rule.part is None else rule.part.of(whole).reshape(rule.ours(whole.shape))
        if rule.cut is None:
            tensors[rule.source] = _transposed(ours, rule)
        else:
            stored = tensors.setdefault(rule.source, np.empty(rule.stored(whole.shape), whole.dtype))
            piece = rule.cut.of(_transposed(stored, rule))
            piece[...] = ours.reshape(piece.shape)
    return tensors


def check_layers(num_layers: int, names: Iterable[str], pattern: str, what: str, unit: str = "layers") -> None:
    """Refuses a number of layers that the names of the tensors contradict, before anything of that size is built."""
    found = {int(match[1]) for name in names if (match := re.match(pattern, name))}
    if len(found) != num_layers:
        raise CheckpointError(f"{what} is {short(num_layers)}; the file holds {len(found)} {unit}")


def check_float(value: Array, what: str) -> None:
    """Refuses all types but float32, float16 and bfloat16."""
    if str(value.dtype) not in FLOATS:
        raise CheckpointError(
            f"{what} is stored as {value.dtype}; expected float32, float16 or bfloat16 "
            "(config.json says of no quantisation how to read it)"
        )


def check_matrix(value: Array, shape: tuple[int, ...], what: str) -> None:
    """Refuses an array of another shape or of no floats."""
    if value.shape != shape:
        raise CheckpointError(f"{what} has shape {list(value.shape)}; config.json asks for {list(shape)}")
    check_float(value, what)


def main_dtype(params: Mapping[Any, Any]) -> str:
    """The dtype that holds most of the parameters."""
    sizes: dict[str, int] = {}
    for _, leaf in flatten(params):
        sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + leaf.size
    return max(sizes, key=lambda name: sizes[name])


def _checked(value: Array, rule: Rule, whole: tuple[int, ...], what: str) -> Array:
    check_matrix(value, rule.stored(whole), what)
    return _transposed(value, rule)


def _transposed(value: Array, rule: Rule) -> Array:
    if rule.reverse:
        return value.T
    return value.swapaxes(-1, -2) if rule.transpose else value


class Joined:
    """An array that several tensors fill. It is assembled at every read, so that memory never holds all of them.

    Attributes:
        shape: Of the whole.
        dtype: One that holds the values of every tensor.
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
        """The whole array, always a copy. Its order in memory is that of the tensors: row by row, copies are fast."""
        first = self._parts[0][0]
        exchanged = first.transpose != (first.part is not None and first.part.turned)
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2]) if exchanged else self.shape
        whole = np.empty(shape, dtype or self.dtype)
        whole = whole.swapaxes(-1, -2) if exchanged else whole
        for rule, value in self._parts:
            view = whole if rule.part is None else rule.part.of(whole)
            piece = value if rule.cut is None else rule.cut.of(value)
            view[...] = piece.reshape(view.shape)
        return whole

    @property
    def computed(self) -> bool:
        """Whether some of it is computed from quantised tensors."""
        return any(getattr(value, "computed", False) for _, value in self._parts)

    @property
    def kept_as(self) -> str:
        """The kind of kernel that holds the whole as it is stored: ``fp8``, ``int8``, or empty for none."""
        return kept_as([value for _, value in self._parts])

    def stored_kernel(self) -> Fp8Kernel | Int8Kernel | None:
        """That kernel, bit for bit; ``None`` where it cannot be one."""
        whole = lambda one: one
        return stored_kernel(
            [
                (whole if rule.part is None else rule.part.of, value if rule.cut is None else rule.cut.of(value))
                for rule, value in self._parts
            ],
            self.shape,
        )


def _joined(parts: list[tuple[Rule, Array]], shape: tuple[int, ...]) -> Array | Joined:
    rule, value = parts[0]
    return value if rule.part is None and rule.cut is None else Joined(parts, shape)


def _check_table(rules: Sequence[Rule], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Checks that the rules fill every array and every tensor; otherwise the fault is ours, not the checkpoint's."""
    given = dict.fromkeys(expected, 0)
    needed = {path: math.prod(shape) for path, shape in expected.items()}
    for rule in rules:
        size = math.prod(rule.ours(expected[rule.path]))
        given[rule.path] += size
        if rule.cut is not None:
            given[rule.source] = given.get(rule.source, 0) + size
            needed[rule.source] = math.prod(rule.stored(expected[rule.path]))
    wrong = sorted(name for name in needed if given[name] != needed[name])
    if wrong:
        raise AssertionError(f"the rule table and the model differ: {wrong}")


def _check_names(where: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    parts = [
        f"{verb} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for verb, names in (("misses", missing), ("holds unexpected", unexpected))
        if names
    ]
    if parts:
        raise CheckpointError(
            f"{where} {' and '.join(parts)}; its tensors must be exactly those that its config.json describes"
        )
