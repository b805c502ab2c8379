"""``eagle3 serve``: an HTTP server with OpenAI's completions."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from typing import Annotated, Literal

import typer

from eagle3_jax.cli._decoding import DraftOptions, open_decoder
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._mesh import MeshOption, read_mesh
from eagle3_jax.cli._options import CompilationCacheOption, DtypeOption, ModelOptions, grouped
from eagle3_jax.cli._parts import chosen_models
from eagle3_jax.cli._progress import spinner
from eagle3_jax.devices.compilation import keep_compiled_programs

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

    Requests share the rows of one batch, and each is answered as if it ran alone. Prints one line
    when all programs are compiled. Ctrl-C or SIGTERM: new requests are refused, the running ones
    end, and then the server. A second signal ends it at once.
    """
    # A missing package is reported before any work.
    import prometheus_client  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401

    with _bind(options.host, options.port) as listener:
        models, dtype = chosen_models(models, dtype)
        keep_compiled_programs(compilation_cache)
        with spinner("loading"):
            from eagle3_jax.server.app import Server
            from eagle3_jax.types import SamplingMode

            devices = read_mesh(mesh, [options.slots])
            decoder = open_decoder(models, draft, dtype, batch=options.slots, mesh=devices)

        mode = SamplingMode.GREEDY if options.sampling == "greedy" else SamplingMode.TRUNCATED
        port = listener.getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        model = models.target or "bundled"
        line = f"{model} is ready at http://{host}:{port}"

        server = Server(
            decoder,
            model=model,
            slots=options.slots,
            capacity=options.capacity,
            max_queue=options.max_queue,
            logprobs=options.logprobs,
            chunk=options.chunk,
            sampling_mode=mode,
            on_ready=lambda: print(line, flush=True),
        )
        server.run(listener)


def _bind(host: str, port: int) -> socket.socket:
    """Returns a socket at an address; nothing can connect to it yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise Misuse(
                f"--host {host} --port {port}: {reason.lower()}; choose another port, or 0 for any"
            ) from None
        # The socket stays open for the caller.
        stack.pop_all()
    return listener
