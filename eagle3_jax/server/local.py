"""A server in a thread of this program, for tests and experiments."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.server.app import Server


@contextlib.contextmanager
def serving(decoder: SpeculativeDecoder, **options: Any) -> Iterator[str]:
    """Serves a decoder in a thread, at a free port of this machine, until the context ends.

    Args:
        decoder: Target and drafter.
        options: Options of :class:`Server`.

    Yields:
        The address, such as ``http://127.0.0.1:40123``.

    Raises:
        Exception: The engine failed.
    """
    is_ready = threading.Event()
    server = Server(decoder, **options, on_ready=is_ready.set)

    def run() -> None:
        # The exception is `server.failure`.
        with contextlib.suppress(Exception):
            server.run(listener)
        is_ready.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run, name="server")
        thread.start()
        is_ready.wait()
        try:
            if server.failure is None:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.drain()
            thread.join()
    if server.failure is not None:
        raise server.failure
