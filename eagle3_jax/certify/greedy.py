"""Greedy answers and log-probabilities, against scores of the same tokens without drafts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from eagle3_jax.certify.asking import Asker, Prompt, Request
from eagle3_jax.certify.sampled import Samples, prompt_ids, text_before
from eagle3_jax.certify.source import Completion, Report
from eagle3_jax.certify.statistics import Test, resolution

SCORED = 32  # sampled answers that are scored
CONTROLS = 96  # tokens that are asked for twice, without drafts, of which the noise is taken
MOST_NOISE = 0.5  # nats of noise above which greedy tokens are not judged
CERTAIN = 0.5  # nats that no rounding of a correct server reaches
LIKELY = -5.0  # log-probability above which two reports of a position are compared
_LEAST_NOISE = 1e-4  # nats that no server is held to
_MARGIN = 4.0  # times the largest difference without drafts
MOST_NOISY = 0.01  # share of tokens that may differ by more than the noise


class Score(NamedTuple):
    """A token with the score of its position.

    Attributes:
        index: Its position behind the prompt.
        gap: By how much a likelier token's log-probability is larger.
        difference: Distance of its log-probability from the one reported while decoding, at least;
            not a number where that is not told.
    """

    index: int
    gap: float
    difference: float


@dataclasses.dataclass(frozen=True)
class Scores:
    """The columns of ``Score``, each ``[n]``."""

    index: np.ndarray
    gaps: np.ndarray
    differences: np.ndarray

    @classmethod
    def of(cls, scores: Sequence[Score]) -> Scores:
        """Returns the columns of a list."""
        return cls(*np.array(scores).reshape(-1, 3).T)

    def __getitem__(self, chosen: np.ndarray) -> Scores:
        """The tokens that a mask chooses."""
        return Scores(self.index[chosen], self.gaps[chosen], self.differences[chosen])


def compare(reports: Sequence[Report], scored: Sequence[Report]) -> list[Score]:
    """Returns the scores of an answer's tokens, without those that are not told."""
    scores = []
    for index, (decoded, forced) in enumerate(zip(reports, scored, strict=False)):
        if not forced.top:
            continue
        likely = forced.top.values()
        log_prob = forced.log_prob
        difference = abs(decoded.log_prob - log_prob)
        if math.isnan(log_prob):
            # It is not among the reported ones, so at most as likely as the least of these.
            log_prob = min(likely)
            difference = max(0.0, decoded.log_prob - log_prob)
        scores.append(Score(index, max(likely) - log_prob, difference))
    return scores


def scores_of(asker: Asker, name: str, answers: Sequence[tuple[Prompt, Completion]]) -> Scores:
    """Scores answers behind their own prefixes."""
    scored = asker.score(name, answers)
    return Scores.of(
        [
            score
            for row, reports in scored.items()
            for score in compare(answers[row][1].reports, reports)
        ]
    )


def greedy(max_tokens: int) -> dict[str, Any]:
    """Returns the fields of a greedy request."""
    return {"temperature": 0.0, "max_tokens": max_tokens}


def greedy_answers(asker: Asker) -> Samples:
    """Asks for greedy answers to all prompts in turns."""
    plan = asker.plan
    numbers = [request % len(plan.prompts) for request in range(plan.num_greedy)]
    requests = [Request(plan.prompts[number], greedy(plan.max_new_tokens)) for number in numbers]
    samples = Samples(list(plan.prompts))
    samples.add(numbers, asker.complete("greedy answers", requests))
    return samples


@dataclasses.dataclass(frozen=True)
class Noise:
    """What the same tokens' log-probabilities differ by where no draft is.

    Attributes:
        scores: The tokens that were asked for twice.
        size: Differences up to this one are put down to rounding, in nats; infinite if nothing was
            compared.
    """

    scores: Scores
    size: float

    @property
    def is_small(self) -> bool:
        """Whether tokens can be judged in spite of it."""
        return self.size <= MOST_NOISE


def measure_noise(asker: Asker, answers: Samples) -> Noise:
    """Asks for first tokens behind texts of several lengths, and scores them in longer texts.

    The two come from passes of unlike shapes, as decoded and scored tokens do.
    """
    rng = np.random.default_rng(asker.plan.seed)
    has_echo = asker.source.scoring == "echo"

    # Each text is a prompt with the beginning of its answer, where ids are told.
    texts: list[Prompt] = []
    endings: list[Completion] = []
    for _ in range(CONTROLS if answers.answers else 0):
        number, answer = answers.answers[int(rng.integers(len(answers.answers)))]
        prompt = answers.prompts[number]
        length = 0
        if prompt_ids(prompt, answer) is not None:
            length = int(rng.integers(len(answer.reports)))
        ids = text_before(prompt, answer, length)
        texts.append(prompt if ids is None else ids)
        endings.append(
            dataclasses.replace(
                answer,
                reports=answer.reports[length:],
                prompt_ids=answer.prompt_ids if ids is None else ids,
            )
        )
    fields = greedy(1) | asker.source.apart()
    firsts = asker.complete("first tokens", [Request(text, fields) for text in texts])

    # In one pass a longer text costs no more, and its shape differs more.
    longer = []
    reported = []
    for row, first in firsts.items():
        if first.reports:
            goes_on = has_echo and first.tokens == endings[row].tokens[:1]
            longer.append((texts[row], endings[row] if goes_on else first))
            reported.append(first.reports[0])
    scored = asker.score("first tokens again", longer)

    values = []
    differences = [0.0]
    for index, again in scored.items():
        first_report = reported[index]
        values += compare([first_report], again[:1])
        for token in first_report.top.keys() & again[0].top.keys() if again else ():
            differences.append(abs(first_report.top[token] - again[0].top[token]))
    scores = Scores.of(values)
    if not values:
        return Noise(scores, math.inf)

    # Two values on a grid differ by its distance although they are equal.
    reports = [report for _, answer in answers.answers for report in answer.reports]
    coarseness = resolution(
        np.array([value for report in reports for value in report.top.values()])
    )
    return Noise(scores, max(_LEAST_NOISE, _MARGIN * max(differences), 2 * coarseness))


