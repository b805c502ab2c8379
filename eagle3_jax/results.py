"""The results of decoding."""

from __future__ import annotations

import dataclasses

from eagle3_jax.stats import SpeculationStats, TokenLogProb
from eagle3_jax.types import FinishReason


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of one prompt.

    Attributes:
        prompt_tokens: Token ids of the prompt.
        tokens: New tokens, including a stop token.
        text: The new tokens, decoded without the stop token; ``None`` without a tokenizer.
        finish_reason: Why the row ended.
        stats: Counters of the row.
        logprobs: One entry per token, if they were asked for.
    """

    prompt_tokens: list[int]
    tokens: list[int]
    text: str | None
    finish_reason: FinishReason
    stats: SpeculationStats
    logprobs: list[TokenLogProb] | None = None


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """Results in the order of the prompts.

    Attributes:
        rows: One result per prompt.
        seconds: Wall time of the device program, including its compilation if it was new.
        lossless: Whether the output follows exactly the distribution of the target as loaded (for
            example in FP8).
    """

    rows: list[Generation]
    seconds: float
    lossless: bool

    @property
    def texts(self) -> list[str | None]:
        """Decoded new tokens of each prompt."""
        return [row.text for row in self.rows]

    @property
    def tokens(self) -> list[list[int]]:
        """New tokens of each prompt."""
        return [row.tokens for row in self.rows]

    @property
    def stats(self) -> SpeculationStats:
        """Counters of all rows together."""
        return SpeculationStats.merge(row.stats for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The tokens that one round adds to a stream.

    Attributes:
        tokens: New tokens.
        pieces: The text that each token completes; empty while a character is unfinished, for a
            stop token, and without a tokenizer.
        num_accepted: Number of accepted draft tokens; they come first.
        finish_reason: ``RUNNING`` until the last chunk.
        stats: Counters so far.
        logprobs: One entry per token, if they were asked for.
    """

    tokens: list[int]
    pieces: list[str]
    num_accepted: int
    finish_reason: FinishReason
    stats: SpeculationStats
    logprobs: list[TokenLogProb] | None = None

    @property
    def text(self) -> str:
        """The pieces, joined."""
        return "".join(self.pieces)
