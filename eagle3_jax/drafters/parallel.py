"""Drafts from the logits of one forward, for methods that predict all positions independently."""

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

    Level ``k`` of the draft follows ``q_k = softmax(logits[k - 1])`` under every node of the level
    before, so the probability of a path is the product over its levels. The tokens of a chain or a
    static tree are the most likely ones, or they are sampled independently of the levels before,
    siblings without replacement. A dynamic tree takes the prefixes with the largest products among
    those that expand the ``top_k`` best of each level. The network does not run again.

    Args:
        root: ``[B]``, the last committed token.
        logits: ``[B K W]``, logits of the tokens 1 to ``K`` after the root.
        draft_to_target: ``[W]``, target id of each draft id; ``None`` if both are the same.
        vocab_size: ``V``.
        keys: ``[B]``, keys of this round.
        sampling: Sampling parameters, one value per row.

    Raises:
        ValueError: The draft has more than ``K`` levels. It is raised when the draft grows.
    """

    def run(tokens, carry, depth, mask, memory):
        del tokens, mask
        if depth + 1 >= logits.shape[1]:
            raise ValueError(
                f"a draft of {depth + 2} levels needs as many logits; there are {logits.shape[1]}"
            )
        return Level(logits[:, depth + 1, None], carry, memory)

    first = Level(logits[:, :1], carry=(), memory=())
    return DraftInputs(root, first, run, draft_to_target, vocab_size, keys, sampling)
