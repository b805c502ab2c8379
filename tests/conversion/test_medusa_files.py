"""Medusa heads are read from and written to the files of their authors and of vLLM."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
import medusa_torch
import tiny
from checkpoints import refused, round_trip, same_params, write_checkpoint
from safetensors.numpy import load_file

from eagle3_jax import conversion, load_drafter
from eagle3_jax.conversion import CheckpointError

pytestmark = [pytest.mark.core, pytest.mark.torch]

TARGET = tiny.config(13)
VLLM = {
    "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 16, "vocab_size": 13,
    "truncated_vocab_size": 13, "num_heads": 3, "num_hidden_layers": 1, "medusa_fc_bias": True,
}  # fmt: skip


def read(path: Path) -> Any:
    return conversion.read_head(path, TARGET)


def official(
    path: Path, suffix: str = "safetensors", *, config: dict | None = None, **heads: Any
) -> Path:
    return medusa_torch.write_official(
        path, medusa_torch.random_heads(16, 13, **heads), suffix=suffix, **config or {}
    )


def vllm(path: Path, *, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    """Writes the same heads by vLLM's names; ``None`` removes a tensor or a field."""
    stored: dict[str, Any] = {}
    for name, value in medusa_torch.tensors_of(medusa_torch.random_heads(16, 13)).items():
        head, layer, *names = name.split(".")
        is_block = names[0] == "linear"
        stored[
            f"blocks.{head}.layers.{layer}.{names[1]}" if is_block else f"lm_heads.{head}.weight"
        ] = value

    stored |= tensors or {}
    fields = VLLM | config
    stored = {name: value for name, value in stored.items() if value is not None}
    return write_checkpoint(
        path, {name: value for name, value in fields.items() if value is not None}, stored
    )


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_the_authors_files_are_read_and_draft_as_torch_does(tmp_path: Path, suffix: str) -> None:
    heads = medusa_torch.random_heads(16, 13)
    path = medusa_torch.write_official(tmp_path / "heads", heads, suffix=suffix)
    assert conversion.identify(path) == "medusa"

    target = tiny.target(13)
    loaded = load_drafter(path, target=target)
    config = loaded.drafter.config
    assert (config.num_heads, config.num_layers, config.bias, config.aux_layers) == (
        3,
        1,
        True,
        (3,),
    )

    state = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    ours = np.asarray(loaded.drafter.bind(loaded.params)(jnp.array(state), 3))
    truth = medusa_torch.logits_of(heads, state)
    assert np.abs(ours - truth).max() < 1e-5 * np.abs(truth).max()


def test_repeated_blocks_are_read_and_different_blocks_are_ambiguous(tmp_path: Path) -> None:
    repeated = official(tmp_path / "repeated", "pt", layers=2, repeated=True)
    assert read(repeated).config.num_layers == 2
    conversion.convert(repeated, tmp_path / "again", "medusa", TARGET)
    assert same_params(read(tmp_path / "again").head, read(repeated).head)
    refused(
        read,
        official(tmp_path / "two", layers=2),
        "head 0 has 2 different blocks under the authors' names",
    )


ROUND_TRIPS = {
    "the authors' file": lambda path: official(path),
    "vLLM's": lambda path: vllm(path),
    "without a bias": lambda path: vllm(
        path, medusa_fc_bias=None, tensors={f"blocks.{k}.layers.0.bias": None for k in range(3)}
    ),
    "one output for all": lambda path: vllm(path, original_lm_head=True, tensors=SHARED),
    "one output for a part of the vocabulary": lambda path: vllm(
        path,
        original_lm_head=True,
        truncated_vocab_size=5,
        tensors=SHARED | {"token_map": np.array([7, 0, 2, 12, 5])},
    ),
    "half precision": lambda path: vllm(
        path, tensors={"lm_heads.1.weight": np.ones((13, 16), np.float16)}
    ),
}
SHARED = {f"lm_heads.{k}.weight": None for k in (1, 2)}
NOT_EXPRESSIBLE = {
    ("without a bias", "medusa"): "blocks without a bias",
    ("one output for all", "medusa"): "one output projection for all heads",
    ("one output for a part of the vocabulary", "medusa"): "a draft vocabulary of 5",
}


@pytest.mark.parametrize("to", ["jax", "medusa", "vllm"])
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_heads_are_written_and_read_again_bit_for_bit(tmp_path: Path, name: str, to: str) -> None:
    path = ROUND_TRIPS[name](tmp_path / "heads")
    round_trip(path, to, TARGET, NOT_EXPRESSIBLE.get((name, to)))
    assert conversion.identify(path) == "medusa"
    table = read(path).draft_to_target
    assert (None if table is None else table.tolist()) == (
        [7, 0, 2, 12, 5] if "part" in name else None
    )


