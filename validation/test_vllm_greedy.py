"""L5: vLLM finds every token of ours to be its own choice, and we every token of vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny

from eagle3_jax import DynamicTree, LoadedDrafter, LoadedTarget, SpeculativeDecoder, load_target
from eagle3_jax.drafters import NGram
from eagle3_jax.rivals.vllm.bridge import VLLM, EngineOptions, Scored, Tokens, eagle3
from validation.checks import Check
from validation.forcing import reference
from validation.margin import Agreement, classify, tie_tolerance
from validation.odd_models import SHAPES, write_odd_model
from validation.subject import Subject

pytestmark = pytest.mark.level("L5")

BATCH = 8
CONTEXT = 100  # prompts are cut to their last tokens, so that all share the compiled programs of one bucket
TREE = DynamicTree(num_nodes=16, max_depth=5, top_k=4)


@dataclasses.dataclass(frozen=True)
class Texts:
    """What one way of decoding wrote."""

    by: str
    outputs: list[Tokens]


@dataclasses.dataclass(frozen=True)
class Agreed:
    """How one side's texts look to the other.

    Attributes:
        tokens: Positions scored.
        ties: Positions at which the token is the other side's second choice within the tolerance.
        disagreements: Positions at which it is neither.
        largest_gap: Of all positions.
    """

    tokens: int
    ties: int
    disagreements: int
    largest_gap: float


def agreement(scored: Sequence[Scored], dtype: str) -> Agreed:
    """Classify every position."""
    gap = np.concatenate([one.gap for one in scored])
    rank = np.concatenate([one.rank for one in scored])
    found = classify(gap, rank, tie_tolerance(np.concatenate([one.best_value for one in scored]), dtype))
    return Agreed(
        tokens=len(gap),
        ties=int((found == Agreement.TIE).sum()),
        disagreements=int((found == Agreement.DISAGREE).sum()),
        largest_gap=float(gap.max()),
    )


def ours(
    decoders: dict[str, SpeculativeDecoder], prompts: Sequence[Tokens], *, max_new_tokens: int, singly: int
) -> list[Texts]:
    """All decoders' texts, in batches; the first ``singly`` prompts of the last decoder one by one as well."""
    texts = []
    for name, decoder in decoders.items():
        outputs: list[Tokens] = []
        for start in range(0, len(prompts), BATCH):
            outputs += decoder.generate(prompts[start : start + BATCH], max_new_tokens=max_new_tokens).tokens
        texts.append(Texts(f"ours, {name}", outputs))
    name, decoder = next(reversed(decoders.items()))
    alone = [decoder.generate([prompt], max_new_tokens=max_new_tokens).tokens[0] for prompt in prompts[:singly]]
    texts.append(Texts(f"ours, {name}, batch 1", alone))
    return texts


