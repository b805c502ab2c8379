"""``eagle3 doctor``: checks that a head fits its target."""

from __future__ import annotations

from typing import Annotated

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import CHECKPOINT, CompilationCacheOption, JsonOption, LayerIdsOption
from eagle3_jax.cli._printing import Page, print_page, table_of
from eagle3_jax.devices.compilation import keep_compiled_programs

EXAMPLE = "Example: eagle3 doctor --target ./llama-3.1-8b --drafter ./EAGLE3-LLaMA3.1-Instruct-8B"


def doctor(
    *,
    target: Annotated[str | None, typer.Option(help=f"{CHECKPOINT} of the target. Default: the bundled one.")] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help=f"{CHECKPOINT} of a head of any method, or of a draft model. Default: the bundled head."),
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
    checks = []
    for check in diagnose(locate(target, "target"), locate(drafter, "eagle3"), layer_ids=layer_ids):
        checks.append({"name": check.name, "status": str(check.status), "detail": check.detail})
    problem = gpu_problem()
    if problem is not None:  # the head may fit all the same
        checks.append({"name": "device", "status": "warning", "detail": problem})
    failed = any(check["status"] == "failure" for check in checks)
    table = table_of("", checks, {"check": "name", "result": "status", "detail": "detail"})
    print_page(Page({"ok": not failed, "checks": checks}, [table]), as_json=as_json)
    if failed:
        raise typer.Exit(1)
