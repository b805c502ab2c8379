"""The benchmark's arithmetic on runs of known length, and its measurements on a tiny pair."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax import SamplingParams, SimulatedAcceptance, SpeculationStats, SpeculativeDecoder
from eagle3_jax.bench.comparison import compare_with_plain
from eagle3_jax.bench.contenders import Contender, DecoderContender, Run
from eagle3_jax.bench.results import Report
from eagle3_jax.bench.roofline import least_bytes_per_second, step_bytes
from eagle3_jax.bench.rounds import timed_rounds
from eagle3_jax.bench.run import measure
from eagle3_jax.bench.step_costs import (
    _draft_rounds,
    _first_output,
    _target_rounds,
    step_costs,
    target_seconds,
)
from eagle3_jax.drafters import NGram
from eagle3_jax.measure.timing import (
    CompileClock,
    Interval,
    Latency,
    Spread,
    geometric_mean,
    ratio_of_sums,
)
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.topology import Chain


@dataclasses.dataclass
class Scripted(Contender):
    """A contender whose runs are scripted."""

    name: str
    answer: Callable[[list[list[int]]], Run]
    dtype: str = "a"
    drafts: bool = False
    largest_batch: int | None = None
    calls: list[str] = dataclasses.field(default_factory=list)

    def run(self, prompts: list[list[int]], max_new_tokens: int) -> Run:
        self.calls.append(self.name)
        return self.answer(prompts)


def timed(
    name: str,
    seconds: list[float],
    tokens: tuple[int, ...] = (1, 2),
    stats: SpeculationStats | None = None,
    **options,
) -> Scripted:
    """A contender whose runs take as long as the script says, and one second for the prefill."""
    script = iter(seconds)
    answer = lambda prompts: Run(1.0, next(script), [list(tokens)] * len(prompts), stats)
    return Scripted(name, answer, drafts=stats is not None, **options)


def measured(*contenders: Contender, prompts: list[list[int]] | None = None, **options) -> Report:
    defaults = {"max_new_tokens": 2, "repeats": 1, "baselines": ["plain"]}
    return measure(contenders, prompts or [[1]], **defaults | options)


def counters(drafts, drafted, accepted, per_position) -> SpeculationStats:
    return SpeculationStats(
        num_drafts=np.array(drafts),
        num_draft_tokens=np.array(drafted),
        num_accepted_tokens=np.array(accepted),
        num_accepted_tokens_per_pos=np.array(per_position),
    )


@pytest.fixture(scope="module")
def target():
    return tiny.target()


@pytest.fixture(scope="module")
def decoder(target):
    return SpeculativeDecoder(target, tiny.eagle3(target), num_speculative_tokens=3, stop_tokens=())


@pytest.fixture(scope="module")
def plain(target):
    return DecoderContender("plain", "float32", SpeculativeDecoder(target, stop_tokens=()))


def test_ratios_are_paired_by_repeat_and_taken_against_the_fastest_plain_run():
    calls: list[str] = []
    # Four of them after the prefill.
    five = tuple(range(5))
    slow = timed("plain slow", [9.0, 8.0, 8.0, 8.0], five, calls=calls)
    fast = timed("plain fast", [9.0, 2.0, 4.0, 1.0], five, dtype="b", calls=calls)
    ours = timed("ours", [9.0, 1.0, 1.0, 1.0], (*five[:4], 99), dtype="b", calls=calls)

    report = measured(
        slow, fast, ours, max_new_tokens=5, repeats=3, baselines=["plain slow", "plain fast"]
    )
    # Contenders run in turn, and the first round is the warm-up.
    assert calls == ["plain slow", "plain fast", "ours"] * 4

    assert report.baseline == "plain fast"
    rows = {row.name: row for row in report.rows}
    # 4 tokens in 2, 4 and 1 seconds.
    assert rows["plain fast"].decode_tokens_per_second == Spread(2.0, 1.5, 3.0)
    # By repeat 2/1, 4/1 and 1/1.
    assert rows["ours"].ratio == Spread(2.0, 1.5, 3.0)
    assert rows["plain slow"].ratio.median == 0.25
    # 5 tokens in 1 + 1 seconds.
    assert rows["ours"].total_tokens_per_second.median == 2.5
    # (1 + 2) / (1 + 1).
    assert rows["ours"].total_ratio.median == 1.5

    assert (rows["ours"].same_texts, rows["plain slow"].same_texts) == (0, 1)
    assert rows["ours"].verify_cost is None


def test_a_batch_counts_the_tokens_of_all_its_rows():
    # Two batches warm up, then two are measured.
    plain = timed("plain", [9.0, 9.0, 2.0, 4.0], tuple(range(5)))
    report = measured(plain, prompts=[[1], [2], [3], [4]], max_new_tokens=5, batch_size=2)
    (row,) = report.rows
    assert len(plain.calls) == 4
    # 4 rows of 4 tokens after the first, in 2 + 4 seconds.
    assert row.decode_tokens_per_second.median == 16 / 6
    assert row.total_tokens_per_second.median == 20 / 8
    # 2 / 4 and 4 / 4 seconds.
    assert (row.per_token.p50, row.per_token.p99) == (0.75, pytest.approx(0.995))
    assert row.first_token == Latency(1.0, 1.0, 1.0)
    assert row.repeatable
    assert report.programs_after_warm_up == 0

    with pytest.raises(ValueError, match="multiple"):
        measured(plain, batch_size=2)


def test_acceptance_is_summed_over_prompts_before_it_is_divided():
    stats = {1: counters(1, 2, 1, [1, 0]), 2: counters(9, 18, 0, [0, 0])}
    uneven = Scripted(
        "ours", lambda prompts: Run(1.0, 1.0, [[1, 2]], stats[prompts[0][0]]), drafts=True
    )
    report = measured(timed("plain", [1.0] * 4), uneven, prompts=[[1], [2]])
    assert report.rows[1].acceptance.mean_acceptance_length == 1.1  # not the mean of 2 and 1


def test_rates_by_task_come_from_the_rows_of_that_task():
    def answer(prompts):
        """Two rows a batch; each prompt names how many of its two drafts are accepted.

        Both drafts are of depth 2, accepted in full or not at all.
        """
        full = np.array([prompt[0] for prompt in prompts])
        stats = counters([2, 2], [4, 4], 2 * full, np.stack([full, full], axis=1))
        return Run(1.0, 0.5, [[1, 2]] * len(prompts), stats)

    ours = Scripted("ours", answer, drafts=True)
    plain = timed("plain", [1.0] * 6)
    prompts = [[2], [1], [0], [2], [1], [1]]
    report = measured(
        plain, ours, prompts=prompts, tasks=["code"] * 3 + ["prose"] * 3, batch_size=2
    )
    code, prose = report.rows[1].tasks
    assert (code.task, code.num_prompts, prose.task, prose.num_prompts) == ("code", 3, "prose", 3)
    assert code.acceptance.mean_acceptance_length == 1 + 2 * (2 + 1 + 0) / 6
    assert code.acceptance.per_position == [0.5, 0.5]
    assert code.acceptance.conditional == [0.5, 1.0]
    assert prose.acceptance.draft_acceptance_rate == 2 * (2 + 1 + 1) / 12
    assert code.ratio == Interval(2.0)  # one batch has only code; the mixed one counts for no task
    assert report.rows[1].prompt_ratio.value == pytest.approx(2.0)
    with pytest.raises(ValueError, match="2 tasks for 1 prompts"):
        measured(plain, tasks=["a", "b"])


def test_rates_by_task_are_unknown_where_a_mixed_batch_tells_only_its_sum():
    ours = timed("ours", [1.0] * 4, stats=counters(2, 2, 1, [1]))
    prompts = [[1], [2], [3], [4]]
    tasks = ["x", "y", "y", "y"]
    report = measured(timed("plain", [1.0] * 4), ours, prompts=prompts, tasks=tasks, batch_size=2)
    assert [task.acceptance for task in report.rows[1].tasks] == [None, None]
    assert report.rows[1].acceptance.mean_acceptance_length == 1.5


def test_who_does_not_take_a_batch_is_named_and_the_rest_is_measured():
    single = Scripted("lookup", lambda prompts: pytest.fail("was run"), largest_batch=1)
    report = measured(timed("plain", [1.0] * 4), single, prompts=[[1], [2]], batch_size=2)
    assert [row.name for row in report.rows] == ["plain"]
    assert [(missing.name, missing.reason) for missing in report.not_measured] == [
        ("lookup", "takes 1 prompt at a time, not 2")
    ]


def test_output_that_changes_and_programs_that_are_compiled_late_are_seen():
    class Restless(Contender):
        name = "plain"
        dtype = "a"
        calls = 0

        def run(self, prompts, max_new_tokens):
            self.calls += 1
            jax.jit(lambda x: x + self.calls)(jnp.ones(self.calls))
            return Run(1.0, 1.0, [[1, self.calls]])

    report = measured(Restless(), repeats=2)
    assert not report.rows[0].repeatable
    assert report.programs_after_warm_up >= 2


def test_a_decoder_is_measured_on_what_it_would_generate(plain, decoder):
    prompts = [[1, 2, 3], [4, 5]]

    report = measured(
        plain, DecoderContender("chain K=3", "float32", decoder), prompts=prompts, max_new_tokens=12
    )
    row = report.rows[1]
    stats = decoder.generate(prompts, max_new_tokens=12).stats
    assert row.acceptance.mean_acceptance_length == stats.mean_acceptance_length
    assert row.acceptance.per_position == stats.acceptance_per_position
    assert row.acceptance.conditional == stats.conditional_acceptance_rate
    assert row.lossless and row.same_texts == len(prompts)
    assert row.chunk.p50 > 0
    assert (report.rows[0].num_draft_steps, row.num_draft_steps) == (0, 3)

    cost = row.verify_cost + 3 * row.draft_cost
    assert row.predicted_ratio == stats.mean_acceptance_length / cost
    json.dumps(report.to_json())


def test_simulated_acceptance_is_marked_and_not_compared(target, plain, decoder):
    rule = {"num_speculative_tokens": 3, "verifier": SimulatedAcceptance.of_length(3.0, 3)}
    simulated = SpeculativeDecoder(target, decoder.drafter, stop_tokens=(), **rule)
    chain = DecoderContender("chain", "float32", simulated)
    report = measured(plain, chain, prompts=[[1, 2, 3]], max_new_tokens=16, cost_rounds=0)
    assert [row.lossless for row in report.rows] == [True, False]
    assert report.rows[1].same_texts is None
    assert report.rows[1].simulated_rates == [1.0, 1.0, 0.0]
    assert report.rows[1].acceptance.mean_acceptance_length == 3.0


def test_a_method_above_the_roofline_is_found(target, plain, monkeypatch):

    monkeypatch.setattr("eagle3_jax.bench.run.ceiling", lambda target, *, rows, context, large: 1e9)
    magic = timed("magic", [1.0, 1e-9], dtype="float32")
    quick = {"cost_rounds": 0, "streams": 0}
    report = measured(plain, magic, large=1, **quick)

    assert [row.name for row in report.too_fast] == ["magic"]
    assert report.rows[1].bandwidth_share == pytest.approx(
        1e9 * step_bytes(target, rows=1, context=0) / 1e9
    )

    assert least_bytes_per_second(
        target, tokens_per_second=12.0, tokens_per_round=3.0, rows=2
    ) == 2 * step_bytes(target, rows=2, context=0)
    assert measured(plain, **quick).rows[0].bandwidth_share is None


def test_costs_are_measured_for_every_shape(target, decoder):
    tree = SpeculativeDecoder(target, decoder.drafter, tree=tiny.STATIC_TREE, stop_tokens=())
    for drafting in (decoder, tree):
        costs = step_costs(drafting, [[1, 2, 3]], max_new_tokens=8, rounds=2)
        assert costs.verify_seconds > 0 and costs.draft_seconds > 0 and 0 < costs.commit_seconds < 1
    assert step_costs(SpeculativeDecoder(target), [[1, 2, 3]], max_new_tokens=8).draft_seconds == 0
    assert (
        step_costs(
            SpeculativeDecoder(target, NGram()), [[1, 2, 3], [4]], max_new_tokens=8
        ).draft_seconds
        > 0
    )


def test_every_head_of_a_draft_is_timed(target):
    """The compiler leaves out what has no effect: heads whose tokens nothing reads."""
    heads = tiny.medusa(target, Chain(3), shared_output=False)
    decoder = SpeculativeDecoder(target, heads, stop_tokens=())
    state = decoder.prefill([[1, 2, 3]], max_new_tokens=8)
    features = _first_output(decoder, [[1, 2, 3]], 4).features

    # Lowering has shapes in place of arrays.
    with tiny.unchecked():
        program = _draft_rounds.lower(decoder.loop, decoder.params, state, features, rounds=2)
        products = program.compile().as_text().count(" dot(")
    # A residual block and an output matrix for each of three heads.
    assert products == 2 * 3


def test_rounds_are_counted_as_the_decoder_counts_them(plain, decoder):
    prompts = [[1, 2, 3], [4, 5]]
    options = {
        "max_new_tokens": 12,
        "tokens": 8,
        "compiler_options": {"xla_allow_excess_precision": False},
    }
    pace = timed_rounds(plain.decoder, prompts, **options)
    assert (pace.rounds, pace.tokens) == (8, 16)
    assert pace.seconds_per_round == pace.seconds / 8
    assert pace.tokens_per_second == 16 / pace.seconds

    # The first token is the prefill's.
    stats = decoder.generate(prompts, max_new_tokens=9).stats
    pace = timed_rounds(decoder, prompts, max_new_tokens=12, tokens=8)
    assert pace.tokens == 16

    # Rounds of both rows together, and of the slower one.
    assert pace.rounds <= stats.num_drafts <= 2 * pace.rounds

    with pytest.raises(Exception, match="xla_no_such_option"):
        timed_rounds(
            plain.decoder, prompts, **options | {"compiler_options": {"xla_no_such_option": 1}}
        )


def test_the_target_alone_is_fed_other_tokens_in_every_round(plain, decoder):
    for measured_decoder in (decoder, plain.decoder):
        assert target_seconds(measured_decoder, [[1, 2, 3]], max_new_tokens=8, rounds=2) > 0

        loop = measured_decoder.loop
        cache = measured_decoder.prefill([[1, 2, 3]], max_new_tokens=8).cache
        tokens = jnp.ones((1, loop.drafter.num_nodes), jnp.int32)
        once, twice = (
            _target_rounds(
                measured_decoder.params,
                jax.tree.map(jnp.copy, cache),
                tokens,
                loop=loop,
                rounds=rounds,
            )[1]
            for rounds in (1, 2)
        )

        # The tokens of the second round are others.
        assert float(jnp.abs(once - twice).max()) > 1e-3


def test_the_target_alone_is_told_whether_its_block_is_a_chain(target, decoder):
    """The attention kernel reads no mask of a chain: a target that is not told is slower."""
    received = []

    class Recording(DecoderTarget):
        def __call__(self, *arguments, is_chain=False, **options):
            received.append(is_chain)
            return super().__call__(*arguments, **options)

    model = Recording(target.model.config, target.model.precision)
    recording = dataclasses.replace(target, model=model)
    for shape, is_chain in (
        ({"num_speculative_tokens": 3}, True),
        ({"tree": tiny.STATIC_TREE}, False),
    ):
        drafting = SpeculativeDecoder(recording, decoder.drafter, stop_tokens=(), **shape)
        cache = drafting.prefill([[1, 2, 3]], max_new_tokens=8).cache
        tokens = jnp.ones((1, drafting.loop.drafter.num_nodes), jnp.int32)
        received.clear()
        _target_rounds(drafting.params, cache, tokens, loop=drafting.loop, rounds=1)
        assert received and set(received) == {is_chain}


def test_a_comparison_says_whether_the_output_is_the_same(target, decoder):
    arguments = {"max_new_tokens": [8], "seed": 0, "repeats": 2}
    greedy = compare_with_plain(decoder, [[1, 2, 3]], sampling=SamplingParams(), **arguments)
    assert greedy.same_output is True and not greedy.is_plain
    assert len(greedy.ratios) == 2 and min(greedy.ratios) > 0
    sampled = compare_with_plain(
        decoder, [[1, 2, 3]], sampling=SamplingParams(temperature=1.0), **arguments
    )
    assert sampled.same_output is None
    assert compare_with_plain(
        SpeculativeDecoder(target), [[1, 2]], sampling=SamplingParams(), **arguments
    ).is_plain

    # Without time left, three turns are measured.
    arguments |= {"repeats": 5, "seconds": 0.0}
    short = compare_with_plain(decoder, [[1, 2, 3]], sampling=SamplingParams(), **arguments)
    assert len(short.ratios) == 3


def test_overlapping_spans_are_counted_once():
    clock = CompileClock()
    clock._spans = [(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (7.0, 8.0)]
    assert clock.seconds == pytest.approx(6.0)


def test_a_clock_tells_when_a_compilation_begins():
    program = jax.jit(lambda x: 3 * x + 1)
    begun = []
    with CompileClock() as clock:
        clock.on_compiling = lambda: begun.append(clock.programs)
        program(np.float32(2))
        assert begun == [0] and clock.programs == 1
        program(np.float32(3))
    assert begun == [0]


def test_figures_and_their_intervals_by_hand():
    # Two pairs, (2, 1) and (4, 4): resampled they are both the first, both the second, or one each.
    ratio = ratio_of_sums([2.0, 4.0], [1.0, 4.0])
    assert ratio == Interval(6 / 5, 1.0, 2.0)  # each extreme is a quarter of the resamples
    assert ratio_of_sums([3.0], [2.0]) == Interval(1.5)
    # Prompts of very different length, all twice as fast: pairs.
    times = np.array([1.0, 10.0, 100.0, 1000.0])
    assert ratio_of_sums(2 * times, times) == Interval(2.0, 2.0, 2.0)
    mean = geometric_mean([1.0, 4.0])
    assert (mean.value, mean.low, mean.high) == (pytest.approx(2.0), 1.0, pytest.approx(4.0))
    assert geometric_mean([1.0]) == Interval(1.0)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(100):
        below = rng.uniform(1.0, 2.0, 40)
        ratio = ratio_of_sums(1.5 * below * rng.lognormal(-0.005, 0.1, 40), below)  # of mean 1
        inside += ratio.low <= 1.5 <= ratio.high
    assert 88 <= inside <= 99
