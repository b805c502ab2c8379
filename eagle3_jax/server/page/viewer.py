"""The page of a server: one request is decoded plainly and with drafts, in turns."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.drafters.plain import Plain
from eagle3_jax.measure.environment import hardware
from eagle3_jax.server.openai import BadRequest, CompletionRequest, Offer, parse_body, read_request
from eagle3_jax.server.page.lanes import PLAIN, SPECULATIVE, Record, run_lanes
from eagle3_jax.server.transport import (
    EventStream,
    error_body,
    event_bytes,
    read_body,
    respond_error,
)
from eagle3_jax.server.worker import Watch
from eagle3_jax.topology import Chain, DynamicTree

PAGE = Path(__file__).with_name("page.html")
SERVED = "as the server"
_SHAPES = {f"chain of {length}": Chain(length) for length in (1, 2, 3, 4, 5, 6, 8)}
_SHAPES |= {
    f"tree of {nodes}": DynamicTree(num_nodes=nodes, max_depth=4, top_k=4) for nodes in (8, 16, 32)
}
# fmt: off
_FIELDS = {
    "prompt", "messages", "max_tokens", "temperature", "top_k", "top_p", "seed", "draft",
    "draft_sampling",
}
# fmt: on


def page() -> str:
    """Returns the page, with the script that draws trees in it: it loads nothing."""
    return PAGE.read_text("utf-8").replace(
        "/* trees.js */", PAGE.with_name("trees.js").read_text("utf-8")
    )


class Viewer:
    """The handlers of the page, for one viewer at a time.

    Attributes:
        routes: The page at ``/``, and ``/watch``: facts about the server (GET) and a request in two
            lanes (POST).
    """

    def __init__(
        self,
        offer: Offer,
        *,
        check: Callable[[CompletionRequest], None],
        refuse: Callable[[], Response | None],
        submit: Callable[[Watch], None],
    ) -> None:
        """Makes the handlers.

        Args:
            offer: The server's decoder and limits.
            check: Raises if the server does not accept a request.
            refuse: Returns the answer of a server that takes no requests now.
            submit: Runs a watch between the rounds of other requests.
        """
        self._offer = offer
        self._check = check
        self._refuse = refuse
        self._submit = submit
        self._latest: Watch | None = None
        self._shapes = _usable_shapes(offer.decoder)
        self.routes = [
            Route("/", lambda request: HTMLResponse(page())),
            Route("/watch", self._tell, methods=["GET"]),
            Route("/watch", self._watch, methods=["POST"]),
        ]

    async def _tell(self, request: Request) -> Response:
        is_chat = self._offer.decoder.target.chat_template is not None
        offered = {"room": self._offer.room, "is_chat": is_chat, "drafts": list(self._shapes)}
        return self._refuse() or JSONResponse(self._facts() | offered)

    def _facts(self) -> Record:
        decoder = self._offer.decoder
        return {
            "model": self._offer.model,
            "method": decoder.method,
            "weights": decoder.target.weights,
            "lossless": decoder.lossless,
            "hardware": hardware(),
        }

    async def _watch(self, request: Request) -> Response:
        body = await read_body(request)
        start, steps = await asyncio.to_thread(self._read, body)
        refusal = self._refuse()
        if refusal is not None:
            return refusal
        if self._latest is not None and not self._latest.has_ended:
            return respond_error(
                503, "another page is being answered, and the page is for one viewer; try again"
            )

        watch = Watch(steps)
        self._latest = watch
        self._submit(watch)
        return EventStream(_stream(watch, start), on_end=watch.cancel)

    def _read(self, body: bytes) -> tuple[Record, Iterator[Record]]:
        """Parses and checks a request.

        Returns its first event, and the work that yields the others.
        """
        values = parse_body(body)
        unknown = sorted(set(values) - _FIELDS)
        if unknown:
            raise BadRequest(
                f"{unknown[0]!r:.80} is not supported by the page; leave it out", unknown[0]
            )

        draft = values.get("draft", SERVED)
        if not isinstance(draft, str) or draft not in self._shapes:
            raise BadRequest(
                f"draft is {draft!r:.80}; expected one of {', '.join(self._shapes)}", "draft"
            )
        served = self._offer.decoder
        try:
            decoder = shaped(served, self._shapes[draft], values.get("draft_sampling"))
        except ValueError as error:
            raise BadRequest(str(error), "draft_sampling") from None

        fields = {name: value for name, value in values.items() if not name.startswith("draft")}
        is_chat = "messages" in values
        completion = read_request(fields, self._offer, is_chat=is_chat)
        self._check(completion)
        request = completion.request

        facts = self._facts() | {
            "method": decoder.method,
            "rule": type(decoder.loop.verifier).__name__,
            "request": values,
            "temperature": request.temperature,
            "seed": request.seed,
        }
        plain = SpeculativeDecoder(served.target, stop_tokens=served.stop_tokens)
        steps = run_lanes({PLAIN: plain, SPECULATIVE: decoder}, request)
        return {"event": "start", **facts}, steps


def shaped(
    served: SpeculativeDecoder, shape: Chain | DynamicTree | None, draft_sampling: str | None
) -> SpeculativeDecoder:
    """Returns the decoder of a server with another draft; it shares all arrays.

    Raises:
        ValueError: The drafter cannot draft this shape, or cannot sample.
    """
    if shape is None and draft_sampling is None:
        return served

    # The drafter with the served shape, which other options replace.
    drafter = dataclasses.replace(served.drafter, drafter=served.loop.drafter)
    return SpeculativeDecoder(
        served.target,
        drafter,
        num_speculative_tokens=shape.num_speculative_tokens if isinstance(shape, Chain) else None,
        tree=shape if isinstance(shape, DynamicTree) else None,
        draft_sampling=draft_sampling,
        stop_tokens=served.stop_tokens,
        verifier=served.loop.verifier,
    )


def _usable_shapes(served: SpeculativeDecoder) -> dict[str, Chain | DynamicTree | None]:
    """Returns the shapes that the drafter of a server can draft, with their names."""
    shapes: dict[str, Chain | DynamicTree | None] = {SERVED: None}
    if isinstance(served.loop.drafter, Plain):
        return shapes
    for name, shape in _SHAPES.items():
        try:
            shaped(served, shape, None)
        except ValueError:
            continue
        shapes[name] = shape
    return shapes


async def _stream(watch: Watch, start: Record) -> AsyncIterator[bytes]:
    yield event_bytes(start)
    while True:
        event = await watch.events.get()
        if event is None:
            return
        if isinstance(event, Exception):
            first_line = str(event).partition("\n")[0]
            yield event_bytes(error_body(500, f"{type(event).__name__}: {first_line}"))
            return
        yield event_bytes(event)
