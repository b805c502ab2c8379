"""What a certificate asks: a server or function that continues and scores prompts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

ZERO = -9000.0  # log-probabilities at or below stand for the probability 0; vLLM writes -9999
_LARGEST = 1e-3  # a log-probability may be above 0 by rounding


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as ``1 text`` and ``2,048 texts``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class ServerError(ValueError):
    """A server does not answer, or not as is needed; the message is one line."""


class Refused(ServerError):
    """A server understands a request and refuses it (status 400 or 422)."""


@dataclasses.dataclass(frozen=True)
class Report:
    """A token with the log-probabilities that are reported for its position.

    Attributes:
        token: Its id; a negative number stands for the text of a token from a server that does not
            tell ids.
        log_prob: Its log-probability; not a number where it is not told.
        top: Log-probabilities of the likeliest tokens, and of this one; empty where they are not
            told.
    """

    token: int
    log_prob: float
    top: dict[int, float]

    @property
    def is_readable(self) -> bool:
        """Whether the token can be judged: every value is the logarithm of a probability."""
        # The comparison is false for what is not a number.
        values = [self.log_prob, *self.top.values()]
        return bool(self.top) and all(value <= _LARGEST for value in values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """An answer.

    Attributes:
        text: The answer.
        reports: A report of each token; empty if nothing is reported.
        chunk_index: Position of each token in the chunk that it came in, from 0.
        prompt_ids: The prompt's token ids, if they are told.
        finish_reason: Why it ends: ``length``, ``stop`` or another word; empty if that is not told.
        num_drafted: Tokens that were drafted for it, if the answer tells.
        more_texts: Texts of the second answer and those behind it, where several were asked for.
    """

    text: str
    reports: list[Report]
    chunk_index: list[int]
    prompt_ids: list[int] | None = None
    finish_reason: str = ""
    num_drafted: int | None = None
    more_texts: tuple[str, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """The ids of the tokens."""
        return [report.token for report in self.reports]

    @property
    def log_prob(self) -> float:
        """The log-probability of the answer; not a number if that of a token is not told."""
        return math.fsum(report.log_prob for report in self.reports)


@runtime_checkable
class Source(Protocol):
    """A server, or a function, that continues prompts.

    Attributes:
        facts: What it says about itself.
        scoring: How it scores given tokens: ``echo`` in one pass, ``prefixes`` one request for
            each, or ``none``.
    """

    facts: dict[str, Any]
    scoring: str

    def complete(
        self, prompt: str | Sequence[int], *, num_reported: int, **fields: Any
    ) -> Completion:
        """Continues a prompt.

        Args:
            prompt: Text or token ids.
            num_reported: Number of log-probabilities of each position.
            fields: Further fields of the request: ``max_tokens``, ``temperature``, ``seed`` and
                others.

        Raises:
            Refused: A field or its value is refused.
            ServerError: The answer fails, or is not complete.
        """
        ...

    def score(
        self, prompt: str | Sequence[int], completion: Completion, *, num_reported: int
    ) -> list[Report]:
        """Reports the tokens of an answer behind their own prefixes, where no draft reaches."""
        ...

    def apart(self) -> dict[str, Any]:
        """Returns the fields of a request that reads nothing that speculation left in a cache."""
        ...

    def counters(self) -> dict[str, Any]:
        """Returns counters of speculation since the start; empty where there are none."""
        ...
