"""The contract of acceptance rules: the library's keep it, and each check finds a broken one."""

from __future__ import annotations

import itertools
import re
import unittest.mock
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import tiny
from faults import Fault

from eagle3_jax import (
    BlockVerification,
    Draft,
    Exact,
    SimulatedAcceptance,
    TypicalAcceptance,
    Verdict,
    acceptance,
    check_verifier,
    num_digits,
    uniforms,
    verify,
    verify_greedy,
)
from eagle3_jax.acceptance import verification_uniforms
from eagle3_jax.sampling import draw, probabilities, row_keys
from eagle3_jax.types import SamplingMode

DISTRIBUTION = "what it emits has the target's distribution"
PATH = "accepts a path of the draft"
RARE = "what is rare is as rare as the target has it"
CALLS = itertools.count()


class Changed:
    """The exact rule with a fault."""

    lossless = True

    def __init__(self, change: Callable[[Verdict, Draft], Any], **members: Any):
        self.change = change
        vars(self).update(members)

    def __call__(self, draft: Draft, *arguments: Any, **options: Any) -> Any:
        return self.change(Exact()(draft, *arguments, **options), draft)


class Altered:
    """The exact rule, whose uniforms, keys, sampling or distributions are changed on the way."""

    lossless = True

    accept = keys = sampling = sampling_mode = sampled = staticmethod(lambda values: values)

    def __init__(self, **members: Any):
        vars(self).update(members)

    def __call__(
        self,
        draft: Draft,
        logits: Any,
        sampling: Any,
        keys: Any,
        *,
        sampling_mode: Any,
        max_depth: int,
    ) -> Verdict:
        if sampling_mode is SamplingMode.GREEDY:
            return Exact()(
                draft, logits, sampling, keys, sampling_mode=sampling_mode, max_depth=max_depth
            )
        accept, choose = verification_uniforms(self.keys(keys), logits.shape[1], logits.shape[2])
        probs = probabilities(logits, self.sampling(sampling), self.sampling_mode(sampling_mode))

        def changed(p: Any, uniforms: Any) -> Any:
            return draw(self.sampled(p), uniforms)

        with unittest.mock.patch.object(acceptance, "draw", changed):
            return verify(
                draft, probs, accept=self.accept(accept), choose=choose, max_depth=max_depth
            )


def skip_a_node(verdict: Verdict, draft: Draft) -> Verdict:
    path = jnp.concatenate([verdict.path[:, 1:], jnp.full_like(verdict.path[:, :1], -1)], axis=1)
    return verdict.replace(path=path, num_accepted=jnp.maximum(verdict.num_accepted - 1, 0))


def from_the_draft(verdict: Verdict, draft: Draft) -> Verdict:
    return verdict.replace(next_token=draft.tokens[:, 1])


def of_the_batch(verdict: Verdict, draft: Draft) -> Verdict:
    return verdict.replace(next_token=jnp.roll(verdict.next_token, 1))


def warmed(sampling: Any) -> Any:
    mixed = jnp.any(sampling.temperature > 0) & (sampling.temperature == 0)
    return sampling.replace(temperature=jnp.where(mixed, 1.0, sampling.temperature))


def coarse(uniforms: Any) -> Any:
    return jnp.floor(uniforms * 2**12) / 2**12


# Samples with which the statistical checks detect these faults.
ENOUGH = {DISTRIBUTION: 16384, RARE: 32768}

