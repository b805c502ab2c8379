"""What a directory holds: told without being able to load it, and never taken for something else."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    TARGET,
    Head,
    write_checkpoint,
    write_llama,
)

from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError


def test_a_language_model_is_no_head_but_is_described(tmp_path: Path) -> None:
    directory = write_llama(tmp_path / "other")
    with pytest.raises(CheckpointError, match="is a language model, not a draft head; give it as the target"):
        conversion.read_head(directory, TARGET)
    description = conversion.describe(directory)
    assert description.kind == "target: Llama"
    assert description.loadable


def test_a_head_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is an EAGLE-3 head, not a target"):
        conversion.read_target(Head().write(tmp_path / "head"))
    conversion.convert(tmp_path / "head", tmp_path / "native", "jax", TARGET)
    with pytest.raises(CheckpointError, match="give it as the drafter"):
        conversion.read_target(tmp_path / "native")


def test_something_else_is_no_checkpoint(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "vision", {"model_type": "vit"}, {"patches.weight": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match="neither a target nor a draft head"):
        conversion.describe(directory)


@pytest.mark.parametrize("layout", ["huggingface", "native"])
def test_a_description_counts_what_is_stored(tmp_path: Path, layout: str) -> None:
    head = Head(dtype=ml_dtypes.bfloat16)
    directory = head.write(tmp_path / "head")
    if layout == "native":
        conversion.convert(directory, tmp_path / "native", "jax", TARGET)
        directory = tmp_path / "native"
    description = conversion.describe(directory)
    floats = sum(value.size for name, value in head.tensors().items() if name not in ("d2t", "t2d"))
    assert description.kind == "draft head: EAGLE-3"
    assert description.loadable
    assert description.num_parameters == floats
    assert description.dtypes == {"bfloat16": floats}
    assert not description.has_tokenizer
    assert json.loads(json.dumps(description.to_json()))["num_tensors"] == (11 if layout == "native" else 15)
