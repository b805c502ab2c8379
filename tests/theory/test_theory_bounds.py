"""Bytes, operations and money of a round by hand, and published claims against physics."""

from __future__ import annotations

import dataclasses

import pytest
from deployments import SMALL, SMALL_HEAD, served

from eagle3_jax.models.config import GatedDelta, GroupedQuery, Latent, LayerConfig
from eagle3_jax.theory.accelerators import custom_accelerator
from eagle3_jax.theory.bounds import (
    break_even_batch,
    check_claim,
    forward_work,
    keys_read,
    largest_batch,
    mixing_flops,
    paying_batches,
    round_bound,
)
from eagle3_jax.theory.cost import cost_of
from eagle3_jax.theory.memory import Deployment, memory_plan
from eagle3_jax.theory.sizes import parameters, sizes_of


def test_bytes_operations_and_times_of_a_round_by_hand():
    # Layers 16 + 16 + 16 + 96 = 144, vectors 12, output 40: 392 bytes a forward; 8 bytes a token in
    # the cache.
    plain_bytes = 392 + 3 * 6 * 8
    plain_flops = 2 * 3 * (144 + 40) + 4 * 3 * 6 * 4
    # With this hardware a plain step takes 1 s.
    hardware = custom_accelerator(gb_per_s=plain_bytes / 1e9, tflops=plain_flops / 1e12)
    deployment = Deployment(target=SMALL, head=SMALL_HEAD, accelerator=hardware)

    bound = round_bound(deployment, batch=3, context=5, num_draft_tokens=2)
    assert (bound.plain_bytes, bound.plain_flops) == (plain_bytes, plain_flops)
    assert bound.plain_seconds == pytest.approx(1.0)

    # Three tokens: the first meets 6 keys, the second 7, the third 8.
    verify_flops = 2 * 3 * 3 * (144 + 40) + 4 * 3 * (6 + 7 + 8) * 4
    assert bound.verify_seconds == pytest.approx(verify_flops / plain_flops)
    assert bound.verify_limit == "compute"

    # Draft layers 176, fusion 48, vectors 16, output 20. First pass: three tokens, one of them with
    # logits.
    first_flops = 2 * 3 * 3 * (176 + 48) + 4 * 3 * (6 + 7 + 8) * 4 + 2 * 3 * 20
    later_bytes = 2 * (176 + 16 + 20) + 3 * 9 * 8
    later_flops = 2 * 3 * 176 + 4 * 3 * 9 * 4 + 2 * 3 * 20
    later = max(later_bytes / plain_bytes, later_flops / plain_flops)
    assert bound.draft_seconds == pytest.approx(first_flops / plain_flops + later)

    assert bound.speedup(2.0) == pytest.approx(2.0 / (bound.verify_cost + 2 * bound.draft_cost))
    assert bound.tokens_per_second(2.0) == pytest.approx(
        3 * 2.0 / (bound.verify_seconds + bound.draft_seconds)
    )


@pytest.mark.parametrize("reach", [{"chunk": 5}, {"window": 4}, {}], ids=str)
def test_what_a_layer_sees_bounds_what_it_reads_and_multiplies(reach):
    mixer = GroupedQuery(num_heads=2, num_kv_heads=1, head_dim=2, **reach)
    first = {"chunk": lambda last: last - last % 5, "window": lambda last: max(0, last - 3)}
    start = first[next(iter(reach))] if reach else lambda last: 0
    for context in range(11):
        for tokens in range(1, 8):
            seen = [range(start(last), last + 1) for last in range(context, context + tokens)]
            assert keys_read(mixer, context, tokens) == len(set().union(*seen))
            assert mixing_flops(mixer, context, tokens) == 4 * 2 * 2 * sum(map(len, seen))


def test_latents_and_states_are_read_once():
    latent = Latent(num_heads=2, q_rank=None, kv_rank=6, nope_dim=2, rope_dim=2, value_dim=3)
    delta = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, kernel=3)
    (plain,) = SMALL.layers
    layers = tuple(LayerConfig(mixer=mixer, mlp=plain.mlp) for mixer in (latent, delta))
    deployment = Deployment(
        target=dataclasses.replace(SMALL, layers=layers),
        head=None,
        accelerator=custom_accelerator(gb_per_s=1.0),
    )

    short, long = (
        forward_work(deployment, deployment.target, batch=3, context=context, tokens=2, logits=1)
        for context in (0, 10)
    )
    assert long.num_bytes - short.num_bytes == 3 * 10 * (6 + 2) * 2
    # Scores of 8 channels, values of 6.
    assert long.other_flops - short.other_flops == 3 * 2 * 10 * 2 * 2 * (6 + 2 + 6)

    # States in float32; two inputs of the convolution in bfloat16.
    states = 4 * 4 * 3 * 5 + 2 * 2 * (2 * 2 * 3 + 4 * 5)
    assert deployment.state_bytes(deployment.target) == states
    weights = deployment.streamed_bytes(deployment.target)
    assert short.num_bytes == weights + 3 * 2 * 8 * 2 + 2 * 3 * states

    two = dataclasses.replace(deployment, num_accelerators=2)
    assert two.cache_bytes_per_token(two.target) == deployment.cache_bytes_per_token(
        deployment.target
    )
    assert two.state_bytes(two.target) == states / 2

    plan = memory_plan(deployment, batch=3, context=10, num_draft_tokens=0)
    assert plan.states == 3 * states
    assert plan.total == plan.without_caches + plan.target_cache + plan.states


