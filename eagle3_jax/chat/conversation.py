"""Conversations with a model that was trained on a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.results import Chunk, Generation
from eagle3_jax.types import SamplingParams


class Chat:
    """A conversation with a decoder. Each turn runs the whole conversation so far.

    Example::

        chat = e3.Chat(decoder)
        for chunk in chat.stream("What is the capital of France?"):
            print(chunk.text, end="")
        print(chat.send("And of Italy?").text)

    Attributes:
        messages: The turns so far, each with ``role`` and ``content``: the system message if there
            is one, then questions and answers. They may be changed between turns.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        *,
        system: str | None = None,
        max_new_tokens: int = 512,
        sampling: SamplingParams | None = None,
        seed: int = 0,
    ):
        """Begins a conversation.

        Args:
            decoder: A decoder whose target has a chat template and a tokenizer.
            system: The system message. Default: the template's own, if it has one.
            max_new_tokens: Maximum number of tokens of an answer.
            sampling: Scalars. Default: greedy.
            seed: Random seed. A turn is decoded with it plus the number of messages before the
                turn.

        Raises:
            ValueError: The target has no chat template or no tokenizer, or the template takes no
                system message.
        """
        self.decoder = decoder
        self.messages: list[dict[str, str]] = (
            [] if system is None else [{"role": "system", "content": system}]
        )
        self._options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling}
        self._seed = seed
        # A template that refuses this conversation would refuse every turn.
        self._begin("Why?")

    def send(self, text: str) -> Generation:
        """Returns the answer to a question, once it is complete.

        Then both become turns of the conversation.

        Raises:
            ValueError: The conversation no longer fits the target. The question is not kept.
        """
        turn, prompt = self._begin(text)
        # Round by round, as `stream`, so that both need the same programs.
        chunks = list(self.decoder.stream(prompt, **self._options_of_turn()))
        tokens = [token for chunk in chunks for token in chunk.tokens]
        reason = chunks[-1].finish_reason
        answer = Generation(
            prompt, tokens, self.decoder.text_of(tokens, reason), reason, chunks[-1].stats
        )
        self.messages += [turn, {"role": "assistant", "content": answer.text or ""}]
        return answer

    def stream(self, text: str) -> Iterator[Chunk]:
        """Yields the answer to a question as it is written.

        The part that has been yielded is the last turn of ``messages`` at any time. If the caller
        ends the loop early, this part stays in the conversation. A question without any chunk is
        not kept.

        Raises:
            ValueError: The conversation no longer fits the target. The question is not kept.
        """
        turn, prompt = self._begin(text)
        return self._recorded(turn, self.decoder.stream(prompt, **self._options_of_turn()))

    def _begin(self, text: str) -> tuple[dict[str, str], list[int]]:
        """Returns a question as a turn, and the token ids of the conversation with it."""
        turn = {"role": "user", "content": text}
        target = self.decoder.target
        prompt = target.apply_chat_template([*self.messages, turn])
        if len(prompt) >= target.max_positions:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens with this question, and {target.name}"
                f" holds {target.holds}; ask a shorter question or begin a new conversation"
            )
        return turn, prompt

    def _options_of_turn(self) -> dict[str, Any]:
        """Returns the decoder's options for the next turn; each turn has a seed of its own."""
        return {**self._options, "seed": (self._seed + len(self.messages)) % 2**32}

    def _recorded(self, turn: dict[str, str], chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yields the chunks of an answer and keeps its text in the conversation."""
        answer = {"role": "assistant", "content": ""}
        for number, chunk in enumerate(chunks):
            if number == 0:
                self.messages += [turn, answer]
            answer["content"] += chunk.text
            yield chunk
