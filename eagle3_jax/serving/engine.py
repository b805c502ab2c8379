"""Requests that share the rows of one running batch. A row that ends is given to the next request."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eagle3_jax import loop as loops
from eagle3_jax.checks import check_mode, checked_sampling, sampling_mode_of
from eagle3_jax.decode import SpeculativeDecoder, padded_prompt
from eagle3_jax.devices.sharding import DATA, on_rows, place_rows, to_host, under
from eagle3_jax.loop import SpeculativeLoop
from eagle3_jax.state import GenerationState, Prompts
from eagle3_jax.stats import LogProbs, SpeculationStats, TokenLogProb
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import FinishReason, SamplingMode, SamplingParams, TargetModel


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt, its limit and its sampling.

    Attributes:
        tokens: Token ids of the prompt.
        max_new_tokens: Maximum number of new tokens.
        temperature: 0 is greedy.
        top_k: Number of most likely tokens to keep; 0 keeps all.
        top_p: Mass of the smallest set of most likely tokens to keep.
        seed: Random seed, 0 to 2^32 - 1.
        ignore_stop: Whether to go on after stop tokens.
    """

    tokens: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_stop: bool = False


@dataclasses.dataclass(frozen=True)
class Event:
    """New tokens of one request, or its end.

    Attributes:
        ticket: The number of the request.
        tokens: New tokens: the first one alone, and then those of each round. The last has the stop token.
        stats: Counters of the request so far.
        finish_reason: ``RUNNING`` until the last event.
        output: All new tokens; of the last event only.
        logprobs: One entry per token, if the engine records them.
    """

    ticket: int
    tokens: list[int]
    stats: SpeculationStats
    finish_reason: FinishReason = FinishReason.RUNNING
    output: list[int] | None = None
    logprobs: list[TokenLogProb] | None = None


@dataclasses.dataclass
class _Slot:
    """A request in a row, and the new tokens that have been reported."""

    ticket: int
    request: Request
    output: list[int] = dataclasses.field(default_factory=list)
    is_cancelled: bool = False

    @property
    def reported(self) -> int:
        """Tokens of the row that have been reported, prompt included."""
        return len(self.request.tokens) + len(self.output)


