"""Rule tables between a foreign checkpoint's tensor names and our nested parameters, applied strictly both ways.

A table is a list of exact pairs, generated for one configuration. Everything that is expected is in it, so a tensor
that is missing, unknown, given twice or of another shape is an error and never a default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from conversion.errors import CheckpointError, short
from eagle3_jax.models.config import DecoderConfig, LayerConfig

if TYPE_CHECKING:
    import numpy as np

Params = dict[Any, Any]

# PyTorch keeps linear weights [out, in]; our kernels are [in, out].
FLOATS = ("float32", "float16", "bfloat16")

# Buffers that old versions of transformers saved. They follow from the configuration.
DERIVED_BUFFERS = (r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",)


class Part(NamedTuple):
    """Which part of an array a tensor is, where several of them fill it.

    The last axis is read as ``[outer, slots, inner]``, and the tensor is some of the slots of every outer index.

    Attributes:
        outer: How often the tensors take turns.
        slots: Places in a turn, of all tensors together.
        inner: Columns of a place.
        start: The tensor's first place.
        stop: The place after its last.
        leading: Where it lies on the leading axes, as an expert among experts.
    """

    outer: int
    slots: int
    inner: int
    start: int
    stop: int
    leading: tuple[int, ...] = ()

    def of(self, whole: np.ndarray) -> np.ndarray:
        """The tensor as a view into the array, ``[..., outer, places, inner]``."""
        one = whole[self.leading]
        return one.reshape(*one.shape[:-1], self.outer, self.slots, self.inner)[..., self.start : self.stop, :]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's own shape."""
        return (*whole[len(self.leading) : -1], self.outer * (self.stop - self.start) * self.inner)


class Rule(NamedTuple):
    """One tensor under both names.

    Attributes:
        source: Name in the foreign checkpoint.
        path: Where it lies in our parameters, joined by dots, as in ``blocks.0.attention.o.kernel``.
        transpose: Whether the two are transposes of each other.
        part: Which part of our array it is, where we store several tensors in one; ``None`` for all of it.
    """

    source: str
    path: str
    transpose: bool = False
    part: Part | None = None


def linear(source: str, path: str, *, bias: bool = False, part: Part | None = None) -> list[Rule]:
    """A linear layer, or some outputs of one."""
    kernel = Rule(f"{source}.weight", f"{path}.kernel", transpose=True, part=part)
    return [kernel, Rule(f"{source}.bias", f"{path}.bias", part=part)] if bias else [kernel]


def in_turns(outer: int, inner: int, places: Mapping[str, int]) -> Iterator[tuple[str, Part]]:
    """Where each of several linear layers lies in the one that we store for all of them."""
    slots, start = sum(places.values()), 0
    for name, size in places.items():
        yield name, Part(outer, slots, inner, start, start + size)
        start += size


def norm(source: str, path: str) -> Rule:
    """An RMSNorm."""
    return Rule(f"{source}.weight", f"{path}.scale")


def attention_and_mlp(config: LayerConfig, source: str, path: str) -> list[Rule]:
    """What every block has: attention, the norm between, the SwiGLU."""
    mixer, mlp = config.mixer, config.mlp
    rules = [norm(f"{source}.post_attention_layernorm", f"{path}.mlp_norm")]
    for name, part in in_turns(mixer.num_kv_heads, mixer.head_dim, {"q": mixer.group, "k": 1, "v": 1}):
        rules += linear(f"{source}.self_attn.{name}_proj", f"{path}.attention.qkv", bias=mixer.qkv_bias, part=part)
    rules += linear(f"{source}.self_attn.o_proj", f"{path}.attention.o", bias=mixer.o_bias)
    if mixer.qk_norm:
        rules += [norm(f"{source}.self_attn.{name}_norm", f"{path}.attention.{name}_norm") for name in "qk"]
    for name, part in in_turns(mlp.width, 1, {"gate": 1, "up": 1}):
        rules += linear(f"{source}.mlp.{name}_proj", f"{path}.mlp.gate_up", bias=mlp.bias, part=part)
    return rules + linear(f"{source}.mlp.down_proj", f"{path}.mlp.down", bias=mlp.bias)