def check_both_directions(
    check: Check,
    vllm: VLLM,
    directory: Path,
    target: LoadedTarget,
    decoders: dict[str, SpeculativeDecoder],
    prompts: Sequence[Tokens],
    *,
    speculative: Sequence[dict],
    dtype: str,
    max_new_tokens: int,
) -> None:
    """Generate on both sides, score each on the other, and vLLM against itself as the control."""
    mine = ours(decoders, prompts, max_new_tokens=max_new_tokens, singly=8)
    options = EngineOptions(model=str(directory), dtype=dtype, max_model_len=target.max_positions, max_num_seqs=BATCH)
    theirs = []
    for config in speculative:
        engine = vllm.engine(dataclasses.replace(options, speculative=config))
        outputs = engine.generate(prompts, max_new_tokens=max_new_tokens).completions
        theirs.append(Texts(f"vLLM, {config['method']}", [one.tokens for one in outputs]))
    engine = vllm.engine(options)
    outputs = engine.generate(prompts, max_new_tokens=max_new_tokens).completions
    theirs.insert(0, Texts("vLLM, plain", [one.tokens for one in outputs]))

    rows, worst, ties = [], 0, {}
    for texts in [*mine, *theirs]:
        fed = prompts[: len(texts.outputs)]
        by_us = texts.by.startswith("ours")
        scored = engine.score(fed, texts.outputs) if by_us else reference(target, fed, texts.outputs)
        control = engine.score(fed, texts.outputs) if not by_us else None
        found = agreement(scored, dtype)
        same = sum(output == other for output, other in zip(texts.outputs, theirs[0].outputs, strict=False))
        itself = agreement(control, dtype) if control is not None else None
        rows.append(
            [
                texts.by,
                "vLLM" if by_us else "us",
                found.tokens,
                found.tokens - found.ties - found.disagreements,
                found.ties,
                found.disagreements,
                round(found.largest_gap, 6),
                f"{same} of {len(fed)}",
                "" if itself is None else f"{itself.ties} ties, {itself.disagreements} disagreements",
            ]
        )
        worst += found.disagreements
        ties[texts.by] = found.ties
        if dtype == "float32":
            # A text parts from another where two logits tie, and nowhere else.
            assert len(fed) - same <= found.ties, f"{texts.by}: texts differ that no tie explains"
    check.table(
        f"{dtype}, {len(prompts)} prompts of up to {max_new_tokens} tokens",
        [
            "written by",
            "scored by",
            "tokens",
            "its choice",
            "ties",
            "disagreements",
            "largest gap",
            "text as vLLM's",
            "A/A",
        ],
        rows,
    )
    # Texts that agree are scored many times over; what is new in one is a token after a text that no other has.
    distinct = {
        (row, tuple(output[: end + 1]))
        for texts in (*mine, *theirs)
        for row, output in enumerate(texts.outputs)
        for end in range(len(output))
    }
    check.number(
        distinct_positions=len(distinct),
        tokens_scored=sum(row[2] for row in rows),
        disagreements=worst,
        ties=sum(ties.values()),
        prompts=len(prompts),
    )
    assert worst == 0, f"{worst} tokens are neither the other side's choice nor a tie"


def test_the_pair_agrees_with_vllm_token_for_token(check: Check, vllm: VLLM, subject: Subject) -> None:
    target, drafter = subject.pair("float32")
    check_both_directions(
        check,
        vllm,
        subject.target_directory,
        target,
        decoders_of(target, drafter),
        [prompt[-CONTEXT:] for prompt in subject.prompt_tokens[:56]],
        speculative=[eagle3(subject.drafter_directory, 5)],
        dtype="float32",
        max_new_tokens=48,
    )


def test_the_pair_agrees_with_vllm_in_bfloat16_but_for_ties(check: Check, vllm: VLLM, subject: Subject) -> None:
    target, drafter = subject.pair("bfloat16")
    check_both_directions(
        check,
        vllm,
        subject.target_directory,
        target,
        decoders_of(target, drafter),
        [prompt[-CONTEXT:] for prompt in subject.prompt_tokens[:24]],
        speculative=[eagle3(subject.drafter_directory, 5)],
        dtype="bfloat16",
        max_new_tokens=48,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_random_model_of_an_odd_shape_agrees_with_vllm(check: Check, vllm: VLLM, tmp_path: Path, shape: str) -> None:
    directory = write_odd_model(shape, tmp_path / "target")
    target = load_target(directory)
    decoders = {
        "plain": SpeculativeDecoder(target, stop_tokens=()),
        "n-gram": SpeculativeDecoder(target, NGram(), num_speculative_tokens=4, stop_tokens=()),
    }
    prompts = tiny.random_prompts(16, target.vocab_size, seed=3, low=3, high=40)
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    check_both_directions(
        check,
        vllm,
        directory,
        target,
        decoders,
        prompts,
        speculative=[ngram],
        dtype="float32",
        max_new_tokens=48,
    )


def decoders_of(target: LoadedTarget, drafter: LoadedDrafter) -> dict[str, SpeculativeDecoder]:
    """Plain decoding and every kind of draft."""
    return {
        "plain": SpeculativeDecoder(target, stop_tokens=()),
        "n-gram": SpeculativeDecoder(target, NGram(), num_speculative_tokens=4, stop_tokens=()),
        "EAGLE-3 tree": SpeculativeDecoder(target, drafter, tree=TREE, stop_tokens=()),
        "EAGLE-3 chain": SpeculativeDecoder(target, drafter, num_speculative_tokens=5, stop_tokens=()),
    }
