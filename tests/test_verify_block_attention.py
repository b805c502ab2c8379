"""The example that leaves the committed prefix to a library's kernel, against the core's own attention."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax import DynamicTree, SpeculativeDecoder
from eagle3_jax.cache import KeyValue
from eagle3_jax.tree import ancestor_mask

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import verify_block_attention as example

ON_A_CPU = ("xla", "pallas")  # the second one interpreted


@pytest.mark.parametrize("kernel", ON_A_CPU)
def test_a_tree_behind_prefixes_of_different_lengths_attends_as_in_the_core(kernel):
    if kernel == "pallas":
        pytest.importorskip("jax.experimental.pallas.ops.gpu.decode_attention", reason="JAX has removed it")
    batch, fed, heads, kv_heads, size, capacity = 2, 7, 6, 2, 16, 256
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    queries = draw(0, batch, fed, heads, size)
    prefix = KeyValue(draw(1, batch, kv_heads, capacity, size), draw(2, batch, kv_heads, capacity, size))
    block = KeyValue(draw(3, batch, kv_heads, fed, size), draw(4, batch, kv_heads, fed, size))
    length = jnp.array([1, 200], jnp.int32)
    parents = jnp.array([[-1, 0, 0, 1, 1, 2, 5], [-1, 0, 1, 2, 3, 4, 5]], jnp.int32)
    mask = ancestor_mask(parents, 6)
    expected = example.core(queries, prefix, length, block, mask)
    found = example.block_attention(queries, prefix, length, block, mask, kernel=kernel)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    # What lies beyond the length is garbage, which nobody sees.
    garbage = KeyValue(*(part.at[1, :, 200:].set(1e4) for part in prefix))
    again = example.block_attention(queries, garbage, length, block, mask, kernel=kernel)
    np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize(
    "draft", [{"num_speculative_tokens": 3}, {"tree": DynamicTree(num_nodes=8, max_depth=3, top_k=3)}]
)
def test_a_target_of_this_attention_writes_what_the_core_writes(draft):
    target = tiny.target()
    model = example.PrefixTarget(target.model.config, target.model.precision, kernel="xla")
    assert model != dataclasses.replace(model, kernel="pallas")
    ours = dataclasses.replace(target, model=model)
    given = {"max_new_tokens": 24, "seed": 0}
    expected = SpeculativeDecoder(target, stop_tokens=()).generate([[1, 2, 3], [4]], **given)
    found = SpeculativeDecoder(ours, tiny.eagle3(target), stop_tokens=(), **draft).generate([[1, 2, 3], [4]], **given)
    assert found.tokens == expected.tokens


def test_every_kernel_is_timed_or_says_why_not(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--rehearse"])
    example.main()
    row = json.loads(capsys.readouterr().out)
    for kernel in ("core", "xla"):
        assert row[kernel]["median"] > 0
    assert "cuDNN" in row["cudnn"]["failed"] or jax.default_backend() == "gpu"
