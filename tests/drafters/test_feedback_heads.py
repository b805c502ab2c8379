"""EAGLE-1 heads and MTP modules: drafts, reading and writing files, errors of wrong files."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")
import tiny
from checkpoints import (
    TARGET,
    Head,
    assert_close,
    edit_config,
    edited,
    loaded_head,
    refused,
    round_trip,
    same_head,
    same_params,
    target_tables,
    write_checkpoint,
)
from torch_heads import MTP, Eagle1, drafted

from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.models.context import BlockContext
from eagle3_jax.topology import Chain
from eagle3_jax.tree import causal_mask

pytestmark = [pytest.mark.core, pytest.mark.torch]

DEPTH = 4
HEADS: dict[str, Eagle1 | MTP] = {
    "EAGLE-1": Eagle1(),
    "EAGLE-1 without a bias": Eagle1(bias=False),
    "EAGLE-1 with another rope": Eagle1(theta=500.0),
    "EAGLE-1 of two layers": Eagle1(layers=2, kv_heads=4),
    "EAGLE-1 for Qwen2": Eagle1(qkv_bias=True),
    "EAGLE-1 with the target's embedding": Eagle1(own_embedding=False),
    "MTP": MTP(),
    "MTP with its own tables": MTP(own_embedding=True, own_output=True),
    "MTP with another rope": MTP(theta=500.0),
}


# The others differ in what is read from files.
@pytest.mark.parametrize(
    "name", [name for name in HEADS if not re.search("bias|target|rope", name)]
)
def test_a_head_drafts_as_its_torch_twin_round_after_round(name: str) -> None:
    """Logits of the first pairs, and the chain of every round.

    In between, tokens are accepted, refused and never drafted.

    The twin computes everything anew each time, so a guess that stayed in the cache, a position
    that is off or a state that was fed back and not replaced by the true one would show in the
    rounds after the first.
    """
    head = HEADS[name]
    random = np.random.default_rng(3)
    text = random.integers(0, 61, 24)
    fed = (9, 1, DEPTH + 1, 2)
    features = random.normal(size=(24, 32)).astype(np.float32)
    drafter, params = loaded_head(head.write, Chain(DEPTH))
    tensors = {
        name.removeprefix("model.layers.8."): value for name, value in head.tensors().items()
    }
    names = ("embed_tokens.weight", "shared_head.head.weight")
    tables = [tensors.get(name, table) for name, table in zip(names, target_tables(), strict=True)]

    @jax.jit
    def first(params: Any, tokens: jax.Array, features: jax.Array) -> jax.Array:
        network = drafter.bind(params)
        positions = jnp.arange(fed[0])[None]
        memories = [BlockContext(mask=causal_mask(fed[0]))] * len(drafter.config.layers)
        embedded = drafter.embed(params, tokens, positions)
        states, _ = network(embedded, network.fuse(features[:, :, None]), positions, memories)
        return drafter.logits(params, network, states)

    def truth(count: int) -> Any:
        return drafted(head, tables, features[:count], text[1 : count + 1], DEPTH)

    length = fed[0]
    following = jnp.asarray(text[None, 1 : length + 1], jnp.int32)
    ours = first(params, following, jnp.asarray(features[None, :length]))
    assert_close(ours[0], truth(fed[0]).logits)
    state = drafter.init(params, 1, 32)
    for (known,), seen in tiny.ragged_rounds(
        text[None], features[None, :, None], [[count] for count in fed]
    ):
        draft = tiny.next_draft(drafter, params, state, seen)
        state = draft.state
        assert draft.tokens[0, 1:].tolist() == truth(known).tokens, f"after {known} tokens"


EXPORTS = {
    "EAGLE-1": {"vllm": "a bias in fc"},
    "EAGLE-1 with another rope": {"vllm": "a bias in fc"},
    "EAGLE-1 of two layers": {"vllm": "a bias in fc"},
    "EAGLE-1 for Qwen2": {"vllm": "a bias in fc"},
    "EAGLE-1 with the target's embedding": {
        "eagle": "embedding of its own",
        "vllm": "a bias in fc",
    },
    "MTP": {"speculators": "zero_first True"},
    "MTP with its own tables": {"speculators": "zero_first True"},
    "MTP with another rope": {"speculators": "zero_first True"},
}


HALVES = {name: dataclasses.replace(head, dtype=ml_dtypes.bfloat16) for name, head in HEADS.items()}
LAYOUTS = {"EAGLE-1": ("jax", "eagle", "vllm"), "MTP": ("jax", "deepseek", "speculators")}


@pytest.mark.parametrize(
    ("name", "to"), [(name, to) for name in HALVES for to in LAYOUTS[name.split()[0]]]
)
def test_a_head_round_trips_bit_equal_or_is_refused_by_what_is_missing(
    tmp_path: Path, name: str, to: str
) -> None:
    directory = HALVES[name].write(tmp_path / "head")
    assert conversion.read_head(directory, TARGET).dtype == "bfloat16"
    round_trip(directory, to, TARGET, EXPORTS.get(name, {}).get(to))


@pytest.mark.parametrize("name", [name for name in HALVES if "MTP" in name])
def test_a_module_is_written_for_mimo_with_biases_of_zeros(tmp_path: Path, name: str) -> None:
    """MiMo's block is that of Qwen2, which has biases."""
    directory = HALVES[name].write(tmp_path / "head")
    conversion.convert(directory, tmp_path / "out", "mimo", TARGET)
    source, again = (conversion.read_head(path, TARGET) for path in (directory, tmp_path / "out"))
    assert again.dialect == "mimo"
    assert again.config.layers[0].mixer.qkv_bias
    assert not np.asarray(again.head["block"]["attention"]["qkv"].pop("bias")).any()
    layers = (dataclasses.replace(source.config.layers[0], mixer=again.config.layers[0].mixer),)
    assert same_head(
        dataclasses.replace(source, config=dataclasses.replace(source.config, layers=layers)), again
    )


