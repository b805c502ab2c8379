"""``vllm bench serve`` as a client of any server; the CPU build has it under another command."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCH = """
import argparse
from vllm.benchmarks import serve

parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


def run(command: Sequence[str]) -> str:
    """Returns the output of a client.

    Raises:
        RuntimeError: It failed; the message is the end of what it said.
    """
    environment = os.environ | {
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    environment.pop("PYTHONPATH", None)  # the client has packages of its own
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return done.stdout


def bench_serve(python: str | Path, url: str, *options: str) -> dict[str, Any]:
    """Sends greedy requests without stop tokens; returns what the benchmark writes.

    Args:
        python: Interpreter of an environment with vLLM.
        url: Address of the server.
        options: Of ``vllm bench serve``: the model, the prompts, how many at once.
    """
    with tempfile.TemporaryDirectory() as folder:
        run(
            [
                str(python), "-c", BENCH, "--backend", "openai", "--base-url", url,
                "--temperature", "0", "--ignore-eos", "--disable-tqdm", "--save-result",
                "--save-detailed", "--result-dir", folder, "--result-filename", "bench.json",
                *options,
            ]
        )  # fmt: skip
        return json.loads(Path(folder, "bench.json").read_text(encoding="utf-8"))
