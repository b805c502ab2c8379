"""Native checkpoints: read strictly, and those of version 0.1 as what they were."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET, Head, edit_config, same_params, write_llama

from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.conversion.families import FAMILIES
from eagle3_jax.models.config import GatedMLP, GroupedQuery, uniform

OLD = Path(__file__).parent / "golden" / "native-2"
# What version 0.1 converted, which the random generators below write again.
OLD_TARGET = dataclasses.replace(
    TARGET,
    vocab_size=29,
    width=16,
    layers=uniform(2, GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=6), GatedMLP(width=12)),
)
OLD_HEAD = Head(
    width=16, target_width=16, vocab=29, draft_vocab=20, head_dim=6, inner=12, layers=2, bias=True, aux=(0, 1, 2)
)


def test_a_target_of_version_0_1_is_what_it_was(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source", OLD_TARGET)
    edit_config(source, head_dim=6)
    truth, old = conversion.read_target(source), conversion.read_target(OLD / "target")
    assert (old.config, old.family, old.stop_tokens) == (truth.config, FAMILIES["llama"], truth.stop_tokens)
    assert same_params(old.params, truth.params)
    conversion.convert(OLD / "target", tmp_path / "new", "jax")
    assert json.loads((tmp_path / "new" / "eagle3_jax.json").read_text())["format"] == 3
    assert same_params(conversion.read_target(tmp_path / "new").params, truth.params)
    description = conversion.describe(OLD / "target")
    assert (description.kind, description.loadable) == ("target: Llama", True)


def test_a_head_of_version_0_1_is_what_it_was(tmp_path: Path) -> None:
    truth = conversion.read_head(OLD_HEAD.write(tmp_path / "source"), OLD_TARGET)
    old = conversion.read_head(OLD / "eagle3", OLD_TARGET)
    assert old.config == truth.config
    assert same_params(old.head, truth.head)
    np.testing.assert_array_equal(old.draft_to_target, truth.draft_to_target)


OLD_DAMAGES: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"num_layers": 0}, "num_layers is 0; expected a whole number from 1"),
    "too many": ({"num_layers": 10**9}, "num_layers is 1000000000; expected a whole number from 1"),
    "others than there are": ({"num_layers": 3}, "num_layers is 3; the file holds 2 layers"),
    "text": ({"width": "16"}, "width is '16'; expected int"),
    "other heads": ({"num_kv_heads": 4}, r"has shape \[16, 48\]; config.json asks for \[16, 72\]"),
    "a field of today": ({"layers": []}, r"\['layers'\] are missing or unknown"),
    "one too few": ({"qk_norm": ...}, r"\['qk_norm'\] are missing or unknown"),
}


@pytest.mark.parametrize("name", OLD_DAMAGES)
def test_a_damaged_target_of_version_0_1_is_refused(tmp_path: Path, name: str) -> None:
    changes, says = OLD_DAMAGES[name]
    directory = Path(shutil.copytree(OLD / "target", tmp_path / "target"))
    path = directory / "eagle3_jax.json"
    values = json.loads(path.read_text())
    values["config"] = {name: value for name, value in {**values["config"], **changes}.items() if value is not ...}
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=says) as refusal:
        conversion.read_target(directory)
    assert "\n" not in str(refusal.value)


def test_a_native_checkpoint_is_read_strictly(tmp_path: Path) -> None:
    native = tmp_path / "native"
    conversion.convert(Head().write(tmp_path / "head"), native, "jax", TARGET)
    with pytest.raises(CheckpointError, match="vocabulary of 61 but the target has 99"):
        conversion.read_head(native, dataclasses.replace(TARGET, vocab_size=99))
    description = native / "eagle3_jax.json"
    values = json.loads(description.read_text())

    def rewrite(**changes: Any) -> None:
        description.write_text(json.dumps(values | changes))

    rewrite(format=99)
    with pytest.raises(CheckpointError, match="format is 99"):
        conversion.read_head(native)
    rewrite(kind="cake")
    with pytest.raises(CheckpointError, match="kind is 'cake'"):
        conversion.identify(native)
    rewrite(config={key: value for key, value in values["config"].items() if key != "norm_output"})
    with pytest.raises(CheckpointError, match="norm_output"):
        conversion.read_head(native)
    rewrite(has_embedding=True)
    with pytest.raises(CheckpointError, match="incomplete"):
        conversion.read_head(native)
    rewrite()
    for part in (native / "params").iterdir():
        if part.is_file():
            part.write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        conversion.read_head(native)
    (native / "params").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="incomplete"):
        conversion.read_head(native)
