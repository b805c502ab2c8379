"""Tables of draft methods at equal text, from the record of ``examples/methods_table.py``.

The time of a verification is noisy on a shared core, and the same for every method: the tables use
the median over the methods.
"""

from __future__ import annotations

import statistics

import methods
from page_tables import Row, cores, record, spread, table, version

RECORD = record("methods-shipped-pair")
TASKS = ("code", "prose")
# EAGLE-2 is EAGLE-1 with another draft, so the first label of a recipe counts.
LABELS = {
    method["recipe"]: method["label"] for method in reversed(methods.facts()) if "recipe" in method
}


def verify_costs() -> dict[str, float]:
    """Returns the ``v`` of each draft: a verification in plain steps, the median of the methods."""
    rows = RECORD["speeds"]["rows"]
    return {
        draft: statistics.median(row["verify_cost"] for row in rows if row["draft"] == draft)
        for draft in dict.fromkeys(row["draft"] for row in rows)
    }


def tau(row: Row) -> float:
    """Returns the tokens per round over all prompts."""
    return row["acceptance"]["mean_acceptance_length"]


def drafts() -> dict[str, list[Row]]:
    """Returns the drafts of each method; the method with the largest τ of the longest is first."""
    rows: dict[str, list[Row]] = {}
    for row in RECORD["speeds"]["rows"]:
        rows.setdefault(row["method"], []).append(row)
    return dict(sorted(rows.items(), key=lambda item: -tau(item[1][-1])))


def runs(method: str) -> list[Row]:
    """Returns the trainings of a method; the one that was kept is first."""
    trained = [run for run in RECORD["trained"] if run["method"] == method]
    return sorted(trained, key=lambda run: -run["held_out_tau"])


def acceptance() -> str:
    """Writes how each method was trained, and its τ over all prompts and by task."""
    lines = []
    for method, rows in drafts().items():
        run = runs(method)[0]
        size = f"{run['trained_parameters'] / 1e6:.1f} M"
        learning = [size, f"{run['seconds']:.0f}", f"{run['learning_rate']:g}"]
        lengths = [cell for row in rows for cell in by_task(row)]
        lines.append([LABELS[method], *learning, *lengths])

    head = ["method", "parameters", "seconds", "learning rate"]
    columns = [f"{row['draft']}: {kind}" for row in rows for kind in ("τ", *TASKS)]
    return table([*head, *columns], lines)


def by_task(row: Row) -> list[str]:
    """Writes τ over all prompts and of each task."""
    of_tasks = [row["tasks"][task]["mean_acceptance_length"] for task in TASKS]
    return [f"{value:.2f}" for value in (tau(row), *of_tasks)]


def speeds() -> str:
    """Writes what a draft costs, and the speed-up as predicted and as measured."""
    verify = verify_costs()
    lines = []
    for method, rows in drafts().items():
        cells = [cell for row in rows for cell in costs(row, verify[row["draft"]])]
        lines.append([LABELS[method], *cells])

    kinds = ("draft", "predicted S", "measured S")
    columns = [f"{row['draft']}: {kind}" for row in rows for kind in kinds]
    medians = ", ".join(f"{cost:.2f} for {name}" for name, cost in verify.items())
    note = f"`v`, the median over the methods: {medians}."
    return f"{table(['method', *columns], lines)}\n\n{note} {origin()}"


def costs(row: Row, verify: float) -> list[str]:
    """Writes the cost of a draft in plain steps, and the speed-ups."""
    draft = row["num_draft_steps"] * row["draft_cost"]
    return [f"{draft:.2f}", f"{tau(row) / (verify + draft):.2f}", spread(row["ratio"])]


def origin() -> str:
    """Names the run."""
    measured = RECORD["speeds"]
    about = measured["about"]
    options = measured["options"]
    prompts = measured["prompts"]
    return (
        f"{version(about)}, {measured['cores']} of {cores(about)}, jax {about['versions']['jax']},"
        f" `{options['weights']}`:\n{prompts['code']} prompts of code and {prompts['prose']} of"
        f" prose, {options['max_new_tokens']} greedy tokens each, batch 1. Median and quartiles of"
        f" the ratio to plain decoding in {options['repeats']} repeats."
    )
