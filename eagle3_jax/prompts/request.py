"""One prompt with its limit and its sampling, from the file or the wire to the row of a batch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from eagle3_jax.text.template import Messages

if TYPE_CHECKING:
    from eagle3_jax.loaded import LoadedTarget
    from eagle3_jax.types import SamplingParams

# Limits are 32-bit on the device.
MOST_TOKENS = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt, its limit and its sampling.

    Attributes:
        prompt: Text or token ids; of a conversation, the text of its last turn.
        max_new_tokens: Maximum number of new tokens.
        temperature: 0 is greedy.
        top_k: Number of most likely tokens to keep; 0 keeps all.
        top_p: Mass of the smallest set of most likely tokens to keep.
        seed: Random seed, 0 to 2^32 - 1.
        stops: Texts that end the answer, which is cut before them.
        ignore_stop: Whether to go on after stop tokens.
        messages: The turns of a conversation; ``None`` for a prompt that is continued.
        where: The place that it was read from, which error messages begin with.
        is_question: Whether a target without a chat template continues the prompt instead.
    """

    prompt: str | list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stops: tuple[str, ...] = ()
    ignore_stop: bool = False
    messages: Messages | None = None
    where: str = ""
    is_question: bool = False

    @property
    def tokens(self) -> list[int]:
        """Token ids of the prompt, which :meth:`encoded` gives it."""
        assert not isinstance(self.prompt, str), "the request has not been encoded"
        return self.prompt

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters, as scalars."""
        # A request is read without JAX.
        from eagle3_jax.types import SamplingParams

        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def templated(self, target: LoadedTarget) -> str | list[int]:
        """Returns the prompt; of a conversation its token ids, by the target's chat template.

        Raises:
            ValueError: The target has no chat template, or the template refuses the conversation.
        """
        if self.messages is None or (self.is_question and target.chat_template is None):
            return self.prompt
        return target.apply_chat_template(self.messages)

    def encoded(self, target: LoadedTarget) -> Request:
        """Returns the request with the token ids of its prompt or of its conversation.

        Raises:
            ValueError: The target does not accept the prompt, or cannot end it at a text.
        """
        try:
            tokens = target.encode(self.templated(target))
            if self.stops and target.tokenizer is None:
                raise ValueError(
                    f"stop was given, but {target.name} has no tokenizer; use stop_tokens"
                )
        except ValueError as error:
            raise ValueError(f"{self.where}{error}") from None
        return dataclasses.replace(self, prompt=tokens, messages=None)
