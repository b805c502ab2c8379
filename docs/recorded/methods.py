"""Tables of docs/methods/index.md, from methods.toml and methods.json.

The second file is the record of ``experiments.py methods``. A method that is not in it is "not
measured". The time of a verification is noisy on two shared cores, and the same for every method:
the tables use the median over the methods, and derive ``S = τ / (v + K·c)`` from it.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable
from typing import NamedTuple

from page_tables import HERE, Row, table, version

from eagle3_jax.conversion.heads import HEADS

TASKS = ("code", "prose")
# τ / (v + K·c) is not their speed-up: lookups skip rounds, and the record has the cost of one of
# Medusa's heads for that of all.
NOT_DERIVED = ("ngram", "suffix", "medusa")


class Quartiles(NamedTuple):
    """The quartiles of a few values."""

    low: float
    median: float
    high: float


def facts() -> list[Row]:
    """Reads the methods of methods.toml."""
    return tomllib.loads((HERE / "methods.toml").read_text(encoding="utf-8"))["method"]


def drafts_of(method: Row, measured: Row) -> list[Row]:
    """Returns the measurements of a method, in every shape that it has."""
    rows = [row for row in measured["rows"] if row["method"] == method.get("measured")]
    if "shape" in method:
        rows = [
            row
            for row in rows
            if method["shape"] == ("chain" if row["draft"][0] == "K" else "tree")
        ]
    return rows


def what_they_are() -> str:
    """Writes papers, needs and shapes."""
    rows = []
    for method in facts():
        name = f"[{method['label']}]({method['page']})" if "page" in method else method["label"]
        papers = ", ".join(f"[{paper}]({address})" for paper, address in method.get("papers", ()))
        lossless = method.get("lossless", "yes")
        rows.append([name, papers, method["needs"], method["drafts"], method["sampled"], lossless])
    return table(["method", "paper", "needs", "drafts", "sampled drafts", "lossless"], rows)


def files_and_proof() -> str:
    """Writes formats, training and what each method was compared with."""
    rows = []
    for method in facts():
        layouts = (
            [f"`{name}`" for name in (*HEADS[method["heads"]].layouts, "jax")]
            if "heads" in method
            else []
        )
        written = method.get("written", ", ".join(layouts))
        recipe = f"`{method['recipe']}`" if "recipe" in method else ""
        rows.append([method["label"], method["formats"], written, recipe, method["checked"]])
    return table(["method", "comes in as", "goes out as", "`--method`", "checked against"], rows)


def verify_costs(measured: Row) -> dict[str, Quartiles]:
    """Returns the ``v`` of each draft: a verification in plain steps, over the methods."""
    costs = {}
    for draft in dict.fromkeys(row["draft"] for row in measured["rows"]):
        values = [row["verify_cost"] for row in measured["rows"] if row["draft"] == draft]
        low, middle, high = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        )
        costs[draft] = Quartiles(low, middle, high)
    return costs


def what_was_measured(measured: Row) -> str:
    """Writes ``v`` by draft, then τ and the derived speed-up of every method."""
    costs = verify_costs(measured)
    verify = [
        [draft, f"{cost.median:.2f} ({cost.low:.2f}–{cost.high:.2f})"]
        for draft, cost in costs.items()
    ]

    methods = [method for method in facts() if method.get("named") != "none"]
    derived = [
        method
        for method in methods
        if drafts_of(method, measured) and method["measured"] not in NOT_DERIVED
    ]

    def plain_steps(row: Row) -> float:
        return costs[row["draft"]].median + row["num_draft_steps"] * row["draft_cost"]

    sections = [
        table(["draft", "v: median over the methods (quartiles)"], verify),
        "**Tokens per round τ, code / prose**",
        by_draft(methods, measured, [*costs], lambda row: 1),
        "**Speed-up derived with this v, code / prose**",
        by_draft(derived, measured, [*costs], plain_steps),
    ]
    return "\n\n".join(sections)


def by_draft(
    methods: list[Row], measured: Row, drafts: list[str], divisor: Callable[[Row], float]
) -> str:
    """Writes τ divided by ``divisor``, for each method and draft."""
    rows = []
    for method in methods:
        shapes = {row["draft"]: row for row in drafts_of(method, measured)}
        cells = [over_tasks(shapes[draft], divisor) if draft in shapes else "–" for draft in drafts]
        count = next((row["parameters"] for row in shapes.values()), None)
        size = "not measured" if count is None else f"{count / 1e6:.1f} M" if count else "0"
        rows.append([method["label"], size, *cells])
    return table(["method", "parameters", *drafts], rows)


def over_tasks(row: Row, divisor: Callable[[Row], float]) -> str:
    """Writes τ divided, of each task; a dash if nothing was drafted."""
    lengths = [row["tasks"][task]["mean_acceptance_length"] for task in TASKS]
    return " / ".join(
        "–" if length is None else f"{length / divisor(row):.2f}" for length in lengths
    )


def run(measured: Row) -> str:
    """Names the run of the figures."""
    about = measured["about"]
    cpu = about["cpu"]
    return (
        f"{version(about)}, {cpu['model']}, {cpu['cores']} cores, jax {about['versions']['jax']},"
        f" `{measured['dtype']}`, {about['date'][:10]}: {len(measured['prompts']['names'])}"
        f" prompts, {measured['max_new_tokens']} new tokens each, batch 1, greedy,"
        f" {measured['repeats']} repeats in turns.\n\n```text\n{measured['command']}\n```"
    )
