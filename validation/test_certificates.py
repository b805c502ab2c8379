"""L6, from outside: servers are judged by what they answer, as ``eagle3 certify`` does.

The CPU build of vLLM samples wrongly under speculation (vllm-project/vllm#55005). The certificate must find that out
by itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_jax import DynamicTree, SpeculationSchedule, SpeculativeDecoder
from eagle3_jax.certify import Certificate, Client, Plan, Verdict, certify
from validation.engines.vllm.bridge import eagle3
from validation.fixtures import launched
from validation.runs import Check
from validation.subject import Setting, Subject, some_prompts

pytestmark = pytest.mark.level("L6")

K = 3
OURS: dict[str, dict[str, Any]] = {  # the first one is that of --quick
    "a chain of sampled tokens": {"num_speculative_tokens": K, "draft_sampling": "probabilistic"},
    "a chain of likeliest tokens": {"num_speculative_tokens": K},
    "a dynamic tree": {"tree": DynamicTree(num_nodes=10, max_depth=K, top_k=3)},
    "a schedule": {"schedule": SpeculationSchedule(((1, 4, K), (5, 8, 1)))},
}


def examine(check: Check, url: str, subject: Subject, *, requests: int) -> Certificate:
    """Certifies a server and stores the certificate in the report."""
    plan = Plan(prompts=some_prompts(subject, 12), num_requests=requests, num_greedy=8, concurrency=16)
    certificate = certify(Client(url), plan)
    for title, tests in (("Speculated tokens", certificate.tests), ("First tokens", certificate.first_tokens)):
        rows = [[test.name, float(f"{test.p_value:.2g}"), test.tokens, test.detail] for test in tests]
        check.table(title, ["test", "p", "tokens", "what was seen"], rows)
    check.number(verdict=certificate.headline, requests=certificate.requests, **certificate.facts)
    check.sees = f"a shift of {certificate.sees:.1%} of the probability between twenty cells, from outside"
    return certificate


@pytest.mark.parametrize("method", OURS)
def test_our_server_is_certified(check: Check, subject: Subject, setting: Setting, method: str) -> None:
    pytest.importorskip("uvicorn", reason="our server needs uvicorn, of the extra `serve`")
    from eagle3_jax.serving.local import serving

    target, drafter = subject.pair("float32")
    decoder = SpeculativeDecoder(target, drafter, stop_tokens=(), **OURS[method])
    with serving(decoder, slots=8, capacity=256, logprobs=20) as url:
        certificate = examine(check, url, subject, requests=64 if setting.quick else 512)
    assert certificate.verdict is Verdict.LOSSLESS, certificate.reason


@pytest.mark.parametrize("speculates", [True, False], ids=["speculating", "plain"])
def test_a_server_of_vllm_is_certified(
    pytestconfig: pytest.Config, check: Check, subject: Subject, setting: Setting, tmp_path: Path, speculates: bool
) -> None:
    speculation = {"speculative-config": json.dumps(eagle3(subject.drafter_directory, K))} if speculates else {}
    options = {"max-num-seqs": 16, "max-logprobs": 20, **speculation}
    with launched(pytestconfig, subject, setting, tmp_path / "log.txt", options) as url:
        certificate = examine(check, url, subject, requests=256 if setting.quick else 512)
    on_cpu = not setting.on_gpu
    (greedy,) = (test for test in certificate.tests if test.name.startswith("greedy"))
    assert greedy.p_value == 1, greedy.detail
    expected = Verdict.NOT_LOSSLESS if speculates and on_cpu else Verdict.LOSSLESS
    assert certificate.verdict is expected, certificate.reason
