"""L4: tokens in low precision are the reference's choice or a tie, as in plain decoding."""

from __future__ import annotations

import numpy as np
import pytest

from validation.agreement import Judged
from validation.decodings import CHAIN, Decoding, first_differences, with_shape
from validation.fixtures import setting_of
from validation.forcing import by_blocks, reference
from validation.margin import Control
from validation.runs import Check
from validation.subject import Setting, Subject, some_prompts


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "margin_dtype" in metafunc.fixturenames:
        on_gpu = setting_of(metafunc.config).on_gpu
        metafunc.parametrize(
            "margin_dtype", ("bfloat16", "float32") if on_gpu else ("mixed", "bfloat16")
        )


@pytest.mark.level("L4")
def test_every_token_is_the_reference_choice_or_a_tie(
    check: Check, subject: Subject, setting: Setting, margin_dtype: str
) -> None:
    """Tokens of a speculative run, judged one by one along the same text.

    Ties are no more frequent than without a drafter.
    """
    dtype = margin_dtype
    target, head = subject.pair(dtype)
    count, limit = _volume(setting, dtype)
    prompts = some_prompts(subject, count)
    outputs = Decoding(target, with_shape(head, CHAIN), 8, limit).decode(prompts).tokens

    # Along the same text: plain decoding, and verification without a draft.
    plain = [scored.best for scored in by_blocks(target, prompts, outputs, block=1)]
    blocks = [
        scored.best
        for scored in by_blocks(target, prompts, outputs, block=CHAIN.num_speculative_tokens + 1)
    ]

    ours = Judged("ours", "the reference", dtype, outputs, reference(target, prompts, outputs))
    control = Judged(
        "plain", "the reference", dtype, plain, reference(target, prompts, outputs, plain)
    )
    agreed = ours.agreed
    usual = control.agreed

    tokens = len(ours.gaps)
    flips = int(np.sum(np.concatenate(outputs) != np.concatenate(plain)))
    noise = Control(
        flips=int(np.sum(np.concatenate(blocks) != np.concatenate(plain))), tokens=tokens
    )
    disagreements_allowed = Control(usual.disagreements, tokens).allowed(tokens)

    largest = (
        {"largest_gap": float(ours.gaps.max())}
        if dtype == "float32"
        else {"largest_gap_in_bfloat16_units": float(ours.units.max())}
    )
    check.number(
        tokens=tokens,
        ties=agreed.ties,
        disagreements=agreed.disagreements,
        ties_of_plain_decoding=usual.ties,
        disagreements_of_plain_decoding=usual.disagreements,
        disagreements_allowed=disagreements_allowed,
        flips=flips,
        flips_without_a_drafter=noise.flips,
        flips_allowed=noise.allowed(tokens),
        texts_that_part=sum(position is not None for position in first_differences(outputs, plain)),
        **largest,
    )

    assert not ours.wrong, (
        f"{ours.wrong} tokens are too far below the reference's choice for any rounding"
    )
    assert agreed.disagreements <= disagreements_allowed, (
        "more disagreements than plain decoding has with the reference"
    )
    assert flips <= noise.allowed(tokens), (
        "speculation departs from plain decoding more often than rounding does"
    )


def _volume(setting: Setting, dtype: str) -> tuple[int, int]:
    """Prompts and new tokens of each: 10,240 tokens, fewer where nothing is rounded to bfloat16."""
    if setting.rehearsal:
        return 8, 32
    if setting.quick:
        return 16, 64
    return (16 if dtype == "mixed" else 64), 160
