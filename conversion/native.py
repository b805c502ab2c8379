"""Native checkpoints: ``eagle3_jax.json`` and an Orbax tree, bit-equal to what was written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.conversion import format2, rules
from eagle3_jax.conversion.description import from_json, to_json
from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.families import Family, family_of
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.files import NATIVE_FILE, copy_tokenizer, new_directory, read_json, write_json
from eagle3_jax.conversion.heads import HEADS, HeadCheckpoint
from eagle3_jax.conversion.heads.head import check_fit
from eagle3_jax.conversion.kinds import TARGET, native_heads
from eagle3_jax.conversion.rules import Params
from eagle3_jax.conversion.targets import TargetCheckpoint, dense_params
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.writing import orbax_quiet

FORMAT = 3
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
        "config": to_json(checkpoint.config),
        "dtype": checkpoint.dtype,
    }
    if isinstance(checkpoint, TargetCheckpoint):
        leaves = _checked(dense_params(checkpoint), DecoderTarget(checkpoint.config).param_shapes(), where)
        values |= {"kind": TARGET, "family": checkpoint.family.model_type, "stop_tokens": list(checkpoint.stop_tokens)}
    else:
        leaves = _checked(checkpoint.head, _shapes(checkpoint.method, checkpoint.config), where)
        leaves = {f"head.{path}": leaf for path, leaf in leaves.items()}
        if checkpoint.draft_to_target is not None:
            leaves["draft_to_target"] = np.asarray(checkpoint.draft_to_target, np.int32)
        if checkpoint.embedding is not None:
            leaves["embedding"] = np.asarray(checkpoint.embedding)
        values |= {
            "kind": checkpoint.method,
            "has_embedding": checkpoint.embedding is not None,
            "num_target_layers": checkpoint.num_target_layers,
        }
    import orbax.checkpoint as ocp  # takes longer to import than most checkpoints to read

    with new_directory(directory, sum(leaf.nbytes for leaf in leaves.values())) as temporary:
        with orbax_quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            # Flat, because Orbax would turn the integer keys of layer lists into strings.
            checkpointer.save(temporary / _PARAMS, {k: np.ascontiguousarray(v) for k, v in leaves.items()})
        write_json(temporary / NATIVE_FILE, values)
        copy_tokenizer(checkpoint.source, temporary)


def read_native_target(directory: Path, own: Family | None = None) -> TargetCheckpoint:
    """Read a native target.

    Args:
        directory: Of the checkpoint.
        own: A family beside those of the table.

    Raises:
        CheckpointError: It is not one, or is damaged.
    """
    fields = _description(directory, TARGET)
    family = family_of(fields.get("family"), fields.where, own)
    config = from_json(DecoderConfig, fields.get("config"), f"{fields.where}, config")
    leaves = _leaves(directory, config)
    if not isinstance(fields.get("stop_tokens"), list):
        raise CheckpointError(
            f"{fields.where}: stop_tokens is {short(fields.get('stop_tokens'))}; expected a list of token ids"
        )
    stop_tokens = fields.token_ids("stop_tokens", config.vocab_size)
    rules.check_layers(config.num_layers, leaves, r"blocks\.(\d{1,9})\.", f"{fields.where}: num_layers")
    params = _nested(leaves, DecoderTarget(config).param_shapes(), str(directory))
    return TargetCheckpoint(
        config=config,
        family=family,
        params=params,
        stop_tokens=stop_tokens,
        source=directory,
        dtype=rules.main_dtype(params),
    )


def read_native_head(directory: Path, target: DecoderConfig | None) -> HeadCheckpoint:
    """Read a native head.

    Raises:
        CheckpointError: It is not one, is damaged, or does not fit the target.
    """
    fields = _description(directory, *native_heads())
    method = str(fields.get("kind"))
    config = from_json(_classes(method)[0], fields.get("config"), f"{fields.where}, config")
    if target is not None:
        check_fit(config, config.aux_layers, target, str(directory))
    leaves = _leaves(directory, config)
    embedding = leaves.pop("embedding", None)
    # Without a map draft ids are target ids; of a smaller vocabulary it must be there.
    maps = "draft_to_target" in leaves or config.draft_vocab_size == config.vocab_size
    if fields.flag("has_embedding") != (embedding is not None) or not maps:
        raise CheckpointError(f"{directory} is incomplete: its parameters are not those that {NATIVE_FILE} describes")
    draft_to_target = leaves.pop("draft_to_target", None)
    _check_table(draft_to_target, embedding, config, str(directory))
    for stack, count in HEADS[method].stacks.items():
        of_stack = [path.removeprefix("head.") for path in leaves]
        rules.check_layers(count(config), of_stack, rf"{stack}\.(\d{{1,9}})\.", f"{fields.where}: layers in {stack!r}")
    head = _nested(
        {path.removeprefix("head."): leaf for path, leaf in leaves.items()}, _shapes(method, config), str(directory)
    )
    return HeadCheckpoint(
        method=method,
        config=config,
        head=head,
        draft_to_target=draft_to_target,
        embedding=embedding,
        dialect="jax",
        source=directory,
        dtype=rules.main_dtype(head),
        num_target_layers=_num_target_layers(fields) if target is None else target.num_layers,
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

    with orbax_quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            tree = checkpointer.metadata(path).item_metadata.tree
            as_numpy = dict.fromkeys(tree, ocp.RestoreArgs(restore_type=np.ndarray))
            leaves = checkpointer.restore(path, restore_args=as_numpy)
        except Exception as error:  # Orbax and TensorStore report damage as almost any type
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{path} is damaged ({reason[:160]}); convert the checkpoint again") from None
    if not isinstance(leaves, dict) or not all(isinstance(leaf, np.ndarray) for leaf in leaves.values()):
        raise CheckpointError(f"{path} is no flat tree of arrays; convert the checkpoint again")
    return leaves


def _num_target_layers(fields: Fields) -> int | None:
    return None if fields.get("num_target_layers") is None else fields.integer("num_target_layers")


def _classes(method: str) -> tuple[type, type]:
    classes = HEADS[method].classes
    assert classes is not None  # or it is no native kind
    return classes()


def _shapes(method: str, config: Any) -> Params:
    return _classes(method)[1](config).param_shapes()


def _check_table(table: np.ndarray | None, embedding: np.ndarray | None, config: Any, where: str) -> None:
    """What no parameter's shape checks: the draft vocabulary and the head's own embedding."""
    size = config.draft_vocab_size
    if table is None:
        table = np.arange(size, dtype=np.int32)
    if table.shape != (size,) or table.dtype != np.int32 or len(np.unique(table)) != size:
        raise CheckpointError(f"{where}: draft_to_target is no list of {size} different token ids; convert it again")
    if table.min() < 0 or table.max() >= config.vocab_size:
        raise CheckpointError(f"{where}: draft_to_target leads outside the vocabulary of {config.vocab_size}")
    if embedding is not None:
        rules.check_float(embedding, f"{where}: embedding")
        if embedding.shape != (config.vocab_size, config.width):
            raise CheckpointError(
                f"{where}: embedding has shape {list(embedding.shape)}; expected {[config.vocab_size, config.width]}"
            )


def read_description(directory: Path) -> Fields:
    """What a native checkpoint says of itself, as the present format says it.

    Raises:
        CheckpointError: There is none, or its format is not known.
    """
    path = directory / NATIVE_FILE
    fields = Fields(read_json(path), str(path))
    written = fields.get("format")
    if written not in (FORMAT, format2.FORMAT):
        raise CheckpointError(
            f"{fields.where}: format is {short(written)}; this version reads the formats {format2.FORMAT} and {FORMAT}"
        )
    return fields if written == FORMAT else Fields(format2.description(fields.values, fields.where), fields.where)


def _leaves(directory: Path, config: Any) -> dict[str, np.ndarray]:
    leaves = read_leaves(directory)
    written = read_json(directory / NATIVE_FILE).get("format")
    return leaves if written == FORMAT else format2.leaves(leaves, config)


def _description(directory: Path, *kinds: str) -> Fields:
    fields = read_description(directory)
    if fields.get("kind") not in kinds:
        wanted, hint = ("target", "drafter") if kinds == (TARGET,) else ("draft head", "target")
        raise CheckpointError(f"{directory} holds a {short(fields.get('kind'))}, not a {wanted}; give it as the {hint}")
    return fields


def _checked(params: Params, shapes: Params, where: str) -> dict[str, np.ndarray]:
    identity = [rules.Rule(path, path) for path, _ in rules.flatten(shapes)]
    return rules.write_params(identity, params, shapes, where=where)


def _nested(leaves: Mapping[str, np.ndarray], shapes: Params, where: str) -> Params:
    identity = [rules.Rule(path, path) for path, _ in rules.flatten(shapes)]
    return rules.read_params(identity, leaves, shapes, where=where)
