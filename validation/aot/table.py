"""A record as the tables of ``docs/gpu.md`` and ``docs/expectations.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from eagle3_jax.measure.tables import to_markdown
from validation.aot.programs import PROGRAMS
from validation.aot.record import Measured, load

_GIB = 2**30
_MIB = 2**20
LAYERS = [
    "program",
    "draft",
    "batch",
    "",
    "launches a layer",
    "outside the layers",
    "temporary MiB",
]
ON_TPUS = ["estimated million cycles of 32 layers"]
MODELS = [
    "target", "program", "draft", "launches of a round", "peak GiB", "temporary GiB", "trace, CPU s", "lower, CPU s",
    "compile, CPU s",
]  # fmt: skip


def tabulate_layers(rows: Mapping[str, Measured], platform: str, target: str) -> str:
    """Returns a Markdown table of the programs at two depths; empty if there are none."""
    lines = []
    for row in rows.values():
        case = row.case
        if (case.platform, case.target) != (platform, target) or len(row.facts) < 2:
            continue
        kind = ("sampled" if case.sampled else "greedy") + f", `{case.mesh}`" * bool(case.mesh)
        launches = [f"{row.per_layer():g}", f"{row.outside():,.0f}"]
        cycles = (row.per_layer("cycles") * 32 + row.outside("cycles")) / 1e6
        memory = f"{row.deep.memory['temp'] / _MIB:,.0f}"
        lines.append(
            [case.program, case.draft, f"{case.batch}", kind, *launches, memory, f"{cycles:.1f}"]
        )
    columns = LAYERS + ON_TPUS * platform.startswith("tpu")
    lines.sort(key=lambda line: (PROGRAMS.index(line[0]), *line[1:4]))
    return to_markdown(columns, [line[: len(columns)] for line in lines]) if lines else ""


def tabulate_models(rows: Mapping[str, Measured], platform: str) -> str:
    """Returns a Markdown table of the programs of complete models; empty if there are none."""
    lines = []
    for row in rows.values():
        deep = row.deep
        if row.case.platform == platform and len(row.facts) == 1:
            memory = [f"{deep.memory['peak'] / _GIB:.1f}", f"{deep.memory['temp'] / _GIB:.2f}"]
            seconds = [f"{seconds:.1f}" for seconds in deep.cpu_seconds.values()]
            names = [row.case.target, row.case.program, row.case.draft]
            lines.append([*names, f"{deep.counts.launches:,}", *memory, *seconds])
    return to_markdown(MODELS, lines) if lines else ""


def describe_mesh(row: Measured) -> str:
    """Returns what devices of a mesh send each other, as a sentence."""
    case = row.case
    return (
        f"On `{case.mesh}` of `{case.platform}`, a {case.program} of {case.draft} at batch"
        f" {case.batch}: a layer adds {_counts(row.collectives_per_layer())}; {row.deep.layers}"
        f" layers and the rest have {_counts(row.deep.counts.collectives)}."
    )


def _counts(kinds: Mapping[str, float]) -> str:
    return " and ".join(f"{total:g} {kind}" for kind, total in kinds.items())


def page(record: Path) -> str:
    """Returns every table of a record under its title.

    Raises:
        ValueError: The record cannot be read.
    """
    rows = load(record)
    note = json.loads(record.read_text("utf-8"))["note"]
    versions = {
        f"{name} {version}" for row in rows.values() for name, version in row.versions.items()
    }
    parts = [
        f"Compiled with {', '.join(sorted(versions))}: {note['date']}, commit {note['commit']}."
    ]
    for platform, target in dict.fromkeys(
        (row.case.platform, row.case.target) for row in rows.values()
    ):
        if table := tabulate_layers(rows, platform, target):
            parts.append(f"### {target} on `{platform}`\n\n{table}")
    for platform in dict.fromkeys(row.case.platform for row in rows.values()):
        if table := tabulate_models(rows, platform):
            parts.append(f"### All layers on `{platform}`\n\n{table}")
    parts += [describe_mesh(row) for row in rows.values() if row.case.mesh]
    return "\n\n".join(parts) + "\n"
