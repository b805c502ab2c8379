"""L6: sampled tokens, scored under the target's distribution, stratum by stratum."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import struct

from eagle3_jax import DraftSampling, DynamicTree, LoadedDrafter, LoadedTarget, SpeculativeDecoder
from validation.emissions import FIRST, Emitted, Reference, Warpers, at_an_edge, play
from validation.statistics import (
    Score,
    directed,
    drafted,
    kolmogorov_smirnov,
    randomised_pit,
    surprisal,
    towards,
)

K = 4
MOST_Z = 5.0
LEAST_P = 1e-6
FEWEST = 100  # tokens below which a sum of scores is too far from normal to be judged
# prompts are cut to their last tokens, so that all share the compiled programs of one bucket
CONTEXT = 64
METHODS: dict[str, dict[str, Any]] = {  # the first one is that of --quick
    f"a chain of {K} sampled tokens": {
        "num_speculative_tokens": K,
        "draft_sampling": DraftSampling.PROBABILISTIC,
    },
    "plain sampling, the control": {},
    f"a chain of {K} likeliest tokens": {"num_speculative_tokens": K},
    "a dynamic tree": {"tree": DynamicTree(num_nodes=10, max_depth=K, top_k=3)},
}
# Settings that share a batch, rows of each, and new tokens of every row.
Batches = Sequence[tuple[Sequence[Warpers], int, int]]


def decoder_of(method: str, target: LoadedTarget, drafter: LoadedDrafter) -> SpeculativeDecoder:
    """Returns the decoder of one of :data:`METHODS`, without stop tokens."""
    options = METHODS[method]
    return SpeculativeDecoder(target, drafter if options else None, stop_tokens=(), **options)


@struct.dataclass
class Sample:
    """All tokens of one method."""

    index: np.ndarray  #: ``[n]``, place in the round.
    bonus: np.ndarray  #: ``[n]``, whether nothing was drafted for its place any more.
    warpers: np.ndarray  #: ``[n]``, as text.
    #: Name to the score of each token; not a number where it has none.
    scores: OrderedDict[str, Score]
    #: Name to ``[n]`` values, uniform under the distribution; not a number likewise.
    transforms: OrderedDict[str, np.ndarray]
    #: Places where rounding decides which tokens truncation keeps.
    left_out: int = struct.field(pytree_node=False, default=0)
    acceptance_length: dict[str, float] | None = struct.field(
        pytree_node=False, default=None
    )  #: ``τ`` by warpers.


def sample(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    reference: Reference,
    *,
    batches: Batches,
) -> Sample:
    """Sample texts, and score every token by the distribution that the reference gives it."""
    prompts = [prompt[-CONTEXT:] for prompt in prompts]
    rng = np.random.default_rng(1)
    parts = []
    left_out = 0
    lengths = {}
    for seed, (settings, rows_per_setting, max_new_tokens) in enumerate(batches):
        rows = [warpers for warpers in settings for _ in range(rows_per_setting)]
        chosen = [prompts[row % len(prompts)] for row in range(len(rows))]

        emitted = play(decoder, chosen, rows=rows, max_new_tokens=max_new_tokens, seed=seed)
        for start in range(0, len(rows), rows_per_setting):
            group = emitted[start : start + rows_per_setting]
            warpers = rows[start]
            rounds = sum(int(np.count_nonzero(row.index == 0)) for row in group)
            lengths[str(warpers)] = (
                sum(int(np.count_nonzero(row.index >= 0)) for row in group) / rounds
            )
            for row, logits in zip(group, reference.logits(group), strict=True):
                edge = at_an_edge(logits, warpers)
                left_out += int(edge.sum())
                inner = jax.tree.map(lambda values, edge=edge: values[~edge], row)
                parts.append(
                    _scored(inner, reference.probabilities(logits[~edge], warpers), warpers, rng)
                )

    joined = jax.tree.map(lambda *values: np.concatenate(values), *parts)
    return joined.replace(left_out=left_out, acceptance_length=lengths)


def _scored(row: Emitted, p: np.ndarray, warpers: Warpers, rng: np.random.Generator) -> Sample:
    uniforms = rng.random(len(row.tokens))
    has_draft = (row.proposals >= 0).any(axis=1)
    if row.q is None:
        score = drafted(p, row.proposals, row.tokens)
        order = np.zeros_like(p)
        places, columns = np.nonzero(row.proposals >= 0)
        order[places, row.proposals[places, columns]] = -1.0
    else:
        q = row.q.astype(np.float64)
        score = directed(p, q, row.tokens)
        order = -towards(p, q)

    def only_drafted(values: np.ndarray) -> np.ndarray:
        """Returns values that are not numbers where nothing was drafted."""
        return np.where(has_draft, values, np.nan)

    # Ordered, because jax.tree sorts the keys of other dictionaries.
    scores = OrderedDict(
        entropy=surprisal(p, row.tokens), directed=jax.tree.map(only_drafted, score)
    )
    transforms = OrderedDict(
        rank=randomised_pit(p, row.tokens, uniforms, order=-p),
        direction=only_drafted(randomised_pit(p, row.tokens, uniforms, order=order)),
    )
    return Sample(row.index, row.bonus, np.full(len(row.tokens), str(warpers)), scores, transforms)


def strata(sample: Sample) -> dict[str, np.ndarray]:
    """What is judged on its own: everything, each index of a round, the bonus, each setting."""
    groups = {"all tokens": np.ones(len(sample.index), bool)}
    for index in np.unique(sample.index).tolist():
        groups["prefill" if index == FIRST else f"index {index}"] = sample.index == index
    if sample.index.max() > 0:
        groups["bonus"] = sample.bonus & (sample.index > 0)
    return groups | {name: sample.warpers == name for name in np.unique(sample.warpers).tolist()}


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Every stratum's statistics."""

    columns: list[str]  #: Columns of the table.
    #: A stratum each: its name, its tokens, ``z`` of every score, ``p`` of every transform; ""
    #: where too few.
    rows: list[list]
    #: Deviations that chance does not explain, in words; empty for an exact sampler.
    wrong: list[str]

    @property
    def scores(self) -> list[float]:
        """``z`` of every judged stratum and score."""
        return [value for row in self.rows for value in row[2:4] if value != ""]

    @property
    def p_values(self) -> list[float]:
        """``p`` of every judged stratum and transform."""
        return [value for row in self.rows for value in row[4:] if value != ""]

    @property
    def judged(self) -> list[int]:
        """Tokens of the strata that are large enough."""
        return [row[1] for row in self.rows if row[2] != ""]


def judge(sample: Sample) -> Judgement:
    """Sums of scores as ``z``, transforms by Kolmogorov-Smirnov, in all :func:`strata`."""
    table = []
    wrong = []
    for stratum, chosen in strata(sample).items():
        row = [stratum, int(chosen.sum())]
        for name, score in sample.scores.items():
            excess = score[chosen & ~np.isnan(score.mean)]
            enough = excess.observed.size >= FEWEST
            row.append(round(excess.z, 2) if enough else "")
            if enough and not abs(excess.z) < MOST_Z:
                wrong.append(f"{stratum}: {name} z = {excess.z:.1f}")

        for name, values in sample.transforms.items():
            uniforms = values[chosen & ~np.isnan(values)]
            p_value = kolmogorov_smirnov(uniforms)
            row.append(float(f"{p_value:.2g}") if uniforms.size >= FEWEST else "")
            if uniforms.size >= FEWEST and not p_value > LEAST_P:
                wrong.append(f"{stratum}: {name} KS p = {p_value:.1g}")
        table.append(row)
    names = [f"{name} z" for name in sample.scores] + [f"{name} KS p" for name in sample.transforms]
    return Judgement(["stratum", "tokens", *names], table, wrong)
