"""Tables of speed, of acceptance and of the headline experiment, each from one record in validation/results.

The benchmark of the chat model is the canonical one: pages include speed-ups from here.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from methods import ROOT, table

RESULTS = ROOT / "validation" / "results"
Row = dict[str, Any]

# Rows of `eagle3 bench`, and how pages call them.
NAMES = {
    "plain float32, int8": "plain decoding, `int8`",
    "plain mixed": "plain decoding, `mixed`",
    "plain float32": "plain decoding, `float32`",
    "chain K=1": "EAGLE-3, K=1",
    "chain K=2": "EAGLE-3, K=2",
    "chain K=3": "EAGLE-3, K=3",
    "chain K=5": "EAGLE-3, K=5",
    "tree N=8 G=5": "EAGLE-3, tree of 8 nodes, 5 levels",
    "tree N=60 G=8": "EAGLE-3, tree of 60 nodes, 8 levels",
    "chain K=4": "EAGLE-3, K=4",
    "tree N=8 G=4": "EAGLE-3, tree of 8 nodes, 4 levels",
    "smollm2 chain K=3": "EAGLE-3, K=3",
    "ngram+smollm2 chain K=3": "n-grams, else EAGLE-3, K=3",
    "n-gram K=4": "n-grams (prompt lookup), K=4",
    "n-gram K=5": "n-grams (prompt lookup), K=5",
    "transformers generate": "transformers `generate`, `float32`",
    "transformers prompt lookup": "transformers prompt lookup, `float32`",
    "vLLM plain, compiled": "vLLM 0.32.0, plain, compiled, `float32`",
    "vLLM eagle3 K=3, compiled": "vLLM 0.32.0, same head, K=3, compiled, `float32`",
}


def record(name: str) -> Row:
    """A committed record."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A record of `eagle3 bench`."""

    name: str  #: Of the file.
    prompts: str  #: What the prompts are of.
    #: Rows of the table in README.
    shown: tuple[str, ...] = ()

    @property
    def about(self) -> Row:
        """Versions, commit and machine."""
        return record(self.name)["about"]

    @property
    def report(self) -> Row:
        """The report; a record of one batch size has one."""
        return record(self.name)["reports"][0]

    @property
    def rows(self) -> dict[str, Row]:
        """Rows by their names in the record."""
        return {row["name"]: row for row in self.report["rows"]}

    def origin(self) -> str:
        """Version, machine and size."""
        versions = self.about["versions"]
        cpu = self.about["cpu"]
        report = self.report
        where = f"{cpu['cores']} cores of an {cpu['model']}"
        size = f"{report['num_prompts']} {self.prompts}, {report['max_new_tokens']} greedy tokens each"
        return (
            f"Version {versions['eagle3_jax']}, commit `{self.about['git']['commit'][:10]}`, {where}, "
            f"jax {versions['jax']}, {size}, batch {report['batch_size']}.\n"
            "Median and quartiles of the ratio to plain decoding in the same repeat."
        )

    def ratio(self, row: Row) -> str:
        """Median and quartiles of the speed-up."""
        is_base = row["name"] == self.report["baseline"]
        return "1" if is_base else "{median:.2f} ({low:.2f}–{high:.2f})".format(**row["ratio"])

    def spread(self, row: Row) -> list[str]:
        """Median and quartiles of the speed-up, in two cells."""
        ratio = row["ratio"]
        return [f"{ratio['median']:.2f}", "" if self.ratio(row) == "1" else f"{ratio['low']:.2f}–{ratio['high']:.2f}"]

    def short(self) -> str:
        """The table of README."""
        lines = [
            [NAMES[name], tau(row), f"{row['decode_tokens_per_second']['median']:.0f}", self.ratio(row)]
            for name, row in self.rows.items()
            if name in self.shown
        ]
        return table(["method", "tokens per round (τ)", "tokens/s", "speed-up"], lines) + f"\n\n{self.origin()}"

    def whole(self) -> str:
        """Every row."""
        lines = []
        for row in self.rows.values():
            drafts = any(word in row["name"] for word in ("chain", "tree", "n-gram"))
            speed = [NAMES[row["name"]], tau(row), f"{row['decode_tokens_per_second']['median']:.0f}"]
            predicted = [f"{row['predicted_ratio']:.2f}", *costs(row)] if drafts else [""] * 3
            texts = "" if self.ratio(row) == "1" else f"{row['same_texts']}"
            lines.append([*speed, *self.spread(row), *predicted, texts])
        columns = ["method", "τ", "tokens/s", "speed-up", "quartiles", "predicted", "v", "c", "same texts"]
        return f"{table(columns, lines)}\n\n{self.origin()}"

    def chains(self) -> list[Row]:
        """The chains of the head alone."""
        return [row for row in self.rows.values() if row["name"].startswith("chain")]

    def draft_lengths(self) -> str:
        """The chains of the head alone, as a table."""
        lines = [
            [f"{row['num_draft_steps']}", tau(row), *costs(row), f"{row['predicted_ratio']:.2f}", *self.spread(row)]
            for row in self.chains()
        ]
        columns = ["K", "τ", "v", "c", "predicted S", "measured S", "quartiles"]
        return f"{table(columns, lines)}\n\n{self.origin()}"

    def by_task(self) -> str:
        """Speed-up and τ of every draft by task."""
        rows = [row for row in self.rows.values() if row["acceptance"] is not None and row["tasks"]]
        tasks = [part["task"] for part in rows[0]["tasks"]]
        lines = [[NAMES[row["name"]], *(_of_task(part) for part in row["tasks"])] for row in rows]
        return table(["method", *(TASKS.get(task, task) for task in tasks)], lines)


