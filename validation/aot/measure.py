"""Cases as they were compiled: facts at one depth or two, their record, and which cases the level AOT compiles.

Every compilation runs in its own process, which isolates it and gives its memory back:
``python -m validation.aot.measure '{"case": {"platform": "cuda:h200"}, "depths": [3, 5]}'``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from validation.aot.facts import Part
from validation.aot.platforms import NotHere, Platform, environment_with_plugins
from validation.aot.programs import PROGRAMS, Case, Facts, compiled

# Layers. Below three, the features that a head reads would include what leaves the last one.
DEPTHS = (3, 5)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a case became."""

    case: Case
    facts: tuple[Facts, ...]  # one for each depth, ascending; of two, the layers of the case say nothing
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
        shallow = self.facts[0]
        deep = self.facts[-1]
        more = getattr(deep.parts[part], name) - getattr(shallow.parts[part], name)
        return more / (deep.layers - shallow.layers)

    def collectives_per_layer(self, part: str) -> dict[str, float]:
        """What one layer more adds to each kind; empty where only one depth is known, or nothing is added."""
        shallow = self.facts[0]
        deep = self.facts[-1]
        kinds = deep.parts[part].collectives
        more = {kind: count - shallow.parts[part].collectives.get(kind, 0) for kind, count in kinds.items()}
        return {kind: count / (deep.layers - shallow.layers) for kind, count in more.items() if count}

    def outside(self, part: str, name: str = "launches") -> float | None:
        """What remains without layers; ``None`` where only one depth is known."""
        per_layer = self.per_layer(part, name)
        return None if per_layer is None else getattr(self.deep.parts[part], name) - per_layer * self.deep.layers

    @property
    def aliased(self) -> float | None:
        """Share of the state's bytes that are updated in place; ``None`` where no state is given."""
        return self.deep.memory["alias"] / self.deep.state if self.deep.state else None

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Measured:
        """From a row of a record."""
        facts = (
            Facts(**{**depth, "parts": {name: Part(**part) for name, part in depth["parts"].items()}})
            for depth in row["facts"]
        )
        return cls(Case(**row["case"]), tuple(facts), dict(row["versions"]))


# ---------------------------------------------------------------- compiling

_NOT_HERE = 3
_MISUSE = 2
_MARK = "MEASURED "  # before the one line that counts; compilers print what they like


def measured_here(case: Case, depths: Sequence[int] | None = DEPTHS, hlo: str | None = None) -> Measured:
    """Compile it in this process.

    Args:
        case: Which.
        depths: Layers of the target, ascending; the case's own when ``None``.
        hlo: File for the optimised HLO of the greatest depth.

    Raises:
        NotHere: The platform's compiler is not installed.
        ValueError: It cannot be compiled so.
    """
    facts = []
    for layers in depths or [case.layers]:
        depth_facts, text = compiled(dataclasses.replace(case, layers=layers))
        facts.append(depth_facts)
        if hlo is not None:
            Path(hlo).write_text(text, encoding="utf-8")
    versions = {name: importlib.metadata.version(name) for name in ("jax", *Platform.named(case.platform).wheels)}
    return Measured(case, tuple(facts), versions)


def measured_apart(case: Case, depths: Sequence[int] | None = DEPTHS, hlo: str | None = None) -> Measured:
    """Runs :func:`measured_here` in a separate process.

    Raises:
        NotHere: The platform's compiler is not installed.
        ValueError: It cannot be compiled so.
        RuntimeError: The compiler failed.
    """
    request = json.dumps({"case": dataclasses.asdict(case), "depths": depths, "hlo": hlo and str(Path(hlo).absolute())})
    done = subprocess.run(
        [sys.executable, "-m", "validation.aot.measure", request],
        env=environment_with_plugins(os.environ), capture_output=True, text=True, check=False,
    )  # fmt: skip
    messages = done.stderr.strip().splitlines()
    if done.returncode in (_NOT_HERE, _MISUSE):
        raise (NotHere if done.returncode == _NOT_HERE else ValueError)(messages[-1])
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"compiling {case.name} ended with {done.returncode}: {' '.join(messages[-3:])}")
    return Measured.from_json(json.loads(lines[-1].removeprefix(_MARK)))


# ---------------------------------------------------------------- the record

PATH = Path(__file__).resolve().parent.parent / "results" / "aot.json"
SLACK = 1.05


def load(path: Path = PATH) -> dict[str, Measured]:
    """Returns every row by the name of its case; the names of whole models end with their number of layers.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        rows = [Measured.from_json(row) for row in json.loads(path.read_text("utf-8"))["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is no record of compiled programs: {error}") from None
    return {key(row): row for row in rows}


def key(row: Measured) -> str:
    """What tells a row from others."""
    return row.case.name if len(row.facts) > 1 else f"{row.case.name} L{row.deep.layers}"


def save(rows: Iterable[Measured], path: Path, note: dict[str, str]) -> None:
    """Write rows, a line each, in place of those of the same cases; ``note`` says when and from what."""
    recorded = load(path) if path.exists() else {}
    recorded |= {key(row): row for row in rows}
    lines = ",\n".join(json.dumps(dataclasses.asdict(recorded[name])) for name in sorted(recorded))
    path.write_text(f'{{"note": {json.dumps(note)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def budget(reached: float | None) -> int:
    """What may be spent where this was reached; nothing more where it was nothing."""
    return math.ceil((reached or 0) * SLACK)


# ---------------------------------------------------------------- which cases

ALL = {
    "target": ["Llama-3.1-8B", "Qwen3-8B", "Llama-3.3-70B"],
    "draft": ["chain5", "tree60"],
    "batch": [1, 8],
    "program": list(PROGRAMS),
    "sampled": [False, True],
}


def cases_of(**choices: Sequence[Any]) -> Iterator[Case]:
    """Every combination of values for fields of :class:`Case`."""
    return (Case(**dict(zip(choices, values, strict=True))) for values in itertools.product(*choices.values()))


def few(platform: str) -> list[Case]:
    """What every commit is held to: minutes of two cores."""
    case = functools.partial(Case, platform=platform)
    return [
        case(draft="chain5"),
        case(draft="chain5", sampled=True),
        case(draft="tree60", batch=8),
        case(program="generate", draft="chain5"),
        *on_meshes(platform)[:1],
    ]


def on_meshes(platform: str) -> list[Case]:
    """Rounds on four and on eight devices; on four alone where the topology has no more."""
    case = functools.partial(Case, platform=platform)
    cases = [case(draft="chain5", mesh="model=4")]
    if platform.startswith("cuda"):
        cases += [
            case(draft="tree60", batch=8, mesh="model=4,data=2"),
            case(draft="chain5", batch=8, sampled=True, mesh="model=4,data=2"),
            case(draft="chain5", mesh="model=8"),
        ]
    return cases if Platform.named(platform).holds(4) else []


def every(platform: str) -> list[Case]:
    """All of it: an hour or so for a GPU, more for a TPU."""
    return [*cases_of(platform=[platform], **ALL), *on_meshes(platform)]


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    try:
        row = measured_here(Case(**request["case"]), request["depths"], request["hlo"])
        print(_MARK + json.dumps(dataclasses.asdict(row)))
    except (NotHere, ValueError) as reason:
        print(" ".join(str(reason).split()), file=sys.stderr)
        sys.exit(_NOT_HERE if isinstance(reason, NotHere) else _MISUSE)