BROKEN: dict[str, Fault] = {
    "a rule that does not say whether it is lossless": Fault(
        Changed(lambda verdict, draft: verdict, lossless=None), "keeps the protocol", "lossless is None; expected True"
    ),
    "a path that is too short": Fault(
        Changed(lambda verdict, draft: verdict.replace(path=verdict.path[:, :-1])), PATH,
        r"path as int32\[768, 11\]; expected int32\[768, 12\]",
    ),
    "a path that skips a node": Fault(
        Changed(skip_a_node), PATH, r"in the path \[.*\] .* is not a child of 0"
    ),
    "a token beyond the vocabulary": Fault(
        Changed(lambda verdict, draft: verdict.replace(next_token=verdict.next_token + 1)), PATH,
        "its next token is id 80 of 80 tokens",
    ),
    "its own random numbers": Fault(
        Changed(lambda verdict, draft: verdict.replace(next_token=(verdict.next_token + next(CALLS)) % 5)),
        "decides from its arguments alone", "tracing it anew gave other verdicts",
    ),
    "rows that are mixed": Fault(
        Changed(of_the_batch), "rows are independent of their neighbours", "gets another verdict when its neighbours"
    ),
    "a next token from the draft": Fault(Changed(from_the_draft), "temperature 0 is greedy", r"where \d+ is the likeliest"),
    "uniforms that are too low": Fault(
        Altered(accept=lambda uniforms: uniforms * 0.98), DISTRIBUTION, "does not follow the target"
    ),
    "next tokens that are too likely": Fault(
        Altered(sampled=lambda p: p**1.05), RARE, "the frequency of rare tokens does not follow the target"
    ),
    "a fault from node 7 on": Fault(
        Altered(accept=lambda uniforms: uniforms.at[:, 7:].multiply(0.5)), DISTRIBUTION,
        "with a tree .* does not follow",
    ),
    "a chain without truncation": Fault(
        Altered(sampling_mode=lambda _: SamplingMode.TEMPERATURE, chains_only=True), DISTRIBUTION,
        "under truncation .* outcomes of probability 0",
    ),
    "greedy rows that are sampled next to others": Fault(
        Altered(sampling=warmed), "temperature 0 is greedy", r"in a mixed batch .* where \d+ is the likeliest"
    ),
    "uniforms for two rows": Fault(
        Altered(keys=lambda keys: keys[jnp.arange(len(keys)) // 2 * 2]), "rows are independent of their neighbours",
        "in rows 1 apart that depend on each other",
    ),
    "the same uniforms in every round": Fault(
        Altered(keys=lambda keys: row_keys(0, len(keys))), "rows are independent of their neighbours",
        "in a row in successive rounds that depend",
    ),
    "uniforms of 12 bits that accept": Fault(
        Altered(accept=coarse), RARE, r"the number of accepted rare tokens does not follow the target: .* expected 3.9"
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", [Exact(), BlockVerification()], ids=["exact", "block"])
def test_an_exact_rule_passes_every_check(rule: Any) -> None:
    report = check_verifier(rule, samples=8192)
    assert report.ok, str(report)
    assert str(report).startswith(f"{type(rule).__name__}, lossless=True\n")
    assert re.search(
        r"distribution: \d+ drafts of up to 1[26] nodes, [23].\d\d tokens accepted of each; first"
        r" tokens [23]\d.\d% "
        r"off \(rms\), all drafted tokens [12].\d% too frequent or all tokens sampled from "
        r"p\^1.0[23]\d would be detected",
        str(report),
    )
    assert "32256 drafts; uniforms of 10 bits would be detected" in str(report)


class OneLook:
    """Samples a token after every node and follows the draft while it agrees.

    It reads temperatures, and no mode.
    """

    lossless = True

    def __call__(
        self,
        draft: Draft,
        logits: Any,
        sampling: Any,
        keys: Any,
        *,
        sampling_mode: Any,
        max_depth: int,
    ):
        p = probabilities(logits, sampling, sampling_mode)
        digits = uniforms(keys, p.shape[1] * num_digits(p.shape[2])).reshape(*p.shape[:2], -1)
        return verify_greedy(draft, draw(p, digits), max_depth=max_depth)


def test_a_greedy_batch_has_temperature_zero() -> None:
    assert check_verifier(OneLook(), checks=["temperature 0 is greedy"]).ok


@pytest.mark.parametrize(
    "rule",
    [SimulatedAcceptance.of_length(2.5, 12), TypicalAcceptance(draws_next=True)],
    ids=["simulated", "typical"],
)
def test_a_lossy_rule_is_measured_and_not_judged(rule: Any) -> None:
    report = check_verifier(rule, samples=4096)
    assert report.ok, str(report)
    assert [finding.verdict for finding in report.findings] == ["passed"] * 4 + ["skipped"] * 3
    distance = float(re.search(r"first tokens are (\d\.\d+) \(total variation\)", str(report))[1])
    assert distance > 0.1
    assert f"{type(rule).__name__}, lossless=False" in str(report)


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_is_found_out_for(name: str) -> None:
    fault = BROKEN[name]
    with tiny.unchecked():
        report = check_verifier(
            fault.part, checks=fault.checks, samples=ENOUGH.get(fault.check, 1024)
        )
    fault.require_found(report)


def test_a_rule_that_accepts_nothing_is_not_a_pass() -> None:
    class Refusing(Changed):
        def __call__(self, draft: Draft, *arguments: Any, **options: Any) -> Any:
            root = jnp.arange(draft.tokens.shape[1]) == 0
            return Exact()(draft.replace(valid=draft.valid & root[None]), *arguments, **options)

    (finding,) = check_verifier(
        Refusing(lambda verdict, draft: verdict), checks=[DISTRIBUTION], samples=1024
    ).findings
    assert finding.verdict == "not run" and "refusals alone" in finding.detail
