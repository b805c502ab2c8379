"""Adaptive verification: what it learns, which width it takes, and that greedy output stays the target's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax import AdaptiveVerification, DynamicTree, LoadedDrafter, RoundCosts, SpeculativeDecoder
from eagle3_jax import loop as loops
from eagle3_jax.adaptive import AdaptiveLoop
from eagle3_jax.calibration import DAMPING_INTERCEPT, DAMPING_SLOPE, INTERCEPT, RIDGE, SLOPE, Calibration, feature_of
from eagle3_jax.drafters import NGram
from eagle3_jax.schedule import SpeculationSchedule

PROMPTS, LIMITS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 5, 6], [10, 11]], [20, 31, 17, 1]
FLAT = RoundCosts(((1, ((1, 1.01), (5, 1.02))),))
STEEP = RoundCosts(((1, ((1, 2.0), (5, 9.0))),))


def tuning(**sizes: dict[int, tuple[float, float]]) -> dict[str, Any]:
    """As ``eagle3 tune --output`` writes it: ``{batch: {K: (v, c)}}``, and a tree, which no width can use."""
    chain = lambda k: {"num_draft_tokens": k, "num_draft_steps": k, "is_chain": True}
    tree = {
        "shape": {"num_draft_tokens": 9, "num_draft_steps": 3, "is_chain": False},
        "verify_cost": 9,
        "draft_cost": 9,
    }
    return {
        "batches": [
            {
                "batch": int(batch[1:]),
                "candidates": [{"shape": chain(k), "verify_cost": v, "draft_cost": c} for k, (v, c) in costs.items()]
                + [tree],
            }
            for batch, costs in sizes.items()
        ]
    }


def test_costs_come_from_a_tuning_and_are_lines_between_what_was_measured() -> None:
    costs = RoundCosts.from_tuning(tuning(b1={1: (1.0, 0.1), 3: (1.2, 0.1)}, b5={1: (1.5, 0.1), 3: (2.1, 0.1)}))
    assert costs.measured[0] == (1, ((1, 1.1), (3, pytest.approx(1.5))))
    assert costs.of(1, (1, 2, 3, 5)) == pytest.approx([1.1, 1.3, 1.5, 1.9])
    assert costs.of(5, (1, 3)) == pytest.approx([1.6, 2.4])
    assert costs.of(3, (1, 3)) == pytest.approx([1.35, 1.95])
    assert costs.of(64, (1, 3)) == pytest.approx([1.6, 2.4])
    falling = RoundCosts(((1, ((1, 1.4), (2, 1.2), (4, 1.3))),))
    assert falling.of(1, (1, 2, 4)) == pytest.approx([1.4, 1.4, 1.4])


def newton(slope: float, intercept: np.ndarray, seen: list[tuple[int, float, bool]]) -> np.ndarray:
    """The damped step by solving the whole system: outcomes are (depth, feature, accepted)."""
    size = 1 + len(intercept)
    gradient, hessian = np.zeros(size), RIDGE * np.eye(size)
    for depth, feature, accepted in seen:
        x = np.zeros(size)
        x[0], x[depth] = feature, 1.0
        c = 1 / (1 + np.exp(-(slope * feature + intercept[depth - 1])))
        gradient += (accepted - c) * x
        hessian += c * (1 - c) * np.outer(x, x)
    count = np.array([len(seen), *(sum(depth == k for depth, _, _ in seen) for k in range(1, size))])
    damping = np.array([DAMPING_SLOPE, *[DAMPING_INTERCEPT] * len(intercept)])
    return np.linalg.solve(hessian, gradient) * count / (count + damping)


def test_a_step_is_newtons_on_every_outcome_that_was_seen() -> None:
    rng = np.random.default_rng(0)
    rows, length = 6, 3
    start = Calibration.start(rows, length)
    calibration, seen = start, []
    for _ in range(4):
        feature = rng.normal(0, 2, (rows, length)).astype(np.float32)
        verified = np.arange(length) < rng.integers(1, length + 1, rows)[:, None]
        verified[0] = False  # has finished
        accepted = np.minimum(rng.integers(0, length + 1, rows), verified.sum(1)).astype(np.int32)
        for row in range(rows):
            for depth in range(1, int(verified[row].sum()) + 1):
                if depth <= accepted[row] + 1:
                    seen.append((depth, float(feature[row, depth - 1]), depth <= accepted[row]))
        predicted = calibration.predicted(jnp.asarray(feature))
        calibration = calibration.observed(
            jnp.asarray(feature), predicted, jnp.asarray(verified), jnp.asarray(accepted)
        )
    assert calibration.rounds.tolist() == [0, 4, 4, 4, 4, 4]
    assert int(calibration.sums[:, :, 0].sum()) == len(seen)
    step = newton(SLOPE, np.full(length, INTERCEPT), seen)
    better = calibration.improved()
    assert np.allclose(better.slope, max(SLOPE + step[0], 0.0), atol=1e-4)
    assert np.allclose(better.intercept, INTERCEPT + step[1:], atol=1e-4)
    assert not np.asarray(better.sums).any() and not np.asarray(better.rounds).any()


def test_nothing_seen_changes_nothing_and_a_slope_is_never_negative() -> None:
    start = Calibration.start(2, 2)
    assert tiny.same_bits(start.improved(), start)
    feature = jnp.array([[4.0, 4.0], [-4.0, -4.0]])
    wrong = start.observed(feature, start.predicted(feature), jnp.ones((2, 2), bool), jnp.array([0, 2]))
    wrong = wrong.replace(sums=400 * wrong.sums)  # the surer, the less is accepted, 400 times
    assert np.array_equal(wrong.improved().slope, [0.0, 0.0])


def test_a_logistic_truth_is_learnt() -> None:
    rng = np.random.default_rng(0)
    rows, length, slope, intercept = 64, 3, 1.3, np.array([0.6, -0.4, -1.0])

    @jax.jit
    def learn(calibration: Calibration, feature: Any, accepted: Any) -> Calibration:
        verified = jnp.ones(feature.shape, bool)
        return calibration.observed(feature, calibration.predicted(feature), verified, accepted).improved()

    calibration = Calibration.start(rows, length)
    for _ in range(60):
        feature = rng.normal(0, 1.5, (rows, length)).astype(np.float32)
        right = rng.random((rows, length)) < 1 / (1 + np.exp(-(slope * feature + intercept)))
        accepted = np.cumprod(right, axis=1).sum(1).astype(np.int32)
        calibration = learn(calibration, jnp.asarray(feature), jnp.asarray(accepted))
    assert float(calibration.slope[0]) == pytest.approx(slope, abs=0.35)
    assert np.allclose(calibration.intercept[0], intercept, atol=0.6)


def test_a_row_that_joins_takes_over_what_the_others_know() -> None:
    old = Calibration.start(3, 2)
    feature = jnp.full((3, 2), 1.0)
    known = dataclasses.replace(old, slope=jnp.array([2.0, 2.0, 0.5]))
    verified = jnp.array([[True, True], [True, True], [False, False]])
    after = known.observed(feature, known.predicted(feature), verified, jnp.array([2, 1, 0])).improved()
    assert len(set(np.asarray(after.slope).tolist())) == 1 and float(after.slope[2]) > 1.5


def test_confidence_becomes_a_finite_feature() -> None:
    found = feature_of(jnp.array([[0.0, 0.5, 1.0, 0.8, jnp.nan]]), jnp.ones((1, 5), bool))
    assert np.allclose(found, [[-16.0, 0.0, 16.0, np.log(4.0), 0.0]], atol=1e-5)
    assert not np.asarray(feature_of(None, jnp.ones((2, 3), bool))).any()


@pytest.fixture(scope="module")
def target():
    return tiny.target()


@pytest.mark.parametrize("costs", [FLAT, STEEP], ids=["flat", "steep"])
def test_greedy_output_is_the_targets_and_widths_follow_the_costs(target: Any, costs: RoundCosts) -> None:
    plain = SpeculativeDecoder(target).generate(PROMPTS, max_new_tokens=LIMITS)
    adaptive = AdaptiveVerification(costs=costs, widths=(1, 5), rounds_per_update=4)
    decoder = SpeculativeDecoder(target, tiny.eagle3(target), num_speculative_tokens=5, adaptive=adaptive)
    ours = decoder.generate(PROMPTS, max_new_tokens=LIMITS)
    assert [row.tokens for row in ours.rows] == [row.tokens for row in plain.rows]
    assert [row.finish_reason for row in ours.rows] == [row.finish_reason for row in plain.rows]
    of_all = lambda name: sum(int(getattr(row.stats, name)) for row in ours.rows)
    drafted, rounds = of_all("num_draft_tokens"), of_all("num_drafts")
    assert drafted > 4 * rounds if costs is FLAT else drafted == rounds


def test_what_is_seen_changes_the_width_and_nothing_is_compiled_for_it(target: Any) -> None:
    """A drafter that is never right: the widest at first, when all are expected to survive, the narrowest soon."""
    wrong = LoadedDrafter(tiny.Scripted(shift=1), jnp.zeros((2, 64), jnp.int32))
    costs = RoundCosts(((1, ((1, 1.1), (4, 1.4))),))
    adaptive = AdaptiveVerification(costs=costs, widths=(1, 4), rounds_per_update=2)
    decoder = SpeculativeDecoder(target, wrong, num_speculative_tokens=4, adaptive=adaptive, stop_tokens=())
    widths, programs = [], []
    for one in decoder.rounds([[1, 2], [3]], max_new_tokens=24):
        widths.append(int(np.asarray(one.draft.valid)[:, 1:].sum(1).max()))
        programs.append(loops.step._cache_size())
    assert widths[0] == 4 and widths[-1] == 1
    assert programs[-1] == programs[0]


def test_prompt_lookup_is_cut_by_what_it_finds(target: Any) -> None:
    adaptive = AdaptiveVerification(costs=FLAT, widths=(2, 4))
    decoder = SpeculativeDecoder(target, NGram(4), adaptive=adaptive, stop_tokens=())
    assert decoder.loop.drafts_whole
    plain = SpeculativeDecoder(target, stop_tokens=()).generate([[1, 2, 1, 2, 1], [3]], max_new_tokens=16)
    ours = decoder.generate([[1, 2, 1, 2, 1], [3]], max_new_tokens=16)
    assert [row.tokens for row in ours.rows] == [row.tokens for row in plain.rows]


def test_one_drafted_token_and_widths_of_all_sizes(target: Any) -> None:
    one = AdaptiveLoop(target.model, tiny.eagle3(target).drafter.drafting(tiny.Chain(1), None))
    assert one.widths == (1,)
    assert AdaptiveVerification().widths_up_to(7) == (1, 2, 4, 6, 7)
    assert AdaptiveVerification(widths=(3,)).widths_up_to(5) == (3, 5)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a tree": ({"tree": DynamicTree(num_nodes=5, max_depth=2, top_k=2)}, "neither tree nor schedule"),
    "a schedule": ({"schedule": SpeculationSchedule(((1, 4, 2),))}, "neither tree nor schedule"),
    "a width above the draft": (
        {"num_speculative_tokens": 2, "adaptive": AdaptiveVerification(widths=(1, 3))}, "a width of 3 was asked for"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line_with(name: str, target: Any) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as refusal:
        SpeculativeDecoder(target, tiny.eagle3(target), **{"adaptive": AdaptiveVerification(), **options})
    assert "\n" not in str(refusal.value)


def test_a_drafter_of_trees_is_refused(target: Any) -> None:
    with pytest.raises(ValueError, match="only chains are cut to a width"):
        SpeculativeDecoder(
            target, tiny.eagle3(target, DynamicTree(num_nodes=5, max_depth=2, top_k=2)), adaptive=AdaptiveVerification()
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": (2, 1)}, "ascending"),
        ({"widths": (0, 1)}, "ascending"),
        ({"least_survival": 1.0}, "below 1"),
        ({"rounds_per_update": 0}, "at least 1"),
    ],
)
def test_nonsense_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveVerification(**options)


@pytest.mark.parametrize(
    "measured", [(), ((2, ((1, 1.0),)), (1, ((1, 1.0),))), ((1, ((1, float("nan")),)),), ((1, ()),)]
)
def test_costs_that_are_none_are_refused(measured: Any) -> None:
    with pytest.raises(ValueError, match="costs are"):
        RoundCosts(measured)
    with pytest.raises(ValueError, match="expected what `eagle3 tune --output` writes"):
        RoundCosts.from_tuning({"num_speculative_tokens": 3})


def test_the_command_line_takes_a_tuning_and_rules_by_name(cli: Any, tmp_path: Path) -> None:
    golden, file, bad = tiny.GOLDEN / "official", tmp_path / "tuned.json", tmp_path / "bad.json"
    file.write_text(json.dumps(tuning(b1={1: (1.0, 0.1), 3: (1.2, 0.1)})))
    bad.write_text("{}")
    pair = ("generate", "--target", golden / "target", "--drafter", golden / "eagle3", "--prompt-ids", "[1, 17, 5]")
    pair = (*pair, "--json", "--max-new-tokens", 6, "--ignore-eos", "--num-speculative-tokens", 3)
    code, out, err = cli(*pair, "--adaptive", file, "--verifier", "block", "--temperature", 1)
    assert code == 0, err
    assert json.loads(out)["lossless"] is True
    for options, message in (
        (("--adaptive", bad), "expected what `eagle3 tune --output` writes"),
        (("--adaptive", tmp_path / "none.json"), "none.json"),
        (("--adaptive", "on", "--tree", "num_nodes=5,max_depth=2,top_k=2"), ""),
        (("--verifier", "blocks"), "expected 'block', 'typical'"),
    ):
        code, _, err = cli(*pair, *options)
        assert code == 2 and message in err.replace("\n", " "), err
