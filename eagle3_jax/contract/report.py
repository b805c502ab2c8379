"""What a run through a contract leaves: findings, one line each, for drafters, targets and acceptance rules alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Literal, TypeVar

Examined = TypeVar("Examined")

ALPHA = 1e-6  # how often a statistical check fails what is right
PROTOCOL = "keeps the protocol"  # nothing else can be asked of what fails this check


class Broken(Exception):
    """The contract is not kept; says how that showed."""


class NotRun(Exception):
    """A check could not see anything; says why."""


class Skipped(Exception):
    """A check is of something that need not be offered, and is not; says so."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: Of the check.
        verdict: ``not run`` where it could not have seen anything, ``skipped`` where what it asks for is optional and
            not offered.
        detail: Why, or how much was compared.
    """

    name: str
    verdict: Literal["passed", "failed", "not run", "skipped"]
    detail: str

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.name}" + (f": {self.detail}" if self.detail else "")


@dataclasses.dataclass(frozen=True)
class ContractReport:
    """What ``check_drafter``, ``check_target`` or ``check_verifier`` found; ``print`` it.

    Attributes:
        title: What was examined.
        findings: One per check, in order.
    """

    title: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether every check passed, or was of something not offered; one that could not run is not a pass."""
        return all(finding.verdict in ("passed", "skipped") for finding in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """What failed."""
        return tuple(finding for finding in self.findings if finding.verdict == "failed")

    def raise_if_failed(self) -> None:
        """Raise the report where a check failed; for a test suite.

        Raises:
            ValueError: With the whole report.
        """
        if self.failures:
            raise ValueError(str(self))

    def __str__(self) -> str:
        count = lambda verdict: sum(finding.verdict == verdict for finding in self.findings)
        skipped = f", {count('skipped')} skipped" if count("skipped") else ""
        return "\n".join(
            (
                self.title,
                *(f"  {finding}" for finding in self.findings),
                f"{count('passed')} passed, {count('failed')} failed, {count('not run')} not run{skipped}",
            )
        )


def examine(
    subject: Examined, checks: Mapping[str, Callable[[Examined], str]], chosen: Collection[str] | None
) -> tuple[Finding, ...]:
    """Run checks in their order, as far as the subject keeps the protocol.

    Args:
        subject: What every check is given.
        checks: By name; each returns how much it compared, or raises.
        chosen: Which of them; all when ``None``.

    Raises:
        ValueError: ``chosen`` names a check that does not exist.
    """
    chosen = checks if chosen is None else chosen
    unknown = [name for name in chosen if name not in checks]
    if unknown:
        raise ValueError(f"there is no check {unknown[0]!r}; expected some of {', '.join(map(repr, checks))}")
    findings: list[Finding] = []
    for name, check in checks.items():
        if name in chosen:
            findings.append(_found(name, check, subject))
            if name == PROTOCOL and findings[-1].verdict == "failed":
                break
    return tuple(findings)


def class_name(examined: object) -> str:
    """Of an object's class; of the class itself where somebody forgot to make an instance."""
    return (examined if isinstance(examined, type) else type(examined)).__name__


def _found(name: str, check: Callable[[Examined], str], subject: Examined) -> Finding:
    try:
        return Finding(name, "passed", check(subject))
    except Broken as broken:
        return Finding(name, "failed", str(broken))
    except NotRun as reason:
        return Finding(name, "not run", str(reason))
    except Skipped as reason:
        return Finding(name, "skipped", str(reason))
    except Exception as error:
        # Whatever somebody else's code raises is a finding, and the other checks go on.
        line = (str(error).strip().splitlines() or ["no message"])[0]
        return Finding(name, "failed", line if isinstance(error, ValueError) else f"{type(error).__name__}: {line}")
