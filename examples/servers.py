"""Requests of several users at `eagle3 serve` and at vLLM's server, all in turns.

    make vllm
    python examples/servers.py --vllm-python PYTHON --output servers.json

`vllm bench serve` sends recorded prompts of SmolLM2 (``validation/recorded``), greedily and without
stop tokens. The servers of `eagle3 serve` have as many rows as users, in float32 and with weights
in eight bits; vLLM has 16 rows, a thread for the model and a process that schedules, and no prefix
cache. All servers of a load run at the same time and answer one after the other. The record is
written after every load, and the same command continues it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from certify_engines import Engine, launched

import eagle3_jax as e3
from eagle3_jax.conversion import convert
from eagle3_jax.files.sources import bundled, locate
from eagle3_jax.measure.environment import environment
from eagle3_jax.measure.records import spread_of, write_record
from eagle3_jax.prompts.benchmark import resize_prompt
from validation.engines.vllm.client import bench_serve
from validation.engines.vllm.process import environment_of
from validation.recorded import Recording

CAPACITY = 512
VLLM_ROWS = 16


class Load(NamedTuple):
    """What the clients do."""

    name: str
    users: int  #: Who each wait for an answer before the next request.
    requests: int
    per_second: float | None = None  #: Requests come at random instead, as many a second.
    prompt_tokens: int | None = None  #: Length of all prompts, if not their own.


LOADS = (
    *(Load(f"{users} at once", users, max(16, 2 * users)) for users in (1, 2, 4, 16)),
    Load("1 request/s", 8, 16, per_second=1.0),
    Load("4 at once, prompts of 256", 4, 16, prompt_tokens=256),
)


class Server(NamedTuple):
    """A server, and the plain server that it is compared with."""

    name: str
    base: str
    options: Sequence[str]  #: Of `eagle3 serve`.


INT8 = ("--weights", "int8")
SERVERS = (
    Server("eagle3 serve, int8, plain", "eagle3 serve, int8, plain", (*INT8, "--drafter", "none")),
    Server(
        "eagle3 serve, int8, chain of 3",
        "eagle3 serve, int8, plain",
        (*INT8, "--num-speculative-tokens", "3"),
    ),
    Server("eagle3 serve, int8, as long as pays", "eagle3 serve, int8, plain", INT8),
    Server("eagle3 serve, float32, plain", "vLLM, plain", ("--drafter", "none")),
    Server(
        "eagle3 serve, float32, chain of 3",
        "vLLM, plain",
        ("--drafter", "smollm2", "--num-speculative-tokens", "3"),
    ),
)
# With prompts in parts, where the prompts are long.
IN_PARTS = tuple(
    Server(f"{name}, parts of 64", base, (*options, "--chunk", "64"))
    for name, base, options in SERVERS[:2]
)


def vllm_engines(python: Path, target: Path) -> dict[str, Engine]:
    """Returns vLLM, compiled, without a draft and with the same head."""
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target),
        "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", str(CAPACITY),
        "--max-num-seqs", str(VLLM_ROWS), "--no-enable-prefix-caching",
    ]  # fmt: skip
    draft = {"method": "eagle3", "model": str(bundled("smollm2")), "num_speculative_tokens": 3}
    drafting = [*command, "--speculative-config", json.dumps(draft)]
    variables = environment_of(threads=1)
    return {
        "vLLM, plain": Engine(command, environment=variables),
        "vLLM, EAGLE-3, chain of 3": Engine(drafting, environment=variables),
    }


def ours(server: Server, users: int) -> Engine:
    """Returns `eagle3 serve` with a row for each user."""
    return Engine(
        [
            sys.executable, "-m", "eagle3_jax", "serve", "--target", "smollm2", "--sampling",
            "greedy", "--slots", str(users), "--capacity", str(CAPACITY), *server.options,
        ]
    )  # fmt: skip


def main() -> None:
    """Measures the loads that the record lacks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", type=Path, required=True, help="interpreter with vLLM")
    parser.add_argument("--repeats", type=int, default=3, help="of every load, in turns")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each request")
    parser.add_argument("--requests", type=int, help="of every load, for a trial")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    options = parser.parse_args()

    record: dict[str, Any] = {
        "about": environment(target="smollm2", drafter="smollm2"),
        "new_tokens": options.new_tokens,
        "repeats": options.repeats,
        "rows": [],
    }
    if options.output.exists():
        record = json.loads(options.output.read_text(encoding="utf-8"))
    measured = {row["load"] for row in record["rows"]}

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert(locate("smollm2", "target"), folder / "target")
        for load in LOADS:
            if load.name not in measured:
                rows = measure(load, folder, options)
                record["rows"] += rows
                measured.add(load.name)
                record["to_measure"] = [load.name for load in LOADS if load.name not in measured]
                write_record(options.output, record)
                for row in rows:
                    speed = row["tokens_per_second"]["median"]
                    ratio = row["ratio"]["median"]
                    print(
                        f"{load.name}, {row['server']}: {speed:.1f} tokens/s, {ratio:.2f}",
                        flush=True,
                    )


