"""Converts between NNX modules, which own their arrays, and pure functions of parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

Params = dict[str, Any]


class _OneKey(nnx.Rngs):
    """A stream of one key, for shapes: those of ``nnx.Rngs`` take most of the time of a layer."""

    def __init__(self) -> None:
        """It has no streams."""

    def params(self) -> jax.Array:
        return jax.random.key(0)


@functools.lru_cache(maxsize=64)
def _abstract(build: Callable[..., nnx.Module], config: Any, precision: Any) -> tuple[Any, Any]:
    module = nnx.eval_shape(lambda: build(config, precision=precision, rngs=_OneKey()))
    return nnx.split(module)


def param_shapes(build: Callable[..., nnx.Module], config: Any, precision: Any) -> Params:
    """Returns the ``jax.ShapeDtypeStruct`` of every parameter, as a nested dictionary."""
    return nnx.to_pure_dict(_abstract(build, config, precision)[1])


def param_axes(build: Callable[..., nnx.Module], config: Any, precision: Any) -> Params:
    """Returns the :data:`~eagle3_jax.devices.sharding.Axes` of every parameter, nested alike.

    A parameter declares its axes where it is created. Every device holds all of a parameter without
    axes.
    """
    return _metadata(build, config, precision, "axes", ())


def param_products(build: Callable[..., nnx.Module], config: Any, precision: Any) -> Params:
    """Returns the kind of product that reads each parameter, in the nesting of the parameters.

    A kind is ``layer``, ``output``, or an empty text for none. A parameter declares its kind where
    it is created. Only parameters with a kind may be in eight bits
    (:mod:`eagle3_jax.models.quantised`).
    """
    return _metadata(build, config, precision, "product", "")


def _metadata(
    build: Callable[..., nnx.Module], config: Any, precision: Any, name: str, default: Any
) -> Params:
    """Returns the metadata ``name`` of every parameter, in the nesting of the parameters."""

    def read(variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(variable.get_metadata().get(name, default))

    _, state = _abstract(build, config, precision)
    values = jax.tree.map(read, state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return nnx.to_pure_dict(values)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def init_params(
    build: Callable[..., nnx.Module], config: Any, precision: Any, key: jax.Array
) -> Params:
    """Returns random float32 parameters as a nested dictionary."""
    module = build(config, precision=precision, rngs=nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.state(module))


def bind(build: Callable[..., nnx.Module], config: Any, precision: Any, params: Params) -> Any:
    """Returns the module with these parameters.

    It runs while tracing, so it costs nothing at run time.
    """
    graphdef, abstract = _abstract(build, config, precision)
    # A copy, so that the cached state stays abstract.
    state = jax.tree.map(lambda leaf: leaf, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def call_cached(module: nnx.Module, *args: Any) -> Any:
    """Returns ``module(*args)``, traced once for all equal modules and arguments of equal shapes.

    It is for the layers of a model and the steps of a draft. The compiler still inlines every call.

    Args:
        module: The module. Two modules are equal if they differ only in the values of their arrays.
        args: Pytrees. A leaf without a ``dtype``, such as a text, is static and must be hashable.
    """
    graphdef, state = nnx.split(module)
    leaves, treedef = jax.tree.flatten(args)
    static = tuple(None if hasattr(leaf, "dtype") else leaf for leaf in leaves)
    arrays = [leaf for leaf in leaves if hasattr(leaf, "dtype")]
    return _apply(graphdef, treedef, static, state, arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _apply(
    graphdef: Any, treedef: Any, static: tuple[Any, ...], state: Any, arrays: list[Any]
) -> Any:
    remaining = iter(arrays)
    leaves = [next(remaining) if leaf is None else leaf for leaf in static]
    args = jax.tree.unflatten(treedef, leaves)
    return nnx.merge(graphdef, state)(*args)
