"""Native checkpoints: ``eagle3_jax.json`` and an Orbax tree of arrays, bit for bit.

The JSON file holds the configuration strictly: every field is named, and no default replaces a
missing one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.conversion import draft_vocab, rules
from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.families import Family, family_of
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.files import NATIVE_FILE, new_directory, read_json, write_json
from eagle3_jax.conversion.heads import HEADS, HeadCheckpoint
from eagle3_jax.conversion.heads.head import check_embedding, check_fit
from eagle3_jax.conversion.quantised.arrays import Shaped
from eagle3_jax.conversion.rules import Params
from eagle3_jax.conversion.sidecars import copy_tokenizer
from eagle3_jax.conversion.targets import TargetCheckpoint, dense_params
from eagle3_jax.devices.host import copy_blocks
from eagle3_jax.files.writing import orbax_quiet
from eagle3_jax.models.config import (
    DecoderConfig,
    Experts,
    GatedDelta,
    GatedMLP,
    GroupedQuery,
    Latent,
)
from eagle3_jax.models.decoder import DecoderTarget

FORMAT = 4
# Arrays of this many bytes are written together, and are in memory at a time.
GROUP_BYTES = 2**28
# Orbax copies a chunk to write or read it.
_CHUNK_BYTES = 2**25
TARGET = "target"
_PARAMS = "params"

# Values of `kind`, for fields that may hold one of several classes. Files contain them, so they are
# never renamed.
_KINDS: dict[Any, str] = {
    GroupedQuery: "grouped-query",
    Latent: "latent",
    GatedDelta: "gated-delta",
    GatedMLP: "gated",
    Experts: "experts",
}


def is_native(directory: Path) -> bool:
    """Tells whether a directory holds a native checkpoint."""
    return (directory / NATIVE_FILE).is_file()


def read_kind(directory: Path) -> str:
    """Reads the kind of a native checkpoint: ``target`` or the name of a kind of head."""
    return read_description(directory).one_of("kind", (TARGET, *HEADS))


def write_native(checkpoint: TargetCheckpoint | HeadCheckpoint, directory: str | Path) -> None:
    """Writes a new native directory.

    Raises:
        CheckpointError: The directory exists, or the parameters do not fit the configuration.
    """
    import orbax.checkpoint as ocp  # imported late: this takes longer than reading most checkpoints

    where = str(checkpoint.source)
    values = {"format": FORMAT, "config": to_json(checkpoint.config), "dtype": checkpoint.dtype}

    if isinstance(checkpoint, TargetCheckpoint):
        shapes = DecoderTarget(checkpoint.config).param_shapes()
        written = rules.write_params(
            identity(shapes), dense_params(checkpoint), shapes, where=where
        )
        leaves: dict[str, Any] = {**written}
        values |= {
            "kind": TARGET,
            "family": checkpoint.family.model_type,
            "stop_tokens": list(checkpoint.stop_tokens),
        }

    else:
        shapes = HEADS[checkpoint.method].param_shapes(checkpoint.config)
        written = rules.write_params(identity(shapes), checkpoint.head, shapes, where=where)
        leaves = {f"head.{path}": leaf for path, leaf in written.items()}
        if checkpoint.draft_to_target is not None:
            leaves["draft_to_target"] = np.asarray(checkpoint.draft_to_target, np.int32)
        if checkpoint.embedding is not None:
            leaves["embedding"] = np.asarray(checkpoint.embedding)
        values |= {
            "kind": checkpoint.method,
            "has_embedding": checkpoint.embedding is not None,
            "num_target_layers": checkpoint.num_target_layers,
        }

    groups = _groups(leaves)
    if len(groups) > 1:
        values["groups"] = len(groups)
    with new_directory(directory, sum(leaf.nbytes for leaf in leaves.values())) as temporary:
        with orbax_quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            for number, paths in enumerate(groups):
                # Flat, because Orbax would turn the integer keys of lists of layers into strings.
                arrays = {path: np.ascontiguousarray(leaves[path]) for path in paths}
                in_chunks = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES)
                checkpointer.save(
                    temporary / _group_name(number),
                    args=ocp.args.PyTreeSave(arrays, save_args=dict.fromkeys(arrays, in_chunks)),
                )
        write_json(temporary / NATIVE_FILE, values)
        copy_tokenizer(checkpoint.source, temporary)


def _groups(leaves: Mapping[str, Any]) -> list[list[str]]:
    """Divides arrays into groups; one group is in memory while it is written."""
    groups: list[list[str]] = [[]]
    filled = 0
    for path, leaf in leaves.items():
        size = leaf.nbytes
        if groups[-1] and filled + size > GROUP_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(path)
        filled += size
    return groups


def _group_name(number: int) -> str:
    return f"{_PARAMS}.{number}" if number else _PARAMS


def read_native_target(directory: Path, extra_family: Family | None = None) -> TargetCheckpoint:
    """Reads a native target; ``extra_family`` is a family in addition to those of the table."""
    fields = read_description(directory)
    family = family_of(fields.get("family"), fields.where, extra_family)
    config = from_json(DecoderConfig, fields.get("config"), f"{fields.where}, config")
    if not isinstance(fields.get("stop_tokens"), list):
        raise fields.wrong("stop_tokens", "expected a list of token ids")
    stop_tokens = fields.token_ids("stop_tokens", config.vocab_size)

    leaves = read_leaves(directory)
    rules.check_layers(
        config.num_layers, leaves, r"blocks\.(\d{1,9})\.", f"{fields.where}: num_layers"
    )
    shapes = DecoderTarget(config).param_shapes()
    params = rules.read_params(identity(shapes), leaves, shapes, where=str(directory))
    return TargetCheckpoint(
        config=config,
        family=family,
        params=params,
        stop_tokens=stop_tokens,
        source=directory,
        dtype=rules.main_dtype(params),
    )


def read_native_head(directory: Path, target: DecoderConfig | None) -> HeadCheckpoint:
    """Reads a native head; a ``target`` is checked against it."""
    fields = read_description(directory)
    where = str(directory)
    kind = HEADS[read_kind(directory)]
    config = from_json(kind.classes[0], fields.get("config"), f"{fields.where}, config")
    if target is not None:
        check_fit(config, target, where)

    leaves = read_leaves(directory)
    stored = {name: leaves.pop(name, None) for name in ("embedding", "draft_to_target")}
    embedding, draft_to_target = (
        None if leaf is None else np.asarray(leaf) for leaf in stored.values()
    )

    # Without a map draft ids are target ids; a smaller vocabulary needs one.
    has_ids = draft_to_target is not None or config.draft_vocab_size == config.vocab_size
    if fields.flag("has_embedding") != (embedding is not None) or not has_ids:
        raise CheckpointError(
            f"{directory} is incomplete: its parameters are not those that {NATIVE_FILE} describes"
        )
    if draft_to_target is not None:
        size = config.draft_vocab_size
        draft_vocab.check_ids(draft_to_target, size, config.vocab_size, f"{where}: draft_to_target")
    if embedding is not None:
        check_embedding(config, embedding, where)

    leaves = {path.removeprefix("head."): leaf for path, leaf in leaves.items()}
    for stack, count in kind.stacks.items():
        rules.check_layers(
            count(config),
            leaves,
            rf"{stack}\.(\d{{1,9}})\.",
            f"{fields.where}: layers in {stack!r}",
        )

    shapes = kind.param_shapes(config)
    head = rules.read_params(identity(shapes), leaves, shapes, where=where)
    depth = fields.optional_size("num_target_layers")
    return HeadCheckpoint(
        method=kind.name,
        config=config,
        head=head,
        draft_to_target=draft_to_target,
        embedding=embedding,
        dialect="jax",
        source=directory,
        dtype=rules.main_dtype(head),
        num_target_layers=depth if target is None else target.num_layers,
    )


def read_description(directory: Path) -> Fields:
    """Reads the JSON file of a native checkpoint."""
    path = directory / NATIVE_FILE
    fields = Fields(read_json(path), str(path))
    if fields.get("format") != FORMAT:
        raise fields.wrong(
            "format", f"this version reads format {FORMAT}: convert the original checkpoint again"
        )
    return fields


def read_leaves(directory: Path) -> dict[str, StoredLeaf]:
    """Finds all arrays of a native checkpoint by dotted path; they are read when they are used."""
    leaves: dict[str, StoredLeaf] = {}
    for number in range(read_description(directory).size("groups", 1)):
        leaves |= _read_group((directory / _group_name(number)).absolute())
    return leaves


def _read_group(path: Path) -> dict[str, StoredLeaf]:
    if not path.is_dir():
        raise CheckpointError(
            f"{path.parent} has no {path.name}/ next to {NATIVE_FILE}; it is incomplete, convert it"
            " again"
        )
    with _orbax(path) as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree

    if not isinstance(tree, dict) or not all(hasattr(leaf, "shape") for leaf in tree.values()):
        raise CheckpointError(f"{path} is not a flat tree of arrays; convert the checkpoint again")
    return {name: StoredLeaf(path, name, leaf.shape, leaf.dtype) for name, leaf in tree.items()}


class StoredLeaf(Shaped):
    """An array of a native checkpoint, which is read whenever it is used.

    Attributes:
        shape: Its shape.
        dtype: Its type.
    """

    # Orbax reads with threads of its own. One array at a time is as fast, and holds less memory.
    _lock = threading.Lock()

    def __init__(self, directory: Path, name: str, shape: Sequence[int], dtype: Any):
        """See the class."""
        self._directory = directory
        self._name = name
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads the array."""
        import orbax.checkpoint as ocp

        name = self._name
        as_numpy = ocp.args.PyTreeRestore(
            item={name: 0},
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        with _orbax(self._directory) as checkpointer:
            array = checkpointer.restore(self._directory, args=as_numpy)[name]
        return array if dtype is None else array.astype(dtype, copy=False)

    def copy_to(self, array: np.ndarray) -> None:
        """Reads into an array of this shape."""
        with self._lock:
            copy_blocks(array, np.asarray(self))

    def swapaxes(self, first: int, second: int) -> np.ndarray:
        """Reads the array and exchanges two axes."""
        return np.asarray(self).swapaxes(first, second)


@contextlib.contextmanager
def _orbax(path: Path) -> Iterator[Any]:
    """Yields a checkpointer; damage of the files in ``path`` is one error."""
    import orbax.checkpoint as ocp

    try:
        with orbax_quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            yield checkpointer
    except Exception as error:  # Orbax and TensorStore report damage as almost any type
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{path} is damaged ({reason[:160]}); convert the checkpoint again"
        ) from None


