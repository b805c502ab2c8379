"""Drafts from logits that were computed in one pass; shared by the methods whose tokens do not hear of each other."""

from __future__ import annotations

from jaxtyping import Array, Float, Int, Key

from eagle3_jax.drafters._grow import Level, draft
from eagle3_jax.tree import Topology
from eagle3_jax.types import Draft, DraftSampling, SamplingParams


def propose_parallel(
    topology: Topology,
    *,
    root: Int[Array, " B"],
    logits: Float[Array, "B K W"],
    draft_to_target: Int[Array, " W"] | None,
    vocab_size: int,
    keys: Key[Array, " B"],
    sampling: SamplingParams,
    draft_sampling: DraftSampling,
) -> Draft:
    """Draft from ``K`` laws that the committed tokens alone decide.

    Level ``k`` of the draft follows ``q_k = softmax(logits[k - 1])`` under every node of the level before, so that the
    law of a path is the product of its levels'. The tokens of a chain or a static tree are the likeliest ones, or
    drawn: each independent of the levels before, siblings without replacement. A dynamic tree takes the likeliest
    prefixes: among those that expand the ``top_k`` best of each level the ones with the largest product, without a
    further run of the network.

    Args:
        topology: Chain, dynamic tree or static tree, at most ``K`` deep.
        root: The last committed token.
        logits: Of the tokens 1 to ``K`` after the root.
        draft_to_target: Target id of each draft id; ``None`` where these are the same.
        vocab_size: ``V``.
        keys: Of this round, one per row.
        sampling: One value per row.
        draft_sampling: Whether the tokens of a chain or a static tree are the likeliest or drawn.

    Returns:
        A draft, with ``probs`` where its tokens were drawn.

    Raises:
        ValueError: The draft is deeper than there are logits.
    """
    if topology.max_depth > logits.shape[1]:
        raise ValueError(
            f"a draft of {topology.max_depth} levels was asked for; there are logits for {logits.shape[1]}"
        )

    def run(tokens, carry, depth, mask, memory):
        del tokens, mask
        return Level(logits[:, depth + 1, None], carry, memory)

    return draft(
        topology,
        draft_sampling,
        root=root,
        first=Level(logits[:, :1], carry=(), memory=()),
        run=run,
        draft_to_target=draft_to_target,
        vocab_size=vocab_size,
        keys=keys,
        sampling=sampling,
    )[0]
