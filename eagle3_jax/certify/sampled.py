"""Sampled answers: which are asked for, what they show, and what is seen without drafts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from eagle3_jax.certify.asking import Asker, Plan, Prompt, Request
from eagle3_jax.certify.bets import ERRORS, VERIFIED, Error, smallest_distance, smallest_error
from eagle3_jax.certify.certificate import Control, level_of
from eagle3_jax.certify.source import ZERO, Completion
from eagle3_jax.certify.statistics import Draws, Test, counts_behind_texts, judge

REPEATED_PROMPTS = 4  # prompts that the short requests share, with unlike seeds
# between draft and target; the smallest that is seen is named
DISTANCES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
_SURE = 0.9  # probability of a first token that makes the texts behind it repeat
_CLEAR = 1e-5  # p-value of the drafted tokens that a control is compared with
_SMALLEST_PART = 256  # tokens of a control
# times that a control behind prompts may be longer than the tokens that it is compared with
_MOST_REPEATS = 4


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
            values = [value for _, value in ranked]
            log_probs[row, : len(ranked)] = [v if v > ZERO else -math.inf for v in values]

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

    def ask(name: str, numbers: list[int], first_seed: int, max_tokens: int) -> None:
        requests = [
            Request(
                samples.prompts[number], plan.fields(first_seed + row) | {"max_tokens": max_tokens}
            )
            for row, number in enumerate(numbers)
        ]
        samples.add(numbers, asker.complete(name, requests))

    numbers = [request % len(plan.prompts) for request in range(plan.num_long)]
    ask("long answers", numbers, 0, plan.max_new_tokens)

    repeated = _repeated_prompts(samples)
    samples.prompts += repeated
    numbers = [len(plan.prompts) + request % len(repeated) for request in range(plan.num_requests)]
    ask("short answers", numbers, plan.num_long, plan.short_tokens)
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
        # An unsure token shows most, so texts are ranked by its entropy.
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
    """Returns the ids of a prompt that those of its answer can continue; ``None`` if not told."""
    ids = answer.prompt_ids if isinstance(prompt, str) else prompt
    return list(ids) if ids is not None and all(token >= 0 for token in answer.tokens) else None


def text_before(prompt: Prompt, answer: Completion, index: int) -> list[int] | None:
    """Returns the token ids before a token of an answer; ``None`` if they are not told."""
    ids = prompt_ids(prompt, answer)
    return None if ids is None else [*ids, *answer.tokens[:index]]


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

    texts = []
    for request, index in zip(part.requests, part.index, strict=True):
        prompt, answer = samples.answers[request]
        texts.append(text_before(samples.prompts[prompt], answer, int(index)))
    prompts: list[Prompt] = [text for text in texts if text is not None]
    is_matched = len(prompts) == len(texts)
    if not is_matched:
        # Nothing can be continued, so the tokens are the first ones behind the prompts: as many as
        # are together as unsure.
        firsts = samples.draws(plan)
        ratio = _entropy(part) / max(_entropy(firsts[firsts.index == 0]), 1e-9)
        number = math.ceil(len(part) * min(max(1.0, ratio), _MOST_REPEATS))
        prompts = [samples.prompts[row % len(plan.prompts)] for row in range(number)]

    first_seed = plan.num_long + 2 * plan.num_requests  # no seed is used twice
    requests = [
        Request(prompt, plan.fields(first_seed + row) | {"max_tokens": 1} | asker.source.apart())
        for row, prompt in enumerate(prompts)
    ]
    answers = asker.complete("tokens without drafts", requests)
    rows = [row for row, answer in answers.items() if answer.reports]
    if not rows:
        return []

    undrafted = Samples([], [(row % len(plan.prompts), answers[row]) for row in rows]).draws(plan)
    if is_matched:
        # The same tests can be made of them, at the same positions behind the same texts.
        part = part[np.array(rows)[undrafted.requests]]
        undrafted = dataclasses.replace(
            part, probs=undrafted.probs, ids=undrafted.ids, tokens=undrafted.tokens
        )
    is_as_unsure = is_matched or _entropy(undrafted) * len(undrafted) >= _entropy(part) * len(part)

    # All tests of the control count, so its smallest p-value is multiplied by their number
    # (Bonferroni).
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
    """Returns a random part of drafted tokens that fails a test clearly; all if no part does."""
    order = np.random.default_rng(seed).permutation(len(drafted))
    size = _SMALLEST_PART
    while size < len(drafted):
        part = drafted[np.sort(order[:size])]
        if any(test.name == name and test.p_value < _CLEAR**2 for test in judge(part, seed=seed)):
            return part
        size *= 2
    return drafted


def _entropy(draws: Draws) -> float:
    """Returns the mean entropy of the reported distributions, in nats."""
    return float(special.entr(np.nan_to_num(draws.probs)).sum(axis=1).mean()) if len(draws) else 0.0


def verified_share(counts: Mapping[str, Any], num_tokens: int) -> float:
    """Returns the share of the tokens that a draft was verified for.

    These are the accepted drafts, and one more token in each round.

    Args:
        counts: By how much the counters of speculation rose; where these tell nothing, drafts come
            for every round.
        num_tokens: Number of tokens behind the first ones.
    """
    rounds = counts.get("num_drafts")
    if rounds is None:
        return VERIFIED
    return min(VERIFIED, (rounds + counts.get("num_accepted_tokens", 0)) / max(1, num_tokens))


@dataclasses.dataclass(frozen=True)
class Sight:
    """The smallest errors of acceptance that a run would have found with 90 % power.

    Attributes:
        error: That of a drafter that proposes the likeliest token; ``None`` if none would have been
            found.
        distance: Distance between draft and target at which accepting every sampled draft would
            have been found; ``None`` if at none.
    """

    error: Error | None
    distance: float | None

    @property
    def in_words(self) -> list[str]:
        """The errors, in words."""
        words = []
        if self.error is not None:
            words.append(f"{self.error} where drafts are the likeliest tokens")
        if self.distance is not None:
            words.append(
                "acceptance of every sampled draft where draft and target are"
                f" {100 * self.distance:.0f} % apart"
            )
        return words

    @property
    def is_sharp(self) -> bool:
        """Whether a run would have found what a wrong acceptance usually does."""
        if self.error is None or self.distance is None:
            return False
        return self.error.willing <= 1.2 and self.distance <= 0.25


def sight_of(draws: Draws, *, share: float, level: float, seed: int) -> Sight:
    """Returns what a run would have found.

    Args:
        draws: The tokens that drafts may reach.
        share: Share of them that a draft was verified for.
        level: Significance of a test.
        seed: Seed of the simulation.
    """
    draws = draws.known()
    probs = np.nan_to_num(draws.probs)
    probs = probs / probs.sum(axis=1, keepdims=True)
    too_willing = [error for error in ERRORS if error.willing > 1]
    counts, distributions = counts_behind_texts(draws, probs)
    return Sight(
        smallest_error(probs, too_willing, share=share, level=level),
        smallest_distance(counts, distributions, DISTANCES, share=share, level=level, seed=seed),
    )


class Judged(NamedTuple):
    """Sampled answers with their tests.

    Attributes:
        drafted: The tokens that drafts may reach.
        tests: Tests of these.
        first_tokens: Tests of first tokens.
        controls: Controls of the tests that failed.
    """

    drafted: Draws
    tests: list[Test]
    first_tokens: list[Test]
    controls: list[Control]


def judge_samples(asker: Asker, samples: Samples) -> Judged:
    """Judges sampled answers. Tests that fail have controls if the first tokens are right."""
    plan = asker.plan
    draws = samples.draws(plan)
    is_first = draws.index == 0
    drafted = draws[~is_first]
    tests = judge(drafted, seed=plan.seed)
    first_tokens = judge(draws[is_first], seed=plan.seed)

    level = level_of(tests, first_tokens)
    failures = [test for test in tests if test.p_value < level]
    are_first_wrong = any(test.p_value < level for test in first_tokens)
    needs_controls = bool(failures) and not are_first_wrong
    controls = control(asker, samples, drafted, failures) if needs_controls else []
    return Judged(drafted, tests, first_tokens, controls)
