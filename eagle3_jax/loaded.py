"""Models with their arrays, as they come from disk or from a program of one's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from tokenizers import Tokenizer

from eagle3_jax.types import Drafter, TargetModel


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LoadedTarget:
    """A target with its arrays.

    Attributes:
        model: The architecture.
        params: Its parameters.
        vocab_size: ``V``.
        max_positions: Longest sequence it can hold.
        stop_tokens: Ids that end a text.
        tokenizer: ``None`` when only token ids can be given.
        name: For reports.
        mesh: Over which its arrays are divided; ``None`` for one device.
        weights: What its kernels are stored as: ``dense``, ``fp8`` or ``fp8-dynamic``.
        bound: Why it holds no longer sequence, where the model itself would; empty where it would not.
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

    @property
    def holds(self) -> str:
        """How many positions it holds, in words."""
        return f"{self.max_positions} positions" + (f" ({self.bound})" if self.bound else "")

    def __repr__(self) -> str:
        """A line; the arrays alone would be thousands."""
        weights = [] if self.weights == "dense" else [f"{self.weights} weights"]
        facts = [type(self.model).__name__, *_facts(self.model, self.params), *weights]
        return f"LoadedTarget({self.name}: {', '.join([*facts, f'vocabulary of {self.vocab_size}'])})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LoadedDrafter:
    """A drafter with its arrays.

    Attributes:
        drafter: The method.
        params: Its parameters; ``None`` where it has none.
        name: For reports.
        method: What it was found to be, as in ``P-EAGLE head (vllm layout)``; empty where its class says it.
        note: What was left out or assumed when it was read; empty when nothing was.
    """

    drafter: Drafter[Any]
    params: Any = None
    name: str = "drafter"
    method: str = ""
    note: str = ""

    @property
    def described(self) -> str:
        """What it was found to be."""
        return self.method or type(self.drafter).__name__

    def __repr__(self) -> str:
        """A line; the parameters are counted with the arrays that the target shares."""
        config = getattr(self.drafter, "config", getattr(self.drafter, "model", None))
        size = getattr(config, "draft_vocab_size", getattr(config, "vocab_size", None))
        words = [] if size is None else [f"vocabulary of {size}"]
        facts = [self.described, shape_of(self.drafter), *_facts(self.drafter, self.params), *words]
        return f"LoadedDrafter({self.name}: {', '.join(facts)})"


def _facts(part: Any, params: Any) -> list[str]:
    """How many layers, how many parameters and of which type, as far as a part says so."""
    config = getattr(part, "config", getattr(getattr(part, "model", None), "config", None))
    layers = getattr(config, "layers", None)
    found = [] if layers is None else [f"{len(layers)} layer{'s' if len(layers) > 1 else ''}"]
    leaves = [leaf for leaf in jax.tree.leaves(params) if hasattr(leaf, "dtype")]
    if leaves:
        types = {leaf.dtype.name for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}
        found += [f"{sum(leaf.size for leaf in leaves):,} parameters", *sorted(types)]
    return found


def shape_of(drafter: Drafter[Any]) -> str:
    """What a drafter drafts in a round at most, in words."""
    if getattr(drafter, "is_chain", False):
        return f"chain K={drafter.max_depth}"
    return f"tree of {drafter.num_nodes} nodes, {drafter.max_depth} deep"
