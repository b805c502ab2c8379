"""Drafts from logits of one forward; shared by the methods that predict all positions independently."""

from __future__ import annotations

from jaxtyping import Array, Float, Int, Key

from eagle3_jax.drafters.grow import DraftInputs, Level
from eagle3_jax.types import SamplingParams


def parallel_inputs(
    root: Int[Array, " B"],
    logits: Float[Array, "B K W"],
    draft_to_target: Int[Array, " W"] | None,
    vocab_size: int,
    keys: Key[Array, " B"],
    sampling: SamplingParams,
) -> DraftInputs:
    """Prepares a draft from ``K`` distributions that depend only on the committed tokens.

    Level ``k`` of the draft follows ``q_k = softmax(logits[k - 1])`` under every node of the level before, so the
    distribution of a path is the product over its levels. Tokens of a chain or a static tree are the most likely ones,
    or sampled: independently of the levels before, siblings without replacement. A dynamic tree takes the prefixes with
    the largest products among those that expand the ``top_k`` best of each level. The network is not run again.

    Args:
        root: The last committed token.
        logits: Logits of the tokens 1 to ``K`` after the root.
        draft_to_target: Target id of each draft id; ``None`` if these are the same.
        vocab_size: ``V``.
        keys: Keys of this round, one per row.
        sampling: One value per row.

    Raises:
        ValueError: The draft that grows from this is deeper than ``K``.
    """

    def run(tokens, carry, depth, mask, memory):
        del tokens, mask
        if depth + 1 >= logits.shape[1]:
            raise ValueError(f"a draft of {depth + 2} levels was asked for; there are logits for {logits.shape[1]}")
        return Level(logits[:, depth + 1, None], carry, memory)

    first = Level(logits[:, :1], carry=(), memory=())
    return DraftInputs(root, first, run, draft_to_target, vocab_size, keys, sampling)
