"""Tables of docs/methods/index.md, from methods.toml and from methods.json, the record of ``examples/methods.py``.

A method that is not in the record is "not measured". The time of a verification is noisy on two shared cores, and the
same for every method: the tables use the median over the methods, and derive ``S = τ / (v + K·c)`` from it.
"""

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Callable, Sequence
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


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines)


def what_they_are() -> str:
    """Papers, needs and shapes."""
    rows = []
    for one in facts():
        name = f"[{one['label']}]({one['page']})" if "page" in one else one["label"]
        papers = ", ".join(f"[{paper}]({address})" for paper, address in one.get("papers", ()))
        rows.append([name, papers, one["needs"], one["drafts"], one["drawn"], one.get("lossless", "yes")])
    return table(["method", "paper", "needs", "drafts", "sampled drafts", "lossless"], rows)


def files_and_proof() -> str:
    """Formats, training and what each was compared with."""
    rows = []
    for one in facts():
        layouts = [f"`{name}`" for name in (*HEADS[one["heads"]].layouts, "jax")] if "heads" in one else []
        written = one.get("written", ", ".join(layouts))
        recipe = f"`{one['recipe']}`" if "recipe" in one else ""
        rows.append([one["label"], one["formats"], written, recipe, one["checked"]])
    return table(["method", "comes in as", "goes out as", "`--method`", "checked against"], rows)


def verify_costs(found: Row) -> dict[str, tuple[float, float, float]]:
    """Median and quartiles over the methods of ``v``, the time of a verification in plain steps, by draft."""
    costs = {}
    for draft in dict.fromkeys(row["draft"] for row in found["rows"]):
        values = [row["verify_cost"] for row in found["rows"] if row["draft"] == draft]
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        costs[draft] = (low, middle, high)
    return costs


def what_was_measured(found: Row) -> str:
    """``v`` by draft, then τ and the derived speed-up of every method."""
    costs = verify_costs(found)
    verify = [[draft, f"{middle:.2f} ({low:.2f}–{high:.2f})"] for draft, (low, middle, high) in costs.items()]
    tables = [table(["draft", "v: median over the methods (quartiles)"], verify)]
    methods = [method for method in facts() if method.get("named") != "none"]
    derived = [one for one in methods if drafts_of(one, found) and one["measured"] not in LOOKUP]
    plain_steps = lambda row: costs[row["draft"]][1] + row["num_draft_steps"] * row["draft_cost"]
    for caption, divisor, kept in (
        ("Tokens per round τ, code / prose", lambda row: 1, methods),
        ("Speed-up derived with this v, code / prose", plain_steps, derived),
    ):
        rows = []
        for method in kept:
            shapes = {row["draft"]: row for row in drafts_of(method, found)}
            cells = ["–" if draft not in shapes else over_tasks(shapes[draft], divisor) for draft in costs]
            count = next((row["parameters"] for row in shapes.values()), None)
            size = "not measured" if count is None else f"{count / 1e6:.1f} M" if count else "0"
            rows.append([method["label"], size, *cells])
        tables += [f"**{caption}**", table(["method", "parameters", *costs], rows)]
    return "\n\n".join(tables)


def over_tasks(row: Row, divisor: Callable[[Row], float]) -> str:
    """τ divided, of each task; a dash where nothing was drafted."""
    lengths = [row["tasks"][task]["mean_acceptance_length"] for task in TASKS]
    return " / ".join("–" if one is None else f"{one / divisor(row):.2f}" for one in lengths)


def how(found: Row) -> str:
    """Of what run the figures are."""
    if not found["rows"]:
        return "Nothing was measured yet."
    about = found["about"]
    prompts = found["prompts"]["names"]
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
