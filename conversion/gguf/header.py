"""The header of a GGUF file: metadata and memory-mapped tensors.

The reader of the package ``gguf`` takes 3 seconds for a vocabulary of 49,000 tokens. This reader
takes 0.3 seconds. The package still defines the types of tensors and dequantizes their blocks.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.files import refuse_pointer, unreadable
from eagle3_jax.conversion.quantised.arrays import Dequantised

# Types that store plain numbers.
_PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
TYPES = (*_PLAIN, *_BLOCKS)  #: Supported types of tensors.

# Formats of ``struct`` for the types of metadata that have a fixed size.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_FLOAT32 = 6
_TEXT = 8
_LIST = 9
_MOST_AXES = 4
_ALIGNMENT = "general.alignment"


class Tensor(Dequantised):
    """A tensor of a GGUF file. Every conversion to numpy dequantises it again.

    Attributes:
        raw: Numbers ``[..., D]``, or the bytes of blocks ``[..., B]``; a view of the mapped file.
        type: llama.cpp's name of its type, such as ``Q4_1``.
    """

    def __init__(self, raw: np.ndarray, type: str):
        """See the class."""
        self.raw = raw
        self.type = type
        if type in _PLAIN:
            super().__init__(raw.shape, raw.dtype, lambda: (raw, None), dtype=raw.dtype)
            return
        values, size = block_size(type)
        shape = (*raw.shape[:-1], raw.shape[-1] // size * values)
        super().__init__(shape, raw.dtype, lambda: (_dequantised(raw, type), None))

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return self.raw.nbytes

    @property
    def is_quantised(self) -> bool:
        """Whether it stores quantised blocks."""
        return self.type not in _PLAIN

    @property
    def label(self) -> str:
        """The name of its dtype, or of its type of blocks."""
        return self.type if self.is_quantised else str(self.dtype)

    def part(self, index: int) -> Tensor:
        """Returns a tensor of a stack. Reading it does not read the other tensors."""
        return Tensor(self.raw[index], self.type)


class Header(NamedTuple):
    """Metadata and tensors of a GGUF file."""

    path: Path  #: The path of the file.
    metadata: dict[str, Any]  #: Values by key.
    tensors: dict[str, Tensor]  #: Tensors by llama.cpp's names.

    @property
    def fields(self) -> Fields:
        """The metadata, typed."""
        return Fields(self.metadata, str(self.path))

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor by its name; refuses a file without it."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} misses {name}; fetch the file again")
        return self.tensors[name]


def package() -> ModuleType:
    """Imports the package ``gguf``."""
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise CheckpointError(
            "reading a GGUF file needs gguf: pip install 'eagle3-jax[gguf]'"
        ) from None
    return gguf


def block_size(type: str) -> tuple[int, int]:
    """Returns the number of weights and of bytes in a block of a type."""
    gguf = package()
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]


def _dequantised(raw: np.ndarray, type: str) -> np.ndarray:
    gguf = package()
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type])


def read_header(path: Path) -> Header:
    """Reads the header of a file.

    Raises:
        CheckpointError: The file is not a GGUF file, is truncated or damaged, is one of several
            parts, or has a tensor of an unsupported type. Or the package ``gguf`` is missing.
    """
    package()
    if re.search(r"-\d{5}-of-(?!00001)\d{5}\.gguf$", path.name):
        raise _a_part(path)
    try:
        refuse_pointer(path)
        status = path.stat()
        return _read_version(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise unreadable(path, error) from None


# Weights, tokenizer and chat template are read one after the other, and each needs the header.
@functools.lru_cache(maxsize=1)
def _read_version(path: Path, size: int, modified_ns: int) -> Header:
    """Reads the header of a file that has this size and time of its last change."""
    del size, modified_ns
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(
                f"{path} does not begin as a GGUF file does; fetch it again, or rename it"
            )
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _parsed(path, content)
    except (UnicodeDecodeError, _DamagedError) as error:
        raise CheckpointError(
            f"{path} is truncated or damaged ({str(error)[:120]}); fetch the file again"
        ) from None


def _a_part(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is one of several parts of a model; merge them into one file with"
        " `llama-gguf-split --merge`"
    )


class _DamagedError(Exception):
    """The file contradicts its own format."""


class _Reader(NamedTuple):
    """Reads values in the order of the file."""

    content: mmap.mmap

    def bytes(self, size: int) -> bytes:
        missing = size - (len(self.content) - self.content.tell())
        if missing > 0:
            raise _DamagedError(f"it ends {missing:,} bytes too early")
        return self.content.read(size)

    def number(self, kind: str) -> Any:
        format = f"<{kind}"
        (value,) = struct.unpack(format, self.bytes(struct.calcsize(format)))
        return value

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _LIST:
            return self.values(self.number("I"), self.number("Q"))
        if kind not in _SCALARS:
            raise _DamagedError(f"a value of type {kind}")
        value = self.number(_SCALARS[kind])
        # The shortest decimal that rounds to this float32 is the number in the publisher's
        # configuration.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def values(self, kind: int, count: int) -> Any:
        if kind == _TEXT:
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise _DamagedError(f"a list of values of type {kind}")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        return np.frombuffer(self.bytes(count * dtype.itemsize), dtype).tolist()


class _Entry(NamedTuple):
    """The description of a tensor."""

    name: str
    shape: tuple[int, ...]
    kind: int  #: llama.cpp's number of its type.
    offset: int  #: Its first byte, counted from the first tensor's.


def _parsed(path: Path, content: mmap.mmap) -> Header:
    reader = _Reader(content)
    reader.bytes(4)
    _check_version(path, reader.number("I"))
    num_tensors = reader.number("Q")
    num_values = reader.number("Q")

    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.text()
        if key in metadata:
            raise _DamagedError(f"{short(key)} twice")
        metadata[key] = reader.value(reader.number("I"))
    if "split.count" in metadata and Fields(metadata, str(path)).integer("split.count") > 1:
        raise _a_part(path)

    entries = [_read_entry(reader) for _ in range(num_tensors)]
    alignment = metadata.get(_ALIGNMENT, 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise _DamagedError(f"{_ALIGNMENT} is {short(alignment)}")
    start = -(-content.tell() // alignment) * alignment
    data = np.frombuffer(content, np.uint8)[start:]

    tensors: dict[str, Tensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise _DamagedError(f"{short(entry.name)} twice")
        tensors[entry.name] = _tensor(path, data, entry)
    return Header(path, metadata, tensors)


def _check_version(path: Path, version: int) -> None:
    if version in (2, 3):
        return
    # A small number with its bytes in the opposite order has zeros at the end.
    is_reversed = version & 0xFFFF == 0
    words = (
        "in the byte order of other machines"
        if is_reversed
        else f"of version {version}; expected 2 or 3"
    )
    raise CheckpointError(f"{path} is a GGUF file {words}; convert the original checkpoint again")


def _read_entry(reader: _Reader) -> _Entry:
    name = reader.text()
    count = reader.number("I")
    if not 1 <= count <= _MOST_AXES:
        raise _DamagedError(f"{short(name)} has {count} axes")
    # The file stores the innermost axis first.
    shape = tuple(reader.number("Q") for _ in range(count))[::-1]
    if 0 in shape:
        raise _DamagedError(f"{short(name)} is empty")
    return _Entry(name, shape, kind=reader.number("I"), offset=reader.number("Q"))


def _tensor(path: Path, data: np.ndarray, entry: _Entry) -> Tensor:
    name = short(entry.name)
    gguf = package()
    known = {member.value: member.name for member in gguf.GGMLQuantizationType}
    type = known.get(entry.kind, f"number {entry.kind}")
    if type not in TYPES:
        raise CheckpointError(
            f"{path}: {name} is of type {type}, which is not read; those that are:"
            f" {', '.join(TYPES)}"
        )

    values, size = block_size(type)
    columns = entry.shape[-1]
    if columns % values:
        raise _DamagedError(
            f"{name} has rows of {columns}, which is not a multiple of the {values} of {type}"
        )
    stop = entry.offset + math.prod(entry.shape) // values * size
    if stop > len(data):
        raise _DamagedError(f"it ends {stop - len(data):,} bytes too early")

    raw = data[entry.offset : stop]
    if type in _PLAIN:
        # A file may align its tensors to less than the size of a number.
        raw = np.require(raw.view(_PLAIN[type]), requirements="A")
    return Tensor(raw.reshape(*entry.shape[:-1], -1), type)
