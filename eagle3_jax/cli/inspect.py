"""``eagle3 inspect``: a description of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from eagle3_jax.cli._options import CHECKPOINT, JsonOption
from eagle3_jax.cli._printing import Page, print_page
from eagle3_jax.measure.tables import Table, flat, show

EXAMPLE = "Example: eagle3 inspect ./EAGLE3-LLaMA3.1-Instruct-8B --json"


def inspect(
    directory: Annotated[
        str | None,
        typer.Argument(help=f"{CHECKPOINT} of a target or a head. Default: the bundled pair."),
    ] = None,
    *,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Print every field of the configuration and the chat template, too."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Describe a checkpoint: kind, size, chat template, stop tokens."""
    from eagle3_jax.conversion.inspect import describe
    from eagle3_jax.files.sources import locate
    from eagle3_jax.theory.known_models import similar_targets

    parts = ("target", "eagle3") if directory is None else ("target",)
    descriptions = [
        describe(locate(directory, part, suggest=similar_targets)).to_json() for part in parts
    ]
    for number, description in enumerate(descriptions):
        if number and not as_json:
            typer.echo()
        print_page(Page(description, [_table(description, everything=everything)]), as_json=as_json)


# Fields of a configuration that say how large a model is.
_SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "draft_vocab_size", "max_position_embeddings",
    "sliding_window",
)  # fmt: skip


def _table(description: dict[str, Any], *, everything: bool) -> Table:
    """Returns the fields of a description in words, without empty ones.

    The configuration is as the file has it.
    """
    from eagle3_jax.conversion.errors import printable
    from eagle3_jax.conversion.sidecars import described_tokens

    stop_tokens = described_tokens(description["stop_tokens"], Path(description["source"]))
    facts = {**description, "stop_tokens": stop_tokens}
    if not everything:
        config = description["config"]
        template = description["chat_template"]
        facts["config"] = {name: config[name] for name in _SIZES if name in config}
        facts["chat_template"] = template and f"{len(template):,} characters; --all prints it"

    rows = []
    for name, value in flat(facts):
        if value not in ("", None):
            label = name if "." in name else name.replace("_", " ")
            rows.append([printable(label), printable(show(value))])
    return Table("", ["", ""], rows)
