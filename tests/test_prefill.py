"""A prefill in parts gives the state of one forward pass, bit for bit, in bounded memory."""

from __future__ import annotations

import itertools
from typing import Any

import families
import jax
import numpy as np
import pytest
import random_targets
import tiny

from eagle3_jax import loop as loops
from eagle3_jax.devices import groups
from eagle3_jax.models import attention
from eagle3_jax.state import GenerationState

# Softmax attention, windows, chunks and experts, latents; a recurrence.
BIT_EQUAL = ("llama", "gpt_oss", "llama4, norms", "deepseek_v3")
FEW = (*BIT_EQUAL, "qwen3_next")
# What follows a recurrence depends on the number of rows in a batch, with or without parts: two
# rows alone, compared with the same two of four (qwen3_next, 160 tokens), have keys in the second
# layer that differ by up to 1.2e-6 in float32. How many rows one product of experts has depends on
# the number of tokens, and XLA's products of qwen3_moe then differ by up to 6e-7 of 3.2, and those
# of mellum by 5e-7 of 3.4.
NEARLY_EQUAL = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_moe", "mellum")
ROWS = 4
FED = 160


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        families.parametrize(metafunc, families.RECIPES, FEW)


def _differ(first: GenerationState, second: GenerationState) -> list[str]:
    """Returns the leaves whose bits differ, the slots after the committed tokens included."""
    pairs = zip(*map(jax.tree_util.tree_leaves_with_path, (first, second)), strict=True)
    return [
        jax.tree_util.keystr(path)
        for (path, leaf), (_, same) in pairs
        if not tiny.same_bits(*map(_bits, (leaf, same)))
    ]


def _bits(leaf: jax.Array) -> jax.Array:
    return (
        jax.random.key_data(leaf)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
    )


def _in_parts(patch: pytest.MonkeyPatch, *, tokens: int, scores: int) -> None:
    patch.setattr(groups, "TOKENS", tokens)
    patch.setattr(attention, "_SCORES", scores)


def _at_once_and_in_parts(
    name: str, precision: str, patch: pytest.MonkeyPatch
) -> list[GenerationState]:
    """Prefills at once, and two rows and 64 queries at a time."""
    target = random_targets.in_precision(families.RECIPES[name], precision)
    prompts = tiny.random_prompts(ROWS, target.vocab_size, low=FED - 20, high=FED)
    loop, params = tiny.bind(target, tiny.eagle3(target))
    states = []
    for tokens, scores in ((groups.TOKENS, attention._SCORES), (2 * FED, 1)):
        _in_parts(patch, tokens=tokens, scores=scores)
        jax.clear_caches()  # what is set is not an argument of what is compiled
        states.append(
            loops.prefill(loop, params, tiny.prompts(prompts, limit=20, width=FED), capacity=256)
        )
    return states


def test_a_prefill_in_parts_is_the_prefill(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares caches, first tokens and the state of the head."""
    at_once, parts = _at_once_and_in_parts(name, "float32", monkeypatch)
    if name not in NEARLY_EQUAL:
        assert _differ(at_once, parts) == []
        return
    for expected, leaf in zip(*map(jax.tree.leaves, (at_once, parts)), strict=True):
        np.testing.assert_allclose(_bits(expected), _bits(leaf), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", BIT_EQUAL)
def test_a_prefill_in_parts_is_the_prefill_in_bfloat16(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, parts = _at_once_and_in_parts(family, "bfloat16", monkeypatch)
    differ = _differ(at_once, parts)

    if family != "gpt_oss":
        assert differ == []
        return

    # What reads its last layer differs by up to 2⁻⁷ of 3.9, half a unit in the last place of the
    # largest: which roundings between two operations XLA leaves out depends on what it fuses. Where
    # it leaves out none (xla_allow_excess_precision=false), nothing differs.
    assert set(differ) <= {
        ".drafter.cache.layers[0].keys",
        ".drafter.cache.layers[0].values",
        ".drafter.output",
    }

    for expected, in_parts in zip(
        *map(jax.tree.leaves, (at_once.drafter, parts.drafter)), strict=True
    ):
        floats = (np.asarray(leaf, np.float32) for leaf in (in_parts, expected))
        np.testing.assert_allclose(*floats, rtol=2**-6, atol=2**-6)


def test_groups_divide_the_batch_and_keep_to_the_limits() -> None:
    for batch, tokens, capacity in itertools.product(
        (1, 2, 61, 64, 96), (1, 100, 128, 2048, 10**5), (160, 4096, 10**6)
    ):
        rows = groups.rows_per_group(batch, tokens, capacity)
        assert batch % rows == 0
        if rows < batch:
            assert batch * tokens > groups.TOKENS
            assert rows == 1 or rows * tokens <= groups.TOKENS
            assert (
                rows == 1
                or rows * capacity <= groups.SLOTS
                or rows * tokens <= groups.FEWEST_TOKENS
            )
        assert rows * tokens <= groups.TOKENS or rows == 1

    assert groups.rows_per_group(64, 2048, 4096) == 4
    assert groups.rows_per_group(64, 128, 4096) == 64


def test_a_mesh_divides_every_group() -> None:
    mesh = jax.sharding.AbstractMesh((8, 1), ("data", "model"))
    with jax.sharding.use_abstract_mesh(mesh):
        assert groups.rows_per_group(64, 2048, 4096) == 32
        assert groups.rows_per_group(8, 10**5, 10**5) == 8


def _temporary(fed: int, rows: int = 1) -> int:
    """Returns the temporary bytes of a prefill, without its arguments and results, on this CPU."""
    jax.clear_caches()
    loop, params = tiny.bind(target := tiny.target(num_layers=1), tiny.eagle3(target))
    batch = tiny.prompts([[1]] * rows, limit=4, width=fed)
    with tiny.unchecked():
        program: Any = loops.prefill.lower(loop, params, batch, capacity=fed).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_temporary_memory_grows_neither_with_squares_of_tokens_nor_with_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = _temporary(1024)
    assert before > 4 * 4 * 1024**2, "the scores of four heads"
    _in_parts(monkeypatch, tokens=1024, scores=2**16)
    short = _temporary(512)
    long = _temporary(1024)
    many = _temporary(512, rows=8)
    # The masks, a byte for every pair and four while they are made, are all that is still
    # quadratic.
    assert long < before / 4
    assert long < 3 * short
    assert many < 3 * short
