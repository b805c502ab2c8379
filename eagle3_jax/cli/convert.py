"""``eagle3 convert``: a checkpoint in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle3_jax.cli._options import CHECKPOINT, LayerIdsOption

EXAMPLE = "Example: eagle3 convert ./EAGLE3-LLaMA3.1-Instruct-8B ./head --target ./llama-3.1-8b"


def convert(
    src: Annotated[
        str, typer.Argument(help=f"{CHECKPOINT} of a checkpoint in any supported layout.")
    ],
    dst: Annotated[Path, typer.Argument(help="Directory to create; it must not exist.")],
    *,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help=(
                "Layout to write: jax (native), vllm, or another layout of the head's method"
                " (eagle, sglang, medusa, speculators, deepseek, mimo). Default: vllm, and for MTP"
                " modules deepseek."
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
    from eagle3_jax.files.sources import locate
    from eagle3_jax.theory.known_models import similar_targets

    config = None
    if target is not None:
        path = locate(target, "target", suggest=similar_targets)
        config = conversion.read_target(path).config
    recognized, written = conversion.convert(
        locate(src, "target", suggest=similar_targets), dst, to, target=config, layer_ids=layer_ids
    )
    typer.echo(f"read {src} ({recognized} layout), wrote {dst} ({written} layout)")
