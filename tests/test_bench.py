"""The benchmark's arithmetic on runs of known length, and its measurements on a tiny pair."""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax import SamplingParams, SpeculationStats, SpeculativeDecoder
from eagle3_jax.analysis.bench import DecoderContender, Run, compare_with_plain, measure, step_costs
from eagle3_jax.analysis.timing import CompileClock, Latency, Spread
from eagle3_jax.cli import run
from eagle3_jax.drafters import NGram

GOLDEN = tiny.GOLDEN / "official"


@dataclasses.dataclass
class Scripted:
    """A contender whose runs take exactly as long as the script says."""

    name: str
    dtype: str
    decode_seconds: list[float]
    tokens: list[int]
    calls: list[str]
    stats: SpeculationStats | None = None

    def run(self, prompts: list[list[int]], max_new_tokens: int) -> Run:
        self.calls.append(self.name)
        return Run(1.0, self.decode_seconds.pop(0), [self.tokens] * len(prompts), self.stats)


@pytest.fixture(scope="module")
def target():
    return tiny.target()


@pytest.fixture(scope="module")
def decoder(target):
    return SpeculativeDecoder(target, tiny.eagle3(target), num_speculative_tokens=3, stop_tokens=())


def test_ratios_are_paired_by_repeat_and_taken_against_the_fastest_plain_run():
    calls: list[str] = []
    five = list(range(5))  # four of them after the prefill
    slow = Scripted("plain slow", "a", [9.0, 8.0, 8.0, 8.0], five, calls)
    fast = Scripted("plain fast", "b", [9.0, 2.0, 4.0, 1.0], five, calls)
    ours = Scripted("ours", "b", [9.0, 1.0, 1.0, 1.0], [*five[:4], 99], calls)
    report = measure([slow, fast, ours], [[1]], max_new_tokens=5, repeats=3, baselines=["plain slow", "plain fast"])
    assert calls == ["plain slow", "plain fast", "ours"] * 4  # in turn, and the first round is the warm-up
    assert report.baseline == "plain fast"
    rows = {row.name: row for row in report.rows}
    assert rows["plain fast"].decode_tokens_per_second == Spread(2.0, 1.5, 3.0)  # 4 tokens in 2, 4 and 1 seconds
    assert rows["ours"].ratio == Spread(2.0, 1.5, 3.0)  # 2/1, 4/1 and 1/1
    assert rows["plain slow"].ratio.median == 0.25
    assert rows["ours"].total_tokens_per_second.median == 2.5  # 5 tokens in 1 + 1 seconds
    assert rows["ours"].total_ratio.median == 1.5  # (1 + 2) / (1 + 1)
    assert rows["ours"].same_output is False
    assert rows["plain slow"].same_output is True
    assert rows["ours"].verify_cost is None


def test_acceptance_is_summed_over_prompts_before_it_is_divided():
    def stats(drafts, accepted):
        return SpeculationStats(
            num_drafts=np.array(drafts),
            num_draft_tokens=np.array(2 * drafts),
            num_accepted_tokens=np.array(accepted),
            num_accepted_tokens_per_pos=np.array([accepted, 0]),
        )

    class Uneven:
        name, dtype = "ours", "a"

        def run(self, prompts, max_new_tokens):
            return Run(1.0, 1.0, [[1, 2]], stats(1, 1) if prompts == [[1]] else stats(9, 0))

    plain = Scripted("plain", "a", [1.0] * 4, [1, 2], [])
    report = measure([plain, Uneven()], [[1], [2]], max_new_tokens=2, repeats=1, baselines=["plain"])
    assert report.rows[1].mean_acceptance_length == 1.1  # not the mean of 2 and 1


def test_costs_are_measured_for_every_shape(target, decoder):
    tree = SpeculativeDecoder(target, decoder.drafter, tree=tiny.STATIC_TREE, stop_tokens=())
    for one in (decoder, tree):
        costs = step_costs(one, [[1, 2, 3]], max_new_tokens=8, rounds=2)
        assert costs.verify_seconds > 0
        assert costs.draft_seconds > 0
    assert step_costs(SpeculativeDecoder(target), [[1, 2, 3]], max_new_tokens=8).draft_seconds == 0
    assert step_costs(SpeculativeDecoder(target, NGram()), [[1, 2, 3], [4]], max_new_tokens=8).draft_seconds > 0


def test_a_decoder_is_measured_on_what_it_would_generate(target, decoder):
    prompts = [[1, 2, 3], [4, 5]]
    plain = DecoderContender("plain", "float32", SpeculativeDecoder(target, stop_tokens=()))
    report = measure(
        [plain, DecoderContender("chain K=3", "float32", decoder)], prompts, max_new_tokens=12, repeats=1,
        baselines=["plain"],
    )  # fmt: skip
    row = report.rows[1]
    stats = decoder.generate(prompts, max_new_tokens=12).stats
    assert row.mean_acceptance_length == stats.mean_acceptance_length
    assert row.acceptance_per_position == stats.acceptance_per_position
    assert row.same_output is True
    assert row.num_draft_steps == 3
    assert row.predicted_ratio == row.mean_acceptance_length / (row.verify_cost + 3 * row.draft_cost)
    assert report.rows[0].num_draft_steps == 0
    json.dumps(report.to_json())


