"""The comparison of texts of two samples, for a server that reports no log-probabilities."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
from scipy import stats

from eagle3_jax.measure.frequencies import ALPHA, smallest_deviation

TOKENS = 3  # of each text
PROMPTS = 4  # that all requests share
_LEAST = 10  # texts that are seen less often are counted together


@dataclasses.dataclass(frozen=True)
class TextComparison:
    """Pearson's test that two samples have the same distribution of texts.

    Attributes:
        statistic: χ² of all prompts.
        degrees: Its degrees of freedom; 0 if nothing was seen often enough.
        sample_size: Number of texts of one sample.
    """

    statistic: float
    degrees: int
    sample_size: int

    @property
    def p_value(self) -> float:
        """Probability of a statistic as large from equal servers."""
        return float(stats.chi2.sf(self.statistic, self.degrees)) if self.degrees else 1.0

    @property
    def shift(self) -> float:
        """The shift of probability between texts that is found with 90 % power."""
        # Two equal samples have half of the noncentrality that one has against a known
        # distribution.
        return smallest_deviation(self.sample_size, self.degrees, alpha=ALPHA) / math.sqrt(2) / 2


def compare_texts(first: Counter, second: Counter) -> TextComparison:
    """Compares the texts of two samples, counted by ``(prompt, text)``."""
    statistic = 0.0
    degrees = 0
    for prompt in {prompt for prompt, _ in first}:
        # The statistics of independent tables add up, and so do their degrees.
        table = _table(_of_prompt(first, prompt), _of_prompt(second, prompt))
        if table.shape[1] > 1 and table.sum(axis=1).all():
            result = stats.chi2_contingency(table, correction=False)
            statistic += float(result.statistic)  # type: ignore[attr-defined]
            degrees += int(result.dof)  # type: ignore[attr-defined]
    return TextComparison(statistic, degrees, first.total())


def _of_prompt(counts: Counter, prompt: int) -> dict[str, int]:
    return {text: count for (number, text), count in counts.items() if number == prompt}


def _table(first: dict[str, int], second: dict[str, int]) -> np.ndarray:
    """Returns the counts of texts in two samples ``[2 C]``; the last cell holds the rare ones."""
    texts = first | second
    counts = np.array([[sample.get(text, 0) for text in texts] for sample in (first, second)])
    is_common = counts.sum(axis=0) >= _LEAST
    table = np.column_stack([counts[:, is_common], counts[:, ~is_common].sum(axis=1)])
    return table[:, table.sum(axis=0) > 0]
