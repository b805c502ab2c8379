"""``eagle3 convert``: a checkpoint in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import CHECKPOINT, LayerIdsOption

EXAMPLE = "Example: eagle3 convert ./EAGLE3-LLaMA3.1-Instruct-8B ./head --target ./llama-3.1-8b"


def convert(
    src: Annotated[
        str,
        typer.Argument(
            help=(
                f"{CHECKPOINT} of a checkpoint in any supported layout, or 'mtp' for the modules in"
                " the files of --target. A short name such as smollm2 is the target, and with"
                " --target its head."
            )
        ),
    ],
    dst: Annotated[Path, typer.Argument(help="Directory to create; it must not exist.")],
    *,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help=(
                "Layout to write: jax (native), vllm, or another layout of the head's method"
                " (eagle, sglang, medusa, speculators, deepseek, mimo). Default: vllm; for an MTP"
                " module deepseek, for those in a target's files jax. Of a target vllm and sglang"
                " mean the layout of Hugging Face."
            ),
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help=f"{CHECKPOINT} of the target that a head belongs to.")
    ] = None,
    layer_ids: LayerIdsOption = None,
) -> None:
    """Rewrite a checkpoint in another layout; its own layout is recognized from its files.

    A checkpoint that the layout cannot express exactly is refused.
    """
    from eagle3_jax import conversion
    from eagle3_jax.conversion.heads import HEADS
    from eagle3_jax.files.sources import OWN_MODULES, locate
    from eagle3_jax.theory.known_models import similar_targets

    modules = src == OWN_MODULES
    if modules and target is None:
        raise Misuse(f"{src} names modules in the files of a target; add --target")
    config = None
    target_path = None
    if target is not None:
        target_path = locate(target, "target", suggest=similar_targets)
        config = conversion.read_target(target_path).config

    # The short name of a published model means its head where a target is given.
    part = "target" if target is None else "eagle3"
    path = target_path if modules else locate(src, part, suggest=similar_targets)
    assert path is not None
    recognized, written = conversion.convert(
        path, dst, to, target=config, layer_ids=layer_ids, modules=modules
    )

    kind = "head" if conversion.identify(path) in HEADS else "target"
    contents = f"MTP modules of {target}" if modules else f"{kind} {src}"
    typer.echo(f"read the {contents} ({recognized} layout), wrote {dst} ({written} layout)")
