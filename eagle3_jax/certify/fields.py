"""Whether a server does what the fields of a request say."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle3_jax.certify.asking import Asker, Request
from eagle3_jax.certify.certificate import Finding
from eagle3_jax.certify.greedy import CERTAIN, LIKELY, greedy
from eagle3_jax.certify.penalties import PENALTIES, bet_on_penalties, count_misses
from eagle3_jax.certify.sampled import Samples, text_before
from eagle3_jax.certify.source import Completion, Refused, ServerError, counted
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
# all objects of the schema
_OBJECTS = ["{" + ",".join(order) + "}" for pair in _PAIRS for order in (pair, pair[::-1])]


def examine_fields(asker: Asker) -> list[Finding]:
    """Sends requests whose answers show whether fields are honoured.

    Args:
        asker: Asks the server. What it refuses does not count as failed.

    Returns:
        A finding for each field.
    """
    return [
        _finding(name, examine, asker.source.facts)
        for name, examine in _Exam(asker).fields().items()
    ]


class _NotHonoured(Exception):
    """A server does not do what a field says; the message is what was seen."""


def _finding(name: str, examine: Callable[[], str], facts: Mapping[str, Any]) -> Finding:
    """Returns what an examination shows."""
    try:
        finding = Finding(name, "passed", examine())
    except _NotHonoured as complaint:
        finding = Finding(name, "failed", str(complaint))
    except Refused as error:
        answered = str(error).rpartition(" answered ")[2]
        return Finding(name, "refused", answered[:_SHOWN])
    except ServerError as error:
        return Finding(name, "not run", str(error))

    # The client does not send a neutral field again that was refused, nor this one then.
    if name in facts.get("refused_fields", ()):
        return Finding(name, "refused", "the server does not take it")
    return finding


class _Ended(NamedTuple):
    """A request whose answer ended by itself, after a number of tokens."""

    request: Request
    length: int


class _Exam:
    """The examinations of all fields. Each returns what was seen.

    Each raises ``_NotHonoured`` where the server does not do what the field says, ``Refused`` where
    it does not take the field, and ``ServerError`` where nothing can be said.
    """

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._is_llama_cpp = getattr(asker.source, "is_llama_cpp", False)

    def fields(self) -> dict[str, Callable[[], str]]:
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

    def _ask(self, name: str, requests: Sequence[Request]) -> list[Completion]:
        """Returns the answers to requests; if the first has none, the others are not sent.

        Raises:
            Refused: One was refused.
            ServerError: One failed.
        """
        answers: list[Completion] = []
        for batch in (requests[:1], requests[1:]):
            send = functools.partial(self._answer_or_refusal, batch)
            results = self._asker.each(f"field {name}", len(batch), send)
            for result in results.values():
                if isinstance(result, Refused):
                    raise result
            if len(results) < len(batch):
                raise ServerError(self._asker.stopped or self._asker.failures[-1])
            answers += results.values()
        return answers

    def _ask_for_tokens(self, name: str, requests: Sequence[Request]) -> list[Completion]:
        """Returns answers that tell their tokens, which are those that are reported.

        Raises:
            Refused: One was refused.
            ServerError: One failed, or has no reports.
        """
        answers = self._ask(name, requests)
        if not all(answer.reports for answer in answers):
            raise ServerError("an answer has no log-probabilities, which would tell its tokens")
        return answers

    def _answer_or_refusal(self, requests: Sequence[Request], row: int) -> Completion | Refused:
        """Returns a refusal as a result, so that it does not count as a failed request."""
        try:
            return self._asker.ask(requests[row])
        except Refused as error:
            return error

    def _greedy(self, number: int, **fields: Any) -> list[Request]:
        """Returns greedy requests, whose prompts take turns."""
        prompts = self._asker.plan.prompts
        return [
            Request(prompts[row % len(prompts)], greedy(_TOKENS) | fields) for row in range(number)
        ]

    def _sampled(self, number: int, **fields: Any) -> list[Request]:
        """Returns sampled requests, whose prompts take turns, each with a seed of its own."""
        seed = self._asker.plan.seed
        requests = self._greedy(number, temperature=1.0, **fields)
        return [request.with_fields(seed=seed + row) for row, request in enumerate(requests)]

    @functools.cached_property
    def _plain(self) -> list[Completion]:
        """Greedy answers to the first prompts."""
        return self._ask("temperature", self._greedy(4))

    @functools.cached_property
    def _ended(self) -> list[_Ended]:
        """Requests whose answers ended by themselves, the longest first."""
        requests = self._sampled(24, max_tokens=_LONGEST, ignore_eos=False)
        for batch in (requests[:8], requests[8:16], requests[16:]):
            answers = self._ask("min_tokens", batch)
            ended = [
                _Ended(request, len(answer.tokens))
                for request, answer in zip(batch, answers, strict=True)
                if answer.finish_reason == "stop" and 0 < len(answer.tokens) < _LONGEST
            ]
            if ended:
                return sorted(ended, key=lambda entry: -entry.length)[:4]
        raise ServerError("no answer ended by itself")

    def _bias(self, bias: dict[int, float]) -> Any:
        """Returns the value of ``logit_bias``."""
        if self._is_llama_cpp:
            return [[token, value] for token, value in bias.items()]
        return {str(token): value for token, value in bias.items()}

    def _logit_bias(self) -> str:
        plain = self._plain[0].tokens
        if not plain or min(plain) < 0:
            raise ServerError("token ids are not told")

        # The most frequent tokens would be written without the bias, and the rarest would not.
        counts = Counter(plain).most_common()
        excluded = {token: -100.0 for token, _ in counts[:8]}
        forced = counts[-1][0]
        exclude = self._bias(excluded)
        force = self._bias({forced: 100.0})
        answers = self._ask_for_tokens(
            "logit_bias",
            self._greedy(1, logit_bias=exclude)
            + self._sampled(3, logit_bias=exclude)
            + self._greedy(1, logit_bias=force)
            + self._sampled(1, logit_bias=force),
        )

        written = [token for answer in answers[:4] for token in answer.tokens if token in excluded]
        if written:
            raise _NotHonoured(f"{counted(len(written), 'token')} came in spite of a bias of -100")
        strange = [token for answer in answers[4:] for token in answer.tokens if token != forced]
        if strange:
            raise _NotHonoured(
                f"{counted(len(strange), 'token')} came in place of the one with a bias of 100"
            )
        return "tokens with a bias of -100 did not come, and only the token with 100 came"

    def _max_tokens(self) -> str:
        limits = [limit for limit in _LIMITS for _ in range(2)]
        pairs = [
            self._greedy(1, max_tokens=limit) + self._sampled(1, max_tokens=limit)
            for limit in _LIMITS
        ]
        # Where the end of a text cannot be ignored, an answer may be shorter.
        is_exact = "ignore_eos" not in self._asker.source.facts.get("refused_fields", ())
        answers = self._ask_for_tokens("max_tokens", [*itertools.chain(*pairs)])

        for limit, answer in zip(limits, answers, strict=True):
            number = len(answer.tokens)
            if number > limit or (is_exact and number < limit):
                raise _NotHonoured(f"max_tokens {limit} gave {counted(number, 'token')}")
        words = "exactly" if is_exact else "at most"
        return f"answers have {words} the {', '.join(map(str, _LIMITS))} tokens of their limits"

    def _min_tokens(self) -> str:
        if self._is_llama_cpp:
            raise ServerError("llama.cpp has no such field")
        fewest = [entry.length + _MORE for entry in self._ended]
        requests = [
            entry.request.with_fields(min_tokens=least, max_tokens=least + _MORE)
            for entry, least in zip(self._ended, fewest, strict=True)
        ]

        answers = self._ask_for_tokens("min_tokens", requests)
        numbers = [len(answer.tokens) for answer in answers]
        for number, least in zip(numbers, fewest, strict=True):
            if number < least:
                raise _NotHonoured(f"min_tokens {least} gave {counted(number, 'token')}")
        return f"{numbers[0]} tokens with it, {self._ended[0].length} without"

    def _ignore_eos(self) -> str:
        numbers = [entry.length + _MORE for entry in self._ended]
        requests = [
            entry.request.with_fields(ignore_eos=True, max_tokens=number)
            for entry, number in zip(self._ended, numbers, strict=True)
        ]

        answers = self._ask_for_tokens("ignore_eos", requests)
        for expected, answer in zip(numbers, answers, strict=True):
            number = len(answer.tokens)
            if number != expected:
                raise _NotHonoured(
                    f"an answer ended after {number} of {expected} tokens ({answer.finish_reason})"
                )
        return f"{numbers[0]} tokens with it, {self._ended[0].length} without"

    def _stop(self) -> str:
        _require_texts(self._plain)
        stops = [_stop_text(answer.text) for answer in self._plain]
        if not all(stops):
            raise ServerError("the greedy texts are too short")
        requests = [
            request.with_fields(stop=[stop])
            for request, stop in zip(self._greedy(len(stops)), stops, strict=True)
        ]
        answers = self._ask("stop", requests)

        forks = 0
        included = 0
        for plain, stop, answer in zip(self._plain, stops, answers, strict=True):
            end = plain.text.index(stop)
            text = answer.text
            if stop in text.removesuffix(stop):
                raise _NotHonoured(f"{text[-32:]!r} goes on behind {stop!r}")
            # A tie may fork a greedy text. One that does not ends before its stop text or with it.
            if not plain.text.startswith(text):
                forks += 1
            elif len(text) not in (end, end + len(stop)) or answer.finish_reason != "stop":
                raise _NotHonoured(
                    f"{text[-32:]!r} ends at character {len(text)} ({answer.finish_reason});"
                    f" {stop!r} is at {end}"
                )
            included += text.endswith(stop)
        if forks == len(stops):
            raise ServerError("the greedy texts are not the same again")
        return (
            f"{counted(len(stops) - forks, 'answer')} ended at the stop text; {included} include"
            f" it, and {forks} differ from the text without it"
        )

    def _n(self) -> str:
        # A seed would be the same for all answers of a request.
        answers = self._ask("n", self._greedy(2, temperature=1.0, n=4))
        numbers = [1 + len(answer.more_texts) for answer in answers]
        for number in numbers:
            if number != 4:
                raise _NotHonoured(f"n 4 gave {counted(number, 'answer')}")
        _require_texts(answers)

        # Each of three more answers repeats the first with its probability.
        for answer in answers:
            p_value = 3 * math.exp(answer.log_prob)
            if answer.text in answer.more_texts and p_value < _RARE:
                raise _NotHonoured(f"answers of the same request are equal (p = {p_value:.1g})")
        return "4 answers came"

    def _response_format(self) -> str:
        if self._is_llama_cpp and self._asker.source.scoring != "none":
            fields: dict[str, Any] = {"json_schema": _SCHEMA}
        else:
            schema = {"name": "pair", "strict": True, "schema": _SCHEMA}
            fields = {"response_format": {"type": "json_schema", "json_schema": schema}}
        return self._constrained("response_format", fields, "the JSON schema", _is_of_schema)

    def _regex(self) -> str:
        rule = " ".join(f'"{letter}"' if letter == "-" else "[0-9]" for letter in _DIGITS)
        # vLLM and SGLang ignore the other's field.
        both = {"structured_outputs": {"regex": _REGEX}, "regex": _REGEX}
        fields = {"grammar": f"root ::= {rule}"} if self._is_llama_cpp else both
        return self._constrained("regex", fields, _REGEX, _is_of_regex)

    def _constrained(
        self, name: str, fields: dict[str, Any], rule: str, is_match: Callable[[str, bool], bool]
    ) -> str:
        """Examines sampled answers that a grammar constrains.

        One that is cut by its length may go on rightly.
        """
        _require_texts(self._plain)
        requests = self._sampled(8, max_tokens=2 * _TOKENS, ignore_eos=False, **fields)
        answers = self._ask(name, requests)

        are_complete = [answer.finish_reason == "stop" for answer in answers]
        wrong = [
            answer.text
            for answer, is_complete in zip(answers, are_complete, strict=True)
            if not is_match(answer.text, is_complete)
        ]
        if wrong:
            raise _NotHonoured(
                f"{len(wrong)} of {len(answers)} answers do not match {rule}, such as"
                f" {wrong[0][:40]!r}"
            )
        _require_texts(answers)
        number = sum(are_complete)
        cut = len(answers) - number
        return f"{counted(number, 'answer')} match {rule}; {cut} were cut off and match so far"

    def _min_p(self) -> str:
        answers = self._ask_for_tokens("min_p", self._sampled(32, max_tokens=32, min_p=_MIN_P))
        reports = [report for answer in answers for report in answer.reports if report.is_readable]
        largest = np.array([max(report.top.values()) for report in reports])
        limits = largest + math.log(_MIN_P) - CERTAIN

        log_probs = np.array([report.log_prob for report in reports])
        excluded = int((log_probs < limits).sum())
        if excluded:
            raise _NotHonoured(
                f"{excluded} of {len(reports)} tokens are less likely than {_MIN_P} of the"
                " likeliest"
            )

        # Reports after min-p list nothing below the limit but what has no probability.
        if not any(
            LIKELY < value < limit
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
            f"no token came that it excludes; without it {expected:.0f} of {len(reports)} are"
            " expected"
        )

    def _penalty(self, name: str) -> str:
        if self._is_llama_cpp:
            raise ServerError("llama.cpp counts tokens of the prompt, too")
        fields = {"max_tokens": 2 * _TOKENS, name: PENALTIES[name]}
        of_greedy = self._greedy(8, **fields)
        of_sampled = self._sampled(16, **fields)
        # A batch of both kinds is another question.
        plain_answers = self._ask_for_tokens(name, of_greedy)
        samples = self._ask_for_tokens(name, of_sampled)

        number = self._asker.plan.num_reported
        misses, shown = count_misses(plain_answers, name, number)
        bet, nats = bet_on_penalties(samples, name, number)
        if shown < _FEWEST_SHOWN and nats < _LEAST_NATS:
            raise ServerError(
                f"too few repeated tokens: ignoring it would change {shown} greedy tokens"
            )
        self._refuse_processed(name, of_greedy + of_sampled, plain_answers + samples)

        if misses[""]:
            best = min(misses, key=lambda words: misses[words])
            words = f"; they are as if {best}" if best else ""
            raise _NotHonoured(
                f"{counted(misses[''], 'greedy token')} would not be the likeliest with it{words}"
            )
        detail = f"greedy answers apply it; ignoring it would change {counted(shown, 'token')}"
        if nats < _LEAST_NATS:
            return detail
        if bet.p_value >= _RARE:
            return f"{detail}. Sampled answers apply it too, with {nats:.0f} nats of evidence"
        if self._samples_follow_reports:
            raise _NotHonoured(f"sampled answers are as if {bet.detail} (p = {bet.p_value:.1g})")
        return f"{detail}. Sampled tokens do not follow their reports without it either"

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
        self, name: str, requests: Sequence[Request], answers: Sequence[Completion]
    ) -> None:
        """Refuses reports after penalties.

        Those of a token that a penalty counts differ from those without it.

        Raises:
            ServerError: They do, or it cannot be seen.
        """
        for request, answer in zip(requests, answers, strict=True):
            for index in range(len(answer.tokens) - 1, 0, -1):
                text = text_before(request.prompt, answer, index)
                likely = _likely(answer.reports[index].top)
                counted = likely.keys() & set(answer.tokens[:index])
                # Counted tokens must shift against others, so some of each are needed.
                if text is not None and 0 < len(counted) < len(likely):
                    (neutral,) = self._ask_for_tokens(name, [Request(text, greedy(1))])
                    again = _likely(neutral.reports[0].top)
                    shifts = [
                        likely[token] - again[token] for token in likely.keys() & again.keys()
                    ]
                    if len(shifts) < 2 or np.ptp(shifts) > _PENALIZED:
                        raise ServerError("the reports are those after penalties")
                    return
        raise ServerError("nothing shows whether the reports are those before penalties")

    def _repetition_penalty(self) -> str:
        raise ServerError("log-probabilities do not determine it")


def _require_texts(answers: Sequence[Completion]) -> None:
    """Raises ``ServerError`` if no answer has a text, as those of a server without a tokenizer."""
    if not any(answer.text.strip() for answer in answers):
        raise ServerError("the answers have no texts")


def _likely(top: Mapping[int, float]) -> dict[int, float]:
    """Returns the tokens whose log-probabilities can be compared."""
    return {token: value for token, value in top.items() if value > LIKELY}


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
    # Every digit counts as 0; those of other scripts do not.
    form = "".join("0" if "0" <= letter <= "9" else letter for letter in text)
    return form == _DIGITS if is_complete else _DIGITS.startswith(form)
