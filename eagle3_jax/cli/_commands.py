"""All commands in one parser."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand

from eagle3_jax import __version__
from eagle3_jax.cli import (
    bench,
    certify,
    chat,
    convert,
    doctor,
    generate,
    inspect,
    oracle,
    plan,
    serve,
    train,
    tune,
)
from eagle3_jax.cli._errors import Misuse

# The place of a line in a file of prompts.
_LINE = re.compile(r" line \d+: ")

app = typer.Typer(
    name="eagle3",
    help="Lossless speculative decoding in JAX.",
    epilog="Example: eagle3 generate 'def fibonacci(n):' --max-new-tokens 64",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


@app.callback(invoke_without_command=True)
def _root(
    traceback: bool = typer.Option(
        False, "--traceback", help="Show the traceback of an error, for developers."
    ),
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    # `run` looks for it.
    del traceback
    if version:
        typer.echo(__version__)


app.command("generate", epilog=generate.EXAMPLE)(generate.generate)
app.command("chat", epilog=chat.EXAMPLE)(chat.chat)
app.command("serve", epilog=serve.EXAMPLE)(serve.serve)
app.command("convert", epilog=convert.EXAMPLE)(convert.convert)
app.command("inspect", epilog=inspect.EXAMPLE)(inspect.inspect)
app.command("doctor", epilog=doctor.EXAMPLE)(doctor.doctor)
app.command("bench", epilog=bench.EXAMPLE)(bench.bench)
app.command("certify", epilog=certify.EXAMPLE)(certify.certify)
app.command("oracle", epilog=oracle.EXAMPLE)(oracle.oracle)
app.command("tune", epilog=tune.EXAMPLE)(tune.tune)
app.add_typer(train.app, name="train")
app.add_typer(plan.app, name="plan")


class _Command(TyperCommand):
    """A command whose errors name its options.

    It refuses negative numbers, infinity and NaN, which no option of any command takes.
    """

    def invoke(self, ctx: Any) -> Any:
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            for number in value if isinstance(value, list | tuple) else [value]:
                if isinstance(number, int | float) and not 0 <= number < math.inf:
                    raise Misuse(
                        f"{parameter.opts[0]} is {number}; expected a finite number, at least 0"
                    )

        try:
            return super().invoke(ctx)
        except ValueError as error:
            message = self._with_options(str(error))
            if message == str(error):
                raise
            raise Misuse(message) from error

    def _with_options(self, message: str) -> str:
        """Returns a message of the library with options in place of the names of parameters."""
        # Keys of a file are named like parameters.
        if _LINE.search(message):
            return message

        options = {
            parameter.name: parameter.opts[0]
            for parameter in self.params
            if parameter.name and parameter.opts[0].startswith("--")
        }
        subject, _, predicate = message.partition(" is ")
        if predicate and subject in options:
            message = f"{options[subject]} is {predicate}"

        # Other words with an underscore are names too, but not keys such as num_nodes=60.
        compound = "|".join(name for name in options if "_" in name)
        compound = "|".join(name for name in options if "_" in name)
        if not compound:
            return message
        return re.sub(rf"(?<![\w-])({compound})\b(?!=)", lambda name: options[name[0]], message)


for _group in (app, train.app, plan.app):
    for _command in _group.registered_commands:
        _command.cls = _Command


@functools.cache
def parser() -> Any:
    """Returns the parser of command lines, which is built once."""
    return typer.main.get_command(app)
