"""A mesh of devices: what is divided over it, by the names that arrays give their axes.

A mesh has two axes. ``data`` divides rows, ``model`` divides what a layer can be cut into: key heads with everything
that belongs to them, columns of an MLP, the vocabulary. The rest is XLA's partitioner (GSPMD): the programs are those
of one device, and from where their arguments lie it decides where everything is computed and what has to travel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from eagle3_jax.uploading import put_shards

DATA, MODEL = "data", "model"
MESH_AXES = (DATA, MODEL)


class Axis(NamedTuple):
    """A named axis of a parameter, which may be divided.

    Attributes:
        name: One of :data:`PLACES`.
        parts: Pieces that it consists of and that stay whole, as key heads of so many columns each.
    """

    name: str
    parts: int


# Per axis of an array, its name; None for one that is never divided. What is left out at the end is not divided.
Axes = tuple[Axis | None, ...]


class Place(NamedTuple):
    """Where an axis of some name goes.

    Attributes:
        mesh_axis: ``data`` or ``model``.
        what: Its parts in words.
        required: Whether a mesh that does not divide them is refused; otherwise every device holds all of them.
    """

    mesh_axis: str
    what: str
    required: bool = True


ROWS, HEADS, MLP, EXPERTS, VOCAB = "rows", "heads", "mlp", "experts", "vocab"
PLACES: Mapping[str, Place] = {
    ROWS: Place(DATA, "rows"),
    HEADS: Place(MODEL, "key/value heads"),
    MLP: Place(MODEL, "columns of an MLP"),
    EXPERTS: Place(MODEL, "experts"),
    VOCAB: Place(MODEL, "tokens of the vocabulary", required=False),
}


def parse_mesh(text: str) -> dict[str, int]:
    """``model=4,data=2`` as sizes by axis; an axis left out has one device.

    Raises:
        ValueError: It is written otherwise, or names an axis that meshes do not have.
    """
    sizes: dict[str, int] = dict.fromkeys(MESH_AXES, 1)
    named: set[str] = set()
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in MESH_AXES:
            raise ValueError(f"mesh {text!r}: {name!r} is no axis; the axes are {' and '.join(MESH_AXES)}, {_FORM}")
        if name in named:
            raise ValueError(f"mesh {text!r} names {name} twice; give each axis once, {_FORM}")
        if not size.isascii() or not size.isdecimal() or len(size) > 6 or int(size) < 1:
            raise ValueError(f"mesh {text!r}: the size of {name} is {size!r}; expected a number from 1, {_FORM}")
        sizes[name] = int(size)
        named.add(name)
    return sizes


_FORM = "as in model=4,data=2"


def make_mesh(
    sizes: str | Mapping[str, int] | None = None, *, devices: Sequence[jax.Device] | None = None, **axes: int
) -> Mesh:
    """A mesh of the devices at hand: ``make_mesh("model=4,data=2")`` or ``make_mesh(model=4, data=2)``.

    Args:
        sizes: As text, or by axis; an axis left out has one device.
        devices: All that there are, of every process, when left out.
        axes: Sizes by axis.

    Raises:
        ValueError: The text is malformed, an axis is unknown, or the sizes are not those of the devices.
    """
    if isinstance(sizes, str):
        sizes = parse_mesh(sizes)
    wanted = {**(sizes or {}), **axes}
    for name, size in wanted.items():
        if name not in MESH_AXES or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"a mesh of {name}={size!r}; expected numbers from 1 for {' and '.join(MESH_AXES)}")
    shape = tuple(wanted.get(name, 1) for name in MESH_AXES)
    found = jax.devices() if devices is None else list(devices)
    if math.prod(shape) != len(found):
        kind = found[0].platform.upper() if found else "no"
        raise ValueError(
            f"a mesh of {described(dict(zip(MESH_AXES, shape, strict=True)))} needs {math.prod(shape)} devices "
            f"and there {'is' if len(found) == 1 else 'are'} {len(found)} ({kind}); "
            "give sizes whose product is that"
        )
    return jax.make_mesh(shape, MESH_AXES, devices=found, axis_types=(AxisType.Auto,) * len(shape))


def as_mesh(mesh: Mesh) -> Mesh:
    """A mesh as it is used here: both axes, and the partitioner decides along each of them.

    Raises:
        ValueError: It has other axes.
    """
    names = tuple(mesh.axis_names)
    if not set(names) <= set(MESH_AXES):
        raise ValueError(f"a mesh with the axes {', '.join(map(str, names))}; expected {' and '.join(MESH_AXES)}")
    missing = [name for name in MESH_AXES if name not in names]
    devices = mesh.devices.reshape(*mesh.devices.shape, *[1] * len(missing))
    order = [(*names, *missing).index(name) for name in MESH_AXES]
    return Mesh(np.transpose(devices, order), MESH_AXES, axis_types=(AxisType.Auto,) * len(order))


def described(sizes: Mapping[str, int]) -> str:
    """A mesh as the command line takes it."""
    return ",".join(f"{name}={sizes[name]}" for name in (MODEL, DATA) if name in sizes)


def param_shardings(mesh: Mesh | AbstractMesh, part: Any, params: Any) -> Any:
    """A ``NamedSharding`` for every parameter of a target or of a drafter.

    Args:
        mesh: Of ``data`` and ``model``.
        part: What the parameters are of. With a method ``param_axes()`` it gives the :data:`Axes` of each parameter, in
            the nesting of ``params``; every device holds all of them otherwise.
        params: Arrays, or their ``jax.ShapeDtypeStruct``; ``None`` where there are none. A node with a method
            ``divided``, as an FP8 kernel, stands for one parameter and says where its leaves go.

    Raises:
        ValueError: The mesh does not divide what must be divided; the message says what, and what would.
    """
    if not hasattr(part, "param_axes"):
        return jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec()), params)

    def of(leaf: Any, axes: Axes) -> Any:
        names = (None if axis is None else _mesh_axis(mesh, axis) for axis in axes)
        sharding = NamedSharding(mesh, PartitionSpec(*names))
        return leaf.divided(sharding) if hasattr(leaf, "divided") else sharding

    axes = part.param_axes()
    if isinstance(params, dict):  # a drafter names the axes of all that it may borrow
        axes = {name: axes[name] for name in params}
    return jax.tree.map(of, params, axes, is_leaf=lambda one: hasattr(one, "divided"))


def _mesh_axis(mesh: Mesh | AbstractMesh, axis: Axis) -> str | None:
    place = PLACES[axis.name]
    size = mesh.shape[place.mesh_axis]
    if axis.parts % size == 0:
        return place.mesh_axis
    if not place.required:
        return None
    fitting = [str(n) for n in range(1, size) if axis.parts % n == 0]
    raise ValueError(
        f"a mesh of {described(mesh.shape)} does not divide {axis.parts} {place.what}: "
        f"{place.mesh_axis} can be {', '.join(fitting)}"
    )


def row_shardings(mesh: Mesh | AbstractMesh, tree: Any) -> Any:
    """A ``NamedSharding`` for every leaf of prompts, of a state or of a round: rows on ``data``.

    A node with ``axes``, as :class:`eagle3_jax.cache.KeyValues`, names those of its leaves; an axis that the mesh does
    not divide stays whole there.

    Args:
        mesh: Of ``data`` and ``model``.
        tree: Arrays that lead with ``B``, or their ``jax.ShapeDtypeStruct``.

    Raises:
        ValueError: The mesh does not divide the rows.
    """

    def of(axes: tuple[str, ...], leaf: Any) -> NamedSharding:
        names: list[str | None] = []
        for name, size in zip(axes, leaf.shape, strict=False):
            place = PLACES[name]
            names.append(place.mesh_axis if size % mesh.shape[place.mesh_axis] == 0 else None)
        if names[:1] == [None]:
            check_rows(mesh, leaf.shape[0])
        return NamedSharding(mesh, PartitionSpec(*names))

    def node(one: Any) -> Any:
        axes = getattr(one, "axes", (ROWS,))
        return jax.tree.map(lambda leaf: of(axes, leaf), one)

    return jax.tree.map(node, tree, is_leaf=lambda one: hasattr(one, "axes"))


def check_rows(mesh: Mesh | AbstractMesh, batch: int) -> None:
    """Refuse a batch that the mesh does not divide.

    Raises:
        ValueError: It does not.
    """
    size = mesh.shape[DATA]
    if batch % size:
        raise ValueError(
            f"a mesh of {described(mesh.shape)} divides rows over {size} and the batch has {batch}; "
            f"give a multiple of {size} prompts, or a mesh with another {DATA}"
        )


def on_rows(tree: Any) -> Any:
    """Prompts or a state where :func:`row_shardings` puts them, in a program that is traced for a mesh.

    Such a program is called under ``jax.set_mesh(mesh)``; in any other one this does nothing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return tree if DATA not in mesh.axis_names else jax.lax.with_sharding_constraint(tree, row_shardings(mesh, tree))


