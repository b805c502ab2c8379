"""A run with a budget of minutes: which checks come first, fit, or were done before."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path
from typing import NamedTuple

from validation.runs import Check, Report, Verdict, load

MINUTES = 14.0  # of a quick run on a GPU
# Levels and the beginnings of names of checks, in the order of what they tell about a device for
# the time they take. The longest beginning that fits a check counts, so "" is what remains of a
# level.
ORDER = (
    ("HF", "logits", "seconds; where a logit is wrong, every later check fails for that reason"),
    ("L3", "", "bits differ where a compiler or a kernel errs, and it was red on the first GPU"),
    ("L4", "", "every token in bfloat16, in which models are served"),
    ("L5", "", "the same text as in vLLM, recorded or run"),
    ("L8", "every round drafts and accepts what was recorded", "rounds of vLLM in a trained pair"),
    ("L8", "", "the same rounds as in vLLM: features, norms and positions of the head"),
    ("HF", "", "greedy text of transformers, which is slow"),
    ("L0", "", "the acceptance rule on this device; CPUs have shown the rule itself"),
    ("L6", "", "sampled text of a trained pair"),
    ("L1", "", "thresholds and frequencies of the rule"),
    ("L2", "", "sampled text of a tiny target; minutes"),
    ("L9", "", "speed, which examples/h200.py measures in more detail"),
    ("L5", "a target of the family", "families of targets in vLLM, which start it anew"),
    (
        "L8",
        "a draft for the family",
        "next to the check before, because they share what vLLM computed",
    ),
    ("JV", "", "our drafts inside vLLM"),
    ("L7", "", "solved tasks; minutes, and it needs a chat model"),
    ("AOT", "", "compiled for devices that are not present"),
)
# Parts of the record's environment that must be equal if a run is to be continued.
CONDITIONS = {"code": "code", "device": "jax", "version": "versions"} | {
    part: part for part in ("target", "drafter", "prompts")
}


def rank(check: Check) -> int:
    """Returns the place of a check in :data:`ORDER`."""
    fitting = [
        (len(name), -index)
        for index, (level, name, _) in enumerate(ORDER)
        if level == check.level and check.name.startswith(name)
    ]
    return -max(fitting)[1]


class Earlier(NamedTuple):
    """What an earlier run in the same directory left."""

    checks: list[Check]  #: Its checks that passed or failed, if it can be continued.
    #: Level and name of a check to its seconds on such a device.
    seconds: dict[tuple[str, str], float]
    note: str = ""  #: A line for the terminal.


def earlier_run(directory: Path, report: Report) -> Earlier:
    """Reads the earlier run of a directory.

    A run of other code, options or devices is not continued.

    Args:
        directory: Where ``report.json`` is written.
        report: The run that begins.
    """
    if not (directory / "report.json").exists():
        return Earlier([], {})
    try:
        earlier = load(directory)
    except ValueError as error:
        return Earlier([], {}, f"the earlier run is not continued: {error}")

    measured = {check.key: check.seconds or check.expected for check in earlier.checks}
    same_kind = _kind(earlier) == _kind(report)
    seconds = {key: value for key, value in measured.items() if value} if same_kind else {}

    different = [
        name
        for name, part in CONDITIONS.items()
        if earlier.environment.get(part) != report.environment.get(part)
    ]
    different += [] if earlier.options == report.options else ["option"]
    if different:
        return Earlier(
            [],
            seconds,
            f"the earlier run is not continued: it has another {', another '.join(different)}",
        )

    checks = [
        dataclasses.replace(check, taken_over=check.taken_over or earlier.started)
        for check in earlier.checks
        if check.verdict in (Verdict.PASSED, Verdict.FAILED)
    ]
    return Earlier(
        checks, seconds, f"continues the earlier run of {earlier.started}" if checks else ""
    )


def _kind(report: Report) -> tuple[object, ...]:
    """What the seconds of a check depend on."""
    return report.environment.get("jax", {}).get("device"), report.rehearsal, report.quick


def sha256_of_options(options: dict[str, object]) -> str:
    """Returns one hash of options, which may hold private directories."""
    return hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()


class Budget(NamedTuple):
    """The minutes of a run."""

    minutes: float
    end: float  #: On the clock of ``time.perf_counter``.

    @property
    def spent(self) -> str:
        """The reason of what does not run."""
        return f"the budget of {self.minutes:g} minutes was spent"

    def seconds_left(self) -> float:
        """Returns the seconds that are left."""
        return self.end - time.perf_counter()

    def why_not(self, check: Check) -> str:
        """Returns why a check is not started; empty if it is.

        One whose seconds are unknown starts if any are left.
        """
        seconds = self.seconds_left()
        if seconds <= 0:
            return self.spent
        if check.expected > seconds:
            before = f"it took {check.expected:.0f} s before"
            return f"{self.spent}: {before}, and {seconds:.0f} s were left"
        return ""
