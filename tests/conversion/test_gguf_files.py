"""GGUF files are located, read and converted; others are refused in one line."""

from __future__ import annotations

import functools
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
import gguf
import gguf_files
from checkpoints import edit_config, refused, same_target
from gguf_files import Type, everywhere
from models_on_disk import write_bytes_target

import eagle3_jax as e3
from eagle3_jax import conversion
from eagle3_jax.conversion.gguf.architectures import ARCHITECTURES, layer_name
from eagle3_jax.conversion.sidecars import tokenizer_config_of, tokenizer_of
from eagle3_jax.files.sources import locate

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of bytes, in the Hugging Face layout."""
    directory = write_bytes_target(tmp_path_factory.mktemp("model"))
    edit_config(directory, bos_token_id=3, eos_token_id=7, tie_word_embeddings=False)
    return directory


def _tokens(directory: Path, writer: gguf.GGUFWriter) -> None:
    """Writes the tokenizer of a directory, with a merge instead of its last byte."""
    vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*sorted(vocab, key=vocab.__getitem__)[:-1], "he"])
    writer.add_token_merges(["h e"])
    writer.add_add_bos_token(True)
    writer.add_chat_template(
        "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )


Edit = Callable[[gguf.GGUFWriter], Any]


@pytest.fixture
def write(directory: Path, tmp_path: Path) -> Any:
    """Writes a GGUF file of the Llama; ``edit`` changes it before it is written."""

    def write_file(
        edit: Edit = lambda writer: None, type: Type = Type.Q8_0, name: str = "m.gguf"
    ) -> Path:
        return gguf_files.write(directory, tmp_path / name, everywhere(type), edit)

    return write_file


def test_a_file_is_loaded_as_target_and_drafter_and_converted_to_other_layouts(
    write: Any, tmp_path: Path, cli: Any
) -> None:
    path = write()
    assert locate(path, "target") == path
    code, out, _ = cli("inspect", path, "--json")
    assert code == 0
    described = json.loads(out)
    assert set(described["dtypes"]) == {"Q8_0", "float32"}
    header = gguf.GGUFReader(path)
    expected = {
        "kind": "target: Llama",
        "loadable": True,
        "dialect": "gguf",
        "quantisation": "GGUF Q8_0",
        "num_bytes": sum(tensor.n_bytes for tensor in header.tensors),
        "num_tensors": len(header.tensors),
    }
    assert expected.items() <= described.items()
    assert cli("doctor", "--target", path, "--drafter", path)[0] == 0
    assert cli("plan", "memory", "--target", path)[0] == 0

    for layout in ("vllm", "jax"):
        assert cli("convert", path, tmp_path / layout, "--to", layout)[0] == 0
        converted = conversion.read_target(tmp_path / layout)
        assert same_target(converted, conversion.read_target(path))
        assert (converted.stop_tokens, converted.dtype) == ((7,), "float32")
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (3, 7)

    target = e3.load_target(path)
    assert target.stop_tokens == (7,)
    assert e3.load_drafter(path, target=target).described.startswith("draft model")


def test_transformers_reads_a_converted_file_with_its_tokenizer(
    tmp_path: Path, directory: Path
) -> None:
    pytest.importorskip("torch")
    import transformers

    path = gguf_files.write(
        directory, tmp_path / "m.gguf", everywhere(Type.Q8_0), functools.partial(_tokens, directory)
    )
    conversion.convert(path, tmp_path / "out", "vllm")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == 7
    read = {name: value.numpy() for name, value in model.state_dict().items()}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name.endswith(("ffn_down.weight", "token_embd.weight", "output.weight")):
            name = layer_name(ARCHITECTURES["llama"], tensor.name)
            assert np.array_equal(
                read[name], gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours: Any = e3.load_target(path).tokenizer
    ids = ours.encode("hello").ids
    assert theirs("hello").input_ids == ids
    assert (ids[:2], len(ids)) == ([3, 255], 5)
    messages = [{"role": "user", "content": "hi"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == f"{theirs.bos_token}hi"


def test_a_directory_with_a_single_gguf_file_means_that_file(
    write: Any, tmp_path: Path, directory: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = write(name="folder/model.gguf")
    (folder / "README.md").write_text("")
    assert locate(folder, "target") == path
    assert conversion.read_target(folder).source == path

    (folder / "other.gguf").write_bytes(path.read_bytes())
    several = r"folder holds 2 GGUF files \(model\.gguf, other\.gguf\); give the path of one$"
    refused(conversion.read_target, folder, several)
    with pytest.raises(ValueError, match=several):
        locate(folder, "target")

    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((directory / name).read_bytes())
    assert locate(folder, "target") == folder
    assert conversion.read_target(folder).source == folder
    with pytest.raises(
        ValueError, match=r"nowhere/m\.gguf does not exist; give the path of a GGUF file$"
    ):
        locate("nowhere/m.gguf", "target")


def test_without_the_package_the_extra_is_named(
    write: Any, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    path = write()
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "reading a GGUF file needs gguf: pip install 'eagle3-jax[gguf]'" in refused(
        "inspect", path
    )


def _key(name: str, value: Any, kind: gguf.GGUFValueType) -> Edit:
    return lambda writer: writer.kv_data[0].update({name: gguf.gguf_writer.GGUFValue(value, kind)})


def _no_key(name: str) -> Edit:
    return lambda writer: writer.kv_data[0].pop(name)


_U32 = gguf.GGUFValueType.UINT32
_STR = gguf.GGUFValueType.STRING
_F32 = gguf.GGUFValueType.FLOAT32
REFUSED: dict[str, tuple[Edit, str]] = {
    "another architecture": (
        _key("general.architecture", "mamba", _STR),
        r"general\.architecture is 'mamba'; those that are read from GGUF are llama, mistral3, .*\. Give the safetens",
    ),
    "a head": (
        _key("general.architecture", "eagle3", _STR),
        r"holds a draft head \(eagle3\); heads are not read from GGUF, so give the directory of the head's safetensors",
    ),
    "no architecture": (_no_key("general.architecture"), r"general\.architecture is None; those that are read"),
    "a part": (_key("split.count", 3, gguf.GGUFValueType.UINT16), r"is one of several parts of a model; merge them"),
    "no number of layers": (_no_key("llama.block_count"), r"m\.gguf has no llama\.block_count; it changes the math"),
    "no epsilon": (
        _no_key("llama.attention.layer_norm_rms_epsilon"),
        r"has no llama\.attention\.layer_norm_rms_epsilon; it changes the mathematics",
    ),
    "another number of layers": (
        _key("llama.block_count", 3, _U32), r"num_hidden_layers is 3; the file holds 2 layers"
    ),
    "another number of heads": (
        _key("llama.attention.head_count", 32, _U32), r"blk\.0\.attn_q\.weight has 32 rows, which are not those of 32",
    ),
    "a list of heads": (
        lambda writer: (
            _no_key("llama.attention.head_count")(writer),
            writer.add_head_count([2, 2]),
        ),
        r"llama\.attention\.head_count is \[2, 2\]; expected a whole number",
    ),
    "experts": (_key("llama.expert_count", 8, _U32), r"llama\.expert_count is 8; only 0 is supported"),
    "narrower values": (_key("llama.attention.value_length", 8, _U32), r"value_length is 8; only 16 is supported"),
    "an unknown key": (
        _key("llama.attention.clamp_kqv", 8.0, _F32),
        r"'llama\.attention\.clamp_kqv' is 8\.0, which is not known here and may change the mathematics; give the saf",
    ),
    "another rotation": (
        _key("llama.rope.scaling.type", "dynamic", _STR), r"rope\.scaling\.type is 'dynamic'; expected 'none' or"
    ),
    "another extension": (
        lambda writer: writer.add_tensor("rope_freqs.weight", np.full(8, 2, np.float32)),
        r"rope_freqs\.weight is not what Llama 3\.1 divides its frequencies by",
    ),
    "factors of another architecture": (
        lambda writer: writer.add_tensor("rope_factors_long.weight", np.full(8, 2, np.float32)),
        r"m\.gguf holds unexpected rope_factors_long\.weight",
    ),
    "a tensor too many": (
        lambda writer: writer.add_tensor("blk.0.attn_gate.weight", np.ones(4, np.float32)),
        r"m\.gguf holds unexpected blk\.0\.attn_gate\.weight",
    ),
    "a stop token out of range": (
        _key("tokenizer.ggml.eos_token_id", 1000, _U32), r"eos_token_id is 1000; expected token ids from 0 to 255"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_file_is_refused(write: Any, name: str) -> None:
    edit, message = REFUSED[name]
    refused(conversion.read_target, write(edit), message)


def test_an_unsupported_type_is_refused(write: Any) -> None:
    # Not applied, because rows of 32 numbers are shorter than a block of this type.
    conversion.read_target(write(type=Type.TQ1_0))
    blocks = np.zeros((2, 54), np.uint8)

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_gate.weight", blocks, raw_dtype=Type.TQ1_0)

    message = (
        r"'blk\.0\.attn_gate\.weight' is of type TQ1_0, which is not read; those that are: F32,"
        r" F16, BF16, Q4_0, "
    )
    refused(conversion.read_target, write(edit), message)


def test_a_missing_tensor_is_refused(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    translated = gguf_files.translated
    for missing, message in (
        ("blk.1.ffn_up.weight", r"misses model\.layers\.1\.mlp\.up_proj\.weight"),
        ("token_embd.weight", r"misses token_embd\.weight; fetch the file again"),
    ):

        def without(config: Any, tensors: Any, missing: str = missing) -> Any:
            return (pair for pair in translated(config, tensors) if pair[0] != missing)

        monkeypatch.setattr(gguf_files, "translated", without)
        refused(conversion.read_target, write(), message)


def test_a_part_is_recognised_by_its_name(write: Any) -> None:
    refused(
        conversion.read_target,
        write(name="m-00002-of-00003.gguf"),
        r"is one of several parts of a model",
    )
    conversion.read_target(write(name="m-00001-of-00001.gguf"))


def test_a_truncated_file_and_another_format_are_refused(write: Any, tmp_path: Path) -> None:
    content = write(lambda writer: writer.add_token_list(["a", "b"])).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (*range(0, 1500, 37), len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        message = (
            r"does not begin as a GGUF file does"
            if size < 4
            else r"is truncated or damaged \(it ends "
        )
        refused(conversion.read_target, path, message)

    for start, message in (
        (
            b"version https://git-lfs.github.com/spec/v1",
            r"is a Git LFS pointer and not the file itself",
        ),
        (
            b"GGUF" + struct.pack(">I", 3),
            r"in the byte order of other machines; convert the original",
        ),
        (b"GGUF" + struct.pack("<I", 1), r"of version 1; expected 2 or 3"),
    ):
        path.write_bytes(start + content[len(start) :])
        refused(conversion.read_target, path, message)


def test_a_header_with_any_byte_changed_is_read_or_refused(
    write: Any, tmp_path: Path, directory: Path
) -> None:
    content = write(functools.partial(_tokens, directory), Type.F32).read_bytes()
    random = np.random.default_rng(0)
    path = tmp_path / "changed.gguf"
    refusals = 0

    for offset in random.integers(0, content.index(b"blk.1."), 150):
        damaged = bytearray(content)
        damaged[offset] = random.choice([0, 1, 7, 127, 255])
        path.write_bytes(damaged)
        try:
            conversion.read_target(path)
            tokenizer_of(path)
            tokenizer_config_of(path)
        except conversion.CheckpointError as error:
            assert str(error).isprintable() and len(str(error)) < 600  # noqa: PT017
            refusals += 1
    assert refusals > 30


def test_names_of_tensors_are_those_of_llama_cpp() -> None:
    """Compares the table of names with that of the package ``gguf``, where the package has one."""
    for architecture in ARCHITECTURES.values():
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
        names = gguf.get_tensor_name_map(arch, 1)
        stems = [gguf.TENSOR_NAMES[tensor].format(bid=0) for tensor in gguf.MODEL_TENSORS[arch]]

        num_checked = 0
        for stem in stems:
            ours = layer_name(architecture, f"{stem}.weight")
            if ours == f"{stem}.weight" or "sinks" in stem:
                continue
            assert names.get_name(ours.removesuffix(".weight")) == stem
            num_checked += 1
        assert num_checked >= 9
