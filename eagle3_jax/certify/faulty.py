"""A speculative sampler with errors to inject, which shows what a certificate sees.

It draws from random distributions over a small vocabulary, as a chain of drafts does, and reports the target's
distribution for each token as a server would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int
from scipy import special

from eagle3_jax.certify.statistics import Draws, Sampling

NUM_PROMPTS = 4
NUM_REPORTED = 20


@dataclasses.dataclass(frozen=True)
class Fault:
    """What a sampler does wrong.

    Attributes:
        greedy_drafts: Proposes the likeliest token and judges it as if it had been sampled.
        typical: Accepts what is likelier than a threshold of Medusa's instead of ``min(1, p/q)``.
        draft_temperature: Temperature of the drafts, which are declared as sampled at 1.
        plain_acceptance: Applies the nucleus to redraws only, not to acceptance.
        stale_bonus: Draws the token behind the drafts from the distribution of the position before.
        shared_number: Redraws with the random number that refused the draft.
        willing: Factor of the probability of acceptance.
        unreduced: Share of the redraws that come from ``p`` instead of the residual.
    """

    greedy_drafts: bool = False
    typical: bool = False
    draft_temperature: float = 1.0
    plain_acceptance: bool = False
    stale_bonus: bool = False
    shared_number: bool = False
    willing: float = 1.0
    unreduced: float = 0.0


FAULTS: Mapping[str, Fault] = {
    "greedy drafts judged as if sampled": Fault(greedy_drafts=True),
    "typical acceptance": Fault(typical=True),
    "drafts sampled at T 0.7 and declared at 1": Fault(draft_temperature=0.7),
    "nucleus applied to the redraw, not to acceptance": Fault(plain_acceptance=True),
    "bonus sampled from the position before": Fault(stale_bonus=True),
    "redrawn from p, not from the residual": Fault(unreduced=1.0),
    "one random number to accept and to redraw": Fault(shared_number=True),
    "20 % too willing to accept": Fault(willing=1.2),
    "10 % too willing to accept": Fault(willing=1.1),
    "5 % too willing to accept": Fault(willing=1.05),
    "residual mixed with 30 % of p": Fault(unreduced=0.3),
    "residual mixed with 10 % of p": Fault(unreduced=0.1),
}
CORRECT = Fault()


class FaultySampler:
    """A target, a drafter that resembles it, and a chain of drafts.

    Attributes:
        target: ``[prompts, V, V]``, the target's distribution behind each token, for each prompt.
        draft: ``[prompts, V, V]``, the distribution that the drafter declares.
        draft_source: ``[prompts, V, V]``, the distribution that drafts are sampled from.
        sampling: How the target is sampled.
        fault: The injected error.
    """

    def __init__(
        self,
        fault: Fault = CORRECT,
        *,
        sampling: Sampling | None = None,
        vocab_size: int = 64,
        num_speculative_tokens: int = 3,
        error: float = 0.7,
        seed: int = 0,
    ) -> None:
        """Draws the distributions.

        Args:
            fault: The error to inject.
            sampling: Temperature 1 and, if below 1, a nucleus.
            vocab_size: Number of tokens.
            num_speculative_tokens: Length of a chain.
            error: Standard deviation of the drafter's logits around the target's.
            seed: Seed of the distributions.
        """
        rng = np.random.default_rng(seed)
        shape = (NUM_PROMPTS, vocab_size, vocab_size)
        logits = 2.0 * rng.standard_normal(shape)
        draft_logits = logits + error * rng.standard_normal(shape)
        self.target = special.softmax(logits, axis=-1)
        self.draft = special.softmax(draft_logits, axis=-1)
        self.draft_source = special.softmax(draft_logits / fault.draft_temperature, axis=-1)
        self.sampling = sampling or Sampling()
        self.fault = fault
        self._length = num_speculative_tokens

    def draws(self, num_requests: int, max_new_tokens: int, *, seed: int = 0) -> Draws:
        """Answers requests, whose prompts take turns, and returns their tokens as a client sees them."""
        prompts = np.arange(num_requests) % NUM_PROMPTS
        tokens, chunk_index = self.answer(prompts, max_new_tokens, seed=seed)
        return self._reported(prompts, tokens, chunk_index)

    def answer(
        self, prompts: Int[np.ndarray, " R"], max_new_tokens: int, *, seed: int
    ) -> tuple[Int[np.ndarray, "R T"], Int[np.ndarray, "R T"]]:
        """Returns the tokens of answers to prompts, by number, and the position of each in its chunk."""
        rng = np.random.default_rng(seed)
        num_requests = len(prompts)
        tokens = np.full((num_requests, max_new_tokens + self._length + 1), -1)
        chunk_index = np.zeros_like(tokens)
        lengths = np.ones(num_requests, int)
        tokens[:, 0] = _draw(self._warped(self.target[prompts, 0]), rng.random(num_requests))
        while (lengths < max_new_tokens).any():
            rows = np.flatnonzero(lengths < max_new_tokens)
            emitted, counts = self._round(prompts[rows], tokens[rows, lengths[rows] - 1], rng)
            for position in range(self._length + 1):
                reached = rows[counts > position]
                tokens[reached, lengths[reached] + position] = emitted[counts > position, position]
                chunk_index[reached, lengths[reached] + position] = position
            lengths[rows] += counts
        return tokens[:, :max_new_tokens], chunk_index[:, :max_new_tokens]

    def _round(
        self, prompts: Int[np.ndarray, " R"], last: Int[np.ndarray, " R"], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of one round ``[R, K+1]`` and how many there are."""
        num_rows = len(prompts)
        emitted = np.full((num_rows, self._length + 1), -1)
        counts = np.zeros(num_rows, int)
        running = np.ones(num_rows, bool)
        row = np.arange(num_rows)
        for position in range(self._length):
            q = self.draft[prompts, last]
            draft_source = self.draft_source[prompts, last]
            draft = (
                draft_source.argmax(axis=1) if self.fault.greedy_drafts else _draw(draft_source, rng.random(num_rows))
            )
            p = self._warped(self.target[prompts, last])
            judged = self.target[prompts, last] if self.fault.plain_acceptance else p
            probability = self.fault.willing * judged[row, draft] / q[row, draft]
            if self.fault.typical:
                entropy = special.entr(judged).sum(axis=1)
                probability = judged[row, draft] > np.minimum(0.09, 0.3 * np.exp(-entropy))
            numbers = rng.random(num_rows)
            accepted = numbers < probability
            fresh = numbers if self.fault.shared_number else rng.random(num_rows)
            residual = np.maximum(p - q, 0)
            empty = residual.sum(axis=1) == 0
            residual = np.where(empty[:, None], p, residual)
            from_target = empty | (rng.random(num_rows) < self.fault.unreduced)
            redrawn = np.where(from_target, _draw(p, fresh), _draw(residual, fresh))
            emitted[running, position] = np.where(accepted, draft, redrawn)[running]
            counts[running] += 1
            running &= accepted
            before = last
            last = draft
        bonus = self._warped(self.target[prompts, before if self.fault.stale_bonus else last])
        emitted[running, -1] = _draw(bonus, rng.random(num_rows))[running]
        counts[running] += 1
        return emitted, counts

    def _warped(self, p: Float[np.ndarray, "n V"]) -> Float[np.ndarray, "n V"]:
        """Returns distributions after the nucleus."""
        if self.sampling.top_p == 1:
            return p
        order = np.argsort(-p, axis=1)
        ranked = np.take_along_axis(p, order, axis=1)
        is_kept = ranked.cumsum(axis=1) - ranked < self.sampling.top_p
        nucleus = np.zeros_like(p)
        np.put_along_axis(nucleus, order, np.where(is_kept, ranked, 0), axis=1)
        return nucleus / nucleus.sum(axis=1, keepdims=True)

    def _reported(
        self, prompts: Int[np.ndarray, " R"], tokens: Int[np.ndarray, "R T"], chunk_index: Int[np.ndarray, "R T"]
    ) -> Draws:
        """Returns the tokens with the likeliest tokens of their positions, before the warpers."""
        before = np.column_stack([np.zeros(len(tokens), int), tokens[:, :-1]])
        p = self.target[prompts[:, None], before].reshape(tokens.size, -1)
        ids = np.argsort(-p, axis=1)[:, :NUM_REPORTED]
        return Draws.of_answers(
            tokens.tolist(),
            prompts=prompts.tolist(),
            requests=range(len(tokens)),
            chunk_index=chunk_index.tolist(),
            ids=ids,
            log_probs=np.log(np.take_along_axis(p, ids, axis=1)),
            sampling=self.sampling,
        )


def _draw(p: Float[np.ndarray, "n V"], numbers: Float[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Returns a token of each distribution by inversion; probabilities may have any sum."""
    cumulated = p.cumsum(axis=1)
    return (cumulated > (numbers * cumulated[:, -1])[:, None]).argmax(axis=1)