def test_a_mimo_module_keeps_its_biases_and_its_order(tmp_path: Path) -> None:
    """DeepSeek's order survives a round trip through MiMo's, whose file is written unchanged."""
    qwen2 = MTP(qkv_bias=True, own_embedding=True, own_output=True)
    directory = write_checkpoint(
        tmp_path / "head", qwen2.config() | {"model_type": "qwen2"}, qwen2.tensors()
    )
    conversion.convert(directory, tmp_path / "mimo", "mimo", TARGET)
    conversion.convert(tmp_path / "mimo", tmp_path / "back", "deepseek", TARGET)
    conversion.convert(tmp_path / "mimo", tmp_path / "again", "mimo", TARGET)
    stored = [
        conversion.tensors.read_tensors(tmp_path / name)
        for name in ("head", "back", "mimo", "again")
    ]
    assert same_params(dict(stored[0]), dict(stored[1]))
    assert same_params(dict(stored[2]), dict(stored[3]))
    deepseek = stored[0]["model.layers.8.eh_proj.weight"]
    mimo = stored[2]["model.mtp_layers.0.input_proj.weight"]
    assert np.array_equal(mimo[:, :32], deepseek[:, 32:])
    assert np.array_equal(mimo[:, 32:], deepseek[:, :32])

    values = json.loads((tmp_path / "mimo/config.json").read_text())
    assert values.items() >= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}.items()
    assert values.items() >= {"num_hidden_layers": 8, "num_nextn_predict_layers": 1}.items()
    assert {"model.embed_tokens.weight", "lm_head.weight"} < set(stored[2])


def test_a_speculators_module_does_not_zero_the_first_embedding(tmp_path: Path) -> None:
    config = MTP().config() | {"model_type": "qwen3", "head_dim": 8}
    config.pop("num_nextn_predict_layers")
    renamed = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
    renamed |= {"shared_head.norm": "final_layernorm", "model.layers.8": "mtp_layers.0"}

    tensors = {}
    for name, value in MTP().tensors().items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        tensors[name] = value
    tensors |= {f"mtp_layers.0.self_attn.{key}_norm.weight": np.ones(8, np.float32) for key in "qk"}

    outer = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
    }
    directory = write_checkpoint(
        tmp_path / "head", outer | {"transformer_layer_config": config}, tensors
    )

    checkpoint = conversion.read_head(directory, TARGET)
    assert checkpoint.dialect == "speculators"
    assert checkpoint.config.zero_first is False

    conversion.convert(directory, tmp_path / "out", "speculators", TARGET)
    assert same_params(dict(conversion.tensors.read_tensors(tmp_path / "out")), tensors)

    with pytest.raises(CheckpointError, match="zero_first False"):
        conversion.convert(directory, tmp_path / "deepseek", "deepseek", TARGET)

    edit_config(directory, speculators_model_type=None)
    with pytest.raises(CheckpointError, match="does not say in which order"):
        conversion.read_head(directory, TARGET)


