"""Quantised checkpoints are read as what they represent; contradictory files are errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quantised as by_hand
from checkpoints import edit_config, edited, refused, same_params, write_checkpoint
from quantised import BLOCK, FP8_CONFIG, INT4, KEPT, LAYERS, RECIPES, plain, written

from eagle3_jax import conversion
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.quantised import read_quantised
from eagle3_jax.conversion.tensors import read_tensors


@pytest.mark.parametrize("name", RECIPES)
def test_a_quantised_target_is_read_as_what_it_stands_for(tmp_path: Path, name: str) -> None:
    stored, dense = (conversion.read_target(path) for path in written(tmp_path, name))
    assert same_params(stored.params, dense.params)
    assert stored.config == dense.config
    assert stored.quantisation is not None
    assert stored.quantisation.num_tensors == LAYERS * 7
    kept_as = {**dict.fromkeys(KEPT, "fp8"), **dict.fromkeys(INT4, "int4"), "int8": "int8"}
    assert stored.quantisation.kept_as == kept_as.get(name, "")


def test_conversion_writes_what_it_stands_for_in_bfloat16(tmp_path: Path) -> None:
    stored, dense = written(tmp_path, "fp8")
    conversion.convert(stored, tmp_path / "native", "jax")
    conversion.convert(stored, tmp_path / "back", "vllm")

    expected = read_tensors(dense)
    for name, value in read_tensors(tmp_path / "back").items():
        expected_value = (
            expected[name].astype(ml_dtypes.bfloat16) if by_hand.is_linear(name) else expected[name]
        )
        assert value.dtype == expected_value.dtype, name
        assert value.tobytes() == expected_value.tobytes(), name

    native, back = (conversion.read_target(tmp_path / name) for name in ("native", "back"))
    assert same_params(native.params, back.params)
    assert native.quantisation is None
    assert "quantization_config" not in (tmp_path / "back/config.json").read_text()


def of_transformers(directory: Path, **options: Any) -> dict[str, np.ndarray]:
    """Returns the weights that transformers reads on a CPU from a checkpoint, by name."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
    return {name: value.float().numpy() for name, value in model.state_dict().items()}


def read(directory: Path) -> dict[str, Any]:
    fields = Fields(json.loads((directory / "config.json").read_text()), "config.json")
    return read_quantised(read_tensors(directory), fields, directory)[0]


@pytest.mark.torch
def test_blocks_are_those_of_transformers(tmp_path: Path) -> None:
    # Transformers makes another weight of the last block, where it is cut.
    path = written(tmp_path, "fp8", inner=32)[0]
    theirs = of_transformers(path)
    ours = read(path)
    assert ours.keys() == theirs.keys()
    assert all(np.asarray(ours[name]).tobytes() == theirs[name].tobytes() for name in theirs)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["channel", "tensor", "int8", "int4"])
def test_compressed_tensors_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from transformers import CompressedTensorsConfig

    path = written(tmp_path, name)[0]
    theirs = of_transformers(path, quantization_config=CompressedTensorsConfig(dequantize=True))
    ours = read(path)
    assert ours.keys() == theirs.keys()
    stored = read_tensors(path)
    for tensor, value in theirs.items():
        # Transformers multiplies in the type of the scales, which some of these files hold in
        # bfloat16; the library multiplies in float32.
        scale = stored.get(f"{tensor}_scale")
        actual = np.asarray(ours[tensor], np.float32)
        rounded = actual if scale is None else actual.astype(scale.dtype).astype(np.float32)
        assert np.array_equal(rounded, value), tensor


@pytest.mark.torch
def test_four_bits_of_experts_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path / "source")
    recipe = by_hand.Recipe(
        lambda name, value: (
            by_hand.mxfp4(name, value) if by_hand.is_expert(name) else ({name: value}, value)
        ),
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        },
    )
    dense = by_hand.quantise(tmp_path / "source", tmp_path / "quantised", recipe)
    ours = read(tmp_path / "quantised")
    theirs = of_transformers(tmp_path / "quantised")
    assert ours.keys() == dense.keys() == theirs.keys()
    for name in dense:
        assert np.asarray(ours[name], np.float32).tobytes() == theirs[name].tobytes(), name
        np.testing.assert_array_equal(ours[name], dense[name])


