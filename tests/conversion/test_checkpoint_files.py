"""Paths given instead of a checkpoint, other prefixes of tensors, and the files that are copied."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")
from checkpoints import TARGET, Head, refused, same_params, write_llama
from safetensors.numpy import load_file, save_file

import eagle3_jax as e3
from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError

pytestmark = pytest.mark.torch

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


class Mistake(NamedTuple):
    """A path that is given instead of a checkpoint; ``prepare`` creates it from a sound target."""

    path: str  # next to the target
    prepare: Callable[[Path], object]
    message: str


def leave_pointer(directory: Path) -> None:
    (directory / "model.safetensors").write_text(POINTER)


def turn_into_adapter(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def turn_into_publisher_layout(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")


def make_cache(directory: Path, *snapshots: str) -> None:
    for name in snapshots:
        (directory.parent / "models--org--name" / "snapshots" / name).mkdir(parents=True)


MISTAKES = {
    "a Git LFS pointer": Mistake(
        "target",
        leave_pointer,
        r"model\.safetensors is a Git LFS pointer .*; run `git lfs pull` in .*/target$",
    ),
    "an adapter": Mistake(
        "target",
        turn_into_adapter,
        r"is a LoRA adapter \(adapter_config\.json\) of org/base; merge it into that model",
    ),
    "the layout of Mistral": Mistake(
        "target",
        turn_into_publisher_layout,
        r"holds consolidated\.safetensors, a layout of its publisher; give the Hu",
    ),
    "a cache": Mistake(
        "models--org--name",
        lambda path: make_cache(path, "0f3c"),
        r"is a folder of the hub's cache; give .*/models--org--name/snaps.*3c$",
    ),
    "a cache of two snapshots": Mistake(
        "models--org--name",
        lambda path: make_cache(path, "0f3c", "1a2b"),
        r"cache; give one of its 2 snapshots, in .*--name/snapshots$",
    ),
    "an absent directory": Mistake("absent", lambda _: None, r"absent does not exist; give "),
    "a file": Mistake(
        "target/model.safetensors", lambda _: None, r"model\.safetensors is a file; give "
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_path_that_is_no_checkpoint_is_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    mistake = MISTAKES[name]
    mistake.prepare(write_llama(tmp_path / "target"))
    path = tmp_path / mistake.path
    refused(conversion.read_target, path, mistake.message)
    assert re.search(mistake.message, conversion.diagnose(path, path)[0].detail)


def test_a_tokenizer_that_was_not_fetched_is_refused(tmp_path: Path) -> None:
    directory = write_llama(tmp_path / "target")
    (directory / "tokenizer.json").write_text(POINTER)
    refused(
        e3.load_target, directory, r"tokenizer\.json is a Git LFS pointer and not the file itself"
    )


@pytest.mark.parametrize("prefix", ["", "module.", "language_model.model.", "_orig_mod.model."])
def test_layers_under_another_prefix_are_read_if_it_is_the_only_prefix(
    tmp_path: Path, prefix: str
) -> None:
    """``AutoModel`` saves without ``model.``; wrappers of PyTorch and of images add prefixes."""
    truth = conversion.read_target(write_llama(tmp_path / "target"))
    directory = write_llama(tmp_path / "renamed")
    weights = directory / "model.safetensors"
    outer = prefix.removesuffix("model.")
    tensors = {}
    for name, value in load_file(weights).items():
        tensors[
            outer + name if name == "lm_head.weight" else prefix + name.removeprefix("model.")
        ] = value
    save_file(tensors, weights)
    assert same_params(conversion.read_target(directory).params, truth.params)

    encoder = {f"vision_tower.layers.{layer}.weight": np.zeros(2, np.float32) for layer in range(2)}
    save_file({**tensors, **encoder}, weights)
    prefixes = " and ".join(sorted((f"{prefix}layers.0", "vision_tower.layers.0")))
    with pytest.raises(
        CheckpointError,
        match=re.escape(f"its layers are named {prefixes}; expected model.layers.0 "),
    ):
        conversion.read_target(directory)
    if outer:
        save_file({**tensors, "lm_head.weight": np.zeros(2, np.float32)}, weights)
        with pytest.raises(
            CheckpointError, match=r"mean the same tensor lm_head\.weight; remove one"
        ):
            conversion.read_target(directory)


def test_a_pickle_without_torch_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_llama(tmp_path / "target")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=re.escape("pip install 'eagle3-jax[convert]'")):
        conversion.read_target(directory)


def test_an_existing_directory_is_not_written_to(tmp_path: Path) -> None:
    head = Head().write(tmp_path / "head")
    (tmp_path / "out").mkdir()
    for layout in ("jax", "vllm"):
        with pytest.raises(CheckpointError, match="exists already"):
            conversion.convert(head, tmp_path / "out", layout, TARGET)
    assert not list((tmp_path / "out").iterdir())


def test_a_conversion_copies_tokenizer_files(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "target")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    for layout in ("jax", "vllm"):
        conversion.convert(source, tmp_path / layout, layout)
        assert (tmp_path / layout / "tokenizer.json").read_text() == "{}"
        assert (tmp_path / layout / "chat_template.jinja").exists()


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"'gguf' is not known; use one of jax, .*eagle, sglang"
    ):
        conversion.convert(write_llama(tmp_path / "target"), tmp_path / "out", "gguf")
