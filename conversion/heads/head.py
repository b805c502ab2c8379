"""What a kind of draft head says of itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig

if TYPE_CHECKING:
    import numpy as np


class Signs(NamedTuple):
    """What a checkpoint is recognised by.

    Attributes:
        config: Its ``config.json``.
        names: Its tensors' names without ``model.``; none where only the configuration is known.
        architecture: All ``architectures``, joined.
        method: What speculators calls the method; empty elsewhere.
    """

    config: Mapping[str, Any]
    names: frozenset[str]
    architecture: str
    method: str

    @classmethod
    def of(cls, config: Mapping[str, Any], names: Collection[str], where: str) -> Signs:
        """The signs of a ``config.json`` and the names of its tensors."""
        return cls(
            config=config,
            names=frozenset(name.removeprefix("model.") for name in names),
            architecture=" ".join(Fields(config, where).words("architectures")),
            method=str(config.get("speculators_model_type") or ""),
        )

    def has(self, pattern: str) -> bool:
        """Whether the name of a tensor begins so."""
        return any(re.match(pattern, name) for name in self.names)


class Stored(NamedTuple):
    """A checkpoint as it lies on disk.

    Attributes:
        directory: Where.
        config: Its ``config.json``.
        tensors: By name.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]


class HeadKind(NamedTuple):
    """Draft heads of one method.

    Attributes:
        name: What ``conversion.identify`` calls it.
        label: What people call it.
        recognise: Whether a checkpoint is one. The table is asked in its order, and the first that says yes has it.
        difference: What it is and why it cannot stand in for a head that is loaded; empty where it is.
        read: The head from what is stored and its target, where that is known.
        make: A drafter and its parameters from a head, the target's tables (what it has not it borrows from there),
            a precision, and the target's mesh, where it has one.
        dialect: Whose layout a checkpoint is in, from its ``config.json`` and its tensors' names.
    """

    name: str
    label: str
    recognise: Callable[[Signs], bool]
    difference: str = ""
    read: Callable[[Stored, DecoderConfig | None], Any] | None = None
    make: Callable[[Any, Any, Any, Any], tuple[Any, dict[str, Any]]] | None = None
    dialect: Callable[[Mapping[str, Any], Iterable[str]], str] = lambda config, names: "huggingface"
