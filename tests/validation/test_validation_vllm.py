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

import numpy as np
import pytest

from eagle3_jax.engines.memory import is_out_of_memory, share_memory, share_of_engine
from eagle3_jax.engines.vllm.bridge import (
    Completion,
    EngineOptions,
    Generated,
    VLLMError,
    VLLMUnavailable,
    difference,
    eagle3,
)
from eagle3_jax.engines.vllm.process import Process
from eagle3_jax.engines.vllm.server import Server, Servers, parse_counters
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


def test_counters_of_a_call_are_a_difference() -> None:
    before = {"num_drafts": 5, "num_accepted_tokens_per_pos": [4]}
    after = {"num_drafts": 8, "num_accepted_tokens_per_pos": [6, 1], "num_draft_tokens": 3}
    assert difference(after, before) == {
        "num_drafts": 3,
        "num_accepted_tokens_per_pos": [2, 1],
        "num_draft_tokens": 3,
    }


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


def test_a_plain_server_does_not_speculate(serve: Any) -> None:
    servers = Servers([serve(vllm_like(**{"/metrics": "vllm:num_requests_running 0.0\n"}))])
    assert servers.engine(EngineOptions(model="m"))
    with pytest.raises(VLLMUnavailable, match="give one to --vllm-url"):
        servers.engine(EngineOptions(model="m", speculative=eagle3("head", 3)))


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"/version": "<html>hello</html>"}, "is not a vLLM server"),
        ({"/version": {"version": "0.32.0"}, "/v1/models": {"data": []}, "/metrics": ""}, "is not a vLLM server"),
        ({}, "answered 404 to /version"),
    ],
)
def test_what_is_no_vllm_is_refused_in_one_line(serve: Any, answers: dict[str, Any], said: str) -> None:
    with pytest.raises(VLLMError, match=said) as caught:
        Server(serve(answers))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [("http://127.0.0.1:9", "no vLLM server answers at http://127.0.0.1:9"), ("localhost:8000", "is not the address")],
)
def test_a_wrong_address_is_one_line(url: str, said: str) -> None:
    with pytest.raises(VLLMError, match=said) as caught:
        Server(url)
    assert "\n" not in str(caught.value)


def test_a_server_that_gives_nothing_for_a_prompt_says_so(serve: Any) -> None:
    engine = Servers([serve(vllm_like())]).engine(EngineOptions(model="m", speculative=eagle3("head", 3)))
    with pytest.raises(VLLMError, match="answered 404 to /v1/completions"):
        engine.generate([[1, 2]], max_new_tokens=2)


# A worker in the place of eagle3_jax/engines/vllm/worker.py is started through an interpreter that runs another script.
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
    if call["call"] == "versions":
        result = {"vllm": "0.32.0", "device": "cpu"}
    elif call["call"] == "load":
        result = {}
    elif call["call"] == "generate":
        DRAFT
        result = {"completions": [{"tokens": t} for t in tokens], "seconds": 1.0,
                  "before": {"num_drafts": 1}, "after": {"num_drafts": 3}}
    print(json.dumps({"id": call["id"], "result": result}), flush=True)
