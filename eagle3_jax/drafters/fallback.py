"""Two drafters as one: the text's own continuation, and a head where the text offers none.

Prompt lookup costs nothing and is right where the output repeats itself. A head drafts everywhere.
Both observe every committed token, so each can draft in any round. A row takes the first drafter's
draft if that has a token, else the second's. If every row has a draft of the first, the second does
not run, which at batch 1 saves its whole cost.

The choice depends on the text alone, never on a sampled token. So each row's draft has the
distribution that its own drafter declares, and verification stays exact. A draft without ``probs``
is a point mass on each token.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from eagle3_jax.cache import Cache
from eagle3_jax.checks import (
    check_part,
    checked_state,
    configured,
    declares_chain,
    propose,
    reads_cache,
)
from eagle3_jax.drafters.base import ShapedDrafter
from eagle3_jax.loaded import LoadedDrafter
from eagle3_jax.topology import Chain, Topology
from eagle3_jax.types import Draft, Drafter, DraftSampling, Observation, SamplingParams

# Members that a drafter may have beyond the protocol.
_OF_SECOND = ("config", "draft_sampling", "longest", "max_positions", "param_axes", "param_shapes")


class _Fields(NamedTuple):
    """The fields of a :class:`Draft` that the second drafter fills."""

    tokens: Any
    parents: Any
    valid: Any
    probs: Any


class _Turn(NamedTuple):
    """The carry of the loop that runs the second drafter.

    Attributes:
        is_needed: Whether it has still to run.
        fields: Its draft.
        state: Its state.
    """

    is_needed: Array
    fields: _Fields
    state: Any


@dataclasses.dataclass(frozen=True)
class Fallback:
    """Drafts with ``first`` where it has a draft, else with ``second``.

    Each row chooses for itself. The parameters are those of ``second``; :meth:`of` puts a loaded
    head in.

    Attributes:
        first: A drafter without parameters, such as ``NGram`` or ``Suffix``.
        second: Any drafter.

    Raises:
        ValueError: ``first`` has parameters, or a part is not a drafter.
    """

    first: Drafter[Any]
    second: Drafter[Any]

    def __post_init__(self) -> None:
        check_part(self.first, "drafter")
        check_part(self.second, "drafter")
        if isinstance(self.first, ShapedDrafter):
            name = type(self.first).__name__
            raise ValueError(
                f"first is {name}, which has parameters; expected a drafter of the text, such as"
                " NGram()"
            )

    @classmethod
    def of(cls, first: Drafter[Any], second: LoadedDrafter) -> LoadedDrafter:
        """Returns a loaded drafter with the arrays of ``second``, which are shared.

        Raises:
            ValueError: As the class.
        """
        method = f"{type(first).__name__}, else {second.described}"
        return dataclasses.replace(second, drafter=cls(first, second.drafter), method=method)

    @property
    def num_nodes(self) -> int:
        """``N``, nodes of the larger draft; the smaller one is padded."""
        return max(self.first.num_nodes, self.second.num_nodes)

    @property
    def max_depth(self) -> int:
        """``G``, of the deeper draft."""
        return max(self.first.max_depth, self.second.max_depth)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers that at least one of them reads."""
        return tuple(dict.fromkeys((*self.second.aux_layers, *self.first.aux_layers)))

    @property
    def num_likeliest(self) -> int:
        """``L``, the larger of the two; 0 if neither asks for likely tokens."""
        return max(_num_likeliest(self.first), _num_likeliest(self.second))

    @property
    def is_chain(self) -> bool:
        """Whether both draft chains."""
        return declares_chain(self.first) and declares_chain(self.second)

    @property
    def reads_cache(self) -> bool:
        """Whether one of them reads the target's cache."""
        return reads_cache(self.first) or reads_cache(self.second)

    def __getattr__(self, name: str) -> Any:
        """Returns an optional member of ``second``.

        A member that ``second`` lacks is lacking here too.
        """
        if name not in _OF_SECOND:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.second, name)

    def with_topology(
        self, topology: Topology | None, draft_sampling: DraftSampling | None
    ) -> Fallback:
        """Returns the drafter with another topology of ``second``.

        ``first`` drafts a chain as long as that is deep.

        Raises:
            ValueError: One of them cannot draft like that.
        """
        chain = None if topology is None else Chain(topology.max_depth)
        first = configured(self.first, chain, None)
        second = configured(self.second, topology, draft_sampling)
        return Fallback(first, second)

    def init(self, params: Any, batch: int, capacity: int) -> tuple[Any, Any]:
        """Returns the empty states of both; see :class:`eagle3_jax.types.Drafter`."""
        return self.first.init(None, batch, capacity), self.second.init(params, batch, capacity)

    def observe(self, params: Any, state: tuple[Any, Any], seen: Observation) -> tuple[Any, Any]:
        """Both take in the committed tokens, with the features of their own layers."""
        first = self.first.observe(None, state[0], self._seen_by(self.first, seen))
        second = self.second.observe(params, state[1], self._seen_by(self.second, seen))
        return first, second

    def propose(
        self,
        params: Any,
        state: tuple[Any, Any],
        keys: Key[Array, " B"],
        sampling: SamplingParams,
        *,
        cache: Cache | None = None,
    ) -> Draft:
        """Drafts with ``first``, and with ``second`` if some row needs it."""
        # The choice must not depend on the random numbers of `second`.
        keys_of_first = jax.vmap(jax.random.fold_in, (0, None))(keys, 0)
        first_draft = propose(self.first, None, state[0], keys_of_first, sampling, cache)
        has_draft = jnp.any(first_draft.valid[:, 1:], axis=1)

        def draft_second(state: Any) -> _Turn:
            draft = propose(self.second, params, state, keys, sampling, cache)
            after = state
            if draft.state is not None:
                after = checked_state(self.second, state, draft.state, "propose")
            fields = _Fields(draft.tokens, draft.parents, draft.valid, draft.probs)
            return _Turn(jnp.bool_(False), fields, after)

        # A loop of at most one turn: XLA updates its carry in place, where the branches of a `cond`
        # copy the caches.
        shapes = jax.eval_shape(lambda: draft_second(state[1]).fields)
        no_draft = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        start = _Turn(~jnp.all(has_draft), no_draft, state[1])
        turn = lax.while_loop(
            lambda turn: turn.is_needed, lambda turn: draft_second(turn.state), start
        )
        second_draft = Draft(**turn.fields._asdict())

        # Both drafts in the same shapes. If one declares distributions, the tokens of the other are
        # point masses.
        drafts = (self._padded(first_draft), self._padded(second_draft))
        probs = [draft.probs for draft in drafts if draft.probs is not None]
        if probs:
            vocab_size = probs[0].shape[-1]
            drafts = tuple(
                draft.replace(probs=_distribution(draft, vocab_size)) for draft in drafts
            )

        def choose(first: Array, second: Array) -> Array:
            return jnp.where(has_draft.reshape(-1, *[1] * (first.ndim - 1)), first, second)

        draft = jax.tree.map(choose, *drafts)
        # The root is the same in both. From `first`, it needs no draft of `second`, which `Silent`
        # then never runs.
        root = first_draft.tokens[:, :1]
        tokens = jnp.concatenate([root, draft.tokens[:, 1:]], axis=1)
        first_state = state[0] if first_draft.state is None else first_draft.state
        return draft.replace(tokens=tokens, state=(first_state, turn.state))

    def _seen_by(self, drafter: Drafter[Any], seen: Observation) -> Observation:
        """Returns the observation with the features and likely tokens that a drafter asks for."""
        if seen.likeliest is not None:
            seen = seen.replace(likeliest=seen.likeliest[..., : _num_likeliest(drafter)])
        if drafter.aux_layers == self.aux_layers:
            return seen
        index = jnp.asarray(
            [self.aux_layers.index(layer) for layer in drafter.aux_layers], jnp.int32
        )
        return seen.replace(features=seen.features[:, :, index])

    def _padded(self, draft: Draft) -> Draft:
        """Returns the draft with invalid nodes up to ``num_nodes``, and without a state."""
        batch, size = draft.tokens.shape
        missing = self.num_nodes - size
        node = jnp.arange(size, self.num_nodes, dtype=jnp.int32)
        node = jnp.broadcast_to(node, (batch, missing))
        tokens = jnp.concatenate([draft.tokens, jnp.zeros_like(node)], axis=1)
        parents = jnp.concatenate([draft.parents, node - 1], axis=1)
        valid = jnp.concatenate([draft.valid, jnp.zeros(node.shape, jnp.bool_)], axis=1)
        probs = draft.probs
        if probs is not None:
            probs = jnp.pad(probs, ((0, 0), (0, missing), (0, 0)))
        return Draft(tokens=tokens, parents=parents, valid=valid, probs=probs)


def _num_likeliest(drafter: Drafter[Any]) -> int:
    return getattr(drafter, "num_likeliest", 0)


def _distribution(draft: Draft, vocab_size: int) -> Float[Array, "B N V"]:
    """Returns the distribution that the tokens were sampled from.

    These are point masses, unless the draft declares another.
    """
    if draft.probs is not None:
        return draft.probs
    return jax.nn.one_hot(draft.tokens, vocab_size, dtype=jnp.float32)
