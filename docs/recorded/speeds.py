"""Tables of speed, of acceptance and of the headline experiment, each from one record.

The benchmark of the chat model is the canonical one: pages include speed-ups from here.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from page_tables import Row, cores, record, spread, table, version

# Names of the rows of `eagle3 bench` on the pages.
NAMES = {
    "plain float32, int8": "plain decoding, `int8`",
    "plain mixed": "plain decoding, `mixed`",
    "plain float32": "plain decoding, `float32`",
    **{f"chain K={k}": f"EAGLE-3, K={k}" for k in range(1, 6)},
    "tree N=8 G=5": "EAGLE-3, tree of 8 nodes, 5 levels",
    "tree N=60 G=8": "EAGLE-3, tree of 60 nodes, 8 levels",
    "tree N=8 G=4": "EAGLE-3, tree of 8 nodes, 4 levels",
    **{f"smollm2 chain K={k}": f"EAGLE-3, K={k}" for k in range(1, 4)},
    **{f"ngram+smollm2 chain K={k}": f"n-grams, else EAGLE-3, K={k}" for k in range(1, 4)},
    "suffix chain K=3": "suffixes, K=3",
    "n-gram K=4": "n-grams (prompt lookup), K=4",
    "n-gram K=5": "n-grams (prompt lookup), K=5",
    "transformers generate": "transformers `generate`, `float32`",
    "transformers prompt lookup": "transformers prompt lookup, `float32`",
    "vLLM plain, compiled": "vLLM 0.32.0, plain, compiled, `float32`",
    "vLLM eagle3 K=3, compiled": "vLLM 0.32.0, same head, K=3, compiled, `float32`",
}
TASKS = {"mt_bench": "MT-bench", "humaneval": "HumanEval", "gsm8k": "GSM8K"}
# Rows of the table in README.
SHOWN = (
    "plain float32, int8",
    "n-gram K=4",
    "smollm2 chain K=3",
    "ngram+smollm2 chain K=3",
    "transformers generate",
    "vLLM eagle3 K=3, compiled",
)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A record of `eagle3 bench` with one batch size."""

    name: str  #: Name of the file.
    prompts: str  #: What the prompts are.

    @property
    def report(self) -> Row:
        """The report of the record."""
        return record(self.name)["reports"][0]

    @property
    def rows(self) -> dict[str, Row]:
        """Rows by their names in the record."""
        return {row["name"]: row for row in self.report["rows"]}

    def origin(self) -> str:
        """Names version, machine and size."""
        about = record(self.name)["about"]
        report = self.report
        size = (
            f"{report['num_prompts']} {self.prompts}, {report['max_new_tokens']} greedy tokens each"
        )
        return (
            f"{version(about)}, {cores(about)}, jax {about['versions']['jax']}, {size}, batch"
            f" {report['batch_size']}.\nMedian and quartiles of the ratio to plain decoding in the"
            " same repeat."
        )

    def is_base(self, row: Row) -> bool:
        """Returns whether a row is the plain decoding that the others are compared with."""
        return row["name"] == self.report["baseline"]

    def speed_up(self, row: Row) -> list[str]:
        """Writes median and quartiles of the speed-up, in two cells."""
        ratio = row["ratio"]
        return [
            f"{ratio['median']:.2f}",
            "" if self.is_base(row) else f"{ratio['low']:.2f}–{ratio['high']:.2f}",
        ]

    def short(self) -> str:
        """Writes the table of README."""
        lines = []
        for name, row in self.rows.items():
            if name in SHOWN:
                speed_up = "1" if self.is_base(row) else spread(row["ratio"])
                lines.append([NAMES[name], tau(row), speed(row), speed_up])

        columns = ["method", "tokens per round (τ)", "tokens/s", "speed-up"]
        return f"{table(columns, lines)}\n\n{self.origin()}"

    def complete(self) -> str:
        """Writes every row."""
        lines = []
        for name, row in self.rows.items():
            drafts = any(word in name for word in ("chain", "tree", "n-gram"))
            predicted = [f"{row['predicted_ratio']:.2f}", *costs(row)] if drafts else [""] * 3
            texts = "" if self.is_base(row) else f"{row['same_texts']}"
            lines.append(
                [NAMES[name], tau(row), speed(row), *self.speed_up(row), *predicted, texts]
            )

        columns = [
            "method",
            "τ",
            "tokens/s",
            "speed-up",
            "quartiles",
            "predicted",
            "v",
            "c",
            "same texts",
        ]
        return f"{table(columns, lines)}\n\n{self.origin()}"

    def chains(self) -> list[Row]:
        """Returns the chains of the head alone."""
        return [row for name, row in self.rows.items() if name.startswith("chain")]

    def draft_lengths(self) -> str:
        """Writes the chains of the head alone."""
        lines = []
        for row in self.chains():
            length = f"{row['num_draft_steps']}"
            predicted = f"{row['predicted_ratio']:.2f}"
            lines.append([length, tau(row), *costs(row), predicted, *self.speed_up(row)])

        columns = ["K", "τ", "v", "c", "predicted S", "measured S", "quartiles"]
        return f"{table(columns, lines)}\n\n{self.origin()}"

    def by_task(self) -> str:
        """Writes speed-up and τ of every draft by task."""
        rows = [row for row in self.rows.values() if row["acceptance"] is not None and row["tasks"]]
        lines = []
        for row in rows:
            cells = [f"{task['ratio']['value']:.2f} (τ {tau(task)})" for task in row["tasks"]]
            lines.append([NAMES[row["name"]], *cells])
        return table(["method", *(TASKS[task["task"]] for task in rows[0]["tasks"])], lines)