"""


def test_a_process_is_asked_line_by_line(tmp_path: Path) -> None:
    script = ANSWER.replace("DRAFT", "tokens = [p[::-1][:n] for p, n in zip(call['arguments']['prompts'], "
                            "call['arguments']['max_new_tokens'])]")  # fmt: skip
    process = Process(interpreter(tmp_path, script))
    found = process.engine(EngineOptions(model="m")).generate([[1, 2, 3], [4, 5]], max_new_tokens=[2, 1])
    assert [one.tokens for one in found.completions] == [[3, 2], [5]]
    assert found.counters == {"num_drafts": 2}
    process.close()


def test_a_process_may_ask_for_drafts_before_it_answers(tmp_path: Path) -> None:
    draft = (
        "print(json.dumps({'propose': {'sequences': call['arguments']['prompts']}}), flush=True); "
        "tokens = json.loads(sys.stdin.readline())['drafts']"
    )
    process = Process(interpreter(tmp_path, ANSWER.replace("DRAFT", draft)))
    options = EngineOptions(model="m", speculative={"num_speculative_tokens": 2})
    engine = process.engine(options, propose=lambda sequences: [[s[-1] + 1, s[-1] + 2] for s in sequences])
    assert engine.generate([[7]], max_new_tokens=2).completions[0].tokens == [8, 9]
    process.close()


def test_a_process_that_dies_midway_leaves_its_last_words(tmp_path: Path) -> None:
    draft = "print('out of memory', file=sys.stderr, flush=True); sys.exit(3)"
    process = Process(interpreter(tmp_path, ANSWER.replace("DRAFT", draft)))
    engine = process.engine(EngineOptions(model="m"))
    with pytest.raises(VLLMError, match="ended with exit code 3; its last words: out of memory"):
        engine.generate([[1]], max_new_tokens=1)
    with pytest.raises(VLLMError, match="exit code 3"):  # and every level after it
        engine.generate([[1]], max_new_tokens=1)


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


def on_a_gpu(tmp_path: Path) -> tuple[Process, Any]:
    """A process whose vLLM pretends to have a GPU, and what it has noted since it was last asked."""
    log = tmp_path / "log"
    process = Process(interpreter(tmp_path, ON_A_GPU.replace("LOG", str(log))), memory_share=0.3)

    def noted() -> list[str]:
        lines = log.read_text().splitlines()
        log.write_text("")
        return lines

    return process, noted


def test_vllm_does_not_look_for_modules_where_we_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "json.py").write_text("raise ImportError('a module of another interpreter')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "ours"))
    Process(interpreter(tmp_path, ANSWER)).close()


def test_a_resting_process_is_gone_and_comes_back_when_it_is_called(tmp_path: Path) -> None:
    process, noted = on_a_gpu(tmp_path)
    process.engine(EngineOptions(model="m", gpu_memory_utilization=0.5))
    assert noted() == ["started, runner as it likes", "load, share 0.5"]
    process.rest()
    assert process._process.poll() is not None
    assert noted() == []
    process.engine(EngineOptions(model="m", eager=False))
    assert noted() == ["started, runner as it likes", "load, share 0.3, compiled"]
    process.close()


def test_memory_that_a_dropped_engine_has_kept_is_got_back_by_a_fresh_process(tmp_path: Path) -> None:
    process, noted = on_a_gpu(tmp_path)
    process.engine(EngineOptions(model="m"))
    process.engine(EngineOptions(model="big"))
    assert noted().count("started, runner as it likes") == 2
    with pytest.raises(VLLMError, match="unknown architecture"):
        process.engine(EngineOptions(model="broken"))
    assert noted().count("started, runner as it likes") == 0, "that is no matter of memory"
    process.close()


def test_the_inside_of_vllm_is_reached_in_its_first_runner(tmp_path: Path) -> None:
    process, noted = on_a_gpu(tmp_path)
    process.engine(EngineOptions(model="m", first_runner=True))
    process.engine(EngineOptions(model="m"), propose=lambda sequences: sequences)
    assert noted() == ["started, runner as it likes", "started, runner 0", "load, share 0.3", "load, share 0.3"]
    process.engine(EngineOptions(model="m"))
    assert noted() == ["started, runner as it likes", "load, share 0.3"]
    process.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (VLLMError("OutOfMemoryError: CUDA"), True),
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
    assert [share_of_engine(count) for count in (1, 2, 4)] == [0.3, 0.2, 0.1]


def test_pytorch_that_runs_out_of_memory_is_recognised() -> None:
    torch = pytest.importorskip("torch")
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"))


def test_an_interpreter_that_is_none_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(VLLMError, match="could not be started"):
        Process(tmp_path / "nothing")


def test_the_worker_has_no_vllm_in_an_environment_without() -> None:
    """The real worker under our own interpreter, which must not have vLLM."""
    with pytest.raises(VLLMError, match="has no vLLM; build an environment with `make vllm`"):
        Process(sys.executable)


def test_the_first_difference_is_named_to_the_token() -> None:
    ours = [Played([5, 6, 7], [1, 0], [[6, 9], [8, 8]])]

    def theirs(tokens: list[int], accepted: list[int] | None) -> Generated:
        completion = Completion(tokens=tokens, accepted=accepted, drafted=accepted and [2] * len(accepted))
        return Generated(completions=[completion], seconds=1.0, counters={})

    assert first_difference(ours, theirs([5, 6, 7], [1, 0])) is None
    assert first_difference(ours, theirs([5, 6, 7], None)) is None
    told = first_difference(ours, theirs([5, 6, 4], [1, 0]))
    assert told is not None and "new token 2: we wrote [7], vLLM [4]" in told
    told = first_difference(ours, theirs([5, 6, 7], [1, 1]))
    assert told is not None and "round 1: we accepted [0] of [[8, 8]], vLLM [1]" in told
    told = first_difference(ours, theirs([5, 6], [1, 0]))
    assert told is not None and "new token 2: we wrote [7], vLLM []" in told


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
    assert np.isclose(stats.mean_acceptance_length, 2.0)
