"""Bytes, operations and money of a round by hand, and published claims against physics."""

from __future__ import annotations

import dataclasses

import pytest
from deployments import SMALL, SMALL_HEAD, served

from eagle3_jax.models.config import GatedDelta, GroupedQuery, Latent, LayerConfig
from eagle3_jax.theory.accelerators import custom_accelerator
from eagle3_jax.theory.bounds import (
    Work,
    best_chain,
    break_even_batch,
    check_claim,
    experts_read,
    forward_work,
    keys_read,
    largest_batch,
    mixing_flops,
    pays_from_batch,
    round_bound,
)
from eagle3_jax.theory.cost import cost_of
from eagle3_jax.theory.memory import Deployment, memory_plan
from eagle3_jax.theory.sizes import parameters, sizes_of


def test_bytes_operations_and_times_of_a_round_by_hand():
    # Layers 16 + 16 + 16 + 96 = 144, vectors 12, output 40: 392 bytes a forward; 8 bytes a token in the cache.
    plain_bytes = 392 + 3 * 6 * 8
    plain_flops = 2 * 3 * (144 + 40) + 4 * 3 * 6 * 4
    hardware = custom_accelerator(gb_per_s=plain_bytes / 1e9, tflops=plain_flops / 1e12)  # a plain step takes 1 s
    deployment = Deployment(target=SMALL, head=SMALL_HEAD, accelerator=hardware)
    bound = round_bound(deployment, batch=3, context=5, num_draft_tokens=2)
    assert (bound.plain_bytes, bound.plain_flops) == (plain_bytes, plain_flops)
    assert bound.plain_seconds == pytest.approx(1.0)
    # Three tokens: the first meets 6 keys, the second 7, the third 8.
    verify_flops = 2 * 3 * 3 * (144 + 40) + 4 * 3 * (6 + 7 + 8) * 4
    assert bound.verify_seconds == pytest.approx(verify_flops / plain_flops)
    assert bound.verify_limit == "compute"
    # Draft layers 176, fusion 48, vectors 16, output 20. First pass: three tokens, one of them with logits.
    first_flops = 2 * 3 * 3 * (176 + 48) + 4 * 3 * (6 + 7 + 8) * 4 + 2 * 3 * 20
    later_bytes = 2 * (176 + 16 + 20) + 3 * 9 * 8
    later_flops = 2 * 3 * 176 + 4 * 3 * 9 * 4 + 2 * 3 * 20
    later = max(later_bytes / plain_bytes, later_flops / plain_flops)
    assert bound.draft_seconds == pytest.approx(first_flops / plain_flops + later)
    assert bound.speedup(2.0) == pytest.approx(2.0 / (bound.verify_cost + 2 * bound.draft_cost))
    assert bound.tokens_per_second(2.0) == pytest.approx(3 * 2.0 / (bound.verify_seconds + bound.draft_seconds))


def test_chunks_bound_what_their_layers_read_and_multiply():
    mixer = GroupedQuery(num_heads=2, num_kv_heads=1, head_dim=2, chunk=5)
    for context in range(11):
        for tokens in range(1, 8):
            seen = [range(last - last % 5, last + 1) for last in range(context, context + tokens)]
            assert keys_read(mixer, context, tokens) == len(set().union(*seen))
            assert mixing_flops(mixer, context, tokens) == 4 * 2 * 2 * sum(map(len, seen))


