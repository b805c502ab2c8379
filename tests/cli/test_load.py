"""Times under a load are those of a queue that can be worked out by hand; the command names what it cannot take."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tiny

import eagle3_jax as e3
from eagle3_jax.bench import load as loads_of_bench
from eagle3_jax.bench.load import Load, load_row, run_load
from eagle3_jax.engine.engine import Engine, Event
from eagle3_jax.measure.timing import quantile
from eagle3_jax.prompts.request import Request
from eagle3_jax.types import FinishReason


class TwoServers(Engine):
    """An engine of two rows on a clock of its own: each tick takes a second and writes two tokens in each row."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waiting: list[tuple[int, Request]] = []
        self.rows: dict[int, tuple[int, Request, list[int]]] = {}
        self.count = 0

    @property
    def totals(self) -> e3.SpeculationStats:
        return e3.SpeculationStats.merge([e3.SpeculationStats.zeros(1, 1)])

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.rows

    def submit(self, request: Request) -> int:
        self.waiting.append((self.count, request))
        self.count += 1
        return self.count - 1

    def tick(self) -> list[Event]:
        free = [row for row in range(2) if row not in self.rows]
        for row in free[: len(self.waiting)]:
            self.rows[row] = (*self.waiting.pop(0), [])
        self.now += 1.0
        events = []
        for row, (ticket, request, output) in list(self.rows.items()):
            new = [7] * min(2, request.max_new_tokens - len(output))
            output += new
            is_last = len(output) == request.max_new_tokens
            reason = FinishReason.LENGTH if is_last else FinishReason.RUNNING
            events.append(Event(ticket, new, self.totals, reason, output if is_last else None))
            if is_last:
                del self.rows[row]
        return events

    def wait(self, seconds: float) -> None:
        self.now += seconds


def run(load: Load, limits: list[int]) -> Any:
    engine = TwoServers()
    requests = [Request([1], limit) for limit in limits]
    return run_load(engine, requests, load, clock=lambda: engine.now, sleep=engine.wait)


def test_a_queue_before_two_rows_has_the_times_of_a_queue() -> None:
    result = run(Load(times=(0.0, 0.0, 0.5, 10.0)), [4, 6, 5, 2])
    # Rows: 0 runs from 0 to 2, 1 from 0 to 3, and 2 waits for the row of 0 and runs from 2 to 5. 3
    # arrives when all is idle, at 10, and ends at 11.
    assert [timeline.first_token for timeline in result.timelines] == [1.0, 1.0, 2.5, 1.0]
    assert [timeline.seconds for timeline in result.timelines] == [2.0, 3.0, 4.5, 1.0]
    assert [timeline.gaps for timeline in result.timelines] == [[1.0], [1.0, 1.0], [1.0, 1.0], []]
    assert [timeline.per_token for timeline in result.timelines] == [0.5, 0.5, 2 / 3, None]
    assert [timeline.output for timeline in result.timelines] == [
        [7] * 4,
        [7] * 6,
        [7] * 5,
        [7] * 2,
    ]
    assert result.seconds == 11.0
    assert result.tokens_per_second == 17 / 11
    assert result.rows_running == pytest.approx((2 + 2 + 2 + 1 + 1 + 1) / 6)


def test_a_request_without_a_time_of_arrival_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 times of arrival for 2 requests"):
        run(Load(times=(0.0,)), [4, 4])


def test_a_closed_loop_keeps_its_number_of_users() -> None:
    single = run(Load(concurrency=1), [4, 4, 4])
    assert [timeline.arrival for timeline in single.timelines] == [0.0, 2.0, 4.0]
    assert single.rows_running == 1.0
    full = run(
        Load(concurrency=3), [4, 4, 4, 4]
    )  # three users, two rows: the third waits, and the fourth comes at 2
    assert [timeline.arrival for timeline in full.timelines] == [0.0, 0.0, 0.0, 2.0]
    assert [timeline.first_token for timeline in full.timelines] == [1.0, 1.0, 3.0, 1.0]


