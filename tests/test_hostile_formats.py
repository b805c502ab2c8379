"""Native checkpoints, tokenizers, sources and pickles that were damaged, or made to do harm."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET, Head, refused, write_llama

import eagle3_jax as e3
from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.conversion.tensors import read_file, read_tensors
from eagle3_jax.load import read_tokenizer
from eagle3_jax.sources import locate


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    conversion.convert(write_llama(folder / "llama"), folder / "target", "jax")
    conversion.convert(Head().write(folder / "source"), folder / "head", "jax", TARGET)
    return folder


NATIVE = {
    "layers": (lambda c: c.update(layers=c["layers"][:7]), "num_layers is 7; the file holds 8 layers"),
    "no layers": (lambda c: c.update(layers=[]), "num_layers is 0"),
    "layers of text": (lambda c: c.update(layers="eight"), "layers is 'eight'"),
    "a layer of text": (lambda c: c.update(layers=["one"]), r"layers\[0\] is 'one'; expected an object"),
    "text": (lambda c: c.update(width="32"), "width is '32'; expected int"),
    "flag": (lambda c: mixer(c).update(num_heads=True), "num_heads is True; expected int"),
    "fraction": (lambda c: c.update(width=32.0), r"width is 32.0; expected int"),
    "NaN": (lambda c: c.update(norm_eps=float("nan")), "norm_eps is nan"),
    "number for a flag": (lambda c: mixer(c).update(qk_norm=1), "qk_norm is 1; expected bool"),
    "another kind": (lambda c: mixer(c).update(kind="intuition"), "mixer is of kind 'intuition'"),
    "a list for a kind": (lambda c: mixer(c).update(kind=[]), r"mixer is of kind \[\]"),
    "no kind": (lambda c: mixer(c).pop("kind"), "mixer is of kind None"),
    "rope of texts": (lambda c: mixer(c).update(rope={"theta": "1"}), "missing or unknown"),
    "rope type": (lambda c: mixer(c).update(rope="default"), "rope is 'default'; expected an object"),
}


def mixer(config: dict[str, Any]) -> dict[str, Any]:
    return config["layers"][0]["mixer"]


@pytest.mark.parametrize("name", NATIVE)
def test_a_damaged_native_target_is_refused_in_one_line(native: Path, tmp_path: Path, name: str) -> None:
    change, says = NATIVE[name]
    directory = Path(shutil.copytree(native / "target", tmp_path / "target"))
    values = json.loads((directory / "eagle3_jax.json").read_text())
    change(values["config"])
    (directory / "eagle3_jax.json").write_text(json.dumps(values))
    refused(conversion.read_target, directory, says)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stop_tokens": [61]}, "expected token ids from 0 to 60"),
        ({"stop_tokens": ["2"]}, "expected token ids"),
        ({"stop_tokens": 2}, "expected a list"),
        ({"kind": ["target"]}, "holds a"),
        ({"format": "2"}, "format is '2'"),
    ],
    ids=str,
)
def test_a_damaged_native_description_is_refused(
    native: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    directory = Path(shutil.copytree(native / "target", tmp_path / "target"))
    path = directory / "eagle3_jax.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    refused(conversion.read_target, directory, says)


@pytest.mark.parametrize("what", ["target", "head"])
def test_native_arrays_that_are_damaged_or_gone_are_refused(native: Path, tmp_path: Path, what: str) -> None:
    for number, path in enumerate(sorted((native / what / "params").rglob("*"))):
        if not path.is_file():
            continue
        for size in {0, path.stat().st_size // 2}:
            directory = Path(shutil.copytree(native / what, tmp_path / f"{number}-{size}"))
            os.truncate(directory / path.relative_to(native / what), size)
            read = conversion.read_target if what == "target" else lambda d: conversion.read_head(d, TARGET)
            try:
                read(directory)  # some files are not needed, such as those about sharding
            except CheckpointError as error:
                assert str(error).isprintable()  # noqa: PT017


# ---------------------------------------------------------------------------------------------------- the rest


# The Rust code behind tokenizers cuts a prefix of four letters from a token of one, and panics.
PANICS = """{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
    "continuing_subword_prefix": "####", "dropout": null, "unk_token": null, "end_of_word_suffix": null}}"""


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "",
        "[]",
        '{"model": {"type": "BPE"}}',
        "\x00",
        '{"version": "\\u001b[2J"}',
        '{"a":' * 2000,
        b"\xff\xfe",
        PANICS,
    ],
    ids=lambda content: str(content[:12]),
)
def test_a_tokenizer_that_is_none_is_refused_when_it_is_loaded(content: str | bytes, tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    (target / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer \(.*; fetch the file again") as refusal:
        e3.load_target(target)
    assert str(refusal.value).isprintable()


def test_a_directory_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    assert read_tokenizer(tmp_path / "tokenizer.json") is None


@pytest.mark.parametrize("source", ["", "a" * 5000, "a\0b", "/nowhere", "./nowhere", "~/x"])
def test_a_source_that_is_nowhere_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="directory") as refusal:
        locate(source, "target")
    assert len(str(refusal.value)) < 400


class Runs:
    """A pickle that runs a command when it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return (os.system, (self.command,))


def test_a_pickle_is_never_run_and_asks_for_no_memory(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path, witness = tmp_path / "pytorch_model.bin", tmp_path / "witness"
    hostile = {
        "runs a command": {"a": Runs(f"touch {witness}")},
        "4 TB of one number": {"a": torch.zeros(1).expand(10**6, 10**6)},
        "sparse": {"a": torch.zeros(4, 4).to_sparse()},
        "on no device": {"a": torch.zeros(4, device="meta")},
        "complex": {"a": torch.zeros(4, dtype=torch.complex64), 5: torch.zeros(1)},
        "a set": {"a", "b"},
        "a text": {"a": "text"},
    }
    for name, content in hostile.items():
        torch.save(content, path)
        if name == "complex":
            assert read_file(path)["a"].dtype == np.complex64  # named as such where a float is needed
            continue
        refused(lambda _: read_tensors(tmp_path), tmp_path, "pytorch_model.bin")
    torch.save({"a": torch.zeros(100)}, path)
    whole = path.read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:size])
        refused(lambda _: read_tensors(tmp_path), tmp_path, "truncated, damaged")
    assert not witness.exists()
