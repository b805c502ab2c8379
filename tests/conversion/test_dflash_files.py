"""Block drafters on disk: both dialects are read and written; contradictions are refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from block_heads import BlockHead
from checkpoints import (
    TARGET,
    edit_config,
    edit_tensors,
    refused,
    round_trip,
    same_head,
    same_params,
    write_checkpoint,
)
from safetensors.numpy import load_file

from eagle3_jax import conversion

pytestmark = pytest.mark.core

HEADS = {
    "DFlash": BlockHead(),
    "DFlash of a reduced vocabulary": BlockHead(draft_vocab=40, bias=True, theta=500.0),
    "JetSpec": BlockHead(causal=True),
    "its own tables": BlockHead(own_output=True, own_embedding=True),
    "anchored": BlockHead(from_anchor=True),
    "DSpark": BlockHead(from_anchor=True, rank=6, confidence="markov"),
    "DSpark after masks": BlockHead(rank=6, confidence="hidden", draft_vocab=40),
    "DSpark, gated": BlockHead(from_anchor=True, rank=6, markov="gated"),
    "DSpark, recurrent": BlockHead(from_anchor=True, rank=6, markov="rnn"),
}
HALVES = {name: dataclasses.replace(head, dtype=ml_dtypes.bfloat16) for name, head in HEADS.items()}
NOT_EXPRESSIBLE = {
    "vllm": {
        "anchored": "from_anchor without markov",
        "DSpark, gated": "markov type 'gated'",
        "DSpark, recurrent": "markov type 'rnn'",
    },
    "speculators": {"JetSpec": "causal", "its own tables": "an embedding of its own"},
    "jax": {},
}


@pytest.mark.parametrize("to", ["jax", "vllm", "speculators"])
@pytest.mark.parametrize("name", HALVES)
def test_a_head_round_trips_bit_equal_or_its_setting_is_refused(
    tmp_path: Path, name: str, to: str
) -> None:
    head = HALVES[name]
    directory = head.write(tmp_path / "head")
    source = conversion.read_head(directory, TARGET)
    assert (source.method, source.dtype) == ("dflash", "bfloat16")
    message = NOT_EXPRESSIBLE[to].get(name)
    round_trip(directory, to, TARGET, message)
    if message is None and to != "jax":
        assert same_params(load_file(tmp_path / "out" / "model.safetensors"), head.tensors())


@pytest.mark.parametrize("name", sorted(HEADS.keys() - NOT_EXPRESSIBLE["speculators"].keys()))
def test_both_dialects_give_the_same_head(tmp_path: Path, name: str) -> None:
    first, second = (
        conversion.read_head(HEADS[name].write(tmp_path / dialect, dialect), TARGET)
        for dialect in ("vllm", "speculators")
    )
    assert (first.dialect, second.dialect) == ("vllm", "speculators")
    assert same_head(first, second)


def test_settings_with_different_defaults_in_engines_are_always_written(tmp_path: Path) -> None:
    conversion.convert(
        HEADS["DSpark"].write(tmp_path / "head"), tmp_path / "spec", "speculators", TARGET
    )
    values = json.loads((tmp_path / "spec" / "config.json").read_text())
    assert values["sample_from_anchor"] is values["sliding_window_non_causal"] is True
    assert values["aux_hidden_state_layer_ids"] == [2, 4, 7]
    assert values["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 1e6
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5

    conversion.convert(tmp_path / "spec", tmp_path / "vllm", "vllm", TARGET)
    values = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert values["target_layer_ids"] == values["dflash_config"]["target_layer_ids"] == [1, 3, 6]
    assert values["dflash_config"]["causal"] is values["dspark_bonus_anchor"] is False


def test_a_speculators_head_of_full_layers_sees_its_whole_block(tmp_path: Path) -> None:
    head = conversion.read_head(BlockHead().write(tmp_path / "head", "speculators"), TARGET)
    assert not head.config.causal
    assert re.fullmatch(
        "every row sees its whole block: draft 4 tokens, .*; .* vLLM would serve .* causally",
        head.note,
    )
    edit_config(tmp_path / "head", sliding_window_non_causal=True)
    assert "vLLM" not in conversion.read_head(tmp_path / "head", TARGET).note
    assert (
        conversion.read_head(BlockHead(causal=True).write(tmp_path / "causal"), TARGET).note == ""
    )


def test_names_of_other_tools_are_understood(tmp_path: Path) -> None:
    head = BlockHead(layers=1)
    first = conversion.read_head(head.write(tmp_path / "first"), TARGET)
    aliases = {
        "fc.": "encoder.fc.",
        "hidden_norm.": "encoder.output_norm_enc.",
        "layers.0.": "midlayer.",
    }

    tensors = {}
    for name, value in head.tensors().items():
        prefix = next((prefix for prefix in aliases if name.startswith(prefix)), "")
        tensors[aliases.get(prefix, "") + name.removeprefix(prefix)] = value
    second = write_checkpoint(tmp_path / "second", head.config(), tensors)
    assert same_head(first, conversion.read_head(second, TARGET))

    edit_tensors(second, fc__weight=tensors["encoder.fc.weight"])
    refused(
        lambda path: conversion.read_head(path, TARGET),
        second,
        "which mean the same tensor fc.weight",
    )


MATRIX = np.ones((32, 64), np.float32)
SPARK = HEADS["DSpark"]


class Case(NamedTuple):
    """A head that is refused."""

    head: BlockHead
    dialect: str
    fields: dict[str, Any]  # changes of its config.json
    tensors: dict[str, Any]  # changes of its tensors
    message: str


def case(
    message: str, head: BlockHead = BlockHead(), dialect: str = "vllm", **changes: Any
) -> Case:
    """Returns a case of a refusal.

    Changes that are arrays, or have ``__`` for a dot in their name, are of tensors.
    """
    tensors = {
        name: value
        for name, value in changes.items()
        if "__" in name or isinstance(value, np.ndarray)
    }
    fields = {name: changes[name] for name in changes.keys() - tensors.keys()}
    return Case(head, dialect, fields, tensors, message)


AMBIGUOUS = {
    name: value
    for name, value in BlockHead().config().items()
    if name not in ("layer_types", "dflash_config")
}
REFUSALS = {
    "no layer ids": case("no target_layer_ids", dflash_config={"mask_token_id": 60}),
    "layer ids that disagree": case(
        r"\(\+1\) is \(2, 4, 7\) and .* must agree", eagle_aux_hidden_state_layer_ids=[1, 3, 6]
    ),
    "layers that the target does not have": case(
        "reads auxiliary layer 10", BlockHead(ids=(1, 3, 9))
    ),
    "no mask token": case("names no mask token", dflash_config={"target_layer_ids": [1, 3, 6]}),
    "mask tokens that disagree": case("mask_token_id is 60 and pard_token is 7", pard_token=7),
    "no block size": case("no block_size", block_size=None),
    "no rope_theta": case("has no rope_theta; it changes the mathematics", rope_theta=None),
    "a window": case(
        "only full attention", layer_types=["sliding_attention"] * 2, sliding_window=8
    ),
    "values that are scaled": case("attention_value_scale is 0.5", attention_value_scale=0.5),
    "a setting in two places": case(
        "causal is False and causal in dflash_config is True; they must agree",
        BlockHead(causal=True),
        causal=False,
    ),
    "quantised": case("quantization_config is {}; give the head before", quantization_config={}),
    "a state for masks": case("unexpected mask_hidden", mask_hidden=MATRIX),
    "a layer too many": case(
        "num_hidden_layers is 1; the file holds 2", num_hidden_layers=1, layer_types=None
    ),
    "a reduced vocabulary without lm_head": case(
        "without own_output", BlockHead(draft_vocab=40), lm_head__weight=None
    ),
    "a reduced vocabulary without d2t": case("has no d2t", BlockHead(draft_vocab=40), d2t__=None),
    "another width without an embedding": case(
        "no embed_tokens", BlockHead(width=48, heads=6, head_dim=8), target_hidden_size=32
    ),
    "Domino": case("a 'domino' drafter", dflash_config={"projector_type": "domino"}),
    "XPress": case("a 'xpress' drafter", dialect="speculators", speculators_model_type="xpress"),
    "a bias without its size": case("no markov_rank", SPARK, markov_rank=None),
    "an absent confidence": case(
        "misses confidence_head.proj.weight", SPARK, confidence_head__proj__weight=None
    ),
    "a confidence without its flag": case(
        "unexpected confidence_head", SPARK, enable_confidence_head=None
    ),
    "a confidence without the bias": case(
        "confidence reads the markov embedding", SPARK, markov_rank=0
    ),
    "an anchor without its flag": case(
        "no sample_from_anchor, whose default differs",
        SPARK,
        "speculators",
        sample_from_anchor=None,
    ),
    "contradicting flags of the anchor": case("are both True", SPARK, dspark_bonus_anchor=True),
    "causality without its flag": case(
        "does not say whether the block is causal",
        dialect="speculators",
        transformer_layer_config=AMBIGUOUS,
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_contradicting_head_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    refusal = REFUSALS[name]
    directory = refusal.head.write(tmp_path / "head", refusal.dialect)
    edit_config(directory, **refusal.fields)
    edit_tensors(
        directory, **{name.removesuffix("__"): value for name, value in refusal.tensors.items()}
    )
    refused(lambda path: conversion.read_head(path, TARGET), directory, refusal.message)


def test_a_separate_mask_embedding_is_refused(tmp_path: Path) -> None:
    directory = BlockHead().write(tmp_path / "head")
    (directory / "mask_embedding.pt").write_bytes(b"")
    refused(
        lambda path: conversion.read_head(path, TARGET),
        directory,
        "a separate mask embedding is not supported",
    )
