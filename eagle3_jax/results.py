"""The results of decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

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


_TYPICAL_CHARACTERS = 6  # per token; a wrong guess only costs time


def tokenized(
    text: str, encode: Callable[[str], list[int]], *, positions: int, holds: str = ""
) -> list[int]:
    """Returns the token ids of a text.

    Args:
        text: A text of any length.
        encode: Converts text to token ids.
        positions: Longest sequence of the target.
        holds: The same in words, for error messages.

    Raises:
        ValueError: The text is not valid UTF-8, or has at least twice as many tokens as
            ``positions``.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt's character {error.start + 1} is {text[error.start]!r}, which is no"
            " character of UTF-8 by itself; give text in UTF-8"
        ) from None
    # Encoding 10 MB takes half a minute, so longer and longer beginnings are encoded first. Text
    # after a beginning can only change the tokens of its last word, so a beginning of twice as many
    # tokens is certainly too long.
    size = 2 * positions * _TYPICAL_CHARACTERS
    while size < len(text):
        if len(encode(text[:size])) >= 2 * positions:
            raise ValueError(
                f"the prompt has {len(text)} characters, far more tokens than the"
                f" {holds or f'{positions} positions'} of the target; give at most {positions - 1}"
                " tokens"
            )
        size *= 4
    return encode(text)


class Pieces:
    """Turns a stream of tokens into the text that each token completes. The pieces, joined, are the decoded text."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown: list[int] = []
        self._decoded = ""

    def decode(self, tokens: list[int], reason: FinishReason = FinishReason.RUNNING) -> list[str]:
        """Returns one piece per token; empty while a character is unfinished, and without a tokenizer.

        Args:
            tokens: The next tokens.
            reason: Why the text ends with them. A stop token has an empty piece, and the last piece
                ends with the character that was never finished.
        """
        if self._tokenizer is None:
            return [""] * len(tokens)
        shown = without_stop_token(tokens, reason)
        pieces = [self._stream.step(self._tokenizer, token) or "" for token in shown]
        pieces += [""] * (len(tokens) - len(shown))
        self._shown += shown
        self._decoded += "".join(pieces)
        if reason is not FinishReason.RUNNING and pieces:
            text = self._tokenizer.decode(self._shown)
            pieces[-1] += text[len(self._decoded) :] if text.startswith(self._decoded) else ""
        return pieces


def without_stop_token(tokens: list[int], reason: FinishReason) -> list[int]:
    """Returns tokens without the stop token that ends them, if one does."""
    return tokens[:-1] if reason is FinishReason.STOP else tokens
