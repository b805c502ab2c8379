"""``eagle3 serve``: an HTTP server with OpenAI's completions."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import socket
import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from eagle3_jax.cli._decoding import DraftOptions, open_decoder
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._mesh import MeshOption, read_mesh
from eagle3_jax.cli._options import (
    CompilationCacheOption,
    DtypeOption,
    ModelOptions,
    grouped,
    parse_schedule,
)
from eagle3_jax.cli._parts import chosen_models
from eagle3_jax.cli._progress import Activity, counted, spinner
from eagle3_jax.devices.compilation import keep_compiled_programs

if TYPE_CHECKING:
    from eagle3_jax import SpeculativeDecoder
    from eagle3_jax.engine.engine import WarmUp

_EVERY_ADDRESS = ("0.0.0.0", "::")
_BACKLOG = 2048  # clients that may connect while the models load

EXAMPLE = """\b
Examples:
  eagle3 serve --port 8000
  eagle3 serve --target ./llama --drafter ./head --dtype bfloat16 --slots 8 --capacity 4096
  eagle3 serve --logprobs 20    # for eagle3 certify --url http://127.0.0.1:8000"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The address, and the work that the server accepts."""

    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen at; 0 takes a free one.", max=65535)] = (
        8000
    )
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Name of this machine that clients may use in the address, besides --host,"
                " localhost and the address that they connect to; repeat it for more names."
            )
        ),
    ] = None
    slots: Annotated[int, typer.Option(help="Requests that run at a time.", min=1, max=1024)] = 4
    capacity: Annotated[
        int,
        typer.Option(help="Tokens per slot: prompt, new tokens and one draft.", min=16, max=2**20),
    ] = 1024
    max_queue: Annotated[
        int,
        typer.Option(
            help="Requests that may wait for a slot; others get 503.", min=0, max=1_000_000
        ),
    ] = 256
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Most log-probabilities of a position that a request may ask for. Default: none.",
            min=0,
        ),
    ] = None
    chunk: Annotated[
        int | None,
        typer.Option(
            help="Longest part of a prompt that runs between two rounds. Default: whole prompts.",
            min=1,
        ),
    ] = None
    sampling: Annotated[
        Literal["full", "greedy"],
        typer.Option(
            help="Requests with any sampling, or with temperature 0 only, which is faster."
        ),
    ] = "full"


@grouped
def serve(
    *,
    models: ModelOptions,
    draft: DraftOptions,
    options: ServerOptions,
    dtype: DtypeOption = None,
    mesh: MeshOption = None,
    compilation_cache: CompilationCacheOption = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's completions and chat completions.

    Requests share the rows of one batch, and each is answered as if it ran alone. Two lines say
    that all programs are compiled, and what is served. Ctrl-C or SIGTERM: new requests are refused,
    the running ones end, and then the server. A second signal ends it at once.
    """
    # A missing package is reported before any work.
    import prometheus_client  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401

    hosts = _hosts(options)
    with _bind(options.host, options.port) as listener, contextlib.ExitStack() as shown:
        models, dtype = chosen_models(models, dtype, shows_drafts=True)
        keep_compiled_programs(compilation_cache)
        now = shown.enter_context(spinner("loading"))

        from eagle3_jax.server.app import Server
        from eagle3_jax.types import SamplingMode

        devices = read_mesh(mesh, [options.slots])
        decoder = open_decoder(models, draft, dtype, batch=options.slots, mesh=devices)
        mode = SamplingMode.GREEDY if options.sampling == "greedy" else SamplingMode.TRUNCATED
        model = models.target or "bundled"
        compilation = _Compilation(now)

        def announce() -> None:
            compilation.end()
            # The spinner would write over the lines.
            shown.close()
            host = f"[{options.host}]" if ":" in options.host else options.host
            print(f"{model} is ready at http://{host}:{listener.getsockname()[1]}")
            slots = f"{options.slots} slot{'s' * (options.slots > 1)}"
            drafts = _described(decoder, models, draft, options.slots)
            print(f"{slots}; {dtype}, weights {models.weights}; {drafts}", flush=True)

        server = Server(
            decoder,
            model=model,
            slots=options.slots,
            capacity=options.capacity,
            max_queue=options.max_queue,
            logprobs=options.logprobs,
            chunk=options.chunk,
            sampling_mode=mode,
            hosts=hosts,
            on_compiling=compilation.begin,
            on_ready=announce,
        )
        server.run(listener)


class _Compilation:
    """Reports the program that is compiled at a terminal, and every compiled program in a log."""

    def __init__(self, now: Activity) -> None:
        self._now = now
        self._program = ""
        self._start = 0.0

    def begin(self, program: WarmUp) -> None:
        """Reports the end of the program before, and the begin of this one."""
        self.end()
        if program.number == 1:
            self._now = counted(self._now, program.total)
        self._program = program.program
        self._start = time.monotonic()
        self._now.say(f"compiling {program.program}")

    def end(self) -> None:
        """Reports the end of a program, if one has begun."""
        if self._program and not sys.stderr.isatty():
            self._now.tell(f"compiled {self._program} in {time.monotonic() - self._start:.1f} s")


def _described(
    decoder: SpeculativeDecoder, models: ModelOptions, draft: DraftOptions, num_slots: int
) -> str:
    """Returns the drafter and its draft lengths by rows."""
    from eagle3_jax.loaded import shape_of

    if decoder.method == "none":
        is_chosen = models.drafter == "none"
        return (
            "no drafter" if is_chosen else "no drafts at this number of slots; fewer --slots draft"
        )
    if draft.schedule is None:
        return f"{decoder.drafter.described}, {shape_of(decoder.loop.drafter)}"
    steps = parse_schedule(draft.schedule).steps(num_slots)
    lengths = [f"K={length} for up to {rows} rows" for rows, length in reversed(steps)]
    return f"{decoder.drafter.described}, {', '.join(lengths)}"


def _hosts(options: ServerOptions) -> list[str]:
    """Returns the names that clients may use, besides those of the loopback and the address."""
    names = options.allow_host or []
    for name in names:
        if re.fullmatch(r"[\w.-]+|[0-9a-fA-F:]+", name) is None:
            raise Misuse(
                f"--allow-host {name}: expected a name or an address without scheme and port, such"
                " as gpu-box.local"
            )
    host = socket.gethostname() if options.host in _EVERY_ADDRESS else options.host
    return [*names, host]


def _bind(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address.

    Clients that connect before the server runs wait: a second server at the same address is refused
    only if the first one listens.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            reason = error.strerror or str(error)
            raise Misuse(
                f"--host {host} --port {port}: {reason.lower()}; choose another port, or 0 for any"
            ) from None
        # The socket stays open for the caller.
        stack.pop_all()
    return listener
