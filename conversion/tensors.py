"""Reads and writes named arrays in the files of checkpoints."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.files import (
    checkpoint_path,
    is_gguf,
    read_json,
    refuse_pointer,
    unreadable,
)
from eagle3_jax.conversion.gguf import read_contents
from eagle3_jax.conversion.quantised import Quantisation
from eagle3_jax.devices.host import copy_blocks

SAFETENSORS = "model.safetensors"
PICKLE = "pytorch_model.bin"
# If a directory holds several of these, the first is read, as in transformers.
_WEIGHTS = (SAFETENSORS, f"{SAFETENSORS}.index.json", PICKLE, f"{PICKLE}.index.json")
_ADAPTER = "adapter_config.json"
_MEDUSA = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")

# fmt: off
_DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16,
    "I32": np.int32, "U32": np.uint32, "I64": np.int64, "U64": np.uint64,
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
# fmt: on
_DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
# Bytes that are brought into the order of a file at a time.
_PIECE = 2**26


class Signs(NamedTuple):
    """The parts of a checkpoint by which its kind is recognised."""

    config: Mapping[str, Any]  #: Its ``config.json``.
    #: Names of its tensors without ``model.``; empty if only the configuration is known.
    names: frozenset[str]
    architecture: str  #: All ``architectures``, joined.
    method: str  #: The ``speculators_model_type``; empty if there is none.

    @classmethod
    def read(cls, fields: Fields, names: Collection[str] = ()) -> Signs:
        """Collects the signs in a ``config.json`` and in the names of the tensors."""
        short_names = frozenset(name.removeprefix("model.") for name in names)
        method = str(fields.get("speculators_model_type") or "")
        return cls(fields.values, short_names, " ".join(fields.words("architectures")), method)

    def has(self, pattern: str) -> bool:
        """Tells whether the name of a tensor begins with a match of ``pattern``."""
        return any(re.match(pattern, name) for name in self.names)


class Stored(NamedTuple):
    """The files of a checkpoint that is not native."""

    directory: Path  #: Its directory, or the path of its GGUF file.
    config: Mapping[str, Any]  #: Its ``config.json``.
    tensors: Mapping[str, Any]  #: Tensors by name: arrays of numpy, or objects that convert to one.
    #: The user's ``--layer-ids``: ``entering`` or ``leaving``, see
    #: :mod:`eagle3_jax.conversion.heads.layer_ids`.
    layer_ids: str | None = None
    #: The tensors that a GGUF file stores; ``None`` otherwise.
    held: Mapping[str, Any] | None = None
    #: The quantisation of a GGUF file; ``None`` otherwise.
    quantisation: Quantisation | None = None

    @property
    def where(self) -> str:
        """The path of its ``config.json``, or of its GGUF file, for messages."""
        return str(self.directory / "config.json" if self.held is None else self.directory)

    @property
    def fields(self) -> Fields:
        """Its ``config.json``, typed."""
        return Fields(self.config, self.where)

    @property
    def signs(self) -> Signs:
        """The parts by which its kind is recognised."""
        return Signs.read(self.fields, self.tensors)


def read_stored(directory: Path) -> Stored:
    """Opens a checkpoint."""
    if is_gguf(directory):
        contents = read_contents(directory)
        stored = Stored(directory, contents.config, contents.tensors)
        return stored._replace(held=contents.held, quantisation=contents.quantisation)
    # Weights are read first: "not a checkpoint" says more than "no config.json".
    tensors = read_tensors(directory)
    return Stored(directory, read_json(directory / "config.json"), tensors)


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Reads all tensors of a checkpoint directory in their stored dtypes.

    Arrays of safetensors files are read-only views of the mapped file: nothing is read before it is
    used.

    Raises:
        CheckpointError: There are no weights, a shard is missing or does not hold what the index
            says, or a file is damaged.
    """
    directory = checkpoint_path(directory)
    try:
        return _read_directory(directory)
    except OSError as error:
        raise unreadable(directory, error) from None


def _read_directory(directory: Path) -> dict[str, np.ndarray]:
    for name in (*_WEIGHTS, *_MEDUSA):
        path = directory / name
        if path.is_file():
            return _read_sharded(path) if name.endswith(".index.json") else read_file(path)

    if (directory / _ADAPTER).is_file():
        base = str(read_json(directory / _ADAPTER).get("base_model_name_or_path"))[:80]
        raise CheckpointError(
            f"{directory} is a LoRA adapter ({_ADAPTER}) of {base}; merge it into that model, for"
            " example with merge_and_unload() of peft, and give the directory of the result"
        )

    suffixes = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    strays = sorted(path.name for path in directory.iterdir() if path.suffix in suffixes)
    for name in strays:
        if name.startswith("consolidated."):
            raise CheckpointError(
                f"{directory} holds {name}, a layout of its publisher; give the Hugging Face layout"
                f" of the model, which has {SAFETENSORS} or its index"
            )
        if name.endswith(".gguf"):
            raise CheckpointError(
                f"{directory} holds {name} and other weights; give the path of the GGUF file"
            )
    if strays:
        raise CheckpointError(
            f"{directory} holds {strays[0]} but neither {' nor '.join(_WEIGHTS)}; "
            "rename a single file to model.safetensors, or add the index of the shards"
        )
    raise CheckpointError(
        f"{directory} is not a checkpoint: it holds no weights (expected {' or '.join(_WEIGHTS)})"
    )


