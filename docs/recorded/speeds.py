"""Tables of speed, of acceptance and of the headline experiment, each from one record in validation/results.

``bench-cpu-intel-xeon-2-cores.json`` is the canonical benchmark: pages include speed-ups from here.
"""

from __future__ import annotations

import json
from typing import Any

from methods import ROOT, table

RESULTS = ROOT / "validation" / "results"
Row = dict[str, Any]

# Rows of the canonical benchmark, and how pages call them.
NAMES = {
    "plain mixed": "plain decoding, `mixed`",
    "plain float32": "plain decoding, `float32`",
    "chain K=1": "EAGLE-3, K=1",
    "chain K=2": "EAGLE-3, K=2",
    "chain K=3": "EAGLE-3, K=3",
    "chain K=5": "EAGLE-3, K=5",
    "tree N=8 G=5": "EAGLE-3, tree of 8 nodes, 5 levels",
    "tree N=60 G=8": "EAGLE-3, tree of 60 nodes, 8 levels",
    "n-gram K=5": "n-grams (prompt lookup), K=5",
    "transformers generate": "transformers `generate`, `float32`",
    "transformers prompt lookup": "transformers prompt lookup, `float32`",
    "vLLM plain, compiled": "vLLM 0.32.0, plain, compiled, `float32`",
    "vLLM eagle3 K=3, compiled": "vLLM 0.32.0, same head, K=3, compiled, `float32`",
}
SHIPPED = {
    "plain float32": "plain decoding, float32",
    "n-gram K=5": "n-grams (prompt lookup), K=5",
    "chain K=3": "EAGLE-3, K=3",
    "vLLM eagle3 K=3, compiled": "vLLM 0.32.0, the same head, K=3, compiled, float32",
}