PROMPTS = "prompts of MT-bench, HumanEval and GSM8K"
CHAT = Benchmark("bench-smollm2-cpu-amd-epyc-2-cores", PROMPTS)
LENGTHS = Benchmark("lengths-smollm2-cpu-amd-epyc-2-cores", PROMPTS)
BATCHES = [Benchmark(f"batch-{size}-smollm2-cpu-amd-epyc-2-cores", PROMPTS) for size in (4, 8)]
SUFFIX = Benchmark("suffix-smollm2-cpu-amd-epyc-2-cores", PROMPTS)
MIXED = Benchmark("mixed-smollm2-cpu-amd-epyc-2-cores", PROMPTS)
SAMPLED = "sampled-smollm2-cpu-amd-epyc-2-cores"
HEADLINE = "headline-cpu-intel-xeon-2-cores"
SMALL = Benchmark("bench-cpu-intel-xeon-2-cores", "code prompts")


def tau(row: Row) -> str:
    """Writes the tokens per round; empty if nothing is drafted."""
    length = (row["acceptance"] or {}).get("mean_acceptance_length", 1)
    return f"{length:.2f}" if length > 1 else ""


def speed(row: Row) -> str:
    """Writes tokens per second."""
    return f"{row['decode_tokens_per_second']['median']:.0f}"


def costs(row: Row) -> list[str]:
    """Writes the verification and a draft token in plain steps."""
    return [f"{row['verify_cost']:.2f}", f"{row['draft_cost']:.3f}"]


def acceptance() -> str:
    """Writes the acceptance of the shipped pair by depth."""
    shipped = record("acceptance-shipped-pair")
    lines = []
    for row in shipped["rows"]:
        shares = [f"{share:.2f}".removeprefix("0") for share in row["acceptance_per_position"]]
        labels = [
            row["draft"].replace("drawn", "sampled"),
            row["kind"],
            f"{row['mean_acceptance_length']:.2f}",
        ]
        lines.append([*labels, *shares, *[""] * (8 - len(shares))])

    about = shipped["about"]
    columns = ["draft", "text", "τ", "depth 1", *(str(depth) for depth in range(2, 9))]
    return (
        table(columns, lines)
        + f"\n\nVersion {about['versions']['eagle3_jax']}, {about['date'][:10]},"
        f" {about['cpu']['model']}, `{shipped['dtype']}`, from [the"
        " record](../validation/results/acceptance-shipped-pair.json)."
    )


