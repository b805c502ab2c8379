"""The command line of certificates: ``eagle3 certify`` and ``python -m eagle3_jax.certify``.

It needs no JAX.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from eagle3_jax.certify.source import counted
from eagle3_jax.files.jsonl import read_rows

if TYPE_CHECKING:
    from eagle3_jax.certify.asking import Plan
    from eagle3_jax.certify.certificate import Certificate

ABOUT = """Judge whether a server's speculation is lossless.

Compares what the server writes with the distribution that it reports. No draft reaches the first
token of an answer, so it shows whether the reports can be trusted. Fields of the request and states
of the server follow.

Exits with 0 if it is lossless, with 1 if it is not or does not do what a field says, and with 3 if
not all was seen that the verdict needs. Ctrl-C: what was answered until then is judged.
"""
DEFAULT_PROMPTS = (
    "The three most common mistakes of beginners are",
    "Once upon a time, in a village by the sea,",
    "def parse_date(text):\n",
    "Question: Why is the sky blue?\nAnswer:",
    "The history of the bicycle begins in",
    "To make bread, you need",
    "In 1969,",
    "SELECT name, count(*) FROM",
    "Dear Sir or Madam,\n\n",
    "My favourite book is",
    "The committee decided that",
    "Here is a list of ten animals:\n1.",
)
_EVERY = 30.0  # seconds between two lines of progress where these are not on a terminal


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of the command line.

    Attributes:
        name: Such as ``--max-new-tokens``.
        kind: Type of its value; ``bool`` takes none.
        help: What it is.
        default: Its value if it is absent.
        least: Smallest number that it may be.
        choices: Words that it may be; empty if it may be any.
        is_required: Whether it must be there.
    """

    name: str
    kind: type
    help: str
    default: Any = None
    least: int | float | None = None
    choices: tuple[str, ...] = ()
    is_required: bool = False

    @property
    def field(self) -> str:
        """The name of its value."""
        return self.name.removeprefix("--").replace("-", "_")

    def parse(self, text: str) -> Any:
        """Returns the value of a text.

        Raises:
            argparse.ArgumentTypeError: It is not of the type, or too small.
        """
        try:
            value = self.kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not of the type {self.kind.__name__}"
            ) from None
        if self.least is not None and not self.least <= value < float("inf"):
            raise argparse.ArgumentTypeError(
                f"{text} is not a finite number of at least {self.least:g}"
            )
        return value


OPTIONS = (
    Option("--url", str, "Address of the server, such as http://localhost:8000.", is_required=True),
    Option(
        "--plain-url",
        str,
        "The same model without speculation, for a server that reports no log-probabilities.",
    ),
    Option("--model", str, "Name of the model. Default: the first that it serves."),
    Option("--api", str, "What is asked for.", "completions", choices=("completions", "chat")),
    Option(
        "--api-key-env",
        str,
        "Variable of the environment that holds the server's key.",
        "EAGLE3_API_KEY",
    ),
    Option(
        "--prompts",
        Path,
        "JSONL file with 'prompt', 'prompt_ids', 'turns' or 'question' on each line. Default:"
        " twelve short texts.",
    ),
    Option(
        "--speculation",
        str,
        "Whether drafts must be seen.",
        "seen",
        choices=("seen", "assumed", "none"),
    ),
    Option("--requests", int, "Short sampled answers; 0 for none.", 2048, least=0),
    Option("--long-requests", int, "Long sampled answers; 0 for none.", 96, least=0),
    Option("--greedy-requests", int, "Greedy answers; 0 for none.", 16, least=0),
    Option("--max-new-tokens", int, "Tokens of a long or greedy answer.", 32, least=2),
    Option("--temperature", float, "Temperature of the sampled answers.", 1.0, least=0),
    Option("--top-k", int, "Likeliest tokens to keep; 0 keeps all.", 0, least=0),
    Option("--top-p", float, "Mass of the nucleus to keep.", 1.0, least=0),
    Option("--logprobs", int, "Log-probabilities of each position.", 20, least=2),
    Option("--sampling-only", bool, "Leave out fields of the request and states of the server."),
    Option("--concurrency", int, "Requests at a time.", 8, least=1),
    Option("--seed", int, "Seed of the first request.", 0, least=0),
    Option("--timeout", float, "Seconds for a request with its whole answer.", 120.0, least=0.1),
    Option("--output", Path, "New directory for certificate.json and certificate.html."),
    Option("--json", bool, "Print the certificate as one line of JSON."),
)


class Progress:
    """Tells on the standard error what is asked: on one line of a terminal, else now and then.

    The first step is written at once.
    """

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._told = -_EVERY
        self._width = 0

    def say(self, step: str) -> None:
        """Tells a step."""
        if self._stream.isatty():
            self._stream.write(f"\r{step:<{self._width}}")
            self._width = len(step)
        elif time.monotonic() - self._told > _EVERY:
            self._stream.write(f"{step}\n")
            self._told = time.monotonic()
        self._stream.flush()

    def end(self) -> None:
        """Clears the line."""
        if self._width:
            self._stream.write(f"\r{'':<{self._width}}\r")
            self._stream.flush()