def block(config: LayerConfig, source: str, path: str) -> list[Rule]:
    """A plain pre-norm block."""
    return [norm(f"{source}.input_layernorm", f"{path}.attention_norm"), *attention_and_mlp(config, source, path)]


def decoder(config: DecoderConfig) -> list[Rule]:
    """A whole target in the names that the families share."""
    table = [Rule("model.embed_tokens.weight", "embedding"), norm("model.norm", "norm")]
    for index, layer in enumerate(config.layers):
        table += block(layer, f"model.layers.{index}", f"blocks.{index}")
    return table if config.tie_embeddings else table + linear("lm_head", "head")


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


def read_params(
    rules: Sequence[Rule], tensors: Mapping[str, np.ndarray], shapes: Params, *, where: str, known: Sequence[str] = ()
) -> Params:
    """Our parameters from foreign tensors: views of those, and :class:`Joined` where we store several in one.

    Args:
        rules: The table.
        tensors: What the checkpoint holds.
        shapes: What our model expects, nested.
        where: Names the checkpoint in messages.
        known: Patterns of further names that may be there and are not needed.

    Raises:
        CheckpointError: Tensors are missing, unexpected, given twice, mis-shaped or not floats.
    """
    by_source = {rule.source: rule for rule in rules}
    expected = {path: tuple(leaf.shape) for path, leaf in flatten(shapes)}
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in (*DERIVED_BUFFERS, *known)))
    unexpected = [name for name in tensors if name not in by_source and not ignored.fullmatch(name)]
    missing = [rule.source for rule in rules if rule.source not in tensors]
    if missing or unexpected:
        parts = [f"misses {_listed(missing)}"] * bool(missing) + [f"holds unexpected {_listed(unexpected)}"] * bool(
            unexpected
        )
        raise CheckpointError(
            f"{where} {' and '.join(parts)}; its tensors must be exactly those that its config.json describes"
        )
    found: dict[str, list[tuple[Rule, np.ndarray]]] = {}
    for rule in rules:
        of_path = found.setdefault(rule.path, [])
        if any(rule.part == other.part for other, _ in of_path):
            raise CheckpointError(f"{where} gives {rule.path} twice, the second time as {rule.source}")
        shape = rule.part.shape(expected[rule.path]) if rule.part else expected[rule.path]
        of_path.append((rule, _checked(tensors[rule.source], rule, shape, f"{where}: {rule.source}")))
    _check_table({path: sum(value.size for _, value in parts) for path, parts in found.items()}, _sizes(expected))
    leaves = {path: _joined(parts, expected[path]) for path, parts in found.items()}
    return unflatten(leaves, shapes)


def write_params(rules: Sequence[Rule], params: Params, shapes: Params, *, where: str) -> dict[str, np.ndarray]:
    """Foreign tensors from our parameters; the inverse of :func:`read_params`.

    Raises:
        CheckpointError: The parameters are not those that the configuration describes.
    """
    import numpy as np

    given = {path: np.asarray(leaf) for path, leaf in flatten(params)}
    expected = {path: tuple(leaf.shape) for path, leaf in flatten(shapes)}
    missing, unexpected = sorted(set(expected) - set(given)), sorted(set(given) - set(expected))
    if missing or unexpected:
        parts = [f"miss {_listed(missing)}"] * bool(missing) + [f"hold unexpected {_listed(unexpected)}"] * bool(
            unexpected
        )
        raise CheckpointError(f"the parameters of {where} {' and '.join(parts)}; they must fit their configuration")
    for path, leaf in given.items():
        if leaf.shape != expected[path]:
            raise CheckpointError(f"{where}: {path} has shape {leaf.shape}; expected {expected[path]}")
        check_float(leaf, f"{where}: {path}")
    sizes = dict.fromkeys((rule.path for rule in rules), 0)
    for rule in rules:
        sizes[rule.path] += math.prod(rule.part.shape(expected[rule.path]) if rule.part else expected[rule.path])
    _check_table(sizes, _sizes(expected))
    return {rule.source: _stored(given[rule.path], rule) for rule in rules}


