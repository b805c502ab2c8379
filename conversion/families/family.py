"""What a family of targets says of itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from eagle3_jax.conversion import blocks
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.models.config import DecoderConfig


def nothing_beside(num_layers: int, names: Collection[str]) -> tuple[str, ...]:
    """Of a family whose checkpoints hold the target alone."""
    del num_layers, names
    return ()


def layer_that_drafts(num_layers: int, names: Collection[str]) -> tuple[str, ...]:
    """Of a family that keeps a module for multi-token prediction as one more layer than there are."""
    module = f"model.layers.{num_layers}"
    return (rf"{re.escape(module)}\..*",) if f"{module}.eh_proj.weight" in names else ()


class Family(NamedTuple):
    """Targets of one ``model_type``.

    Attributes:
        model_type: As ``config.json`` has it; a checkpoint remembers its family by it.
        label: What people call it.
        architecture: The class of transformers that computes it.
        read_config: The description of a target from its ``config.json``; refuses what cannot be computed.
        write_fields: What the ``config.json`` of a target says beyond the fields that all families share. It need not
            refuse what it cannot say: what is written is read back and compared.
        rules: The table of its tensors.
        also: Tables of other layouts that its checkpoints come in: of those whose names a file has, the first counts.
            They are only read; what is written has the names of ``rules``.
        beside: Patterns of tensors that are none of the target's, from the number of its layers and the names of all.
            They are left out, and are not there on the way back.
    """

    model_type: str
    label: str
    architecture: str
    read_config: Callable[[Fields], DecoderConfig]
    write_fields: Callable[[DecoderConfig], dict[str, Any]]
    rules: Callable[[DecoderConfig], list[Rule]] = blocks.decoder
    also: tuple[Callable[[DecoderConfig], list[Rule]], ...] = ()
    beside: Callable[[int, Collection[str]], tuple[str, ...]] = nothing_beside

    def table(self, config: DecoderConfig, names: Collection[str]) -> list[Rule]:
        """The table that a file's tensors are named by; that of ``rules`` where none fits."""
        tables = (rules(config) for rules in (self.rules, *self.also))
        return next((table for table in tables if all(rule.source in names for rule in table)), self.rules(config))
