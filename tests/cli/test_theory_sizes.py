"""Sizes that are counted from the networks, against numbers counted by hand."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from eagle3_jax.models.config import (
    DecoderConfig,
    Eagle3Config,
    Experts,
    GatedDelta,
    GatedMLP,
    GroupedQuery,
    Latent,
    LayerConfig,
)
from eagle3_jax.theory.sizes import Parameters, parameters, sizes_of

D = 9  # width of the residual stream
PLAIN = GroupedQuery(num_heads=6, num_kv_heads=2, head_dim=4)
MLP = GatedMLP(width=10)
LATENT = Latent(num_heads=3, q_rank=7, kv_rank=5, nope_dim=4, rope_dim=2, value_dim=6)
DELTA = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, kernel=3)
SHARED = Experts(num_experts=4, per_token=1, width=3, router="sigmoid", shared_width=7, shared_gate=True)

# A layer, its parameters without the two norms of the block, and its numbers per token, of states and of windows.
LAYERS = {
    "plain": (PLAIN, MLP, Parameters(query_output=2 * D * 24, key_value=D * 16, mlp=3 * D * 10), (16, 0, 0)),
    "biases": (
        dataclasses.replace(PLAIN, qkv_bias=True, o_bias=True, qk_norm=True, sinks=True),
        GatedMLP(width=10, bias=True),
        Parameters(query_output=2 * D * 24, key_value=D * 16, mlp=3 * D * 10, vectors=40 + D + 2 * 4 + 6 + 2 * 10 + D),
        (16, 0, 0),
    ),
    "latents": (
        LATENT,
        MLP,
        Parameters(
            query_output=7 * 3 * 6 + 3 * (4 + 6) * 5 + 3 * 6 * D, key_value=D * (7 + 7), mlp=3 * D * 10, vectors=7 + 5
        ),
        (7, 0, 0),
    ),
    "recurrence": (
        DELTA,
        MLP,
        Parameters(query_output=D * (32 + 20 + 8) + 20 * D, mlp=3 * D * 10, vectors=32 * 3 + 2 * 4 + 5),
        (0, 4 * 3 * 5, 2 * 32),
    ),
    "experts": (
        PLAIN,
        SHARED,
        Parameters(
            query_output=2 * D * 24,
            key_value=D * 16,
            mlp=3 * D * 7,
            experts=4 * 3 * D * 3,
            routers=4 * D + D,
            vectors=4,
        ),
        (16, 0, 0),
    ),
}


def decoder(*layers: LayerConfig, tied: bool = False) -> DecoderConfig:
    return DecoderConfig(vocab_size=17, width=D, layers=layers, tie_embeddings=tied)


@pytest.mark.parametrize("name", LAYERS)
def test_every_parameter_of_a_layer_is_counted_by_its_use(name: str) -> None:
    mixer, mlp, expected, cached = LAYERS[name]
    layer, other = LayerConfig(mixer=mixer, mlp=mlp), LayerConfig(mixer=PLAIN, mlp=GatedMLP(width=1))
    run, middle, last = sizes_of(decoder(layer, layer, other, layer)).runs
    with_norms = dataclasses.replace(expected, vectors=expected.vectors + 2 * D)
    assert (run.count, middle.count, last.count) == (2, 1, 1)
    assert last.sizes == with_norms
    assert run.sizes == Parameters(**{use: 2 * count for use, count in dataclasses.asdict(with_norms).items()})
    assert (last.cache_values_per_token, last.state_values, last.window_values) == cached


def test_tables_and_norms_outside_of_layers() -> None:
    layer = LayerConfig(mixer=PLAIN, mlp=MLP)
    for tied, embedding in ((False, 17 * D), (True, 0)):
        counted, in_layers = parameters(decoder(layer, tied=tied)), sizes_of(decoder(layer)).runs[0].sizes
        assert (counted.embedding, counted.output, counted.fusion) == (embedding, 17 * D, 0)
        assert counted.vectors == in_layers.vectors + D


def test_the_first_layer_of_a_head_reads_embedding_and_features() -> None:
    layer = LayerConfig(mixer=PLAIN, mlp=MLP)
    head = Eagle3Config(
        vocab_size=17,
        width=D,
        layers=(layer, layer),
        draft_vocab_size=5,
        target_width=8,
        aux_layers=(1, 2),
        fc_norm=True,
    )
    first, rest = sizes_of(head).runs
    assert (first.sizes.query_output, first.sizes.key_value, first.sizes.vectors) == (3 * D * 24, 2 * D * 16, 3 * D)
    assert (rest.sizes.query_output, rest.sizes.key_value, rest.sizes.vectors) == (2 * D * 24, D * 16, 2 * D)
    counted = parameters(head)
    assert (counted.fusion, counted.output, counted.embedding) == (2 * 8 * D, 5 * D, 0)
    assert counted.vectors == 5 * D + D + 2 * 8  # layers, final norm, norms of the features


def test_a_token_goes_through_some_experts_and_many_tokens_through_most() -> None:
    config = decoder(LayerConfig(mixer=PLAIN, mlp=SHARED))
    assert sizes_of(config).active == parameters(config).total - 17 * D - 3 * (3 * D * 3)
    # All choices of two experts of four by three tokens, counted one by one.
    of = Experts(num_experts=4, per_token=2, width=1, router="softmax")
    choices = list(itertools.product(itertools.combinations(range(4), 2), repeat=3))
    mean = sum(len({expert for pair in choice for expert in pair}) for choice in choices) / len(choices)
    (run,) = sizes_of(decoder(LayerConfig(mixer=PLAIN, mlp=of))).runs
    assert run.experts_read(3) == pytest.approx(mean * 3 * D)
    assert (run.experts_read(1), run.experts_read(None)) == (2 * 3 * D, 4 * 3 * D)
