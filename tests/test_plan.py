"""Planning: formulas against hand-computed values, published claims against physics, and the command."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import tiny
from safetensors.numpy import load_file

from eagle3_jax.cli import run
from eagle3_jax.cli._planning import read_head_shape, read_target_shape
from eagle3_jax.load import bundled
from eagle3_jax.theory.accelerators import KNOWN_ACCELERATORS, accelerator_named, custom_accelerator
from eagle3_jax.theory.bounds import batch_needed, break_even_batch, check_claim, largest_batch, round_bound
from eagle3_jax.theory.cost import cost_of, cost_per_million_tokens, tokens_per_currency_unit
from eagle3_jax.theory.exercises import exercises
from eagle3_jax.theory.memory import Deployment, memory_plan
from eagle3_jax.theory.rollout import (
    MeasuredCosts,
    Traffic,
    accepted_variance,
    plan_rollout,
    requests_to_judge_p99,
)
from eagle3_jax.theory.rollout_page import to_markdown
from eagle3_jax.theory.shapes import KNOWN_MODELS, HeadShape, ModelShape, usual_head
from eagle3_jax.theory.speedup import (
    TrafficClass,
    best_chain_length,
    blended_tau,
    conditional_rate_from_tau,
    draft_rate_from_tau,
    rates_for_speedup,
    simulate,
    speedup,
    tau_from_conditional_rate,
    tau_from_draft_rate,
)

ROOT = Path(__file__).parent.parent
OFFICIAL = tiny.GOLDEN / "official"


def served(
    model: str = "llama-3.3-70b", gpu: str = "H200", weights: str = "fp8", num_accelerators: int = 1
) -> Deployment:
    target = KNOWN_MODELS[model]
    return Deployment(
        target=target,
        head=usual_head(target),
        accelerator=accelerator_named(gpu),
        weights=weights,
        num_accelerators=num_accelerators,
    )


# Speed-up


@pytest.mark.parametrize(
    ("alpha", "k"), [(Fraction(1, 2), 2), (Fraction(7, 10), 5), (Fraction(0), 3), (Fraction(1), 4)]
)
def test_tau_is_the_expectation_over_every_pattern_of_accepted_tokens(alpha, k):
    expected = Fraction(0)
    for pattern in itertools.product((True, False), repeat=k):
        probability = math.prod((alpha if kept else 1 - alpha for kept in pattern), start=Fraction(1))
        expected += probability * (1 + len(list(itertools.takewhile(bool, pattern))))
    assert tau_from_conditional_rate(float(alpha), k) == pytest.approx(float(expected), abs=1e-12)


def test_the_two_rates_give_different_lengths_from_the_same_number():
    assert tau_from_draft_rate(0.7, 5) == pytest.approx(4.5)
    assert tau_from_conditional_rate(0.7, 5) == pytest.approx(2.94117)  # (1 - 0.7^6) / 0.3
    assert tau_from_conditional_rate(0.8, 5) == pytest.approx(3.68928)  # the articles' "3.7", the bonus included


def test_rates_are_recovered_from_lengths():
    assert draft_rate_from_tau(4.5, 5) == pytest.approx(0.7)
    assert conditional_rate_from_tau(1.75, 2) == pytest.approx(0.5)  # 1 + 1/2 + 1/4
    assert conditional_rate_from_tau(1.3, 1) == pytest.approx(0.3)  # with one token both rates are the same
    # One 70B head on MT-Bench, K = 3, measured as τ 2.92: "0.64" and "0.79" are the same head.
    assert draft_rate_from_tau(2.92, 3) == pytest.approx(0.64)
    assert conditional_rate_from_tau(2.92, 3) == pytest.approx(0.79, abs=0.005)


def test_one_pair_of_costs_explains_what_vllm_measured():
    """Llama-3.1-8B on one H100, batch 1: τ and time per output token in ms for K = 2..7 (vllm-project/vllm 20780)."""
    measured = zip(range(2, 8), (2.36, 2.79, 3.08, 3.32, 3.46, 3.54), (4.32, 4.09, 4.05, 4.13, 4.20, 4.29), strict=True)
    for k, tau, milliseconds in measured:
        predicted = speedup(tau, num_draft_tokens=k, verify_cost=1.18, draft_cost=0.144)
        assert predicted == pytest.approx(7.07 / milliseconds, rel=0.03)


@pytest.mark.parametrize(
    ("verify_cost", "draft_rate", "conditional_rate"),
    [(1.05, 0.16, 0.33), (1.5, 0.31, 0.52), (2.0, 0.48, 0.67), (2.5, 0.64, 0.80)],
)
def test_break_even_moves_with_the_cost_of_verification(verify_cost, draft_rate, conditional_rate):
    found = rates_for_speedup(1.0, num_draft_tokens=3, verify_cost=verify_cost, draft_cost=0.144)
    assert found is not None
    assert found.draft_acceptance_rate == pytest.approx(draft_rate, abs=0.006)
    assert found.conditional_acceptance_rate == pytest.approx(conditional_rate, abs=0.006)


def test_a_speedup_beyond_everything_accepted_is_out_of_reach():
    assert rates_for_speedup(6.01, num_draft_tokens=5, verify_cost=1.0, draft_cost=0.0) is None
    everything = rates_for_speedup(6.0, num_draft_tokens=5, verify_cost=1.0, draft_cost=0.0)
    assert everything is not None
    assert everything.conditional_acceptance_rate == pytest.approx(1.0)
    nothing = rates_for_speedup(0.5, num_draft_tokens=5, verify_cost=1.0, draft_cost=0.0)
    assert nothing is not None
    assert nothing.mean_acceptance_length == 1.0


def test_the_best_chain_grows_with_alpha_and_is_none_when_nothing_pays():
    costs = {"verify_costs": [1.18] * 10, "draft_costs": [0.144] * 10}
    assert [best_chain_length(alpha, **costs) for alpha in (0.5, 0.6, 0.7, 0.8)] == [2, 3, 4, 5]
    assert best_chain_length(0.1, **costs) == 0


def test_blended_traffic_weighs_classes_by_their_rounds():
    assert blended_tau([0.5, 0.5], [1.0, 3.0]) == pytest.approx(1.5)  # 100 tokens each: 100 and 33.3 rounds
    with pytest.raises(ValueError, match="sum to 1"):
        blended_tau([0.5, 0.4], [1.0, 3.0])


def test_the_exercises_of_the_articles_have_their_answers():
    for overhead, drafts, conditionals in (
        (0.1, (0.24, 0.46), (0.559, 0.752)),
        (0.15, (0.26, 0.49), (0.582, 0.771)),
        (0.5, (0.40, 0.70), (0.709, 0.883)),
        (1.0, (0.60, 1.0), (0.834, 1.0)),
    ):
        for wanted, draft, conditional in zip((2.0, 3.0), drafts, conditionals, strict=True):
            found = rates_for_speedup(wanted, num_draft_tokens=5, verify_cost=1.0, draft_cost=overhead / 5)
            assert found is not None
            assert found.draft_acceptance_rate == pytest.approx(draft, abs=0.006)
            assert found.conditional_acceptance_rate == pytest.approx(conditional, abs=0.001)
    answers = [one.answer for one in exercises()]
    assert len(answers) == 5
    assert "= 3.91, a rate of 0.583, S 3.4 to 3.6" in answers[1]
    assert "blended 2.39, S 2.1 to 2.2" in answers[1]
    for figure in ("2.81 GB", "2.47 GB", "4 KiB", "32 KiB", "320 KiB", "2.40 GB", "0.034"):
        assert figure in answers[4]


def simulated(traffic: list[tuple[float, float]], seed: int = 0, num_requests: int = 2000):
    classes = [TrafficClass(share=share, conditional_acceptance_rate=alpha) for share, alpha in traffic]
    return simulate(
        classes,
        num_draft_tokens=5,
        verify_cost=1.2,
        draft_cost=0.1,
        num_requests=num_requests,
        output_tokens=121,
        seed=seed,
    )


def test_the_simulation_has_the_mean_of_the_formula_and_depends_on_its_seed_only():
    found = simulated([(1.0, 0.7)])
    rounds = 2000 * 120 / 2.94117
    error = math.sqrt(accepted_variance(0.7, 5) / rounds)
    assert found.mean_acceptance_length == pytest.approx(2.94117, abs=5 * error)
    assert found == simulated([(1.0, 0.7)])
    assert found != simulated([(1.0, 0.7)], seed=1)


def test_the_simulation_is_exact_where_nothing_is_random():
    always, never = simulated([(1.0, 1.0)]), simulated([(1.0, 0.0)])
    assert always.time_per_output_token.p99 == pytest.approx(
        20 * 1.7 / 120
    )  # 120 tokens, six a round, 1.2 + 5·0.1 each
    assert never.time_per_output_token.p50 == pytest.approx(1.7)
    assert (always.slower_than_plain, never.slower_than_plain) == (0.0, 1.0)


def test_the_tail_of_mixed_traffic_is_its_worst_class():
    mixed = simulated([(0.9, 0.8), (0.1, 0.2)])
    assert mixed.speedup > 1.5
    assert mixed.time_per_output_token.p50 < 0.6
    assert mixed.time_per_output_token.p99 > 1.2
    assert mixed.slower_than_plain == pytest.approx(0.1, abs=0.03)


# Shapes and memory


# Parameters that the published checkpoints hold (the safetensors index on the hub; a tied table counted once).
PUBLISHED = {
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.3-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Vicuna-13B": 13_015_864_320,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
}


def test_named_models_have_the_parameters_of_their_checkpoints():
    assert {shape.name: shape.parameters.total for shape in KNOWN_MODELS.values()} == PUBLISHED


def test_the_usual_head_is_the_official_one():
    # fc 3·4096², q 8192·4096, k and v 2·8192·1024, o 4096², mlp 3·4096·14336, norms 4·4096, lm_head 32000·4096.
    assert usual_head(KNOWN_MODELS["llama-3.1-8b"]).parameters.total == 424_689_664  # the file is 850 MB in float16
    assert usual_head(KNOWN_MODELS["llama-3.3-70b"]).parameters.total == 1_403_027_456


@pytest.mark.parametrize(
    ("target", "head"),
    [(None, None), (str(OFFICIAL / "target"), str(OFFICIAL / "eagle3"))],
    ids=["bundled", "official"],
)
def test_config_json_alone_gives_the_parameters_that_the_files_hold(target, head):
    shape = read_target_shape(target)
    drafter = read_head_shape(head, target=shape, bundled=target is None)
    assert drafter is not None
    for model, source, part in ((shape, target, "target"), (drafter, head, "eagle3")):
        folder = bundled(part) if source is None else Path(source)
        tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        held = {n: t for n, t in tensors.items() if t.dtype.kind not in "ib"}  # d2t and t2d are maps
        if part == "eagle3":
            held = {name: tensor for name, tensor in held.items() if "embed_tokens" not in name}  # the target's
        assert model.parameters.total == sum(tensor.size for tensor in held.values())


def test_bytes_of_a_70b_target_in_fp8_and_of_its_head():
    deployment = served()
    target, head = deployment.target, deployment.head
    assert head is not None
    assert deployment.weight_bytes(target) / 1e9 == pytest.approx(72.66, abs=0.01)  # layers FP8, tables bfloat16
    assert deployment.streamed_bytes(target) / 1e9 == pytest.approx(70.555, abs=0.001)
    assert deployment.weight_bytes(head) / 1e9 == pytest.approx(2.806, abs=0.001)
    assert deployment.cache_bytes_per_token(target) == 327_680  # 2·80·8·128 numbers of 2 bytes
    assert deployment.cache_bytes_per_token(head) == 4096  # 1.25 %: not nothing, as an article says


def test_an_h200_keeps_about_56_gb_for_the_caches_of_a_70b_target():
    plan = memory_plan(
        served(), batch=8, context=4096, num_draft_tokens=5, prefill_tokens=1, utilization=0.94, reserve_bytes=0.0
    )
    assert 165_000 < plan.cache_capacity_tokens < 173_000


def test_every_part_of_the_plan_by_hand():
    deployment = Deployment(target=SMALL, head=SMALL_HEAD, accelerator=custom_accelerator(gb_per_s=1.0, memory_gb=1.0))
    plan = memory_plan(
        deployment, batch=2, context=10, num_draft_tokens=1, prefill_tokens=1, utilization=0.5, reserve_bytes=7.0
    )
    assert plan.target_weights == 2 * (144 + 12 + 40 + 40)
    # fusion 3·4·4, q 8·4, k and v 2·8·2, o 4·4, mlp 96, norms 4·4, lm_head 5·4
    assert plan.head_weights == 2 * (48 + 32 + 32 + 16 + 96 + 16 + 20)
    assert (plan.target_cache, plan.head_cache) == (2 * 12 * 8, 2 * 12 * 8)  # 2·1·1·2 numbers of 2 bytes a token
    # four tokens: 2·(4·4 + 2·8 + (2 + 2)·2 + 3·4) each, and 2·4·10 for logits and probabilities
    assert plan.activations == 4 * 2 * (16 + 16 + 8 + 12) + 4 * 80
    assert (plan.reserve, plan.budget) == (7.0, 0.5e9)
    assert plan.fits
    assert plan.cache_capacity_tokens == (0.5e9 - plan.without_caches) // 16


def test_tensor_parallelism_divides_all_but_vectors_fusion_and_scarce_key_heads():
    one, eight, sixteen = (served(num_accelerators=n) for n in (1, 8, 16))
    target, head = one.target, one.head
    assert head is not None
    vectors = 2 * target.parameters.vectors
    assert eight.weight_bytes(target) - vectors == pytest.approx((one.weight_bytes(target) - vectors) / 8)
    whole = 2 * (head.parameters.fusion + head.parameters.vectors)
    assert eight.weight_bytes(head) - whole == pytest.approx((one.weight_bytes(head) - whole) / 8)
    assert eight.cache_bytes_per_token(target) == one.cache_bytes_per_token(target) / 8
    assert sixteen.cache_bytes_per_token(target) == eight.cache_bytes_per_token(target)  # 8 key heads, each twice
    assert 16 * sixteen.weight_bytes(target) > 8 * eight.weight_bytes(target) + target.parameters.key_value / 2


def test_quantised_weights_leave_the_tables_alone():
    tables = 2 * 128_256 * 8192 * 2 + 2 * KNOWN_MODELS["llama-3.3-70b"].parameters.vectors
    layers = 70_553_706_496 - 2 * 128_256 * 8192 - KNOWN_MODELS["llama-3.3-70b"].parameters.vectors
    for weights, size in (("bfloat16", 2.0), ("int8", 1.0), ("fp8", 1.0), ("int4", 0.515625)):
        assert served(weights=weights).weight_bytes(KNOWN_MODELS["llama-3.3-70b"]) == layers * size + tables


# Roofline

SMALL = ModelShape(
    name="small", vocab_size=10, width=4, mlp_width=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2
)
SMALL_HEAD = HeadShape(
    name="head", width=4, mlp_width=8, num_heads=2, num_kv_heads=1, head_dim=2, draft_vocab_size=5, target_width=4
)


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


# Cost


def test_costs_of_the_articles_reproduce():
    for speed, cost in ((1700.0, 0.229), (3800.0, 0.102), (3200.0, 0.122), (6200.0, 0.063)):  # 1.40 $/h
        assert cost_per_million_tokens(speed, 1.40) == pytest.approx(cost, abs=0.0006)
    assert tokens_per_currency_unit(1700.0, 1.40) == pytest.approx(1700 * 3600 / 1.40)
    found = cost_of(1000.0, price_per_hour=3.6, busy=0.5)
    assert (found.per_million_tokens, found.tokens_per_unit) == (pytest.approx(2.0), pytest.approx(500_000))


# Rollout


def planned(**changes) -> str:
    plan = rollout_plan(**changes)
    return to_markdown(plan, target="org/target", head="org/head")


def rollout_plan(requests_per_second: float = 5.0, concurrency: int = 16, alpha: float = 0.75, **changes):
    return plan_rollout(
        served(),
        Traffic(
            requests_per_second=requests_per_second, prompt_tokens=1024, output_tokens=256, concurrency=concurrency
        ),
        num_draft_tokens=4,
        conditional_acceptance_rate=alpha,
        **changes,
    )


def test_the_variance_of_accepted_tokens_by_enumeration():
    alpha, k = 0.6, 3
    law = [0.4, 0.24, 0.144, 0.216]  # 0.6^j · 0.4, and 0.6³
    mean = sum(j * p for j, p in enumerate(law))
    assert accepted_variance(alpha, k) == pytest.approx(sum(p * (j - mean) ** 2 for j, p in enumerate(law)))


def test_stages_last_until_a_99th_percentile_can_be_judged():
    assert requests_to_judge_p99() == math.ceil(3.8416 * 0.0099 / 0.0025**2) == 6086
    stages = rollout_plan().stages
    assert [(stage.share, stage.hours) for stage in stages] == [(0.01, 34), (0.1, 24.0), (0.5, 24.0), (1.0, 168.0)]
    assert stages[0].requests == pytest.approx(34 * 180)
    assert rollout_plan(requests_per_second=500.0).stages[0].hours == 1.0


def test_gates_follow_from_measured_costs():
    plan = rollout_plan(measured=MeasuredCosts(1.4, 0.1))
    tau = 1 + 0.75 + 0.5625 + 0.421875 + 0.31640625
    assert plan.expected.mean_acceptance_length == pytest.approx(tau)
    assert plan.break_even_tau == pytest.approx(1.8)
    assert plan.least_tau == pytest.approx((1.8 + tau) / 2)
    assert plan.largest_time_ratio == pytest.approx((1 + 1.8 / tau) / 2)
    assert not plan.obstacles


def test_what_cannot_work_is_not_to_be_started():
    slow = rollout_plan(measured=MeasuredCosts(4.0, 0.1))
    assert any("speed" in text for text in slow.obstacles)
    full = rollout_plan(concurrency=1000)
    assert any("memory" in text for text in full.obstacles)
    assert "**Do not start.**" in to_markdown(full, target="t", head="h")


def test_the_schedule_covers_every_batch_once_and_drafts_less_in_large_ones():
    schedule = rollout_plan(concurrency=512).schedule
    assert schedule[0].first == 1
    assert schedule[-1].last == 1024
    for left, right in itertools.pairwise(schedule):
        assert right.first == left.last + 1
    lengths = [part.num_draft_tokens for part in schedule]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 4 > lengths[-1]


def test_the_page_has_real_metrics_and_commands_that_parse():
    page = planned()
    names = set(re.findall(r"vllm:(\w+)", page))
    assert names == {
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_drafts_total",
        "request_time_per_output_token_seconds_bucket",
        "time_to_first_token_seconds_bucket",
        "generation_tokens_total",
        "num_preemptions_total",
        "num_requests_running",
        "kv_cache_usage_perc",
    }
    config = re.search(r"--speculative-config '(.*?)'", page)
    assert config is not None
    settings = json.loads(config[1])
    assert settings["method"] == "eagle3"
    assert settings["num_speculative_tokens_per_batch_size"][0][0] == 1
    patch = re.search(r"--type=json -p '(.*?)'", page, re.DOTALL)
    assert patch is not None
    assert [step["value"] for step in json.loads(patch[1])] == [100, 0]
    assert "pytest validation --gpu --target org/target --drafter org/head" in page
    for share in ("| 1% |", "| 10% |", "| 50% |", "| 100% |"):
        assert share in page


# The command


@pytest.fixture
def cli(capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


BIG = ("--target", "Llama-3.3-70B", "--weights", "fp8", "--gpu", "H200")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("speedup", "--simulate", "100", "--traffic", "0.7:0.7,0.3:0.4"), "break_even_map"),
        (("speedup", "--mean-acceptance-length", "2.5", "--wanted", "2"), "wanted"),
        (("memory", *BIG), "fits"),
        (("memory", "--bandwidth-gb-per-s", "500"), "cache_capacity_tokens"),
        (("roofline",), "accelerators"),
        (("roofline", "--drafter", "none"), "accelerators"),
        (("roofline", *BIG, "--batch-size", "4", "--claim", "6200"), "accelerators"),
        (("cost", "--price-per-hour", "4", *BIG), "costs"),
        (("cost", "--price-per-hour", "4", "--tokens-per-second", "100"), "costs"),
        (("rollout", *BIG), "stages"),
    ],
)
def test_every_plan_is_a_page_for_people_and_an_object_for_machines(cli, arguments, field):
    code, out, err = cli(*arguments)
    assert (code, err) == (0, "")
    assert len(out) > 100
    for rate in re.finditer(r"(\w+)\s+acceptance[\s_-]rate", out):
        assert rate[1] in ("draft", "conditional"), out
    code, out, err = cli(*arguments, "--json")
    assert (code, err) == (0, "")
    assert field in json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_the_traffic_of_the_articles_is_blended_by_rounds(cli):
    _, out, _ = cli("speedup", "--traffic", "0.7:0.7,0.3:0.4", "--json")
    assert json.loads(out)["mean_acceptance_length"] == pytest.approx(2.388, abs=0.001)


def test_an_impossible_claim_is_called_so(cli):
    _, out, _ = cli("roofline", *BIG, "--context", "0", "--batch-size", "4", "--claim", "6200")
    assert "IMPOSSIBLE" in out
    assert "batch 92" in out


def test_figures_of_a_model_that_fits_into_a_cache_are_not_called_bounds(cli):
    _, out, _ = cli("roofline", "--gpu", "H100")
    assert "no bound for it" in out


@pytest.mark.parametrize("command", ["speedup", "roofline"])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_written_where_it_is_asked_for(cli, tmp_path, command, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{suffix}"
    assert cli(command, *(BIG if command == "roofline" else ()), "--plot", path)[0] == 0
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_a_plot_without_matplotlib_says_what_to_install(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    code, out, err = cli("speedup", "--plot", tmp_path / "plot.png")
    assert (code, out) == (2, "")
    assert err == "error: this needs matplotlib: pip install 'eagle3-jax[plot]'\n"


def test_the_exercises_are_printed_and_a_rollout_is_written_to_a_file(cli, tmp_path):
    assert cli("speedup", "--exercises")[1].count("?") >= 5
    path = tmp_path / "rollout.md"
    assert cli("rollout", *BIG, "--out", path)[:2] == (0, "")
    assert path.read_text().startswith("# Rollout of speculative decoding: Llama-3.3-70B\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("memory", "--gpu", "H300"), "did you mean H200? known are B200, H200,"),
        (("memory", "--gpu", "abacus"), "'abacus' is not known; known are B200"),
        (("cost", "--price-per-hour", "-1", "--tokens-per-second", "10"), "price_per_hour is -1"),
        (("cost", "--price-per-hour", "0", "--tokens-per-second", "10"), "price_per_hour is 0"),
        (("cost", "--price-per-hour", "1", "--tokens-per-second", "0"), "tokens_per_second is 0"),
        (("cost", "--price-per-hour", "1", "--tokens-per-second", "9", "--busy", "2"), "busy is 2"),
        (("cost", "--tokens-per-second", "10"), "--price-per-hour"),
        (("memory", "-K", "512"), "the bundled head has 512 positions, so K is at most 511"),
        (("roofline", *BIG, "-K", "2048"), "K is at most 2047"),
        (("memory", "--context", "513"), "beyond the 512 positions"),
        (("roofline", "--target", "nosuch"), "neither a directory, a hub id"),
        (("roofline", "--claim", "9"), "add --batch-size"),
        (("roofline", "--claim", "9", "--batch-size", "1"), "add --gpu"),
        (("roofline", "--bandwidth-gb-per-s", "-4"), "expected a positive number"),
        (("roofline", "--bandwidth-gb-per-s", "inf"), "is inf; expected a finite number"),
        (("cost", "--price-per-hour", "nan", "--tokens-per-second", "10"), "--price-per-hour is nan; expected a"),
        (("speedup", "--draft-cost", "inf"), "--draft-cost is inf"),
        (("speedup", "-K", "0"), "greater than or equal to 1"),
        (("memory", "--memory-gb", "80"), "add --bandwidth-gb-per-s"),
        (("memory", "--utilization", "1.2"), "utilization is 1.2"),
        (("memory", "--reserve-gb", "-1"), "reserve"),
        (("memory", "--weights", "nf4"), "'nf4' are not known"),
        (("memory", "--cache", "int4"), "'int4' is not known"),
        (("memory", "--target", "Qwen3-8B", "--num-gpus", "3"), "cannot be divided by 3"),
        (("memory", "--target", "Qwen3-8B", "--drafter", OFFICIAL / "eagle3"), "features of width"),
        (("memory", "--target", "Qwen3-8B", "--drafter", OFFICIAL / "target"), "no draft_vocab_size"),
        (("speedup", "--alpha", "1.2"), "conditional_acceptance_rate is 1.2"),
        (("speedup", "--alpha", "0.5", "--draft-acceptance-rate", "0.5"), "give one"),
        (("speedup", "--mean-acceptance-length", "7"), "a round emits 1 to 6"),
        (("speedup", "--traffic", "0.5:0.3"), "sum to 1"),
        (("speedup", "--traffic", "much"), "SHARE:ALPHA"),
        (("speedup", "--traffic", "1:0.5", "--alpha", "0.5"), "leave the other options"),
        (("speedup", "--verify-cost", "0"), "verify_cost is 0"),
        (("speedup", "--wanted", "0"), "wanted speed-up is 0"),
        (("speedup", "--plot", "plot.gif"), ".png or .svg"),
        (("rollout", "--drafter", "none"), "needs a head"),
        (("rollout", "--verify-cost", "1.2"), "give both or neither"),
        (("rollout", "--requests-per-second", "0"), "requests_per_second is 0"),
        (("rollout", "--out", "/nowhere/rollout.md"), "cannot be written"),
    ],
)
def test_bad_input_is_refused_with_one_line(cli, arguments, message):
    code, out, err = cli(*arguments)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"model_type": "mixtral"}, "plans are made for dense decoders"),
        ({"sliding_window": 4096}, "only full attention"),
        ({"head_dim": None, "hidden_size": 65}, "add head_dim"),
    ],
)
def test_a_config_that_cannot_be_planned_with_says_what_is_wrong(cli, tmp_path, changes, message):
    config = json.loads((bundled("target") / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = cli("memory", "--target", tmp_path)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_config_of_the_hub_counts_like_the_named_model(tmp_path):
    """The fields of Qwen3-4B and of a Qwen2 with its biases, as their config.json has them."""
    qwen3 = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
        "sliding_window": None, "use_sliding_window": False, "attention_bias": False,
    }  # fmt: skip
    qwen2 = {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
        "sliding_window": 131072, "use_sliding_window": False, "max_position_embeddings": 32768,
    }  # fmt: skip
    for config, parameters in ((qwen3, PUBLISHED["Qwen3-4B"]), (qwen2, 7_615_616_512)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_target_shape(str(tmp_path)).parameters.total == parameters


def test_a_speculators_head_is_read_from_its_nested_config(tmp_path):
    config = {
        "draft_vocab_size": 32000,
        "target_hidden_size": 4096,
        "transformer_layer_config": {
            "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
            "num_hidden_layers": 1, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 4096,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = read_head_shape(str(tmp_path), target=KNOWN_MODELS["llama-3.1-8b"], bundled=False)
    assert head is not None
    assert head.parameters.total == 424_689_664
    assert head.max_draft_tokens == 4095


def test_known_accelerators_are_found_however_they_are_spelt():
    assert accelerator_named("nvidia h100 sxm".replace("nvidia ", "")).name == "H100"
    assert accelerator_named("tpu_v6e").name == "TPU-v6e"
    assert all(accelerator.source for accelerator in KNOWN_ACCELERATORS.values())
    measured = custom_accelerator(gb_per_s=4000.0, base=accelerator_named("H200"))
    assert measured.bandwidth_bytes_per_second == 4e12
    assert measured.peak_flops == accelerator_named("H200").peak_flops


LIBRARY = ROOT / "eagle3_jax"
PLANNING = sorted(
    path for found in ("theory/*.py", "theory/*.md", "measure/*.py", "cli/*plan*.py") for path in LIBRARY.glob(found)
)


@pytest.mark.parametrize("path", PLANNING, ids=lambda path: path.name)
def test_no_rate_is_called_acceptance_rate_alone(path):
    for match in re.finditer(r"(\S+)\s+acceptance rates?\b", path.read_text()):
        assert match[1].endswith(("draft", "conditional")) or '"acceptance rate"' in match[0], match[0]
