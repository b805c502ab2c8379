"""Files of Qwen3-Next and Qwen3.5 as they are published, with an encoder of images and a module that drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoints import write_checkpoint
from families import BASE, RECIPES

from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError, hf_config, rules
from eagle3_jax.conversion.families import FAMILIES
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import GatedDelta, grouped
from eagle3_jax.models.decoder import DecoderTarget

NAMES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def values_of(name: str) -> dict[str, Any]:
    return BASE | RECIPES[name].fields | {"model_type": name, "rms_norm_eps": 1e-6}


def written(name: str) -> tuple[Any, dict[str, np.ndarray]]:
    """Random parameters, and their tensors in the layout that is written."""
    config = FAMILIES[name].read_config(Fields(values_of(name), name))
    shapes, rng = DecoderTarget(config).param_shapes(), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
    return params, rules.write_params(FAMILIES[name].rules(config), params, shapes, where=name)


def assert_read(directory: Path, params: Any, family: str) -> None:
    found = conversion.read_target(directory)
    assert found.family == FAMILIES[family]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, found.params), params)


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every expert of a layer in two tensors, gates before the rest."""
    count, out = 8, dict(tensors)
    for layer in range(4):
        source = f"model.layers.{layer}.mlp.experts"
        of = {
            part: [out.pop(f"{source}.{e}.{part}_proj.weight") for e in range(count)] for part in ("gate", "up", "down")
        }
        out[f"{source}.gate_up_proj"] = np.stack(
            [np.concatenate(pair) for pair in zip(of["gate"], of["up"], strict=True)]
        )
        out[f"{source}.down_proj"] = np.stack(of["down"])
    return out


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_the_language_model_is_read_out_of_one_that_sees(tmp_path: Path, name: str) -> None:
    params, tensors = written(name)
    if "moe" in name:
        tensors = fused(tensors)
    inside = {key.replace("model.", "model.language_model.", 1): value for key, value in tensors.items()}
    parts = ("model.visual.patch_embed.proj.weight", "mtp.fc.weight")
    beside = {part: np.zeros((2, 2), np.float32) for part in parts}
    values = {"model_type": name.removesuffix("_text"), "text_config": values_of(name), "vision_config": {}}
    directory = write_checkpoint(
        tmp_path / "target", values, {**inside, **{k: v.astype(np.float32) for k, v in beside.items()}}
    )
    assert_read(directory, params, name)
    assert conversion.describe(directory).kind == f"target: {FAMILIES[name].label}"


@pytest.mark.parametrize("name", NAMES)
def test_a_module_that_drafts_is_left_out(tmp_path: Path, name: str) -> None:
    params, tensors = written(name)
    module = {f"mtp.layers.0.{part}.weight": np.ones((2, 2), np.float32) for part in ("mlp.gate", "input_layernorm")}
    assert_read(write_checkpoint(tmp_path / "target", values_of(name), tensors | module), params, name)


def test_every_fourth_layer_attends_where_a_file_does_not_say_which() -> None:
    values = values_of("qwen3_5_text") | {"layer_types": None, "num_hidden_layers": 8}
    del values["rope_parameters"]
    values["rope_theta"] = 1e7
    read = FAMILIES["qwen3_5_text"].read_config
    config = read(Fields(values, "here"))
    assert [isinstance(layer.mixer, GatedDelta) for layer in config.layers] == [True, True, True, False] * 2
    rope = grouped(config.layers[3]).rope
    assert rope is not None and (rope.partial, rope.theta) == (0.25, 1e7)
    third = read(Fields(values | {"full_attention_interval": 3}, "here"))
    assert [index for index, layer in enumerate(third.layers) if not isinstance(layer.mixer, GatedDelta)] == [2, 5]


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "a kind of layer": ({"layer_types": ["mamba"] * 4}, "layer_types has 'mamba'; expected linear_attention or full_"),
    "too few": ({"layer_types": ["linear_attention"] * 3}, "layer_types names 3 layers but num_hidden_layers is 4"),
    "no kernel": ({"linear_conv_kernel_dim": None}, "has no linear_conv_kernel_dim"),
    "heads that do not divide": (
        {"linear_num_value_heads": 3},
        "num_value_heads 3 is not a multiple of num_key_heads 2",
    ),
    "no gate": ({"attn_output_gate": False}, "attn_output_gate is False; only True is supported"),
}


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_a_configuration_that_is_not_computed_is_refused(name: str, case: str) -> None:
    changes, says = REFUSALS[case]
    with pytest.raises(CheckpointError, match=says) as refusal:
        FAMILIES[name].read_config(Fields(values_of(name) | changes, "here"))
    assert "\n" not in str(refusal.value)


def test_types_that_the_tensors_contradict_are_refused(tmp_path: Path) -> None:
    _, tensors = written("qwen3_5_text")
    values = values_of("qwen3_5_text") | {"layer_types": ["full_attention"] + ["linear_attention"] * 3}
    with pytest.raises(CheckpointError, match=r"misses model\.layers\.0\.self_attn\.q_proj\.weight"):
        conversion.read_target(write_checkpoint(tmp_path / "target", values, tensors))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_says_the_same(name: str) -> None:
    family = FAMILIES[name]
    config = family.read_config(Fields(values_of(name), name))
    values = {**hf_config.stack_fields(config, "float32"), **family.write_fields(config)}
    assert family.read_config(Fields(values, name)) == config
    assert values["partial_rotary_factor"] == grouped(config.layers[3]).rope.partial  # type: ignore[union-attr]
