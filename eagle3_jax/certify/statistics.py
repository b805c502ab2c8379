"""Tests whether tokens follow the distributions that a server reported for their positions.

A token is sampled after everything before it is known. So under a correct sampler its place in the reported
distribution is uniform on [0, 1] and independent of all earlier places, whatever the prompts and the drafts.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import special, stats

from eagle3_jax.testing.frequencies import Contrast, fit_counts, smallest_deviation

PLACES = 20  # cells of the test of places
PAIR_PLACES = 5  # cells of each place of a pair
FEWEST = 200  # tokens below which a group is not judged on its own
LAST_COUNTED = 6  # tokens are counted behind texts of at most this many tokens after the prompt
_EDGE = 1e-4  # distance from a nucleus' end at which rounding may decide what belongs to it
_CONCENTRATIONS = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)  # of the alternatives that contexts are tested against


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a server is asked to sample.

    Attributes:
        temperature: Above 0.
        top_k: Number of likeliest tokens to keep; 0 keeps all.
        top_p: Mass of the smallest set of likeliest tokens to keep.
        processed: Whether reported log-probabilities are those after temperature, top-k and top-p; else before.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    processed: bool = False

    def check(self, num_reported: int) -> None:
        """Refuses a setting whose distribution the reports do not determine.

        Raises:
            ValueError: A value is out of range, or reports before the warpers do not show where the nucleus ends.
        """
        if not (0 < self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(
                f"cannot sample with temperature {self.temperature}, top-k {self.top_k}, top-p {self.top_p}; "
                "expected a temperature above 0, top-k of at least 0 and top-p in (0, 1]"
            )
        is_whole = self.temperature == 1 and self.top_k == 0
        reported_all = 0 < self.top_k <= num_reported
        if self.top_p < 1 and not (self.processed or is_whole or reported_all):
            raise ValueError(
                f"top-p {self.top_p} at temperature {self.temperature} with top-k {self.top_k}: {num_reported} "
                "log-probabilities before these do not show where the nucleus ends; sample at temperature 1 without "
                f"top-k, or with a top-k of at most {num_reported}, or let the server report processed "
                "log-probabilities (--reports processed)"
            )

    def distributions(self, log_probs: Float[np.ndarray, "n L"]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the distributions that tokens are sampled from, and which of them the reports determine.

        Args:
            log_probs: Reported log-probabilities, the likeliest first; ``-inf`` where fewer were reported.

        Returns:
            ``[n L+1]`` probabilities, the last of all tokens that were not reported: not a number where only the
            proportions of the reported ones are known. And ``[n]``, False where rounding decides what is kept.
        """
        determined = np.ones(len(log_probs), bool)
        probs = np.exp(log_probs)
        unreported = np.maximum(1 - probs.sum(axis=1), 0)
        if self.processed:
            return np.column_stack([probs, unreported]), determined
        if self.temperature != 1 or self.top_k > 0:
            probs = special.softmax(log_probs / self.temperature, axis=1)
            unreported = np.full(len(probs), math.nan)
        if 0 < self.top_k <= log_probs.shape[1]:
            if self.top_k < log_probs.shape[1]:
                determined &= log_probs[:, self.top_k - 1] - log_probs[:, self.top_k] > _EDGE
            probs = probs * (np.arange(log_probs.shape[1]) < self.top_k)
            probs = probs / probs.sum(axis=1, keepdims=True)
            unreported = np.zeros(len(probs))
        if self.top_p < 1:
            before = probs.cumsum(axis=1) - probs
            determined &= (np.abs(before - self.top_p) > _EDGE).all(axis=1) & (probs.sum(axis=1) > self.top_p)
            probs = np.where(before < self.top_p, probs, 0)
            probs = probs / probs.sum(axis=1, keepdims=True)
            unreported = np.zeros(len(probs))
        return np.column_stack([probs, unreported]), determined


