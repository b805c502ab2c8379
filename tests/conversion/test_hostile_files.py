"""Hostile files that random edits (``test_fuzz_files.py``) do not reach are refused in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from checkpoints import TARGET, Head, edit_config, edit_tensors, refused, write_llama
from safetensors.numpy import load_file, save_file

import eagle3_jax as e3
from eagle3_jax import conversion
from eagle3_jax.cli import run
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.conversion.files import TOKENIZER_FILES
from eagle3_jax.conversion.tensors import read_file, read_tensors
from eagle3_jax.files.sources import locate

Damage = Callable[[Path], object]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "target")


def write_config(text: str) -> Damage:
    return lambda directory: (directory / "config.json").write_text(text)


def set_fields(**values: Any) -> Damage:
    return lambda directory: edit_config(directory, **values)


def set_tensors(**tensors: np.ndarray) -> Damage:
    return lambda directory: edit_tensors(directory, **tensors)


def replace_config_by_pipe(directory: Path) -> None:
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")


def write_index(directory: Path, shard: str) -> None:
    """Lists the weights in an index, and a tensor ``more`` in ``shard``."""
    weights = (directory / "model.safetensors").rename(directory / "one.safetensors")
    weight_map = dict.fromkeys(load_file(weights), weights.name) | {"more": shard}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a billion layers": (set_fields(num_hidden_layers=10**9), "the file holds 8 layers"),
    "a size above all devices": (
        set_fields(hidden_size=10**12),
        "hidden_size is 1000000000000; expected",
    ),
    "a size of other tensors": (set_fields(hidden_size=10**9), "has shape"),
    "a flag as a size": (
        set_fields(vocab_size=True),
        "vocab_size is True; expected a whole number",
    ),
    "a number that is none": (
        set_fields(rope_theta=float("nan")),
        "rope_theta is nan; expected a finite number",
    ),
    "JSON nested 200,000 deep": (
        write_config('{"a":' * 200_000 + "1" + "}" * 200_000),
        "not valid JSON",
    ),
    "a number of 10,000 digits": (
        write_config('{"vocab_size": 1' + "0" * 10_000 + "}"),
        "not valid JSON",
    ),
    "a pipe": (replace_config_by_pipe, "has no config.json"),
    "whole numbers": (set_tensors(lm_head__weight=np.zeros((61, 32), np.int32)), "stored as int32"),
    "terminal codes in a name": (
        set_tensors(**{"\x1b[2Jx": np.zeros(1, np.float32)}),
        r"unexpected \\x1b\[2Jx",
    ),
    "no weights": (
        lambda directory: (directory / "model.safetensors").unlink(),
        "not a checkpoint: it holds no weigh",
    ),
    "weights of another name": (
        lambda path: (path / "model.safetensors").rename(path / "weights.safetensors"),
        "holds weights.safetensors but neither",
    ),
    "a shard without its tensor": (
        lambda path: write_index(path, "one.safetensors"),
        "does not hold more",
    ),
    "a shard of another directory": (
        lambda path: write_index(path, "../two.safetensors"),
        "without directories",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_target_is_refused_in_one_line(target: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(target)
    refused(conversion.read_target, target, message)


def test_a_tensor_in_two_shards_is_refused(target: Path) -> None:
    tensors = load_file(target / "model.safetensors")
    save_file({"lm_head.weight": tensors["lm_head.weight"]}, target / "two.safetensors")
    write_index(target, "two.safetensors")
    refused(
        conversion.read_target,
        target,
        "two.safetensors holds lm_head.weight, which .* lists in one.safetensors",
    )


def test_a_description_of_hostile_text_is_printable_and_json(target: Path, capsys: Any) -> None:
    edit_config(target, remark="\x1b[2J\ud800", limit=float("inf"))
    assert run(["inspect", str(target)]) == 0
    assert "\x1b[2J" not in capsys.readouterr().out
    assert run(["inspect", str(target), "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["config"]["limit"] is None
    )


def test_a_byte_order_mark_is_read(target: Path) -> None:
    truth = conversion.read_target(target).config
    (target / "config.json").write_bytes(b"\xef\xbb\xbf" + (target / "config.json").read_bytes())
    assert conversion.read_target(target).config == truth


def test_a_file_without_permission_is_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_file(path: Path) -> bool:
        if path.name == "config.json":
            raise PermissionError(13, "Permission denied", str(path))
        return path.exists()

    monkeypatch.setattr(Path, "is_file", is_file)
    refused(conversion.read_target, target, "cannot be read .Permission denied")


def test_a_native_head_is_read_strictly(tmp_path: Path) -> None:
    directory = tmp_path / "native"
    conversion.convert(Head().write(tmp_path / "head"), directory, "jax", TARGET)
    path = directory / "eagle3_jax.json"
    values = json.loads(path.read_text())
    config = values["config"]
    incomplete = {key: value for key, value in config.items() if key != "norm_output"}

    def read_head(directory: Path) -> conversion.HeadCheckpoint:
        return conversion.read_head(directory, TARGET)

    for changes, message in (
        ({"config": incomplete}, "norm_output"),
        (
            {"config": {**config, "layers": [{**config["layers"][0], "mixer": {"kind": "new"}}]}},
            "mixer is of kind 'new'",
        ),
        ({"config": {**config, "draft_vocab_size": 41}}, "draft_to_target is int32.40.; expected"),
        ({"config": {**config, "vocab_size": 99}}, "vocabulary of 99 but the target has 61"),
        ({"has_embedding": True}, "incomplete"),
        ({"format": 2}, "format is 2; .* format 4: convert the original checkpoint again$"),
    ):
        path.write_text(json.dumps(values | changes))
        refused(read_head, directory, message)

    path.write_text(json.dumps(values))
    shutil.rmtree(directory / "params")
    refused(read_head, directory, "has no params/ next to eagle3_jax.json; it is incomplete")


def test_truncated_native_arrays_are_refused(tmp_path: Path) -> None:
    sound = tmp_path / "native"
    conversion.convert(Head().write(tmp_path / "head"), sound, "jax", TARGET)
    num_refusals = 0
    files = [path for path in (sound / "params").rglob("*") if path.is_file()]

    for number, path in enumerate(files):
        directory = Path(shutil.copytree(sound, tmp_path / str(number)))
        os.truncate(directory / path.relative_to(sound), path.stat().st_size // 2)
        try:
            conversion.read_head(directory, TARGET)
        except CheckpointError as error:  # Orbax does not need every file
            assert str(error).isprintable()  # noqa: PT017
            num_refusals += 1
    assert num_refusals


# The Rust code of the package tokenizers cuts a prefix of four letters from a token of one, and
# panics.
PANIC = """{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
    "continuing_subword_prefix": "####", "dropout": null, "unk_token": null,
    "end_of_word_suffix": null}}"""


def test_a_tokenizer_that_panics_is_refused(target: Path) -> None:
    (target / "tokenizer.json").write_text(PANIC)
    refused(
        e3.load_target, target, r"tokenizer\.json is not a tokenizer \(.*; fetch the file again"
    )


@pytest.mark.parametrize("source", ["", "a" * 5000, "a\0b", "/nowhere", "./nowhere", "~/x"])
def test_an_absent_source_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="directory") as refusal:
        locate(source, "target")
    assert len(str(refusal.value)) < 400


@pytest.mark.torch
def test_exactly_the_files_that_are_read_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's filter is the truth; newer versions of transformers save the template apart."""
    import huggingface_hub as hub
    from huggingface_hub.utils import filter_repo_objects

    weights = (
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "medusa_lm_head.pt",
    )
    read = {
        *TOKENIZER_FILES,
        *weights,
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    }
    unread = {
        "README.md",
        "optimizer.pt",
        "model.gguf",
        "consolidated.00.pth",
        "tf_model.h5",
        "original/params.pth",
    }

    download = Mock(return_value=str(tmp_path))
    monkeypatch.setattr(hub, "snapshot_download", download)
    assert locate("org/name", "target") == tmp_path
    assert "chat_template.jinja" in read
    (name,), options = download.call_args
    assert name == "org/name"
    assert set(filter_repo_objects(read | unread, **options)) == read


class Command(str):
    """A pickle that runs this command when it is read."""

    def __reduce__(self) -> Any:
        return (os.system, (str(self),))


@pytest.mark.torch
def test_a_pickle_is_never_run_and_allocates_no_memory(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "pytorch_model.bin"
    trace = tmp_path / "trace"
    for content in (
        {"a": Command(f"touch {trace}")},
        {"a": torch.zeros(1).expand(10**6, 10**6)},  # 4 TB of the same number
        {"a": torch.zeros(4, 4).to_sparse()},
        {"a": torch.zeros(4, device="meta")},
        {"a", "b"},
        {"a": "text"},
    ):
        torch.save(content, path)
        refused(lambda _: read_tensors(tmp_path), tmp_path, "pytorch_model.bin")
    assert not trace.exists()

    torch.save({"a": torch.zeros(4, dtype=torch.complex64), 5: torch.zeros(1)}, path)
    assert read_file(path)["a"].dtype == np.complex64  # refused later, because a float is needed
    content = path.read_bytes()
    for size in (0, 100, len(content) // 2, len(content) - 30):
        path.write_bytes(content[:size])
        refused(lambda _: read_tensors(tmp_path), tmp_path, "truncated, damaged")
