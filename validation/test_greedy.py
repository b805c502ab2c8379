"""L3: greedy output is the target's own, bit for bit or up to rounding.

What is bitwise, in every precision: a chain and plain decoding in blocks of its size, every key and
value included; a refused draft leaves no trace; a round depends on nothing but the tokens that were
accepted. What is not: the path of a tree is verified among its siblings' slots and then moved, so
its sums run in another order. In float32 and mixed precision that has not been seen to change a
token; in bfloat16 it does, at approximately tied logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from eagle3_jax import LoadedDrafter, LoadedTarget
from eagle3_jax import loop as loops
from eagle3_jax.drafters import Plain
from eagle3_jax.loop import GenerationState, LoopParams, SpeculativeLoop
from eagle3_jax.testing.scripted import FixedTree, RootState, chain_parents
from eagle3_jax.topology import Chain
from eagle3_jax.types import Draft, SamplingParams
from validation.decodings import (
    CHAIN,
    SHAPES,
    Decoded,
    Decoding,
    NeverRight,
    batch_of,
    first_differences,
    programs,
    with_shape,
)
from validation.device import exact_options
from validation.fixtures import setting_of
from validation.forcing import padded, reference
from validation.margin import wrong_tolerance
from validation.runs import Check
from validation.subject import CONTEXT, Setting, Subject, some_prompts


@dataclasses.dataclass(frozen=True)
class Script(FixedTree):
    """A drafter that gets a given number of tokens right after every root, and the next ones wrong.

    Parameters are ``tokens [B S]`` and, for the root at each place, ``right [B S]``.
    """

    vocab_size: int

    def propose(
        self, params: Any, state: RootState, keys: Array, sampling: SamplingParams
    ) -> Draft:
        right = jnp.take_along_axis(params["right"], state.length[:, None], axis=1)
        tokens = self.scripted(params["tokens"], state)
        wrong = jnp.arange(self.num_nodes, dtype=jnp.int32)[None] > right
        return self.draft(state, jnp.where(wrong, (tokens + 1) % self.vocab_size, tokens))


def assert_partings_are_rounding(
    target: LoadedTarget, dtype: str, prompts: Sequence[list[int]], ours: Sequence[list[int]],
    places: Sequence[int | None],
) -> None:  # fmt: skip
    """Where an output parts, its token is within rounding of the reference's choice."""
    for prompt, output, position in zip(prompts, ours, places, strict=True):
        if position is not None:
            (scored,) = reference(target, [prompt], [output])
            gap = scored.gap[position]
            value = scored.best_value[position]
            assert gap <= wrong_tolerance(value, dtype), (
                f"new token {position} is {gap:.3f} below the highest logit {value:.3f}"
            )


def same_bits(state: GenerationState, reference_state: GenerationState) -> list[str]:
    """Which of tokens, keys and values differ anywhere among what is committed."""
    known = [np.asarray(compared.cache.length) for compared in (state, reference_state)]
    differing = (
        []
        if np.array_equal(state.tokens, reference_state.tokens) and np.array_equal(*known)
        else ["tokens"]
    )

    for layer, caches in enumerate(
        zip(state.cache.layers, reference_state.cache.layers, strict=True)
    ):
        for name in ("keys", "values"):
            a, b = (getattr(cache, name) for cache in caches)
            for row, length in enumerate(known[0]):
                if not bool(jnp.array_equal(a[row, :, :length], b[row, :, :length])):
                    differing.append(f"{name} of layer {layer}, row {row}")
    return differing


