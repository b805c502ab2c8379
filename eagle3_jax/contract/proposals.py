"""An acceptance rule under examination: random drafts over a small vocabulary, and what it decides on them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from eagle3_jax.boundary import require_verdict
from eagle3_jax.sampling import row_keys
from eagle3_jax.types import Draft, SamplingParams, Verdict, Verifier, Warping

ROWS = 768
MAX_DEPTH = 12  # one more than any draft is deep
ROOT = 0
_SETTINGS = ((1.0, 0, 1.0), (0.7, 3, 1.0), (1.3, 0, 0.8), (0.0, 0, 1.0))  # a quarter of the rows is greedy
_WIDE, _NARROW = (
    80,
    7,
)  # ids of two digits where a draw goes digit by digit; sorting 80 tokens takes a CPU 15 times longer


class Shape(NamedTuple):
    """How a draft is made.

    Attributes:
        parents: Parent of each node.
        drawn: Whether tokens are drawn and declare their distribution, or are the likeliest ones by rank.
        warping: Warping of the sampled batches that verify it.
    """

    parents: tuple[int, ...]
    drawn: bool
    warping: Warping

    @property
    def vocabulary(self) -> int:
        """``V``."""
        return _NARROW if self.warping is Warping.TRUNCATED else _WIDE

    @property
    def settings(self) -> tuple[tuple[float, int, float], ...]:
        """Temperature, top-k and top-p; row ``b`` has those of ``b`` modulo how many there are."""
        if self.warping is Warping.TRUNCATED:
            return _SETTINGS
        return tuple((temperature, 0, 1.0) for temperature, _, _ in _SETTINGS)


_CHAIN = tuple(range(-1, 11))
_TREE = (-1, 0, 1, 1, 2, 2, 4, 0, 7, 7, 8, 3, 0, 10, 10, 13)  # late nodes at the root, so that each is often visited
SHAPES = {
    f"{what}{how}": Shape(parents, drawn, warping)
    for warping, how in ((Warping.TEMPERATURE, ""), (Warping.TRUNCATED, " under truncation"))
    for parents, drawn, what in (
        (_CHAIN, False, "a chain"),
        (_CHAIN, True, "a drawn chain"),
        (_TREE, False, "a tree"),
        (_TREE, True, "a tree of drawn siblings"),
    )
}
ONE_TOKEN = Shape((-1, 0), False, Warping.TEMPERATURE)


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

    @property
    def first(self) -> Int[np.ndarray, " B"]:
        """The first token that each row writes."""
        child = np.take_along_axis(self.tokens, np.maximum(self.path[:, :1], 0), axis=1)[:, 0]
        return np.where(self.num_accepted > 0, child, self.next_token)

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
    def logits(self) -> dict[int, Float[np.ndarray, "V V"]]:
        """By ``V``, the target's logits after each token: nearly flat after some, nearly certain after others."""
        return {vocabulary: self._table(vocabulary) for vocabulary in (_WIDE, _NARROW)}

    @functools.cached_property
    def proposed(self) -> dict[int, Float[np.ndarray, "V V"]]:
        """By ``V``, the distributions that drafts are made from: near the target's, and different."""
        rng = np.random.default_rng([self.seed, 2])
        return {
            vocabulary: _softmax(logits + rng.normal(0, 0.8, logits.shape)).astype(np.float32)
            for vocabulary, logits in self.logits.items()
        }

    def _table(self, vocabulary: int) -> Float[np.ndarray, "V V"]:
        for attempt in itertools.count():
            rng = np.random.default_rng([self.seed, 1, attempt])
            scale = rng.uniform(1, 5, (vocabulary, 1))
            scale[ROOT] = 2
            logits = rng.normal(0, scale, (vocabulary, vocabulary)).astype(np.float32)
            if vocabulary > _NARROW or _near_the_cut(logits) > 1e-4:
                break
        return logits

    def wanted(self, shape: Shape, setting: tuple[float, int, float]) -> Float[np.ndarray, "V V"]:
        """The target's distribution after each token under a row's sampling, computed apart from the library."""
        return np.stack([warped(row, *setting) for row in self.logits[shape.vocabulary].astype(np.float64)])

    def drafts(self, shape: Shape, run: int) -> Draft:
        """Random drafts, ``[ROWS N]``; one node in twenty is padding."""
        rng = np.random.default_rng([self.seed, 3, run])
        nodes, proposed = len(shape.parents), self.proposed[shape.vocabulary]
        sums, ranked = np.cumsum(proposed, axis=-1), np.argsort(-proposed, axis=-1)
        tokens = np.full((ROWS, nodes), ROOT, np.int32)
        probs = np.zeros((ROWS, nodes, shape.vocabulary), np.float32)
        seen = [0] * nodes  # children so far
        for node, parent in enumerate(shape.parents[1:], 1):
            before = tokens[:, parent]
            if shape.drawn:
                tokens[:, node] = (rng.random((ROWS, 1)) * sums[before, -1:] < sums[before]).argmax(-1)
                probs[:, node] = proposed[before]
            else:
                tokens[:, node] = ranked[before, seen[parent]]
            seen[parent] += 1
        valid = rng.random((ROWS, nodes)) < 0.95
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
        logits: Float[np.ndarray, "V V"] | None = None,
        temperature: float | None = None,
        anew: bool = False,
    ) -> Decided:
        """What the rule says to drafts of a shape.

        Args:
            shape: Of the drafts.
            run: Chooses drafts and keys.
            greedy: Whether it is a batch without randomness, in which drafts say nothing of what they are from.
            draft: Other drafts.
            logits: Other logits of the target after each token.
            temperature: Temperature of every row, without truncation; those of its settings when ``None``.
            anew: Whether the rule is traced once more.
        """
        draft = self.drafts(shape, run) if draft is None else draft
        given = draft.replace(probs=None) if greedy else draft  # type: ignore[attr-defined]
        rows = np.resize(shape.settings, (ROWS, 3))
        if temperature is not None:
            rows[:] = (temperature, 0, 1.0)
        sampling = SamplingParams(
            temperature=rows[:, 0].astype(np.float32),
            top_k=rows[:, 1].astype(np.int32),
            top_p=rows[:, 2].astype(np.float32),
        )
        program = self.deciding() if anew else self._decide
        tokens, keys = np.asarray(draft.tokens), row_keys(self.seed + run, ROWS)
        logits = self.logits[shape.vocabulary] if logits is None else logits
        verdict = program(
            given,
            jnp.asarray(logits),
            jax.tree.map(jnp.asarray, sampling),
            keys,
            Warping.GREEDY if greedy else shape.warping,
        )
        found = jax.device_get((verdict.path, verdict.num_accepted, verdict.next_token))
        return Decided(tokens, np.asarray(draft.valid), *found)

    def deciding(self) -> Any:
        """The rule traced anew, its verdicts checked."""

        @functools.partial(jax.jit, static_argnums=4)
        def decide(draft: Draft, logits: Any, sampling: SamplingParams, keys: Any, warping: Warping) -> Verdict:
            after = logits[draft.tokens]
            verdict = self.verifier(draft, after, sampling, keys, warping=warping, max_depth=MAX_DEPTH)
            require_verdict(self.verifier, verdict, batch=ROWS, max_depth=MAX_DEPTH)
            return verdict

        return decide

    @functools.cached_property
    def _decide(self) -> Any:
        return self.deciding()


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def warped(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities after temperature, then top-k, then top-p."""
    if not temperature:
        return np.eye(len(logits))[logits.argmax()]
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


def _near_the_cut(logits: np.ndarray) -> float:
    """How near a sum of probabilities comes to a top-p: there rounding would decide what is kept."""
    near = []
    for temperature, _, top_p in _SETTINGS:
        if top_p < 1:
            mass = -np.sort(-_softmax(logits.astype(np.float64) / temperature), axis=-1)
            near.append(np.abs(np.cumsum(mass, axis=-1) - top_p).min())
    return min(near)
