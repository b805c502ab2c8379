"""Level 3: greedy output is the target's own, token for token, whatever drafts it."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tiny
from greedy_texts import DRAFTERS, PROMPTS, check_greedy_output

from eagle3_jax import loop as loops
from eagle3_jax.decode import LoadedDrafter, LoadedTarget, SpeculativeDecoder
from eagle3_jax.drafters import NGram, Plain
from eagle3_jax.models.layers import BFLOAT16, FLOAT32, MIXED, Precision
from eagle3_jax.topology import DynamicTree

pytestmark = [pytest.mark.core, pytest.mark.bits]


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_equals_autoregression_with(name: str) -> None:
    outcome = check_greedy_output(name)
    accepted = int(outcome.stats.num_accepted_tokens.sum())
    drafted = int(outcome.stats.num_draft_tokens.sum())
    if name == "a perfect drafter":
        assert accepted == drafted > 0
    if name == "a drafter that is always wrong":
        assert drafted > accepted == 0
    if name in ("plain decoding", "padding", "n-grams that never match"):
        assert drafted == 0
    if name == "n-grams" or "tree" in name:
        assert accepted > 0, "a comparison in which nothing was accepted would show nothing"


@pytest.mark.parametrize(
    "name", ["a perfect drafter", "a random dynamic tree", "n-grams", "a tree of Medusa heads"]
)
def test_greedy_output_ends_at_a_stop_token_inside_a_block_with(name: str) -> None:
    check_greedy_output(name, stops=(3, 9))


@functools.cache
def transformers_output() -> tuple[list[list[int]], list[list[int]]]:
    """Returns 20 prompts and the output of ``transformers.generate``.

    The checkpoint is that of the recorded vLLM run.
    """
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny.GOLDEN / "vllm/target", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = tiny.random_prompts(20, 512, seed=7, low=3, high=20)
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        rows = model.generate(
            padded, attention_mask=real, do_sample=False, max_new_tokens=64, min_new_tokens=64,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return prompts, rows[:, width:].tolist()


@pytest.mark.torch
@pytest.mark.parametrize("drafter", ["none", "n-grams", "EAGLE-3 chain", "EAGLE-3 tree"])
@pytest.mark.parametrize("batch", [1, 5])
def test_greedy_output_equals_transformers_with(drafter: str, batch: int) -> None:
    prompts, rows = transformers_output()
    target, head = tiny.golden_pair("vllm")
    options = {
        "none": {},
        "n-grams": {"drafter": NGram(5)},
        "EAGLE-3 chain": {"drafter": head, "num_speculative_tokens": 5},
        "EAGLE-3 tree": {"drafter": head, "tree": DynamicTree(num_nodes=16, max_depth=4, top_k=4)},
    }[drafter]

    decoder = SpeculativeDecoder(target, stop_tokens=(), **options)
    written = []
    for start in range(0, len(prompts), batch):
        written += decoder.generate(prompts[start : start + batch], max_new_tokens=64).tokens
    assert written == rows


def finished_state(
    target: LoadedTarget, drafter: LoadedDrafter, prompt: list[int]
) -> loops.GenerationState:
    loop, params = tiny.bind(target, drafter)
    return loops.run(
        loop, params, loops.prefill(loop, params, tiny.prompts([prompt], limit=24), capacity=64)
    )


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16], ids=lambda p: p.name)
def test_shape_matched_plain_decoding_equals_rounds_of_refused_drafts_bit_for_bit(
    precision: Precision,
) -> None:
    """Equal shapes give equal bits of every key and value, in every layer."""
    target = tiny.target(13, precision=precision)
    prompt = PROMPTS[0]
    plain = finished_state(target, LoadedDrafter(Plain(num_nodes=5)), prompt)
    wrong = finished_state(target, LoadedDrafter(tiny.Scripted(shift=1), plain.tokens), prompt)
    assert int(wrong.stats.num_accepted_tokens.sum()) == 0 < int(wrong.stats.num_draft_tokens.sum())
    assert np.array_equal(wrong.tokens, plain.tokens)
    assert tiny.same_bits(tiny.known(wrong.cache), tiny.known(plain.cache))


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16, MIXED], ids=lambda p: p.name)
def test_accepted_drafts_leave_the_numbers_of_plain_decoding_bit_for_bit(
    precision: Precision,
) -> None:
    """A token of a verified block reads the tokens before it from the slots of plain decoding."""
    target = tiny.target(13, precision=precision)
    prompt = PROMPTS[0]
    plain = finished_state(target, LoadedDrafter(Plain(num_nodes=5)), prompt)
    right = finished_state(target, LoadedDrafter(tiny.Scripted(), plain.tokens), prompt)

    # The script may end before the last draft does.
    stats = right.stats
    num_refused = int(stats.num_draft_tokens.sum()) - int(stats.num_accepted_tokens.sum())
    assert 0 <= num_refused <= 3

    assert np.array_equal(plain.tokens, right.tokens)
    assert tiny.same_bits(tiny.known(right.cache), tiny.known(plain.cache))
