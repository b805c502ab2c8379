"""A batch taken a few rows at a time, so that what a forward needs beside its results does not grow with the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax

from eagle3_jax.sharding import DATA

In, Out = TypeVar("In"), TypeVar("Out")

# Of a forward: tokens on a device, of which a product keeps any of them busy long before, and slots of the caches that
# are made for it and copied. A few tokens would read all weights for little, so there are at least so many.
TOKENS, SLOTS, FEWEST_TOKENS = 8192, 16384, 256


def rows_at_once(batch: int, tokens: int, capacity: int) -> int:
    """How many rows go through a forward together: all of them unless they have more than :data:`TOKENS` tokens.

    Otherwise as many as divide the batch, and as a mesh divides, with about so many tokens on a device.

    Args:
        batch: ``B``.
        tokens: ``T``, of a row.
        capacity: ``S``, slots of a row.
    """
    devices = jax.sharding.get_abstract_mesh().shape.get(DATA, 1)
    if batch * tokens <= TOKENS * devices or batch % devices:
        return batch
    most = max(1, min(TOKENS // tokens, max(SLOTS // capacity, FEWEST_TOKENS // tokens))) * devices
    return next(rows for rows in range(most, 0, -devices) if batch % rows == 0)


def by_groups(run: Callable[[In], Out], rows: In, size: int) -> Out:
    """``run(rows)``, of a few rows after the other.

    Args:
        run: What does to each row what it does to it alone.
        rows: A tree whose leaves lead with ``B``, as those of the result do.
        size: Rows of a group; a divisor of ``B``.
    """
    leaves, of_rows = jax.tree.flatten(rows)
    groups = len(leaves[0]) // size
    if groups == 1:
        return run(rows)
    # Every group takes rows from all over the batch: whichever device has some of the rows has some of each group.
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