def test_random_arrivals_have_the_rate_and_differ_by_seed() -> None:
    """The gaps of a Poisson process are exponential: a mean and a deviation of 1 / rate, here within five errors."""
    count = 10_000
    arrivals = Load(rate=4.0).arrivals(count, seed=0)
    assert arrivals is not None
    gaps = np.diff(arrivals)
    assert abs(gaps.mean() - 0.25) < 5 * 0.25 / np.sqrt(count)
    assert abs(gaps.std() - 0.25) < 5 * 0.25 * np.sqrt(2 / count)
    assert not np.array_equal(arrivals, Load(rate=4.0).arrivals(count, seed=1))


def test_the_interval_of_a_quantile_ends_at_the_values_of_the_binomial_table() -> None:
    """The interval of the median of 100 values goes from the 40th to the 61st (Conover, table A3, at 95 %)."""
    median = quantile(np.arange(1.0, 101.0), 0.5)
    assert (median.value, median.low, median.high) == (50.5, 40.0, 61.0)
    assert quantile(np.arange(5.0), 0.99).high is None  # too few values


def test_the_command_measures_requests_that_come_and_go(cli: Any, tmp_path: Any) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [1, 17, 5]}\n' * 3)
    arrivals = tmp_path / "arrivals.json"
    arrivals.write_text("[0, 0.01, 0.2]")
    options = (
        "bench", "--target", tiny.GOLDEN / "official" / "target", "--drafter", "ngram", "--ngram", 2,
        "--dtype", "float32", "--prompts", prompts, "--max-new-tokens", 6, "--repeats", 1, "--slots", 2,
        "--max-prompts", 3,
    )  # fmt: skip
    code, out, err = cli(*options, "--arrivals", arrivals, "--prefill-chunk", 2, "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [row["name"] for row in rows] == [
        "plain float32",
        "plain float32, chunks of 2",
        "n-gram K=2",
        "n-gram K=2, chunks of 2",
    ]
    for row in rows:
        assert (row["load"], row["num_requests"], row["programs_after_warm_up"]) == (
            "recorded arrivals",
            3,
            0,
        )
        assert row["same_texts"] == 3
        assert 0 < row["first_token"]["p50"]["value"] <= row["total"]["p50"]["value"]
    assert rows[0]["mean_acceptance_length"] is None


def test_ctrl_c_leaves_the_loads_that_were_measured(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(engines: Any, requests: Any, loads: Any, **options: Any) -> Any:
        runs = [run(Load(concurrency=1), [4, 6])]
        for name in engines:
            yield load_row(name, loads[0], runs, runs)
        raise KeyboardInterrupt

    monkeypatch.setattr(loads_of_bench, "measure_load", interrupted)
    target = tiny.GOLDEN / "official" / "target"
    options = (
        "--target",
        target,
        "--drafter",
        "none",
        "--dtype",
        "float32",
        "--prompts",
        "random",
        "--slots",
        2,
    )
    code, out, err = cli(
        "bench", *options, "--prompt-tokens", 4, "--max-new-tokens", 4, "--rate", "1,2", "--json"
    )
    assert (code, err.splitlines()[-1]) == (130, "interrupted: measured 1 requests/s")
    assert [row["load"] for row in json.loads(out)["rows"]] == ["1 requests/s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rate", "0"), "--rate '0': expected positive numbers, such as '2' or '0.5,2'"),
        (("--rate", "1,x"), "--rate '1,x': expected positive numbers"),
        (("--concurrency", "0"), "--concurrency '0': expected whole numbers from 1"),
        (("--slots", "4"), "--slots 4 is measured under a load; add --concurrency or --rate"),
        (
            ("--rate", "1", "--batch-size", "4"),
            "--batch-size 4: under a load --slots is the number of rows",
        ),
        (
            ("--prefill-chunk", "8"),
            "--prefill-chunk 8 is measured under a load; add --concurrency or --rate",
        ),
        (("--schedule", "[[1,2,3]]"), "--schedule [[1,2,3]] is measured under a load"),
        (("--arrivals", "missing.json"), "--arrivals missing.json: "),
        (
            ("--rate", "1", "--drafter", "none", "--schedule", "[[1,2,3]]"),
            "--schedule shortens the chains of a head",
        ),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(
    cli: Any, options: tuple[str, ...], message: str
) -> None:
    code, out, err = cli("bench", *options, "--dtype", "float32", "--max-prompts", 1)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]
