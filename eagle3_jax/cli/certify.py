"""``eagle3 certify``: whether a server's speculation is lossless."""

from __future__ import annotations

import inspect
import sys
from typing import Annotated, Any, Literal

import typer

from eagle3_jax.certify import command
from eagle3_jax.certify.command import ABOUT, OPTIONS, Option

EXAMPLE = """\b
Examples, the second with the key of the server in EAGLE3_API_KEY:
  eagle3 certify --url http://localhost:8000
  eagle3 certify --url https://host:8000 --model meta-llama/Llama-3.1-8B-Instruct --requests 8192 --output report"""  # noqa: E501


def certify(**values: Any) -> None:  # noqa: D103
    certificate = command.run(values, ["eagle3", *sys.argv[1:]])
    command.print_certificate(certificate, as_json=values["json"])
    if certificate.verdict.exit_code:
        raise typer.Exit(certificate.verdict.exit_code)


def _parameter(option: Option) -> inspect.Parameter:
    """Returns an option as typer reads it from a signature."""
    kind: Any = Literal[option.choices] if option.choices else option.kind  # type: ignore[valid-type]
    default = False if option.kind is bool else option.default
    if option.is_required:
        default = inspect.Parameter.empty
    elif default is None:
        kind = kind | None
    named = Annotated[kind, typer.Option(option.name, help=option.help, min=option.least)]
    return inspect.Parameter(
        option.field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=named
    )


certify.__doc__ = ABOUT
certify.__signature__ = inspect.Signature(map(_parameter, OPTIONS))  # type: ignore[attr-defined]
certify.__annotations__ = {option.field: _parameter(option).annotation for option in OPTIONS}
