"""Two drafters as one: the continuation that the text itself offers, and a draft head where the text offers none.

Prompt lookup costs nothing and is right where the output repeats itself; a head drafts everywhere. Both observe every
committed token, so each can draft in any round. A row takes the first drafter's draft if that has a token, else the
second's. If every row has one, the second does not run, which at batch 1 saves its whole cost.

The choice depends on the text alone, never on a sampled token. So each row's draft has the distribution that its own
drafter declares, and verification stays exact. A draft without ``probs`` is a point mass on each token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from eagle3_jax.checks import check_same_state, configured, declares_chain, require_part
from eagle3_jax.drafters.base import ShapedDrafter
from eagle3_jax.loaded import LoadedDrafter
from eagle3_jax.topology import Chain, Topology
from eagle3_jax.types import Draft, Drafter, DraftSampling, Observation, SamplingParams


@dataclasses.dataclass(frozen=True)
class Fallback:
    """Drafts with ``first`` where it has a draft, else with ``second``. Each row chooses for itself.

    Its parameters are those of ``second``; :meth:`of` puts a loaded head in. Attributes that this class does not have,
    such as ``config`` and ``max_positions``, are those of ``second`` too.

    Attributes:
        first: A drafter without parameters, such as ``NGram`` or ``Suffix``.
        second: Any drafter.

    Raises:
        ValueError: ``first`` has parameters, or a part is no drafter.
    """

    first: Drafter[Any]
    second: Drafter[Any]

    def __post_init__(self) -> None:
        require_part(self.first, "drafter")
        require_part(self.second, "drafter")
        if isinstance(self.first, ShapedDrafter):
            name = type(self.first).__name__
            raise ValueError(f"first is {name}, which has parameters; expected a drafter of the text, such as NGram()")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("first", "second"):
            raise AttributeError(name)
        return getattr(self.second, name)

    @classmethod
    def of(cls, first: Drafter[Any], second: LoadedDrafter) -> LoadedDrafter:
        """A loaded drafter with the arrays of ``second``, which are shared.

        Raises:
            ValueError: As the class.
        """
        method = f"{type(first).__name__}, else {second.described}"
        return dataclasses.replace(second, drafter=cls(first, second.drafter), method=method)

    @property
    def num_nodes(self) -> int:
        """``N``, of the larger draft; the other one is padded."""
        return max(self.first.num_nodes, self.second.num_nodes)

    @property
    def max_depth(self) -> int:
        """``G``, of the deeper draft."""
        return max(self.first.max_depth, self.second.max_depth)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers that either of them reads."""
        return tuple(dict.fromkeys((*self.second.aux_layers, *self.first.aux_layers)))

    @property
    def num_likeliest(self) -> int:
        """``L``, the larger of the two; 0 if neither asks for likely tokens."""
        return max(getattr(one, "num_likeliest", 0) for one in (self.first, self.second))

    @property
    def is_chain(self) -> bool:
        """Whether both draft chains."""
        return declares_chain(self.first) and declares_chain(self.second)

    def with_topology(self, topology: Topology | None, draft_sampling: DraftSampling | None) -> Fallback:
        """With another topology of ``second``; ``first`` drafts a chain as long as that is deep.

        Raises:
            ValueError: One of them cannot draft like that.
        """
        chain = None if topology is None else Chain(topology.max_depth)
        return Fallback(configured(self.first, chain, None), configured(self.second, topology, draft_sampling))

    def init(self, params: Any, batch: int, capacity: int) -> tuple[Any, Any]:
        """The states of both; see :class:`eagle3_jax.types.Drafter`."""
        return self.first.init(None, batch, capacity), self.second.init(params, batch, capacity)

    def observe(self, params: Any, state: tuple[Any, Any], seen: Observation) -> tuple[Any, Any]:
        """Both take in the committed tokens, with the features of their own layers."""
        first = self.first.observe(None, state[0], self._seen_by(self.first, seen))
        return first, self.second.observe(params, state[1], self._seen_by(self.second, seen))

    def propose(self, params: Any, state: tuple[Any, Any], keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        """Drafts with ``first``, and with ``second`` if some row needs it."""
        own = jax.vmap(jax.random.fold_in, (0, None))(keys, 0)  # the choice must not depend on the second's draws
        draft = self.first.propose(None, state[0], own, sampling)
        found = jnp.any(draft.valid[:, 1:], axis=1)

        def ask(state: Any) -> tuple[tuple[Any, ...], Any]:
            other = self.second.propose(params, state, keys, sampling)
            after = state if other.state is None else check_same_state(self.second, state, other.state, "propose")
            return (other.tokens, other.parents, other.valid, other.probs), after

        nothing = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), jax.eval_shape(lambda: ask(state[1])[0]))
        # A loop of at most one turn: XLA updates its carry in place, where the branches of a `cond` copy the caches.
        start = (~jnp.all(found), nothing, state[1])
        _, other, after = lax.while_loop(lambda now: now[0], lambda now: (jnp.bool_(False), *ask(now[2])), start)
        both = self._padded(draft), self._padded(Draft(**dict(zip(_FIELDS, other, strict=True))))
        if any(one.probs is not None for one in both):
            vocab_size = next(one.probs.shape[-1] for one in both if one.probs is not None)
            both = tuple(one.replace(probs=_distribution(one, vocab_size)) for one in both)
        chosen = jax.tree.map(lambda one, two: jnp.where(found.reshape(-1, *[1] * (one.ndim - 1)), one, two), *both)
        # The root is the same in both. From `first`, it needs no draft of `second`, which `Silent` then never runs.
        tokens = jnp.concatenate([draft.tokens[:, :1], chosen.tokens[:, 1:]], axis=1)
        first = state[0] if draft.state is None else draft.state
        return chosen.replace(tokens=tokens, state=(first, after))

    def _seen_by(self, drafter: Drafter[Any], seen: Observation) -> Observation:
        if seen.likeliest is not None:
            seen = seen.replace(likeliest=seen.likeliest[..., : getattr(drafter, "num_likeliest", 0)])
        if drafter.aux_layers == self.aux_layers:
            return seen
        index = jnp.asarray([self.aux_layers.index(layer) for layer in drafter.aux_layers], jnp.int32)
        return seen.replace(features=seen.features[:, :, index])

    def _padded(self, draft: Draft) -> Draft:
        """The draft with invalid nodes up to ``num_nodes``, and without a state."""
        batch, size = draft.tokens.shape
        node = jnp.broadcast_to(jnp.arange(size, self.num_nodes, dtype=jnp.int32), (batch, self.num_nodes - size))
        probs = draft.probs
        return Draft(
            tokens=jnp.concatenate([draft.tokens, jnp.zeros_like(node)], axis=1),
            parents=jnp.concatenate([draft.parents, node - 1], axis=1),
            valid=jnp.concatenate([draft.valid, jnp.zeros(node.shape, jnp.bool_)], axis=1),
            probs=None if probs is None else jnp.pad(probs, ((0, 0), (0, self.num_nodes - size), (0, 0))),
        )


_FIELDS = ("tokens", "parents", "valid", "probs")


def _distribution(draft: Draft, vocab_size: int) -> Float[Array, "B N V"]:
    """What the tokens were drawn from: a point mass each, unless the draft says otherwise."""
    return jax.nn.one_hot(draft.tokens, vocab_size, dtype=jnp.float32) if draft.probs is None else draft.probs
