"""The record of the validation in docs/validation.md, out of the JSON of one complete run.

    FAMILIES=all make nightly PARTS=validation
    cp build/nightly/validation/report.json validation/results/cpu-amd-epyc-2-cores.json
    python docs/recorded/write_tables.py

A test fails if the record lacks a check of today's source.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator

import release
from page_tables import RESULTS, ROOT, cores, table, version

sys.path.insert(0, str(ROOT))

from validation.runs import Check, Report, Verdict, checks_in, load

RECORD = RESULTS / "cpu-amd-epyc-2-cores.json"

# The errors that each level detects, and those that it cannot detect. {sees} is quoted from the
# record.
SCOPE = {
    "L0": (
        "any deviation of the rule, however small: distributions are enumerated in rational"
        " numbers. Not: rounding, the compiled loop"
    ),
    "L1": (
        "a frequency off by more than 1/4,096, by injected randomness; at 128,256 tokens a"
        " threshold of an acceptance rule that is off by 1e-6 of the emitted distribution. Not:"
        " dependence between samples"
    ),
    "L2": "{sees}. Not: what leaves every probability of a token given its context unchanged",
    "L3": (
        "one bit of a key, a value or a token that a refused draft left behind. Not: an error that"
        " plain decoding of the same shape makes as well"
    ),
    "L4": (
        "one token that is neither the reference's choice nor approximately tied with it, and ties"
        " that are more frequent than without a drafter"
    ),
    "L5": (
        "in float32 one token among those scored that vLLM, or this library, would not have chosen;"
        " in bfloat16 one more than 8 units in the last place below, and more than twice the ties"
        " between two plain decodings of one engine. Not: errors common to both"
    ),
    "L6": "{sees}. Not: a deviation that leaves every tested score unchanged",
    "L7": "whether tasks are solved as often with speculation as without; it needs a GPU",
    "L8": "one round that accepts another number of tokens than vLLM",
    "L9": (
        "a speed above what was measured of the memory in the same run, and a program compiled"
        " during a measurement"
    ),
    "HF": "logits or features that differ by more than float32 rounds. Not: published checkpoints",
    "JV": "a draft of ours that vLLM accepts otherwise than we do",
    "AOT": (
        "host work, copies of caches and launches above a budget, in programs compiled for"
        " accelerators"
    ),
}


class Record:
    """The tables of a complete run."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def checks(self, level: str, words: str) -> list[Check]:
        """Returns the checks of a level that passed and whose name begins with these words.

        Raises:
            ValueError: There are none.
        """
        passed = [
            check
            for check in self.report.checks
            if check.level == level and check.verdict is Verdict.PASSED
        ]
        if chosen := [check for check in passed if check.name.startswith(words)]:
            return chosen
        raise ValueError(f"{level}: no check {words!r} passed")

    def total(self, level: str, words: str, name: str) -> int:
        """Returns the sum of one number over checks."""
        return sum(check.numbers[name] for check in self.checks(level, words))

    def origin(self) -> str:
        """Names the run."""
        about = self.report.environment
        versions = ", ".join(
            f"{name} {about['versions'][name]}" for name in ("jax", "flax", "transformers")
        )
        return (
            f"{version(about)}, {self.report.started[:10]}: {cores(about)}, Python"
            f" {about['python']}, {versions}, vLLM {about['vllm']['vllm']}. Every figure of this"
            f" section is from [`{RECORD.name}`](../validation/results/{RECORD.name})."
        )

    def levels(self) -> Iterator[list[str]]:
        """Yields the verdict of each level."""
        for name, result in self.report.levels.items():
            reason = result.reason.splitlines()[0].replace("|", "\\|") if result.reason else ""
            verdict = f"{result.verdict} ({reason})" if reason else str(result.verdict)
            yield [
                name,
                verdict,
                f"{len(result.checks)}",
                SCOPE[name].format(sees=_joined(result.sees) or "nothing yet"),
            ]

    def methods(self) -> Iterator[list[str]]:
        """Yields the comparison of each drafting method with vLLM."""
        from validation.drafters import METHODS

        for check in self.checks("L8", "every method accepts what vllm accepts"):
            name = _case(check)
            (key,) = (key for key in check.numbers if key.startswith("with "))
            error = f"{key.removeprefix('with ')}: {check.numbers[key]:.2f}"
            drafted = METHODS[name.replace(" ", "_")].num_speculative_tokens
            yield [name, f"{drafted}", *_rounds(check), error]

    def families(self) -> Iterator[list[str]]:
        """Yields the comparison of each family of targets with vLLM."""
        from validation.families import FAMILIES

        parity = {_case(check): check for check in self.checks("L8", "a draft for the family")}
        for check in self.checks("L5", "a target of the family"):
            name = _case(check)
            family = FAMILIES[name.replace(" ", "_")]
            drafts = "EAGLE-3" if family.with_heads else "n-grams"
            counts = [f"{check.numbers[key]:,}" for key in ("tokens", "disagreements", "ties")]
            rounds = _rounds(parity[name]) if name in parity else ["not compared", ""]
            yield [f"`{family.recipe.model_type}`", family.dtype, drafts, *counts, *rounds]


def _rounds(check: Check) -> list[str]:
    return [f"{check.numbers['rounds']}", f"{check.numbers['mean_acceptance_length']:.2f}"]


def _case(check: Check) -> str:
    (case,) = re.findall(r"\[(.*)\]", check.name)
    return case


def _joined(lines: Iterable[str]) -> str:
    """Sentences that differ in their numbers alone as one sentence with ranges."""
    number = re.compile(r"\d+(?:\.\d+)?")
    sentences: dict[str, list[list[str]]] = {}
    for line in lines:
        line = line.partition(";")[0].replace("% ", " % ").replace("  %", " %")
        sentences.setdefault(number.sub("{}", line), []).append(number.findall(line))

    return "; ".join(
        template.format(*(_range(column) for column in zip(*rows, strict=True)))
        for template, rows in sentences.items()
    )


def _range(numbers: tuple[str, ...]) -> str:
    low = min(numbers, key=float)
    high = max(numbers, key=float)
    return low if low == high else f"{low} to {high}"


def missing(report: Report) -> set[tuple[str, str]]:
    """Level and name of the checks in today's source that the record lacks."""
    return checks_in(ROOT / "validation", gpu=report.gpu) - {check.kind for check in report.checks}


def parts() -> dict[str, dict[str, str]]:
    """Returns the tables by page and mark."""
    run = Record(load(RECORD))

    error = "the injected error, and the tokens per round with it"
    families = [
        "family",
        "in",
        "drafts",
        "tokens scored",
        "disagreements",
        "ties",
        "rounds",
        "tokens per round",
    ]

    marked = {
        "record": run.origin(),
        "levels": table(
            ["level", "verdict", "checks", "what it detects, and what not"], [*run.levels()]
        ),
        "methods": table(["method", "K", "rounds", "tokens per round", error], [*run.methods()]),
        "families": table(families, [*run.families()]),
        "records": release.table_of_records(),
    }
    return {"docs/validation.md": marked}
