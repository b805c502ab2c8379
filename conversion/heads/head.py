"""The row of a method in the table of draft heads, and functions that all methods share."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from eagle3_jax.conversion import draft_vocab, rules
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.fields import Fields, agreed
from eagle3_jax.conversion.rules import Params, Rule
from eagle3_jax.conversion.sidecars import tokenizer_of
from eagle3_jax.conversion.tensors import Signs, Stored
from eagle3_jax.models.config import DecoderConfig, grouped

EMBEDDING = "embed_tokens.weight"
DRAFT_VOCABULARY = ("d2t", "t2d")
Status = Literal["ok", "warning", "failure", "skipped"]


@dataclasses.dataclass(frozen=True)
class Check:
    """A finding of the doctor."""

    name: str  #: The part that was checked.
    #: ``ok``, ``warning`` (works, but probably not as meant), ``failure``, or ``skipped``.
    status: Status
    detail: str  #: The finding and, if there is a fault, how to correct it.

    @classmethod
    def report(cls, name: str, detail: str, warning: str = "") -> Check:
        """Returns a finding, which is ``ok`` without a ``warning``; with one, both are joined."""
        return cls(name, "warning" if warning else "ok", detail + warning)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadCheckpoint:
    """A draft head with its parameters as numpy arrays."""

    method: str  #: The name of its row in the table of heads, such as ``eagle3``.
    config: Any  #: Its description, as the drafter of the method expects it.
    #: Nested dictionary of numpy arrays in the stored dtype, as the drafter of the method expects
    #: it.
    head: Params
    #: ``[W]`` int32, absolute target ids; ``None`` if draft ids are target ids.
    draft_to_target: np.ndarray | None
    #: ``[V D]``, the head's own embedding; ``None`` if it shares the target's.
    embedding: np.ndarray | None
    #: The layout that it was read from, such as ``vllm``; ``jax`` for a native checkpoint.
    dialect: str
    source: Path  #: The directory that it was read from.
    dtype: str  #: The dtype of most parameters.
    num_target_layers: int | None = None  #: Number of layers of its target; ``None`` if unknown.
    #: Tensors that were left out and settings that were assumed; empty if there are none.
    note: str = ""


class Layout(NamedTuple):
    """The files of a head that is written."""

    values: dict[str, Any]  #: Its ``config.json``.
    tensors: dict[str, np.ndarray]  #: Its tensors.
    file: str = "model.safetensors"  #: The name of the file of its tensors.
    #: Its ``generation_config.json``; ``None`` for a layout without that file.
    generation: dict[str, Any] | None = None


class Suspects(NamedTuple):
    """The usual faults of a head whose drafts are wrong."""

    #: Faults that make even the first draft token wrong.
    first: str = "other auxiliary layers, a shifted token, or a head of another target"
    #: Faults that leave the first draft token right and make the next one wrong.
    later: str = "the state that is fed back, or its positions"


class HeadKind(NamedTuple):
    """Draft heads of one method."""

    name: str  #: Its name in ``conversion.identify``.
    label: str  #: Its name for people.
    #: Tells whether a checkpoint is of this kind. The first kind of the table that recognises a
    #: checkpoint reads it.
    recognise: Callable[[Signs], bool]
    classes: tuple[type, type]  #: The classes of its configuration and of its drafter.
    #: Reads the head from its files and its target, if that is known.
    read: Callable[[Stored, DecoderConfig | None], HeadCheckpoint]
    #: Reads its description from a ``config.json`` and its target alone, for planning.
    read_config: Callable[[Fields, DecoderConfig], Any]
    #: Writes the head in one of ``layouts``. A ``CheckpointError`` names a setting that the layout
    #: cannot express.
    write: Callable[[HeadCheckpoint, str], Layout]
    #: The layouts in which it can be written, in addition to the native one; the first is the
    #: default.
    layouts: tuple[str, ...]
    dialect: Callable[[Signs], str]  #: Returns the layout of a checkpoint.
    #: The names of the lists of layers in a native checkpoint, and functions that return their
    #: lengths.
    stacks: Mapping[str, Callable[[Any], int]] = {}
    #: Returns the name of a head of this description, if the method has several names.
    variant: Callable[[Any], str] | None = None
    #: Returns the doctor's checks for this method alone, from a ``TargetCheckpoint`` and a head.
    examine: Callable[[Any, HeadCheckpoint], list[Check]] = lambda target, head: []
    suspects: Suspects = Suspects()  #: The usual faults.

    def title(self, config: Any) -> str:
        """Returns the name of a head of this description."""
        return self.label if self.variant is None else self.variant(config)

    def param_shapes(self, config: Any) -> Params:
        """Returns the shapes of the parameters of a head of this description, nested."""
        return self.classes[1](config).param_shapes()


def check_fit(config: Any, target: DecoderConfig, where: str) -> None:
    """Refuses a head that was trained for another target."""
    advice = "give the target that the head was trained for"
    count = target.num_layers
    depth = getattr(config, "num_target_layers", count)
    last = max(config.aux_layers, default=0)

    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{where} drafts for a vocabulary of {config.vocab_size} but the target has"
            f" {target.vocab_size}; {advice}"
        )
    if config.target_width != target.width:
        # Methods that read several layers have a field for their width.
        field = ", or add target_hidden_size to the head's config.json"
        raise CheckpointError(
            f"{where} reads features of width {config.target_width} but the target has"
            f" {target.width}; {advice}{field if len(config.aux_layers) > 1 else ''}"
        )
    if depth != count:
        raise CheckpointError(
            f"{where} reads the final state of a target of {depth} layers but the target has"
            f" {count}; {advice}"
        )
    problem = config.misfit(target) if hasattr(config, "misfit") else ""
    if problem:
        raise CheckpointError(f"{where}: {problem}; {advice}")
    # L + 1 alone means the state after the target's last norm, and so it does with this flag.
    reads_norm = config.aux_layers == (count + 1,) or getattr(config, "normed_last", False)
    if last > count + reads_norm:
        raise CheckpointError(
            f"{where} reads auxiliary layer {last} but the target has {count} layers; {advice}"
        )


def check_embedding(config: Any, embedding: np.ndarray | None, where: str) -> None:
    """Refuses a wrong embedding, and its absence if the head cannot share the target's."""
    if embedding is not None:
        rules.check_matrix(embedding, (config.vocab_size, config.width), f"{where}: embedding")
    elif config.width != config.target_width:
        raise CheckpointError(
            f"{where} has no {EMBEDDING}, but its width {config.width} differs from the target's"
            f" {config.target_width}, so it cannot share the target's embedding; give the complete"
            " head"
        )


