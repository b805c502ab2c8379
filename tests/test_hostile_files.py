"""Files that were damaged, or made to do harm: one line says what is wrong, soon; nothing is executed or written."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET, Head, edit_config, edit_tensors, refused, write_llama
from safetensors.numpy import load_file, save_file

from eagle3_jax import conversion
from eagle3_jax.cli import run

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("sound") / "target")


@pytest.fixture
def target(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "target"))


def text(name: str, content: str | bytes) -> Damage:
    return lambda d: (d / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def field(**values: Any) -> Damage:
    return lambda d: edit_config(d, **values)


def weights(change: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]) -> Damage:
    """Another header or other data of model.safetensors."""

    def apply(d: Path) -> None:
        raw = (d / "model.safetensors").read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header, data = change(json.loads(raw[8 : 8 + size]), raw[8 + size :])
        packed = json.dumps(header).encode()
        (d / "model.safetensors").write_bytes(struct.pack("<Q", len(packed)) + packed + data)

    return apply


def entry(**values: Any) -> Damage:
    return weights(lambda header, data: ({**header, "lm_head.weight": {**header["lm_head.weight"], **values}}, data))


def start(num_bytes: int) -> Damage:
    return lambda d: os.truncate(d / "model.safetensors", num_bytes)


def length(value: int) -> Damage:
    def apply(d: Path) -> None:
        with (d / "model.safetensors").open("r+b") as file:
            file.write(struct.pack("<Q", value))

    return apply


def instead(name: str, make: Callable[[Path], object]) -> Damage:
    def apply(d: Path) -> None:
        (d / name).unlink()
        make(d / name)

    return apply


def index(shard: Any) -> Damage:
    """Only an index, whose every tensor is in one place."""

    def apply(d: Path) -> None:
        names = load_file(d / "model.safetensors")
        (d / "model.safetensors").rename(d.parent / "elsewhere.safetensors")
        (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))

    return apply


def loop(path: Path) -> None:
    path.symlink_to(path)


DAMAGES: dict[str, tuple[Damage, str]] = {
    # config.json
    "empty": (text("config.json", ""), "not valid JSON"),
    "UTF-16": (lambda d: (d / "config.json").write_text("{}", encoding="utf-16"), "not valid JSON"),
    "no UTF-8": (text("config.json", b'{"a": "\xff"}'), "not valid JSON"),
    "nested 200,000 deep": (text("config.json", '{"a":' * 200_000 + "1" + "}" * 200_000), "not valid JSON"),
    "a number of 10,000 digits": (text("config.json", '{"vocab_size": 1' + "0" * 10_000 + "}"), "not valid JSON"),
    "a list": (text("config.json", "[]"), "expected an object"),
    "10 MB of nothing": (text("config.json", " " * 10_000_000), "not valid JSON"),
    "a directory for a file": (instead("config.json", Path.mkdir), "has no config.json"),
    "a link to itself": (instead("config.json", loop), "has no config.json"),
    "a pipe": (instead("config.json", os.mkfifo), "has no config.json"),
    # sizes
    "10^9 layers": (field(num_hidden_layers=10**9), "the file holds 8 layers"),
    "10^30 layers": (
        field(num_hidden_layers=10**30),
        "num_hidden_layers is 10000000",
    ),
    "10^12 heads": (
        field(num_attention_heads=10**12, num_key_value_heads=10**12, head_dim=8),
        "num_attention_heads is 10000",
    ),
    "10^12 wide": (field(hidden_size=10**12), "hidden_size is 1000000000000; expected"),
    "10^9 wide": (field(hidden_size=10**9), "has shape"),
    "10^12 words": (field(vocab_size=10**12), "vocab_size is 10000"),
    "10^9 words": (field(vocab_size=10**9), "has shape"),
    "10^12 positions": (field(max_position_embeddings=10**12), "max_position_embeddings is 1000000000000"),
    "no layers": (field(num_hidden_layers=0), "num_hidden_layers is 0; expected"),
    "heads below zero": (field(num_attention_heads=-4), "num_attention_heads is -4"),
    "half a layer": (field(num_hidden_layers=1.5), "num_hidden_layers is 1.5; expected a whole number"),
    "a flag for a size": (field(vocab_size=True), "vocab_size is True; expected a whole number"),
    "a text for a size": (field(hidden_size="32"), "hidden_size is '32'; expected a whole number"),
    "a list for a size": (field(hidden_size=[32]), "expected a whole number"),
    "an object for a size": (field(hidden_size={"a": 1}), "expected a whole number"),
    "NaN for a size": (field(hidden_size=float("nan")), "expected a whole number"),
    # numbers
    "epsilon NaN": (field(rms_norm_eps=float("nan")), "rms_norm_eps is nan; expected a finite number"),
    "epsilon infinite": (field(rms_norm_eps=float("inf")), "rms_norm_eps is inf; expected a finite number"),
    "epsilon 0": (field(rms_norm_eps=0.0), "norm_eps is 0.0; expected"),
    "epsilon below 0": (field(rms_norm_eps=-1e-5), "norm_eps is -1e-05; expected"),
    "theta NaN": (field(rope_theta=float("nan")), "rope_theta is nan; expected a finite number"),
    "theta 0": (field(rope_theta=0), "rope_theta is 0.0; expected a positive number"),
    "theta below 1": (field(rope_theta=1e-30), "theta is 1e-30; expected"),
    "theta of 400 digits": (field(rope_theta=10**400), "expected a finite number"),
    "factor NaN": (field(rope_scaling={"type": "linear", "factor": float("nan")}), "expected a finite number"),
    "factor 0": (field(rope_scaling={"type": "linear", "factor": 0}), "factor is 0"),
    "factor below 0": (field(rope_scaling={"type": "linear", "factor": -2.0}), "factor is -2"),
    "llama3 with a band upside down": (
        field(
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 16,
            }
        ),
        "expected the first not to be larger",
    ),
    "yarn of no context": (
        field(rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": -16}),
        "original_max_positions is -16",
    ),
    "a stop token outside": (field(eos_token_id=61), "eos_token_id is 61; expected token ids from 0 to 60"),
    "a stop token below 0": (field(eos_token_id=[2, -1]), "expected token ids from 0 to 60"),
    "a stop token outside, elsewhere": (
        text("generation_config.json", '{"eos_token_id": [2, 1000000000000]}'),
        "generation_config.json: eos_token_id",
    ),
    "architectures that are none": (field(architectures=5), "architectures is 5; expected a list of texts"),
    "layer types that are none": (field(layer_types=5), "layer_types is 5; expected a list of texts"),
    # model.safetensors
    "nothing": (start(0), "truncated or damaged"),
    "the length alone": (start(8), "truncated or damaged"),
    "half the header": (start(100), "truncated or damaged"),
    "all but a byte": (
        lambda d: os.truncate(p := d / "model.safetensors", p.stat().st_size - 1),
        "truncated or damaged",
    ),
    "a header of 2^63 bytes": (length(2**63), "truncated or damaged"),
    "a header longer than the file": (length(10**9), "truncated or damaged"),
    "a shorter header": (length(30), "truncated or damaged"),
    "a header 200,000 deep": (
        text("model.safetensors", struct.pack("<Q", 1_000_000) + b"[" * 1_000_000),
        "truncated or damaged",
    ),
    "an unknown type": (entry(dtype="F7"), "truncated or damaged"),
    "a negative size": (entry(shape=[-61, 32]), "truncated or damaged"),
    "a shape of another size": (entry(shape=[61, 33]), "truncated or damaged"),
    "a shape beyond counting": (entry(shape=[2**62, 2**62]), "truncated or damaged"),
    "offsets that overlap": (
        weights(
            lambda h, data: ({**h, "model.norm.weight": {**h["model.norm.weight"], "data_offsets": [0, 128]}}, data)
        ),
        "truncated or damaged",
    ),
    "offsets turned round": (entry(data_offsets=[61 * 32 * 4, 0]), "truncated or damaged"),
    "offsets beyond the end": (entry(data_offsets=[10**12, 10**12 + 61 * 32 * 4]), "truncated or damaged"),
    "whole numbers": (lambda d: edit_tensors(d, lm_head__weight=np.zeros((61, 32), np.int32)), "stored as int32"),
    "a name that a terminal obeys": (
        lambda d: edit_tensors(d, **{"\x1b[2Jx": np.zeros(1, np.float32)}),
        r"unexpected \\x1b\[2Jx",
    ),
    "a directory for weights": (instead("model.safetensors", Path.mkdir), "holds no weights|holds model.safetensors"),
    "weights that link to themselves": (instead("model.safetensors", loop), "holds no weights|holds model.safetensors"),
    # the index
    "a shard above": (index("../elsewhere.safetensors"), "without directories"),
    "a shard by its whole path": (index("/etc/passwd"), "without directories"),
    "the directory above as a shard": (index(".."), "is missing"),
    "no name for a shard": (index(""), "is missing"),
    "a number for a shard": (index(7), "is missing"),
    "a NUL in a shard's name": (index("a\0b"), "without directories"),
    "a shard's name of 100,000 letters": (index("a" * 100_000), "without directories"),
    "a list for an index": (
        lambda d: (index("x")(d), text("model.safetensors.index.json", '{"weight_map": ["a"]}')(d)),
        "has no weight_map",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_target_is_refused_in_one_line(target: Path, name: str) -> None:
    damage, says = DAMAGES[name]
    damage(target)
    refused(conversion.read_target, target, says)


def test_a_description_of_hostile_text_is_printable_and_json(target: Path, capsys: Any) -> None:
    edit_config(target, remark="\x1b[2J\ud800", limit=float("inf"))
    assert run(["inspect", str(target)]) == 0
    assert "\x1b[2J" not in capsys.readouterr().out
    assert run(["inspect", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["config"]["limit"] is None


def test_a_byte_order_mark_is_read(target: Path) -> None:
    (target / "config.json").write_bytes(b"\xef\xbb\xbf" + (target / "config.json").read_bytes())
    assert conversion.read_target(target).config == TARGET.__class__(**{**vars(TARGET), "max_positions": 64})


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_may_not_be_read_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def denied(path: Path) -> bool:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return path.exists()

    monkeypatch.setattr(Path, "is_file", denied)
    refused(conversion.read_target, target, "cannot be read .Permission denied")


def test_tensors_in_two_shards_and_a_shard_that_is_another_file_are_refused(target: Path) -> None:
    tensors = load_file(target / "model.safetensors")
    index("one.safetensors")(target)
    save_file(tensors, target / "one.safetensors")
    conversion.read_target(target)
    save_file({"lm_head.weight": tensors["lm_head.weight"]}, target / "two.safetensors")
    path = target / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {**json.loads(path.read_text())["weight_map"], "x": "two.safetensors"}}))
    refused(conversion.read_target, target, "holds the tensor lm_head.weight twice")


# ---------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"draft_vocab_size": 10**12}, "draft_vocab_size is 1000000000000; expected 1 to"),
        ({"draft_vocab_size": "40"}, "expected a whole number"),
        ({"target_hidden_size": 10**12}, "features of width 1000000000000"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 10**12]}, "reads auxiliary layer 1000000000000"),
        ({"eagle_aux_hidden_state_layer_ids": [[1]]}, "expected a list of layer numbers"),
        ({"eagle_config": 5}, "eagle_config is 5; expected an object"),
        ({"transformer_layer_config": [1]}, "expected an object"),
        ({"norm_output": "yes"}, "expected true or false"),
        ({"rms_norm_eps": float("nan")}, "expected a finite number"),
        ({"num_aux_hidden_states": 10**12}, "they must agree"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is"),
    ],
    ids=str,
)
def test_a_damaged_head_is_refused_in_one_line(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    head = Head().write(tmp_path / "head")
    edit_config(head, **values)
    refused(lambda path: conversion.read_head(path, TARGET), head, says)


@pytest.mark.parametrize("value", [2**62, -(2**62), 61, -1])
def test_a_map_that_leads_outside_is_refused(tmp_path: Path, value: int) -> None:
    head = Head().write(tmp_path / "head")
    table = Head().tensors()["d2t"].copy()
    table[3] = value
    edit_tensors(head, d2t=table)
    refused(lambda path: conversion.read_head(path, TARGET), head, "d2t|t2d")
