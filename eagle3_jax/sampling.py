"""From logits to the distribution that is sampled, and from uniforms to tokens.

One function serves prefill, plain decoding and verification, so that they cannot disagree.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from eagle3_jax.sharding import on_rows
from eagle3_jax.types import DraftSampling, SamplingParams, Warping, per_row

# A token is drawn digit by digit: its id is written in this base, which gives 3 digits up to 262,144 tokens.
_BASE = 64
# Uniforms are multiples of 2^-24, as many as a float32 below one has.
_BITS = 24


def check_sampling(sampling: SamplingParams, batch: int) -> SamplingParams:
    """One checked value per row.

    Raises:
        ValueError: A value is out of range; the message says which.
    """
    with np.errstate(over="ignore"):  # what is infinite in float32 is refused below
        rows = per_row(sampling, batch)
    for name, values, good, expected in (
        ("temperature", rows.temperature, lambda x: 0 <= x < np.inf, "0 (greedy) or more, and finite"),
        ("top_k", rows.top_k, lambda x: x >= 0, "0 (all tokens) or more"),
        ("top_p", rows.top_p, lambda x: (x > 0) & (x <= 1), "above 0 and at most 1"),
    ):
        for value in np.asarray(values):
            if not good(value):
                raise ValueError(f"{name} is {value:g}; expected {expected}")
    return rows


def warping_of(sampling: SamplingParams) -> Warping:
    """How much the rows' parameters ask for; reads them back from the device."""
    sampled = np.asarray(sampling.temperature) > 0
    truncated = sampled & ((np.asarray(sampling.top_k) > 0) | (np.asarray(sampling.top_p) < 1))
    if truncated.any():
        return Warping.TRUNCATED
    return Warping.TEMPERATURE if sampled.any() else Warping.GREEDY


def probabilities(
    logits: Float[Array, "B N V"], sampling: SamplingParams, warping: Warping = Warping.TRUNCATED
) -> Float[Array, "B N V"]:
    """The target's distribution after temperature, then top-k, then top-p (the order of Hugging Face), in float32.

    Args:
        logits: Of ``N`` tokens per row.
        sampling: One value per row; a row of temperature 0 becomes a point mass on its argmax (lowest id in a tie).
        warping: ``TRUNCATED`` honours ``top_k`` and ``top_p``; ``TEMPERATURE`` skips their sort when no row uses them.
    """
    sampling = jax.tree.map(
        lambda value: jnp.broadcast_to(jnp.asarray(value), logits.shape[:1]), sampling
    )  # scalars too
    # Whole rows on a mesh: sorts, sums and draws over a divided vocabulary would each be put together on their own.
    logits = on_rows(logits.astype(jnp.float32))
    temperature = jnp.asarray(sampling.temperature)[:, None, None]
    # The difference first: a quotient could overflow, and infinity minus infinity is no number.
    best = jnp.max(logits, axis=-1, keepdims=True)
    below_best = jnp.where(logits == best, 0.0, logits - best)
    least = jnp.finfo(jnp.float32).tiny  # what divides without being taken for zero
    scaled = below_best / jnp.where(temperature > 0, jnp.maximum(temperature, least), 1.0)
    if warping is Warping.TRUNCATED:
        scaled = _truncate(scaled, jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p))
    greedy = jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=jnp.float32)
    return jnp.where(temperature > 0, jax.nn.softmax(scaled, axis=-1), greedy)


def _truncate(
    logits: Float[Array, "B N V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Float[Array, "B N V"]:
    """Set everything outside top-k, then outside top-p, to minus infinity."""
    size = logits.shape[-1]
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    kth = jnp.where((top_k > 0) & (top_k < size), top_k, size)[:, None, None] - 1
    smallest = jnp.take_along_axis(ranked, jnp.broadcast_to(kth, (*ranked.shape[:2], 1)), axis=-1)
    ranked = jnp.where(ranked >= smallest, ranked, -jnp.inf)  # ties with the k-th stay, as in Hugging Face
    mass = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    keep = (before < top_p[:, None, None]) | (top_p[:, None, None] >= 1.0)
    ranked = jnp.where(keep.at[..., 0].set(True), ranked, -jnp.inf)
    # Scattered back: on a CPU a second sort for the inverse order would double the cost of the whole function.
    back = lambda order, ranked: jnp.zeros_like(ranked).at[order].set(ranked, unique_indices=True)
    return jax.vmap(jax.vmap(back))(order, ranked)


def argmax(x: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """The lowest index of the largest element.

    XLA's CPU backend looks for it one element after the other; to find the largest, and then the lowest index that
    holds it, takes a fifth of the time (60 rows of 4,096: 1,212 and 244 microseconds).
    """

    def in_two_passes(x: Float[Array, "*B V"]) -> Int[Array, "*B"]:
        last = x.shape[-1] - 1
        index = jnp.arange(last + 1, dtype=jnp.int32)
        return jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), index, last), axis=-1)

    return lax.platform_dependent(x, cpu=in_two_passes, default=lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32))


