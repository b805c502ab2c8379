"""A compilation in a process of its own: isolated, and its memory is given back.

python -m validation.aot.apart '{"case": {"platform": "cuda:h200"}, "depths": [2, 4]}'
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from validation.aot.facts import parts_of
from validation.aot.measured import DEPTHS, Facts, Measured
from validation.aot.platforms import NotHere, Platform, environment_with_plugins
from validation.aot.programs import Case, compiled

_NOT_HERE, _MISUSE = 3, 2
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
        program = compiled(dataclasses.replace(case, layers=layers))
        if hlo is not None:
            Path(hlo).write_text(program.text, encoding="utf-8")
        found = parts_of(program.text, rounds=case.program == "generate", caches=program.caches, table=program.table)
        facts.append(Facts.of(program, found))
    versions = {name: importlib.metadata.version(name) for name in ("jax", *Platform.named(case.platform).wheels)}
    return Measured(case, tuple(facts), versions)


def measured_apart(case: Case, depths: Sequence[int] | None = DEPTHS, hlo: str | None = None) -> Measured:
    """:func:`measured_here`, in a process of its own.

    Raises:
        NotHere: The platform's compiler is not installed.
        ValueError: It cannot be compiled so.
        RuntimeError: The compiler failed.
    """
    asked = json.dumps({"case": dataclasses.asdict(case), "depths": depths, "hlo": hlo and str(Path(hlo).absolute())})
    done = subprocess.run(
        [sys.executable, "-m", "validation.aot.apart", asked],
        env=environment_with_plugins(os.environ), capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = done.stderr.strip().splitlines()
    if done.returncode in (_NOT_HERE, _MISUSE):
        raise (NotHere if done.returncode == _NOT_HERE else ValueError)(said[-1])
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"compiling {case.name} ended with {done.returncode}: {' '.join(said[-3:])}")
    return Measured.from_json(json.loads(lines[-1].removeprefix(_MARK)))


def _main(asked: str) -> int:
    wanted = json.loads(asked)
    try:
        found = measured_here(Case(**wanted["case"]), wanted["depths"], wanted.get("hlo"))
    except NotHere as reason:
        print(reason, file=sys.stderr)
        return _NOT_HERE
    except ValueError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return _MISUSE
    print(_MARK + json.dumps(found.to_json()))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
