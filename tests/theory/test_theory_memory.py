"""Parameters and bytes of models, heads and caches: against published checkpoints, and by hand."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from deployments import SMALL, SMALL_HEAD, served

from eagle3_jax.devices import groups
from eagle3_jax.models import attention
from eagle3_jax.models.config import (
    DecoderConfig,
    Experts,
    GatedDelta,
    GatedMLP,
    GroupedQuery,
    Latent,
    LayerConfig,
)
from eagle3_jax.theory.accelerators import custom_accelerator
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import SCORES, Deployment, memory_plan
from eagle3_jax.theory.sizes import Parameters, parameters, sizes_of
from validation.aot.record import PATH, load

# Parameters that the published checkpoints hold (the safetensors index on the hub; a tied table
# counted once).
PUBLISHED = {
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.3-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Vicuna-13B": 13_015_864_320,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
# Published sizes of models whose files hold more than the model (a module that drafts, a vision
# tower), in billions: all parameters, and the active ones, some with the embedding, of which a
# token reads one row.
ROUNDED = {
    "Qwen3-30B-A3B": (30.5, 3.3, "and embedding"),
    "Qwen3-235B-A22B": (235, 22, "and embedding"),
    "gpt-oss-20b": (20.91, 3.61, ""),
    "gpt-oss-120b": (116.83, 5.13, ""),
    "DeepSeek-V3": (671, 37, ""),
    "Llama-4-Maverick": (400, 17, "and embedding"),
    "Qwen3-Next-80B-A3B": (80, 3, ""),
}


def test_named_models_have_the_parameters_of_their_checkpoints():
    assert {name: parameters(KNOWN_MODELS[name]).total for name in PUBLISHED} == PUBLISHED
    assert KNOWN_MODELS.keys() == PUBLISHED.keys() | ROUNDED.keys() | {"GLM-4.5"}


@pytest.mark.parametrize("name", ROUNDED)
def test_named_models_with_experts_have_as_many_active_as_is_published(name):
    counts = parameters(KNOWN_MODELS[name])
    total, active, with_embedding = ROUNDED[name]
    counted = sizes_of(KNOWN_MODELS[name]).active + (counts.embedding if with_embedding else 0)
    for billions, published in ((counts.total / 1e9, total), (counted / 1e9, active)):
        digits = len(str(published).partition(".")[2])
        assert abs(billions - published) < max(10**-digits, 0.002 * published)


def test_glm_counts_its_drafting_module_and_no_tables():
    """Its report says 355 billion.

    The module is a layer with experts, two norms more, a 2·D by D fusion.
    """
    model = KNOWN_MODELS["GLM-4.5"]
    last = sizes_of(model).layers[-1]
    tables = 2 * 151_552 * 5120
    fusion = 2 * 5120 * 5120 + 2 * 5120
    total = parameters(model).total - tables + last.sizes.total / last.number + fusion
    assert total / 1e9 == pytest.approx(355.2, abs=0.1)


D = 9  # width of the residual stream
PLAIN = GroupedQuery(num_heads=6, num_kv_heads=2, head_dim=4)
LATENT = Latent(num_heads=3, q_rank=7, kv_rank=5, nope_dim=4, rope_dim=2, value_dim=6)
DELTA = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, kernel=3)
SHARED = Experts(
    num_experts=4, per_token=1, width=3, router="sigmoid", shared_width=7, shared_gate=True
)
ATTENDS = {"query_output": 2 * D * 24, "key_value": D * 16}
MULTIPLIES = {"mlp": 3 * D * 10}

# A layer, its parameters without the two norms of the block, and its numbers per token, of states
# and of windows.
LAYERS = {
    "plain": (PLAIN, GatedMLP(width=10), ATTENDS | MULTIPLIES, (16, 0, 0)),
    "biases": (
        dataclasses.replace(PLAIN, qkv_bias=True, o_bias=True, qk_norm=True, sinks=True),
        GatedMLP(width=10, bias=True),
        ATTENDS | MULTIPLIES | {"vectors": 40 + D + 2 * 4 + 6 + 2 * 10 + D},
        (16, 0, 0),
    ),
    "latents": (
        LATENT,
        GatedMLP(width=10),
        MULTIPLIES
        | {
            "query_output": 7 * 3 * 6 + 3 * (4 + 6) * 5 + 3 * 6 * D,
            "key_value": D * (7 + 7),
            "vectors": 7 + 5,
        },
        (7, 0, 0),
    ),
    "recurrence": (
        DELTA,
        GatedMLP(width=10),
        MULTIPLIES | {"query_output": D * (32 + 20 + 8) + 20 * D, "vectors": 32 * 3 + 2 * 4 + 5},
        (0, 4 * 3 * 5, 2 * 32),
    ),
    "experts": (
        PLAIN,
        SHARED,
        ATTENDS | {"mlp": 3 * D * 7, "experts": 4 * 3 * D * 3, "routers": 4 * D + D, "vectors": 4},
        (16, 0, 0),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_parameter_of_a_layer_is_counted_by_its_use(name):
    mixer, mlp, expected, cached = LAYERS[name]
    layer = LayerConfig(mixer=mixer, mlp=mlp)
    small = LayerConfig(mixer=PLAIN, mlp=GatedMLP(width=1))
    config = DecoderConfig(vocab_size=17, width=D, layers=(layer, small, layer))
    twice, once = sizes_of(config).layers
    of_layer = Parameters(**expected | {"vectors": expected.get("vectors", 0) + 2 * D})
    assert (twice.number, once.number) == (2, 1)
    assert twice.sizes == Parameters(*(2 * size for size in of_layer))
    assert twice[3:] == tuple(2 * values for values in cached)
    assert parameters(config).total == twice.sizes.total + once.sizes.total + D + 2 * 17 * D


def test_bytes_of_a_70b_target_in_fp8_and_of_its_head():
    deployment = served()
    target = deployment.target
    head = deployment.head
    assert head is not None

    # fc 3·8192², q 16384·8192, k and v 2·16384·1024, o 8192², mlp 3·8192·28672, norms 4·8192,
    # lm_head 32000·8192.
    assert parameters(head).total == 1_403_027_456
    # Layers are in FP8, tables in bfloat16.
    assert deployment.weight_bytes(target) / 1e9 == pytest.approx(72.66, abs=0.01)
    assert deployment.streamed_bytes(target) / 1e9 == pytest.approx(70.555, abs=0.001)
    # The head has all of its kernels in FP8.
    assert deployment.weight_bytes(head) / 1e9 == pytest.approx(1.403, abs=0.001)
    assert served(weights="int8").weight_bytes(head) / 1e9 == pytest.approx(2.806, abs=0.001)

    # 2·80·8·128 numbers of 2 bytes; the head's 1.25 % are not nothing, as an article says.
    assert deployment.cache_bytes_per_token(target) == 327_680
    assert deployment.cache_bytes_per_token(head) == 4096


def test_every_part_of_the_plan_by_hand():
    deployment = Deployment(
        target=SMALL, head=SMALL_HEAD, accelerator=custom_accelerator(gb_per_s=1.0, memory_gb=1.0)
    )

    plan = memory_plan(
        deployment,
        batch=2,
        context=10,
        num_draft_tokens=1,
        prefill_tokens=1,
        utilization=0.5,
        reserve_bytes=7.0,
    )

    assert plan.target_weights == 2 * (144 + 12 + 40 + 40)
    # Fusion 3·4·4, q 8·4, k and v 2·8·2, o 4·4, mlp 96, norms 4·4, lm_head 5·4.
    assert plan.head_weights == 2 * (48 + 32 + 32 + 16 + 96 + 16 + 20)
    # 2·1·1·2 numbers of 2 bytes a token.
    assert (plan.target_cache, plan.head_cache) == (2 * 12 * 8, 2 * 12 * 8)
    # Four tokens: 2·(4·4 + 2·8 + (2 + 2)·2 + 3·4) each, and 2·4·10 for logits and probabilities;
    # scores of two heads and ten keys of 4 + 2 bytes each; one token of a prefill and caches of
    # two, of 8 bytes for either model.
    assert plan.activations == 4 * (2 * (16 + 16 + 8 + 12) + 80) + 4 * 2 * 10 * 6 + 3 * 16
    assert (plan.reserve, plan.budget) == (7.0, 0.5e9)
    assert plan.fits
    assert plan.cache_capacity_tokens == (0.5e9 - plan.without_caches) // 16

    windowed = dataclasses.replace(
        SMALL.layers[0], mixer=dataclasses.replace(SMALL.layers[0].mixer, window=4)
    )
    deployment = dataclasses.replace(
        deployment, target=dataclasses.replace(SMALL, layers=(windowed,))
    )
    # Buffers hold the whole sequence, window or not.
    assert deployment.cache_bytes_per_token(deployment.target) == 8


COMPILED = load(PATH.with_name("aot-memory.json"))


@pytest.mark.parametrize("name", COMPILED)
def test_a_plan_is_within_a_tenth_of_what_was_compiled_for_an_h200(name):
    """Peaks of programs of all layers (python -m validation.aot --layers all --record)."""
    row = COMPILED[name]
    case = row.case
    plain = row.case.draft == "plain"
    deployment = served(case.target, weights="bfloat16")
    k = 0 if plain else 5

    plan = memory_plan(
        dataclasses.replace(deployment, head=None) if plain else deployment,
        batch=case.batch,
        context=case.capacity - k - 1,
        num_draft_tokens=k,
        prefill_tokens=1 if case.program == "step" else min(8192, case.batch * case.prompt),
        utilization=1.0,
        reserve_bytes=0.0,
    )

    # The table that the head shares with its target is one array, and two arguments of a compiled
    # program.
    shared = 0 if plain else 2 * 128_256 * 4096
    assert plan.total == pytest.approx(row.deep.memory["peak"] - shared, rel=0.1)


def test_the_scores_that_a_plan_counts_are_those_that_are_made_at_once():
    assert SCORES == attention._SCORES
    prefill_tokens = inspect.signature(memory_plan).parameters["prefill_tokens"].default
    assert prefill_tokens == groups.TOKENS and 2 * prefill_tokens == groups.SLOTS


def test_tensor_parallelism_divides_all_but_vectors_fusion_and_scarce_key_heads():
    single, eight, sixteen = (served(num_accelerators=n) for n in (1, 8, 16))
    target = single.target
    head = single.head
    assert head is not None

    vectors = 2 * parameters(target).vectors
    assert eight.weight_bytes(target) - vectors == pytest.approx(
        (single.weight_bytes(target) - vectors) / 8
    )
    undivided = parameters(head).fusion + 2 * parameters(head).vectors
    assert eight.weight_bytes(head) - undivided == pytest.approx(
        (single.weight_bytes(head) - undivided) / 8
    )

    assert eight.cache_bytes_per_token(target) == single.cache_bytes_per_token(target) / 8
    # 8 key heads, each twice.
    assert sixteen.cache_bytes_per_token(target) == eight.cache_bytes_per_token(target)
    replicated = parameters(target).key_value / 2
    assert 16 * sixteen.weight_bytes(target) > 8 * eight.weight_bytes(target) + replicated


def test_quantised_weights_leave_the_tables_alone():
    target = KNOWN_MODELS["Llama-3.3-70B"]
    tables = 2 * 128_256 * 8192 * 2 + 2 * parameters(target).vectors
    layers = 70_553_706_496 - 2 * 128_256 * 8192 - parameters(target).vectors
    for weights, size in (("bfloat16", 2.0), ("int8", 1.0), ("fp8", 1.0), ("int4", 0.515625)):
        assert served(weights=weights).weight_bytes(target) == layers * size + tables
