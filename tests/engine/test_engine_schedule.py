"""Every request is answered once, in order and fairly.

Whatever the order of submissions, cancellations and rounds.
"""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.strategies as st
import pytest
import tiny
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import eagle3_jax as e3
from eagle3_jax.engine.engine import Engine
from eagle3_jax.measure.timing import CompileClock
from eagle3_jax.prompts.request import Request
from eagle3_jax.types import SamplingMode

SLOTS = 2
LONGEST = 10
PROMPTS = [[3], [1, 2, 3], list(range(9)), [5, 6] * 10]


@functools.cache
def decoder() -> e3.SpeculativeDecoder:
    schedule = e3.SpeculationSchedule(((1, 1, 3), (2, 2, 1)))
    return e3.SpeculativeDecoder(tiny.target(13), e3.drafters.NGram(3), schedule=schedule)


@functools.cache
def continuations() -> list[list[int]]:
    """What the target alone writes after each prompt."""
    return e3.SpeculativeDecoder(tiny.target(13)).generate(PROMPTS, max_new_tokens=LONGEST).tokens


class Schedule(RuleBasedStateMachine):
    """An engine and the requests as the test knows them."""

    chunk: int | None = None

    def __init__(self) -> None:
        super().__init__()
        mode = SamplingMode.GREEDY
        self.engine = Engine(
            decoder(), slots=SLOTS, capacity=64, sampling_mode=mode, chunk=self.chunk
        )
        self.expected: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.stats: dict[int, e3.SpeculationStats] = {}
        self.open: list[int] = []
        self.begun: list[int] = []

    def running(self) -> list[int]:
        return [slot.request_id for slot in self.engine._slots.values()]

    def waiting(self) -> list[int]:
        """Requests without a slot, in the order in which they begin."""
        partial = self.engine._partial
        first = [] if partial is None else [partial.entry.request_id]
        return first + [entry.request_id for entry in self.engine._waiting]

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), limit=st.integers(1, LONGEST))
    def submit(self, prompt: int, limit: int) -> None:
        request_id = self.engine.submit(Request(PROMPTS[prompt], limit))
        assert request_id == len(self.expected)
        self.expected[request_id] = continuations()[prompt][:limit]
        self.tokens[request_id] = []
        self.open.append(request_id)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.open))
        self.engine.cancel(request_id)
        self.open.remove(request_id)

    @rule()
    def cancel_a_request_that_has_ended(self) -> None:
        for request_id in set(self.expected) - set(self.open):
            self.engine.cancel(request_id)

    @rule()
    def tick(self) -> None:
        waiting = self.waiting()
        num_staying = sum(request_id in self.open for request_id in self.running())

        for event in self.engine.tick():
            assert event.request_id in self.open, "an event after the end of its request"
            if not self.tokens[event.request_id]:
                self.begun.append(event.request_id)
                assert len(event.tokens) == 1
            self.tokens[event.request_id] += event.tokens
            self.stats[event.request_id] = event.stats

            assert (event.output is None) == (event.finish_reason is e3.FinishReason.RUNNING)
            expected = self.expected[event.request_id]
            assert self.tokens[event.request_id] == expected[: len(self.tokens[event.request_id])]

            if event.output is not None:
                assert event.output == self.tokens[event.request_id] == expected
                self.open.remove(event.request_id)

        assert set(self.running()) <= set(self.open), "a slot that no request has any more"
        if waiting and num_staying < SLOTS and self.chunk is None:
            assert waiting[0] in self.begun, "a free slot while a request waits"
        assert self.begun == sorted(self.begun), "a later request begins first"

    @invariant()
    def every_request_is_in_one_state(self) -> None:
        held = [
            request_id for request_id in self.running() if request_id in self.open
        ] + self.waiting()
        assert sorted(held) == self.open
        assert len(self.running()) <= SLOTS
        assert self.engine.free == max(0, SLOTS - len(self.running()) - len(self.waiting()))
        assert not (self.engine.idle and self.open)

    def teardown(self) -> None:
        """All requests end within the rounds of their tokens and chunks."""
        chunks = sum(1 + len(prompt) // (self.chunk or 64) for prompt in PROMPTS)
        for _ in range((LONGEST + chunks) * (len(self.open) + 1)):
            self.tick()
            self.every_request_is_in_one_state()
        assert self.engine.idle and not self.open
        # A cancelled request counts as far as it has run.
        if self.stats:
            assert self.engine.totals == e3.SpeculationStats.merge(self.stats.values())


class ScheduleOfChunks(Schedule):
    """The same with long prompts in parts."""

    chunk = 4


@pytest.mark.parametrize("machine", [Schedule, ScheduleOfChunks])
def test_every_order_of_requests_is_answered(machine: type[Schedule]) -> None:
    # A counterexample has 25 steps at most, and shrinking it takes minutes.
    phases = [hypothesis.Phase.generate]
    settings = hypothesis.settings(
        max_examples=15, stateful_step_count=25, deadline=None, derandomize=True, phases=phases
    )
    run_state_machine_as_test(machine, settings=settings)


@pytest.mark.parametrize("chunk", [None, 8])
def test_a_warm_engine_compiles_nothing_whatever_comes(chunk: int | None) -> None:
    engine = Engine(decoder(), slots=SLOTS, capacity=48, chunk=chunk)
    programs = list(engine.warm_up())
    assert [program.number for program in programs] == list(range(1, programs[0].total + 1))
    assert [program.program for program in programs] == [
        "prompts of up to 16 tokens",
        "prompts of up to 32 tokens",
        "prompts of up to 64 tokens",
        "verification, tokens per row: 2",
        "verification, tokens per row: 4",
    ]
    expected = continuations()
    with CompileClock() as clock:
        outputs = engine.run([Request(prompt, LONGEST) for prompt in PROMPTS])
    assert (outputs, clock.programs) == (expected, 0)
