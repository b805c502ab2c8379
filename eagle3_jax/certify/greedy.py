"""Greedy answers and log-probabilities, against scores of the same tokens where no draft reaches."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import stats

from eagle3_jax.certify.asking import Asker, Prompt
from eagle3_jax.certify.sampled import Samples, prompt_ids
from eagle3_jax.certify.source import Completion, Report
from eagle3_jax.certify.statistics import Test, resolution

SCORED = 32  # sampled answers that are scored
CONTROLS = 96  # tokens that are asked for twice, without drafts, of which the noise is taken
MOST_NOISE = 0.5  # nats of noise above which greedy tokens are not judged
CERTAIN = 0.5  # nats that no rounding of a correct server reaches
_LEAST_NOISE = 1e-4  # nats that no server is held to
_MARGIN = 4.0  # times the largest difference without drafts
_MOST_NOISY = 0.01  # share of tokens that may differ by more than the noise


@dataclasses.dataclass(frozen=True)
class Scores:
    """Tokens with the scores of their positions.

    Attributes:
        index: ``[n]`` position of each token behind its prompt.
        gaps: ``[n]`` by how much a likelier token's log-probability is larger.
        differences: ``[n]`` distance of its log-probability from the one reported while decoding,
            at least; not a number where that is not told.
    """

    index: np.ndarray
    gaps: np.ndarray
    differences: np.ndarray

    def __getitem__(self, chosen: np.ndarray) -> Scores:
        """The tokens that a mask chooses."""
        return Scores(self.index[chosen], self.gaps[chosen], self.differences[chosen])


def compare(reports: list[Report], scored: list[Report]) -> list[tuple[int, float, float]]:
    """Returns the values of ``Scores`` for an answer's reports and scores."""
    values = []
    for index, (decoded, forced) in enumerate(zip(reports, scored, strict=False)):
        if forced.top:
            likely = forced.top.values()
            difference = abs(decoded.log_prob - forced.log_prob)
            log_prob = forced.log_prob
            if math.isnan(
                log_prob
            ):  # not among the reported ones, so at most as likely as the least of these
                log_prob = min(likely)
                difference = max(0.0, decoded.log_prob - log_prob)
            values.append((index, max(likely) - log_prob, difference))
    return values


def scores_of(asker: Asker, name: str, answers: list[tuple[Prompt, Completion]]) -> Scores:
    """Scores answers behind their own prefixes."""
    scored = asker.score(name, answers)
    values = [
        value
        for row, reports in scored.items()
        for value in compare(answers[row][1].reports, reports)
    ]
    return Scores(*np.array(values).reshape(-1, 3).T)


def greedy_answers(asker: Asker) -> Samples:
    """Asks for greedy answers to all prompts in turns."""
    plan = asker.plan
    numbers = [request % len(plan.prompts) for request in range(plan.num_greedy)]
    prompts = [plan.prompts[number] for number in numbers]
    fields = {"temperature": 0.0, "max_tokens": plan.max_new_tokens}
    answers = asker.complete("greedy answers", prompts, lambda row: fields)
    samples = Samples(list(plan.prompts))
    samples.add(numbers, answers)
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
    """Asks for the first token behind texts of several lengths, and scores it as a part of a longer text.

    The two come from passes of unlike shapes, as decoded and scored tokens do.
    """
    rng = np.random.default_rng(asker.plan.seed)
    has_echo = asker.source.scoring == "echo"
    texts: list[Prompt] = []
    rests: list[Completion] = []
    for _ in range(CONTROLS if answers.answers else 0):
        number, answer = answers.answers[int(rng.integers(len(answers.answers)))]
        ids = prompt_ids(answers.prompts[number], answer)
        length = int(rng.integers(len(answer.reports))) if ids is not None else 0
        texts.append(answers.prompts[number] if ids is None else [*ids, *answer.tokens[:length]])
        text_ids = answer.prompt_ids if ids is None else [*ids, *answer.tokens[:length]]
        rests.append(
            dataclasses.replace(answer, reports=answer.reports[length:], prompt_ids=text_ids)
        )
    fields = {"temperature": 0.0, "max_tokens": 1} | asker.source.apart()
    firsts = asker.complete("first tokens", texts, lambda row: fields)
    rows = [row for row, answer in firsts.items() if answer.reports]
    longer = [
        # In one pass a longer text costs no more.
        (
            texts[row],
            rests[row] if has_echo and firsts[row].tokens == rests[row].tokens[:1] else firsts[row],
        )
        for row in rows
    ]
    scored = asker.score("first tokens again", longer)
    values = []
    differences = [0.0]
    for index, again in scored.items():
        first = firsts[rows[index]].reports
        values += compare(first[:1], again[:1])
        for token in first[0].top.keys() & again[0].top.keys() if again else ():
            differences.append(abs(first[0].top[token] - again[0].top[token]))
    scores = Scores(*np.array(values).reshape(-1, 3).T)
    if not values:
        return Noise(scores, math.inf)
    reports = [report for _, answer in answers.answers for report in answer.reports]
    coarseness = resolution(
        np.array([value for report in reports for value in report.top.values()])
    )
    return Noise(scores, max(_LEAST_NOISE, _MARGIN * max(differences), 2 * coarseness))


