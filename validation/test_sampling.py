"""L6: sampled tokens of the shipped pair follow the target's distribution, at every index of a round.

``p`` comes from transformers, teacher-forced, with its warpers. The control is plain sampling under the same
statistics: if rounding could fail them, it would fail there first.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest

from eagle3_jax import DraftSampling, DynamicTree, SpeculativeDecoder, load_drafter, load_target
from eagle3_jax.load import bundled
from validation.checks import Check
from validation.emissions import FIRST, Emitted, Reference, Warpers, at_an_edge, play
from validation.statistics import (
    Score,
    directed,
    drafted,
    kolmogorov_smirnov,
    randomised_pit,
    smallest_shift,
    surprisal,
    towards,
)

pytestmark = pytest.mark.level("L6")

K = 4
MOST_Z, LEAST_P = 5.0, 1e-6
FEWEST = 100  # tokens below which a sum of scores is too far from normal to be judged
CONTEXT = 64  # prompts are cut to their last tokens, so that all share the compiled programs of one bucket
# Rows and tokens each. Truncation sorts the vocabulary, which costs most of a round on a CPU, so fewer rows have it.
BATCHES = (
    ((Warpers(0.7), Warpers(1.0), Warpers(1.5)), 20, 180),
    ((Warpers(0.7, top_p=0.9), Warpers(1.0, top_k=50), Warpers(1.5, top_k=50, top_p=0.9)), 8, 110),
)
METHODS: dict[str, Callable[[], dict]] = {
    "plain sampling, the control": lambda: {"drafter": None},
    f"a chain of {K} likeliest tokens": lambda: {"num_speculative_tokens": K},
    f"a chain of {K} drawn tokens": lambda: {
        "num_speculative_tokens": K,
        "draft_sampling": DraftSampling.PROBABILISTIC,
    },
    "a dynamic tree": lambda: {"tree": DynamicTree(num_nodes=10, max_depth=K, top_k=3)},
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """All tokens of one method.

    Attributes:
        index: ``[n]``, place in the round.
        bonus: ``[n]``, whether nothing was drafted for its place any more.
        warpers: ``[n]``, as text.
        scores: Name to the score of each token; not a number where it has none.
        transforms: Name to ``[n]`` values, uniform under the law; likewise.
        left_out: Places where rounding decides what truncation keeps.
        acceptance_length: By warpers, ``τ``.
    """

    index: np.ndarray
    bonus: np.ndarray
    warpers: np.ndarray
    scores: dict[str, Score]
    transforms: dict[str, np.ndarray]
    left_out: int
    acceptance_length: dict[str, float]


@functools.cache
def sample(method: str) -> Sample:
    target = load_target()
    options = {"drafter": load_drafter(target=target), **METHODS[method]()}
    decoder = SpeculativeDecoder(target, options.pop("drafter"), stop_tokens=(), **options)
    texts = [json.loads(line)["prompt"] for line in bundled("prompts.jsonl").read_text().splitlines()]
    prompts = [decoder.encode(text)[-CONTEXT:] for text in texts]
    reference, rng = Reference(), np.random.default_rng(1)
    parts, left_out, lengths = [], 0, {}
    for seed, (settings, each, max_new_tokens) in enumerate(BATCHES):
        rows = [warpers for warpers in settings for _ in range(each)]
        chosen = [prompts[row % len(prompts)] for row in range(len(rows))]
        found = play(decoder, chosen, rows=rows, max_new_tokens=max_new_tokens, seed=seed)
        for start in range(0, len(rows), each):
            group, warpers = found[start : start + each], rows[start]
            rounds = sum(int(np.count_nonzero(row.index == 0)) for row in group)
            lengths[str(warpers)] = sum(int(np.count_nonzero(row.index >= 0)) for row in group) / rounds
            for row, logits in zip(group, reference.logits(group), strict=True):
                edge = at_an_edge(logits, warpers)
                left_out += int(edge.sum())
                parts.append(
                    _scored(_chosen(row, ~edge), reference.probabilities(logits[~edge], warpers), warpers, rng)
                )
    return _joined(parts, left_out, lengths)


def _chosen(row: Emitted, kept: np.ndarray) -> Emitted:
    fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(row) if field.name != "prompt"}
    return Emitted(row.prompt, **{name: None if value is None else value[kept] for name, value in fields.items()})


def _scored(row: Emitted, p: np.ndarray, warpers: Warpers, rng: np.random.Generator) -> tuple:
    uniforms = rng.random(len(row.tokens))
    scores = {"entropy": surprisal(p, row.tokens)}
    transforms = {"rank": randomised_pit(p, row.tokens, uniforms, order=-p)}
    has_draft = (row.proposals >= 0).any(axis=1)
    if has_draft.any():
        if row.q is None:
            score = drafted(p, row.proposals, row.tokens)
            order = np.zeros_like(p)
            places, columns = np.nonzero(row.proposals >= 0)
            order[places, row.proposals[places, columns]] = -1.0
        else:
            q = row.q.astype(np.float64)
            score, order = directed(p, q, row.tokens), -towards(p, q)
        scores["directed"] = Score(*(np.where(has_draft, x, np.nan) for x in dataclasses.astuple(score)))
        pit = randomised_pit(p, row.tokens, uniforms, order=order)
        transforms["direction"] = np.where(has_draft, pit, np.nan)
    else:
        nothing = np.full(len(row.tokens), np.nan)
        scores["directed"], transforms["direction"] = Score(nothing, nothing, nothing), nothing
    return row.index, row.bonus, np.full(len(row.tokens), str(warpers)), scores, transforms


def _joined(parts: Sequence[tuple], left_out: int, lengths: dict[str, float]) -> Sample:
    index, bonus, warpers, scores, transforms = zip(*parts, strict=True)
    fields = ("observed", "mean", "variance")
    return Sample(
        index=np.concatenate(index),
        bonus=np.concatenate(bonus),
        warpers=np.concatenate(warpers),
        scores={
            name: Score(*(np.concatenate([getattr(part[name], field) for part in scores]) for field in fields))
            for name in scores[0]
        },
        transforms={name: np.concatenate([part[name] for part in transforms]) for name in transforms[0]},
        left_out=left_out,
        acceptance_length=lengths,
    )


def strata(found: Sample) -> dict[str, np.ndarray]:
    """What is judged on its own: everything, each index of a round, the bonus, each setting."""
    groups = {"all tokens": np.ones(len(found.index), bool)}
    for index in np.unique(found.index).tolist():
        groups["prefill" if index == FIRST else f"index {index}"] = found.index == index
    if found.index.max() > 0:
        groups["bonus"] = found.bonus & (found.index > 0)
    return groups | {name: found.warpers == name for name in np.unique(found.warpers).tolist()}


@pytest.mark.parametrize("method", METHODS)
def test_sampled_tokens_follow_the_targets_distribution_with(check: Check, method: str) -> None:
    found = sample(method)
    table, wrong = [], []
    for stratum, chosen in strata(found).items():
        judged = int(chosen.sum()) >= FEWEST
        row = [stratum, int(chosen.sum())]
        for name, score in found.scores.items():
            own = score[chosen & ~np.isnan(score.mean)]
            enough = judged and own.observed.size >= FEWEST
            row.append(round(own.z, 2) if enough else "")
            if enough and not abs(own.z) < MOST_Z:
                wrong.append(f"{stratum}: {name} z = {own.z:.1f}")
        for name, values in found.transforms.items():
            own = values[chosen & ~np.isnan(values)]
            p_value = kolmogorov_smirnov(own)
            row.append(float(f"{p_value:.2g}") if own.size >= FEWEST else "")
            if own.size >= FEWEST and not p_value > LEAST_P:
                wrong.append(f"{stratum}: {name} KS p = {p_value:.1g}")
        table.append(row)
    names = [f"{name} z" for name in found.scores] + [f"{name} KS p" for name in found.transforms]
    check.table(f"{method}: tokens that should follow p", ["stratum", "tokens", *names], table)
    z = {row[0]: row[2] for row in table if row[2] != ""}
    check.plot(
        f"{method}: surprisal of the tokens against its mean, the entropy",
        "bar",
        "stratum",
        "z",
        {"z": (list(z), list(z.values()))},
    )
    check.number(
        tokens=len(found.index),
        left_out_at_an_edge=found.left_out,
        largest_z=max(abs(value) for row in table for value in row[2:4] if value != ""),
        smallest_p=min(value for row in table for value in row[4:] if value != ""),
        **{f"τ at {name}": round(value, 3) for name, value in found.acceptance_length.items()},
    )
    judged = [row[1] for row in table if row[2] != ""]
    check.sees = (
        f"probabilities off along a score by {100 * smallest_shift(max(judged), MOST_Z):.1f} % rms over all tokens, by "
        f"{100 * smallest_shift(min(judged), MOST_Z):.0f} % in the smallest stratum; not what leaves every score alone"
    )
    assert not wrong, f"{method}: {'; '.join(wrong)}"


def test_drawn_drafts_are_accepted_more_often_than_the_likeliest(check: Check) -> None:
    """At a high temperature; the reason to have them. ``Σ min(p, q)`` against ``p`` of one token."""
    drawn, likeliest = (
        sample(name).acceptance_length for name in (f"a chain of {K} drawn tokens", f"a chain of {K} likeliest tokens")
    )
    check.table(
        f"Mean acceptance length τ of a chain of {K}",
        ["setting", "likeliest", "drawn"],
        [[name, round(likeliest[name], 3), round(drawn[name], 3)] for name in likeliest],
    )
    for name in ("T=1", "T=1.5"):
        assert drawn[name] > likeliest[name]


@pytest.fixture(scope="module", autouse=True)
def _forget_samples():
    yield
    sample.cache_clear()
    jax.clear_caches()
