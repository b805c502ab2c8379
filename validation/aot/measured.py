"""A case as it was compiled: its facts at one depth or two, and what they say of a layer and of the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from validation.aot.facts import Part
from validation.aot.programs import Case, Compiled

# Layers. Below three, the features that a head reads would include what leaves the last one.
DEPTHS = (3, 5)


@dataclasses.dataclass(frozen=True)
class Facts:
    """A program at one depth.

    Attributes:
        layers: Of the target.
        parts: See :func:`validation.aot.facts.parts_of`.
        seconds: To ``trace``, ``lower`` and ``compile``, by the clock.
        memory: Bytes; see :class:`validation.aot.programs.Compiled`.
        state: Bytes of the state that is given to be consumed; 0 where there is none.
        cpu_seconds: As ``seconds``, of all cores.
    """

    layers: int
    parts: dict[str, Part]
    seconds: dict[str, float]
    memory: dict[str, int]
    state: int
    cpu_seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, compiled: Compiled, parts: dict[str, Part]) -> Facts:
        """Without the text."""
        return cls(compiled.layers, parts, compiled.seconds, compiled.memory, compiled.state, compiled.cpu_seconds)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a case became.

    Attributes:
        case: Which; its ``layers`` say nothing where there are two depths.
        facts: One for each depth, ascending.
        versions: Of jax and of the platform's compiler.
    """

    case: Case
    facts: tuple[Facts, ...]
    versions: dict[str, str]

    @property
    def deep(self) -> Facts:
        """At the greatest depth."""
        return self.facts[-1]

    @property
    def main(self) -> str:
        """The part that is paid again and again: the round, or all of a program that is none."""
        return "round" if "round" in self.deep.parts else "whole"

    def per_layer(self, part: str, name: str = "launches") -> float | None:
        """What one layer more costs; ``None`` where only one depth is known."""
        if len(self.facts) < 2:
            return None
        shallow, deep = self.facts[0], self.facts[-1]
        more = getattr(deep.parts[part], name) - getattr(shallow.parts[part], name)
        return more / (deep.layers - shallow.layers)

    def outside(self, part: str, name: str = "launches") -> float | None:
        """What remains without layers; ``None`` where only one depth is known."""
        each = self.per_layer(part, name)
        return None if each is None else getattr(self.deep.parts[part], name) - each * self.deep.layers

    @property
    def aliased(self) -> float | None:
        """Share of the state's bytes that are updated in place; ``None`` where no state is given."""
        return self.deep.memory["alias"] / self.deep.state if self.deep.state else None

    def to_json(self) -> dict[str, Any]:
        """For a record."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Measured:
        """What :meth:`to_json` gave."""
        facts = (
            Facts(**{**one, "parts": {name: Part(**part) for name, part in one["parts"].items()}})
            for one in row["facts"]
        )
        return cls(Case(**row["case"]), tuple(facts), dict(row["versions"]))
