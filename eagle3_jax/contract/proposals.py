"""An acceptance rule under examination: random drafts over a small vocabulary, and what it decides on them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from eagle3_jax.boundary import require_verdict
from eagle3_jax.sampling import row_keys
from eagle3_jax.types import Draft, SamplingParams, Verdict, Verifier, Warping

VOCABULARY, ROWS = 5, 768
MAX_DEPTH = 4  # one more than any draft is deep
ROOT = 0
_SETTINGS = ((1.0, 0, 1.0), (0.7, 3, 1.0), (1.3, 0, 0.8))


class Shape(NamedTuple):
    """How a draft is made.

    Attributes:
        parents: Of its nodes.
        drawn: Whether tokens are drawn and say from what, or are the likeliest ones by rank.
        warping: Of the sampled batches that verify it; some truncate.
    """

    parents: tuple[int, ...]
    drawn: bool
    warping: Warping

    @property
    def settings(self) -> tuple[tuple[float, int, float], ...]:
        """Temperature, top-k and top-p; row ``b`` has those of ``b`` modulo how many there are."""
        if self.warping is Warping.TRUNCATED:
            return _SETTINGS
        return tuple((temperature, 0, 1.0) for temperature, _, _ in _SETTINGS)


_CHAIN, _TREE = (-1, 0, 1, 2), (-1, 0, 0, 1, 1, 2, 3)
SHAPES = {
    "a chain": Shape(_CHAIN, False, Warping.TEMPERATURE),
    "a drawn chain": Shape(_CHAIN, True, Warping.TEMPERATURE),
    "a tree": Shape(_TREE, False, Warping.TRUNCATED),
    "a tree of drawn siblings": Shape(_TREE, True, Warping.TRUNCATED),
}


class Decided(NamedTuple):
    """Drafts and the verdicts on them, on the host.

    Attributes:
        tokens: ``[B N]``.
        valid: ``[B N]``.
        path: ``[B MAX_DEPTH]``.
        num_accepted: ``[B]``.
        next_token: ``[B]``.
    """

    tokens: Int[np.ndarray, "B N"]
    valid: Bool[np.ndarray, "B N"]
    path: Int[np.ndarray, "B G"]
    num_accepted: Int[np.ndarray, " B"]
    next_token: Int[np.ndarray, " B"]

    def emitted(self, row: int) -> list[int]:
        """Tokens that the round writes."""
        nodes = self.path[row, : self.num_accepted[row]]
        return [*self.tokens[row, nodes].tolist(), int(self.next_token[row])]


@dataclasses.dataclass(frozen=True, eq=False)
class VerifierSubject:
    """An acceptance rule, and the programs that ask it.

    The target is a table: what it wants after a token depends on that token alone, so the law of what must be written
    is known.

    Attributes:
        verifier: The rule.
        samples: Drafts of each shape for statistical checks.
        seed: Of everything random.
    """

    verifier: Verifier
    samples: int = 32768
    seed: int = 0

    @property
    def shapes(self) -> dict[str, Shape]:
        """The drafts that the rule is for."""
        chains_only = getattr(self.verifier, "chains_only", False)
        return {name: shape for name, shape in SHAPES.items() if shape.parents == _CHAIN or not chains_only}

    @functools.cached_property
    def logits(self) -> Float[np.ndarray, "V V"]:
        """The target's, after each token."""
        rng = np.random.default_rng([self.seed, 1])
        return rng.normal(0, 1.2, (VOCABULARY, VOCABULARY)).astype(np.float32)

    @functools.cached_property
    def proposed(self) -> Float[np.ndarray, "V V"]:
        """Of what drafts are made, after each token: near the target, and not it."""
        rng = np.random.default_rng([self.seed, 2])
        return _softmax(self.logits + rng.normal(0, 0.8, self.logits.shape)).astype(np.float32)

    def wanted(self, setting: tuple[float, int, float]) -> Float[np.ndarray, "V V"]:
        """The target's distribution after each token under a row's sampling, computed apart from the library."""
        return np.stack([_warped(row, *setting) for row in self.logits.astype(np.float64)])

    def drafts(self, shape: Shape, run: int) -> Draft:
        """Random drafts, ``[ROWS N]``, here and there with a node that is padding."""
        rng = np.random.default_rng([self.seed, 3, run])
        nodes = len(shape.parents)
        tokens = np.full((ROWS, nodes), ROOT, np.int32)
        probs = np.zeros((ROWS, nodes, VOCABULARY), np.float32)
        seen = [0] * nodes  # children so far
        for node, parent in enumerate(shape.parents[1:], 1):
            q = self.proposed[tokens[:, parent]]
            if shape.drawn:
                below = rng.random((ROWS, 1)) * q.sum(-1, keepdims=True) < np.cumsum(q, axis=-1)
                tokens[:, node] = below.argmax(-1)
            else:
                tokens[:, node] = np.argsort(-q, axis=-1)[:, seen[parent]]
            probs[:, node] = q
            seen[parent] += 1
        valid = rng.random((ROWS, nodes)) < 0.9
        valid[:, 0] = True
        parents = np.broadcast_to(np.array(shape.parents, np.int32), tokens.shape)
        return Draft(
            tokens=jnp.asarray(tokens),
            parents=jnp.asarray(parents),
            valid=jnp.asarray(valid),
            probs=jnp.asarray(probs) if shape.drawn else None,
        )

    def decide(
        self,
        shape: Shape,
        *,
        run: int = 0,
        greedy: bool = False,
        draft: Draft | None = None,
        temperature: float | None = None,
        anew: bool = False,
    ) -> Decided:
        """What the rule says to drafts of a shape.

        Args:
            shape: Of the drafts.
            run: Chooses drafts and keys.
            greedy: Whether it is a batch without randomness, in which drafts say nothing of what they are from.
            draft: Other drafts.
            temperature: Of every row, without truncation; those of its settings when ``None``.
            anew: Whether the rule is traced once more.
        """
        draft = self.drafts(shape, run) if draft is None else draft
        given = draft.replace(probs=None) if greedy else draft  # type: ignore[attr-defined]
        rows = np.array([shape.settings[row % len(shape.settings)] for row in range(ROWS)])
        if temperature is not None:
            rows[:] = (temperature, 0, 1.0)
        sampling = SamplingParams(
            temperature=rows[:, 0].astype(np.float32),
            top_k=rows[:, 1].astype(np.int32),
            top_p=rows[:, 2].astype(np.float32),
        )
        program = self.deciding() if anew else self._decide
        tokens, keys = np.asarray(draft.tokens), row_keys(self.seed + run, ROWS)
        logits = jnp.asarray(self.logits[tokens])
        verdict = program(
            given, logits, jax.tree.map(jnp.asarray, sampling), keys, Warping.GREEDY if greedy else shape.warping
        )
        found = jax.device_get((verdict.path, verdict.num_accepted, verdict.next_token))
        return Decided(tokens, np.asarray(draft.valid), *found)

    def deciding(self) -> Any:
        """The rule traced anew, its verdicts checked."""

        @functools.partial(jax.jit, static_argnums=4)
        def decide(draft: Draft, logits: Any, sampling: SamplingParams, keys: Any, warping: Warping) -> Verdict:
            verdict = self.verifier(draft, logits, sampling, keys, warping=warping, max_depth=MAX_DEPTH)
            require_verdict(self.verifier, verdict, batch=ROWS, max_depth=MAX_DEPTH)
            return verdict

        return decide

    @functools.cached_property
    def _decide(self) -> Any:
        return self.deciding()


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _warped(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Temperature, then top-k, then top-p."""
    order = np.argsort(-logits)
    kept = _softmax(logits[order] / temperature)
    if top_k:
        kept[top_k:] = 0
    kept /= kept.sum()
    if top_p < 1:
        kept[np.cumsum(kept) - kept >= top_p] = 0
    law = np.zeros_like(kept)
    law[order] = kept / kept.sum()
    return law
