"""The certificate: a verdict about one server, with its evidence."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from eagle3_jax import __version__
from eagle3_jax.bench.tables import write_text
from eagle3_jax.certify.statistics import Test
from eagle3_jax.files.writing import whole_directory
from eagle3_jax.testing.report import ALPHA

_FEWEST = 100  # tokens below which nothing is certified


class Verdict(enum.StrEnum):
    """What a certificate says."""

    LOSSLESS = "lossless"
    NOT_LOSSLESS = "not lossless"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> int:
        """0, 1 or 3."""
        return {"lossless": 0, "not lossless": 1, "inconclusive": 3}[self]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
    """The verdict about one server, with its evidence.

    Attributes:
        first_tokens: Tests of the tokens that no draft reaches.
        tests: Tests of all others.
        notes: What else was seen.
        facts: What the server says about itself, and what it was asked.
        requests: Number of requests that were answered.
        lost: Number of requests that failed.
        is_partial: Whether it was interrupted.
        seconds: Duration.
        started: Date and time.
        commit: Commit of this package, with ``+`` if files differ from it; empty outside a checkout.
        command: The command that repeats it.
        alpha: Probability that a correct server fails.
        version: Version of this package.
    """

    first_tokens: list[Test]
    tests: list[Test]
    notes: list[str]
    facts: dict[str, Any]
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
        return self.alpha / max(1, len(self.first_tokens) + len(self.tests))

    @property
    def verdict(self) -> Verdict:
        """Whether a test failed, and of which tokens; inconclusive too if there were too few."""
        if self._worst(self.first_tokens) is not None:
            return Verdict.INCONCLUSIVE
        if self._worst(self.tests) is not None:
            return Verdict.NOT_LOSSLESS
        return Verdict.LOSSLESS if self._tokens >= _FEWEST else Verdict.INCONCLUSIVE

    @property
    def reason(self) -> str:
        """The reason for the verdict, in one sentence without a full stop."""
        first = self._worst(self.first_tokens)
        worst = self._worst(self.tests)
        if first is not None:
            return (
                f"the first tokens, which no draft reaches, do not follow the reports either ({first.name}: "
                f"{first.detail}); the reports do not describe the sampler"
            )
        if worst is not None:
            return f"{worst.name}: {worst.detail} (p = {worst.p_value:.1g}, {worst.tokens:,} tokens)"
        if self.verdict is Verdict.INCONCLUSIVE:
            return f"{self._tokens} tokens are too few; ask for more requests or longer answers"
        return f"no test found a deviation in {self._tokens:,} tokens"

    @property
    def sees(self) -> float | None:
        """Shift of probability that the test of all places would have detected; ``None`` if nothing was sampled."""
        return next((test.sees for test in self.tests if test.sees is not None), None)

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        if self.verdict is Verdict.LOSSLESS and self.sees is not None:
            return f"Lossless within {100 * self.sees:.1f} %"
        return str(self.verdict).capitalize()

    @property
    def _tokens(self) -> int:
        return max((test.tokens for test in self.tests), default=0)

    def _worst(self, tests: Sequence[Test]) -> Test | None:
        worst = min(tests, key=lambda test: test.p_value, default=None)
        return worst if worst is not None and worst.p_value < self.level else None

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        derived = {name: getattr(self, name) for name in ("headline", "reason", "sees", "level")}
        return {"verdict": str(self.verdict), **derived, **dataclasses.asdict(self)}

    def write(self, directory: Path) -> None:
        """Writes ``certificate.json`` and ``certificate.html`` into a new directory."""
        loader = jinja2.FileSystemLoader(Path(__file__).parent)
        environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
        page = environment.get_template("certificate.html.jinja").render(certificate=self)
        with whole_directory(directory) as partial:
            write_text(partial / "certificate.json", json.dumps(self.to_json(), indent=1) + "\n")
            write_text(partial / "certificate.html", page)
