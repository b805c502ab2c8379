"""What stands between us and vLLM, without vLLM: servers and processes that answer as it does, or as none should."""

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

from eagle3_jax.bench.memory import is_out_of_memory
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
from validation.engines.vllm.server import Server, Servers, parse_counters
from validation.parity import Played, first_difference, stats_of

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 44.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 16.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.3e+01
"""
COUNTED = {
    "num_drafts": 20,
    "num_draft_tokens": 60,
    "num_accepted_tokens": 44,
    "num_accepted_tokens_per_pos": [16, 15, 13],
}


class Fake(http.server.BaseHTTPRequestHandler):
    """Answers from a table of paths; anything else is not found."""

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
    """Start a server with given answers; gives its address."""
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


def vllm_like(**more: Any) -> dict[str, Any]:
    models = {"data": [{"id": "m", "root": "/models/pair/target", "max_model_len": 512}]}
    return {"/version": {"version": "0.32.0"}, "/v1/models": models, "/metrics": METRICS} | more


def test_counters_are_read_from_the_metrics_of_a_server() -> None:
    assert parse_counters(METRICS) == COUNTED
    assert parse_counters("vllm:num_requests_running 0.0\n") == {}


def test_a_server_is_the_engine_that_it_serves(serve: Any) -> None:
    servers = Servers([serve(vllm_like())])
    assert servers.versions["vllm"] == "0.32.0"
    assert servers.engine(EngineOptions(model="/elsewhere/target", speculative=eagle3("head", 3)))
    with pytest.raises(VLLMError, match=r"serves /models/pair/target, not /elsewhere/other"):
        servers.engine(EngineOptions(model="/elsewhere/other", speculative=eagle3("head", 3)))
    with pytest.raises(VLLMUnavailable, match="drafts 3 tokens, not 4"):
        servers.engine(EngineOptions(model="m", speculative=eagle3("head", 4)))
    with pytest.raises(VLLMUnavailable, match="--vllm-plain-url"):
        servers.engine(EngineOptions(model="m"))
    plain = Servers([serve(vllm_like(**{"/metrics": "vllm:num_requests_running 0.0\n"}))])
    assert plain.engine(EngineOptions(model="m"))
    with pytest.raises(VLLMUnavailable, match="give one to --vllm-url"):
        plain.engine(EngineOptions(model="m", speculative=eagle3("head", 3)))
    engine = servers.engine(EngineOptions(model="m", speculative=eagle3("head", 3)))
    with pytest.raises(VLLMError, match="answered 404 to /v1/completions"):
        engine.generate([[1, 2]], max_new_tokens=2)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"/version": "<html>hello</html>"}, "is not a vLLM server"),
        ({"/version": {"version": "0.32.0"}, "/v1/models": {"data": []}, "/metrics": ""}, "is not a vLLM server"),
        ({}, "answered 404 to /version"),
        ("http://127.0.0.1:9", "no vLLM server answers at http://127.0.0.1:9"),
        ("localhost:8000", "is not the address"),
    ],
)
def test_what_is_no_vllm_is_refused_in_one_line(serve: Any, answers: dict[str, Any] | str, said: str) -> None:
    with pytest.raises(VLLMError, match=said) as caught:
        Server(answers if isinstance(answers, str) else serve(answers))
    assert "\n" not in str(caught.value)


# A worker in the place of validation/engines/vllm/worker.py is started through an interpreter that runs another script.
def interpreter(directory: Path, script: str) -> Path:
    """An executable that ignores the worker it is given and runs ``script``."""
    path = directory / "python"
    (directory / "fake.py").write_text(script)
    path.write_text(f"#!/bin/sh\nexec {sys.executable} {directory / 'fake.py'}\n")
    path.chmod(0o755)
    return path


ANSWER = """
import json, sys
for line in sys.stdin:
    call = json.loads(line)
    result = {"vllm": "0.32.0", "device": "cpu"}
    if call["call"] == "generate":
        prompts = call["arguments"]["prompts"]
        if prompts == [[]]:
            print("out of memory", file=sys.stderr, flush=True)
            sys.exit(3)
        print(json.dumps({"propose": {"sequences": prompts}}), flush=True)
        drafts = json.loads(sys.stdin.readline())["drafts"]
        tokens = [draft[: call["arguments"]["max_new_tokens"]] for draft in drafts]
        result = {"completions": [{"tokens": t} for t in tokens], "seconds": 1.0,
                  "before": {"num_drafts": 1, "num_accepted_tokens_per_pos": [4]},
                  "after": {"num_drafts": 3, "num_accepted_tokens_per_pos": [6, 1], "num_draft_tokens": 3}}
    print(json.dumps({"id": call["id"], "result": result}), flush=True)