def read_as(
    kind: HeadKind,
    stored: Stored,
    config: Any,
    table: list[Rule],
    tensors: Mapping[str, np.ndarray],
    *,
    target: DecoderConfig | None,
    embedding: str = EMBEDDING,
    extra_names: tuple[str, ...] = (),
    draft_to_target: np.ndarray | None = None,
    note: str = "",
) -> HeadCheckpoint:
    """Reads the tensors of a head after its description.

    As in vLLM, its own embedding has priority over the target's.

    Args:
        kind: The row of the head's method in the table.
        stored: The files of the head.
        config: The description of the head.
        table: The rules of its tensors.
        tensors: Its tensors, by the names of the table.
        target: The target that it drafts for; ``None`` if unknown.
        embedding: Name of the head's own embedding, which is optional; empty for a method without
            one.
        extra_names: Names of further tensors that the file may hold.
        draft_to_target: ``[W]`` int32, target ids of the draft vocabulary; ``None`` if draft ids
            are target ids.
        note: Tensors that were left out and settings that were assumed.
    """
    where = str(stored.directory)
    if target is not None:
        check_fit(config, target, where)
    known = [re.escape(name) for name in (embedding, *extra_names)]
    head = rules.read_params(table, tensors, kind.param_shapes(config), where=where, known=known)

    own_embedding = tensors.get(embedding)
    check_embedding(config, own_embedding, where)
    num_target_layers = getattr(config, "num_target_layers", None)
    return HeadCheckpoint(
        method=kind.name,
        config=config,
        head=head,
        draft_to_target=draft_to_target,
        embedding=own_embedding,
        dialect=kind.dialect(stored.signs),
        source=stored.directory,
        dtype=rules.main_dtype(head),
        num_target_layers=num_target_layers if target is None else target.num_layers,
        note=note,
    )


