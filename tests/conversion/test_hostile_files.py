"""Damaged or hostile files: one line names the fault soon, and nothing is executed or written.

One table for each parser. ``test_fuzz_files.py`` mutates the same files at random.
"""

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

import eagle3_jax as e3
from eagle3_jax import conversion
from eagle3_jax.cli import run
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.conversion.files import TOKENIZER_FILES
from eagle3_jax.conversion.tensors import read_file, read_tensors
from eagle3_jax.files.sources import locate

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a head, in the Hugging Face layout and in the native one."""
    folder = tmp_path_factory.mktemp("sound")
    conversion.convert(write_llama(folder / "target"), folder / "native-target", "jax")
    conversion.convert(Head().write(folder / "head"), folder / "native-head", "jax", TARGET)
    return folder


@pytest.fixture
def target(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound / "target", tmp_path / "target"))


def read_head(directory: Path) -> Any:
    return conversion.read_head(directory, TARGET)


# ------------------------------------------------------------------------------------------------ fields of config.json


NAN = float("nan")
TARGET_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 10**9}, "the file holds 8 layers"),
    ({"num_hidden_layers": 10**30}, "num_hidden_layers is 10000000"),
    ({"num_attention_heads": -4}, "num_attention_heads is -4"),
    ({"hidden_size": 10**12}, "hidden_size is 1000000000000; expected"),
    ({"hidden_size": 10**9}, "has shape"),
    ({"vocab_size": True}, "vocab_size is True; expected a whole number"),
    ({"rms_norm_eps": 0.0}, "norm_eps is 0.0; expected"),
    ({"rope_theta": NAN}, "rope_theta is nan; expected a finite number"),
    ({"rope_theta": 1e-30}, "theta is 1e-30; expected"),
    ({"rope_theta": 10**400}, "expected a finite number"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": -16}},
        "original_max_positions is -16",
    ),
    ({"eos_token_id": 61}, "eos_token_id is 61; expected token ids from 0 to 60"),
    ({"architectures": 5}, "architectures is 5; expected a list of texts"),
]


@pytest.mark.parametrize(("values", "says"), TARGET_FIELDS, ids=lambda value: str(value)[:50])
def test_a_field_of_a_target_is_refused(target: Path, values: dict[str, Any], says: str) -> None:
    edit_config(target, **values)
    refused(conversion.read_target, target, says)


# ------------------------------------------------------------------------------------------------ files


def text(name: str, content: str | bytes) -> Damage:
    return lambda d: (d / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def entry(**values: Any) -> Damage:
    """Another entry of ``lm_head.weight`` in the header of model.safetensors."""

    def apply(d: Path) -> None:
        raw = (d / "model.safetensors").read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + size])
        packed = json.dumps({**header, "lm_head.weight": {**header["lm_head.weight"], **values}}).encode()
        (d / "model.safetensors").write_bytes(struct.pack("<Q", len(packed)) + packed + raw[8 + size :])

    return apply


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


def index(shard: Any, **more: Any) -> Damage:
    """Only an index, with every tensor in one place; ``...`` for the file that has them."""

    def apply(d: Path) -> None:
        names = load_file(d / "model.safetensors")
        (d / "model.safetensors").rename(d / "one.safetensors")
        weight_map = dict.fromkeys(names, "one.safetensors" if shard is ... else shard) | more
        (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return apply


def loop(path: Path) -> None:
    path.symlink_to(path)


NO_FILE = "holds no weights|holds model.safetensors"
SAFETENSORS: dict[str, Damage] = {
    "nothing": start(0),
    "a header longer than the file": length(10**9),
    "a header 200,000 deep": text("model.safetensors", struct.pack("<Q", 1_000_000) + b"[" * 1_000_000),
    "a shape beyond counting": entry(shape=[2**62, 2**62]),
    "offsets that overlap": entry(data_offsets=[4, 61 * 32 * 4 + 4]),
    "offsets beyond the end": entry(data_offsets=[10**12, 10**12 + 61 * 32 * 4]),
}
FILES: dict[str, tuple[Damage, str]] = {
    # config.json
    "no config.json": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "empty": (text("config.json", ""), "not valid JSON"),
    "nested 200,000 deep": (text("config.json", '{"a":' * 200_000 + "1" + "}" * 200_000), "not valid JSON"),
    "a number of 10,000 digits": (text("config.json", '{"vocab_size": 1' + "0" * 10_000 + "}"), "not valid JSON"),
    "a pipe": (instead("config.json", os.mkfifo), "has no config.json"),
    "a stop token outside, elsewhere": (
        text("generation_config.json", '{"eos_token_id": [2, 1000000000000]}'), "generation_config.json: eos_token_id",
    ),
    # model.safetensors
    **{name: (damage, "truncated or damaged") for name, damage in SAFETENSORS.items()},
    "whole numbers": (lambda d: edit_tensors(d, lm_head__weight=np.zeros((61, 32), np.int32)), "stored as int32"),
    "a name that a terminal obeys": (
        lambda d: edit_tensors(d, **{"\x1b[2Jx": np.zeros(1, np.float32)}),
        r"unexpected \\x1b\[2Jx",
    ),
    "weights that link to themselves": (instead("model.safetensors", loop), NO_FILE),
    # the index
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "not a checkpoint: it holds no weights"),
    "a stray name": (lambda d: (d / "model.safetensors").rename(d / "weights.safetensors"), "holds weights"),
    "no weight map": (
        lambda d: (index("x")(d), text("model.safetensors.index.json", '{"metadata": {}}')(d)), "has no weight_map",
    ),
    "a shard without its tensor": (index(..., more="one.safetensors"), "does not hold more"),
    "a shard above": (index("../elsewhere.safetensors"), "without directories"),
    "a NUL in a shard's name": (index("a\0b"), "without directories"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_target_is_refused_in_one_line(target: Path, name: str) -> None:
    damage, says = FILES[name]
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
    refused(conversion.read_target, target, "two.safetensors holds lm_head.weight, which .* lists in one.safetensors")


# ------------------------------------------------------------------------------------------------ native checkpoints


def mixer(config: dict[str, Any]) -> dict[str, Any]:
    return config["layers"][0]["mixer"]


NATIVE = {
    "layers": (lambda c: c.update(layers=c["layers"][:7]), "num_layers is 7; the file holds 8 layers"),
    "a layer of text": (lambda c: c.update(layers=["one"]), r"layers\[0\] is 'one'; expected an object"),
    "fraction": (lambda c: c.update(width=32.0), r"width is 32.0; expected int"),
    "another kind": (lambda c: mixer(c).update(kind="intuition"), "mixer is of kind 'intuition'"),
    "rope of texts": (lambda c: mixer(c).update(rope={"theta": "1"}), "missing or unknown"),
}
DESCRIPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a stop token outside": ({"stop_tokens": [61]}, "expected token ids from 0 to 60"),
    "another kind": ({"kind": "cake"}, "kind is 'cake'; expected one of target, "),
    "the format of version 0.1": ({"format": 2}, "format is 2; .* format 3: convert the original checkpoint again$"),
}


@pytest.mark.parametrize("name", [*NATIVE, *DESCRIPTIONS])
def test_a_damaged_native_target_is_refused_in_one_line(sound: Path, tmp_path: Path, name: str) -> None:
    directory = Path(shutil.copytree(sound / "native-target", tmp_path / "target"))
    path = directory / "eagle3_jax.json"
    values = json.loads(path.read_text())
    if name in NATIVE:
        NATIVE[name][0](values["config"])
    else:
        values |= DESCRIPTIONS[name][0]
    path.write_text(json.dumps(values))
    refused(conversion.read_target, directory, (NATIVE.get(name) or DESCRIPTIONS[name])[1])


def test_a_native_head_is_read_strictly(sound: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sound / "native-head", tmp_path / "head"))
    path = directory / "eagle3_jax.json"
    values = json.loads(path.read_text())
    for changes, says in (
        ({"config": {key: value for key, value in values["config"].items() if key != "norm_output"}}, "norm_output"),
        ({"has_embedding": True}, "incomplete"),
        ({"config": {**values["config"], "draft_vocab_size": 41}}, "draft_to_target is int32.40.; expected"),
        ({"config": {**values["config"], "vocab_size": 99}}, "vocabulary of 99 but the target has 61"),
    ):
        path.write_text(json.dumps(values | changes))
        refused(read_head, directory, says)
    path.write_text(json.dumps(values))
    shutil.rmtree(directory / "params")
    refused(read_head, directory, "has no params/ next to eagle3_jax.json; it is incomplete")


@pytest.mark.parametrize("what", ["target", "head"])
def test_native_arrays_that_are_damaged_or_gone_are_refused(sound: Path, tmp_path: Path, what: str) -> None:
    refusals = 0
    for number, path in enumerate(sorted((sound / f"native-{what}" / "params").rglob("*"))):
        if not path.is_file():
            continue
        for size in {0, path.stat().st_size // 2}:
            directory = Path(shutil.copytree(sound / f"native-{what}", tmp_path / f"{number}-{size}"))
            os.truncate(directory / path.relative_to(sound / f"native-{what}"), size)
            try:
                (conversion.read_target if what == "target" else read_head)(directory)
            except CheckpointError as error:  # some files are not needed, such as those about sharding
                assert str(error).isprintable()  # noqa: PT017
                refusals += 1
    assert refusals


# ------------------------------------------------------------------------------------------------ tokenizers, sources


# The Rust code behind tokenizers cuts a prefix of four letters from a token of one, and panics.
PANICS = """{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
    "continuing_subword_prefix": "####", "dropout": null, "unk_token": null, "end_of_word_suffix": null}}"""


@pytest.mark.parametrize(
    "content",
    ["{}", '{"version": "\\u001b[2J"}', b"\xff\xfe", PANICS],
    ids=lambda content: str(content[:12]),
)
def test_a_tokenizer_that_is_none_is_refused_when_it_is_loaded(content: str | bytes, tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    (target / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer \(.*; fetch the file again") as refusal:
        e3.load_target(target)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("source", ["", "a" * 5000, "a\0b", "/nowhere", "./nowhere", "~/x"])
def test_a_source_that_is_nowhere_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="directory") as refusal:
        locate(source, "target")
    assert len(str(refusal.value)) < 400


@pytest.mark.torch
def test_all_that_is_read_of_a_checkpoint_is_fetched_and_no_more(tmp_path: Path, monkeypatch) -> None:
    """The hub's own filter decides; the chat template is a file of its own in what newer transformers write."""
    import huggingface_hub as hub
    from huggingface_hub.utils import filter_repo_objects

    weights = ("model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
    read = {*TOKENIZER_FILES, *weights, "config.json", "generation_config.json", "model.safetensors.index.json"}
    other = {"README.md", "optimizer.pt", "model.gguf", "consolidated.00.pth", "tf_model.h5", "original/params.pth"}
    fetched: set[str] = set()

    def download(name: str, *, allow_patterns: list[str]) -> str:
        assert name == "org/name"
        fetched.update(filter_repo_objects(read | other, allow_patterns=allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert locate("org/name", "target") == tmp_path
    assert "chat_template.jinja" in read and fetched == read


class Runs:
    """A pickle that runs a command when it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return (os.system, (self.command,))


@pytest.mark.torch
def test_a_pickle_is_never_run_and_asks_for_no_memory(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "pytorch_model.bin"
    witness = tmp_path / "witness"
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
