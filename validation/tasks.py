"""Benchmark questions, and whether an answer is right."""

from __future__ import annotations

import re

from scipy import stats

from eagle3_jax.prompts.benchmark import Prompt
from validation.subject import Subject

_MOST = 200
_REHEARSED = 8
_CONFIDENCE = 0.99
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


def reference_number(reference: str) -> str | None:
    """GSM8K's answer: the number after ``####``; ``None`` where a reference has none."""
    _, mark, answer = reference.rpartition("####")
    numbers = _NUMBER.findall(answer)
    return _plain(numbers[0]) if mark and numbers else None


def answered_number(text: str) -> str | None:
    """The number a text ends on: after ``####`` if it says so, else its last one."""
    return reference_number(text) or next(
        (_plain(number) for number in reversed(_NUMBER.findall(text))), None
    )


def is_right(text: str, reference: str) -> bool:
    """Whether a text ends on the number of the reference."""
    number = reference_number(reference)
    return number is not None and answered_number(text) == number


def _plain(number: str) -> str:
    """``$1,200.00`` as ``1200``."""
    digits = number.replace("$", "").replace(",", "")
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def questions(subject: Subject, *, rehearsal: bool) -> list[Prompt]:
    """Prompts whose right answer is a number, as those of GSM8K.

    Raises:
        ValueError: There are none, or the target is not tuned to answer questions.
    """
    if rehearsal:  # any prompt will do: the flow is tried, and no answer need be right
        return subject.prompts[:_REHEARSED]
    if not subject.has_chat_template:
        raise ValueError(
            f"{subject.name} is not tuned to answer questions: its target has no chat template"
        )
    prompts = [prompt for prompt in subject.prompts if reference_number(prompt.reference or "")]
    if not prompts:
        raise ValueError(
            "no prompt has a number as its reference: give --prompts FILE, such as GSM8K's"
            " test.jsonl"
        )
    return prompts[:_MOST]


def discordant_interval(only_with: int, only_without: int) -> tuple[float, float]:
    """Share of speculation among the questions that only one of both got right.

    It is 1/2 if speculation makes no difference.

    The test is paired, as McNemar's: questions that both got right, or both wrong, say nothing
    about a difference.
    """
    low, high = stats.binomtest(only_with, only_with + only_without).proportion_ci(_CONFIDENCE)
    return float(low), float(high)