def head_tensors(
    kind: HeadKind, checkpoint: HeadCheckpoint, table: list[Rule], *, embedding: str = EMBEDDING
) -> dict[str, np.ndarray]:
    """Returns the tensors of a head by the names of a table, with those that all methods have."""
    config = checkpoint.config
    where = str(checkpoint.source)
    written = rules.write_params(table, checkpoint.head, kind.param_shapes(config), where=where)
    tensors = {name: np.asarray(tensor) for name, tensor in written.items()}

    own_embedding = None if checkpoint.embedding is None else np.asarray(checkpoint.embedding)
    check_embedding(config, own_embedding, where)
    if own_embedding is not None:
        tensors[embedding] = own_embedding
    if checkpoint.draft_to_target is not None:
        tensors |= draft_vocab.write(checkpoint.draft_to_target, config)
    return tensors


def refuse_inexpressible(dialect: str, settings: Mapping[str, Any], instead: str = "jax") -> None:
    """Refuses a layout that cannot express a head: engines ignore such settings silently.

    Args:
        dialect: The layout.
        settings: The settings that the layout cannot express, in words, and whether the head has
            them.
        instead: The layout to recommend.
    """
    named = "; ".join(setting for setting, is_set in settings.items() if is_set)
    if named:
        raise CheckpointError(f"the {dialect!r} layout cannot express {named}; use --to {instead}")


def official_refusals(config: Any, rope_types: tuple[str, ...]) -> dict[str, Any]:
    """Returns what the official code cannot express, and whether a head has it.

    These are sizes of heads and types of rotary embedding.

    ``rope_types`` are the types of rotary embedding that it can express.
    """
    mixer = grouped(config.layers[0])
    rope_type = None if mixer.rope is None else mixer.rope.type
    head_dim = (
        f"head_dim {mixer.head_dim} (it takes width {config.width} over {mixer.num_heads} heads)"
    )
    return {
        head_dim: mixer.head_dim * mixer.num_heads != config.width,
        f"rope type {rope_type!r}": rope_type not in rope_types,
    }


def read_mask_token(fields: Fields, names: tuple[str, ...]) -> int:
    """Reads the id of the mask token, for which engines have several names."""
    ids = {name: fields.integer(name) for name in names if fields.get(name) is not None}
    mask = agreed(ids, fields.where)
    if mask is None:
        raise CheckpointError(
            f"{fields.where} names no mask token ({', '.join(names)}); the head cannot draft"
            " without it, so add it"
        )
    return mask


def speculators_fields(
    method: str, architecture: str, num_tokens: int, **proposal: Any
) -> dict[str, Any]:
    """Returns speculators' fields for a head; ``proposal`` are further ones of its proposal."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens, **proposal}
    # The file of the head does not name the directory of its target; the engine that serves it
    # fills it in.
    verifier = {"name_or_path": None, "architectures": []}
    config = {
        "algorithm": method,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": verifier,
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": method,
        "speculators_version": "0.9.0",
        "speculators_config": config,
    }


def mask_token(token: int, stop_tokens: tuple[int, ...], directory: Path) -> Check:
    """Checks whether texts may contain the mask token; ``directory`` is that of the target."""
    report = functools.partial(Check.report, "mask token")
    detail = f"id {token}"
    if token in stop_tokens:
        return report(
            detail, ", which ends the target's answers; drafts of heads trained so are weak"
        )

    tokenizer = tokenizer_of(directory)
    if tokenizer is None:
        return report(f"{detail}; without a tokenizer.json it is unknown whether texts hold it")
    word = tokenizer.id_to_token(token)
    if word is None:
        return report(f"{detail}, not a token of the tokenizer's: texts do not hold it")
    added = tokenizer.get_added_tokens_decoder().get(token)
    if added is not None and added.special:
        return report(f"{detail}, a special token: texts do not hold it")
    spelt = json.dumps(word, ensure_ascii=False)
    return report(
        detail, f" is {spelt}, which texts may hold; what follows it in a text is drafted worse"
    )
