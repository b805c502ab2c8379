"""The thread that an engine runs in.

Requests come by a queue, and events go to the event loop after each tick.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from eagle3_jax.engine.engine import Engine, Event, WarmUp
from eagle3_jax.engine.scoring import score
from eagle3_jax.prompts.request import Request
from eagle3_jax.server.openai import CompletionRequest
from eagle3_jax.stats import SpeculationStats, TokenLogProb

_SECONDS_FOR_A_TICK = 5.0


@dataclasses.dataclass(frozen=True)
class PromptEcho:
    """The prompt as the first chunk of an answer that repeats it.

    Attributes:
        scores: One log-probability per token, none for the first; ``None`` if they are not wanted.
    """

    scores: list[TokenLogProb | None] | None


@dataclasses.dataclass(eq=False)
class Ticket:
    """One request on its way through the engine.

    Attributes:
        completion: The request of the client.
        events: The answer so far that its handler has not read: a slow reader never stops the
            engine.
        arrival: Time at which the request came.
        latest: Time of the latest chunk; ``None`` before the first.
        request_id: The engine's id, which only its thread uses.
    """

    completion: CompletionRequest
    events: asyncio.Queue[Event | PromptEcho | Exception] = dataclasses.field(
        default_factory=asyncio.Queue
    )
    arrival: float = dataclasses.field(default_factory=time.perf_counter)
    latest: float | None = None
    request_id: int | None = None

    @property
    def request(self) -> Request:
        """The request to the engine. With a limit of 0 only the prompt is echoed."""
        return self.completion.request


@dataclasses.dataclass(eq=False)
class Watch:
    """A request outside the batch, of which one step runs between two ticks of the engine.

    Attributes:
        steps: The work; each step yields an event as JSON.
        events: The events that its handler has not read: at the end ``None``, or the exception that
            ended the work.
        has_ended: Whether no more steps run.
    """

    steps: Iterator[dict[str, Any]]
    events: asyncio.Queue[dict[str, Any] | Exception | None] = dataclasses.field(
        default_factory=asyncio.Queue
    )
    has_ended: bool = False

    def cancel(self) -> None:
        """Ends it after the step that runs."""
        self.has_ended = True


class Worker:
    """Runs an engine. Its methods return at once and are called in the event loop."""

    def __init__(
        self,
        engine: Engine,
        *,
        on_compiling: Callable[[WarmUp], None],
        on_ready: Callable[[], None],
        on_events: Callable[[list[tuple[Ticket, Event | PromptEcho]], SpeculationStats], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Makes a worker whose thread is not started. The arguments are called in the event loop.

        Args:
            engine: The engine.
            on_compiling: Called before each program is compiled.
            on_ready: Called when all programs are compiled.
            on_events: Takes the events of a tick or the scores of a prompt, and the counters of all
                rounds.
            on_failure: Called when the engine has failed and the thread ends.
        """
        self._engine = engine
        self._on_compiling = on_compiling
        self._on_ready = on_ready
        self._on_events = on_events
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[Callable[[], bool | None]] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._watch: Watch | None = None
        self._is_stopped = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread, which compiles all programs first."""
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after its tick or compilation, and waits for it.

        Running requests get no more events.
        """
        self._is_stopped = True
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    def abandon(self) -> None:
        """Ends the thread after its tick, and blocks until then.

        It blocks no longer than five seconds of a compilation. A thread that still runs a program
        when the interpreter ends can abort the process.
        """
        self._is_stopped = True
        self._commands.put(lambda: None)
        self._thread.join(_SECONDS_FOR_A_TICK)

    def submit(self, ticket: Ticket) -> None:
        """Adds a request, which the engine must have checked."""
        self._commands.put(functools.partial(self._submit, ticket))

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request; its slot is free at the next tick."""
        self._commands.put(functools.partial(self._cancel, ticket))

    def watch(self, watch: Watch) -> None:
        """Begins a watch. One that still runs is replaced."""
        self._commands.put(functools.partial(self._begin_watch, watch))

    def _run(self) -> None:
        try:
            for program in self._engine.warm_up():
                if self._is_stopped:
                    return
                self._notify(self._on_compiling, program)
            self._notify(self._on_ready)

            while self._run_commands():
                events = [(self._tickets[event.request_id], event) for event in self._engine.tick()]
                for ticket, event in events:
                    if event.output is not None and ticket.request_id is not None:
                        del self._tickets[ticket.request_id]
                self._notify(self._on_events, events, self._engine.totals)
                self._run_watch()

        # Whatever it is, the server must hear of it.
        except BaseException as error:
            self._notify(self._on_failure, error)
            self._end_watch(RuntimeError(f"the engine failed: {type(error).__name__}: {error}"))

    def _run_commands(self) -> bool:
        """Runs the commands that have come, at most one slow one, and waits if there is no work.

        Returns:
            Whether to go on.
        """
        while not self._is_stopped:
            try:
                command = self._commands.get(block=self._engine.idle and self._watch is None)
            except queue.Empty:
                return True
            if command():
                return True
        return False

    def _submit(self, ticket: Ticket) -> bool:
        """Adds a request, after the scores of its prompt. Returns whether that took long."""
        is_scored = ticket.completion.echo and ticket.completion.logprobs is not None
        if ticket.completion.echo:
            scores = None
            if is_scored:
                scores = score(
                    self._engine.decoder, ticket.request.tokens, self._engine.num_logprobs or 0
                )
            self._notify(self._on_events, [(ticket, PromptEcho(scores))], self._engine.totals)

        if ticket.request.max_new_tokens > 0:
            ticket.request_id = self._engine.submit(ticket.request)
            self._tickets[ticket.request_id] = ticket
        return is_scored

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.request_id in self._tickets:
            self._engine.cancel(ticket.request_id)
            del self._tickets[ticket.request_id]

    def _begin_watch(self, watch: Watch) -> None:
        self._watch = watch

    def _run_watch(self) -> None:
        """Runs one step of the watch.

        Its failure, such as too little memory, is not a failure of the engine.
        """
        watch = self._watch
        if watch is None:
            return
        # A watch ends early when its client has left.
        if watch.has_ended:
            self._watch = None
            return

        try:
            event = next(watch.steps, None)
        except Exception as error:
            event = error

        if isinstance(event, dict):
            self._notify(watch.events.put_nowait, event)
        else:
            self._end_watch(event)

    def _end_watch(self, last: Exception | None) -> None:
        if self._watch is not None:
            self._watch.has_ended = True
            self._notify(self._watch.events.put_nowait, last)
            self._watch = None

    def _notify(self, method: Callable[..., None], *arguments: Any) -> None:
        # The loop may be closed; then nothing listens any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(method, *arguments)
