"""Files and directories that are not what they claim to be, and writes that leave nothing behind."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from checkpoints import (
    TARGET,
    Head,
    write_llama,
)

from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError


def broken_files(directory: Path) -> dict[str, Any]:
    weights = directory / "model.safetensors"

    def shard(**index: Any) -> None:
        weights.rename(directory / "one.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    def names() -> list[str]:
        from safetensors import safe_open

        with safe_open(directory / "one.safetensors", "np") as file:
            return list(file.keys())

    def in_one(**more: str) -> None:
        shard()
        index = {"weight_map": dict.fromkeys(names(), "one.safetensors") | more}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    def pickled(value: Any) -> None:
        import torch

        weights.unlink()
        torch.save(value, directory / "pytorch_model.bin")

    def damaged_pickle() -> None:
        weights.unlink()
        (directory / "pytorch_model.bin").write_bytes(b"PK\x03\x04 not a checkpoint")

    return {
        "no weights": (weights.unlink, "not a checkpoint: it holds no weights"),
        "stray name": (lambda: weights.rename(directory / "weights.safetensors"), "holds weights.safetensors but"),
        "truncated": (lambda: weights.write_bytes(weights.read_bytes()[:-8]), "truncated or damaged"),
        "empty": (lambda: weights.write_bytes(b""), "truncated or damaged"),
        "no config": ((directory / "config.json").unlink, "has no config.json"),
        "config no JSON": (lambda: (directory / "config.json").write_text("{"), "is not valid JSON"),
        "config a list": (lambda: (directory / "config.json").write_text("[]"), "holds a JSON list"),
        "no weight map": (lambda: shard(metadata={}), "has no weight_map"),
        "missing shard": (lambda: in_one(more="two.safetensors"), r"two\.safetensors is missing"),
        "shard without its tensor": (lambda: in_one(more="one.safetensors"), "does not hold more"),
        "shard elsewhere": (lambda: in_one(more="../two.safetensors"), "without directories"),
        "damaged pickle": (damaged_pickle, "truncated, damaged or no file of plain tensors"),
        "pickled list": (lambda: pickled([1]), "expected a dictionary of tensors"),
        "pickled number": (lambda: pickled({"a": 1}), "a is a int; expected a tensor"),
        "pickled code": (lambda: pickled({"a": Path()}), "no file of plain tensors"),
    }


@pytest.mark.parametrize("name", list(broken_files(Path())))
def test_a_damaged_directory_is_refused(tmp_path: Path, name: str) -> None:
    directory = write_llama(tmp_path / "target")
    damage, message = broken_files(directory)[name]
    damage()
    with pytest.raises(CheckpointError, match=message) as refusal:
        conversion.read_target(directory)
    assert "\n" not in str(refusal.value)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    directory = write_llama(tmp_path / "target")
    data = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    (directory / "b.safetensors").write_bytes(data)
    from safetensors import safe_open

    with safe_open(directory / "a.safetensors", "np") as file:
        weight_map = dict.fromkeys(file.keys(), "a.safetensors")
    weight_map["more"] = "b.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="twice"):
        conversion.read_target(directory)


@pytest.mark.parametrize("read", [conversion.read_target, conversion.read_head, conversion.describe])
def test_a_place_that_is_no_directory_is_refused(tmp_path: Path, read: Any) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is a file"):
        read(tmp_path / "file")


def test_a_pickle_without_torch_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_llama(tmp_path / "target")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=re.escape("pip install 'eagle3-jax[convert]'")):
        conversion.read_target(directory)


@pytest.mark.parametrize("to", ["jax", "vllm"])
def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    source = write_llama(tmp_path / "target")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for module in ("targets", "native"):
        monkeypatch.setattr(f"conversion.{module}.copy_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        conversion.convert(source, tmp_path / "out", to)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("to", ["jax", "eagle", "sglang", "vllm"])
def test_an_existing_directory_is_not_written_to(tmp_path: Path, to: str) -> None:
    head = Head().write(tmp_path / "head")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        conversion.convert(head, tmp_path / "out", to, TARGET)
    assert not list((tmp_path / "out").iterdir())


def test_tokenizer_files_travel(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "target")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    for to in ("jax", "vllm"):
        conversion.convert(source, tmp_path / to, to)
        assert (tmp_path / to / "tokenizer.json").read_text() == "{}"
        assert (tmp_path / to / "chat_template.jinja").exists()


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'gguf' is not known; use one of jax, .*eagle, sglang"):
        conversion.convert(write_llama(tmp_path / "target"), tmp_path / "out", "gguf")
