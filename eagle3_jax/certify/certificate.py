"""The certificate: a verdict about one server or function, with its evidence."""

from __future__ import annotations

import dataclasses
import enum
import html
import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle3_jax import __version__
from eagle3_jax.certify.source import counted
from eagle3_jax.certify.statistics import Test
from eagle3_jax.files.writing import whole_directory
from eagle3_jax.measure.frequencies import ALPHA

#: The requirement that shows that requests of a kind were judged.
_SHOWN_BY = {"greedy": "greedy tokens", "sampled": "sight"}
CONTROL_LEVEL = 0.01  # significance of the control of a failed test


class Verdict(enum.StrEnum):
    """What a certificate says."""

    LOSSLESS = "lossless"
    NOT_LOSSLESS = "not lossless"
    NOT_AS_REQUESTED = "not as requested"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> int:
        """0, 1 or 3."""
        return {"lossless": 0, "inconclusive": 3}.get(self, 1)


@dataclasses.dataclass(frozen=True)
class Requirement:
    """What must have been seen for the verdict "lossless".

    Attributes:
        name: What must have been seen.
        is_met: Whether it was.
        detail: What was seen.
    """

    name: str
    is_met: bool
    detail: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """Whether the server does what a field of the request says.

    Attributes:
        name: The field.
        outcome: ``passed``, ``failed``, ``refused`` (the server says that it does not take the
            field) or ``not run``.
        detail: What was seen.
    """

    name: str
    outcome: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Control:
    """The tokens that a failed test is compared with: behind the same texts, without drafts.

    Attributes:
        name: The failed test.
        p_value: The smallest p-value of the tests of these tokens, times their number.
        tokens: Number of these tokens.
        has_power: Whether as many drafted tokens still fail the test clearly.
    """

    name: str
    p_value: float
    tokens: int
    has_power: bool

    @property
    def is_clean(self) -> bool:
        """Whether the deviation is that of drafted tokens alone."""
        return self.has_power and self.p_value >= CONTROL_LEVEL


