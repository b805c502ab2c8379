"""Parameters and caches counted from a description, against the arrays that the networks of that description have."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest
from checkpoints import TARGET

from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.models.config import (
    DecoderConfig,
    Eagle3Config,
    GatedMLP,
    GroupedQuery,
    LayerConfig,
    uniform,
    usual_head,
)
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.theory.sizes import cache_values_per_token, layer_runs, parameters

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


@pytest.mark.parametrize("config", ALL)
def test_every_parameter_is_counted_where_it_belongs(config: DecoderConfig | Eagle3Config) -> None:
    kinds = {"qkv": "attention", "o": "attention", "gate_up": "mlp", "down": "mlp", "fc": "fusion", "head": "output"}
    held: dict[str, int] = dict.fromkeys(("attention", "mlp", "fusion", "output", "vectors", "embedding"), 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(network_of(config).param_shapes()):
        names = [str(getattr(entry, "key", entry)) for entry in path]
        kind = "embedding" if names == ["embedding"] else kinds.get(names[-2], "")
        held["vectors" if len(leaf.shape) == 1 else kind] += leaf.size
    if isinstance(config, DecoderConfig) and config.tie_embeddings:
        held |= {"output": held["embedding"], "embedding": 0}
    counted = parameters(config)
    assert held == {
        "attention": counted.query_output + counted.key_value,
        "mlp": counted.mlp,
        "fusion": counted.fusion,
        "output": counted.output,
        "vectors": counted.vectors,
        "embedding": counted.embedding,
    }


@pytest.mark.parametrize("config", ALL)
def test_a_token_adds_to_the_caches_what_their_buffers_have_for_it(config: DecoderConfig | Eagle3Config) -> None:
    network = network_of(config)

    def buffers() -> list[Any]:
        cache = network.init_cache(1, 1) if isinstance(config, DecoderConfig) else network.init({}, 1, 1).cache
        return jax.tree.leaves(cache.layers)

    held = sum(leaf.size for leaf in jax.eval_shape(buffers))
    assert cache_values_per_token(config) == held


def test_keys_and_values_are_the_columns_that_the_query_heads_leave() -> None:
    first, second = layer_runs(decoder(changed(), changed(num_heads=4, num_kv_heads=4)))
    assert (first.query_output, first.key_value) == (2 * 9 * 6 * 4, 2 * 9 * 2 * 4)
    assert (second.query_output, second.key_value) == (2 * 9 * 4 * 4, 2 * 9 * 4 * 4)
    widest, other = layer_runs(HEADS["two layers"])
    assert (widest.query_output, widest.key_value) == (3 * 9 * 6 * 4, 2 * 18 * 2 * 4)
    assert (other.query_output, other.key_value) == (2 * 9 * 6 * 4, 2 * 9 * 2 * 4)


def test_equal_neighbours_are_counted_together() -> None:
    assert [run.count for run in layer_runs(TARGETS["unlike layers"])] == [2, 1, 1]
    assert [run.count for run in layer_runs(TARGETS["windows"])] == [1, 1, 1]
    assert [run.count for run in layer_runs(HEADS["all biases"])] == [1, 2]
