"""Parts that break a contract, and the check that finds each of them out."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from eagle3_jax import ContractReport
from eagle3_jax.testing.report import PROTOCOL


class Fault(NamedTuple):
    """A part that breaks one check."""

    part: Any
    check: str
    message: str  #: Pattern of the message.

    @property
    def checks(self) -> list[str]:
        """The checks to run: a part that breaks the protocol too would not be examined further."""
        return [PROTOCOL, self.check]

    def require_found(self, report: ContractReport) -> None:
        (failure,) = report.failures
        assert failure.name == self.check
        assert re.search(self.message, failure.detail), failure.detail
