"""Every family of targets: results of transformers, round trips of files, any head's drafts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
import tiny
from checkpoints import edit_config, refused, same_target, write_llama
from families import (
    BASE,
    LLAMAS,
    MUSE_GLIMMER,
    NEW_TOKENS,
    PROMPTS,
    RECIPES,
    VOCAB,
    WRAPPED,
    build,
    check_greedy,
    eager,
    parametrize,
    truth,
)
from safetensors.numpy import load_file

import eagle3_jax as e3
from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.conversion.families import FAMILIES
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import (
    GatedMLP,
    GroupedQuery,
    QueryScaling,
    RopeConfig,
    grouped,
    uniform,
)
from eagle3_jax.topology import Chain, DynamicTree
from eagle3_jax.tree import causal_mask

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def _quick_to_compile() -> Any:
    """Every recipe has separate programs, and each runs once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


ALL = RECIPES | LLAMAS | WRAPPED
# Dense layers, windows and experts, latents, recurrences; the others are slow.
FEW = ("llama", "gpt_oss", "deepseek_v3", "qwen3_5_text")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function from a recipe to the directory of its model, as transformers writes."""
    root = tmp_path_factory.mktemp("families")

    def of(name: str) -> Path:
        directory = root / name.replace(", ", "-")
        if not directory.exists():
            build(ALL[name]).save_pretrained(directory)
        return directory

    return of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Texts are slow: one family for each kind of layer is enough beyond the logits."""
    if metafunc.function is test_greedy_text_is_that_of_transformers_plain_and_behind_any_draft:
        parametrize(metafunc, RECIPES | WRAPPED, FEW)


@pytest.mark.parametrize("name", ALL)
def test_logits_and_features_are_those_of_transformers(folder: Any, name: str) -> None:
    target = e3.load_target(folder(name))
    expected = truth(name)
    model: Any = target.model
    count = len(expected.tokens)

    @jax.jit
    def forward(params: Any, tokens: jax.Array) -> Any:
        layers = tuple(range(model.config.num_layers + 2))
        out = model(params, tokens, jnp.arange(count)[None], causal_mask(count), aux_layers=layers)
        return model.unembed(params, out.final), out.features

    logits, features = forward(target.params, jnp.asarray(expected.tokens, jnp.int32)[None])
    np.testing.assert_allclose(logits[0], expected.logits, atol=1e-4)
    # Processors round the features of Gemma 4 E apart by 1.5e-4.
    np.testing.assert_allclose(
        np.moveaxis(features[0], 1, 0), expected.entering, atol=3e-4, rtol=1e-4
    )


def test_greedy_text_is_that_of_transformers_plain_and_behind_any_draft(
    folder: Any, name: str
) -> None:
    target = e3.load_target(folder(name))
    plain = (
        e3.SpeculativeDecoder(target, stop_tokens=())
        .generate(PROMPTS, max_new_tokens=NEW_TOKENS)
        .tokens
    )
    check_greedy(name, plain)
    drafter = tiny.eagle3(target, Chain(3), draft_vocab_size=60)
    for tree in (None, DynamicTree(num_nodes=8, max_depth=3, top_k=3)):
        decoder = e3.SpeculativeDecoder(target, drafter, tree=tree, stop_tokens=())
        assert decoder.generate(PROMPTS, max_new_tokens=NEW_TOKENS).tokens == plain


# Their index of keys is not read, and without it they are not what was published.
INDEXED = [name for name, recipe in RECIPES.items() if "index_topk" in recipe.fields]


