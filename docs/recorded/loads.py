"""Tables of requests that come and go: at servers, and in lists of prompts."""

from __future__ import annotations

from page_tables import Row, cores, record, spread, table, version

SERVERS = "servers-smollm2-cpu-amd-epyc-2-cores"
REFILLED = "refilled-rows"


def milliseconds(row: Row, name: str, percentile: str = "p50") -> str:
    """Returns a time in ms."""
    return f"{1e3 * row[name][percentile]:,.0f}"


def servers(*, long_prompts: bool = False) -> str:
    """Returns every load and server; those with long prompts are a table of their own."""
    measured = record(SERVERS)
    rows = []
    for row in measured["rows"]:
        if ("prompts of" in row["load"]) != long_prompts:
            continue
        length = row["mean_acceptance_length"]
        is_base = row["server"] == row["base"]
        rows.append(
            [
                row["load"],
                row["server"],
                f"{row['tokens_per_second']['median']:.0f}",
                "1" if is_base else spread(row["ratio"]),
                f"{length:.2f}" if length else "",
                milliseconds(row, "first_token"),
                milliseconds(row, "gap"),
                milliseconds(row, "gap", "p99"),
                milliseconds(row, "per_token"),
                "" if is_base else f"{row['same_texts']} of {row['requests']}",
            ]
        )

    times = ["first token p50", "gap p50", "gap p99", "per token p50"]
    columns = ["load", "server", "tokens/s", "ratio", "τ", *times, "same"]
    about = measured["about"]
    run = (
        f"{version(about)}, {cores(about)}, jax {about['versions']['jax']}, greedy,"
        f" {measured['new_tokens']} tokens a request, times in ms of all requests of"
        f" {measured['repeats']} repeats."
    )
    if measured["to_measure"]:
        run = f"{run} Not measured yet: {', '.join(measured['to_measure'])}."
    return f"{table(columns, rows)}\n\n{run}" if rows else "*Not measured yet.*"


def refilled() -> str:
    """Returns what refilled rows save."""
    rows = []
    for row in record(REFILLED)["rows"]:
        saved = 1 - row["rounds_refilled"] / row["rounds"]
        rounds = [f"{row['rounds']:,}", f"{row['rounds_refilled']:,}"]
        rows.append([row["method"], row["limits"], *rounds, f"{saved:.0%}", spread(row["speedup"])])

    about = record(REFILLED)["about"]
    repeats = record(REFILLED)["repeats"]
    columns = ["method", "new tokens", "rounds in batches", "rounds refilled", "saved", "speed-up"]
    run = f"{version(about)}, {cores(about)}, median and quartiles of {repeats} repeats."
    return f"{table(columns, rows)}\n\n{run}"
