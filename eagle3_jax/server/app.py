"""An HTTP server with OpenAI's completions over an :class:`~eagle3_jax.engine.engine.Engine`."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from eagle3_jax import __version__
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.engine.engine import Engine, Event, WarmUp
from eagle3_jax.server.access import KnownHosts
from eagle3_jax.server.metrics import CONTENT_TYPE, Metrics
from eagle3_jax.server.openai import (
    FINISH_REASONS,
    Answer,
    BadRequest,
    CompletionRequest,
    Offer,
    join_choices,
    parse_body,
    read_request,
    wrong_model,
)
from eagle3_jax.server.page.viewer import Viewer
from eagle3_jax.server.transport import (
    DrainingServer,
    EventStream,
    error_body,
    event_bytes,
    read_body,
    respond_error,
    wait_for_disconnect,
)
from eagle3_jax.server.worker import PromptEcho, Ticket, Worker
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.types import FinishReason, SamplingMode

_SECONDS_FOR_READERS = 30  # at shutdown, for clients that have not read their answers
_CLIENT_LEFT = 499  # of a response that is not read


class State(enum.Enum):
    """Whether a server takes requests; the value ends "the server ..." in errors."""

    COMPILING = "is still compiling"
    READY = "is ready"
    DRAINING = "is shutting down"
    FAILED = "has failed"


class Server:
    """Serves one decoder: HTTP in the event loop, and the engine in a thread of its own.

    Attributes:
        app: The ASGI application.
        failure: The exception that ended the engine, if one did.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        *,
        model: str | None = None,
        slots: int = 4,
        capacity: int = 1024,
        max_queue: int = 256,
        logprobs: int | None = None,
        chunk: int | None = None,
        sampling_mode: SamplingMode = SamplingMode.TRUNCATED,
        hosts: Sequence[str] = (),
        on_compiling: Callable[[WarmUp], None] = lambda program: None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes a server; nothing is compiled yet.

        Args:
            decoder: Target and drafter.
            model: Name of the model for clients. Default: the target's.
            slots: Requests that run at a time.
            capacity: Tokens per row: prompt, new tokens and one draft.
            max_queue: Requests that may wait for a slot.
            logprobs: Most log-probabilities of a position that a request may ask for. Default: none
                are computed.
            chunk: Longest part of a prompt that runs between two rounds. Default: whole prompts.
            sampling_mode: The work that requests may need.
            hosts: Further names of this machine that clients may use in the address.
            on_compiling: Called before each program is compiled.
            on_ready: Called when all programs are compiled.

        Raises:
            ValueError: See :class:`~eagle3_jax.engine.engine.Engine`.
        """
        self._engine = Engine(
            decoder,
            slots=slots,
            capacity=capacity,
            sampling_mode=sampling_mode,
            chunk=chunk,
            logprobs=logprobs,
        )
        self._offer = Offer(decoder, model or decoder.target.name, self._engine.room, logprobs)

        self._most_open = slots + max_queue
        self._on_compiling = on_compiling
        self._on_ready = on_ready
        # Requests that wait or run.
        self._open: set[Ticket] = set()
        self._state = State.COMPILING
        self._program: WarmUp | None = None
        self._started = int(time.time())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: uvicorn.Server | None = None
        self.failure: BaseException | None = None

        self._metrics = Metrics(
            self._offer.model,
            max_depth=decoder.loop.drafter.max_depth,
            running=lambda: self._engine.num_running,
            waiting=lambda: max(0, len(self._open) - self._engine.num_running),
        )
        viewer = Viewer(
            self._offer,
            check=self._check,
            refuse=self._refuse,
            submit=lambda watch: self._worker.watch(watch),
        )

        routes = [
            *viewer.routes,
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{model:path}", self._find_model),
            Route("/version", self._tell_version),
            Route("/health", lambda request: self._refuse() or Response()),
            Route("/metrics", self._tell_metrics),
        ]
        handlers: dict[Any, Any] = {
            BadRequest: lambda request, error: respond_error(error.status, str(error), error.param),
            HTTPException: lambda request, error: respond_error(error.status_code, error.detail),
            ClientDisconnect: lambda request, error: Response(status_code=_CLIENT_LEFT),
            RecursionError: lambda request, error: respond_error(
                400, "the body is nested too deeply"
            ),
        }
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(KnownHosts, hosts)],
            exception_handlers=handlers,
            lifespan=self._live,
        )

    def run(self, listener: socket.socket) -> None:
        """Serves at a bound socket until SIGTERM or Ctrl-C.

        A second signal does not wait for running requests.

        Raises:
            Exception: The engine failed.
        """
        config = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=_SECONDS_FOR_READERS,
        )
        self._http = DrainingServer(config, self.drain)
        self._http.run([listener])
        if self.failure is not None:
            raise self.failure

    def drain(self) -> None:
        """Refuses new requests, and ends :meth:`run` when the running ones have ended.

        Any thread may call it.
        """
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self._state is not State.FAILED:
            self._state = State.DRAINING
        self._end_if_drained()

    def _end_if_drained(self) -> None:
        is_ending = self._state in (State.DRAINING, State.FAILED)
        if is_ending and not self._open and self._http is not None:
            self._http.should_exit = True

    @contextlib.asynccontextmanager
    async def _live(self, app: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._worker = Worker(
            self._engine,
            on_compiling=self._tell_compilation,
            on_ready=self._take_requests,
            on_events=self._deliver,
            on_failure=self._fail,
        )

        self._worker.start()
        try:
            yield
            await self._worker.stop()
        except asyncio.CancelledError:
            # After a second signal running requests are not waited for.
            self._worker.abandon()

    def _tell_compilation(self, program: WarmUp) -> None:
        self._program = program
        self._on_compiling(program)

    def _take_requests(self) -> None:
        if self._state is State.COMPILING:
            self._state = State.READY
            self._on_ready()

    def _deliver(
        self, events: list[tuple[Ticket, Event | PromptEcho]], totals: SpeculationStats
    ) -> None:
        """Counts new tokens, and gives them to the handlers of their requests."""
        now = time.perf_counter()
        self._metrics.count_rounds(totals)
        for ticket, event in events:
            ticket.events.put_nowait(event)
            if isinstance(event, PromptEcho):
                if ticket.request.max_new_tokens == 0:
                    self._close(ticket, "length")
                continue

            self._metrics.count_tokens(
                len(event.tokens),
                num_prompt=len(ticket.request.tokens),
                seconds=now - (ticket.latest or ticket.arrival),
                is_first=ticket.latest is None,
            )

            ticket.latest = now
            if event.output is not None:
                self._close(ticket, FINISH_REASONS.get(event.finish_reason, "error"))

    def _fail(self, error: BaseException) -> None:
        """Fails all requests and ends the server."""
        self.failure = error
        self._state = State.FAILED
        for ticket in list(self._open):
            ticket.events.put_nowait(
                RuntimeError(f"the engine failed: {type(error).__name__}: {error}")
            )
            self._close(ticket, "error")
        self._end_if_drained()

    def _close(self, ticket: Ticket, reason: str) -> None:
        """Ends a request that waits or runs."""
        if ticket in self._open:
            self._open.discard(ticket)
            self._worker.cancel(ticket)
            self._metrics.count_end(reason, time.perf_counter() - ticket.arrival)
            self._end_if_drained()

    def _tell_version(self, request: Request) -> Response:
        return JSONResponse({"version": f"eagle3-jax {__version__}"})

    def _tell_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._offer.model,
            "object": "model",
            "created": self._started,
            "owned_by": "eagle3-jax",
            "root": self._offer.model,
            "parent": None,
            "max_model_len": self._offer.room,
        }

    def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    def _find_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._offer.model:
            raise wrong_model(name, self._offer)
        return JSONResponse(self._model())

    def _refuse(self) -> Response | None:
        """Returns the answer to every request, unless the server is ready."""
        if self._state is State.READY:
            return None
        message = f"the server {self._state.value}"
        if self._state is State.COMPILING and self._program is not None:
            number, total, program = self._program
            message = f"{message}: {number} of {total}, {program}"
        return respond_error(503, message)

    async def _complete(self, request: Request) -> Response:
        body = await read_body(request)
        is_chat = request.url.path == "/v1/chat/completions"
        completion = await asyncio.to_thread(self._read, body, is_chat)

        refusal = self._refuse()
        if refusal is not None:
            return refusal
        if len(self._open) >= self._most_open:
            return respond_error(
                503, f"the server has {len(self._open)} requests already; try again"
            )

        ticket = Ticket(completion)
        self._open.add(ticket)
        self._worker.submit(ticket)
        answer = Answer(completion, self._offer)
        if completion.stream:
            events = self._stream(ticket, answer)
            return EventStream(events, on_end=lambda: self._close(ticket, "abort"))
        return await self._answer_in_one(request, ticket, answer)

    def _read(self, body: bytes, is_chat: bool) -> CompletionRequest:
        """Parses and checks a request.

        It runs outside of the event loop, because a long text takes a while.
        """
        completion = read_request(parse_body(body), self._offer, is_chat=is_chat)
        self._check(completion)
        return completion

    def _check(self, completion: CompletionRequest) -> None:
        """Raises if the engine does not accept a request."""
        if completion.request.max_new_tokens > 0:
            try:
                self._engine.checked(completion.request)
            except ValueError as error:
                raise BadRequest(
                    f"{error}; the server chose it with --sampling", "temperature"
                ) from None

    async def _choices(self, ticket: Ticket, answer: Answer) -> AsyncIterator[dict[str, Any]]:
        """Yields one choice per chunk.

        The chunks are the prompt if it is echoed, the first token, and the tokens of each round.
        """
        while answer.finish_reason is None:
            event = await ticket.events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, PromptEcho):
                choice = answer.add_prompt(event.scores)
            elif event.finish_reason is FinishReason.NOT_FINITE:
                raise RuntimeError("the target has no next token: its logits are not finite")
            else:
                choice = answer.add(event)

            # A stop text ends an answer before the engine does.
            if answer.finish_reason is not None:
                self._close(ticket, answer.finish_reason)
            yield choice

    async def _stream(self, ticket: Ticket, answer: Answer) -> AsyncIterator[bytes]:
        try:
            async for choice in self._choices(ticket, answer):
                yield event_bytes(answer.body([choice], usage=False))
            if ticket.completion.include_usage:
                yield event_bytes(answer.body([], usage=True))
        except RuntimeError as error:
            yield event_bytes(error_body(500, str(error)))
        yield b"data: [DONE]\n\n"

    async def _answer_in_one(self, request: Request, ticket: Ticket, answer: Answer) -> Response:
        async def collect() -> list[dict[str, Any]]:
            return [choice async for choice in self._choices(ticket, answer)]

        answering = asyncio.ensure_future(collect())
        leaving = asyncio.ensure_future(wait_for_disconnect(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=_CLIENT_LEFT)
            return JSONResponse(answer.body([join_choices(answering.result())], usage=True))
        except RuntimeError as error:
            return respond_error(500, str(error))
        finally:
            answering.cancel()
            leaving.cancel()
            self._close(ticket, "abort")
