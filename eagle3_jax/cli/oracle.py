"""``eagle3 oracle``: files with which any engine tests its own verification of drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle3_jax.cli._progress import spinner

EXAMPLE = "Example: eagle3 oracle ./oracle && python ./oracle/check.py ./oracle"


def oracle(
    out: Annotated[Path, typer.Argument(help="Directory to create; it must not exist.")],
) -> None:
    """Write rounds of speculative decoding, with which any engine tests its own verification.

    The folder has tiny models with the head of each method, rounds with all that decided them as
    NPZ files, a page that defines every array and rule, and a program that checks an engine's
    verdicts by numpy alone.
    """
    from eagle3_jax.oracle import write_oracle

    with spinner("models") as now:
        write_oracle(out, now.say)
    cases = len(list((out / "cases").iterdir()))
    typer.echo(f"wrote {out} ({cases} cases); python {out / 'check.py'} {out} checks it")
