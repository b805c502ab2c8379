"""The tables of README.md and docs/methods/index.md, out of the records of `eagle3 bench` and of methods.json.

``methods.json`` is what ``examples/methods.py`` measured; a method that is not in it is "not measured".
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.conversion.heads import HEADS

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RECORD = HERE / "methods.json"
BENCH = ROOT / "validation" / "results" / "bench-cpu-intel-xeon-2-cores.json"
TASKS = ("code", "prose")
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


def ratio(row: Row, task: str, *, interval: bool) -> str:
    """Speed over plain decoding, with its interval over prompts; of one prompt there is none."""
    found = row["tasks"][task]["ratio"]
    with_interval = interval and found["low"] is not None
    return f"{found['value']:.2f}" + (f" ({found['low']:.2f}–{found['high']:.2f})" if with_interval else "")


def length(row: Row, task: str) -> str:
    """τ; a dash where nothing was drafted."""
    found = row["tasks"][task]["mean_acceptance_length"]
    return "–" if found is None else f"{found:.2f}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines)


SHIPPED = {
    "plain float32": "plain decoding, float32",
    "n-gram K=5": "n-grams (prompt lookup), K=5",
    "chain K=3": "EAGLE-3, K=3",
    "vLLM eagle3 K=3, compiled": "vLLM 0.32.0, the same head, K=3, compiled, float32",
}


def shipped() -> str:
    """The table of README: the shipped pair, and where it was measured."""
    found = json.loads(BENCH.read_text(encoding="utf-8"))
    about, report = found["about"], found["reports"][0]
    rows = {row["name"]: row for row in report["rows"]}
    lines = []
    for name, label in SHIPPED.items():
        row, baseline = rows[name], name == report["baseline"]
        tau = (row["acceptance"] or {}).get("mean_acceptance_length", 1)
        speedup = "1" if baseline else "{median:.2f} ({low:.2f}–{high:.2f})".format(**row["ratio"])
        speed = f"{row['decode_tokens_per_second']['median']:.0f}"
        lines.append([label, f"{tau:.2f}" if tau > 1 else "", speed, speedup])
    of, where = about["versions"], f"{about['cpu']['cores']} cores of an {about['cpu']['model']}"
    size = f"{report['num_prompts']} code prompts, {report['max_new_tokens']} greedy tokens each"
    return table(["method", "tokens per round (τ)", "tokens/s", "speed-up"], lines) + (
        f"\n\nVersion {of['eagle3_jax']}, commit `{about['git']['commit'][:10]}`, {where}, jax {of['jax']}, {size}, "
        f"batch {report['batch_size']}.\nMedian and quartiles of the ratio to plain decoding in the same repeat."
    )


def what_they_are() -> str:
    """Papers, needs and shapes."""
    columns = ["method", "paper", "needs", "drafts", "drawn drafts", "lossless"]
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


def what_was_measured(found: Row) -> str:
    """Every shape of every method."""
    columns = ["method", "draft", "parameters", "τ, code", "τ, prose", "v", "c", "speed-up, code", "speed-up, prose"]
    rows = []
    for method in facts():
        if method.get("named") == "none":
            continue
        shapes = drafts_of(method, found)
        rows += [[method["label"], "not measured", *[""] * 7]] if not shapes else []
        rows += [
            [
                method["label"],
                row["draft"],
                millions(row["parameters"]),
                *(length(row, task) for task in TASKS),
                f"{row['verify_cost']:.2f}",
                f"{row['draft_cost']:.3f}",
                *(ratio(row, task, interval=True) for task in TASKS),
            ]
            for row in shapes
        ]
    return table(columns, rows)


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
        "README.md": {"speed": shipped()},
        "docs/methods/index.md": {
            "what they are": what_they_are(),
            "files and proof": files_and_proof(),
            "the run": how(found),
            "what was measured": what_was_measured(found),
        },
    }
