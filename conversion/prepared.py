"""The int8 form of a published model, next to its file in the user's cache.

Dequantising, rotating and quantising the file again takes seconds at every start.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle3_jax import models
from eagle3_jax.conversion import native, reading, rules
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.families import family_of
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.files import read_json, write_json
from eagle3_jax.conversion.quantised import Quantisation
from eagle3_jax.conversion.quantised.arrays import Shaped
from eagle3_jax.conversion.rules import Params
from eagle3_jax.conversion.sidecars import copy_tokenizer
from eagle3_jax.conversion.targets import TargetCheckpoint
from eagle3_jax.conversion.tensors import SAFETENSORS, read_tensors, write_tensors
from eagle3_jax.files.published import published_at
from eagle3_jax.files.writing import WriteError, whole_directory
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.quantised import Int8Kernel

WEIGHTS = "int8"
_FILE = "prepared.json"
# Parts of an Int8Kernel, as ends of the names of tensors.
_VALUES = ".values"
_SCALE = ".scale"


class _Kept(Shaped):
    """A parameter whose int8 kernel is at hand."""

    kept_as = WEIGHTS

    def __init__(self, kernel: Int8Kernel):
        self.kernel = kernel
        self.shape = kernel.shape
        self.dtype = np.dtype(np.float32)

    def stored_kernel(self) -> Int8Kernel:
        return self.kernel


def place(source: Path, weights: str) -> Path | None:
    """Returns the directory of the prepared form, which may not exist.

    Its name is a hash of the file and of the code that converts and quantises. Returns ``None`` for
    other kinds of weights, and for files outside the cache: those belong to the user.
    """
    published = published_at(source)
    if weights != WEIGHTS or published is None:
        return None
    digest = hashlib.sha256(f"{published.sha256} {_code()}".encode())
    return source.parent / f"{WEIGHTS}-{digest.hexdigest()[:16]}"


@functools.cache
def _code() -> str:
    """Returns a hash of the modules on which a prepared form depends."""
    digest = hashlib.sha256()
    for module in (__file__, models.__file__):
        for path in sorted(Path(str(module)).parent.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def read_target(source: Path, weights: str) -> TargetCheckpoint:
    """Reads a target, from its prepared form if there is one that is not damaged.

    Raises:
        CheckpointError: See :func:`eagle3_jax.conversion.read_target`.
    """
    directory = place(source, weights)
    if directory is not None and directory.is_dir():
        with contextlib.suppress(CheckpointError):
            return _read(directory)
    return reading.read_target(source)


def _read(directory: Path) -> TargetCheckpoint:
    fields = Fields(read_json(directory / _FILE), str(directory / _FILE))
    config = native.from_json(DecoderConfig, fields.get("config"), fields.where)
    leaves: dict[str, Any] = read_tensors(directory)
    rotations = fields.section("rotations").values
    parts = [name + part for name in rotations for part in (_VALUES, _SCALE)]
    is_complete = all((directory / name).is_file() for name in fields.words("sidecars"))
    if not is_complete or not leaves.keys() >= {*parts}:
        raise CheckpointError(f"{directory} is incomplete")
    for name, rotation in rotations.items():
        kernel = Int8Kernel(
            values=leaves.pop(name + _VALUES),
            scale=leaves.pop(name + _SCALE),
            is_table=name == "embedding",
            rotation=rotation,
        )
        leaves[name] = _Kept(kernel)

    shapes = DecoderTarget(config).param_shapes()
    return TargetCheckpoint(
        config=config,
        family=family_of(fields.get("family"), fields.where),
        params=rules.read_params(native.identity(shapes), leaves, shapes, where=str(directory)),
        stop_tokens=fields.token_ids("stop_tokens", config.vocab_size),
        source=directory,
        dtype=fields.get("dtype"),
        quantisation=Quantisation(WEIGHTS, WEIGHTS, len(rotations)),
    )


def write(checkpoint: TargetCheckpoint, params: Params, weights: str) -> None:
    """Writes the prepared form of a file from the cache; does nothing for other checkpoints.

    It replaces those of earlier versions. A form that cannot be written is left out: the next start
    takes longer.

    Args:
        checkpoint: The target as it was read.
        params: Its parameters on the device.
        weights: How kernels are stored.
    """
    directory = place(checkpoint.source, weights)
    if directory is None:
        return
    for earlier in directory.parent.glob(f"{WEIGHTS}-*"):
        shutil.rmtree(earlier, ignore_errors=True)

    kernels = jax.tree.structure(checkpoint.params).flatten_up_to(params)
    tensors: dict[str, Any] = {}
    rotations: dict[str, int] = {}
    for (name, leaf), kernel in zip(rules.flatten(checkpoint.params), kernels, strict=True):
        if isinstance(kernel, Int8Kernel):
            tensors[name + _VALUES] = np.asarray(kernel.values)
            tensors[name + _SCALE] = np.asarray(kernel.scale)
            rotations[name] = kernel.rotation
        else:
            # In the type of the file: the precision of the next start may be another.
            tensors[name] = np.asarray(leaf)

    with contextlib.suppress(WriteError), whole_directory(directory) as temporary:
        write_tensors(temporary / SAFETENSORS, tensors)
        copy_tokenizer(checkpoint.source, temporary)
        values = {
            "config": native.to_json(checkpoint.config),
            "family": checkpoint.family.model_type,
            "stop_tokens": checkpoint.stop_tokens,
            "dtype": checkpoint.dtype,
            "rotations": rotations,
            "sidecars": [path.name for path in temporary.iterdir() if path.name != SAFETENSORS],
        }
        write_json(temporary / _FILE, values)