@pytest.mark.parametrize("name", [name for name in RECIPES | LLAMAS if name not in INDEXED])
def test_what_came_in_goes_out_again(folder: Any, tmp_path: Path, name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    conversion.convert(folder(name), tmp_path / "native", "jax")
    conversion.convert(tmp_path / "native", tmp_path / "back", "vllm")
    source, native, back = (
        conversion.read_target(path)
        for path in (folder(name), tmp_path / "native", tmp_path / "back")
    )
    assert source.config == native.config == back.config
    assert source.family == native.family == back.family == FAMILIES[ALL[name].model_type]
    assert source.stop_tokens == native.stop_tokens == back.stop_tokens == (2,)
    assert source.dtype == native.dtype == back.dtype == "float32"
    ours, theirs = (
        load_file(path / "model.safetensors") for path in (tmp_path / "back", folder(name))
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[key].tobytes() == theirs[key].tobytes() for key in theirs)
    loaded = eager(
        AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    )
    assert type(loaded) is type(build(ALL[name]))
    with torch.no_grad():
        logits = loaded(torch.from_numpy(truth(name).tokens)[None], use_cache=False).logits[0]
    # The files are equal byte for byte; PyTorch's sums depend on where in memory their operands
    # are.
    np.testing.assert_allclose(logits.numpy(), truth(name).logits, atol=1e-5)
    for path in (folder(name), tmp_path / "native"):
        description = conversion.describe(path)
        assert description.loadable is True
        assert description.problem == ""
        assert description.kind == f"target: {source.family.label}"


@pytest.mark.parametrize("name", INDEXED)
def test_what_came_in_without_its_index_goes_out_as_a_native_checkpoint_alone(
    folder: Any, tmp_path: Path, name: str
) -> None:
    conversion.convert(folder(name), tmp_path / "native", "jax")
    source, native = (conversion.read_target(path) for path in (folder(name), tmp_path / "native"))
    assert source.config == native.config
    assert source.family == native.family
    assert jax.tree.all(jax.tree.map(np.array_equal, source.params, native.params))
    with pytest.raises(
        CheckpointError,
        match="an index that chooses keys, which is not read and cannot be written; use --to jax",
    ):
        conversion.convert(tmp_path / "native", tmp_path / "back", "vllm")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", WRAPPED.keys() - {"muse_glimmer"})
def test_a_language_model_out_of_a_model_of_images_goes_out_alone(
    folder: Any, tmp_path: Path, name: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    conversion.convert(folder(name), tmp_path / "alone", "vllm")
    source, text_model = (
        conversion.read_target(path) for path in (folder(name), tmp_path / "alone")
    )
    assert source.config == text_model.config
    assert source.family == text_model.family
    loaded = eager(
        AutoModelForCausalLM.from_pretrained(tmp_path / "alone", attn_implementation="eager")
    )
    with torch.no_grad():
        logits = loaded(torch.from_numpy(truth(name).tokens)[None], use_cache=False).logits[0]
    np.testing.assert_allclose(logits.numpy(), truth(name).logits, atol=1e-5)


def test_muse_glimmer_goes_out_for_vllm_with_its_prefix_and_its_tokens_of_media(
    folder: Any, tmp_path: Path
) -> None:
    source = conversion.read_target(folder("muse_glimmer"))
    assert source.config.media_tokens == (14, 95)
    conversion.convert(folder("muse_glimmer"), tmp_path / "native", "jax")
    conversion.convert(tmp_path / "native", tmp_path / "back", "vllm")
    assert same_target(conversion.read_target(tmp_path / "back"), source)
    ours, theirs = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "back", folder("muse_glimmer"))
    )
    # Under model. alone vLLM expects an older layout, with other norms.
    assert ours.keys() == {name for name in theirs if "vision" not in name}
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


MUSE_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "bases": ({"layer_rope_theta": [5.0, 1e4, 0, 0]}, "expected 0 or the rope_theta 10000 for"),
    "too few bases": ({"layer_rope_theta": [0, 0]}, "layer_rope_theta names 2 layers but num_hid"),
    "biases": ({"attention_bias": True}, "attention_bias is True; only False"),
    "no scale": ({"qk_scale_factor": None}, "has no qk_scale_factor"),
    "a temperature": (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        "rope_parameters is .*; a rotation that scales attention is not supported",
    ),
    "a temperature, in the older notation": (
        {
            "rope_parameters": None,
            "rope_theta": 1e4,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        "rope_scaling is .'rope_type': 'yarn'.*; a rotation that scales attention is not supported",
    ),
    "no gates": ({"use_attn_output_gate": False}, "use_attn_output_gate is False; only True"),
}


