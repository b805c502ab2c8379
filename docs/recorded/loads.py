"""Tables of requests that come and go: in one process, at servers, and in lists of prompts."""

from __future__ import annotations

from page_tables import Row, record, table

ENGINE = "load-smollm2-cpu-amd-epyc-2-cores"
SERVERS = "servers-smollm2-cpu-amd-epyc-2-cores"
CHUNKS = "load-chunks-smollm2-cpu-amd-epyc-2-cores"
REFILLED = "refilled-rows"
TIMES = ["first token p50", "gap p50", "gap p99"]
NAMES = {"plain float32, int8": "plain", "chain K=3": "chain of 3", "schedule": "schedule"}


def seconds(interval: Row) -> str:
    """Returns a time in ms with its 95 % interval."""
    bounds = [interval["low"], interval["high"]]
    low, high = ("–" if end is None else f"{1e3 * end:,.0f}" for end in bounds)
    return f"{1e3 * interval['value']:,.0f} ({low} to {high})"


def speed(row: Row) -> str:
    """Returns tokens per second."""
    return f"{row['tokens_per_second']['median']:.0f}"


def times(row: Row) -> list[str]:
    """Returns the columns of :data:`TIMES`."""
    return [
        seconds(row["first_token"]["p50"]),
        seconds(row["gap"]["p50"]),
        seconds(row["gap"]["p99"]),
    ]


def _users(row: Row) -> int:
    """Returns the number of users at once; loads with a rate come after all of these."""
    return int(row["load"].split()[0]) if row["load"].endswith("at once") else 100


def loads() -> str:
    """Returns every load and method in one process."""
    rows = []
    for row in sorted(record(ENGINE)["rows"], key=_users):
        # Plain decoding in float32 is slower, and not shown.
        if row["name"] in NAMES:
            length = row["mean_acceptance_length"]
            ratio = f"{row['ratio']['median']:.2f}"
            tau = "" if length is None else f"{length:.2f}"
            names = [row["load"], NAMES[row["name"]]]
            rows.append(
                [*names, speed(row), ratio, tau, *times(row), seconds(row["per_token"]["p50"])]
            )
    return table(["load", "method", "tokens/s", "ratio", "τ", *TIMES, "per token p50"], rows)


def chunks() -> str:
    """Returns what prompts in parts do to the new request and to the others."""
    rows = []
    for row in record(CHUNKS)["rows"]:
        method, _, parts = row["name"].partition(", chunks of ")
        if method in NAMES:
            rows.append([NAMES[method], parts or "whole", speed(row), *times(row)])
    return table(["method", "parts of", "tokens/s", *TIMES], rows)


def servers() -> str:
    """Returns every number of users and server."""
    rows = []
    for row in record(SERVERS)["rows"]:
        texts = f"{row['same_texts']} of {row['num_requests']}"
        figures = [
            speed(row),
            f"{row['ratio']['median']:.2f}",
            *times(row),
            seconds(row["per_token"]["p50"]),
        ]
        rows.append([row["load"], row["name"], *figures, texts])
    return table(["users", "server", "tokens/s", "ratio", *TIMES, "per token p50", "same"], rows)


def refilled() -> str:
    """Returns what refilled rows save."""
    rows = []
    for row in record(REFILLED)["rows"]:
        saved = 1 - row["rounds_refilled"] / row["rounds"]
        rounds = [f"{row['rounds']:,}", f"{row['rounds_refilled']:,}"]
        speedup = row["speedup"]["median"]
        rows.append([row["method"], row["limits"], *rounds, f"{saved:.0%}", f"{speedup:.2f}"])

    columns = [
        "method",
        "new tokens",
        "rounds in batches",
        "rounds refilled",
        "saved",
        "times faster (one run)",
    ]
    return table(columns, rows)
