"""Parts of HTTP: bodies of limited size, errors, streams of events, and a server that drains."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from eagle3_jax.server.openai import BadRequest

LARGEST_BODY = 2**20  # bytes
_MOST_DROPPED = 2**26  # bytes of a larger body that are read, so that its sender reads the answer
_ERROR_TYPES = {
    403: "PermissionDeniedError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class DrainingServer(uvicorn.Server):
    """A server of HTTP that drains.

    It ends after its running requests at the first signal, and at once at the second.
    """

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_is_not_cancellation)
        self._drain = drain
        self._num_signals = 0

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._num_signals += 1
        if self._num_signals > 1 or not self.started:
            self.should_exit = True
            self.force_exit = True
        self._drain()


def _is_not_cancellation(record: logging.LogRecord) -> bool:
    """Whether a log record is not the traceback of a task that the server's end cancelled."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class EventStream(StreamingResponse):
    """A stream of events that also ends its request if the client leaves before the first event."""

    def __init__(self, events: AsyncIterator[bytes], *, on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._on_end = on_end

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self._on_end()


async def read_body(request: Request) -> bytes:
    """Returns a body of up to 1 MiB.

    Raises:
        BadRequest: The body is larger. It is read up to 64 MiB and dropped, so that its sender
            reads the answer.
    """
    parts = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= LARGEST_BODY:
            parts.append(part)
        if size > _MOST_DROPPED:
            break

    if size > LARGEST_BODY:
        raise BadRequest(f"the body has more than {LARGEST_BODY} bytes", status=413)
    return b"".join(parts)


async def wait_for_disconnect(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Returns an error in OpenAI's form.

    Args:
        status: Status code of HTTP.
        message: One line for the user.
        param: The field of the request that it is about.
    """
    kind = _ERROR_TYPES.get(status, "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def respond_error(status: int, message: str, param: str | None = None) -> JSONResponse:
    """Returns an error as a response; see :func:`error_body`.

    Clients come back after a second if it is 503.
    """
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse(error_body(status, message, param), status, headers)


def event_bytes(body: dict[str, Any]) -> bytes:
    """Returns one event of a stream."""
    return f"data: {json.dumps(body)}\n\n".encode()
