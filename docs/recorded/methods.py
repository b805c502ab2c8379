"""Tables of docs/methods/index.md, from methods.toml and from methods.json, the record of ``examples/methods.py``.

A method that is not in the record is "not measured". The time of a verification is noisy on two shared cores, and the
same for every method: the tables use the median over the methods, and derive ``S = τ / (v + K·c)`` from it.
"""

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.conversion.heads import HEADS

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RECORD = HERE / "methods.json"
TASKS = ("code", "prose")
LOOKUP = ("ngram", "suffix")  # they skip rounds, so that τ / (v + K·c) is not their speed-up
Row = dict[str, Any]


def facts() -> list[Row]:
    """What methods.toml says of every method."""
    return tomllib.loads((HERE / "methods.toml").read_text(encoding="utf-8"))["method"]


def record() -> Row:
    """What was measured; no rows where nothing was."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"rows": []}


def drafts_of(method: Row, found: Row) -> list[Row]:
    """The measurements of a method, in every shape that is its own."""
    shape = method.get("shape")
    return [
        row
        for row in found["rows"]
        if row["method"] == method.get("measured") and shape in (None, "chain" if row["draft"][0] == "K" else "tree")
    ]


def link(method: Row, folder: str) -> str:
    """The name of a method, leading to its page where it has one."""
    return f"[{method['label']}]({folder}{method['page']})" if "page" in method else method["label"]


def papers(method: Row) -> str:
    """Its papers."""
    return ", ".join(f"[{name}]({address})" for name, address in method.get("papers", ()))


def written(method: Row) -> str:
    """The layouts that heads of a method go out in."""
    layouts = [f"`{name}`" for name in (*HEADS[method["heads"]].layouts, "jax")] if "heads" in method else []
    return method.get("written", ", ".join(layouts))


def millions(count: int) -> str:
    """Parameters."""
    return f"{count / 1e6:.1f} M" if count else "0"


def length(row: Row, task: str) -> str:
    """τ; a dash where nothing was drafted."""
    found = row["tasks"][task]["mean_acceptance_length"]
    return "–" if found is None else f"{found:.2f}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines)


def what_they_are() -> str:
    """Papers, needs and shapes."""
    columns = ["method", "paper", "needs", "drafts", "sampled drafts", "lossless"]
    return table(
        columns,
        [
            [link(one, ""), papers(one), one["needs"], one["drafts"], one["drawn"], one.get("lossless", "yes")]
            for one in facts()
        ],
    )


def files_and_proof() -> str:
    """Formats, training and what each was compared with."""
    columns = ["method", "comes in as", "goes out as", "`--method`", "checked against"]
    rows = []
    for one in facts():
        recipe = f"`{one['recipe']}`" if "recipe" in one else ""
        rows.append([one["label"], one["formats"], written(one), recipe, one["checked"]])
    return table(columns, rows)


def verify_costs(found: Row) -> dict[str, tuple[float, float, float]]:
    """Median and quartiles over the methods of ``v``, the time of a verification in plain steps, by draft."""
    costs = {}
    for draft in dict.fromkeys(row["draft"] for row in found["rows"]):
        values = [row["verify_cost"] for row in found["rows"] if row["draft"] == draft]
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        costs[draft] = (low, middle, high)
    return costs


def speedup(row: Row, task: str, costs: dict[str, tuple[float, float, float]]) -> str:
    """``S = τ / (v + K·c)`` with the ``v`` of all methods."""
    tau = row["tasks"][task]["mean_acceptance_length"]
    return f"{tau / (costs[row['draft']][1] + row['num_draft_steps'] * row['draft_cost']):.2f}"


def what_was_measured(found: Row) -> str:
    """``v`` by draft, then τ and the derived speed-up of every method."""
    costs = verify_costs(found)
    verify = [[draft, f"{middle:.2f} ({low:.2f}–{high:.2f})"] for draft, (low, middle, high) in costs.items()]
    tables = [table(["draft", "v: median over the methods (quartiles)"], verify)]
    methods = [method for method in facts() if method.get("named") != "none"]
    derived = [one for one in methods if drafts_of(one, found) and one["measured"] not in LOOKUP]
    for caption, cell, kept in (
        ("Tokens per round τ, code / prose", length, methods),
        ("Speed-up derived with this v, code / prose", lambda row, task: speedup(row, task, costs), derived),
    ):
        rows = []
        for method in kept:
            shapes = {row["draft"]: row for row in drafts_of(method, found)}
            parameters = millions(next(iter(shapes.values()))["parameters"]) if shapes else "not measured"
            cells = [
                " / ".join(cell(shapes[draft], task) for task in TASKS) if draft in shapes else "–" for draft in costs
            ]
            rows.append([method["label"], parameters, *cells])
        tables += [f"**{caption}**", table(["method", "parameters", *costs], rows)]
    return "\n\n".join(tables)


def how(found: Row) -> str:
    """Of what run the figures are."""
    if not found["rows"]:
        return "Nothing was measured yet."
    about, prompts = found["about"], found["prompts"]["names"]
    jax = f"{about['cpu']['model']}, {about['cpu']['cores']} cores" if about["jax"]["backend"] == "cpu" else ""
    device = jax or about["jax"]["device"]
    return (
        f"Version {about['versions']['eagle3_jax']}, commit `{about['git']['commit'][:10]}`, {device}, jax "
        f"{about['versions']['jax']}, `{found['dtype']}`, {about['date'][:10]}: {len(prompts)} prompts, "
        f"{found['max_new_tokens']} new tokens each, batch 1, greedy, {found['repeats']} repeats in turns.\n\n"
        f"```text\n{found['command']}\n```"
    )


def parts(found: Row) -> dict[str, dict[str, str]]:
    """The text between the marks of each page."""
    return {
        "docs/methods/index.md": {
            "what they are": what_they_are(),
            "files and proof": files_and_proof(),
            "the run": how(found),
            "what was measured": what_was_measured(found),
        },
    }