def test_latents_and_states_are_read_whole_and_once():
    latent = Latent(num_heads=2, q_rank=None, kv_rank=6, nope_dim=2, rope_dim=2, value_dim=3)
    delta = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, kernel=3)
    (plain,) = SMALL.layers
    layers = tuple(LayerConfig(mixer=mixer, mlp=plain.mlp) for mixer in (latent, delta))
    deployment = Deployment(
        target=dataclasses.replace(SMALL, layers=layers), head=None, accelerator=custom_accelerator(gb_per_s=1.0)
    )
    short, long = (
        forward_work(deployment, deployment.target, batch=3, context=context, tokens=2, logits=1) for context in (0, 10)
    )
    assert long.num_bytes - short.num_bytes == 3 * 10 * (6 + 2) * 2
    assert long.other_flops - short.other_flops == 3 * 2 * 10 * 2 * 2 * (6 + 2 + 6)  # scores of 8, values of 6 channels
    states = 4 * 4 * 3 * 5 + 2 * 2 * (2 * 2 * 3 + 4 * 5)  # float32; two inputs of the convolution in bfloat16
    assert deployment.state_bytes(deployment.target) == states
    assert short.num_bytes == deployment.streamed_bytes(deployment.target) + 3 * 2 * 8 * 2 + 2 * 3 * states
    two = dataclasses.replace(deployment, num_accelerators=2)
    assert two.cache_bytes_per_token(two.target) == deployment.cache_bytes_per_token(deployment.target)
    assert two.state_bytes(two.target) == states / 2
    plan = memory_plan(deployment, batch=3, context=10, num_draft_tokens=0)
    assert plan.states == 3 * states
    assert plan.total == plan.without_caches + plan.target_cache + plan.states


def test_experts_of_a_forward_by_hand():
    deployment = served("gpt-oss-120b", "H200", "mxfp4")
    expert = 3 * 2880 * 2880 + 3 * 2880  # with its biases
    whole = deployment.streamed_bytes(deployment.target)
    for tokens, read in ((1, 4.0), (2, 4 + 4 * (1 - 4 / 128)), (60, 128 * (1 - (1 - 4 / 128) ** 60))):
        unread = 36 * (128 - read) * expert * 4.25 / 8
        assert deployment.streamed_bytes(deployment.target, tokens=tokens) == pytest.approx(whole - unread)
    one = forward_work(deployment, deployment.target, batch=1, context=0, tokens=1, logits=1)
    counted = sizes_of(deployment.target).active - parameters(deployment.target).vectors
    counted -= parameters(deployment.target).routers
    assert one.layer_flops + one.other_flops == pytest.approx(2 * counted + 36 * 4 * 64 * 64)


def test_experts_make_verification_dear_where_few_sequences_run():
    deployment = served("Qwen3-30B-A3B", "H200", "bfloat16")
    sizes = (1, 4, 8, 16, 60)
    shares = [experts_read(deployment, batch=1, nodes=size) for size in sizes]
    assert [round(128 * share) for share in shares] == [8, 29, 52, 82, 125]

    def costs(batch: int) -> list[float]:
        bounds = [round_bound(deployment, batch=batch, context=0, num_draft_tokens=size - 1) for size in sizes]
        return [bound.verify_cost for bound in bounds]

    one, many = costs(1), costs(512)
    assert one == sorted(one)
    assert one[0] == 1.0 < one[1] < 3 < one[-1]
    assert many[1] < 1.1
    asked = {"context": 1024, "num_draft_tokens": 5, "mean_acceptance_length": 2.94}
    start = pays_from_batch(deployment, **asked)
    assert start is not None

    def gain(batch: int) -> float:
        return round_bound(deployment, batch=batch, context=1024, num_draft_tokens=5).speedup(2.94)

    assert gain(start - 1) <= 1 < gain(start)
    end = break_even_batch(deployment, **asked)
    assert end is None or gain(end) <= 1 < gain(end - 1)
    lengths = [
        best_chain(deployment, batch=batch, context=1024, conditional_acceptance_rate=0.7) for batch in (1, 16, 128)
    ]
    assert lengths == sorted(lengths) and lengths[0] < 3 < lengths[2]
    assert pays_from_batch(served(), **asked) == 1
    assert pays_from_batch(served(), context=0, num_draft_tokens=5, mean_acceptance_length=1.0) is None
    assert break_even_batch(served(), context=0, num_draft_tokens=5, mean_acceptance_length=1.0) == 1


def test_a_claim_about_experts_is_held_against_the_fewest_that_can_be_read():
    deployment = served("Qwen3-30B-A3B", "H200", "bfloat16")
    alike = round_bound(deployment, batch=4, context=0, num_draft_tokens=3, alike=True)
    usual = round_bound(deployment, batch=4, context=0, num_draft_tokens=3)
    assert alike.verify_seconds < usual.verify_seconds / 3
    between = 4 * 4 / usual.verify_seconds * 2
    assert check_claim(deployment, tokens_per_second=between, batch=4, context=0, num_draft_tokens=3).possible


