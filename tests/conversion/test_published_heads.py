"""Published EAGLE-3 heads of each family: their configurations, and their layer numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TARGET, Head, edit_config, write_llama

import eagle3_jax as e3
from eagle3_jax import conversion
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.heads import eagle3
from eagle3_jax.conversion.heads.layer_ids import resolve
from eagle3_jax.conversion.tensors import Signs
from eagle3_jax.models.config import Eagle3Config, Latent, gated, grouped
from eagle3_jax.theory.known_models import KNOWN_MODELS

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1,
    "num_key_value_heads": 8, "draft_vocab_size": 32_000, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip


def ids(*layers: int, **more: Any) -> dict[str, Any]:
    return {
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(layers),
            "use_aux_hidden_state": True,
            **more,
        }
    }


# The relevant fields of published config.json files: SpecForge's configs, and heads of NVIDIA and
# lmsys.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "SpecForge, DeepSeek-V3": (
        "DeepSeek-V3",
        {"hidden_size": 7168, "intermediate_size": 40_960, "num_attention_heads": 56, "vocab_size": 129_280,
         "max_position_embeddings": 163_840, **ids(1, 29, 57)},
    ),
    "SpecForge, Qwen3-30B, EAGLE-3.1": (
        "Qwen3-30B-A3B",
        {"hidden_size": 2048, "intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 4,
         "head_dim": 128, "vocab_size": 151_936, "rope_theta": 1e6, "fc_norm": True, "norm_output": True,
         "sliding_window": None, "use_sliding_window": False, "max_window_layers": 48,
         "max_position_embeddings": 2048},
    ),
    "NVIDIA, gpt-oss-120b, v3": (
        "gpt-oss-120b",
        {"hidden_size": 2880, "intermediate_size": 17_280, "num_attention_heads": 64, "head_dim": 64,
         "vocab_size": 201_088, "max_position_embeddings": 131_072, "norm_before_fc": True, **ids(24, 30, 36)},
    ),
    "SpecForge, Kimi K2": (
        "DeepSeek-V3",  # of the same width and depth
        {"model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18_432, "num_attention_heads": 64,
         "num_key_value_heads": 64, "head_dim": 128, "vocab_size": 129_280, "max_position_embeddings": 131_072,
         **ids(2, 30, 58)},
    ),
    "a head for GLM-4.5": (
        "GLM-4.5",
        {"hidden_size": 5120, "intermediate_size": 12_288, "num_attention_heads": 40, "vocab_size": 151_552,
         "max_position_embeddings": 131_072},
    ),
}  # fmt: skip
# The meaning of the numbers without a choice of the user (None: an error), with `entering` and with
# `leaving`.
MEANINGS = {
    "SpecForge, DeepSeek-V3": (None, (1, 29, 57), (2, 30, 58)),
    "NVIDIA, gpt-oss-120b, v3": ((24, 30, 36), (24, 30, 36), None),
    "SpecForge, Kimi K2": ((2, 30, 58), (2, 30, 58), (3, 31, 59)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_an_eagle3_head_of_its_target(name: str) -> None:
    target, fields = PUBLISHED[name]
    values = LLAMA | fields
    head_dim = values["hidden_size"] // values["num_attention_heads"]
    values = {
        "head_dim": head_dim,
        "fc_norm": False,
        "norm_output": False,
        "norm_before_fc": False,
    } | values

    config = eagle3.planned(Fields(values, "config.json"), KNOWN_MODELS[target])
    assert type(config) is Eagle3Config
    assert config.width == config.target_width == KNOWN_MODELS[target].width
    assert config.vocab_size == KNOWN_MODELS[target].vocab_size

    mixer = grouped(config.layers[0])
    assert not mixer.qk_norm
    read = {
        "num_hidden_layers": config.num_layers,
        "draft_vocab_size": config.draft_vocab_size,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "intermediate_size": gated(config.layers[0]).width,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_fc": config.norm_before_fc,
    }
    assert read == {name: values[name] for name in read}


@pytest.mark.parametrize("name", MEANINGS)
def test_the_user_chooses_the_meaning_of_ambiguous_layer_numbers(name: str) -> None:
    target, fields = PUBLISHED[name]
    named = eagle3.named_aux_layers(Fields(LLAMA | fields, "config.json"))
    depth = KNOWN_MODELS[target].num_layers
    context = {"dialect": "sglang", "num_target_layers": depth, "where": "config.json"}

    for convention, layers in zip((None, "entering", "leaving"), MEANINGS[name], strict=True):
        if layers is None:
            message = (
                "say which with --layer-ids leaving"
                if convention is None
                else "say --layer-ids entering"
            )
            with pytest.raises(CheckpointError, match=rf"^.*{message}.*$"):  # one line
                resolve(named, convention, **context)
        else:
            resolved = resolve(named, convention, **context)
            assert (resolved.entered, bool(resolved.note)) == (layers, convention is not None)
    assert resolve(named, None, dialect="vllm", num_target_layers=depth, where="").entered == named


# TorchSpec's configuration of the heads for Kimi K2.5 with latent attention.
KIMI_LATENT: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168,
    "intermediate_size": 18_432, "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 64,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 163_840, "draft_vocab_size": 163_840,
    "rope_theta": 50_000.0,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    **ids(1, 29, 57, use_input_layernorm_in_first_layer=True, use_last_layernorm=True, use_mtp_layernorm=False),
}  # fmt: skip


def test_a_published_latent_head_has_its_scale_and_its_epsilon() -> None:
    config = eagle3.planned(Fields(KIMI_LATENT, "config.json"), KNOWN_MODELS["DeepSeek-V3"])
    mixer = config.layers[0].mixer
    assert isinstance(mixer, Latent)
    assert (mixer.num_heads, mixer.q_rank, mixer.kv_rank) == (64, 1536, 512)
    assert (mixer.nope_dim, mixer.rope_dim, mixer.value_dim) == (128, 64, 128)
    assert (mixer.norm_eps, config.norm_eps, mixer.rope.interleaved) == (1e-5, 1e-5, True)
    # As in the engines: the square of yarn's factor, 0.1 ln 64 + 1.
    assert mixer.scale == pytest.approx(192**-0.5 * 1.41588831**2)
    assert config.aux_layers == (1, 29, 57)


def test_an_official_head_is_recognised_by_its_configuration_alone() -> None:
    """Its architecture is Llama's: the planner knows no more of a head on the hub."""
    official = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    }
    named = Fields(official | {"draft_vocab_size": 32_000}, "config.json")
    assert eagle3.recognise(Signs.read(named))
    assert not eagle3.recognise(Signs.read(Fields(official, "config.json")))


