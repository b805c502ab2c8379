"""Tests whether tokens follow the distributions that were reported for their positions.

A token is sampled after everything before it is known. So under a correct sampler its place in the
reported distribution is uniform on [0, 1] and independent of all earlier places (Rosenblatt, 1952),
whatever the prompts and the drafts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import special, stats

from eagle3_jax.certify.bets import bet_on_frequencies, bet_on_one_token
from eagle3_jax.certify.source import ZERO, counted
from eagle3_jax.measure.frequencies import Contrast, fit_counts

PLACES = 20  # cells of the test of places
PAIR_PLACES = 5  # cells of each place of a pair
FEWEST = 200  # tokens below which a group is not judged on its own
LAST_COUNTED = 6  # tokens are counted behind texts of at most this many tokens after the prompt
# difference of log-probabilities at which rounding may decide what belongs to a nucleus
_EDGE = 1e-4


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are to be sampled.

    Attributes:
        temperature: Above 0.
        top_k: Number of likeliest tokens to keep; 0 keeps all.
        top_p: Mass of the smallest set of likeliest tokens to keep.
        min_p: Probability that a token needs, as a share of the likeliest token's; 0 keeps all.
        processed: Whether reported log-probabilities are those after all of these; else before.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    processed: bool = False

    def check(self, num_reported: int) -> None:
        """Refuses a setting whose distribution the reports do not determine.

        Raises:
            ValueError: A value is out of range, or reports before the warpers do not show where the
                nucleus ends.
        """
        is_valid = (
            0 < self.temperature < math.inf
            and self.top_k >= 0
            and 0 < self.top_p <= 1
            and 0 <= self.min_p < 1
        )
        if not is_valid:
            raise ValueError(
                f"cannot sample with temperature {self.temperature}, top-k {self.top_k}, top-p"
                f" {self.top_p}, min-p {self.min_p}; expected a temperature above 0, top-k of at"
                " least 0, top-p in (0, 1], min-p in [0, 1)"
            )

        # A nucleus is a share of the whole distribution. The reports give its total if they are of
        # this distribution, or hold all that top-k keeps.
        is_whole = self.temperature == 1 and self.top_k == 0 and self.min_p == 0
        reported_all = 0 < self.top_k <= num_reported
        if self.top_p < 1 and not (self.processed or is_whole or reported_all):
            raise ValueError(
                f"top-p {self.top_p} at temperature {self.temperature} with top-k {self.top_k}:"
                f" {num_reported} log-probabilities before these do not show where the nucleus"
                " ends; sample at temperature 1 without top-k, or with a top-k of at most"
                f" {num_reported}, or let the server report processed log-probabilities"
            )

    def distributions(
        self, log_probs: np.ndarray, *, edge: float = _EDGE
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the distributions that tokens are sampled from, and which are determined.

        Args:
            log_probs: ``[n L]`` reported log-probabilities, the likeliest first; ``-inf`` where
                fewer were reported.
            edge: Difference of log-probabilities at which rounding may decide what is kept.

        Returns:
            ``[n L+1]`` probabilities, the last of all tokens that were not reported: not a number
            where only the proportions of the reported ones are known. And ``[n]``, False where
            rounding decides what is kept.
        """
        is_determined = np.ones(len(log_probs), bool)
        probs = np.exp(log_probs)
        # Behind a reported token of probability 0 no other has a probability.
        is_exhausted = (log_probs <= ZERO).any(axis=1)
        others = np.where(is_exhausted, 0.0, np.maximum(1 - probs.sum(axis=1), 0))
        if self.processed:
            return np.column_stack([probs, others]), is_determined

        # Temperature, min-p, top-k and top-p follow in vLLM's order. At another temperature only
        # the proportions of the reported tokens are known.
        if self.temperature != 1 or self.top_k > 0:
            probs = special.softmax(log_probs / self.temperature, axis=1)
            others = np.full(len(probs), math.nan)

        if self.min_p > 0:
            distance = np.log(np.maximum(probs, 1e-300)) - np.log(self.min_p * probs[:, :1])
            is_determined &= (np.abs(distance) > edge).all(axis=1)
            probs = _kept(probs, distance > 0)
            others = np.where(distance[:, -1] > 0, math.nan, 0.0)

        if 0 < self.top_k <= log_probs.shape[1]:
            if self.top_k < log_probs.shape[1]:
                is_determined &= log_probs[:, self.top_k - 1] - log_probs[:, self.top_k] > edge
            probs = _kept(probs, np.arange(log_probs.shape[1]) < self.top_k)
            others = np.zeros(len(probs))

        if self.top_p < 1:
            before = probs.cumsum(axis=1) - probs
            is_determined &= (np.abs(before - self.top_p) > edge).all(axis=1)

            # A nucleus that does not end among the reported tokens holds all of these, in their
            # proportions.
            others = np.where(probs.sum(axis=1) > self.top_p + edge, 0.0, math.nan)
            probs = _kept(probs, before < self.top_p)

        return np.column_stack([probs, others]), is_determined


