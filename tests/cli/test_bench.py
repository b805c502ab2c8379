"""The benchmark's arithmetic on runs of known length, and its measurements on a tiny pair."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax import SamplingParams, SimulatedAcceptance, SpeculationStats, SpeculativeDecoder
from eagle3_jax.bench.comparison import compare_with_plain
from eagle3_jax.bench.contenders import Contender, DecoderContender, Run
from eagle3_jax.bench.roofline import least_bytes_per_second, step_bytes
from eagle3_jax.bench.rounds import timed_rounds
from eagle3_jax.bench.run import measure
from eagle3_jax.bench.step_costs import _target_rounds, step_costs, target_seconds
from eagle3_jax.bench.timing import CompileClock, Interval, Latency, Spread, geometric_mean, ratio_of_sums
from eagle3_jax.drafters import NGram


@dataclasses.dataclass
class Scripted(Contender):
    """A contender whose runs take exactly as long as the script says."""

    name: str
    dtype: str
    decode_seconds: list[float]
    tokens: list[int]
    calls: list[str]
    stats: SpeculationStats | None = None

    @property
    def drafts(self) -> bool:
        return self.stats is not None

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
    assert rows["ours"].same_texts == 0
    assert rows["plain slow"].same_texts == 1
    assert rows["ours"].verify_cost is None


def test_acceptance_is_summed_over_prompts_before_it_is_divided():
    def stats(drafts, accepted):
        return SpeculationStats(
            num_drafts=np.array(drafts),
            num_draft_tokens=np.array(2 * drafts),
            num_accepted_tokens=np.array(accepted),
            num_accepted_tokens_per_pos=np.array([accepted, 0]),
        )

    class Uneven(Contender):
        name, dtype, drafts = "ours", "a", True

        def run(self, prompts, max_new_tokens):
            return Run(1.0, 1.0, [[1, 2]], stats(1, 1) if prompts == [[1]] else stats(9, 0))

    plain = Scripted("plain", "a", [1.0] * 4, [1, 2], [])
    report = measure([plain, Uneven()], [[1], [2]], max_new_tokens=2, repeats=1, baselines=["plain"])
    assert report.rows[1].acceptance.mean_acceptance_length == 1.1  # not the mean of 2 and 1


def test_costs_are_measured_for_every_shape(target, decoder):
    tree = SpeculativeDecoder(target, decoder.drafter, tree=tiny.STATIC_TREE, stop_tokens=())
    for one in (decoder, tree):
        costs = step_costs(one, [[1, 2, 3]], max_new_tokens=8, rounds=2)
        assert costs.verify_seconds > 0
        assert costs.draft_seconds > 0
        assert 0 < costs.commit_seconds < 1
    assert step_costs(SpeculativeDecoder(target), [[1, 2, 3]], max_new_tokens=8).draft_seconds == 0
    assert step_costs(SpeculativeDecoder(target, NGram()), [[1, 2, 3], [4]], max_new_tokens=8).draft_seconds > 0


def test_rounds_are_counted_as_the_decoder_counts_them(target, decoder):
    prompts, plain = [[1, 2, 3], [4, 5]], SpeculativeDecoder(target, stop_tokens=())
    given = {"max_new_tokens": 12, "tokens": 8, "compiler_options": {"xla_allow_excess_precision": False}}
    pace = timed_rounds(plain, prompts, **given)
    assert (pace.rounds, pace.tokens) == (8, 16)
    assert pace.seconds_per_round == pace.seconds / 8
    assert pace.tokens_per_second == 16 / pace.seconds
    stats = decoder.generate(prompts, max_new_tokens=9).stats  # the first token is the prefill's
    pace = timed_rounds(decoder, prompts, max_new_tokens=12, tokens=8)
    assert pace.tokens == 16
    assert pace.rounds <= stats.num_drafts <= 2 * pace.rounds  # of both rows together, and of the slower one
    with pytest.raises(Exception, match="xla_no_such_option"):
        timed_rounds(plain, prompts, max_new_tokens=12, tokens=8, compiler_options={"xla_no_such_option": 1})


def test_the_target_alone_is_fed_other_tokens_in_every_round(target, decoder):
    for one in (decoder, SpeculativeDecoder(target, stop_tokens=())):
        assert target_seconds(one, [[1, 2, 3]], max_new_tokens=8, rounds=2) > 0
        cache = one.prefill([[1, 2, 3]], max_new_tokens=8).cache
        tokens = jnp.ones((1, one.loop.drafter.num_nodes), jnp.int32)
        once, twice = (
            _target_rounds(one.params, jax.tree.map(jnp.copy, cache), tokens, loop=one.loop, rounds=rounds)[1]
            for rounds in (1, 2)
        )
        assert float(jnp.abs(once - twice).max()) > 1e-3  # other tokens in the second round


def test_a_decoder_is_measured_on_what_it_would_generate(target, decoder):
    prompts = [[1, 2, 3], [4, 5]]
    plain = DecoderContender("plain", "float32", SpeculativeDecoder(target, stop_tokens=()))
    report = measure(
        [plain, DecoderContender("chain K=3", "float32", decoder)], prompts, max_new_tokens=12, repeats=1,
        baselines=["plain"],
    )  # fmt: skip
    row = report.rows[1]
    stats = decoder.generate(prompts, max_new_tokens=12).stats
    assert row.acceptance.mean_acceptance_length == stats.mean_acceptance_length
    assert row.acceptance.per_position == stats.acceptance_per_position
    assert row.acceptance.conditional == stats.conditional_acceptance_rate
    assert row.lossless
    assert row.chunk.p50 > 0
    assert row.same_texts == len(prompts)
    assert row.num_draft_steps == 3
    assert row.predicted_ratio == stats.mean_acceptance_length / (row.verify_cost + 3 * row.draft_cost)
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
    assert row.first_token == Latency(1.0, 1.0, 1.0)
    assert row.repeatable
    assert report.programs_after_warm_up == 0
    with pytest.raises(ValueError, match="multiple"):
        measure([plain], [[1]], max_new_tokens=5, repeats=1, baselines=["plain"], batch_size=2)


def test_output_that_changes_and_programs_that_are_compiled_late_are_seen():
    class Restless(Contender):
        name, dtype, calls = "plain", "a", 0

        def run(self, prompts, max_new_tokens):
            self.calls += 1
            jax.jit(lambda x: x + self.calls)(jnp.ones(self.calls))
            return Run(1.0, 1.0, [[1, self.calls]])

    report = measure([Restless()], [[1]], max_new_tokens=2, repeats=2, baselines=["plain"])
    assert not report.rows[0].repeatable
    assert report.programs_after_warm_up >= 2


def test_a_comparison_says_whether_the_output_is_the_same(target, decoder):
    arguments = {"max_new_tokens": [8], "seed": 0, "repeats": 2}
    greedy = compare_with_plain(decoder, [[1, 2, 3]], sampling=SamplingParams(), **arguments)
    assert greedy.same_output is True
    assert len(greedy.ratios) == 2
    assert min(greedy.ratios) > 0
    assert not greedy.is_plain
    sampled = compare_with_plain(decoder, [[1, 2, 3]], sampling=SamplingParams(temperature=1.0), **arguments)
    assert sampled.same_output is None
    alone = compare_with_plain(SpeculativeDecoder(target), [[1, 2]], sampling=SamplingParams(), **arguments)
    assert alone.is_plain


def test_overlapping_spans_are_counted_once():
    clock = CompileClock()
    clock._spans = [(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (7.0, 8.0)]
    assert math.isclose(clock.seconds, 6.0)


def test_a_ratio_of_sums_and_its_interval_by_hand():
    # Two pairs, (2, 1) and (4, 4): resampled they are both the first, both the second, or one each.
    found = ratio_of_sums([2.0, 4.0], [1.0, 4.0])
    assert found == Interval(6 / 5, 1.0, 2.0)  # each extreme is drawn in a quarter of the resamples
    assert ratio_of_sums([2.0, 4.0], [1.0, 4.0], seed=7) == found
    assert ratio_of_sums([3.0], [2.0]) == Interval(1.5)
    with pytest.raises(ValueError, match="expected pairs"):
        ratio_of_sums([1.0], [])


def test_the_interval_resamples_pairs_and_not_each_side_alone():
    times = np.array([1.0, 10.0, 100.0, 1000.0])  # prompts of very different length, all twice as fast
    assert ratio_of_sums((2 * times).tolist(), times.tolist()) == Interval(2.0, 2.0, 2.0)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(100):
        below = rng.uniform(1.0, 2.0, 40)
        above = 1.5 * below * rng.lognormal(-0.005, 0.1, 40)  # of mean 1
        found = ratio_of_sums(above.tolist(), below.tolist())
        inside += found.low <= 1.5 <= found.high
    assert 88 <= inside <= 99


def test_a_geometric_mean_by_hand():
    found = geometric_mean([1.0, 4.0])
    assert (found.value, found.low, found.high) == (pytest.approx(2.0), 1.0, pytest.approx(4.0))
    assert (geometric_mean([1.0]), geometric_mean([3.0]).low) == (Interval(1.0), None)
    with pytest.raises(ValueError, match="at least one"):
        geometric_mean([])


class Planted(Contender):
    """Two rows a batch; each prompt names how many of its two drafts of depth 2 are accepted in full."""

    name, dtype, drafts = "ours", "a", True

    def run(self, prompts, max_new_tokens):
        full = np.array([prompt[0] for prompt in prompts])
        stats = SpeculationStats(
            num_drafts=np.full(len(prompts), 2),
            num_draft_tokens=np.full(len(prompts), 4),
            num_accepted_tokens=2 * full,
            num_accepted_tokens_per_pos=np.stack([full, full], axis=1),
        )
        return Run(1.0, 0.5, [[1, 2]] * len(prompts), stats)


def test_rates_by_task_come_from_the_rows_of_that_task():
    plain = Scripted("plain", "a", [1.0] * 6, [1, 2], [])
    report = measure(
        [plain, Planted()], [[2], [1], [0], [2], [1], [1]], tasks=["code", "code", "code", "prose", "prose", "prose"],
        max_new_tokens=2, repeats=1, baselines=["plain"], batch_size=2,
    )  # fmt: skip
    code, prose = report.rows[1].tasks
    assert (code.task, code.num_prompts, prose.task, prose.num_prompts) == ("code", 3, "prose", 3)
    assert code.acceptance.mean_acceptance_length == 1 + 2 * (2 + 1 + 0) / 6
    assert code.acceptance.per_position == [0.5, 0.5]
    assert code.acceptance.conditional == [0.5, 1.0]
    assert prose.acceptance.draft_acceptance_rate == 2 * (2 + 1 + 1) / 12
    assert code.ratio == Interval(2.0)  # one batch of code alone; the mixed one tells of no task
    assert report.rows[1].prompt_ratio.value == pytest.approx(2.0)
    with pytest.raises(ValueError, match="2 tasks for 1 prompts"):
        measure([plain], [[1]], tasks=["a", "b"], max_new_tokens=2, repeats=1, baselines=["plain"])


def test_rates_by_task_are_unknown_where_a_mixed_batch_tells_only_its_sum():
    stats = SpeculationStats(
        num_drafts=np.array(2), num_draft_tokens=np.array(2), num_accepted_tokens=np.array(1),
        num_accepted_tokens_per_pos=np.array([1]),
    )  # fmt: skip
    contenders = [Scripted("plain", "a", [1.0] * 4, [1, 2], []), Scripted("ours", "a", [1.0] * 4, [1, 2], [], stats)]
    report = measure(
        contenders, [[1], [2], [3], [4]], tasks=["x", "y", "y", "y"], max_new_tokens=2, repeats=1, baselines=["plain"],
        batch_size=2,
    )  # fmt: skip
    x, y = report.rows[1].tasks
    assert x.acceptance is None
    assert y.acceptance is None
    assert report.rows[1].acceptance.mean_acceptance_length == 1.5


def test_simulated_acceptance_is_marked_and_not_compared(target):
    drafter = tiny.eagle3(target)
    simulated = SimulatedAcceptance.of_length(3.0, 3)
    decoder = SpeculativeDecoder(target, drafter, num_speculative_tokens=3, stop_tokens=(), verifier=simulated)
    plain = DecoderContender("plain", "float32", SpeculativeDecoder(target, stop_tokens=()))
    contenders = [plain, DecoderContender("chain", "float32", decoder)]
    report = measure(contenders, [[1, 2, 3]], max_new_tokens=16, repeats=1, baselines=["plain"], cost_rounds=0)
    assert [row.lossless for row in report.rows] == [True, False]
    assert report.rows[1].same_texts is None
    assert report.rows[1].acceptance.mean_acceptance_length == 3.0


def test_who_does_not_take_a_batch_is_named_and_the_rest_is_measured():
    class Single(Contender):
        name, dtype, drafts, largest_batch = "lookup", "a", True, 1

        def run(self, prompts, max_new_tokens):
            raise AssertionError("never asked")

    plain = Scripted("plain", "a", [1.0] * 4, [1, 2], [])
    report = measure([plain, Single()], [[1], [2]], max_new_tokens=2, repeats=1, baselines=["plain"], batch_size=2)
    assert [row.name for row in report.rows] == ["plain"]
    assert [(one.name, one.reason) for one in report.not_measured] == [("lookup", "takes 1 prompt at a time, not 2")]


def test_a_method_above_the_roofline_is_found(target, monkeypatch):
    monkeypatch.setattr("eagle3_jax.bench.run.ceiling", lambda target, *, rows, context, large: 1e9)
    decoder = DecoderContender("plain", "float32", SpeculativeDecoder(target, stop_tokens=()))
    magic = Scripted("magic", "float32", [1.0, 1e-9], [1, 2], [])
    report = measure(
        [decoder, magic], [[1]], max_new_tokens=2, repeats=1, baselines=["plain"], cost_rounds=0, streams=0, large=1
    )
    assert [row.name for row in report.too_fast] == ["magic"]
    assert report.rows[1].bandwidth_share == pytest.approx(1e9 * step_bytes(target, rows=1, context=0) / 1e9)
    assert least_bytes_per_second(target, tokens_per_second=12.0, tokens_per_round=3.0, rows=2) == 2 * step_bytes(
        target, rows=2, context=0
    )
    assert measure(
        [decoder], [[1]], max_new_tokens=2, repeats=1, baselines=["plain"], cost_rounds=0, streams=0
    ).rows[0].bandwidth_share is None  # fmt: skip
