"""Draft heads out again, in the layouts that other engines load.

A layout that cannot express a head refuses it and names the flag: an engine that silently ignores one would still run,
with an acceptance that nobody can explain.
"""

from __future__ import annotations

from pathlib import Path

from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.files import copy_tokenizer, new_directory, write_json
from eagle3_jax.conversion.heads import HEADS
from eagle3_jax.conversion.heads.head import HeadCheckpoint
from eagle3_jax.conversion.tensors import write_tensors

LAYOUTS: tuple[str, ...] = tuple(dict.fromkeys(layout for kind in HEADS.values() for layout in kind.layouts))


def write_head(checkpoint: HeadCheckpoint, directory: str | Path, dialect: str) -> None:
    """Write a new head directory.

    Args:
        checkpoint: The head.
        directory: Must not exist.
        dialect: One of the layouts of its method, as in ``eagle`` for the official code, ``sglang`` for SGLang and
            SpecForge, ``vllm`` for vLLM.

    Raises:
        CheckpointError: The method has no such layout, it cannot express the head, or the directory exists.
    """
    kind = HEADS[checkpoint.method]
    if dialect not in kind.layouts:
        raise CheckpointError(f"{dialect!r} is no layout of {kind.label} heads; use one of {', '.join(kind.layouts)}")
    assert kind.write is not None
    layout = kind.write(checkpoint, dialect)
    with new_directory(directory) as temporary:
        write_tensors(temporary / layout.file, layout.tensors)
        write_json(temporary / "config.json", layout.values)
        copy_tokenizer(checkpoint.source, temporary)
