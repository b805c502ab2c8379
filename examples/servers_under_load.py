"""Servers with OpenAI's completions under the same load, in turns: speed, first token, gaps, and whether texts agree.

Start the servers first, then name them; the first one is what the others are compared with::

    eagle3 serve --target smollm2 --drafter none --port 8001 --slots 16 &
    eagle3 serve --target smollm2 --drafter smollm2 --port 8002 --slots 16 --num-speculative-tokens 3 &
    python examples/servers_under_load.py --target smollm2 --prompts questions.jsonl \
        --server plain=http://127.0.0.1:8001 --server 'chain K=3=http://127.0.0.1:8002' --output record.json

Every request is greedy and ignores stop tokens, so that all servers write the same number of
tokens.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

import eagle3_jax as e3
from eagle3_jax.bench.load import Load, Run, Timeline, load_row
from eagle3_jax.measure.environment import environment
from eagle3_jax.measure.records import write_record
from eagle3_jax.prompts.benchmark import read_prompts

UNKNOWN = e3.SpeculationStats.merge([e3.SpeculationStats.zeros(1, 1)])  # a client sees no drafts


class Server:
    """One server, as a client sees it."""

    def __init__(self, name: str, url: str):
        self.name = name
        self._client = httpx.Client(base_url=url, timeout=600, trust_env=False)
        self._model = self._client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int, concurrency: int) -> Run:
        """Sends all prompts. Each of ``concurrency`` users waits for an answer before the next request."""
        running: list[int] = []
        count = 0
        lock = threading.Lock()
        start = time.perf_counter()

        def send(prompt: list[int]) -> Timeline:
            nonlocal count
            with lock:
                count += 1
                running.append(count)
            timeline = Timeline(time.perf_counter() - start)
            for ids in self._stream(prompt, max_new_tokens):
                timeline.deliveries.append((time.perf_counter() - start, len(ids)))
                timeline.output += ids
            with lock:
                count -= 1
            return timeline

        with concurrent.futures.ThreadPoolExecutor(concurrency) as users:
            timelines = list(users.map(send, prompts))
        seconds = max(timeline.deliveries[-1][0] for timeline in timelines)
        return Run(timelines, seconds, sum(running) / len(running), UNKNOWN)

    def _stream(self, prompt: list[int], max_new_tokens: int) -> Iterator[list[int]]:
        """Yields the tokens of each chunk of an answer."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "stream": True,
        }
        body |= {"ignore_eos": True, "return_token_ids": True}
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line.removeprefix("data: "))["choices"]
                if choices and choices[0].get("token_ids"):
                    yield choices[0]["token_ids"]


def main() -> None:
    """Measures all servers at every number of users and prints a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--target", help="the target, whose template encodes the prompts")
    parser.add_argument(
        "--prompts", type=Path, action="append", required=True, help="JSONL files of prompts"
    )
    parser.add_argument("--requests", type=int, default=24, help="requests of a run")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--concurrency", default="1,2,4,8,16", help="numbers of users")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--note",
        action="append",
        default=[],
        help="what the record says about the servers' settings",
    )
    parser.add_argument("--output", type=Path, help="JSON file for the record")
    options = parser.parse_args()
    servers = [Server(*setting.rsplit("=", 1)) for setting in options.server]
    target = e3.load_target(options.target)
    prompts: list[list[int]] = []
    for file in options.prompts:
        read = read_prompts(file, target, max_new_tokens=options.max_new_tokens)
        prompts += [
            prompt.tokens for prompt in read[: -(-options.requests // len(options.prompts))]
        ]
    prompts = prompts[: options.requests]
    for server in servers:
        server.run(prompts[:4], 8, 2)  # whatever a server does at its first requests
    rows: list[dict[str, Any]] = []
    if (
        options.output and options.output.exists()
    ):  # of other numbers of users, for which servers had other settings
        rows = json.loads(options.output.read_text())["rows"]
    for users in map(int, options.concurrency.split(",")):
        runs: dict[str, list[Run]] = {server.name: [] for server in servers}
        for _ in range(options.repeats):
            for server in servers:
                runs[server.name].append(server.run(prompts, options.max_new_tokens, users))
        first_runs = runs[servers[0].name]
        for name, runs_of_server in runs.items():
            row = load_row(name, Load(concurrency=users), runs_of_server, first_runs)
            rows.append(dataclasses.asdict(row))
            print(
                f"{row.load}, {name}: {row.tokens_per_second.median:.0f} tokens/s,"
                f" {row.ratio.median:.2f} x; first token {row.first_token.p50.value:.2f} s; gap"
                f" {row.gap.p50.value:.3f} s, p99 {row.gap.p99.value:.3f} s; {row.same_texts} of"
                f" {row.num_requests} texts",
                flush=True,
            )
        if options.output:  # after every number of users, so that nothing is lost
            record = {
                "servers": options.note,
                "max_new_tokens": options.max_new_tokens,
                "repeats": options.repeats,
            }
            record |= {"about": environment(target=options.target), "rows": rows}
            write_record(options.output, record)


if __name__ == "__main__":
    main()
