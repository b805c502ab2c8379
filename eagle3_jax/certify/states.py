"""Whether answers depend on what a server was asked before or at the same time."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from eagle3_jax.certify.asking import Asker, Prompt, Request
from eagle3_jax.certify.greedy import (
    CERTAIN,
    LIKELY,
    MOST_NOISY,
    Noise,
    Scores,
    compare,
    greedy,
    p_value_of_noisy,
    scores_of,
)
from eagle3_jax.certify.sampled import prompt_ids, text_before
from eagle3_jax.certify.source import Completion, Refused, Report, ServerError, counted
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


def examine_states(asker: Asker, noise: Noise | None) -> list[Test]:
    """Compares answers to a prompt again, among others, behind an answer and behind a long text.

    Args:
        asker: Asks the server.
        noise: What log-probabilities differ by without drafts; ``None`` if nothing is scored.

    Returns:
        A test of each state; one that could not be made has no tokens.
    """
    is_scored = noise is not None and noise.is_small
    is_comparable = noise is None or noise.is_small  # a chat is compared with itself
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
    # Each compares the server with itself, so that no control is needed.
    return [dataclasses.replace(test, is_controlled=True) for test in tests]


def _again(asker: Asker, name: str) -> Test:
    """Sends greedy prompts one by one: one, another one, and the first again."""
    numbers = [number for row in range(_AGAIN) for number in (row, row + 1, row)]
    answers = asker.complete("again", _requests(asker, numbers), at_a_time=1)
    rows = range(0, len(numbers), 3)
    pairs = [
        (answers[row], answers[row + 2]) for row in rows if row in answers and row + 2 in answers
    ]
    return _agreement(name, pairs)


def _at_once(asker: Asker, name: str) -> Test:
    """Sends greedy prompts one by one, and then at once."""
    requests = _requests(asker, range(_AT_ONCE))
    by_itself = asker.complete("one by one", requests, at_a_time=1)
    at_once = asker.complete("at once", requests, at_a_time=_AT_ONCE)
    pairs = [(by_itself[row], at_once[row]) for row in sorted(by_itself.keys() & at_once.keys())]
    return _agreement(name, pairs)


def _requests(asker: Asker, numbers: Iterable[int]) -> list[Request]:
    """Returns greedy requests for prompts by number, which start again behind the last one."""
    plan = asker.plan
    fields = greedy(plan.max_new_tokens)
    return [Request(plan.prompts[number % len(plan.prompts)], fields) for number in numbers]


def _agreement(name: str, pairs: Sequence[tuple[Completion, Completion]]) -> Test:
    """Compares pairs of greedy answers up to where they fork, which must be at a tie."""
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
                # A token that is not reported is at most as likely as the least of the reported.
                likelihood = report.top.get(again.token, min(report.top.values()))
                gaps.append(report.log_prob - likelihood)
                break

    num_wrong = sum(gap > CERTAIN for gap in gaps)
    ties = f", {len(gaps) - num_wrong} of them at tied tokens" if gaps else ""
    detail = (
        f"{len(gaps)} of {counted(len(pairs), 'pair')} of answers differ{ties}; log-probabilities"
        f" differ by up to {max(distances):.2g} nats"
    )
    is_wrong = num_wrong > 0 or max(distances) > CERTAIN
    return Test(name, 0.0 if is_wrong else 1.0, number, detail)


def _distance(report: Report, again: Report) -> float:
    """Returns the largest difference of two reports of a position, among their likely tokens."""
    tokens = report.top.keys() & again.top.keys()
    likely = [token for token in tokens if max(report.top[token], again.top[token]) > LIKELY]
    return max((abs(report.top[token] - again.top[token]) for token in likely), default=0.0)


def _second_turns(asker: Asker, name: str) -> Test:
    """Continues sampled answers, of which a server may have cached the keys of refused drafts.

    The second turn is compared with its scores, which read nothing that speculation left.
    """
    plan = asker.plan

    def converse(row: int) -> tuple[Prompt, Completion] | None:
        prompt = plan.prompts[row % len(plan.prompts)]
        fields = {"temperature": 1.0, "max_tokens": plan.max_new_tokens, "seed": plan.seed + row}
        first = asker.ask(Request(prompt, fields))
        ids = text_before(prompt, first, len(first.tokens))
        text: Prompt = f"{prompt}{first.text}" if ids is None else ids
        try:
            return text, asker.ask(Request(text, greedy(_TURN_TOKENS)))
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
    detail = (
        f"{wrong} of {number} are not the likeliest token; {different} differ by more than"
        f" {CERTAIN} nats, at most {MOST_NOISY:.0%} may"
    )
    return Test(name, 0.0 if wrong else p_value_of_noisy(different, number), number, detail)


def _unseeded(asker: Asker, name: str) -> Test:
    """Sends a sampled prompt without a seed, one request at a time, whose texts must not repeat."""
    fields = {"temperature": 1.0, "max_tokens": _UNSEEDED_TOKENS}
    requests = [Request(asker.plan.prompts[0], fields)] * _UNSEEDED
    answers = asker.complete("without a seed", requests, at_a_time=1).values()
    readable = [
        answer for answer in answers if all(report.is_readable for report in answer.reports)
    ]

    # Two requests write a same text of probability x with probability x, for each of the pairs.
    counts = Counter(tuple(answer.tokens) for answer in readable)
    repeated = [answer.log_prob for answer in readable if counts[tuple(answer.tokens)] > 1]
    p_value = min(1.0, math.comb(len(readable), 2) * math.exp(max(repeated))) if repeated else 1.0
    detail = f"{counted(len(readable), 'request')} wrote {counted(len(counts), 'different text')}"
    return Test(name, p_value, sum(len(answer.tokens) for answer in readable), detail)


def _long_text(asker: Asker, name: str) -> Test:
    """Asks for a greedy answer behind a long text, and for its tokens again behind prefixes."""
    nothing = Test(name, 1.0, 0, "")
    known = asker.source.facts.get("max_model_len")
    length = min(known, _LONGEST) if isinstance(known, int) else _LONGEST
    answer: Completion | None = None
    unit = _unit(asker)
    text: list[int] = []

    # Not every server tells its longest text; one that refuses a text may take half of it.
    while unit and answer is None and length >= _SHORTEST // 2:
        free = length - _BEHIND - _MARGIN
        text = (unit * math.ceil(free / len(unit)))[:free]
        send = functools.partial(_answer_or_error, asker, Request(text, greedy(_BEHIND)))
        result = asker.each("long text", 1, send, at_a_time=1).get(0)
        if isinstance(result, Completion):
            answer = result
        elif not isinstance(result, Refused):  # slow, perhaps
            return nothing
        length //= 2
    # Where the end of a text cannot be ignored, the answer may have no second token.
    if answer is None or len(answer.reports) < 2:
        return nothing

    positions = np.unique(np.linspace(1, len(answer.tokens) - 1, _CHECKED).astype(int)).tolist()
    prefixes = [Request([*text, *answer.tokens[:position]], greedy(1)) for position in positions]
    behind = asker.complete("behind a long text", prefixes)
    values = []
    for row, first in behind.items():
        decoded = answer.reports[positions[row]]
        top = first.reports[0].top if first.reports else {}
        values += compare([decoded], [Report(decoded.token, top.get(decoded.token, math.nan), top)])
    test = _judge(name, Scores.of(values))
    return dataclasses.replace(test, detail=f"after {len(text):,} tokens; {test.detail}")


def _answer_or_error(asker: Asker, request: Request, row: int) -> Completion | ServerError:
    """Returns an error as a result, so that it does not count as a failed request."""
    try:
        return asker.ask(request)
    except ServerError as error:
        return error


def _unit(asker: Asker) -> list[int]:
    """Returns the token ids that a long text repeats; none where they are not told."""
    prompts = asker.plan.prompts[:16]
    requests = [Request(prompt, greedy(1)) for prompt in prompts]
    answers = asker.complete("ids of the prompts", requests)
    units = [prompt_ids(prompts[row], answer) for row, answer in answers.items()]
    return [token for ids in units if ids is not None for token in ids]