@pytest.mark.parametrize("name", MUSE_REFUSALS)
def test_what_muse_glimmer_cannot_mean_is_refused(name: str) -> None:
    changes, message = MUSE_REFUSALS[name]
    values = BASE | {"vocab_size": 9} | MUSE_GLIMMER.fields | changes
    fields = Fields({key: value for key, value in values.items() if value is not None}, "file")
    with pytest.raises(CheckpointError, match=message):
        FAMILIES["muse_glimmer_text"].read_config(fields)


def test_muse_glimmer_without_lists_has_a_full_layer_in_four() -> None:
    values = BASE | MUSE_GLIMMER.fields | {"num_hidden_layers": 6}
    del values["layer_types"], values["layer_rope_theta"]
    config = FAMILIES["muse_glimmer_text"].read_config(Fields(values, "file"))
    mixers = [grouped(layer) for layer in config.layers]
    assert [mixer.window for mixer in mixers] == [5, None, 5, 5, 5, None]
    assert [mixer.rope is None for mixer in mixers] == [False, True, False, False, False, True]


def test_every_family_has_a_recipe_and_windows_that_a_text_leaves() -> None:
    # Kimi K2 is DeepSeek V3 under another name, MiMo is Qwen2; transformers knows neither. Muse
    # Glimmer is known as a whole.
    unknown = {"kimi_k2", "mimo", MUSE_GLIMMER.model_type}
    assert {recipe.model_type for recipe in RECIPES.values()} == FAMILIES.keys() - unknown
    windows = [
        recipe.fields["sliding_window"]
        for recipe in RECIPES.values()
        if recipe.fields.get("sliding_window")
    ]
    assert windows
    assert max(windows) < len(truth("llama").tokens) < NEW_TOKENS < VOCAB


def test_a_family_of_the_caller_comes_before_that_of_the_table(folder: Any) -> None:
    family = FAMILIES["llama"]._replace(label="Mine")
    assert conversion.read_target(folder("llama"), family).family is family


def test_the_doctor_names_the_family(folder: Any, tmp_path: Path) -> None:
    checks = conversion.diagnose(folder("qwen3"), tmp_path / "nowhere")
    assert checks[0].detail == "Qwen3 decoder, 4 layers, width 32, vocabulary 96"


# As published, where files leave out what transformers knows.
_SIZES = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_HEADS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256_000,
    "rope_theta": 50_000.0,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma2": {
        **_SIZES, **_HEADS, "head_dim": 256, "rms_norm_eps": 1e-6, "sliding_window": 4096, "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {**_SIZES, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    "cohere2": {
        **_SIZES, **_HEADS, "sliding_window": 4096, "layer_norm_eps": 1e-5, "logit_scale": 0.25,
        "sliding_window_pattern": 5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_published_file_leaves_out_is_what_transformers_takes(name: str) -> None:
    from transformers import AutoConfig

    ours = FAMILIES[name].read_config(Fields(PUBLISHED[name], "config.json"))
    theirs = AutoConfig.for_model(name, **PUBLISHED[name])
    of_type = (
        theirs.rope_parameters
        if name == "gemma3_text"
        else dict.fromkeys(theirs.layer_types, theirs.rope_parameters)
    )
    assert ours.vocab_size == theirs.vocab_size
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    for layer, kind in zip(ours.layers, theirs.layer_types, strict=True):
        mixer = grouped(layer)
        slides = kind == "sliding_attention"
        assert mixer.num_heads == theirs.num_attention_heads
        assert mixer.num_kv_heads == theirs.num_key_value_heads
        assert mixer.head_dim == theirs.head_dim
        assert mixer.window == (theirs.sliding_window if slides else None)
        if name != "cohere2":
            assert mixer.scale == theirs.query_pre_attn_scalar**-0.5
        if mixer.rope is None:
            assert name == "cohere2"
            assert not slides
        else:
            assert mixer.rope.theta == of_type[kind]["rope_theta"]
            assert mixer.rope.type == of_type[kind]["rope_type"]
            assert mixer.rope.factor == of_type[kind].get("factor", 1.0)


