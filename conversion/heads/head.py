"""What a kind of draft head says of itself, and what all of them have in common."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3_jax.conversion import rules
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh

    from eagle3_jax.conversion.checks import Check
    from eagle3_jax.models.layers import Precision
    from eagle3_jax.types import Tables

Params = dict[Any, Any]


class Signs(NamedTuple):
    """What a checkpoint is recognised by.

    Attributes:
        config: Its ``config.json``.
        names: Its tensors' names without ``model.``; none where only the configuration is known.
        architecture: All ``architectures``, joined.
        method: What speculators calls the method; empty elsewhere.
    """

    config: Mapping[str, Any]
    names: frozenset[str]
    architecture: str
    method: str

    @classmethod
    def of(cls, config: Mapping[str, Any], names: Collection[str], where: str) -> Signs:
        """The signs of a ``config.json`` and the names of its tensors."""
        return cls(
            config=config,
            names=frozenset(name.removeprefix("model.") for name in names),
            architecture=" ".join(Fields(config, where).words("architectures")),
            method=str(config.get("speculators_model_type") or ""),
        )

    def has(self, pattern: str) -> bool:
        """Whether the name of a tensor begins so."""
        return any(re.match(pattern, name) for name in self.names)


class Stored(NamedTuple):
    """A checkpoint as it lies on disk.

    Attributes:
        directory: Where.
        config: Its ``config.json``.
        tensors: By name.
        layer_ids: What the user says that numbers of auxiliary layers count, see
            :mod:`eagle3_jax.conversion.heads.layer_ids`.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    layer_ids: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadCheckpoint:
    """A draft head as it lies on disk.

    Attributes:
        method: Which row of the table of heads it is, as in ``eagle3``.
        config: Its description, as the method's drafter takes it.
        head: Nested dictionary of numpy arrays in the stored dtype, as the method's drafter expects it.
        draft_to_target: ``[W]`` int32, absolute target ids; ``None`` where draft ids are target ids.
        embedding: ``[V D]``, the head's own embedding; ``None`` when it shares the target's.
        dialect: Whose layout it was read from, as in ``vllm``; ``jax`` for a native checkpoint.
        source: Where it was read from.
        dtype: The dtype that holds most of the parameters.
        num_target_layers: Layers of the target that it was read for, when known.
        note: What was left out or assumed when it was read; empty when nothing was.
    """

    method: str
    config: Any
    head: Params
    draft_to_target: np.ndarray | None
    embedding: np.ndarray | None
    dialect: str
    source: Path
    dtype: str
    num_target_layers: int | None = None
    note: str = ""


class Layout(NamedTuple):
    """A checkpoint as it is written.

    Attributes:
        values: Its ``config.json``.
        tensors: By name.
        file: What the tensors' file is called.
    """

    values: dict[str, Any]
    tensors: dict[str, np.ndarray]
    file: str = "model.safetensors"


class Suspects(NamedTuple):
    """What is usually wrong with a head whose drafts are.

    Attributes:
        first: Where not even the first draft token is right.
        later: Where that is right and the next one is not.
    """

    first: str = "other auxiliary layers, a shifted token, or a head of another target"
    later: str = "the state that is fed back, or its positions"


class HeadKind(NamedTuple):
    """Draft heads of one method.

    Attributes:
        name: What ``conversion.identify`` calls it.
        label: What people call it.
        recognise: Whether a checkpoint is one. The table is asked in its order, and the first that says yes has it.
        difference: What it is and why it cannot stand in for a head that is loaded; empty where it is.
        classes: Its configuration's class and its drafter's, imported when asked for: recognising needs no JAX. Native
            checkpoints and loading need nothing else.
        read: The head from what is stored and its target, where that is known.
        read_config: Its description from a ``config.json`` and its target alone, for planning.
        write: The head in one of ``layouts``; a ``CheckpointError`` names what that cannot express.
        layouts: What it can be written as, beside the native one; the first is the usual one.
        stacks: Which lists of layers a native checkpoint holds, and how many of them the description asks for.
        dialect: Whose layout a checkpoint is in, from its ``config.json`` and its tensors' names.
        variant: What people call a head of this description, where the method has several names.
        examine: What heads of the method may get wrong and others do not have, given a ``TargetCheckpoint`` and a head.
        suspects: Where to look when drafts are wrong.
    """

    name: str
    label: str
    recognise: Callable[[Signs], bool]
    difference: str = ""
    classes: Callable[[], tuple[type, type]] | None = None
    read: Callable[[Stored, DecoderConfig | None], HeadCheckpoint] | None = None
    read_config: Callable[[Fields, DecoderConfig], Any] | None = None
    write: Callable[[HeadCheckpoint, str], Layout] | None = None
    layouts: tuple[str, ...] = ()
    stacks: Mapping[str, Callable[[Any], int]] = {}
    dialect: Callable[[Mapping[str, Any], Iterable[str]], str] = lambda config, names: "huggingface"
    variant: Callable[[Any], str] | None = None
    examine: Callable[[Any, HeadCheckpoint], list[Check]] = lambda target, head: []
    suspects: Suspects = Suspects()

    def title(self, config: Any) -> str:
        """What people call a head of this description."""
        return self.label if self.variant is None else self.variant(config)