def judge_greedy(scores: Scores, noise: Noise) -> list[Test]:
    """Judges greedy tokens: each is the likeliest, or tied with it, or wrong."""
    drafted = scores[scores.index > 0]
    number = len(drafted.gaps)
    if not number:
        return []

    # With no wrong token among n, the upper Clopper-Pearson bound at 95 % is about 3 / n.
    bound = 1 - 0.05 ** (1 / number)
    wrong = drafted.gaps[drafted.gaps > max(noise.size, CERTAIN)]
    tied = int((drafted.gaps > 0).sum())
    detail = (
        f"none is wrong, so at most {100 * bound:.2g} % of all are (95 % confidence); {tied} tie"
        f" within {noise.size:.1g} nats"
    )
    if len(wrong):
        detail = (
            f"{len(wrong)} are not the likeliest token, by up to {wrong.max():.2g} nats; the noise"
            f" is {noise.size:.1g}"
        )

    # Rounding ties tokens as often where no draft is.
    number_without = len(noise.scores.gaps)
    tied_without = int((noise.scores.gaps > 0).sum())
    p_value = _is_more_frequent(tied, number, tied_without, number_without)
    ties = f"{tied} of {number} tie; without drafts {tied_without} of {number_without}"
    return [
        Test("greedy tokens, scored by force", 0.0 if len(wrong) else 1.0, number, detail, True),
        Test("ties of greedy tokens", p_value, number, ties, True),
    ]


def _is_more_frequent(count: int, number: int, count_without: int, number_without: int) -> float:
    """Returns the p-value of Fisher's exact test that something is as frequent behind drafts."""
    table = [[count, number - count], [count_without, number_without - count_without]]
    return float(stats.fisher_exact(table, alternative="greater").pvalue)  # type: ignore[attr-defined]


def judge_first_greedy(scores: Scores, noise: Noise) -> list[Test]:
    """Judges greedy tokens that no draft reaches."""
    gaps = np.concatenate([scores.gaps[scores.index == 0], noise.scores.gaps])
    wrong = gaps[gaps > max(noise.size, CERTAIN)]
    size = f", by up to {wrong.max():.2g} nats" if len(wrong) else ""
    detail = f"{len(wrong)} of {len(gaps)} are not the likeliest token{size}"
    return [Test("greedy tokens, scored by force", 0.0 if len(wrong) else 1.0, len(gaps), detail)]


def p_value_of_noisy(count: int, number: int) -> float:
    """Returns the p-value of as many tokens that differ by more than is certain, by a binomial."""
    return float(stats.binom.sf(count - 1, number, MOST_NOISY))


def judge_differences(scores: Scores, noise: Noise) -> list[Test]:
    """Judges log-probabilities reported while decoding, which show stale keys and values."""
    differences = scores.differences[(scores.index > 0) & ~np.isnan(scores.differences)]
    number = len(differences)
    if not number:
        return []
    limit = max(noise.size, CERTAIN)
    count = int((differences > limit).sum())
    detail = (
        f"{count} of {number} differ by more than {limit:.1g} nats; at most {MOST_NOISY:.0%} may"
    )
    name = "reported against forced log-probabilities"
    return [Test(name, p_value_of_noisy(count, number), number, detail, True)]


def doubtful(scores: Scores, noise: Noise) -> float:
    """Returns the share of tokens that differ by more than the noise and less than is certain."""
    values = np.fmax(scores.gaps, scores.differences)[scores.index > 0]
    return float(((values > noise.size) & (values <= CERTAIN)).mean()) if len(values) else 0.0


def judge_own_reports(answers: Samples) -> list[Test]:
    """Judges greedy tokens by their own reports; first tokens show how often these are noisy."""
    behind: list[bool] = []
    without: list[bool] = []
    for _, answer in answers.answers:
        for index, report in enumerate(answer.reports):
            if report.is_readable:
                is_wrong = max(report.top.values()) - report.log_prob > CERTAIN
                (behind if index else without).append(is_wrong)
    if not behind or not without:
        return []

    p_value = _is_more_frequent(sum(behind), len(behind), sum(without), len(without))
    detail = (
        f"{sum(behind)} of {len(behind)} are not the likeliest token that is reported for them; of"
        f" first tokens {sum(without)} of {len(without)}"
    )
    return [Test("greedy tokens, in their own reports", p_value, len(behind), detail, True)]
