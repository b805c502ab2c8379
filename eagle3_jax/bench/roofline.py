"""The measured roofline: a decoding step cannot be faster than its weights and caches can be read."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.decode import LoadedTarget
from eagle3_jax.models.config import DecoderConfig, Experts

_RUNS = 8
# What is done with a matrix and a few rows, and how often that moves the matrix.
_WAYS = {
    "sum": (jax.jit(lambda matrix, few: jnp.sum(matrix, axis=0)), 1),
    "copy": (jax.jit(lambda matrix, few: -matrix), 2),  # XLA would elide a plain copy of an argument
    "product": (jax.jit(lambda matrix, few: few @ matrix), 1),
}
_STACKS = {"gate_up", "down", "gate_up_bias", "down_bias"}  # parameters of all experts of a layer together


def step_bytes(target: LoadedTarget, *, rows: int, context: int) -> int:
    """Least number of bytes that a step of plain decoding reads: every weight once, and each row's keys and values.

    A step reads one row of the embedding table per token; the table is left out unless it is the output projection
    too. Only the experts that one token goes through are counted, since all rows may choose the same.

    Args:
        target: A target of this library's decoder.
        rows: Sequences decoded at once.
        context: Earlier tokens of each sequence.
    """
    config = target.model.config  # type: ignore[attr-defined]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params)) - _unread_experts(target.params, config)
    if not config.tie_embeddings:
        weights -= target.params["embedding"].nbytes
    caches = jax.eval_shape(lambda: jax.tree.leaves(target.model.init_cache(rows, context).layers))
    return weights + sum(leaf.size * leaf.dtype.itemsize for leaf in caches)


def _unread_experts(params: Any, config: DecoderConfig) -> int:
    """Bytes of the experts that a token does not go through, quantized or not."""
    unread = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["blocks"]):
        index, *names = [getattr(entry, "key", getattr(entry, "idx", None)) for entry in path]
        mlp = config.layers[int(index)].mlp  # type: ignore[arg-type]
        if isinstance(mlp, Experts) and not _STACKS.isdisjoint(names) and "shared" not in names:
            unread += leaf.nbytes * (mlp.num_experts - mlp.per_token) // mlp.num_experts
    return unread


def bandwidth(size: int) -> float:
    """Bytes per second at which the device streams an array of ``size`` bytes: the fastest of :func:`bandwidths`."""
    return max(bandwidths(size).values())


def bandwidths(size: int) -> dict[str, float]:
    """Bytes per second at which the device streams an array of ``size`` bytes, in three ways.

    A sum, a copy (which writes as much as it reads) and a product with few rows, as decoding has. The fastest run of
    each counts, since the figures serve as ceilings.
    """
    columns = 1024
    matrix = jnp.ones((max(size // (4 * columns), 1), columns), jnp.float32)
    few = jnp.ones((1, matrix.shape[0]), jnp.float32)
    return {name: times * matrix.nbytes / _fastest(way, matrix, few) for name, (way, times) in _WAYS.items()}


def ceiling(target: LoadedTarget, *, rows: int, context: int, large: int = 2**30) -> float:
    """Highest bandwidth for a step of this target in bytes per second, measured now.

    Small models stay in a cache that is faster than memory, so the bandwidth is measured at the size of a step and at
    ``large`` bytes, far beyond all caches.
    """
    return max(bandwidth(large), bandwidth(step_bytes(target, rows=rows, context=context)))


def least_bytes_per_second(
    target: LoadedTarget, *, tokens_per_second: float, tokens_per_round: float, rows: int
) -> float:
    """Least memory traffic of decoding at some speed: target steps per second times bytes of a step.

    ``τ`` counts rounds in which something was drafted; the others write one token and read no less, so a method that
    does not always draft is credited with less than it reads, never with more. Neither caches nor drafting are counted.

    Args:
        target: The target, whose weights every step reads.
        tokens_per_second: Speed of all rows together.
        tokens_per_round: ``τ``; 1 for plain decoding.
        rows: Sequences decoded at once.
    """
    return tokens_per_second / rows / tokens_per_round * step_bytes(target, rows=rows, context=0)


def _fastest(function: Any, *arguments: jax.Array) -> float:
    jax.block_until_ready(function(*arguments))
    best = float("inf")
    for _ in range(_RUNS):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        best = min(best, time.perf_counter() - start)
    return best
