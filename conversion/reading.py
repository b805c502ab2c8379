"""Reads and converts checkpoints of every layout. The files of a directory determine its layout."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from eagle3_jax.conversion import native, targets
from eagle3_jax.conversion.errors import CheckpointError, TargetNeededError
from eagle3_jax.conversion.families import FAMILIES, WRAPPERS, Family, deepseek
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.files import checkpoint_path
from eagle3_jax.conversion.heads import HEADS, LAYOUTS, HeadCheckpoint, Signs, mtp, write_head
from eagle3_jax.conversion.native import TARGET, write_native
from eagle3_jax.conversion.targets import TargetCheckpoint, language_model, write_target
from eagle3_jax.conversion.tensors import Stored, read_stored
from eagle3_jax.models.config import DecoderConfig

LANGUAGE_MODEL = "language-model"
# Layouts that mean Hugging Face's where a target is written.
_OF_TARGETS = ("vllm", "sglang")
# Heads that name auxiliary layers without saying what the numbers count.
_COUNTED = ("eagle3", "p-eagle")


class Opened(NamedTuple):
    """A checkpoint whose kind is known."""

    directory: Path  #: Its directory, or the path of its GGUF file.
    #: ``target``, ``language-model`` (a target of no known family), or the name of a kind of head.
    kind: str
    stored: Stored | None  #: Its files; ``None`` for a native checkpoint.


def open_checkpoint(directory: str | Path) -> Opened:
    """Opens a checkpoint and recognises its kind."""
    path = checkpoint_path(directory)
    if native.is_native(path):
        return Opened(path, native.read_kind(path), None)
    stored = read_stored(path)
    return Opened(path, recognise(stored.signs, str(path)), stored)


def layout_of(opened: Opened) -> str:
    """Returns ``jax``, ``gguf``, ``huggingface``, or the layout of the head's method."""
    if opened.stored is None:
        return "jax"
    if opened.kind in HEADS:
        return HEADS[opened.kind].dialect(opened.stored.signs)
    return "huggingface" if opened.stored.held is None else "gguf"


def identify(directory: str | Path) -> str:
    """Returns the kind of a checkpoint.

    Returns:
        ``target``, ``language-model`` (a target of no supported family), or the name of a kind of
        head such as ``eagle3``.

    Raises:
        CheckpointError: The directory is not a checkpoint, or its kind is unknown.
    """
    return open_checkpoint(directory).kind


def recognise(signs: Signs, where: str) -> str:
    """Returns the kind of a checkpoint that is not native; ``where`` is its name in messages."""
    for kind in HEADS.values():
        if kind.recognise(signs):
            _refuse_two_kinds(kind.name, signs, where)
            return kind.name

    known = str(signs.config.get("model_type")) in {*FAMILIES, *WRAPPERS}
    # A known family may have any prefix before its layers; it is checked when they are read.
    layers = (
        r"(\w+\.)*(layers|blocks)\.\d+\."
        if known
        else r"(language_model\.)?(model\.)?layers\.\d+\."
    )

    if (
        signs.has(rf"{layers}|h\.\d+\.|transformer\.h\.\d+\.")
        or "embed_tokens.weight" in signs.names
    ):
        return TARGET if known else LANGUAGE_MODEL

    sample = ", ".join(sorted(signs.names)[:3])
    raise CheckpointError(
        f"{where} is neither a target nor a draft head that is known (it holds {sample})"
    )


def _refuse_two_kinds(name: str, signs: Signs, where: str) -> None:
    """Refuses an MTP module and a head of another method in the same files."""
    others = frozenset(filter(lambda tensor: not mtp.is_module(tensor), signs.names))
    remaining = Signs({}, others, "", "")
    second = next((kind for kind in HEADS.values() if kind.recognise(remaining)), None)
    if name == "mtp" and signs.has(mtp.MODULE) and second is not None:
        raise CheckpointError(
            f"{where} holds an MTP module and a head of {second.label}; expected the files of one"
            " drafter, so put the tensors of the other into a directory of their own"
        )


def read_target(directory: str | Path, family: Family | None = None) -> TargetCheckpoint:
    """Reads a target: a Hugging Face directory, a native one, or a GGUF file.

    Args:
        directory: Directory of the checkpoint, or the path of the GGUF file.
        family: A family of the caller, in addition to those of ``eagle3_jax.conversion.families``.

    Raises:
        CheckpointError: The checkpoint is not a target, or this library cannot compute it; the
            message gives the reason.
    """
    return target_of(open_checkpoint(directory), family)


def target_of(opened: Opened, family: Family | None = None) -> TargetCheckpoint:
    """Reads a target from an open checkpoint; see :func:`read_target`."""
    if opened.kind in HEADS:
        label = HEADS[opened.kind].label
        article = "an" if label.startswith(("EAGLE", "MTP")) else "a"
        raise CheckpointError(
            f"{opened.directory} is {article} {label} head, not a target; give it as the drafter,"
            " and the directory of the language model as the target"
        )
    if opened.stored is None:
        return native.read_native_target(opened.directory, family)
    return targets.read_target(opened.stored, family)


def read_head(
    directory: str | Path, target: DecoderConfig | None = None, *, layer_ids: str | None = None
) -> HeadCheckpoint:
    """Reads a draft head in any dialect, or a native one.

    Args:
        directory: Directory of the head.
        target: The target that the head drafts for. The head is checked against it. It is required
            if the head does not name its auxiliary layers (official heads do not).
        layer_ids: Whether the numbers of the head's auxiliary layers count layers that the residual
            stream enters (``entering``) or leaves (``leaving``). Required if the file does not say
            it (``eagle3_jax.conversion.heads.layer_ids``).

    Raises:
        CheckpointError: The checkpoint is not a head, is incomplete, or does not fit the target;
            the message gives the reason.
    """
    return head_of(open_checkpoint(directory), target, layer_ids=layer_ids)