def test_a_batch_counts_the_tokens_of_all_its_rows():
    calls: list[str] = []
    five = list(range(5))
    plain = Scripted("plain", "a", [9.0, 9.0, 2.0, 4.0], five, calls)  # two batches to warm up, then two
    report = measure([plain], [[1], [2], [3], [4]], max_new_tokens=5, repeats=1, baselines=["plain"], batch_size=2)
    (row,) = report.rows
    assert len(calls) == 4
    assert row.decode_tokens_per_second.median == 16 / 6  # 4 rows of 4 tokens after the first, in 2 + 4 seconds
    assert row.total_tokens_per_second.median == 20 / 8
    assert (row.per_token.p50, row.per_token.p99) == (0.75, pytest.approx(0.995))  # 2 / 4 and 4 / 4 seconds
    assert row.first_token == Latency(1.0, 1.0)
    assert row.repeatable
    assert report.programs_after_warm_up == 0
    with pytest.raises(ValueError, match="multiple"):
        measure([plain], [[1]], max_new_tokens=5, repeats=1, baselines=["plain"], batch_size=2)


def test_output_that_changes_and_programs_that_are_compiled_late_are_seen():
    class Restless:
        name, dtype, calls = "plain", "a", 0

        def run(self, prompts, max_new_tokens):
            self.calls += 1
            jax.jit(lambda x: x + self.calls)(jnp.ones(self.calls))
            return Run(1.0, 1.0, [[1, self.calls]])

    report = measure([Restless()], [[1]], max_new_tokens=2, repeats=2, baselines=["plain"])
    assert not report.rows[0].repeatable
    assert report.programs_after_warm_up >= 2


def test_batches_of_a_decoder_write_what_single_prompts_do(target, decoder):
    prompts = [[1, 2, 3], [4, 5]]
    both = DecoderContender("chain", "float32", decoder).run(prompts, 8)
    assert both.tokens == decoder.generate(prompts, max_new_tokens=8).tokens
    costs = step_costs(decoder, prompts, max_new_tokens=8, rounds=2)
    assert costs.verify_seconds > 0 < costs.draft_seconds


def test_a_comparison_says_whether_the_output_is_the_same(target, decoder):
    arguments = {"max_new_tokens": [8], "seed": 0, "repeats": 2}
    greedy = compare_with_plain(decoder, [[1, 2, 3]], sampling=SamplingParams(), **arguments)
    assert greedy.same_output is True
    assert greedy.ratio.median > 0
    assert not greedy.is_plain
    sampled = compare_with_plain(decoder, [[1, 2, 3]], sampling=SamplingParams(temperature=1.0), **arguments)
    assert sampled.same_output is None
    alone = compare_with_plain(SpeculativeDecoder(target), [[1, 2]], sampling=SamplingParams(), **arguments)
    assert alone.is_plain


def test_the_clock_counts_a_compilation_once_and_a_second_call_not_at_all():
    @jax.jit
    def outer(x):
        return inner(x) + 1.0

    @jax.jit
    def inner(x):
        for _ in range(40):
            x = jnp.sin(x) @ x
        return x

    x = jnp.ones((8, 8))
    with CompileClock() as first:
        jax.block_until_ready(outer(x))
    with CompileClock() as second:
        jax.block_until_ready(outer(x))
    assert first.seconds > 0
    assert second.seconds == 0


def test_overlapping_spans_are_counted_once():
    clock = CompileClock()
    clock._spans = [(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (7.0, 8.0)]
    assert math.isclose(clock.seconds, 6.0)


@pytest.mark.parametrize(("prompts", "tokens", "repeats"), [([], 8, 1), ([[1]], 1, 1), ([[1]], 8, 0)])
def test_nothing_to_measure_is_refused(prompts, tokens, repeats):
    with pytest.raises(ValueError, match="at least"):
        measure([], prompts, max_new_tokens=tokens, repeats=repeats, baselines=[])


def test_the_command_measures_every_method(capsys, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [1, 17, 5, 42]}\n{"prompt_ids": [1, 2]}\n')
    arguments = [
        "bench", "--target", str(GOLDEN / "target"), "--drafter", str(GOLDEN / "eagle3"), "--dtype", "float32",
        "--prompts", str(prompts), "--max-prompts", "1", "--max-new-tokens", "4", "--repeats", "1", "--chains", "1",
        "--tree", "num_nodes=4,max_depth=2,top_k=2",
    ]  # fmt: skip
    assert run([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in report["rows"]]
    assert names[:4] == ["plain float32", "chain K=1", "tree N=4 G=2", "n-gram K=5"]
    assert ("transformers generate" in names) == (report["not_measured"] is None)
    assert report["num_prompts"] == 1
    assert all(row["same_output"] for row in report["rows"])
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    assert run(arguments) == 0
    out = capsys.readouterr().out
    for word in (*names[:4], "baseline", "τ", "batch 1", "jax", "transformers generate: not measured; pip install"):
        assert word in out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--batch-size", "9"), "--batch-size"),
        (("--chains", "0-3"), "--chains"),
        (("--chains", "x"), "--chains"),
        (("--tree", "x"), "--tree"),
    ],
)
def test_the_command_refuses(capsys, options, named):
    assert run(["bench", *options]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
