"""What a checkpoint directory holds, told by the tables of heads and of families."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.families import FAMILIES, WRAPPERS
from eagle3_jax.conversion.files import NATIVE_FILE, checked_directory, read_json
from eagle3_jax.conversion.heads import HEADS, LOADABLE, Signs
from eagle3_jax.conversion.tensors import read_tensors

TARGET, LANGUAGE_MODEL = "target", "language-model"


def identify(directory: str | Path) -> str:
    """The kind of checkpoint: ``target``, ``language-model`` (a target of no family), or the name of a kind of head.

    Raises:
        CheckpointError: It is no checkpoint, or none that is known.
    """
    path = checked_directory(directory)
    if (path / NATIVE_FILE).is_file():
        kind = read_json(path / NATIVE_FILE).get("kind")
        if kind not in (TARGET, *native_heads()):
            known = ", ".join((TARGET, *native_heads()))
            raise CheckpointError(f"{path / NATIVE_FILE}: kind is {short(kind)}; expected one of {known}")
        return kind
    # Weights first: "not a checkpoint" says more about a stray directory than "no config.json".
    names = read_tensors(path).keys()
    return recognise(read_json(path / "config.json"), names, where=str(path))


def native_heads() -> tuple[str, ...]:
    """The kinds of heads that a native checkpoint may hold."""
    return tuple(kind.name for kind in HEADS.values() if kind.classes is not None)


def recognise(config: Mapping[str, Any], names: Collection[str], *, where: str) -> str:
    """The kind of a foreign checkpoint.

    Args:
        config: Its ``config.json``.
        names: Its tensors' names.
        where: Names it in messages.

    Raises:
        CheckpointError: It is none that is known.
    """
    signs = Signs.of(config, names, where)
    for kind in HEADS.values():
        if kind.recognise(signs):
            return kind.name
    known = str(config.get("model_type")) in {*FAMILIES, *WRAPPERS}
    # Of a known family the prefix of its layers may be any; it is judged where they are read.
    layers = r"(\w+\.)*(layers|blocks)\.\d+\." if known else r"(language_model\.)?(model\.)?layers\.\d+\."
    if signs.has(rf"{layers}|h\.\d+\.|transformer\.h\.\d+\.") or "embed_tokens.weight" in signs.names:
        return TARGET if known else LANGUAGE_MODEL
    sample = ", ".join(sorted(names)[:3])
    raise CheckpointError(f"{where} is neither a target nor a draft head that is known (it holds {sample})")


def named_as(names: Collection[str]) -> str | None:
    """The kind of head whose tensors are named so, whatever the configuration says; ``None`` where that is open."""
    signs = Signs.of({}, names, "")
    return next((kind.name for kind in HEADS.values() if kind.recognise(signs)), None)


def refuse_all_but_heads(kind: str, where: object, instead: str) -> None:
    """Refuse what is not a head that is loaded.

    Raises:
        CheckpointError: It is a head of another method, or a language model.
    """
    if kind in (TARGET, LANGUAGE_MODEL):
        raise CheckpointError(f"{where} is a language model, not a draft head; {instead}")
    if HEADS[kind].read is None:
        raise CheckpointError(f"{where} is {HEADS[kind].difference}; this loads {LOADABLE} heads only")


def refuse_all_but_targets(kind: str, where: object) -> None:
    """Refuse a head where a target is asked for.

    Raises:
        CheckpointError: It is one.
    """
    if kind in HEADS:
        name = HEADS[kind].label
        what = HEADS[kind].difference or f"{'an' if name.startswith(('EAGLE', 'MTP')) else 'a'} {name} head"
        raise CheckpointError(f"{where} is {what}, not a target; give the directory of the language model")


def label(kind: str, config: Mapping[str, Any]) -> str:
    """A kind in words.

    Args:
        kind: As :func:`identify` gives it.
        config: The ``config.json`` of the checkpoint, or the description of a native one.
    """
    if kind in HEADS:
        head = HEADS[kind]
        return f"draft head: {head.label}" + ("" if head.read else " (not loadable here)")
    model_type = str(config.get("family", config.get("model_type")))
    family = FAMILIES.get(WRAPPERS[model_type].family(config) if model_type in WRAPPERS else model_type)
    return f"target: {family.label}" if family else "language model of another architecture (not loadable here)"