def run(values: dict[str, Any], words: Sequence[str]) -> Certificate:
    """Certifies a server, and writes the certificate if a directory is named.

    Args:
        values: The value of each option, by its field.
        words: The command line that repeats it.

    Raises:
        ValueError: An option has an impossible value, or the server cannot be judged.
    """
    from eagle3_jax.certify.client import Client
    from eagle3_jax.certify.examine import certify

    if not values["requests"] + values["long_requests"] + values["greedy_requests"]:
        raise ValueError(
            "--requests 0, --long-requests 0 and --greedy-requests 0 leave nothing to judge"
        )
    output: Path | None = values["output"]
    if output is not None and output.exists():
        raise ValueError(f"--output {output} exists already; name a new directory")
    plan = _plan(values)
    # Values out of range are refused before a server is asked. What its reports are is not known
    # yet, and those after the warpers determine any distribution.
    dataclasses.replace(plan.sampling, processed=True).check(plan.num_reported)

    variable = values["api_key_env"]
    access: dict[str, Any] = {
        "key": os.environ.get(variable),
        "key_variable": variable,
        "timeout": values["timeout"],
        "api": values["api"],
    }
    progress = Progress()
    try:
        client = Client(values["url"], model=values["model"], **access)
        plain = None if values["plain_url"] is None else Client(values["plain_url"], **access)
        certificate = certify(client, plan, plain=plain, on_progress=progress.say)
    finally:
        progress.end()

    certificate = dataclasses.replace(certificate, command=shlex.join(_repeating(words)))
    if output is not None:
        _write(certificate, output)
    return certificate


def _plan(values: dict[str, Any]) -> Plan:
    """Returns the plan of the options' values."""
    from eagle3_jax.certify.asking import Plan
    from eagle3_jax.certify.statistics import Sampling

    file = values["prompts"]
    return Plan(
        prompts=DEFAULT_PROMPTS if file is None else _read_prompts(file),
        sampling=Sampling(values["temperature"], values["top_k"], values["top_p"]),
        num_requests=values["requests"],
        num_long=values["long_requests"],
        max_new_tokens=values["max_new_tokens"],
        num_greedy=values["greedy_requests"],
        num_reported=values["logprobs"],
        concurrency=values["concurrency"],
        seed=values["seed"],
        speculation=values["speculation"],
        with_fields=not values["sampling_only"],
    )


def _write(certificate: Certificate, output: Path) -> None:
    """Writes a certificate; a full disk does not lose the verdict."""
    try:
        certificate.write(output)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"warning: {error}\n")


def _repeating(words: Sequence[str]) -> list[str]:
    """Returns a command line without the directory of the report."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if before != "--output" and word.partition("=")[0] != "--output"
    ]


def _read_prompts(path: Path) -> list[str | list[int]]:
    """Returns the texts or token ids of a file."""
    from eagle3_jax.prompts.reading import FORM, read_request
    from eagle3_jax.prompts.request import Request

    prompts = []
    for row in read_rows(path, FORM):
        request = read_request(row, Request("", 1))
        if not request.prompt or {"messages", "max_new_tokens"} & set(row.values):
            raise ValueError(
                f"{row.where}expected a text or token ids; a certificate sends no 'messages' and"
                " no empty prompt, and --max-new-tokens is for all prompts"
            )
        prompts.append(request.prompt)
    return prompts


def text_of(certificate: Certificate, width: int) -> str:
    """Returns verdict, evidence and notes as lines of at most a width, where words allow it."""
    minutes, seconds = divmod(round(certificate.seconds), 60)
    duration = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    lost = f"; {counted(certificate.lost, 'request')} failed" if certificate.lost else ""
    lines = textwrap.wrap(f"{certificate.headline}: {certificate.reason}.", width)
    for table in certificate.tables():
        lines += ["", table.title, *_lines_of([table.columns, *table.rows], width)]
    lines += [
        "",
        f"{counted(certificate.requests, 'answer')} in {duration}{lost}. A test fails below"
        f" p = {certificate.level:.1g}.",
    ]
    return "\n".join([*lines, *certificate.notes])


def _lines_of(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Returns lines of a table, whose last column is wrapped."""
    sizes = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    indent = sum(sizes) + 2 * len(sizes)
    lines = []
    for row in rows:
        cells = "".join(f"{cell:<{size}}  " for cell, size in zip(row, sizes, strict=False))
        # A narrow terminal has the detail on lines of its own.
        if indent + 24 > width:
            lines.append(cells.rstrip())
            lines += textwrap.wrap(row[-1], width, initial_indent="    ", subsequent_indent="    ")
        else:
            lines += textwrap.wrap(cells + row[-1], width, subsequent_indent=" " * indent) or [""]
    return [line.rstrip() for line in lines]


def print_certificate(certificate: Certificate, *, as_json: bool) -> None:
    """Prints a certificate on the standard output."""
    width = os.get_terminal_size().columns if sys.stdout.isatty() else 120
    text = (
        json.dumps(certificate.to_json(), default=str) if as_json else text_of(certificate, width)
    )
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code."""
    parser = _Parser(
        prog="python -m eagle3_jax.certify",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in OPTIONS:
        if option.kind is bool:
            parser.add_argument(option.name, action="store_true", help=option.help)
            continue
        choices = f" One of {', '.join(option.choices)}." if option.choices else ""
        default = f" Default: {option.default}." if option.default is not None else ""
        parser.add_argument(
            option.name,
            type=option.parse,
            default=option.default,
            choices=option.choices or None,
            required=option.is_required,
            metavar=None if option.choices else option.kind.__name__.upper(),
            help=option.help + choices + default,
        )

    words = list(sys.argv[1:] if arguments is None else arguments)
    values = vars(parser.parse_args(words))
    try:
        certificate = run(values, ["python", "-m", "eagle3_jax.certify", *words])
        print_certificate(certificate, as_json=values["json"])
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    return certificate.verdict.exit_code
