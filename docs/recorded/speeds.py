"""Tables of speed and of acceptance, each from one record.

The benchmark of the chat model is the canonical one: pages include speed-ups from here.
"""

from __future__ import annotations

import dataclasses

from page_tables import Row, cores, record, spread, table, version

# Names of the rows of the records on the pages.
NAMES = {
    "plain float32, int8": "plain decoding, `int8`",
    "plain mixed": "plain decoding, `mixed`",
    "plain float32": "plain decoding, `float32`",
    **{f"chain K={k}": f"EAGLE-3, K={k}" for k in range(1, 6)},
    **{f"ngram+chain K={k}": f"n-grams, else EAGLE-3, K={k}" for k in range(1, 4)},
    "mixed chain K=3": "EAGLE-3, K=3, `mixed`",
    "tree N=8 G=5": "EAGLE-3, tree of 8 nodes, 5 levels",
    "tree N=60 G=8": "EAGLE-3, tree of 60 nodes, 8 levels",
    "tree N=8 G=4": "EAGLE-3, tree of 8 nodes, 4 levels",
    "suffix K=3": "suffixes, K=3",
    "n-gram K=4": "n-grams (prompt lookup), K=4",
    "n-gram K=5": "n-grams (prompt lookup), K=5",
    "transformers generate": "transformers `generate`, `float32`",
    "transformers prompt lookup": "transformers prompt lookup, `float32`",
    "vLLM plain, compiled": "vLLM 0.32.0, plain, compiled, `float32`",
    "vLLM eagle3 K=3, compiled": "vLLM 0.32.0, same head, K=3, compiled, `float32`",
    "llama.cpp, weights of the file": "llama.cpp, plain, the file's 4 bits",
    "llama.cpp, float32": "llama.cpp, plain, `float32`",
}
TASKS = {"mt_bench": "MT-bench", "humaneval": "HumanEval", "gsm8k": "GSM8K"}
# Rows of the table in README.
SHOWN = (
    "plain float32, int8",
    "n-gram K=4",
    "chain K=3",
    "ngram+chain K=3",
    "transformers generate",
    "vLLM eagle3 K=3, compiled",
    "llama.cpp, weights of the file",
)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A record of `eagle3 bench` with one batch size."""

    name: str  #: Name of the file.
    prompts: str  #: What the prompts are.

    @property
    def report(self) -> Row:
        """The report of the record; that of `eagle3 bench` has one for each batch size."""
        values = record(self.name)
        return values["report"] if "report" in values else values["reports"][0]

    @property
    def rows(self) -> dict[str, Row]:
        """Rows by their names in the record."""
        return {row["name"]: row for row in self.report["rows"]}

    def run(self, batches: str = "") -> str:
        """Names version, machine and size, and the batch if not ``batches``."""
        about = record(self.name)["about"]
        report = self.report
        temperature = record(self.name).get("temperature")
        decoding = f"at temperature {temperature:g}" if temperature else "greedy"
        size = (
            f"{report['num_prompts']} {self.prompts}, {report['max_new_tokens']} tokens each,"
            f" {decoding}"
        )
        return (
            f"{version(about)}, {cores(about)}, jax {about['versions']['jax']}, {size},"
            f" {batches or 'batch {}'.format(report['batch_size'])}."
        )

    def origin(self, batches: str = "") -> str:
        """Names the run, and what a speed-up in it is."""
        return (
            f"{self.run(batches)}\nMedian and quartiles of the ratio to plain decoding in the same"
            f" repeat, of {self.report['repeats']}."
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
            is_ours = row["num_draft_steps"] and row["predicted_ratio"]
            predicted = [f"{row['predicted_ratio']:.2f}", *costs(row)] if is_ours else [""] * 3
            texts = "" if row["same_texts"] is None else f"{row['same_texts']}"
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
        """Writes speed-up and τ of every draft by task, with the run."""
        rows = [row for row in self.rows.values() if row["acceptance"] is not None and row["tasks"]]
        lines = []
        for row in rows:
            cells = [f"{task['ratio']['value']:.2f} (τ {tau(task)})" for task in row["tasks"]]
            lines.append([NAMES[row["name"]], *cells])
        columns = ["method", *(TASKS[task["task"]] for task in rows[0]["tasks"])]
        base = NAMES[self.report["baseline"]]
        means = f"Geometric means over the prompts of a task of the ratio to {base}."
        return f"{table(columns, lines)}\n\n{self.run()}\n{means}"


PROMPTS = "prompts of MT-bench, HumanEval and GSM8K"
CHAT = Benchmark("speed-smollm2-cpu-amd-epyc-2-cores", PROMPTS)
BATCHES = [Benchmark(f"batch-{size}-smollm2-cpu-amd-epyc-2-cores", PROMPTS) for size in (4, 8)]
SAMPLED = Benchmark("sampled-smollm2-cpu-amd-epyc-2-cores", PROMPTS)
SMALL = Benchmark("bench-cpu-amd-epyc-2-cores", "code prompts")


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


ACCEPTANCE = "acceptance-shipped-pair"
# Drafts of the table of acceptance by depth.
BY_DEPTH = (
    "chain K=5",
    "tree of 60 nodes, 8 levels, top 10",
    "n-gram K=5",
    "chain K=4, likeliest",
    "chain K=4, sampled",
)
KINDS = ("code", "prose")


def accepted(draft: str, kind: str) -> Row:
    """Returns the acceptance of a draft on the prompts of a kind."""
    (row,) = (
        row for row in record(ACCEPTANCE)["rows"] if (row["draft"], row["kind"]) == (draft, kind)
    )
    return row


def taus(draft: str) -> list[str]:
    """Writes τ of a draft on code and on prose."""
    return [f"{accepted(draft, kind)['mean_acceptance_length']:.2f}" for kind in KINDS]


def of_acceptance() -> str:
    """Names the run of the acceptance."""
    shipped = record(ACCEPTANCE)
    about = shipped["about"]
    return (
        f"{version(about)}, {about['date'][:10]}, {about['cpu']['model']}, `{shipped['dtype']}`,"
        f" from [the record](RESULTS/{ACCEPTANCE}.json)."
    )


def acceptance() -> str:
    """Writes the acceptance of the shipped pair by depth."""
    lines = []
    for draft in BY_DEPTH:
        for kind in KINDS:
            row = accepted(draft, kind)
            shares = [f"{share:.2f}".removeprefix("0") for share in row["acceptance_per_position"]]
            labels = [draft, kind, f"{row['mean_acceptance_length']:.2f}"]
            lines.append([*labels, *shares, *[""] * (8 - len(shares))])

    columns = ["draft", "text", "τ", "depth 1", *(str(depth) for depth in range(2, 9))]
    origin = of_acceptance().replace("RESULTS", "../validation/results")
    return f"{table(columns, lines)}\n\n{origin}"


def lookups() -> str:
    """Writes τ of n-grams and of suffixes."""
    drafts = ("n-gram K=5", "n-gram K=5, up to 24", "suffix K=5")
    columns = ["draft", *KINDS]
    lines = [[draft, *taus(draft)] for draft in drafts]
    origin = of_acceptance().replace("RESULTS", "../../validation/results")
    return f"{table(columns, lines)}\n\n{origin}"


def layer_skip() -> str:
    """Writes τ of layer skip by depth, and what a round costs."""
    drafts = [f"layer-skip={count} K=3" for count in (3, 6, 9, 11)]
    lines = []
    for draft, count in zip(drafts, (3, 6, 9, 11), strict=True):
        rates = [f"{accepted(draft, kind)['draft_acceptance_rate']:.0%}" for kind in KINDS]
        lines.append([f"{count}", *rates, *taus(draft), f"{1 + 3 * count / 12:.2f}"])

    columns = [
        "`layer-skip=`",
        "accepted, code",
        "prose",
        "τ, code",
        "prose",
        "target steps a round",
    ]
    origin = of_acceptance().replace("RESULTS", "../../validation/results")
    return f"{table(columns, lines)}\n\n{origin}"


def block_rule() -> str:
    """Writes τ of the token rule and of the block rule."""
    lines = []
    for length in (3, 5, 7):
        cells = [
            cell for rule in ("token", "block") for cell in taus(f"chain K={length}, {rule} rule")
        ]
        lines.append([f"K={length}", *cells])

    columns = ["", "token rule, code", "prose", "block rule, code", "prose"]
    origin = of_acceptance().replace("RESULTS", "../../validation/results")
    return f"{table(columns, lines)}\n\n{origin}"


def batches() -> str:
    """Writes the speed-ups of the chat model at batches of 4 and 8."""
    lines = []
    for name in BATCHES[0].rows:
        cells = [cell for batch in BATCHES for cell in batch.speed_up(batch.rows[name])]
        lines.append([NAMES[name], tau(BATCHES[0].rows[name]), *cells])
    columns = ["method", "τ", "batch 4", "quartiles", "batch 8", "quartiles"]
    return f"{table(columns, lines)}\n\n{BATCHES[0].origin('batches of 4 and 8')}"
