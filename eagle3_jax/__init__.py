"""Lossless EAGLE-3 speculative decoding in JAX.

Public are the names of `__init__.pyi`, whose first group is enough to decode, and what `docs/api`
documents by the path of its module; everything else may move. Each name is imported at its first
use, so `eagle3 --help` starts without JAX.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.5.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    name.name: node.module
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for name in node.names
}
__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'eagle3_jax' has no attribute {name!r}")
    if module == __name__:
        return importlib.import_module(f"eagle3_jax.{name}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
