"""Bits of a weight in a quantised checkpoint, from its ``config.json`` alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.quantised.formats import description_of, format_of

_DENSE = 16.0  # bits of a weight that is not quantised
_EXCLUDING = ("modules_to_not_convert", "ignore", "exclude_modules")
# A module of each use; the names of recurrent layers and of stacked experts differ.
_MODULES = {
    "attention": ("self_attn.o_proj", "linear_attn.out_proj"),
    "mlp": ("mlp.down_proj", "feed_forward.down_proj"),
    "experts": ("mlp.experts", "mlp.experts.0.down_proj", "feed_forward.experts"),
}


class StoredBits(NamedTuple):
    """Bits of a weight with its share of scales and zero points, on average over all layers."""

    kind: str  #: ``fp8``, ``int8``, ``int4``, ``mxfp4`` or ``nvfp4``.
    attention: float  #: Of projections of attention and of recurrent layers.
    mlp: float  #: Of MLPs that every token goes through.
    experts: float  #: Of experts.


def stored_bits(fields: Fields, directory: Path, num_layers: int) -> StoredBits | None:
    """Returns the bits of the weights inside layers; ``None`` without quantisation.

    Modules that ``config.json`` leaves out have 16 bits.

    Raises:
        CheckpointError: The quantisation is not one that is read.
    """
    format = format_of(fields, directory)
    if format is None:
        return None
    description = description_of(fields, directory)
    patterns = [word for name in _EXCLUDING for word in description.words(name)]
    overrides = description.section("dynamic").values
    patterns += [f"re:{name[2:]}" for name in overrides if name.startswith("-:")]

    def is_dense(layer: int, modules: Sequence[str]) -> bool:
        names = [f"model.layers.{layer}.{module}" for module in modules]
        return any(_names(pattern, name) for pattern in patterns for name in names)

    bits = {}
    for use, modules in _MODULES.items():
        num_dense = sum(is_dense(layer, modules) for layer in range(num_layers))
        if format.kind == "mxfp4" and use != "experts":
            num_dense = num_layers
        bits[use] = format.bits + (_DENSE - format.bits) * num_dense / num_layers
    return StoredBits(format.kind, **bits)


def _names(pattern: str, module: str) -> bool:
    """Tells whether a pattern of ``config.json`` names a module or a part that contains it."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    pattern = pattern.replace("language_model.", "")
    return any(
        fnmatchcase(module, full_name)
        for full_name in (pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*")
    )
