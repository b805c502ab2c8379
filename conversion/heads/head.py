"""The row of a method in the table of draft heads, and what reading and writing them have in common."""

from __future__ import annotations

import dataclasses
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
from eagle3_jax.models.config import DecoderConfig

EMBEDDING = "embed_tokens.weight"
DRAFT_VOCABULARY = ("d2t", "t2d")
Status = Literal["ok", "warning", "failure", "skipped"]


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding of the doctor."""

    name: str  #: The part that was checked.
    status: Status  #: ``ok``, ``warning`` (works, but probably not as meant), ``failure``, or ``skipped``.
    detail: str  #: The finding and, if something is wrong, what to do.

    @classmethod
    def of(cls, name: str, detail: str, warning: str = "") -> Check:
        """A finding that is in order if there is no warning to append to it."""
        return cls(name, "warning" if warning else "ok", detail + warning)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadCheckpoint:
    """A draft head as it is stored."""

    method: str  #: The name of its row in the table of heads, such as ``eagle3``.
    config: Any  #: Its description, as the drafter of the method takes it.
    head: Params  #: Nested dictionary of numpy arrays in the stored dtype, as the drafter of the method expects it.
    draft_to_target: np.ndarray | None  #: ``[W]`` int32, absolute target ids; ``None`` where draft ids are target ids.
    embedding: np.ndarray | None  #: ``[V D]``, the head's own embedding; ``None`` when it shares the target's.
    dialect: str  #: The layout that it was read from, such as ``vllm``; ``jax`` for a native checkpoint.
    source: Path  #: The directory that it was read from.
    dtype: str  #: The dtype that holds most of the parameters.
    num_target_layers: int | None = None  #: Layers of the target that it was read for, when known.
    note: str = ""  #: What was left out or assumed when it was read; empty when nothing was.


class Layout(NamedTuple):
    """The files of a head that is written: its ``config.json``, and its tensors with the name of their file."""

    values: dict[str, Any]
    tensors: dict[str, np.ndarray]
    file: str = "model.safetensors"


class Suspects(NamedTuple):
    """The usual faults of a head whose drafts are wrong."""

    #: Where not even the first draft token is right.
    first: str = "other auxiliary layers, a shifted token, or a head of another target"
    later: str = "the state that is fed back, or its positions"  #: Where that one is right and the next one is not.


class HeadKind(NamedTuple):
    """Draft heads of one method."""

    name: str  #: Its name in ``conversion.identify``.
    label: str  #: Its name for people.
    #: Whether a checkpoint is one. The table is asked in its order, and the first that says yes has it.
    recognise: Callable[[Signs], bool]
    classes: tuple[type, type]  #: The classes of its configuration and of its drafter.
    #: Reads the head from its files and its target, where known.
    read: Callable[[Stored, DecoderConfig | None], HeadCheckpoint]
    #: Reads its description from a ``config.json`` and its target alone, for planning.
    read_config: Callable[[Fields, DecoderConfig], Any]
    #: Writes the head in one of ``layouts``. A ``CheckpointError`` names what that cannot express.
    write: Callable[[HeadCheckpoint, str], Layout]
    #: The layouts that it can be written in, besides the native one; the first is the usual one.
    layouts: tuple[str, ...]
    dialect: Callable[[Signs], str]  #: The layout of a checkpoint.
    #: The lists of layers in a native checkpoint, and how many of them the description asks for.
    stacks: Mapping[str, Callable[[Any], int]] = {}
    #: The name of a head of this description, where the method has several names.
    variant: Callable[[Any], str] | None = None
    #: Checks of the doctor for this method alone, given a ``TargetCheckpoint`` and a head.
    examine: Callable[[Any, HeadCheckpoint], list[Check]] = lambda target, head: []
    suspects: Suspects = Suspects()  #: The usual faults.

    def title(self, config: Any) -> str:
        """The name of a head of this description."""
        return self.label if self.variant is None else self.variant(config)

    def param_shapes(self, config: Any) -> Params:
        """Shapes of the parameters of a head of this description, nested."""
        return self.classes[1](config).param_shapes()


def check_fit(config: Any, target: DecoderConfig, where: str) -> None:
    """Refuses a head that was trained for another target."""
    depth = getattr(config, "num_target_layers", target.num_layers)
    aux_layers = config.aux_layers
    if config.vocab_size != target.vocab_size:
        wrong = f"drafts for a vocabulary of {config.vocab_size} but the target has {target.vocab_size}"
        more = ""
    elif config.target_width != target.width:
        wrong = f"reads features of width {config.target_width} but the target has {target.width}"
        more = ", or add target_hidden_size to the head's config.json"
    elif depth != target.num_layers:
        wrong = f"reads the final state of a target of {depth} layers but the target has {target.num_layers}"
        more = ""
    elif aux_layers and aux_layers[-1] > target.num_layers and aux_layers != (target.num_layers + 1,):
        wrong = f"reads auxiliary layer {aux_layers[-1]} but the target has {target.num_layers} layers"
        more = ""
    else:
        return
    raise CheckpointError(f"{where} {wrong}; give the target that the head was trained for{more}")


def check_embedding(config: Any, embedding: np.ndarray | None, where: str) -> None:
    """Refuses an embedding of another shape or type, and its absence where the head cannot share the target's."""
    if embedding is not None:
        rules.check_matrix(embedding, (config.vocab_size, config.width), f"{where}: embedding")
    elif config.width != config.target_width:
        raise CheckpointError(
            f"{where} has no {EMBEDDING}, but its width {config.width} differs from the target's "
            f"{config.target_width}, so it cannot share the target's embedding; give the complete head"
        )


