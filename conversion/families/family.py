"""What a family of targets says of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from conversion import rules
from conversion.hf_config import Fields
from conversion.rules import Rule
from eagle3_jax.models.config import DecoderConfig


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
    """

    model_type: str
    label: str
    architecture: str
    read_config: Callable[[Fields], DecoderConfig]
    write_fields: Callable[[DecoderConfig], dict[str, Any]]
    rules: Callable[[DecoderConfig], list[Rule]] = rules.decoder