class Engine:
    """Decodes requests in a fixed number of rows: an object of the host without threads, clock or files.

    The tokens of a request are those that ``decoder.generate`` returns for it, regardless of the other rows. (With a
    schedule this holds for greedy requests.) After the first request of each padded length nothing is compiled.

    Example::

        engine = Engine(decoder, slots=8, capacity=512)
        ticket = engine.submit(Request(prompt, max_new_tokens=64))
        while not engine.idle:
            for event in engine.tick():
                print(event.ticket, event.tokens, event.finish_reason)
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        *,
        slots: int,
        capacity: int,
        sampling_mode: SamplingMode = SamplingMode.TRUNCATED,
        chunk: int | None = None,
        logprobs: int | None = None,
        prefill_rows: int = 1,
    ):
        """Makes an empty engine; nothing is compiled yet.

        Args:
            decoder: Target, drafter, stop tokens, and the rounds between two reads by the host.
            slots: ``B``, rows of the batch.
            capacity: Tokens per row: prompt, new tokens and one draft (``num_nodes``, 1 without a drafter).
            sampling_mode: The work that requests may need. Without top-k and top-p, ``TEMPERATURE`` saves their sort.
            chunk: Longest part of a prompt that runs between two rounds. Default: whole prompts.
            logprobs: ``L``: record log-probabilities of new tokens and of the ``L`` likeliest ones.
            prefill_rows: Most prompts of one padded length that are prefilled together. With 1 every bit of a request
                depends on the request alone; more are faster where many wait.

        Raises:
            ValueError: There is no slot, a chunk has no token, or the decoder's mesh does not divide the slots.
        """
        if slots < 1:
            raise ValueError(f"slots is {slots}; expected at least 1")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk is {chunk}; expected at least 1 token")
        self._mesh = decoder.mesh
        self._parts = 1 if self._mesh is None else self._mesh.shape[DATA]
        if slots % self._parts:
            raise ValueError(
                f"slots is {slots}; expected a multiple of {self._parts}, over which the mesh divides rows"
            )
        self._decoder = decoder
        self._loop = dataclasses.replace(decoder.loop, sampling_mode=sampling_mode)
        self._num_slots = slots
        positions = decoder.target.max_positions
        drafter_positions = getattr(decoder.loop.drafter, "max_positions", None) or positions
        self._most = min(capacity - decoder.loop.drafter.num_nodes, positions, drafter_positions)
        self._capacity = padded_prompt(capacity)
        self._chunk = chunk
        self._logprobs = logprobs
        self._prefill_rows = prefill_rows
        self._waiting: collections.deque[tuple[int, Request]] = collections.deque()
        self._slots: dict[int, _Slot] = {}
        self._partial: tuple[_Slot, GenerationState, int] | None = None
        self._num_submitted = 0
        self._state: GenerationState | None = None
        self._forget_counts()

    @property
    def room(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._most

    @property
    def num_slots(self) -> int:
        """``B``, rows of the batch."""
        return self._num_slots

    @property
    def num_logprobs(self) -> int | None:
        """``L``; ``None`` if no log-probabilities are recorded."""
        return self._logprobs

    @property
    def totals(self) -> SpeculationStats:
        """Counters of all rounds so far, those of cancelled requests included."""
        return self._totals

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._waiting and not self._slots and self._partial is None

    @property
    def num_running(self) -> int:
        """Number of requests in slots."""
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot."""
        return len(self._waiting) + (self._partial is not None)

    @property
    def free(self) -> int:
        """Number of slots that the waiting requests leave free."""
        return max(0, self._num_slots - self.num_running - self.num_waiting)

    def check(self, request: Request) -> None:
        """Checks that a request can run.

        Raises:
            ValueError: The target does not accept the prompt, the prompt and its limit are longer than a row, or the
                sampling is out of range or needs another mode.
        """
        length = len(self._decoder.encode(request.tokens))
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {request.max_new_tokens}; expected at least 1")
        if length + request.max_new_tokens > self._most:
            raise ValueError(
                f"the prompt has {length} tokens and is given {request.max_new_tokens} more, and a row of the engine "
                f"holds {self._most}; shorten one of them or build the engine with a larger capacity"
            )
        params = SamplingParams(temperature=request.temperature, top_k=request.top_k, top_p=request.top_p)
        check_mode(self._loop.sampling_mode, sampling_mode_of(checked_sampling(params, 1)))

    def submit(self, request: Request) -> int:
        """Adds a request, which begins at a later :meth:`tick`; requests begin in order.

        Returns:
            The ticket of the request: the number of requests before it.

        Raises:
            ValueError: See :meth:`check`.
        """
        self.check(request)
        ticket = self._num_submitted
        self._num_submitted += 1
        self._waiting.append((ticket, request))
        return ticket

    def cancel(self, ticket: int) -> None:
        """Ends a request without a further event. Its slot is free at the next :meth:`tick`."""
        self._waiting = collections.deque(entry for entry in self._waiting if entry[0] != ticket)
        if self._partial is not None and self._partial[0].ticket == ticket:
            self._partial = None
        for slot in self._slots.values():
            slot.is_cancelled = slot.is_cancelled or slot.ticket == ticket

    def run(self, requests: Iterable[Request]) -> list[list[int]]:
        """Returns the new tokens of requests, in their order, when all have ended."""
        tickets = [self.submit(request) for request in requests]
        outputs: dict[int, list[int]] = {}
        while not self.idle:
            outputs.update(ended(self.tick()))
        return [outputs[ticket] for ticket in tickets]

    def warm_up(self) -> Iterator[int]:
        """Compiles the programs of every padded length before requests come, and yields each length."""
        longest = self._most - 1
        for length in sorted({padded_prompt(length) for length in range(1, longest + 1)}):
            self.run([Request([0] * min(length, longest), 1, ignore_stop=True)])
            yield length
        if self._state is not None:
            with under(self._mesh):
                self._state = _end(self._state, np.zeros(self._num_slots, bool))
        self._num_submitted = 0
        self._forget_counts()

    def score(self, tokens: list[int]) -> list[TokenLogProb | None]:
        """Returns the log-probability of each token after those before it, in one forward pass of the target.

        The first token has none. The engine must record log-probabilities.
        """
        assert self._logprobs is not None
        target = self._decoder.target
        padded_length = min(padded_prompt(len(tokens)), target.max_positions)
        row = np.zeros((1, padded_length), np.int32)
        row[0, : len(tokens)] = tokens
        with under(self._mesh):
            scores = to_host(_scores(target.model, self._decoder.params.target, row, count=self._logprobs))
        return [None, *scores.row(0, 0, len(tokens) - 1)]

    def tick(self) -> list[Event]:
        """Frees cancelled slots, begins one group of prompts or runs one chunk, and runs ``rounds_per_check`` rounds.

        Returns:
            What the requests have written.
        """
        with under(self._mesh):
            return self._tick()

    def _tick(self) -> list[Event]:
        self._drop_cancelled()
        if self._partial is not None:
            self._run_chunk()
        elif self._waiting and len(self._slots) < self._num_slots:
            self._begin_group()
        state = self._state
        if state is None or not self._slots:
            return []
        for _ in range(self._loop.rounds_per_check):
            state = loops.step(self._loop.at(state), self._decoder.params, state).state
        self._state = state
        return self._events(state)

    def _events(self, state: GenerationState) -> list[Event]:
        """Reads what is new in all rows, in one transfer, and frees the slots of requests that have ended."""
        starts = np.zeros(self._num_slots, np.int32)
        for index, slot in self._slots.items():
            starts[index] = slot.reported
        width = 1 + self._loop.rounds_per_check * (self._loop.drafter.max_depth + 1)
        length, finish, tokens, scores, counters = to_host(_written(state, starts, width=width))
        self._count(counters)
        events = []
        for index, slot in list(self._slots.items()):
            count = int(length[index]) - slot.reported
            new = tokens[index, :count].tolist()
            scored = None if scores is None else scores.row(index, 0, count)
            is_first = not slot.output
            stats = jax.tree.map(lambda leaf, index=index: leaf[index], counters)
            slot.output += new
            reason = FinishReason(int(finish[index]))
            if is_first and count > 1:  # the prefill's token is a chunk of its own
                events.append(Event(slot.ticket, new[:1], stats, logprobs=scored and scored[:1]))
                new = new[1:]
                scored = scored and scored[1:]
            event = Event(slot.ticket, new, stats, reason, logprobs=scored)
            if reason is not FinishReason.RUNNING:
                event = dataclasses.replace(event, output=slot.output)
                del self._slots[index]
            if new or event.output is not None:
                events.append(event)
        return events

    def _forget_counts(self) -> None:
        zeros = SpeculationStats.zeros(self._num_slots, self._loop.drafter.max_depth)
        self._counted = jax.tree.map(np.array, zeros)  # of each row, at the last tick
        self._totals = SpeculationStats.merge([zeros])

    def _count(self, counters: SpeculationStats) -> None:
        """Adds to the totals what the counters of the rows have gained since the last tick."""
        gains = jax.tree.map(np.subtract, counters, self._counted)
        self._totals = jax.tree.map(np.add, self._totals, SpeculationStats.merge([gains]))
        self._counted = jax.tree.map(np.array, counters)

    def _drop_cancelled(self) -> None:
        cancelled = [index for index, slot in self._slots.items() if slot.is_cancelled]
        if cancelled and self._state is not None:
            mask = np.zeros(self._num_slots, bool)
            mask[cancelled] = True
            self._state = _end(self._state, mask)
            for index in cancelled:
                del self._slots[index]

    def _begin_group(self) -> None:
        """Prefills the first waiting request, together with others of its padded length, and inserts them."""
        first = self._waiting[0][1]
        if self._chunk is not None and len(first.tokens) > self._chunk:
            ticket, request = self._waiting.popleft()
            loop, prompts = self._prompts([request])
            state = loops.empty(loop, self._decoder.params, prompts, capacity=self._capacity)
            self._partial = (_Slot(ticket, request), state, 0)
            self._run_chunk()
            return
        size = padded_prompt(len(first.tokens))
        same_size = []
        for entry in self._waiting:  # the first ones only, so that requests begin in order
            if padded_prompt(len(entry[1].tokens)) != size:
                break
            same_size.append(entry)
        free = self._free_slots()
        most = min(len(same_size), len(free), self._prefill_rows)
        count = 1 << (most.bit_length() - 1)  # a power of two, so that few programs are compiled
        group = [self._waiting.popleft() for _ in range(count)]
        loop, prompts = self._prompts([request for _, request in group])
        rows = loops.prefill(loop, self._decoder.params, prompts, capacity=self._capacity)
        slots = [_Slot(ticket, request) for ticket, request in group]
        self._insert(rows, free[:count], slots)

    def _run_chunk(self) -> None:
        """Runs the next chunk of the prompt that is prefilled in parts, and inserts its row after the last one."""
        assert self._partial is not None and self._chunk is not None
        slot, state, done = self._partial
        length = np.full(self._parts, len(slot.request.tokens), np.int32)
        state = loops.extend(self._loop, self._decoder.params, state, length, size=self._chunk)
        done += self._chunk
        self._partial = (slot, state, done)
        if done >= len(slot.request.tokens):
            self._partial = None
            self._insert(state, self._free_slots()[:1], [slot])

    def _free_slots(self) -> list[int]:
        return [index for index in range(self._num_slots) if index not in self._slots]

    def _prompts(self, requests: Sequence[Request]) -> tuple[SpeculativeLoop, Prompts]:
        """Returns the loop that all requests share, and a batch of some of them.

        On a mesh that divides rows the last request is repeated up to a number of rows that it divides.
        """
        requests = [*requests, *[requests[-1]] * (-len(requests) % self._parts)]
        sampling = SamplingParams(
            temperature=np.array([request.temperature for request in requests]),
            top_k=np.array([request.top_k for request in requests]),
            top_p=np.array([request.top_p for request in requests]),
        )
        loop, prompts, _ = self._decoder.batch(
            [request.tokens for request in requests],
            max_new_tokens=[request.max_new_tokens for request in requests],
            sampling=sampling,
            seed=[request.seed for request in requests],
            logprobs=self._logprobs,
        )
        goes_on = jnp.array([request.ignore_stop for request in requests])[:, None]
        prompts = prompts.replace(stop_tokens=jnp.where(goes_on, -1, prompts.stop_tokens))
        loop = dataclasses.replace(loop, sampling_mode=self._loop.sampling_mode)
        return loop, place_rows(prompts, self._mesh)

    def _insert(self, rows: GenerationState, indices: Sequence[int], slots: Sequence[_Slot]) -> None:
        if self._state is None:
            self._state = _ended_copies(rows, self._num_slots)
        num_repeated = rows.length.shape[0] - len(indices)
        nowhere = self._num_slots  # an index out of range: the row is dropped
        targets = np.array([*indices, *[nowhere] * num_repeated], np.int32)
        self._state = _insert(self._state, rows, targets)
        for counts in jax.tree.leaves(self._counted):
            counts[list(indices)] = 0
        self._slots.update(zip(indices, slots, strict=True))


