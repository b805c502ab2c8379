"""What a checkpoint directory holds, told from its configuration and its tensors' names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from conversion.errors import CheckpointError, short
from conversion.families import FAMILIES
from conversion.files import NATIVE_FILE, checked_directory, read_json
from conversion.hf_config import Fields
from conversion.tensors import read_tensors

TARGET, EAGLE3, EAGLE1, PEAGLE = "target", "eagle3", "eagle1", "p-eagle"
MEDUSA, DFLASH, LANGUAGE_MODEL = "medusa", "dflash", "language-model"

LABELS = {
    EAGLE3: "draft head: EAGLE-3",
    EAGLE1: "draft head: EAGLE-1/2 (not loadable here)",
    PEAGLE: "draft head: P-EAGLE (not loadable here)",
    MEDUSA: "draft head: Medusa (not loadable here)",
    DFLASH: "draft head: DFlash (not loadable here)",
    LANGUAGE_MODEL: "language model of another architecture (not loadable here)",
}

# Why a head of another method cannot stand in for an EAGLE-3 head.
DIFFERENCES = {
    EAGLE1: "an EAGLE-1/2 head: its fc reads one embedding and one feature, and it has neither hidden_norm nor lm_head",
    PEAGLE: "a P-EAGLE head, which drafts all tokens in parallel from a mask token",
    MEDUSA: "a Medusa head",
    DFLASH: "a DFlash drafter, which denoises a block",
}


def label(kind: str, config: Mapping[str, Any]) -> str:
    """A kind in words.

    Args:
        kind: As :func:`identify` gives it.
        config: The ``config.json`` of the checkpoint, or the description of a native one.
    """
    if kind != TARGET:
        return LABELS[kind]
    family = FAMILIES.get(str(config.get("family", config.get("model_type"))))
    return f"target: {family.label}" if family else LABELS[LANGUAGE_MODEL]


def identify(directory: str | Path) -> str:
    """The kind of checkpoint: one of the keys of ``LABELS``.

    Raises:
        CheckpointError: It is no checkpoint, or none that is known.
    """
    path = checked_directory(directory)
    if (path / NATIVE_FILE).is_file():
        kind = read_json(path / NATIVE_FILE).get("kind")
        if kind not in (TARGET, EAGLE3):
            raise CheckpointError(f"{path / NATIVE_FILE}: kind is {short(kind)}; expected {TARGET!r} or {EAGLE3!r}")
        return kind
    # Weights first: "not a checkpoint" says more about a stray directory than "no config.json".
    names = read_tensors(path).keys()
    return recognise(read_json(path / "config.json"), names, where=str(path))


def recognise(config: Mapping[str, Any], names: Collection[str], *, where: str) -> str:
    """The kind of a foreign checkpoint.

    Args:
        config: Its ``config.json``.
        names: Its tensors' names.
        where: Names it in messages.

    Raises:
        CheckpointError: It is none that is known.
    """
    architecture = " ".join(Fields(config, where).words("architectures"))
    method = str(config.get("speculators_model_type") or "")
    bare = {name.removeprefix("model.") for name in names}

    def has(pattern: str) -> bool:
        return any(re.match(pattern, name) for name in bare)

    if (
        "medusa_num_heads" in config
        or config.get("model_type") == "medusa"
        or has(r"\d+\.\d+\.linear\.|blocks\.\d+\.layers\.")
    ):
        return MEDUSA
    if "dflash_config" in config or "DFlash" in architecture or method.startswith(("dflash", "dspark")):
        return DFLASH
    if "mask_hidden" in bare or "PEagle" in architecture or method == "peagle":
        return PEAGLE
    # "fc" mixes embeddings or features into a head; no language model has it.
    if has(r"midlayer\.|layers\.\d+\.hidden_norm\.") or "Eagle3" in architecture or method == "eagle3":
        return EAGLE3
    if "fc.weight" in bare:
        return EAGLE3 if bare & {"d2t", "t2d", "norm.weight"} else EAGLE1
    if has(r"(language_model\.)?layers\.\d+\.|h\.\d+\.|transformer\.h\.\d+\.") or "embed_tokens.weight" in bare:
        return TARGET if str(config.get("model_type")) in FAMILIES else LANGUAGE_MODEL
    sample = ", ".join(sorted(names)[:3])
    raise CheckpointError(f"{where} is neither a target nor a draft head that is known (it holds {sample})")
