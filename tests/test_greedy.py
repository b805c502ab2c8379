"""Level 3: greedy output is the target's own, token for token, whatever drafts it."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import test_golden
import tiny

from eagle3_jax import loop as loops
from eagle3_jax.decode import LoadedDrafter, LoadedTarget, SpeculativeDecoder
from eagle3_jax.drafters import Fallback, Markov, NGram, Plain, Suffix
from eagle3_jax.models.layers import BFLOAT16, FLOAT32, MIXED, Precision
from eagle3_jax.topology import PUBLISHED_TREES, Chain, DynamicTree

pytestmark = [pytest.mark.core, pytest.mark.bits]

TARGET = tiny.target(13)
PROMPTS = [*tiny.random_prompts(5, 13, seed=1), [4] * 9]
LIMITS = [24, 7, 1, 30, 16, 24]


@functools.cache
def continuation(prompt: tuple[int, ...], new_tokens: int, width: int = 48) -> list[int]:
    """Decodes by argmax: a forward pass over the text for each token, no cache or drafter."""
    tokens = tiny.padded([prompt], width)
    for length in range(len(prompt), len(prompt) + new_tokens):
        logits, _ = tiny.forward(TARGET.model, TARGET.params, jnp.array(tokens))
        tokens[0, length] = int(logits[0, length - 1].argmax())
    return tokens[0, len(prompt) : len(prompt) + new_tokens].tolist()


def expected(stops: tuple[int, ...] = ()) -> list[list[int]]:
    rows = [
        continuation(tuple(prompt), limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)
    ]
    lengths = [
        next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in rows
    ]
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def scripted(shift: int) -> LoadedDrafter:
    """Knows every continuation by heart; with a shift it is always wrong."""
    texts = [[*prompt, *continuation(tuple(prompt), 35)] for prompt in PROMPTS]
    return LoadedDrafter(tiny.Scripted(shift=shift), jnp.asarray(tiny.padded(texts, 64)))


DRAFTERS = {
    "plain decoding": lambda: LoadedDrafter(Plain()),
    "padding": lambda: LoadedDrafter(Plain(num_nodes=4)),
    "n-grams": lambda: LoadedDrafter(NGram(4)),
    "suffixes": lambda: LoadedDrafter(Suffix(4)),
    "a draft model of one layer": lambda: tiny.draft_model(TARGET, Chain(3)),
    "a draft model's dynamic tree": lambda: tiny.draft_model(
        TARGET, DynamicTree(num_nodes=9, max_depth=3, top_k=3)
    ),
    "n-grams that never match": lambda: LoadedDrafter(NGram(4, max_ngram=40, min_ngram=40)),
    "a perfect drafter": lambda: scripted(0),
    "a drafter that is always wrong": lambda: scripted(1),
    "a random chain": lambda: tiny.eagle3(TARGET, Chain(5)),
    "a random chain of a reduced vocabulary": lambda: tiny.eagle3(
        TARGET, Chain(3), draft_vocab_size=6
    ),
    "a head of two layers that feeds its norm back": lambda: tiny.eagle3(
        TARGET, Chain(3), num_layers=2, norm_output=True, fc_norm=True
    ),
    "a random dynamic tree": lambda: tiny.eagle3(
        TARGET, DynamicTree(num_nodes=16, max_depth=4, top_k=4)
    ),
    "EAGLE-1's tree": lambda: tiny.eagle1(TARGET, PUBLISHED_TREES["eagle-25"]),
    "an MTP chain of 1": lambda: tiny.mtp(TARGET, Chain(1)),
    "a random block": lambda: tiny.dflash(TARGET, causal=True),
    "a random tree of a block": lambda: tiny.dflash(
        TARGET,
        DynamicTree(num_nodes=16, max_depth=4, top_k=4),
        from_anchor=True,
        markov=Markov(rank=4, type="rnn"),
    ),
    "a random static tree": lambda: tiny.eagle3(TARGET, tiny.STATIC_TREE),
    "the first of four Medusa heads": lambda: tiny.medusa(TARGET, Chain(1)),
    "a tree of Medusa heads": lambda: tiny.medusa(TARGET, tiny.STATIC_TREE),
    "n-grams, else a random chain": lambda: Fallback.of(NGram(4), tiny.eagle3(TARGET, Chain(3))),
    "a random parallel tree": lambda: tiny.p_eagle(TARGET, tiny.STATIC_TREE),
}


def check_greedy_output(name: str, stops: tuple[int, ...] = ()) -> loops.Outcome:
    return check_greedy_text(DRAFTERS[name](), stops)


def check_greedy_text(drafter: LoadedDrafter, stops: tuple[int, ...] = ()) -> loops.Outcome:
    loop, params = tiny.bind(TARGET, drafter)
    batch = tiny.prompts(PROMPTS, limit=LIMITS, stop_tokens=stops)
    outcome = loops.generate(loop, params, batch, capacity=48 + loop.drafter.num_nodes)
    assert tiny.outputs(outcome, batch) == expected(stops)
    return outcome


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
    target, head = test_golden.pair("vllm")

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
