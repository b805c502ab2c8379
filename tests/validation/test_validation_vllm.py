"""The interface to vLLM, without vLLM: servers and processes that answer like it, or like something else."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3_jax.certify.client import parse_counters
from eagle3_jax.measure.memory import is_out_of_memory
from validation.engines.memory import share_memory
from validation.engines.vllm.bridge import (
    Completion,
    EngineOptions,
    Generated,
    VLLMError,
    VLLMUnavailable,
    eagle3,
)
from validation.engines.vllm.process import Process
from validation.engines.vllm.server import Server, Servers
from validation.parity import Played, first_difference, stats_of

METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 44.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 16.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.3e+01
"""
COUNTERS = {
    "num_drafts": 20,
    "num_draft_tokens": 60,
    "num_accepted_tokens": 44,
    "num_accepted_tokens_per_pos": [16, 15, 13],
}
MODELS = {"data": [{"id": "m", "root": "/models/pair/target", "max_model_len": 512}]}
PATHS = {"/version": {"version": "0.32.0"}, "/v1/models": MODELS, "/metrics": METRICS}


class Fake(http.server.BaseHTTPRequestHandler):
    """Answers from a table of paths; other paths are not found."""

    answers: dict[str, Any]

    def do_GET(self) -> None:
        answer = self.answers.get(self.path)
        body = answer if isinstance(answer, str) else json.dumps(answer)
        self.send_response(200 if answer is not None else 404)
        self.end_headers()
        self.wfile.write(body.encode())

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Any]:
    """Starts servers with the given answers, and returns their addresses."""
    servers = []

    def start(answers: dict[str, Any]) -> str:
        handler = type("Handler", (Fake,), {"answers": answers})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_server_is_the_engine_that_it_serves(serve: Any) -> None:
    assert parse_counters(METRICS) == COUNTERS
    servers = Servers([serve(PATHS)])
    assert servers.versions["vllm"] == "0.32.0"
    assert servers.engine(EngineOptions(model="/elsewhere/target", speculative=eagle3("head", 3)))
    with pytest.raises(VLLMError, match=r"serves target, not /elsewhere/other"):
        servers.engine(EngineOptions(model="/elsewhere/other", speculative=eagle3("head", 3)))
    with pytest.raises(VLLMUnavailable, match="drafts 3 tokens, not 4"):
        servers.engine(EngineOptions(model="m", speculative=eagle3("head", 4)))
    with pytest.raises(VLLMUnavailable, match="--vllm-plain-url"):
        servers.engine(EngineOptions(model="m"))
    plain = Servers([serve(PATHS | {"/metrics": "vllm:num_requests_running 0.0\n"})])
    assert plain.engine(EngineOptions(model="m"))
    with pytest.raises(VLLMUnavailable, match="give one to --vllm-url"):
        plain.engine(EngineOptions(model="m", speculative=eagle3("head", 3)))


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"/v1/models": "<html>hello</html>"}, "does not answer in JSON"),
        ({"/v1/models": MODELS}, "is not a vLLM server"),
        ({}, "/v1/models answered 404"),
        ("http://127.0.0.1:9", "no server answers at http://127.0.0.1:9"),
        ("localhost:8000", "is not the address"),
    ],
)
def test_a_wrong_address_is_refused_in_one_line(
    serve: Any, answers: dict[str, Any] | str, message: str
) -> None:
    with pytest.raises(VLLMError, match=message) as caught:
        Server(answers if isinstance(answers, str) else serve(answers))
    assert "\n" not in str(caught.value)


# A process runs this in place of validation/engines/vllm/worker.py.
WORKER = """
import json, os, sys
log = open("LOG", "a", buffering=1)
log.write("started, runner " + os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "default") + "\\n")
loaded = 0
for line in sys.stdin:
    call = json.loads(line)
    arguments = call["arguments"]
    answer = {"result": {"vllm": "0.32.0", "device": "DEVICE"}}
    if call["call"] == "load":
        loaded += 1
        compiled = "" if arguments["enforce_eager"] else ", compiled"
        log.write(f"load, share {arguments['gpu_memory_utilization']}{compiled}\\n")
        if loaded > 1 and arguments["model"] == "big":
            answer = {"error": "ValueError: Free memory on device cuda:0 on startup is less"}
        if arguments["model"] == "broken":
            answer = {"error": "ValueError: unknown architecture"}
    if call["call"] == "generate":
        if arguments["prompts"] == [[]]:
            print("out of memory", file=sys.stderr, flush=True)
            sys.exit(3)
        print(json.dumps({"propose": {"sequences": arguments["prompts"]}}), flush=True)
        drafts = json.loads(sys.stdin.readline())["drafts"]
        answer["result"] = {"completions": [{"tokens": draft[: arguments["max_new_tokens"]]} for draft in drafts],
            "seconds": 1.0, "before": {"num_drafts": 1, "num_accepted_tokens_per_pos": [4]},
            "after": {"num_drafts": 3, "num_accepted_tokens_per_pos": [6, 1], "num_draft_tokens": 3}}
    print(json.dumps(answer), flush=True)
"""