def on_a_mesh() -> bool:
    """Whether the program that is being traced runs on more than one device."""
    return jax.sharding.get_abstract_mesh().size > 1


def rows_spec(batch: int) -> PartitionSpec:
    """Where arrays of so many rows lie in the program that is being traced: on ``data``, if that divides them."""
    size = jax.sharding.get_abstract_mesh().shape.get(DATA, 1)
    return PartitionSpec(DATA if batch % size == 0 else None)


def divides_rows() -> bool:
    """Whether the program that is being traced has its rows on more than one device."""
    return jax.sharding.get_abstract_mesh().shape.get(DATA, 1) > 1


def place(tree: Any, shardings: Any) -> Any:
    """Arrays put where they belong, each of them once: what two parts share stays one array."""
    placed: dict[int, jax.Array] = {}

    def once(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if id(leaf) not in placed:
            placed[id(leaf)] = _put(leaf, sharding)
        return placed[id(leaf)]

    return jax.tree.map(once, tree, shardings)


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable or not getattr(leaf, "is_fully_addressable", True):
        return jax.device_put(leaf, sharding)
    # Every process has the whole of it and gives what its own devices need.
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_put(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
    return put_shards(np.asarray(leaf), leaf.dtype, sharding)


def to_host(tree: Any) -> Any:
    """Numpy arrays of a tree; of arrays that other processes have shards of, too, who must all ask."""
    split = lambda leaf: isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    return jax.device_get(
        jax.tree.map(lambda leaf: multihost_utils.process_allgather(leaf, tiled=True) if split(leaf) else leaf, tree)
    )
