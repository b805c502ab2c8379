"""The command `eagle3 plan`: pages for people, objects for machines, and what it believes."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from deployments import served

from eagle3_jax.cli.plan.models import Target, read_head
from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import attention_heads, memory_plan, remedy_of
from eagle3_jax.theory.sizes import parameters

BIG = ("--target", "Llama-3.3-70B", "--weights", "fp8", "--gpu", "H200")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("speedup", "--simulate", "100", "--traffic", "0.7:0.7,0.3:0.4"), "simulation"),
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
    code, out, err = cli("plan", *arguments)
    assert (code, err) == (0, "")
    assert len(out) > 100
    for rate in re.finditer(r"(\w+)\s+acceptance[\s_-]rate", out):
        assert rate[1] in ("draft", "conditional"), out
    code, out, err = cli("plan", *arguments, "--json")
    assert (code, err) == (0, "")
    assert field in json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_the_traffic_of_the_articles_is_blended_by_rounds(cli):
    _, out, _ = cli("plan", "speedup", "--traffic", "0.7:0.7,0.3:0.4", "--json")
    assert json.loads(out)["mean_acceptance_length"] == pytest.approx(2.388, abs=0.001)


def test_a_rollout_is_written_to_a_file(cli, tmp_path):
    path = tmp_path / "rollout.md"
    assert cli("plan", "rollout", *BIG, "--out", path)[:2] == (0, "")
    assert path.read_text().startswith("# Rollout of speculative decoding: Llama-3.3-70B\n")


def test_a_target_with_experts_says_what_verification_reads_of_them(cli):
    options = ("--target", "Qwen3-30B-A3B", "--gpu", "H200")
    line = json.loads(cli("plan", "roofline", *options, "--json")[1])["accelerators"][0]
    assert line["target_parameters"] == 30_532_122_624
    assert line["target_active_parameters"] == 3_041_867_776
    assert [round(128 * row["experts"]) for row in line["nodes"]] == [8, 16, 29, 52, 82, 112, 125]
    assert line["pays_from_batch"] == 5

    _, out, _ = cli("plan", "roofline", *options)
    assert re.search(r"nodes +experts read +v\n1 +6\.2% +1\.00\n", out)
    assert "Speculation pays from batch 5 on" in out and "a chain of K = 1 gains most" in out

    _, dense, _ = cli("plan", "roofline", *BIG)
    assert "experts" not in dense and "Speculation pays below batch" in dense


def test_memory_names_active_parameters_and_recurrent_states(cli):
    _, out, _ = cli(
        "plan", "memory", "--target", "Qwen3-Next-80B-A3B", "--gpu", "H200", "--weights", "fp8"
    )
    assert "79.674 billion, 3.564 of them active, fp8" in out
    assert re.search(r"states +0\.62 +of recurrent layers, whatever the length", out)
    _, out, _ = cli(
        "plan", "memory", "--target", "gpt-oss-120b", "--gpu", "H100", "--weights", "mxfp4",
        "--batch-size", "4"
    )  # fmt: skip
    # The published files are 65.2 GB.
    assert re.search(r"target +65\.19 ", out) and "states" not in out


# What the plan reads of published config.json files, and the gigabytes of their weights. Those of
# NVFP4 are counted by hand: 32 layers of 218,103,808 weights in 4.5 bits, two tables of 128,256 by
# 4,096 and 65 norms in 16. A module that drafts, an encoder of images and the groups that GPTQ
# numbers are not counted.
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "hidden_act": "silu", "use_sliding_window": False, "torch_dtype": "float16",
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 201088, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0,
    "sliding_window": 128, "tie_word_embeddings": False, "attention_bias": True, "hidden_act": "silu",
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1, "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                    "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024},
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "model_type": "siglip_vision_model"},
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": None, "version": "gemm",
       "zero_point": True}  # fmt: skip
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.01,
    "static_groups": False, "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model",
    "batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True, "dataset": None,
    "exllama_config": {"version": 1}, "max_input_length": None, "model_seqlen": None, "use_cuda_fp16": False,
    "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None, "pad_token_id": None,
    "tokenizer": None, "use_exllama": True,
}  # fmt: skip
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"},
         "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": [
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}  # fmt: skip
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
DENSE_ATTENTION = {**NVFP4, "ignore": ["lm_head", "model.layers.*.self_attn*"]}
LAYER = 218_103_808
ATTENTION = 2 * 4096 * (4096 + 1024)
PUBLISHED = {
    "gpt-oss-20b": (GPT_OSS, MXFP4, 13.76, "20.915 billion, 3.608 of them active, mxfp4"),
    "Qwen2.5-7B-Instruct-AWQ": (QWEN, AWQ, 5.57, "7.616 billion, int4"),
    "Qwen2.5-7B-Instruct-GPTQ-Int4": (QWEN, GPTQ, 5.57, "7.616 billion, int4"),
    "Llama-3.1-8B-Instruct-NVFP4": (
        LLAMA, NVFP4, (32 * LAYER * 4.5 + 16 * (2 * 128256 + 65) * 4096) / 8e9, "8.030 billion, nvfp4",
    ),
    "the same, attention dense": (
        LLAMA, DENSE_ATTENTION,
        (32 * (LAYER * 4.5 + ATTENTION * 11.5) + 16 * (2 * 128256 + 65) * 4096) / 8e9, "8.030 billion, nvfp4",
    ),
    "DeepSeek-V3": (DEEPSEEK, FP8, 671.0 + 1.9, "671.026 billion, "),
    "gemma-3-4b-it": (GEMMA, None, 2 * 3.88, "3.880 billion, bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_memory_is_that_of_the_weights_as_they_are_published(cli, tmp_path, name):
    config, quantisation, gigabytes, note = PUBLISHED[name]
    fields = config if quantisation is None else {**config, "quantization_config": quantisation}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    options = ("--target", tmp_path, "--drafter", "none", "--gpu", "H200", "--num-gpus", "1")
    code, out, err = cli("plan", "memory", *options)
    assert (code in (0, 1), err) == (True, "")
    size = float(re.search(r"target +([\d.]+) ", out)[1])
    assert size == pytest.approx(gigabytes, rel=0.004), out
    assert note in out
    assert "bfloat16" in cli("plan", "memory", *options, "--weights", "bf16")[1]


def test_what_does_not_fit_ends_with_one_and_says_what_would_do(cli):
    big = ("plan", "memory", "--target", "Llama-3.3-70B", "--gpu", "H100")
    code, out, _ = cli(*big)
    assert code == 1
    assert "DOES NOT FIT" in out and "What would do: 4 x H100, or --weights int4." in out
    for remedy in (("--num-gpus", "4"), ("--weights", "int4")):
        code, out, _ = cli(*big, *remedy)
        assert code == 0 and "What would do" not in out
    assert "a lower --batch-size or --context" in cli(*big, "--batch-size", "100000")[1]


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("Llama-3.3-70B", "A100-40GB"),
        ("Llama-3.1-405B", "H200"),
        ("Vicuna-13B", "L4"),
        ("Qwen3-32B", "A100-40GB"),
    ],
)
def test_a_remedy_is_the_smallest_change_that_fits(name, gpu):
    deployment = served(name, gpu, "bfloat16")
    load = {"batch": 8, "context": 4096, "num_draft_tokens": 5}
    (heads,) = attention_heads(deployment.target)
    numbers = [n for n in range(2, heads + 1) if heads % n == 0]
    weights = ["fp8", "int8", "int4", "mxfp4", "nvfp4"]

    for field, values in (("num_accelerators", numbers), ("weights", weights)):
        changed = [dataclasses.replace(deployment, **{field: value}) for value in values]
        fits = [
            value
            for value, plan in zip(values, changed, strict=True)
            if memory_plan(plan, **load).fits
        ]
        assert remedy_of(deployment, **load)[field] == (fits[0] if fits else None)


VICUNA = KNOWN_MODELS["Vicuna-13B"]
# The fields of yuhuili/EAGLE3-Vicuna1.3-13B, whose weights hold one layer.
VICUNA_HEAD = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "vocab_size": 32000, "draft_vocab_size": 32000,
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
    "num_attention_heads": 40, "num_key_value_heads": 40,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip


def head_of(folder, **changes):
    (folder / "config.json").write_text(json.dumps(VICUNA_HEAD | changes))
    return read_head(str(folder), Target("Vicuna", VICUNA), bundled=False).config


def test_a_head_with_its_targets_number_of_layers_has_one(tmp_path):
    head = head_of(tmp_path)
    assert head.num_layers == 1
    assert parameters(head) == parameters(usual_head(VICUNA))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"medusa_num_heads": 4}, "they must agree, so remove the wrong one"),
        ({"architectures": ["DFlashDraftModel"]}, "has no rope_theta; it changes the mathematics"),
        ({"speculators_model_type": "peagle"}, "names no mask token"),
        (
            {"draft_vocab_size": None, "model_type": "gpt"},
            "no draft head and no language model that is known",
        ),
    ],
    ids=str,
)
def test_a_head_of_another_method_is_told_by_its_configuration_alone(tmp_path, changes, says):
    with pytest.raises(ValueError, match=says):
        head_of(tmp_path, **changes)


def test_a_target_is_planned_whatever_its_window_and_quantisation(cli, tmp_path):
    def planned(**changes):
        (tmp_path / "config.json").write_text(json.dumps(VICUNA_HEAD | changes))
        return json.loads(cli("plan", "memory", "--target", tmp_path, "--gpu", "B200", "--json")[1])

    plain = planned()
    assert plain["target_parameters"] == 13_015_864_320
    fp8 = planned(quantization_config={"quant_method": "fp8"})
    assert (fp8["target_parameters"], fp8["weights"]) == (plain["target_parameters"], "fp8")
    assert planned(model_type="mistral", sliding_window=512) == plain
