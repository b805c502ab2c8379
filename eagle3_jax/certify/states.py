"""Whether answers depend on what a server was asked before or at the same time."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from eagle3_jax.certify.asking import Asker, Prompt
from eagle3_jax.certify.greedy import CERTAIN, Noise, Scores, compare, scores_of
from eagle3_jax.certify.sampled import prompt_ids
from eagle3_jax.certify.source import Completion, Refused, Report, ServerError
from eagle3_jax.certify.statistics import Test

_AGAIN = 4  # prompts that are sent before and after another one
_AT_ONCE = 8  # prompts that are sent one by one and at once
_TURNS = 16  # conversations of two turns
_TURN_TOKENS = 4  # tokens of a second turn
_UNSEEDED = 8  # requests without a seed
_UNSEEDED_TOKENS = 16  # tokens of each of these
_LONGEST = 16_384  # tokens of a long text
_SHORTEST = 1024  # tokens below which no text is long
_BEHIND = 32  # tokens of the answer behind it
_CHECKED = 16  # of these, which are asked for again
_MARGIN = 64  # tokens that are free behind a long text and its answer
_LIKELY = -5.0  # log-probability above which reports are compared
_MOST_NOISY = 0.01  # share of tokens that may differ by more than is certain


def examine_states(asker: Asker, noise: Noise | None) -> list[Test]:
    """Compares answers to the same prompt again, among others, behind an earlier answer and behind a long text.

    Args:
        asker: Asks the server.
        noise: What log-probabilities differ by without drafts; ``None`` if nothing is scored.

    Returns:
        A test of each state; one that could not be made has no tokens.
    """
    is_scored = noise is not None and noise.is_small
    is_comparable = noise is None or noise.is_small
    states: tuple[tuple[str, bool, Callable[[Asker, str], Test]], ...] = (
        ("texts without a seed", True, _unseeded),
        ("greedy answers, again behind another", is_comparable, _again),
        (f"greedy answers, {_AT_ONCE} at once", is_comparable, _at_once),
        ("second turns", is_scored, _second_turns),
        ("greedy tokens behind a long text", is_scored, _long_text),
    )
    tests = [
        examine(asker, name) if is_possible else Test(name, 1.0, 0, "")
        for name, is_possible, examine in states
    ]
    return [dataclasses.replace(test, is_controlled=True) for test in tests]


def _greedy(max_tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": max_tokens}


def _again(asker: Asker, name: str) -> Test:
    """Sends greedy prompts one by one: one, another one, and the first again."""
    plan = asker.plan
    numbers = [
        number % len(plan.prompts) for row in range(_AGAIN) for number in (row, row + 1, row)
    ]
    fields = _greedy(plan.max_new_tokens)
    answers = asker.complete(
        "again", [plan.prompts[number] for number in numbers], lambda row: fields, at_a_time=1
    )
    rows = range(0, len(numbers), 3)
    pairs = [
        (answers[row], answers[row + 2]) for row in rows if row in answers and row + 2 in answers
    ]
    return _agreement(name, pairs)


def _at_once(asker: Asker, name: str) -> Test:
    """Sends greedy prompts one by one, and then at once."""
    plan = asker.plan
    prompts = [plan.prompts[row % len(plan.prompts)] for row in range(_AT_ONCE)]
    fields = _greedy(plan.max_new_tokens)
    by_itself = asker.complete("one by one", prompts, lambda row: fields, at_a_time=1)
    at_once = asker.complete("at once", prompts, lambda row: fields, at_a_time=_AT_ONCE)
    pairs = [(by_itself[row], at_once[row]) for row in sorted(by_itself.keys() & at_once.keys())]
    return _agreement(name, pairs)


def _agreement(name: str, pairs: Sequence[tuple[Completion, Completion]]) -> Test:
    """Compares pairs of greedy answers to the same prompts up to where they fork, which must be a tie."""
    number = 0
    distances = [0.0]
    gaps = []
    for first, second in pairs:
        for report, again in zip(first.reports, second.reports, strict=False):
            if not (report.is_readable and again.is_readable):
                break
            number += 1
            distances.append(_distance(report, again))
            if report.token != again.token:
                gaps.append(report.log_prob - report.top.get(again.token, min(report.top.values())))
                break
    wrong = [gap for gap in gaps if gap > CERTAIN]
    detail = f"{len(gaps)} of {len(pairs)} fork, {'all' if not wrong else len(gaps) - len(wrong)} at ties"
    detail += f"; log-probabilities differ by up to {max(distances):.2g}"
    return Test(name, 0.0 if wrong or max(distances) > CERTAIN else 1.0, number, detail)


def _distance(report: Report, again: Report) -> float:
    """Returns the largest difference of two reports of the same position, among their likely tokens."""
    tokens = report.top.keys() & again.top.keys()
    likely = [token for token in tokens if max(report.top[token], again.top[token]) > _LIKELY]
    return max((abs(report.top[token] - again.top[token]) for token in likely), default=0.0)


def _second_turns(asker: Asker, name: str) -> Test:
    """Continues sampled answers, of which a server may have cached the keys of refused drafts.

    The second turn is compared with its scores, which read nothing that speculation left.
    """
    plan = asker.plan

    def converse(row: int) -> tuple[Prompt, Completion] | None:
        prompt = plan.prompts[row % len(plan.prompts)]
        fields = {"temperature": 1.0, "max_tokens": plan.max_new_tokens, "seed": plan.seed + row}
        first = asker.source.complete(prompt, num_reported=plan.num_reported, **fields)
        ids = prompt_ids(prompt, first)
        text: Prompt = f"{prompt}{first.text}" if ids is None else [*ids, *first.tokens]
        try:
            return text, asker.source.complete(
                text, num_reported=plan.num_reported, **_greedy(_TURN_TOKENS)
            )
        except Refused:  # too long
            return None

    turns = asker.each("second turns", _TURNS, converse, at_a_time=1).values()
    scores = scores_of(asker, "scored second turns", [turn for turn in turns if turn is not None])
    return _judge(name, scores)


def _judge(name: str, scores: Scores) -> Test:
    """Judges greedy tokens, which are the likeliest or tied, and their log-probabilities."""
    number = len(scores.gaps)
    wrong = int((scores.gaps > CERTAIN).sum())
    different = int((scores.differences > CERTAIN).sum())
    p_value = float(stats.binom.sf(different - 1, number, _MOST_NOISY)) if different else 1.0
    detail = f"{wrong} are not the likeliest; {different} differ by more than {CERTAIN}, at most {_MOST_NOISY:.0%} may"
    return Test(name, 0.0 if wrong else p_value, number, detail)


def _unseeded(asker: Asker, name: str) -> Test:
    """Sends a sampled prompt without a seed, one request at a time, whose texts must not repeat."""
    prompts = [asker.plan.prompts[0]] * _UNSEEDED
    fields = {"temperature": 1.0, "max_tokens": _UNSEEDED_TOKENS}
    answers = asker.complete("without a seed", prompts, lambda row: fields, at_a_time=1).values()
    readable = [
        answer for answer in answers if all(report.is_readable for report in answer.reports)
    ]
    counts = Counter(tuple(answer.tokens) for answer in readable)
    repeated = [answer.log_prob for answer in readable if counts[tuple(answer.tokens)] > 1]
    p_value = min(1.0, math.comb(len(readable), 2) * math.exp(max(repeated))) if repeated else 1.0
    detail = f"{len(readable)} requests wrote {len(counts)} texts"
    return Test(name, p_value, sum(len(answer.tokens) for answer in readable), detail)


def _long_text(asker: Asker, name: str) -> Test:
    """Asks for a greedy answer behind a long text, and for some of its tokens again behind their own prefixes."""
    nothing = Test(name, 1.0, 0, "")
    known = asker.source.facts.get("max_model_len")
    length = min(known, _LONGEST) if isinstance(known, int) else _LONGEST
    answer: Completion | None = None
    unit = _unit(asker)
    text: list[int] = []
    while unit and answer is None and length >= _SHORTEST // 2:
        free = length - _BEHIND - _MARGIN
        text = (unit * math.ceil(free / len(unit)))[:free]
        result = asker.each(
            "long text", 1, lambda row, text=text: _send(asker, text), at_a_time=1
        ).get(0)
        if isinstance(result, Completion):
            answer = result
        elif not isinstance(result, Refused):  # slow, perhaps
            return nothing
        length //= 2
    if answer is None or not answer.reports:
        return nothing
    positions = np.unique(np.linspace(1, len(answer.tokens) - 1, _CHECKED).astype(int)).tolist()
    prefixes: list[Prompt] = [[*text, *answer.tokens[:position]] for position in positions]
    behind = asker.complete("behind a long text", prefixes, lambda row: _greedy(1))
    values = []
    for row, first in behind.items():
        decoded = answer.reports[positions[row]]
        top = first.reports[0].top if first.reports else {}
        values += compare([decoded], [Report(decoded.token, top.get(decoded.token, math.nan), top)])
    test = _judge(name, Scores(*np.array(values).reshape(-1, 3).T))
    return dataclasses.replace(test, detail=f"{len(text):,} tokens; {test.detail}")


def _send(asker: Asker, text: list[int]) -> Completion | ServerError:
    try:
        return asker.source.complete(text, num_reported=asker.plan.num_reported, **_greedy(_BEHIND))
    except ServerError as error:
        return error


def _unit(asker: Asker) -> list[int]:
    """Returns the token ids that a long text repeats; none where they are not told."""
    prompts = asker.plan.prompts[:16]
    answers = asker.complete("ids of the prompts", prompts, lambda row: _greedy(1))
    units = [prompt_ids(prompts[row], answer) for row, answer in answers.items()]
    return [token for ids in units if ids is not None for token in ids]
