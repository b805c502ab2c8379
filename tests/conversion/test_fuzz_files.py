"""Every file format that is read, mutated: it loads and is finite, or one line says why not; never anything else.

A few dozen examples of each format here, the same in every run. For more, and others each time:
``FUZZ_EXAMPLES=5000 pytest tests/conversion/test_fuzz_files.py``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET, Head, write_llama
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from eagle3_jax import conversion
from eagle3_jax.cli import run
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._planning import read_head, read_target
from eagle3_jax.conversion import CheckpointError, draft_vocab
from eagle3_jax.conversion.files import read_tokenizer
from eagle3_jax.load import bundled
from eagle3_jax.models.rope import inverse_frequencies
from eagle3_jax.training.texts import Text, Texts

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))
fuzz = settings(
    max_examples=EXAMPLES,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    deadline=None,  # the time of each is judged below
    database=None,
    suppress_health_check=list(HealthCheck),
)

EXTREMES = [0, -1, 1, 2, 10**9, 10**12, 10**400, -(2**63), 1e-300, 1e300, 0.5, -0.0, float("nan"), float("inf")]
NAMES = ["llama", "qwen3", "yarn", "llama3", "linear", "full_attention"]
WORDS = [*NAMES, "", "\x1b[2J", "\ud800", "\0", "../x", "x" * 300]
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.sampled_from(EXTREMES) | st.sampled_from(WORDS) | st.text(max_size=5)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def containers(value: Any) -> Iterator[Any]:
    """Every object and list inside a JSON value that holds something."""
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


@st.composite
def damaged_json(draw: st.DrawFn, value: Any, hints: tuple[str, ...] = ()) -> bytes:
    """The text of a JSON value after a few edits: parts dropped, replaced, added, doubled; bytes cut or flipped."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(0, 3))):
        found = list(containers(value))
        if not found:
            break
        chosen = draw(st.sampled_from(found))
        key = draw(st.sampled_from([*chosen] if isinstance(chosen, dict) else range(len(chosen))))
        match draw(st.sampled_from(["drop", "replace", "replace", "add", "swap"])):
            case "drop":
                del chosen[key]
            case "replace":
                chosen[key] = draw(VALUES)
            case "add" if isinstance(chosen, dict):
                chosen[draw(st.sampled_from(hints) if hints else st.text(max_size=5))] = draw(VALUES)
            case _:
                other = draw(st.sampled_from([*chosen] if isinstance(chosen, dict) else range(len(chosen))))
                chosen[key], chosen[other] = chosen[other], chosen[key]
    text = json.dumps(value, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0 and isinstance(value, dict) and value:
        name = json.dumps(next(iter(value)))
        text = text[:1] + f"{name}: {json.dumps(draw(VALUES))}, ".encode() + text[1:]
    return draw(damaged_bytes(text)) if draw(st.integers(0, 4)) == 0 else text


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """The same with a few bytes flipped, or cut short, or with something before it."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, 3))):
        if changed:
            changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    if draw(st.booleans()):
        changed = changed[: draw(st.integers(0, len(changed)))]
    return draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\xff\xfe", b" "])) + bytes(changed)


def judge(read: Callable[[], Any], kinds: type[Exception] | tuple[type[Exception], ...] = CheckpointError) -> Any:
    """What was read; ``None`` when it was refused as it should be."""
    begun = time.process_time()
    try:
        return read()
    except kinds as error:
        message = str(error)
        assert message.isprintable() and 10 < len(message) < 1000, message
        return None
    finally:
        assert time.process_time() - begun < 2


def assert_finite(config: Any) -> bool:
    """No number of a decoder's configuration can make its arithmetic NaN."""
    frequencies, scale = inverse_frequencies(config.layers[0].mixer.rope, config.layers[0].mixer.head_dim)
    assert np.isfinite(frequencies).all() and (frequencies >= 0).all() and np.isfinite(scale) and scale > 0
    assert np.float32(config.norm_eps) > 0 and np.isfinite(config.norm_eps)
    assert 0 < config.max_positions <= 10**9
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a head in both layouts, and a target in shards."""
    folder = tmp_path_factory.mktemp("fuzz")
    sharded = write_llama(folder / "sharded")
    weights = (sharded / "model.safetensors").rename(sharded / "a.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(load_file(weights), weights.name)}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    conversion.convert(write_llama(folder / "target"), folder / "native-target", "jax")
    conversion.convert(Head().write(folder / "head"), folder / "native-head", "jax", TARGET)
    return folder


@contextlib.contextmanager
def holding(path: Path, content: bytes) -> Iterator[Path]:
    """A file of the folder with other content for a while; yields its directory."""
    sound = path.read_bytes() if path.exists() else None
    try:
        path.write_bytes(content)
        yield path.parent
    finally:
        path.unlink() if sound is None else path.write_bytes(sound)


def read_head_of(directory: Path, target: Any = TARGET) -> Any:
    return conversion.read_head(directory, target)


ROPES = (
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "mscale": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"type": "linear", "factor": 2.0},
    None,
)  # fmt: skip


def target_values(data: st.DataObject, values: dict[str, Any]) -> dict[str, Any]:
    return values | {"rope_scaling": data.draw(st.sampled_from(ROPES)), "rope_theta": 10000.0}


def head_values(data: st.DataObject, values: dict[str, Any]) -> dict[str, Any]:
    if data.draw(st.booleans()):
        values = {"speculators_model_type": "eagle3", "draft_vocab_size": 40, "transformer_layer_config": values}
    return values | {"eagle_config": {"use_aux_hidden_state": True, "layer_ids": [2, 4, 5]}}


def as_they_are(data: st.DataObject, values: dict[str, Any]) -> dict[str, Any]:
    del data
    return values


# For each file: what is put into it before it is damaged, and names of fields that are worth adding.
DESCRIPTIONS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[str, ...]]] = {
    "target/config.json": (
        target_values,
        ("head_dim", "attention_bias", "layer_types", "rope_parameters", "tie_word_embeddings", "quantization_config"),
    ),
    "head/config.json": (
        head_values,
        ("eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "target_hidden_size", "norm_output", "fc_norm"),
    ),
    "native-target/eagle3_jax.json": (as_they_are, ()),
    "native-head/eagle3_jax.json": (as_they_are, ()),
    "target/generation_config.json": (lambda *_: {"bos_token_id": 1, "eos_token_id": [2, 3]}, ("eos_token_id",)),
    "sharded/model.safetensors.index.json": (as_they_are, ("weight_map",)),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
@fuzz
@given(data=st.data())
def test_json(folder: Path, name: str, data: st.DataObject) -> None:
    path = folder / name
    prepare, hints = DESCRIPTIONS[name]
    values = prepare(data, json.loads(path.read_bytes()) if path.exists() else {})
    with holding(path, data.draw(damaged_json(values, hints))) as directory:
        if "head" in name:
            for target in (TARGET, None):
                found = judge(lambda target=target: read_head_of(directory, target))
                assert found is None or assert_finite(found.config)
        else:
            found = judge(lambda: conversion.read_target(directory))
            if found is not None:
                assert assert_finite(found.config)
                assert all(0 <= token < found.config.vocab_size for token in found.stop_tokens)
        judge(lambda: conversion.describe(directory))
        if name == "head/config.json":
            target_of_plan = read_target("llama-3.1-8b")
            judge(lambda: read_head(str(directory), target_of_plan, bundled=False), (Misuse, ValueError))


@fuzz
@given(data=st.data())
def test_safetensors(folder: Path, data: st.DataObject) -> None:
    path = folder / "head" / "model.safetensors"
    sound = path.read_bytes()
    (size,) = struct.unpack("<Q", sound[:8])
    if data.draw(st.booleans()):
        changed = data.draw(damaged_json(json.loads(sound[8 : 8 + size])))
        length = len(changed) if data.draw(st.booleans()) else data.draw(st.integers(0, 2**64 - 1))
        content = struct.pack("<Q", length) + changed + sound[8 + size :]
    else:
        content = data.draw(damaged_bytes(sound))
    with holding(path, content) as directory:
        judge(lambda: read_head_of(directory))


@fuzz
@given(data=st.data())
def test_draft_vocabularies(data: st.DataObject) -> None:
    tensors = {name: tensor.copy() for name, tensor in Head().tensors().items() if name in ("d2t", "t2d")}
    for name in data.draw(st.lists(st.sampled_from(["d2t", "t2d"]), max_size=3)):
        if name not in tensors:
            continue
        table = tensors[name]
        match data.draw(st.sampled_from(["drop", "entry", "type", "shape"])):
            case "drop":
                del tensors[name]
            case "entry" if table.size:
                whole = st.sampled_from([-(2**63), -1, 0, 1, 60, 61, 2**63 - 1])
                table.flat[data.draw(st.integers(0, table.size - 1))] = np.array(data.draw(whole)).astype(table.dtype)
            case "type":
                kinds = st.sampled_from([np.int8, np.uint64, np.float32, np.bool_, np.int32])
                tensors[name] = table.astype(data.draw(kinds))
            case _:
                tensors[name] = data.draw(st.sampled_from([table[:-1], table[None], table[:0], np.append(table, 0)]))
    ids = judge(lambda: draft_vocab.read(tensors, vocab_size=61, draft_vocab_size=40, where="the head"))
    if ids is not None:
        assert len(set(ids.tolist())) == 40 and ids.min() >= 0 and ids.max() < 61


@fuzz
@given(data=st.data())
def test_tokenizers(folder: Path, data: st.DataObject) -> None:
    whole = json.loads((bundled("target") / "tokenizer.json").read_text())
    model = whole["model"] | {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    path = folder / "tokenizer.json"
    path.write_bytes(data.draw(damaged_json(whole | {"model": model})))
    found = judge(lambda: read_tokenizer(path), ValueError)
    if found is not None:
        assert found.get_vocab_size() >= 0


@fuzz
@given(data=st.data())
def test_texts(folder: Path, data: st.DataObject) -> None:
    path = folder / "texts.npz"
    Texts.of(Text(list(range(length)), [True] * length, length) for length in (8, 4, 6)).save(path)
    path.write_bytes(data.draw(damaged_bytes(path.read_bytes())))
    texts = judge(lambda: Texts.load(path), ValueError)
    if texts is not None:
        assert texts.length.sum() == len(texts.tokens) == len(texts.learn)


@settings(fuzz, max_examples=max(EXAMPLES // 4, 10))
@given(data=st.data())
def test_commands_on_damaged_directories(folder: Path, data: st.DataObject) -> None:
    """Every command ends with 0, 1 or 2, and one line on the standard error."""
    path = folder / data.draw(st.sampled_from(["target", "head"])) / "config.json"
    with holding(path, data.draw(damaged_json(json.loads(path.read_bytes())))) as directory:
        for command in (["inspect", str(directory), "--json"], ["plan", "memory", "--target", str(directory)]):
            assert run(command) in (0, 1, 2)