@dataclasses.dataclass(frozen=True)
class Draws:
    """Sampled tokens with the reported distributions of their positions.

    Attributes:
        probs: Probability of each reported token, and of all others together in the last column.
        ids: The reported tokens.
        tokens: The sampled tokens.
        prompts: Number of each token's prompt.
        requests: Number of its request.
        index: Its position behind the prompt, from 0.
        chunk_index: Its position in the chunk of tokens that the server sent at once, from 0.
        texts: Number of the text before it, from 0: the prompt and the tokens behind it; -1 where that is too long.
    """

    probs: Float[np.ndarray, "n C"]
    ids: Int[np.ndarray, "n C-1"]
    tokens: Int[np.ndarray, " n"]
    prompts: Int[np.ndarray, " n"]
    requests: Int[np.ndarray, " n"]
    index: Int[np.ndarray, " n"]
    chunk_index: Int[np.ndarray, " n"]
    texts: Int[np.ndarray, " n"]

    @classmethod
    def of_answers(
        cls,
        answers: Sequence[Sequence[int]],
        *,
        prompts: Sequence[int],
        requests: Sequence[int],
        chunk_index: Sequence[Sequence[int]],
        ids: Int[np.ndarray, "n L"],
        log_probs: Float[np.ndarray, "n L"],
        sampling: Sampling,
    ) -> Draws:
        """Returns the tokens of answers whose distributions the reports determine.

        Args:
            answers: The sampled tokens of each answer.
            prompts: Number of each answer's prompt.
            requests: Number of its request.
            chunk_index: Position of each token of the answer in its chunk.
            ids: The reported tokens of each position of all answers.
            log_probs: Their log-probabilities, the likeliest first; ``-inf`` where fewer were reported.
            sampling: How the tokens were sampled.
        """
        probs, determined = sampling.distributions(log_probs)
        lengths = [len(answer) for answer in answers]
        draws = cls(
            probs=probs,
            ids=ids,
            tokens=np.concatenate(answers),
            prompts=np.repeat(prompts, lengths),
            requests=np.repeat(requests, lengths),
            index=np.concatenate([np.arange(length) for length in lengths]),
            chunk_index=np.concatenate(chunk_index).astype(int),
            texts=np.concatenate(number_texts(prompts, answers)).astype(int),
        )
        return draws[determined]

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    def __getitem__(self, chosen: Bool[np.ndarray, " n"]) -> Draws:
        """The chosen tokens."""
        return Draws(*(column[chosen] for column in vars(self).values()))

    @property
    def cells(self) -> Int[np.ndarray, " n"]:
        """The column of ``probs`` that each token is in."""
        is_token = self.ids == self.tokens[:, None]
        return np.where(is_token.any(axis=1), is_token.argmax(axis=1), self.ids.shape[1])

    @property
    def masses(self) -> Float[np.ndarray, " n"]:
        """The probability of each token's cell."""
        return np.take_along_axis(self.probs, self.cells[:, None], axis=1)[:, 0]

    def known(self) -> Draws:
        """The tokens whose probability is known: all, or those among the reported ones."""
        return self[~np.isnan(self.masses)]


@dataclasses.dataclass(frozen=True)
class Test:
    """The result of one test.

    Attributes:
        name: What was compared.
        p_value: Probability of a deviation as large from a correct sampler.
        tokens: Number of tokens that were compared.
        detail: What was seen.
        sees: Shift of probability between the cells that would be detected with 90 % power, where it is known.
    """

    __test__ = False  # not a test of pytest's

    name: str
    p_value: float
    tokens: int
    detail: str
    sees: float | None = None


