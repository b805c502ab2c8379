"""What decoding returns to its callers."""

from __future__ import annotations

import dataclasses

from eagle3_jax.stats import SpeculationStats
from eagle3_jax.types import FinishReason


@dataclasses.dataclass(frozen=True)
class Generation:
    """One prompt's result.

    Attributes:
        prompt_tokens: As fed.
        tokens: New tokens only, a stop token included.
        text: The new tokens decoded without the stop token; ``None`` without a tokenizer.
        finish_reason: Why it ended.
        stats: Its counters.
    """

    prompt_tokens: list[int]
    tokens: list[int]
    text: str | None
    finish_reason: FinishReason
    stats: SpeculationStats


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """Results in the order of the prompts.

    Attributes:
        rows: One per prompt.
        seconds: Wall time of the device program, its compilation included when it was new.
        lossless: Whether the output follows the target's distribution exactly: that of the target as it was loaded,
            with whatever its weights are stored as.
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
    """What one round adds to a stream.

    Attributes:
        tokens: New tokens.
        pieces: The text that each of them completes; empty while a character is unfinished, for a stop token, and
            without a tokenizer.
        num_accepted: How many of them, counted from the first, were accepted draft tokens.
        finish_reason: ``RUNNING`` until the last chunk.
        stats: Counters so far.
    """

    tokens: list[int]
    pieces: list[str]
    num_accepted: int
    finish_reason: FinishReason
    stats: SpeculationStats