def check_fit(config: Any, aux_layers: tuple[int, ...] | None, target: DecoderConfig, where: str) -> None:
    """Refuse a head that was trained for another target.

    Args:
        config: Of the head.
        aux_layers: Which features it reads, where that is known.
        target: What it is to draft for.
        where: Names the head in messages.

    Raises:
        CheckpointError: Vocabulary, width or depth differ.
    """
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{where} drafts for a vocabulary of {config.vocab_size} but the target has {target.vocab_size}; "
            "give the target that the head was trained for"
        )
    if config.target_width != target.width:
        raise CheckpointError(
            f"{where} reads features of width {config.target_width} but the target has {target.width}; "
            "give the target that the head was trained for, or add target_hidden_size to the head's config.json"
        )
    depth = getattr(config, "num_target_layers", target.num_layers)
    if depth != target.num_layers:
        raise CheckpointError(
            f"{where} reads the final state of a target of {depth} layers but the target has {target.num_layers}; "
            "give the target that the head was trained for"
        )
    if aux_layers and aux_layers[-1] > target.num_layers and aux_layers != (target.num_layers + 1,):
        raise CheckpointError(
            f"{where} reads auxiliary layer {aux_layers[-1]} but the target has {target.num_layers} layers; "
            "give the target that the head was trained for"
        )


def read_embedding(config: Any, tensors: Mapping[str, np.ndarray], directory: Path) -> np.ndarray | None:
    """The head's own embedding. One of the target's width is used as it is too, trained or not: vLLM does so."""
    embedding = tensors.get("embed_tokens.weight")
    if embedding is None:
        if config.width != config.target_width:
            raise CheckpointError(
                f"{directory} has no embed_tokens.weight, but its width {config.width} differs from the target's "
                f"{config.target_width}, so it cannot share the target's embedding; fetch the complete head"
            )
        return None
    if embedding.shape != (config.vocab_size, config.width):
        raise CheckpointError(
            f"{directory}: embed_tokens.weight has shape {list(embedding.shape)}; "
            f"config.json asks for {[config.vocab_size, config.width]}"
        )
    rules.check_float(embedding, f"{directory}: embed_tokens.weight")
    return embedding


def make_drafter(
    checkpoint: HeadCheckpoint, classes: tuple[type, type], tables: Tables, precision: Precision, mesh: Mesh | None
) -> tuple[Any, dict[str, Any]]:
    """A drafter and its parameters; without an embedding of its own, or with an equal one, it shares the target's.

    Args:
        checkpoint: The head.
        classes: Of its kind.
        tables: The target's; what the head has not it borrows from there.
        precision: Of its products and activations.
        mesh: The target's, where it has one.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from eagle3_jax.models.layers import cast
    from eagle3_jax.sharding import param_shardings

    drafter, embedding = classes[1](checkpoint.config, precision=precision), None
    if checkpoint.embedding is not None:
        places = None if mesh is None else tables.embedding.sharding  # type: ignore[union-attr]
        own = cast(checkpoint.embedding, precision, places)
        same = own.shape == tables.embedding.shape and bool(jnp.array_equal(own, tables.embedding))
        embedding = None if same else own
    ids = checkpoint.draft_to_target
    owned = {"head": checkpoint.head} | ({} if ids is None else {"draft_to_target": np.asarray(ids, np.int32)})
    places = {} if mesh is None else param_shardings(mesh, drafter, owned)
    if ids is not None:
        ids = jax.device_put(owned["draft_to_target"], places.get("draft_to_target"))
    head = cast(checkpoint.head, precision, places.get("head"))
    return drafter, drafter.assemble(head, tables, embedding=embedding, draft_to_target=ids)
