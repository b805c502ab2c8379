"""What a release claims: its records, and whether the code is still the one that they are of.

    python docs/recorded/release.py            # the checklist; 1 if the release is not ready
    python docs/recorded/release.py --run      # measures again what is older than its code
    python docs/recorded/release.py --run speed batches    # of these

``records.toml`` names every record with the packages that it depends on and the command that
repeats it. A record is current if no file of these packages, or of what they import, has other
statements than at the record's commit; words, types of functions and the number of the version do
not count.
Records of a GPU stay as they are until there is one, and pages name their version.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import fnmatch
import functools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from page_tables import ROOT, table

from eagle3_jax import __version__

sys.path.insert(0, str(ROOT))

from validation.fixtures import installed_python

LIBRARY = "eagle3_jax"
# Where commands write before their records replace the committed ones: a record says whether the
# tree had other changes.
BUILD = ROOT / "build" / "records"
NIGHT = "tests/nightly/result.json"
NIGHT_RUN = "tests/nightly/run.py"
SHOWN = 3  # packages in a line


def git(*words: str) -> str:
    """Returns what git prints.

    Raises:
        subprocess.CalledProcessError: git refuses, such as for a commit that it does not know.
    """
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


# ----------------------------------------------------------------------------------------- Records


@dataclasses.dataclass(frozen=True, order=True)
class Stamp:
    """The code that a record is of."""

    date: str  #: Of the measurement; empty where a record has none.
    version: str
    commit: str
    dirty: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """An entry of ``records.toml``."""

    name: str
    about: str  #: What it shows, for the table.
    files: list[str]  #: Patterns of paths from the root.
    command: str  #: Repeats it; ``$OUT`` is the folder that it writes into.
    #: Packages and files of the library that it depends on, besides all that they import, and
    #: paths from the root.
    code: list[str]
    page: str = ""  #: The page that shows it.
    minutes: int = 0  #: Of the command, on two cores.
    machine: str = "any"  #: ``any``, ``quiet`` where nothing else may run, or ``gpu``.

    @property
    def paths(self) -> list[Path]:
        """The committed files."""
        return sorted(path for pattern in self.files for path in ROOT.glob(pattern))

    @property
    def stamps(self) -> list[Stamp]:
        """The stamps of all files, the oldest first; a file may hold several measurements."""
        values = [json.loads(path.read_text(encoding="utf-8")) for path in self.paths]
        return sorted({stamp for value in values for stamp in stamps_in(value)})

    def changes(self) -> list[str]:
        """Returns why it is not of today's code; empty if it is."""
        if not self.paths:
            return ["there is no such file"]
        if not self.stamps:
            return ["it does not name its commit"]

        reasons = [
            f"{stamp.commit[:10]} had uncommitted changes" for stamp in self.stamps if stamp.dirty
        ]
        values = [json.loads(path.read_text(encoding="utf-8")) for path in self.paths]
        dicts = [value for value in values if isinstance(value, dict)]
        if missing := [name for value in dicts for name in value.get("to_measure", [])]:
            reasons.append(f"it lacks {', '.join(missing)}")
        commits = {stamp.commit for stamp in self.stamps}
        known = {commit for commit in commits if is_known(commit)}
        if lost := sorted(commits - known):
            more = f" and {len(lost) - 1} more are" if len(lost) > 1 else " is"
            reasons.append(f"{lost[0][:10]}{more} not in the history")
        changed = sorted({part for commit in known for part in parts_since(commit, *self.code)})
        if changed:
            more = f" and {len(changed) - SHOWN} more" * (len(changed) > SHOWN)
            reasons.append(f"{', '.join(changed[:SHOWN])}{more} changed")
        return reasons


def records() -> list[Record]:
    """Reads ``records.toml``."""
    text = Path(__file__).with_name("records.toml").read_text(encoding="utf-8")
    return [Record(**entry) for entry in tomllib.loads(text)["record"]]


@functools.cache
def files_of_records() -> list[str]:
    """Returns the patterns of all committed records, which are not code."""
    return [pattern for record in records() for pattern in record.files]


