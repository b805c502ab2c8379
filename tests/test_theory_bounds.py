"""Bytes, operations and money of a round by hand, and published claims against physics."""

from __future__ import annotations

import pytest
from deployments import SMALL, SMALL_HEAD, served

from eagle3_jax.theory.accelerators import KNOWN_ACCELERATORS, accelerator_named, custom_accelerator
from eagle3_jax.theory.bounds import batch_needed, break_even_batch, check_claim, largest_batch, round_bound
from eagle3_jax.theory.cost import cost_of, cost_per_million_tokens, tokens_per_currency_unit
from eagle3_jax.theory.memory import Deployment, memory_plan


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


@pytest.mark.parametrize(
    ("gpu", "steps", "claims", "needed"),
    [
        ("H100-PCIe", 28.3, (1200.0, 3600.0), 128),
        ("H100", 47.5, (1500.0, 4400.0), 93),
        ("H200", 68.0, (1700.0, 6200.0), 92),
        ("B200", 113.4, (2400.0, 8500.0), 75),
    ],
)
def test_throughputs_of_the_articles_are_impossible_at_their_batch(gpu, steps, claims, needed):
    """Llama-3.3-70B in FP8 "at batch 1-4"; context left out, which flatters the claims."""
    deployment = served(gpu=gpu)
    bound = round_bound(deployment, batch=4, context=0, num_draft_tokens=5)
    assert 1 / bound.plain_seconds == pytest.approx(steps, abs=0.06)
    standard, speculative = claims
    assert bound.plain_tokens_per_second < standard
    verdict = check_claim(deployment, tokens_per_second=speculative, batch=4, context=0, num_draft_tokens=5)
    assert not verdict.possible
    assert verdict.batch_needed == needed
    assert check_claim(deployment, tokens_per_second=4 * steps * 0.99, batch=4, context=0, num_draft_tokens=5).possible


def test_latencies_of_the_articles_are_below_one_pass_over_the_weights():
    bound = round_bound(served(), batch=1, context=0, num_draft_tokens=5)
    assert bound.plain_seconds == pytest.approx(14.7e-3, rel=0.01)  # "time to first token 8 ms"
    assert bound.verify_seconds / 6 == pytest.approx(2.45e-3, rel=0.01)  # "0.3 ms between tokens", all accepted
    small = round_bound(served("llama-3.1-8b", "L40S", "bfloat16"), batch=1, context=0, num_draft_tokens=5)
    assert small.plain_tokens_per_second == pytest.approx(57.6, abs=0.1)  # "3,800"
    # NVIDIA's own measurement on one H200 is below the bound, as it has to be.
    assert bound.plain_tokens_per_second > 51.14


def test_small_batches_verify_for_free_and_large_ones_pay_for_every_token():
    deployment = served()
    costs = [round_bound(deployment, batch=2**power, context=0, num_draft_tokens=5).verify_cost for power in range(13)]
    assert costs[0] == pytest.approx(1.0, abs=1e-3)
    assert costs == sorted(costs)
    assert costs[-1] == pytest.approx(6.0, abs=1e-2)


def test_a_draft_pass_costs_its_share_of_the_bandwidth():
    big = round_bound(served(), batch=1, context=0, num_draft_tokens=100)
    assert big.draft_cost == pytest.approx(0.034, abs=0.0005)  # 2.40 of 70.55 GB; the fusion is read once a round
    small = round_bound(served("llama-3.1-8b", "H100", "bfloat16"), batch=1, context=0, num_draft_tokens=100)
    assert small.draft_cost == pytest.approx(0.050, abs=0.0005)


@pytest.mark.parametrize("gpu", ["H200", "A100-80GB"])
@pytest.mark.parametrize("context", [0, 1000])
def test_the_break_even_batch_is_the_first_that_does_not_pay(gpu, context):
    deployment = served(gpu=gpu)

    def pays(batch: int) -> bool:
        return round_bound(deployment, batch=batch, context=context, num_draft_tokens=5).speedup(2.94) > 1.0

    found = break_even_batch(deployment, context=context, num_draft_tokens=5, mean_acceptance_length=2.94)
    assert found == next(batch for batch in range(1, 1000) if not pays(batch))


def test_long_contexts_keep_speculation_paying():
    long = break_even_batch(served(), context=8000, num_draft_tokens=5, mean_acceptance_length=3.5)
    short = break_even_batch(served(), context=0, num_draft_tokens=5, mean_acceptance_length=3.5)
    assert (short, long) == (112, None)  # at 8,000 tokens a sequence, reading caches is most of every step


def test_the_largest_batch_is_the_last_that_fits():
    deployment = served()
    found = largest_batch(deployment, context=2048, num_draft_tokens=5)
    assert memory_plan(deployment, batch=found, context=2048, num_draft_tokens=5).fits
    assert not memory_plan(deployment, batch=found + 1, context=2048, num_draft_tokens=5).fits
    assert largest_batch(served(gpu="L4"), context=2048, num_draft_tokens=5) == 0
    assert batch_needed(deployment, tokens_per_second=1e9, context=1000) is None


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
        assert cost_per_million_tokens(speed, 1.40) == pytest.approx(cost, abs=0.0006)
    assert tokens_per_currency_unit(1700.0, 1.40) == pytest.approx(1700 * 3600 / 1.40)
    found = cost_of(1000.0, price_per_hour=3.6, busy=0.5)
    assert (found.per_million_tokens, found.tokens_per_unit) == (pytest.approx(2.0), pytest.approx(500_000))


def test_known_accelerators_are_found_however_they_are_spelt():
    assert accelerator_named("nvidia h100 sxm".replace("nvidia ", "")).name == "H100"
    assert accelerator_named("tpu_v6e").name == "TPU-v6e"
    assert all(accelerator.source for accelerator in KNOWN_ACCELERATORS.values())
    measured = custom_accelerator(gb_per_s=4000.0, base=accelerator_named("H200"))
    assert measured.bandwidth_bytes_per_second == 4e12
    assert measured.peak_flops == accelerator_named("H200").peak_flops
