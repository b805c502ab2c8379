"""A family of targets, and a model of text and other media that contains one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from eagle3_jax.conversion import blocks, hf_config
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.rules import Rule, any_of
from eagle3_jax.models.config import DecoderConfig

Tensor = TypeVar("Tensor")

# Fields of the language model that a file may have outside of its ``text_config``.
_OUTER_FIELDS = (
    "tie_word_embeddings",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "quantization_config",
)


class Family(NamedTuple):
    """Targets of one ``model_type``."""

    model_type: str  #: The value in ``config.json``; a native checkpoint names its family by it.
    label: str  #: Its name for people.
    architecture: str  #: The class of transformers that computes it.
    #: Reads the description of a target from its ``config.json``; refuses unsupported settings.
    read_config: Callable[[Fields], DecoderConfig]
    #: Returns the fields of ``config.json`` that differ between families. It need not refuse
    #: settings that the fields cannot express, because written fields are read back and compared.
    write_fields: Callable[[DecoderConfig], dict[str, Any]]
    #: Returns the rules of its tensors.
    rules: Callable[[DecoderConfig], list[Rule]] = blocks.decoder
    #: Rules of alternative layouts of its checkpoints, for reading. The first rules that fit the
    #: names of a file are used, beginning with ``rules``. Checkpoints are written by ``rules``.
    alternatives: tuple[Callable[[DecoderConfig], list[Rule]], ...] = ()
    #: Patterns of tensors that do not belong to the target. They are left out, and are not written
    #: again.
    excluded: tuple[str, ...] = ()
    #: Fields that files of other families have, and that change the meaning of one of its own.
    absent: tuple[str, ...] = ()
    #: Returns patterns of tensors that a target of this description may have and does not use.
    unused: Callable[[DecoderConfig], tuple[str, ...]] = lambda config: ()
    #: Whether a module for multi-token prediction may be stored as one more layer. It is left out,
    #: too.
    drafting_layer: bool = False

    def select(self, tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
        """Returns the tensors of the target, without those that are left out."""
        excluded = any_of(*self.excluded)
        if self.drafting_layer and f"model.layers.{num_layers}.eh_proj.weight" in tensors:
            excluded = any_of(*self.excluded, rf"model\.layers\.{num_layers}\..*")
        return {name: value for name, value in tensors.items() if not excluded.fullmatch(name)}

    def table(self, config: DecoderConfig, names: Collection[str]) -> list[Rule]:
        """Returns the rules that fit the names of a file; ``rules`` if none fits."""
        for rules in (self.rules, *self.alternatives):
            table = rules(config)
            if all(rule.source in names for rule in table):
                return table
        return self.rules(config)


class Wrapper(NamedTuple):
    """A ``model_type`` that contains a language model, which is read, and other parts."""

    model_type: str  #: The value in ``config.json``.
    label: str  #: Its name in the support matrix.
    #: The family for every ``model_type`` that its language model may have. The first is the
    #: default.
    texts: Mapping[str, str]
    #: Pairs of prefixes of the language model's tensors: in this model, and in a model of text
    #: alone.
    prefixes: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]  #: Patterns of the tensors of other parts.
    #: Refuses fields of ``text_config`` that have another meaning in a model of text alone.
    check: Callable[[Fields], None] = lambda _: None

    def family(self, config: Mapping[str, Any]) -> str:
        """Returns the family of the language model in a ``config.json``, or the default."""
        text = config.get("text_config")
        named = text.get("model_type") if isinstance(text, dict) else None
        return self.texts.get(str(named), next(iter(self.texts.values())))

    def fields(self, outer: Fields) -> Fields:
        """Returns the fields of the language model."""
        # transformers applies the outer flag to the language model.
        hf_config.refuse_bidirectional(outer)
        text = outer.section("text_config")
        if not text.values:
            raise CheckpointError(
                f"{outer.where} has no text_config; it describes the language model, so add it"
            )
        text.one_of(
            "model_type",
            self.texts,
            next(iter(self.texts)),
            purpose=f"in a model of type {self.model_type!r}",
        )

        self.check(text)
        # As in transformers, fields outside of text_config have priority.
        overrides = {name: outer.get(name) for name in _OUTER_FIELDS if outer.get(name) is not None}
        return Fields({**text.values, **overrides}, text.where)

    def note(self, names: Collection[str]) -> str:
        """Describes the tensors that are left out, in one line."""
        left_out = list(filter(self._ignored.fullmatch, names))
        parts = sorted({name.removeprefix("model.").partition(".")[0] for name in left_out})
        details = (
            f"; the {len(left_out)} tensors of {' and '.join(parts)} are ignored"
            if left_out
            else ""
        )
        return f"only the language model of this {self.model_type} is read{details}"

    def select(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of the language model, by the names of a model of text alone."""
        return {
            self._name(name): value
            for name, value in tensors.items()
            if not self._ignored.fullmatch(name)
        }

    @property
    def _ignored(self) -> re.Pattern[str]:
        return any_of(*self.ignored)

    def _name(self, name: str) -> str:
        for prefix, instead in self.prefixes:
            if name.startswith(prefix):
                return instead + name.removeprefix(prefix)
        return name