def stamps_in(value: Any) -> Iterator[Stamp]:
    """Yields the stamps in a record: of an environment, or in fields of its own."""
    if isinstance(value, list):
        for item in value:
            yield from stamps_in(item)
    if not isinstance(value, dict):
        return

    about = value.get("git")
    if isinstance(about, dict) and "versions" in value:
        versions = value["versions"]
        yield Stamp(
            value.get("date", "")[:10],
            versions.get("eagle3_jax", versions.get("eagle3-jax", "")),
            about["commit"],
            about["dirty"],
        )
    elif {"commit", "version"} <= value.keys():
        date = value.get("date", value.get("started", ""))[:10]
        yield Stamp(date, value["version"], value["commit"], value.get("dirty", False))
    for item in value.values():
        yield from stamps_in(item)


# -------------------------------------------------------------------------------------------- Code


def is_known(commit: str) -> bool:
    """Returns whether a commit is an ancestor of this one."""
    try:
        git("merge-base", "--is-ancestor", commit, "HEAD")
    except subprocess.CalledProcessError:
        return False
    return True


@functools.cache
def parts_since(commit: str, *code: str) -> set[str]:
    """Returns the packages and files with other statements than at a commit."""
    folders = {folder for name in code for folder in folders_of(name)}
    return {
        Path(folder).stem
        for name in git("diff", "--name-only", commit, "HEAD").splitlines()
        for folder in folders
        if name == folder or name.startswith(f"{folder}/")
        if not any(fnmatch.fnmatch(name, pattern) for pattern in files_of_records())
        if not name.endswith((".py", ".md"))
        or statements_at(commit, name) != statements_at("HEAD", name)
    }


@functools.cache
def folders_of(name: str) -> tuple[str, ...]:
    """Returns the paths of a package with all that it imports, or the one path that is named."""
    if "/" in name:
        return (name.rstrip("/"),)
    rooms = {name}
    while more := {below for room in rooms for below in imported_by(room)} - rooms:
        rooms |= more
    return tuple(sorted(path for room in rooms for path in paths_of(room)))


def paths_of(room: str) -> list[str]:
    """Returns the path of a package or file at the root of the library."""
    if room == "conversion":  # the library has a link to it
        return ["conversion"]
    candidates = (f"{LIBRARY}/{room}", f"{LIBRARY}/{room}.py")
    return [path for path in candidates if (ROOT / path).exists()]


@functools.cache
def imported_by(room: str) -> frozenset[str]:
    """Returns the packages and files at the root of the library that one of them imports."""
    files = [
        file
        for path in paths_of(room)
        for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"))
    ]
    rooms = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                # A submodule may be imported by its name.
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            for module in modules:
                package, _, inner = module.partition(".")
                if package == LIBRARY and paths_of(inner.partition(".")[0]):
                    rooms.add(inner.partition(".")[0])
    return frozenset(rooms - {""})


@functools.cache
def statements_at(commit: str, name: str) -> str:
    """Returns the statements of a file without words and types of functions; empty if it is not."""
    if name.endswith(".md"):
        return ""
    try:
        tree = ast.parse(git("show", f"{commit}:{name}"))
    except subprocess.CalledProcessError:
        return ""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [part for part in body if not is_prose(part)]
        # Types of arguments are words, those of fields are not: a class may be made of them.
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    return ast.dump(tree)


def is_prose(node: ast.stmt) -> bool:
    """Returns whether a statement is a docstring or the number of the version."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"


def table_of_records() -> str:
    """Writes every record with its code and its age, for docs/validation.md."""
    lines = []
    for record in records():
        stamps = record.stamps
        versions = ", ".join(dict.fromkeys(stamp.version for stamp in stamps))
        commits = ", ".join(
            f"`{commit}`" for commit in dict.fromkeys(s.commit[:10] for s in stamps)
        )
        dates = sorted({stamp.date for stamp in stamps if stamp.date})
        when = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
        about = f"[{record.about}]({record.page})" if record.page else record.about
        minutes = f"{record.minutes}" if record.machine != "gpu" else "15, on a GPU"
        lines.append([f"`{record.name}`", about, versions, commits, when, minutes])
    return table(["record", "what it shows", "version", "commit", "date", "minutes"], lines)


# --------------------------------------------------------------------------------------- Checklist


def faults_of_the_changelog() -> list[str]:
    """Returns what the changelog lacks."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d$"
    faults = []
    if "## [Unreleased]" not in text:
        faults.append("CHANGELOG.md has no '## [Unreleased]'")
    if not re.search(dated, text, re.MULTILINE):
        faults.append(f"CHANGELOG.md has no '## [{__version__}] - YYYY-MM-DD'")
    return faults