"""


def test_a_process_is_asked_line_by_line_and_may_ask_for_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules on our PYTHONPATH, of another interpreter, are not found there; a process that dies leaves a reason."""
    (tmp_path / "json.py").write_text("raise ImportError('a module of another interpreter')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "worker").mkdir()
    process = Process(interpreter(tmp_path / "worker", ANSWER))
    options = EngineOptions(model="m", speculative={"num_speculative_tokens": 2})
    engine = process.engine(options, propose=lambda sequences: [[s[-1] + 1, s[-1] + 2] for s in sequences])
    found = engine.generate([[7], [4, 5]], max_new_tokens=1)
    assert [one.tokens for one in found.completions] == [[8], [6]]
    assert found.counters == {"num_drafts": 2, "num_accepted_tokens_per_pos": [2, 1], "num_draft_tokens": 3}
    for _ in range(2):  # and every level after it
        with pytest.raises(VLLMError, match="ended with exit code 3; its last words: out of memory"):
            engine.generate([[]], max_new_tokens=1)


ON_A_GPU = """
import json, os, sys
log = open("LOG", "a", buffering=1)
log.write("started, runner " + os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "as it likes") + "\\n")
loaded = 0
for line in sys.stdin:
    call = json.loads(line)
    answer = {"id": call["id"], "result": {}}
    if call["call"] == "versions":
        answer["result"] = {"vllm": "0.32.0", "device": "NVIDIA H200"}
    if call["call"] == "load":
        loaded += 1
        eager = ", compiled" if not call['arguments']['enforce_eager'] else ""
        log.write(f"load, share {call['arguments']['gpu_memory_utilization']}{eager}\\n")
        if loaded > 1 and call["arguments"]["model"] == "big":
            answer = {"id": call["id"], "error": "ValueError: Free memory on device cuda:0 on startup is less"}
        if call["arguments"]["model"] == "broken":
            answer = {"id": call["id"], "error": "ValueError: unknown architecture"}
    print(json.dumps(answer), flush=True)
"""


def test_a_process_on_a_gpu_starts_again_where_it_must(tmp_path: Path) -> None:
    """After a rest, for memory that a dropped engine has kept, and for vLLM's first runner, the one with an inside."""
    log = tmp_path / "log"
    process = Process(interpreter(tmp_path, ON_A_GPU.replace("LOG", str(log))), memory_share=0.3)

    def noted() -> list[str]:
        """What it did since it was last asked."""
        lines = log.read_text().splitlines()
        log.write_text("")
        return lines

    process.engine(EngineOptions(model="m", gpu_memory_utilization=0.5))
    assert noted() == ["started, runner as it likes", "load, share 0.5"]
    process.rest()
    assert process._process.poll() is not None and noted() == []
    process.engine(EngineOptions(model="m", eager=False))
    assert noted() == ["started, runner as it likes", "load, share 0.3, compiled"]
    process.engine(EngineOptions(model="big"))
    assert noted().count("started, runner as it likes") == 1
    with pytest.raises(VLLMError, match="unknown architecture"):
        process.engine(EngineOptions(model="broken"))
    assert noted().count("started, runner as it likes") == 0, "that is no matter of memory"
    process.engine(EngineOptions(model="m", first_runner=True))
    process.engine(EngineOptions(model="m"), propose=lambda sequences: sequences)
    assert noted() == ["started, runner 0", "load, share 0.3", "load, share 0.3"]
    process.engine(EngineOptions(model="m"))
    assert noted() == ["started, runner as it likes", "load, share 0.3"]
    process.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (VLLMError("ValueError: No available memory for the cache blocks."), True),
        (MemoryError(), True),
        (RuntimeError("size mismatch"), False),
        (AssertionError("the text says: out of memory"), False),
    ],
)
def test_errors_of_memory_are_told_from_others(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    wrapped = ValueError("while loading")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is expected


@pytest.mark.parametrize("given", [False, True])
def test_jax_takes_its_share_of_a_gpu_and_engines_leave_room(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # so that they are put back
        monkeypatch.delenv(name)
    if given:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")
    share_memory()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    # JAX refuses to be told twice, by its old name and by its new one.
    assert os.environ.get("XLA_CLIENT_MEM_FRACTION") == (None if given else "0.4")


def test_an_environment_without_vllm_is_one_line(tmp_path: Path) -> None:
    """No interpreter, and the real worker under our own, which must not have vLLM."""
    with pytest.raises(VLLMError, match="could not be started"):
        Process(tmp_path / "nothing")
    with pytest.raises(VLLMError, match="has no vLLM; build an environment with `make vllm`"):
        Process(sys.executable)


@pytest.mark.parametrize(
    ("tokens", "accepted", "said"),
    [
        ([5, 6, 7], [1, 0], None),
        ([5, 6, 7], None, None),
        ([5, 6, 4], [1, 0], "new token 2: we wrote [7], vLLM [4]"),
        ([5, 6, 7], [1, 1], "round 1: we accepted [0] of [[8, 8]], vLLM [1]"),
        ([5, 6], [1, 0], "new token 2: we wrote [7], vLLM []"),
    ],
)
def test_the_first_difference_is_named_to_the_token(tokens: list[int], accepted: list[int] | None, said: Any) -> None:
    theirs = Generated(completions=[Completion(tokens=tokens, accepted=accepted)], seconds=1.0, counters={})
    told = first_difference([Played([5, 6, 7], [1, 0], [[6, 9], [8, 8]])], theirs)
    assert told is None if said is None else said in str(told)


def test_our_rounds_are_counted_as_vllm_counts() -> None:
    drafts = [[5, 6, 7], [8, 9, 10]]
    stats = stats_of([Played([], [2, 0], drafts), Played([], [1], drafts[:1])], 3)
    assert stats.to_json() == {
        "num_drafts": 3,
        "num_draft_tokens": 9,
        "num_accepted_tokens": 3,
        "num_accepted_tokens_per_pos": [2, 1, 0],
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": pytest.approx(1 / 3),
    }
