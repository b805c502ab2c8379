"""The rounds of our decoder, compared with those that vLLM reports."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from eagle3_jax import SamplingParams, SpeculationStats, SpeculativeDecoder
from eagle3_jax.measure.trace import record
from validation.engines.vllm.bridge import Engine, Generated, Tokens

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


@dataclasses.dataclass(frozen=True)
class Played:
    """The rounds of one prompt, except those without a draft, which vLLM does not count."""

    tokens: Tokens  #: New tokens.
    accepted: list[int]  #: Draft tokens accepted per round.
    drafts: list[Tokens]  #: Draft tokens proposed per round.


def play(
    decoder: SpeculativeDecoder, prompts: Sequence[Tokens], *, max_new_tokens: int, batch_size: int
) -> list[Played]:
    """Decode greedily, ``batch_size`` prompts at a time, and keep drafts and accepted counts."""
    played = []
    for start in range(0, len(prompts), batch_size):
        batch = list(prompts[start : start + batch_size])
        limits = [max_new_tokens] * len(batch)
        trace = record(decoder, batch, max_new_tokens=limits, sampling=SamplingParams(), seed=0)
        for tokens, row in zip(trace.result.tokens, trace.prompts, strict=True):
            rounds = [round_ for round_ in row["rounds"] if len(round_["tokens"]) > 1]
            accepted = [round_["num_accepted"] for round_ in rounds]
            drafts = [round_["tokens"][1:] for round_ in rounds]
            played.append(Played(tokens, accepted, drafts))
    return played


def parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place where two lists differ, or the shorter one ends; ``None`` if equal."""
    places = itertools.zip_longest(ours, theirs)
    return next(
        (position for position, (token, their_token) in enumerate(places) if token != their_token),
        None,
    )


def first_difference(ours: Sequence[Played], theirs: Generated) -> str | None:
    """Where the two part first, to the token; ``None`` where they never do."""
    for request, (played, completion) in enumerate(zip(ours, theirs.completions, strict=True)):
        if (at := parting(played.tokens, completion.tokens)) is not None:
            wrote = f"we wrote {played.tokens[at : at + 1]}, vLLM {completion.tokens[at : at + 1]}"
            return f"request {request}, new token {at}: {wrote}"
        if (
            completion.accepted is not None
            and (at := parting(played.accepted, completion.accepted)) is not None
        ):
            return (
                f"request {request}, round {at}: we accepted {played.accepted[at : at + 1]} of"
                f" {played.drafts[at : at + 1]}, vLLM {completion.accepted[at : at + 1]}; all"
                " before is equal"
            )
    return None


def stats_of(played: Sequence[Played], num_speculative_tokens: int) -> SpeculationStats:
    """vLLM's counters, from our rounds."""
    rows = [
        count_rounds(row.accepted, [*map(len, row.drafts)], num_speculative_tokens)
        for row in played
    ]
    return SpeculationStats.merge(rows)


def count_rounds(accepted: Sequence[int], drafted: Sequence[int], depth: int) -> SpeculationStats:
    """vLLM's counters, from the rounds of a row. Rounds without a draft do not count."""
    counts = np.asarray(drafted, int)
    accepted_counts = np.asarray(accepted, int)[counts > 0]
    return SpeculationStats(
        num_drafts=np.sum(counts > 0),
        num_draft_tokens=np.sum(counts),
        num_accepted_tokens=np.sum(accepted_counts),
        num_accepted_tokens_per_pos=np.sum(accepted_counts[:, None] > np.arange(depth), axis=0),
    )


@dataclasses.dataclass(frozen=True)
class Parity:
    """One head in two engines: tokens, accepted counts of every round, and all counters."""

    ours: list[Played]
    theirs: Generated
    stats: SpeculationStats

    @property
    def counters(self) -> dict[str, tuple[object, object]]:
        """Name to ours and theirs."""
        our_counters = self.stats.to_json()
        return {name: (our_counters[name], self.theirs.counters.get(name)) for name in COUNTERS}

    @property
    def difference(self) -> str | None:
        """Where the two part first, in words; ``None`` where they never do."""
        text_difference = first_difference(self.ours, self.theirs)
        if text_difference is not None:
            return text_difference

        names = [name for name, (our_count, theirs) in self.counters.items() if our_count != theirs]
        if names or set(self.theirs.counters) != set(COUNTERS):
            return (
                f"the rounds are equal and the counters are not: {self.stats.to_json()} and"
                f" {self.theirs.counters}"
            )
        if not self.stats.num_accepted_tokens > 0:
            return "nothing was accepted, so that equal counts prove nothing"
        return None


def parity(
    decoder: SpeculativeDecoder,
    engine: Engine,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    batch_size: int,
) -> Parity:
    """The same prompts through both, greedily."""
    theirs = engine.generate(prompts, max_new_tokens=max_new_tokens)
    return parity_with(
        theirs, decoder, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size
    )


def parity_with(
    theirs: Generated,
    decoder: SpeculativeDecoder,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    batch_size: int,
) -> Parity:
    """The same prompts through our decoder, next to a run of vLLM."""
    ours = play(decoder, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size)
    return Parity(ours, theirs, stats_of(ours, decoder.loop.drafter.max_depth))
