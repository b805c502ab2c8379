"""Texts that end an answer, against a search in the text of all tokens so far."""

from __future__ import annotations

import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.text.stops import StoppedText

STOPS = (("return",), ("self", "\n\n"), ("é",), ("a", "ab"), ("never here",), ())
TEXTS = ("def add(a, b):\n    return a + b\n", "café né\n\nself.abc", "x = [1, 2]\n" * 4)


def first_stop(target: e3.LoadedTarget, tokens: list[int], stops: tuple[str, ...]) -> tuple:
    """The number of tokens up to a stop text, and the text before it, or all if there is none."""
    assert target.tokenizer is not None
    for count in range(1, len(tokens) + 1):
        text = target.tokenizer.decode(tokens[:count])
        places = [text.index(stop) for stop in stops if stop in text]
        if places:
            return count, text[: min(places)]
    return len(tokens), target.tokenizer.decode(tokens)


@pytest.mark.parametrize("stops", STOPS, ids=repr)
@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_ends_before_its_first_stop_text(
    shipped: e3.LoadedTarget, text: str, stops: tuple[str, ...]
) -> None:
    tokens = shipped.encode(text)
    expected = first_stop(shipped, tokens, stops)

    for seed in range(5):
        # Rounds bring one to four tokens.
        counts = np.random.default_rng(seed).integers(1, 5, len(tokens))
        answer = StoppedText(shipped.tokenizer, stops)
        begin = 0
        num_tokens = 0

        for count in counts:
            new = tokens[begin : begin + int(count)]
            begin += len(new)
            is_last = begin >= len(tokens)
            reason = e3.FinishReason.LENGTH if is_last else e3.FinishReason.RUNNING
            shown_before = len(answer.text) - answer.num_open
            num_tokens += len(answer.add(new, reason))
            # What a stream has shown is never taken back.
            assert len(answer.text) >= shown_before
            if is_last or answer.stop is not None:
                break

        assert (num_tokens, answer.text) == expected
        assert (answer.stop in stops) == (answer.stop is not None)
