"""Mutated files of every format: each loads and is finite, or is refused in one line.

Every run has the same few dozen examples of each format. ``FUZZ_EXAMPLES=5000 pytest
tests/conversion/test_fuzz_files.py`` runs more examples, and different ones each time.
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
from eagle3_jax.cli.plan.models import read_head, read_target
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.conversion.files import read_tokenizer
from eagle3_jax.files.sources import bundled
from eagle3_jax.models.rope import inverse_frequencies
from eagle3_jax.training.texts import Text, Texts

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))
fuzz = settings(
    max_examples=EXAMPLES,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    deadline=None,  # `judge` limits the time of an example
    database=None,
    suppress_health_check=list(HealthCheck),
)

EXTREMES = [
    0,
    -1,
    1,
    2,
    10**9,
    10**12,
    10**400,
    -(2**63),
    1e-300,
    1e300,
    0.5,
    -0.0,
    float("nan"),
    float("inf"),
]
NAMES = ["llama", "qwen3", "yarn", "llama3", "linear", "full_attention"]
WORDS = [*NAMES, "", "\x1b[2J", "\ud800", "\0", "../x", "x" * 300]
SHORT_TEXTS = st.text(max_size=5)
NUMBERS = st.none() | st.booleans() | st.integers() | st.sampled_from(EXTREMES)
LEAVES = NUMBERS | st.sampled_from(WORDS) | SHORT_TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SHORT_TEXTS, inner, max_size=3),
)


def containers(value: Any) -> Iterator[Any]:
    """Yields every object and list inside a JSON value, except empty ones."""
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


@st.composite
def damaged_json(draw: st.DrawFn, value: Any, hints: tuple[str, ...] = ()) -> bytes:
    """Returns the text of a JSON value with parts dropped, replaced, added or doubled."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(0, 3))):
        candidates = list(containers(value))
        if not candidates:
            break
        chosen = draw(st.sampled_from(candidates))
        keys = st.sampled_from([*chosen] if isinstance(chosen, dict) else range(len(chosen)))
        key = draw(keys)
        match draw(st.sampled_from(["drop", "replace", "replace", "add", "swap"])):
            case "drop":
                del chosen[key]
            case "replace":
                chosen[key] = draw(VALUES)
            case "add" if isinstance(chosen, dict):
                name = draw(st.sampled_from(hints) if hints else SHORT_TEXTS)
                chosen[name] = draw(VALUES)
            case _:
                second = draw(keys)
                chosen[key], chosen[second] = chosen[second], chosen[key]

    text = json.dumps(value, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    # A name that occurs twice.
    if draw(st.integers(0, 9)) == 0 and isinstance(value, dict) and value:
        name = json.dumps(next(iter(value)))
        text = text[:1] + f"{name}: {json.dumps(draw(VALUES))}, ".encode() + text[1:]
    return draw(damaged_bytes(text)) if draw(st.integers(0, 4)) == 0 else text


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Returns the bytes with a few of them replaced, without their end, or with a prefix."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, 3))):
        if changed:
            index = draw(st.integers(0, len(changed) - 1))
            changed[index] = draw(st.integers(0, 255))
    if draw(st.booleans()):
        changed = changed[: draw(st.integers(0, len(changed)))]
    return draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\xff\xfe", b" "])) + bytes(changed)


def judge(
    read: Callable[[], Any], kinds: type[Exception] | tuple[type[Exception], ...] = CheckpointError
) -> Any:
    """Returns the result of reading; ``None`` after a refusal in one printable line.

    Both take less than 2 seconds.
    """
    start = time.process_time()
    try:
        return read()
    except kinds as error:
        message = str(error)
        assert message.isprintable() and 10 < len(message) < 1000, message
        return None
    finally:
        assert time.process_time() - start < 2


def assert_finite(config: Any) -> bool:
    """Checks that no number of a decoder's configuration can make its arithmetic NaN."""
    mixer = config.layers[0].mixer
    frequencies, scale = inverse_frequencies(mixer.rope, mixer.head_dim)
    assert ((frequencies >= 0) & (frequencies < np.inf)).all()
    assert 0 < scale < np.inf
    assert 0 < np.float32(config.norm_eps) < np.inf
    assert 0 < config.max_positions <= 10**9
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a head in both layouts, and a target in shards."""
    folder = tmp_path_factory.mktemp("fuzz")
    sharded = write_llama(folder / "sharded")
    weights = (sharded / "model.safetensors").rename(sharded / "a.safetensors")
    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(load_file(weights), weights.name),
    }
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    conversion.convert(write_llama(folder / "target"), folder / "native-target", "jax")
    conversion.convert(Head().write(folder / "head"), folder / "native-head", "jax", TARGET)
    return folder


@contextlib.contextmanager
def holding(path: Path, content: bytes) -> Iterator[Path]:
    """Replaces the content of a file for a while, and yields its directory."""
    sound = path.read_bytes() if path.exists() else None
    try:
        path.write_bytes(content)
        yield path.parent
    finally:
        path.unlink() if sound is None else path.write_bytes(sound)


ROPES = (
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
     "beta_fast": 32.0, "mscale": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"type": "linear", "factor": 2.0},
    None,
)  # fmt: skip


def target_values(data: st.DataObject, values: dict[str, Any]) -> dict[str, Any]:
    return values | {"rope_scaling": data.draw(st.sampled_from(ROPES)), "rope_theta": 10000.0}


def head_values(data: st.DataObject, values: dict[str, Any]) -> dict[str, Any]:
    if data.draw(st.booleans()):
        values = {
            "speculators_model_type": "eagle3",
            "draft_vocab_size": 40,
            "transformer_layer_config": values,
        }
    return values | {"eagle_config": {"use_aux_hidden_state": True, "layer_ids": [2, 4, 5]}}


# For each file: a function that adds fields before the damage, and names of fields to add.
DESCRIPTIONS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[str, ...]]] = {
    "target/config.json": (
        target_values,
        (
            "head_dim",
            "attention_bias",
            "layer_types",
            "rope_parameters",
            "tie_word_embeddings",
            "quantization_config",
        ),
    ),
    "head/config.json": (
        head_values,
        (
            "eagle_aux_hidden_state_layer_ids",
            "num_aux_hidden_states",
            "target_hidden_size",
            "norm_output",
            "fc_norm",
        ),
    ),
    "native-target/eagle3_jax.json": (lambda _, values: values, ()),
    "native-head/eagle3_jax.json": (lambda _, values: values, ()),
    "target/generation_config.json": (
        lambda *_: {"bos_token_id": 1, "eos_token_id": [2, 3]},
        ("eos_token_id",),
    ),
    "sharded/model.safetensors.index.json": (lambda _, values: values, ("weight_map",)),
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
                head = judge(lambda target=target: conversion.read_head(directory, target))
                assert head is None or assert_finite(head.config)
        else:
            checkpoint = judge(lambda: conversion.read_target(directory))
            if checkpoint is not None:
                assert assert_finite(checkpoint.config)
                assert all(
                    0 <= token < checkpoint.config.vocab_size for token in checkpoint.stop_tokens
                )

        judge(lambda: conversion.describe(directory))
        if name == "head/config.json":
            target_of_plan = read_target("llama-3.1-8b")
            judge(
                lambda: read_head(str(directory), target_of_plan, bundled=False),
                (Misuse, ValueError),
            )


@fuzz
@given(data=st.data())
def test_safetensors(folder: Path, data: st.DataObject) -> None:
    path = folder / "head" / "model.safetensors"
    sound = path.read_bytes()
    (size,) = struct.unpack("<Q", sound[:8])
    if data.draw(st.booleans()):
        header = json.loads(sound[8 : 8 + size])
        changed = data.draw(damaged_json(header))
        length = len(changed) if data.draw(st.booleans()) else data.draw(st.integers(0, 2**64 - 1))
        content = struct.pack("<Q", length) + changed + sound[8 + size :]
    else:
        content = data.draw(damaged_bytes(sound))

    with holding(path, content) as directory:
        judge(lambda: conversion.read_head(directory, TARGET))


@fuzz
@given(data=st.data())
def test_tokenizers(folder: Path, data: st.DataObject) -> None:
    values = json.loads((bundled("target") / "tokenizer.json").read_text())
    values["model"] |= {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    path = folder / "tokenizer.json"
    path.write_bytes(data.draw(damaged_json(values)))
    tokenizer = judge(lambda: read_tokenizer(path), ValueError)
    assert tokenizer is None or tokenizer.get_vocab_size() >= 0


@fuzz
@given(data=st.data())
def test_texts(folder: Path, data: st.DataObject) -> None:
    path = folder / "texts.npz"
    Texts.of(Text(list(range(length)), [True] * length, length) for length in (8, 4, 6)).save(path)
    path.write_bytes(data.draw(damaged_bytes(path.read_bytes())))
    texts = judge(lambda: Texts.load(path), ValueError)
    assert texts is None or texts.length.sum() == len(texts.tokens) == len(texts.learn)


@settings(fuzz, max_examples=max(EXAMPLES // 4, 10))
@given(data=st.data())
def test_commands_on_damaged_directories(folder: Path, data: st.DataObject) -> None:
    """Every command ends with exit code 0, 1 or 2."""
    path = folder / data.draw(st.sampled_from(["target", "head"])) / "config.json"
    values = json.loads(path.read_bytes())
    with holding(path, data.draw(damaged_json(values))) as directory:
        for command in (
            ["inspect", str(directory), "--json"],
            ["plan", "memory", "--target", str(directory)],
        ):
            assert run(command) in (0, 1, 2)
