"""What lies on each device before a program runs: parameters and caches, from shapes and shardings alone.

No compiler is asked, so what a program needs beside them is not in it.

python -m validation.aot.arguments DeepSeek-V3 --mesh model=8 --weights fp8
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from typing import Any

import jax
from jax.sharding import AbstractMesh

from eagle3_jax.bench.random_models import shape_named
from eagle3_jax.load import precision_named
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import stored_type
from eagle3_jax.models.quantised import WEIGHTS, fp8_shapes
from eagle3_jax.sharding import MESH_AXES, param_shardings, parse_mesh, row_shardings

_GIB = 2**30


def bytes_on_a_device(
    target: str,
    mesh: str = "",
    *,
    dtype: str = "bfloat16",
    weights: str = "dense",
    batch: int = 1,
    capacity: int = 4096,
    layers: int | None = None,
) -> dict[str, int]:
    """Bytes of a target's ``parameters`` and ``caches`` on each device of a mesh.

    Args:
        target: Name of a shape that is known.
        mesh: Axes and sizes, as ``model=8``; one device when empty.
        dtype: A precision's name.
        weights: As :data:`~eagle3_jax.models.quantised.WEIGHTS` names them.
        batch: Rows.
        capacity: Slots of a row.
        layers: The target's first ones; all of them when ``None``.

    Raises:
        ValueError: A name is unknown, or the mesh does not divide the model.
    """
    precision = precision_named(dtype)
    config = shape_named(target)
    model = DecoderTarget(dataclasses.replace(config, layers=config.layers[:layers]), precision)
    sizes = parse_mesh(mesh or "model=1")
    on = AbstractMesh(tuple(sizes[name] for name in MESH_AXES), MESH_AXES)

    def stored(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, stored_type(path, leaf.ndim, precision))

    params: Any = jax.tree_util.tree_map_with_path(stored, model.param_shapes())
    if weights not in WEIGHTS:
        raise ValueError(f"there are no weights {weights!r}; use one of {', '.join(WEIGHTS)}")
    if weights != "dense":
        params = fp8_shapes(params, model.param_products(), dynamic=weights == "fp8-dynamic")
    caches = jax.eval_shape(lambda: model.init_cache(batch, capacity)).layers
    return {
        "parameters": _bytes(params, param_shardings(on, model, params)),
        "caches": _bytes(caches, row_shardings(on, caches)),
    }


def _bytes(tree: Any, shardings: Any) -> int:
    each = jax.tree.map(lambda leaf, of: math.prod(of.shard_shape(leaf.shape)) * leaf.dtype.itemsize, tree, shardings)
    return sum(jax.tree.leaves(each))


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each target."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.aot.arguments", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("targets", nargs="+", metavar="SHAPE")
    parser.add_argument("--mesh", default="", metavar="AXES", help="axes and sizes, such as model=8")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="dense", choices=WEIGHTS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--capacity", type=int, default=4096)
    options = parser.parse_args(arguments)
    rest = {name: getattr(options, name) for name in ("dtype", "weights", "batch", "capacity")}
    try:
        for target in options.targets:
            found = bytes_on_a_device(target, options.mesh, **rest)
            parts = ", ".join(f"{name} {size / _GIB:.1f} GiB" for name, size in found.items())
            print(f"{target}, {options.mesh or 'one device'}, {options.weights}: {parts} a device")
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