def identity(shapes: Params) -> list[rules.Rule]:
    """Returns the table of a checkpoint whose tensors have the names of our parameters."""
    return [rules.Rule(path, path) for path, _ in rules.flatten(shapes)]


def to_json(config: Any) -> Any:
    """Returns a configuration as JSON values."""
    if isinstance(config, tuple):
        return [to_json(entry) for entry in config]
    if not dataclasses.is_dataclass(config):
        return config
    kind = {"kind": _KINDS[type(config)]} if type(config) in _KINDS else {}
    names = [field.name for field in dataclasses.fields(config)]
    return kind | {name: to_json(getattr(config, name)) for name in names}


def from_json(config: type, value: Any, where: str) -> Any:
    """Builds a configuration from a JSON object that has exactly its fields."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is {short(value)}; expected an object")
    hints = typing.get_type_hints(config)
    known = {*hints, "kind"} if config in _KINDS else {*hints}
    wrong = sorted((value.keys() - known) | (hints.keys() - value.keys()))
    if wrong:
        raise CheckpointError(
            f"{where}: the fields {wrong} are missing or unknown; convert it again"
        )
    typed = {name: _typed(hint, value[name], name, where) for name, hint in hints.items()}
    try:
        return config(**typed)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from None


def _typed(hint: Any, value: Any, name: str, where: str) -> Any:
    """Converts a JSON value to the type of a field."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    if value is None and type(None) in options:
        return None

    configs = [option for option in options if dataclasses.is_dataclass(option)]
    if configs:
        kind = value.get("kind") if isinstance(value, dict) else None
        config = next((option for option in configs if _KINDS.get(option, kind) == kind), None)
        if config is None:
            raise CheckpointError(
                f"{where}: {name} is of kind {short(kind)}, which this version does not know"
            )
        return from_json(config, value, f"{where}, {name}")  # type: ignore[arg-type]

    if typing.get_origin(hint) is tuple and isinstance(value, list):
        entry_type = typing.get_args(hint)[0]
        return tuple(
            _typed(entry_type, entry, f"{name}[{index}]", where)
            for index, entry in enumerate(value)
        )
    # JSON writers may drop the point of a float.
    if float in options and type(value) is int and abs(value) < 1e300:
        return float(value)
    if not any(_is_a(value, option) for option in options):
        expected = getattr(hint, "__name__", str(hint).replace("typing.", ""))
        raise CheckpointError(f"{where}: {name} is {short(value)}; expected {expected}")
    return value


def _is_a(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if isinstance(value, bool):
        return hint is bool
    return typing.get_origin(hint) is None and isinstance(value, hint)
