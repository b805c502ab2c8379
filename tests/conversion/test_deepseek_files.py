"""Files of DeepSeek V3 and of what was built like it: what stands beside the target, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from checkpoints import edit_config, same_target, write_checkpoint
from families import PROMPTS, RECIPES, build
from safetensors.numpy import load_file

import eagle3_jax as e3
from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.conversion.families import FAMILIES
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import Experts, GatedMLP, Latent


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What transformers writes for a recipe: the configuration, and the tensors."""
    root = tmp_path_factory.mktemp("published")

    def of(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        directory = root / name
        if not directory.exists():
            build(RECIPES[name]).save_pretrained(directory)
        return json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")

    return of


def test_kimi_k2_is_deepseek_v3_under_another_name(published: Any, tmp_path: Path) -> None:
    config, tensors = published("deepseek_v3")
    ours = conversion.read_target(write_checkpoint(tmp_path / "deepseek", config, tensors))
    kimi = conversion.read_target(write_checkpoint(tmp_path / "kimi", {**config, "model_type": "kimi_k2"}, tensors))
    assert same_target(ours, kimi) and kimi.family == FAMILIES["kimi_k2"]
    conversion.convert(tmp_path / "kimi", tmp_path / "back", "vllm")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "kimi_k2"
    assert conversion.describe(tmp_path / "back").kind == "target: Kimi K2"


def test_a_layer_that_drafts_is_left_out_and_another_layer_is_not(published: Any, tmp_path: Path) -> None:
    config, tensors = published("deepseek_v3")
    more = {name.replace("layers.3.", "layers.4."): value for name, value in tensors.items() if "layers.3." in name}
    ours = conversion.read_target(write_checkpoint(tmp_path / "without", config, tensors))
    drafts = {**more, "model.layers.4.eh_proj.weight": np.zeros((32, 64), np.float32)}
    assert same_target(ours, conversion.read_target(write_checkpoint(tmp_path / "with", config, tensors | drafts)))
    with pytest.raises(CheckpointError, match="num_hidden_layers is 4; the file holds 5 layers"):
        conversion.read_target(write_checkpoint(tmp_path / "five", config, tensors | more))
    with pytest.raises(CheckpointError, match="num_hidden_layers is 3; the file holds 4 layers"):
        conversion.read_target(write_checkpoint(tmp_path / "three", {**config, "num_hidden_layers": 3}, tensors))


def test_a_published_file_says_the_same_in_its_older_notation(published: Any, tmp_path: Path) -> None:
    """``rope_scaling`` with ``type``, ``rope_theta`` beside it, ``first_k_dense_replace``, no ``rope_interleave``."""
    config, tensors = published("deepseek_v3")
    parameters = dict(config["rope_parameters"])
    old = {**config, "rope_theta": parameters.pop("rope_theta"), "rope_parameters": None, "rope_interleave": None}
    old["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}
    old |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "ep_size": 1}
    old = {name: value for name, value in old.items() if value is not None}
    ours = conversion.read_target(write_checkpoint(tmp_path / "new", config, tensors))
    assert same_target(ours, conversion.read_target(write_checkpoint(tmp_path / "old", old, tensors)))
    mixers, kinds = {layer.mixer for layer in ours.config.layers}, [type(layer.mlp) for layer in ours.config.layers]
    assert kinds == [GatedMLP, Experts, Experts, Experts] and len(mixers) == 1
    (mixer,) = mixers
    assert isinstance(mixer, Latent) and mixer.rope.interleaved
    assert mixer.scale == pytest.approx(20**-0.5 * (0.1 * np.log(8.0) + 1) ** 2)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_beyond_the_keys_of_its_index_a_target_holds_nothing(published: Any, tmp_path: Path, name: str) -> None:
    config, tensors = published(name)
    assert any("indexer" in tensor for tensor in tensors)
    target = e3.load_target(write_checkpoint(tmp_path / "target", {**config, "index_topk": 16}, tensors))
    decoder = e3.SpeculativeDecoder(target, stop_tokens=())
    assert target.max_positions == 16
    if name == "deepseek_v32":
        assert len(decoder.generate(PROMPTS[:1], max_new_tokens=60).tokens[0]) == 16 - len(PROMPTS[0])
    says = (
        r"the prompt has 20 tokens; .* holds 16 positions \(beyond them its attention is sparse, to 16 tokens, which "
        r"is not computed here\), so give at most 15"
    )
    with pytest.raises(ValueError, match=says):
        decoder.encode([5] * 20)
    edit_config(tmp_path / "target", index_topk=1024)
    whole = e3.load_target(tmp_path / "target")
    assert (whole.max_positions, whole.holds) == (256, "256 positions")


REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "silent about the rank": ("deepseek_v3", {"q_lora_rank": ...}, "has no q_lora_rank"),
    "no latents": ("deepseek_v3", {"kv_lora_rank": None}, "has no kv_lora_rank"),
    "fewer key heads": (
        "deepseek_v3",
        {"num_key_value_heads": 2},
        "num_key_value_heads is 2; num_attention_heads is 4, and each head",
    ),
    "odd rotation": ("deepseek_v3", {"qk_rope_head_dim": 7}, "rope_dim is 7; rotary embedding needs a positive even"),
    "another extension": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        "rope type 'linear' of latent attention; expected default or yarn",
    ),
    "a share that rotates": ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    "no groups": ("deepseek_v3", {"n_group": ...}, "has no n_group"),
    "another score": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
    "every second layer": ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 is supported"),
    "no first layers": ("deepseek_v3", {"first_k_dense_replace": None}, "has no first_k_dense_replace"),
    "types of other layers": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["dense"] * 3},
        "mlp_layer_types names 3 layers but num_hidden_layers is 4; they must agree",
    ),
    "types of another kind": (
        "glm_moe_dsa",
        {"mlp_layer_types": ["dense", "odd", "sparse", "sparse"]},
        "mlp_layer_types has 'odd'; expected dense or sparse",
    ),
    "biases": ("glm_moe_dsa", {"mlp_bias": True}, "mlp_bias is True; only False is supported"),
    "an index without a size": ("deepseek_v32", {"index_topk": None}, "has no index_topk"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_configuration_that_means_something_else_is_refused(name: str) -> None:
    from transformers import AutoConfig

    recipe, changes, says = REFUSALS[name]
    values = AutoConfig.for_model(RECIPES[recipe].model_type, **_fields(recipe)).to_dict()
    FAMILIES[recipe].read_config(Fields(values, "config.json"))
    values = {key: value for key, value in {**values, **changes}.items() if value is not ...}
    with pytest.raises(CheckpointError, match=says) as refusal:
        FAMILIES[recipe].read_config(Fields(values, "config.json"))
    assert "\n" not in str(refusal.value)


def _fields(recipe: str) -> dict[str, Any]:
    from families import BASE

    return BASE | RECIPES[recipe].fields


def test_absent_neighbours_rotate_and_null_ones_do_not() -> None:
    """As transformers reads ``rope_interleave``."""
    from transformers import AutoConfig

    values = AutoConfig.for_model("deepseek_v3", **_fields("deepseek_v3")).to_dict()
    del values["rope_interleave"]
    for changes, expected in (({}, True), ({"rope_interleave": None}, False), ({"rope_interleave": False}, False)):
        mixer = FAMILIES["deepseek_v3"].read_config(Fields(values | changes, "config.json")).layers[0].mixer
        assert isinstance(mixer, Latent) and mixer.rope.interleaved == expected