def _kept(probs: np.ndarray, is_kept: np.ndarray) -> np.ndarray:
    """Returns ``[n L]`` probabilities without the tokens that are not kept."""
    masses = np.where(is_kept, probs, 0)
    return masses / masses.sum(axis=1, keepdims=True)


def resolution(log_probs: np.ndarray) -> float:
    """Returns the distance of neighbouring values in nats if these are on a grid; else 0."""
    values = np.abs(log_probs[(log_probs > ZERO) & (log_probs != 0)])
    if len(values) < FEWEST:
        return 0.0

    for digits in (1, 2, 3, 4):
        if np.allclose(values * 10**digits, np.round(values * 10**digits), rtol=0, atol=1e-6):
            return 10.0**-digits

    # A bfloat16 is a float32 whose last 16 bits are 0; neighbours differ by 2⁻⁷ relatively.
    is_bfloat16 = not (values.astype(np.float32).view(np.uint32) & 0xFFFF).any()
    return float(2.0**-7 * values.mean()) if is_bfloat16 else 0.0


@dataclasses.dataclass(frozen=True)
class Draws:
    """Sampled tokens with the reported distributions of their positions.

    Attributes:
        probs: ``[n C]`` probability of each reported token, and of all others together in the last
            column.
        ids: ``[n C-1]`` the reported tokens.
        tokens: ``[n]`` the sampled tokens.
        prompts: ``[n]`` number of each token's prompt.
        requests: ``[n]`` number of its request.
        index: ``[n]`` its position behind the prompt, from 0.
        chunk_index: ``[n]`` its position in the chunk of tokens that came at once, from 0.
        texts: ``[n]`` number of the text before it, from 0: the prompt and the tokens behind it; -1
            where that is too long.
        coarseness: Distance of neighbouring log-probabilities in the reports, in nats; 0 if they
            lie on no grid.
    """

    probs: np.ndarray
    ids: np.ndarray
    tokens: np.ndarray
    prompts: np.ndarray
    requests: np.ndarray
    index: np.ndarray
    chunk_index: np.ndarray
    texts: np.ndarray
    coarseness: float = 0.0

    @classmethod
    def of_answers(
        cls,
        answers: Sequence[Sequence[int]],
        *,
        prompts: Sequence[int],
        requests: Sequence[int],
        chunk_index: Sequence[Sequence[int]],
        ids: np.ndarray,
        log_probs: np.ndarray,
        sampling: Sampling,
    ) -> Draws:
        """Returns the tokens of answers where the reports determine their distribution.

        Args:
            answers: The tokens of each answer.
            prompts: Number of its prompt.
            requests: Number of its request.
            chunk_index: Position of each token of the answer in its chunk.
            ids: ``[n L]`` the reported tokens of each position of all answers; -1 where fewer were
                reported.
            log_probs: ``[n L]`` their log-probabilities, the likeliest first; not a number where
                nothing can be read.
            sampling: How the tokens were sampled.
        """
        is_readable = np.logical_not(np.isnan(log_probs).any(axis=1))
        coarseness = resolution(log_probs[is_readable])
        edge = max(_EDGE, coarseness)
        probs, is_determined = sampling.distributions(
            np.where(is_readable[:, None], log_probs, 0), edge=edge
        )

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
            coarseness=coarseness,
        )
        return draws[is_determined & is_readable]

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    def __getitem__(self, chosen: np.ndarray) -> Draws:
        """The tokens that a mask ``[n]`` chooses."""
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        coarseness = columns.pop("coarseness")
        return Draws(
            **{name: column[chosen] for name, column in columns.items()}, coarseness=coarseness
        )

    @functools.cached_property
    def cells(self) -> np.ndarray:
        """``[n]`` the column of ``probs`` that each token is in."""
        is_token = self.ids == self.tokens[:, None]
        return np.where(is_token.any(axis=1), is_token.argmax(axis=1), self.ids.shape[1])

    @functools.cached_property
    def masses(self) -> np.ndarray:
        """``[n]`` the probability of each token's cell."""
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
        is_controlled: Whether the comparison is with tokens without drafts, so that its failure
            needs no control.
    """

    __test__ = False  # not a test of pytest's

    name: str
    p_value: float
    tokens: int
    detail: str
    is_controlled: bool = False


def judge(draws: Draws, *, seed: int = 0) -> list[Test]:
    """Compares sampled tokens with the reported distributions.

    Args:
        draws: The tokens.
        seed: Seed of the random numbers that split a token's probability.
    """
    num_sampled = len(draws)
    draws = draws.known()
    if not len(draws):
        return []

    # Where only the proportions of the reported tokens are known, theirs is the distribution.
    probs = np.nan_to_num(draws.probs)
    total = probs.sum(axis=1, keepdims=True)
    probs = probs / np.maximum(total, 1e-300)

    # A token covers a piece of [0, 1], in which its place is random.
    before = np.where(np.arange(probs.shape[1]) < draws.cells[:, None], probs, 0).sum(axis=1)
    numbers = np.random.default_rng(seed).random(len(draws))
    within = np.take_along_axis(probs, draws.cells[:, None], axis=1)[:, 0]
    places = np.clip(before + numbers * within, 0, 1 - 1e-12)

    tests = [
        _uniform("places in the distribution", places),
        _likelihood(probs, draws.cells),
        *_unreported(draws),
        _favoured(draws, probs),
    ]

    num_excluded = int(_is_excluded(draws).sum())
    if num_excluded:
        detail = f"tokens of probability 0 that were written: {num_excluded:,}"
        tests.append(Test("excluded tokens", 0.0, num_sampled, detail))

    # An error of the acceptance rule shows at the positions of a round unequally.
    for position in np.unique(draws.chunk_index) if draws.chunk_index.any() else []:
        chosen = draws.chunk_index == position
        if chosen.sum() >= FEWEST:
            tests.append(_uniform(f"places, token {position + 1} of a chunk", places[chosen]))

    tests += [_pairs(draws, places), _contexts(draws, probs)]
    has_whole_texts = np.ptp(draws.index) > 0
    if has_whole_texts:
        tests.append(_repetitions(draws, within))
    return [test for test in tests if test.tokens]


def _is_excluded(draws: Draws) -> np.ndarray:
    """Returns which tokens the warpers exclude ``[n]``.

    A token that is not reported may have rounded to the probability 0, unless a reported one has it
    already.
    """
    is_reported = draws.cells < draws.ids.shape[1]
    is_exhausted = (draws.probs[:, :-1] == 0).any(axis=1)
    return (draws.masses == 0) & (is_reported | is_exhausted)


def _uniform(name: str, places: np.ndarray, num_cells: int = PLACES) -> Test:
    """Compares values with the uniform distribution on [0, 1]."""
    if len(places) < FEWEST:
        return Test(name, 1.0, 0, "too few tokens")
    counts = np.bincount((places * num_cells).astype(int), minlength=num_cells)
    fit = fit_counts(counts, np.full(num_cells, len(places) / num_cells))
    detail = chi_square_in_words(fit.statistic, fit.degrees)
    return Test(name, fit.chi_square, len(places), detail)


def chi_square_in_words(statistic: float, degrees: int) -> str:
    """Returns a statistic with its expectation and its standard deviation."""
    return f"χ² = {statistic:.1f}, expected {degrees} ± {math.sqrt(2 * degrees):.0f}"


def _likelihood(probs: np.ndarray, cells: np.ndarray) -> Test:
    """Compares log-probabilities with their expectation, which sees text that is too sure."""
    contrast = Contrast()
    contrast.add_log_probabilities(probs, cells)
    tokens = len(cells) if contrast.is_normal else 0

    often = "more" if contrast.total > 0 else "less"
    likeliest = (cells == 0).mean() if tokens else 0
    expected = probs[:, 0].mean() if tokens else 0
    detail = (
        f"{likeliest:.1%} are the likeliest token, expected {expected:.1%}; likely tokens came"
        f" {often} often than expected, by {abs(contrast.z):.1f} σ"
    )
    return Test("log-probabilities of the tokens", contrast.p_value, tokens, detail)


def _unreported(draws: Draws) -> Iterator[Test]:
    """Compares how many tokens are not among the reported ones with the mass that those leave."""
    masses = draws.probs[:, -1]
    can_be = ~(draws.probs[:, :-1] == 0).any(axis=1) & ~np.isnan(masses)
    masses = masses[can_be]
    expected = float(masses.sum())

    # A log-probability may be off by half of the grid's distance, so a probability by that share.
    rounding = draws.coarseness / 2
    if not len(masses) or expected + rounding * len(masses) < 1:
        return

    count = int((draws.cells[can_be] == draws.ids.shape[1]).sum())
    # A binomial bounds the tails of a sum of unlike Bernoulli variables with the same mean
    # (Hoeffding, 1956).
    least = max(0.0, expected / len(masses) - rounding)
    most = min(1.0, expected / len(masses) + rounding)
    tail = min(
        stats.binom.cdf(count, len(masses), least), stats.binom.sf(count - 1, len(masses), most)
    )
    p_value = min(1.0, 2 * float(tail))
    yield Test(
        "tokens not among the reported",
        p_value,
        len(masses),
        f"{counted(count, 'token')}, expected {expected:,.1f}",
    )


def _pairs(draws: Draws, places: np.ndarray) -> Test:
    """Compares pairs of consecutive places with independent ones, as reused numbers do not give."""
    # Every token is in at most one pair, so that pairs are independent of one another.
    first = np.flatnonzero(
        (draws.requests[:-1] == draws.requests[1:])
        & (draws.index[:-1] + 1 == draws.index[1:])
        & (draws.index[:-1] % 2 == 1)
    )

    rows = (places[first] * PAIR_PLACES).astype(int)
    columns = (places[first + 1] * PAIR_PLACES).astype(int)
    cells = (PAIR_PLACES * rows + columns + 0.5) / PAIR_PLACES**2
    return _uniform("pairs of places", cells, PAIR_PLACES**2)


def _favoured(draws: Draws, probs: np.ndarray) -> Test:
    """Bets that acceptance favours or neglects one token behind each text: the draft."""
    bet = bet_on_one_token(probs, draws.cells, draws.texts)
    return Test("one token too often, by bets", bet.p_value, len(draws), bet.detail)


def _contexts(draws: Draws, probs: np.ndarray) -> Test:
    """Compares tokens behind the same text with its distribution."""
    counts = counts_behind_texts(draws, probs)
    bet = bet_on_frequencies(*counts)
    return Test(
        "counts behind the same text",
        bet.p_value,
        int(counts[0].sum()),
        f"{counted(len(counts[0]), 'text')} came more than once; {bet.detail}",
    )


def counts_behind_texts(draws: Draws, probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each text that came more than once the counts behind it, and its distribution.

    Both are ``[texts C]``. The distribution is that of the text's first token; the others' cells
    are found by ids.
    """
    chosen = np.flatnonzero(draws.texts >= 0)
    _, first, number, size = np.unique(
        draws.texts[chosen], return_index=True, return_inverse=True, return_counts=True
    )
    rows = chosen[first]

    is_token = draws.ids[rows[number]] == draws.tokens[chosen, None]
    cells = np.where(is_token.any(axis=1), is_token.argmax(axis=1), draws.ids.shape[1])
    counts = np.zeros((len(rows), probs.shape[1]))
    np.add.at(counts, (number, cells), 1)
    return counts[size > 1], probs[rows[size > 1]]


