"""L4: every token in low precision is the reference's choice or nearly tied with it, as often as in plain decoding."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from eagle3_jax.rivals.vllm.bridge import Scored
from validation.checks import Check
from validation.decodings import (
    CHAIN,
    Decoding,
    drafting,
    first_differences,
    forget_programs,
    new_tokens_of,
    some_prompts,
)
from validation.forcing import by_blocks, reference
from validation.margin import TIE_ULPS, Agreement, Control, classify, tie_tolerance, wrong_tolerance
from validation.subject import Subject


@pytest.fixture(scope="module", autouse=True)
def _drop_programs() -> Iterator[None]:
    yield
    forget_programs()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "margin_dtype" in metafunc.fixturenames:
        on_gpu = metafunc.config.getoption("--gpu") and not metafunc.config.getoption("--rehearse")
        metafunc.parametrize("margin_dtype", ("bfloat16", "float32") if on_gpu else ("mixed", "bfloat16"))


@pytest.mark.level("L4")
def test_every_token_is_the_reference_choice_or_a_tie(
    check: Check, subject: Subject, setting: Any, margin_dtype: str
) -> None:
    """Tokens of a speculative run, judged one by one along the same text; ties no more often than without a drafter."""
    dtype = margin_dtype
    target, head = subject.pair(dtype)
    count, limit = _volume(setting, dtype)
    prompts = some_prompts(subject, count)
    outputs = new_tokens_of(Decoding(target, drafting(head, CHAIN), dtype, 8, limit).states(prompts), limit)
    plain = [one.best for one in by_blocks(target, prompts, outputs, block=1)]
    blocks = [one.best for one in by_blocks(target, prompts, outputs, block=CHAIN.num_speculative_tokens + 1)]
    ours = Judged.of(reference(target, prompts, outputs), dtype)
    control = Judged.of(reference(target, prompts, outputs, plain), dtype)
    tokens = len(ours.gap)
    flips = int(np.sum(np.concatenate(outputs) != np.concatenate(plain)))
    noise = Control(flips=int(np.sum(np.concatenate(blocks) != np.concatenate(plain))), tokens=tokens)
    disagreements_allowed = Control(control.disagreements, tokens).allowed(tokens)
    check.number(
        tokens=tokens,
        ties=ours.ties,
        disagreements=ours.disagreements,
        ties_of_plain_decoding=control.ties,
        disagreements_of_plain_decoding=control.disagreements,
        disagreements_allowed=disagreements_allowed,
        flips=flips,
        flips_without_a_drafter=noise.flips,
        flips_allowed=noise.allowed(tokens),
        **_largest_gap(ours, dtype),
    )
    _plots(check, ours, control, first_differences(outputs, plain), limit)
    assert not ours.wrong, f"gaps and highest logits of tokens that no rounding explains: {ours.wrong}"
    assert ours.disagreements <= disagreements_allowed, "more disagreements than plain decoding has with the reference"
    assert flips <= noise.allowed(tokens), "speculation departs from plain decoding more often than rounding does"


def _largest_gap(judged: Judged, dtype: str) -> dict[str, float]:
    if dtype == "float32":
        return {"largest_gap": float(judged.gap.max())}
    return {"largest_gap_in_bfloat16_units": float(np.max(TIE_ULPS * judged.gap / judged.tolerance))}


def _volume(setting: Any, dtype: str) -> tuple[int, int]:
    """Prompts and new tokens of each: 10,240 tokens, fewer where nothing is rounded to bfloat16."""
    if setting.rehearsal:
        return 8, 32
    return (16 if dtype == "mixed" else 64), 160


@dataclasses.dataclass(frozen=True)
class Judged:
    """All tokens of a run as the reference sees them, prompt after prompt."""

    gap: np.ndarray
    value: np.ndarray
    tolerance: np.ndarray
    agreement: np.ndarray
    wrong: list[tuple[float, float]]

    @classmethod
    def of(cls, scored: Sequence[Scored], dtype: str) -> Judged:
        gap, rank, value = (np.concatenate([getattr(one, name) for one in scored]) for name in _SCORES)
        tolerance = tie_tolerance(value, dtype)
        wrong = np.flatnonzero(gap > wrong_tolerance(value, dtype))
        pairs = [(float(gap[index]), float(value[index])) for index in wrong]
        return cls(gap, value, tolerance, classify(gap, rank, tolerance), pairs)

    @property
    def ties(self) -> int:
        return int(np.sum(self.agreement == Agreement.TIE))

    @property
    def disagreements(self) -> int:
        return int(np.sum(self.agreement == Agreement.DISAGREE))


_SCORES = ("gap", "rank", "best_value")


def _plots(check: Check, ours: Judged, control: Judged, places: Sequence[int | None], limit: int) -> None:
    series = {}
    for name, one in (("speculation", ours), ("plain decoding", control)):
        apart = np.flatnonzero(one.gap > 0)
        series[name] = (one.value[apart].tolist(), one.gap[apart].tolist())
    check.plot("Tokens that are not the reference's choice", "scatter", "highest logit", "gap to it", series)
    parted = [place for place in places if place is not None]
    edges = np.linspace(0, limit, 9).astype(int)
    names = [f"{low} to {high - 1}" for low, high in itertools.pairwise(edges)]
    counts = np.histogram(parted, edges)[0].astype(float).tolist()
    title = "Where texts first part from plain decoding along the same tokens"
    check.plot(title, "bar", "new token", "prompts", {"prompts": (names, counts)})
    check.number(texts_that_part=len(parted))
