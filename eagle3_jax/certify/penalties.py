"""Bets that a server counts tokens for penalties wrongly, as errors of speculation make it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from eagle3_jax.certify.bets import Bet, mixture
from eagle3_jax.certify.greedy import CERTAIN
from eagle3_jax.certify.source import ZERO, Completion

PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 1.0}
_STRENGTHS = {
    "it were ignored": 0.0,
    "a quarter of it counted": 0.25,
    "half of it counted": 0.5,
    "three quarters of it counted": 0.75,
    "it were 1.5 times as large": 1.5,
    "it were doubled": 2.0,
}


def bet_on_penalties(
    answers: Sequence[Completion], name: str, num_reported: int
) -> tuple[Bet, float]:
    """Bets that a penalty of sampled answers counts otherwise than by the tokens of the answer.

    Tokens beyond the likeliest ones are left out, and the others' distribution is normalized
    without them.

    Args:
        answers: Answers at temperature 1; their reports are without the penalty.
        name: The penalty.
        num_reported: Number of the likeliest tokens that are reported.

    Returns:
        The mixture of the bets, with the best one, and the logarithm of the gain that is expected
        if a server ignored the penalty.
    """
    gains: dict[str, float] = defaultdict(float)
    nats = 0.0
    for log_probs, cell, penalties in _positions(answers, name, num_reported):
        right = special.log_softmax(log_probs - penalties.pop(""))
        for words, penalty in penalties.items():
            gains[words] += float(special.log_softmax(log_probs - penalty)[cell] - right[cell])

        # What the bet on no penalty gains on average without one: a Kullback-Leibler divergence.
        plain = special.log_softmax(log_probs)
        nats += float(np.exp(plain) @ (plain - right))

    if not gains:
        return Bet(0.0, ""), nats
    best = max(gains, key=lambda words: gains[words])
    return Bet(mixture(list(gains.values())), best), nats


def count_misses(
    answers: Sequence[Completion], name: str, num_reported: int
) -> tuple[dict[str, int], int]:
    """Counts greedy tokens that a penalty makes less likely than another token.

    Args:
        answers: Greedy answers; their reports are without the penalty.
        name: The penalty.
        num_reported: Number of the likeliest tokens that are reported.

    Returns:
        Their number for each way to count, that of the right one by the empty text; and how many
        tokens would be wrong if a server ignored the penalty.
    """
    misses: dict[str, int] = defaultdict(int)
    shown = 0
    for log_probs, cell, penalties in _positions(answers, name, num_reported):
        for words, penalty in penalties.items():
            misses[words] += _falls_behind(log_probs - penalty, cell)
        shown += _falls_behind(log_probs - penalties[""], int(log_probs.argmax()))
    return dict(misses), shown


def _falls_behind(values: np.ndarray, cell: int) -> bool:
    return bool(values.max() - values[cell] > CERTAIN)


class _Position(NamedTuple):
    """A token that is among the likeliest ones.

    Attributes:
        log_probs: The log-probabilities of the likeliest tokens.
        cell: Which of them the token is.
        penalties: The penalties of all of them, for each way to count; the right ones have the
            empty text.
    """

    log_probs: np.ndarray
    cell: int
    penalties: dict[str, np.ndarray]


def _positions(answers: Sequence[Completion], name: str, num_reported: int) -> Iterator[_Position]:
    """Yields the tokens behind the first ones that can be judged."""
    for answer in answers:
        for index, report in enumerate(answer.reports):
            ranked = sorted(report.top, key=lambda token: -report.top[token])[:num_reported]
            ranked = [token for token in ranked if report.top[token] > ZERO]
            if not index or not report.is_readable or report.token not in ranked:
                continue

            penalties: dict[str, np.ndarray] = {}
            for words, tokens in _ways_to_count(answer, index).items():
                counts = np.array([tokens.count(token) for token in ranked])
                counted = counts if name == "frequency_penalty" else counts > 0
                penalties[words] = PENALTIES[name] * counted
            penalties |= {words: strength * penalties[""] for words, strength in _STRENGTHS.items()}

            log_probs = np.array([report.top[token] for token in ranked])
            yield _Position(log_probs, ranked.index(report.token), penalties)


def _ways_to_count(answer: Completion, index: int) -> dict[str, list[int]]:
    """Returns the tokens that a penalty counts at a position: rightly, and by errors."""
    tokens = answer.tokens[:index]
    chunk_index = answer.chunk_index
    start = index - chunk_index[index]  # of the chunk, which is a round
    return {
        "": tokens,
        "a token counted once a round": [
            token
            for row, token in enumerate(tokens)
            if token not in tokens[row - chunk_index[row] : row]
        ],
        "the last token of each round counted": [
            token for row, token in enumerate(tokens[:start]) if not chunk_index[row + 1]
        ],
        "the tokens of earlier rounds counted": tokens[:start],
    }
