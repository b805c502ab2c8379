"""A stand-in for jaxtyping where it is not installed: shapes in signatures are for readers and tests, not for running.

So a checkout runs on a machine that has JAX and Flax and no way to a package index.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types


class _Shape:
    def __class_getitem__(cls, _: object) -> type[_Shape]:
        return cls


def stand_in_for_jaxtyping() -> None:
    """Let ``from jaxtyping import Array, Float`` give names without a meaning, if nothing else does."""
    if sys.modules.get("jaxtyping") is not None or importlib.util.find_spec("jaxtyping") is not None:
        return
    module = types.ModuleType("jaxtyping")
    module.__spec__ = importlib.machinery.ModuleSpec("jaxtyping", None)
    module.__path__ = []
    for name in ("Array", "Bool", "DTypeLike", "Float", "Int", "Key"):
        setattr(module, name, _Shape)
    sys.modules["jaxtyping"] = module
