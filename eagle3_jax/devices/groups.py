"""Runs a batch a few rows at a time, so that a prefill's memory does not grow with the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax

from eagle3_jax.devices.sharding import DATA

In = TypeVar("In")
Out = TypeVar("Out")

# Limits of one forward, per device. 8,192 tokens keep the matrix products busy. Each group
# allocates its own caches, which are then copied; 16,384 slots bound them. Below 256 tokens a
# forward would read all weights for little work.
TOKENS = 8192
SLOTS = 16384
FEWEST_TOKENS = 256


def rows_per_group(batch: int, tokens: int, capacity: int) -> int:
    """Returns how many rows go through one forward.

    It is the whole batch if that has at most :data:`TOKENS` tokens per device. A larger batch is
    split into equal groups within the limits above. The result divides ``batch``, and the data axis
    of a mesh divides the result.

    Args:
        batch: ``B``, rows.
        tokens: ``T``, tokens per row.
        capacity: ``S``, cache slots per row.
    """
    devices = jax.sharding.get_abstract_mesh().shape.get(DATA, 1)
    if batch * tokens <= TOKENS * devices or batch % devices:
        return batch
    most = max(1, min(TOKENS // tokens, max(SLOTS // capacity, FEWEST_TOKENS // tokens))) * devices
    return next(rows for rows in range(most, 0, -devices) if batch % rows == 0)


def map_groups(run: Callable[[In], Out], rows: In, size: int) -> Out:
    """Computes ``run(rows)`` on groups of ``size`` rows, one group after the other.

    Args:
        run: A function that treats every row independently of the others.
        rows: A pytree whose leaves are ``[B ...]``, as are those of the result.
        size: Rows per group; a divisor of ``B``.
    """
    # Leaves are reshaped instead of trees, because building a tree checks the annotated shapes of
    # its class.
    leaves, rows_treedef = jax.tree.flatten(rows)
    groups = len(leaves[0]) // size
    if groups == 1:
        return run(rows)

    # Group g has rows g, g + groups, ...: a device of a mesh holds consecutive rows, so every group
    # uses all devices.
    grouped = [leaf.reshape(size, groups, *leaf.shape[1:]) for leaf in leaves]

    # The structure of the result is known once a group has been traced.
    out_treedef: Any = None

    def run_group(index: jax.Array | int) -> list[jax.Array]:
        nonlocal out_treedef
        group = [lax.dynamic_index_in_dim(leaf, index, axis=1, keepdims=False) for leaf in grouped]
        result = run(jax.tree.unflatten(rows_treedef, group))
        out, out_treedef = jax.tree.flatten(result)
        return out

    def add_group(index: jax.Array, out: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(out, run_group(index), strict=True)
        return [lax.dynamic_update_index_in_dim(leaf, new, index, axis=1) for leaf, new in pairs]

    shapes = jax.eval_shape(lambda: run_group(0))
    out = [lax.full((size, groups, *shape.shape[1:]), 0, shape.dtype) for shape in shapes]
    out = lax.fori_loop(0, groups, add_group, out)
    joined = [leaf.reshape(size * groups, *leaf.shape[2:]) for leaf in out]
    return jax.tree.unflatten(out_treedef, joined)