def read_file(path: Path) -> dict[str, np.ndarray]:
    """Reads all tensors of a safetensors file or a PyTorch file."""
    refuse_pointer(path)
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)


def write_tensors(
    path: Path, tensors: Mapping[str, Any], shard_bytes: int | None = None
) -> dict[str, str]:
    """Writes a safetensors file that PyTorch programs accept, one tensor after the other.

    Args:
        path: The file.
        tensors: Arrays of numpy, or objects with their ``shape`` and ``dtype`` that convert to one.
        shard_bytes: If the tensors have more bytes, there are several files, named as transformers
            names them.

    Returns:
        The name of the file of each tensor.
    """
    # With larger numbers first, every tensor is aligned.
    names = sorted(tensors, key=lambda name: -np.dtype(tensors[name].dtype).itemsize)
    shards: list[list[str]] = [[]]
    filled = 0
    for name in names:
        size = tensors[name].nbytes
        if shard_bytes is not None and shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size

    files = {}
    for number, shard in enumerate(shards, start=1):
        part = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        file = path.with_name(f"{path.stem}{part}{path.suffix}")
        _write_file(file, {name: tensors[name] for name in shard})
        files |= dict.fromkeys(shard, file.name)
    return files


def _write_file(path: Path, tensors: Mapping[str, Any]) -> None:
    # transformers refuses files without the name of a framework.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[np.dtype(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop

    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            _write_array(file, np.asarray(tensor))


def _write_array(file: BinaryIO, array: np.ndarray) -> None:
    if array.flags.c_contiguous:
        file.write(array.reshape(-1).view(np.uint8).data)
        return
    # A transposed array is brought into order a piece at a time.
    rows = array.reshape(1) if array.ndim == 0 else array
    step = max(1, _PIECE * len(rows) // max(1, array.nbytes))
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        ordered = np.empty(piece.shape, piece.dtype)
        copy_blocks(ordered, piece)
        file.write(ordered.reshape(-1).view(np.uint8).data)


def _read_sharded(index: Path) -> dict[str, np.ndarray]:
    """Reads all shards of an index, which must list exactly the tensors that they hold."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index} has no weight_map; it must say which shard holds which tensor"
        )
    tensors: dict[str, np.ndarray] = {}

    for shard in sorted(set(map(str, weight_map.values()))):
        # An index must not lead out of its directory.
        if len(shard) > 255 or Path(shard).name != shard or "\0" in shard:
            raise CheckpointError(
                f"{index} names the shard {short(shard)}; expected a file name without directories"
            )

        path = index.parent / shard
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing; {index.name} lists it. Fetch the remaining shards"
            )
        for name, value in read_file(path).items():
            if weight_map.get(name) != shard:
                listed = f"in {weight_map[name]}" if name in weight_map else "nowhere"
                raise CheckpointError(
                    f"{path} holds {name}, which {index.name} lists {listed}; rebuild the index"
                )
            tensors[name] = value

    for name in sorted(weight_map.keys() - tensors.keys())[:1]:
        raise CheckpointError(
            f"{index.parent / weight_map[name]} does not hold {name}, which {index.name} places"
            " there"
        )
    return tensors


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    # safe_open checks sizes, offsets and names. Its reader for numpy has no bfloat16, so the
    # tensors are read here.
    try:
        with safe_open(path, "np"):
            pass
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is truncated or damaged ({str(error)[:200]}); it is not a complete"
            " safetensors file, fetch it again"
        ) from None

    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, mode="r")[8 + size :]

    tensors = {}
    for name, entry in header.items():
        dtype = entry["dtype"]
        if dtype not in _DTYPES:
            raise CheckpointError(
                f"{path}: {name} is stored as {dtype}, which is not supported; expected floats"
            )
        start, stop = entry["data_offsets"]
        raw = np.asarray(data[start:stop])
        tensor = raw.view(_DTYPES[dtype]).reshape(entry["shape"])
        # An odd number of flags before a matrix leaves it unaligned; only then is it copied.
        tensors[name] = np.require(tensor, requirements="A")
    return tensors


def _read_pickle(path: Path) -> dict[str, np.ndarray]:
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            "reading a PyTorch file (.bin, .pt) needs torch: pip install 'eagle3-jax[convert]', "
            "or convert the file to model.safetensors"
        ) from None

    try:
        # weights_only: a pickle from the network must not run code.
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle report damage as almost any type
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise CheckpointError(
            f"{path} is truncated, damaged or not a file of plain tensors ({reason[:120]}); fetch"
            " it again"
        ) from None

    if not isinstance(loaded, dict) or not all(
        isinstance(value, torch.Tensor) for value in loaded.values()
    ):
        raise CheckpointError(
            f"{path} holds other things than tensors; expected a dictionary of tensors"
        )
    return {str(name): _as_numpy(torch, value, f"{path}: {name}") for name, value in loaded.items()}


def _as_numpy(torch: ModuleType, value: Any, label: str) -> np.ndarray:
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        raise CheckpointError(
            f"{label} is a {value.layout} tensor on {value.device}; expected a plain one"
        )
    # With strides of zero, a file of a few bytes describes terabytes.
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise CheckpointError(
            f"{label} repeats its numbers to shape {list(value.shape)}; expected them in full"
        )

    value = value.detach().contiguous()
    if value.dtype == torch.bfloat16:  # numpy has no bfloat16
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    try:
        return value.numpy()
    except (TypeError, RuntimeError):
        raise CheckpointError(
            f"{label} is stored as {value.dtype}, which is not supported; expected floats"
        ) from None