# A CPU takes every precision, shape and batch size, a GPU each with each.
CELLS = [
    ("float32", "chain", 1),
    ("float32", "tree", 8),
    ("bfloat16", "chain", 8),
    ("bfloat16", "tree", 1),
    ("mixed", "chain", 1),
]
GPU_CELLS = [
    (dtype, shape, batch)
    for dtype in ("bfloat16", "float32")
    for shape in SHAPES
    for batch in (1, 8)
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        cells = GPU_CELLS if setting_of(metafunc.config).on_gpu else CELLS
        metafunc.parametrize("cell", cells, ids=["-".join(map(str, cell)) for cell in cells])


@pytest.fixture
def new_tokens(setting: Setting) -> int:
    """Per prompt, for L3."""
    return 128 if setting.on_gpu else 32


@pytest.mark.level("L3")
def test_speculation_equals_plain_decoding_of_the_same_shape(
    check: Check, subject: Subject, cell: tuple[str, str, int], new_tokens: int
) -> None:
    """The same tokens, and for a chain the same bits.

    A tree in low precision may part at approximately tied logits.
    """
    dtype, shape, batch = cell
    target, head = subject.pair(dtype)
    prompts = some_prompts(subject, 8)

    drafter = with_shape(head, SHAPES[shape])
    plain = LoadedDrafter(Plain(drafter.drafter.num_nodes))
    ours = Decoding(target, drafter, batch, new_tokens).decode(prompts)
    theirs = Decoding(target, plain, batch, new_tokens).decode(prompts)

    accepted = ours.stats.num_accepted_tokens
    places = first_differences(ours.tokens, theirs.tokens)
    parted = [position for position in places if position is not None]
    check.number(
        prompts=len(prompts),
        tokens=len(prompts) * new_tokens,
        accepted=accepted,
        parted=len(parted),
    )
    assert accepted > len(prompts), (
        "a comparison in which hardly anything was accepted would show little"
    )

    assert_partings_are_rounding(target, dtype, prompts, ours.tokens, places)
    if dtype == "float32" or shape == "chain":
        assert not parted, f"{dtype} output differs first at new tokens {parted}"
    if shape == "chain":
        for state, plain_state in zip(ours.states, theirs.states, strict=True):
            assert same_bits(state, plain_state) == []


@pytest.mark.level("L3")
def test_refused_drafts_leave_every_bit_as_it_was(
    check: Check, subject: Subject, cell: tuple[str, str, int], new_tokens: int
) -> None:
    """With drafts that are never right, every key and value is that of plain decoding."""
    dtype, shape, batch = cell
    target, head = subject.pair(dtype)
    prompts = some_prompts(subject, batch)
    drafter = with_shape(head, SHAPES[shape])
    padding = LoadedDrafter(Plain(drafter.drafter.num_nodes))
    (plain,) = Decoding(target, padding, batch, new_tokens).decode(prompts).states

    params = {"inner": drafter.params, "tokens": plain.tokens}
    wrong = LoadedDrafter(NeverRight(drafter.drafter, target.vocab_size), params)
    refused = Decoding(target, wrong, batch, new_tokens).decode(prompts)

    drafted = refused.stats.num_draft_tokens
    check.number(
        drafted=drafted, bytes_compared=sum(leaf.nbytes for leaf in jax.tree.leaves(plain.cache))
    )
    assert drafted > 0 == refused.stats.num_accepted_tokens
    assert same_bits(refused.states[0], plain) == []


@pytest.mark.level("L3")
def test_a_round_depends_on_what_was_accepted_and_on_nothing_else(
    check: Check, subject: Subject, new_tokens: int
) -> None:
    """A script that gets as much right in every round as the head leaves the same bits."""
    target, head = subject.pair("bfloat16")
    prompts = some_prompts(subject, 8)
    drafter = with_shape(head, CHAIN)
    loop = SpeculativeLoop(target.model, drafter.drafter)
    params = LoopParams(target.params, drafter.params)
    decoding = Decoding(target, drafter, 8, new_tokens)
    decoded = decoding.decode(prompts)
    (ours,) = decoded.states

    # How many tokens the head got right in the round after each length.
    right = np.zeros(ours.tokens.shape, np.int32)
    prefill, _ = programs(loop, params, decoding)
    state = prefill(params, batch_of(prompts, new_tokens))
    step = loops.step.lower(loop, params, state).compile(exact_options())
    while (running := np.asarray(state.running)).any():
        roots = np.asarray(state.length) - 1
        latest = step(params, state)
        state = latest.state
        right[np.flatnonzero(running), roots[running]] = np.asarray(latest.verdict.num_accepted)[
            running
        ]

    script = {"tokens": ours.tokens, "right": jnp.asarray(right)}
    scripted = LoadedDrafter(
        Script(chain_parents(CHAIN.num_speculative_tokens), target.vocab_size), script
    )
    (theirs,) = Decoding(target, scripted, 8, new_tokens).decode(prompts).states

    check.number(accepted=decoded.stats.num_accepted_tokens)
    assert decoded.stats.num_accepted_tokens > 0
    assert same_bits(ours, theirs) == []


@pytest.mark.level("L3")
def test_the_text_does_not_depend_on_the_drafter(
    check: Check, subject: Subject, new_tokens: int
) -> None:
    """In float32, whether the drafter knows everything, nothing, or has random weights."""
    target, head = subject.pair("float32")
    prompts = some_prompts(subject, 8)
    drafter = with_shape(head, CHAIN)
    num_nodes = CHAIN.num_speculative_tokens + 1
    expected = (
        Decoding(target, LoadedDrafter(Plain(num_nodes)), 8, new_tokens).decode(prompts).tokens
    )

    tokens = padded(
        [[*prompt, *row] for prompt, row in zip(prompts, expected, strict=True)],
        CONTEXT + new_tokens,
    )
    script = Script(chain_parents(num_nodes - 1), target.vocab_size)
    random = drafter.params | {"head": drafter.drafter.init_params(jax.random.key(0))}
    drafters = {
        "random head": dataclasses.replace(drafter, params=random),
        "all right": LoadedDrafter(
            script, {"tokens": tokens, "right": jnp.full(tokens.shape, num_nodes, jnp.int32)}
        ),
        "all wrong": LoadedDrafter(
            script, {"tokens": tokens, "right": jnp.zeros(tokens.shape, jnp.int32)}
        ),
    }

    for name, loaded in drafters.items():
        decoded = Decoding(target, loaded, 8, new_tokens).decode(prompts)
        accepted = decoded.stats.num_accepted_tokens
        drafted = decoded.stats.num_draft_tokens
        check.number(**{f"accepted of drafted, {name}": f"{accepted} of {drafted}"})
        assert decoded.tokens == expected, name
        # Except the last round of each row, which drafts past the end of the script.
        if name == "all right":
            assert accepted >= drafted - len(prompts) * num_nodes > 0
        if name == "all wrong":
            assert drafted > 0 == accepted


@pytest.mark.level("L3")
def test_invariant_texts_and_bits_are_those_of_plain_decoding(
    check: Check, subject: Subject, setting: Setting, new_tokens: int
) -> None:
    """As users compile: one token at a time, chains, and batches.

    On CPUs a quick run is in float32.
    """
    compared = 0
    prompts = some_prompts(subject, 8)
    dtypes = (
        ("bfloat16",)
        if setting.on_gpu
        else ("float32",)
        if setting.quick
        else ("float32", "bfloat16")
    )

    for dtype in dtypes:
        target, head = subject.pair(dtype)
        invariant = dataclasses.replace(target, model=target.model.invariant(target.weights))

        def decode(drafter: LoadedDrafter, batch: int, target: LoadedTarget = invariant) -> Decoded:
            return Decoding(target, drafter, batch, new_tokens, {}).decode(prompts)

        expected = decode(LoadedDrafter(Plain()), 1)
        for length, batch in ((3, 1), (5, 8)):
            decoded = decode(with_shape(head, Chain(length)), batch)
            assert decoded.stats.num_accepted_tokens > len(prompts)
            assert decoded.tokens == expected.tokens, f"{dtype}, chain of {length}, batch {batch}"
            rows = rows_of(decoded.states)
            for ours, theirs in zip(rows, rows_of(expected.states), strict=True):
                compared += sum(leaf.nbytes for leaf in ours)
                assert all(map(np.array_equal, ours, theirs)), (
                    f"{dtype}, chain of {length}, batch {batch}"
                )
    check.number(prompts=len(prompts), bytes_compared=compared)


def rows_of(states: Sequence[GenerationState]) -> list[list[np.ndarray]]:
    """Committed keys and values of every row of all batches."""
    return [
        [np.asarray(leaf)[row, :, :end] for leaf in jax.tree.leaves(state.cache.layers)]
        for state in states
        for row, end in enumerate(np.asarray(state.cache.length))
    ]