class Setting(NamedTuple):
    """The first columns of a row of the headline experiment."""

    prompts: str
    temperature: str
    batch: str
    draft: str


def headline() -> str:
    """Writes the headline experiment on a CPU: speed over our plain decoding, and over vLLM."""
    experiment = record(HEADLINE)
    ratios: dict[str, dict[Setting, str]] = {"ours": {}, "plain": {}, "chain K=3": {}}
    for cell in experiment["cells"].values():
        for row in cell.get("rows", ()):
            temperature = f"{cell['temperature']:g}"
            setting = Setting(cell["prompts"], temperature, f"{cell['batch']}", row["name"])
            ratios[cell["rival"]][setting] = spread(row["ratio"])

    lines = []
    for setting, over_plain in ratios["ours"].items():
        if setting.draft.startswith("chain"):
            lines.append([*setting, over_plain, ratios["chain K=3"].get(setting, "–")])

    options = experiment["options"]
    return (
        table(["prompts", "temperature", "batch", "draft", "over plain", "over vLLM"], lines)
        + f"\n\n{version(experiment['environment'])}, {experiment['device'].partition(',')[0]},"
        f" `{options['dtype']}`, {options['max_prompts']} prompts of each set,"
        f" {options['max_new_tokens']} tokens, {options['repeats']} repeats, from"
        f" [`{HEADLINE}.json`](../validation/results/{HEADLINE}.json)."
    )


def batches() -> str:
    """Writes the speed-ups of the chat model at batches of 4 and 8."""
    lines = []
    for name in BATCHES[0].rows:
        cells = [cell for batch in BATCHES for cell in batch.speed_up(batch.rows[name])]
        lines.append([NAMES[name], tau(BATCHES[0].rows[name]), *cells])
    return (
        table(["method", "τ", "batch 4", "quartiles", "batch 8", "quartiles"], lines)
        + f"\n\n{BATCHES[0].origin()}"
    )


def sampled() -> str:
    """Writes the speed-ups of the chat model at temperature 1."""
    experiment = record(SAMPLED)
    lines: dict[str, list[str]] = {}
    for cell in experiment["cells"].values():
        for row in cell["rows"]:
            if row["name"] != "plain":
                lines.setdefault(row["name"], []).append(spread(row["ratio"]))

    options = experiment["options"]
    columns = ["draft", *(TASKS[cell["prompts"]] for cell in experiment["cells"].values())]
    return (
        table(columns, [[name, *cells] for name, cells in lines.items()])
        + f"\n\n{version(experiment['environment'])}, {experiment['device'].partition(',')[0]},"
        f" `{options['weights']}`, {options['max_prompts']} prompts of each,"
        f" {options['max_new_tokens']} tokens, {options['repeats']} repeats, temperature 1, batch"
        " 1, drafts of likeliest tokens."
    )


def llama_cpp() -> str:
    """Writes this library and llama.cpp on the same file."""
    comparison = record("llama-cpp-cpu-amd-epyc-2-cores")
    report = comparison["report"]
    about = comparison["about"]
    lines = [
        [row["name"], f"`{row['dtype']}`", tau(row), speed(row), spread(row["ratio"])]
        for row in report["rows"]
    ]

    return (
        table(["decoder", "weights", "τ", "tokens/s", "speed-up over our plain decoding"], lines)
        + f"\n\n{version(about)}, llama-cpp-python {comparison['llama_cpp_python']},"
        f" {cores(about)}, "
        f"{report['num_prompts']} prompts,\n{report['max_new_tokens']} greedy tokens each, batch 1."
    )