def test_experts_of_a_forward_by_hand():
    deployment = served("gpt-oss-120b", "H200", "mxfp4")
    # With its biases.
    expert = 3 * 2880 * 2880 + 3 * 2880
    all_bytes = deployment.streamed_bytes(deployment.target)

    for tokens, read in (
        (1, 4.0),
        (2, 4 + 4 * (1 - 4 / 128)),
        (60, 128 * (1 - (1 - 4 / 128) ** 60)),
    ):
        unread = 36 * (128 - read) * expert * 4.25 / 8
        assert deployment.streamed_bytes(deployment.target, tokens=tokens) == pytest.approx(
            all_bytes - unread
        )

    token = forward_work(deployment, deployment.target, batch=1, context=0, tokens=1, logits=1)
    counted = sizes_of(deployment.target).active - parameters(deployment.target).vectors
    counted -= parameters(deployment.target).routers
    assert token.layer_flops + token.other_flops == pytest.approx(2 * counted + 36 * 4 * 64 * 64)


def test_claims_are_held_against_the_fewest_experts_that_can_be_read_and_name_the_batch_they_need():
    deployment = served("Qwen3-30B-A3B", "H200", "bfloat16")
    options = {"batch": 4, "context": 0, "num_draft_tokens": 3}
    same_experts = round_bound(deployment, **options, same_experts=True)
    usual = round_bound(deployment, **options)
    assert same_experts.verify_seconds < usual.verify_seconds / 3
    assert check_claim(
        deployment, tokens_per_second=4 * 4 / usual.verify_seconds * 2, **options
    ).possible
    claim = check_claim(served(), tokens_per_second=1e9, batch=1, context=1000, num_draft_tokens=0)
    assert not claim.possible and claim.batch_needed is None


@pytest.mark.parametrize(
    ("model", "gpu", "weights", "context"),
    [
        ("Llama-3.3-70B", "H200", "fp8", 0),
        ("Llama-3.3-70B", "A100-80GB", "fp8", 1000),
        ("Qwen3-30B-A3B", "H200", "bfloat16", 1024),
    ],
)
def test_speculation_pays_from_the_first_batch_to_the_last_that_gains(model, gpu, weights, context):
    deployment = served(model, gpu, weights)
    options = {"context": context, "num_draft_tokens": 5}
    pays = [round_bound(deployment, batch=b, **options).speedup(2.94) > 1.0 for b in range(1, 2000)]
    first = pays.index(True)
    end = pays.index(False, first) + 1 if False in pays[first:] else None
    batches = paying_batches(deployment, **options, mean_acceptance_length=2.94)
    assert (batches[0], batches[1] if end else None) == (first + 1, end)
    assert paying_batches(deployment, **options, mean_acceptance_length=1.0) == (None, 1)
    assert break_even_batch(deployment, **options, mean_acceptance_length=2.94) == batches[1]


def test_experts_can_end_the_gain_after_one_batch_and_have_no_end_up_to_the_largest():
    on_h100, on_l4 = (served("gpt-oss-120b", gpu, "fp8") for gpu in ("H100", "L4"))
    options = {"context": 1024, "num_draft_tokens": 3}
    assert paying_batches(on_h100, **options, mean_acceptance_length=2.94) == (1, 2)
    # The upper bound, 66,886, is beyond 65,536.
    assert paying_batches(on_l4, **options, mean_acceptance_length=1.5) == (34, None)


def test_the_largest_batch_is_the_last_that_fits():
    deployment = served()
    options = {"context": 2048, "num_draft_tokens": 5}
    largest = largest_batch(deployment, **options)
    assert [
        memory_plan(deployment, batch=batch, **options).fits for batch in (largest, largest + 1)
    ] == [True, False]
    assert largest_batch(served(gpu="L4"), **options) == 0


def test_fp8_peaks_are_for_hardware_that_multiplies_in_fp8():
    fp8, int8, *on_a100 = (
        round_bound(
            served(gpu=gpu, weights=w), batch=4096, context=0, num_draft_tokens=0
        ).plain_seconds
        for gpu in ("H100", "A100-80GB")
        for w in ("fp8", "int8")
    )
    assert fp8 < 0.6 * int8
    assert on_a100[0] == on_a100[1]


def test_costs_of_the_articles_reproduce():
    # At 1.40 $/h.
    for speed, cost in ((1700.0, 0.229), (3800.0, 0.102), (3200.0, 0.122), (6200.0, 0.063)):
        assert cost_of(speed, price_per_hour=1.40).per_million_tokens == pytest.approx(
            cost, abs=0.0006
        )
    assert cost_of(1000.0, price_per_hour=3.6, busy=0.5) == pytest.approx((1000.0, 2.0, 500_000))
