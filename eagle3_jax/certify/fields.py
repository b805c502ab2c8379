"""Whether a server does what the fields of a request say."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eagle3_jax.certify.asking import Asker, Prompt
from eagle3_jax.certify.certificate import Finding
from eagle3_jax.certify.greedy import CERTAIN
from eagle3_jax.certify.penalties import PENALTIES, bet_on_penalties, count_misses
from eagle3_jax.certify.sampled import Samples, prompt_ids
from eagle3_jax.certify.source import Completion, Refused, ServerError
from eagle3_jax.certify.statistics import Sampling, judge

_TOKENS = 24  # tokens of an answer: several rounds of drafts
_LIMITS = (1, 2, 5, 7)  # tokens of answers that cut rounds of drafts
_LONGEST = 64  # tokens of an answer that may end by itself
_MORE = 8  # tokens behind the end of such an answer
_STOP = 4  # characters of a stop text
_MIN_P = 0.3
_FEWEST_EXCLUDED = 14.0  # tokens that a server without `min_p` is expected to write
_LEAST_NATS = 20.0  # evidence that a server without penalties would have against it
_FEWEST_SHOWN = 3  # greedy tokens that would be wrong without penalties
_MISFIT = 1e-3  # p-value below which sampled tokens do not follow their reports
_PENALIZED = 0.3  # nats by which reports before penalties do not differ from those without
_LIKELY = -5.0  # log-probability above which reports are compared
_SHOWN = 80  # characters of a refusal
_RARE = 1e-7  # probability of what a correct server does not do
_DIGITS = "000-000-000-000-0000"  # the form of the texts of a regular expression
_REGEX = "([0-9]{3}-){4}[0-9]{4}"
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_PAIRS = [(f'"a":{a}', f'"b":"{b}"') for a in ("true", "false") for b in "xy"]
_OBJECTS = [
    "{" + ",".join(order) + "}" for pair in _PAIRS for order in (pair, pair[::-1])
]  # all of the schema


def examine_fields(asker: Asker) -> list[Finding]:
    """Sends requests whose answers show whether fields are honoured.

    Args:
        asker: Asks the server. What it refuses does not count as failed.

    Returns:
        A finding for each field.
    """
    exam = _Exam(asker)
    findings = []
    for name, examine in exam.fields().items():
        try:
            complaint, detail = examine()
            # The client does not send a neutral field again that was refused, nor this one then.
            if name in asker.source.facts.get("refused_fields", ()):
                raise Refused("the server does not take it")
            findings.append(Finding(name, "failed" if complaint else "passed", complaint or detail))
        except Refused as error:
            answered = str(error).rpartition(" answered ")[2]
            findings.append(Finding(name, "refused", answered[:_SHOWN]))
        except ServerError as error:
            findings.append(Finding(name, "not run", str(error)))
    return findings


class _Exam:
    """The examinations of all fields. Each returns a complaint, empty if there is none, and what was seen.

    Each raises ``Refused`` where the server does not take the field, and ``ServerError`` where
    nothing can be said.
    """

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._is_llama_cpp = getattr(asker.source, "is_llama_cpp", False)

    def fields(self) -> dict[str, Callable[[], tuple[str, str]]]:
        """Returns the examination of each field, by its name."""
        return {
            "logit_bias": self._logit_bias,
            "max_tokens": self._max_tokens,
            "min_tokens": self._min_tokens,
            "ignore_eos": self._ignore_eos,
            "stop": self._stop,
            "n": self._n,
            "response_format": self._response_format,
            "regex": self._regex,
            "min_p": self._min_p,
            **{name: functools.partial(self._penalty, name) for name in PENALTIES},
            "repetition_penalty": self._repetition_penalty,
        }

    def _ask(
        self, name: str, requests: Sequence[tuple[Prompt, Mapping[str, Any]]]
    ) -> list[Completion]:
        """Returns the answers to requests; if the first has none, the others are not sent.

        Raises:
            Refused: One was refused.
            ServerError: One failed.
        """
        answers: list[Completion] = []
        for batch in (requests[:1], requests[1:]):
            results = self._asker.each(
                f"field {name}", len(batch), functools.partial(self._send, batch)
            )
            for result in results.values():
                if isinstance(result, Refused):
                    raise result
            if len(results) < len(batch):
                raise ServerError(self._asker.stopped or self._asker.failures[-1])
            answers += results.values()
        return answers

    def _ask_for_tokens(
        self, name: str, requests: Sequence[tuple[Prompt, Mapping[str, Any]]]
    ) -> list[Completion]:
        """Returns answers that tell their tokens, which are those that are reported.

        Raises:
            Refused: One was refused.
            ServerError: One failed, or has no reports.
        """
        answers = self._ask(name, requests)
        if not all(answer.reports for answer in answers):
            raise ServerError("an answer has no log-probabilities, which would tell its tokens")
        return answers

    def _send(
        self, requests: Sequence[tuple[Prompt, Mapping[str, Any]]], row: int
    ) -> Completion | Refused:
        prompt, fields = requests[row]
        try:
            return self._asker.source.complete(
                prompt, num_reported=self._asker.plan.num_reported, **fields
            )
        except Refused as error:
            return error

    def _greedy(self, number: int, **fields: Any) -> list[tuple[Prompt, dict[str, Any]]]:
        """Returns greedy requests, whose prompts take turns."""
        prompts = self._asker.plan.prompts
        return [
            (prompts[row % len(prompts)], {"temperature": 0.0, "max_tokens": _TOKENS, **fields})
            for row in range(number)
        ]

    def _sampled(self, number: int, **fields: Any) -> list[tuple[Prompt, dict[str, Any]]]:
        """Returns sampled requests, whose prompts take turns, each with a seed of its own."""
        seeds = itertools.count(self._asker.plan.seed)
        requests = self._greedy(number, temperature=1.0, **fields)
        return [(prompt, {"seed": next(seeds), **values}) for prompt, values in requests]

    @functools.cached_property
    def _plain(self) -> list[Completion]:
        """Greedy answers to the first prompts."""
        return self._ask("temperature", self._greedy(4))

    @functools.cached_property
    def _ended(self) -> list[tuple[Prompt, dict[str, Any], int]]:
        """Requests whose answers ended by themselves, with their number of tokens."""
        requests = self._sampled(24, max_tokens=_LONGEST, ignore_eos=False)
        for batch in (requests[:8], requests[8:16], requests[16:]):
            answers = self._ask("min_tokens", batch)
            ended = [
                (prompt, fields, len(answer.tokens))
                for (prompt, fields), answer in zip(batch, answers, strict=True)
                if answer.finish_reason == "stop" and 0 < len(answer.tokens) < _LONGEST
            ]
            if ended:
                return sorted(ended, key=lambda request: -request[2])[:4]
        raise ServerError("no answer ended by itself")

    def _bias(self, bias: dict[int, float]) -> Any:
        """Returns the value of ``logit_bias``."""
        return (
            list(map(list, bias.items()))
            if self._is_llama_cpp
            else {str(token): bias[token] for token in bias}
        )

    def _logit_bias(self) -> tuple[str, str]:
        plain = self._plain[0].tokens
        if not plain or min(plain) < 0:
            raise ServerError("token ids are not told")
        counts = Counter(plain).most_common()
        excluded = {token: -100.0 for token, _ in counts[:8]}
        forced = counts[-1][0]
        answers = self._ask_for_tokens(
            "logit_bias",
            self._greedy(1, logit_bias=self._bias(excluded))
            + self._sampled(3, logit_bias=self._bias(excluded))
            + self._greedy(1, logit_bias=self._bias({forced: 100.0}))
            + self._sampled(1, logit_bias=self._bias({forced: 100.0})),
        )
        written = [token for answer in answers[:4] for token in answer.tokens if token in excluded]
        if written:
            return f"{len(written)} tokens with a bias of -100 were written", ""
        strange = [token for answer in answers[4:] for token in answer.tokens if token != forced]
        if strange:
            return f"{len(strange)} tokens were written in place of that with a bias of 100", ""
        return (
            "",
            f"{len(excluded)} tokens with -100 were not written, and only the token with 100 was",
        )

    def _max_tokens(self) -> tuple[str, str]:
        requests = [
            self._greedy(1, max_tokens=limit) + self._sampled(1, max_tokens=limit)
            for limit in _LIMITS
        ]
        is_exact = "ignore_eos" not in self._asker.source.facts.get("refused_fields", ())
        answers = self._ask_for_tokens("max_tokens", list(itertools.chain(*requests)))
        for limit, answer in zip(np.repeat(_LIMITS, 2), answers, strict=True):
            number = len(answer.tokens)
            if number > limit or (is_exact and number < limit):
                return f"{number} tokens were written with max_tokens {limit}", ""
        return (
            "",
            (
                f"{'exactly' if is_exact else 'at most'} {', '.join(map(str, _LIMITS))} tokens were"
                " written"
            ),
        )

    def _min_tokens(self) -> tuple[str, str]:
        if self._is_llama_cpp:
            raise ServerError("llama.cpp has no such field")
        fewest = [length + _MORE for _, _, length in self._ended]
        answers = self._ask_for_tokens(
            "min_tokens",
            [
                (prompt, fields | {"min_tokens": least, "max_tokens": least + _MORE})
                for (prompt, fields, _), least in zip(self._ended, fewest, strict=True)
            ],
        )
        numbers = [len(answer.tokens) for answer in answers]
        for number, least in zip(numbers, fewest, strict=True):
            if number < least:
                return f"{number} tokens were written with min_tokens {least}", ""
        return "", f"{numbers[0]} tokens, where {fewest[0] - _MORE} were without it"

    def _ignore_eos(self) -> tuple[str, str]:
        requests = [
            (prompt, fields | {"ignore_eos": True, "max_tokens": length + _MORE})
            for prompt, fields, length in self._ended
        ]
        answers = self._ask_for_tokens("ignore_eos", requests)
        for (_, fields), answer in zip(requests, answers, strict=True):
            number = len(answer.tokens)
            if number != fields["max_tokens"]:
                return (
                    (
                        f"an answer ended after {number} of {fields['max_tokens']} tokens"
                        f" ({answer.finish_reason})"
                    ),
                    "",
                )
        return "", f"{len(answers[0].tokens)} tokens, where {self._ended[0][2]} were without it"

    def _stop(self) -> tuple[str, str]:
        _require_texts(self._plain)
        stops = [_stop_text(answer.text) for answer in self._plain]
        if not all(stops):
            raise ServerError("the greedy texts are too short")
        requests = [
            (prompt, fields | {"stop": [stop]})
            for (prompt, fields), stop in zip(self._greedy(len(stops)), stops, strict=True)
        ]
        answers = self._ask("stop", requests)
        forks = 0
        included = 0
        for plain, stop, answer in zip(self._plain, stops, answers, strict=True):
            end = plain.text.index(stop)
            text = answer.text
            if stop in text.removesuffix(stop):
                return f"{text[-32:]!r} goes on behind {stop!r}", ""
            if not plain.text.startswith(text):
                forks += 1
            elif len(text) not in (end, end + len(stop)) or answer.finish_reason != "stop":
                return (
                    (
                        f"{text[-32:]!r} ends at character {len(text)} ({answer.finish_reason});"
                        f" {stop!r} is at {end}"
                    ),
                    "",
                )
            included += text.endswith(stop)
        if forks == len(stops):
            raise ServerError("the greedy texts are not the same again")
        return (
            "",
            (
                f"{len(stops) - forks} answers ended at their stop text, which {included} include;"
                f" {forks} forked"
            ),
        )

    def _n(self) -> tuple[str, str]:
        requests = self._greedy(
            2, temperature=1.0, n=4
        )  # without seeds, which would be the same for all
        answers = self._ask("n", requests)
        wrong = [number for answer in answers if (number := 1 + len(answer.more_texts)) != 4]
        if wrong:
            return f"{wrong[0]} answers came for n 4", ""
        _require_texts(answers)
        for answer in answers:
            p_value = 3 * math.exp(answer.log_prob)
            if answer.text in answer.more_texts and p_value < _RARE:
                return f"answers of the same request are equal (p = {p_value:.1g})", ""
        return "", "4 answers came"

    def _response_format(self) -> tuple[str, str]:
        is_own = self._is_llama_cpp and self._asker.source.scoring != "none"
        schema = {"name": "pair", "strict": True, "schema": _SCHEMA}
        fields = (
            {"json_schema": _SCHEMA}
            if is_own
            else {"response_format": {"type": "json_schema", "json_schema": schema}}
        )
        return self._constrained("response_format", fields, "the JSON schema", _is_of_schema)

    def _regex(self) -> tuple[str, str]:
        rule = " ".join(f'"{letter}"' if letter == "-" else "[0-9]" for letter in _DIGITS)
        # vLLM and SGLang ignore the other's field.
        both = {"structured_outputs": {"regex": _REGEX}, "regex": _REGEX}
        fields = {"grammar": f"root ::= {rule}"} if self._is_llama_cpp else both
        return self._constrained("regex", fields, _REGEX, _is_of_regex)

    def _constrained(
        self, name: str, fields: dict[str, Any], rule: str, is_match: Callable[[str, bool], bool]
    ) -> tuple[str, str]:
        """Examines sampled answers that a grammar constrains; one that is cut by its length may go on rightly."""
        _require_texts(self._plain)
        answers = self._ask(
            name, self._sampled(8, max_tokens=2 * _TOKENS, ignore_eos=False, **fields)
        )
        wrong = [
            answer.text
            for answer in answers
            if not is_match(answer.text, answer.finish_reason == "stop")
        ]
        num_complete = sum(answer.finish_reason == "stop" for answer in answers)
        if wrong:
            return (
                (
                    f"{len(wrong)} of {len(answers)} answers do not match {rule}, such as"
                    f" {wrong[0][:40]!r}"
                ),
                "",
            )
        _require_texts(answers)
        return (
            "",
            f"{num_complete} answers match {rule}, and {len(answers) - num_complete} begin so",
        )

    def _min_p(self) -> tuple[str, str]:
        answers = self._ask_for_tokens("min_p", self._sampled(32, max_tokens=32, min_p=_MIN_P))
        reports = [report for answer in answers for report in answer.reports if report.is_readable]
        largest = np.array([max(report.top.values()) for report in reports])
        limits = largest + math.log(_MIN_P) - CERTAIN
        excluded = sum(
            report.log_prob < limit for report, limit in zip(reports, limits, strict=True)
        )
        if excluded:
            return (
                (
                    f"{excluded} of {len(reports)} tokens are less likely than {_MIN_P} of the"
                    " likeliest"
                ),
                "",
            )
        if not any(
            _LIKELY < value < limit
            for report, limit in zip(reports, limits, strict=True)
            for value in report.top.values()
        ):
            raise ServerError("the reports are those after min_p")
        inside = [
            sum(math.exp(value) for value in report.top.values() if value >= limit)
            for report, limit in zip(reports, limits, strict=True)
        ]
        expected = len(inside) - math.fsum(inside)
        if expected < _FEWEST_EXCLUDED:
            raise ServerError(f"only {expected:.0f} tokens would be excluded")
        return (
            "",
            (
                f"no token was written that it excludes; {expected:.0f} of {len(reports)} would"
                " have been without it"
            ),
        )

    def _penalty(self, name: str) -> tuple[str, str]:
        if self._is_llama_cpp:
            raise ServerError("llama.cpp counts tokens of the prompt, too")
        fields = {"max_tokens": 2 * _TOKENS, name: PENALTIES[name]}
        greedy = self._greedy(8, **fields)
        sampled = self._sampled(16, **fields)
        # A batch of both kinds is another question.
        answers = self._ask_for_tokens(name, greedy) + self._ask_for_tokens(name, sampled)
        number = self._asker.plan.num_reported
        misses, shown = count_misses(answers[:8], name, number)
        bet, nats = bet_on_penalties(answers[8:], name, number)
        if shown < _FEWEST_SHOWN and nats < _LEAST_NATS:
            raise ServerError(
                f"too few repeated tokens: ignoring it would change {shown} greedy tokens"
            )
        self._refuse_processed(name, list(zip(greedy + sampled, answers, strict=True)))
        if misses[""]:
            best = min(misses, key=lambda words: misses[words])
            words = f"; they are as if {best}" if best else ""
            return f"{misses['']} greedy tokens are not the likeliest behind it{words}", ""
        detail = f"greedy answers count it rightly, where ignoring it would change {shown} tokens"
        if nats < _LEAST_NATS:
            return "", detail
        if bet.p_value < _RARE and not self._samples_follow_reports:
            return "", f"{detail}; sampled tokens do not follow their reports without it either"
        if bet.p_value < _RARE:
            return f"sampled answers are as if {bet.detail} (p = {bet.p_value:.1g})", ""
        return "", f"{detail}; so do sampled ones, where it would show in {nats:.0f} nats"

    @functools.cached_property
    def _samples_follow_reports(self) -> bool:
        """Whether sampled answers follow their reports where nothing changes them."""
        answers = self._ask("temperature", self._sampled(16, max_tokens=2 * _TOKENS))
        plan = dataclasses.replace(self._asker.plan, sampling=Sampling())
        numbers = itertools.cycle(range(len(plan.prompts)))
        samples = Samples(list(plan.prompts), list(zip(numbers, answers, strict=False)))
        tests = judge(samples.draws(plan))
        return len(tests) * min((test.p_value for test in tests), default=1.0) > _MISFIT

    def _refuse_processed(
        self, name: str, answers: list[tuple[tuple[Prompt, Mapping[str, Any]], Completion]]
    ) -> None:
        """Refuses reports after penalties: those of a token that a penalty counts differ from those without it.

        Raises:
            ServerError: They do, or it cannot be seen.
        """
        for (prompt, _), answer in answers:
            ids = prompt_ids(prompt, answer)
            for index in range(len(answer.tokens) - 1, 0, -1) if ids is not None else ():
                likely = _likely(answer.reports[index].top)
                before = answer.tokens[:index]
                if 0 < len(likely.keys() & set(before)) < len(likely):
                    neutral = ([*(ids or ()), *before], {"temperature": 0.0, "max_tokens": 1})
                    again = _likely(self._ask(name, [neutral])[0].reports[0].top)
                    shifts = [
                        likely[token] - again[token] for token in likely.keys() & again.keys()
                    ]
                    if len(shifts) < 2 or np.ptp(shifts) > _PENALIZED:
                        raise ServerError("the reports are those after penalties")
                    return
        raise ServerError("nothing shows whether the reports are those before penalties")

    def _repetition_penalty(self) -> tuple[str, str]:
        raise ServerError("log-probabilities do not determine it")


def _require_texts(answers: Sequence[Completion]) -> None:
    """Raises ``ServerError`` if no answer has a text, as those of a server without a tokenizer."""
    if not any(answer.text.strip() for answer in answers):
        raise ServerError("the answers have no texts")


def _likely(top: Mapping[int, float]) -> dict[int, float]:
    """Returns the tokens whose log-probabilities can be compared."""
    return {token: value for token, value in top.items() if value > _LIKELY}


def _stop_text(text: str) -> str:
    """Returns a few characters from the middle of a text; none if it is too short."""
    starts = range(len(text) // 2, len(text) - _STOP + 1)
    texts = [text[start : start + _STOP] for start in starts]
    return next((stop for stop in texts if stop.strip() and "\ufffd" not in stop), "")


def _is_of_schema(text: str, is_complete: bool) -> bool:
    """Whether a text is an object of the schema, or the beginning of one."""
    if not is_complete:
        return any(written.startswith("".join(text.split())) for written in _OBJECTS)
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return value in [json.loads(written) for written in _OBJECTS] and isinstance(value["a"], bool)


def _is_of_regex(text: str, is_complete: bool) -> bool:
    """Whether a text matches the regular expression, or is the beginning of a match."""
    form = "".join("0" if "0" <= letter <= "9" else letter for letter in text)
    return form == _DIGITS if is_complete else _DIGITS.startswith(form)
