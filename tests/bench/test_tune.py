"""Tuning: decisions on hand-computed costs, measurements on a tiny pair, and the command."""

from __future__ import annotations

import json

import pytest
import tiny

from eagle3_jax import DynamicTree, SpeculationSchedule, SpeculativeDecoder
from eagle3_jax.bench import tune as tuning
from eagle3_jax.bench.contenders import DecoderContender
from eagle3_jax.bench.step_costs import StepCosts
from eagle3_jax.bench.tune import (
    BatchTuning,
    Candidate,
    Shape,
    break_even,
    choose,
    schedule_of,
)
from eagle3_jax.cli import run
from eagle3_jax.drafters import NGram
from eagle3_jax.measure.timing import Spread
from eagle3_jax.theory.speedup import conditional_rate_from_tau, draft_rate_from_tau

GOLDEN = tiny.GOLDEN / "official"
PAIR = ("--target", str(GOLDEN / "target"), "--drafter", str(GOLDEN / "eagle3"))


def chain(k: int, tau: float) -> Shape:
    return Shape(
        name=f"K={k}",
        num_draft_tokens=k,
        num_draft_steps=k,
        is_chain=True,
        mean_acceptance_length=tau,
    )


def gains(
    k: int, median: float, low: float | None = None, *, shape: Shape | None = None
) -> Candidate:
    spread = Spread(median, median if low is None else low, median)
    return Candidate(shape=shape or chain(k, 2.0), verify_cost=1.0, draft_cost=0.1, speedup=spread)


def at(batch: int, *candidates: Candidate) -> BatchTuning:
    return BatchTuning(batch=batch, plain_step=Spread(0.01, 0.01, 0.01), candidates=candidates)


def test_costs_are_ratios_within_a_repeat_and_the_gain_is_tau_over_them():
    # The machine is half as fast in the second repeat; v is 1.5, 1.5 and 1.25 plain steps, c 0.25
    # in all three.
    candidate = Candidate.of(
        chain(2, 2.2), plain=[4.0, 8.0, 4.0], verify=[6.0, 12.0, 5.0], draft=[1.0, 2.0, 1.0]
    )
    assert (candidate.verify_cost, candidate.draft_cost) == (1.5, 0.25)
    assert candidate.speedup.median == pytest.approx(2.2 / 2.0)  # v + 2 c
    assert candidate.speedup.high == pytest.approx((2.2 / 2.0 + 2.2 / 1.75) / 2)


def test_the_largest_gain_wins_unless_a_shorter_draft_or_none_is_as_good():
    assert choose([gains(1, 1.2), gains(3, 1.5, 1.4), gains(5, 1.3)]).shape.name == "K=3"
    assert choose([gains(1, 1.42), gains(2, 1.45), gains(3, 1.5, 1.4)]).shape.name == "K=1"
    assert choose([gains(2, 1.4), gains(3, 1.4)]).shape.name == "K=2"  # a tie
    for losing in ([gains(1, 0.9), gains(2, 0.7)], [gains(1, 1.1, 0.98)], [gains(1, 1.0)], []):
        assert choose(losing) is None


def test_a_tree_can_win_and_the_schedule_still_takes_the_best_chain():
    tree = Shape(
        name="tree",
        num_draft_tokens=9,
        num_draft_steps=3,
        is_chain=False,
        mean_acceptance_length=3.0,
    )

    tuned = at(1, gains(2, 1.4, 1.35), gains(0, 1.8, 1.7, shape=tree))
    assert tuned.best.shape is tree
    assert tuned.best_chain.shape.name == "K=2"
    result = tuning.Tuning(batches=(tuned,), checks=(), num_prompts=1, max_new_tokens=8, repeats=1)
    assert result.schedule.to_lists() == [[1, 1, 2], [2, 512, 0]]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([(1, 5), (4, 3), (16, 1)], [[1, 1, 5], [2, 4, 3], [5, 16, 1], [17, 512, 0]]),
        ([(1, 3), (2, 3), (8, 2)], [[1, 2, 3], [3, 8, 2], [9, 512, 0]]),
        ([(4, 3), (16, 0), (64, 0)], [[1, 4, 3], [5, 512, 0]]),
        ([(1, 4), (8, 0), (16, 2)], [[1, 1, 4], [2, 8, 0], [9, 16, 2], [17, 512, 0]]),
        ([(3, 0), (6, 2)], [[1, 3, 0], [4, 6, 2], [7, 512, 0]]),
        ([(512, 2)], [[1, 512, 2], [513, 513, 0]]),
        ([(600, 2)], [[1, 600, 2], [601, 601, 0]]),
    ],
)
def test_a_range_takes_the_length_of_its_upper_end_and_the_last_entry_is_plain(lengths, expected):
    schedule = schedule_of(lengths)
    assert schedule.to_lists() == expected
    assert [schedule.length_at(batch) for batch, _ in lengths] == [length for _, length in lengths]
    largest = lengths[-1][0]
    assert schedule.length_at(largest + 1) == schedule.length_at(10**6) == 0
    assert SpeculationSchedule.from_lists(schedule.to_lists()) == schedule
    assert schedule_of([(batch, 0) for batch, _ in lengths]) is None


