"""Targets come in exactly, go out exactly, and what is not computed is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
from checkpoints import (
    LLAMA3,
    assert_close,
    edit_config,
    edit_tensors,
    llama_model,
    same_params,
    write_llama,
)

from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.memory import causal_mask

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}

TARGETS = {
    "one key head, head_dim 16": {"num_key_value_heads": 1, "head_dim": 16},
    "head_dim 80, tied": {"head_dim": 80, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "llama3": {"rope_parameters": LLAMA3, "head_dim": 16},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "yarn": {"rope_parameters": YARN, "head_dim": 16},
    "yarn, every field": {
        "rope_parameters": YARN
        | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        "head_dim": 32,
    },
}


@pytest.mark.parametrize("name", TARGETS)
def test_logits_and_features_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    import torch

    model = llama_model(**TARGETS[name])
    model.save_pretrained(tmp_path / "target")
    checkpoint = conversion.read_target(tmp_path / "target")
    tokens = np.random.default_rng(0).integers(0, 61, (2, 40))
    with torch.no_grad():
        truth = model(torch.from_numpy(tokens), output_hidden_states=True)

    target = DecoderTarget(checkpoint.config)
    params = jax.tree.map(jnp.asarray, checkpoint.params)

    @jax.jit
    def forward(params: Any, tokens: jax.Array) -> Any:
        positions = jnp.broadcast_to(jnp.arange(40), tokens.shape)
        out = target(params, tokens, positions, causal_mask(40), aux_layers=(0, 1, 2))
        return target.unembed(params, out.final), out.features

    logits, features = forward(params, jnp.asarray(tokens))
    assert_close(logits, truth.logits.numpy())
    for layer in range(3):
        assert_close(features[:, :, layer], truth.hidden_states[layer].numpy())


@pytest.mark.parametrize("name", TARGETS)
def test_written_target_reads_back_bit_equal_and_transformers_reads_it(tmp_path: Path, name: str) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = llama_model(**TARGETS[name])
    model.save_pretrained(tmp_path / "source")
    source = conversion.read_target(tmp_path / "source")
    conversion.convert(tmp_path / "source", tmp_path / "native", "jax")
    conversion.convert(tmp_path / "native", tmp_path / "back", "vllm")
    for directory in ("native", "back"):
        again = conversion.read_target(tmp_path / directory)
        assert (again.config, again.stop_tokens, again.dtype) == (source.config, (2,), "float32")
        assert same_params(source.params, again.params)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "back")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["sharded safetensors", "pickle", "sharded pickle"])
def test_every_file_layout_reads_the_same_bits(tmp_path: Path, dtype: str, layout: str) -> None:
    import torch

    model = llama_model(num_hidden_layers=1).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "plain")
    if layout == "sharded safetensors":
        model.save_pretrained(tmp_path / "other", max_shard_size="8KB")
    else:
        (tmp_path / "other").mkdir()
        (tmp_path / "other/config.json").write_text((tmp_path / "plain/config.json").read_text())
        state = model.state_dict()
        if layout == "pickle":
            torch.save(state, tmp_path / "other/pytorch_model.bin")
        else:
            names = sorted(state)
            shards = {"a.bin": names[:5], "b.bin": names[5:]}
            for shard, held in shards.items():
                torch.save({name: state[name] for name in held}, tmp_path / "other" / shard)
            weight_map = {name: shard for shard, held in shards.items() for name in held}
            index = tmp_path / "other/pytorch_model.bin.index.json"
            index.write_text(json.dumps({"weight_map": weight_map}))
    plain, other = (conversion.read_target(tmp_path / name) for name in ("plain", "other"))
    assert plain.dtype == other.dtype == dtype
    assert same_params(plain.params, other.params)


def test_both_notations_of_rope_mean_the_same(tmp_path: Path) -> None:
    old, new = write_llama(tmp_path / "old"), write_llama(tmp_path / "new")
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    edit_config(old, rope_theta=500.0, rope_scaling={"type": scaling.pop("rope_type"), **scaling})
    edit_config(new, rope_parameters=LLAMA3)
    assert (
        conversion.read_target(old).config.layers[0].mixer.rope
        == conversion.read_target(new).config.layers[0].mixer.rope
    )
    edit_config(new, rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(CheckpointError, match=r"rope_parameters is .* and rope_scaling is .* must agree"):
        conversion.read_target(new)


def test_a_target_that_says_nothing_of_rope_has_the_original_base(tmp_path: Path) -> None:
    config = conversion.read_target(write_llama(tmp_path / "target")).config
    rope = config.layers[0].mixer.rope
    assert rope is not None and (rope.theta, rope.type) == (10_000.0, "default")


@pytest.mark.parametrize(
    ("generation", "stop_tokens"),
    [(None, (2,)), ({"eos_token_id": [5, 7]}, (5, 7)), ({"eos_token_id": 3}, (3,)), ({}, (2,))],
)
def test_stop_tokens_come_from_the_generation_configuration_first(
    tmp_path: Path, generation: Any, stop_tokens: tuple[int, ...]
) -> None:
    directory = write_llama(tmp_path / "target")
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    source = conversion.read_target(directory)
    assert source.stop_tokens == stop_tokens
    conversion.write_target(source, tmp_path / "copy")
    assert conversion.read_target(tmp_path / "copy").stop_tokens == stop_tokens


def test_known_extras_are_harmless_and_only_those(tmp_path: Path) -> None:
    directory = write_llama(tmp_path / "target")
    edit_tensors(directory, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(4, np.float32))
    conversion.read_target(directory)
    edit_tensors(directory, model__layers__0__self_attn__extra=np.ones(4, np.float32))
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.0\.self_attn\.extra"):
        conversion.read_target(directory)


def test_a_tied_projection_may_only_repeat_the_embedding(tmp_path: Path) -> None:
    directory = write_llama(tmp_path / "target")
    edit_config(directory, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        conversion.read_target(directory)
    from safetensors.numpy import load_file

    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(directory, lm_head__weight=embedding)
    assert conversion.read_target(directory).config.tie_embeddings


TARGET_REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "activation": ({"hidden_act": "gelu"}, {}, "hidden_act is 'gelu'"),
    "dynamic rope": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "'dynamic' is not supported"),
    "rope without factor": ({"rope_scaling": {"type": "linear"}}, {}, "has no factor"),
    "unknown rope field": ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, {}, "mrope_section"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor"),
    "sliding window": ({"sliding_window": 16}, {}, "sliding_window is 16"),
    "no eps": ({"rms_norm_eps": None}, {}, "has no rms_norm_eps"),
    "text for a number": ({"hidden_size": "32"}, {}, "hidden_size is '32'; expected a whole number"),
    "uneven groups": ({"num_key_value_heads": 3}, {}, "num_heads 4 is not a multiple of num_kv_heads 3"),
    "missing": ({}, {"model__norm__weight": None}, r"misses model\.norm\.weight"),
    "too few layers": ({"num_hidden_layers": 7}, {}, r"num_hidden_layers is 7; the file holds 8 layers"),
    "shape": (
        {},
        {"model__norm__weight": np.ones(31, np.float32)},
        r"model\.norm\.weight has shape \[31\]; config.json asks for \[32\]",
    ),
}


@pytest.mark.parametrize("name", TARGET_REFUSALS)
def test_a_target_that_is_not_computed_is_refused(tmp_path: Path, name: str) -> None:
    fields, tensors, message = TARGET_REFUSALS[name]
    directory = write_llama(tmp_path / "target")
    edit_config(directory, **fields)
    if tensors:
        edit_tensors(directory, **tensors)
    with pytest.raises(CheckpointError, match=message) as refusal:
        conversion.read_target(directory)
    assert "\n" not in str(refusal.value)
