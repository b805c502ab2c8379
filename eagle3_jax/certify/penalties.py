"""Bets that a server counts tokens for penalties otherwise than it should, as speculation makes it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import special

from eagle3_jax.certify.bets import Bet
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
        plain = special.log_softmax(log_probs)
        nats += float(np.exp(plain) @ (plain - right))
    log_gain = (
        float(np.logaddexp.reduce(list(gains.values()))) - math.log(len(gains)) if gains else 0.0
    )
    return Bet(log_gain, max(gains, key=lambda words: gains[words], default="")), nats


def count_misses(
    answers: Sequence[Completion], name: str, num_reported: int
) -> tuple[dict[str, int], int]:
    """Counts greedy tokens that are not the likeliest behind a penalty.

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


def _positions(
    answers: Sequence[Completion], name: str, num_reported: int
) -> Iterator[tuple[np.ndarray, int, dict[str, np.ndarray]]]:
    """Returns for each token among the likeliest ones their log-probabilities, its cell, and all penalties of these.

    The right penalties have the empty text.
    """
    for answer in answers:
        for index, report in enumerate(answer.reports):
            ranked = sorted(report.top, key=lambda token: -report.top[token])[:num_reported]
            ranked = [token for token in ranked if report.top[token] > ZERO]
            if not index or not report.is_readable or report.token not in ranked:
                continue
            penalties: dict[str, np.ndarray] = {}
            for words, tokens in _ways_to_count(answer, index).items():
                counts = np.array([tokens.count(token) for token in ranked])
                penalties[words] = PENALTIES[name] * (
                    counts if name == "frequency_penalty" else counts > 0
                )
            penalties |= {words: strength * penalties[""] for words, strength in _STRENGTHS.items()}
            yield (
                np.array([report.top[token] for token in ranked]),
                ranked.index(report.token),
                penalties,
            )


def _ways_to_count(answer: Completion, index: int) -> dict[str, list[int]]:
    """Returns the tokens of an answer that a penalty counts at a position: the right ones, and those of errors."""
    tokens = answer.tokens[:index]
    chunk_index = answer.chunk_index
    start = index - chunk_index[index]  # of the chunk
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
