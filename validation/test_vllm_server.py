"""L8 through HTTP: what a server tells of itself is enough for the same comparison."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from validation.device import environment_of_vllm
from validation.engines.vllm.bridge import VLLMError, eagle3
from validation.engines.vllm.process import environment_of
from validation.engines.vllm.server import Servers
from validation.fixtures import vllm_interpreter
from validation.runs import Check
from validation.subject import Setting, Subject
from validation.test_vllm_acceptance import BATCH, Comparison

pytestmark = pytest.mark.level("L8")

K = 3
START_SECONDS = 240


@pytest.fixture
def address(pytestconfig: pytest.Config, subject: Subject, setting: Setting, tmp_path: Path) -> Iterator[str]:
    """The address of a real server of the pair, started as users start it."""
    if pytestconfig.getoption("--vllm-url"):
        pytest.skip("a server was named; all of L8 goes through it")
    python = vllm_interpreter(pytestconfig)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options: dict[str, Any] = {
        "model": subject.target_directory,
        "dtype": "float32",
        "max-model-len": 512,
        "max-num-seqs": BATCH,
        "port": port,
        "host": "127.0.0.1",
        "logprobs-mode": "raw_logits",
        "per-request-spec-decode-metrics": "detailed",
        "speculative-config": json.dumps(eagle3(subject.drafter_directory, K)),
    }
    environment = environment_of(threads=1)
    if setting.on_gpu:
        options["gpu-memory-utilization"] = pytestconfig.getoption("--vllm-memory")
        environment |= environment_of_vllm()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--no-enable-prefix-caching"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    log = tmp_path / "log.txt"
    with log.open("w") as written:
        process = subprocess.Popen(
            command, env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, process, log)
        yield url
    finally:  # of the processes that it started, too, which would outlive it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            Servers([url])
            return
        except VLLMError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                last_line = [line for line in log.read_text().splitlines() if line.strip()][-1:]
                raise VLLMError(f"the vLLM server did not start: {last_line or error}") from None
        time.sleep(1)


@pytest.mark.not_quick  # a start of a server for what L8 compares with the process; tests have a server that is a fake
def test_a_server_accepts_what_we_accept(check: Check, address: str, subject: Subject) -> None:
    comparison = Comparison.of_subject(Servers([address]), subject, K, 16)
    comparison.acceptance(check)
    theirs = comparison.engine.generate(comparison.prompts[:2], max_new_tokens=8)
    assert all(completion.accepted for completion in theirs.completions), "the server tells nothing of single rounds"
    scored = comparison.engine.score(comparison.prompts[:2], [completion.tokens for completion in theirs.completions])
    assert all(rank == 1 for completion in scored for rank in completion.rank)
