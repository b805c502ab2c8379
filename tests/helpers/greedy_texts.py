"""Greedy texts of a tiny target without a cache, and drafters whose texts must be the same."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import tiny

from eagle3_jax import loop as loops
from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.drafters import Fallback, Markov, NGram, Plain, Suffix
from eagle3_jax.topology import PUBLISHED_TREES, Chain, DynamicTree

TARGET = tiny.target(13)
PROMPTS = [*tiny.random_prompts(5, 13, seed=1), [4] * 9]
LIMITS = [24, 7, 1, 30, 16, 24]


@functools.cache
def continuation(prompt: tuple[int, ...], new_tokens: int, width: int = 48) -> list[int]:
    """Decodes by argmax with a forward pass over the complete text for each token."""
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
    "a chain of three MTP modules": lambda: tiny.mtp(TARGET, Chain(4), layers=tiny.layers(3)),
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
