"""Small operations whose obvious implementation is slow or inexact on some backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

# `draw` finds a token digit by digit. In this base token ids have 3 digits up to 262,144 tokens.
_BASE = 64
# XLA's GPU backend reduces rows of at most this many elements by one kernel, longer ones by two.
_ONE_KERNEL = 16_384
# Uniforms are multiples of 2^-24: a float32 below one has 24 bits.
_BITS = 24
# `_fold` adds blocks of this many numbers, at most `_MOST_BLOCKS` in one operation.
_LANES = 64
_MOST_BLOCKS = 16


class Largest(NamedTuple):
    """The largest element of each row, and the lowest index that holds it.

    A NaN counts as the largest.
    """

    value: Float[Array, "*B"]
    index: Int[Array, "*B"]


def argmax(x: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """Returns the lowest index of the largest element."""
    return largest(x).index


def largest(x: Float[Array, "*B V"]) -> Largest:
    """Returns the largest element and its lowest index.

    If an element is NaN, the index is arbitrary on CPUs.

    XLA's CPU backend scans for it element by element. Finding the maximum, and then the lowest
    index that holds it, takes a fifth of the time (60 rows of 4,096: 244 instead of 1,212
    microseconds).
    """

    def in_two_passes(x: Float[Array, "*B V"]) -> Largest:
        value = jnp.max(x, axis=-1)
        last = x.shape[-1] - 1
        index = jnp.arange(last + 1, dtype=jnp.int32)
        return Largest(value, jnp.min(jnp.where(x == value[..., None], index, last), axis=-1))

    def separately(x: Float[Array, "*B V"]) -> Largest:
        return Largest(jnp.max(x, axis=-1), jnp.argmax(x, axis=-1).astype(jnp.int32))

    on_gpu = _largest_of_pieces if jax.sharding.get_abstract_mesh().empty else separately
    return lax.platform_dependent(x, cpu=in_two_passes, cuda=on_gpu, default=separately)


def _largest_of_pieces(x: Float[Array, "*B V"]) -> Largest:
    """Reduces value and index together: one kernel for pieces of a row, then a few comparisons.

    XLA fuses the comparisons into the kernels that use the result.
    """
    pieces = -(-x.shape[-1] // _ONE_KERNEL)
    missing = -x.shape[-1] % pieces

    padding = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
    padded = jnp.pad(x, padding, constant_values=-jnp.inf)
    split = padded.reshape(*x.shape[:-1], pieces, -1)
    indices = lax.broadcasted_iota(jnp.int32, padded.shape, x.ndim - 1).reshape(split.shape)

    def larger(
        left_pair: tuple[Array, Array], right_pair: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        value, index = left_pair
        right_value, right_index = right_pair
        is_nan = value != value
        right_is_nan = right_value != right_value
        ties = (value == right_value) | (is_nan & right_is_nan)
        is_larger = (value > right_value) | (is_nan & ~right_is_nan)
        wins = is_larger | (ties & (index < right_index))
        return jnp.where(wins, value, right_value), jnp.where(wins, index, right_index)

    start = (jnp.array(-jnp.inf, x.dtype), jnp.int32(x.shape[-1]))
    values, piece_indices = lax.reduce((split, indices), start, larger, (split.ndim - 1,))
    pairs = [(values[..., piece], piece_indices[..., piece]) for piece in range(pieces)]
    return Largest(*functools.reduce(larger, pairs))


def uniforms(keys: Key[Array, " B"], count: int) -> Float[Array, "B count"]:
    """Returns ``count`` uniforms in [0, 1) per row, multiples of 2^-24.

    ``jax.random.uniform`` has one bit less.
    """
    bits = jax.vmap(lambda key: jax.random.bits(key, (count,), jnp.uint32))(keys)
    return (bits >> (32 - _BITS)).astype(jnp.float32) * 2.0**-_BITS


def draw(p: Float[Array, "*B V"], uniforms: Float[Array, "*B U"]) -> Int[Array, "*B"]:
    """Samples a token from ``p``. A token without mass is never sampled.

    The token id is found digit by digit in base 64, most significant first. Each digit inverts the
    cumulative distribution of at most 64 sums at its own uniform. One cumulative sum over a whole
    vocabulary would be wrong: at 128,256 tokens float32 moves up to 0.4 % of the mass to other
    tokens, and a parallel scan is not monotonic, so it can return tokens without mass. Here the
    total variation distance from ``p`` stays below 2e-6.

    Args:
        p: ``[... V]``, the distribution; it need not sum to one.
        uniforms: ``[... U]``, uniforms in [0, 1), as many as :func:`num_digits` says.

    Raises:
        ValueError: The number of uniforms is wrong.
    """
    if uniforms.shape[-1] != num_digits(p.shape[-1]):
        raise ValueError(
            f"{uniforms.shape[-1]} uniforms for a draw from {p.shape[-1]} tokens; expected"
            f" {num_digits(p.shape[-1])}, one for each digit (num_digits)"
        )

    # The first digit chooses among the largest groups, each further one among the 64 members of the
    # group that was chosen.
    *lower, masses = _sum_groups(p)
    token = _invert_cumulative(masses, uniforms[..., 0])
    for digit, masses in enumerate(reversed(lower), 1):
        siblings = jnp.take_along_axis(_split_groups(masses), token[..., None, None], axis=-2)[
            ..., 0, :
        ]
        token = token * _BASE + _invert_cumulative(siblings, uniforms[..., digit])
    return token


def num_digits(vocab_size: int) -> int:
    """Returns ``U``, the number of uniforms of a draw.

    It is 1 up to 64 tokens, 2 up to 4,096 and 3 up to 262,144.
    """
    digits = 1
    while _BASE**digits < vocab_size:
        digits += 1
    return digits


def _sum_groups(p: Float[Array, "*B V"]) -> list[Float[Array, "*B _"]]:
    """Returns the masses of all tokens, of groups of 64 tokens, ... until at most 64 remain."""
    levels = [p]
    while levels[-1].shape[-1] > _BASE:
        levels.append(jnp.sum(_split_groups(levels[-1]), axis=-1))
    return levels


def _split_groups(masses: Float[Array, "*B n"]) -> Float[Array, "*B groups 64"]:
    """Returns the masses in groups of 64, padded with zeros."""
    missing = -masses.shape[-1] % _BASE
    padded = jnp.pad(masses, [(0, 0)] * (masses.ndim - 1) + [(0, missing)])
    return padded.reshape(*masses.shape[:-1], -1, _BASE)


def _invert_cumulative(
    masses: Float[Array, "*B n"], uniform: Float[Array, "*B"]
) -> Int[Array, "*B"]:
    """Returns the first index whose cumulative mass exceeds the uniform's share of the total.

    The index always has mass.
    """
    # Rounding in a parallel scan can lift the sum at an index without mass above its neighbors'
    # sums.
    cumulative = jnp.where(masses > 0, jnp.cumsum(masses, axis=-1), 0.0)
    passed = cumulative > uniform[..., None] * jnp.max(cumulative, axis=-1, keepdims=True)
    return jnp.argmax(passed, axis=-1).astype(jnp.int32)


# Compiled calls are inlined, and traced once for all layers of a shape.
@jax.jit
def scatter_tokens(
    buffer: Float[Array, "B C S H"], slots: Int[Array, "B T"], new: Float[Array, "B C T H"]
) -> Float[Array, "B C S H"]:
    """Writes each token to its slot.

    The slots of a row must differ. Tokens for slots beyond the capacity are dropped.
    """
    if slots.size == 1:
        # XLA turns a single write into a slice update, fuses it into every reader of the buffer,
        # and copies the buffer for each. A second write, which is dropped, prevents that.
        slots = jnp.concatenate([slots, slots + buffer.shape[2]], axis=1)
        new = jnp.concatenate([new, new], axis=2)
    new = new.astype(buffer.dtype)

    # `unique_indices`: otherwise a GPU under deterministic operations makes the writes one after
    # the other.
    def write_by_head(buffer: Array, slots: Array, new: Array) -> Array:
        # Row by row and head by head, so that a device which holds some heads writes only those.
        def write(buffer: Array, slots: Array, new: Array) -> Array:
            return buffer.at[slots].set(new, mode="drop", unique_indices=True)

        return jax.vmap(jax.vmap(write, (0, None, 0)))(buffer, slots, new)

    def write_together(buffer: Array, slots: Array, new: Array) -> Array:
        rows = jnp.arange(buffer.shape[0])[:, None, None]
        heads = jnp.arange(buffer.shape[1])[:, None]
        return buffer.at[rows, heads, slots[:, None]].set(new, mode="drop", unique_indices=True)

    # TPUs transpose the buffers for `write_by_head`; a mesh gathers them for `write_together`.
    if not jax.sharding.get_abstract_mesh().empty:
        return write_by_head(buffer, slots, new)
    return lax.platform_dependent(buffer, slots, new, tpu=write_together, default=write_by_head)


def gather_tokens(
    buffer: Float[Array, "B C S H"], slots: Int[Array, "B T"]
) -> Float[Array, "B C T H"]:
    """Reads the token in each slot. Slots must be within the capacity."""
    # A mesh would gather the buffers for the second way.
    if not jax.sharding.get_abstract_mesh().empty:
        return jnp.take_along_axis(buffer, slots[:, None, :, None], axis=2)

    # One index for each head, too: for tokens of all heads at once TPUs transpose the buffers (64
    # MiB each at batch 8).
    rows = jnp.arange(buffer.shape[0])[:, None, None]
    heads = jnp.arange(buffer.shape[1])[:, None]
    return buffer[rows, heads, slots[:, None]]


def ordered_sum(x: Float[Array, "*rows D"]) -> Float[Array, "*rows 1"]:
    """Returns the sum over the last axis, on CPUs in an order that only a row's length decides.

    XLA's CPU backend chooses the order of a reduction by its whole shape, so a row would have
    different bits in a batch of another size. Here blocks of 64 numbers are added one after the
    other, then the 64 sums in pairs. Zeros at the end change nothing. Other backends choose the
    order.
    """
    in_order = functools.partial(_fold, operation=jnp.add, neutral=0.0)
    return lax.platform_dependent(
        x, cpu=in_order, default=lambda x: jnp.sum(x, axis=-1, keepdims=True)
    )


def max_before_exp(x: Float[Array, "*rows S"]) -> Float[Array, "*rows 1"]:
    """Returns the maximum over the last axis, for scores of which exponentials are taken next.

    XLA's CPU backend fuses a reduction of 4,096 numbers or more with the exponential that follows,
    and that exponential rounds otherwise. A query would have different bits in a larger block.
    Comparisons in pairs are not fused.
    """
    in_order = functools.partial(
        _fold, operation=jnp.maximum, neutral=float(jnp.finfo(x.dtype).min)
    )
    return lax.platform_dependent(
        x, cpu=in_order, default=lambda x: jnp.max(x, axis=-1, keepdims=True)
    )


def _fold(
    x: Float[Array, "*rows D"], operation: Callable[[Array, Array], Array], neutral: float
) -> Float[Array, "*rows 1"]:
    """Combines the numbers of the last axis in an order that their number decides."""
    size = x.shape[-1]
    if size == 1:
        return x

    # Blocks, one after the other.
    pad = functools.partial(jnp.pad, constant_values=neutral)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -size % _LANES)]
    blocks = pad(x, padding).reshape(*x.shape[:-1], -1, _LANES)
    while blocks.shape[-2] > 1:
        count = min(blocks.shape[-2], _MOST_BLOCKS)
        missing = -blocks.shape[-2] % count
        padding = [(0, 0)] * (blocks.ndim - 2) + [(0, missing), (0, 0)]
        groups = pad(blocks, padding).reshape(*x.shape[:-1], -1, count, _LANES)
        blocks = functools.reduce(operation, [groups[..., index, :] for index in range(count)])

    # The lanes, in pairs. Without the barrier one fusion would repeat all operations for each lane.
    lanes = lax.optimization_barrier(blocks[..., 0, :])
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = operation(lanes[..., :half], lanes[..., half:])
    return lanes


def indices(count: int) -> Int[Array, " count"]:
    """Returns ``0, 1, ... count - 1`` in 32 bits, also where JAX is set to 64 bits."""
    return jnp.arange(count, dtype=jnp.int32)


def entry_of_rows(values: Array, index: Int[Array, " B"]) -> Array:
    """Returns the entry ``[B ...]`` of each row of ``values [B T ...]`` at ``index``."""
    broadcast = jnp.expand_dims(index, tuple(range(1, values.ndim)))
    return jnp.take_along_axis(values, broadcast, axis=1)[:, 0]
