"""EAGLE-3 heads in every dialect draft as a torch twin, and are read and written."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")
from checkpoints import (
    LLAMA3,
    TARGET,
    Head,
    assert_close,
    edit_config,
    edit_tensors,
    refused,
    round_trip,
    same_head,
    same_params,
    torch_draft,
    write_checkpoint,
)

from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.drafters.eagle3 import Eagle3Drafter, Eagle3Head
from eagle3_jax.models.config import DecoderConfig, with_window
from eagle3_jax.models.context import attention_contexts
from eagle3_jax.models.functional import bind
from eagle3_jax.models.layers import FLOAT32
from eagle3_jax.topology import Chain
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import Observation, SamplingParams

pytestmark = [pytest.mark.core, pytest.mark.torch]

HEADS = {
    "official": Head(),
    "rope theta": Head(theta=500.0),
    "equal vocabulary": Head(draft_vocab=61),
    "norm_before_residual": Head(norm_before_residual=True),
    "norm_output": Head(norm_output=True),
    "fc_norm": Head(fc_norm=True, norm_output=True),
    "norm_before_fc": Head(norm_before_fc=True),
    "qk_norm": Head(qk_norm=True, head_dim=16),
    "biases": Head(bias=True),
    "two layers": Head(layers=2),
    "a window": Head(windows=(3,)),
    "a window in one layer": Head(layers=2, windows=(None, 2), qk_norm=True),
    "four auxiliary layers": Head(aux=(1, 3, 5, 8)),
    "own embedding, other width": Head(
        width=48, heads=3, kv_heads=1, head_dim=16, own_embedding=True
    ),
    "own embedding": Head(own_embedding=True),
    "sinks": Head(sinks=True, layers=2, windows=(None, 3)),
    # A large epsilon shows whose norms it enters.
    "latent attention": Head(latent=(10, 12, 6, 4, 5), eps=0.2, draft_vocab=61),
    "latent attention, EAGLE-3.1": Head(latent=(7, 9, 2, 6, 3), fc_norm=True, norm_output=True),
    "latent attention, two layers": Head(latent=(10, 12, 6, 4, 5), layers=2),
    "latent attention, queries without a latent": Head(
        latent=(0, 12, 4, 4, 9), norm_before_residual=True, own_embedding=True
    ),
}
HALVES = {name: dataclasses.replace(head, dtype=ml_dtypes.bfloat16) for name, head in HEADS.items()}
NOT_EXPRESSIBLE = {
    "eagle": {
        "norm_before_residual": "norm_before_residual",
        "norm_output": "norm_output",
        "fc_norm": "fc_norm",
        "norm_before_fc": "norm_before_fc",
        "qk_norm": "qk_norm",
        "biases": "attention_bias",
        "two layers": "num_layers 2",
        "a window": "sliding_window",
        "a window in one layer": "sliding_window",
        "four auxiliary layers": r"aux_layers \(1, 3, 5, 8\)",
        "sinks": "attention sinks",
        "latent attention": "latent attention",
        "latent attention, EAGLE-3.1": "latent attention",
        "latent attention, two layers": "latent attention",
        "latent attention, queries without a latent": "latent attention",
    },
    "sglang": {
        "norm_before_residual": "norm_before_residual",
        "qk_norm": "qk_norm",
        "biases": "attention_bias",
        "two layers": "num_layers 2",
        "a window": "sliding_window",
        "a window in one layer": "sliding_window",
        "four auxiliary layers": r"aux_layers \(1, 3, 5, 8\)",
        "sinks": "attention sinks",
        "latent attention, two layers": "num_layers 2",
        "latent attention, queries without a latent": "queries without a latent",
    },
    "vllm": {"sinks": "attention sinks"},
    "jax": {},
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_as_its_independent_torch_twin(tmp_path: Path, name: str) -> None:
    head = HEADS[name]
    checkpoint = conversion.read_head(head.write(tmp_path / "head"), TARGET)
    if head.draft_vocab < 61:  # draft ids are absolute in memory
        np.testing.assert_array_equal(
            checkpoint.draft_to_target, np.flatnonzero(head.tensors()["t2d"])
        )
    random = np.random.default_rng(3)
    length = 9
    depth = 4
    features = random.normal(size=(length, len(head.aux), head.target_width)).astype(np.float32)
    tokens = random.integers(0, 61, length + 1)
    embedding = checkpoint.embedding
    if embedding is None:
        embedding = random.normal(size=(61, head.width)).astype(np.float32)
    truth = torch_draft(head, embedding, features, tokens[1:], depth)

    arrays = {
        "head": checkpoint.head,
        "embedding": embedding,
        "draft_to_target": checkpoint.draft_to_target,
    }
    params = jax.tree.map(jnp.asarray, arrays)
    drafter = Eagle3Drafter(checkpoint.config, Chain(depth))
    logits, drafted = logits_and_draft(
        drafter, params, features[None], tokens[None].astype(np.int32)
    )
    assert_close(logits[0], truth.logits)
    assert drafted[0, 1:].tolist() == truth.tokens


@functools.partial(jax.jit, static_argnums=0)
def logits_and_draft(
    drafter: Eagle3Drafter, params: Any, features: jax.Array, tokens: jax.Array
) -> Any:
    """Returns logits at every feature with its next token, and the draft after the last one."""
    length = features.shape[1]
    network = bind(Eagle3Head, drafter.config, FLOAT32, params["head"])
    positions = jnp.arange(length)[None]
    past = attention_contexts(drafter.config.layers, causal_mask(length), positions)
    output, _ = network(params["embedding"][tokens[:, 1:]], network.fuse(features), positions, past)

    lengths = jnp.full((1,), length)
    seen = Observation(
        tokens=tokens[:, :-1], features=features, length=lengths, next_token=tokens[:, -1]
    )
    state = drafter.observe(params, drafter.init(params, 1, 16), seen)
    keys = jax.random.split(jax.random.key(0), 1)
    return network.logits(output), drafter.propose(params, state, keys, SamplingParams()).tokens


@pytest.mark.parametrize("to", ["jax", "eagle", "sglang", "vllm"])
@pytest.mark.parametrize("name", HALVES)
def test_a_head_round_trips_bit_equal_or_its_setting_is_refused(
    tmp_path: Path, name: str, to: str
) -> None:
    directory = HALVES[name].write(tmp_path / "head")
    assert conversion.read_head(directory, TARGET).dtype == "bfloat16"
    round_trip(directory, to, TARGET, NOT_EXPRESSIBLE[to].get(name))


@pytest.mark.parametrize("dialect", ["eagle", "sglang", "speculators", "modelopt"])
@pytest.mark.parametrize(
    "name",
    ["official", "norm_before_residual", "qk_norm", "own embedding, other width", "a window"],
)
def test_every_dialect_gives_the_same_head(tmp_path: Path, name: str, dialect: str) -> None:
    head = HEADS[name]
    first = conversion.read_head(head.write(tmp_path / "first"), TARGET)
    second = conversion.read_head(head.write(tmp_path / "second", dialect), TARGET)
    assert second.dialect == dialect
    assert same_head(first, second)


def test_auxiliary_layers_are_read_in_any_order_and_field(tmp_path: Path) -> None:
    directory = Head().write(tmp_path / "head")
    for ids, section, target, layers in (
        (None, None, TARGET, (2, 4, 5)),
        ([6, 0, 3], None, None, (0, 3, 6)),
        (None, {"layer_ids": [7, 8, 1]}, TARGET, (1, 7, 8)),
    ):
        edit_config(directory, eagle_aux_hidden_state_layer_ids=ids, eagle_config=section)
        assert conversion.read_head(directory, target).config.aux_layers == layers


def test_speculators_heads_normalise_the_residual_by_default(tmp_path: Path) -> None:
    directory = Head().write(tmp_path / "head", "speculators")
    assert not conversion.read_head(directory, TARGET).config.norm_before_residual
    edit_config(directory, norm_before_residual=None)
    assert conversion.read_head(directory, TARGET).config.norm_before_residual


def test_the_number_of_layers_comes_from_the_tensors(tmp_path: Path) -> None:
    directory = Head().write(tmp_path / "head")
    edit_config(directory, num_hidden_layers=40)
    assert conversion.read_head(directory, TARGET).config.num_layers == 1


def test_sglang_names_of_further_layers_are_understood(tmp_path: Path) -> None:
    head = Head(layers=2)
    tensors = {}
    for name, value in head.tensors().items():
        renamed = name.replace("layers.1.", "additional_layers.0.").replace(
            "0.input_layernorm", "0.hidden_norm"
        )
        tensors[renamed if name in ("lm_head.weight", "d2t", "t2d") else f"model.{renamed}"] = value

    first = conversion.read_head(head.write(tmp_path / "first"), TARGET)
    second = conversion.read_head(
        write_checkpoint(tmp_path / "second", head.config(), tensors), TARGET
    )
    assert same_params(first.head, second.head)


TENSORS = Head().tensors()
OFFSETS = TENSORS["d2t"]
MASK = TENSORS["t2d"]
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention"]}
HEAD_REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no d2t": (
        {},
        {"d2t": None},
        "no d2t, but its draft vocabulary of 40 is smaller than the target's 61",
    ),
    "d2t out of range": (
        {},
        {"d2t": np.append(OFFSETS[:-1], 40)},
        "draft id 39 to target id 79, out of range",
    ),
    "absolute d2t": ({}, {"d2t": OFFSETS + np.arange(40)}, "d2t must hold offsets"),
    "d2t of floats": (
        {},
        {"d2t": OFFSETS.astype(np.float32)},
        r"d2t is float32\[40\]; expected whole numbers",
    ),
    "d2t duplicates": (
        {},
        {"d2t": np.insert(OFFSETS[2:], 0, [OFFSETS[0], OFFSETS[0] - 1])},
        "d2t has duplicates",
    ),
    "t2d contradicts": ({}, {"t2d": MASK[::-1]}, "which t2d does not mark"),
    "no lm_head": ({}, {"lm_head__weight": None}, r"misses lm_head\.weight"),
    "unexpected": ({}, {"fc__bias": np.ones(32, np.float32)}, r"unexpected fc\.bias"),
    "both names": (
        {},
        {"layers__0__hidden_norm__weight": np.ones(32, np.float32)},
        "mean the same tensor",
    ),
    "deep aux": (
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
        {},
        "auxiliary layer 9 but the target has 8",
    ),
    "double aux": ({"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}, {}, "expected distinct layers"),
    "contradicting aux": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "eagle_config": {"layer_ids": [2, 3, 4]}},
        {},
        "they must agree",
    ),
    "no features": (
        {"eagle_config": {"use_aux_hidden_state": False}},
        {},
        "use_aux_hidden_state is false",
    ),
    "no last norm": (
        {"eagle_config": {"use_last_layernorm": False}},
        {},
        "use_last_layernorm is False",
    ),
    "a window of no size": ({"layer_types": ["sliding_attention"]}, {}, "has no sliding_window"),
    "a window of no layer": (
        {"sliding_window": 5},
        {},
        "sliding_window is 5; no layer_types say which of",
    ),
    "a window that is off": (
        {**SLIDING, "use_sliding_window": False},
        {},
        "no sliding_window is switched on",
    ),
    "attention in both directions": (
        {"is_causal": False},
        {},
        "is_causal is False; only causal attention",
    ),
    "architecture": ({"model_type": "deepseek_v3"}, {}, "model_type is 'deepseek_v3'"),
    "latent attention": (
        {"model_type": "kimi_k2", "architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        {},
        "has no q_lora_rank",
    ),
    "qwen3 without head_dim": ({"model_type": "qwen3"}, {}, "has no head_dim"),
    "two input norms": ({"fc_norm": True, "norm_before_fc": True}, {}, "exclude each other"),
    "embedding shape": (
        {},
        {"embed_tokens__weight": np.ones((60, 32), np.float32)},
        r"shape \[60, 32\]",
    ),
}


@pytest.mark.parametrize("name", HEAD_REFUSALS)
def test_a_contradicting_head_is_refused(tmp_path: Path, name: str) -> None:
    fields, tensors, message = HEAD_REFUSALS[name]
    directory = Head().write(tmp_path / "head")
    edit_config(directory, **fields)
    edit_tensors(directory, **tensors)
    refused(lambda path: conversion.read_head(path, TARGET), directory, message)


def test_a_full_draft_vocabulary_must_not_be_reordered(tmp_path: Path) -> None:
    directory = Head(draft_vocab=61).write(tmp_path / "head")
    edit_tensors(directory, d2t=np.zeros(61, np.int64), t2d=np.ones(61, np.bool_))
    conversion.read_head(directory, TARGET)
    edit_tensors(directory, d2t=60 - 2 * np.arange(61))
    with pytest.raises(CheckpointError, match="reorders tokens"):
        conversion.read_head(directory, TARGET)


def test_a_head_of_another_width_needs_its_own_embedding(tmp_path: Path) -> None:
    directory = HEADS["own embedding, other width"].write(tmp_path / "head")
    edit_tensors(directory, embed_tokens__weight=None)
    with pytest.raises(
        CheckpointError, match=r"no embed_tokens\.weight, but its width 48 differs from"
    ):
        conversion.read_head(directory, TARGET)


def test_defaulted_auxiliary_layers_need_a_target_deep_enough(tmp_path: Path) -> None:
    directory = Head().write(tmp_path / "head")
    with pytest.raises(conversion.TargetNeededError, match="give the target as well"):
        conversion.read_head(directory)
    with pytest.raises(CheckpointError, match="a target of 6 layers is too shallow"):
        conversion.read_head(directory, dataclasses.replace(TARGET, layers=TARGET.layers[:6]))


LINEAR = {"type": "linear", "factor": 2.0}
DEEPER = dataclasses.replace(TARGET, layers=TARGET.layers[:1] * 10)
NOT_OFFICIAL: dict[str, tuple[Head, dict[str, Any], DecoderConfig, str]] = {
    "layers that are the default of another depth": (
        Head(),
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
        DEEPER,
        r"aux_layers \(2, 4, 5\)",
    ),
    "linear rope with a base": (
        Head(),
        {"rope_theta": 500.0, "rope_scaling": LINEAR},
        TARGET,
        "linear rope with rope_theta 500",
    ),
    "another rope": (
        Head(),
        {
            "rope_theta": 500.0,
            "rope_scaling": {name: LLAMA3[name] for name in LLAMA3 if name != "rope_theta"},
        },
        TARGET,
        "rope type 'llama3'",
    ),
    "a free head_dim": (Head(head_dim=16), {}, TARGET, "head_dim 16"),
}


@pytest.mark.parametrize("name", NOT_OFFICIAL)
def test_the_official_layout_refuses_other_settings(tmp_path: Path, name: str) -> None:
    head, fields, target, message = NOT_OFFICIAL[name]
    edit_config(head.write(tmp_path / "head"), **fields)
    with pytest.raises(CheckpointError, match=message):
        conversion.convert(tmp_path / "head", tmp_path / "out", "eagle", target)


def test_windows_of_two_sizes_have_no_field(tmp_path: Path) -> None:
    checkpoint = conversion.read_head(
        Head(layers=2, windows=(3, 3)).write(tmp_path / "head"), TARGET
    )
    first, second = checkpoint.config.layers
    config = dataclasses.replace(checkpoint.config, layers=(first, with_window(second, 7)))
    conversion.write_native(dataclasses.replace(checkpoint, config=config), tmp_path / "native")
    assert conversion.read_head(tmp_path / "native", TARGET).config == config
    with pytest.raises(CheckpointError, match=r"windows of \[3, 7\] tokens; .* use --to jax"):
        conversion.convert(tmp_path / "native", tmp_path / "out", "vllm", TARGET)


def test_written_configurations_have_the_fields_that_engines_read(tmp_path: Path) -> None:
    directory = Head(aux=(0, 3, 5, 8), norm_before_residual=True).write(tmp_path / "head")
    conversion.convert(directory, tmp_path / "vllm", "vllm", TARGET)
    values = json.loads((tmp_path / "vllm/config.json").read_text())
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 3, 5, 8]}
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_aux_hidden_states": 4,
        "eagle_config": {**ids, "use_aux_hidden_state": True},
        "norm_before_residual": True,
        "norm_output": False,
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        **ids,
    }
    assert expected.items() <= values.items()
