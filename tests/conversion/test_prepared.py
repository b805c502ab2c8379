"""The int8 form of a published model is the one that its file gives, in every bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import pytest
import tiny

import eagle3_jax as e3
from eagle3_jax.conversion import prepared
from eagle3_jax.conversion.tensors import read_tensors, write_tensors
from eagle3_jax.files import published
from eagle3_jax.files.published import PUBLISHED, cached_path
from eagle3_jax.files.sources import bundled
from eagle3_jax.models import quantised


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundled target, in the place of a published model."""
    row = PUBLISHED["smollm2"]._replace(member="tiny/model")
    monkeypatch.setitem(published.PUBLISHED, "tiny", row)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(bundled("target"), cached_path("tiny")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_load_needs_neither_the_file_nor_its_quantisation(
    model: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = e3.load_target(bundled("target"), weights="int8", dtype=dtype)
    assert tiny.same_bits(
        e3.load_target(model, weights="int8").params,
        e3.load_target(bundled("target"), weights="int8").params,
    )

    # From here on, reading the file or quantising fails.
    shutil.rmtree(model)
    model.mkdir()
    monkeypatch.setattr(quantised, "quantise_int8", None)
    loaded = e3.load_target(model, weights="int8", dtype=dtype)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(expected.params)
    assert tiny.same_bits(loaded.params, expected.params)
    assert loaded.model == expected.model
    assert loaded.stop_tokens == expected.stop_tokens
    assert loaded.chat_template == expected.chat_template
    assert loaded.tokenizer is not None and expected.tokenizer is not None
    assert loaded.tokenizer.to_str() == expected.tokenizer.to_str()


@pytest.mark.parametrize(
    "damage", ["tensors", "a tensor", "tokenizer", "description", "earlier version"]
)
def test_a_damaged_or_an_old_form_is_written_again(model: Path, damage: str) -> None:
    expected = e3.load_target(model, weights="int8")
    place = prepared.place(model, "int8")
    assert place is not None and place.parent == model.parent
    tensors = place / "model.safetensors"
    size = tensors.stat().st_size

    if damage == "tensors":
        tensors.write_bytes(tensors.read_bytes()[:-100])
    elif damage == "a tensor":
        contents = read_tensors(place)
        contents.pop(next(name for name in contents if name.endswith(".scale")))
        tensors.unlink()
        write_tensors(tensors, contents)
    elif damage == "tokenizer":
        (place / "tokenizer.json").unlink()
    elif damage == "description":
        (place / "prepared.json").write_text("{}", encoding="utf-8")
    else:
        place.rename(place.with_name("int8-of-another-version"))

    loaded = e3.load_target(model, weights="int8")
    assert tiny.same_bits(loaded.params, expected.params)
    assert loaded.tokenizer is not None
    assert tensors.stat().st_size == size
    assert [path for path in model.parent.iterdir() if path != model] == [place]


def test_files_of_the_user_and_other_weights_leave_nothing(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    e3.load_target(tmp_path / "model", weights="int8")
    e3.load_target(model, weights="fp8")
    e3.load_target(model)
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "model"}
    assert list(model.parent.iterdir()) == [model]
