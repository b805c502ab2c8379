"""The record of compiled programs as the tables of ``docs/gpu.md`` and ``docs/expectations.md``."""

from __future__ import annotations

import json

from eagle3_jax.measure.tables import to_markdown
from validation.aot.programs import PROGRAMS
from validation.aot.record import PATH, load

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
MODELS = ["target", "program", "draft", "launches of a round", "peak GiB", "temporary GiB"]


def tabulate_layers(platform: str) -> str:
    """Returns a Markdown table of the programs of a platform at two depths."""
    lines = []
    for row in load().values():
        case = row.case
        if case.platform != platform or len(row.facts) < 2:
            continue
        kind = ("sampled" if case.sampled else "greedy") + f", `{case.mesh}`" * bool(case.mesh)
        launches = [f"{row.per_layer():g}", f"{row.outside():,.0f}"]
        memory = f"{row.deep.memory['temp'] / _MIB:,.0f}"
        lines.append([case.program, case.draft, f"{case.batch}", kind, *launches, memory])
    lines.sort(key=lambda line: (PROGRAMS.index(line[0]), *line[1:4]))
    return to_markdown(LAYERS, lines)


def tabulate_models(platform: str) -> str:
    """Returns a Markdown table of the programs of complete models."""
    lines = []
    for row in load().values():
        if row.case.platform != platform or len(row.facts) > 1:
            continue
        memory = row.deep.memory
        sizes = [f"{memory['peak'] / _GIB:.1f}", f"{memory['temp'] / _GIB:.2f}"]
        names = [row.case.target, row.case.program, row.case.draft]
        lines.append([*names, f"{row.deep.counts.launches:,}", *sizes])
    return to_markdown(MODELS, lines)


def launches() -> str:
    """Returns the launches of the recorded programs, a table for each platform."""
    rows = load()
    note = json.loads(PATH.read_text("utf-8"))["note"]
    versions = {
        f"{name} {version}" for row in rows.values() for name, version in row.versions.items()
    }
    parts = [
        f"Compiled with {', '.join(sorted(versions))}: {note['date']}, commit {note['commit']}."
    ]
    for platform in dict.fromkeys(row.case.platform for row in rows.values()):
        parts.append(f"Llama-3.1-8B on `{platform}`:\n\n{tabulate_layers(platform)}")
    return "\n\n".join(parts)
