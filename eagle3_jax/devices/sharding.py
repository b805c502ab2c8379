"""Sharding over a mesh of devices, by names of array axes.

A mesh has two axes. ``data`` divides rows of the batch. ``model`` divides layers: key heads with
their query heads, columns of an MLP, experts, the vocabulary. The programs are those of one device.
XLA's partitioner (GSPMD) derives from the shardings of their arguments where to compute and what to
communicate.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from eagle3_jax.devices.host import copy_blocks, empty_aligned

DATA = "data"
MODEL = "model"
MESH_AXES = (DATA, MODEL)
_FORM = "as in model=4,data=2"
# Bytes of a stack of matrices that the host prepares for an accelerator at a time.
_MOST_AT_ONCE = 2**28


class Axis(NamedTuple):
    """A named axis of a parameter that a mesh may divide."""

    name: str  #: A key of :data:`AXIS_RULES`.
    parts: int  #: Number of pieces that must stay whole, such as key heads of several columns each.


# For each axis of an array its name, or None if it is never divided. Axes left out at the end are
# not divided.
Axes = tuple[Axis | None, ...]


class AxisRule(NamedTuple):
    """The mesh axis that divides a named axis."""

    mesh_axis: str  #: ``data`` or ``model``.
    parts: str  #: The parts of the named axis, in words.
    #: Whether a mesh must divide it. If False, every device may hold the whole axis instead.
    required: bool = True


ROWS = "rows"
HEADS = "heads"
MLP = "mlp"
EXPERTS = "experts"
VOCAB = "vocab"
AXIS_RULES: Mapping[str, AxisRule] = {
    ROWS: AxisRule(DATA, "rows"),
    HEADS: AxisRule(MODEL, "key/value heads"),
    MLP: AxisRule(MODEL, "columns of an MLP"),
    EXPERTS: AxisRule(MODEL, "experts"),
    VOCAB: AxisRule(MODEL, "tokens of the vocabulary", required=False),
}


def parse_mesh(text: str) -> dict[str, int]:
    """Parses ``model=4,data=2``; an axis left out has size 1.

    Raises:
        ValueError: The text is malformed or names an unknown axis.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in MESH_AXES:
            raise ValueError(
                f"mesh {text!r}: {name!r} is not an axis; the axes are {' and '.join(MESH_AXES)},"
                f" {_FORM}"
            )

        if name in sizes:
            raise ValueError(f"mesh {text!r} names {name} twice; give each axis once, {_FORM}")
        if not size.isascii() or not size.isdecimal() or len(size) > 6 or int(size) < 1:
            raise ValueError(
                f"mesh {text!r}: the size of {name} is {size!r}; expected a number from 1, {_FORM}"
            )
        sizes[name] = int(size)
    return dict.fromkeys(MESH_AXES, 1) | sizes


def make_mesh(
    sizes: str | Mapping[str, int] | None = None,
    *,
    devices: Sequence[jax.Device] | None = None,
    **axes: int,
) -> Mesh:
    """Makes a mesh: ``make_mesh("model=4,data=2")`` or ``make_mesh(model=4, data=2)``.

    Args:
        sizes: Sizes as text or by axis; an axis left out has size 1.
        devices: Devices of the mesh. Default: all devices of all processes.
        axes: Sizes by axis.

    Raises:
        ValueError: The text is malformed, an axis is unknown, or the sizes do not match the number
            of devices.
    """
    if isinstance(sizes, str):
        sizes = parse_mesh(sizes)
    axes = {**(sizes or {}), **axes}
    for name, size in axes.items():
        if name not in MESH_AXES or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(
                f"a mesh of {name}={size!r}; expected numbers from 1 for {' and '.join(MESH_AXES)}"
            )

    shape = tuple(axes.get(name, 1) for name in MESH_AXES)
    devices = jax.devices() if devices is None else list(devices)
    if math.prod(shape) != len(devices):
        kind = devices[0].platform.upper() if devices else "no"
        raise ValueError(
            f"a mesh of {described(dict(zip(MESH_AXES, shape, strict=True)))} needs"
            f" {math.prod(shape)} devices and there {'is' if len(devices) == 1 else 'are'}"
            f" {len(devices)} ({kind}); give sizes whose product is that"
        )

    return jax.make_mesh(
        shape, MESH_AXES, devices=devices, axis_types=(AxisType.Auto,) * len(shape)
    )


def as_mesh(mesh: Mesh) -> Mesh:
    """Returns the mesh with both axes, each of type ``Auto``.

    Raises:
        ValueError: The mesh has other axes.
    """
    names = tuple(mesh.axis_names)
    if not set(names) <= set(MESH_AXES):
        raise ValueError(
            f"a mesh with the axes {', '.join(map(str, names))}; expected {' and '.join(MESH_AXES)}"
        )
    missing = [name for name in MESH_AXES if name not in names]
    devices = mesh.devices.reshape(*mesh.devices.shape, *[1] * len(missing))
    order = [(*names, *missing).index(name) for name in MESH_AXES]
    return Mesh(np.transpose(devices, order), MESH_AXES, axis_types=(AxisType.Auto,) * len(order))