def record(name: str) -> Row:
    """A committed record."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


BENCH = record("bench-cpu-intel-xeon-2-cores")
ROWS = {row["name"]: row for row in BENCH["reports"][0]["rows"]}


def origin() -> str:
    """Version, machine and size of the canonical benchmark."""
    about, report = BENCH["about"], BENCH["reports"][0]
    of, where = about["versions"], f"{about['cpu']['cores']} cores of an {about['cpu']['model']}"
    size = f"{report['num_prompts']} code prompts, {report['max_new_tokens']} greedy tokens each"
    return (
        f"Version {of['eagle3_jax']}, commit `{about['git']['commit'][:10]}`, {where}, jax {of['jax']}, {size}, "
        f"batch {report['batch_size']}.\nMedian and quartiles of the ratio to plain decoding in the same repeat."
    )


def ratio(row: Row) -> str:
    """Median and quartiles of the speed-up."""
    one = row["name"] == BENCH["reports"][0]["baseline"]
    return "1" if one else "{median:.2f} ({low:.2f}–{high:.2f})".format(**row["ratio"])


def spread(row: Row) -> list[str]:
    """Median and quartiles of the speed-up, in two cells."""
    one = row["ratio"]
    return [f"{one['median']:.2f}", "" if ratio(row) == "1" else f"{one['low']:.2f}–{one['high']:.2f}"]


def tau(row: Row) -> str:
    """Tokens per round; empty if nothing is drafted."""
    found = (row["acceptance"] or {}).get("mean_acceptance_length", 1)
    return f"{found:.2f}" if found > 1 else ""


def shipped() -> str:
    """The table of README."""
    lines = [
        [label, tau(ROWS[name]), f"{ROWS[name]['decode_tokens_per_second']['median']:.0f}", ratio(ROWS[name])]
        for name, label in SHIPPED.items()
    ]
    return table(["method", "tokens per round (τ)", "tokens/s", "speed-up"], lines) + f"\n\n{origin()}"


def costs(row: Row) -> list[str]:
    """The verification and a draft token in plain steps."""
    return [f"{row['verify_cost']:.2f}", f"{row['draft_cost']:.3f}"]


def everything() -> str:
    """Every row of the canonical benchmark."""
    lines = []
    for row in ROWS.values():
        drafts = row["name"].startswith(("chain", "tree", "n-gram"))
        speed = [NAMES[row["name"]], tau(row), f"{row['decode_tokens_per_second']['median']:.0f}", *spread(row)]
        predicted = [f"{row['predicted_ratio']:.2f}", *costs(row)] if drafts else [""] * 3
        lines.append([*speed, *predicted, "" if ratio(row) == "1" else f"{row['same_texts']}"])
    columns = ["method", "τ", "tokens/s", "speed-up", "quartiles", "predicted", "v", "c", "same texts"]
    return table(columns, lines) + f"\n\n{origin()}"


def draft_lengths() -> str:
    """The chains of the canonical benchmark."""
    chains = [row for row in ROWS.values() if row["name"].startswith("chain")]
    lines = [
        [f"{row['num_draft_steps']}", tau(row), *costs(row), f"{row['predicted_ratio']:.2f}", *spread(row)]
        for row in chains
    ]
    return table(["K", "τ", "v", "c", "predicted S", "measured S", "quartiles"], lines) + f"\n\n{origin()}"


def acceptance() -> str:
    """Acceptance of the shipped pair by depth."""
    found = record("acceptance-shipped-pair")
    lines = []
    for row in found["rows"]:
        shares = [f"{share:.2f}".removeprefix("0") for share in row["acceptance_per_position"]]
        named = [row["draft"].replace("drawn", "sampled"), row["kind"], f"{row['mean_acceptance_length']:.2f}"]
        lines.append([*named, *shares, *[""] * (8 - len(shares))])
    about = found["about"]
    columns = ["draft", "text", "τ", "depth 1", *(str(depth) for depth in range(2, 9))]
    return table(columns, lines) + (
        f"\n\nVersion {about['versions']['eagle3_jax']}, {about['date'][:10]}, {about['cpu']['model']}, "
        f"`{found['dtype']}`, from [the record](../validation/results/acceptance-shipped-pair.json)."
    )


def headline() -> str:
    """The headline experiment on a CPU: this library over its own plain decoding, and over vLLM with the same draft."""
    found = record("headline-cpu-intel-xeon-2-cores")
    cells = [cell for cell in found["cells"].values() if "rows" in cell]
    place = lambda cell, name: (cell["prompts"], cell["temperature"], cell["batch"], name)
    median = lambda row: "{median:.2f} ({low:.2f}–{high:.2f})".format(**row["ratio"])
    over = {place(cell, row["name"]): median(row) for cell in cells if cell["rival"] != "ours" for row in cell["rows"]}
    lines = []
    for cell in cells:
        for row in cell["rows"] if cell["rival"] == "ours" else ():
            if row["name"].startswith("chain"):
                setting = [cell["prompts"], f"{cell['temperature']:g}", str(cell["batch"]), row["name"]]
                lines.append([*setting, median(row), over.get(place(cell, row["name"]), "–")])
    where, options = found["environment"], found["options"]
    name = "headline-cpu-intel-xeon-2-cores.json"
    return table(["prompts", "temperature", "batch", "draft", "over plain", "over vLLM"], lines) + (
        f"\n\nVersion {where['versions']['eagle3_jax']}, commit `{where['git']['commit'][:10]}`, "
        f"{found['device'].partition(',')[0]}, `{options['dtype']}`, {options['max_prompts']} prompts of each set, "
        f"{options['max_new_tokens']} tokens, {options['repeats']} repeats, "
        f"from [`{name}`](../validation/results/{name})."
    )


def parts() -> dict[str, dict[str, str]]:
    """The text between the marks of each page."""
    return {
        "README.md": {"speed": shipped()},
        "docs/numbers.md": {"speed": everything(), "acceptance": acceptance(), "headline": headline()},
        "docs/choosing.md": {"draft lengths": draft_lengths()},
    }