class Table(NamedTuple):
    """A table of the evidence; the first cell of a row is its name, the second its result."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
    """The verdict about one server or function, with its evidence.

    Attributes:
        requirements: What must have been seen for the verdict "lossless".
        tests: Tests of the tokens that drafts may reach.
        first_tokens: Tests of the tokens that no draft reaches.
        controls: Of failed tests.
        findings: Whether the fields of a request do what they say.
        sees: Errors of acceptance that would have been found.
        notes: What else was seen.
        facts: What the server says about itself, and what it was asked.
        tokens: Number of tokens that were judged.
        requests: Number of requests that were answered.
        lost: Number of requests that failed.
        is_partial: Whether it was interrupted.
        seconds: Duration.
        started: Date and time.
        commit: Commit of this package, with ``+`` if files differ from it; empty outside a
            checkout.
        command: The command that repeats it.
        alpha: Probability that a correct server fails.
        version: Version of this package.
    """

    requirements: list[Requirement]
    tests: list[Test]
    first_tokens: list[Test]
    controls: list[Control]
    findings: list[Finding]
    sees: list[str]
    notes: list[str]
    facts: dict[str, Any]
    tokens: int
    requests: int
    lost: int
    is_partial: bool
    seconds: float
    started: str
    commit: str = ""
    command: str = ""
    alpha: float = ALPHA
    version: str = __version__

    @property
    def level(self) -> float:
        """Significance of one test."""
        return level_of(self.tests, self.first_tokens, alpha=self.alpha)

    @property
    def verdict(self) -> Verdict:
        """A clean failure decides; then fields of the request; then what must have been seen."""
        if self._proofs:
            return Verdict.NOT_LOSSLESS
        if self._broken_fields:
            return Verdict.NOT_AS_REQUESTED
        return Verdict.INCONCLUSIVE if self._doubts else Verdict.LOSSLESS

    @property
    def reason(self) -> str:
        """The reason for the verdict, in one sentence without a full stop."""
        if self._proofs:
            worst = min(self._proofs, key=lambda test: test.p_value)
            return (
                f"{worst.name}: {worst.detail} (p = {worst.p_value:.1g}, {worst.tokens:,} tokens)"
            )
        if self._broken_fields:
            return "; ".join(f"{finding.name}: {finding.detail}" for finding in self._broken_fields)
        if self._doubts:
            return "; ".join(self._doubts)

        errors = f"; the run would have found {' and '.join(self.sees)}" if self.sees else ""
        return f"no test found a deviation in {self.tokens:,} tokens{errors}"

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        if self.verdict is not Verdict.LOSSLESS:
            return str(self.verdict).capitalize()
        kinds = [kind for kind, name in _SHOWN_BY.items() if name in self._required]
        return "Lossless" if len(kinds) == len(_SHOWN_BY) else f"Lossless for {kinds[0]} requests"

    @property
    def _required(self) -> set[str]:
        return {entry.name for entry in self.requirements}

    @property
    def _failures(self) -> list[Test]:
        return [test for test in self.tests if test.p_value < self.level]

    @property
    def _proofs(self) -> list[Test]:
        """Failed tests of drafted tokens, where those without drafts do follow the reports."""
        if any(test.p_value < self.level for test in self.first_tokens):
            return [test for test in self._failures if test.is_controlled]

        clean = {control.name for control in self.controls if control.is_clean}
        return [test for test in self._failures if test.is_controlled or test.name in clean]

    @property
    def _broken_fields(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.outcome == "failed"]

    @property
    def _doubts(self) -> list[str]:
        """Why nothing can be said."""
        doubts = []
        first = min(self.first_tokens, key=lambda test: test.p_value, default=None)
        if first is not None and first.p_value < self.level:
            doubts.append(
                "the first tokens, which no draft reaches, do not follow the reports either"
                f" ({first.name}: {first.detail}); the reports do not describe the sampler"
            )

        # Without right reports a failed test says nothing, and has no control.
        controls = {control.name: control for control in self.controls}
        for test in self._failures if not doubts else []:
            control = controls.get(test.name)
            if control is None or not control.has_power:
                doubts.append(
                    f"{test.name} fails ({test.detail}), but too few tokens without drafts were"
                    " compared"
                )
            else:
                doubts.append(
                    f"{test.name} fails ({test.detail}), but so do {control.tokens:,} tokens after"
                    " the same texts that no draft reaches; the reports do not describe the"
                    " sampler"
                )

        if not self._required.intersection(_SHOWN_BY.values()):
            doubts.append("no answer could be judged")
        return doubts + [
            f"{entry.name}: {entry.detail}" for entry in self.requirements if not entry.is_met
        ]

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        derived = {name: getattr(self, name) for name in ("headline", "reason", "level")}
        return {"verdict": str(self.verdict), **derived, **dataclasses.asdict(self)}

    def tables(self) -> list[Table]:
        """Returns the evidence as tables."""
        seen = [
            [entry.name, "ok" if entry.is_met else "missing", entry.detail]
            for entry in self.requirements
        ]
        tests = [self._row(test) for test in self.tests]
        first_tokens = [self._row(test) for test in self.first_tokens]
        controls = [_row_of_control(control) for control in self.controls]
        fields = [[finding.name, finding.outcome, finding.detail] for finding in self.findings]

        judged = ["test", "result", "p", "tokens", "detail"]
        tables = [
            Table("Requirements of the verdict", ["requirement", "result", "detail"], seen),
            Table("Tests of tokens that drafts may reach", judged, tests),
            Table("Tests of first tokens, which no draft reaches", judged, first_tokens),
            Table(
                "Controls of failed tests: tokens after the same texts, without drafts",
                judged,
                controls,
            ),
            Table("Fields of the request", ["field", "result", "detail"], fields),
        ]
        return [table for table in tables if table.rows]

    def _row(self, test: Test) -> list[str]:
        """Returns the row of a test in a table."""
        return _row_of_p_value(test, "failure" if test.p_value < self.level else "ok", test.detail)

    def write(self, directory: Path) -> None:
        """Writes ``certificate.json`` and ``certificate.html`` into a new directory."""
        template = string.Template(
            Path(__file__).with_name("certificate.html").read_text(encoding="utf-8")
        )
        with whole_directory(directory) as partial:
            text = json.dumps(self.to_json(), indent=1, default=str)
            (partial / "certificate.json").write_text(text + "\n", encoding="utf-8")
            (partial / "certificate.html").write_text(
                template.substitute(self._page()), encoding="utf-8"
            )

    def _page(self) -> dict[str, str]:
        """Returns the values of the page's template."""
        failed = f"; {counted(self.lost, 'request')} failed" if self.lost else ""
        commit = f", commit {self.commit[:10]}" if self.commit else ""
        facts = {
            **self.facts,
            "answers": f"{self.requests}{failed}",
            "seconds": f"{self.seconds:.0f}",
            "started": self.started,
            "eagle3-jax": f"{self.version}{commit}",
        }
        values = {
            "subject": str(self.facts.get("url") or self.facts.get("model")),
            "style": str(self.verdict).replace(" ", "-"),
            "headline": self.headline,
            "reason": self.reason,
            "level": f"{self.level:.1g}",
            "alpha": f"{self.alpha:.0e}",
            "command": self.command,
        }
        page = {name: html.escape(value) for name, value in values.items()}

        page["tables"] = "\n".join(map(_html_of, self.tables()))
        page["notes"] = "\n".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        page["facts"] = "\n".join(
            f"<dt>{html.escape(name.replace('_', ' '))}</dt><dd>{html.escape(text)}</dd>"
            for name, text in zip(facts, map(_in_words, facts.values()), strict=True)
        )
        return page


def _in_words(value: Any) -> str:
    """Returns a fact as text; those of an object by their names."""
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_in_words(value[name])}" for name in value)
    if isinstance(value, list | tuple):
        return ", ".join(map(_in_words, value)) or "none"
    return str(value)


def level_of(*groups: Sequence[Test], alpha: float = ALPHA) -> float:
    """Returns the significance of one test of several groups, which share ``alpha`` equally.

    So at most ``alpha`` of all correct servers fail any of them (Bonferroni).
    """
    return alpha / max(1, sum(len(group) for group in groups))


def _row_of_p_value(item: Test | Control, result: str, detail: str) -> list[str]:
    """Returns the row of a test or a control in a table."""
    return [item.name, result, f"{item.p_value:.2g}", f"{item.tokens:,}", detail]


def _row_of_control(control: Control) -> list[str]:
    """Returns the row of a control in a table."""
    if control.is_clean:
        return _row_of_p_value(control, "clean", "without drafts the test passes")
    if control.has_power:
        return _row_of_p_value(control, "fails too", "the test fails without drafts, too")
    detail = "as many drafted tokens do not fail the test clearly, so nothing can be compared"
    return _row_of_p_value(control, "too few", detail)


def _html_of(table: Table) -> str:
    """Returns a table of the page; a row whose result is not good is marked."""
    titles = "".join(f'<th scope="col">{name}</th>' for name in table.columns)
    lines = []
    for row in table.rows:
        name, *cells = map(html.escape, row)
        style = ' class="failed"' if row[1] in ("failure", "missing", "failed", "fails too") else ""
        columns = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f'<tr{style}><th scope="row">{name}</th>{columns}')

    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{table.title}">'
    body = "\n".join(lines)
    return (
        f"<h2>{table.title}</h2>\n{region}<table>\n<thead><tr>{titles}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>"
    )
