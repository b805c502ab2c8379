"""Log-probabilities of the output, recorded by the loop from the logits that each token was verified with."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class TokenLogProb:
    """Log-probabilities at one position of the output, under the target at temperature 1."""

    logprob: float  #: That of the token that was written.
    top: list[tuple[int, float]]  #: The likeliest tokens and their log-probabilities, likeliest first.


class LogProbs(struct.PyTreeNode, kw_only=True):
    """Log-probabilities under the target at temperature 1, of the token in each slot and of the ``L`` likeliest."""

    token: Float[Array | np.ndarray, "B S"]  #: ``[B S]``; slots of the prompt hold 0.
    top_ids: Int[Array | np.ndarray, "B S L"]  #: ``[B S L]``, likeliest first.
    top: Float[Array | np.ndarray, "B S L"]  #: ``[B S L]``.

    @classmethod
    def zeros(cls, batch: int, capacity: int, count: int) -> LogProbs:
        """Empty slots; ``count`` is ``L``."""
        slots = (batch, capacity)
        return cls(
            token=jnp.zeros(slots), top_ids=jnp.zeros((*slots, count), jnp.int32), top=jnp.zeros((*slots, count))
        )

    @classmethod
    def of(cls, logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], count: int) -> LogProbs:
        """Those of ``tokens`` and of the ``count`` likeliest tokens under the logits that the tokens were chosen by."""
        scores = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        # By logits: the rounding of their log-probabilities makes ties of tokens that are not equally likely.
        ids = lax.top_k(logits, count)[1]
        top = jnp.take_along_axis(scores, ids, axis=-1)
        return cls(token=jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0], top_ids=ids, top=top)

    def row(self, index: int, start: int, stop: int) -> list[TokenLogProb]:
        """The slots ``start`` to ``stop`` of one row of host arrays."""
        columns = (np.asarray(leaf)[index, start:stop].tolist() for leaf in (self.token, self.top_ids, self.top))
        return [TokenLogProb(one, list(zip(ids, top, strict=True))) for one, ids, top in zip(*columns, strict=True)]
