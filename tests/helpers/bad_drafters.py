"""Drafters that somebody wrote badly: each breaks one rule of the contract, and most know what the target will say.

A bad draft that is never accepted shows nothing, so these propose the target's own continuation and then spoil it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.testing.scripted import FixedTree, Rooted, RootState
from eagle3_jax.types import Draft, Observation, SamplingParams

VOCABULARY = 13
KEEP = -(2**31) + 1  # a token that is not replaced


@dataclasses.dataclass(frozen=True)
class Knowing(Rooted):
    """Proposes what its parameters say; see :class:`Spoilt`. Its size alone is static, so its cases share programs."""

    num_nodes: int
    max_depth: int
    is_chain: bool = False

    def propose(self, params: Any, state: RootState, keys: Any, sampling: SamplingParams) -> Draft:
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
    "a tree that is deeper than it says": Spoilt(CHAIN, (0,) * 6, 2),
    "another root than the last token": Spoilt(shifts=(1, 1, 0, 0, 0, 1)),
    "a root that has a parent": Spoilt(says=((0, 2),)),
    "a root that is marked as padding": Spoilt(invalid=(0,)),
    "an id past the vocabulary": Spoilt(tokens=((1, VOCABULARY + 7),)),
    "a negative id": Spoilt(tokens=((3, -3),)),
    "a parent behind its child": Spoilt(says=((2, 3),)),
    "a circle of parents": Spoilt(says=((3, 4), (4, 3))),
    "a parent past the last node": Spoilt(says=((3, 2**31 - 1),)),
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


def proposing(change: Callable[[Draft], Any], **members: Any) -> Any:
    """An :class:`Ordinary` drafter whose drafts are changed."""
    return replaced(propose=lambda self, *arguments: change(Ordinary.propose(self, *arguments)), **members)


def observing(change: Callable[[dict, dict, Observation], dict], **members: Any) -> Any:
    """An :class:`Ordinary` drafter whose states are changed: by the one before, the one after and what was seen."""
    return replaced(
        observe=lambda self, params, state, seen: change(state, Ordinary.observe(self, params, state, seen), seen),
        **members,
    )


def with_field(**fields: Callable[[Draft], Any]) -> Callable[[Draft], Draft]:
    return lambda draft: dataclasses.replace(draft, **{name: new(draft) for name, new in fields.items()})


class Remembering(Ordinary):
    """Keeps on itself how often it was asked, and drafts by it."""

    def __init__(self) -> None:
        self.asked = 0

    def propose(self, *arguments: Any) -> Draft:
        self.asked += 1
        draft = Ordinary.propose(self, *arguments)
        return dataclasses.replace(draft, tokens=draft.tokens.at[:, 1:].add(self.asked) % VOCABULARY)


class Hasty(Ordinary):
    """Another hash every few times that it is asked for one."""

    def __init__(self, every: int):
        self.every, self.calls = every, 0

    def __hash__(self) -> int:
        self.calls += 1
        return self.calls // self.every


@dataclasses.dataclass(frozen=True, eq=False)
class Drawing(FixedTree):
    """Draws each node from a law of its own, and declares another, or the same.

    Attributes:
        law: By the number of tokens known, ``[B]``, what the nodes below the root are drawn from.
        declared: What it declares for them.
    """

    law: Callable[[Any], Any]
    declared: Any

    __eq__, __hash__ = object.__eq__, object.__hash__  # its arrays have no hash

    def propose(self, params: Any, state: RootState, keys: Any, sampling: SamplingParams) -> Draft:
        shape = (state.root.shape[0], self.num_nodes - 1, VOCABULARY)
        law = jnp.broadcast_to(self.law(state.length), shape)
        drawn = jax.vmap(lambda key, q: jax.random.categorical(key, jnp.log(q), axis=-1))(keys, law)
        probs = jnp.pad(jnp.broadcast_to(self.declared, shape), ((0, 0), (1, 0), (0, 0)))
        return self.draft(state, jnp.pad(drawn.astype(jnp.int32), ((0, 0), (1, 0))), probs)


def siblings(law: Any, declared: Any) -> Drawing:
    return Drawing((-1, 0, 0), lambda length: law, declared)


def deep(law: Callable[[Any], Any], declared: Any) -> Drawing:
    return Drawing((-1, 0, 1, 2, 3), law, declared)


class Peeking(FixedTree):
    """Draws evenly, and declares a distribution that depends on the token that it has drawn."""

    def propose(self, params: Any, state: RootState, keys: Any, sampling: SamplingParams) -> Draft:
        drawn = jax.vmap(lambda key: jax.random.randint(key, (self.num_nodes,), 0, VOCABULARY))(keys)
        return self.draft(state, drawn, jnp.where((drawn % 2 == 0)[:, :, None], UNIFORM, SKEWED))


UNIFORM = jnp.full((VOCABULARY,), 1 / VOCABULARY, jnp.float32)
SKEWED = jnp.array(np.r_[np.full(6, 1.4), np.full(7, 0.6)] / (6 * 1.4 + 7 * 0.6), jnp.float32)


LAWS = jax.nn.softmax(jnp.asarray(np.random.default_rng(0).normal(0, 1.5, (4, VOCABULARY)), jnp.float32), axis=-1)
NEAR = jax.nn.softmax(jnp.asarray(np.random.default_rng(11).normal(0, 1.5, VOCABULARY), jnp.float32))
COOLER = jax.nn.softmax(jnp.log(LAWS) / jnp.array([[1.0], [1.0], [1.0], [0.97]]), axis=-1)


def fail(self: Any, *arguments: Any) -> Any:
    raise RuntimeError("out of ideas\nand more lines")


def mean_of_rows(draft: Draft) -> Any:
    shared = jnp.sum(draft.tokens[:, 0]) % VOCABULARY
    return draft.tokens.at[:, 1].set(shared)


# The check that must fail, and what it must say.
BROKEN: dict[str, tuple[Any, str, str]] = {
    "an unstable hash": (Hasty(1), "keeps the protocol", "its hash changes"),
    "a draft of another size": (
        proposing(with_field(), num_nodes=4), "keeps shapes and types", r"tokens as int32\[4, 3\].*int32\[4, 4\]"
    ),
    "a state that grows": (
        observing(lambda old, new, seen: {**new, "root": jnp.stack([new["root"]] * 2, 1)}), "keeps shapes and types",
        r"returned int32\[4, 2\]; expected the same",
    ),
    "an exception": (replaced(propose=fail), "keeps shapes and types", "^RuntimeError: out of ideas$"),
    "a guess that it remembers": (
        Remembering(), "proposes from its state alone", "tracing `propose` anew gave another draft"
    ),
    "a guess that it commits": (
        proposing(lambda d: dataclasses.replace(d, state={"root": d.tokens[:, 2], "length": d.tokens[:, 0]})),
        "commits nothing by proposing", "after the state that the draft before handed on",
    ),
    "another root": (
        proposing(with_field(tokens=lambda d: d.tokens.at[:, 0].add(1) % VOCABULARY)), "starts at the root",
        "node 0 of rows 0, 1, 2, 3 is",
    ),
    "a child before its parent": (
        proposing(with_field(parents=lambda d: d.parents.at[:, 1].set(2))), "puts parents before children",
        "node 1 of row 0 has parent 2; expected 0 to 0",
    ),
    "a tree deeper than it says": (
        replaced(max_depth=1), "is as deep as it says", "drafts 2 levels and says 1"
    ),
    "an id outside the vocabulary": (
        proposing(with_field(tokens=lambda d: d.tokens.at[:, 2].set(VOCABULARY))), "drafts ids of the vocabulary",
        "node 2 of row 0 is id 13; expected 0 to 12",
    ),
    "siblings that are the same": (
        proposing(lambda d: dataclasses.replace(
            d, parents=d.parents.at[:, 2].set(0), tokens=d.tokens.at[:, 2].set(d.tokens[:, 1])
        )), "drafts ids of the vocabulary", "siblings of row 0 repeat a token",
    ),
    "a draft that depends on the other rows": (
        proposing(with_field(tokens=mean_of_rows)), "rows are independent of their neighbours", "when its neighbours"
    ),
    "a root that an empty observation moves": (
        observing(lambda old, new, seen: {**new, "root": seen.next_token}), "an empty observation changes nothing",
        "after an observation of length 0",
    ),
    "a state that reads padding": (
        observing(lambda old, new, seen: {**new, "root": (new["root"] + jnp.sum(seen.tokens, axis=1)) % VOCABULARY}),
        "padding behind an observation does not matter", "past the observed length",
    ),
    "a state that counts observations": (
        observing(lambda old, new, seen: {**new, "root": (old["root"] + new["root"]) % VOCABULARY}),
        "observing in pieces is observing at once", "6 tokens are shown in pieces of 4, 2",
    ),
    "negative probabilities": (
        siblings(UNIFORM, UNIFORM.at[0].add(-1).at[1].add(1)), "declares distributions", "negative or not finite"
    ),
    "a token that it says it cannot draft": (
        siblings(jnp.eye(VOCABULARY)[3], jnp.eye(VOCABULARY)[4]), "declares distributions", "declares probability 0"
    ),
    "probabilities that are rounded to bfloat16": (
        deep(lambda length: NEAR, NEAR.astype(jnp.bfloat16).astype(jnp.float32)), "declares distributions",
        "add up to .* expected 1 within 2e-05",
    ),
    "another law after 24 tokens": (
        deep(lambda length: jnp.where(length[:, None, None] >= 24, LAWS[:, ::-1], LAWS), LAWS),
        "draws from what it declares", "after a long text node . draws likely tokens too seldom",
    ),
    "a last token that is drawn three percent cooler": (
        deep(lambda length: COOLER, LAWS), "draws from what it declares", "node 4 draws likely tokens too often"
    ),
    "a state that ends after 24 tokens": (
        observing(lambda old, new, seen: {
            **new, "root": jnp.where((old["length"] >= 24) & (seen.length > 0), old["root"], new["root"])
        }), "a long text is as good as a short one", "drafts something else when 72 tokens",
    ),
    "what a token is drawn from follows from the token": (
        Peeking((-1, 0, 1)), "knows before it draws", "of one state that share every token before it"
    ),
    "probabilities for one token and others drafted": (
        siblings(jnp.eye(VOCABULARY)[3] + 1e-9, UNIFORM), "sampled output has the target's law",
        "do not have the target's distribution",
    ),
}  # fmt: skip
