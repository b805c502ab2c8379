"""L6, from outside: servers are judged by what they answer, as ``eagle3 certify`` does.

The CPU build of vLLM samples wrongly under speculation (vllm-project/vllm#55005). The certificate
must find that out by itself. Certificates of other ways to decode, and of vLLM's plain decoding,
are among the records of a release: ``examples/certify_engines.py``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from eagle3_jax import SpeculativeDecoder
from eagle3_jax.certify.asking import Plan
from eagle3_jax.certify.certificate import Certificate, Verdict
from eagle3_jax.certify.client import Client
from eagle3_jax.certify.examine import certify
from validation.engines.vllm.bridge import eagle3
from validation.fixtures import installed_python, launched
from validation.runs import Check
from validation.subject import Setting, Subject, some_prompts

pytestmark = pytest.mark.level("L6")

K = 3
ROOT = Path(__file__).parent.parent


def examine(check: Check, url: str, subject: Subject, setting: Setting) -> Certificate:
    """Certifies a server and stores the certificate; a quick run asks for an eighth."""
    plan = Plan(prompts=some_prompts(subject, 12), concurrency=16, speculation="seen")
    if setting.quick:
        plan = dataclasses.replace(
            plan, num_requests=256, num_long=16, num_greedy=8, with_fields=False
        )
    certificate = certify(Client(url), plan)
    for title, columns, rows in certificate.tables():
        check.table(title, columns, rows)
    check.number(verdict=certificate.headline, requests=certificate.requests, **certificate.facts)
    check.sees = " and ".join(certificate.sees) + ", from outside"
    return certificate


def shows_no_deviation(certificate: Certificate, setting: Setting) -> bool:
    """Whether a server is lossless, as far as a quick run can see."""
    unmet = {entry.name for entry in certificate.requirements if not entry.is_met}
    return certificate.verdict is Verdict.LOSSLESS or (
        setting.quick and certificate.verdict is Verdict.INCONCLUSIVE and unmet == {"sight"}
    )


def test_our_server_is_certified(check: Check, subject: Subject, setting: Setting) -> None:
    pytest.importorskip("uvicorn", reason="our server needs uvicorn, of the extra `serve`")
    from eagle3_jax.server.local import serving

    target, drafter = subject.pair("float32")
    decoder = SpeculativeDecoder(
        target,
        drafter,
        num_speculative_tokens=K,
        draft_sampling="probabilistic",
        stop_tokens=(),
    )
    with serving(decoder, slots=8, capacity=256, logprobs=20) as url:
        certificate = examine(check, url, subject, setting)
    assert shows_no_deviation(certificate, setting), certificate.reason


def test_a_server_of_vllm_is_certified(
    pytestconfig: pytest.Config,
    check: Check,
    subject: Subject,
    setting: Setting,
    tmp_path: Path,
) -> None:
    speculation = json.dumps(eagle3(subject.drafter_directory, K))
    options = {"max-num-seqs": 16, "max-logprobs": 20, "speculative-config": speculation}

    with launched(pytestconfig, subject, setting, tmp_path / "log.txt", options) as url:
        certificate = examine(check, url, subject, setting)
        command = [
            str(installed_python()),
            "-m",
            "eagle3_jax.certify",
            "--url",
            url,
            "--speculation",
            "assumed",
        ]
        greedy_only = ["--requests", "0", "--long-requests", "0", "--sampling-only"]
        done = subprocess.run([*command, *greedy_only], env=os.environ | {"PYTHONPATH": str(ROOT)})

    assert done.returncode == 0, (
        "the command does not certify greedy requests in the server's own environment"
    )
    (greedy,) = (
        test for test in certificate.tests if test.name == "greedy tokens, scored by force"
    )
    assert greedy.p_value == 1, greedy.detail

    if setting.on_gpu:
        assert shows_no_deviation(certificate, setting), certificate.reason
    else:
        assert certificate.verdict is Verdict.NOT_LOSSLESS, certificate.reason
