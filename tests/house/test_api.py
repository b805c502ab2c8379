"""The public API is that of ``api.txt``, which shows a change of a name or a signature."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import eagle3_jax

# The lane with PyTorch has the jax whose types stand in some signatures.
pytestmark = pytest.mark.torch

ROOT = Path(__file__).parent.parent.parent
RECORD = Path(__file__).with_name("api.txt")
DIRECTIVE = re.compile(r"\.\. auto(?:class|function|exception|data):: ([\w.]+)")


def public_names() -> list[str]:
    """Names of ``import eagle3_jax``, and those that the pages of the API document."""
    names = {f"eagle3_jax.{name}" for name in eagle3_jax.__all__}
    for page in (ROOT / "docs" / "api").glob("*.md"):
        names.update(DIRECTIVE.findall(page.read_text(encoding="utf-8")))
    return sorted(names)


def found(name: str) -> Any:
    """The object with a dotted name."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return getattr(found(module), attribute)


def signature(value: Any) -> str:
    """A signature whose annotations stand as in the source."""
    text = str(inspect.signature(value))
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # of functions that are defaults
    text = re.sub(r"""ForwardRef\((['"])(.*?)\1\)""", r"\2", text)
    return re.sub(r"""(: |-> )(['"])(.*?)\2""", r"\1\3", text)


def lines_of(name: str, value: Any) -> Iterator[str]:
    """The signature of a function; of a class those of its constructor and public members."""
    if inspect.isroutine(value):
        yield f"{name}{signature(value)}"
        return
    # A module, an alias of a type or a value.
    if not inspect.isclass(value):
        yield name
        return

    has_signature = value.__init__ is not object.__init__ or hasattr(value, "_fields")
    is_protocol = getattr(value, "_is_protocol", False)
    is_made = has_signature and not is_protocol and not issubclass(value, enum.Enum | Exception)
    yield f"{name}{signature(value)}" if is_made else name

    for member, definition in sorted(vars(value).items()):
        if member.startswith("_"):
            continue
        function = getattr(definition, "__func__", definition)
        if inspect.isfunction(function):
            yield f"    {member}{signature(function)}"
        elif isinstance(definition, property):
            yield f"    {member}"


def test_the_public_api_is_the_recorded_one(pytestconfig: pytest.Config) -> None:
    lines: list[str] = []
    for name in public_names():
        lines += lines_of(name, found(name))
    text = "\n".join(lines) + "\n"
    if pytestconfig.getoption("--record-api"):
        RECORD.write_text(text, encoding="utf-8")
    assert text == RECORD.read_text(encoding="utf-8"), (
        "the public API has changed; if that is meant, write it with --record-api, and name old"
        " and new in CHANGELOG.md"
    )
