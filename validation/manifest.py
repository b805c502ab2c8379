"""Write ``manifest.toml``, the table of the checks that each level must contain.

    python -m validation.manifest     # collect all checks, and write the table again

A test compares the table with what pytest collects.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Mapping

from validation.levels import LEVELS
from validation.runs import MANIFEST, MODES, Check, Counts, count


def to_toml(modes: Mapping[str, Counts]) -> str:
    """The table of what was collected in each mode."""
    lines = [
        "# The checks of every level and how many cases each has: on CPUs, with --gpu, in a rehearsal of that.",
        "# Written by `python -m validation.manifest`.",
    ]
    for level in LEVELS:
        rows = {name for counts in modes.values() for name in counts.get(level.name, {})}
        lines += ["", f"[{level.name}]"]
        for name in sorted(rows):
            cases = [counts.get(level.name, {}).get(name, 0) for counts in modes.values()]
            lines.append(f"{json.dumps(name)} = {cases}")
    return "\n".join(lines) + "\n"


def collect() -> str:
    """Collect the checks of every mode with pytest, and return the table of them.

    Raises:
        RuntimeError: Something could not be collected.
    """
    import pytest

    from validation.conftest import REPORT

    class Keep:
        checks: list[Check]

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            report = session.config.stash[REPORT]
            if report.errors or report.skipped:
                raise RuntimeError(f"not everything can be collected here: {[*report.errors, *report.skipped]}")
            self.checks = report.checks

    modes: dict[str, Counts] = {}
    for mode, options in MODES.items():
        keep = Keep()
        said = io.StringIO()
        arguments = [str(MANIFEST.parent), "--collect-only", "-q", "-p", "no:cacheprovider", *options]
        with contextlib.redirect_stdout(said):
            ended = pytest.main(arguments, plugins=[keep])
        if ended != pytest.ExitCode.OK:
            raise RuntimeError(f"pytest {' '.join(arguments)} ended with {ended!r}: {said.getvalue()[-500:]}")
        modes[mode] = count(keep.checks)
    return to_toml(modes)


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(collect(), end="")
    else:
        MANIFEST.write_text(collect(), encoding="utf-8")
