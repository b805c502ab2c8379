"""Token ids of texts, and the text of tokens as they come."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from eagle3_jax.types import FinishReason

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
            f"the prompt's character {error.start + 1} is {text[error.start]!r}, which is not a"
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
    """Turns a stream of tokens into the text that each token completes.

    The pieces, joined, are the decoded text.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown: list[int] = []
        self._decoded = ""

    def decode(self, tokens: list[int], reason: FinishReason = FinishReason.RUNNING) -> list[str]:
        """Returns one piece per token; it is empty while a character is unfinished.

        Without a tokenizer all pieces are empty.

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
            if text.startswith(self._decoded):
                pieces[-1] += text[len(self._decoded) :]
        return pieces


def without_stop_token(tokens: list[int], reason: FinishReason) -> list[int]:
    """Returns tokens without the stop token that ends them, if one does."""
    return tokens[:-1] if reason is FinishReason.STOP else tokens
