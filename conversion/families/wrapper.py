"""Models of more than text, whose language model is a target of one of the families."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields

Tensor = TypeVar("Tensor")

# What such a file may say beside its ``text_config`` and mean the language model.
_OF_THE_WHOLE = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "quantization_config")


class Wrapper(NamedTuple):
    """A ``model_type`` that holds a language model and more; the language model is read and the rest left out.

    Attributes:
        model_type: As ``config.json`` has it.
        text: The ``model_type`` of its language model.
        prefixes: What the names of the language model's tensors begin with, and what they begin with alone.
        ignored: Patterns of the other tensors.
    """

    model_type: str
    text: str
    prefixes: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]

    def fields(self, whole: Fields) -> Fields:
        """What is said of the language model.

        Raises:
            CheckpointError: There is no ``text_config``, it is of another family, or the two contradict each other.
        """
        text = whole.section("text_config")
        if not text.values:
            raise CheckpointError(f"{whole.where} has no text_config; it describes the language model, so add it")
        if text.get("model_type") not in (None, self.text):
            raise CheckpointError(
                f"{text.where}: model_type is {short(text.get('model_type'))}; expected {self.text!r} in a model of "
                f"type {self.model_type!r}"
            )
        tied = {one.flag("tie_word_embeddings") for one in (whole, text) if one.get("tie_word_embeddings") is not None}
        if len(tied) > 1:
            raise CheckpointError(f"{whole.where}: tie_word_embeddings differs from that in text_config; remove one")
        beside = {name: whole.get(name) for name in _OF_THE_WHOLE if text.get(name) is None}
        return Fields({**text.values, **beside}, text.where)

    def alone(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the language model under the names that they have without the rest."""
        rest = re.compile("|".join(f"(?:{pattern})" for pattern in self.ignored))
        return {self._name(name): value for name, value in tensors.items() if not rest.fullmatch(name)}

    def _name(self, name: str) -> str:
        for prefix, instead in self.prefixes:
            if name.startswith(prefix):
                return instead + name.removeprefix(prefix)
        return name