def test_break_even_is_the_cost_of_a_round_under_three_names():
    costs = {"plain": [1.0], "verify": [1.5], "draft": [0.1]}
    level = break_even(Candidate.of(chain(3, 2.5), **costs))
    # 1.5 + 3 * 0.1
    assert level.mean_acceptance_length == pytest.approx(1.8)
    assert level.needed.draft_acceptance_rate == pytest.approx(0.8 / 3)
    assert level.needed.conditional_acceptance_rate == pytest.approx(
        conditional_rate_from_tau(1.8, 3)
    )
    assert level.measured.draft_acceptance_rate == draft_rate_from_tau(2.5, 3) == 0.5
    assert Candidate.of(chain(3, 1.8), **costs).speedup.median == pytest.approx(1.0)

    hopeless = Candidate.of(chain(1, 1.9), plain=[1.0], verify=[2.5], draft=[0.1])
    assert break_even(hopeless).needed is None


@pytest.fixture(scope="module")
def target():
    return tiny.target()


def test_acceptance_is_that_of_each_shape_and_costs_are_positive(target):
    head = tiny.eagle3(target)
    prompts = [[1, 2, 3], [4, 5]]
    tree = DynamicTree(num_nodes=4, max_depth=2, top_k=2)

    result = tuning.tune(
        target,
        head,
        prompts,
        batches=[3],
        chains=[2],
        trees=[tree],
        max_new_tokens=9,
        repeats=1,
        rounds=2,
    )

    (at_three,) = result.batches
    k2, tree4 = at_three.candidates

    direct = SpeculativeDecoder(target, head, num_speculative_tokens=2, stop_tokens=())
    stats = direct.generate(prompts, max_new_tokens=9).stats
    assert k2.shape.mean_acceptance_length == stats.mean_acceptance_length
    assert k2.shape.acceptance_per_position == tuple(stats.acceptance_per_position)
    assert not tree4.shape.is_chain
    assert (tree4.shape.num_draft_tokens, tree4.shape.num_draft_steps) == (3, 2)
    assert min(k2.verify_cost, k2.draft_cost, tree4.verify_cost, tree4.draft_cost) > 0

    (check,) = result.checks
    assert check.batch == at_three.batch == 3
    assert 0 < check.rows_running <= 1 and check.measured.median > 0
    assert check.predicted == at_three.fastest.speedup.median * check.rows_running
    json.dumps(result.to_json())


def test_rounds_in_which_prompt_lookup_finds_nothing_are_rounds_all_the_same(target):
    decoder = SpeculativeDecoder(target, NGram(), num_speculative_tokens=2, stop_tokens=())
    prompts = [[1, 2, 3, 1, 2], [4]]
    limit = 24
    rounds = sum(1 for _ in decoder.rounds([prompts[0]], max_new_tokens=limit))
    run = DecoderContender("n-gram", "float32", decoder).run(prompts, limit)
    counted = tuning._rounds(run)[0]
    assert 0 <= rounds - counted <= 2  # what the limit cut off is not seen
    assert counted > run.stats.num_drafts[0]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_ids": [1, 17, 5, 42]}\n{"prompt_ids": [9, 3]}\n')
    return str(path)


def test_the_command_writes_what_generate_reads(capsys, tmp_path, prompts, monkeypatch):
    output = tmp_path / "tuned.json"
    cache = ("--compilation-cache", "none")
    # The random head of this pair is never worth its cost, and costs must not depend on the
    # machine.
    monkeypatch.setattr(tuning, "step_costs", lambda *_, **__: StepCosts(1.0, 0.0, 0.0))
    monkeypatch.setattr(
        tuning.Candidate,
        "of",
        lambda shape, **_: gains(0, 2.0 / shape.num_draft_tokens, shape=shape),
    )
    arguments = [
        "tune", *PAIR, "--dtype", "float32", "--prompts", prompts,
        "--batch-sizes", "2", "--chains", "1",
        "--max-new-tokens", "6", "--repeats", "1", "--no-check", "--output", str(output), *cache,
    ]  # fmt: skip
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert (
        '{"num_speculative_tokens": 1, "num_speculative_tokens_per_batch_size": [[1, 2, 1], [3,'
        " 512, 0]]}" in out
    )
    assert "eagle3 generate --schedule '[[1,2,1],[3,512,0]]'" in out
    for words in ("S = τ / (v + G·c)", "conditional acceptance rate", "jax"):
        assert words in out
    written = json.loads(output.read_text())
    assert written["num_speculative_tokens_per_batch_size"] == [[1, 2, 1], [3, 512, 0]]

    def generated(*options: str) -> list[dict]:
        base = [
            "generate", *PAIR, "--prompts", prompts, "--max-new-tokens", "7", "--ignore-eos",
            "--json", *cache
        ]  # fmt: skip
        assert run([*base, "--batch-size", "2", *options]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    chosen = generated("--schedule", str(output))
    plain = generated("--drafter", "none")
    assert [row["token_ids"] for row in chosen] == [row["token_ids"] for row in plain]
    assert all(row["stats"]["num_draft_tokens"] > 0 for row in chosen)
