"""Parameters and caches counted from a description, against the arrays that the networks of that description have."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import pytest
from checkpoints import TARGET

from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.models.config import (
    DecoderConfig,
    Eagle3Config,
    Experts,
    GatedDelta,
    GatedMLP,
    GroupedQuery,
    Latent,
    LayerConfig,
    uniform,
    usual_head,
)
from eagle3_jax.models.config.stacks import MLP as MLP_
from eagle3_jax.models.config.stacks import Mixer
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.theory.layer_sizes import share_of_experts
from eagle3_jax.theory.sizes import active_parameters, cache_values_per_token, layer_runs, parameters

PLAIN = GroupedQuery(num_heads=6, num_kv_heads=2, head_dim=4)
MLP = GatedMLP(width=10)


def decoder(*layers: LayerConfig, tied: bool = False) -> DecoderConfig:
    return DecoderConfig(vocab_size=17, width=9, layers=layers, tie_embeddings=tied)


def changed(mlp: GatedMLP = MLP, **mixer: Any) -> LayerConfig:
    return LayerConfig(mixer=dataclasses.replace(PLAIN, **mixer), mlp=mlp)


TARGETS = {
    "plain": decoder(*uniform(3, PLAIN, MLP)),
    "tied": decoder(changed(), tied=True),
    "q, k and v with biases": decoder(changed(qkv_bias=True)),
    "all biases": decoder(changed(GatedMLP(width=10, bias=True), qkv_bias=True, o_bias=True)),
    "normalised queries and keys": decoder(changed(qk_norm=True)),
    "windows": decoder(changed(window=3), changed(), changed(window=3)),
    "unlike layers": decoder(
        changed(), changed(), changed(num_heads=2, num_kv_heads=1, head_dim=6), changed(GatedMLP(width=7)), tied=True
    ),
}
LATENT = Latent(num_heads=3, q_rank=7, kv_rank=5, nope_dim=4, rope_dim=2, value_dim=6)
DELTA = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, kernel=3)
EXPERTS = Experts(num_experts=6, per_token=2, width=11, router="softmax")
BESIDE = Experts(num_experts=4, per_token=1, width=3, router="sigmoid", shared_width=7, shared_gate=True)


def layer(mixer: Mixer = PLAIN, mlp: MLP_ = MLP) -> LayerConfig:
    return LayerConfig(mixer=mixer, mlp=mlp)


TARGETS |= {
    "gates of what is attended, and sinks": decoder(changed(output_gate=True, sinks=True, qk_l2_norm=True)),
    "latents": decoder(layer(LATENT), layer()),
    "latents, no rank of queries, biases": decoder(layer(dataclasses.replace(LATENT, q_rank=None, bias=True))),
    "latents with biases": decoder(layer(dataclasses.replace(LATENT, bias=True))),
    "recurrences": decoder(layer(DELTA), layer(DELTA), layer()),
    "experts": decoder(layer(mlp=EXPERTS), layer()),
    "experts with biases": decoder(layer(mlp=dataclasses.replace(EXPERTS, bias=True, limit=7.0))),
    "experts beside a shared one": decoder(layer(mlp=BESIDE), layer(LATENT, EXPERTS)),
}
HEAD = Eagle3Config(
    vocab_size=17, width=9, layers=uniform(1, PLAIN, MLP), draft_vocab_size=5, target_width=8, aux_layers=(1, 2)
)
HEADS = {
    "usual": usual_head(TARGET),
    "two layers": dataclasses.replace(HEAD, layers=uniform(2, PLAIN, MLP)),
    "features normalised apart": dataclasses.replace(HEAD, fc_norm=True, norm_output=True),
    "features normalised together": dataclasses.replace(HEAD, norm_before_fc=True, norm_before_residual=True),
    "all biases": dataclasses.replace(
        HEAD, layers=(changed(GatedMLP(width=10, bias=True), qkv_bias=True, o_bias=True, qk_norm=True),) * 3
    ),
}
ALL = [pytest.param(config, id=name) for table in (TARGETS, HEADS) for name, config in table.items()]


def network_of(config: DecoderConfig | Eagle3Config) -> Any:
    return DecoderTarget(config) if isinstance(config, DecoderConfig) else Eagle3Drafter(config)


KINDS = {
    **dict.fromkeys(("qkv", "o", "q", "q_a", "q_b", "kv_a", "key_up", "value_up", "qkvz", "ba"), "attention"),
    **dict.fromkeys(("gate_up", "down"), "mlp"),
    **dict.fromkeys(("router", "shared_gate"), "routers"),
    "fc": "fusion",
    "head": "output",
    "embedding": "embedding",
}


def kind_of(names: list[str], shape: tuple[int, ...]) -> str:
    """What a parameter belongs to, by its name and shape alone."""
    if names[-1] in ("gate_up", "down", "gate_up_bias", "down_bias"):
        return "experts"
    matrix = names[-1] if names[-1] in KINDS else names[-2]
    return "vectors" if len(shape) == 1 or names[-1] == "convolution" else KINDS[matrix]


@pytest.mark.parametrize("config", ALL)
def test_every_parameter_is_counted_where_it_belongs(config: DecoderConfig | Eagle3Config) -> None:
    held: dict[str, int] = dict.fromkeys([*KINDS.values(), "vectors", "experts"], 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(network_of(config).param_shapes()):
        held[kind_of([str(getattr(entry, "key", entry)) for entry in path], leaf.shape)] += leaf.size
    if isinstance(config, DecoderConfig) and config.tie_embeddings:
        held |= {"output": held["embedding"], "embedding": 0}
    counted = parameters(config)
    assert held == {
        "attention": counted.query_output + counted.key_value,
        "mlp": counted.mlp,
        "experts": counted.experts,
        "routers": counted.routers,
        "fusion": counted.fusion,
        "output": counted.output,
        "vectors": counted.vectors,
        "embedding": counted.embedding,
    }


def test_a_token_goes_through_some_experts_and_many_tokens_through_most() -> None:
    config = TARGETS["experts beside a shared one"]
    one, other = 3 * 9 * 3, 3 * 9 * 11  # parameters of an expert
    assert active_parameters(config) == parameters(config).total - 17 * 9 - 3 * one - 4 * other
    assert active_parameters(TARGETS["plain"]) == parameters(TARGETS["plain"]).total - 17 * 9
    # All choices of two experts of four by three tokens, counted one by one.
    of = Experts(num_experts=4, per_token=2, width=1, router="softmax")
    pairs = list(itertools.combinations(range(4), 2))
    choices = list(itertools.product(pairs, repeat=3))
    mean = sum(len({expert for pair in choice for expert in pair}) for choice in choices) / len(choices)
    assert share_of_experts(of, 3) * 4 == pytest.approx(mean)
    assert share_of_experts(of, 1) * 4 == 2
    assert share_of_experts(MLP, 3) == 1


@pytest.mark.parametrize("config", ALL)
def test_a_token_adds_to_the_caches_what_their_buffers_have_for_it(config: DecoderConfig | Eagle3Config) -> None:
    network = network_of(config)

    def buffers() -> list[Any]:
        cache = network.init_cache(1, 1) if isinstance(config, DecoderConfig) else network.init({}, 1, 1).cache
        return jax.tree.leaves(cache.layers)

    held = sum(leaf.size for leaf in jax.eval_shape(buffers))
    sizes = [run.sizes for run in layer_runs(config)]
    assert cache_values_per_token(config) + sum(one.state_values + one.window_values for one in sizes) == held


def test_keys_and_values_are_the_columns_that_the_query_heads_leave() -> None:
    first, second = layer_runs(decoder(changed(), changed(num_heads=4, num_kv_heads=4)))
    assert (first.sizes.query_output, first.sizes.key_value) == (2 * 9 * 6 * 4, 2 * 9 * 2 * 4)
    assert (second.sizes.query_output, second.sizes.key_value) == (2 * 9 * 4 * 4, 2 * 9 * 4 * 4)
    widest, other = layer_runs(HEADS["two layers"])
    assert (widest.sizes.query_output, widest.sizes.key_value) == (3 * 9 * 6 * 4, 2 * 18 * 2 * 4)
    assert (other.sizes.query_output, other.sizes.key_value) == (2 * 9 * 6 * 4, 2 * 9 * 2 * 4)


def test_equal_neighbours_are_counted_together() -> None:
    assert [run.count for run in layer_runs(TARGETS["unlike layers"])] == [2, 1, 1]
    assert [run.count for run in layer_runs(TARGETS["windows"])] == [1, 1, 1]
    assert [run.count for run in layer_runs(HEADS["all biases"])] == [1, 2]