def check_layers(num_layers: int, names: Iterable[str], pattern: str, what: str) -> None:
    """Refuse a number of layers that the names of the tensors contradict, before anything of that size is built.

    Raises:
        CheckpointError: They are not layers 0 up to the last.
    """
    found = {int(match[1]) for name in names if (match := re.match(pattern, name))}
    if len(found) != num_layers:
        raise CheckpointError(f"{what} is {short(num_layers)}; the file holds {len(found)} layers")


def check_float(value: np.ndarray, what: str) -> None:
    """Refuse anything but float32, float16 and bfloat16.

    Raises:
        CheckpointError: It is another type, such as that of a quantised checkpoint.
    """
    if str(value.dtype) not in FLOATS:
        raise CheckpointError(
            f"{what} is stored as {value.dtype}; expected float32, float16 or bfloat16 (quantised weights are not read)"
        )


def matrix(tensors: Mapping[str, np.ndarray], name: str, shape: tuple[int, int], *, where: str) -> np.ndarray | None:
    """A matrix that a checkpoint may bring or leave out, as it is stored.

    Raises:
        CheckpointError: It has another shape, or is not of floats.
    """
    value = tensors.get(name)
    if value is not None:
        if value.shape != shape:
            raise CheckpointError(f"{where}: {name} has shape {list(value.shape)}; config.json asks for {list(shape)}")
        check_float(value, f"{where}: {name}")
    return value


def main_dtype(params: Mapping[Any, Any]) -> str:
    """The dtype that holds most of the parameters."""
    sizes: dict[str, int] = {}
    for _, leaf in flatten(params):
        sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + leaf.size
    return max(sizes, key=lambda name: sizes[name])


def _checked(value: np.ndarray, rule: Rule, shape: tuple[int, ...], what: str) -> np.ndarray:
    stored = shape[::-1] if rule.transpose else shape
    if value.shape != stored:
        raise CheckpointError(f"{what} has shape {list(value.shape)}; config.json asks for {list(stored)}")
    check_float(value, what)
    return value.T if rule.transpose else value


class Joined:
    """An array that several tensors fill. It is put together whenever it is read, so that nobody holds all of them.

    Attributes:
        shape: Of the whole.
        dtype: That holds every tensor.
        ndim: Number of axes.
        size: Number of entries.
    """

    def __init__(self, parts: Sequence[tuple[Rule, np.ndarray]], shape: tuple[int, ...]):
        """See the class."""
        import numpy as np  # tables alone, for a configuration, do without

        self._parts, self.shape = parts, shape
        self.dtype = np.result_type(*(value for _, value in parts))
        self.ndim, self.size = len(shape), math.prod(shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole; always a copy."""
        import numpy as np

        whole = np.empty(self.shape, dtype or self.dtype)
        for rule, value in self._parts:
            assert rule.part is not None
            view = rule.part.of(whole)
            view[...] = value.reshape(view.shape)
        return whole


def _joined(parts: list[tuple[Rule, np.ndarray]], shape: tuple[int, ...]) -> np.ndarray | Joined:
    return parts[0][1] if parts[0][0].part is None else Joined(parts, shape)


def _stored(value: np.ndarray, rule: Rule) -> np.ndarray:
    part = value if rule.part is None else rule.part.of(value).reshape(rule.part.shape(value.shape))
    return part.T if rule.transpose else part


def _sizes(expected: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    return {path: math.prod(shape) for path, shape in expected.items()}


def _check_table(shapes: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    if shapes != expected:  # a mistake of ours, not of the checkpoint
        wrong = sorted(path for path in {*shapes, *expected} if shapes.get(path) != expected.get(path))
        raise AssertionError(f"the rule table and the model differ: {wrong}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
