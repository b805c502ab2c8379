"""Drafters that somebody wrote badly: each breaks one rule of the contract, and most know what the target will say.

A bad draft that is never accepted shows nothing, so these propose the target's own continuation and then spoil it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import tiny

from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.types import Draft, Observation, SamplingParams

VOCABULARY = 13
KEEP = -(2**31) + 1  # a token that is not replaced


@dataclasses.dataclass(frozen=True)
class Knowing(tiny._Rooted):
    """Proposes what its parameters say; see :class:`Spoilt`. Its size alone is static, so its cases share programs."""

    num_nodes: int
    max_depth: int
    is_chain: bool = False

    def propose(self, params: Any, state: tiny.RootState, keys: Any, sampling: SamplingParams) -> Draft:
        place = jnp.minimum(state.length[:, None] + params["levels"], params["script"].shape[1] - 1)
        tokens = (jnp.take_along_axis(params["script"], place, axis=1) + params["shifts"]) % VOCABULARY
        tokens = tokens.at[:, 0].set((state.root + params["shifts"][0]) % VOCABULARY)
        tokens = jnp.where(params["tokens"] == KEEP, tokens, params["tokens"])
        wide = lambda values: jnp.broadcast_to(values, tokens.shape)
        return Draft(tokens=tokens, parents=wide(params["parents"]), valid=wide(params["valid"]))


@dataclasses.dataclass(frozen=True)
class Spoilt:
    """A tree of the target's own tokens, and what is wrong with it.

    Attributes:
        parents: The tree by which its tokens are chosen.
        shifts: How many ids each node is off.
        depth: What it says its depth is.
        says: Parents that it gives instead, by node.
        tokens: Tokens that it gives instead, by node.
        invalid: Nodes that it marks as padding.
        is_chain: What it says.
    """

    parents: tuple[int, ...] = (-1, 0, 0, 2, 3, 3)  # a wrong sibling stands before the right path
    shifts: tuple[int, ...] = (0, 1, 0, 0, 0, 1)
    depth: int = 4
    says: tuple[tuple[int, int], ...] = ()
    tokens: tuple[tuple[int, int], ...] = ()
    invalid: tuple[int, ...] = ()
    is_chain: bool = False

    def drafter(self, script: Any) -> LoadedDrafter:
        """With the continuations ``[B S]`` that it knows by heart."""
        levels, size = [0], len(self.parents)
        for parent in self.parents[1:]:
            levels.append(levels[parent] + 1)
        said, given = list(self.parents), dict(self.tokens)
        for node, parent in self.says:
            said[node] = parent
        params = {
            "script": script,
            "levels": jnp.array(levels, jnp.int32),
            "shifts": jnp.array(self.shifts, jnp.int32),
            "parents": jnp.array(np.array(said, np.int32)),
            "tokens": jnp.array(np.array([given.get(node, KEEP) for node in range(size)], np.int32)),
            "valid": jnp.array([node not in self.invalid for node in range(size)]),
        }
        return LoadedDrafter(Knowing(size, self.depth, self.is_chain), params)


CHAIN = (-1, 0, 1, 2, 3, 4)
SPOILT = {
    "siblings, and a depth that would let them be a chain": Spoilt((-1, 0, 0, 0, 0, 0), (0, 1, 0, 2, 3, 4), 5),
    "a branching tree of one node more than it says it is deep": Spoilt((-1, 0, 0, 2, 3, 4), (0, 1, 0, 0, 0, 0), 5),
    "a branching tree of two nodes more than its depth": Spoilt((-1, 0, 0, 2, 3, 4), (0, 1, 0, 0, 0, 0)),
    "a tree that is deeper than it says": Spoilt(CHAIN, (0,) * 6, 2),
    "a tree far deeper than it says": Spoilt(CHAIN, (0,) * 6, 1),
    "another root than the last token": Spoilt(shifts=(1, 1, 0, 0, 0, 1)),
    "a root outside the vocabulary": Spoilt(tokens=((0, 10**6),)),
    "a root that has a parent": Spoilt(says=((0, 2),)),
    "a root that is marked as padding": Spoilt(invalid=(0,)),
    "an id past the vocabulary": Spoilt(tokens=((1, VOCABULARY + 7),)),
    "the largest integer for an id": Spoilt(tokens=((3, 2**31 - 1),)),
    "a negative id": Spoilt(tokens=((3, -3),)),
    "a parent behind its child": Spoilt(says=((2, 3),)),
    "a node that is its own parent": Spoilt(says=((2, 2),)),
    "a circle of parents": Spoilt(says=((3, 4), (4, 3))),
    "a second root": Spoilt(says=((3, -1),)),
    "a parent below every index": Spoilt(says=((3, -(2**31)),)),
    "a parent past the last node": Spoilt(says=((3, 2**31 - 1),)),
    "parents that are all the last node": Spoilt(says=tuple((node, 5) for node in range(6))),
    "a tree that says it is a chain": Spoilt((-1, 0, 1, 1, 3, 4), (0, 0, 1, 0, 0, 0), 5, is_chain=True),
}


class Ordinary:
    """A plain class that keeps the protocol and hashes by identity."""

    num_nodes, max_depth, aux_layers = 3, 2, ()

    def init(self, params: Any, batch: int, capacity: int) -> Any:
        zero = jnp.zeros((batch,), jnp.int32)
        return {"root": zero, "length": zero}

    def observe(self, params: Any, state: Any, seen: Observation) -> Any:
        root = jnp.where(seen.length > 0, seen.next_token, state["root"])
        return {"root": root, "length": state["length"] + seen.length}

    def propose(self, params: Any, state: Any, keys: Any, sampling: SamplingParams) -> Draft:
        tokens = (state["root"][:, None] + jnp.arange(3, dtype=jnp.int32)) % VOCABULARY
        parents = jnp.broadcast_to(jnp.array([-1, 0, 1], jnp.int32), tokens.shape)
        return Draft(tokens=tokens, parents=parents, valid=jnp.ones(tokens.shape, jnp.bool_))


def replaced(**members: Any) -> Any:
    """An :class:`Ordinary` drafter with some members replaced; functions become methods."""
    return type("Replaced", (Ordinary,), members)()