def _repetitions(draws: Draws, within: np.ndarray) -> Test:
    """Tests whether requests of a prompt, with unlike seeds, wrote the same unlikely text.

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

    # The bound of one pair, times the number of pairs (Bonferroni).
    repeated = [max(values) for values in texts.values() if len(values) > 1]
    pairs = sum(math.comb(number, 2) for number in requests.values())
    p_value = min(1.0, pairs * math.exp(min(repeated, default=0.0)))
    detail = (
        f"texts that came more than once: {len(repeated):,}, of {counted(len(starts), 'request')}"
    )
    return Test("texts of unlike seeds", p_value, len(draws) if pairs else 0, detail)


def number_texts(prompts: Sequence[int], answers: Sequence[Sequence[int]]) -> list[list[int]]:
    """Numbers the text before each token of each answer.

    A text of more than ``LAST_COUNTED`` tokens behind the prompt has the number -1.
    """
    numbers: dict[tuple[int, ...], int] = {}
    counted = []
    for prompt, answer in zip(prompts, answers, strict=True):
        before = [(prompt, *answer[:index]) for index in range(min(len(answer), LAST_COUNTED + 1))]
        known = [numbers.setdefault(text, len(numbers)) for text in before]
        counted.append(known + [-1] * (len(answer) - len(known)))
    return counted
