"""Tables of one H100, from one record in validation/results: rounds of Llama-3.1-8B's shape, and the chat model."""

from __future__ import annotations

from page_tables import Row, record, spread, table
from speeds import tau

RECORD = record("nvidia-h100")
FIGURES = RECORD["rounds"]["figures"]
RUN = (
    f"Version {RECORD['version']}, commit `{RECORD['commit'][:10]}`, {RECORD['device']}, jax {RECORD['jax']}, "
    "[`nvidia-h100.json`](../validation/results/nvidia-h100.json)."
)
DRAFTS = {
    "plain": "plain step",
    "verify 6": "verification of 6 tokens",
    "draft step": "draft step of the head",
    "chain 3": "chain of 3",
    "chain": "chain of 5",
    "tree of 6": "tree of 6 nodes",
    "tree of 60": "tree of 60 nodes",
}


def rounds() -> str:
    """Writes milliseconds of the parts of a round, in plain steps, and the speed at simulated acceptance."""
    lines = []
    for name, label in DRAFTS.items():
        figure = FIGURES[name]
        milliseconds = 1e3 * figure["seconds_per_round"]["median"]
        plain_steps = figure["round_in_bases"]["median"]
        is_draft = name.startswith(("chain", "tree"))
        speed = f"{figure['speed_in_bases']['median']:.2f}" if is_draft else ""
        lines.append([label, f"{milliseconds:.2f}", f"{plain_steps:.3f}", speed])
    return f"{table(['what', 'ms', 'plain steps', 'speed-up, acceptance simulated'], lines)}\n\n{RUN}"


def rows() -> list[tuple[Row, Row]]:
    """Returns every row of the benchmark of the chat model, after its report."""
    reports = [report for bench in RECORD["bench"] for report in bench["reports"]]
    return [(report, row) for report in reports for row in report["rows"]]


def chat_model() -> str:
    """Writes the speed of SmolLM2 with its head."""
    lines = []
    for report, row in rows():
        is_plain = row["name"] == report["baseline"]
        speed = f"{row['decode_tokens_per_second']['median']:,.0f}"
        texts = "" if is_plain else f"{row['same_texts']} of {report['num_prompts']}"
        ratio = "" if row["name"].startswith("plain") else spread(row["ratio"])
        lines.append([f"{report['batch_size']}", row["name"], tau(row), speed, ratio, texts])
    return f"{table(['batch', 'draft', 'τ', 'tokens/s', 'speed-up', 'same texts'], lines)}\n\n{RUN}"
