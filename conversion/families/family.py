"""A family of targets, and a model of text and other media that contains one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from eagle3_jax.conversion import blocks, hf_config
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.rules import Rule, any_of, numbers_in
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


class Modules(NamedTuple):
    """Modules for multi-token prediction (MTP) in the files of a target."""

    layout: str  #: Their names, a layout of ``conversion.heads.mtp``.
    #: Pattern of the names of their tensors; empty for modules that are stored as further layers.
    pattern: str = ""
    #: Pattern whose group is the number of a module.
    number: str = r"model\.layers\.(\d{1,9})\.eh_proj\."
    #: Returns the fields of ``config.json`` by which the layers of some modules differ from the
    #: target's.
    fields: Callable[[Fields, int], Mapping[str, Any]] = lambda fields, count: {}
    #: Whether they read the target's state after its final norm, and whether the embedding at
    #: position 0 counts as zero. transformers does the first and not the second, in every family
    #: whose modules it drafts with.
    normed_state: bool = True
    zero_first: bool = False

    def numbers(self, names: Collection[str], num_layers: int) -> list[int]:
        """Returns the numbers of the modules in a file, which begin with 0."""
        first = 0 if self.pattern else num_layers
        return sorted(
            number - first for number in numbers_in(names, self.number) if number >= first
        )

    def names(self, names: Collection[str], num_layers: int) -> set[str]:
        """Returns the names of the modules' tensors in a file."""
        pattern = self.pattern or any_of(
            *(
                rf"model\.layers\.{num_layers + number}\..*"
                for number in self.numbers(names, num_layers)
            )
        )
        return set(filter(re.compile(pattern).fullmatch, names))

    def described(self, fields: Fields, count: int) -> Fields:
        """Returns the fields of a target whose layers are those of ``count`` modules."""
        changed = {"num_hidden_layers": count, **self.fields(fields, count)}
        return fields._replace(values={**fields.values, **changed})


# Modules behind the layers, whose blocks have experts however many layers of the target are dense.
BEHIND = Modules("deepseek", fields=lambda fields, count: {"first_k_dense_replace": 0})
# Modules under a name of their own, as Qwen3-Next has them.
MTP = Modules("qwen", pattern=r"mtp\..*", number=r"mtp\.layers\.(\d{1,9})\.")


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
    #: The modules for multi-token prediction that a file may hold. They do not belong to the
    #: target, and draft for it (``--drafter mtp``).
    modules: Modules | None = None
    #: Fields that files of other families have, and that change the meaning of one of its own.
    absent: tuple[str, ...] = ()
    #: Returns patterns of tensors that a target of this description may have and does not use.
    unused: Callable[[DecoderConfig], tuple[str, ...]] = lambda config: ()

    def select(self, tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
        """Returns the tensors of the target, without those that are left out."""
        excluded = any_of(*self.excluded)
        drafting = self.modules.names(tensors, num_layers) if self.modules else set()
        return {
            name: value
            for name, value in tensors.items()
            if name not in drafting and not excluded.fullmatch(name)
        }

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
    #: Further fields of this model that its language model depends on, with their defaults.
    outer: Mapping[str, Any] = {}

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
        names = (*_OUTER_FIELDS, *self.outer)
        overrides = {name: outer.get(name) for name in names if outer.get(name) is not None}
        return Fields({**text.values, **self.outer, **overrides}, text.where)

    def note(self, names: Collection[str]) -> str:
        """Describes the tensors that are left out, in one line."""
        left_out = list(filter(self._ignored.fullmatch, names))
        parts = sorted({name.removeprefix("model.").partition(".")[0] for name in left_out})
        listed = " and ".join(", ".join(parts).rsplit(", ", 1))
        details = f"; the {len(left_out)} tensors of {listed} are ignored" if left_out else ""
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
