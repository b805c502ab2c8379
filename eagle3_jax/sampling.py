"""From logits to the distribution that is sampled, and from uniforms to tokens.

One function serves prefill, plain decoding and verification, so that they cannot disagree.
"""

from __future__ import annotations

import enum
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from eagle3_jax.types import SamplingParams


class Warping(enum.Enum):
    """How much work the rows of a batch need; static, so that a greedy batch never builds a distribution."""

    GREEDY = "greedy"
    TEMPERATURE = "temperature"
    TRUNCATED = "truncated"


class DraftSampling(enum.Enum):
    """How a drafter turns its own logits into draft tokens, in vLLM's words; the output is exact either way.

    ``GREEDY`` proposes the likeliest token, a point mass. ``PROBABILISTIC`` draws from ``q = softmax(logits / T)``,
    which a flat target accepts more often: with probability ``Σ min(p, q)``, not ``p`` of one token.
    """

    GREEDY = "greedy"
    PROBABILISTIC = "probabilistic"


def probabilities(
    logits: Float[Array, "B N V"], sampling: SamplingParams, warping: Warping = Warping.TRUNCATED
) -> Float[Array, "B N V"]:
    """The target's distribution after temperature, then top-k, then top-p (the order of Hugging Face), in float32.

    Args:
        logits: Of ``N`` tokens per row.
        sampling: One value per row; a row of temperature 0 becomes a point mass on its argmax (lowest id in a tie).
        warping: ``TRUNCATED`` honours ``top_k`` and ``top_p``; ``TEMPERATURE`` skips their sort when no row uses them.
    """
    logits = logits.astype(jnp.float32)
    temperature = jnp.asarray(sampling.temperature)[:, None, None]
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    if warping is Warping.TRUNCATED:
        scaled = _truncate(scaled, jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p))
    greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
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
    return jnp.put_along_axis(jnp.empty_like(ranked), order, ranked, axis=-1, inplace=False)


def residual(p: Float[Array, "*B V"], q: Float[Array, "*B V"]) -> tuple[Float[Array, "*B V"], Float[Array, "*B"]]:
    """What the target still wants after a rejection: ``max(p - q, 0)`` normalised, and its mass before that.

    Leviathan et al. (2023), section 2.3. Without mass (``p`` nowhere exceeds ``q``) the result is ``p`` itself.
    """
    rest = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(rest, axis=-1)
    return jnp.where(mass[..., None] > 0, rest / jnp.where(mass > 0, mass, 1.0)[..., None], p), mass


def draw(p: Float[Array, "*B V"], uniform: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """Invert the cumulative distribution at ``uniform`` in [0, 1); a token without mass is never drawn."""
    cumulative = jnp.cumsum(p, axis=-1)
    # Scaled to what the sum really came to, so that rounding cannot point past the last token with mass.
    passed = cumulative > uniform[..., None] * cumulative[..., -1:]
    return jnp.argmax(passed, axis=-1).astype(jnp.int32)


def row_keys(seed: int, batch: int) -> Key[Array, " B"]:
    """One key per row; row ``b`` is the same in a batch of any size."""
    return _row_keys(jax.random.key(seed), batch)


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
    """``count`` uniforms in [0, 1) for each row."""
    return jax.vmap(lambda key: jax.random.uniform(key, (count,)))(keys)
