"""The contract of a drafter, run on somebody's own: :func:`check_drafter`.

The loop keeps the output exact whatever a drafter proposes, with one exception that it cannot see: ``probs`` that are
not what the tokens were drawn from. A drafter that breaks another rule is exact and slow. Both show here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Literal

from eagle3_jax.contract import decoding, drafts
from eagle3_jax.contract.subject import Broken, NotRun, Subject
from eagle3_jax.decode import LoadedDrafter, LoadedTarget
from eagle3_jax.types import Drafter

CHECKS: dict[str, Callable[[Subject], str]] = {
    "keeps the protocol": drafts.keeps_the_protocol,
    "keeps shapes and types": drafts.keeps_shapes,
    "proposes from its state alone": drafts.proposes_from_its_state_alone,
    "starts at the root": drafts.starts_at_the_root,
    "puts parents before children": drafts.is_topological,
    "is as deep as it says": drafts.is_as_deep_as_it_says,
    "drafts ids of the vocabulary": drafts.drafts_ids_of_the_vocabulary,
    "rows are independent of their neighbours": drafts.is_alone_in_its_row,
    "an empty observation changes nothing": drafts.ignores_empty_observations,
    "padding behind an observation does not matter": drafts.ignores_padding,
    "observing in pieces is observing at once": drafts.does_not_care_how_truth_is_cut,
    "declares distributions": drafts.declares_distributions,
    "draws from what it declares": drafts.draws_from_what_it_declares,
    "greedy output is the target's": decoding.leaves_greedy_output_alone,
    "sampled output has the target's law": decoding.leaves_the_law_alone,
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: Of the check.
        verdict: ``not run`` where it could not have seen anything.
        detail: Why, or how much was compared.
    """

    name: str
    verdict: Literal["passed", "failed", "not run"]
    detail: str

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.name}" + (f": {self.detail}" if self.detail else "")


@dataclasses.dataclass(frozen=True)
class DrafterReport:
    """What :func:`check_drafter` found; ``print`` it.

    Attributes:
        drafter: Its class.
        target: Name of the target.
        findings: One per check, in order.
    """

    drafter: str
    target: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether every check ran and passed; a check that could not run is not a pass."""
        return all(finding.verdict == "passed" for finding in self.findings)

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
        return "\n".join(
            (
                f"{self.drafter} with {self.target}",
                *(f"  {finding}" for finding in self.findings),
                f"{count('passed')} passed, {count('failed')} failed, {count('not run')} not run",
            )
        )


def check_drafter(
    drafter: LoadedDrafter | Drafter[Any],
    target: LoadedTarget,
    *,
    checks: Collection[str] = tuple(CHECKS),
    samples: int = 32768,
    seed: int = 0,
) -> DrafterReport:
    """Run a drafter of your own through the contract that the loop relies on.

    Nothing is printed: ``print(e3.check_drafter(MyDrafter(), target))`` shows the report. The statistical checks fail
    a drafter that is right once in a million; their lines say what deviation they would have seen. It compiles about
    ten programs and decodes a few thousand short sequences, so a small target is the place to start.

    Args:
        drafter: An instance, with its parameters if it has any.
        target: What it drafts for. The law is enumerated with the vocabulary cut to three tokens (top-k), so any
            target in float32 will do.
        checks: Which of :data:`CHECKS`; all when left out.
        samples: Drafts and sequences drawn by the statistical checks.
        seed: Of everything random.

    Raises:
        ValueError: ``checks`` names one that does not exist.
    """
    unknown = [name for name in checks if name not in CHECKS]
    if unknown:
        raise ValueError(f"there is no check {unknown[0]!r}; expected some of {', '.join(map(repr, CHECKS))}")
    loaded = drafter if isinstance(drafter, LoadedDrafter) else LoadedDrafter(drafter)
    subject = Subject(loaded, target, samples, seed)
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        if name in checks:
            findings.append(_found(name, check, subject))
            if name == "keeps the protocol" and findings[-1].verdict == "failed":
                break  # nothing else can be asked of what is no drafter
    method = loaded.drafter if isinstance(loaded.drafter, type) else type(loaded.drafter)
    return DrafterReport(method.__name__, target.name, tuple(findings))


def _found(name: str, check: Callable[[Subject], str], subject: Subject) -> Finding:
    try:
        return Finding(name, "passed", check(subject))
    except Broken as broken:
        return Finding(name, "failed", str(broken))
    except NotRun as reason:
        return Finding(name, "not run", str(reason))
    except Exception as error:
        # Whatever somebody else's drafter raises is a finding, and the other checks go on.
        line = (str(error).strip().splitlines() or ["no message"])[0]
        return Finding(name, "failed", line if isinstance(error, ValueError) else f"{type(error).__name__}: {line}")


__all__ = ["CHECKS", "DrafterReport", "Finding", "Subject", "check_drafter"]
