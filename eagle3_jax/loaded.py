"""Models together with their arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from tokenizers import Tokenizer

from eagle3_jax.text.template import ChatTemplate
from eagle3_jax.types import Drafter, TargetModel


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LoadedTarget:
    """A target with its arrays.

    Attributes:
        model: The architecture.
        params: Parameters of the model.
        vocab_size: ``V``.
        max_positions: Longest sequence.
        stop_tokens: Ids that end a text.
        tokenizer: The tokenizer; ``None`` if prompts must be token ids.
        name: Name in reports.
        mesh: The mesh that divides the arrays; ``None`` for one device.
        weights: How kernels are stored: ``dense``, ``fp8``, ``fp8-dynamic`` or ``int8``.
        bound: The reason if ``max_positions`` is lower than the model's own limit; else empty.
        chat_template: The chat template; ``None`` if the model has none.
    """

    model: TargetModel
    params: Any
    vocab_size: int
    max_positions: int
    stop_tokens: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None
    name: str = "target"
    mesh: Mesh | None = None
    weights: str = "dense"
    bound: str = ""
    chat_template: ChatTemplate | None = None

    @property
    def holds(self) -> str:
        """``max_positions`` in words."""
        return f"{self.max_positions} positions" + (f" ({self.bound})" if self.bound else "")

    def __repr__(self) -> str:
        """Describes the target in one line, without arrays."""
        facts = [type(self.model).__name__, *_facts(self.model, self.params)]
        if self.weights != "dense":
            facts.append(f"{self.weights} weights")
        facts.append(f"vocabulary of {self.vocab_size}")
        return f"LoadedTarget({self.name}: {', '.join(facts)})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LoadedDrafter:
    """A drafter with its arrays.

    Attributes:
        drafter: The drafter.
        params: Its parameters; ``None`` if it has none.
        name: Name in reports.
        method: Method and file layout, as in ``P-EAGLE head (vllm layout)``; empty to use the name
            of the class.
        note: Parts that were left out or assumptions that were made when it was read; mostly empty.
    """

    drafter: Drafter[Any]
    params: Any = None
    name: str = "drafter"
    method: str = ""
    note: str = ""

    @property
    def described(self) -> str:
        """Method and file layout."""
        return self.method or type(self.drafter).__name__

    def __repr__(self) -> str:
        """Describes the drafter in one line. Parameters include the arrays shared with the target."""
        model = getattr(self.drafter, "model", None)
        config = getattr(self.drafter, "config", model)
        vocab_size = getattr(config, "vocab_size", None)
        size = getattr(config, "draft_vocab_size", vocab_size)
        facts = [self.described, shape_of(self.drafter), *_facts(self.drafter, self.params)]
        if size is not None:
            facts.append(f"vocabulary of {size}")
        return f"LoadedDrafter({self.name}: {', '.join(facts)})"


def _facts(part: Any, params: Any) -> list[str]:
    """Returns the number of layers, the number of parameters and their types in words, if known."""
    model = getattr(part, "model", None)
    config = getattr(part, "config", getattr(model, "config", None))
    layers = getattr(config, "layers", None)
    facts = []
    if layers is not None:
        facts.append(f"{len(layers)} layer{'s' if len(layers) > 1 else ''}")
    leaves = [leaf for leaf in jax.tree.leaves(params) if hasattr(leaf, "dtype")]
    if leaves:
        count = sum(leaf.size for leaf in leaves)
        types = {leaf.dtype.name for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}
        facts += [f"{count:,} parameters", *sorted(types)]
    return facts


def shape_of(drafter: Drafter[Any]) -> str:
    """Returns the shape of a draft in words."""
    if getattr(drafter, "is_chain", False):
        return f"chain K={drafter.max_depth}"
    return f"tree of {drafter.num_nodes} nodes, {drafter.max_depth} deep"
