"""Records as the tables of ``docs/accelerators.md``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3_jax.reporting.tables import to_markdown
from validation.aot.measured import Measured

_GIB, _MIB = 2**30, 2**20
LAYERS = [
    "program",
    "draft",
    "batch",
    "",
    "launches a layer",
    "outside the layers",
    "temporary MiB",
    "Mcycles of 32 layers",
]


def number(value: float | None, digits: int = 0) -> str:
    """A number in a cell; empty where there is none."""
    if value is None:
        return ""
    return f"{value:,.{digits}f}" if value % 1 or digits else f"{int(value):,}"


def both(before: Any, after: Any) -> str:
    """Two cells as one, with an arrow where they differ."""
    return str(after) if before in ("", after) else f"{before} → **{after}**" if after != "" else str(before)


def cells_of_a_layer(row: Measured) -> list[str]:
    """Launches a layer and outside the layers, temporary memory, estimated cycles of a whole model."""
    main = row.main
    each, rest = row.per_layer(main, "cycles"), row.outside(main, "cycles")
    return [
        number(row.per_layer(main), 1 if (row.per_layer(main) or 0) % 1 else 0),
        number(row.outside(main)),
        number(round(row.deep.memory["temp"] / _MIB)),
        number((each * 32 + rest) / 1e6, 1) if each and rest is not None else "",
    ]


def cells_of_a_model(row: Measured) -> list[str]:
    """Launches of a round, memory and seconds of a program of all layers."""
    deep = row.deep
    return [
        number(deep.parts[row.main].launches),
        number(deep.memory["peak"] / _GIB, 1),
        number(deep.memory["temp"] / _GIB, 2),
        number(deep.seconds["trace"], 1),
        number(deep.seconds["lower"], 1),
        number(deep.seconds["compile"], 1),
    ]


def of_layers(before: Mapping[str, Measured], after: Mapping[str, Measured], platform: str, target: str) -> str:
    """Cases at two depths, as Markdown."""
    rows = []
    for name, row in {**before, **after}.items():
        case = row.case
        if (case.platform, case.target) != (platform, target) or len(row.facts) < 2:
            continue
        cells = [cells_of_a_layer(found[name]) if name in found else [""] * 4 for found in (before, after)]
        kind = "sampled" if case.sampled else "greedy"
        rows.append([case.program, case.draft, case.batch, kind, *map(both, *cells)])
    columns = LAYERS if platform.startswith("tpu") else LAYERS[:-1]
    rows.sort(key=lambda row: (("prefill", "step", "generate").index(row[0]), *map(str, row[1:4])))
    return to_markdown(columns, [row[: len(columns)] for row in rows])


def of_models(before: Mapping[str, Measured], after: Mapping[str, Measured], platform: str) -> str:
    """Programs of all layers, as Markdown."""
    columns = ["target", "program", "draft", "launches of a round", "peak GiB", "temporary GiB"]
    columns += [f"{verb}, s" for verb in ("trace", "lower", "compile")]
    rows = []
    for name, row in {**before, **after}.items():
        if row.case.platform != platform or len(row.facts) > 1:
            continue
        cells = [cells_of_a_model(found[name]) if name in found else [""] * 6 for found in (before, after)]
        rows.append([row.case.target, row.case.program, row.case.draft, *map(both, *cells)])
    return to_markdown(columns, rows)


def page(before: Mapping[str, Measured], after: Mapping[str, Measured]) -> str:
    """Every table that two records give, each under its title."""
    kinds = dict.fromkeys((row.case.platform, row.case.target) for row in {**before, **after}.values())
    parts = []
    for platform, target in kinds:
        if any(len(row.facts) > 1 and (row.case.platform, row.case.target) == (platform, target)
               for row in {**before, **after}.values()):  # fmt: skip
            parts.append(f"{target} on `{platform}`:\n\n{of_layers(before, after, platform, target)}")
    for platform in dict.fromkeys(platform for platform, _ in kinds):
        if any(len(row.facts) == 1 and row.case.platform == platform for row in {**before, **after}.values()):
            parts.append(f"All layers on `{platform}`:\n\n{of_models(before, after, platform)}")
    return "\n".join(parts)
