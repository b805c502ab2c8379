"""What the loop relies on in an acceptance rule: the library's own pass, and every check is seen to fail."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny

from eagle3_jax import Draft, Exact, SimulatedAcceptance, Verdict, check_verifier, verify, verify_greedy
from eagle3_jax.acceptance import verification_dice
from eagle3_jax.contract import VERIFIER_CHECKS
from eagle3_jax.sampling import probabilities
from eagle3_jax.types import Warping

LAW = "what it emits has the target's law"
CALLS = itertools.count()


@dataclasses.dataclass(frozen=True)
class Typical:
    """Takes every draft token that the target does not find unlikely (Cai et al., 2024, in its simplest form)."""

    least: float = 0.2

    @property
    def lossless(self) -> bool:
        return False

    def __call__(self, draft: Draft, logits: Any, sampling: Any, keys: Any, *, warping: Any, max_depth: int) -> Verdict:
        if warping is Warping.GREEDY:
            return Exact()(draft, logits, sampling, keys, warping=warping, max_depth=max_depth)
        probs = probabilities(logits, sampling, warping)
        parents = jnp.maximum(draft.parents, 0)
        of_parent = jnp.take_along_axis(probs, parents[:, :, None], axis=1)
        mass = jnp.take_along_axis(of_parent, draft.tokens[:, :, None], axis=2)[:, :, 0]
        wanted = jnp.full(draft.tokens.shape, -1, jnp.int32)
        rows = jnp.arange(wanted.shape[0])[:, None]
        taken = jnp.where(draft.valid & (draft.parents >= 0) & (mass >= self.least), parents, wanted.shape[1])
        wanted = wanted.at[rows, taken].set(draft.tokens, mode="drop")
        verdict = verify_greedy(draft, wanted, max_depth=max_depth)
        last = jnp.take_along_axis(verdict.path, jnp.maximum(verdict.num_accepted - 1, 0)[:, None], axis=1)[:, 0]
        last = jnp.where(verdict.num_accepted > 0, last, 0)
        p = jnp.take_along_axis(probs, last[:, None, None], axis=1)[:, 0]
        token = jax.vmap(jax.random.categorical)(keys, jnp.log(p)).astype(jnp.int32)
        return verdict.replace(next_token=jnp.where(sampling.temperature > 0, token, jnp.argmax(p, axis=-1)))


class Changed:
    """The exact rule with a fault."""

    lossless = True

    def __init__(self, change: Callable[[Verdict, Draft], Any], **members: Any):
        self.change = change
        vars(self).update(members)

    def __call__(self, draft: Draft, *arguments: Any, **options: Any) -> Any:
        return self.change(Exact()(draft, *arguments, **options), draft)


class Eager(Changed):
    """Halves the dice, so that twice as much is accepted."""

    def __init__(self) -> None:
        super().__init__(lambda verdict, draft: verdict)

    def __call__(self, draft: Draft, logits: Any, sampling: Any, keys: Any, *, warping: Any, max_depth: int) -> Verdict:
        if warping is Warping.GREEDY:
            return Exact()(draft, logits, sampling, keys, warping=warping, max_depth=max_depth)
        accept, choose = verification_dice(keys, logits.shape[1], logits.shape[2])
        probs = probabilities(logits, sampling, warping)
        return verify(draft, probs, accept=accept / 2, choose=choose, max_depth=max_depth)


def skip_a_node(verdict: Verdict, draft: Draft) -> Verdict:
    path = jnp.concatenate([verdict.path[:, 1:], jnp.full_like(verdict.path[:, :1], -1)], axis=1)
    return verdict.replace(path=path, num_accepted=jnp.maximum(verdict.num_accepted - 1, 0))


def from_the_draft(verdict: Verdict, draft: Draft) -> Verdict:
    return verdict.replace(next_token=draft.tokens[:, 1])


def on_padding(verdict: Verdict, draft: Draft) -> Verdict:
    """Accepts node 1 whatever it is."""
    path = verdict.path.at[:, 0].set(1).at[:, 1:].set(-1)
    return verdict.replace(path=path, num_accepted=jnp.ones_like(verdict.num_accepted))


def of_the_batch(verdict: Verdict, draft: Draft) -> Verdict:
    return verdict.replace(next_token=jnp.roll(verdict.next_token, 1))


# The check that must fail, and what it must say.
BROKEN: dict[str, tuple[Any, str, str]] = {
    "a rule that does not say whether it is lossless": (
        Changed(lambda verdict, draft: verdict, lossless=None), "keeps the protocol", "lossless is None; expected True"
    ),
    "a forgotten instance": (Exact, "keeps the protocol", "is the class Exact; give an instance"),
    "a path that is too short": (
        Changed(lambda verdict, draft: verdict.replace(path=verdict.path[:, :-1])), "keeps shapes and types",
        r"path as int32\[768, 3\]; expected int32\[768, 4\]",
    ),
    "a path that skips a node": (
        Changed(skip_a_node), "accepts a path of the draft", r"in the path \[.*\] .* is no child of 0"
    ),
    "a path over padding": (Changed(on_padding), "accepts a path of the draft", "node 1 is padding"),
    "a count of its own": (
        Changed(lambda verdict, draft: verdict.replace(num_accepted=verdict.num_accepted + 1)),
        "accepts a path of the draft", "-1 is no child of 3",
    ),
    "a token beyond the vocabulary": (
        Changed(lambda verdict, draft: verdict.replace(next_token=verdict.next_token + 1)), "stays in the vocabulary",
        "its next token is id 5 of 5 tokens",
    ),
    "dice of its own": (
        Changed(lambda verdict, draft: verdict.replace(next_token=(verdict.next_token + next(CALLS)) % 5)),
        "decides from its arguments alone", "tracing it anew decided otherwise",
    ),
    "rows that are mixed": (
        Changed(of_the_batch), "rows are independent of their neighbours", "is decided otherwise when its neighbours"
    ),
    "a next token from the draft": (Changed(from_the_draft), "temperature 0 is greedy", "where . is the likeliest"),
    "the law of a draft": (Changed(from_the_draft), LAW, "the first token does not follow the target"),
    "too much accepted": (Eager(), LAW, r"with a chain .* the first token does not follow the target"),
}  # fmt: skip


def test_the_exact_rule_passes_every_check() -> None:
    report = check_verifier(Exact(), samples=8192)
    assert report.ok, str(report)
    assert str(report).startswith("Exact, lossless=True\n")
    assert re.search(
        r"law: 30720 drafts, 1.\d\d tokens accepted of each; a deviation of 1\d.\d% .* nine times", str(report)
    )


@pytest.mark.parametrize("rule", [SimulatedAcceptance.of_length(2.5, 4), Typical()], ids=["simulated", "typical"])
def test_a_rule_that_does_not_say_it_is_lossless_is_measured_and_not_judged(rule: Any) -> None:
    report = check_verifier(rule, samples=4096)
    assert report.ok, str(report)
    assert [finding.verdict for finding in report.findings] == ["passed"] * 6 + ["skipped"] * 2
    distance = float(re.search(r"first tokens lie (\d\.\d+) \(total variation\)", str(report))[1])
    assert distance > 0.1
    assert f"{type(rule).__name__}, lossless=False" in str(report)


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_is_found_out_for(name: str) -> None:
    rule, check, message = BROKEN[name]
    with tiny.unchecked():
        report = check_verifier(rule, checks=["keeps the protocol", check], samples=8192)
    (failure,) = report.failures
    assert failure.name == check
    assert re.search(message, failure.detail), failure.detail
    assert not report.ok


def test_every_check_has_been_seen_to_fail() -> None:
    assert {check for _, check, _ in BROKEN.values()} == set(VERIFIER_CHECKS)


def test_a_rule_that_accepts_nothing_shows_nothing_of_acceptance() -> None:
    class Refusing(Changed):
        def __call__(self, draft: Draft, *arguments: Any, **options: Any) -> Any:
            root = jnp.arange(draft.tokens.shape[1]) == 0
            return Exact()(draft.replace(valid=draft.valid & root), *arguments, **options)

    (finding,) = check_verifier(Refusing(lambda verdict, draft: verdict), checks=[LAW], samples=1024).findings
    assert finding.verdict == "not run" and "refusals alone" in finding.detail