def test_stacked_experts_of_fbgemm_have_a_scale_for_every_output(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    width = 8
    inner = 12

    names = {"gate_up_proj": (3, width, 2 * inner), "down_proj": (3, inner, width)}
    stored = {}
    dense = {}

    for name, shape in names.items():
        name = f"model.layers.0.feed_forward.experts.{name}"
        new, dense[name] = RECIPES["fbgemm"].quantise(
            name, random.normal(0, 1, shape).astype(np.float32)
        )
        stored |= new

    write_checkpoint(tmp_path, {"quantization_config": RECIPES["fbgemm"].config}, stored)
    ours = read(tmp_path)
    for name, value in dense.items():
        np.testing.assert_array_equal(ours[name], value)
        np.testing.assert_array_equal(ours[name].stored_kernel().dense(jnp.float32), value)


# What is refused, in one line that names it.

Q = "model.layers.0.self_attn.q_proj"
REFUSALS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "no scale": ("fp8", {}, {f"{Q}.weight_scale_inv": None}, f"{Q}.weight is stored as float8_e4m3fn; expected fl"),
    "no values": ("channel", {}, {f"{Q}.weight": None}, f"{Q}.weight_scale without {Q}.weight"),
    "scales of another shape": (
        "fp8", {}, {f"{Q}.weight_scale_inv": np.ones((2, 1), np.float32)}, r"weight_scale_inv has shape \[2, 1\]; its q"
    ),
    "dense values": ("fp8", {}, {f"{Q}.weight": np.ones((32, 32), np.float32)}, "is stored as float32; .* asks for fl"),
    "bits that are left out": ("int4", {}, {f"{Q}.weight_shape": None}, f"{Q}.weight_packed comes without {Q}.weight_"),
    "another number of words": (
        "int4", {}, {f"{Q}.weight_shape": np.array([32, 40])}, r"_packed has shape \[32, 4\]; .* asks for \[32, 5\]"
    ),
    "asymmetric": ("int4", {}, {f"{Q}.weight_zero_point": np.ones((32, 4), np.int32)}, "unexpected .*_zero_point"),
    "reordered": ("int4", {}, {f"{Q}.weight_g_idx": np.zeros(32, np.int32)}, "unexpected .*weight_g_idx"),
    "two of one": (
        "int4", {}, {f"{Q}.weight": np.ones((32, 32), np.float32)}, f"gives {Q}.weight twice, the second time as {Q}"
    ),
    "no method": ("fp8", {"quant_method": None}, {}, "quant_method is None; those that are read are fp8, awq, c"),
    "another method": ("fp8", {"quant_method": "aqlm"}, {}, "quant_method is 'aqlm'; those that are read are fp8"),
    "one scale": ("fp8", {"weight_block_size": None}, {}, r"weight_scale_inv has shape \[2, 2\]; .* asks for \[1\]"),
    "another format": ("int4", {"format": "marlin-24"}, {}, "format is 'marlin-24'; expected one of float-q"),
    "sparse": ("int8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "'sparse-24-bitmask'; only 'dense'"),
    "no zero points": ("int4 with zeros", {}, {f"{Q}.weight_zero_point": None}, f"comes without {Q}.weight_zero_point"),
    "AWQ of another product": ("awq", {"version": "gemv"}, {}, "version is 'gemv'; expected 'gemm' or 'GEMM'"),
    "an unknown setting": ("awq", {"rotation": "hadamard"}, {}, "rotation is 'hadamard'; this setting is not known"),
    "no zero points of AWQ": ("awq", {}, {f"{Q}.qzeros": None}, f"{Q}.qweight comes without {Q}.qzeros"),
    "words of another shape": (
        "awq", {}, {f"{Q}.qweight": np.ones((4, 32), np.int32)}, r"qweight has shape \[4, 32\]; .* asks for \[4, 4\]"
    ),
    "three bits": ("gptq", {"bits": 3}, {}, "bits is 3; expected 2, 4 or 8"),
    "another order of GPTQ": ("gptq", {"checkpoint_format": "marlin"}, {}, "checkpoint_format is 'marlin'; expected 'gp"),
    "modules of their own": ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, {}, "down.* has settings of its own"),
    "a group too many": ("gptq", {}, {f"{Q}.g_idx": np.full(32, 4, np.int32)}, "g_idx names groups beyond the 4 that have"),
    "a bias that counts": ("gptq", {}, {f"{Q}.bias": np.ones(32, np.float16)}, f"unexpected {Q}.bias"),
    "no global scale": ("nvfp4", {}, {f"{Q}.weight_global_scale": None}, f"comes without {Q}.weight_global_scale"),
    "scaled activations": (
        "nvfp4 of modelopt", {}, {f"{Q}.pre_quant_scale": np.ones(32, np.float32)}, f"unexpected {Q}.pre_quant_scale"
    ),
    "other blocks": ("nvfp4 of modelopt", {"group_size": 32}, {}, "group_size is 32; only 16 is supported"),
    "no groups": ("int8", {"config_groups": {}}, {}, "config_groups says nothing of weights"),
}  # fmt: skip
_GROUPS = by_hand.group({"num_bits": 8, "type": "int", "strategy": "channel"}, "")["config_groups"]
_WEIGHTS = _GROUPS["group_0"]["weights"]
OF_WEIGHTS: dict[str, tuple[dict[str, Any], str]] = {
    "asymmetric": ({"symmetric": False}, "weight comes without .*weight_zero_point"),
    "unknown": ({"rotated": True, "num_bits": 4}, "rotated is True; this setting is not known"),
    "bits": ({"num_bits": 4}, "num_bits 4 of type 'int' is not read in the format 'int-quantized'"),
    "group": ({"strategy": "group"}, "has no group_size"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_what_it_says_is_refused(tmp_path: Path, name: str) -> None:
    recipe, config, tensors, message = REFUSALS[name]
    fields = {"quantization_config": RECIPES[recipe].config | config}
    refused(conversion.read_target, edited(written(tmp_path, recipe)[0], fields, tensors), message)


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_weights_that_are_not_read_are_refused(tmp_path: Path, name: str) -> None:
    fields, message = OF_WEIGHTS[name]
    path = written(tmp_path, "int8")[0]
    config = RECIPES["int8"].config

    groups = {"one": {"weights": {**_WEIGHTS, **fields}}}
    edit_config(path, quantization_config={**config, "config_groups": groups})
    refused(conversion.read_target, path, message)

    both = {"one": {"weights": _WEIGHTS}, "two": {"weights": {**_WEIGHTS, **fields}}}
    edit_config(path, quantization_config={**config, "config_groups": both})
    refused(conversion.read_target, path, "the groups one, two differ in their weights")


def test_a_quantisation_without_quantised_tensors_is_refused(tmp_path: Path) -> None:
    path = plain(tmp_path / "target")
    edit_config(path, quantization_config=FP8_CONFIG)
    refused(
        conversion.read_target,
        path,
        f"quantised .fp8, a scale for {BLOCK} by {BLOCK} weights. and holds no scale; remove",
    )


def test_quantised_tensors_without_a_quantisation_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "channel")[0]
    edit_config(path, quantization_config=None)
    refused(conversion.read_target, path, "weight_scale")


def test_model_optimizer_may_describe_it_in_a_separate_file(tmp_path: Path) -> None:
    stored, dense = written(tmp_path, "modelopt")
    edit_config(stored, quantization_config=None)
    description = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }
    (stored / "hf_quant_config.json").write_text(json.dumps(description))
    assert same_params(conversion.read_target(stored).params, conversion.read_target(dense).params)
