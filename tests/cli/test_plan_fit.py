"""What a plan believes of a configuration, and what it says when the memory is not enough."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from eagle3_jax.cli import run
from eagle3_jax.cli._planning import Target, read_head
from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment, attention_heads, memory_plan, remedy_of
from eagle3_jax.theory.sizes import parameters

VICUNA = KNOWN_MODELS["Vicuna-13B"]
# The fields of yuhuili/EAGLE3-Vicuna1.3-13B, whose weights hold one layer.
VICUNA_HEAD = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "draft_vocab_size": 32000,
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 40, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip


def head_of(folder: Any, **changes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(VICUNA_HEAD | changes))
    return read_head(str(folder), Target("Vicuna", VICUNA), bundled=False).config


def test_a_head_with_its_targets_number_of_layers_has_one(tmp_path: Any) -> None:
    head = head_of(tmp_path)
    assert head.num_layers == 1
    assert parameters(head) == parameters(usual_head(VICUNA))
    assert parameters(head).total < 1e9


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"medusa_num_heads": 4},
            "disagree on the Medusa heads",
        ),
        ({"architectures": ["DFlashDraftModel"]}, "has no rope_theta; engines fill in 1000000 or 10000"),
        ({"speculators_model_type": "peagle"}, "names no mask token"),
        ({"draft_vocab_size": None, "model_type": "gpt"}, "no draft head and no language model that is known"),
    ],
    ids=str,
)
def test_a_head_of_another_method_is_told_by_its_configuration_alone(
    tmp_path: Any, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        head_of(tmp_path, **changes)


def planned(folder: Any, capsys: Any, **changes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(VICUNA_HEAD | changes))
    assert run(["plan", "memory", "--target", str(folder), "--gpu", "B200", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_targets_of_every_family_are_planned_with_windows_and_quantised_ones_too(tmp_path: Any, capsys: Any) -> None:
    plain = planned(tmp_path, capsys)
    assert plain["target_parameters"] == 13_015_864_320
    assert planned(tmp_path, capsys, quantization_config={"quant_method": "fp8"}) == plain
    assert planned(tmp_path, capsys, model_type="mistral", sliding_window=512) == plain
    biased = planned(tmp_path, capsys, model_type="qwen2")
    assert biased["target_parameters"] == plain["target_parameters"] + 40 * 3 * 5120
    normed = planned(tmp_path, capsys, model_type="qwen3", head_dim=128, attention_bias=True)
    assert normed["target_parameters"] == plain["target_parameters"] + 40 * (4 * 5120 + 2 * 128)


def test_what_does_not_fit_ends_with_one_and_says_what_would_do(capsys: Any) -> None:
    arguments = ["plan", "memory", "--target", "Llama-3.3-70B", "--gpu", "H100"]
    assert run(arguments) == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out
    assert "What would do: 4 x H100, or --weights int4." in out
    assert run([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["remedy"] == {"num_accelerators": 4, "weights": "int4"}
    for remedy in (("--num-gpus", "4"), ("--weights", "int4")):
        assert run([*arguments, *remedy]) == 0
        assert "What would do" not in capsys.readouterr().out
    assert run([*arguments, "--batch-size", "100000"]) == 1
    assert "lower --batch-size or --context" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["Llama-3.3-70B", "Llama-3.1-405B", "Vicuna-13B", "Qwen3-32B"])
@pytest.mark.parametrize("gpu", ["L4", "A100-40GB", "H200"])
def test_a_remedy_is_the_smallest_change_that_fits(name: str, gpu: str) -> None:
    target = KNOWN_MODELS[name]
    deployment = Deployment(target=target, head=usual_head(target), accelerator=accelerator_named(gpu))
    asked = {"batch": 8, "context": 4096, "num_draft_tokens": 5}
    remedy = remedy_of(deployment, **asked)

    def fits(**changes: Any) -> bool:
        return memory_plan(dataclasses.replace(deployment, **changes), **asked).fits

    (heads,) = attention_heads(target)
    fewer = [n for n in range(2, remedy.num_accelerators or heads + 1) if heads % n == 0]
    assert not any(fits(num_accelerators=n) for n in fewer if n != remedy.num_accelerators)
    assert remedy.num_accelerators is None or fits(num_accelerators=remedy.num_accelerators)
    wider = {None: ("fp8", "int8", "int4"), "fp8": (), "int8": ("fp8",), "int4": ("fp8", "int8")}[remedy.weights]
    assert not any(fits(weights=weights) for weights in wider)
    assert remedy.weights is None or fits(weights=remedy.weights)