def start(directory: Path, device: str, **options: Any) -> Process:
    """Starts a process whose interpreter runs :data:`WORKER`."""
    directory.mkdir()
    script = WORKER.replace("LOG", str(directory / "log")).replace("DEVICE", device)
    (directory / "fake.py").write_text(script)
    (directory / "python").write_text(f"#!/bin/sh\nexec {sys.executable} {directory / 'fake.py'}\n")
    (directory / "python").chmod(0o755)
    return Process(directory / "python", **options)


def test_a_process_generates_requests_drafts_and_leaves_a_reason_when_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules on our PYTHONPATH belong to another interpreter, so the process does not find them."""
    (tmp_path / "json.py").write_text("raise ImportError('a module of another interpreter')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = EngineOptions(model="m", speculative={"num_speculative_tokens": 2})
    process = start(tmp_path / "worker", "cpu")
    engine = process.engine(
        options, propose=lambda sequences: [[s[-1] + 1, s[-1] + 2] for s in sequences]
    )
    generated = engine.generate([[7], [4, 5]], max_new_tokens=1)
    assert generated.outputs == [[8], [6]]
    assert generated.counters == {
        "num_drafts": 2,
        "num_accepted_tokens_per_pos": [2, 1],
        "num_draft_tokens": 3,
    }
    for _ in range(2):  # and every level after it
        with pytest.raises(
            VLLMError, match="ended with exit code 3; its last words: out of memory"
        ):
            engine.generate([[]], max_new_tokens=1)


def test_a_process_on_a_gpu_starts_again_where_it_must(tmp_path: Path) -> None:
    """After a rest, if a dropped engine has kept memory, and for vLLM's first runner, whose internals can be read."""
    process = start(tmp_path / "worker", "NVIDIA H200", memory_share=0.3)
    log = tmp_path / "worker" / "log"

    def new_lines() -> list[str]:
        lines = log.read_text().splitlines()
        log.write_text("")
        return lines

    process.engine(EngineOptions(model="m", gpu_memory_utilization=0.5))
    assert new_lines() == ["started, runner default", "load, share 0.5"]
    process.rest()
    assert process._process.poll() is not None and new_lines() == []
    process.engine(EngineOptions(model="m", eager=False))
    assert new_lines() == ["started, runner default", "load, share 0.3, compiled"]
    process.engine(EngineOptions(model="big"))
    assert new_lines().count("started, runner default") == 1
    with pytest.raises(VLLMError, match="unknown architecture"):
        process.engine(EngineOptions(model="broken"))
    assert new_lines().count("started, runner default") == 0, "this is no error of memory"
    process.engine(EngineOptions(model="m", first_runner=True))
    process.engine(EngineOptions(model="m"), propose=lambda sequences: sequences)
    assert new_lines() == ["started, runner 0", "load, share 0.3", "load, share 0.3"]
    process.close()


def test_an_environment_without_vllm_is_one_line(tmp_path: Path) -> None:
    """No interpreter, and the real worker with our interpreter, which has no vLLM."""
    with pytest.raises(VLLMError, match="could not be started"):
        Process(tmp_path / "nothing")
    with pytest.raises(VLLMError, match="has no vLLM; build an environment with `make vllm`"):
        Process(sys.executable)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (VLLMError("ValueError: No available memory for the cache blocks."), True),
        (RuntimeError("size mismatch"), False),
        (AssertionError("the text says: out of memory"), False),
    ],
)
def test_errors_of_memory_are_distinguished_from_others(error: Exception, expected: bool) -> None:
    wrapped = ValueError("while loading")
    wrapped.__cause__ = error
    assert is_out_of_memory(error) is is_out_of_memory(wrapped) is expected


@pytest.mark.parametrize("has_old_name", [False, True])
def test_jax_takes_its_share_of_a_gpu(has_old_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX refuses its old variable and its new one together."""
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # so that they are put back
        monkeypatch.delenv(name)
    if has_old_name:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")
    share_memory()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert os.environ.get("XLA_CLIENT_MEM_FRACTION") == (None if has_old_name else "0.4")


def test_the_first_difference_is_named_to_the_token_and_rounds_count_as_in_vllm() -> None:
    for tokens, accepted, message in (
        ([5, 6, 7], [1, 0], None),
        ([5, 6, 4], [1, 0], "new token 2: we wrote [7], vLLM [4]"),
        ([5, 6, 7], [1, 1], "round 1: we accepted [0] of [[8, 8]], vLLM [1]"),
        ([5, 6], [1, 0], "new token 2: we wrote [7], vLLM []"),
    ):
        theirs = Generated(
            completions=[Completion(tokens=tokens, accepted=accepted)], seconds=1.0, counters={}
        )
        difference = first_difference([Played([5, 6, 7], [1, 0], [[6, 9], [8, 8]])], theirs)
        assert difference is None if message is None else message in str(difference)
    drafts = [[5, 6, 7], [8, 9, 10]]
    stats = stats_of([Played([], [2, 0], drafts), Played([], [1], drafts[:1])], 3).to_json()
    assert (
        stats["num_drafts"] == 3
        and stats["num_draft_tokens"] == 9
        and stats["num_accepted_tokens"] == 3
    )
    assert (
        stats["num_accepted_tokens_per_pos"] == [2, 1, 0] and stats["mean_acceptance_length"] == 2.0
    )
