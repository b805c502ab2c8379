"""Models of more than text, whose language model is a target of one of the families."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields

Tensor = TypeVar("Tensor")

# Fields of the language model that a file may give next to its ``text_config``.
_OF_THE_WHOLE = ("eos_token_id", "bos_token_id", "pad_token_id", "quantization_config")


class Wrapper(NamedTuple):
    """A ``model_type`` that holds a language model and more; the language model is read and the rest left out.

    Attributes:
        model_type: As ``config.json`` has it.
        label: Its name in the support matrix.
        texts: The family for every ``model_type`` that its language model may have. The first is the default.
        prefixes: What the names of the language model's tensors begin with, and what they begin with alone.
        ignored: Patterns of the other tensors.
    """

    model_type: str
    label: str
    texts: Mapping[str, str]
    prefixes: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]

    def family(self, whole: Mapping[str, Any]) -> str:
        """The family of the language model. Without a usable ``text_config`` it is the default."""
        text = whole.get("text_config")
        named = text.get("model_type") if isinstance(text, dict) else None
        return self.texts.get(str(named), next(iter(self.texts.values())))

    def fields(self, whole: Fields) -> Fields:
        """What is said of the language model.

        Raises:
            CheckpointError: There is no ``text_config``, or it is of another family.
        """
        text = whole.section("text_config")
        if not text.values:
            raise CheckpointError(f"{whole.where} has no text_config; it describes the language model, so add it")
        if text.get("model_type") not in (None, *self.texts):
            raise CheckpointError(
                f"{text.where}: model_type is {short(text.get('model_type'))}; expected "
                f"{' or '.join(map(repr, self.texts))} in a model of type {self.model_type!r}"
            )
        beside = {name: whole.get(name) for name in _OF_THE_WHOLE if text.get(name) is None}
        if whole.get("tie_word_embeddings") is not None:  # the whole decides, as in transformers
            beside["tie_word_embeddings"] = whole.get("tie_word_embeddings")
        return Fields({**text.values, **beside}, text.where)

    def note(self, names: Collection[str]) -> str:
        """Which tensors are left out, in one line."""
        rest = [name for name in names if self._ignored.fullmatch(name)]
        parts = sorted({name.removeprefix("model.").partition(".")[0] for name in rest})
        beside = f"; the {len(rest)} tensors of {' and '.join(parts)} are ignored" if rest else ""
        return f"only the language model of this {self.model_type} is read{beside}"

    def alone(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the language model under the names that they have without the rest."""
        return {self._name(name): value for name, value in tensors.items() if not self._ignored.fullmatch(name)}

    @property
    def _ignored(self) -> re.Pattern[str]:
        return re.compile("|".join(f"(?:{pattern})" for pattern in self.ignored))

    def _name(self, name: str) -> str:
        for prefix, instead in self.prefixes:
            if name.startswith(prefix):
                return instead + name.removeprefix(prefix)
        return name
