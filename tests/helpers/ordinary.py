"""A drafter written as a plain class, and variations of it that break a rule of the contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from eagle3_jax.types import Draft, Observation, SamplingParams

VOCABULARY = 13


class Ordinary:
    """A plain class that keeps the protocol and hashes by identity."""

    num_nodes = 3
    max_depth = 2
    aux_layers = ()

    def init(self, params: Any, batch: int, capacity: int) -> Any:
        zero = jnp.zeros((batch,), jnp.int32)
        return {"root": zero, "length": zero}

    def observe(self, params: Any, state: Any, seen: Observation) -> Any:
        root = jnp.where(seen.length > 0, seen.next_token, state["root"])
        return {"root": root, "length": state["length"] + seen.length}

    def propose(self, params: Any, state: Any, keys: Any, sampling: SamplingParams) -> Draft:
        tokens = (state["root"][:, None] + jnp.arange(3, dtype=jnp.int32)[None]) % VOCABULARY
        parents = jnp.broadcast_to(jnp.array([-1, 0, 1], jnp.int32), tokens.shape)
        return Draft(tokens=tokens, parents=parents, valid=jnp.ones(tokens.shape, jnp.bool_))


def replaced(**members: Any) -> Any:
    """Returns an :class:`Ordinary` drafter with some members replaced; functions become methods."""
    return type("Replaced", (Ordinary,), members)()


def proposing(change: Callable[[Draft], Any], **members: Any) -> Any:
    """Returns an :class:`Ordinary` drafter whose drafts are changed."""
    return replaced(
        propose=lambda self, *arguments: change(Ordinary.propose(self, *arguments)), **members
    )


def observing(change: Callable[[dict, dict, Observation], dict], **members: Any) -> Any:
    """Returns an :class:`Ordinary` drafter whose states ``change`` rewrites.

    It gets the old state, the new state and the observation.
    """
    return replaced(
        observe=lambda self, params, state, seen: change(
            state, Ordinary.observe(self, params, state, seen), seen
        ),
        **members,
    )


def with_field(**fields: Callable[[Draft], Any]) -> Callable[[Draft], Draft]:
    return lambda draft: dataclasses.replace(
        draft, **{name: new(draft) for name, new in fields.items()}
    )
