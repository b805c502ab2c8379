"""The report of a contract: one finding per check of a drafter, a target or an acceptance rule."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Literal, TypeVar

Part = TypeVar("Part")
Outcome = Literal["passed", "failed", "not run", "skipped"]

# The check that all others depend on.
PROTOCOL = "keeps the protocol"


class Broken(Exception):
    """The part breaks the contract; the message says how."""

    verdict: Outcome = "failed"


class NotRun(Broken):
    """A check could not have detected anything; the message says why."""

    verdict = "not run"


class Skipped(Broken):
    """The part does not have the optional feature of a check; the message says which."""

    verdict = "skipped"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: Name of the check.
        verdict: ``not run`` if the check could not have detected anything, ``skipped`` if the part
            does not have the optional feature that it checks.
        detail: The reason, or how much was compared.
    """

    name: str
    verdict: Outcome
    detail: str

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.name}" + (f": {self.detail}" if self.detail else "")


@dataclasses.dataclass(frozen=True)
class ContractReport:
    """The result of ``check_drafter``, ``check_target`` or ``check_verifier``; ``print`` it.

    Attributes:
        title: Name of the part.
        findings: One per check, in order.
    """

    title: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether every check passed or was skipped; a check that could not run is not a pass."""
        return all(finding.verdict in ("passed", "skipped") for finding in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that failed."""
        return tuple(finding for finding in self.findings if finding.verdict == "failed")

    def raise_if_failed(self) -> None:
        """Raises the report if a check failed; for a test suite.

        Raises:
            ValueError: A check failed; the message is the whole report.
        """
        if self.failures:
            raise ValueError(str(self))

    def __str__(self) -> str:
        number = Counter(finding.verdict for finding in self.findings)
        counts = [f"{number[verdict]} {verdict}" for verdict in ("passed", "failed", "not run")]
        if number["skipped"]:
            counts.append(f"{number['skipped']} skipped")

        lines = [f"  {finding}" for finding in self.findings]
        return "\n".join([self.title, *lines, ", ".join(counts)])


def examine(
    title: str,
    subject: Part,
    checks: Mapping[str, Callable[[Part], str | None]],
    chosen: Collection[str] | None,
) -> ContractReport:
    """Runs the chosen checks in their order, and none of them after a broken protocol.

    Args:
        title: Name of the part.
        subject: The part.
        checks: All checks by name. Each returns how much was compared, or raises :class:`Broken`.
        chosen: Names of the checks to run; ``None``: all.

    Raises:
        ValueError: ``chosen`` names a check that does not exist.
    """
    chosen = checks if chosen is None else chosen
    unknown = [name for name in chosen if name not in checks]
    if unknown:
        raise ValueError(
            f"there is no check {unknown[0]!r}; expected some of {', '.join(map(repr, checks))}"
        )

    findings: list[Finding] = []
    for name, check in checks.items():
        if name in chosen:
            findings.append(_find(name, check, subject))
            if name == PROTOCOL and findings[-1].verdict == "failed":
                break

    return ContractReport(title, tuple(findings))


def _find(name: str, check: Callable[[Part], str | None], subject: Part) -> Finding:
    try:
        return Finding(name, "passed", check(subject) or "")
    except Broken as reason:
        return Finding(name, reason.verdict, str(reason))
    except Exception as error:
        # Any exception of the part is a finding, and the other checks go on.
        line = (str(error).strip().splitlines() or ["no message"])[0]
        if not isinstance(error, ValueError):
            line = f"{type(error).__name__}: {line}"
        return Finding(name, "failed", line)


def require_no(fault: str | None) -> None:
    """Raises ``Broken`` with a fault if there is one."""
    if fault is not None:
        raise Broken(fault)


def require_accepted(num_accepted: int, result: str) -> None:
    """Raises ``NotRun`` if no draft token was accepted, as a right ``result`` then shows little."""
    if not num_accepted:
        raise NotRun(
            f"the {result} is right, but no draft token was accepted, so refusals alone were"
            " compared"
        )


def class_name(part: object) -> str:
    """Returns the name of a part's class; of the class itself if the part is not an instance."""
    return (part if isinstance(part, type) else type(part)).__name__
