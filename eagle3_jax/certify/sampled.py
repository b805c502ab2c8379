"""Sampled answers: which are asked for, what they show, and what the same texts show without drafts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special

from eagle3_jax.certify.asking import Asker, Plan, Prompt
from eagle3_jax.certify.bets import ERRORS, VERIFIED, Error, smallest_distance, smallest_error
from eagle3_jax.certify.certificate import Control, level_of
from eagle3_jax.certify.source import ZERO, Completion
from eagle3_jax.certify.statistics import Draws, Test, counts_behind_texts, judge

REPEATED_PROMPTS = 4  # prompts that the short requests share, with unlike seeds
DISTANCES = (
    0.1,
    0.15,
    0.2,
    0.25,
    0.3,
    0.4,
    0.5,
)  # between draft and target; the smallest that is seen is named
_SURE = 0.9  # probability of a first token that makes the texts behind it repeat
_CLEAR = 1e-5  # p-value of the drafted tokens that a control is compared with
_SMALLEST_PART = 256  # tokens of a control
_MOST_REPEATS = (
    4  # times that a control behind prompts may be longer than the tokens that it is compared with
)


@dataclasses.dataclass
class Samples:
    """Answers with the prompts that they continue.

    Attributes:
        prompts: The prompts, by number.
        answers: For each answer the number of its prompt and the answer.
        num_silent: Number of answers without any report.
    """

    prompts: list[Prompt]
    answers: list[tuple[int, Completion]] = dataclasses.field(default_factory=list)
    num_silent: int = 0

    def add(self, numbers: Sequence[int], answers: Mapping[int, Completion]) -> None:
        """Adds answers, by number of their request.

        Args:
            numbers: The number of each request's prompt.
            answers: The answers.
        """
        self.answers += [
            (numbers[row], answer) for row, answer in answers.items() if answer.reports
        ]
        self.num_silent += sum(not answer.reports for answer in answers.values())

    @property
    def num_tokens(self) -> int:
        """The number of tokens that were reported."""
        return sum(len(answer.reports) for _, answer in self.answers)

    @property
    def num_unread(self) -> int:
        """The number of tokens whose report cannot be read."""
        return sum(
            not report.is_readable for _, answer in self.answers for report in answer.reports
        )

    def draws(self, plan: Plan) -> Draws:
        """Returns the tokens with the distributions that were reported."""
        reports = [report for _, answer in self.answers for report in answer.reports]
        ids = np.full((len(reports), plan.num_reported), -1)
        log_probs = np.full(ids.shape, -math.inf)
        for row, report in enumerate(reports):
            if not report.is_readable:
                log_probs[row] = math.nan
                continue
            # The token itself may be reported behind the likeliest ones.
            ranked = sorted(report.top.items(), key=lambda entry: -entry[1])[: plan.num_reported]
            ids[row, : len(ranked)] = [token for token, _ in ranked]
            log_probs[row, : len(ranked)] = [
                value if value > ZERO else -math.inf for _, value in ranked
            ]
        return Draws.of_answers(
            [answer.tokens for _, answer in self.answers],
            prompts=[prompt for prompt, _ in self.answers],
            requests=range(len(self.answers)),
            chunk_index=[answer.chunk_index for _, answer in self.answers],
            ids=ids,
            log_probs=log_probs,
            sampling=plan.sampling,
        )


def ask_for_samples(asker: Asker) -> Samples:
    """Asks for long answers to all prompts, then for short ones to a few."""
    plan = asker.plan
    samples = Samples(list(plan.prompts))
    numbers = [request % len(plan.prompts) for request in range(plan.num_long)]
    long = asker.complete(
        "long answers",
        [plan.prompts[number] for number in numbers],
        lambda row: plan.fields(row) | {"max_tokens": plan.max_new_tokens},
    )
    samples.add(numbers, long)
    repeated = _repeated_prompts(samples)
    samples.prompts += repeated
    numbers = [len(plan.prompts) + request % len(repeated) for request in range(plan.num_requests)]
    short = asker.complete(
        "short answers",
        [samples.prompts[number] for number in numbers],
        lambda row: plan.fields(plan.num_long + row) | {"max_tokens": plan.short_tokens},
    )
    samples.add(numbers, short)
    return samples


def _repeated_prompts(samples: Samples) -> list[Prompt]:
    """Returns prompts for the short answers: texts before a sure token that an unsure one follows.

    The sure token is the first of an answer, which no draft reaches. The unsure one is then
    verified behind the same text in nearly all answers. Where token ids are not told, these are the
    first prompts.
    """
    values: dict[tuple[int, ...], float] = {}
    for prompt, answer in samples.answers:
        ids = prompt_ids(samples.prompts[prompt], answer)
        if ids is None or not all(report.is_readable for report in answer.reports):
            continue
        for index in range(1, len(answer.reports) - 1):
            sure, unsure = (
                np.exp(list(answer.reports[index + step].top.values())) for step in (0, 1)
            )
            if sure.max() >= _SURE:
                values[(*ids, *answer.tokens[:index])] = float(special.entr(unsure).sum())
    chosen = sorted(values, key=lambda text: -values[text])[:REPEATED_PROMPTS]
    plain = samples.prompts[: REPEATED_PROMPTS - len(chosen)]
    return [*map(list, chosen), *plain]


def prompt_ids(prompt: Prompt, answer: Completion) -> list[int] | None:
    """Returns the token ids of a prompt that can be continued by those of its answer; ``None`` if they are not told."""
    ids = prompt if not isinstance(prompt, str) else answer.prompt_ids
    return list(ids) if ids is not None and all(token >= 0 for token in answer.tokens) else None


def control(
    asker: Asker, samples: Samples, drafted: Draws, failures: Sequence[Test]
) -> list[Control]:
    """Compares drafted tokens that fail with tokens behind the same texts that no draft reaches.

    A part of the drafted tokens is chosen that still fails clearly. So reports that are wrong with
    and without drafts would fail for as many tokens without drafts, too.

    Args:
        asker: Asks the source.
        samples: What was judged.
        drafted: The drafted tokens.
        failures: Their failed tests.
    """
    plan = asker.plan
    part = _failing_part(drafted, min(failures, key=lambda test: test.p_value).name, plan.seed)
    texts = [_text_before(samples, part, row) for row in range(len(part))]
    is_matched = all(text is not None for text in texts)
    prompts = [text for text in texts if text is not None]
    if (
        not is_matched
    ):  # nothing can be continued, so the tokens are the first ones behind the prompts
        firsts = samples.draws(plan)
        ratio = _entropy(part) / max(_entropy(firsts[firsts.index == 0]), 1e-9)
        number = math.ceil(len(part) * min(max(1.0, ratio), _MOST_REPEATS))
        prompts = [samples.prompts[row % len(plan.prompts)] for row in range(number)]
    first_seed = plan.num_long + 2 * plan.num_requests  # no seed is used twice
    answers = asker.complete(
        "tokens without drafts",
        prompts,
        lambda row: plan.fields(first_seed + row) | {"max_tokens": 1} | asker.source.apart(),
    )
    rows = [row for row, answer in answers.items() if answer.reports]
    if not rows:
        return []
    undrafted = Samples([], [(row % len(plan.prompts), answers[row]) for row in rows]).draws(plan)
    if is_matched:
        part = part[np.array(rows)[undrafted.requests]]
        undrafted = dataclasses.replace(
            part, probs=undrafted.probs, ids=undrafted.ids, tokens=undrafted.tokens
        )
    is_as_unsure = is_matched or _entropy(undrafted) * len(undrafted) >= _entropy(part) * len(part)
    results = judge(undrafted, seed=plan.seed + 1)
    p_value = min(1.0, len(results) * min((test.p_value for test in results), default=1.0))
    drafted_p_values = {test.name: test.p_value for test in judge(part, seed=plan.seed)}
    return [
        Control(
            test.name,
            p_value,
            len(undrafted),
            has_power=bool(results)
            and is_as_unsure
            and drafted_p_values.get(test.name, 1.0) < _CLEAR,
        )
        for test in failures
    ]


def _failing_part(drafted: Draws, name: str, seed: int) -> Draws:
    """Returns a random part of drafted tokens that still fails a test clearly; all, if no smaller part does."""
    order = np.random.default_rng(seed).permutation(len(drafted))
    size = _SMALLEST_PART
    while size < len(drafted):
        part = drafted[np.sort(order[:size])]
        if any(test.name == name and test.p_value < _CLEAR**2 for test in judge(part, seed=seed)):
            return part
        size *= 2
    return drafted


def _text_before(samples: Samples, draws: Draws, row: int) -> list[int] | None:
    """Returns the token ids before a token; ``None`` if they are not told."""
    prompt, answer = samples.answers[draws.requests[row]]
    ids = prompt_ids(samples.prompts[prompt], answer)
    return None if ids is None else [*ids, *answer.tokens[: draws.index[row]]]


def _entropy(draws: Draws) -> float:
    """Returns the mean entropy of the reported distributions, in nats."""
    return float(special.entr(np.nan_to_num(draws.probs)).sum(axis=1).mean()) if len(draws) else 0.0


def verified_share(counts: Mapping[str, Any], num_tokens: int) -> float:
    """Returns the share of the tokens that a draft was verified for: accepted ones, and one more in each round.

    Args:
        counts: By how much the counters of speculation rose; where these tell nothing, drafts come
            for every round.
        num_tokens: Number of tokens behind the first ones.
    """
    rounds = counts.get("num_drafts")
    if rounds is None:
        return VERIFIED
    return min(VERIFIED, (rounds + counts.get("num_accepted_tokens", 0)) / max(1, num_tokens))


def sight(
    draws: Draws, *, share: float, level: float, seed: int
) -> tuple[Error | None, float | None]:
    """Returns the smallest errors of acceptance that a run would have found with 90 % power.

    Args:
        draws: The tokens that drafts may reach.
        share: Share of them that a draft was verified for.
        level: Significance of a test.
        seed: Seed of the simulation.

    Returns:
        The error of a drafter that proposes the likeliest token, and the distance between draft and
        target at which accepting every sampled draft would have been found; ``None`` where none
        would have.
    """
    draws = draws.known()
    probs = np.nan_to_num(draws.probs)
    probs = probs / probs.sum(axis=1, keepdims=True)
    too_willing = [error for error in ERRORS if error.willing > 1]
    counts = counts_behind_texts(draws, probs)
    distance = smallest_distance(*counts, DISTANCES, share=share, level=level, seed=seed)
    return smallest_error(probs, too_willing, share=share, level=level), distance


def seen_in_words(error: Error | None, distance: float | None) -> list[str]:
    """Returns errors that would have been found, in words."""
    words = [] if error is None else [f"{error} where drafts are the likeliest tokens"]
    if distance is not None:
        words.append(
            f"acceptance of every sampled draft where draft and target are {100 * distance:.0f} %"
            " apart"
        )
    return words


def is_sharp(error: Error | None, distance: float | None) -> bool:
    """Whether a run would have found what a wrong acceptance usually does."""
    return error is not None and error.willing <= 1.2 and distance is not None and distance <= 0.25


def judge_samples(
    asker: Asker, samples: Samples
) -> tuple[Draws, list[Test], list[Test], list[Control]]:
    """Returns the tokens that drafts may reach, tests of them, tests of first tokens, and controls of what failed."""
    plan = asker.plan
    draws = samples.draws(plan)
    is_first = draws.index == 0
    drafted = draws[~is_first]
    tests = judge(drafted, seed=plan.seed)
    first_tokens = judge(draws[is_first], seed=plan.seed)
    level = level_of(tests, first_tokens)
    failures = [test for test in tests if test.p_value < level]
    are_first_wrong = any(test.p_value < level for test in first_tokens)
    controls = (
        control(asker, samples, drafted, failures) if failures and not are_first_wrong else []
    )
    return drafted, tests, first_tokens, controls
