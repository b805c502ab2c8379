"""L5: vLLM finds every token of ours to be its own choice, and we every token of vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3_jax import SpeculativeDecoder, load_target
from eagle3_jax.drafters import NGram
from validation.agreement import ENGINES, BothDirections, both_directions, decoders_of
from validation.engines.vllm.bridge import VLLM, eagle3
from validation.margin import TIE_ULPS, WRONG_ULPS, Agreement
from validation.odd_models import SHAPES, write_odd_model
from validation.runs import Check
from validation.subject import CONTEXT, Setting, Subject, random_prompts

pytestmark = pytest.mark.level("L5")


COLUMNS = [
    "written by", "scored by", "tokens", "its choice", "ties", "disagreements", "largest gap",
    "text as vLLM's", "A/A",
]  # fmt: skip


def keep(check: Check, compared: BothDirections) -> None:
    """Keep what both engines found of each other, then judge it."""
    rows: list[list[Any]] = []
    for judged in compared.all:
        agreed = judged.agreed
        control = compared.controls.get(judged.by)
        own_control = (
            ""
            if control is None
            else f"{control.agreed.ties} ties, {control.agreed.disagreements} disagreements"
        )
        choice = agreed.tokens - agreed.ties - agreed.disagreements
        shared = f"{judged.texts_shared(compared.plain)} of {len(judged.outputs)}"
        counted = [
            agreed.tokens,
            choice,
            agreed.ties,
            agreed.disagreements,
            round(agreed.largest_gap, 6),
        ]
        rows.append([judged.by, judged.scored_by, *counted, shared, own_control])

    dtype = compared.ours[0].dtype
    prompts = len(compared.plain)
    check.table(
        f"{dtype}, {prompts} prompts of up to {max(map(len, compared.plain))} tokens", COLUMNS, rows
    )

    # Texts that agree are scored many times over; what is new in one is a token after a text that
    # no other has.
    distinct = {
        (row, tuple(output[: end + 1]))
        for judged in compared.all
        for row, output in enumerate(judged.outputs)
        for end in range(len(output))
    }
    check.number(
        distinct_positions=len(distinct),
        tokens_scored=sum(row[2] for row in rows),
        disagreements=sum(row[5] for row in rows),
        ties=sum(row[4] for row in rows),
        prompts=prompts,
    )

    if dtype != "float32":
        _keep_noise(check, compared)
    assert not compared.unexplained, "; ".join(compared.unexplained)


def _keep_noise(check: Check, compared: BothDirections) -> None:
    """What plain decoding of both engines allows, and the deviation that it leaves visible."""
    tokens = len(compared.theirs[0].gaps)
    for name, verdict in (("off_choice", Agreement.TIE), ("disagreements", Agreement.DISAGREE)):
        noise = compared.noise(verdict)
        check.number(
            **{
                f"most_{name}": max(judged.control(verdict).flips for judged in compared.all),
                f"{name}_of_plain_decoding": noise.flips,
                f"{name}_allowed": noise.allowed(tokens, times=ENGINES),
            }
        )

    rates = [
        compared.noise(verdict).sees(tokens, times=ENGINES)
        for verdict in (Agreement.TIE, Agreement.DISAGREE)
    ]
    check.sees = (
        f"in {compared.theirs[0].dtype} a token more than {WRONG_ULPS:g} units below the choice,"
        f" {rates[0]:.1%} of tokens that are not the choice, {rates[1]:.1%} beyond {TIE_ULPS:g}"
        " units or second place"
    )


def pair_in_both_engines(
    vllm: VLLM, subject: Subject, dtype: str, count: int, limit: int, singly: int
) -> BothDirections:
    target, drafter = subject.pair(dtype)
    return both_directions(
        vllm,
        subject.target_directory,
        target,
        decoders_of(target, drafter),
        [prompt[-CONTEXT:] for prompt in subject.prompt_tokens[:count]],
        speculative=[eagle3(subject.drafter_directory, 5)],
        dtype=dtype,
        max_new_tokens=limit,
        singly=singly,
    )


def test_the_pair_agrees_with_vllm_token_for_token(
    check: Check, vllm: VLLM, subject: Subject, setting: Setting
) -> None:
    count, singly = (16, 2) if setting.quick else (56, 8)
    keep(check, pair_in_both_engines(vllm, subject, "float32", count, 48, singly))


def test_the_pair_agrees_with_vllm_in_bfloat16_but_for_ties(
    check: Check, vllm: VLLM, subject: Subject, setting: Setting
) -> None:
    """As many tokens as the device decodes in a minute: more of them show more."""
    count, limit, singly = (
        (8, 32, 0) if setting.quick else (56, 128, 8) if setting.on_gpu else (24, 48, 8)
    )
    keep(check, pair_in_both_engines(vllm, subject, "bfloat16", count, limit, singly))


# HF compares the same models with transformers, and the pair is compared with vLLM above
@pytest.mark.not_quick
@pytest.mark.parametrize("shape", SHAPES)
def test_a_random_model_of_an_odd_shape_agrees_with_vllm(
    check: Check, vllm: VLLM, tmp_path: Path, shape: str
) -> None:
    directory = write_odd_model(shape, tmp_path / "target")
    target = load_target(directory)
    decoders = {
        "plain": SpeculativeDecoder(target, stop_tokens=()),
        "n-gram": SpeculativeDecoder(target, NGram(), num_speculative_tokens=4, stop_tokens=()),
    }
    prompts = random_prompts(16, target.vocab_size, seed=3, low=3, high=40)
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }

    compared = both_directions(
        vllm,
        directory,
        target,
        decoders,
        prompts,
        speculative=[ngram],
        dtype="float32",
        max_new_tokens=48,
    )
    keep(check, compared)
