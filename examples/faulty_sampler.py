"""A speculative sampler with errors to inject, which shows what a certificate sees.

It draws from random distributions over a small vocabulary, as a chain of drafts does, and reports
the target's distribution for each token as a server would.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special, stats

from eagle3_jax.certify.source import Completion, Report
from eagle3_jax.certify.statistics import Draws, Sampling
from eagle3_jax.measure.frequencies import ALPHA

NUM_PROMPTS = 4
NUM_REPORTED = 20
PROMPTS = [[number] for number in range(NUM_PROMPTS)]


@dataclasses.dataclass(frozen=True)
class Fault:
    """What a sampler does wrong.

    Attributes:
        likeliest: Whether the drafter proposes its likeliest token, as if it had a probability of
            1; else it draws.
        greedy_drafts: Proposes the likeliest token and judges it as if it had been sampled.
        typical: Accepts what is likelier than a threshold of Medusa's instead of ``min(1, p/q)``.
        draft_temperature: Temperature of the drafts, which are declared as sampled at 1.
        plain_acceptance: Applies the nucleus to redraws only, not to acceptance.
        stale_bonus: Draws the token behind the drafts from the distribution of the position before.
        shared_number: Redraws with the random number that refused the draft.
        willing: Factor of the probability of acceptance; infinity accepts every draft.
        unreduced: Share of the redraws that come from ``p`` instead of the residual.
    """

    likeliest: bool = False
    greedy_drafts: bool = False
    typical: bool = False
    draft_temperature: float = 1.0
    plain_acceptance: bool = False
    stale_bonus: bool = False
    shared_number: bool = False
    willing: float = 1.0
    unreduced: float = 0.0

    @property
    def sampling(self) -> Sampling:
        """The settings at which the fault shows."""
        return Sampling(top_p=0.9) if self.plain_acceptance else Sampling()


FAULTS: Mapping[str, Fault] = {
    "greedy drafts judged as if sampled": Fault(greedy_drafts=True),
    "typical acceptance": Fault(typical=True),
    "drafts sampled at T 0.7 and declared at 1": Fault(draft_temperature=0.7),
    "nucleus applied to the redraw, not to acceptance": Fault(plain_acceptance=True),
    "bonus sampled from the position before": Fault(stale_bonus=True),
    "redrawn from p, not from the residual": Fault(unreduced=1.0),
    "one random number to accept and to redraw": Fault(shared_number=True),
    "every draft accepted": Fault(willing=math.inf),
    "20 % too willing to accept": Fault(willing=1.2),
    "residual mixed with 30 % of p": Fault(unreduced=0.3),
    "likeliest draft, every one accepted": Fault(likeliest=True, willing=math.inf),
    "likeliest draft, typical acceptance": Fault(likeliest=True, typical=True),
    "likeliest draft, 20 % too willing": Fault(likeliest=True, willing=1.2),
    "likeliest draft, 10 % too willing": Fault(likeliest=True, willing=1.1),
    "likeliest draft, 5 % too willing": Fault(likeliest=True, willing=1.05),
    "likeliest draft, redrawn from p": Fault(likeliest=True, unreduced=1.0),
    "likeliest draft, residual mixed with 30 % of p": Fault(likeliest=True, unreduced=0.3),
    "likeliest draft, residual mixed with 10 % of p": Fault(likeliest=True, unreduced=0.1),
}
CORRECT = Fault()


class FaultySampler:
    """A target, a drafter that resembles it, and a chain of drafts.

    Attributes:
        first: ``[prompts, V]``, the target's distribution of the first token of an answer.
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
        sureness: float = 0.95,
        seed: int = 0,
    ) -> None:
        """Draws the distributions.

        Args:
            fault: The error to inject.
            sampling: Temperature and nucleus; default: those of the fault.
            vocab_size: Number of tokens.
            num_speculative_tokens: Length of a chain.
            error: Standard deviation of the drafter's logits around the target's.
            sureness: Probability of the likeliest first token.
            seed: Seed of the distributions.
        """
        rng = np.random.default_rng(seed)
        shape = (NUM_PROMPTS, vocab_size, vocab_size)
        logits = 2.0 * rng.standard_normal(shape)
        draft_logits = logits + error * rng.standard_normal(shape)

        # A first token that is nearly sure makes the texts behind it repeat.
        self.target = special.softmax(logits, axis=-1)
        self.first = (
            sureness * np.eye(vocab_size)[np.arange(NUM_PROMPTS) % vocab_size]
            + (1 - sureness) * self.target[:, 0]
        )

        self.draft = special.softmax(draft_logits, axis=-1)
        self.draft_source = special.softmax(draft_logits / fault.draft_temperature, axis=-1)
        likeliest = np.eye(vocab_size)[self.draft.argmax(axis=-1)]
        if fault.likeliest:
            self.draft = likeliest
        if fault.likeliest or fault.greedy_drafts:
            self.draft_source = likeliest

        self.sampling = fault.sampling if sampling is None else sampling
        self.fault = fault
        self._length = num_speculative_tokens

    def draws(self, num_requests: int, max_new_tokens: int, *, seed: int = 0) -> Draws:
        """Returns the tokens of requests, whose prompts take turns, as a client sees them."""
        prompts = np.arange(num_requests) % NUM_PROMPTS
        tokens, chunk_index = self.answer(prompts, max_new_tokens, seed=seed)
        return self.reported(prompts, tokens, chunk_index)

    def answer(
        self, prompts: np.ndarray, max_new_tokens: int, *, seed: int, start: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens ``[R T]`` of answers, and the position of each in its chunk.

        Args:
            prompts: ``[R]`` numbers of prompts.
            max_new_tokens: ``T``.
            seed: Of the random numbers.
            start: The first token; ``None`` to draw it.
        """
        rng = np.random.default_rng(seed)
        num_requests = len(prompts)
        tokens = np.full((num_requests, max_new_tokens + self._length + 1), -1)
        chunk_index = np.zeros_like(tokens)
        lengths = np.ones(num_requests, int)
        first = draw(self._warped(self.first[prompts]), rng.random(num_requests))
        tokens[:, 0] = first if start is None else start

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
        self, prompts: np.ndarray, last: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of one round ``[R K+1]`` and how many there are.

        Without a fault it is Leviathan's rule (Leviathan et al., 2023, algorithm 1), a chain of
        ``eagle3_jax.acceptance``. It is written again here, since a fault changes its inside.
        """
        num_rows = len(prompts)
        emitted = np.full((num_rows, self._length + 1), -1)
        counts = np.zeros(num_rows, int)
        running = np.ones(num_rows, bool)
        row = np.arange(num_rows)

        for position in range(self._length):
            q = self.draft[prompts, last]
            draft = draw(self.draft_source[prompts, last], rng.random(num_rows))
            p = self._warped(self.target[prompts, last])

            # A refused draft is redrawn from the residual, max(p - q, 0).
            numbers = rng.random(num_rows)
            accepted = numbers < self._acceptance(prompts, last)[row, draft]
            fresh = numbers if self.fault.shared_number else rng.random(num_rows)
            from_target = rng.random(num_rows) < self.fault.unreduced
            redrawn = np.where(from_target, draw(p, fresh), draw(_residual(p, q), fresh))

            emitted[running, position] = np.where(accepted, draft, redrawn)[running]
            counts[running] += 1
            running &= accepted
            before = last
            last = draft

        bonus = self._warped(self.target[prompts, before if self.fault.stale_bonus else last])
        emitted[running, -1] = draw(bonus, rng.random(num_rows))[running]
        counts[running] += 1
        return emitted, counts

    def _acceptance(self, prompts: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Returns the probability ``[n V]`` that each token is accepted behind a token ``[n]``."""
        plain = self.target[prompts, last]
        judged = plain if self.fault.plain_acceptance else self._warped(plain)
        if self.fault.typical:
            entropy = special.entr(judged).sum(axis=1, keepdims=True)
            return (judged > np.minimum(0.09, 0.3 * np.exp(-entropy))).astype(float)
        if math.isinf(self.fault.willing):
            return np.ones_like(judged)
        return np.minimum(
            1.0, self.fault.willing * judged / np.maximum(self.draft[prompts, last], 1e-300)
        )

    def emitted(
        self, prompts: np.ndarray, last: np.ndarray, before: np.ndarray, position: int
    ) -> np.ndarray:
        """Returns the exact distribution ``[n V]`` of the token at a position of a round.

        Args:
            prompts: ``[n]`` numbers of prompts.
            last: ``[n]`` the token before.
            before: ``[n]`` the token before that.
            position: Index in the round; the last one is that of the token behind the drafts.
        """
        p = self._warped(self.target[prompts, last])
        if position == self._length:
            return self._warped(self.target[prompts, before]) if self.fault.stale_bonus else p

        # A token comes as an accepted draft, or is redrawn behind a refused one.
        source = self.draft_source[prompts, last]
        accepted = self._acceptance(prompts, last)
        residual = _residual(p, self.draft[prompts, last])
        redrawn = (1 - self.fault.unreduced) * residual + self.fault.unreduced * p
        if not self.fault.shared_number:
            return (
                source * accepted + (source * (1 - accepted)).sum(axis=1, keepdims=True) * redrawn
            )

        # A number in [a, 1), with which the draft was refused, redraws the tokens whose interval it
        # falls into.
        upper = residual.cumsum(axis=1)[:, None]
        lower = upper - residual[:, None]
        lengths = np.maximum(upper - np.maximum(lower, accepted[:, :, None]), 0)
        return source * accepted + (source[:, :, None] * lengths).sum(axis=1)

    def fewest_tokens(
        self, *, num_tokens: int = 20_000, power: float = 0.95, seed: int = 0
    ) -> float:
        """Returns how many tokens a test at ``ALPHA`` needs that knows the fault.

        Such a test sums ``log(p'(x) / p(x))`` for the exact distribution ``p'`` of each position;
        the sum is taken as normal. Where ``p'`` excludes tokens, the sum is compared with ``log(1 /
        ALPHA)``, which needs a few more.
        """
        prompts = np.arange(num_tokens // 32) % NUM_PROMPTS
        tokens, chunk_index = self.answer(prompts, 32, seed=seed)

        # The mean and the variance of the sum's terms, under the fault and without it.
        moments = np.zeros(4)
        count = 0
        for position in range(self._length + 1):
            row, column = np.nonzero(chunk_index[:, 1:] == position)
            last = tokens[row, column]
            before = tokens[row, np.maximum(column - 1, 0)]
            faulty = self.emitted(prompts[row], last, before, position)
            right = self._warped(self.target[prompts[row], last])
            with np.errstate(divide="ignore"):
                ratio = np.log(faulty) - np.log(right)
            is_new = np.isposinf(ratio) & (faulty > 1e-12)
            if is_new.any():
                # A token of probability 0 decides alone; it must come once.
                return float(-np.log(1 - power) / (faulty * is_new).sum(axis=1).mean())

            for index, masses in ((0, faulty), (2, right)):
                values = np.where(masses > 1e-300, ratio, 0.0)
                mean = (masses * values).sum(axis=1)
                moments[index] += mean.sum()
                if np.isfinite(mean).all():
                    moments[index + 1] += ((masses * values**2).sum(axis=1) - mean**2).sum()
            count += len(row)

        faulty_mean, faulty_variance, right_mean, right_variance = moments / count
        z_power = stats.norm.isf(1 - power)
        if np.isfinite(right_mean):
            spread = stats.norm.isf(ALPHA) * math.sqrt(right_variance) + z_power * math.sqrt(
                faulty_variance
            )
            return float((spread / (faulty_mean - right_mean)) ** 2)
        half = z_power * math.sqrt(faulty_variance) / (2 * faulty_mean)
        return float((half + math.sqrt(half**2 - math.log(ALPHA) / faulty_mean)) ** 2)

    def _warped(self, p: np.ndarray) -> np.ndarray:
        """Returns distributions ``[n V]`` after temperature and nucleus."""
        if self.sampling.temperature != 1:
            p = special.softmax(np.log(p) / self.sampling.temperature, axis=1)
        if self.sampling.top_p == 1:
            return p
        order = np.argsort(-p, axis=1)
        ranked = np.take_along_axis(p, order, axis=1)
        is_kept = ranked.cumsum(axis=1) - ranked < self.sampling.top_p
        nucleus = np.zeros_like(p)
        np.put_along_axis(nucleus, order, np.where(is_kept, ranked, 0), axis=1)
        return nucleus / nucleus.sum(axis=1, keepdims=True)

    def reported(
        self,
        prompts: np.ndarray,
        tokens: np.ndarray,
        chunk_index: np.ndarray,
        lengths: np.ndarray | None = None,
    ) -> Draws:
        """Returns tokens with the likeliest tokens of their positions, before the warpers.

        Args:
            prompts: ``[R]`` numbers of prompts.
            tokens: ``[R T]`` the answers.
            chunk_index: ``[R T]`` position of each token in its round.
            lengths: ``[R]`` number of tokens of each answer that are reported; default: all.
        """
        num_answers = len(tokens)
        lengths = np.full(num_answers, tokens.shape[1]) if lengths is None else lengths

        p = np.concatenate(
            [self.first[prompts][:, None], self.target[prompts[:, None], tokens[:, :-1]]], axis=1
        )
        p = p[np.arange(tokens.shape[1]) < lengths[:, None]]
        ids = np.argsort(-p, axis=1)[:, :NUM_REPORTED]
        return Draws.of_answers(
            [tokens[row, : lengths[row]].tolist() for row in range(num_answers)],
            prompts=prompts.tolist(),
            requests=range(num_answers),
            chunk_index=[chunk_index[row, : lengths[row]].tolist() for row in range(num_answers)],
            ids=ids,
            log_probs=np.log(np.take_along_axis(p, ids, axis=1)),
            sampling=self.sampling,
        )


class FaultySource:
    """A sampler as what a certificate asks, without a network; subclasses do more wrong.

    A prompt is ``[p]``, the number of a prompt, and tokens behind it. The first token of an answer
    is not drafted.
    """

    def __init__(
        self,
        sampler: FaultySampler | None = None,
        *,
        processed: bool = False,
        noise: float = 0.0,
        round_to: Callable[[float], float] = float,
        behind_drafts: float = 0.0,
    ) -> None:
        """Keeps a sampler, and how a server reports what it draws from.

        Args:
            sampler: The sampler; default: a correct one.
            processed: Whether log-probabilities are reported after temperature and nucleus.
            noise: Standard deviation of the noise on logits, which is another one in each pass.
            round_to: Rounds a log-probability.
            behind_drafts: Standard deviation of an error of the logits behind drafts, from which
                greedy tokens come.
        """
        self.sampler = sampler or FaultySampler()
        self._processed = processed
        self._noise = noise
        self._round_to = round_to
        self._behind_drafts = behind_drafts
        self._passes = 0
        self.facts: dict[str, Any] = {"model": "fake"}
        self.scoring = "echo"
        self.num_drafts = 0

    def complete(
        self,
        prompt: Sequence[int],
        *,
        num_reported: int,
        max_tokens: int,
        temperature: float,
        seed: int = 0,
        **fields: Any,
    ) -> Completion:
        before = list(prompt[1:])
        number = prompt[0]
        if temperature == 0:
            tokens, chunk_index = self.greedy(number, before, max_tokens)
        else:
            tokens, chunk_index = self.sample(number, before, max_tokens, seed, temperature, fields)
        self.num_drafts += 3 * sum(position == 0 for position in chunk_index[1:])

        reports = []
        for index, token in enumerate(tokens):
            is_drafted = index > 0
            p = self.reported(number, [*before, *tokens[:index]], is_drafted, temperature, fields)
            reports.append(self.report(token, p, num_reported, is_drafted))

        text = "".join(f" {token}" for token in tokens)
        return Completion(
            text=text,
            reports=reports,
            chunk_index=chunk_index,
            prompt_ids=list(prompt),
            finish_reason="length",
        )

    def distribution(self, number: int, before: Sequence[int]) -> np.ndarray:
        """Returns the target's distribution behind a prompt and tokens."""
        return self.sampler.target[number, before[-1]] if before else self.sampler.first[number]

    def sample(
        self,
        number: int,
        before: list[int],
        max_tokens: int,
        seed: int,
        temperature: float,
        fields: dict[str, Any],
    ) -> tuple[list[int], list[int]]:
        """Returns sampled tokens, and the position of each in its round."""
        start = self.first_sampled(
            self.warped(self.distribution(number, before), temperature, fields), seed
        )
        tokens, chunk_index = self.sampler.answer(
            np.array([number]), max_tokens, seed=self.seed(seed), start=start
        )
        return tokens[0].tolist(), chunk_index[0].tolist()

    def seed(self, seed: int) -> int:
        """Returns the seed that is used for a request's seed."""
        return seed

    def warped(self, p: np.ndarray, temperature: float, fields: dict[str, Any]) -> np.ndarray:
        """Returns a distribution after temperature and nucleus."""
        p = special.softmax(np.log(p) / temperature)
        order = np.argsort(-p)
        is_kept = p[order].cumsum() - p[order] < fields.get("top_p", 1.0)
        masses = np.zeros_like(p)
        masses[order[is_kept]] = p[order[is_kept]]
        return masses / masses.sum()

    def first_sampled(self, p: np.ndarray, seed: int) -> int:
        """Returns the first token of an answer, which is not drafted."""
        return int(np.random.default_rng([self.seed(seed), 7]).choice(len(p), p=p))

    def greedy(
        self, number: int, before: list[int], max_tokens: int
    ) -> tuple[list[int], list[int]]:
        """Returns the likeliest tokens."""
        tokens: list[int] = []
        for _ in range(max_tokens):
            tokens.append(
                int(self.reported(number, [*before, *tokens], bool(tokens), 0.0, {}).argmax())
            )
        return tokens, [0, *(position % 4 for position in range(max_tokens - 1))]

    def reported(
        self,
        number: int,
        before: list[int],
        is_drafted: bool,
        temperature: float,
        fields: dict[str, Any],
    ) -> np.ndarray:
        """Returns the distribution that is reported of a position."""
        p = self.distribution(number, before)
        if self._behind_drafts and is_drafted:
            p = noisy(p, self._behind_drafts, seed=before[-1])
        return self.warped(p, temperature, fields) if self._processed and temperature else p

    def report(self, token: int, p: np.ndarray, num_reported: int, is_drafted: bool) -> Report:
        """Returns the report of a token."""
        self._passes += 1
        p = noisy(p, self._noise, seed=self._passes) if self._noise else p
        with np.errstate(divide="ignore"):
            log_probs = np.maximum(np.log(p), -9999.0)
        listed = {*np.argsort(-log_probs)[:num_reported].tolist(), token}
        top = {likely: self._round_to(float(log_probs[likely])) for likely in listed}
        return Report(token, top[token], top)

    def score(
        self, prompt: Sequence[int], completion: Completion, *, num_reported: int
    ) -> list[Report]:
        tokens = completion.tokens
        scored = []
        for index, token in enumerate(tokens):
            p = self.scored(prompt[0], [*prompt[1:], *tokens[:index]])
            scored.append(self.report(token, p, num_reported, False))
        return scored

    def scored(self, number: int, before: list[int]) -> np.ndarray:
        """Returns the distribution of a position by which a token is scored."""
        return self.distribution(number, before)

    def apart(self) -> dict[str, Any]:
        """Returns nothing: nothing is cached."""
        return {}

    def counters(self) -> dict[str, Any]:
        return {"num_draft_tokens": self.num_drafts}


def noisy(p: np.ndarray, size: float, seed: int) -> np.ndarray:
    """Returns a distribution with normal noise on its logits."""
    rng = np.random.default_rng(seed)
    return special.softmax(np.log(p) + size * rng.standard_normal(len(p)))


def to_bfloat16(value: float) -> float:
    """Returns the nearest value of bfloat16."""
    bits = np.float32(value).view(np.uint32) + np.uint32(0x8000) & np.uint32(0xFFFF0000)
    return float(bits.view(np.float32))


def _residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Returns what is left of ``p`` behind a refused draft, and ``p`` where nothing is."""
    masses = np.maximum(p - q, 0)
    total = masses.sum(axis=1, keepdims=True)
    return np.where(total > 0, masses / np.maximum(total, 1e-300), p)


def draw(p: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns a token of each distribution ``[n V]`` by inversion."""
    cumulated = p.cumsum(axis=1)
    return (cumulated > (numbers * cumulated[:, -1])[:, None]).argmax(axis=1)