@pytest.fixture
def open_head(tmp_path: Path) -> Path:
    """A head for a target of 8 layers with ambiguous layer numbers."""
    return Head(aux=(1, 3, 4)).write(tmp_path / "head", "sglang")


def test_a_head_with_ambiguous_numbers_is_read_as_the_user_chooses(
    open_head: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        CheckpointError, match=r"one more of each is \[2, 4, 5\], the usual choice for 8 layers"
    ):
        conversion.read_head(open_head, TARGET)
    leaving = conversion.read_head(open_head, TARGET, layer_ids="leaving")
    assert leaving.note == "layers [1, 3, 4] are read as those left, as was said"
    target = e3.load_target(write_llama(tmp_path / "target"))
    with pytest.raises(ValueError, match="say which"):
        e3.load_drafter(open_head, target=target)

    for convention, layers in (("leaving", (2, 4, 5)), ("entering", (1, 3, 4))):
        assert (
            conversion.read_head(open_head, TARGET, layer_ids=convention).config.aux_layers
            == layers
        )
        loaded = e3.load_drafter(open_head, target=target, layer_ids=convention)
        assert loaded.drafter.aux_layers == layers

    conversion.convert(open_head, tmp_path / "native", "jax", target=TARGET, layer_ids="leaving")
    assert conversion.read_head(tmp_path / "native", TARGET).config.aux_layers == (2, 4, 5)
    with pytest.raises(CheckpointError, match="counts layers entered; leave --layer-ids out"):
        conversion.read_head(tmp_path / "native", TARGET, layer_ids="leaving")


def test_numbers_without_evidence_are_read_as_entered_with_a_note(tmp_path: Path) -> None:
    head = Head(aux=(1, 5, 6)).write(tmp_path / "head", "sglang")
    checkpoint = conversion.read_head(head, TARGET)
    assert checkpoint.config.aux_layers == (1, 5, 6)
    assert re.search("read as those entered, .*--layer-ids", checkpoint.note)
    assert conversion.read_head(Head().write(tmp_path / "usual"), TARGET).note == ""

    errors = {
        "leaving": "names no auxiliary layers",
        "sideways": "expected 'entering' or 'leaving'",
    }
    for convention, message in errors.items():
        with pytest.raises(CheckpointError, match=message):
            conversion.read_head(tmp_path / "usual", TARGET, layer_ids=convention)

    edit_config(head, eagle_aux_hidden_state_layer_ids=[1, 5, 8])
    with pytest.raises(CheckpointError, match="does not have to leave"):
        conversion.read_head(head, TARGET, layer_ids="leaving")


def test_the_command_line_requires_and_accepts_the_choice(
    open_head: Path, tmp_path: Path, cli: Any, refused: Any
) -> None:
    target = write_llama(tmp_path / "target")
    pair = ("--target", target, "--drafter", open_head)
    prompt = ("--prompt-ids", json.dumps([1, 2, 3]), "--max-new-tokens", 4)
    assert "say which with --layer-ids leaving" in refused("generate", *pair, *prompt)
    assert cli("generate", *pair, *prompt, "--layer-ids", "leaving", "--json")[0] == 0
    assert "is about heads from files" in refused(
        "generate", "--target", target, "--drafter", "ngram", *prompt, "--layer-ids", "leaving"
    )

    out = tmp_path / "out"
    assert (
        cli(
            "convert", open_head, out, "--to", "vllm", "--target", target, "--layer-ids", "leaving"
        )[0]
        == 0
    )
    assert json.loads((out / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [
        2,
        4,
        5,
    ]
