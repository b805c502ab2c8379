"""Between NNX modules, which own their arrays, and the pure functions that the decoder compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

Params = dict[str, Any]


@functools.lru_cache(maxsize=64)
def _abstract(build: Callable[..., nnx.Module], config: Any, precision: Any) -> tuple[Any, Any]:
    module = nnx.eval_shape(lambda: build(config, precision=precision, rngs=nnx.Rngs(0)))
    return nnx.split(module)


def param_shapes(build: Callable[..., nnx.Module], config: Any, precision: Any) -> Params:
    """The nested dictionary of ``jax.ShapeDtypeStruct`` that a module of this configuration expects."""
    return nnx.to_pure_dict(_abstract(build, config, precision)[1])


def param_axes(build: Callable[..., nnx.Module], config: Any, precision: Any) -> Params:
    """What of each parameter may be divided over devices, as it says itself where it is created; in the same nesting.

    A parameter that says nothing is held by every device.
    """
    return _metadata(build, config, precision, "axes", ())


def param_products(build: Callable[..., nnx.Module], config: Any, precision: Any) -> Params:
    """The matrix that each parameter is for products: ``layer``, ``output``, or an empty text, as it says itself.

    Only these may be in eight bits (:mod:`eagle3_jax.models.quantised`).
    """
    return _metadata(build, config, precision, "product", "")


def _metadata(build: Callable[..., nnx.Module], config: Any, precision: Any, name: str, default: Any) -> Params:
    """What every parameter says of itself under some name, in the nesting of the parameters."""
    found = jax.tree.map(
        lambda one: one.replace(one.get_metadata().get(name, default)),
        _abstract(build, config, precision)[1],
        is_leaf=lambda one: isinstance(one, nnx.Variable),
    )
    return nnx.to_pure_dict(found)


def init_params(build: Callable[..., nnx.Module], config: Any, precision: Any, key: jax.Array) -> Params:
    """Random float32 parameters as a nested dictionary."""

    @jax.jit
    def init(key: jax.Array) -> Params:
        module = build(config, precision=precision, rngs=nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.state(module))

    return init(key)


def bind(build: Callable[..., nnx.Module], config: Any, precision: Any, params: Params) -> Any:
    """The module with these parameters. Done while tracing, where it costs nothing at run time."""
    graphdef, abstract = _abstract(build, config, precision)
    state = jax.tree.map(lambda leaf: leaf, abstract)  # a copy: the cached one stays abstract
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def call_cached(module: nnx.Module, *args: Any) -> Any:
    """``module(*args)``, traced and lowered once for all modules of one description and arguments of the same shapes.

    The layers of a model, the steps of a draft: the compiler inlines each again, but Python sees one.
    """
    graphdef, state = nnx.split(module)
    leaves, treedef = jax.tree.flatten(args)
    plain = tuple(None if hasattr(leaf, "dtype") else leaf for leaf in leaves)  # a name in somebody's own memory
    return _apply(graphdef, treedef, plain, state, [leaf for leaf in leaves if hasattr(leaf, "dtype")])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _apply(graphdef: Any, treedef: Any, plain: tuple[Any, ...], state: Any, arrays: list[Any]) -> Any:
    given = iter(arrays)
    args = jax.tree.unflatten(treedef, [next(given) if leaf is None else leaf for leaf in plain])
    return nnx.merge(graphdef, state)(*args)
