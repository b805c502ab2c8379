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
    "windows": BlockHead(windows=(True, False), is_causal=False),
    "causal windows": BlockHead(windows=(True, False)),
    "JetSpec, windows": BlockHead(windows=(True, True)),
}
HALVES = {name: dataclasses.replace(head, dtype=ml_dtypes.bfloat16) for name, head in HEADS.items()}
OURS = ("fc.weight", "hidden_norm.weight")
THEIRS = ("encoder.fc.weight", "encoder.output_norm_enc.weight")
NOT_EXPRESSIBLE = {
    "vllm": {
        "anchored": "from_anchor without markov",
        "DSpark, gated": "markov type 'gated'",
        "DSpark, recurrent": "markov type 'rnn'",
    },
    "speculators": {"JetSpec": "causal", "its own tables": "an embedding of its own"},
    "transformers": {
        "DFlash of a reduced vocabulary": "biases; a vocabulary",
        "JetSpec": "a causal block",
        "its own tables": "a vocabulary, output or embedding of its own",
        "anchored": "from_anchor",
        "causal windows": "a causal block",
        "JetSpec, windows": "a causal block",
        **dict.fromkeys(
            ("DSpark", "DSpark after masks", "DSpark, gated", "DSpark, recurrent"),
            "a bias by the token before",
        ),
    },
    "jax": {},
}


@pytest.mark.parametrize("to", NOT_EXPRESSIBLE)
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
        names = dict(zip(OURS, THEIRS, strict=True)) if to == "transformers" else {}
        expected = {names.get(name, name): value for name, value in head.tensors().items()}
        assert same_params(load_file(tmp_path / "out" / "model.safetensors"), expected)


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


class Windows(NamedTuple):
    """What a file with windows means."""

    fields: dict[str, Any]
    windows: tuple[int | None, ...] = (8, None)
    causal: bool = False
    causal_windows: bool = False
    dialect: str = "vllm"


