"""``eagle3 convert``, ``inspect`` and ``doctor``: rewriting, describing and checking checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import CompilationCacheOption, JsonOption, LayerIdsOption, print_json
from eagle3_jax.devices.compilation import keep_compiled_programs

_HELP = "Directory, GGUF file or hub id"
CONVERT_EXAMPLE = "Example: eagle3 convert ./EAGLE3-LLaMA3.1-Instruct-8B ./head --to jax --target ./llama-3.1-8b"
INSPECT_EXAMPLE = "Example: eagle3 inspect ./EAGLE3-LLaMA3.1-Instruct-8B --json"
DOCTOR_EXAMPLE = "Example: eagle3 doctor --target ./llama-3.1-8b --drafter ./EAGLE3-LLaMA3.1-Instruct-8B"

_STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}


def convert(
    src: Annotated[str, typer.Argument(help=f"{_HELP} of a checkpoint in any supported layout.")],
    dst: Annotated[Path, typer.Argument(help="Directory to create; it must not exist.")],
    *,
    to: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT",
            help="Layout to write: jax (native), vllm, or another layout of the head's method (eagle, sglang, medusa, "
            "speculators, deepseek, mimo).",
        ),
    ],
    target: Annotated[str | None, typer.Option(help=f"{_HELP} of the target that a head belongs to.")] = None,
    layer_ids: LayerIdsOption = None,
) -> None:
    """Rewrite a checkpoint in another layout.

    Whatever does not fit exactly is refused.
    """
    from eagle3_jax import conversion
    from eagle3_jax.files.sources import locate

    config = None if target is None else conversion.read_target(locate(target, "target")).config
    conversion.convert(locate(src, "target"), dst, to, target=config, layer_ids=layer_ids)
    typer.echo(f"wrote {dst} ({to} layout)")


def inspect(
    directory: Annotated[
        str | None, typer.Argument(help=f"{_HELP} of a target or a head. Default: the bundled pair.")
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Describe a checkpoint: kind, size, configuration."""
    from eagle3_jax.conversion.inspect import describe
    from eagle3_jax.files.sources import locate

    places = [locate(directory, part) for part in (("target", "eagle3") if directory is None else ("target",))]
    descriptions = [describe(place).to_json() for place in places]
    if as_json:
        for description in descriptions:
            print_json(description)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from eagle3_jax.conversion.errors import printable

    for number, description in enumerate(descriptions):
        if number:
            typer.echo()
        table = Table(show_header=False, box=None, pad_edge=False)
        for name, value in _described(description):
            table.add_row(Text(printable(name), "bold"), Text(printable(value), overflow="fold"))
        Console(highlight=False).print(table)


def doctor(
    *,
    target: Annotated[str | None, typer.Option(help=f"{_HELP} of the target. Default: the bundled one.")] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help=f"{_HELP} of a head of any method, or of a draft model. Default: the bundled head."),
    ] = None,
    layer_ids: LayerIdsOption = None,
    compilation_cache: CompilationCacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that a head or a draft model fits its target.

    Exits with 1 when a check fails.
    """
    from eagle3_jax.bench.gpu import gpu_problem
    from eagle3_jax.conversion.doctor import diagnose
    from eagle3_jax.files.sources import locate

    if drafter is None and target is not None:
        raise Misuse(
            "--target was given without --drafter, and the bundled head fits the bundled target only; "
            "add --drafter DIRECTORY"
        )
    keep_compiled_programs(compilation_cache)
    found = diagnose(locate(target, "target"), locate(drafter, "eagle3"), layer_ids=layer_ids)
    checks = [{"name": c.name, "status": str(c.status), "detail": c.detail} for c in found]
    problem = gpu_problem()
    if problem is not None:  # the head may fit all the same
        checks.append({"name": "device", "status": "warning", "detail": problem})
    failed = any(check["status"] == "failure" for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": checks})
    else:
        _print_checks(checks)
    if failed:
        raise typer.Exit(1)


def _print_checks(checks: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "result", "detail", box=None, pad_edge=False)
    for check in checks:
        status = Text(check["status"], _STYLES.get(check["status"], "dim"))
        table.add_row(Text(check["name"]), status, Text(check["detail"], overflow="fold"))
    Console(highlight=False).print(table)


def _described(description: dict[str, Any]) -> list[tuple[str, str]]:
    """The fields of a description in words, and the configuration as the file has it; empty ones are left out."""
    from eagle3_jax.bench.tables import flat, show

    fields = [(name, value) for name, value in flat(description) if value not in ("", None)]
    return [(name if "." in name else name.replace("_", " "), show(value)) for name, value in fields]
