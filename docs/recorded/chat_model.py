"""The table of the published chat model, from the record of ``experiments.py chat-model``."""

from __future__ import annotations

from page_tables import Row, cores, record, table, version

RECORD = record("smollm2-cpu-amd-epyc-2-cores")
FORMS = ("float32", "mixed", "int8")
ROWS = (1, 2, 4, 6)
PREFILLS = (32, 128)


def rounds() -> str:
    """Writes milliseconds of steps and of prefills, by precision."""
    figures = RECORD["rounds"]["figures"]
    lines = []
    for form in FORMS:
        steps = [step(figures[f"{form}, {count} rows"]) for count in ROWS]
        prefills = [
            f"{figures[f'{form}, prefill of {count}']['milliseconds']:.0f}" for count in PREFILLS
        ]
        lines.append([f"`{form}`", *steps, *prefills])

    row_counts = [f"{count} rows" for count in ROWS[1:]]
    titles = ["weights", "1 row", *row_counts, "prefill of 32", "of 128"]
    about = RECORD["rounds"]["environment"]
    jax = about["versions"]["jax"]
    run = f"{version(about)}, {cores(about)}, jax {jax}, batch 1, context 100 of 256. Medians."
    return f"{table(titles, lines)}\n\n{run}"


def step(figure: Row) -> str:
    """Writes milliseconds of a step, and its ratio to the fastest plain step."""
    return f"{figure['milliseconds']:.1f} ({figure['times_fastest_plain_step']:.2f})"
