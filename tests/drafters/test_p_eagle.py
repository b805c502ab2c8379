"""P-EAGLE heads: their files, and drafts against a torch twin that runs one forward pass."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")
import tiny
from checkpoints import (
    TARGET,
    Head,
    TorchHead,
    edit_config,
    edit_tensors,
    edited,
    loaded_head,
    refused,
    round_trip,
    same_head,
    same_params,
    target_tables,
)

from eagle3_jax import conversion
from eagle3_jax.topology import Chain
from eagle3_jax.types import DraftSampling

pytestmark = [pytest.mark.core, pytest.mark.torch]

MASK_TOKEN = 57
HEADS = {
    "four layers": Head(layers=4, own_embedding=True),
    "every option": Head(
        layers=2,
        norm_before_residual=True,
        norm_before_fc=True,
        qk_norm=True,
        windows=(3, None),
        aux=(1, 3, 5, 8),
    ),
    "EAGLE-3.1's norms": Head(layers=3, fc_norm=True, norm_output=True, draft_vocab=61),
}
HALVES = {name: dataclasses.replace(head, dtype=ml_dtypes.bfloat16) for name, head in HEADS.items()}


def mask_hidden(head: Head) -> np.ndarray:
    random = np.random.default_rng(11)
    return (
        random.normal(size=(1, 1, len(head.aux) * head.target_width))
        .astype(np.float32)
        .astype(head.dtype)
    )


def write(head: Head, directory: Path, dialect: str = "sglang", mask: str = "ptd_token_id") -> Path:
    """Writes a head as Amazon or speculators stores it."""
    head.write(directory, dialect)
    edit_tensors(directory, mask_hidden=mask_hidden(head))
    if dialect == "speculators":
        edit_config(directory, speculators_model_type="peagle", architectures=["PEagleDraftModel"])
    edit_config(directory, **{mask: MASK_TOKEN})
    return directory


@pytest.mark.parametrize("name", ["every option", "EAGLE-3.1's norms"])
def test_drafts_are_those_of_one_forward_over_context_and_masks(name: str) -> None:
    """Three rounds of two ragged rows; each round overwrites the mask rows of the round before."""
    head = HEADS[name]
    depth = 4
    random = np.random.default_rng(3)
    features = random.normal(size=(2, 16, len(head.aux), head.target_width)).astype(np.float32)
    tokens = random.integers(0, 61, (2, 16))
    network = TorchHead(head, target_tables()[0])
    torch = network.torch
    masks = [np.tile(mask_hidden(head).reshape(1, len(head.aux), -1), (depth - 1, 1, 1))]

    def one_forward(row: int, known: int) -> np.ndarray:
        """Returns the draft distributions ``[K V]`` after ``known`` features and their tokens."""
        text = tokens[row, 1 : known + 1].tolist()
        ids = torch.tensor(text + [MASK_TOKEN] * (depth - 1))
        stream = network.fuse(np.concatenate([features[row, :known], *masks]))
        rows = network.run(ids, stream)
        softmax = network.logits(rows[-depth:]).softmax(-1)
        full_rows = torch.zeros(depth, 61)
        full_rows[:, network.chosen] = softmax
        return full_rows.numpy()

    drafter, params = loaded_head(
        functools.partial(write, head), Chain(depth), DraftSampling.PROBABILISTIC
    )
    state = drafter.init(params, 2, 20)
    for known, seen in tiny.ragged_rounds(tokens, features, ((7, 4), (1, 3), (3, 0))):
        draft = tiny.next_draft(drafter, params, state, seen, 1.0)
        state = draft.state
        for row in (0, 1):
            np.testing.assert_allclose(
                draft.probs[row, 1:], one_forward(row, int(known[row])), atol=1e-5
            )


@pytest.mark.parametrize("to", ["jax", "vllm", "speculators"])
@pytest.mark.parametrize("name", HALVES)
def test_a_head_round_trips_bit_equal(tmp_path: Path, name: str, to: str) -> None:
    directory = write(HALVES[name], tmp_path / "head")
    assert conversion.identify(directory) == "p-eagle"
    round_trip(directory, to, TARGET)
    again = conversion.read_head(tmp_path / "out", TARGET)
    assert again.config.mask_token_id == MASK_TOKEN
    assert not again.note


@pytest.mark.parametrize("name", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_the_mask_token_may_stand_under_any_of_its_names(tmp_path: Path, name: str) -> None:
    directory = write(Head(layers=2), tmp_path / "head", mask=name)
    assert conversion.read_head(directory, TARGET).config.mask_token_id == MASK_TOKEN


def test_both_dialects_give_the_same_head(tmp_path: Path) -> None:
    first = conversion.read_head(write(Head(layers=2), tmp_path / "a"), TARGET)
    directory = write(Head(layers=2), tmp_path / "b", "speculators", "mask_token_id")
    edit_config(directory, norm_before_residual=None)  # of these heads the default is no
    second = conversion.read_head(directory, TARGET)
    assert second.dialect == "speculators"
    assert same_head(first, second)


def test_a_norm_that_no_engine_applies_is_left_out_and_named(tmp_path: Path) -> None:
    directory = write(Head(layers=3), tmp_path / "head")
    plain = conversion.read_head(directory, TARGET)
    edit_tensors(directory, layers__1__hidden_norm__weight=np.ones(32, np.float32))
    again = conversion.read_head(directory, TARGET)
    assert again.note.startswith("layers.1.hidden_norm.weight left out")
    assert same_params(plain.head, again.head)


def test_files_say_what_vllm_and_speculators_read(tmp_path: Path) -> None:
    directory = write(HEADS["every option"], tmp_path / "head")
    conversion.convert(directory, tmp_path / "vllm", "vllm", TARGET)
    values = json.loads((tmp_path / "vllm/config.json").read_text())
    assert values["pard_token"] == values["ptd_token_id"] == MASK_TOKEN
    assert "PEagle" not in values["architectures"][0]  # vLLM has no such class

    conversion.convert(directory, tmp_path / "spec", "speculators", TARGET)
    values = json.loads((tmp_path / "spec/config.json").read_text())
    expected = {"mask_token_id": MASK_TOKEN, "speculators_model_type": "peagle"}
    assert values.items() >= expected.items()

    layers = {"num_aux_hidden_states": 4, "layer_types": ["sliding_attention", "full_attention"]}
    assert values["transformer_layer_config"].items() >= layers.items()
    assert "model_type" not in values
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"]


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no state": ({}, {"mask_hidden": None}, "misses mask_hidden"),
    "no mask token": (
        {"ptd_token_id": None},
        {},
        r"names no mask token \(mask_token_id, pard_token, ptd_token_id\)",
    ),
    "a mask token out of range": (
        {"ptd_token_id": 61},
        {},
        "mask_token_id is 61; expected a token of the vocabulary",
    ),
    "two mask tokens": (
        {"mask_token_id": 3},
        {},
        r"mask_token_id is 3 and ptd_token_id is 57; they must agree",
    ),
    "a state of another width": (
        {},
        {"mask_hidden": np.ones((1, 1, 32), np.float32)},
        r"mask_hidden has shape \[32\]; config.json asks for \[96\]",
    ),
    "no lm_head": ({}, {"lm_head__weight": None}, r"misses lm_head\.weight"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_add_up_is_refused(tmp_path: Path, name: str) -> None:
    fields, tensors, message = REFUSALS[name]
    directory = write(Head(layers=2), tmp_path / "head")
    refused(
        lambda path: conversion.read_head(path, TARGET), edited(directory, fields, tensors), message
    )
