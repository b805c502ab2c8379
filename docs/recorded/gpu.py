"""Tables of one H100 and one H200, each from one record in validation/results."""

from __future__ import annotations

from page_tables import Row, record, spread, table
from speeds import tau

from eagle3_jax.measure.records import spread_of


def origin(name: str, run: Row) -> str:
    """Names the run of a record."""
    return (
        f"Version {run['version']}, commit `{run['commit'][:10]}`, {run['device']}, jax"
        f" {run['jax']}, [`{name}.json`](../validation/results/{name}.json)."
    )


RECORD = record("nvidia-h100")
FIGURES = RECORD["rounds"]["figures"]
RUN = origin("nvidia-h100", RECORD)
H200 = record("nvidia-h200")
RUN_ON_H200 = origin("nvidia-h200", H200)
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
    """Writes the times of the parts of a round, and the speed at simulated acceptance."""
    lines = []
    for name, label in DRAFTS.items():
        figure = FIGURES[name]
        plain_steps = figure["round_in_bases"]["median"]
        is_draft = name.startswith(("chain", "tree"))
        speed = f"{figure['speed_in_bases']['median']:.2f}" if is_draft else ""
        lines.append([label, milliseconds(figure), f"{plain_steps:.3f}", speed])
    return (
        f"{table(['what', 'ms', 'plain steps', 'speed-up, acceptance simulated'], lines)}\n\n{RUN}"
    )


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


def in_turns(figure: Row, base: Row) -> str:
    """Writes the ratio of the times of two cells that took turns."""
    pairs = zip(
        figure["seconds_per_round"]["values"], base["seconds_per_round"]["values"], strict=True
    )
    ratios = [seconds / base_seconds for seconds, base_seconds in pairs]
    # The first value of each cell was measured before they took turns.
    return spread(spread_of(ratios[1:])) if ratios[1:] else f"{ratios[0]:.2f}"


def milliseconds(figure: Row) -> str:
    """Writes the median time of a round."""
    return f"{1e3 * figure['seconds_per_round']['median']:.2f}"


def price() -> str:
    """Writes the times of rounds with invariant decoding and without."""
    figures = H200["h200"]["invariant"]
    lines = []
    for name, default in figures.items():
        batch, _, draft = name.partition(", ")
        if invariant := figures.get(f"{batch}, invariant {draft}"):
            times = [milliseconds(default), milliseconds(invariant), in_turns(invariant, default)]
            lines.append([batch.removeprefix("batch "), DRAFTS[draft], *times])
    columns = ["batch", "what", "default, ms", "invariant, ms", "ratio"]
    return f"{table(columns, lines)}\n\n{RUN_ON_H200}"


def weights() -> str:
    """Writes the times of plain steps with weights of each kind."""
    figures = H200["h200"]["weights"]
    lines = []
    for kind, read in figures["step_bytes"].items():
        step = figures[f"{kind}, plain"]
        share = read / step["seconds_per_round"]["median"] / figures["copy_bytes_per_second"]
        speed = in_turns(figures["bfloat16, plain"], step)
        lines.append([kind, f"{read / 1e9:.1f}", milliseconds(step), speed, f"{share:.0%}"])
    columns = ["weights", "GB read", "plain step, ms", "speed", "share of a copy's speed"]
    return f"{table(columns, lines)}\n\n{RUN_ON_H200}"
