"""Models together with their arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer

from eagle3_jax.checks import is_whole
from eagle3_jax.devices.sharding import to_host
from eagle3_jax.files.jsonl import shown
from eagle3_jax.text.template import ChatTemplate, Messages
from eagle3_jax.text.tokens import tokenized
from eagle3_jax.types import Drafter, TargetModel

#: A text, token ids, or an array ``[T]`` of token ids.
Prompt = str | Sequence[int] | np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LoadedTarget:
    """A target with its arrays.

    Attributes:
        model: The architecture.
        params: Parameters of the model.
        vocab_size: ``V``.
        max_positions: Longest sequence.
        stop_tokens: Ids that end a text.
        tokenizer: The tokenizer; ``None`` if prompts must be token ids.
        name: Name in reports.
        mesh: The mesh that divides the arrays; ``None`` for one device.
        weights: How kernels are stored: ``dense``, ``fp8``, ``fp8-dynamic`` or ``int8``.
        bound: The reason if ``max_positions`` is lower than the model's own limit; else empty.
        chat_template: The chat template; ``None`` if the model has none.
        source: The directory or GGUF file that it was read from; ``None`` for a target of your own.
    """

    model: TargetModel
    params: Any
    vocab_size: int
    max_positions: int
    stop_tokens: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None
    name: str = "target"
    mesh: Mesh | None = None
    weights: str = "dense"
    bound: str = ""
    chat_template: ChatTemplate | None = None
    source: Path | None = None

    @property
    def holds(self) -> str:
        """``max_positions`` in words."""
        return f"{self.max_positions} positions" + (f" ({self.bound})" if self.bound else "")

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt.

        Args:
            prompt: A text, token ids, or an array ``[T]`` of them.

        Raises:
            ValueError: The prompt is empty, too long, or has an id outside the vocabulary.
        """
        tokens = self._encode_text(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        if len(tokens) >= self.max_positions:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens; {self.name} holds {self.holds}, so give at"
                f" most {self.max_positions - 1}"
            )
        for token in tokens:
            self.check_token(token, "prompt token")
        return [int(token) for token in tokens]

    def _encode_text(self, text: str) -> list[int]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer; give the prompt as token ids")
        return tokenized(
            text,
            lambda part: tokenizer.encode(part).ids,
            positions=self.max_positions,
            holds=self.holds,
        )

    def check_token(self, token: Any, name: str) -> None:
        """Raises unless a value is a token id; ``name`` begins the message."""
        if not is_whole(token, 0) or token >= self.vocab_size:
            raise ValueError(
                f"{name} {shown(token)} is not a token id; expected whole numbers from 0 to"
                f" {self.vocab_size - 1}"
            )

    def apply_chat_template(self, messages: Messages) -> list[int]:
        """Returns the token ids of a conversation, up to where the model's answer begins.

        Args:
            messages: The turns, each with ``role`` (``system``, ``user`` or ``assistant``) and
                ``content``, a text.

        Raises:
            ValueError: The target has no chat template or no tokenizer, the messages have another
                form, or the template refuses them.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer; give the prompt as token ids")
        if self.chat_template is None:
            raise ValueError(f"{self.name} has no chat template; give the prompt as text")

        # The template has the special tokens.
        return tokenized(
            self.chat_template.render(messages),
            lambda part: tokenizer.encode(part, add_special_tokens=False).ids,
            positions=self.max_positions,
            holds=self.holds,
        )

    def __repr__(self) -> str:
        """Describes the target in one line, without arrays."""
        facts = [type(self.model).__name__, *_facts(self.model, self.params)]
        if self.weights != "dense":
            facts.append(f"{self.weights} weights")
        facts.append(f"vocabulary of {self.vocab_size}")
        return f"LoadedTarget({self.name}: {', '.join(facts)})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LoadedDrafter:
    """A drafter with its arrays.

    Attributes:
        drafter: The drafter.
        params: Its parameters; ``None`` if it has none.
        name: Name in reports.
        method: Method and file layout, as in ``P-EAGLE head (vllm layout)``; empty to use the name
            of the class.
        note: Parts that were left out or assumptions that were made when it was read; mostly empty.
    """

    drafter: Drafter[Any]
    params: Any = None
    name: str = "drafter"
    method: str = ""
    note: str = ""

    @property
    def described(self) -> str:
        """Method and file layout."""
        return self.method or type(self.drafter).__name__

    def __repr__(self) -> str:
        """Describes the drafter in one line.

        Its parameters include the arrays that it shares with the target.
        """
        model = getattr(self.drafter, "model", None)
        config = getattr(self.drafter, "config", model)
        vocab_size = getattr(config, "vocab_size", None)
        size = getattr(config, "draft_vocab_size", vocab_size)
        facts = [self.described, shape_of(self.drafter), *_facts(self.drafter, self.params)]
        if size is not None:
            facts.append(f"vocabulary of {size}")
        return f"LoadedDrafter({self.name}: {', '.join(facts)})"


def _token_ids(prompt: Sequence[int] | np.ndarray | jax.Array) -> list[int]:
    """Returns the token ids of a prompt that is not a text."""
    if not isinstance(prompt, np.ndarray | jax.Array):
        return list(prompt)
    if prompt.ndim != 1:
        raise ValueError(
            f"a prompt is an array of shape {prompt.shape}; expected [T], the token ids of one"
            " prompt"
        )
    return to_host(prompt).tolist()


def _facts(part: Any, params: Any) -> list[str]:
    """Returns the number of layers, the number of parameters and their types in words, if known."""
    model = getattr(part, "model", None)
    config = getattr(part, "config", getattr(model, "config", None))
    layers = getattr(config, "layers", None)

    facts = []
    if layers is not None:
        facts.append(f"{len(layers)} layer{'s' if len(layers) > 1 else ''}")

    leaves = [leaf for leaf in jax.tree.leaves(params) if hasattr(leaf, "dtype")]
    if leaves:
        count = sum(leaf.size for leaf in leaves)
        types = {leaf.dtype.name for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}
        facts += [f"{count:,} parameters", *sorted(types)]
    return facts


def shape_of(drafter: Drafter[Any]) -> str:
    """Returns the shape of a draft in words."""
    if getattr(drafter, "is_chain", False):
        note = getattr(drafter, "shape_note", "")
        return f"chain K={drafter.max_depth}" + (f" ({note})" if note else "")
    return f"tree of {drafter.num_nodes} nodes, {drafter.max_depth} deep"
