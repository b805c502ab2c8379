"""A family of targets, and a model of more than text that contains one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from eagle3_jax.conversion import blocks, hf_config
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.models.config import DecoderConfig

Tensor = TypeVar("Tensor")

# Fields of the language model that a file may give next to its ``text_config``.
_OF_THE_WHOLE = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "quantization_config")


class Family(NamedTuple):
    """Targets of one ``model_type``."""

    model_type: str  #: As in ``config.json``; a native checkpoint names its family by it.
    label: str  #: Its name for people.
    architecture: str  #: The class of transformers that computes it.
    #: Reads the description of a target from its ``config.json``; refuses what cannot be computed.
    read_config: Callable[[Fields], DecoderConfig]
    #: The fields of ``config.json`` besides those that all families share. It need not refuse what it cannot say: what
    #: is written is read back and compared.
    write_fields: Callable[[DecoderConfig], dict[str, Any]]
    rules: Callable[[DecoderConfig], list[Rule]] = blocks.decoder  #: The rules of its tensors.
    #: Rules of other layouts that its checkpoints come in. The first that fits the names of a file is used. They are
    #: only read; ``rules`` is what is written.
    also: tuple[Callable[[DecoderConfig], list[Rule]], ...] = ()
    #: Patterns of tensors that do not belong to the target. They are left out, and are not written again.
    beside: tuple[str, ...] = ()
    #: Whether a module for multi-token prediction may be stored as one more layer. So is that.
    drafting_layer: bool = False

    def alone(self, tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
        """The tensors of the target, without those that are left out."""
        module = f"model.layers.{num_layers}"
        patterns = list(self.beside)
        if self.drafting_layer and f"{module}.eh_proj.weight" in tensors:
            patterns.append(rf"{re.escape(module)}\..*")
        return {name: value for name, value in tensors.items() if not any(re.fullmatch(p, name) for p in patterns)}

    def table(self, config: DecoderConfig, names: Collection[str]) -> list[Rule]:
        """The rules that fit the names of a file; ``rules`` where none fits."""
        tables = (rules(config) for rules in (self.rules, *self.also))
        return next((table for table in tables if all(rule.source in names for rule in table)), self.rules(config))


class Wrapper(NamedTuple):
    """A ``model_type`` that contains a language model and more. Only the language model is read."""

    model_type: str  #: As ``config.json`` has it.
    label: str  #: Its name in the support matrix.
    #: The family for every ``model_type`` that its language model may have. The first is the default.
    texts: Mapping[str, str]
    #: Prefixes of the language model's tensors, each with the prefix that it has alone.
    prefixes: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]  #: Patterns of the other tensors.
    #: Refuses fields of ``text_config`` that mean something else there than in a language model alone.
    check: Callable[[Fields], None] = lambda _: None

    def family(self, whole: Mapping[str, Any]) -> str:
        """The family of the language model. Without a usable ``text_config`` it is the default."""
        text = whole.get("text_config")
        named = text.get("model_type") if isinstance(text, dict) else None
        return self.texts.get(str(named), next(iter(self.texts.values())))

    def fields(self, whole: Fields) -> Fields:
        """The fields of the language model."""
        hf_config.refuse_bidirectional(whole)  # transformers applies it to the language model
        text = whole.section("text_config")
        if not text.values:
            raise CheckpointError(f"{whole.where} has no text_config; it describes the language model, so add it")
        text.one_of("model_type", self.texts, next(iter(self.texts)), purpose=f"in a model of type {self.model_type!r}")
        self.check(text)
        # The whole decides, as in transformers.
        decided = {name: whole.get(name) for name in _OF_THE_WHOLE if whole.get(name) is not None}
        return Fields({**text.values, **decided}, text.where)

    def note(self, names: Collection[str]) -> str:
        """The tensors that are left out, in one line."""
        rest = [name for name in names if self._ignored.fullmatch(name)]
        parts = sorted({name.removeprefix("model.").partition(".")[0] for name in rest})
        beside = f"; the {len(rest)} tensors of {' and '.join(parts)} are ignored" if rest else ""
        return f"only the language model of this {self.model_type} is read{beside}"

    def alone(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the language model, in the names of one that is published alone."""
        return {self._name(name): value for name, value in tensors.items() if not self._ignored.fullmatch(name)}

    @property
    def _ignored(self) -> re.Pattern[str]:
        return re.compile("|".join(f"(?:{pattern})" for pattern in self.ignored))

    def _name(self, name: str) -> str:
        for prefix, instead in self.prefixes:
            if name.startswith(prefix):
                return instead + name.removeprefix(prefix)
        return name
