"""Counters of speculation and their rates, under vLLM's names; and log-probabilities of tokens."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.types import Draft, Verdict

# On the device inside the loop, on the host once merged.
Counter = Array | np.ndarray | np.generic


class SpeculationStats(struct.PyTreeNode, kw_only=True):
    """Counts drafted and accepted tokens, before a stop token or a limit cuts the output.

    The first token of a generation comes from the prefill and belongs to no round. Inside the loop
    the first axis of every field is ``B``. :meth:`merge` sums rows and runs, so that a rate is
    never an average of rates.

    Attributes:
        num_drafts: ``[B]``, number of rounds in which at least one token was drafted.
        num_draft_tokens: ``[B]``, number of drafted tokens.
        num_accepted_tokens: ``[B]``, number of accepted draft tokens.
        num_accepted_tokens_per_pos: ``[B G]``, number of rounds in which the draft token at each
            depth was accepted.
    """

    num_drafts: Int[Counter, "*B"]
    num_draft_tokens: Int[Counter, "*B"]
    num_accepted_tokens: Int[Counter, "*B"]
    num_accepted_tokens_per_pos: Int[Counter, "*B G"]

    def __eq__(self, stats: object) -> bool:
        """Returns whether all counters are equal. It runs on the host."""
        if not isinstance(stats, SpeculationStats):
            return NotImplemented
        return all(map(np.array_equal, jax.tree.leaves(self), jax.tree.leaves(stats)))

    @classmethod
    def zeros(cls, batch: int, max_depth: int) -> SpeculationStats:
        """Returns counters of no rounds."""
        zero = jnp.zeros((batch,), jnp.int32)
        return cls(
            num_drafts=zero,
            num_draft_tokens=zero,
            num_accepted_tokens=zero,
            num_accepted_tokens_per_pos=jnp.zeros((batch, max_depth), jnp.int32),
        )

    def count(self, draft: Draft, verdict: Verdict, active: Bool[Array, " B"]) -> SpeculationStats:
        """Returns the counters after one more round of the active rows.

        Args:
            draft: The draft of the round.
            verdict: The decision about it.
            active: ``[B]``, rows that are counted.
        """
        drafted = jnp.where(active, jnp.sum(draft.valid[:, 1:], axis=1, dtype=jnp.int32), 0)
        accepted = jnp.where(active, verdict.num_accepted, 0)

        # The number of depths is that of the counters: with a schedule a draft may be shallower.
        num_depths = np.shape(self.num_accepted_tokens_per_pos)[-1]
        reached = jnp.arange(num_depths, dtype=jnp.int32)[None, :] < accepted[:, None]
        has_draft = (drafted > 0).astype(jnp.int32)

        return SpeculationStats(
            num_drafts=self.num_drafts + has_draft,  # type: ignore[operator]
            num_draft_tokens=self.num_draft_tokens + drafted,  # type: ignore[operator]
            num_accepted_tokens=self.num_accepted_tokens + accepted,  # type: ignore[operator]
            num_accepted_tokens_per_pos=self.num_accepted_tokens_per_pos
            + reached.astype(jnp.int32),  # type: ignore[operator]
        )

    @classmethod
    def merge(cls, stats: Iterable[SpeculationStats]) -> SpeculationStats:
        """Returns the sums over rows and runs of one draft depth, on the host."""
        rows = [jax.tree.map(np.asarray, row) for row in stats]
        return cls(
            num_drafts=np.sum([np.sum(row.num_drafts) for row in rows]),
            num_draft_tokens=np.sum([np.sum(row.num_draft_tokens) for row in rows]),
            num_accepted_tokens=np.sum([np.sum(row.num_accepted_tokens) for row in rows]),
            num_accepted_tokens_per_pos=np.sum([row._accepted_by_depth() for row in rows], axis=0),
        )

    def _accepted_by_depth(self) -> np.ndarray:
        """Returns ``[G]``, in how many rounds of all rows each depth was accepted."""
        counts = np.asarray(self.num_accepted_tokens_per_pos)
        return counts.reshape(-1, counts.shape[-1]).sum(0)

    @property
    def mean_acceptance_length(self) -> float:
        """``τ``, tokens per round: ``1 + accepted / drafts``; 1 if nothing was drafted."""
        return 1.0 + _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of drafted tokens that were accepted."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_per_position(self) -> list[float]:
        """For each depth, the share of rounds that accepted the draft token and all before it."""
        return [_ratio(count, self.num_drafts) for count in self._accepted_by_depth()]

    @property
    def conditional_acceptance_rate(self) -> list[float]:
        """For each depth, the rate at which the token is accepted if all before it were."""
        counts = [self.num_drafts, *self._accepted_by_depth()]
        return [_ratio(count, before) for before, count in itertools.pairwise(counts)]

    def to_json(self) -> dict[str, object]:
        """Returns the counters, the acceptance length and the acceptance rate, as JSON numbers."""
        return {
            "num_drafts": int(np.sum(self.num_drafts)),
            "num_draft_tokens": int(np.sum(self.num_draft_tokens)),
            "num_accepted_tokens": int(np.sum(self.num_accepted_tokens)),
            "num_accepted_tokens_per_pos": self._accepted_by_depth().tolist(),
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
        }


def _ratio(count: object, total: object) -> float:
    """Returns the ratio of two sums, 0 if the second is 0."""
    divisor = float(np.sum(total))  # type: ignore[arg-type]
    return float(np.sum(count)) / divisor if divisor else 0.0  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class TokenLogProb:
    """Log-probabilities at one position of the output, under the target at temperature 1."""

    logprob: float  #: Log-probability of the token in the output.
    #: Ids and log-probabilities of the most likely tokens, in descending order.
    top: list[tuple[int, float]]
    #: Log-probability of the token in the output under the distribution that it was sampled from:
    #: with temperature, top-k and top-p, and 0 for a greedy row; ``None`` if it was not recorded.
    sampled: float | None = None


class LogProbs(struct.PyTreeNode, kw_only=True):
    """Log-probabilities under the target at temperature 1.

    Attributes:
        token: ``[B S]``, of the token in each slot; 0 in slots of the prompt.
        top_ids: ``[B S L]``, ids of the ``L`` most likely tokens, in descending order.
        top: ``[B S L]``, their log-probabilities.
        sampled: ``[B S]``, of the token in each slot under the distribution that it was sampled
            from, with the row's temperature, top-k and top-p; ``None`` if it is not recorded.
    """

    token: Float[Array | np.ndarray, "B S"]
    top_ids: Int[Array | np.ndarray, "B S L"]
    top: Float[Array | np.ndarray, "B S L"]
    sampled: Float[Array | np.ndarray, "B S"] | None = None

    @classmethod
    def zeros(cls, batch: int, capacity: int, count: int, *, sampled: bool = False) -> LogProbs:
        """Returns empty slots; ``count`` is ``L``."""
        slots = (batch, capacity)
        return cls(
            token=jnp.zeros(slots),
            top_ids=jnp.zeros((*slots, count), jnp.int32),
            top=jnp.zeros((*slots, count)),
            sampled=jnp.zeros(slots) if sampled else None,
        )

    @classmethod
    def from_logits(
        cls, logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], count: int
    ) -> LogProbs:
        """Computes the log-probabilities of ``tokens`` and of the ``count`` most likely tokens.

        Args:
            logits: ``[B T V]``, the logits from which the tokens were chosen.
            tokens: ``[B T]``, token ids.
            count: ``L``.
        """
        scores = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        # By logits, because rounded log-probabilities can tie although their logits differ.
        ids = lax.top_k(logits, count)[1]
        top = jnp.take_along_axis(scores, ids, axis=-1)
        token = jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
        return cls(token=token, top_ids=ids, top=top)

    def row(self, index: int, start: int, stop: int) -> list[TokenLogProb]:
        """Returns the slots ``start`` to ``stop`` of one row of host arrays."""
        columns = (
            np.asarray(leaf)[index, start:stop].tolist()
            for leaf in (self.token, self.top_ids, self.top)
        )
        sampled: list[float | None] = [None] * (stop - start)
        if self.sampled is not None:
            sampled = np.asarray(self.sampled)[index, start:stop].tolist()
        return [
            TokenLogProb(logprob, list(zip(ids, top, strict=True)), of_sampling)
            for logprob, ids, top, of_sampling in zip(*columns, sampled, strict=True)
        ]
