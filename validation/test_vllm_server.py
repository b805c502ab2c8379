"""L8 through HTTP: what a server tells of itself is enough for the same comparison."""

from __future__ import annotations

import contextlib
import dataclasses
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

from eagle3_jax.rivals.vllm.bridge import EngineOptions, VLLMError, VLLMUnavailable, eagle3
from eagle3_jax.rivals.vllm.process import environment_of
from eagle3_jax.rivals.vllm.server import Servers
from validation.checks import Check
from validation.device import environment_of_vllm
from validation.subject import Subject
from validation.test_vllm_acceptance import BATCH, Comparison
from validation.vllm.fixtures import vllm_interpreter

pytestmark = pytest.mark.level("L8")

K = 3
START_SECONDS = 240


@dataclasses.dataclass
class Started:
    """A server of our own.

    Attributes:
        url: Where it listens.
        process: To end it.
    """

    url: str
    process: subprocess.Popen


@pytest.fixture(scope="module")
def started(
    pytestconfig: pytest.Config, subject: Subject, setting: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    """A real server of the pair, as people start it."""
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
    if setting.gpu and not setting.rehearsal:
        options["gpu-memory-utilization"] = pytestconfig.getoption("--vllm-memory")
        environment |= environment_of_vllm()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--no-enable-prefix-caching"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with log.open("w") as written:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, process, log)
        yield Started(url, process)
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """End a server and the processes that it started, which would outlive it."""
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
                said = [line for line in log.read_text().splitlines() if line.strip()][-1:]
                raise VLLMError(f"the vLLM server did not start: {said or error}") from None
        time.sleep(1)


def test_a_server_accepts_what_we_accept(check: Check, started: Started, subject: Subject) -> None:
    servers = Servers([started.url])
    comparison = Comparison.of(
        servers,
        subject.target_directory,
        subject.drafter_directory,
        subject.pair("float32"),
        subject.prompt_tokens[:16],
        num_speculative_tokens=K,
        max_new_tokens=32,
    )
    comparison.acceptance(check)
    theirs = comparison.engine.generate(comparison.prompts[:2], max_new_tokens=8)
    assert all(one.accepted for one in theirs.completions), "the server tells nothing of single rounds"
    scored = comparison.engine.score(comparison.prompts[:2], [one.tokens for one in theirs.completions])
    assert all(rank == 1 for one in scored for rank in one.rank)


def test_a_server_is_told_apart_from_what_was_asked_for(check: Check, started: Started, subject: Subject) -> None:
    servers, model = Servers([started.url]), str(subject.target_directory)
    with pytest.raises(VLLMError, match=r"serves .*, not /some/other-model"):
        servers.engine(EngineOptions(model="/some/other-model", speculative=eagle3("head", K)))
    with pytest.raises(VLLMUnavailable, match="--vllm-plain-url"):
        servers.engine(EngineOptions(model=model))
    with pytest.raises(VLLMUnavailable, match=f"drafts {K} tokens, not 5"):
        servers.engine(EngineOptions(model=model, speculative=eagle3("head", 5)))
    check.number(refused="another model, plain decoding, another K")


def test_a_server_that_dies_is_one_line(check: Check, started: Started, subject: Subject) -> None:
    engine = Servers([started.url]).engine(
        EngineOptions(model=str(subject.target_directory), speculative=eagle3("head", K))
    )
    end(started.process)
    with pytest.raises(VLLMError, match="no vLLM server answers") as caught:
        engine.generate([[1, 2, 3]], max_new_tokens=4)
    assert "\n" not in str(caught.value)
    check.number(reason="no vLLM server answers")
