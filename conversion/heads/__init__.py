"""The table of draft heads, in the order of their recognition, and functions for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.files import new_directory, write_json
from eagle3_jax.conversion.heads import (
    dflash,
    dflash2,
    eagle1,
    eagle3,
    gemma4,
    medusa,
    mtp,
    p_eagle,
)
from eagle3_jax.conversion.heads.head import HeadCheckpoint, HeadKind, Layout
from eagle3_jax.conversion.sidecars import copy_tokenizer
from eagle3_jax.conversion.tensors import Signs, write_tensors
from eagle3_jax.devices.sharding import param_shardings
from eagle3_jax.models.layers import Precision, cast
from eagle3_jax.models.quantised import quantised
from eagle3_jax.types import EmbeddingTables

HEADS: dict[str, HeadKind] = {
    kind.name: kind
    for kind in (
        gemma4.KIND,
        medusa.KIND,
        mtp.KIND,
        dflash2.KIND,
        dflash.KIND,
        p_eagle.KIND,
        eagle1.KIND,
        eagle3.KIND,
    )
}
LAYOUTS: tuple[str, ...] = tuple(
    dict.fromkeys(layout for kind in HEADS.values() for layout in kind.layouts)
)


def kind_of(config: Any) -> HeadKind:
    """Returns the kind of head of a configuration; variants of a method share a kind."""
    return next(kind for kind in HEADS.values() if type(config) is kind.classes[0])


def write_head(checkpoint: HeadCheckpoint, directory: str | Path, dialect: str) -> None:
    """Writes a head to a new directory.

    Args:
        checkpoint: The head.
        directory: A directory that does not exist yet.
        dialect: A layout of the head's method, such as ``eagle`` for the official code, ``sglang``
            for SGLang and SpecForge, or ``vllm`` for vLLM.

    Raises:
        CheckpointError: The method has no such layout, the layout cannot express the head, or the
            directory exists.
    """
    kind = HEADS[checkpoint.method]
    if dialect not in kind.layouts:
        raise CheckpointError(
            f"{dialect!r} is not a layout of {kind.label} heads; use one of"
            f" {', '.join(kind.layouts)}"
        )
    layout = kind.write(checkpoint, dialect)
    with new_directory(directory) as temporary:
        write_tensors(temporary / layout.file, layout.tensors)
        write_json(temporary / "config.json", layout.values)
        if layout.generation is not None:
            write_json(temporary / "generation_config.json", layout.generation)
        copy_tokenizer(checkpoint.source, temporary)


def make_drafter(
    checkpoint: HeadCheckpoint,
    tables: EmbeddingTables,
    precision: Precision,
    mesh: Mesh | None,
    weights: str = "dense",
) -> tuple[Any, dict[str, Any]]:
    """Builds a drafter and its parameters.

    Args:
        checkpoint: The head.
        tables: The embedding and output tables of the target.
        precision: Types of the operands and of the results of matrix products.
        mesh: The mesh that parameters are placed on; ``None`` for the default device.
        weights: Storage of kernels: a name from :data:`eagle3_jax.models.quantised.WEIGHTS`.
    """
    drafter = HEADS[checkpoint.method].classes[1](checkpoint.config, precision=precision)

    # A head without an embedding, or with the target's, shares that of the target.
    embedding = None
    if checkpoint.embedding is not None:
        table = tables.embedding
        # An embedding in int8 has two leaves, and values come first.
        sharding = None if mesh is None else jax.tree.leaves(table)[0].sharding
        embedding = cast(checkpoint.embedding, precision, sharding)
        if isinstance(table, jax.Array) and jnp.array_equal(embedding, table):
            embedding = None

    ids = checkpoint.draft_to_target
    owned: dict[str, Any] = {"head": checkpoint.head}
    if ids is not None:
        owned["draft_to_target"] = np.asarray(ids, np.int32)
    shardings = {} if mesh is None else param_shardings(mesh, drafter, owned)
    if ids is not None:
        ids = jax.device_put(owned["draft_to_target"], shardings.get("draft_to_target"))

    kernels = quantised(checkpoint.head, drafter.param_products(), weights)
    head = cast(kernels, precision, shardings.get("head"))
    return drafter, drafter.assemble(head, tables, embedding=embedding, draft_to_target=ids)


__all__ = [
    "HEADS",
    "LAYOUTS",
    "HeadCheckpoint",
    "HeadKind",
    "Layout",
    "Signs",
    "kind_of",
    "make_drafter",
    "write_head",
]