def judge(draws: Draws, *, alpha: float, seed: int = 0) -> list[Test]:
    """Compares sampled tokens with the reported distributions.

    Args:
        draws: The tokens.
        alpha: Significance of one test, for the deviation that it would detect.
        seed: Seed of the random numbers that split a token's probability.
    """
    if not len(draws.known()):
        return []
    impossible = draws.masses == 0
    draws = draws.known()
    probs = np.nan_to_num(draws.probs)
    cells = draws.cells
    before = np.where(np.arange(probs.shape[1]) < cells[:, None], probs, 0).sum(axis=1)
    within = draws.masses
    total = probs.sum(axis=1)
    places = np.clip((before + np.random.default_rng(seed).random(len(draws)) * within) / total, 0, 1 - 1e-12)
    tests = [
        _uniform("places in the distribution", places, alpha),
        _likelihood(probs / total[:, None], cells),
        *_unreported(draws),
    ]
    excluded = int(impossible.sum())
    if excluded:
        tests.append(Test("excluded tokens", 0.0, len(impossible), f"{excluded} tokens of probability 0 were written"))
    for position in np.unique(draws.chunk_index) if draws.chunk_index.any() else []:
        chosen = draws.chunk_index == position
        if chosen.sum() >= FEWEST:
            tests.append(_uniform(f"places, token {position + 1} of a chunk", places[chosen], alpha))
    tests += [_pairs(draws, places, alpha), _contexts(draws, probs)]
    if np.ptp(draws.index):  # whole texts
        tests.append(_repetitions(draws, within))
    return [test for test in tests if test.tokens]


def _uniform(name: str, places: Float[np.ndarray, " n"], alpha: float, num_cells: int = PLACES) -> Test:
    """Compares values with the uniform distribution on [0, 1]."""
    if len(places) < FEWEST:
        return Test(name, 1.0, 0, "too few tokens")
    counts = np.bincount((places * num_cells).astype(int), minlength=num_cells)
    fit = fit_counts(counts, np.full(num_cells, len(places) / num_cells))
    # A shift that moves the mass ε / 2 has at least this noncentrality, whatever cells it is between.
    sees = smallest_deviation(len(places), fit.degrees, alpha=alpha) / 2
    return Test(name, fit.chi_square, len(places), f"χ² {fit.statistic:.1f} on {fit.degrees} degrees", sees)


def _likelihood(probs: Float[np.ndarray, "n C"], cells: Int[np.ndarray, " n"]) -> Test:
    """Compares the log-probabilities of the tokens with their expectation, which sees text that is too sure."""
    contrast = Contrast()
    contrast.add_log_probabilities(probs, cells)
    tokens = len(cells) if contrast.is_normal else 0
    often = "often" if contrast.total > 0 else "seldom"
    likeliest = (cells == 0).mean() if tokens else 0
    expected = probs[:, 0].mean() if tokens else 0
    detail = (
        f"likely tokens too {often} by {abs(contrast.z):.1f} σ; the likeliest {likeliest:.1%}, expected {expected:.1%}"
    )
    return Test("log-probabilities of the tokens", contrast.p_value, tokens, detail)


def _unreported(draws: Draws) -> Iterator[Test]:
    """Compares how many tokens are not among the reported ones with the mass that those leave."""
    masses = draws.probs[:, -1]
    masses = masses[masses > 0]
    expected = float(masses.sum())
    if expected < 1:
        return
    count = int((draws.cells == draws.ids.shape[1]).sum())
    # A binomial bounds the tails of a sum of unlike Bernoulli variables with the same mean (Hoeffding, 1956).
    mean = expected / len(masses)
    tail = min(stats.binom.cdf(count, len(masses), mean), stats.binom.sf(count - 1, len(masses), mean))
    p_value = min(1.0, 2 * float(tail))
    yield Test("tokens not among the reported", p_value, len(masses), f"{count}, expected {expected:.1f}")


def _pairs(draws: Draws, places: Float[np.ndarray, " n"], alpha: float) -> Test:
    """Compares pairs of consecutive places with independent uniform ones, as reused random numbers are not."""
    first = np.flatnonzero(
        (draws.requests[:-1] == draws.requests[1:])
        & (draws.index[:-1] + 1 == draws.index[1:])
        & (draws.index[:-1] % 2 == 1)
    )
    rows = (places[first] * PAIR_PLACES).astype(int)
    columns = (places[first + 1] * PAIR_PLACES).astype(int)
    cells = (PAIR_PLACES * rows + columns + 0.5) / PAIR_PLACES**2
    return _uniform("pairs of places", cells, alpha, PAIR_PLACES**2)


