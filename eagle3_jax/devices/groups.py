"""Runs a batch a few rows at a time, so that the temporary memory of a prefill does not grow with the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax

from eagle3_jax.devices.sharding import DATA

In = TypeVar("In")
Out = TypeVar("Out")

# Limits of one forward, per device. 8,192 tokens keep the matrix products busy. Each group makes caches of its own that
# are then copied; 16,384 slots bound them. Below 256 tokens a forward would read all weights for little work.
TOKENS = 8192
SLOTS = 16384
FEWEST_TOKENS = 256


def rows_per_group(batch: int, tokens: int, capacity: int) -> int:
    """Returns how many rows go through one forward: the whole batch if it has at most :data:`TOKENS` tokens per device.

    A larger batch is split into equal groups within the limits above. The result divides ``batch``, and the data axis
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
    # Leaves and not trees are reshaped: the annotated shapes of a tree's class are checked when it is put together.
    leaves, of_rows = jax.tree.flatten(rows)
    groups = len(leaves[0]) // size
    if groups == 1:
        return run(rows)
    # Group g has rows g, g + groups, ...: a device of a mesh holds consecutive rows, so every group uses all devices.
    apart = [leaf.reshape(size, groups, *leaf.shape[1:]) for leaf in leaves]

    of_out: Any = None

    def group(index: jax.Array | int) -> list[jax.Array]:
        nonlocal of_out
        some = [lax.dynamic_index_in_dim(leaf, index, axis=1, keepdims=False) for leaf in apart]
        out, of_out = jax.tree.flatten(run(jax.tree.unflatten(of_rows, some)))
        return out

    def put(index: jax.Array, out: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(out, group(index), strict=True)
        return [lax.dynamic_update_index_in_dim(leaf, new, index, axis=1) for leaf, new in pairs]

    shapes = jax.eval_shape(lambda: group(0))
    out = [lax.full((size, groups, *one.shape[1:]), 0, one.dtype) for one in shapes]
    out = lax.fori_loop(0, groups, put, out)
    return jax.tree.unflatten(of_out, [leaf.reshape(size * groups, *leaf.shape[2:]) for leaf in out])
