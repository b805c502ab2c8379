"""Compiled cases at one depth or two, their record, and the cases of every commit."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from validation.aot.hlo import Counts
from validation.aot.platforms import Platform, find_compilers
from validation.aot.programs import Case, Facts, compiled

PATH = Path(__file__).resolve().parent.parent / "results" / "aot.json"
# Layers. With fewer than three, the features of a head would include the output of the last layer.
DEPTHS = (3, 5)
SLACK = 1.05


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a case compiled to."""

    case: Case
    #: One for each depth, ascending. With two, the layers of the case mean nothing.
    facts: list[Facts]
    versions: dict[str, str]  #: Versions of JAX and of the compiler.

    @property
    def deep(self) -> Facts:
        """Facts at the greatest depth."""
        return self.facts[-1]

    @property
    def key(self) -> str:
        """Name of the row; that of a complete model ends with its number of layers."""
        return self.case.name if len(self.facts) > 1 else f"{self.case.name} L{self.deep.layers}"

    def per_layer(self) -> float:
        """Returns the launches that a layer adds, from two depths."""
        shallow, deep = self.facts
        more = deep.counts.launches - shallow.counts.launches
        return more / (deep.layers - shallow.layers)

    def outside(self) -> float:
        """Returns the launches outside the layers, from two depths."""
        return self.deep.counts.launches - self.per_layer() * self.deep.layers

    @property
    def aliased(self) -> float | None:
        """Share of the state that is updated in place; ``None`` if no state is an argument."""
        return self.deep.memory["alias"] / self.deep.state if self.deep.state else None

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Measured:
        """Returns a row of a record; older rows have more fields, which are ignored."""
        facts = [
            Facts(**_fields(Facts, depth) | {"counts": Counts(**_fields(Counts, depth["counts"]))})
            for depth in row["facts"]
        ]
        return cls(Case(**row["case"]), facts, row["versions"])


def _fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the fields of a dataclass."""
    return {field.name: values[field.name] for field in dataclasses.fields(kind)}


def measured(case: Case, depths: Sequence[int | None] = DEPTHS) -> tuple[Measured, str]:
    """Compiles a case in a process of its own, which finds the compilers.

    Returns the HLO of the last depth, too.

    Args:
        case: The case.
        depths: Numbers of layers, ascending; ``[None]`` for the case's own.

    Raises:
        NotHere: The compiler of the platform is not installed.
        ValueError: The case cannot be compiled.
        RuntimeError: The compiler failed.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=find_compilers) as process:
        return process.submit(_measured_here, case, depths).result()


def _measured_here(case: Case, depths: Sequence[int | None]) -> tuple[Measured, str]:
    facts = []
    text = ""
    for layers in depths:
        depth_facts, text = compiled(dataclasses.replace(case, layers=layers or case.layers))
        facts.append(depth_facts)
    versions = {
        name: importlib.metadata.version(name)
        for name in ("jax", *Platform.named(case.platform).wheels)
    }
    return Measured(case, facts, versions), text


def load(path: Path = PATH) -> dict[str, Measured]:
    """Returns every row of a record by its key.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        rows = [Measured.from_json(row) for row in json.loads(path.read_text("utf-8"))["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is not a record of compiled programs: {error}") from None
    return {row.key: row for row in rows}


def save(rows: Iterable[Measured], path: Path, note: dict[str, str]) -> None:
    """Writes rows, a line each, in place of those of the same cases.

    ``note`` is the date and the commit.
    """
    recorded = load(path) if path.exists() else {}
    recorded |= {row.key: row for row in rows}
    lines = ",\n".join(json.dumps(dataclasses.asdict(recorded[key])) for key in sorted(recorded))
    path.write_text(f'{{"note": {json.dumps(note)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def budget(recorded: float) -> int:
    """Returns the largest count that is allowed where one was recorded; 0 stays 0."""
    return math.ceil(recorded * SLACK)


def cases(platform: str, *, every: bool = False) -> list[Case]:
    """Returns the cases of every commit (minutes), or all recorded cases of a platform."""
    if every:
        return list(
            dict.fromkeys(row.case for row in load().values() if row.case.platform == platform)
        )
    few = [
        Case(platform=platform),
        Case(platform=platform, sampled=True),
        Case(platform=platform, draft="tree60", batch=8),
        Case(platform=platform, program="generate"),
    ]
    return few + [Case(platform=platform, mesh="model=4")] * platform.startswith("cuda")
