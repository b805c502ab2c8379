"""The description of a format of quantised checkpoints, and its application to the tensors of a file."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.quantised.arrays import Dequantised
from eagle3_jax.conversion.quantised.decoding import Stored

# Types that need a scale: they are never the weights themselves.
_NO_FLOATS = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32", "float8_e8m0fnu")


class Layout(NamedTuple):
    """The names of a quantised tensor and its scales, and the weights that they stand for.

    Attributes:
        scale: Ending of the name of the scales.
        values: Ending of the name of the values, in its place.
        result: Ending of the name of weights that are not quantised.
        decode: Gives the weights; raises ``CheckpointError`` where types or shapes contradict each other.
    """

    scale: str
    values: str
    result: str
    decode: Callable[[Stored], Dequantised]


class Format(NamedTuple):
    """A quantisation as ``config.json`` describes it.

    Attributes:
        words: Its name for people.
        layouts: The layouts of its tensors.
        dense: Modules that are not quantised: names, with ``*``, or a regular expression after ``re:``.
        dense_field: The field that lists them.
        beside: Patterns of tensors that belong to quantised ones and are not needed for their weights.
        refused: Patterns of tensors that change the meaning of the weights, each with the reason.
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
        words: The format, for people.
        fp8: Whether its kernels are E4M3 values with scales, which can be kept as they are.
        num_tensors: How many tensors are quantised.
    """

    words: str
    fp8: bool
    num_tensors: int


def dequantised(tensors: Mapping[str, np.ndarray], how: Format, where: str) -> tuple[dict[str, Any], Quantisation]:
    """The tensors without quantisation, and how they were stored."""
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
    fp8 = all(value.in_fp8 for value in results.values())
    # Messages list tensors in the order of the file.
    return rest | results, Quantisation(how.words, fp8, len(results))


def _names(entry: str, module: str) -> bool:
    """Whether an entry of such a list means a module, or one that contains it."""
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
