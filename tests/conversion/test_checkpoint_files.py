"""Places that users give instead of a checkpoint, other prefixes of tensors, and what a conversion copies."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from checkpoints import TARGET, Head, same_params, write_llama
from safetensors.numpy import load_file, save_file

import eagle3_jax as e3
from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError

pytestmark = pytest.mark.torch

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


def mistaken(directory: Path) -> dict[str, tuple[Path, Any, str]]:
    """What people give in place of a checkpoint: the path, how it comes to be, and the line that helps."""
    weights = directory / "model.safetensors"
    cache = directory.parent / "models--org--name"

    def cached(*snapshots: str) -> None:
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text("0f3c")
        for name in snapshots:
            (cache / "snapshots" / name).mkdir(parents=True)

    def renamed(name: str, **files: str) -> None:
        weights.rename(directory / name)
        for stem, content in files.items():
            (directory / f"{stem}.json").write_text(content)

    def adapter() -> None:
        (directory / "config.json").unlink()
        renamed("adapter_model.safetensors", adapter_config='{"base_model_name_or_path": "org/base"}')

    def pickle_pointer() -> None:
        weights.unlink()
        (directory / "pytorch_model.bin").write_text(POINTER)

    pull = rf"is a Git LFS pointer and not the file itself; run `git lfs pull` in {directory}"
    return {
        "a pointer": (directory, lambda: weights.write_text(POINTER), rf"model\.safetensors {pull}$"),
        "a pointer to a pickle": (directory, pickle_pointer, rf"pytorch_model\.bin {pull}$"),
        "an adapter": (
            directory, adapter,
            r"is a LoRA adapter \(adapter_config\.json\) of org/base; merge it into that model, for example with "
            r"merge_and_unload\(\) of peft, and give the directory of the result$",
        ),
        "Mistral's own layout": (
            directory, lambda: renamed("consolidated.safetensors", params="{}"),
            r"holds consolidated\.safetensors, a layout of its publisher; give the Hugging Face layout",
        ),
        "a cache": (cache, lambda: cached("0f3c"), rf"is a folder of the hub's cache; give {cache}/snapshots/0f3c$"),
        "a cache of several": (
            cache, lambda: cached("0f3c", "1a2b"), rf"cache; give one of its 2 snapshots, in {cache}/snapshots$",
        ),
        "GGUF": (
            directory, lambda: renamed("model-Q4_K_M.gguf"),
            r"model-Q4_K_M\.gguf does not begin as a GGUF file does; fetch it again, or rename it$",
        ),
        "nowhere": (directory.parent / "nowhere", lambda: None, r"nowhere (does not exist|is not a dir.*); give "),
        "a file": (weights, lambda: None, r"model\.safetensors is (a file|not a directory); give "),
        "a file of GGUF": (
            directory / "m.gguf", lambda: (directory / "m.gguf").write_bytes(b"GGUF"),
            r"m\.gguf is truncated or damaged \(it ends within its header\); fetch the file again$",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(mistaken(Path())))
def test_what_is_given_in_place_of_a_checkpoint_is_named_with_what_helps(
    tmp_path: Path, refused: Any, name: str
) -> None:
    sound = write_llama(tmp_path / "sound")
    path, make, says = mistaken(write_llama(tmp_path / "target"))[name]
    make()
    assert re.search(says, conversion.diagnose(path, sound)[0].detail)
    prompt = ("--prompt-ids", "[1, 2]")
    for arguments in (
        ("inspect", path),
        ("convert", path, tmp_path / "out", "--to", "jax"),
        ("generate", "--target", sound, "--drafter", path, *prompt),
    ):
        assert re.search(says, refused(*arguments).rstrip())


def test_a_tokenizer_that_was_not_fetched_is_named(tmp_path: Path) -> None:
    directory = write_llama(tmp_path / "target")
    (directory / "tokenizer.json").write_text(POINTER)
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json is a Git LFS pointer and not the file itself; run `git"
    ):
        e3.load_target(directory)


@pytest.mark.parametrize("prefix", ["", "module.", "language_model.model.", "_orig_mod.model."])
def test_layers_under_another_prefix_are_read_where_it_is_the_only_one(tmp_path: Path, prefix: str) -> None:
    """``AutoModel`` saves without ``model.``; wrappers of PyTorch, and of images, put their own names before it."""
    truth = conversion.read_target(write_llama(tmp_path / "target"))
    directory = write_llama(tmp_path / "renamed")
    outer = prefix.removesuffix("model.")
    tensors = {
        f"{outer}{name}" if name.startswith("lm_head") else prefix + name.removeprefix("model."): value
        for name, value in load_file(directory / "model.safetensors").items()
    }
    assert f"{outer}lm_head.weight" in tensors
    save_file(tensors, directory / "model.safetensors")
    assert same_params(conversion.read_target(directory).params, truth.params)
    assert conversion.describe(directory).kind == "target: Llama"

    encoder = {f"vision_tower.layers.{layer}.weight": np.zeros(2, np.float32) for layer in range(2)}
    save_file({**tensors, **encoder}, directory / "model.safetensors")
    both = " and ".join(sorted((f"{prefix}layers.0", "vision_tower.layers.0")))
    with pytest.raises(CheckpointError, match=re.escape(f"its layers are named {both}; expected model.layers.0 ")):
        conversion.read_target(directory)
    if outer:
        save_file({**tensors, "lm_head.weight": np.zeros(2, np.float32)}, directory / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"mean the same tensor lm_head\.weight; remove one"):
            conversion.read_target(directory)


def test_a_pickle_without_torch_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_llama(tmp_path / "target")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=re.escape("pip install 'eagle3-jax[convert]'")):
        conversion.read_target(directory)


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
