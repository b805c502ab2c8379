"""Requests that share the rows of one running batch.

A row that ends is given to the next request.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import loop as loops
from eagle3_jax.checks import check_mode, checked_sampling, sampling_mode_of
from eagle3_jax.decode import SpeculativeDecoder, padded_prompt
from eagle3_jax.devices.sharding import DATA, place_rows, to_host, under
from eagle3_jax.engine import rows
from eagle3_jax.prompts.request import Request
from eagle3_jax.schedule import StagedLoop
from eagle3_jax.state import GenerationState, Prompts
from eagle3_jax.stats import SpeculationStats, TokenLogProb
from eagle3_jax.types import FinishReason, SamplingMode, SamplingParams


@dataclasses.dataclass(frozen=True)
class Event:
    """New tokens of one request, or its end.

    Attributes:
        request_id: The id of the request.
        tokens: New tokens: the first one alone, and then those of each round. The last has the stop
            token.
        stats: Counters of the request so far.
        finish_reason: ``RUNNING`` until the last event.
        output: All new tokens; of the last event only.
        logprobs: One entry per token, if the engine records them.
    """

    request_id: int
    tokens: list[int]
    stats: SpeculationStats
    finish_reason: FinishReason = FinishReason.RUNNING
    output: list[int] | None = None
    logprobs: list[TokenLogProb] | None = None


@dataclasses.dataclass
class _Entry:
    """A request in the engine, the new tokens that have been reported, and its counters then."""

    request_id: int
    request: Request
    stats: SpeculationStats
    output: list[int] = dataclasses.field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens that have been reported, prompt included."""
        return len(self.request.tokens) + len(self.output)


class _Partial(NamedTuple):
    """A prompt that runs in chunks."""

    entry: _Entry
    state: GenerationState
    done: int  #: Tokens of the prompt that have run.


class _Prefix(NamedTuple):
    """The state after all tokens of a prompt but the last, which requests of this prompt share."""

    tokens: list[int]  #: The prompt.
    state: GenerationState


class WarmUp(NamedTuple):
    """A program that an engine is about to compile."""

    number: int  #: From 1.
    total: int
    program: str  #: What it computes.


