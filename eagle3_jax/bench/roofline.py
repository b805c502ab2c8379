"""The measured roofline: a step cannot be faster than its weights and caches can be read."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eagle3_jax.decode import LoadedTarget
from eagle3_jax.models.config import DecoderConfig, Experts
from eagle3_jax.models.quantised import stored_bytes

Stream = tuple[jax.Array, jax.Array, jax.Array]

_RUNS = 8
_COLUMNS = 1024
# Bytes that one launch moves at least, so that its own microseconds do not count.
_BYTES_OF_A_LAUNCH = {"cpu": 2**26}
_BYTES_OF_A_LAUNCH_ELSEWHERE = 2**32
# Over an array that is small, for which the loop itself takes as long.
_MOST_PASSES = 1000
# Parameters of all experts of a layer together.
_STACKS = {"gate_up", "down", "gate_up_bias", "down_bias"}


def step_bytes(target: LoadedTarget, *, rows: int, context: int) -> int:
    """Counts the bytes that a step of plain decoding must read.

    These are every weight once, and each row's keys and values. A step reads one row of the
    embedding table per token; the table is left out unless it is the output projection too. Only
    the experts that one token goes through are counted, since all rows may choose the same.

    Args:
        target: A target of this library's decoder.
        rows: Sequences decoded at once.
        context: Earlier tokens of each sequence.
    """
    config = target.model.config  # type: ignore[attr-defined]
    weights = sum(map(stored_bytes, jax.tree.leaves(target.params)))
    weights -= _unread_experts(target.params, config)
    if not config.tie_embeddings:
        weights -= target.params["embedding"].nbytes
    caches = jax.eval_shape(lambda: jax.tree.leaves(target.model.init_cache(rows, context).layers))
    return weights + sum(leaf.size * leaf.dtype.itemsize for leaf in caches)


def _unread_experts(params: Any, config: DecoderConfig) -> int:
    """Counts the bytes of the experts that a token does not go through, quantized or not."""
    unread = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["blocks"]):
        index, *names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        mlp = config.layers[int(index)].mlp
        if isinstance(mlp, Experts) and not _STACKS.isdisjoint(names) and "shared" not in names:
            unread += stored_bytes(leaf) * (mlp.num_experts - mlp.per_token) // mlp.num_experts
    return unread


def bandwidth(size: int) -> float:
    """Returns the highest of :func:`bandwidths`."""
    return max(bandwidths(size).values())


def bandwidths(size: int) -> dict[str, float]:
    """Returns the bytes per second at which the device streams ``size`` bytes, in three ways.

    The ways are a sum, a copy (which writes as much as it reads) and a product with few rows, as
    decoding has. Each is repeated within one program, so that the time of a launch is divided by
    the number of passes. The fastest run of each counts, since the figures serve as ceilings.
    """
    speeds = {}
    for name, (_, moves) in WAYS.items():
        arrays = stream_arrays(size)
        seconds = seconds_per_pass(name, arrays, passes=passes_of(size))
        speeds[name] = moves * arrays[0].nbytes / seconds
    return speeds


def passes_of(size: int) -> int:
    """Returns how often one launch moves an array of ``size`` bytes."""
    least_bytes = _BYTES_OF_A_LAUNCH.get(jax.default_backend(), _BYTES_OF_A_LAUNCH_ELSEWHERE)
    return min(max(least_bytes // size, 2), _MOST_PASSES)


def stream_arrays(size: int) -> Stream:
    """Returns the matrix of ``size`` bytes, a row for the product, and the sums of the columns."""
    matrix = jnp.ones((max(size // (4 * _COLUMNS), 1), _COLUMNS), jnp.float32)
    row = jnp.ones((1, matrix.shape[0]), jnp.float32)
    return matrix, row, jnp.ones((1, _COLUMNS), jnp.float32)


def seconds_per_pass(way: str, arrays: Stream, *, passes: int) -> float:
    """Returns the time of one pass over the matrix, in the fastest of several launches.

    Args:
        way: A key of :data:`WAYS`.
        arrays: The arrays of :func:`stream_arrays`, which the launches consume.
        passes: Number of passes in a launch.
    """
    # The first launch compiles.
    arrays = jax.block_until_ready(_stream(arrays, way=way, passes=passes))
    fastest = float("inf")
    for _ in range(_RUNS):
        start = time.perf_counter()
        arrays = jax.block_until_ready(_stream(arrays, way=way, passes=passes))
        fastest = min(fastest, time.perf_counter() - start)
    return fastest / passes


@functools.partial(jax.jit, static_argnames=("way", "passes"), donate_argnames=("arrays",))
def _stream(arrays: Stream, *, way: str, passes: int) -> Stream:
    """Passes over the matrix several times.

    The arrays are consumed, so that the copy is made in place.
    """
    one_pass, _ = WAYS[way]

    def stream_once(_: jax.Array, arrays: Stream) -> Stream:
        return lax.optimization_barrier(one_pass(*arrays))

    return lax.fori_loop(0, passes, stream_once, arrays)


#: What a pass does with the matrix, the row and the sum, and how often that moves the matrix. Every
#: pass depends on the pass before, so that the compiler cannot take it out of the loop.
WAYS: dict[str, tuple[Callable[..., Stream], int]] = {
    "sum": (
        lambda matrix, row, total: (matrix, row, jnp.minimum(matrix, total).sum(0, keepdims=True)),
        1,
    ),
    "copy": (lambda matrix, row, total: (-matrix, row, total), 2),
    "product": (
        lambda matrix, row, total: (matrix, row.at[0, 0].min((row @ matrix)[0, 0]), total),
        1,
    ),
}


def ceiling(target: LoadedTarget, *, rows: int, context: int, large: int = 2**30) -> float:
    """Measures the highest bandwidth for a step of this target, in bytes per second.

    Small models stay in a cache that is faster than memory, so the bandwidth is measured at the
    size of a step and at ``large`` bytes, far beyond all caches.
    """
    return max(bandwidth(large), bandwidth(step_bytes(target, rows=rows, context=context)))


def least_bytes_per_second(
    target: LoadedTarget, *, tokens_per_second: float, tokens_per_round: float, rows: int
) -> float:
    """Returns the least memory traffic of decoding at some speed, in bytes per second.

    It is the steps per second of the target times the bytes of a step. ``τ`` counts rounds with a
    draft. A round without one writes one token and reads no less, so the result is a lower bound
    for methods that do not always draft. Neither caches nor drafting are counted.

    Args:
        target: The target, whose weights every step reads.
        tokens_per_second: Speed of all rows together.
        tokens_per_round: ``τ``; 1 for plain decoding.
        rows: Sequences decoded at once.
    """
    return tokens_per_second / rows / tokens_per_round * step_bytes(target, rows=rows, context=0)
