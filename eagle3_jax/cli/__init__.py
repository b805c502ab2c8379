"""The command `eagle3`; it sits on top of everything and is imported by nothing.

Misuse ends with exit code 2 and one line on the standard error; nothing has been written then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from eagle3_jax import __version__
from eagle3_jax.cli import bench, convert, generate, plan, train, tune
from eagle3_jax.cli._errors import Explained, explain

app = typer.Typer(
    name="eagle3",
    help="Exact EAGLE-3 speculative decoding in JAX.",
    epilog="Example: eagle3 generate 'def fibonacci(n):' --max-new-tokens 64",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


@app.callback(invoke_without_command=True)
def _root(
    traceback: bool = typer.Option(False, "--traceback", help="Show where an error came from, for developers."),
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    del traceback  # `run` looks for it
    if version:
        typer.echo(__version__)


app.command("generate", epilog=generate.EXAMPLE)(generate.generate)
app.command("convert", epilog=convert.CONVERT_EXAMPLE)(convert.convert)
app.command("inspect", epilog=convert.INSPECT_EXAMPLE)(convert.inspect)
app.command("doctor", epilog=convert.DOCTOR_EXAMPLE)(convert.doctor)
app.command("bench", epilog=bench.EXAMPLE)(bench.bench)
app.command("tune", epilog=tune.EXAMPLE)(tune.tune)
app.add_typer(train.app, name="train")
app.add_typer(plan.app, name="plan")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        arguments: Without the program's name; those of the process when left out.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in ([], ["train"], ["plan"]):
        given.append("--help")
    try:
        code = app(given, prog_name="eagle3", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        # The reader has gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except BaseException as error:  # every ending of the program is decided in this one place
        explained = explain(error)
        if explained is None or (explained.message and "--traceback" in given):
            raise
        return _tell(explained)


def _tell(explained: Explained) -> int:
    if explained.message:
        print(explained.message, file=sys.stderr)
    return explained.code


def main() -> None:
    """Entry point of the command."""
    sys.exit(run())