class Engine:
    """Decodes requests in a fixed number of rows, on the host, without threads, clock or files.

    The tokens of a request are those that ``decoder.generate`` returns for it, regardless of the
    other rows. (With a schedule this holds for greedy requests.) After the first request of each
    padded length nothing is compiled.

    Example::

        engine = Engine(decoder, slots=8, capacity=512)
        request_id = engine.submit(Request(prompt, max_new_tokens=64))
        while not engine.idle:
            for event in engine.tick():
                print(event.request_id, event.tokens, event.finish_reason)

    Attributes:
        decoder: Target, drafter and stop tokens.
        num_slots: ``B``, rows of the batch.
        num_logprobs: ``L``; ``None`` if no log-probabilities are recorded.
        room: Most tokens of a prompt and its answer together.
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
        sampling_logprobs: bool = False,
        prefill_rows: int = 1,
        share_prompts: bool = False,
    ):
        """Makes an empty engine; nothing is compiled yet.

        Args:
            decoder: Target, drafter, stop tokens, and the rounds between two reads by the host.
            slots: ``B``, rows of the batch.
            capacity: Tokens per row: prompt, new tokens and one draft (``num_nodes``, 1 without a
                drafter).
            sampling_mode: The work that requests may need. Without top-k and top-p, ``TEMPERATURE``
                saves their sort.
            chunk: Longest part of a prompt that runs between two rounds. Default: whole prompts.
            logprobs: ``L``: record log-probabilities of new tokens and of the ``L`` likeliest ones.
            sampling_logprobs: With ``logprobs``: record also those of new tokens under the
                distributions that they are sampled from.
            prefill_rows: Most prompts of one padded length that are prefilled together. With 1
                every bit of a request depends on the request alone; more are faster where many
                wait.
            share_prompts: Run the prompt of consecutive requests with the same one once, and copy
                its caches for each of them. Its last token runs once for each request, and chooses
                their first tokens.

        Raises:
            ValueError: There is no slot, a chunk has no token, chunks and shared prompts are both
                asked for, a row has no room for a draft, or
                the decoder's mesh does not divide the slots.
        """
        if slots < 1:
            raise ValueError(f"slots is {slots}; expected at least 1")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk is {chunk}; expected at least 1 token")
        if chunk is not None and share_prompts:
            raise ValueError(
                f"chunk is {chunk} with share_prompts; a shared prompt runs as a whole, so leave"
                " chunk out"
            )
        parts = 1 if decoder.mesh is None else decoder.mesh.shape[DATA]
        if slots % parts:
            raise ValueError(
                f"slots is {slots}; expected a multiple of {parts}, over which the mesh divides"
                " rows"
            )

        drafter = decoder.loop.drafter
        positions = decoder.target.max_positions
        drafter_positions = getattr(drafter, "max_positions", None) or positions
        self.decoder = decoder
        self.num_slots = slots
        self.num_logprobs = logprobs
        self._sampling_logprobs = sampling_logprobs
        self.room = min(capacity - drafter.num_nodes, positions, drafter_positions)
        if self.room < 2:
            raise ValueError(
                f"capacity is {capacity}; expected at least {drafter.num_nodes + 2}: a draft of"
                f" {drafter.num_nodes} tokens, a prompt and a new token"
            )
        self._loop = dataclasses.replace(decoder.loop, sampling_mode=sampling_mode)
        self._parts = parts
        self._capacity = padded_prompt(capacity)
        self._chunk = chunk
        self._prefill_rows = prefill_rows
        self._share_prompts = share_prompts
        self._no_rounds = SpeculationStats.merge([SpeculationStats.zeros(1, drafter.max_depth)])
        # Counters of all requests without a row.
        self._ended_stats = self._no_rounds
        self._ids = itertools.count()
        self._waiting: collections.deque[_Entry] = collections.deque()
        self._partial: _Partial | None = None
        self._prefix: _Prefix | None = None
        self._slots: dict[int, _Entry] = {}
        self._state: GenerationState | None = None

    @property
    def totals(self) -> SpeculationStats:
        """Counters of all rounds so far, those of cancelled requests included."""
        return SpeculationStats.merge(
            [self._ended_stats, *(entry.stats for entry in self._slots.values())]
        )

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._waiting and not self._slots and self._partial is None

    @property
    def num_running(self) -> int:
        """Number of requests in slots."""
        return len(self._slots)

    @property
    def free(self) -> int:
        """Number of slots that the waiting requests leave free."""
        num_waiting = len(self._waiting) + (self._partial is not None)
        return max(0, self.num_slots - self.num_running - num_waiting)

    def checked(self, request: Request) -> Request:
        """Returns the request with the token ids of its prompt, if it can run.

        Raises:
            ValueError: The target does not accept the prompt, the prompt and its limit are longer
                than a row, or the sampling is out of range or needs another mode.
        """
        request = request.encoded(self.decoder.target)

        length = len(request.tokens)
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {request.max_new_tokens}; expected at least 1")
        if length + request.max_new_tokens > self.room:
            raise ValueError(
                f"the prompt has {length} tokens and is given {request.max_new_tokens} more, and a"
                f" row of the engine holds {self.room}; shorten one of them or build the engine"
                " with a larger capacity"
            )

        needed_mode = sampling_mode_of(checked_sampling(request.sampling, 1))
        check_mode(self._loop.sampling_mode, needed_mode)
        return request

    def submit(self, request: Request) -> int:
        """Adds a request, which begins at a later :meth:`tick`; requests begin in order.

        The engine does not look for the request's stop texts: who reads the tokens as text cancels
        the request at the first of them.

        Returns:
            The id of the request. Later requests have higher ids.

        Raises:
            ValueError: See :meth:`checked`.
        """
        request = self.checked(request)
        request_id = next(self._ids)
        self._waiting.append(_Entry(request_id, request, self._no_rounds))
        return request_id

    def cancel(self, request_id: int) -> None:
        """Ends a request without a further event. Its slot is free at once."""
        self._waiting = collections.deque(
            entry for entry in self._waiting if entry.request_id != request_id
        )
        if self._partial is not None and self._partial.entry.request_id == request_id:
            self._partial = None
        for index, entry in list(self._slots.items()):
            if entry.request_id == request_id:
                self._release(index)
                self._end_row(index)

    def run(self, requests: Iterable[Request]) -> list[list[int]]:
        """Returns the new tokens of requests, in their order, when all have ended."""
        ids = [self.submit(request) for request in requests]
        outputs: dict[int, list[int]] = {}
        while not self.idle:
            outputs.update(ended(self.tick()))
        return [outputs[request_id] for request_id in ids]

    def warm_up(self) -> Iterator[WarmUp]:
        """Compiles all programs before requests come, and yields each before its compilation.

        They are one for each padded length of prompts, and one for each draft length.
        """
        longest = self.room - 1
        lengths = sorted({padded_prompt(length) for length in range(1, longest + 1)})
        loop = self._loop
        rounds = loop.reachable(self.num_slots) if isinstance(loop, StagedLoop) else [loop]
        total = len(lengths) + len(rounds)

        for number, length in enumerate(lengths, 1):
            yield WarmUp(number, total, f"prompts of up to {length} tokens")
            request_id = self.submit(Request([0] * min(length, longest), 1, ignore_stop=True))
            with under(self.decoder.mesh):
                while not self._slots:
                    self._begin()
            self.cancel(request_id)

        for number, loop in enumerate(rounds, len(lengths) + 1):
            num_nodes = loop.drafter.num_nodes
            yield WarmUp(number, total, f"verification, tokens per row: {num_nodes}")
            with under(self.decoder.mesh):
                assert self._state is not None
                self._state = loops.step(loop, self.decoder.params, self._state).state

        # The small programs with which the host reads a round.
        self.run([Request([0], 1, ignore_stop=True)])

    def tick(self) -> list[Event]:
        """Begins one group of prompts or runs one chunk, and runs ``rounds_per_check`` rounds.

        Returns:
            What the requests have written.
        """
        with under(self.decoder.mesh):
            self._begin()
            return self._run_rounds() if self._slots else []

    def _begin(self) -> None:
        """Begins one group of prompts, or runs one chunk; of shared prompts all that have room."""
        if self._share_prompts:
            while self._waiting and len(self._slots) < self.num_slots:
                self._begin_siblings()
            return
        if self._partial is None and self._waiting and len(self._slots) < self.num_slots:
            self._begin_group()
        if self._partial is not None:
            self._run_chunk(self._partial)

    def _begin_group(self) -> None:
        """Prefills the first waiting requests, as many of one padded length as may run together.

        A prompt that is longer than a chunk begins alone, and is only prepared.
        """
        first = self._waiting[0]
        if self._chunk is not None and len(first.request.tokens) > self._chunk:
            prompts = self._prompts([self._waiting.popleft()])
            state = loops.empty(self._loop, self.decoder.params, prompts, capacity=self._capacity)
            self._partial = _Partial(first, state, done=0)
            return

        # Requests begin in order, so only those before the first one of another length are taken.
        lengths = [padded_prompt(len(entry.request.tokens)) for entry in self._waiting]
        num_same = sum(1 for _ in itertools.takewhile(lambda length: length == lengths[0], lengths))
        num_free = self.num_slots - len(self._slots)
        most = min(num_same, num_free, self._prefill_rows)
        # A power of two, so that few programs are compiled.
        count = 1 << (most.bit_length() - 1)

        group = [self._waiting.popleft() for _ in range(count)]
        prompts = self._prompts(group)
        prefilled = loops.prefill(self._loop, self.decoder.params, prompts, capacity=self._capacity)
        self._insert(prefilled, group)

    def _begin_siblings(self) -> None:
        """Begins the first waiting requests of one prompt, as many as a power of two."""
        prompt = self._waiting[0].request.tokens
        if self._prefix is None or self._prefix.tokens != prompt:
            self._prefix = _Prefix(prompt, self._run_prefix(self._waiting[0]))
        num_free = self.num_slots - len(self._slots)
        waiting = itertools.islice(self._waiting, num_free)
        is_sibling = (entry.request.tokens == prompt for entry in waiting)
        most = sum(1 for _ in itertools.takewhile(bool, is_sibling))
        count = 1 << (most.bit_length() - 1)

        group = [self._waiting.popleft() for _ in range(count)]
        prompts = self._prompts(group)
        state = rows.siblings(self._prefix.state, prompts)
        state = loops.extend(self._loop, self.decoder.params, state, prompts.length, size=1)
        self._insert(state, group)

    def _run_prefix(self, entry: _Entry) -> GenerationState:
        """Runs all tokens of a prompt but the last, which chooses the first new token."""
        prompts = self._prompts([entry])
        state = loops.empty(self._loop, self.decoder.params, prompts, capacity=self._capacity)
        return loops.extend(
            self._loop,
            self.decoder.params,
            state,
            prompts.length,
            size=prompts.tokens.shape[1],
            until=prompts.length - 1,
        )

    def _run_chunk(self, partial: _Partial) -> None:
        """Runs the next chunk of a prompt. The last chunk gives it a row."""
        assert self._chunk is not None
        entry = partial.entry
        num_prompt = len(entry.request.tokens)
        length = np.full(self._parts, num_prompt, np.int32)
        state = loops.extend(
            self._loop, self.decoder.params, partial.state, length, size=self._chunk
        )

        done = partial.done + self._chunk
        if done < num_prompt:
            self._partial = _Partial(entry, state, done)
        else:
            self._partial = None
            self._insert(state, [entry])

    def _prompts(self, entries: Sequence[_Entry]) -> Prompts:
        """Returns a batch of requests.

        On a mesh that divides rows the last request is repeated up to a number of rows that it
        divides.
        """
        requests = [entry.request for entry in entries]
        requests += [requests[-1]] * (-len(requests) % self._parts)
        _, prompts, _ = self.decoder.batch(
            [request.tokens for request in requests],
            max_new_tokens=[request.max_new_tokens for request in requests],
            sampling=sampling_of(requests),
            seed=[request.seed for request in requests],
            logprobs=self.num_logprobs,
        )

        # No token has the id -1.
        ignores_stop = np.array([request.ignore_stop for request in requests])[:, None]
        prompts = prompts.replace(
            stop_tokens=jnp.where(ignores_stop, -1, prompts.stop_tokens),
            sampling_logprobs=self._sampling_logprobs,
        )
        return place_rows(prompts, self.decoder.mesh)

    def _insert(self, new_rows: GenerationState, entries: Sequence[_Entry]) -> None:
        """Puts the rows of entries into free slots. Rows beyond the entries are repeated ones."""
        if self._state is None:
            self._state = rows.ended_copies(new_rows, self.num_slots)
        free = [index for index in range(self.num_slots) if index not in self._slots]

        # A row whose target is out of range is dropped.
        targets = np.full(new_rows.length.shape[0], self.num_slots, np.int32)
        targets[: len(entries)] = free[: len(entries)]
        self._state = rows.insert(self._state, new_rows, targets)
        self._slots.update(zip(free, entries, strict=False))

    def _run_rounds(self) -> list[Event]:
        """Runs rounds, reads what is new in one transfer, and frees the rows that have ended."""
        state = self._state
        assert state is not None
        for _ in range(self._loop.rounds_per_check):
            state = loops.step(self._loop.at(state), self.decoder.params, state).state
        self._state = state

        # A round writes at most a whole draft and the bonus token, and the prefill wrote one token.
        starts = np.zeros(self.num_slots, np.int32)
        for index, entry in self._slots.items():
            starts[index] = entry.length
        width = 1 + self._loop.rounds_per_check * (self._loop.drafter.max_depth + 1)
        written = to_host(rows.written(state, starts, width=width))

        events = []
        for index, entry in list(self._slots.items()):
            count = int(written.length[index]) - entry.length
            new = written.tokens[index, :count].tolist()
            scored = None
            if written.logprobs is not None:
                scored = written.logprobs.row(index, 0, count)
            is_first = not entry.output
            entry.output += new
            entry.stats = jax.tree.map(lambda leaf, index=index: leaf[index], written.stats)

            reason = FinishReason(int(written.finish[index]))
            output = None
            if reason is not FinishReason.RUNNING:
                output = entry.output
                self._release(index)

            # The prefill's token is an event of its own, so that a client sees it at once.
            if is_first and count > 1:
                events.append(
                    Event(entry.request_id, new[:1], entry.stats, logprobs=scored and scored[:1])
                )
                new = new[1:]
                scored = scored and scored[1:]
            events.append(Event(entry.request_id, new, entry.stats, reason, output, scored))
        return events

    def _release(self, index: int) -> None:
        """Frees a slot, and keeps the counters of its request."""
        entry = self._slots.pop(index)
        self._ended_stats = SpeculationStats.merge([self._ended_stats, entry.stats])

    def _end_row(self, index: int) -> None:
        """Ends a row on the device, so that a schedule no longer counts it as running."""
        assert self._state is not None
        with under(self.decoder.mesh):
            self._state = rows.end(self._state, index)


def sampling_of(requests: Iterable[Request]) -> SamplingParams:
    """Returns the sampling parameters of a batch of requests."""
    return jax.tree.map(
        lambda *values: np.array(values), *(request.sampling for request in requests)
    )


def ended(events: Iterable[Event]) -> list[tuple[int, list[int]]]:
    """Returns request_id and new tokens of each request that has ended."""
    return [(event.request_id, event.output) for event in events if event.output is not None]