def described(sizes: Mapping[str, int]) -> str:
    """Returns a mesh as text, in the form of the command line."""
    return ",".join(f"{name}={sizes[name]}" for name in (MODEL, DATA) if name in sizes)


def param_shardings(mesh: Mesh | AbstractMesh, part: Any, params: Any) -> Any:
    """Returns a ``NamedSharding`` for every parameter of a target or a drafter.

    Args:
        mesh: A mesh of ``data`` and ``model``.
        part: The target or drafter. Its method ``param_axes()`` gives the :data:`Axes` of each
            parameter, in the nesting of ``params``. Without that method every device holds all
            parameters.
        params: Arrays, or their ``jax.ShapeDtypeStruct``; ``None`` if there are none. A node with a
            method ``divided``, such as an FP8 kernel, is one parameter and gives the shardings of
            its leaves.

    Raises:
        ValueError: The mesh does not divide an axis that it must divide; the message says which
            sizes would.
    """
    if not hasattr(part, "param_axes"):
        return jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec()), params)

    def shard(leaf: Any, axes: Axes) -> Any:
        names = (None if axis is None else _mesh_axis(mesh, axis) for axis in axes)
        sharding = NamedSharding(mesh, PartitionSpec(*names))
        return leaf.divided(sharding) if hasattr(leaf, "divided") else sharding

    # A drafter also names the axes of arrays that it may borrow and that are not here.
    axes = part.param_axes()
    if isinstance(params, dict):
        axes = {name: axes[name] for name in params}
    return jax.tree.map(shard, params, axes, is_leaf=lambda node: hasattr(node, "divided"))


def _mesh_axis(mesh: Mesh | AbstractMesh, axis: Axis) -> str | None:
    """Returns the mesh axis that divides an array axis; ``None`` if devices hold the whole axis."""
    rule = AXIS_RULES[axis.name]
    size = mesh.shape[rule.mesh_axis]
    if axis.parts % size == 0:
        return rule.mesh_axis
    if not rule.required:
        return None
    fitting = [str(n) for n in range(1, size) if axis.parts % n == 0]
    raise ValueError(
        f"a mesh of {described(mesh.shape)} does not divide {axis.parts} {rule.parts}: "
        f"{rule.mesh_axis} can be {', '.join(fitting)}"
    )


def row_shardings(mesh: Mesh | AbstractMesh, tree: Any) -> Any:
    """Returns a ``NamedSharding`` for every leaf of prompts, a state or a round.

    ``data`` divides the rows. A node with an attribute ``axes``, such as
    :class:`eagle3_jax.cache.KeyValues`, names the axes of its leaves. An axis that the mesh does
    not divide evenly stays whole.

    Args:
        mesh: A mesh of ``data`` and ``model``.
        tree: Arrays with first axis ``B``, or their ``jax.ShapeDtypeStruct``.

    Raises:
        ValueError: The mesh does not divide the rows.
    """

    def shard_leaf(axes: tuple[str, ...], leaf: Any) -> NamedSharding:
        names: list[str | None] = []
        for name, size in zip(axes, leaf.shape, strict=False):
            mesh_axis = AXIS_RULES[name].mesh_axis
            names.append(mesh_axis if size % mesh.shape[mesh_axis] == 0 else None)
        if names[:1] == [None]:
            check_rows(mesh, leaf.shape[0])
        return NamedSharding(mesh, PartitionSpec(*names))

    def shard_node(node: Any) -> Any:
        axes = getattr(node, "axes", (ROWS,))
        return jax.tree.map(lambda leaf: shard_leaf(axes, leaf), node)

    return jax.tree.map(shard_node, tree, is_leaf=lambda node: hasattr(node, "axes"))


def check_rows(mesh: Mesh | AbstractMesh, batch: int) -> None:
    """Checks that the mesh divides the rows of a batch.

    Raises:
        ValueError: It does not divide them.
    """
    size = mesh.shape[DATA]
    if batch % size:
        raise ValueError(
            f"a mesh of {described(mesh.shape)} divides rows over {size} and the batch has {batch};"
            f" give a multiple of {size} prompts, or a mesh with another {DATA}"
        )


def on_rows(tree: Any) -> Any:
    """Constrains prompts or a state to :func:`row_shardings`, in a traced program.

    Without a mesh (``jax.set_mesh``) it returns them unchanged.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if DATA not in mesh.axis_names:
        return tree
    return jax.lax.with_sharding_constraint(tree, row_shardings(mesh, tree))


def on_a_mesh() -> bool:
    """Returns whether the traced program runs on more than one device."""
    return jax.sharding.get_abstract_mesh().size > 1


def rows_spec(batch: int) -> PartitionSpec:
    """Returns the ``PartitionSpec`` of rows in a traced program: ``data``, if that divides them."""
    size = jax.sharding.get_abstract_mesh().shape.get(DATA, 1)
    return PartitionSpec(DATA if batch % size == 0 else None)


def divides_rows() -> bool:
    """Returns whether the traced program divides its rows over devices."""
    return jax.sharding.get_abstract_mesh().shape.get(DATA, 1) > 1


def under(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Returns the context in which programs are traced and called.

    It is ``jax.set_mesh``, or nothing without a mesh.
    """
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def place_rows(tree: Any, mesh: Mesh | None) -> Any:
    """Moves prompts or a state to a mesh, whose ``data`` axis divides their rows.

    Without a mesh it returns them.
    """
    return tree if mesh is None else place(tree, row_shardings(mesh, tree))


