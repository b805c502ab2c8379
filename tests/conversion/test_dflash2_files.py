"""DFlash2 drafters on disk: both dialects are read and written; wrong files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET, edit_config, edit_tensors, refused, round_trip, same_head
from convolved_heads import ConvolvedHead
from safetensors import safe_open

from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError

pytestmark = pytest.mark.core

PUBLISHED = Path(__file__).parent.parent / "golden" / "published" / "dflash2_qwen3" / "drafter"
SCALES = (("output_multiplier", 0.5), ("final_logit_softcapping", 3.0))
HEADS = {
    "full": ConvolvedHead(),
    "windows": ConvolvedHead(taps=3, group=4, sliding=(True, False)),
    "scales": ConvolvedHead(scales=(*SCALES, ("input_embedding_scale", 2.0)), causal=True),
    "its own output": ConvolvedHead(own_output=True, candidates=61),
}
NOT_EXPRESSIBLE = {
    "scales": "causal .*layout cannot express|cannot express (causal|input_embedding_scale)",
    "its own output": "an output projection of its own",
}


@pytest.mark.parametrize("to", ["jax", "vllm", "speculators"])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_round_trips_bit_equal_or_its_setting_is_refused(
    tmp_path: Path, name: str, to: str
) -> None:
    directory = HEADS[name].write(tmp_path / "head")
    assert conversion.read_head(directory, TARGET).method == "dflash2"
    message = NOT_EXPRESSIBLE.get(name) if to == "speculators" else None
    round_trip(directory, to, TARGET, message)


@pytest.mark.parametrize("name", ["full", "windows"])
def test_both_dialects_give_the_same_head(tmp_path: Path, name: str) -> None:
    first, second = (
        conversion.read_head(HEADS[name].write(tmp_path / dialect, dialect), TARGET)
        for dialect in ("vllm", "speculators")
    )
    assert (first.dialect, second.dialect) == ("vllm", "speculators")
    assert same_head(first, second)


def test_the_published_fields_and_tensors_are_read_and_written(tmp_path: Path) -> None:
    head = conversion.read_head(PUBLISHED)
    config = head.config
    sizes = (config.conv_kernel_size, config.conv_group_size, config.selector_top_k)
    assert sizes == (2, 16, 5)
    assert (config.output_multiplier, config.final_logit_softcapping, config.windows) == (
        0.5,
        20.0,
        (8, None, 8),
    )
    assert (config.causal, config.block_size, config.selector_rank) == (False, 6, 12)

    conversion.convert(PUBLISHED, tmp_path / "out", "vllm")
    names = [
        set(safe_open(path / "model.safetensors", "np").keys())
        for path in (PUBLISHED, tmp_path / "out")
    ]
    assert names[0] == names[1]
    theirs, ours = (
        json.loads((path / "config.json").read_text()) for path in (PUBLISHED, tmp_path / "out")
    )
    assert ours["architectures"] == ["DFlash2DraftModel"]
    assert ours["is_causal"] is False
    assert theirs["dflash_config"].items() <= ours["dflash_config"].items()


def case(message: str, dialect: str = "vllm", **changes: Any) -> tuple[str, str, dict[str, Any]]:
    return message, dialect, changes


def settings(**changes: Any) -> dict[str, Any]:
    """Returns a ``dflash_config`` with changes; ``None`` leaves a field out."""
    values = {**ConvolvedHead().config()["dflash_config"], **changes}
    return {name: value for name, value in values.items() if value is not None}


MATRIX = np.ones((6, 31), np.float32)
REFUSALS = {
    "no kernel size": case("no conv_kernel_size", dflash_config=settings(conv_kernel_size=None)),
    "no candidates": case("selector_top_k is 0", dflash_config=settings(selector_top_k=0)),
    "more candidates than tokens": case(
        "selector_top_k is 62; expected 1 to the vocabulary's 61",
        dflash_config=settings(selector_top_k=62),
    ),
    "groups that do not divide": case(
        "conv_group_size is 5; expected a divisor of the width 32",
        dflash_config=settings(conv_group_size=5),
    ),
    "more taps than rows": case(
        "conv_kernel_size is 6; expected 1 to the 5 rows", dflash_config=settings(conv_kernel_size=6)
    ),
    "another rank": case(
        r"predecessor_codebook has shape \[61, 6\]; config.json asks for \[61, 7\]",
        dflash_config=settings(selector_rank=7),
    ),
    "an unknown setting": case(
        "'selector_beams' is not a setting of a DFlash2 drafter; expected",
        dflash_config=settings(selector_beams=4),
    ),
    "a cap below zero": case(
        "final_logit_softcapping is -1.0", dflash_config=settings(final_logit_softcapping=-1.0)
    ),
    "the anchor predicts": case(
        "has no from_anchor", dflash_config=settings(sample_from_anchor=True)
    ),
    "a bias by the token before": case("a DFlash2 drafter has no from_anchor", markov_rank=4),
    "a reduced vocabulary": case("whole vocabulary", draft_vocab_size=40, lm_head__weight=MATRIX),
    "a window of zero": case(
        "sliding_window is 0", layer_types=["sliding_attention"] * 2, sliding_window=0,
        use_sliding_window=True,
    ),
    "scales in speculators' layout": case(
        "output_multiplier is 0.5; speculators and vLLM ignore it", "speculators",
        output_multiplier=0.5,
    ),
    "no selector": case(
        "misses candidate_selector.hidden_projection.weight",
        candidate_selector__hidden_projection__weight=None,
    ),
    "no convolution": case(
        "misses layers.1.mlp_conv.base_kernel", layers__1__mlp_conv__base_kernel=None
    ),
    "another shape": case(
        r"has shape \[6, 31\]", candidate_selector__hidden_projection__weight=MATRIX
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_wrong_head_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    message, dialect, changes = REFUSALS[name]
    directory = ConvolvedHead().write(tmp_path / "head", dialect)
    tensors = {key: value for key, value in changes.items() if "__" in key}
    edit_config(directory, **{key: changes[key] for key in changes.keys() - tensors.keys()})
    edit_tensors(directory, **tensors)
    refused(lambda path: conversion.read_head(path, TARGET), directory, message)


def test_a_dflash_file_with_the_parts_of_dflash2_is_read_as_what_it_is(tmp_path: Path) -> None:
    """The name of the architecture alone may be that of DFlash, but not the settings."""
    directory = ConvolvedHead().write(tmp_path / "head")
    edit_config(directory, architectures=["DFlashDraftModel"])
    assert conversion.identify(directory) == "dflash2"
    edit_config(directory, dflash_config={"mask_token_id": 60, "target_layer_ids": [1, 3, 6]})
    with pytest.raises(CheckpointError, match="no conv_kernel_size"):
        conversion.read_head(directory, TARGET)