def head_of(
    opened: Opened, target: DecoderConfig | None = None, *, layer_ids: str | None = None
) -> HeadCheckpoint:
    """Reads a head from an open checkpoint; see :func:`read_head`."""
    if opened.kind not in HEADS:
        if opened.stored is not None:
            deepseek.refuse_v4(opened.stored.fields)
        raise CheckpointError(
            f"{opened.directory} is a language model, not a draft head; give it as the target"
        )

    if opened.stored is None:
        _refuse_layer_ids(
            layer_ids, f"{opened.directory} is in the native layout, which counts layers entered"
        )
        return native.read_native_head(opened.directory, target)
    if opened.kind not in _COUNTED:
        _refuse_layer_ids(layer_ids, f"{opened.directory} is not an EAGLE-3 or P-EAGLE head")

    try:
        top = opened.stored.fields
        for fields in (top, top.section("transformer_layer_config")):
            # Only targets may have quantised weights.
            if fields.get("quantization_config") is not None:
                raise fields.wrong("quantization_config", "give the head before quantisation")
        return HEADS[opened.kind].read(opened.stored._replace(layer_ids=layer_ids), target)
    except TargetNeededError:
        raise
    except CheckpointError as error:
        # A wrong config.json is a likelier cause than tensors that are wrong in the same way.
        signs = Signs.read(Fields({}, ""), opened.stored.tensors)
        named = next((kind for kind in HEADS.values() if kind.recognise(signs)), None)
        if named is None or named.name == opened.kind:
            raise
        described = HEADS[opened.kind].label
        raise CheckpointError(
            f"{error}; its tensors are named as those of {named.label} heads are, and config.json"
            f" describes {described}"
        ) from None


def modules_of(opened: Opened, target: DecoderConfig | None = None) -> HeadCheckpoint:
    """Reads the MTP modules in the files of a target.

    Raises:
        CheckpointError: There are none, or they are not those that its ``config.json`` describes.
    """
    if opened.stored is None or opened.kind in HEADS:
        raise CheckpointError(
            f"{opened.directory} holds no MTP modules besides a target; give the Hugging Face"
            " directory of a target that has them in its files"
        )
    return mtp.read_modules(opened.stored, target)


def note_of_modules(opened: Opened) -> str:
    """Names the MTP modules in the files of a target; empty without any."""
    if opened.stored is None or opened.kind != TARGET:
        return ""
    count = len(language_model(opened.stored).modules)
    plural = "s" if count > 1 else ""
    return f"it holds {count} MTP module{plural} (--drafter mtp, for itself)" if count else ""


def _refuse_options_of_heads(subject: str, to: str | None, target: DecoderConfig | None) -> None:
    """Refuses values of :func:`convert` that only a head has."""
    if target is not None:
        raise CheckpointError(
            f"{subject}, and --target names the target that a head belongs to; leave --target out,"
            " or name a head"
        )
    if to not in (None, "jax", *_OF_TARGETS):
        raise CheckpointError(
            f"{subject}, which has no layout {to!r}; use --to jax, or one of"
            f" {', '.join(_OF_TARGETS)} for Hugging Face's layout"
        )


def _refuse_layer_ids(layer_ids: str | None, reason: str) -> None:
    if layer_ids is not None:
        raise CheckpointError(f"{reason}; leave --layer-ids out")


def convert(
    source: str | Path,
    destination: str | Path,
    to: str | None = None,
    target: DecoderConfig | None = None,
    *,
    layer_ids: str | None = None,
    modules: bool = False,
) -> tuple[str, str]:
    """Converts a target or a head to another layout; returns the recognised layout and the new one.

    Args:
        source: A checkpoint directory in any supported layout, or a GGUF file.
        destination: A directory that does not exist yet.
        to: ``jax`` (native), or a layout of the head's method. For a target ``jax``, or ``vllm``
            and ``sglang``, which both mean the Hugging Face layout. Default: ``vllm``; for a method
            that vLLM has no layout of, the first one of the method.
        target: The target of a head, see :func:`read_head`.
        layer_ids: See :func:`read_head`.
        modules: Whether the MTP modules in the files of a target are converted, not the target.
            They have no default layout but the native one.

    Raises:
        CheckpointError: The source cannot be read, the destination exists, or the layout cannot
            express it.
    """
    if to not in (None, "jax", *LAYOUTS):
        raise CheckpointError(f"--to {to!r} is not known; use one of jax, {', '.join(LAYOUTS)}")

    opened = open_checkpoint(source)
    if modules:
        _refuse_layer_ids(layer_ids, f"{source} holds MTP modules")
        checkpoint = modules_of(opened, target)
        written = to or "jax"
    elif opened.kind in HEADS:
        checkpoint = head_of(opened, target, layer_ids=layer_ids)
        layouts = HEADS[opened.kind].layouts
        written = to or ("vllm" if "vllm" in layouts else layouts[0])
    else:
        _refuse_layer_ids(layer_ids, f"{source} holds no draft head")
        _refuse_options_of_heads(f"{source} is a language model", to, target)
        checkpoint = target_of(opened)
        written = "jax" if to == "jax" else "huggingface"

    if written == "jax":
        write_native(checkpoint, destination)
    elif isinstance(checkpoint, TargetCheckpoint):
        write_target(checkpoint, destination)
    else:
        write_head(checkpoint, destination, written)
    return layout_of(opened), written
