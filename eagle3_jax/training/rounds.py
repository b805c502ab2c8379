"""Tokens per round, read off texts in one pass and without decoding.

The drafts of a chain of ``K`` are accepted up to the first that differs from the text. So the
drafts at every position determine the rounds. The first round begins with the answer, and each next
one after the token that the target added. On text that the target wrote greedily, these are exactly
the rounds of decoding it. On sampled text their number is right on average, because a greedy draft
is accepted as often as the target samples its token.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.models.functional import Params
from eagle3_jax.training.batches import TTTBatch, later
from eagle3_jax.training.ttt import unroll


def draft_hits(
    drafter: Eagle3Drafter,
    head_params: Params,
    embedding: Float[Array, "V D"],
    features: Float[Array, "B T A Dt"],
    batch: TTTBatch,
    draft_to_target: Int[Array, " W"] | None,
    num_steps: int,
) -> Bool[Array, "B T K"]:
    """Returns whether draft ``k`` after token ``t + 1`` is token ``t + 2 + k`` of the text.

    An entry counts only where all entries before it are True.

    Args:
        drafter: The head's configuration and precision.
        head_params: Parameters of the head.
        embedding: The head's token embedding.
        features: The target's features of the texts.
        batch: The texts.
        draft_to_target: The draft vocabulary; ``None`` for all tokens.
        num_steps: ``K``, length of the chain.
    """
    logits = unroll(drafter, head_params, embedding, features, batch, num_steps)
    hits = []
    for step, scores in enumerate(logits):
        draft = jnp.argmax(scores, axis=-1)
        token = draft if draft_to_target is None else draft_to_target[draft]
        hits.append(token == later(batch.tokens, step + 2, -1))
    return jnp.stack(hits, axis=-1)


def accepted_in_rounds(hits: Bool[np.ndarray, "T K"], first: int, end: int) -> list[int]:
    """Returns the number of accepted drafts of every round of one text.

    Args:
        hits: See :func:`draft_hits`.
        first: Index of the first token of the answer, which the prefill gives.
        end: Index after the last token of the answer.

    Returns:
        For each round the number of accepted drafts, 0 to ``K``. Drafts past the end of the text
        are not counted.
    """
    rounds = []
    root = first
    while root < end - 1:
        chain = hits[root - 1][: end - 1 - root]
        accepted = int(np.argmin(chain)) if not chain.all() else len(chain)
        rounds.append(accepted)
        root += accepted + 1
    return rounds
