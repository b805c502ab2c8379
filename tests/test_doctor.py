"""The doctor names what is wrong with a target and a head, and what is only suspicious."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    Head,
    edit_config,
    edit_tensors,
    write_llama,
)

import conversion
from conversion.acceptance import Agreement, forced_agreement
from conversion.doctor import suspected_cause

GOLDEN = Path(__file__).parent / "golden"


def statuses(checks: list[conversion.Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def detail(checks: list[conversion.Check], name: str) -> str:
    return next(check.detail for check in checks if check.name == name)


def test_the_doctor_reports_what_cannot_be_read_and_skips_the_rest(tmp_path: Path) -> None:
    target, head = write_llama(tmp_path / "target"), write_llama(tmp_path / "head")
    checks = conversion.diagnose(target, head)
    assert statuses(checks)["target"] == "ok"
    assert statuses(checks)["generation of the head"] == "failure"
    assert "language model" in detail(checks, "generation of the head")
    assert {check.status for check in checks[2:]} == {"skipped"}
    assert statuses(conversion.diagnose(tmp_path / "nowhere", head))["target"] == "failure"


def test_the_doctor_names_each_suspicion(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    edit_config(target, max_position_embeddings=128, rope_theta=500.0)
    (target / "tokenizer.json").write_text("{}")
    head = Head(dtype=np.float16, norm_output=True).write(tmp_path / "head", "sglang")
    (head / "tokenizer.json").write_text("{} ")
    edit_tensors(
        head,
        d2t=np.zeros(40, np.int64),
        t2d=np.arange(61) < 40,
        norm__weight=np.ones(32, np.float16),
        fc__weight=np.full((32, 96), np.nan, np.float16),
        embed_tokens__weight=np.ones((61, 32), np.float16),
    )
    edit_config(head, eagle_aux_hidden_state_layer_ids=[1, 4, 6])
    checks = conversion.diagnose(target, head)
    found = statuses(checks)
    expected = {
        "widths": "differs from the target's",
        "vocabulary": "d2t is all zero",
        "auxiliary layers": r"try \[2, 5, 7\]",
        "norm flags": "old SpecForge files",
        "rope": "theta 500",
        "positions": "head 64, target 128",
        "dtype": "head float16, target float32",
        "tokenizer": "at the target but",
        "chat template": "the target has none",
    }
    for name, message in expected.items():
        assert found[name] == "warning", name
        assert re.search(message, detail(checks, name)), name
    assert found["weights of the head"] == "failure"
    assert "fc.kernel holds NaN" in detail(checks, "weights of the head")
    assert found["agreement"] == "skipped"


def test_the_doctor_knows_a_list_of_outputs_by_the_default_of_the_target(tmp_path: Path) -> None:
    target, head = write_llama(tmp_path / "target"), Head().write(tmp_path / "head")
    edit_config(head, eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    found = detail(conversion.diagnose(target, head), "auxiliary layers")
    assert "(1, 3, 4) starts with 1" in found and "(2, 4, 5) is the default of this target" in found


@pytest.mark.parametrize(
    ("rates", "cause"),
    [((0.0, 0.0, 0.0), "d2t"), ((0.6, 0.05, 0.0), "feedback norm"), ((0.6, 0.5, 0.4), None)],
)
def test_the_signature_of_rates_suggests_the_cause(rates: tuple[float, ...], cause: str | None) -> None:
    found = suspected_cause(Agreement(rates=rates, counts=(100, 60, 30)))
    assert found is None if cause is None else cause in (found or "")


@pytest.mark.skipif(not (GOLDEN / "vllm").exists(), reason="golden checkpoints are not here")
def test_the_doctor_tells_a_healthy_pair_from_a_lost_map(tmp_path: Path) -> None:
    trace = json.loads((GOLDEN / "vllm/trace_eagle3_k3_float32.json").read_text())
    prompts = [request["prompt"] for request in trace["requests"]][:4]
    checks = conversion.diagnose(GOLDEN / "vllm/target", GOLDEN / "vllm/eagle3", prompts=prompts)
    assert statuses(checks)["agreement"] == "ok"
    assert "failure" not in statuses(checks).values()

    target = conversion.read_target(GOLDEN / "vllm/target")
    head = conversion.read_head(GOLDEN / "vllm/eagle3", target.config)
    lost = dataclasses.replace(head, draft_to_target=np.roll(head.draft_to_target, 1))
    agreement = forced_agreement(target, lost, prompts)
    assert "d2t" in (suspected_cause(agreement) or "")
