"""Records the runs of the chat model that the site replays.

    python docs/recorded/page_runs.py docs/recorded/page_runs.json

Minutes on a CPU without other work; the model is downloaded once (93 MB).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx

import eagle3_jax as e3
from eagle3_jax.devices.compilation import keep_compiled_programs
from eagle3_jax.measure.environment import environment
from eagle3_jax.server.local import serving

REPEATS = 3  # the one in which both lanes together take the least time is kept


def ask(question: str, **fields: Any) -> dict[str, Any]:
    """Returns a request of one chat message."""
    return {"messages": [{"role": "user", "content": question}], "seed": 1, **fields}


RUNS = {
    "Greedy, chain of 3": ask(
        "Write a Python function that returns the n-th Fibonacci number.",
        max_tokens=64,
        temperature=0,
        draft="chain of 3",
    ),
    "Sampled at temperature 0.7, chain of 3": ask(
        "Write a short greeting to a new colleague.",
        max_tokens=48,
        temperature=0.7,
        draft="chain of 3",
        draft_sampling="probabilistic",
    ),
    "Greedy, tree of 16": ask(
        "List three facts about the Moon.", max_tokens=48, temperature=0, draft="tree of 16"
    ),
}


def main() -> None:
    """Starts a server, and writes the runs."""
    keep_compiled_programs(None)
    target = e3.load_target("smollm2")
    decoder = e3.SpeculativeDecoder(
        target, e3.load_drafter("smollm2", target=target), num_speculative_tokens=3
    )
    with serving(decoder, model="smollm2", slots=1, capacity=128) as address:
        runs = [{"title": title, "events": _record(address, body)} for title, body in RUNS.items()]
    saved = {"about": environment(target="smollm2", drafter="smollm2"), "runs": runs}
    text = json.dumps(saved, ensure_ascii=False, separators=(",", ":"))
    Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


def _record(address: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the events of the fastest repeat, with the compilation of the first."""
    repeats = []
    for _ in range(REPEATS):
        response = httpx.post(f"{address}/watch", json=body, timeout=None)
        parts = response.text.split("\n\n")
        repeats.append([json.loads(part.removeprefix("data: ")) for part in parts if part])
    compiled = {event["lane"]: event for event in repeats[0] if event["event"] == "compiled"}
    fastest = min(repeats, key=_seconds)
    return [compiled[event["lane"]] if event["event"] == "compiled" else event for event in fastest]


def _seconds(events: list[dict[str, Any]]) -> float:
    """Returns the time of both lanes."""
    return sum(event["seconds"] for event in events if event["event"] == "end")


if __name__ == "__main__":
    main()