SLIDING = {"use_sliding_window": True, "sliding_window": 5}
REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no family": (
        "llama",
        {"model_type": "gemma3n"},
        "model_type is 'gemma3n'; the families of targets are llama, ",
    ),
    "a window that is off": (
        "qwen3",
        {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4},
        "layer_types has 'sliding_attention', but no sliding_window is switched on",
    ),
    "no window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": None},
        "has no sliding_window",
    ),
    "no head size": ("qwen3", {"head_dim": None}, "has no head_dim"),
    "no scaling of queries": (
        "ministral3",
        {"rope_parameters": None},
        "has no original_max_position_embeddings",
    ),
    "silent about weights": ("qwen3_moe", {"norm_topk_prob": None}, "has no norm_topk_prob"),
    "two numbers of experts": (
        "qwen3_moe",
        {"num_experts": 4, "num_local_experts": 8},
        "num_experts is 4 and num_local_experts is 8; they must agree",
    ),
    "more experts a token than there are": (
        "qwen3_moe",
        {"num_experts_per_tok": 9},
        "9 experts per token of 8; expected at most as many",
    ),
    "experts in a dense layer": (
        "qwen3_moe",
        {"mlp_only_layers": []},
        (
            r"misses model\.layers\.1\.mlp\.gate\.weight.* and holds unexpected"
            r" model\.layers\.1\.mlp\.down_proj"
        ),
    ),
    "another gate": (
        "gpt_oss",
        {"swiglu_alpha": 1.0},
        r"swiglu_alpha is 1\.0; only 1\.702 is supported",
    ),
    "another score": (
        "glm4_moe",
        {"scoring_func": "softmax"},
        "scoring_func is 'softmax'; only 'sigmoid' is supported",
    ),
    "uneven groups": ("glm4_moe", {"n_group": 3}, "8 experts in 3 groups of which 1 are kept"),
    "two shares": (
        "glm4_moe",
        {"partial_rotary_factor": 1.0},
        r"partial_rotary_factor is 1\.0 and partial_rotary_factor in the rope parameters is 0\.5",
    ),
    "rotation of other layers": (
        "llama4, norms",
        {"no_rope_layers": [1, 0]},
        "no_rope_layers names 2 layers but num_hidden_layers is 4; they must agree",
    ),
    "attention in both directions": (
        "gemma3",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention is True; only False is supported",
    ),
    "another GELU": (
        "gemma2",
        {"hidden_activation": "gelu"},
        "hidden_activation is 'gelu'; only 'gelu_pytorch_tanh'",
    ),
    "one rotation for both kinds of layers": (
        "gemma3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        (
            "rope_parameters is .* expected an object for 'sliding_attention' and one for"
            " 'full_attention'"
        ),
    ),
    "silent about a factor": (
        "granite",
        {"residual_multiplier": None},
        "has no residual_multiplier",
    ),
    "factors of another model": (
        "phi3, longrope",
        {"partial_rotary_factor": 1.0, "rope_parameters": None, "rope_theta": 1e4}
        | {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 3,
                "long_factor": [1.0] * 3,
            }
        },
        (
            "short_factor has 3 and long_factor 3 numbers; expected 4 each, one for a pair of"
            " rotating channels"
        ),
    ),
    "an old name of longrope": (
        "phi3",
        {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}},
        "rope type 'su' is not supported; expected one of default, longrope",
    ),
    "factors of two lengths": (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        "rope type 'longrope' is not supported; expected one of default, linear, llama3, yarn",
    ),
    "one after the other": (
        "cohere",
        {"use_parallel_block": False},
        "use_parallel_block is False; only True",
    ),
    "scaled logits": (
        "llama",
        {"logit_scale": 0.5},
        r"logit_scale is 0\.5; only 1\.0 is supported",
    ),
    "experts elsewhere": (
        "llama4, every second",
        {"moe_layers": [0, 2]},
        r"misses model\.layers\.0\.feed_forward\.router\.weight",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_configuration_that_means_something_else_is_refused(
    folder: Any, tmp_path: Path, name: str
) -> None:
    recipe, changes, says = REFUSALS[name]
    config = json.loads((folder(recipe) / "config.json").read_text())
    directory = tmp_path / "target"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(
        (folder(recipe) / "model.safetensors").read_bytes()
    )
    (directory / "config.json").write_text(json.dumps(config))
    edit_config(directory, **changes)
    refused(conversion.read_target, directory, says)


def test_longrope_holds_the_texts_that_its_short_factors_are_for(
    folder: Any, tmp_path: Path
) -> None:
    target = e3.load_target(folder("phi3, longrope"))
    assert (
        target.holds
        == "128 positions (beyond them its rotary embedding (longrope) has other factors, which are"
        " not computed here)"
    )
    with pytest.raises(ValueError, match=r"the prompt has 130 tokens; .* holds 128 positions"):
        target.encode([5] * 130)


YARN = RopeConfig(type="yarn", factor=8.0, original_max_positions=32)
LAYER = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
NOT_EXPRESSIBLE = {
    "llama, q and k norms": (
        "llama",
        {"qk_norm": True},
        r"Llama cannot express layers\[0\]\.mixer\.qk_norm True",
    ),
    "qwen2, no bias": ("qwen2", {}, r"Qwen2 cannot express layers\[0\]\.mixer\.qkv_bias False"),
    "ministral3, no growth": (
        "ministral3",
        {},
        "rope_parameters has no original_max_position_embeddings",
    ),
    "ministral3, two bases": (
        "ministral3",
        {"rope": YARN, "query_scaling": QueryScaling(floor=8, beta=0.1)},
        r"Ministral 3 cannot express layers\[0\]\.mixer\.rope\.original_max_positions 32",
    ),
    "no rope": ("llama", {"rope": None}, "without rotary embedding"),
    "gemma2, no norms around": (
        "gemma2",
        {"scale": 0.25, "softcap": 50.0},
        r"Gemma 2 cannot express",
    ),
    "phi3, a bias": (
        "phi3",
        {"qkv_bias": True},
        r"Phi-3, Phi-4 cannot express layers\[0\]\.mixer\.qkv_bias True",
    ),
    "qwen3_moe, no experts": (
        "qwen3_moe",
        {"qk_norm": True},
        "a target without experts is of another family",
    ),
}


@pytest.mark.parametrize("name", NOT_EXPRESSIBLE)
def test_a_target_that_its_family_cannot_say_is_not_written(tmp_path: Path, name: str) -> None:
    family, changes, says = NOT_EXPRESSIBLE[name]
    source = conversion.read_target(write_llama(tmp_path / "target"))
    layers = uniform(8, GroupedQuery(**{**LAYER, **changes}), GatedMLP(width=24))
    checkpoint = dataclasses.replace(
        source, family=FAMILIES[family], config=dataclasses.replace(source.config, layers=layers)
    )
    with pytest.raises(CheckpointError, match=says):
        conversion.write_target(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layers_of_two_windows_are_not_written_as_one(tmp_path: Path) -> None:
    source = conversion.read_target(write_llama(tmp_path / "target"))

    two = tuple(
        layer
        for window in (5, 7)
        for layer in uniform(
            4, GroupedQuery(**LAYER, qkv_bias=True, window=window), GatedMLP(width=24)
        )
    )

    checkpoint = dataclasses.replace(
        source, family=FAMILIES["qwen2"], config=dataclasses.replace(source.config, layers=two)
    )

    with pytest.raises(CheckpointError, match=r"Qwen2 cannot express layers\[4\]\.mixer\.window 7"):
        conversion.write_target(checkpoint, tmp_path / "out")