def measure(load: Load, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each server under one load."""
    servers = SERVERS if load.prompt_tokens is None else (*SERVERS[:2], *IN_PARTS)
    engines = {server.name: ours(server, load.users) for server in servers}
    if load.prompt_tokens is None:
        engines |= vllm_engines(options.vllm_python, folder / "target")
    bases = {server.name: server.base for server in servers}

    count = options.requests or load.requests
    prompts = folder / "prompts.json"
    pairs = [[{"value": text}, {"value": ""}] for text in texts(load, count)]
    prompts.write_text(json.dumps([{"conversations": pair} for pair in pairs]))
    command_options = [
        "--model", str(folder / "target"), "--dataset-name", "sharegpt",
        "--dataset-path", str(prompts), "--disable-shuffle", "--no-oversample",
        "--sharegpt-output-len", str(options.new_tokens), "--num-prompts", str(count),
        "--num-warmups", str(load.users),
    ]  # fmt: skip
    command_options += (
        ["--request-rate", str(load.per_second)]
        if load.per_second
        else ["--max-concurrency", str(load.users)]
    )

    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    with contextlib.ExitStack() as running:
        urls = {
            name: running.enter_context(launched(engine, folder / f"log {number}"))
            for number, (name, engine) in enumerate(engines.items())
        }
        for _ in range(options.repeats):
            for name, url in urls.items():
                served = ["--served-model-name", "smollm2"] if name in bases else []
                runs[name].append(bench_serve(options.vllm_python, url, *command_options, *served))
                assert runs[name][-1]["completed"] == count, runs[name][-1]["errors"]

    return [row_of(load, name, runs, bases.get(name, "vLLM, plain")) for name in runs]


def texts(load: Load, count: int) -> list[str]:
    """Returns recorded prompts of all benchmarks as texts, at the length of a load."""
    tokenizer = e3.load_target("smollm2").tokenizer
    assert tokenizer is not None
    prompts = Recording.of("SmolLM2").prompts
    chosen = [prompts[index * len(prompts) // count] for index in range(count)]
    if load.prompt_tokens is not None:
        chosen = [resize_prompt(prompt, load.prompt_tokens) for prompt in chosen]
    return [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in chosen]


def row_of(
    load: Load, name: str, runs: dict[str, list[dict[str, Any]]], base: str
) -> dict[str, Any]:
    """Returns the figures of a server; times are of all requests of all repeats."""
    speeds = [run["output_throughput"] for run in runs[name]]
    of_base = [run["output_throughput"] for run in runs[base]]
    first = [time for run in runs[name] for time in run["ttfts"]]
    gaps = [gap for run in runs[name] for of_request in run["itls"] for gap in of_request]
    per_token = [
        sum(of_request) / (length - 1)
        for run in runs[name]
        for of_request, length in zip(run["itls"], run["output_lens"], strict=True)
    ]
    last = runs[name][-1]
    same = zip(last["generated_texts"], runs[base][-1]["generated_texts"], strict=True)
    return {
        "load": load.name,
        "server": name,
        "base": base,
        "tokens_per_second": spread_of(speeds),
        "ratio": spread_of(ours / plain for ours, plain in zip(speeds, of_base, strict=True)),
        "mean_acceptance_length": last.get("spec_decode_acceptance_length"),
        "first_token": percentiles(first),
        "gap": percentiles(gaps),
        "per_token": percentiles(per_token),
        "same_texts": sum(text == plain for text, plain in same),
        "requests": len(last["generated_texts"]),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the median and the 99th percentile, in seconds."""
    return {"p50": float(np.quantile(seconds, 0.5)), "p99": float(np.quantile(seconds, 0.99))}


if __name__ == "__main__":
    main()