def judge_greedy(scores: Scores, noise: Noise) -> list[Test]:
    """Judges greedy tokens: each is the likeliest, or tied with it, or wrong."""
    drafted = scores[scores.index > 0]
    if not len(drafted.gaps):
        return []
    wrong = drafted.gaps[drafted.gaps > max(noise.size, CERTAIN)]
    tied = int((drafted.gaps > 0).sum())
    ties_without = int((noise.scores.gaps > 0).sum())
    number = len(drafted.gaps)
    detail = f"none wrong: fewer than {3 / number:.2g} of all (95 %); {tied} tied within {noise.size:.1g}"
    if len(wrong):
        detail = f"{len(wrong)} are not the likeliest, by up to {wrong.max():.2g}; noise {noise.size:.1g}"
    # Rounding ties tokens as often where no draft is.
    table = [[tied, number - tied], [ties_without, len(noise.scores.gaps) - ties_without]]
    p_value = float(stats.fisher_exact(table, alternative="greater").pvalue)  # type: ignore[attr-defined]
    ties = f"{tied} of {number} tied; without drafts {ties_without} of {len(noise.scores.gaps)}"
    return [
        Test("greedy tokens, scored by force", 0.0 if len(wrong) else 1.0, number, detail, True),
        Test("ties of greedy tokens", p_value, number, ties, True),
    ]


def judge_first_greedy(scores: Scores, noise: Noise) -> list[Test]:
    """Judges greedy tokens that no draft reaches."""
    gaps = np.concatenate([scores.gaps[scores.index == 0], noise.scores.gaps])
    wrong = gaps[gaps > max(noise.size, CERTAIN)]
    detail = f"{len(wrong)} are not the likeliest" + (
        f", by up to {wrong.max():.2g}" if len(wrong) else ""
    )
    return [Test("greedy tokens, scored by force", 0.0 if len(wrong) else 1.0, len(gaps), detail)]


def judge_differences(scores: Scores, noise: Noise) -> list[Test]:
    """Judges log-probabilities that were reported while decoding, which show stale keys and values."""
    differences = scores.differences[(scores.index > 0) & ~np.isnan(scores.differences)]
    if not len(differences):
        return []
    limit = max(noise.size, CERTAIN)
    count = int((differences > limit).sum())
    p_value = float(stats.binom.sf(count - 1, len(differences), _MOST_NOISY))
    detail = f"{count} differ by more than {limit:.1g}; at most {_MOST_NOISY:.0%} may"
    return [
        Test("reported against forced log-probabilities", p_value, len(differences), detail, True)
    ]


def doubtful(scores: Scores, noise: Noise) -> float:
    """Returns the share of tokens that differ by more than the noise, and by less than is certain."""
    values = np.fmax(scores.gaps, scores.differences)[scores.index > 0]
    return float(((values > noise.size) & (values <= CERTAIN)).mean()) if len(values) else 0.0


def judge_own_reports(answers: Samples) -> list[Test]:
    """Judges greedy tokens against the reports of their own positions; first tokens show how often these are noisy."""
    is_wrong: tuple[list[bool], list[bool]] = ([], [])
    for _, answer in answers.answers:
        for index, report in enumerate(answer.reports):
            if report.is_readable:
                is_wrong[index > 0].append(max(report.top.values()) - report.log_prob > CERTAIN)
    without, behind = is_wrong
    if not behind or not without:
        return []
    counts = [[sum(wrong), len(wrong) - sum(wrong)] for wrong in (behind, without)]
    p_value = float(stats.fisher_exact(counts, alternative="greater").pvalue)  # type: ignore[attr-defined]
    detail = f"{counts[0][0]} of {len(behind)} are not the likeliest of their own reports; of first ones {counts[1][0]}"
    return [Test("greedy tokens, in their own reports", p_value, len(behind), detail, True)]