def test_exports_say_what_engines_read(tmp_path: Path) -> None:
    head = HEADS["EAGLE-1 without a bias"].write(tmp_path / "head")
    conversion.convert(head, tmp_path / "vllm", "vllm", TARGET)
    values = json.loads((tmp_path / "vllm/config.json").read_text())

    # vLLM takes true for a bias of attention.
    expected = {"architectures": ["EagleLlamaForCausalLM"], "bias": False, "num_hidden_layers": 1}
    assert values.items() >= expected.items()

    biased = edited(
        HEADS["EAGLE-1"].write(tmp_path / "biased"), {}, {"fc__bias": np.zeros(32, np.float32)}
    )
    conversion.convert(biased, tmp_path / "zero", "vllm", TARGET)
    assert "fc.bias" not in conversion.tensors.read_tensors(tmp_path / "zero")


def test_a_missing_bias_that_the_configuration_does_not_mention_is_noted(tmp_path: Path) -> None:
    head = HEADS["EAGLE-1 without a bias"].write(tmp_path / "head")
    assert conversion.read_head(head, TARGET).note == ""
    edit_config(head, bias=None)
    checkpoint = conversion.read_head(head, TARGET)
    assert not checkpoint.config.fc_bias
    assert "fc has no bias" in checkpoint.note


ONES, BLOCK, WIDE = (np.ones(shape, np.float32) for shape in (32, (32, 64), (61, 32)))
REFUSALS: dict[str, tuple[Eagle1 | MTP, dict[str, Any], dict[str, Any], str]] = {
    "no bias": (Eagle1(), {"bias": True}, {"fc__bias": None}, r"misses fc\.bias"),
    "own output": (Eagle1(), {}, {"lm_head__weight": WIDE}, r"unexpected lm_head\.weight"),
    "final norm": (Eagle1(), {}, {"norm__weight": ONES}, r"misses .*lm_head\.weight"),
    "vocabulary": (Eagle1(), {"vocab_size": 62}, {}, "vocabulary of 62 but the target has 61"),
    "projection": (MTP(), {}, {"model__layers__8__eh_proj__weight": None}, r"misses model\.layers\.8\.eh_proj"),
    "modules": (MTP(), {"num_nextn_predict_layers": 2}, {}, "num_nextn_predict_layers is 2 and the file holds 1"),
    "FP8": (MTP(), {}, {"model__layers__8__eh_proj__weight_scale_inv": ONES}, "unexpected .*weight_scale_inv"),
    "DeepSeek's block": (MTP(), {"model_type": "deepseek_v3"}, {}, "model_type is 'deepseek_v3'"),
    "another depth": (dataclasses.replace(MTP(), target_layers=7), {}, {}, "a target of 7 layers but the target has 8"),
    "Qwen3-Next's names": (MTP(), {}, {"mtp__fc__weight": BLOCK}, r"names its tensors mtp\.\*"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_add_up_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    head, fields, tensors, message = REFUSALS[name]
    directory = head.write(tmp_path / "head")
    refused(
        lambda path: conversion.read_head(path, TARGET), edited(directory, fields, tensors), message
    )


def test_a_head_is_what_it_is_whatever_it_is_called(tmp_path: Path) -> None:
    methods = {}
    for name, head in {"one": Eagle1(), "three": Head(), "mtp": MTP()}.items():
        directory = head.write(tmp_path / name)
        edit_config(directory, architectures=["EagleLlamaForCausalLM"])
        methods[name] = conversion.identify(directory)
    assert methods == {"one": "eagle1", "three": "eagle3", "mtp": "mtp"}


def test_a_head_needs_its_target_and_only_a_whole_model_is_none(tmp_path: Path) -> None:
    with pytest.raises(conversion.TargetNeededError, match="how deep its target is"):
        conversion.read_head(Eagle1().write(tmp_path / "head"))
    assert conversion.read_head(MTP().write(tmp_path / "mtp")).config.num_target_layers == 8
    tensors = MTP().tensors() | {
        "model.layers.0.input_layernorm.weight": ONES,
        "model.norm.weight": ONES,
    }
    directory = write_checkpoint(
        tmp_path / "whole", MTP().config() | {"model_type": "deepseek_v3"}, tensors
    )
    assert conversion.identify(directory) == "target"