def faults_of_the_night() -> list[str]:
    """Returns the parts of the night that did not pass with every family, or did not run."""
    results = json.loads((ROOT / NIGHT).read_text(encoding="utf-8"))
    faults = []
    for name in runpy.run_path(str(ROOT / NIGHT_RUN))["PARTS"]:
        result = results.get(name, {"verdict": "not run"})
        if result["verdict"] != "pass":
            faults.append(f"{name}: {result['verdict']}")
        elif result.get("families") != "all":
            faults.append(f"{name}: not with FAMILIES=all")
    return faults


def line_of(record: Record, reasons: list[str]) -> str:
    """Returns the line of a record in the checklist."""
    mark = "current"
    if reasons:
        mark = "waits for a GPU" if record.machine == "gpu" else "OLD"
    newest = "".join(f"{stamp.version} {stamp.commit[:10]}" for stamp in record.stamps[-1:])
    time_needed = f"  ({record.minutes} minutes)" if mark == "OLD" else ""
    return f"{mark:15} {record.name:22} {newest:17} {'; '.join(reasons)}{time_needed}"


def measure(record: Record) -> bool:
    """Runs the command of a record and puts its files into their place; whether it succeeded."""
    folder = BUILD / record.name
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "OUT": str(folder),
        "PYTHON": sys.executable,
        "VLLM": os.environ.get("VLLM", str(installed_python())),
    }

    print(f"== {record.name}: {record.command}", flush=True)
    start = time.monotonic()
    done = subprocess.run(record.command, shell=True, cwd=ROOT, env=environment, check=False)
    minutes = (time.monotonic() - start) / 60
    print(f"== {record.name}: exit code {done.returncode} after {minutes:.0f} minutes", flush=True)
    return done.returncode == 0


def adopt(record: Record) -> None:
    """Copies what the command of a record wrote over the committed files."""
    for pattern in record.files:
        for path in sorted((BUILD / record.name).glob(Path(pattern).name)):
            shutil.copyfile(path, (ROOT / pattern).parent / path.name)


def main() -> int:
    """Prints the checklist, or measures again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="RECORD", help="default: all")
    parser.add_argument("--run", action="store_true", help="measure those that are older")
    parser.add_argument("--again", action="store_true", help="with --run: those that are not, too")
    options = parser.parse_args()

    known = {record.name: record for record in records()}
    if unknown := set(options.names) - set(known):
        parser.error(f"unknown {', '.join(sorted(unknown))}; the records are {', '.join(known)}")
    chosen = [known[name] for name in options.names] if options.names else [*known.values()]
    changes = {record.name: record.changes() for record in chosen}
    for record in chosen:
        print(line_of(record, changes[record.name]))
    old = [record for record in chosen if changes[record.name] and record.machine != "gpu"]

    if options.run:
        if git("status", "--porcelain"):
            parser.error("files differ from the commit, of which the records would be; commit them")
        to_measure = chosen if options.again else old
        measured = [record for record in to_measure if measure(record)]
        for record in measured:
            adopt(record)
        return int(len(measured) < len(to_measure))

    faults = [] if options.names else [*faults_of_the_changelog(), *faults_of_the_night()]
    for fault in faults:
        print(f"{'FAULT':15} {fault}")
    ready = not old and not faults
    print(
        f"{__version__} is ready: every record is of its code"
        if ready
        else f"{__version__} is not ready: {len(old)} records are older than their code,"
        f" {len(faults)} faults; --run measures again"
    )
    return int(not ready)


if __name__ == "__main__":
    raise SystemExit(main())