def test_written_files_have_the_names_and_fields_that_other_programs_read(tmp_path: Path) -> None:
    path = official(tmp_path / "heads")
    conversion.convert(path, tmp_path / "official", "medusa", TARGET)
    conversion.convert(path, tmp_path / "vllm", "vllm", TARGET)
    values = json.loads((tmp_path / "official/config.json").read_text())

    base = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    assert values == {"medusa_num_heads": 3, "medusa_num_layers": 1, **base}
    assert not (tmp_path / "official/model.safetensors").exists()
    names = load_file(tmp_path / "official/medusa_lm_head.safetensors").keys()
    assert names == load_file(path / "medusa_lm_head.safetensors").keys()

    # vLLM reads every name with "num" and "heads" as the number of heads, and in the same way that
    # of layers.
    values = json.loads((tmp_path / "vllm/config.json").read_text())
    assert [name for name in values if "num" in name and "heads" in name] == ["num_heads"]
    assert [name for name in values if "num" in name and "layers" in name] == ["num_hidden_layers"]
    assert VLLM.items() <= values.items()
    parts = ("blocks.{}.layers.0.weight", "blocks.{}.layers.0.bias", "lm_heads.{}.weight")
    expected = {part.format(head) for part in parts for head in range(3)}
    assert load_file(tmp_path / "vllm/model.safetensors").keys() == expected


def test_full_outputs_with_a_token_map_are_cut_to_its_rows(tmp_path: Path) -> None:
    table = np.array([9, 1, 4])
    head = read(vllm(tmp_path / "heads", truncated_vocab_size=3, tensors={"token_map": table}))
    full = load_file(tmp_path / "heads/model.safetensors")["lm_heads.2.weight"]
    assert head.config.draft_vocab_size == 3
    assert np.array_equal(head.head["outputs"][2]["kernel"], full[table].T)
    with pytest.raises(
        CheckpointError, match="a draft vocabulary of heads that do not share their output"
    ):
        conversion.convert(tmp_path / "heads", tmp_path / "out", "vllm", TARGET)


def test_every_head_of_an_authors_file_is_read(tmp_path: Path) -> None:
    # medusa-vicuna-7b-v1.3 is published with 5 heads and the number 2.
    complete = read(official(tmp_path / "complete"))
    head = read(official(tmp_path / "heads", config={"medusa_num_heads": 2}))
    assert head.config.num_heads == complete.config.num_heads == 3
    assert head.note == "config.json names 2 heads; the 3 of the file are read"
    assert complete.note == ""


ZEROS = np.zeros((16, 16), np.float32)
REFUSED = {
    "more heads than the file": (
        lambda p: official(p, config={"medusa_num_heads": 5}),
        "number of Medusa heads is 5; the file holds 3 heads",
    ),
    "fewer heads than the file": (
        lambda p: vllm(p, num_heads=2),
        "number of Medusa heads is 2; the file holds 3",
    ),
    "no number of heads": (
        lambda p: official(p, config={"medusa_num_heads": None}),
        "says nowhere how many heads",
    ),
    "absent biases": (
        lambda p: vllm(p, tensors={f"blocks.{k}.layers.0.bias": None for k in range(3)}),
        "medusa_fc_bias is true and the file holds none",
    ),
    "biases without their flag": (lambda p: vllm(p, medusa_fc_bias=None), "which vLLM would drop"),
    "a scale": (lambda p: vllm(p, logit_scale=0.5), "logit_scale is 0.5; only 1"),
    "no map": (lambda p: vllm(p, truncated_vocab_size=5), "there is no token_map"),
    "a map of everything": (
        lambda p: vllm(p, tensors={"token_map": np.arange(13)}),
        "which vLLM would ignore",
    ),
    "a map of other tokens": (
        lambda p: vllm(p, truncated_vocab_size=2, tensors={"token_map": np.array([4, 13])}),
        "not a list of different target ids",
    ),
    "a model of its own": (
        lambda p: vllm(p, tensors={"model.embed_tokens.weight": ZEROS}),
        r"trained together \(Medusa-2\)",
    ),
    "two numbers of heads": (
        lambda p: vllm(p, num_attention_heads=4),
        "num_heads is 3 and num_attention_heads is 4; they must agree",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradicting_heads_are_refused(tmp_path: Path, name: str) -> None:
    write, message = REFUSED[name]
    refused(read, write(tmp_path / "heads"), message)


def test_the_target_is_needed_because_no_file_has_its_depth(tmp_path: Path) -> None:
    path = official(tmp_path / "heads")
    with pytest.raises(CheckpointError, match="does not say how many layers its target has"):
        conversion.read_head(path)
    assert "give the target as well" in conversion.describe(path).note
    conversion.convert(path, tmp_path / "native", "jax", TARGET)
    deeper = dataclasses.replace(TARGET, layers=tiny.layers(3))
    with pytest.raises(CheckpointError, match="a target of 2 layers but the target has 3"):
        conversion.read_head(tmp_path / "native", deeper)
    assert conversion.read_head(tmp_path / "native").config.num_target_layers == 2
    refused(conversion.read_target, path, "a Medusa head, not a target|not a target")
