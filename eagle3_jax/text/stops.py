"""Texts that end an answer."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from eagle3_jax.text.tokens import Pieces
from eagle3_jax.types import FinishReason


class StoppedText:
    """The text of an answer as its tokens come, up to the first of some stop texts.

    Attributes:
        text: The text so far; it ends before the stop text once one has appeared.
        stop: The stop text that ended it; ``None`` until one appears.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        self.text = ""
        self.stop: str | None = None
        self._pieces = Pieces(tokenizer)
        self._stops = stops
        self._longest = max(map(len, stops), default=0)

    def add(self, tokens: list[int], reason: FinishReason = FinishReason.RUNNING) -> list[str]:
        """Adds the next tokens of the answer.

        Args:
            tokens: The tokens.
            reason: Why the answer ends with them.

        Returns:
            One piece of text per token, up to the token that completes a stop text. Later tokens
            do not belong to the answer.
        """
        pieces = self._pieces.decode(tokens, reason)
        for number, piece in enumerate(pieces, 1):
            # A stop text may have begun in earlier pieces.
            begin = max(0, len(self.text) - self._longest + 1)
            self.text += piece
            starts = {self.text.find(stop, begin): stop for stop in self._stops}
            starts.pop(-1, None)

            if starts:
                first = min(starts)
                self.stop = starts[first]
                self.text = self.text[:first]
                return pieces[:number]
        return pieces

    @property
    def num_open(self) -> int:
        """Number of characters at the end of the text that may begin a stop text."""
        if self.stop is not None:
            return 0
        sizes = [0]
        for stop in self._stops:
            most = min(len(stop) - 1, len(self.text))
            sizes += [size for size in range(1, most + 1) if self.text.endswith(stop[:size])]
        return max(sizes)