def _contexts(draws: Draws, probs: Float[np.ndarray, "n C"]) -> Test:
    """Compares tokens behind the same text with its distribution, by an e-value.

    The bet is that frequencies behind a text are a Dirichlet sample around its distribution. Its gain is a martingale
    if the distribution is right, so ``1 / gain`` bounds a p-value, however few tokens there are (Ville's inequality).
    """
    order = np.argsort(draws.texts, kind="stable")
    order = order[draws.texts[order] >= 0]
    starts = np.flatnonzero(np.diff(draws.texts[order], prepend=-1))
    gains = np.zeros(len(_CONCENTRATIONS))
    num_texts = 0
    tokens = 0
    for rows in np.split(order, starts[1:]):
        if len(rows) < 2:
            continue
        distribution = probs[rows[0]] / probs[rows[0]].sum()
        is_token = draws.ids[rows[0]] == draws.tokens[rows, None]
        others = ~is_token.any(axis=1)
        counts = np.append(is_token.sum(axis=0), others.sum())
        possible = distribution > 0
        gains += [_log_gain(counts[possible], distribution[possible], scale) for scale in _CONCENTRATIONS]
        num_texts += 1
        tokens += len(rows)
    log_gain = float(np.logaddexp.reduce(gains)) - math.log(len(gains))
    detail = f"{num_texts} texts; a gain of 10^{log_gain / math.log(10):.1f}"
    return Test("counts behind the same text", min(1.0, math.exp(min(0.0, -log_gain))), tokens, detail)


def _log_gain(counts: Int[np.ndarray, " C"], distribution: Float[np.ndarray, " C"], scale: float) -> float:
    """Returns the logarithm of the Dirichlet mixture's likelihood over that of the distribution."""
    mixture = special.gammaln(scale) - special.gammaln(scale + counts.sum())
    mixture += (special.gammaln(counts + scale * distribution) - special.gammaln(scale * distribution)).sum()
    return float(mixture - (counts * np.log(distribution)).sum())


def _repetitions(draws: Draws, within: Float[np.ndarray, " n"]) -> Test:
    """Tests whether requests of the same prompt, with unlike seeds, wrote the same text although it was unlikely.

    Two of them write a same text of probability at most ``x`` with probability at most ``x``.
    """
    texts: dict[tuple[int, bytes], list[float]] = defaultdict(list)
    requests: dict[int, int] = defaultdict(int)
    log_probs = np.log(np.maximum(within, np.finfo(float).tiny))
    starts = np.flatnonzero(np.diff(draws.requests, prepend=-1))
    for rows in np.split(np.arange(len(draws)), starts[1:]):
        prompt = int(draws.prompts[rows[0]])
        texts[prompt, draws.tokens[rows].tobytes()].append(float(log_probs[rows].sum()))
        requests[prompt] += 1
    repeated = [max(values) for values in texts.values() if len(values) > 1]
    pairs = sum(math.comb(number, 2) for number in requests.values())
    p_value = min(1.0, pairs * math.exp(min(repeated, default=0.0)))
    detail = f"{len(repeated)} texts were written more than once by {len(starts)} requests"
    return Test("texts of unlike seeds", p_value, len(draws) if pairs else 0, detail)


def number_texts(prompts: Sequence[int], answers: Sequence[Sequence[int]]) -> list[list[int]]:
    """Numbers the text before each token of each answer; -1 where it has more than ``LAST_COUNTED`` tokens."""
    numbers: dict[tuple[int, ...], int] = {}
    counted = []
    for prompt, answer in zip(prompts, answers, strict=True):
        before = [(prompt, *answer[:index]) for index in range(min(len(answer), LAST_COUNTED + 1))]
        known = [numbers.setdefault(text, len(numbers)) for text in before]
        counted.append(known + [-1] * (len(answer) - len(known)))
    return counted
