"""``eagle3 doctor``: checks that a model is complete, and that a head fits its target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import (
    CHECKPOINT,
    CompilationCacheOption,
    JsonOption,
    LayerIdsOption,
    announce_input,
)
from eagle3_jax.cli._parts import fetch_first
from eagle3_jax.cli._printing import Page, print_page, table_of
from eagle3_jax.devices.compilation import keep_compiled_programs
from eagle3_jax.files.sources import OWN_MODULES, is_named, locate

EXAMPLE = """\b
Examples:
  eagle3 doctor --target ./llama-3.1-8b
  eagle3 doctor --target ./llama-3.1-8b --drafter ./EAGLE3-LLaMA3.1-Instruct-8B --prompts prompts.jsonl"""  # noqa: E501
_MOST_PROMPTS = 5
# Tokens that agreement adds to a prompt, at most.
_CONTINUED = 32


def doctor(
    *,
    target: Annotated[
        str | None, typer.Option(help=f"{CHECKPOINT} of the target. Default: the bundled one.")
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help=(
                f"{CHECKPOINT} of a head of any method, or of a draft model, or 'mtp' for the"
                " modules in the target's files. Default: the bundled head; with --target none,"
                " and the target is checked alone."
            )
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help=(
                f"JSONL file, as `eagle3 bench` takes, to measure acceptance on {_MOST_PROMPTS} of"
                " its prompts. Default: random token ids, which say little."
            )
        ),
    ] = None,
    layer_ids: LayerIdsOption = None,
    compilation_cache: CompilationCacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a model, or that a head or a draft model fits its target.

    Of a model the tokenizer, the chat template, the stop tokens and the weights are checked. Exits
    with 1 when a check fails.
    """
    from eagle3_jax.conversion.doctor import diagnose
    from eagle3_jax.measure.gpu import gpu_problem

    is_alone = drafter is None and target is not None
    if is_alone and (prompts is not None or layer_ids is not None):
        option = "--layer-ids" if prompts is None else "--prompts"
        raise Misuse(
            f"{option} is about a drafter, and --target was given without --drafter; add one, or"
            " leave it out"
        )
    if is_named(drafter) and drafter != OWN_MODULES:
        raise Misuse(
            f"--drafter {drafter} has no files to check; name a head or a draft model, or check"
            " --target alone"
        )

    fetch_first(target, drafter)
    keep_compiled_programs(compilation_cache)
    target_path = locate(target, "target")
    # Modules in the target's files have no directory of their own.
    is_elsewhere = not is_alone and drafter != OWN_MODULES
    drafter_path = locate(drafter, "eagle3") if is_elsewhere else drafter
    token_ids = None if prompts is None else _token_ids(prompts, target_path)
    diagnosis = diagnose(target_path, drafter_path, prompts=token_ids, layer_ids=layer_ids)

    checks = [
        {"name": check.name, "status": str(check.status), "detail": check.detail}
        for check in diagnosis
    ]
    problem = gpu_problem()
    # The head may fit all the same.
    if problem is not None:
        checks.append({"name": "device", "status": "warning", "detail": problem})

    failed = any(check["status"] == "failure" for check in checks)
    table = table_of("", checks, {"check": "name", "result": "status", "detail": "detail"})
    print_page(Page({"ok": not failed, "checks": checks}, [table]), as_json=as_json)
    if failed:
        raise typer.Exit(1)


def _token_ids(file: Path, target: Path) -> list[list[int]]:
    """Returns the token ids of prompts of a file; the weights of the target are not read."""
    from eagle3_jax import ChatTemplate, LoadedTarget
    from eagle3_jax.conversion import read_target
    from eagle3_jax.conversion.sidecars import tokenizer_config_of, tokenizer_of
    from eagle3_jax.models.decoder import DecoderTarget
    from eagle3_jax.models.layers import FLOAT32
    from eagle3_jax.prompts.benchmark import in_turn, read_prompts

    announce_input(file)
    config = read_target(target).config
    model = LoadedTarget(
        model=DecoderTarget(config, FLOAT32),
        params=None,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        tokenizer=tokenizer_of(target),
        name=str(target),
        chat_template=ChatTemplate.from_config(tokenizer_config_of(target)),
    )

    prompts = in_turn(read_prompts(file, model, max_new_tokens=_CONTINUED), _MOST_PROMPTS)
    for prompt in prompts:
        if len(prompt.tokens) < 2:
            raise Misuse(
                f"--prompts {file}: {prompt.name} has one token; acceptance is measured after two"
                " or more"
            )
    return [prompt.tokens for prompt in prompts]
