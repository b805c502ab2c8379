"""A record as the tables of ``docs/gpu.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from eagle3_jax.bench.tables import to_markdown
from validation.aot.measure import Measured, load
from validation.aot.programs import PROGRAMS

_GIB = 2**30
_MIB = 2**20
LAYERS = ["program", "draft", "batch", "", "launches a layer", "outside the layers", "temporary MiB", "GB a layer"]
# Of TPUs alone: the compiler's estimate, and the copies that are left.
ON_TPUS = ["estimated million cycles of 32 layers", "copies of caches in 5 layers", "copies of tables"]


def number(value: float | None, digits: int = 0) -> str:
    """A number in a cell; empty where there is none."""
    if value is None:
        return ""
    return f"{value:,.{digits}f}" if value % 1 or digits else f"{int(value):,}"


def cells_of_a_layer(row: Measured) -> list[str]:
    """Launches a layer and outside the layers, temporary memory, bytes a layer, estimated cycles of a whole model."""
    main = row.main
    layer_cycles = row.per_layer(main, "cycles")
    outside_cycles = row.outside(main, "cycles")
    return [
        number(row.per_layer(main), 1 if (row.per_layer(main) or 0) % 1 else 0),
        number(row.outside(main)),
        number(round(row.deep.memory["temp"] / _MIB)),
        number((row.per_layer(main, "bytes") or 0) / 1e9, 2) if row.deep.parts[main].bytes else "",
        number((layer_cycles * 32 + outside_cycles) / 1e6, 1) if layer_cycles and outside_cycles is not None else "",
        number(row.deep.parts[main].cache_copies),
        number(row.deep.parts[main].table_copies),
    ]


def cells_of_a_model(row: Measured) -> list[str]:
    """Launches of a round, memory and CPU seconds of a program of all layers."""
    deep = row.deep
    return [
        number(deep.parts[row.main].launches),
        number(deep.memory["peak"] / _GIB, 1),
        number(deep.memory["temp"] / _GIB, 2),
        *(number(deep.cpu_seconds.get(verb), 1) for verb in ("trace", "lower", "compile")),
    ]


def tabulate_layers(measured: Mapping[str, Measured], platform: str, target: str) -> str:
    """Returns a Markdown table of the programs at two depths; empty if there are none."""
    rows = []
    for row in measured.values():
        case = row.case
        if (case.platform, case.target) != (platform, target) or len(row.facts) < 2:
            continue
        kind = ("sampled" if case.sampled else "greedy") + f", `{case.mesh}`" * bool(case.mesh)
        rows.append([case.program, case.draft, case.batch, kind, *cells_of_a_layer(row)])
    columns = LAYERS + ON_TPUS * platform.startswith("tpu")
    rows.sort(key=lambda row: (PROGRAMS.index(row[0]), *map(str, row[1:4])))
    return to_markdown(columns, [row[: len(columns)] for row in rows]) if rows else ""


def tabulate_models(measured: Mapping[str, Measured], platform: str) -> str:
    """Returns a Markdown table of the programs of whole models; empty if there are none."""
    columns = ["target", "program", "draft", "launches of a round", "peak GiB", "temporary GiB"]
    columns += [f"{verb}, CPU s" for verb in ("trace", "lower", "compile")]
    rows = [
        [row.case.target, row.case.program, row.case.draft, *cells_of_a_model(row)]
        for row in measured.values()
        if row.case.platform == platform and len(row.facts) == 1
    ]
    return to_markdown(columns, rows) if rows else ""


def describe_meshes(rows: Mapping[str, Measured]) -> list[str]:
    """What travels between devices, a sentence for each program on a mesh."""
    return [
        f"On `{row.case.mesh}` of `{row.case.platform}`, a {row.case.program} of {row.case.draft} at batch "
        f"{row.case.batch}: a layer adds {_counts(row.collectives_per_layer(row.main))}; {row.deep.layers} layers and "
        f"the rest have {_counts(row.deep.parts[row.main].collectives)}."
        for row in rows.values()
        if row.case.mesh
    ]


def _counts(kinds: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {kind}" for kind, count in kinds.items()) or "nothing"


def page(record: Path) -> str:
    """Every table of a record under its title.

    Raises:
        ValueError: It cannot be read.
    """
    rows = load(record)
    note = json.loads(record.read_text("utf-8"))["note"]
    versions = dict(sorted({pair for row in rows.values() for pair in row.versions.items()}))
    compilers = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts = [f"Compiled with {compilers}: {note['date']}, commit {note['commit']}."]
    for platform, target in dict.fromkeys((row.case.platform, row.case.target) for row in rows.values()):
        if table := tabulate_layers(rows, platform, target):
            parts.append(f"### {target} on `{platform}`\n\n{table}")
    for platform in dict.fromkeys(row.case.platform for row in rows.values()):
        if table := tabulate_models(rows, platform):
            parts.append(f"### All layers on `{platform}`\n\n{table}")
    parts += describe_meshes(rows)
    return "\n\n".join(part.strip() for part in parts) + "\n"
