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
    weights = ["fp8", "int8", "int4", "mxfp4"]

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
    assert planned(quantization_config={"quant_method": "fp8"}) == plain
    assert planned(model_type="mistral", sliding_window=512) == plain