def place(tree: Any, shardings: Any) -> Any:
    """Puts arrays on their devices. An array that occurs twice is put once and stays shared."""
    placed: dict[int, jax.Array] = {}

    def once(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if id(leaf) not in placed:
            placed[id(leaf)] = _put(leaf, sharding)
        return placed[id(leaf)]

    return jax.tree.map(once, tree, shardings)


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable or not getattr(leaf, "is_fully_addressable", True):
        return jax.device_put(leaf, sharding)

    # Every process has the whole array and puts the shards of its own devices.
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            _put(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf)
        )
    return put_shards(np.asarray(leaf), leaf.dtype, sharding)


def to_host(tree: Any) -> Any:
    """Copies a pytree to the host.

    Arrays sharded over processes are gathered, so every process must call this.
    """

    def gather(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.device_get(jax.tree.map(gather, tree))


def put_shards(leaf: Any, dtype: Any, sharding: NamedSharding) -> jax.Array:
    """Copies a host array to devices in another dtype.

    Each device gets only its shard, which is converted for it.

    Args:
        leaf: A numpy array or one that :func:`is_sliceable`. Only those parts of a mapped file are
            read that a device of this process gets.
        dtype: Dtype on the devices.
        sharding: The devices and their shards.
    """
    indices = sharding.addressable_devices_indices_map(leaf.shape)
    shards = [
        put_array(leaf[_cut(index, leaf.shape)], dtype, device) for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def _cut(index: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Returns an index in which a whole axis is ``slice(None)``."""
    return tuple(
        slice(None) if entry.indices(size) == (0, size, 1) else entry
        for entry, size in zip(index, shape, strict=True)
    )


def put_array(leaf: Any, dtype: Any, device: jax.Device | None = None) -> jax.Array:
    """Copies a host array to a device in another dtype.

    Args:
        leaf: A numpy array, or an object that ``np.asarray`` converts. It may have ``copy_to``, a
            method that writes it into an array, and say whether it is ``sliceable``: whether a part
            of it can be read alone.
        dtype: Dtype on the device.
        device: Default: the default device of JAX.
    """
    if jax.default_backend() == "cpu":
        # JAX takes this memory, and no other copy exists. Without one, it could be that of a file.
        array = empty_aligned(leaf.shape, dtype)
        if hasattr(leaf, "copy_to"):
            leaf.copy_to(array)
        else:
            copy_blocks(array, np.asarray(leaf))
        return jax.device_put(array, device)

    is_large = leaf.ndim > 2 and leaf.size * jnp.dtype(dtype).itemsize > _MOST_AT_ONCE
    if is_large and is_sliceable(leaf):
        return _put_slices(leaf, dtype, device)
    return _put_at_once(np.asarray(leaf), dtype, device)


def is_sliceable(leaf: Any) -> bool:
    """Returns whether a slice of a host array can be read alone."""
    return getattr(leaf, "sliceable", isinstance(leaf, np.ndarray))


def _put_at_once(leaf: np.ndarray, dtype: Any, device: jax.Device | None) -> jax.Array:
    """Copies an array to an accelerator."""
    # The smaller type is copied: fewer bytes.
    if jnp.dtype(dtype).itemsize < leaf.dtype.itemsize:
        leaf = leaf.astype(dtype)
    # An array that is in order only after a transposition is copied in that order, and transposed
    # on the device.
    order = np.argsort(np.negative(leaf.strides), kind="stable")
    stored = jax.device_put(leaf.transpose(order), device)
    back = tuple(np.argsort(order).tolist())
    done = back == tuple(range(leaf.ndim)) and stored.dtype == dtype
    return stored if done else _in_order(stored, back, jnp.dtype(dtype))


def _put_slices(leaf: Any, dtype: Any, device: jax.Device | None) -> jax.Array:
    """Copies a large stack of matrices to an accelerator, a few of them at a time."""
    stack = jnp.zeros(leaf.shape, dtype, device=device)
    matrix_bytes = math.prod(leaf.shape[1:]) * stack.dtype.itemsize
    step = max(1, _MOST_AT_ONCE // matrix_bytes)
    for start in range(0, leaf.shape[0], step):
        matrices = _put_at_once(np.asarray(leaf[start : start + step]), dtype, device)
        stack = _with_slices(stack, matrices, start)
        del matrices
        # Otherwise the host would prepare all of them before the first is copied.
        jax.block_until_ready(stack)
    return stack


@functools.partial(jax.jit, donate_argnums=0)
def _with_slices(stack: jax.Array, matrices: jax.Array, start: jax.Array | int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(stack, matrices, start, axis=0)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _in_order(stored: jax.Array, order: tuple[int, ...], dtype: Any) -> jax.Array:
    return stored.transpose(order).astype(dtype)
