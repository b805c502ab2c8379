"""Runs what takes too long for every commit, and writes how it went to `result.json` beside this file: `make nightly`.

Each part is one run of pytest. The result is written after each part, so an interrupted night shows what it finished.
The times of the tests give `tests/slow.txt`: of those tests, `make test` runs one case.
"""

from __future__ import annotations

import collections
import datetime
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from pathlib import Path

from eagle3_jax import __version__

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD, RESULT = ROOT / "build" / "nightly", Path(__file__).with_name("result.json")
SLOW = ROOT / "tests" / "slow.txt"
AOT = "--aot cuda:h200 --aot tpu:v6e:1x1"
# Long law and injected bugs are the tests of tests/nightly. Fuzzing is 25 times as long as in `.ci/run`.
PARTS = {
    "tests": "tests tests/nightly --every-family",
    "validation": f"validation --complete --every-family --report-dir {BUILD / 'validation'}",
    "AOT": f"validation/test_aot.py --level AOT --complete --aot-all {AOT} --report-dir {BUILD / 'aot'}",
}


def run(name: str, arguments: str) -> dict[str, object]:
    """Runs one part; gives its verdict, the number of tests by outcome, and the minutes."""
    counts, started = BUILD / f"{name}.xml", time.monotonic()
    counts.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *arguments.split(), f"--junitxml={counts}"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"FUZZ_EXAMPLES": "1000"}, check=False)
    suite = xml.parse(counts).getroot().find("testsuite") if counts.exists() else None
    found = (
        {key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")} if suite is not None else {}
    )
    minutes = round((time.monotonic() - started) / 60)
    return {"verdict": "pass" if done.returncode == 0 else "fail", **found, "minutes": minutes}


def slow_tests() -> list[str]:
    """`file::test` of every test whose cases took more than ten seconds together."""
    seconds: collections.Counter[str] = collections.Counter()
    for case in xml.parse(BUILD / "tests.xml").getroot().iter("testcase"):
        file = case.attrib["classname"].rpartition(".")[2]
        seconds[f"{file}::{case.attrib['name'].partition('[')[0]}"] += float(case.attrib["time"])
    return sorted(name for name, spent in seconds.items() if spent > 10)


def main() -> int:
    """Runs every part; 0 if all passed."""
    BUILD.mkdir(parents=True, exist_ok=True)
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    result: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "commit": git("rev-parse", "HEAD").strip(),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no").strip()),
        "version": __version__,
    }
    parts = {name: {"verdict": "not run"} for name in PARTS}
    for name, arguments in PARTS.items():
        parts[name] = run(name, arguments)
        RESULT.write_text(json.dumps(result | {"parts": parts}, indent=2) + "\n", encoding="utf-8")
    if parts["tests"]["verdict"] == "pass":
        SLOW.write_text("".join(f"{name}\n" for name in slow_tests()), encoding="utf-8")
    return int(any(part["verdict"] != "pass" for part in parts.values()))


if __name__ == "__main__":
    raise SystemExit(main())
