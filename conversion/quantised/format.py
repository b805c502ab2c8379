"""What a format of quantised checkpoints says of itself, and its application to the tensors of a file."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.quantised.arrays import Dequantised
from eagle3_jax.conversion.quantised.decoding import Stored

# What only numbers can be, never the weights themselves.
_NO_FLOATS = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32", "float8_e8m0fnu")


class Layout(NamedTuple):
    """How a quantised tensor and its scales are named, and what they stand for.

    Attributes:
        scale: Ending of the scales' name.
        values: Ending of the values' name, in its place.
        result: Ending of the name that the weights have where they are not quantised.
        decode: The weights; raises ``CheckpointError`` where types or shapes do not go together.
    """

    scale: str
    values: str
    result: str
    decode: Callable[[Stored], Dequantised]


class Format(NamedTuple):
    """A quantisation as ``config.json`` describes it.

    Attributes:
        words: What it is, for people.
        layouts: Of its tensors.
        dense: Modules that it says are not quantised: names, with ``*``, or behind ``re:`` a regular expression.
        dense_field: Where it says so.
        beside: Patterns of tensors that belong to quantised ones and are not needed for their weights.
        refused: Patterns of tensors that say that the weights are something else, each with what.
    """

    words: str
    layouts: tuple[Layout, ...]
    dense: Sequence[str] = ()
    dense_field: str = ""
    beside: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}


class Quantisation(NamedTuple):
    """How the weights of a checkpoint were stored.

    Attributes:
        words: For people.
        fp8: Whether its kernels are E4M3 values with scales, which can be kept as they are.
        num_tensors: How many tensors are quantised.
    """

    words: str
    fp8: bool
    num_tensors: int


def dequantised(tensors: Mapping[str, np.ndarray], how: Format, where: str) -> tuple[dict[str, Any], Quantisation]:
    """The tensors with those that are quantised as what they stand for, and how they were stored.

    Raises:
        CheckpointError: They are not what the format says.
    """
    for pattern, meaning in how.refused.items():
        found = next((name for name in tensors if re.fullmatch(pattern, name)), None)
        if found is not None:
            raise CheckpointError(f"{where} holds {found}: {meaning}; give the checkpoint before quantisation")
    results: dict[str, Any] = {}
    used: set[str] = set()
    for name, scale in tensors.items():
        layout = next((one for one in how.layouts if name.endswith(one.scale)), None)
        if layout is None:
            continue
        stem = name.removesuffix(layout.scale)
        values, result = stem + layout.values, stem + layout.result
        if values not in tensors:
            raise CheckpointError(f"{where} holds {name} without {values}, which it scales; fetch the files again")
        module = result.removesuffix(".weight")
        dense = next((entry for entry in how.dense if _names(entry, module)), None)
        if dense is not None:
            raise CheckpointError(
                f"{where} holds {name}, and {how.dense_field} says with {dense!r} that {module} is not quantised; "
                "take that out if it is"
            )
        if result in results or (result != values and result in tensors):
            raise CheckpointError(f"{where} gives {result} twice, the second time as {values}")
        try:
            results[result] = layout.decode(Stored(values, tensors[values], name, scale, tensors))
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error} ({how.words})") from None
        used |= {name, values}
    beside = re.compile("|".join(f"(?:{pattern})" for pattern in how.beside) or r"(?!)")
    rest = {name: value for name, value in tensors.items() if name not in used and not beside.fullmatch(name)}
    bare = next((name for name, value in rest.items() if str(value.dtype) in _NO_FLOATS), None)
    if bare is not None:
        raise CheckpointError(
            f"{where}: {bare} is stored as {rest[bare].dtype} and has no scale; fetch the files again"
        )
    if not results:
        raise CheckpointError(
            f"{where} says that its weights are quantised ({how.words}) and holds no scale; remove quantization_config"
        )
    ours = [value.in_fp8 for value in results.values()]
    # In the order of the file, where that is how tensors are listed in messages.
    return rest | results, Quantisation(how.words, all(ours), len(results))


def _names(entry: str, module: str) -> bool:
    """Whether an entry of such a list means a module, or something that the module is inside of."""
    if entry.startswith("re:"):
        try:
            return re.match(entry[3:], module) is not None
        except re.error as error:
            raise CheckpointError(
                f"{short(entry)} is no regular expression ({error}); mend it in config.json"
            ) from None
    parts = module.split(".")
    above = [".".join(parts[: size + 1]) for size in range(len(parts))]
    if any(fnmatch.fnmatchcase(name, entry) for name in above):
        return True
    return "." not in entry and entry in parts
