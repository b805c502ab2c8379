"""Rule tables between a foreign checkpoint's tensor names and our nested parameters, applied strictly both ways.

A table is a list of exact pairs, generated for one configuration. Everything that is expected is in it, so a tensor
that is missing, unknown, given twice or of another shape is an error and never a default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from conversion.errors import CheckpointError, short
from eagle3_jax.models.config import LayerConfig

Params = dict[Any, Any]

# PyTorch keeps linear weights [out, in]; our kernels are [in, out].
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

# Buffers that old versions of transformers saved. They follow from the configuration.
DERIVED_BUFFERS = (r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",)


class Rule(NamedTuple):
    """One tensor under both names.

    Attributes:
        source: Name in the foreign checkpoint.
        path: Where it lies in our parameters, joined by dots, as in ``blocks.0.attention.q.kernel``.
        transpose: Whether the two are transposes of each other.
        columns: Which part of our array's last axis it is, where we store several tensors side by side.
    """

    source: str
    path: str
    transpose: bool = False
    columns: tuple[int, int] | None = None


def linear(source: str, path: str, *, bias: bool = False, columns: tuple[int, int] | None = None) -> list[Rule]:
    """A linear layer, or some outputs of one."""
    kernel = Rule(f"{source}.weight", f"{path}.kernel", transpose=True, columns=columns)
    return [kernel, Rule(f"{source}.bias", f"{path}.bias", columns=columns)] if bias else [kernel]


def side_by_side(sizes: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Where each of several linear layers lies in the one that we store for all of them."""
    start = 0
    for name, size in sizes.items():
        yield name, (start, start + size)
        start += size


def norm(source: str, path: str) -> Rule:
    """An RMSNorm."""
    return Rule(f"{source}.weight", f"{path}.scale")


def attention_and_mlp(config: LayerConfig, source: str, path: str) -> list[Rule]:
    """What every block has: attention, the norm between, the SwiGLU."""
    mixer, mlp = config.mixer, config.mlp
    rules = [norm(f"{source}.post_attention_layernorm", f"{path}.mlp_norm")]
    queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    for name, columns in side_by_side({"q": queries, "k": keys, "v": keys}):
        rules += linear(
            f"{source}.self_attn.{name}_proj", f"{path}.attention.qkv", bias=mixer.qkv_bias, columns=columns
        )
    rules += linear(f"{source}.self_attn.o_proj", f"{path}.attention.o", bias=mixer.o_bias)
    if mixer.qk_norm:
        rules += [norm(f"{source}.self_attn.{name}_norm", f"{path}.attention.{name}_norm") for name in "qk"]
    for name, columns in side_by_side({"gate": mlp.width, "up": mlp.width}):
        rules += linear(f"{source}.mlp.{name}_proj", f"{path}.mlp.gate_up", bias=mlp.bias, columns=columns)
    return rules + linear(f"{source}.mlp.down_proj", f"{path}.mlp.down", bias=mlp.bias)


def block(config: LayerConfig, source: str, path: str) -> list[Rule]:
    """A plain pre-norm block."""
    return [norm(f"{source}.input_layernorm", f"{path}.attention_norm"), *attention_and_mlp(config, source, path)]


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
    """Our parameters from foreign tensors.

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
    found: dict[str, dict[int, np.ndarray]] = {}
    for rule in rules:
        of_path = found.setdefault(rule.path, {})
        start = rule.columns[0] if rule.columns else 0
        if start in of_path:
            raise CheckpointError(f"{where} gives {rule.path} twice, the second time as {rule.source}")
        shape = _part_of(expected[rule.path], rule)
        of_path[start] = _checked(tensors[rule.source], rule, shape, f"{where}: {rule.source}")
    leaves = {path: _joined([of_path[start] for start in sorted(of_path)]) for path, of_path in found.items()}
    _check_table({path: leaf.shape for path, leaf in leaves.items()}, expected)
    return unflatten(leaves, shapes)


def write_params(rules: Sequence[Rule], params: Params, shapes: Params, *, where: str) -> dict[str, np.ndarray]:
    """Foreign tensors from our parameters; the inverse of :func:`read_params`.

    Raises:
        CheckpointError: The parameters are not those that the configuration describes.
    """
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
    _check_table(dict.fromkeys((rule.path for rule in rules), None), dict.fromkeys(expected, None))
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
    if value.dtype not in FLOATS:
        raise CheckpointError(
            f"{what} is stored as {value.dtype}; expected float32, float16 or bfloat16 (quantised weights are not read)"
        )


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


def _part_of(shape: tuple[int, ...], rule: Rule) -> tuple[int, ...]:
    return shape if rule.columns is None else (*shape[:-1], rule.columns[1] - rule.columns[0])


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def _stored(value: np.ndarray, rule: Rule) -> np.ndarray:
    part = value if rule.columns is None else value[..., slice(*rule.columns)]
    return part.T if rule.transpose else part


def _check_table(shapes: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    if shapes != expected:  # a mistake of ours, not of the checkpoint
        wrong = sorted(path for path in {*shapes, *expected} if shapes.get(path) != expected.get(path))
        raise AssertionError(f"the rule table and the model differ: {wrong}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
