"""A target under examination: the texts it is shown, and what it answers in one way of showing them and another."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.cache import Cache
from eagle3_jax.contract.report import Broken
from eagle3_jax.decode import LoadedTarget
from eagle3_jax.models.memory import causal_mask
from eagle3_jax.tree import ancestor_mask, depths
from eagle3_jax.types import TargetOutput

ROWS, SIZE = 3, 6  # rows, and tokens of a block
LENGTHS = (5, 1, 3)  # ragged prefixes, fed as SIZE tokens
WIDTH = 20  # of the longest text: a prefix, a block and one behind it, or a prompt and what is generated
CAPACITY = 128
LONG_ROWS, LONG_BLOCK, LONG_WIDTH = 9, 16, 96  # of the check of long texts

# A tree for each row: paths that cross in the block's order, one node that is padding, and a path so deep and so late
# in the block that a window of up to three positions shows whether it goes by positions or by slots.
PARENTS = np.array([[-1, 0, 0, 2, 1, 3], [-1, 0, 1, 0, -1, 3], [-1, 0, 0, 2, 3, 4]], np.int32)
PATHS = np.array([[0, 2, 3, 5, 0, 0], [0, 3, 5, 0, 0, 0], [0, 2, 3, 4, 5, 0]], np.int32)  # the nodes that stay
COUNTS = (4, 2, 5)  # how many of them
PADDING = (1, 4)  # row and node


class Answer(NamedTuple):
    """What a target says to a run of tokens, on the host but for what its cache takes.

    Attributes:
        logits: ``[B T V]``.
        final: ``[B T D]``.
        features: ``[B T A D]``.
        written: For the cache.
    """

    logits: Float[np.ndarray, "B T V"]
    final: Float[np.ndarray, "B T D"]
    features: Float[np.ndarray, "B T A D"]
    written: Any


@dataclasses.dataclass(frozen=True, eq=False)
class TargetSubject:
    """A target, and the programs that ask it.

    Attributes:
        target: With its parameters.
        given: The tolerance; by the types of the target when ``None``.
        seed: Of every text.
    """

    target: LoadedTarget
    given: float | None = None
    seed: int = 0

    def text(self, which: int = 0) -> Int[np.ndarray, "B T"]:
        """Random tokens, ``[ROWS WIDTH]``."""
        rng = np.random.default_rng([self.seed, which])
        return rng.integers(0, self.target.model.vocab_size, (ROWS, WIDTH)).astype(np.int32)

    @functools.cached_property
    def layers(self) -> int:
        """``L``: the cache has a part for each."""
        return len(self.target.model.init_cache(1, CAPACITY).layers)

    @functools.cached_property
    def rounds_off(self) -> bool:
        """Whether it computes in less than 32 bits."""
        cache = self.target.model.init_cache(1, CAPACITY)
        leaves = jax.tree.leaves((self.target.params, cache.layers))
        return any(jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4 for leaf in leaves)

    @functools.cached_property
    def tolerance(self) -> float:
        """Largest deviation of a logit, as a share of the largest logit, that rounding explains."""
        if self.given is not None:
            return self.given
        return 3e-2 if self.rounds_off else 1e-4

    @functools.cached_property
    def scale(self) -> float:
        """The largest logit."""
        return max(float(np.abs(self.prefill(self.text()[:, :SIZE])[0].logits).max()), 1e-9)

    def prefill(
        self,
        tokens: Int[np.ndarray, "B T"],
        length: tuple[int, ...] = LENGTHS,
        *,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[Answer, Cache]:
        """What it says to prompts of which so many tokens are real, and the cache then."""
        batch, fed = tokens.shape
        positions = np.broadcast_to(np.arange(fed, dtype=np.int32), (batch, fed))
        real = jnp.asarray(length, jnp.int32)
        answer = self._ask(tokens, positions, causal_mask(fed), None, real, aux_layers)
        return answer, self._fill(answer.written, real)

    def block(
        self,
        cache: Cache,
        tokens: Int[np.ndarray, "B T"],
        parents: Int[np.ndarray, "B T"] | None = None,
        *,
        aux_layers: tuple[int, ...] = (),
    ) -> Answer:
        """What it says to a block behind a cache: a tree, or a chain when no parents are given."""
        if parents is None:
            mask, depth = causal_mask(tokens.shape[1]), jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        else:
            mask = ancestor_mask(jnp.asarray(parents), tokens.shape[1])
            depth = depths(mask)
        return self._ask(tokens, cache.length[:, None] + depth, mask, cache, None, aux_layers)

    def commit(
        self, cache: Cache, answer: Answer, count: tuple[int, ...], nodes: Int[np.ndarray, "B T"] | None = None
    ) -> Cache:
        """The cache with so many tokens of a block."""
        return self._commit(cache, answer.written, jnp.asarray(count, jnp.int32), nodes)

    def plain(self, text: Int[np.ndarray, "B W"]) -> Float[np.ndarray, "B W V"]:
        """Logits of texts that are fed token by token, from an empty cache: what everything else is compared with."""
        return np.asarray(self._plain(self.target.params, jnp.asarray(text)), np.float64)

    def plain_by_threes(self, text: Int[np.ndarray, "B W"]) -> Float[np.ndarray, "B W V"]:
        """:meth:`plain` of ``ROWS`` rows at a time, so that a larger batch is compared with smaller ones."""
        return np.concatenate([self.plain(text[row : row + ROWS]) for row in range(0, len(text), ROWS)])

    def continuations(
        self, start: Int[np.ndarray, "B W"], length: tuple[int, ...], more: int
    ) -> Int[np.ndarray, "B W"]:
        """Texts that go on from ragged starts with the likeliest token, each found by feeding all of it anew."""
        text, rows = start.copy(), np.arange(ROWS)
        for place in range(more):
            at = np.array(length) + place
            text[rows, at] = self.plain(text)[rows, at - 1].argmax(-1)
        return text

    def agree(
        self,
        found: Float[np.ndarray, "B T V"],
        expected: Float[np.ndarray, "B T V"],
        what: str,
        *,
        among: Bool[np.ndarray, "B T"] | None = None,
    ) -> float:
        """How far logits deviate at most, as a share of the largest one.

        Args:
            found: Some.
            expected: Others.
            what: Completes "token 2 of row 1 ...".
            among: Which tokens count.

        Raises:
            Broken: By more than the tolerance.
        """
        gap = np.abs(np.asarray(found, np.float64) - expected).max(-1) / self.scale
        gap = np.where(np.isfinite(gap), gap, np.inf)
        if among is not None:
            gap = np.where(among, gap, 0.0)
        row, token = np.unravel_index(gap.argmax(), gap.shape)
        if gap[row, token] > self.tolerance:
            raise Broken(
                f"token {token} of row {row} {what}: logits off by {gap[row, token]:.1g} of the largest one; expected "
                f"at most {self.tolerance:g}"
            )
        return float(gap[row, token])

    def _ask(
        self, tokens: Any, positions: Any, mask: Any, cache: Cache | None, length: Any, aux_layers: tuple[int, ...]
    ) -> Answer:
        output, logits = self._forward(
            self.target.params, jnp.asarray(tokens), jnp.asarray(positions), mask, cache, length, aux_layers
        )
        wide = lambda array: np.asarray(array, np.float64)
        return Answer(wide(logits), wide(output.final), wide(output.features), output.written)

    @functools.cached_property
    def _forward(self) -> Any:
        model = self.target.model

        @functools.partial(jax.jit, static_argnums=6)
        def forward(
            params: Any, tokens: Array, positions: Array, mask: Array, cache: Any, length: Any, aux_layers: tuple
        ) -> tuple[TargetOutput, Array]:
            output = model(params, tokens, positions, mask, cache, aux_layers=aux_layers, length=length)
            return output, model.unembed(params, output.final)

        return forward

    @functools.cached_property
    def _fill(self) -> Any:
        model = self.target.model
        return jax.jit(lambda written, count: model.init_cache(count.shape[0], CAPACITY).fill(written, count))

    @functools.cached_property
    def _commit(self) -> Any:
        return jax.jit(lambda cache, written, count, nodes: cache.commit(written, count, nodes))

    @functools.cached_property
    def _plain(self) -> Any:
        model = self.target.model

        @jax.jit
        def plain(params: Any, text: Array) -> Array:
            batch = text.shape[0]
            one = jnp.ones((batch,), jnp.int32)

            def feed(cache: Cache, token: Array) -> tuple[Cache, Array]:
                output = model(params, token[:, None], cache.length[:, None], causal_mask(1), cache)
                return cache.commit(output.written, one), model.unembed(params, output.final)[:, 0]

            _, logits = jax.lax.scan(feed, model.init_cache(batch, CAPACITY), text.T)
            return jnp.moveaxis(logits, 0, 1)

        return plain
