"""Counters of speculation and every rate derived from them, under vLLM's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.types import Draft, Verdict

Counter = Array | np.ndarray | np.generic  # on the device inside the loop, on the host once merged


class SpeculationStats(struct.PyTreeNode, kw_only=True):
    """What verification accepted, before a stop token or a limit cut the output.

    The first token of a generation comes from the prefill and belongs to no round. Fields lead with ``B`` inside
    the loop; :meth:`merge` sums rows and runs, so that a rate is never an average of rates.

    Attributes:
        num_drafts: ``[B]`` rounds in which at least one token was drafted.
        num_draft_tokens: ``[B]`` tokens drafted.
        num_accepted_tokens: ``[B]`` draft tokens accepted.
        num_accepted_tokens_per_pos: ``[B G]`` rounds in which the draft token at each depth was accepted.
    """

    num_drafts: Int[Counter, "*B"]
    num_draft_tokens: Int[Counter, "*B"]
    num_accepted_tokens: Int[Counter, "*B"]
    num_accepted_tokens_per_pos: Int[Counter, "*B G"]

    def __eq__(self, other: object) -> bool:
        """Whether all counters are equal, on the host; arrays alone have no answer."""
        if not isinstance(other, SpeculationStats):
            return NotImplemented
        return all(map(np.array_equal, jax.tree.leaves(self), jax.tree.leaves(other)))

    @classmethod
    def zeros(cls, batch: int, max_depth: int) -> SpeculationStats:
        """No rounds yet."""
        zero = jnp.zeros((batch,), jnp.int32)
        return cls(
            num_drafts=zero,
            num_draft_tokens=zero,
            num_accepted_tokens=zero,
            num_accepted_tokens_per_pos=jnp.zeros((batch, max_depth), jnp.int32),
        )

    def count(self, draft: Draft, verdict: Verdict, active: Bool[Array, " B"]) -> SpeculationStats:
        """Add one round of the active rows."""
        drafted = jnp.where(active, jnp.sum(draft.valid[:, 1:], axis=1, dtype=jnp.int32), 0)
        accepted = jnp.where(active, verdict.num_accepted, 0)
        # As many depths as are counted: a draft may be shallower than the deepest that a schedule asks for.
        reached = (
            jnp.arange(np.shape(self.num_accepted_tokens_per_pos)[-1], dtype=jnp.int32)[None, :] < accepted[:, None]
        )
        return SpeculationStats(
            num_drafts=self.num_drafts + (drafted > 0).astype(jnp.int32),  # type: ignore[operator]
            num_draft_tokens=self.num_draft_tokens + drafted,  # type: ignore[operator]
            num_accepted_tokens=self.num_accepted_tokens + accepted,  # type: ignore[operator]
            num_accepted_tokens_per_pos=self.num_accepted_tokens_per_pos + reached.astype(jnp.int32),  # type: ignore[operator]
        )

    @classmethod
    def merge(cls, stats: Iterable[SpeculationStats]) -> SpeculationStats:
        """Sum the counters of any number of rows and runs of one draft depth, on the host."""
        rows = [jax.tree.map(np.asarray, one) for one in stats]
        return cls(
            num_drafts=np.sum([np.sum(one.num_drafts) for one in rows]),
            num_draft_tokens=np.sum([np.sum(one.num_draft_tokens) for one in rows]),
            num_accepted_tokens=np.sum([np.sum(one.num_accepted_tokens) for one in rows]),
            num_accepted_tokens_per_pos=np.sum([one._accepted_by_depth() for one in rows], axis=0),
        )

    def _accepted_by_depth(self) -> np.ndarray:
        """``[G]``, rounds of all rows in which the draft token at each depth was accepted."""
        counts = np.asarray(self.num_accepted_tokens_per_pos)
        return counts.reshape(-1, counts.shape[-1]).sum(0)

    @property
    def mean_acceptance_length(self) -> float:
        """τ: tokens emitted per round, ``1 + accepted / drafts``; 1 when nothing was drafted."""
        return 1.0 + _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of drafted tokens that was accepted."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of rounds in which the draft token at each depth was accepted, with all those before it."""
        return [_ratio(count, self.num_drafts) for count in self._accepted_by_depth()]

    @property
    def conditional_acceptance_rate(self) -> list[float]:
        """Probability that the token at each depth is accepted given that all before it were."""
        counts = self._accepted_by_depth()
        return [_ratio(count, before) for count, before in zip(counts, [self.num_drafts, *counts[:-1]], strict=True)]

    def to_json(self) -> dict[str, object]:
        """Counters and the two headline rates, as plain numbers."""
        return {
            "num_drafts": int(np.sum(self.num_drafts)),
            "num_draft_tokens": int(np.sum(self.num_draft_tokens)),
            "num_accepted_tokens": int(np.sum(self.num_accepted_tokens)),
            "num_accepted_tokens_per_pos": self._accepted_by_depth().tolist(),
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
        }


def _ratio(part: object, whole: object) -> float:
    total = float(np.sum(whole))  # type: ignore[arg-type]
    return float(np.sum(part)) / total if total else 0.0  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class TokenLogProb:
    """Log-probabilities at one position of the output, under the target at temperature 1."""

    logprob: float  #: That of the token that was written.
    top: list[tuple[int, float]]  #: The likeliest tokens and their log-probabilities, likeliest first.


class LogProbs(struct.PyTreeNode, kw_only=True):
    """Log-probabilities under the target at temperature 1, of the token in each slot and of the ``L`` likeliest."""

    token: Float[Array | np.ndarray, "B S"]  #: ``[B S]``; slots of the prompt hold 0.
    top_ids: Int[Array | np.ndarray, "B S L"]  #: ``[B S L]``, likeliest first.
    top: Float[Array | np.ndarray, "B S L"]  #: ``[B S L]``.

    @classmethod
    def zeros(cls, batch: int, capacity: int, count: int) -> LogProbs:
        """Empty slots; ``count`` is ``L``."""
        slots = (batch, capacity)
        return cls(
            token=jnp.zeros(slots), top_ids=jnp.zeros((*slots, count), jnp.int32), top=jnp.zeros((*slots, count))
        )

    @classmethod
    def of(cls, logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], count: int) -> LogProbs:
        """Those of ``tokens`` and of the ``count`` likeliest tokens under the logits that the tokens were chosen by."""
        scores = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        # By logits: the rounding of their log-probabilities makes ties of tokens that are not equally likely.
        ids = lax.top_k(logits, count)[1]
        top = jnp.take_along_axis(scores, ids, axis=-1)
        return cls(token=jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0], top_ids=ids, top=top)

    def row(self, index: int, start: int, stop: int) -> list[TokenLogProb]:
        """The slots ``start`` to ``stop`` of one row of host arrays."""
        columns = (np.asarray(leaf)[index, start:stop].tolist() for leaf in (self.token, self.top_ids, self.top))
        return [TokenLogProb(one, list(zip(ids, top, strict=True))) for one, ids, top in zip(*columns, strict=True)]