def test_a_window_bounds_what_its_layers_read_and_multiply():
    (layer,) = SMALL.layers
    windowed = dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=4))
    hardware = custom_accelerator(gb_per_s=1.0, tflops=1.0)

    def work(context: int, tokens: int, *layers: LayerConfig) -> Work:
        target = dataclasses.replace(SMALL, layers=layers)
        deployment = Deployment(target=target, head=None, accelerator=hardware)
        return forward_work(deployment, target, batch=3, context=context, tokens=tokens, logits=1)

    # Keys that each token meets, and those that any of them does, all counted one by one.
    for context in range(8):
        for tokens in range(1, 8):
            seen = [range(max(0, last - 3), last + 1) for last in range(context, context + tokens)]
            pairs, keys = sum(map(len, seen)), len(set().union(*seen))
            both, whole = work(context, tokens, layer, windowed), work(context, tokens, layer, layer)
            spared = tokens * context + tokens * (tokens + 1) // 2 - pairs
            assert whole.other_flops - both.other_flops == 4 * 3 * spared * 2 * 2  # two heads of size 2
            assert whole.num_bytes - both.num_bytes == 3 * (context + tokens - keys) * 8  # 2·1·2 numbers of 2 bytes
    kept = memory_plan(served("Mistral-7B-v0.1", weights="bfloat16"), batch=1, context=8192, num_draft_tokens=0)
    assert kept.target_cache == 8193 * 2 * 32 * 8 * 128 * 2  # buffers hold the whole sequence


@pytest.mark.parametrize("gpu", ["H200", "A100-80GB"])
@pytest.mark.parametrize("context", [0, 1000])
def test_the_break_even_batch_is_the_first_that_does_not_pay(gpu, context):
    deployment = served(gpu=gpu)

    def pays(batch: int) -> bool:
        return round_bound(deployment, batch=batch, context=context, num_draft_tokens=5).speedup(2.94) > 1.0

    found = break_even_batch(deployment, context=context, num_draft_tokens=5, mean_acceptance_length=2.94)
    assert found == next(batch for batch in range(1, 1000) if not pays(batch))


def test_the_largest_batch_is_the_last_that_fits():
    deployment = served()
    found = largest_batch(deployment, context=2048, num_draft_tokens=5)
    assert memory_plan(deployment, batch=found, context=2048, num_draft_tokens=5).fits
    assert not memory_plan(deployment, batch=found + 1, context=2048, num_draft_tokens=5).fits
    assert largest_batch(served(gpu="L4"), context=2048, num_draft_tokens=5) == 0
    claim = check_claim(deployment, tokens_per_second=1e9, batch=1, context=1000, num_draft_tokens=0)
    assert not claim.possible and claim.batch_needed is None


def test_fp8_peaks_are_for_hardware_that_multiplies_in_fp8():
    on_h100 = round_bound(served(gpu="H100"), batch=4096, context=0, num_draft_tokens=0)
    in_int8 = round_bound(served(gpu="H100", weights="int8"), batch=4096, context=0, num_draft_tokens=0)
    assert on_h100.plain_seconds < 0.6 * in_int8.plain_seconds
    on_a100 = [
        round_bound(served(gpu="A100-80GB", weights=w), batch=4096, context=0, num_draft_tokens=0).plain_seconds
        for w in ("fp8", "int8")
    ]
    assert on_a100[0] == on_a100[1]


def test_costs_of_the_articles_reproduce():
    for speed, cost in ((1700.0, 0.229), (3800.0, 0.102), (3200.0, 0.122), (6200.0, 0.063)):  # 1.40 $/h
        assert cost_of(speed, price_per_hour=1.40).per_million_tokens == pytest.approx(cost, abs=0.0006)
    found = cost_of(1000.0, price_per_hour=3.6, busy=0.5)
    assert (found.per_million_tokens, found.tokens_per_unit) == (pytest.approx(2.0), pytest.approx(500_000))
