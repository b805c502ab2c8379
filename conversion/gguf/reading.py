"""Reads a GGUF file as the Hugging Face checkpoint that it was made from.

This undoes the changes of llama.cpp's converter: the order of the rows of queries and keys, the
offset of norms and the stacks of experts. A tensor is computed whenever it is converted to numpy.
"""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.gguf.architectures import (
    LONG_FACTORS,
    ROPE_FREQS,
    SHORT_FACTORS,
    Architecture,
    architecture_of,
    layer_name,
    read_config,
)
from eagle3_jax.conversion.gguf.header import Header, Tensor, read_header
from eagle3_jax.conversion.gguf.tokenizer import (
    read_tokenizer_config,
    read_tokenizer_json,
    token_fields,
)
from eagle3_jax.conversion.quantised import Quantisation
from eagle3_jax.conversion.quantised.arrays import Dequantised

_STACK = re.compile(r"blk\.(\d{1,9})\.ffn_(gate|up|down)_exps\.(weight|bias)")


class Contents(NamedTuple):
    """A GGUF file in the form of a Hugging Face checkpoint."""

    config: dict[str, Any]  #: The ``config.json``.
    tensors: dict[str, Any]  #: Tensors by Hugging Face names.
    held: dict[str, Tensor]  #: The stored tensors by llama.cpp's names.
    #: The types of quantised tensors; ``None`` if there are none.
    quantisation: Quantisation | None


def read_contents(path: Path) -> Contents:
    """Reads a file.

    Raises:
        CheckpointError: The file is damaged or unsupported; the message gives the reason.
    """
    header = read_header(path)
    row = architecture_of(header)
    quantisation = _quantisation(header)
    # float16 and bfloat16 cannot represent dequantised weights exactly.
    dtype = {} if quantisation is None else {"dtype": "float32"}
    config = {**read_config(header, row), **token_fields(header), **dtype}
    return Contents(config, _tensors(header, row, config), header.tensors, quantisation)


def read_text(path: Path, name: str) -> str | None:
    """Builds the text of a JSON file of the configuration or the tokenizer, by the file's name.

    Returns ``None`` for names other than ``config.json``, ``tokenizer.json`` and
    ``tokenizer_config.json``, and for a file without a tokenizer.

    Raises:
        CheckpointError: See :func:`read_contents`, or the tokenizer is unsupported.
    """
    if name == "config.json":
        value = read_contents(path).config
    elif name in _TOKENIZER_FILES:
        value = _TOKENIZER_FILES[name](read_header(path))
    else:
        return None
    return None if value is None else json.dumps(value, ensure_ascii=False, indent=2) + "\n"


_TOKENIZER_FILES = {
    "tokenizer.json": read_tokenizer_json,
    "tokenizer_config.json": read_tokenizer_config,
}


def _quantisation(header: Header) -> Quantisation | None:
    quantised = [tensor for tensor in header.tensors.values() if tensor.is_quantised]
    sizes = collections.Counter[str]()
    for tensor in quantised:
        sizes[tensor.type] += tensor.size
    words = ", ".join(type for type, _ in sizes.most_common())
    return Quantisation(f"GGUF {words}", "", len(quantised)) if quantised else None


