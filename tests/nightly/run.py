"""Runs the tests that take too long for every commit: `make nightly` writes `result.json`.

Each part is one run of pytest, and two parts run at a time, because compilation uses one core. The
result of a part is written when it ends, with the commit that it is of; `python
tests/nightly/run.py bugs` runs this part again and keeps the results of the others. Ctrl-C ends the
parts that run, and leaves their results as they were. A night takes every third family of targets;
`FAMILIES=all` takes all.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import json
import os
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as xml
from pathlib import Path

from eagle3_jax import __version__

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "nightly"
RESULT = Path(__file__).with_name("result.json")
TESTS = ROOT / "tests"
WRITING = threading.Lock()
INTERRUPTED = threading.Event()


def tests_of(folders: str) -> str:
    """Returns the folders of tests as arguments of pytest."""
    return " ".join(str(TESTS / folder) for folder in folders.split())


FAMILIES = os.environ.get("FAMILIES", "of the day")
EVERY = "--every-family" if FAMILIES == "all" else ""
CORE = "certify chat devices drafters engine house processors verifiers"
RING = (
    "bench cli conversion docs files measure models oracle server text theory training validation"
)
# Files of the core that the validation runs whole, for its levels L0 to L2 and L8.
VALIDATED = (
    "test_exact_distribution.py",
    "test_thresholds.py",
    "test_draw_distribution.py",
    "test_sampling_distribution.py",
    "drafters/test_recorded_drafters.py",
)
FILES = sorted(str(path) for path in TESTS.glob("test_*.py") if path.name not in VALIDATED)
# The longest first. Fuzzing tries 10 times as many damaged files as in `.ci/run`.
PARTS = {
    "validation": (
        f"validation --complete {EVERY} --aot cuda:h200 --aot tpu:v6e:1x1"
        f" --report-dir {BUILD / 'validation'}"
    ),
    "slow-core": f"-m slow {tests_of(CORE)} {' '.join(FILES)} --ignore {TESTS / VALIDATED[-1]}",
    "slow-ring": f"-m slow {tests_of(RING)}",
    "contracts": f"-m slow {TESTS / 'testing'}",
    "bugs": "tests/nightly/test_mutants.py",
    "fuzzing": "tests/conversion/test_fuzz_files.py tests/nightly/test_fuzz_configs.py",
    "tunix": "tests/tunix",
}
# Of parts in an environment of their own.
PYTHONS = {"tunix": str(ROOT / ".venv-tunix" / "bin" / "python")}


def run(name: str) -> bool:
    """Runs one part and records its results; whether it passed.

    Its verdict, its commit, its tests by outcome and its minutes.
    """
    git = lambda *words: subprocess.check_output(["git", *words], cwd=ROOT, text=True)
    # git leaves out no absolute path.
    changes = git("status", "--porcelain", "--untracked-files=no", f":!{RESULT.relative_to(ROOT)}")
    of_what = {
        "version": __version__,
        "commit": git("rev-parse", "HEAD").strip(),
        "dirty": bool(changes.strip()),
        "date": datetime.date.today().isoformat(),
        "families": FAMILIES,
    }

    counts = BUILD / f"{name}.xml"
    started = time.monotonic()
    counts.unlink(missing_ok=True)
    python = PYTHONS.get(name, sys.executable)
    command = [python, "-m", "pytest", *PARTS[name].split(), f"--junitxml={counts}"]
    with (BUILD / f"{name}.log").open("w", encoding="utf-8") as log:
        environ = os.environ | {"FUZZ_EXAMPLES": "400"}
        done = subprocess.run(command, cwd=ROOT, env=environ, stdout=log, stderr=log, check=False)

    suite = xml.parse(counts).getroot().find("testsuite") if counts.exists() else None
    counts_by_outcome = {}
    if suite is not None:
        outcomes = ("tests", "failures", "errors", "skipped")
        counts_by_outcome = {key: int(suite.attrib[key]) for key in outcomes}
    minutes = round((time.monotonic() - started) / 60)
    if INTERRUPTED.is_set():
        return False

    passed = done.returncode == 0
    with WRITING:
        earlier = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
        results = {part: earlier[part] for part in PARTS if part in earlier}
        results[name] = {
            "verdict": "pass" if passed else "fail",
            **of_what,
            **counts_by_outcome,
            "minutes": minutes,
        }
        RESULT.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    log_path = counts.with_suffix(".log")
    print(f"{name}: {results[name]['verdict']} after {minutes} minutes; see {log_path}", flush=True)
    return passed


def main(names: list[str]) -> int:
    """Runs the parts named, or every part; 0 if all passed."""
    if unknown := set(names) - set(PARTS):
        print(
            f"error: {', '.join(sorted(unknown))} is not a part; the parts are {', '.join(PARTS)}",
            file=sys.stderr,
        )
        return 2

    BUILD.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        runs = [pool.submit(run, name) for name in names or PARTS]
        try:
            return int(not all([part.result() for part in runs]))
        except KeyboardInterrupt:
            INTERRUPTED.set()
            pool.shutdown(cancel_futures=True)
            return 130


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
