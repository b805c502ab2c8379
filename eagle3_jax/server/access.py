"""Checks that keep pages of other sites away from a server on a user's machine."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from eagle3_jax.server.transport import respond_error

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(\[[^\[\]]+\]|[^\[\]:/@]+)(:[0-9]{1,5})?")
_JSON = "application/json"


class KnownHosts:
    """Middleware that refuses requests which a page of another site may have sent.

    A browser sends such a request with the site's name in ``Host`` (DNS rebinding), with the site
    in ``Origin``, or as a form, which needs no permission of the server. Known hosts are the
    loopback names, the address that the client connected to, and further names.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        self._names = {_normalized(name) for name in (*_LOOPBACK, *names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request itself if it is refused."""
        app = self._app
        if scope["type"] == "http":
            app = self._refusal(scope) or app
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        address = (scope.get("server") or ("",))[0]
        known = self._names | {_normalized(address)}

        # A request with no host, or with several, has no known one.
        host = ", ".join(headers.getlist("host"))
        if _host_of(host) not in known:
            return _refuse_name("Host", host)
        origin = headers.get("origin")
        if origin is not None:
            scheme, _, site = origin.partition("://")
            if scheme not in ("http", "https") or _host_of(site) not in known:
                return _refuse_name("Origin", origin)

        content_type = headers.get("content-type", "")
        if scope["method"] == "POST" and content_type.partition(";")[0].strip().lower() != _JSON:
            return respond_error(
                415,
                f"Content-Type is {content_type!r:.80}; expected {_JSON}: curl needs"
                f" -H 'Content-Type: {_JSON}'",
            )
        return None


def _refuse_name(header: str, value: str) -> Response:
    return respond_error(
        403,
        f"{header} is {value!r:.80}, which is not a known name of this server; use localhost or its"
        " address, or start it with --allow-host NAME",
    )


def _host_of(text: str) -> str | None:
    """Returns the host of ``host:port``; ``None`` for another form."""
    match = _HOST.fullmatch(text)
    return None if match is None else _normalized(match[1].strip("[]"))


def _normalized(name: str) -> str:
    """Returns the one spelling of a name or an address."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name.lower()
    # A server that listens at every address sees one of IPv4 as a part of IPv6.
    return str(getattr(address, "ipv4_mapped", None) or address)
