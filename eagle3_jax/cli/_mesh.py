"""Several devices and several processes: ``--mesh`` and ``--distributed``."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3_jax.cli._errors import Misuse, one_line

if TYPE_CHECKING:
    from jax.sharding import Mesh

MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        help="Divide both models and the rows of a batch over all devices: 'model=4,data=2'.",
    ),
]
DistributedOption = Annotated[
    str | None,
    typer.Option(
        "--distributed",
        help=(
            "Run as one of several processes: 'auto' if a launcher started them (Slurm, Open MPI,"
            " Cloud TPU), or 'coordinator=HOST:PORT,processes=2,process=0'. The first process"
            " prints."
        ),
    ),
]
_PROCESSES = re.compile(
    r"coordinator=(?P<coordinator>[^,\s]+:\d+),processes=(?P<processes>\d{1,6}),process=(?P<process>\d{1,6})"
)
_FORM = "'auto', or 'coordinator=HOST:PORT,processes=2,process=0' with another process for each"


def join(distributed: str | None, mesh: str | None) -> bool:
    """Joins the processes that ``--distributed`` names, before anything runs on a device.

    Returns:
        Whether this process is the one that prints; the standard output of the others is dropped.
    """
    if distributed is None:
        return True
    if mesh is None:
        raise Misuse(
            "--distributed was given without --mesh, which divides the models over the processes;"
            " see docs/mesh.md"
        )
    import jax

    numbers = _PROCESSES.fullmatch(distributed)
    if numbers is None and distributed != "auto":
        raise Misuse(f"--distributed {distributed!r}: expected {_FORM}")
    try:
        if numbers is None:
            jax.distributed.initialize()
        else:
            processes = int(numbers["processes"])
            process = int(numbers["process"])
            if process >= processes:
                raise Misuse(
                    f"--distributed {distributed}: process is {process}; expected 0 to"
                    f" {processes - 1}"
                )
            jax.distributed.initialize(numbers["coordinator"], processes, process)
    except (ValueError, RuntimeError) as error:
        if isinstance(error, Misuse):
            raise
        hint = f"; expected {_FORM}" if numbers is None else ""
        raise Misuse(
            f"--distributed {distributed}: {one_line(str(error)).rstrip('.')}{hint}"
        ) from None

    first = jax.process_index() == 0
    # Libraries for collectives may print too (Gloo does); their output goes to the standard error.
    output = os.dup(1) if first else os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(2, 1)
    # It stays open to the end of the process.
    sys.stdout = open(output, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    return first


def read_mesh(text: str | None, batches: list[int]) -> Mesh | None:
    """Makes the mesh that ``--mesh`` names; it must divide each of the batch sizes."""
    if text is None:
        return None
    from eagle3_jax.devices.sharding import check_rows, make_mesh

    hint = ""
    try:
        mesh = make_mesh(text)
        hint = (
            " (with --json, --batch-size sets how many are decoded at once; text is streamed one by"
            " one)"
        )
        for batch in batches:
            check_rows(mesh, batch)
    except ValueError as error:
        raise Misuse(f"--mesh {text}: {error}{hint}") from None
    return mesh
