"""Rotary position embedding: frequencies for a configuration, and the rotation.

A pair is channels ``i`` and ``i + dim/2``, as in GPT-NeoX and Llama, or channels ``2i`` and
``2i+1`` (``interleaved``).
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from eagle3_jax.models.config import QueryScaling, RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Returns the radians per position of every channel pair, and the scale of cosine and sine.

    Args:
        config: The rotary embedding.
        head_dim: ``H``; the first ``dim = H * partial`` channels rotate.

    Returns:
        ``[dim/2]`` in float32, and the scale (1 except for yarn and longrope).
    """
    if config.type == "proportional":
        return _proportional(config, head_dim), 1.0
    head_dim = int(head_dim * config.partial)
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = (1.0 / np.power(np.float32(config.theta), exponents)).astype(np.float32)
    if config.type == "default":
        return inv_freq, 1.0
    if config.type == "linear":
        return inv_freq / np.float32(config.factor), 1.0
    original = config.original_max_positions
    assert original is not None
    if config.type == "llama3":
        return _llama3(config, original, inv_freq), 1.0
    if config.type == "longrope":
        return _longrope(config, original, inv_freq)
    return _yarn(config, original, head_dim, inv_freq)


def _proportional(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Lets the first pairs of all channels rotate, at the frequencies of a complete rotation."""
    rotating = int(config.partial * head_dim // 2)
    exponents = np.arange(0, 2 * rotating, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = np.zeros(head_dim // 2, np.float32)
    inv_freq[:rotating] = 1.0 / np.power(np.float32(config.theta), exponents)
    return inv_freq / np.float32(config.factor)


def _llama3(config: RopeConfig, original: int, inv_freq: np.ndarray) -> np.ndarray:
    """Stretches long wavelengths, keeps short ones, and interpolates between (Llama 3.1)."""
    wavelength = 2 * math.pi / inv_freq
    rotations = original / wavelength
    # Equal factors would divide by zero (Llama 4 Scout).
    span = max(config.high_freq_factor - config.low_freq_factor, 1e-6)
    smooth = np.clip((rotations - config.low_freq_factor) / span, 0.0, 1.0)
    return ((1 - smooth) * inv_freq / config.factor + smooth * inv_freq).astype(np.float32)


def _longrope(config: RopeConfig, original: int, inv_freq: np.ndarray) -> tuple[np.ndarray, float]:
    """Divides every frequency by its short factor (Ding et al., 2024, arXiv 2402.13753).

    Short factors are for texts of at most the original length.
    """
    scale = config.attention_factor
    if scale is None:
        extension = max(0.0, math.log(config.factor))
        scale = math.sqrt(1 + extension / math.log(original))
    return inv_freq / np.asarray(config.short_factor, np.float32), scale


def _yarn(
    config: RopeConfig, original: int, head_dim: int, inv_freq: np.ndarray
) -> tuple[np.ndarray, float]:
    """Interpolates by parts (NTK), with an attention temperature (Peng et al., 2023, section 3)."""

    def dimension_of(rotations: float) -> float:
        # The d at which the original context holds this number of wavelengths 2π θ^(2d/H).
        power = original / (rotations * 2 * math.pi)
        return head_dim * math.log(power) / (2 * math.log(config.theta))

    low = dimension_of(config.beta_fast)
    high = dimension_of(config.beta_slow)
    if config.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)

    # Interpolation grows with the wavelength. Equal bounds would divide by zero.
    span = (high - low) or 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / span, 0.0, 1.0)
    scaled = inv_freq / config.factor * ramp + inv_freq * (1 - ramp)

    # The temperature of attention is in cosine and sine: √(1/t) = 0.1 ln(factor) + 1.
    def temperature(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    scale = config.attention_factor
    if scale is None:
        if config.mscale and config.mscale_all_dim:
            scale = temperature(config.mscale) / temperature(config.mscale_all_dim)
        else:
            scale = temperature(1.0)
    return scaled.astype(np.float32), float(scale)


def rotate(
    x: Float[Array, "B T heads H"], positions: Int[Array, "B T"], config: RopeConfig
) -> Float[Array, "B T heads H"]:
    """Rotates every head vector by its position, computed in float32."""
    inv_freq, scale = inverse_frequencies(config, x.shape[-1])
    rotating = x[..., : 2 * len(inv_freq)]
    unrotated = x[..., 2 * len(inv_freq) :]

    angles = positions[..., None].astype(jnp.float32) * lax.broadcast_to_rank(inv_freq, 3)
    cos = (jnp.cos(angles) * scale)[:, :, None, :]
    sin = (jnp.sin(angles) * scale)[:, :, None, :]

    rotating = rotating.astype(jnp.float32)
    if config.interleaved:
        first = rotating[..., ::2]
        second = rotating[..., 1::2]
    else:
        first, second = jnp.split(rotating, 2, axis=-1)
    pair = [first * cos - second * sin, second * cos + first * sin]
    if config.interleaved:
        rotated = jnp.stack(pair, axis=-1).reshape(rotating.shape)
    else:
        rotated = jnp.concatenate(pair, axis=-1)
    rotated = rotated.astype(x.dtype)
    return rotated if unrotated.shape[-1] == 0 else jnp.concatenate([rotated, unrotated], axis=-1)


def scale_queries(
    queries: Float[Array, "B T heads H"], positions: Int[Array, "B T"], config: QueryScaling
) -> Float[Array, "B T heads H"]:
    """Returns queries times the factor of their position, in their own type.

    If positions count from 0 (Ministral 3), the factor is rounded to that type before the product.
    If they count from 1 (Llama 4), the product is rounded.
    """
    interval = (positions + config.offset) // config.floor
    factor = 1 + config.beta * jnp.log1p(interval.astype(jnp.float32))
    factor = factor[:, :, None, None]
    if config.offset:
        return (queries.astype(jnp.float32) * factor).astype(queries.dtype)
    return queries * factor.astype(queries.dtype)
