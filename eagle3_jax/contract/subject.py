"""A drafter under examination: what it is shown, and what it answers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.boundary import like_before, require_draft, require_rows
from eagle3_jax.decode import LoadedDrafter, LoadedTarget
from eagle3_jax.models.memory import causal_mask
from eagle3_jax.sampling import row_keys
from eagle3_jax.types import Draft, Observation, SamplingParams

ROWS, FED = 4, 6
LONG = 72  # tokens of a long text
CAPACITY = 4 * FED + LONG
LENGTHS = (FED, 3, 1, FED - 1)  # ragged; the first row is full
SAMPLING = SamplingParams(
    temperature=np.array([0.0, 0.7, 1.5, 1.0], np.float32),
    top_k=np.array([0, 3, 0, 0], np.int32),
    top_p=np.array([1.0, 1.0, 0.9, 1.0], np.float32),
)


class HostDraft(NamedTuple):
    """A :class:`~eagle3_jax.Draft` on the host.

    Attributes:
        tokens: ``[B N]``.
        parents: ``[B N]``.
        valid: ``[B N]``.
        probs: ``[B N V]`` or ``None``.
    """

    tokens: Int[np.ndarray, "B N"]
    parents: Int[np.ndarray, "B N"]
    valid: Bool[np.ndarray, "B N"]
    probs: Float[np.ndarray, "B N V"] | None

    @classmethod
    def of(cls, draft: Draft) -> HostDraft:
        """Of a draft on the device."""
        return cls(*jax.device_get((draft.tokens, draft.parents, draft.valid, draft.probs)))


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A drafter with its target, and the programs that ask it.

    Attributes:
        loaded: The drafter.
        target: Whose tokens and features it is shown.
        samples: How many drafts and sequences statistical checks draw.
        seed: Of everything random.
    """

    loaded: LoadedDrafter
    target: LoadedTarget
    samples: int = 32768
    seed: int = 0

    @property
    def name(self) -> str:
        """Of the drafter's class."""
        return type(self.loaded.drafter).__name__

    def shown(self, length: tuple[int, ...] = LENGTHS, *, seed: int = 0, size: int = FED) -> Observation:
        """Random tokens and the target's features at them, ``[ROWS size]``, of which ``length`` are real."""
        rng = np.random.default_rng([self.seed, seed])
        ids = rng.integers(0, self.target.vocab_size, 2)  # so few that a text repeats itself, for those who look back
        tokens = jnp.asarray(rng.choice(ids, (ROWS, size)), jnp.int32)
        following = jnp.asarray(rng.choice(ids, ROWS), jnp.int32)
        features = self._features(self.target.params, tokens)
        return Observation(
            tokens=tokens, features=features, length=jnp.asarray(length, jnp.int32), next_token=following
        )

    @functools.cached_property
    def _features(self) -> Any:
        layers, model = self.loaded.drafter.aux_layers, self.target.model

        @jax.jit
        def features(params: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T A D"]:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            mask = causal_mask(tokens.shape[1])
            return model(params, tokens, positions, mask, aux_layers=layers).features

        return features

    def fresh(self) -> Any:
        """An empty state, checked."""
        state = self.loaded.drafter.init(self.loaded.params, ROWS, CAPACITY)
        require_rows(self.loaded.drafter, state, ROWS)
        return state

    @functools.cached_property
    def _observe(self) -> Any:
        return self.observing()

    def observing(self) -> Any:
        """``observe`` traced anew, checked; takes parameters, a state and an observation."""
        drafter = self.loaded.drafter
        return jax.jit(lambda params, state, seen: like_before(drafter, state, drafter.observe(params, state, seen)))

    def observe(self, state: Any, seen: Observation) -> Any:
        """The state after an observation, checked."""
        return self._observe(self.loaded.params, state, seen)

    @functools.cached_property
    def after_prompt(self) -> Any:
        """The state that most checks start from."""
        return self.observe(self.fresh(), self.shown())

    @property
    def long(self) -> int:
        """Number of tokens of a long text, as far as the target's positions go."""
        return min(LONG, self.target.max_positions - 4 * FED)

    @functools.cached_property
    def after_long_text(self) -> Any:
        """The state after a long text."""
        return self.observe(self.fresh(), self.shown((self.long,) * ROWS, seed=5, size=self.long))

    def proposing(self) -> Any:
        """``propose`` traced anew, checked; takes parameters, a state, keys and sampling."""
        drafter, vocab_size = self.loaded.drafter, self.target.vocab_size

        def propose(params: Any, state: Any, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
            draft = drafter.propose(params, state, keys, sampling)
            require_draft(drafter, draft, batch=keys.shape[0], vocab_size=vocab_size)
            if draft.state is not None:
                like_before(drafter, state, draft.state, "propose")
            return draft

        return jax.jit(propose)

    @functools.cached_property
    def _propose(self) -> Any:
        return self.proposing()

    def propose(self, state: Any, *, seed: int = 0) -> HostDraft:
        """A draft."""
        return HostDraft.of(self._propose(self.loaded.params, state, row_keys(self.seed + seed, ROWS), SAMPLING))

    def drafts_of_one_row(self, samples: int, *, state: Any = None, row: int = 2) -> Iterator[HostDraft]:
        """Drafts with many keys from the state of one row, after the prompt by default; row 3 does not truncate."""
        size = self.loaded.drafter.num_nodes * self.target.vocab_size
        rows = int(np.clip(2**23 // size, 1, 1024))
        alike = lambda leaf: jnp.repeat(leaf[row : row + 1], rows, axis=0)
        state = jax.tree.map(alike, self.after_prompt if state is None else state)
        sampling = jax.tree.map(alike, jax.tree.map(jnp.asarray, SAMPLING))
        for run in range(max(1, samples // rows)):
            keys = row_keys(self.seed + 100 + run, rows)
            yield HostDraft.of(self._propose(self.loaded.params, state, keys, sampling))

    def left(self, state: Any) -> Any:
        """The state that proposing hands on, if it does."""
        return self._propose(self.loaded.params, state, row_keys(self.seed, ROWS), SAMPLING).state

    @functools.cached_property
    def draft(self) -> HostDraft:
        """What it proposes after the prompt."""
        return self.propose(self.after_prompt)

    @functools.cached_property
    def rounds_off(self) -> bool:
        """Whether it or its target computes in less than 32 bits, so that another order of sums may change a token."""
        leaves = jax.tree.leaves((self.loaded.params, self.after_prompt, self.target.params, self.shown().features))
        return any(jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4 for leaf in leaves)


def differing_rows(one: HostDraft, other: HostDraft, *, tolerance: float = 1e-6) -> list[int]:
    """Rows in which two drafts differ, padding left out; declared probabilities may by as much as rounding does."""
    same = np.asarray(one.valid == other.valid)
    for field in ("tokens", "parents"):
        same &= (getattr(one, field) == getattr(other, field)) | ~one.valid
    if one.probs is not None and other.probs is not None:
        close = np.isclose(one.probs, other.probs, rtol=1e-4, atol=tolerance).all(axis=-1)
        same[:, 1:] &= (close | ~np.asarray(one.valid))[:, 1:]
    return np.flatnonzero(~same.all(axis=1)).tolist()


def named_rows(rows: list[int]) -> str:
    """Rows for a message."""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows))}"
