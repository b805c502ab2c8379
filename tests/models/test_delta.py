"""The gated delta net against transformers' on texts, blocks and trees, and its commits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import draw, same_bits

from eagle3_jax.cache import Cache
from eagle3_jax.models.config import GatedDelta, GatedMLP, LayerConfig
from eagle3_jax.models.context import attention_contexts, empty_cache, parents_of
from eagle3_jax.models.delta import GatedDeltaNet
from eagle3_jax.models.layers import FLOAT32
from eagle3_jax.models.recurrent import Recurrent
from eagle3_jax.tree import ancestor_mask, causal_mask

pytestmark = pytest.mark.core

BATCH = 2
WIDTH = 32
EPS = 1e-6
MIXER = GatedDelta(num_key_heads=2, num_value_heads=6, key_dim=8, value_dim=4, kernel=4)
LAYER = LayerConfig(mixer=MIXER, mlp=GatedMLP(width=4))
PARENTS = np.array([[-1, 0, 0, 1, 2, 3, 4], [-1, 0, 1, 2, 0, 4, 5]], np.int32)
COMMIT = jax.jit(Cache.commit)
PATHS = np.array([[0, 2, 4, 6], [0, 4, 5, 6]], np.int32)
COUNTS = np.array([4, 3], np.int32)


@functools.cache
def theirs() -> Any:
    """Returns the layer of transformers with random values of all parameters."""
    import torch
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=WIDTH, num_hidden_layers=1, linear_num_key_heads=2, linear_num_value_heads=6,
        linear_key_head_dim=8, linear_value_head_dim=4, linear_conv_kernel_dim=4, rms_norm_eps=EPS,
    )  # fmt: skip
    layer = Qwen3NextGatedDeltaNet(config, 0).float().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in layer.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            special = {"norm.weight": 1 + 0.3 * noise, "A_log": 0.5 * noise, "dt_bias": noise}
            value.copy_(special.get(name, 0.4 * noise))
    return layer


def torch_reads(x: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return theirs()(torch.from_numpy(x)).numpy()


@functools.cache
def ours() -> tuple[Any, Any]:
    """Returns the same layer of this library."""
    layer = GatedDeltaNet(
        MIXER, d_in=WIDTH, width=WIDTH, norm_eps=EPS, precision=FLOAT32, rngs=nnx.Rngs(0)
    )

    weights = {name: value.detach().numpy() for name, value in theirs().named_parameters()}
    flat = weights["conv1d.weight"].T
    keys = MIXER.num_key_heads * MIXER.key_dim
    heads = MIXER.num_key_heads
    parts = [part.reshape(4, 1, heads, -1) for part in np.split(flat, [keys, 2 * keys], axis=-1)]

    params = {
        "qkvz": {"kernel": weights["in_proj_qkvz.weight"].T},
        "ba": {"kernel": weights["in_proj_ba.weight"].T},
        "convolution": np.concatenate(parts, axis=-1).reshape(flat.shape),
        "a_log": weights["A_log"],
        "dt_bias": weights["dt_bias"],
        "norm": {"scale": weights["norm.weight"]},
        "o": {"kernel": weights["out_proj.weight"].T},
    }

    graph, state = nnx.split(layer)
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, params))
    return graph, state


def run(x: Any, mask: Any, cache: Any = None, length: Any = None) -> Any:
    """Returns the output of the layer, and the state for its cache."""
    return _run(*ours(), x, mask, cache, length)


@functools.partial(jax.jit, static_argnums=0)
def _run(graph: Any, state: Any, x: Any, mask: Any, cache: Any, length: Any) -> Any:
    positions = jnp.zeros((x.shape[0], mask.shape[-1]), jnp.int32)
    (memory,) = attention_contexts([LAYER], mask, positions, cache, length)
    return nnx.merge(graph, state)(x, positions, memory)


def empty() -> Cache:
    return empty_cache([LAYER], batch=BATCH, capacity=32, dtype=jnp.float32)


def after(x: np.ndarray, length: Any = None) -> Cache:
    """Returns the cache after a text."""
    size = jnp.full((BATCH,), x.shape[1]) if length is None else jnp.asarray(length)
    _, written = run(x, causal_mask(x.shape[1]), None, size)
    return empty().fill((written,), size)


def state_of(cache: Cache) -> Recurrent:
    (layer,) = cache.layers
    assert isinstance(layer, Recurrent)
    return layer


def nearly(actual: np.ndarray, expected: np.ndarray) -> None:
    """Checks that two arrays are equal up to the rounding of two sums in float32, on any CPU."""
    np.testing.assert_allclose(actual, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.torch
@pytest.mark.parametrize("size", [1, 3, 14, 64, 150])
def test_a_text_is_read_as_transformers_reads_it(size: int) -> None:
    x = draw(size, BATCH, size, WIDTH)
    expected = torch_reads(x)
    # Both are 3e-6 off sums in 64 bits at the root of their mean square. What is read is
    # normalised, so where little is read the same rounding is more: of seven texts, the largest
    # gaps are 2e-6 to 7e-6 of the largest value.
    nearly(run(x, causal_mask(size))[0], expected)


@pytest.mark.torch
def test_tokens_one_by_one_are_the_text() -> None:
    x = draw(0, BATCH, 9, WIDTH)
    cache = empty()
    ones = jnp.ones((BATCH,), jnp.int32)
    for token in range(9):
        read, written = run(x[:, token : token + 1], causal_mask(1), cache)
        cache = cache.commit((written,), ones)
        nearly(read[:, 0], torch_reads(x)[:, token])
    for actual, expected in zip(
        *map(jax.tree.leaves, (state_of(cache), state_of(after(x)))), strict=True
    ):
        nearly(actual, expected)


@pytest.mark.torch
def test_every_node_of_a_tree_reads_its_own_path() -> None:
    text = draw(0, BATCH, 9, WIDTH)
    nodes = draw(1, BATCH, 7, WIDTH)
    read, _ = run(nodes, ancestor_mask(jnp.asarray(PARENTS), 7), after(text))
    for row in range(BATCH):
        for node in range(7):
            path = [node]
            while PARENTS[row, path[0]] >= 0:
                path.insert(0, PARENTS[row, path[0]])
            sequence = np.concatenate([text[row], nodes[row, path]])[None]
            nearly(read[row, node], torch_reads(sequence)[0, -1])


@pytest.mark.torch
def test_a_committed_path_is_bit_for_bit_what_its_tokens_alone_leave() -> None:
    text = draw(0, BATCH, 9, WIDTH)
    nodes = draw(1, BATCH, 7, WIDTH)
    rows = np.arange(BATCH)[:, None]

    cache = after(text)
    more = draw(2, BATCH, 3, WIDTH)

    tree, written = run(nodes, ancestor_mask(jnp.asarray(PARENTS), 7), cache)
    of_tree = COMMIT(cache, (written,), jnp.asarray(COUNTS), jnp.asarray(PATHS))
    chain, written = run(nodes[rows, PATHS], causal_mask(4), cache)
    of_chain = COMMIT(cache, (written,), jnp.asarray(COUNTS))

    for row, count in enumerate(COUNTS):
        assert np.array_equal(tree[row, PATHS[row, :count]], chain[row, :count])

    assert same_bits(state_of(of_tree), state_of(of_chain))
    assert not np.array_equal(state_of(of_tree).state, state_of(cache).state)
    assert same_bits(
        *(run(more, causal_mask(3), committed)[0] for committed in (of_tree, of_chain))
    )


@pytest.mark.parametrize("size", [(2, 2, 2, 8, 4), (1, 4, 6, 64, 32), (3, 1, 3, 16, 16)], ids=str)
def test_a_node_computes_the_bits_of_a_token_alone(size: tuple[int, ...]) -> None:
    """Compares a tree with single tokens, behind the projections.

    The sums of projections may depend on the number of rows.
    """
    batch, heads, group, dk, dv = size
    mixer = GatedDelta(num_key_heads=heads, num_value_heads=heads * group, key_dim=dk, value_dim=dv)
    layer = GatedDeltaNet(mixer, d_in=8, width=8, norm_eps=EPS, precision=FLOAT32, rngs=nnx.Rngs(1))
    graph, weights = nnx.split(layer)

    @jax.jit
    def block(weights: Any, inputs: Any, betas: Any, decays: Any, parents: Any, start: Any) -> Any:
        return nnx.merge(graph, weights)._block(inputs, betas, decays, parents, start)

    parents = np.array([-1, 0, 0, 1, 2, 4, 3])[None].repeat(batch, 0)
    path = [0, 2, 4, 5]
    rng = np.random.default_rng(2)
    inputs = draw(3, batch, 7, heads, 2 * dk + group * dv)
    betas, decays = (
        rng.uniform(low, 1, (batch, 7, heads, group)).astype(np.float32) for low in (0.0, 0.6)
    )
    start = Recurrent(
        state=jnp.asarray(draw(4, batch, heads * group, dk, dv)),
        window=jnp.asarray(draw(5, batch, heads, 3, 2 * dk + group * dv)),
    )
    read, written = block(weights, inputs, betas, decays, parents, start)
    ones = jnp.ones((batch,), jnp.int32)
    zeros = jnp.zeros((batch,), jnp.int32)
    nodes = jnp.asarray(path)[None].repeat(batch, 0)
    commit = jax.jit(Recurrent.commit)
    of_tree = commit(start, written, zeros, 4 * ones, nodes)
    slowly = start
    for node in path:
        token_inputs = [leaf[:, node : node + 1] for leaf in (inputs, betas, decays)]
        token_read, written = block(weights, *token_inputs, parents[:, :1], slowly)
        assert np.array_equal(token_read[:, 0], read[:, node])
        slowly = commit(slowly, written, zeros, ones, None)
    assert same_bits(of_tree, slowly)
    assert not np.array_equal(of_tree.state, start.state)
    assert not np.array_equal(of_tree.window, start.window)


@pytest.mark.torch
def test_a_row_of_which_nothing_stays_keeps_its_bits() -> None:
    cache = after(draw(0, BATCH, 9, WIDTH))
    nodes = draw(1, BATCH, 7, WIDTH)
    _, written = run(nodes, ancestor_mask(jnp.asarray(PARENTS), 7), cache)

    for count, path in (([0, 3], PATHS), ([0, 3], None)):
        moved = COMMIT(
            cache, (written,), jnp.asarray(count), None if path is None else jnp.asarray(path)
        )

        for leaf, before in zip(
            *map(jax.tree.leaves, (state_of(moved), state_of(cache))), strict=True
        ):
            assert np.array_equal(leaf[0], before[0])
            assert not np.array_equal(leaf[1], before[1])


@pytest.mark.torch
@pytest.mark.parametrize("size", [9, 100])
def test_padding_leaves_no_trace(size: int) -> None:
    """Rows of different lengths, also shorter than the window, with different padding."""
    x = draw(0, BATCH, size, WIDTH)
    length = np.array([size - 2, 2])
    cache = after(x, length)
    x[np.arange(size)[None] >= length[:, None]] = 1e3
    assert same_bits(cache, after(x, length))
    for row, count in enumerate(length):
        unpadded = after(np.broadcast_to(x[row, :count], (BATCH, count, WIDTH)))
        for actual, expected in zip(
            *map(jax.tree.leaves, (state_of(cache), state_of(unpadded))), strict=True
        ):
            np.testing.assert_allclose(actual[row], expected[0], atol=1e-5)


@pytest.mark.torch
def test_a_batch_for_training_hides_its_padding_by_the_mask() -> None:
    x = draw(0, BATCH, 9, WIDTH)
    length = np.array([7, 2])
    real = np.arange(9)[None] < length[:, None]
    _, written = run(x, causal_mask(9) & real[:, None, :])
    for actual, expected in zip(
        *map(jax.tree.leaves, (written, state_of(after(x, length)))), strict=True
    ):
        # Two programs, which may sum in another order.
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_a_text_holds_no_state_for_each_of_its_tokens() -> None:
    size = 512
    mixer = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=64, value_dim=64)
    layer = GatedDeltaNet(mixer, d_in=8, width=8, norm_eps=EPS, precision=FLOAT32, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(layer)

    @jax.jit
    def text(weights: Any, x: Any) -> Any:
        (memory,) = attention_contexts([LAYER], causal_mask(size), jnp.zeros((1, size), jnp.int32))
        return nnx.merge(graph, weights)(x, memory.parents, memory)

    inputs = jax.ShapeDtypeStruct((1, size, 8), jnp.float32)
    used = text.lower(weights, inputs).compile().memory_analysis().temp_size_in_bytes
    assert 0 < used < size * 4 * mixer.num_value_heads * mixer.key_dim * mixer.value_dim / 2


def test_the_parent_is_the_last_other_token_seen() -> None:
    assert np.array_equal(parents_of(ancestor_mask(jnp.asarray(PARENTS), 7)), PARENTS)
    assert np.array_equal(parents_of(causal_mask(4)), [[-1, 0, 1, 2]])


def test_tokens_behind_a_block_that_no_state_took_in_are_refused() -> None:
    mask = jnp.ones((BATCH, 2, 5), bool)
    with pytest.raises(
        ValueError, match="the last 2 tokens of a block of 5 were given to a recurrent layer"
    ):
        attention_contexts([LAYER], mask, jnp.zeros((BATCH, 5), jnp.int32), empty())
