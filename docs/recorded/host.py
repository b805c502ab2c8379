"""The table of memory and seconds of the host."""

from __future__ import annotations

from page_tables import cores, record, table, version

RECORD = "host-memory"
TASKS = {
    "copy": "`cp` of the file",
    "safetensors": "`load_file` of safetensors, to numpy",
    "load": "`e3.load_target`",
    "convert": "`eagle3 convert --to jax`",
    "load native": "`e3.load_target` of that",
    "convert back": "`eagle3 convert` of that to safetensors",
    "rewrite": "`eagle3 convert` from safetensors to safetensors",
}


def memory_and_seconds() -> str:
    """Returns the seconds of every task, and its memory as a share of the file."""
    rows = record(RECORD)["tasks"]
    kinds = dict.fromkeys(row["checkpoint"] for row in rows)
    columns = ["task"]
    for kind in kinds:
        size = next(row["gigabytes"] for row in rows if row["checkpoint"] == kind)
        columns += [f"{kind}, {size} GB: seconds", "memory / file"]

    by_task = {(row["task"], row["checkpoint"]): row for row in rows}
    lines = []
    for task, words in TASKS.items():
        line = [words]
        for kind in kinds:
            row = by_task[task, kind]
            line += [f"{row['seconds']:.1f}", f"{row['peak_over_file']:.2f}"]
        lines.append(line)
    return table(columns, lines)


def measured_on() -> str:
    """Names the version, the commit and the machine."""
    about = record(RECORD)["environment"]
    return f"{version(about)}, {cores(about)}."