MIXED = ["sliding_attention", "full_attention"]
SLIDES = {"layer_types": MIXED, "sliding_window": 8, "use_sliding_window": True}
# As the sources of the projects have it: transformers 5.24, z-lab's dflash/model.py, vLLM 0.32's
# qwen3_dflash.py, SGLang's dflash_utils.py, speculators' models/dflash.
WINDOWS = {
    "z-lab, published": Windows(SLIDES, causal_windows=True),
    "z-lab, both ways": Windows(SLIDES | {"is_causal": False}),
    "z-lab, causal": Windows(SLIDES | {"is_causal": True}, causal=True),
    "z-lab, all layers": Windows(
        SLIDES | {"layer_types": MIXED[:1] * 2}, windows=(8, 8), causal=True
    ),
    "z-lab, a window that is off": Windows(
        {"sliding_window": 8, "use_sliding_window": False}, windows=(None, None)
    ),
    "vLLM, its flag": Windows(SLIDES | {"dflash_config": {"causal": False}}),
    "vLLM, every layer": Windows(
        {"dflash_config": {"use_swa": True, "swa_window_size": 8}}, windows=(8, 8)
    ),
    "vLLM, every layer by the other size": Windows(
        {"layer_types": None, "sliding_window": 8, "dflash_config": {"use_swa": True}},
        windows=(8, 8),
    ),
    "vLLM, the layers that are named": Windows(
        {"layer_types": MIXED, "dflash_config": {"use_swa": True, "swa_window_size": 8}},
        causal_windows=True,
    ),
    "speculators, causal": Windows(SLIDES, causal_windows=True, dialect="speculators"),
    "speculators, both ways": Windows(
        SLIDES | {"sliding_window_non_causal": True}, dialect="speculators"
    ),
    "transformers": Windows(
        {"layer_types": MIXED, "sliding_window": 8}, windows=(9, None), dialect="transformers"
    ),
    "transformers, without layer_types": Windows(
        {"layer_types": None, "sliding_window": 8}, windows=(9, 9), dialect="transformers"
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_what_the_project_of_the_file_means_by_it(tmp_path: Path, name: str) -> None:
    case = WINDOWS[name]
    # Two windows, so that the file of transformers has no size that others would default to.
    directory = BlockHead().write(tmp_path / "head", case.dialect)
    edit_fields(directory, case.fields)
    config = conversion.read_head(directory, TARGET).config
    assert config.windows == case.windows
    assert (config.causal, config.causal_windows) == (case.causal, case.causal_windows)


def edit_fields(directory: Path, fields: dict[str, Any]) -> None:
    """Changes fields where the file of a block drafter has them."""
    path = directory / "config.json"
    values = json.loads(path.read_text())
    for name, value in fields.items():
        section = values
        if "transformer_layer_config" in values and name != "sliding_window_non_causal":
            section = values["transformer_layer_config"]
        if isinstance(value, dict):
            value = {**section[name], **value}
        section[name] = value
    path.write_text(json.dumps(values))


def test_the_notes_say_what_layers_with_a_window_see(tmp_path: Path) -> None:
    head = BlockHead(windows=(True, False), window=8)
    note = conversion.read_head(head.write(tmp_path / "z-lab"), TARGET).note
    assert "layer 0 sees 7 positions behind" in note
    assert "ahead" not in note
    note = conversion.read_head(head.write(tmp_path / "hf", "transformers"), TARGET).note
    assert "layer 0 sees 8 positions behind and ahead" in note


def test_what_engines_do_with_logits_is_noted(tmp_path: Path) -> None:
    directory = BlockHead().write(tmp_path / "head")
    edit_config(directory, final_logit_softcapping=30.0)
    assert (
        "likeliest tokens: final_logit_softcapping" in conversion.read_head(directory, TARGET).note
    )


def test_an_assistant_needs_its_target(tmp_path: Path) -> None:
    directory = BlockHead(windows=(True, False)).write(tmp_path / "head", "transformers")
    with pytest.raises(conversion.TargetNeededError, match="the size of the vocabulary; give"):
        conversion.read_head(directory)
    description = conversion.describe(directory)
    assert (description.kind, description.dialect) == ("draft head: DFlash", "transformers")
    wider = dataclasses.replace(TARGET, width=48)
    with pytest.raises(
        conversion.CheckpointError, match="reads features of width 32 but the target has 48"
    ):
        conversion.read_head(directory, wider)


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
    "a window that is off": case(
        "but no sliding_window is switched on", layer_types=MIXED, sliding_window=8
    ),
    "a window of nothing": case("sliding_window is 0; expected", **SLIDES | {"sliding_window": 0}),
    "a window below nothing": case(
        "sliding_window is -1; expected", dialect="transformers", sliding_window=-1
    ),
    "an unknown kind of layer": case(
        "layer_types has 'chunked_attention'; expected full_attention or sliding_attention",
        **SLIDES | {"layer_types": ["chunked_attention", *MIXED[1:]]},
    ),
    "kinds of too many layers": case(
        "layer_types names 3 layers but the head has 2",
        **SLIDES | {"layer_types": [*MIXED, MIXED[0]]},
    ),
    "kinds of too few layers": case(
        "layer_types names 1 layers but the head has 2",
        dialect="transformers",
        layer_types=MIXED[:1],
        sliding_window=8,
    ),
    "a window without layers": case("no layer_types say", **SLIDES | {"layer_types": None}),
    "windows that disagree": case(
        "swa_window_size is 4 and sliding_window is 8; they must agree", **SLIDES, swa_window_size=4
    ),
    "a window without its size": case("has no sliding_window", use_swa=True),
    "an assistant without its size": case("has no sliding_window", dialect="transformers"),
    "a causal assistant": case(
        "is_causal is True; only False", dialect="transformers", is_causal=True, sliding_window=8
    ),
    "windows of speculators without their flag": case(
        "does not say whether the block is causal",
        BlockHead(windows=(True, False)),
        "speculators",
        sliding_window_non_causal=None,
    ),
    "an embedding that is scaled": case(
        "input_embedding_scale is 2.0; only 1.0", input_embedding_scale=2.0
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


def test_an_assistant_reads_the_last_layer_after_the_final_norm(tmp_path: Path) -> None:
    """transformers has the normed state in place of what leaves the last layer."""
    last = TARGET.num_layers - 1
    head = BlockHead(ids=(1, 4, last), windows=(True, False))
    assistant = head.write(tmp_path / "head", "transformers")
    config = conversion.read_head(assistant, TARGET).config
    assert (config.aux_layers, config.normed_last) == ((2, 5, last + 2), True)
    message = "cannot express the state after the target's final norm"
    round_trip(assistant, "vllm", TARGET, message)
    round_trip(assistant, "transformers", TARGET)

    others = conversion.read_head(head.write(tmp_path / "vllm"), TARGET).config
    assert (others.aux_layers, others.normed_last) == ((2, 5, last + 1), False)
    beyond = edit_config(assistant, target_layer_ids=[1, 4, last + 1]) or assistant
    refused(lambda path: conversion.read_head(path, TARGET), beyond, "reads auxiliary layer 9")
