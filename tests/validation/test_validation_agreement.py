"""L5's rule in bfloat16, on logits that are made here.

Rounding alone passes, a wrong target or token does not.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from validation.agreement import ENGINES, BothDirections, Judged
from validation.engines.vllm.bridge import Scored, score
from validation.margin import Agreement, bfloat16_ulp

VOCAB = 32
# units in the last place by which a bfloat16 engine errs; about one token in fifty then changes
NOISE = 0.6


def scored(logits: np.ndarray, tokens: np.ndarray) -> list[Scored]:
    """Returns a judge's scores, computed here from logits, ``[prompts, length, vocabulary]``."""
    chosen = np.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    ranks = 1 + (logits > chosen[..., None]).sum(-1)
    best = logits.max(-1)
    return [
        Scored(best=top.tolist(), rank=rank.tolist(), gap=gap.tolist(), best_value=high.tolist())
        for top, rank, gap, high in zip(logits.argmax(-1), ranks, best - chosen, best, strict=True)
    ]


def on_grid(logits: np.ndarray) -> np.ndarray:
    return logits.astype(ml_dtypes.bfloat16).astype(np.float64)


def two_engines(
    seed: int,
    *,
    size: tuple[int, int] = (24, 48),
    off: float = 0.0,
    decoding: float = NOISE,
    vllm: float = NOISE,
    wrong_token: bool = False,
) -> BothDirections:
    """Texts of two engines along the same prefixes, each scored by each.

    Args:
        seed: Seed of all random numbers.
        size: Number of prompts, and of new tokens of each.
        off: Units in the last place by which the logits of our target are wrong, up or down, in
            decoding and judging.
        decoding: Noise of our decoding.
        vllm: Noise of vLLM's decoding; its scoring shares all of it where that is 0.
        wrong_token: Whether one of our tokens is another than our target's choice.
    """
    draw = np.random.default_rng(seed)
    shape = (*size, VOCAB)
    true = 20.0 - np.cumsum(draw.exponential(2.0, shape), -1)[..., ::-1]
    unit = bfloat16_ulp(true.max(-1, keepdims=True))

    def noise(size: float) -> np.ndarray:
        return size * unit * draw.standard_normal(shape)

    ours = true + off * unit * draw.choice([-1.0, 1.0], shape)
    shared = noise(NOISE)
    their_judge = on_grid(true + shared)
    our_tokens = on_grid(ours + noise(decoding)).argmax(-1)
    theirs = on_grid(true + (noise(vllm) if vllm else shared)).argmax(-1)
    if wrong_token:
        our_tokens[3, 7] = (our_tokens[3, 7] + VOCAB // 2) % VOCAB

    def judged(by: str, tokens: np.ndarray, judge: str) -> Judged:
        seen = scored(ours if judge == "us" else their_judge, tokens)
        return Judged(by, judge, "bfloat16", tokens.tolist(), seen)

    return BothDirections(
        ours=[judged("ours, plain", our_tokens, "vLLM")],
        theirs=[judged("vLLM, plain", theirs, "us")],
        controls={
            "ours, plain": judged("ours, plain", our_tokens, "us"),
            "vLLM, plain": judged("vLLM, plain", theirs, "vLLM"),
        },
    )


@pytest.mark.parametrize("vllm", [NOISE, 0.0], ids=["noise of both", "vLLM repeats its own errors"])
def test_sound_engines_with_many_ties_pass(vllm: float) -> None:
    """In twenty runs, most of which hold a token that is neither the choice nor a tie."""
    runs = [two_engines(seed, vllm=vllm) for seed in range(20)]
    assert [run.unexplained for run in runs] == [[]] * 20
    assert all(run.ours[0].agreed.ties >= 10 for run in runs)
    assert sum(any(judged.agreed.disagreements for judged in run.all) for run in runs) >= 10


@pytest.mark.parametrize(
    ("size", "off", "visible"), [((24, 48), 3.0, 0.06), ((56, 128), 1.5, 0.02)]
)
def test_a_target_some_units_off_fails(size: tuple[int, int], off: float, visible: float) -> None:
    """In every one of ten runs; on as many tokens as a CPU and as a GPU take."""
    for seed in range(10):
        run = two_engines(seed, size=size, off=off)
        assert run.unexplained, seed
        assert run.noise(Agreement.DISAGREE).sees(size[0] * size[1], times=ENGINES) < visible


def test_one_token_that_is_no_tie_fails() -> None:
    assert two_engines(0, wrong_token=True).unexplained == [
        "ours, plain: 1 tokens are too far below vLLM's choice for any rounding",
        "ours, plain: 1 tokens are too far below us's choice for any rounding",
    ]


def test_decoding_noisier_than_vllms_fails_although_it_raises_the_bound() -> None:
    for seed in range(10):
        (message,) = two_engines(seed, size=(56, 128), decoding=2.5 * NOISE).unexplained
        assert (
            message.startswith("ours, plain, scored by us:")
            and "neither its choice nor a tie" in message
        )


def test_a_token_tied_with_others_ranks_after_none_of_them() -> None:
    """vLLM's rank counts equal logits: a second choice tied with two others has rank 4 there."""
    entries = {5: (20.0, 1), 7: (19.875, 4), 9: (19.875, 4), 11: (19.0, 5), 13: (20.0, 2)}
    for token, rank in {5: 1, 7: 2, 9: 2, 11: 5}.items():
        result = score([{key: entries[key] for key in (5, 7, token)}], [token])
        assert (result.best, result.rank, result.gap) == ([5], [rank], [20.0 - entries[token][0]])
    assert score([{5: entries[5], 13: entries[13]}], [13]).rank == [1]
