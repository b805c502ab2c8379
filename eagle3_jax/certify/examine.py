"""Examines a server or function: asks, judges, and lists what must have been seen for a verdict."""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eagle3_jax.certify import texts
from eagle3_jax.certify.asking import Asker, Plan, Prompt, Request
from eagle3_jax.certify.bets import VERIFIED
from eagle3_jax.certify.certificate import Certificate, Control, Finding, Requirement, level_of
from eagle3_jax.certify.fields import examine_fields
from eagle3_jax.certify.greedy import (
    MOST_NOISE,
    SCORED,
    Noise,
    Scores,
    doubtful,
    greedy_answers,
    judge_differences,
    judge_first_greedy,
    judge_greedy,
    judge_own_reports,
    measure_noise,
    scores_of,
)
from eagle3_jax.certify.sampled import (
    Samples,
    ask_for_samples,
    judge_samples,
    sight_of,
    verified_share,
)
from eagle3_jax.certify.source import Completion, ServerError, Source, counted
from eagle3_jax.certify.states import examine_states
from eagle3_jax.certify.statistics import Draws, Sampling, Test, chi_square_in_words
from eagle3_jax.files.versions import git

SAME_SEEDS = 4  # requests that are sent twice
MOST_LOST = 0.01  # share of the requests that may have failed
MOST_UNREAD = 0.01  # share of the tokens whose report cannot be read
LEAST_JUDGED = 0.5  # share of the sampled tokens whose distribution must be known
MOST_SHIFTED = 0.25  # probability whose shift between texts must be seen
FEWEST = 200  # tokens of a kind below which nothing is certified
_CHUNK = 1.01  # tokens of a chunk on average from which chunks are rounds
_COARSE = 0.1  # nats of noise that a certificate warns of
_WHOLE = 1e-3  # probability that a small vocabulary may lack by rounding
_RAW = 0.02  # difference of log-probabilities that two equal requests may have


