"""Suffix decoding: proposes the tokens that most often followed the last tokens of the text.

SuffixDecoding (Oliaro et al., 2024, arXiv 2411.04975) keeps a suffix tree with counts. Here every
match is found in the text itself, on the device: a slot matches the last ``m`` tokens if the ``m``
tokens up to it equal them. For each length ``m``, a draft begins at all matches. Every step takes
the token that follows most of the matches and drops those that disagree:

    ``P(d_1 .. d_k | m) = matches that agree with d_1 .. d_k / matches of m tokens``

The sum of ``P`` over a draft is the expected number of accepted tokens. The draft of the length
with the largest sum is proposed. A draft may end where ``P`` falls below ``min_probability``. It is
a function of the text, so any draft length is exact. By default it does not end early: a round
verifies a block of one size, so a shorter draft saves nothing. Texts of other requests, which the
paper's second tree holds, are ignored: otherwise a row would depend on its neighbours.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Key

from eagle3_jax.drafters.text import TextDrafter, TextState
from eagle3_jax.types import Draft, SamplingParams


@dataclasses.dataclass(frozen=True)
class Suffix(TextDrafter):
    """Continues the matches of all suffixes by majority.

    It has no parameters and needs no training.

    Attributes:
        num_speculative_tokens: ``K``, tokens of a draft. Default: the default length for one row.
        max_suffix: Longest suffix tried, in tokens.
        max_matches: Maximum number of matches that are counted: the longest, and of equally long
            ones the latest.
        min_probability: Share of the matches that must agree with a draft; the draft ends where
            fewer do.
    """

    max_suffix: int = 24
    max_matches: int = 16
    min_probability: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_suffix", "max_matches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not 0 <= self.min_probability <= 1:
            raise ValueError(f"min_probability is {self.min_probability}; expected 0 to 1")

    def propose(
        self, params: Any, state: TextState, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        """Drafts by majority. If a draft ends early, its remaining nodes are invalid."""
        del params, keys, sampling
        run = state.count_matches(self.max_suffix)
        proposed, valid = jax.vmap(self._draft_row)(state.tokens, state.length, run)
        node = jnp.broadcast_to(
            jnp.arange(self.num_nodes, dtype=jnp.int32), (state.length.shape[0], self.num_nodes)
        )
        tokens = jnp.concatenate([state.root, proposed], axis=1)
        parents = node - 1
        valid = jnp.concatenate([jnp.ones_like(valid[:, :1]), valid], axis=1)
        return Draft(tokens=tokens, parents=parents, valid=valid)

    def _draft_row(
        self, tokens: Int[Array, " S"], end: Int[Array, ""], run: Int[Array, " S"]
    ) -> tuple[Int[Array, " K"], Bool[Array, " K"]]:
        """Returns the draft of one row, and which of its tokens are valid.

        Args:
            tokens: ``[S]``, the text.
            end: Length of the text.
            run: ``[S]``, from :meth:`TextState.count_matches`.
        """
        capacity = tokens.shape[0]
        depth = self.num_speculative_tokens

        # M suffixes, the longest first. C matches, the longest first, of equally long ones the
        # latest.
        suffix = jnp.arange(self.max_suffix, 0, -1, dtype=jnp.int32)
        rank = jnp.where(run > 0, run * capacity + jnp.arange(capacity, dtype=jnp.int32), -1)
        best, slot = lax.top_k(rank, min(self.max_matches, capacity))

        # next_tokens[c, i] is the i-th token after match c. agreeing[m, c]: match c continues
        # suffix m as its draft so far does.
        following = slot[:, None] + 1 + jnp.arange(depth, dtype=jnp.int32)[None, :]
        known = following < end
        next_tokens = tokens[jnp.minimum(following, capacity - 1)]
        agreeing = (run[slot][None, :] >= suffix[:, None]) & (best >= 0)[None, :]

        total = jnp.sum(agreeing, axis=1, dtype=jnp.float32)
        score = jnp.zeros(suffix.shape, jnp.float32)
        valid = total > 0
        drafted = []
        valid_by_depth = []
        for index in range(depth):
            # For each match, the number of agreeing matches with the same next token. Of equal
            # counts `argmax` takes the first: the longest match, then the latest.
            same = next_tokens[:, None, index] == next_tokens[None, :, index]
            same = same & known[:, None, index] & known[None, :, index]
            count = jnp.where(
                agreeing, agreeing.astype(jnp.float32) @ same.astype(jnp.float32), 0.0
            )
            chosen = jnp.argmax(count, axis=1)

            # The share is P(d_1 .. d_k | m). Their sum is the expected number of accepted tokens.
            share = jnp.max(count, axis=1) / jnp.maximum(total, 1.0)
            valid &= (share > 0) & (share >= self.min_probability)
            score += jnp.where(valid, share, 0.0)
            drafted.append(next_tokens[chosen, index])
            valid_by_depth.append(valid)
            agreeing &= same[chosen]

        # Of sums that are equal up to rounding the longest suffix wins.
        winner = jnp.argmax(jnp.round(score, 4))
        return jnp.stack(drafted, axis=1)[winner], jnp.stack(valid_by_depth, axis=1)[winner]
