"""The attention kernel for GPUs, interpreted with JAX's operations, against XLA."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.cache import KeyValue, KeyValues
from eagle3_jax.models import flash
from eagle3_jax.models.attention import Scoring, Segment, attention
from eagle3_jax.models.context import CacheContext, ForKernel, Span, cache_mask
from eagle3_jax.tree import causal_mask

OFFICIAL = Path(__file__).parent.parent / "golden" / "official"
interpreted = functools.partial(flash.flash_attention, interpret=True)


def random(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def tree_mask(tokens: int) -> jax.Array:
    """Returns the mask of a random tree: a token sees itself, an earlier one, its ancestors."""
    rng = np.random.default_rng(tokens)
    mask = np.eye(tokens, dtype=bool)
    for token in range(1, tokens):
        mask[token] |= mask[rng.integers(token)]
    return jnp.asarray(mask)[None]


# Batch, tokens, key heads, group, capacity, head size, value size. Several parts of queries, splits
# that outnumber the tiles, capacities that no tile divides, values narrower than keys.
SHAPES = {
    "one token": (2, 1, 2, 4, 200, 64, 64),
    "chain": (2, 6, 2, 3, 256, 32, 32),
    "tree of 60": (1, 61, 2, 4, 300, 16, 16),
    "many rows": (40, 2, 8, 1, 130, 16, 16),
    "narrow values": (1, 5, 1, 8, 70, 64, 32),
}
SCORINGS = {
    "plain": Scoring(),
    "scaled and capped": Scoring(scale=0.3, softcap=2.0),
    "sinks": Scoring(sinks=random(9, 8)),
}


def check_attention(
    queries: jax.Array,
    kv: KeyValue,
    masks: tuple[Any, ...],
    length: jax.Array,
    size: int,
    scoring: Scoring = Scoring(),
) -> None:
    """Compares with attention under the last mask; with the others the kernel gives the same."""
    expected = attention(queries, (Segment(kv, masks[-1]),), (), scoring)
    options = {
        "scale": scoring.factor(queries.shape[-1]),
        "softcap": scoring.softcap,
        "sinks": scoring.sinks,
    }
    for mask in masks:
        actual = interpreted(queries, kv, mask, length, size=size, **options)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_attention(shape: tuple[int, ...]) -> None:
    """The mask is that of the block or of all slots; a chain needs none."""
    batch, tokens, kv_heads, group, capacity, size, width = shape
    queries = random(0, batch, tokens, kv_heads * group, size)
    kv = KeyValue(
        random(1, batch, kv_heads, capacity, size), random(2, batch, kv_heads, capacity, width)
    )

    length = jnp.asarray(
        np.random.default_rng(0).integers(0, capacity - tokens + 1, batch), jnp.int32
    )
    # One for each row.
    trees = jnp.concatenate([tree_mask(tokens), *[causal_mask(tokens)] * (batch - 1)])

    for mask, kernel_mask in ((trees, trees), (trees[:1], trees[:1]), (causal_mask(tokens), None)):
        check_attention(
            queries, kv, (kernel_mask, cache_mask(mask, length, capacity)), length, tokens
        )


def test_the_last_tokens_of_a_block_see_those_before_them() -> None:
    """Runs three of five tokens, like the levels of a draft."""
    queries = random(0, 2, 3, 4, 16)
    length = jnp.array([0, 61], jnp.int32)
    kv = KeyValue(random(1, 2, 2, 80, 16), random(2, 2, 2, 80, 16))
    tree = tree_mask(5)[:, 2:]
    for mask, kernel_mask in ((tree, tree), (causal_mask(5)[:, 2:], None)):
        check_attention(queries, kv, (kernel_mask, cache_mask(mask, length, 80)), length, 5)


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize(
    "span", [Span(), Span(window=20), Span(chunk=32)], ids=["all", "window", "chunk"]
)
def test_scales_caps_sinks_and_windows(scoring: Scoring, span: Span) -> None:
    queries = random(0, 2, 5, 8, 16)
    kv = KeyValue(random(1, 2, 2, 150, 16), random(2, 2, 2, 150, 16))
    length = jnp.array([3, 140], jnp.int32)
    positions = length[:, None] + jnp.arange(5, dtype=jnp.int32)[None]
    seen = cache_mask(causal_mask(5), length, 150, positions=positions, span=span)
    check_attention(queries, kv, (seen,), length, 5, scoring)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_token_has_the_same_bits_wherever_its_block_begins(dtype) -> None:
    """Compares tokens 102 to 105 in a block from 100 and in one with garbage after its end."""
    queries = random(0, 1, 6, 8, 16, dtype=dtype)
    kv = KeyValue(*(random(seed, 1, 2, 256, 16, dtype=dtype) for seed in (1, 2)))
    garbage = KeyValue(*(buffer.at[:, :, 106:].set(1e4) for buffer in kv))

    def outputs(queries: jax.Array, kv: KeyValue, start: int) -> jax.Array:
        length = jnp.array([start], jnp.int32)
        by_mask, in_order = (
            interpreted(queries, kv, mask, length, size=6, scale=0.25)[0]
            for mask in (causal_mask(6), None)
        )
        np.testing.assert_array_equal(by_mask, in_order)
        return in_order

    early = outputs(queries, kv, 100)
    late = outputs(jnp.roll(queries, -2, axis=1), garbage, 102)
    np.testing.assert_array_equal(early[2:], late[:4])


def test_it_reads_no_slot_from_the_end_on() -> None:
    """A NaN in any tile that is read would spread, even with a weight of zero."""
    queries = random(0, 1, 2, 2, 16)
    length = jnp.array([62], jnp.int32)
    kv = KeyValue(*(random(seed, 1, 1, 192, 16).at[:, :, 64:].set(jnp.nan) for seed in (1, 2)))
    for seen in (causal_mask(2), cache_mask(causal_mask(2), length, 192), None):
        assert np.isfinite(interpreted(queries, kv, seen, length, size=2, scale=0.25)).all()


def test_its_gradient_is_that_of_attention() -> None:
    layer = KeyValues(
        keys=random(1, 1, 2, 64, 16, dtype=jnp.bfloat16),
        values=random(2, 1, 2, 64, 16, dtype=jnp.bfloat16),
    )
    block = KeyValue(*(random(seed, 1, 2, 3, 16, dtype=jnp.bfloat16) for seed in (3, 4)))
    length = jnp.array([10], jnp.int32)

    def gradient(kernel: ForKernel | None) -> jax.Array:
        memory = CacheContext(layer, length, cache_mask(causal_mask(3), length, 64), kernel)
        total = lambda queries: jnp.sum(memory.attend(queries, block)[0].astype(jnp.float32) ** 2)
        return jax.grad(total)(random(0, 1, 3, 4, 16, dtype=jnp.bfloat16))

    np.testing.assert_array_equal(gradient(ForKernel(length, 3, causal_mask(3))), gradient(None))


DRAFTS = {
    "plain": None,
    "chain": {"num_speculative_tokens": 4},
    "tree": {"tree": e3.DynamicTree(num_nodes=12, max_depth=4, top_k=3)},
}


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_generation_with_the_kernel_writes_the_same_tokens(
    draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*args, **options):
        calls.append(args)
        return interpreted(*args, **options)

    target = e3.load_target(OFFICIAL / "target")
    drafter = None if draft is None else e3.load_drafter(OFFICIAL / "eagle3", target=target)
    prompts = [[1, 17, 5, 42, 33, 9, 71, 8], [3], [8] * 12]
    generate = lambda: (
        e3.SpeculativeDecoder(target, drafter, **draft or {})
        .generate(prompts, max_new_tokens=20)
        .tokens
    )
    expected = generate()
    assert not calls
    monkeypatch.setattr(flash, "flash_attention", counted)
    # In float32 no logits nearly tie here.
    monkeypatch.setattr(flash, "is_supported", lambda queries, kv: True)
    jax.clear_caches()
    with flash.enabled(True):
        assert generate() == expected
    assert calls
    jax.clear_caches()


def test_which_arrays_the_kernel_takes() -> None:
    def taken(tokens: int = 6, size: int = 64, dtype=jnp.bfloat16) -> bool:
        kv = KeyValue(*(jnp.zeros((1, 2, 8, size), dtype) for _ in range(2)))
        return flash.is_supported(jnp.zeros((1, tokens, 4, size), dtype), kv)

    assert taken()
    assert not taken(tokens=129)  # a prompt
    assert not taken(size=96)
    # In full precision its products are slow to compile and to run.
    assert not taken(dtype=jnp.float32)
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert not taken()


@pytest.mark.parametrize(
    ("platform", "capability", "agrees", "is_enabled"),
    [
        ("gpu", "9.0", True, True),
        ("gpu", "9.0", False, False),
        ("gpu", "7.5", True, False),  # bfloat16 came with 8.0
        ("cpu", "9.0", True, False),
    ],
)
def test_the_kernel_is_on_for_gpus_on_which_it_is_right(
    platform: str, capability: str, agrees: bool, is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = types.SimpleNamespace(
        platform=platform, device_kind="NVIDIA H200", compute_capability=capability
    )

    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(
        flash, "agrees_with_reference", lambda attend: agrees and attend is flash.flash_attention
    )
    assert flash.is_enabled() == is_enabled

    monkeypatch.setenv("EAGLE3_ATTENTION", "xla")
    assert not flash.is_enabled()
    with flash.enabled(True):
        assert not flash.is_enabled()

    monkeypatch.setenv("EAGLE3_ATTENTION", "cudnn")
    with pytest.raises(ValueError, match="EAGLE3_ATTENTION is 'cudnn'; expected xla"):
        flash.is_enabled()


def test_the_kernel_is_compared_before_its_first_use_also_while_a_program_is_traced() -> None:
    agreements = []

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        agreements.append(flash.agrees_with_reference(interpreted))
        return x

    program(jnp.zeros(()))
    assert agreements == [True]


def ignore_length(queries, kv, seen, length, **options):
    return interpreted(queries, kv, seen, jnp.zeros_like(length), **options)


def attend_to_siblings(queries, kv, seen, length, **options):
    return interpreted(queries, kv, None, length, **options)


def fail_to_compile(*arguments, **options):
    raise RuntimeError("no such instruction\nsecond line")


@pytest.mark.parametrize(
    ("attend", "message"),
    [
        (ignore_length, "the attention kernel is off by [0-9.e+]+; attention is left to XLA"),
        (attend_to_siblings, "the attention kernel is off by [0-9.e+]+; attention is left to XLA"),
        (
            fail_to_compile,
            r"the attention kernel failed \(no such instruction\); attention is left to XLA",
        ),
    ],
)
def test_a_kernel_that_fails_or_differs_is_not_used(attend: Any, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        assert not flash.agrees_with_reference(attend)
