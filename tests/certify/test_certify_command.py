"""``eagle3 certify`` and its client, over a local server with injected errors and bad manners."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, serving
from faulty_sampler import FAULTS, PROMPTS, FaultySampler

from eagle3_jax.certify.asking import Plan
from eagle3_jax.certify.certificate import Certificate, Verdict
from eagle3_jax.certify.client import Client
from eagle3_jax.certify.examine import certify
from eagle3_jax.certify.source import ServerError
from eagle3_jax.cli import run

# Few requests, which promise nothing, but show what they show.
PLAN = Plan(
    prompts=PROMPTS,
    num_requests=64,
    num_long=64,
    num_greedy=4,
    max_new_tokens=16,
    with_fields=False,
)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FaultySampler()) as running:
        yield running


def result_of(server: FakeServer, plan: Plan = PLAN) -> Certificate:
    return certify(Client(server.url), plan)


def test_a_correct_server_is_lossless(server: FakeServer) -> None:
    certificate = result_of(server, Plan(prompts=PROMPTS, concurrency=4))
    assert certificate.verdict is Verdict.LOSSLESS, certificate.reason
    assert certificate.facts["version"] == "0.0.fake"
    assert "The same seed wrote the same text in 4 of 4 requests." in certificate.notes
    names = [test.name for test in certificate.tests]
    assert "places, token 2 of a chunk" in names and "counts behind the same text" in names
    assert {finding.outcome for finding in certificate.findings} <= {"passed", "refused", "not run"}


@pytest.mark.parametrize("form", ["content", "texts"])
def test_the_forms_of_other_servers_are_read(server: FakeServer, form: str) -> None:
    expected = result_of(server)
    server.manners.form = form
    prompts = ["0", "1", "2", "3"] if form == "texts" else PROMPTS
    certificate = result_of(server, dataclasses.replace(PLAN, prompts=prompts))

    # No text can be continued, so short answers are to other prompts.
    if form == "texts":
        assert {test.name for test in certificate.tests} >= {
            "greedy tokens, scored by force",
            "pairs of places",
        }
        assert all(test.p_value > certificate.level for test in certificate.tests)
        return
    assert certificate.tests == expected.tests
    assert certificate.first_tokens == expected.first_tokens


def test_what_llama_cpp_withholds_behind_drafts_is_asked_for(server: FakeServer) -> None:
    """All tests but those by index in a round, which its answers do not show, are the same."""
    expected = {test.name: test.p_value for test in result_of(server).tests}
    server.manners.form = "llama.cpp"
    certificate = result_of(server, dataclasses.replace(PLAN, prompts=["0", "1", "2", "3"]))
    assert certificate.facts["build_info"] == "b1-fake"
    actual = {test.name: test.p_value for test in certificate.tests}
    assert actual == {
        name: p_value for name, p_value in expected.items() if "of a chunk" not in name
    }


def test_without_echo_each_prefix_is_asked(server: FakeServer) -> None:
    expected = result_of(server)
    server.manners.echoes = False
    client = Client(server.url)
    tests = certify(client, PLAN).tests
    # A token that is not among the reported ones has no log-probability there.
    assert tests[:-1] == expected.tests[:-1]
    assert tests[-1].p_value == 1 and 0.8 * expected.tests[-1].tokens < tests[-1].tokens
    assert client.scoring == "prefixes"


def test_an_injected_error_is_found_over_http() -> None:
    with serving(FaultySampler(FAULTS["drafts sampled at T 0.7 and declared at 1"])) as server:
        plan = dataclasses.replace(PLAN, num_requests=512, num_long=128)
        certificate = result_of(server, plan)
    assert certificate.verdict is Verdict.NOT_LOSSLESS
    assert "places" in certificate.reason or "log-probabilities" in certificate.reason


def test_a_greedy_token_that_is_not_the_likeliest_is_found(server: FakeServer) -> None:
    server.manners.wrong_greedy = 3
    certificate = result_of(server)
    assert certificate.verdict is Verdict.NOT_LOSSLESS
    assert "3 are not the likeliest token, by up to" in certificate.reason


def test_a_server_that_is_wrong_without_drafts_is_inconclusive(server: FakeServer) -> None:
    server.manners.wrong_greedy = 0
    certificate = result_of(server)
    assert certificate.verdict is Verdict.INCONCLUSIVE
    assert "the reports do not describe the sampler" in certificate.reason


def test_reports_that_differ_from_forced_ones_are_found(server: FakeServer) -> None:
    """As with stale keys and values: tokens follow what the server reports, but that is wrong."""
    server.manners.shift = 1.0
    certificate = result_of(server, dataclasses.replace(PLAN, num_greedy=0))
    assert certificate.verdict is Verdict.NOT_LOSSLESS
    assert "reported against forced log-probabilities" in certificate.reason


def test_a_server_that_ignores_seeds_is_not_certified(server: FakeServer) -> None:
    server.manners.fixed_seed = 7
    assert result_of(server).verdict is not Verdict.LOSSLESS


def test_a_server_without_reports_is_compared_with_a_plain_one(server: FakeServer) -> None:
    server.manners.reports = False
    with pytest.raises(ServerError, match="--plain-url"):
        result_of(server)
    plan = dataclasses.replace(PLAN, num_requests=2048, speculation="assumed")
    with serving(FaultySampler()) as plain:
        certificate = certify(Client(server.url), plan, plain=Client(plain.url))
        assert certificate.verdict is Verdict.LOSSLESS, certificate.reason
        with serving(FaultySampler(FAULTS["greedy drafts judged as if sampled"])) as faulty:
            faulty.manners.reports = False
            certificate = certify(Client(faulty.url), plan, plain=Client(plain.url))
    assert certificate.verdict is Verdict.NOT_LOSSLESS


def test_a_busy_server_is_asked_again_and_a_failing_one_is_judged_by_what_it_answered(
    server: FakeServer,
) -> None:
    server.manners.refusals = [429, 503, 429]
    assert result_of(server).lost == 0

    client = Client(server.url)
    threading.Timer(0.3, lambda: setattr(server.manners, "refusals", [500] * 10_000)).start()
    certificate = certify(client, dataclasses.replace(PLAN, num_requests=5000))
    assert certificate.is_partial and certificate.lost > 3
    assert certificate.verdict is Verdict.INCONCLUSIVE
    assert "complete: " in certificate.reason and "answered 500" in certificate.reason


def test_an_interrupted_run_is_judged_by_what_was_answered(server: FakeServer) -> None:
    def interrupt(message: str) -> None:
        if message.startswith("short answers: 40 "):
            raise KeyboardInterrupt

    certificate = certify(Client(server.url), PLAN, on_progress=interrupt)
    assert certificate.is_partial and "complete: interrupted" in certificate.reason
    tokens = {test.name: test.tokens for test in certificate.tests}
    expected = 40 * (PLAN.short_tokens - 1) + PLAN.num_long * (PLAN.max_new_tokens - 1)
    assert tokens["places in the distribution"] == expected


def test_another_model_in_between_is_refused(server: FakeServer) -> None:
    server.manners.models = ["fake", "other"]
    with pytest.raises(ServerError, match="answered as other, not as fake"):
        result_of(server, dataclasses.replace(PLAN, concurrency=1))


def command(server: FakeServer, *options: str, prompts: Path) -> list[str]:
    words = ["certify", "--url", server.url, "--prompts", str(prompts), "--sampling-only"]
    few = "--requests 64 --greedy-requests 4 --long-requests 16 --max-new-tokens 16"
    return [*words, *few.split(), *options]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in PROMPTS))
    return file


def test_the_command_prints_the_verdict_first_and_writes_the_certificate(
    server: FakeServer,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EAGLE3_API_KEY", "sesame")
    server.manners.key = "sesame"
    output = tmp_path / "certificate"
    words = command(server, "--output", str(output), "--greedy-requests", "16", prompts=prompts)
    assert run(words) == 3
    captured = capsys.readouterr()
    printed = captured.out
    assert printed.startswith("Inconclusive: first tokens: ") and "sight: " in printed
    # A file gets the first step at once.
    assert captured.err.startswith("greedy answers: 1 of 16\n")
    # No gain is written as a negative power of ten, and the number 1 has the singular.
    assert "10^-" not in printed
    assert not re.search(r"\b1 (texts|tokens|answers|requests)\b", printed)

    record = json.loads((output / "certificate.json").read_text())
    assert record["verdict"] == "inconclusive" and "sesame" not in json.dumps(record)
    page = (output / "certificate.html").read_text()
    assert "Inconclusive" in page and "places in the distribution" in page and "sesame" not in page
    assert "$" not in page.partition("</style>")[2]
    # Facts are words, without the braces and brackets of Python.
    facts = page.partition("<dl")[2]
    assert "temperature 1.0, top k 0, top p 1.0" in facts
    assert not re.search(r"[{\[]", facts)


def test_the_exit_code_is_the_verdict(server: FakeServer, prompts: Path) -> None:
    assert run(command(server, *GREEDY.split(), "--json", prompts=prompts)) == 0
    server.manners.wrong_greedy = 3
    assert run(command(server, *GREEDY.split(), "--json", prompts=prompts)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "0.7", "--top-p", "0.9"], "do not show where the nucleus ends"),
        (["--temperature", "0"], "expected a temperature above 0"),
        (["--speculation", "perhaps"], "'perhaps' is not one of 'seen', 'assumed', 'none'"),
        (["--top-k", "50", "--top-p", "0.9"], "do not show where the nucleus ends"),
        (["--model", "gpt"], "serves fake, not gpt"),
        (
            ["--greedy-requests", "0", "--requests", "0", "--long-requests", "0"],
            "leave nothing to judge",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(
    server: FakeServer,
    prompts: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture,
) -> None:
    assert run(command(server, *options, prompts=prompts)) == 2
    assert message in capsys.readouterr().err


GREEDY = "--requests 0 --long-requests 0 --greedy-requests 16 --speculation assumed"
ALONE = """
import runpy, sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None
runpy.run_module("eagle3_jax.certify", run_name="__main__")
"""


def test_the_command_needs_numpy_scipy_and_httpx_alone(server: FakeServer, prompts: Path) -> None:
    refused = (
        "jax,jaxlib,flax,optax,orbax,ml_dtypes,safetensors,tokenizers,jinja2,jaxtyping,typer,rich,"
        "filelock"
    )
    _, *words = command(server, *GREEDY.split(), prompts=prompts)
    run_alone = [sys.executable, "-c", ALONE, refused, *words]
    done = subprocess.run(run_alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Lossless for greedy requests: no test found a deviation")


@pytest.mark.parametrize(
    ("manners", "message"),
    [
        ({"key": "sesame"}, "wants a key: put it into the environment variable EAGLE3_API_KEY"),
        ({"seconds": 3.0}, "no answer in 0.5 s; raise --timeout"),
        ({"most_reported": 5}, "5 log-probabilities are reported where 20 were asked for"),
        ({"refusals": [500]}, "answered 500"),
        # The message of an error, and not its JSON.
        ({"refusals": [501]}, "answered 501: busy\n"),
    ],
)
def test_a_server_that_cannot_be_judged_is_one_line(
    server: FakeServer,
    prompts: Path,
    manners: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture,
) -> None:
    server.manners = dataclasses.replace(server.manners, **manners)
    assert run(command(server, "--timeout", "0.5", prompts=prompts)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("url", ["localhost:8000", "http://127.0.0.1:9", "ftp://x"])
def test_no_server_is_one_line(url: str, capsys: pytest.CaptureFixture) -> None:
    assert run(["certify", "--url", url]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "prompts.jsonl holds no lines"),
        (
            '{"prompt": ""}',
            "prompts.jsonl line 1: expected a text or token ids; a certificate sends no 'messages'",
        ),
        (
            '{"prompt": "a", "temperature": 1}',
            "prompts.jsonl line 1: 'temperature' is not known; it is given for all prompts, with",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            "prompts.jsonl line 1: expected a text or token ids; a certificate sends no 'messages'",
        ),
    ],
)
def test_a_file_without_prompts_is_one_line(
    tmp_path: Path, refused: Any, content: str, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert message in refused("certify", "--url", "http://127.0.0.1:9", "--prompts", file)


def test_a_chat_is_judged_by_its_sampled_tokens(server: FakeServer) -> None:
    plan = Plan(prompts=["0", "1", "2", "3"], concurrency=4, with_fields=False)
    certificate = certify(Client(server.url, api="chat"), plan)
    assert certificate.verdict is Verdict.LOSSLESS, certificate.reason
    assert certificate.headline == "Lossless for sampled requests"


def test_a_server_that_cuts_streams_refuses_and_restarts_is_lossless(server: FakeServer) -> None:
    server.manners.cut_every = 50
    server.manners.refusals = [429, 503, 502]
    client = Client(server.url)
    threading.Timer(3.0, server.restart, [1.0]).start()
    certificate = certify(client, Plan(prompts=PROMPTS, concurrency=4, with_fields=False))
    assert certificate.verdict is Verdict.LOSSLESS, certificate.reason