TASKS = {"mt_bench": "MT-bench", "humaneval": "HumanEval", "gsm8k": "GSM8K"}
CHAT = Benchmark(
    "bench-smollm2-cpu-amd-epyc-2-cores",
    "prompts of MT-bench, HumanEval and GSM8K",
    ("plain float32, int8", "n-gram K=4", "smollm2 chain K=3", "ngram+smollm2 chain K=3", "transformers generate",
     "vLLM eagle3 K=3, compiled"),
)  # fmt: skip
LENGTHS = Benchmark("lengths-smollm2-cpu-amd-epyc-2-cores", CHAT.prompts)
SMALL = Benchmark("bench-cpu-intel-xeon-2-cores", "code prompts")


def _of_task(part: Row) -> str:
    """Speed-up on the prompts of one task, and τ."""
    return f"{part['ratio']['value']:.2f} (τ {part['acceptance']['mean_acceptance_length']:.2f})"


def tau(row: Row) -> str:
    """Tokens per round; empty if nothing is drafted."""
    length = (row["acceptance"] or {}).get("mean_acceptance_length", 1)
    return f"{length:.2f}" if length > 1 else ""


def costs(row: Row) -> list[str]:
    """The verification and a draft token in plain steps."""
    return [f"{row['verify_cost']:.2f}", f"{row['draft_cost']:.3f}"]


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


def headline(name: str) -> str:
    """The headline experiment on a CPU: this library over its own plain decoding, and over vLLM with the same draft."""
    experiment = record(name)
    cells = [cell for cell in experiment["cells"].values() if "rows" in cell]
    place = lambda cell, draft: (cell["prompts"], cell["temperature"], cell["batch"], draft)
    median = lambda row: "{median:.2f} ({low:.2f}–{high:.2f})".format(**row["ratio"])
    over = {place(cell, row["name"]): median(row) for cell in cells if cell["rival"] != "ours" for row in cell["rows"]}
    lines = []
    for cell in cells:
        for row in cell["rows"] if cell["rival"] == "ours" else ():
            if row["name"].startswith("chain"):
                prompts = TASKS.get(cell["prompts"], cell["prompts"])
                setting = [prompts, f"{cell['temperature']:g}", str(cell["batch"]), row["name"]]
                lines.append([*setting, median(row), over.get(place(cell, row["name"]), "–")])
    columns = ["prompts", "temperature", "batch", "draft", "over plain", "over vLLM"]
    if not over:
        columns = columns[:-1]
        lines = [line[:-1] for line in lines]
    about = experiment["environment"]
    options = experiment["options"]
    weights = options.get("weights", "dense")
    precision = options["dtype"] if weights == "dense" else weights
    return table(columns, lines) + (
        f"\n\nVersion {about['versions']['eagle3_jax']}, commit `{about['git']['commit'][:10]}`, "
        f"{experiment['device'].partition(',')[0]}, `{precision}`, {options['max_prompts']} prompts of each set, "
        f"{options['max_new_tokens']} tokens, {options['repeats']} repeats, "
        f"from [`{name}.json`](../validation/results/{name}.json)."
    )


def llama_cpp() -> str:
    """This library and llama.cpp on the same file."""
    rival = record("llama-cpp-cpu-amd-epyc-2-cores")
    report = rival["report"]
    about = rival["about"]
    lines = [
        [row["name"], f"`{row['dtype']}`", tau(row), f"{row['decode_tokens_per_second']['median']:.0f}",
         "{median:.2f} ({low:.2f}–{high:.2f})".format(**row["ratio"])]
        for row in report["rows"]
    ]  # fmt: skip
    return table(["decoder", "weights", "τ", "tokens/s", "speed-up over our plain decoding"], lines) + (
        f"\n\nVersion {about['versions']['eagle3_jax']}, commit `{about['git']['commit'][:10]}`, llama-cpp-python "
        f"{rival['llama_cpp_python']}, {about['cpu']['cores']} cores of an {about['cpu']['model']}, "
        f"{report['num_prompts']} prompts,\n{report['max_new_tokens']} greedy tokens each, batch 1."
    )


def parts() -> dict[str, dict[str, str]]:
    """The text between the marks of each page."""
    return {
        "README.md": {"speed": CHAT.short()},
        "docs/numbers.md": {
            "speed": CHAT.whole(),
            "tasks": CHAT.by_task(),
            "drafts": LENGTHS.whole(),
            "llama.cpp": llama_cpp(),
            "small pair": SMALL.whole(),
            "acceptance": acceptance(),
            "headline": headline("headline-cpu-intel-xeon-2-cores"),
        },
        "docs/choosing.md": {"draft lengths": LENGTHS.draft_lengths()},
    }
