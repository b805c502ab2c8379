"""Files of a target in every layout; a field that is not computed raises an error.

`test_families.py` compares what is computed with transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA3, edit_config, edit_tensors, edited, refused, same_params, write_llama
from families import RECIPES, build

from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["sharded safetensors", "pickle", "sharded pickle"])
def test_every_file_layout_reads_the_same_bits(tmp_path: Path, dtype: str, layout: str) -> None:
    import torch

    model = build(RECIPES["llama"]).to(getattr(torch, dtype))
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
    plain, read_again = (conversion.read_target(tmp_path / name) for name in ("plain", "other"))
    assert plain.dtype == read_again.dtype == dtype
    assert same_params(plain.params, read_again.params)


def test_both_notations_of_rope_mean_the_same(tmp_path: Path) -> None:
    old = write_llama(tmp_path / "old")
    new = write_llama(tmp_path / "new")

    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    edit_config(old, rope_theta=500.0, rope_scaling={"type": scaling.pop("rope_type"), **scaling})
    edit_config(new, rope_parameters=LLAMA3)
    assert (
        conversion.read_target(old).config.layers[0].mixer.rope
        == conversion.read_target(new).config.layers[0].mixer.rope
    )

    edit_config(new, rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(
        CheckpointError, match=r"rope_parameters is .* and rope_scaling is .* must agree"
    ):
        conversion.read_target(new)


def test_a_target_that_says_nothing_of_rope_has_the_original_base(tmp_path: Path) -> None:
    config = conversion.read_target(write_llama(tmp_path / "target")).config
    rope = config.layers[0].mixer.rope
    assert rope is not None
    assert rope.theta == 10_000.0
    assert rope.type == "default"


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
    edit_tensors(
        directory, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(4, np.float32)
    )
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
    "dynamic rope": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {},
        "'dynamic' is not supported",
    ),
    "rope without factor": ({"rope_scaling": {"type": "linear"}}, {}, "has no factor"),
    "unknown rope field": (
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1]}},
        {},
        "mrope_section",
    ),
    "partial rotation": ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor"),
    "sliding window": ({"sliding_window": 16}, {}, "sliding_window is 16"),
    "no eps": ({"rms_norm_eps": None}, {}, "has no rms_norm_eps"),
    "text for a number": (
        {"hidden_size": "32"},
        {},
        "hidden_size is '32'; expected a whole number",
    ),
    "uneven groups": (
        {"num_key_value_heads": 3},
        {},
        "num_heads 4 is not a multiple of num_kv_heads 3",
    ),
    "missing": ({}, {"model__norm__weight": None}, r"misses model\.norm\.weight"),
    "too few layers": (
        {"num_hidden_layers": 7},
        {},
        r"num_hidden_layers is 7; the file holds 8 layers",
    ),
    "shape": (
        {},
        {"model__norm__weight": np.ones(31, np.float32)},
        r"model\.norm\.weight has shape \[31\]; config.json asks for \[32\]",
    ),
}


@pytest.mark.parametrize("name", TARGET_REFUSALS)
def test_a_target_that_is_not_computed_is_refused(tmp_path: Path, name: str) -> None:
    fields, tensors, message = TARGET_REFUSALS[name]
    refused(
        conversion.read_target, edited(write_llama(tmp_path / "target"), fields, tensors), message
    )