def residual(p: Float[Array, "*B V"], q: Float[Array, "*B V"]) -> tuple[Float[Array, "*B V"], Float[Array, "*B"]]:
    """What the target still wants after a rejection: ``max(p - q, 0)`` normalised, and its mass before that.

    Leviathan et al. (2023), section 2.3. Without mass (``p`` nowhere exceeds ``q``) the result is ``p`` itself.
    """
    rest = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(rest, axis=-1)
    return jnp.where(mass[..., None] > 0, rest / jnp.where(mass > 0, mass, 1.0)[..., None], p), mass


def draw(p: Float[Array, "*B V"], uniforms: Float[Array, "*B U"]) -> Int[Array, "*B"]:
    """Draw a token from ``p``; one without mass is never drawn.

    The id is found digit by digit in base 64, most significant first: each digit by inverting the cumulative
    distribution of at most 64 sums at a uniform of its own. One cumulative sum over a whole vocabulary would not do: at
    128,256 tokens float32 moves up to 0.4 % of the mass to other tokens, and a parallel scan, which does not
    rise monotonically, draws tokens without any. Here the total variation distance from ``p`` stays below 2e-6.

    Args:
        p: The distribution; it need not sum to one.
        uniforms: In [0, 1), :func:`num_digits` of them for every draw.
    """
    if uniforms.shape[-1] != num_digits(p.shape[-1]):
        raise ValueError(
            f"{uniforms.shape[-1]} uniforms for a draw from {p.shape[-1]} tokens; expected {num_digits(p.shape[-1])}, "
            "one for each digit (num_digits)"
        )
    *lower, masses = _masses(p)
    token = _invert(masses, uniforms[..., 0])
    for digit, masses in enumerate(reversed(lower), 1):
        siblings = jnp.take_along_axis(_in_groups(masses), token[..., None, None], axis=-2)[..., 0, :]
        token = token * _BASE + _invert(siblings, uniforms[..., digit])
    return token


def num_digits(vocab_size: int) -> int:
    """``U``, how many uniforms a draw takes: 1 up to 64 tokens, 2 up to 4,096, 3 up to 262,144."""
    digits = 1
    while _BASE**digits < vocab_size:
        digits += 1
    return digits


def _masses(p: Float[Array, "*B V"]) -> list[Float[Array, "*B _"]]:
    """The masses of all tokens, of all groups of 64 tokens, of all groups of 64 groups, ... until 64 are enough."""
    levels = [p]
    while levels[-1].shape[-1] > _BASE:
        levels.append(jnp.sum(_in_groups(levels[-1]), axis=-1))
    return levels


def _in_groups(masses: Float[Array, "*B n"]) -> Float[Array, "*B groups 64"]:
    missing = -masses.shape[-1] % _BASE
    padded = jnp.pad(masses, [(0, 0)] * (masses.ndim - 1) + [(0, missing)])
    return padded.reshape(*masses.shape[:-1], -1, _BASE)


def _invert(masses: Float[Array, "*B n"], uniform: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """The first index whose cumulative mass exceeds the uniform's share of all; never one without mass."""
    # Rounding in a parallel scan can lift the sum at an index without mass above the sums around it.
    cumulative = jnp.where(masses > 0, jnp.cumsum(masses, axis=-1), 0.0)
    passed = cumulative > uniform[..., None] * jnp.max(cumulative, axis=-1, keepdims=True)
    return jnp.argmax(passed, axis=-1).astype(jnp.int32)


def row_keys(seed: int, batch: int) -> Key[Array, " B"]:
    """One key per row; row ``b`` is the same in a batch of any size.

    Two calls with one seed share their random numbers: give batches that must be independent different seeds.

    Raises:
        ValueError: The seed is not a whole number from 0 to 2^32 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed!r}; expected a whole number from 0 to {2**32 - 1}")
    return _row_keys(jax.random.key(np.uint32(seed)), batch)


@functools.partial(jax.jit, static_argnames=("batch",))
def _row_keys(key: Key[Array, ""], batch: int) -> Key[Array, " B"]:
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))


def keys_at(keys: Key[Array, " B"], position: Int[Array, " B"], purpose: int) -> Key[Array, " B"]:
    """Fresh keys for what happens at one position of each row, apart for each purpose.

    Randomness depends on the row and the position alone, never on neighbours or on how many rounds it took.
    """
    at_position = jax.vmap(jax.random.fold_in)(keys, position)
    return jax.vmap(jax.random.fold_in, (0, None))(at_position, purpose)


def uniforms(keys: Key[Array, " B"], count: int) -> Float[Array, "B count"]:
    """``count`` uniforms in [0, 1) for each row, multiples of 2^-24 (``jax.random.uniform`` has one bit less)."""
    bits = jax.vmap(lambda key: jax.random.bits(key, (count,), jnp.uint32))(keys)
    return (bits >> (32 - _BITS)).astype(jnp.float32) * 2.0**-_BITS


__all__ = [
    "DraftSampling",
    "Warping",
    "argmax",
    "check_sampling",
    "draw",
    "keys_at",
    "num_digits",
    "probabilities",
    "residual",
    "row_keys",
    "uniforms",
    "warping_of",
]