def ended(events: Iterable[Event]) -> list[tuple[int, list[int]]]:
    """Returns ticket and new tokens of each request that has ended."""
    return [(event.ticket, event.output) for event in events if event.output is not None]


@functools.partial(jax.jit, static_argnames=("count",))
def _ended_copies(rows: GenerationState, count: int) -> GenerationState:
    """Returns ``count`` rows that have ended. They are copies of the first of ``rows``, so every leaf is valid."""
    copies = jax.tree.map(lambda leaf: leaf[jnp.zeros((count,), jnp.int32)], rows)
    return on_rows(copies.replace(finish=jnp.full((count,), int(FinishReason.LENGTH), jnp.int32)))


@functools.partial(jax.jit, donate_argnames=("state",))
def _insert(state: GenerationState, rows: GenerationState, slots: Int[Array | np.ndarray, " R"]) -> GenerationState:
    """Returns the state with ``rows`` in place of its rows ``slots``. It consumes ``state``."""
    return on_rows(jax.tree.map(lambda live, new: live.at[slots].set(new, mode="drop"), state, rows))


@functools.partial(jax.jit, donate_argnames=("state",))
def _end(state: GenerationState, mask: Array) -> GenerationState:
    """Returns the state with some rows ended. It consumes ``state``."""
    return state.replace(finish=jnp.where(mask, int(FinishReason.LENGTH), state.finish))


@functools.partial(jax.jit, static_argnames=("width",))
def _written(state: GenerationState, starts: Int[Array, " B"], *, width: int) -> tuple:
    """Returns each row's length, finish, tokens and log-probabilities from ``starts`` on, and counters."""
    slots = jnp.minimum(starts[:, None] + jnp.arange(width), state.tokens.shape[1] - 1)
    take = jax.vmap(lambda leaf, slots: leaf[slots])
    scores = None if state.logprobs is None else jax.tree.map(lambda leaf: take(leaf, slots), state.logprobs)
    return state.length, state.finish, take(state.tokens, slots), scores, state.stats


@functools.partial(jax.jit, static_argnames=("model", "count"))
def _scores(model: TargetModel, params: Any, tokens: Int[Array | np.ndarray, "1 T"], *, count: int) -> LogProbs:
    """Returns the log-probability of the token after each position, and of the ``count`` likeliest ones."""
    tokens = jnp.asarray(tokens)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    output = model(params, tokens, positions, causal_mask(tokens.shape[1]))
    logits = model.unembed(params, output.final)
    following = jnp.roll(tokens, -1, axis=1)
    return LogProbs.from_logits(logits, following, count)
