"""Files of targets as they are published: parts that are left out, and alternative layouts."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("torch")
import quantised
import tiny
from checkpoints import edit_config, same_target, write_checkpoint
from families import BASE, PROMPTS, RECIPES, WRAPPED, build, eager, truth
from safetensors.numpy import load_file

import eagle3_jax as e3
from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError, blocks
from eagle3_jax.conversion.families import FAMILIES, described, read_config
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.rules import COMPLETE, Rule, flatten, read_params, write_params
from eagle3_jax.conversion.targets import EVEN_WIDTHS
from eagle3_jax.models.config import (
    DecoderConfig,
    Experts,
    GatedMLP,
    GroupedQuery,
    Latent,
    LayerConfig,
    RopeConfig,
)
from eagle3_jax.models.decoder import DecoderTarget

pytestmark = pytest.mark.torch


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Saves the model of a recipe in the layout of transformers."""

    def save(name: str) -> Path:
        directory = tmp_path / "target"
        build((RECIPES | WRAPPED)[name]).save_pretrained(directory)
        return directory

    return save


@pytest.fixture
def published(saved: Any) -> Any:
    """Saves a recipe with transformers, and returns its configuration and its tensors."""

    def publish(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        directory = saved(name)
        return json.loads((directory / "config.json").read_text()), load_file(
            directory / "model.safetensors"
        )

    return publish


def read_from(
    directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> conversion.TargetCheckpoint:
    """Writes a target, and reads it."""
    return conversion.read_target(write_checkpoint(directory, config, tensors))


def values_of(name: str) -> dict[str, Any]:
    """Returns the ``config.json`` of a recipe, without transformers."""
    recipe = (RECIPES | WRAPPED)[name]
    eps = {"rms_norm_eps": 1e-6, "layer_norm_eps": 1e-6}
    text = recipe.fields.get("text_config")
    if text is None:
        return BASE | eps | recipe.fields | {"model_type": recipe.model_type}
    return {"model_type": recipe.model_type, **recipe.fields, "text_config": eps | text}


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of text and images of transformers, around the language model of a recipe."""
    import transformers

    text = build(RECIPES["llama4, norms"])
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    vision |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 32}
    vision |= {"projector_input_dim": 32, "projector_output_dim": 32}
    config = transformers.Llama4Config(text_config=text.config, vision_config=vision)
    model = transformers.Llama4ForConditionalGeneration(config).float()
    model.language_model.load_state_dict(text.state_dict())
    directory = tmp_path_factory.mktemp("multimodal") / "model"
    model.save_pretrained(directory)
    return directory


def test_the_language_model_of_a_model_of_images_is_read(
    saved: Any, tmp_path: Path, multimodal: Path
) -> None:
    target = conversion.read_target(multimodal)
    assert same_target(target, conversion.read_target(saved("llama4, norms")))
    assert target.family == FAMILIES["llama4_text"]
    assert target.stop_tokens == (2,)
    description = conversion.describe(multimodal)
    assert (description.kind, description.problem) == ("target: Llama 4", "")
    conversion.convert(multimodal, tmp_path / "text", "vllm")
    assert same_target(conversion.read_target(tmp_path / "text"), target)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no text": ({"text_config": None}, "has no text_config; it describes the language model"),
    "another text": (
        {"text_config": {"model_type": "qwen2"}},
        "model_type is 'qwen2'; expected 'llama4_text' in a",
    ),
    "tied and not": (
        {"tie_word_embeddings": True},
        "tie_word_embeddings is true but lm_head.weight differs from",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradicting_description_of_a_model_of_images_is_refused(
    multimodal: Path, tmp_path: Path, name: str
) -> None:
    changes, message = CONTRADICTIONS[name]
    (tmp_path / "model.safetensors").symlink_to(multimodal / "model.safetensors")
    config = json.loads((multimodal / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        conversion.read_target(tmp_path)


# Prefixes in published files, which transformers writes, and in the memory of transformers.
LAYOUTS: dict[str, tuple[tuple[str, str], ...]] = {
    "published": (),
    "in memory": (
        ("language_model.model.", "model.language_model."),
        ("language_model.", ""),
        ("model.", "model."),  # transformers does not rename all of the projector
        ("", "model."),
    ),
}


@pytest.mark.parametrize("name", ["mistral3", "kimi_k25"])
def test_a_language_model_is_read_under_every_prefix_that_was_written(
    saved: Any, tmp_path: Path, name: str
) -> None:
    source = saved(name)
    target = conversion.read_target(source)
    config = json.loads((source / "config.json").read_text())
    stored = load_file(source / "model.safetensors")
    assert "language_model.lm_head.weight" in stored  # transformers writes the published prefixes
    for layout, prefixes in LAYOUTS.items():
        tensors = {}
        for key, value in stored.items():
            old, new = next((pair for pair in prefixes if key.startswith(pair[0])), ("", ""))
            key = new + key.removeprefix(old)
            tensors[key.replace(".blocks.", ".layers.") if "language_model" in key else key] = value
        assert same_target(read_from(tmp_path / layout, config, tensors), target)


def test_the_family_of_a_language_model_is_that_of_its_text(saved: Any, tmp_path: Path) -> None:
    """Published files have ``kimi_k2``, transformers writes ``deepseek_v3``; both remain."""
    directory = saved("kimi_k25")
    assert conversion.read_target(directory).family == FAMILIES["deepseek_v3"]
    text = json.loads((directory / "config.json").read_text())["text_config"]
    edit_config(directory, text_config={**text, "model_type": "kimi_k2"})

    target = conversion.read_target(directory)
    assert target.family == FAMILIES["kimi_k2"]
    conversion.convert(directory, tmp_path / "text", "vllm")
    assert same_target(conversion.read_target(tmp_path / "text"), target)

    edit_config(directory, text_config={**text, "model_type": "mistral4"})
    with pytest.raises(
        CheckpointError,
        match="model_type is 'mistral4'; expected 'deepseek_v3' or 'kimi_k2' in a mod",
    ):
        conversion.read_target(directory)


@pytest.mark.parametrize("name", WRAPPED)
def test_a_description_names_the_parts_of_a_model_of_images_that_are_left_out(
    saved: Any, name: str
) -> None:
    directory = saved(name)
    kind = WRAPPED[name].model_type
    parts = dict.fromkeys(("mistral3", "gemma3"), "multi_modal_projector and vision_tower")
    parts["kimi_k25"] = "mm_projector and vision_tower"
    parts["gemma4"] = "embed_vision and vision_tower"
    parts["muse_glimmer"] = "vision_adapter, vision_projection and vision_tower"
    tensors = load_file(directory / "model.safetensors")
    counted = {key for key in tensors if "language_model" in key or key.startswith("lm_head")}
    description = conversion.describe(directory)
    assert description.num_parameters == sum(tensors[key].size for key in counted)
    assert description.kind.removeprefix("target: ") in (
        "Ministral 3",
        "Mistral",
        "DeepSeek V3",
        "Qwen3",
        "Gemma 3",
        "Gemma 4",
        "Muse Glimmer",
    )
    num_ignored = len(tensors) - len(counted)
    ignored = f"the {num_ignored} tensors of {parts.get(kind, 'visual')} are ignored; "
    assert description.note.startswith(f"only the language model of this {kind} is read; {ignored}")


@pytest.mark.parametrize("name", ["mistral3", "mistral3, of mistral"])
def test_the_top_level_determines_whether_the_embedding_is_tied(saved: Any, name: str) -> None:
    directory = saved(name)
    config = json.loads((directory / "config.json").read_text())
    tied = config["tie_word_embeddings"]
    # As Ministral 3 is published, only text_config has the field.
    for outer, inner in ((tied, not tied), (None, tied)):
        text = {**config["text_config"], "tie_word_embeddings": inner}
        edit_config(directory, tie_word_embeddings=outer, text_config=text)
        assert conversion.read_target(directory).config.tie_embeddings == tied


def test_a_language_model_in_fp8_is_decoded_by_its_scales(saved: Any, tmp_path: Path) -> None:
    """As Ministral 3 Instruct is published: one scale a tensor; the encoder is not quantised."""
    import torch
    from transformers import AutoModelForImageTextToText

    fp8 = quantised.RECIPES["fp8 tensor"]

    def quantise(name: str, weights: np.ndarray) -> Any:
        return (
            fp8.quantise(name, weights)
            if name.startswith("language_model.")
            else ({name: weights}, weights)
        )

    skipped = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    recipe = quantised.Recipe(quantise, fp8.config | {"modules_to_not_convert": skipped})
    source = saved("mistral3")
    dense = quantised.quantise(source, tmp_path / "fp8", recipe)
    plain = write_checkpoint(
        tmp_path / "dense", json.loads((source / "config.json").read_text()), dense
    )
    checkpoint = conversion.read_target(tmp_path / "fp8")
    dense_checkpoint = conversion.read_target(plain)
    assert checkpoint.config == dense_checkpoint.config
    quantisation: Any = checkpoint.quantisation
    assert (quantisation.kept_as, quantisation.num_tensors) == ("fp8", 4 * 7)
    dense_params = jax.tree.map(np.asarray, dense_checkpoint.params)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, jax.tree.map(np.asarray, checkpoint.params), dense_params)

    tokens = truth("mistral3").tokens
    model = eager(AutoModelForImageTextToText.from_pretrained(plain, attn_implementation="eager"))
    with torch.no_grad():
        true_logits = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0]
    for weights in ("dense", "fp8"):
        target = e3.load_target(tmp_path / "fp8", weights=weights)
        logits, _ = tiny.forward(target.model, target.params, tokens[None])
        np.testing.assert_allclose(logits[0], true_logits, atol=1e-4)


MIXTURE = Experts(
    num_experts=3, per_token=2, width=4, router="softmax", shared_width=6, shared_gate=True
)
GATED = GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=6, output_gate=True, qkv_bias=True)
CONFIG = DecoderConfig(vocab_size=7, width=5, layers=(LayerConfig(mixer=GATED, mlp=MIXTURE),))


@pytest.mark.parametrize(
    ("transpose", "in_halves"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_stacked_experts_and_gates_of_attention_are_reordered(
    transpose: bool, in_halves: bool
) -> None:
    """All entries are different, so the test sees where each entry goes."""
    shapes = DecoderTarget(CONFIG).param_shapes()
    kernels = functools.partial(blocks.stacked, transpose=transpose, in_halves=in_halves)
    parts = {Experts: functools.partial(blocks.experts, shared="shared_expert", kernels=kernels)}
    rules = blocks.decoder(CONFIG, parts=parts)
    name = "model.layers.0."
    stored = {rule.source: rule.stored_shape(shape_of(shapes, rule.path)) for rule in rules}
    assert stored[f"{name}self_attn.q_proj.weight"] == (48, 5)
    assert stored[f"{name}mlp.experts.gate_up_proj"] == ((3, 8, 5) if transpose else (3, 5, 8))
    assert stored[f"{name}mlp.shared_expert_gate.weight"] == (1, 5)
    rng = np.random.default_rng(0)
    tensors = {source: rng.normal(size=shape).astype("f4") for source, shape in stored.items()}
    params = read_params(rules, tensors, shapes, where="here")
    attention = params["blocks"][0]["attention"]
    mlp = params["blocks"][0]["mlp"]

    columns = np.asarray(attention["qkv"]["kernel"]).reshape(5, 2, 6, 6)
    query_and_gate = tensors[f"{name}self_attn.q_proj.weight"].T.reshape(5, 2, 2, 2, 6)
    np.testing.assert_array_equal(columns[:, :, :2], query_and_gate[:, :, :, 0])
    np.testing.assert_array_equal(columns[:, :, 4:], query_and_gate[:, :, :, 1])
    biases = np.asarray(attention["qkv"]["bias"]).reshape(2, 6, 6)
    stored_biases = tensors[f"{name}self_attn.q_proj.bias"].reshape(2, 2, 2, 6)
    np.testing.assert_array_equal(biases[:, 4:], stored_biases[:, :, 1])

    gate_up = tensors[f"{name}mlp.experts.gate_up_proj"]
    gate_up = gate_up.swapaxes(1, 2) if transpose else gate_up
    gates = gate_up[..., :4] if in_halves else gate_up[..., ::2]
    ups = gate_up[..., 4:] if in_halves else gate_up[..., 1::2]
    np.testing.assert_array_equal(np.asarray(mlp["gate_up"])[..., ::2], gates)
    np.testing.assert_array_equal(np.asarray(mlp["gate_up"])[..., 1::2], ups)
    down = tensors[f"{name}mlp.experts.down_proj"]
    np.testing.assert_array_equal(
        np.asarray(mlp["down"]), down.swapaxes(1, 2) if transpose else down
    )

    written_tensors = write_params(rules, params, shapes, where="here")
    assert written_tensors.keys() == tensors.keys()
    assert all(np.array_equal(written_tensors[source], value) for source, value in tensors.items())


def shape_of(shapes: Any, path: str) -> tuple[int, ...]:
    """Returns the shape of a parameter by its dotted path."""
    return tuple(dict(flatten(shapes))[path].shape)


def test_a_table_that_omits_a_piece_of_a_tensor_is_an_error() -> None:
    shapes = DecoderTarget(CONFIG).param_shapes()

    def shorten(rule: Rule) -> Rule:
        return rule if rule.cut == COMPLETE else rule._replace(cut=rule.cut._replace(slots=3))

    rules = list(map(shorten, blocks.decoder(CONFIG)))
    tensors = {
        rule.source: np.zeros(rule.stored_shape(shape_of(shapes, rule.path)), np.float32)
        for rule in rules
    }
    message = r"the rule table and the model differ: \['model\.layers\.0\.self_attn\.q_"
    with pytest.raises(AssertionError, match=message):
        read_params(rules, tensors, shapes, where="here")


# ------------------------------------------------------------------------------------ DeepSeek


def test_kimi_k2_is_deepseek_v3_under_another_name(published: Any, tmp_path: Path) -> None:
    config, tensors = published("deepseek_v3")
    ours = read_from(tmp_path / "deepseek", config, tensors)
    kimi = read_from(tmp_path / "kimi", {**config, "model_type": "kimi_k2"}, tensors)
    assert same_target(ours, kimi)
    assert kimi.family == FAMILIES["kimi_k2"]
    conversion.convert(tmp_path / "kimi", tmp_path / "back", "vllm")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "kimi_k2"
    assert conversion.describe(tmp_path / "back").kind == "target: Kimi K2"


def test_a_layer_that_drafts_is_left_out_and_another_layer_is_not(
    published: Any, tmp_path: Path
) -> None:
    config, tensors = published("deepseek_v3")
    more = {
        name.replace("layers.3.", "layers.4."): value
        for name, value in tensors.items()
        if "layers.3." in name
    }
    drafts = {**more, "model.layers.4.eh_proj.weight": np.zeros((32, 64), np.float32)}

    ours = read_from(tmp_path / "without", config, tensors)
    assert same_target(ours, read_from(tmp_path / "with", config, tensors | drafts))
    with pytest.raises(CheckpointError, match="num_hidden_layers is 4; the file holds 5 layers"):
        read_from(tmp_path / "five", config, tensors | more)
    with pytest.raises(CheckpointError, match="num_hidden_layers is 3; the file holds 4 layers"):
        read_from(tmp_path / "three", {**config, "num_hidden_layers": 3}, tensors)


def test_the_older_notation_of_a_published_file_is_equivalent(
    published: Any, tmp_path: Path
) -> None:
    """An older file has ``rope_scaling`` with ``type``, and no ``rope_interleave``."""
    config, tensors = published("deepseek_v3")
    parameters = dict(config["rope_parameters"])
    old = {**config, "rope_theta": parameters.pop("rope_theta"), "rope_parameters": None}
    old["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}
    old |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "ep_size": 1}
    del old["rope_interleave"]

    ours = read_from(tmp_path / "new", config, tensors)
    assert same_target(ours, read_from(tmp_path / "old", old, tensors))
    assert [type(layer.mlp) for layer in ours.config.layers] == [
        GatedMLP,
        Experts,
        Experts,
        Experts,
    ]
    (mixer,) = {layer.mixer for layer in ours.config.layers}
    assert isinstance(mixer, Latent)
    assert mixer.rope.interleaved
    assert mixer.scale == pytest.approx(20**-0.5 * (0.1 * np.log(8.0) + 1) ** 2)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_a_target_with_an_index_is_limited_to_the_keys_of_the_index(
    published: Any, tmp_path: Path, name: str
) -> None:
    config, tensors = published(name)
    assert any("indexer" in tensor for tensor in tensors)
    target = e3.load_target(
        write_checkpoint(tmp_path / "target", {**config, "index_topk": 16}, tensors)
    )
    decoder = e3.SpeculativeDecoder(target, stop_tokens=())
    assert target.max_positions == 16
    if name == "deepseek_v32":
        tokens = decoder.generate(PROMPTS[:1], max_new_tokens=60).tokens[0]
        assert len(tokens) == 16 - len(PROMPTS[0])
    message = (
        r"the prompt has 20 tokens; .* holds 16 positions \(beyond them its attention is sparse, to"
        r" 16 tokens, which "
        r"is not computed here\), so give at most 15"
    )
    with pytest.raises(ValueError, match=message):
        decoder.target.encode([5] * 20)
    edit_config(tmp_path / "target", index_topk=1024)
    target = e3.load_target(tmp_path / "target")
    assert (target.max_positions, target.holds) == (256, "256 positions")


ORIGINAL = "original_max_position_embeddings"
REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "silent about the rank": ("deepseek_v3", {"q_lora_rank": ...}, "has no q_lora_rank"),
    "fewer key heads": (
        "deepseek_v3",
        {"num_key_value_heads": 2},
        "num_key_value_heads is 2; num_attention_heads is 4, and each head",
    ),
    "odd rotation": (
        "deepseek_v3",
        {"qk_rope_head_dim": 7},
        "rope_dim is 7; rotary embedding needs a positive even",
    ),
    "another extension": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        "rope type 'linear' of latent attention; expected default or yarn",
    ),
    "another score": (
        "deepseek_v3",
        {"scoring_func": "softmax"},
        "scoring_func is 'softmax'; only 'sigmoid'",
    ),
    "biases": ("glm_moe_dsa", {"mlp_bias": True}, "mlp_bias is True; only False is supported"),
    "a kind of layer": (
        "qwen3_next",
        {"layer_types": ["mamba"] * 4},
        "layer_types has 'mamba'; expected linear_att",
    ),
    "no kernel": ("qwen3_next", {"linear_conv_kernel_dim": None}, "has no linear_conv_kernel_dim"),
    "no gate": (
        "qwen3_5_text",
        {"attn_output_gate": False},
        "attn_output_gate is False; only True is supported",
    ),
    "heads that do not divide": (
        "qwen3_5_text",
        {"linear_num_value_heads": 3},
        "num_value_heads 3 is not a multiple of num_key_heads 2",
    ),
    "a layer of its own": (
        "llama",
        {"per_layer_config": {"1": {"num_key_value_heads": 1}}},
        "per_layer_config is .* fields of single layers are not supported",
    ),
    "no windows in layers that have them": (
        "phi3",
        {"layer_types": ["full_attention"] * 4},
        (
            "layer_types is .* sliding_window is 5 in every layer, so expected 'sliding_attention'"
            " alone"
        ),
    ),
    "no windows in half of the layers": (
        "ministral3",
        {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2},
        "layer_types is .* sliding_window is 5 in every layer",
    ),
    "no windows in layers with experts": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention"] * 4},
        "layer_types is .* sliding_window is 5 in every layer",
    ),
    "windows of a Ministral in a model of images": (
        "mistral3, of mistral",
        {
            "text_config": {
                "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            }
        },
        "layer_types is .* sliding_window is 5 in every layer",
    ),
    "windows in a model of images": (
        "qwen3_vl",
        {"text_config": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}},
        "sliding_window is 5; only full attention is supported",
    ),
    "no base of the rotation": (
        "qwen3_vl",
        {"text_config": {"rope_parameters": None}},
        "has no rope_theta",
    ),
    "capped logits in a model of images": (
        "gemma3, images",
        {"text_config": {"final_logit_softcapping": 6.0}},
        r"final_logit_softcapping is 6\.0; only None is supported",
    ),
    "an original length in the wrong place": (
        "phi3, longrope",
        {
            "original_max_position_embeddings": None,
            "rope_parameters": {
                **RECIPES["phi3, longrope"].fields["rope_parameters"],
                ORIGINAL: 128,
            },
        },
        "has no original_max_position_embeddings",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_unsupported_configuration_is_refused(name: str) -> None:
    recipe, changes, message = REFUSALS[name]
    values = values_of(recipe)
    read_config(Fields(values, "config.json"))
    if "text_config" in changes:
        changes = {"text_config": values["text_config"] | changes["text_config"]}
    values = {key: value for key, value in {**values, **changes}.items() if value is not ...}
    with pytest.raises(CheckpointError, match=message):
        read_config(Fields(values, "config.json"))


@pytest.mark.parametrize("name", RECIPES | WRAPPED)
def test_attention_in_both_directions_is_refused(name: str) -> None:
    """In every family, transformers attends in both directions if the field is false or null."""
    values = values_of(name)
    for value in (False, None):
        changed = [values | {"is_causal": value}]
        if "text_config" in values:
            changed.append(values | {"text_config": values["text_config"] | {"is_causal": value}})
        for config in changed:
            with pytest.raises(
                CheckpointError, match=f"is_causal is {value}; only causal attention is supported"
            ):
                read_config(Fields(config, "config.json"))
    read_config(Fields(values | {"is_causal": True}, "config.json"))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, ORIGINAL: 16}


def lengths(mixer: Any) -> tuple[int, int]:
    return mixer.rope.original_max_positions, mixer.query_scaling.floor


truncation = operator.attrgetter("rope.truncate")
interleaving = operator.attrgetter("rope.interleaved")
# A recipe, changes of its fields, a part of the mixer that is read, and its value. transformers
# reads the same.
READINGS: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any], Any]] = {
    "a length next to the rope parameters": ("ministral3", {ORIGINAL: 8}, lengths, (8, 8)),
    "an absent truncation": ("llama", {"rope_parameters": YARN}, truncation, True),
    "a null truncation": (
        "llama",
        {"rope_parameters": {**YARN, "truncate": None}},
        truncation,
        False,
    ),
    "no truncation": ("llama", {"rope_parameters": {**YARN, "truncate": False}}, truncation, False),
    "an absent interleaving": ("deepseek_v3", {}, interleaving, True),
    "a null interleaving": ("deepseek_v3", {"rope_interleave": None}, interleaving, False),
    "no interleaving": ("deepseek_v3", {"rope_interleave": False}, interleaving, False),
}


@pytest.mark.parametrize("name", READINGS)
def test_a_field_is_read_as_transformers_reads_it(name: str) -> None:
    recipe, changes, part, value = READINGS[name]
    config = read_config(Fields(values_of(recipe) | changes, "config.json"))
    assert part(config.layers[0].mixer) == value


@pytest.mark.parametrize(("outer", "text", "expected"), [(5, None, 5), (None, 7, 7), (5, 7, 5)])
def test_stop_tokens_outside_of_text_config_have_priority(
    outer: int | None, text: int | None, expected: int
) -> None:
    """As in transformers, without a ``generation_config.json``."""
    values = values_of("mistral3")
    values |= {"eos_token_id": outer, "text_config": values["text_config"] | {"eos_token_id": text}}
    assert described(Fields(values, "config.json")).fields.get("eos_token_id") == expected


# -------------------------------------------------------------------- Qwen3-Next and Qwen3.5


def written(name: str) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns random parameters, and their tensors in the layout that is written."""
    config = FAMILIES[name].read_config(Fields(values_of(name), name))
    shapes = DecoderTarget(config).param_shapes()
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
    return params, write_params(FAMILIES[name].rules(config), params, shapes, where=name)


def assert_read(directory: Path, params: Any, family: str) -> None:
    target = conversion.read_target(directory)
    assert target.family == FAMILIES[family]
    arrays = jax.tree.map(np.asarray, target.params)
    jax.tree.map(np.testing.assert_array_equal, arrays, params)


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stacks the experts of a layer in two tensors, with all gates before all ``up``."""
    stacked = dict(tensors)
    for layer in range(4):
        source = f"model.layers.{layer}.mlp.experts"

        def pop(part: str, source: str = source) -> list[np.ndarray]:
            names = [f"{source}.{expert}.{part}_proj.weight" for expert in range(8)]
            return [stacked.pop(name) for name in names]

        gate_up = [np.concatenate(pair) for pair in zip(pop("gate"), pop("up"), strict=True)]
        stacked[f"{source}.gate_up_proj"] = np.stack(gate_up)
        stacked[f"{source}.down_proj"] = np.stack(pop("down"))
    return stacked


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_the_language_model_of_a_qwen_with_images_is_read(tmp_path: Path, name: str) -> None:
    params, tensors = written(name)
    if "moe" in name:
        tensors = fused(tensors)
    inside = {
        key.replace("model.", "model.language_model.", 1): value for key, value in tensors.items()
    }
    left_out = dict.fromkeys(
        ("model.visual.patch_embed.proj.weight", "mtp.fc.weight"), np.zeros((2, 2), np.float32)
    )

    values = {
        "model_type": name.removesuffix("_text"),
        "text_config": values_of(name),
        "vision_config": {},
    }
    directory = write_checkpoint(tmp_path / "target", values, inside | left_out)
    assert_read(directory, params, name)
    assert conversion.describe(directory).kind == f"target: {FAMILIES[name].label}"


def test_mimo_is_qwen2_with_a_module_that_is_left_out(saved: Any, tmp_path: Path) -> None:
    """transformers does not know MiMo, and its own code derives from Qwen2's."""
    directory = saved("qwen2")
    qwen2 = conversion.read_target(directory)
    module = {"model.mtp_layers.0.input_proj.weight": np.ones((2, 2), np.float32)}
    config = json.loads((directory / "config.json").read_text())
    published = {"model_type": "mimo", "attention_bias": True, "head_dim": 8}
    mimo = read_from(
        tmp_path / "mimo",
        config | published,
        load_file(directory / "model.safetensors") | module,
    )
    assert mimo.family == FAMILIES["mimo"]
    assert same_target(mimo, qwen2)

    conversion.write_target(mimo, tmp_path / "again")
    assert same_target(conversion.read_target(tmp_path / "again"), mimo)
    with pytest.raises(CheckpointError, match="attention_bias is False; only True is supported"):
        read_config(Fields(config | published | {"attention_bias": False}, "config.json"))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_a_module_that_drafts_is_left_out(tmp_path: Path, name: str) -> None:
    params, tensors = written(name)
    module = dict.fromkeys(
        ("mtp.layers.0.mlp.gate.weight", "mtp.fc.weight"), np.ones((2, 2), np.float32)
    )
    assert_read(
        write_checkpoint(tmp_path / "target", values_of(name), tensors | module), params, name
    )


def test_every_fourth_layer_attends_by_default() -> None:
    values = values_of("qwen3_5_text") | {"layer_types": None, "num_hidden_layers": 8}
    values |= {"rope_parameters": None, "rope_theta": 1e7}
    for interval, full_layers in ((None, (3, 7)), (3, (2, 5))):
        config = read_config(Fields(values | {"full_attention_interval": interval}, "here"))
        mixers = {index: layer.mixer for index, layer in enumerate(config.layers)}
        ropes = {
            index: mixer.rope for index, mixer in mixers.items() if isinstance(mixer, GroupedQuery)
        }
        assert ropes == dict.fromkeys(full_layers, RopeConfig(theta=1e7, partial=0.25))


_UNEVEN = {"hidden_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}


def test_transformers_refuses_uneven_widths_of_these_families() -> None:
    from huggingface_hub.errors import StrictDataclassClassValidationError
    from transformers import CONFIG_MAPPING

    refused = set()
    for recipe in RECIPES.values():
        if recipe.model_type in CONFIG_MAPPING:
            try:
                CONFIG_MAPPING[recipe.model_type](**{**BASE, **recipe.fields, **_UNEVEN})
            except StrictDataclassClassValidationError as error:
                refused |= {recipe.model_type} if "multiple of" in str(error) else set()
    assert refused == set(EVEN_WIDTHS)


def test_a_width_that_is_no_multiple_of_the_heads_is_written(tmp_path: Path) -> None:
    recipe = RECIPES["glm4_moe"]
    uneven = recipe._replace(fields={**recipe.fields, **_UNEVEN})
    build(uneven).save_pretrained(tmp_path / "glm")
    conversion.convert(tmp_path / "glm", tmp_path / "back", "vllm")
    source, back = map(conversion.read_target, (tmp_path / "glm", tmp_path / "back"))
    assert same_target(source, back)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["hidden_size"] == 40