def _tensors(header: Header, row: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, tensor in header.tensors.items():
        # The configuration contains these factors.
        if name == ROPE_FREQS or (name in (LONG_FACTORS, SHORT_FACTORS) and row.name == "phi3"):
            continue

        stack = _STACK.fullmatch(name)
        if stack is not None and row.name == "gpt-oss":
            results |= _fused(header, *stack.groups())
        elif stack is not None:
            prefix = f"model.layers.{stack[1]}.mlp.experts"
            for index in range(tensor.shape[0]):
                results[f"{prefix}.{index}.{stack[2]}_proj.{stack[3]}"] = tensor.part(index)
        elif re.fullmatch(r"blk\.\d{1,9}\.attn_[kv]_b\.weight", name):
            results |= _keys_and_values(header, name)
        else:
            results[layer_name(row, name)] = _undone(header, row, config, name)
    return results


def _undone(header: Header, row: Architecture, config: dict[str, Any], name: str) -> Dequantised:
    """Returns a tensor without the changes of llama.cpp's converter."""
    tensor = header.tensors[name]
    if row.norm_offset and name.endswith("norm.weight"):
        offset = np.float32(row.norm_offset)

        def without_offset() -> tuple[np.ndarray, None]:
            return np.asarray(tensor, np.float32) - offset, None

        return Dequantised(tensor.shape, tensor.stored, without_offset)

    match = re.search(r"\.attn_([qk])\.(weight|bias)$", name)
    if match is None or not row.permuted:
        return tensor

    # llama.cpp rotates neighbouring rows, transformers the two halves of a head: the converter
    # moved row (half, pair) of every head to (pair, half).
    heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
    rows, *inputs = tensor.shape
    if rows % (2 * heads):
        raise CheckpointError(
            f"{header.path}: {name} has {rows} rows, which are not those of {heads} heads"
        )
    pairs = tensor.reshape(heads, rows // heads // 2, 2, *inputs)
    return pairs.swapaxes(1, 2).reshape(rows, *inputs)


def _fused(header: Header, layer: str, name: str, suffix: str) -> dict[str, Dequantised]:
    """Returns a stack of gpt-oss's experts ``[E, in, out]``."""
    parts = ("down",) if name == "down" else ("gate", "up")
    names = [f"blk.{layer}.ffn_{part}_exps.{suffix}" for part in parts]
    tensors = list(map(header.tensor, names))
    shapes = [list(tensor.shape) for tensor in tensors]
    num_axes = 2 if suffix == "bias" else 3
    if shapes[0] != shapes[-1] or len(shapes[0]) != num_axes:
        raise CheckpointError(
            f"{header.path}: the experts of block {layer} have {' and '.join(parts)} of shape "
            f"{' and '.join(map(str, shapes))}; they must agree and have {num_axes} axes"
        )

    experts, width, *inputs = shapes[0]
    shape = (experts, len(parts) * width, *inputs)

    # The converter separated gate and up. Published files have their columns in turn.
    def interleaved() -> tuple[np.ndarray, None]:
        return np.stack(tensors, 2).reshape(shape), None

    dtype = np.result_type(*(tensor.dtype for tensor in tensors))
    stack = Dequantised(shape, tensors[0].stored, interleaved, dtype=dtype)
    stem = f"model.layers.{layer}.mlp.experts.{'_'.join(parts)}_proj"
    return {f"{stem}_bias": stack} if suffix == "bias" else {stem: stack.swapaxes(1, 2)}


def _keys_and_values(header: Header, name: str) -> dict[str, Dequantised]:
    """Returns ``kv_b_proj``, which has the rows of keys and then those of values, head by head.

    The file has them as two tensors, keys as ``[H, rank, D]`` and values as ``[H, D, rank]``.
    """
    layer = name.split(".")[1]
    keys = header.tensor(f"blk.{layer}.attn_k_b.weight")
    values = header.tensor(f"blk.{layer}.attn_v_b.weight")
    # Keys without three axes are not those of heads; the check below refuses them.
    heads, rank, key_dim = keys.shape if keys.ndim == 3 else (0, 0, 0)
    if values.ndim != 3 or values.shape[::2] != (heads, rank):
        raise CheckpointError(
            f"{header.path}: block {layer} has keys {list(keys.shape)} and values"
            f" {list(values.shape)}; expected [heads, rank, size] and [heads, size, rank]"
        )

    shape = (heads * (key_dim + values.shape[1]), rank)
    rows = [keys.swapaxes(1, 2), values]

    def concatenated() -> tuple[np.ndarray, None]:
        return np.concatenate(rows, 1).reshape(shape), None

    dtype = np.result_type(keys.dtype, values.dtype)
    projection = Dequantised(shape, keys.stored, concatenated, dtype=dtype)
    return {f"model.layers.{layer}.self_attn.kv_b_proj.weight": projection}