def read_as(
    kind: HeadKind,
    stored: Stored,
    config: Any,
    table: list[Rule],
    tensors: Mapping[str, np.ndarray],
    *,
    target: DecoderConfig | None,
    embedding: str | None = EMBEDDING,
    beside: tuple[str, ...] = (),
    draft_to_target: np.ndarray | None = None,
    note: str = "",
) -> HeadCheckpoint:
    """A head whose description has been read. An embedding of the target's width is used too, as vLLM does.

    Args:
        kind: Its row in the table.
        stored: Its files.
        config: Its description.
        table: The rules of its tensors.
        tensors: Its tensors, in the names of the table.
        target: The target that it drafts for, where that is known.
        embedding: Name of the head's own embedding, which it may lack; ``None`` for a method without one.
        beside: Names of further tensors that it may hold.
        draft_to_target: ``[W]``, target ids of the draft vocabulary; ``None`` where draft ids are target ids.
        note: What was left out or assumed.
    """
    where = str(stored.directory)
    if target is not None:
        check_fit(config, target, where)
    known = [re.escape(name) for name in (embedding, *beside) if name is not None]
    head = rules.read_params(table, tensors, kind.param_shapes(config), where=where, known=known)
    own = None if embedding is None else tensors.get(embedding)
    check_embedding(config, own, where)
    return HeadCheckpoint(
        method=kind.name,
        config=config,
        head=head,
        draft_to_target=None if draft_to_target is None else draft_to_target.astype(np.int32),
        embedding=own,
        dialect=kind.dialect(stored.signs),
        source=stored.directory,
        dtype=rules.main_dtype(head),
        num_target_layers=getattr(config, "num_target_layers", None) if target is None else target.num_layers,
        note=note,
    )


def head_tensors(
    kind: HeadKind, checkpoint: HeadCheckpoint, table: list[Rule], *, embedding: str = EMBEDDING
) -> dict[str, np.ndarray]:
    """The tensors of a head in the names of a table, with its embedding and its draft vocabulary."""
    config = checkpoint.config
    where = str(checkpoint.source)
    tensors = rules.write_params(table, checkpoint.head, kind.param_shapes(config), where=where)
    own = None if checkpoint.embedding is None else np.asarray(checkpoint.embedding)
    check_embedding(config, own, where)
    if own is not None:
        tensors[embedding] = own
    if checkpoint.draft_to_target is not None:
        tensors |= draft_vocab.write(checkpoint.draft_to_target, config.vocab_size, config.draft_vocab_size)
    return tensors


def refuse_inexpressible(dialect: str, settings: Mapping[str, Any], instead: str = "jax") -> None:
    """Refuses a layout that cannot express a head: an engine that ignores a setting would draft badly in silence.

    ``settings`` are those that it cannot express, in words, and whether the head has them.
    """
    named = "; ".join(what for what, is_set in settings.items() if is_set)
    if named:
        raise CheckpointError(f"the {dialect!r} layout cannot express {named}; use --to {instead}")


def read_mask_token(fields: Fields, names: tuple[str, ...]) -> int:
    """The id of the token that stands for an unknown one, which engines look for under several names."""
    found = agreed({name: None if fields.get(name) is None else fields.integer(name) for name in names}, fields.where)
    if found is None:
        raise CheckpointError(
            f"{fields.where} names no mask token ({', '.join(names)}); the head cannot draft without it, so add it"
        )
    return found


def speculators_fields(method: str, architecture: str, num_tokens: int, **proposal: Any) -> dict[str, Any]:
    """The fields that speculators asks of a head of every method; ``proposal`` are further ones of its proposal."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens, **proposal}
    return {
        "architectures": [architecture],
        "speculators_model_type": method,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            # The head does not know the directory of its target; the engine that serves it fills it in.
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }


def mask_token(token: int, stop_tokens: tuple[int, ...], directory: Path) -> Check:
    """Checks whether texts may hold the token that stands for an unknown one; ``directory`` is the target's."""
    name = "mask token"
    detail = f"id {token}"
    if token in stop_tokens:
        return Check.of(name, detail, ", which ends the target's answers; drafts of heads trained so are weak")
    tokenizer = tokenizer_of(directory)
    if tokenizer is None:
        return Check.of(name, f"{detail}; without a tokenizer.json it is unknown whether texts hold it")
    added = tokenizer.get_added_tokens_decoder().get(token)
    is_special = added is not None and added.special
    word = tokenizer.id_to_token(token)
    if is_special or word is None:
        what = "a special token" if is_special else "no token of the tokenizer's"
        return Check.of(name, f"{detail}, {what}: texts do not hold it")
    spelt = json.dumps(word, ensure_ascii=False)
    return Check.of(name, detail, f" is {spelt}, which texts may hold; what follows it in a text is drafted worse")
