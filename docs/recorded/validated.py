"""The record of the validation in docs/validation.md, out of the JSON of one complete run.

    pytest validation --complete --every-family --aot cuda:h200 --report-dir DIR    # copy DIR/report.json to RECORD
    python docs/recorded/write_tables.py

A test refuses a record that lacks a check of today's source. `make nightly` refuses one of code older than
:data:`MOST_COMMITS`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from validation.runs import Check, Report, Verdict, checks_in, load  # noqa: E402

RECORD = ROOT / "validation" / "results" / "cpu-amd-epyc-2-cores.json"
MOST_COMMITS = 50  # that changed eagle3_jax/ or conversion/ since the record's commit; more, and it is too old

# What each level would have seen, and what it cannot see. {sees} is what the record says of itself.
SCOPE = {
    "L0": "any deviation of the rule, however small: distributions are enumerated in rational numbers. Not: rounding, "
    "the compiled loop",
    "L1": "a frequency off by more than 1/4,096, by injected randomness; at 128,256 tokens a threshold of an "
    "acceptance rule that is off by 1e-6 of the emitted distribution. Not: dependence between samples",
    "L2": "{sees}. Not: what leaves every probability of a token given its context unchanged",
    "L3": "one bit of a key, a value or a token that a refused draft left behind. Not: an error that plain decoding of "
    "the same shape makes as well",
    "L4": "one token that is neither the reference's choice nor approximately tied with it, and ties that are more "
    "frequent than without a drafter",
    "L5": "in float32 one token among those scored that vLLM, or this library, would not have chosen; in bfloat16 one "
    "more than 8 units in the last place below, and more ties than twice what plain decoding of each engine has with "
    "itself. Not: errors common to both",
    "L6": "{sees}. Not: what leaves every score unchanged",
    "L7": "whether tasks are solved as often with speculation as without; it needs a GPU",
    "L8": "one round that accepts another number of tokens than vLLM",
    "L9": "a speed above what was measured of the memory in the same run, and a program compiled during a measurement",
    "HF": "logits or features that differ by more than float32 rounds. Not: published checkpoints",
    "JV": "a draft of ours that vLLM accepts otherwise than we do",
    "AOT": "host work, copies of caches and launches above a budget, in programs compiled for accelerators",
}


class Record:
    """A complete run, and how the page quotes it."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def checks(self, level: str, words: str) -> list[Check]:
        """The checks of a level that passed and whose name begins with these words.

        Raises:
            ValueError: There are none.
        """
        passed = [one for one in self.report.checks if one.level == level and one.verdict is Verdict.PASSED]
        if found := [check for check in passed if check.name.startswith(words)]:
            return found
        raise ValueError(f"{level}: no check {words!r} passed")

    def total(self, level: str, words: str, name: str) -> int:
        """The sum of one number over checks."""
        return sum(check.numbers[name] for check in self.checks(level, words))

    def origin(self) -> str:
        """Whose record this is."""
        of = self.report.environment["versions"]
        where = self.report.environment
        commit = where["git"]["commit"]
        versions = ", ".join(f"{name} {of[name]}" for name in ("jax", "flax", "transformers"))
        return (
            f"Version {of['eagle3_jax']}, commit `{commit[:10]}`, {self.report.started[:10]}: {where['cpu']['cores']} "
            f"cores of an {where['cpu']['model']}, Python {where['python']}, {versions}, vLLM {where['vllm']['vllm']}. "
            f"Every figure of this section is from [`{RECORD.name}`](../validation/results/{RECORD.name})."
        )

    def _greedy(self) -> str:
        exact = ("the pair agrees with vllm token for token", "a random model of an odd shape")
        (rounded,) = self.checks("L5", "the pair agrees with vllm in bfloat16")
        return (
            "**Greedy, both directions.** vLLM scores our text (plain, n-gram, chain, tree) and we score vLLM's: "
            f"{sum(self.total('L5', words, 'distinct_positions') for words in exact):,} distinct positions in float32 "
            f"({sum(self.total('L5', words, 'tokens_scored') for words in exact):,} scorings), the pair and three "
            f"random models of odd shapes: {sum(self.total('L5', words, 'disagreements') for words in exact)} "
            f"disagreements, {sum(self.total('L5', words, 'ties') for words in exact)} ties. In bfloat16 "
            f"{rounded.numbers['distinct_positions']:,} ({rounded.numbers['tokens_scored']:,}): "
            f"{rounded.numbers['ties']} ties within two units in the last place, {rounded.numbers['disagreements']} "
            "disagreements."
        )

    def _bits(self) -> str:
        kept = self.total("L3", "refused drafts leave every bit", "bytes_compared")
        return (
            f"**Bit for bit.** {kept / 1e6:.0f} MB of caches after refused drafts are equal in every bit, and "
            f"{self.total('L3', 'speculation equals plain', 'tokens'):,} greedy tokens equal plain decoding in blocks "
            "of the same size, in float32, bfloat16 and `mixed`."
        )

    def _acceptance(self) -> str:
        words = "every round accepts what vllm accepts"
        variations = "a head of every variation"
        apart = max(abs(check.numbers["draft_logits_apart"]) for check in self.checks("L8", variations))
        return (
            f"**Acceptance.** K = 1 to 7: each of {self.total('L8', words, 'rounds'):,} rounds accepts as many tokens "
            f"as vLLM, and all counters are equal; so do {self.total('L8', variations, 'rounds'):,} rounds of "
            f"{len(self.checks('L8', variations))} kinds of EAGLE-3 head, whose draft logits, read inside vLLM, agree "
            f"to {apart * 1e5:.1f}·10⁻⁵."
        )

    def _distribution(self) -> str:
        sequences, tokens = (self.total("L2", words, "tests") for words in ("sequences follow", "millions of tokens"))
        return (
            "**Output distribution.** For every way to draft, what the compiled loop samples is compared with a closed "
            f"form: the probabilities of whole sequences in {sequences} tests, and those of each token after its "
            f"context, from millions of tokens, in {tokens}. The table of levels has the deviation that this would "
            "have detected."
        )

    def _sampling(self) -> str:
        sampled = [one for one in self.checks("L6", "sampled tokens follow") if one.numbers["τ at T=1"] > 1]
        return (
            f"**Sampling on the shipped pair.** {sum(one.numbers['tokens'] for one in sampled):,} tokens of "
            f"{', '.join(_case(one) for one in sampled)} at six settings against transformers' distribution: largest "
            f"|z| {max(one.numbers['largest_z'] for one in sampled):.1f}. The CPU build of vLLM 0.32.0 samples wrongly "
            "under speculation; the suite detects that and compares with a repaired vLLM."
        )

    def levels(self) -> Iterator[str]:
        """The table of verdicts."""
        yield "| level | verdict | checks | what it detects, and what not |"
        yield "|---|---|---|---|"
        for name, result in self.report.levels.items():
            reason = result.reason.splitlines()[0].replace("|", "\\|") if result.reason else ""
            verdict = f"{result.verdict} ({reason})" if reason else str(result.verdict)
            scope = SCOPE[name].format(sees=_joined(result.sees) or "nothing yet")
            yield f"| {name} | {verdict} | {len(result.checks)} | {scope} |"

    def methods(self) -> Iterator[str]:
        """The table of drafting methods next to vLLM."""
        from validation.drafters import METHODS

        drafted = {name.replace("_", " "): method.num_speculative_tokens for name, method in METHODS.items()}
        yield "| method | K | rounds | tokens per round | the injected error, and the tokens per round with it |"
        yield "|---|---|---|---|---|"
        for check in self.checks("L8", "every method accepts what vllm accepts"):
            name = _case(check)
            numbers = check.numbers
            ((error, found),) = ((key[5:], one) for key, one in numbers.items() if key.startswith("with "))
            yield (
                f"| {name} | {drafted[name]} | {numbers['rounds']} | "
                f"{numbers['mean_acceptance_length']:.2f} | {error}: {found:.2f} |"
            )

    def families(self) -> Iterator[str]:
        """The table of model families next to vLLM."""
        from validation.families import FAMILIES

        families = {name.replace("_", " "): family for name, family in FAMILIES.items()}
        counts = {_case(check): check for check in self.checks("L8", "a draft for the family")}
        yield "| family | in | drafts | tokens scored | disagreements | ties | rounds | tokens per round |"
        yield "|---|---|---|---|---|---|---|---|"
        for check in self.checks("L5", "a target of the family"):
            name = _case(check)
            found = check.numbers
            drafts = "EAGLE-3" if families[name].with_heads else "n-grams"
            rounds = "not compared | "
            if name in counts:
                parity = counts[name].numbers
                rounds = f"{parity['rounds']} | {parity['mean_acceptance_length']:.2f}"
            yield (
                f"| `{families[name].recipe.model_type}` | {families[name].dtype} | {drafts} | {found['tokens']:,} | "
                f"{found['disagreements']} | {found['ties']} | {rounds} |"
            )

    def text(self) -> str:
        """What is on the page."""
        claims = self._greedy, self._bits, self._acceptance, self._distribution, self._sampling
        return "\n".join(
            [
                self.origin(),
                "",
                *(f"- {claim()}" for claim in claims),
                "\n### Level by level\n\nThe last column names the "
                "deviation that a check detects with 90 % power, or the bug that was injected and detected.\n",
                *self.levels(),
                "\n### Every drafting method, next to vLLM\n",
                *self.methods(),
                "\n### Every family of targets that vLLM runs on a CPU, next to vLLM\n",
                *self.families(),
            ]
        )


def _case(check: Check) -> str:
    (case,) = re.findall(r"\[(.*)\]", check.name)
    return case.replace("drawn", "sampled")


def _joined(lines: Iterable[str]) -> str:
    """Sentences that differ in their numbers alone as one sentence with ranges."""
    number = re.compile(r"\d+(?:\.\d+)?")
    alike: dict[str, list[list[str]]] = {}
    for line in lines:
        line = line.partition(";")[0].replace("% ", " % ").replace("  %", " %")
        alike.setdefault(number.sub("{}", line), []).append(number.findall(line))
    spans = lambda rows: [(min(column, key=float), max(column, key=float)) for column in zip(*rows, strict=True)]
    return "; ".join(
        template.format(*(low if low == high else f"{low} to {high}" for low, high in spans(rows)))
        for template, rows in alike.items()
    )


def missing(report: Report) -> set[tuple[str, str]]:
    """Level and name of the checks in today's source that the record lacks."""
    return checks_in(ROOT / "validation", gpu=report.gpu) - {check.kind for check in report.checks}


def text() -> str:
    """What is between the marks of the page."""
    return Record(load(RECORD)).text()