def certify(
    source: Source,
    plan: Plan,
    *,
    plain: Source | None = None,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Certificate:
    """Judges a server or function.

    Args:
        source: The server or function.
        plan: What it is asked.
        plain: The same model without speculation, for a server that reports no log-probabilities.
        on_progress: Takes a line about each answer.

    Raises:
        ServerError: The server answers nothing, or reports nothing and there is no plain one.
        ValueError: The reports do not determine the distribution of such a sampling.
    """
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    clock = time.perf_counter()

    # Whether anything is reported, and prompts are scored, is seen before hundreds of requests are
    # sent.
    probe = source.complete(
        plan.prompts[0], num_reported=plan.num_reported, max_tokens=2, temperature=0.0
    )
    if not probe.reports and plain is None:
        raise ServerError(
            "no log-probabilities are reported; name the same model without speculation with"
            " --plain-url, and texts are compared, which sees much less"
        )
    if probe.reports:
        plan = _with_kind_of_reports(source, plan, probe)

    asker = Asker(source, plan, on_progress)
    evidence = _Evidence()
    if probe.reports:
        _judge(asker, evidence)
    elif plain is not None:
        _compare(asker, plain, evidence)
    if probe.reports and plan.with_fields:
        tests = examine_states(asker, evidence.noise)
        evidence.tests += [test for test in tests if test.tokens]
        evidence.notes += [f"Not run: {test.name}." for test in tests if not test.tokens]
        evidence.findings += examine_fields(asker)
    if asker.failures and not asker.answered:
        raise ServerError(asker.failures[0])

    lost = len(asker.failures)
    sent = lost + asker.answered
    evidence.require("complete", not asker.stopped, asker.stopped or "every request was sent")
    evidence.require(
        "answered",
        lost / max(1, sent) <= MOST_LOST,
        f"{lost:,} of {counted(sent, 'request')} failed",
    )
    evidence.facts |= {
        **vars(plan),
        "prompts": len(plan.prompts),
        "sampling": dataclasses.asdict(plan.sampling),
    }
    state = git()
    commit = f"{state['commit']}{'+' if state['dirty'] else ''}" if isinstance(state, dict) else ""
    return Certificate(
        requirements=evidence.requirements,
        tests=evidence.tests,
        first_tokens=evidence.first_tokens,
        controls=evidence.controls,
        findings=evidence.findings,
        sees=evidence.sees,
        notes=evidence.notes,
        facts={**source.facts, **evidence.facts},
        tokens=evidence.tokens,
        requests=asker.answered,
        lost=lost,
        is_partial=bool(asker.stopped),
        seconds=time.perf_counter() - clock,
        started=started,
        commit=commit,
    )


@dataclasses.dataclass
class _Evidence:
    """What was seen so far; the attributes are those of ``Certificate``."""

    requirements: list[Requirement] = dataclasses.field(default_factory=list)
    tests: list[Test] = dataclasses.field(default_factory=list)
    first_tokens: list[Test] = dataclasses.field(default_factory=list)
    controls: list[Control] = dataclasses.field(default_factory=list)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    sees: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    noise: Noise | None = None

    def require(self, name: str, is_met: bool, detail: str) -> None:
        """Adds what must have been seen."""
        self.requirements.append(Requirement(name, bool(is_met), detail))


def _with_kind_of_reports(source: Source, plan: Plan, probe: Completion) -> Plan:
    """Returns the plan with the kind of the log-probabilities: before the warpers, or after.

    Raises:
        ServerError: They are neither, or there are fewer than were asked for.
        ValueError: They do not determine the distribution.
    """
    number = min(len(report.top) for report in probe.reports)
    is_whole = all(
        math.fsum(map(math.exp, report.top.values())) > 1 - _WHOLE for report in probe.reports
    )
    if 0 < number < plan.num_reported and not is_whole:
        raise ServerError(
            f"{number} log-probabilities are reported where {plan.num_reported} were asked for; ask"
            f" for {number} (--logprobs)"
        )
    if source.scoring != "none":
        source.score(plan.prompts[0], probe, num_reported=plan.num_reported)

    neutral = dataclasses.replace(plan, sampling=Sampling(processed=plan.sampling.processed))
    if plan.sampling != neutral.sampling:
        before, after = (
            source.complete(
                plan.prompts[0], num_reported=plan.num_reported, max_tokens=1, **settings.fields(0)
            )
            for settings in (neutral, plan)
        )
        processed = _are_processed(before.reports[0].top, after.reports[0].top, plan)
        if processed is None:
            raise ServerError(
                "the reported log-probabilities are neither those before temperature, top-k, top-p"
                " and min-p nor those after; nothing can be judged at these settings"
            )
        sampling = dataclasses.replace(plan.sampling, processed=processed)
        plan = dataclasses.replace(plan, sampling=sampling)
    plan.sampling.check(plan.num_reported)
    return plan


def _are_processed(before: dict[int, float], after: dict[int, float], plan: Plan) -> bool | None:
    """Returns whether reports are those after the warpers; ``None`` if they are neither.

    Args:
        before: The report of a request at temperature 1 without warpers.
        after: That of a request with the plan's settings.
        plan: The plan.
    """
    # The last ones may be tied, and the written token may be reported behind them.
    ranked = sorted(before, key=lambda token: -before[token])[: plan.num_reported - 1]
    if all(abs(before[token] - after.get(token, math.inf)) <= _RAW for token in ranked):
        return False

    # Proportions are compared, since not all tokens are reported.
    log_probs = np.array([[before[token] for token in ranked]])
    expected = plan.sampling.distributions(log_probs)[0][0, :-1]
    reported = np.exp([after.get(token, -math.inf) for token in ranked])
    difference = expected / expected.sum() - reported / max(reported.sum(), 1e-300)
    return True if np.abs(difference).max() <= _RAW else None


def _judge(asker: Asker, evidence: _Evidence) -> None:
    """Judges greedy and sampled answers by what is reported."""
    plan = asker.plan
    is_sampled = plan.num_requests + plan.num_long > 0
    at_start = asker.source.counters()
    greedy = greedy_answers(asker)
    at_half = asker.source.counters()
    samples = ask_for_samples(asker) if is_sampled else Samples([])
    at_end = asker.source.counters()
    drafts_of_samples = _rise(at_half, at_end)
    evidence.facts |= _rise(at_start, at_end)

    if asker.source.scoring != "none":
        _measure_noise(asker, greedy if greedy.answers else samples, evidence)
    if plan.num_greedy:
        drafts_of_greedy = _rise(at_start, at_half)
        _see_drafts("drafts of greedy tokens", plan, greedy, drafts_of_greedy, evidence)
        _judge_greedy(asker, greedy, evidence)
    if is_sampled:
        _see_drafts("drafts of sampled tokens", plan, samples, drafts_of_samples, evidence)
        _judge_sampled(asker, samples, drafts_of_samples, evidence)
    _require_reports([greedy, samples], evidence)


def _measure_noise(asker: Asker, answers: Samples, evidence: _Evidence) -> None:
    noise = measure_noise(asker, answers)
    evidence.noise = noise
    detail = (
        f"log-probabilities of the same token differ by up to {noise.size:.1g} nats without"
        f" drafts; the limit is {MOST_NOISE}"
    )
    if math.isinf(noise.size):
        detail = "no token was asked for twice"

    evidence.require("little noise", noise.is_small, detail)
    if noise.size > _COARSE and noise.is_small:
        evidence.notes.append(
            f"The reports are coarse: tokens within {noise.size:.1g} nats count as ties."
        )


def _require_reports(groups: Sequence[Samples], evidence: _Evidence) -> None:
    """Lists that reports must have come, and been readable."""
    num_unread = sum(group.num_unread for group in groups)
    num_tokens = sum(group.num_tokens for group in groups)
    num_silent = sum(group.num_silent for group in groups)
    num_answers = num_silent + sum(len(group.answers) for group in groups)

    is_met = (
        num_tokens > 0
        and num_unread <= MOST_UNREAD * num_tokens
        and num_silent <= MOST_UNREAD * num_answers
    )
    detail = f"the reports of {num_unread:,} of {counted(num_tokens, 'token')} cannot be read"
    if num_silent:
        detail += f"; {num_silent:,} of {counted(num_answers, 'answer')} have no report"
    evidence.require("readable reports", is_met, detail)


def _judge_greedy(asker: Asker, greedy: Samples, evidence: _Evidence) -> None:
    evidence.tests += judge_own_reports(greedy)
    noise = evidence.noise
    if noise is None:
        evidence.notes.append(
            "A chat cannot be scored, so greedy tokens were compared with their own reports only."
        )
        return
    if not noise.is_small:
        return

    answers = [(greedy.prompts[number], answer) for number, answer in greedy.answers]
    scores = scores_of(asker, "scored greedy answers", answers)
    evidence.tests += judge_greedy(scores, noise)
    evidence.first_tokens += judge_first_greedy(scores, noise)
    evidence.tokens += int((scores.index > 0).sum())
    _require_scores("greedy tokens", scores, answers, evidence, fewest=FEWEST)
    _require_agreement("greedy scores", doubtful(scores, noise), evidence)


def _require_scores(
    name: str,
    scores: Scores,
    answers: Sequence[tuple[Prompt, Completion]],
    evidence: _Evidence,
    *,
    fewest: int,
) -> None:
    """Lists that nearly all tokens behind the first ones, and a number, must have been scored."""
    num_scored = int((scores.index > 0).sum())
    num_tokens = sum(max(0, len(answer.reports) - 1) for _, answer in answers)
    is_met = num_scored >= max(fewest, (1 - MOST_UNREAD) * num_tokens)
    needed = f"; at least {fewest} are needed" if fewest else ""
    detail = f"{num_scored:,} of {counted(num_tokens, 'token')} were scored{needed}"
    evidence.require(name, is_met, detail)


def _judge_sampled(
    asker: Asker, samples: Samples, drafts: dict[str, Any], evidence: _Evidence
) -> None:
    if not samples.answers:
        evidence.require("judged tokens", False, "no sampled answer has reports")
        return
    judged = judge_samples(asker, samples)
    evidence.tests += judged.tests
    evidence.first_tokens += judged.first_tokens
    evidence.controls += judged.controls
    evidence.tokens += len(judged.drafted.known())
    _require_samples(asker.plan, samples, judged.drafted, drafts, evidence)
    _score_samples(asker, samples, evidence)
    _repeat_seeds(asker, samples, evidence)


def _require_agreement(name: str, share: float, evidence: _Evidence) -> None:
    size = 0.0 if evidence.noise is None else evidence.noise.size
    is_met = share <= MOST_LOST
    detail = (
        f"{share:.1%} of the tokens that drafts reach differ from their scores by more than"
        f" {size:.1g} nats, the noise without drafts"
    )
    if not is_met:
        detail += "; the cause is rounding of other kernels, or stale keys and values"
    evidence.require(name, is_met, detail)


def _score_samples(asker: Asker, samples: Samples, evidence: _Evidence) -> None:
    """Compares log-probabilities of sampled answers with those of scoring, if of the same kind."""
    if evidence.noise is None or not evidence.noise.is_small or asker.plan.sampling.processed:
        return

    answers = [(samples.prompts[number], answer) for number, answer in samples.answers[:SCORED]]
    scores = scores_of(asker, "scored sampled answers", answers)
    evidence.tests += judge_differences(scores, evidence.noise)
    _require_scores("scored samples", scores, answers, evidence, fewest=0)
    # A sampled token need not be the likeliest.
    differences = dataclasses.replace(scores, gaps=np.zeros_like(scores.gaps))
    _require_agreement("sampled scores", doubtful(differences, evidence.noise), evidence)


def _repeat_seeds(asker: Asker, samples: Samples, evidence: _Evidence) -> None:
    """Notes whether the same seed writes the same text."""
    plan = asker.plan
    number = min(SAME_SEEDS, plan.num_long, len(samples.answers))
    requests = [
        Request(samples.prompts[prompt], plan.fields(row) | {"max_tokens": plan.max_new_tokens})
        for row, (prompt, _) in enumerate(samples.answers[:number])
    ]

    again = asker.complete("the same seeds", requests)
    same = sum(answer.tokens == samples.answers[row][1].tokens for row, answer in again.items())
    if again:
        evidence.notes.append(
            f"The same seed wrote the same text in {same} of {len(again)} requests."
        )


def _require_samples(
    plan: Plan, samples: Samples, drafted: Draws, drafts: dict[str, Any], evidence: _Evidence
) -> None:
    """Lists what sampled answers must have shown."""
    num_sampled = sum(max(0, len(answer.reports) - 1) for _, answer in samples.answers)
    judged = len(drafted.known())
    fewest = max(FEWEST, math.ceil(LEAST_JUDGED * num_sampled))
    detail = (
        f"the reports determine the distribution of {judged:,} of {num_sampled:,} sampled tokens;"
        f" at least {fewest:,} are needed"
    )
    evidence.require("judged tokens", judged >= fewest, detail)

    first = max((test.tokens for test in evidence.first_tokens), default=0)
    evidence.require(
        "first tokens",
        first >= FEWEST,
        f"{first:,} first tokens were judged; at least {FEWEST} are needed",
    )
    if not judged:
        return

    # Of a run without speculation it is said what as many tokens show of a speculating server.
    share = VERIFIED if plan.speculation == "none" else verified_share(drafts, num_sampled)
    level = level_of(evidence.tests, evidence.first_tokens)
    sight = sight_of(drafted, share=share, level=level, seed=plan.seed)
    evidence.sees = sight.in_words
    detail = f"the run would have found {' and '.join(evidence.sees) or 'no error of acceptance'}"
    if not sight.is_sharp:
        detail += (
            "; a verdict needs that it finds an acceptance 20 % too willing, and acceptance of"
            f" every sampled draft where draft and target are 25 % apart. {share:.0%} of the tokens"
            " were drafted; ask for more requests (--requests)"
        )
    evidence.require("sight", sight.is_sharp, detail)


def _rise(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Returns by how much counters rose; a server that restarted counts from zero again."""
    rises = {name: np.array(count) - before.get(name, 0) for name, count in after.items()}
    return {name: np.maximum(rise, 0).tolist() for name, rise in rises.items()}


def _see_drafts(
    name: str, plan: Plan, answers: Samples, drafts: dict[str, Any], evidence: _Evidence
) -> None:
    """Lists that drafts of the answers that are judged must have been seen, by any sign of them."""
    signs = [
        f"the counter {counter} rose by {rise:,}"
        for counter, rise in drafts.items()
        if rise and "draft" in counter
    ]
    drafted = [
        answer.num_drafted for _, answer in answers.answers if answer.num_drafted is not None
    ]
    if sum(drafted):
        signs.append(f"the answers report {sum(drafted):,} drafted tokens")

    # Without speculation a slow reader may get two tokens at once.
    chunk_index = [position for _, answer in answers.answers for position in answer.chunk_index]
    starts = chunk_index.count(0)
    if len(chunk_index) > _CHUNK * starts and plan.speculation != "none":
        signs.append(f"chunks have {len(chunk_index) / starts:.2f} tokens on average")

    shown = "; ".join(signs)
    match plan.speculation:
        case "none":
            evidence.require(
                f"no {name}", not signs, shown or "nothing was drafted, as --speculation none says"
            )
        case "assumed":
            evidence.require(name, True, shown or "assumed; nothing shows them")
        case _:
            missing = "no draft was counted while log-probabilities were asked for"
            if not drafts and not drafted:
                missing = (
                    "nothing shows that the server drafts (no counters, chunks of one token); start"
                    " it with its metrics, or say --speculation assumed or none"
                )
            evidence.require(name, bool(signs), shown or missing)


def _compare(asker: Asker, plain: Source, evidence: _Evidence) -> None:
    """Compares sampled texts with those of the same model without speculation."""
    plan = asker.plan
    prompts = list(plan.prompts[: texts.PROMPTS])
    numbers = [request % len(prompts) for request in range(plan.num_requests)]

    def sample(side: Asker, first_seed: int) -> Counter:
        requests = [
            Request(prompts[number], plan.fields(first_seed + row) | {"max_tokens": texts.TOKENS})
            for row, number in enumerate(numbers)
        ]
        answers = side.complete("texts", requests)
        return Counter((numbers[row], answer.text) for row, answer in answers.items())

    at_start = asker.source.counters()
    counts = sample(asker, 0)
    plain_counts = sample(asker.for_source(plain), plan.num_requests)  # other seeds
    drafts = _rise(at_start, asker.source.counters())
    _see_drafts("drafts of sampled tokens", plan, Samples([]), drafts, evidence)

    comparison = texts.compare_texts(counts, plain_counts)
    evidence.tokens = texts.TOKENS * comparison.sample_size
    detail = chi_square_in_words(comparison.statistic, comparison.degrees)
    name = f"texts of {texts.TOKENS} tokens"
    evidence.tests.append(Test(name, comparison.p_value, evidence.tokens, detail, True))

    evidence.sees = [
        f"a shift of {100 * comparison.shift:.0f} % between texts of {texts.TOKENS} tokens"
    ]
    detail = f"{evidence.sees[0]} would have been found; the limit is {100 * MOST_SHIFTED:.0f} %"
    evidence.require("sight", comparison.shift <= MOST_SHIFTED, detail)
    evidence.notes.append(
        "No log-probabilities are reported, so texts of two servers were compared."
    )
