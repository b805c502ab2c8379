"""Native checkpoints: ``eagle3_jax.json`` and an Orbax tree, bit-equal to what was written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conversion import rules
from conversion.eagle3 import HeadCheckpoint, check_fit
from conversion.errors import CheckpointError
from conversion.files import NATIVE_FILE, copy_tokenizer, new_directory, read_json, write_json
from conversion.hf_config import Fields
from conversion.kinds import EAGLE3, TARGET
from conversion.llama import TargetCheckpoint
from conversion.rules import Params
from eagle3_jax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from eagle3_jax.models.config import DecoderConfig, RopeConfig
from eagle3_jax.models.decoder import DecoderTarget

FORMAT = 2
_PARAMS = "params"


def is_native(directory: Path) -> bool:
    """Whether a directory is one of ours."""
    return (directory / NATIVE_FILE).is_file()


def write_native(checkpoint: TargetCheckpoint | HeadCheckpoint, directory: str | Path) -> None:
    """Write a new native directory.

    Raises:
        CheckpointError: The directory exists, or parameters and configuration differ.
    """
    where = str(checkpoint.source)
    values: dict[str, Any] = {
        "format": FORMAT,
        "config": dataclasses.asdict(checkpoint.config),
        "dtype": checkpoint.dtype,
    }
    if isinstance(checkpoint, TargetCheckpoint):
        leaves = _checked(checkpoint.params, DecoderTarget(checkpoint.config).param_shapes(), where)
        values |= {"kind": TARGET, "stop_tokens": list(checkpoint.stop_tokens)}
    else:
        config = checkpoint.config
        leaves = _checked(checkpoint.head, Eagle3Drafter(config).param_shapes(), where)
        leaves = {f"head.{path}": leaf for path, leaf in leaves.items()}
        leaves["draft_to_target"] = np.asarray(checkpoint.draft_to_target, np.int32)
        if checkpoint.embedding is not None:
            leaves["embedding"] = np.asarray(checkpoint.embedding)
        values |= {
            "kind": EAGLE3,
            "has_embedding": checkpoint.embedding is not None,
            "num_target_layers": checkpoint.num_target_layers,
        }
    import orbax.checkpoint as ocp  # takes longer to import than most checkpoints to read

    with new_directory(directory) as temporary:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            # Flat, because Orbax would turn the integer keys of layer lists into strings.
            checkpointer.save(temporary / _PARAMS, {k: np.ascontiguousarray(v) for k, v in leaves.items()})
        write_json(temporary / NATIVE_FILE, values)
        copy_tokenizer(checkpoint.source, temporary)


def read_native_target(directory: Path) -> TargetCheckpoint:
    """Read a native target.

    Raises:
        CheckpointError: It is not one, or is damaged.
    """
    fields = _description(directory, TARGET)
    config = _decoder(fields.section("config"))
    leaves = read_leaves(directory)
    stop_tokens = fields.values.get("stop_tokens")
    if not isinstance(stop_tokens, list):
        raise CheckpointError(f"{fields.where}: stop_tokens is {stop_tokens!r}; expected a list of token ids")
    params = _nested(leaves, DecoderTarget(config).param_shapes(), str(directory))
    return TargetCheckpoint(
        config=config,
        params=params,
        stop_tokens=tuple(stop_tokens),
        source=directory,
        dtype=rules.main_dtype(params),
    )


def read_native_head(directory: Path, target: DecoderConfig | None) -> HeadCheckpoint:
    """Read a native head.

    Raises:
        CheckpointError: It is not one, is damaged, or does not fit the target.
    """
    fields = _description(directory, EAGLE3)
    section = fields.section("config")
    values = {**section.values, "layer": _decoder(section.section("layer"))}
    values["aux_layers"] = tuple(values.get("aux_layers") or ())
    config = _build(Eagle3Config, values, section.where)
    if target is not None:
        check_fit(config, config.aux_layers, target, str(directory))
    leaves = read_leaves(directory)
    embedding = leaves.pop("embedding", None)
    if fields.flag("has_embedding") != (embedding is not None) or "draft_to_target" not in leaves:
        raise CheckpointError(f"{directory} is incomplete: its parameters are not those that {NATIVE_FILE} describes")
    draft_to_target = leaves.pop("draft_to_target")
    head = _nested(
        {path.removeprefix("head."): leaf for path, leaf in leaves.items()},
        Eagle3Drafter(config).param_shapes(),
        str(directory),
    )
    return HeadCheckpoint(
        config=config,
        head=head,
        draft_to_target=draft_to_target,
        embedding=embedding,
        dialect="jax",
        source=directory,
        dtype=rules.main_dtype(head),
        num_target_layers=fields.get("num_target_layers") if target is None else target.num_layers,
    )


def read_leaves(directory: Path) -> dict[str, np.ndarray]:
    """All arrays of a native checkpoint by dotted path.

    Raises:
        CheckpointError: They are missing or damaged.
    """
    path = (directory / _PARAMS).absolute()
    if not path.is_dir():
        raise CheckpointError(f"{directory} has no {_PARAMS}/ beside {NATIVE_FILE}; it is incomplete, convert it again")
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            tree = checkpointer.metadata(path).item_metadata.tree
            as_numpy = dict.fromkeys(tree, ocp.RestoreArgs(restore_type=np.ndarray))
            return checkpointer.restore(path, restore_args=as_numpy)
        # Orbax and TensorStore report damage as any of these.
        except (ValueError, OSError, KeyError, AttributeError, TypeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{path} is damaged ({reason[:160]}); convert the checkpoint again") from None


def _description(directory: Path, kind: str) -> Fields:
    fields = Fields(read_json(directory / NATIVE_FILE), str(directory / NATIVE_FILE))
    if fields.get("format") != FORMAT:
        raise CheckpointError(f"{fields.where}: format is {fields.get('format')!r}; this version reads format {FORMAT}")
    if fields.get("kind") != kind:
        hint = "give it as the drafter" if kind == TARGET else "give it as the target"
        raise CheckpointError(f"{directory} holds a {fields.get('kind')}, not a {kind}; {hint}")
    return fields


def _decoder(section: Fields) -> DecoderConfig:
    rope = _build(RopeConfig, dict(section.section("rope").values), section.where)
    return _build(DecoderConfig, {**section.values, "rope": rope}, section.where)


def _build(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    """A configuration from exactly its fields: a default of today must not stand in for a value of then."""
    names = {field.name for field in dataclasses.fields(kind)}
    if set(values) != names:
        raise CheckpointError(
            f"{where}: the fields {sorted(set(values) ^ names)} are missing or unknown; convert it again"
        )
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from None


def _checked(params: Params, shapes: Params, where: str) -> dict[str, np.ndarray]:
    identity = [rules.Rule(path, path) for path, _ in rules.flatten(shapes)]
    return rules.write_params(identity, params, shapes, where=where)


def _nested(leaves: Mapping[str, np.ndarray], shapes: Params, where: str) -> Params:
    identity = [rules.Rule(path, path) for path, _ in rules.flatten(shapes)]
    return rules.read_params(identity, leaves, shapes, where=where)
