"""Theory of the speed-up: tokens per round, cost of a round, break-even.

Publications mean two quantities by "acceptance rate", and each has its own formula. For a chain of
``K`` drafted tokens

* the *draft acceptance rate* ``r`` is accepted over drafted tokens, and ``τ = 1 + K·r`` is an
  identity;
* the *conditional acceptance rate* ``α`` is the probability that a token is accepted given that all
  before it were, and ``τ = (1 - α^(K+1)) / (1 - α)`` if it is the same at every position (Leviathan
  et al., 2023, arXiv 2211.17192, eq. 1).

``τ`` is the mean acceptance length: tokens emitted per round, the bonus or correction included. A
round costs ``v + K·c`` plain steps, ``v`` for verification and ``c`` for each draft pass, so the
speed-up is ``S = τ / (v + K·c)``.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

# Between the conditional acceptance rates 0 and 1, in the search for a rate.
_STEPS = 2**60


def tau_from_draft_rate(draft_acceptance_rate: float, num_draft_tokens: int) -> float:
    """``τ = 1 + K·r``: a round emits its accepted tokens and one more of the verification."""
    _check_rate("draft_acceptance_rate", draft_acceptance_rate)
    return 1.0 + num_draft_tokens * draft_acceptance_rate


def tau_from_conditional_rate(conditional_acceptance_rate: float, num_draft_tokens: int) -> float:
    """``τ = 1 + α + α² + … + α^K = (1 - α^(K+1)) / (1 - α)`` (Leviathan et al., 2023, eq. 1).

    Position ``j`` is accepted with all before it with probability ``α^j``; the leading 1 is the
    token of every round.
    """
    _check_rate("conditional_acceptance_rate", conditional_acceptance_rate)
    return math.fsum(conditional_acceptance_rate**j for j in range(num_draft_tokens + 1))


def draft_rate_from_tau(mean_acceptance_length: float, num_draft_tokens: int) -> float:
    """``r = (τ - 1) / K``, the inverse of :func:`tau_from_draft_rate`."""
    _check_tau(mean_acceptance_length, num_draft_tokens)
    return (mean_acceptance_length - 1.0) / num_draft_tokens


def conditional_rate_from_tau(mean_acceptance_length: float, num_draft_tokens: int) -> float:
    """Finds the ``α`` in [0, 1] whose geometric sum is ``τ``, by bisection."""
    _check_tau(mean_acceptance_length, num_draft_tokens)

    # It increases with α.
    def tau_at(step: int) -> float:
        return tau_from_conditional_rate(step / _STEPS, num_draft_tokens)

    return bisect.bisect_left(range(_STEPS), mean_acceptance_length, key=tau_at) / _STEPS


def round_cost(num_draft_tokens: int, *, verify_cost: float, draft_cost: float) -> float:
    """``v + K·c``: cost of a round in plain steps, which is also the τ at which it breaks even."""
    if not 0 < verify_cost < math.inf or not 0 <= draft_cost < math.inf:
        raise ValueError(
            f"verify_cost is {verify_cost:g} and draft_cost {draft_cost:g}; expected more than 0"
            " and at least 0"
        )
    return verify_cost + num_draft_tokens * draft_cost


def speedup(
    mean_acceptance_length: float, *, num_draft_tokens: int, verify_cost: float, draft_cost: float
) -> float:
    """``S = τ / (v + K·c)``: tokens per round over its cost.

    It is theorem 3.8 of Leviathan et al. (2023), where ``v = 1``.
    """
    _check_tau(mean_acceptance_length, num_draft_tokens)
    return mean_acceptance_length / round_cost(
        num_draft_tokens, verify_cost=verify_cost, draft_cost=draft_cost
    )


@dataclasses.dataclass(frozen=True)
class Rates:
    """The same mean acceptance length under its three names."""

    mean_acceptance_length: float  #: ``τ``.
    draft_acceptance_rate: float  #: ``r = (τ - 1) / K``.
    conditional_acceptance_rate: float  #: The constant ``α`` that gives this ``τ``.


def rates(mean_acceptance_length: float, num_draft_tokens: int) -> Rates:
    """Returns both rates of a mean acceptance length."""
    return Rates(
        mean_acceptance_length,
        draft_rate_from_tau(mean_acceptance_length, num_draft_tokens),
        conditional_rate_from_tau(mean_acceptance_length, num_draft_tokens),
    )


def rates_for_speedup(
    gain: float, *, num_draft_tokens: int, verify_cost: float, draft_cost: float
) -> Rates | None:
    """Returns the rates at which ``S`` is ``gain``: ``τ = S·(v + K·c)``.

    Those of ``S = 1`` are the break-even.

    Returns:
        ``None`` when even ``τ = K + 1``, everything accepted, is not enough. A ``τ`` below 1, which
        is always reached, is given as 1.
    """
    if not 0 < gain < math.inf:
        raise ValueError(f"the wanted speed-up is {gain:g}; expected a positive number")
    tau = gain * round_cost(num_draft_tokens, verify_cost=verify_cost, draft_cost=draft_cost)
    return None if tau > num_draft_tokens + 1 else rates(max(tau, 1.0), num_draft_tokens)


def best_chain_length(
    conditional_acceptance_rate: float,
    *,
    verify_costs: Sequence[float],
    draft_costs: Sequence[float],
) -> int:
    """Returns the ``K`` of the largest ``S``, the smallest of equals; 0 when none exceeds 1.

    The costs are ``v`` and ``c`` for ``K`` = 1, 2, ….
    """
    gains = [1.0]
    for k, (verify_cost, draft_cost) in enumerate(zip(verify_costs, draft_costs, strict=True), 1):
        tau = tau_from_conditional_rate(conditional_acceptance_rate, k)
        gains.append(
            speedup(tau, num_draft_tokens=k, verify_cost=verify_cost, draft_cost=draft_cost)
        )
    return gains.index(max(gains))


def blended_tau(token_shares: Sequence[float], mean_acceptance_lengths: Sequence[float]) -> float:
    """Returns ``τ`` of mixed traffic, ``1 / Σ w_i/τ_i`` with shares ``w_i`` of the output tokens.

    A class that writes ``w_i`` of the tokens needs ``w_i/τ_i`` rounds for each token. Tokens over
    rounds is the harmonic mean: classes weigh by their rounds. An arithmetic mean of rates is too
    large.

    Raises:
        ValueError: The shares do not add up to 1.
    """
    if min(token_shares) <= 0 or abs(math.fsum(token_shares) - 1.0) > 1e-6:
        raise ValueError(
            f"shares {', '.join(f'{w:g}' for w in token_shares)}; expected positive ones that sum"
            " to 1"
        )
    return 1.0 / math.fsum(
        w / tau for w, tau in zip(token_shares, mean_acceptance_lengths, strict=True)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrafficClass:
    """One kind of requests."""

    share: float  #: Share of all requests.
    conditional_acceptance_rate: float  #: ``α``.


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """Percentiles of a latency, in plain steps."""

    p50: float
    p90: float
    p99: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """Simulated requests, timed in plain steps, so that plain decoding takes 1 per token."""

    num_requests: int  #: Number of requests.
    mean_acceptance_length: float  #: τ of all rounds, counted before the limit cuts the last.
    speedup: float  #: Tokens over time, of all requests together.
    time_per_output_token: Percentiles  #: Decode time of a request over its tokens after the first.
    slower_than_plain: float  #: Share of requests that speculation makes slower.


def simulate(
    traffic: Sequence[TrafficClass],
    *,
    num_draft_tokens: int,
    verify_cost: float,
    draft_cost: float,
    num_requests: int,
    output_tokens: int,
    seed: int,
) -> Simulation:
    """Simulates requests round by round, with accepted counts of the geometric distribution.

    ``P(accepted = j) = α^j (1 - α)`` for ``j < K`` and ``α^K`` for ``j = K``; every round takes ``v
    + K·c``. A request that accepts little is slow, and the mean acceptance length does not show it.
    Queueing and changing batches are not simulated.

    Args:
        traffic: Kinds of requests.
        num_draft_tokens: ``K``.
        verify_cost: ``v``.
        draft_cost: ``c``.
        num_requests: Number of requests.
        output_tokens: Tokens of each request, at least 2; the prefill gives the first.
        seed: Random seed.
    """
    # Only this function needs it.
    import numpy as np

    cost = round_cost(num_draft_tokens, verify_cost=verify_cost, draft_cost=draft_cost)
    alphas = [kind.conditional_acceptance_rate for kind in traffic]
    shares = [kind.share for kind in traffic]
    # Raises if shares or rates are out of range.
    blended_tau(shares, [tau_from_conditional_rate(alpha, num_draft_tokens) for alpha in alphas])

    generator = np.random.default_rng(seed)
    alpha = generator.choice(alphas, size=num_requests, p=shares)
    # Tokens after that of the prefill.
    written = np.zeros(num_requests, np.int64)
    rounds = np.zeros(num_requests, np.int64)
    while (active := np.flatnonzero(written < output_tokens - 1)).size:
        is_accepted = generator.random((active.size, num_draft_tokens)) < alpha[active, None]
        written[active] += 1 + np.cumprod(is_accepted, axis=1).sum(axis=1)
        rounds[active] += 1

    per_token = rounds * cost / (output_tokens - 1)
    return Simulation(
        num_requests=num_requests,
        mean_acceptance_length=float(written.sum() / rounds.sum()),
        speedup=1.0 / float(per_token.mean()),
        time_per_output_token=Percentiles(*np.percentile(per_token, [50, 90, 99]).tolist()),
        slower_than_plain=float(np.mean(per_token > 1.0)),
    )


def _check_rate(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value:g}; expected 0 to 1")


def _check_tau(mean_acceptance_length: float, num_draft_tokens: int) -> None:
    if not 1.0 <= mean_acceptance_length <= num_draft_tokens + 1:
        raise ValueError(
            f"mean_acceptance_length is {mean_acceptance_length:g}; with {num_draft_tokens} draft"
            f" tokens a round emits 1 to {num_draft_tokens + 1}"
        )
