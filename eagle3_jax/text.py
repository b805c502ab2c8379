"""Between text and token ids, at both ends of a generation."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_TYPICAL_CHARACTERS = 6  # of a token; a guess that costs little when it is wrong


def tokenized(text: str, encode: Callable[[str], list[int]], *, positions: int, holds: str = "") -> list[int]:
    """Token ids of a text, unless it is far too long.

    Args:
        text: Of any length.
        encode: From text to token ids.
        positions: How many tokens there is room for.
        holds: The same in words.

    Raises:
        ValueError: The text is none in UTF-8, or has at least twice as many tokens as there is room for.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt's character {error.start + 1} is {text[error.start]!r}, which is no character of UTF-8 by "
            "itself; give text in UTF-8"
        ) from None
    # Half a minute would go into the tokens of 10 MB. What follows a beginning can change how the last word of it is
    # cut and nothing before that, so twice as many tokens as there is room for leave no doubt.
    size = 2 * positions * _TYPICAL_CHARACTERS
    while size < len(text):
        if len(encode(text[:size])) >= 2 * positions:
            raise ValueError(
                f"the prompt has {len(text)} characters, far more tokens than the {holds or f'{positions} positions'} "
                f"of the target; give at most {positions - 1} tokens"
            )
        size *= 4
    return encode(text)


class Pieces:
    """New tokens as the text that each of them completes; joined, the pieces are the decoded tokens."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._given = ""

    def of(self, tokens: list[int]) -> list[str]:
        """One piece for each token; empty while a character is unfinished, and without a tokenizer."""
        if self._tokenizer is None:
            return [""] * len(tokens)
        pieces = [self._stream.step(self._tokenizer, token) or "" for token in tokens]
        self._given += "".join(pieces)
        return pieces

    def rest(self, text: str | None) -> str:
        """What the whole text has beyond the pieces given so far: a character that was never finished."""
        return text[len(self._given) :] if text is not None and text.startswith(self._given) else ""


__all__ = ["Pieces", "tokenized"]
