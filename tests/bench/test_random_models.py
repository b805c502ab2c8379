"""Random models of published shapes, and what a step costs: bytes, memory, bandwidth, money."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import tiny

from eagle3_jax import LoadedTarget, SpeculativeDecoder, load_target
from eagle3_jax.bench import roofline
from eagle3_jax.bench.random_models import SHAPES, bytes_needed, random_pair, shape_named, why_not
from eagle3_jax.bench.roofline import bandwidth, ceiling, step_bytes
from eagle3_jax.models.config import Experts, LayerConfig
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import BFLOAT16, MIXED, Precision, cast
from eagle3_jax.models.quantised import WEIGHTS, quantised
from eagle3_jax.theory.sizes import parameters


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target()


def test_models_of_every_named_shape_have_the_sizes_that_planning_counts() -> None:
    for config in SHAPES.values():
        # The other layers are like these, and take a minute.
        config = dataclasses.replace(config, layers=config.layers[:2])
        leaves = tiny.jax.tree.leaves(DecoderTarget(config, BFLOAT16).param_shapes())
        assert sum(leaf.size for leaf in leaves) == parameters(config).total


@pytest.mark.parametrize(
    ("name", "precision", "dtypes"),
    [("Llama-tiny", BFLOAT16, {"bfloat16"}), ("Qwen3-tiny", MIXED, {"bfloat16", "float32"})],
)
def test_a_random_pair_decodes(name: str, precision: Precision, dtypes: set[str]) -> None:
    target, drafter = random_pair(name.lower(), precision=precision)
    leaves = tiny.jax.tree.leaves((target.params, drafter.params["head"]))
    assert {str(leaf.dtype) for leaf in leaves} == dtypes
    result = SpeculativeDecoder(target, drafter, num_speculative_tokens=2).generate(
        [[1, 2, 3]], max_new_tokens=5
    )
    assert len(result.tokens[0]) == 5


# Dense models are not rounded to the last of them, int4.
@pytest.mark.parametrize("weights", WEIGHTS[1:-1])
def test_random_weights_in_eight_bits_are_those_of_a_quantised_model(weights: str) -> None:
    """The parameters, types and products of a dense model that is loaded in eight bits."""
    dense, head = random_pair("llama-tiny", num_layers=2)
    target, drafter = random_pair("llama-tiny", num_layers=2, weights=weights)
    for ours, model, params in (
        (target.params, dense.model, dense.params),
        (drafter.params["head"], head.drafter, head.params["head"]),
    ):
        expected = cast(quantised(params, model.param_products(), weights), BFLOAT16)
        described = lambda tree: tiny.jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
        assert described(ours) == described(expected)

    # The spread of a kernel is that of the dense one, and an output has numbers that differ.
    kernel = target.params["blocks"][1]["mlp"]["down"]["kernel"].dense("float32")
    reference = dense.params["blocks"][1]["mlp"]["down"]["kernel"]
    assert float(kernel.std()) == pytest.approx(float(reference.astype("float32").std()), rel=0.1)

    result = SpeculativeDecoder(target, drafter, num_speculative_tokens=2).generate(
        [[1, 2, 3]], max_new_tokens=5
    )
    assert len(result.tokens[0]) == 5 and target.weights == weights
    with pytest.raises(ValueError, match="weights 'int3' are not known"):
        random_pair("llama-tiny", weights="int3")


def test_random_weights_in_four_bits_decode() -> None:
    target, drafter = random_pair("llama-tiny", num_layers=2, weights="int4")
    kernel = target.params["blocks"][1]["mlp"]["down"]["kernel"]
    assert kernel.values.dtype == "int4" and len(set(np.asarray(kernel.values).flat)) > 8
    decoder = SpeculativeDecoder(target, drafter, num_speculative_tokens=2)
    assert len(decoder.generate([[1, 2, 3]], max_new_tokens=5).tokens[0]) == 5


def test_the_memory_of_a_model_is_that_of_its_weights_and_caches_and_fits_or_not() -> None:
    config = shape_named("Llama-3.1-8B")
    # With the head's layer, a few hundred million.
    weights = 2 * (8.03e9 + 3 * 4096**2 + 4096 * 32_000)
    assert weights < bytes_needed(config, batch=1, capacity=1024) < 1.2 * weights
    longer = bytes_needed(config, batch=1, capacity=2048)
    more = longer - bytes_needed(config, batch=1, capacity=1024)
    # A cache for 32 layers and the head's.
    assert more == pytest.approx(1.1 * 1024 * 33 * 2 * 8 * 128 * 2, rel=1e-6)

    stats = {"bytes_limit": 8 * 2**30, "bytes_in_use": 3 * 2**30}
    assert why_not(5 * 2**30, stats) is None
    assert why_not(6 * 2**30, stats) == "it needs 6.0 GiB and the device has 5.0 GiB left"
    assert why_not(1, None) == "the device does not tell how much memory it has"


def test_the_bytes_of_a_step_are_weights_and_caches(target: LoadedTarget) -> None:
    # 12 layers of attention (256 x (256 + 128 + 128) + 256 x 256) and SwiGLU (3 x 256 x 704) with
    # two norms each, a norm, and the output projection; the embedding is looked up, not read.
    weights = 4 * (12 * (256 * 512 + 256 * 256 + 3 * 256 * 704 + 2 * 256) + 256 + 256 * 4096)
    assert step_bytes(target, rows=1, context=0) == weights
    assert step_bytes(target, rows=3, context=10) == weights + 3 * 10 * 12 * 2 * 2 * 64 * 4

    layer = LayerConfig(
        mixer=tiny.layers(1)[0].mixer,
        mlp=Experts(
            num_experts=4, per_token=1, width=6, router="softmax", shared_width=5, bias=True
        ),
    )
    routed = tiny.target(13, layers=(layer,))
    width = routed.model.config.width
    # Three experts with their biases, in float32.
    unread = 3 * 4 * (3 * width * 6 + 2 * 6 + width)
    all_bytes = sum(leaf.nbytes for leaf in tiny.jax.tree.leaves(routed.params))
    all_bytes -= routed.params["embedding"].nbytes
    assert step_bytes(routed, rows=1, context=0) == all_bytes - unread

    tied = tiny.target(13, tie_embeddings=True)
    assert step_bytes(tied, rows=1, context=0) == sum(
        leaf.nbytes for leaf in tiny.jax.tree.leaves(tied.params)
    )


def test_bandwidth_is_that_of_some_memory(target: LoadedTarget) -> None:
    assert 1e8 < bandwidth(2**22) < 1e14
    assert ceiling(target, rows=1, context=0, large=2**22) > 1e8


def test_a_launch_moves_the_array_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every launch takes one second, a pass takes a fraction of it: launches are not counted."""
    clock = itertools.count()
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: float(next(clock)))
    size = 2**20
    passes = roofline.passes_of(size)
    assert passes > 8
    assert roofline.bandwidths(size) == {
        "sum": passes * size,
        "copy": passes * 2 * size,
        "product": passes * size,
    }
    assert roofline.passes_of(2**40) > 1


@pytest.mark.parametrize("way", roofline.WAYS)
def test_no_pass_over_the_array_is_optimized_away(way: str) -> None:
    def seconds(passes: int) -> float:
        return roofline.seconds_per_pass(way, roofline.stream_arrays(2**24), passes=passes) * passes

    assert seconds(32) > 8 * seconds(1)
