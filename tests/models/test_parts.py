"""Parts in which families differ, but not in the float32 logits of `test_families.py`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flax import nnx  # noqa: E402
from tiny import draw  # noqa: E402

from eagle3_jax.models.config import (  # noqa: E402
    GatedMLP,
    GroupedQuery,
    LayerConfig,
    QueryScaling,
)
from eagle3_jax.models.context import BlockContext, Span, attention_contexts, cache_mask  # noqa: E402
from eagle3_jax.models.layers import RMSNorm  # noqa: E402
from eagle3_jax.models.rope import scale_queries  # noqa: E402
from eagle3_jax.tree import causal_mask  # noqa: E402

pytestmark = pytest.mark.torch

BATCH = 2
FED = 9
HEADS = 4
KV_HEADS = 2
SIZE = 16


def theirs(module: str, name: str) -> Any:
    return getattr(__import__(f"transformers.models.{module}", fromlist=[name]), name)


NORMS = {
    "plain": ("llama.modeling_llama", "LlamaRMSNorm"),
    "float32": ("gpt_oss.modeling_gpt_oss", "GptOssRMSNorm"),
    "zero-centred": ("qwen3_next.modeling_qwen3_next", "Qwen3NextRMSNorm"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_those_of_transformers(kind: Any, dtype: str) -> None:
    x = 3 * draw(0, 5, 32)
    weight = draw(1, 32)

    norm = theirs(*NORMS[kind])(32, eps=1e-5)
    # As published models hold them: gpt-oss keeps the weights of its norms in float32.
    norm = norm if kind == "float32" else norm.to(getattr(torch, dtype))
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(weight))
        expected = norm(torch.from_numpy(x).to(getattr(torch, dtype))).float().numpy()

    ours = RMSNorm(32, 1e-5, kind)
    rounded = jnp.asarray(weight).astype("float32" if kind == "float32" else dtype)
    ours.scale = nnx.Param(rounded)
    out = np.asarray(ours(jnp.asarray(x).astype(dtype)).astype(jnp.float32))

    # The mean is summed in another order: a unit or two in the last place. A weight that multiplies
    # on the wrong side of the cast is off by a unit of bfloat16 in many places.
    np.testing.assert_allclose(out, expected, rtol=2**-21 if dtype == "float32" else 2**-7)
    assert dtype == "float32" or (out == expected).mean() > 0.97


POSITIONS = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 6, 7, 7, 9, 10]], np.int32)


def test_queries_grow_from_the_first_position_on() -> None:
    queries = draw(0, BATCH, FED, HEADS, SIZE)
    factor = np.log1p(np.floor((POSITIONS + 1.0) / 4)) * 0.5 + 1
    ours = scale_queries(
        jnp.asarray(queries), jnp.asarray(POSITIONS), QueryScaling(floor=4, beta=0.5, offset=1)
    )
    np.testing.assert_allclose(ours, queries * factor[..., None, None], rtol=1e-6)

    rounded = scale_queries(
        jnp.asarray(queries, jnp.bfloat16),
        jnp.asarray(POSITIONS),
        QueryScaling(floor=4, beta=0.5, offset=1),
    )

    narrow = torch.from_numpy(queries).bfloat16()
    expected = (narrow * torch.from_numpy(factor.astype(np.float32))[..., None, None]).to(
        torch.bfloat16
    )
    assert np.array_equal(np.asarray(rounded, np.float32), expected.float().numpy())


def test_chunks_are_counted_from_the_first_position() -> None:
    from transformers import masking_utils as masking

    sees = masking.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    index = torch.arange(11)
    expected = np.array([[bool(sees(0, 0, query, key)) for key in index] for query in index])
    positions = jnp.arange(11)[None]
    actual = Span(chunk=4).limit(causal_mask(11), positions, positions)
    assert np.array_equal(actual[0], expected)
    # A block of three behind eight committed tokens, the last two of it siblings at one position.
    mask = jnp.asarray([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)
    at = jnp.asarray([[8, 9, 9]])
    seen = cache_mask(mask, jnp.asarray([8]), 12, positions=at, span=Span(chunk=4))
    assert np.array_equal(seen[0, :2, :10], expected[8:10, :10])
    assert np.array_equal(seen[0, 2, :11], [*expected[9, :9], False, True])


def test_a_window_and_chunks_are_spans_of_layers() -> None:
    plain = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": SIZE}
    layers = [
        LayerConfig(mixer=GroupedQuery(**plain, **span), mlp=GatedMLP(width=4))
        for span in ({}, {"window": 3}, {"chunk": 4}, {"rope": None})
    ]

    positions = jnp.arange(FED)[None]
    seen = [
        memory.mask[0]
        for memory in attention_contexts(layers, causal_mask(FED), positions)
        if isinstance(memory, BlockContext)
    ]

    query, key = np.indices((FED, FED))
    causal = key <= query
    expected = [causal, causal & (key > query - 3), causal & (key // 4 == query // 4), causal]

    assert len(seen) == 4
    assert all(np.array_equal(a, b) for a, b in zip(seen, expected, strict=True))
