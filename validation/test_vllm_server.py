"""L8 through HTTP: what a server tells of itself is enough for the same comparison."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from validation.engines.vllm.bridge import eagle3
from validation.engines.vllm.server import Servers
from validation.fixtures import launched
from validation.runs import Check
from validation.subject import Setting, Subject
from validation.test_vllm_acceptance import BATCH, Comparison

pytestmark = pytest.mark.level("L8")

K = 3


@pytest.fixture
def address(
    pytestconfig: pytest.Config, subject: Subject, setting: Setting, tmp_path: Path
) -> Iterator[str]:
    """The address of a real server of the pair, started as users start it."""
    if pytestconfig.getoption("--vllm-url"):
        pytest.skip("a server was named; all of L8 goes through it")
    options = {
        "max-num-seqs": BATCH,
        "logprobs-mode": "raw_logits",
        "per-request-spec-decode-metrics": "detailed",
        "speculative-config": json.dumps(eagle3(subject.drafter_directory, K)),
    }
    with launched(pytestconfig, subject, setting, tmp_path / "log.txt", options) as url:
        yield url


# a start of a server for what L8 compares with the process; tests have a server that is a fake
@pytest.mark.not_quick
def test_a_server_accepts_what_we_accept(check: Check, address: str, subject: Subject) -> None:
    comparison = Comparison.of_subject(Servers([address]), subject, K, 16)
    comparison.acceptance(check)
    theirs = comparison.engine.generate(comparison.prompts[:2], max_new_tokens=8)
    assert all(completion.accepted for completion in theirs.completions), (
        "the server tells nothing of single rounds"
    )

    scored = comparison.engine.score(comparison.prompts[:2], theirs.outputs)
    assert all(rank == 1 for completion in scored for rank in completion.rank)
