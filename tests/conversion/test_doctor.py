"""The doctor names the faults and the suspicions of a target and a head."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    TARGET,
    Head,
    edit_config,
    edit_tensors,
    write_checkpoint,
    write_llama,
)
from heads_on_disk import CHECKPOINTS

from eagle3_jax import conversion
from eagle3_jax.cli import run
from eagle3_jax.conversion.acceptance import Agreement, forced_agreement
from eagle3_jax.conversion.doctor import suspected_cause
from eagle3_jax.conversion.heads import HEADS
from eagle3_jax.conversion.heads.head import mask_token

GOLDEN = Path(__file__).parent.parent / "golden"


def statuses(checks: list[conversion.Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def detail(checks: list[conversion.Check], name: str) -> str:
    return next(check.detail for check in checks if check.name == name)


def test_an_unreadable_checkpoint_is_a_failure_and_later_checks_are_skipped(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    head = Head().write(tmp_path / "head")
    patches = {"patches.weight": np.ones(3, np.float32)}
    vision = write_checkpoint(tmp_path / "vision", {"model_type": "vit"}, patches)
    checks = conversion.diagnose(target, vision)
    assert statuses(checks)["target"] == "ok"
    assert statuses(checks)["method"] == "failure"
    assert "neither a target nor a draft head" in detail(checks, "method")
    assert {check.status for check in checks[2:]} == {"skipped"}
    checks = conversion.diagnose(tmp_path / "nowhere", head)
    assert (statuses(checks)["target"], statuses(checks)["method"]) == ("failure", "ok")


def test_the_doctor_names_each_suspicion(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    edit_config(target, max_position_embeddings=128, rope_theta=500.0)
    (target / "tokenizer.json").write_text("{}")
    head = Head(dtype=np.float16, norm_output=True).write(tmp_path / "head", "sglang")
    (head / "tokenizer.json").write_text("{} ")
    edit_tensors(head, d2t=np.zeros(40, np.int64), t2d=np.arange(61) < 40, norm__weight=np.ones(32, np.float16))
    edit_tensors(head, fc__weight=np.full((32, 96), np.nan, np.float16))
    edit_tensors(head, embed_tokens__weight=np.ones((61, 32), np.float16))
    edit_config(head, eagle_aux_hidden_state_layer_ids=[1, 4, 6])
    checks = conversion.diagnose(target, head)
    status = statuses(checks)
    expected = {
        "widths": "differs from the target's",
        "vocabulary": "d2t is all zero",
        "auxiliary layers": r"try --layer-ids leaving: \(2, 5, 7\)",
        "norm flags": "old SpecForge files",
        "rope": "theta 500",
        "positions": "head 64, target 128",
        "dtype": "head float16, target float32",
        "tokenizer": "at the target but",
        "chat template": "the target has none",
    }
    for name, message in expected.items():
        assert status[name] == "warning", name
        assert re.search(message, detail(checks, name)), name
    assert status["weights of the head"] == "failure"
    assert "fc.kernel holds NaN" in detail(checks, "weights of the head")
    assert status["agreement"] == "skipped"


def test_a_list_of_left_layers_is_recognised_by_the_default_of_the_target(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    head = Head().write(tmp_path / "head")
    edit_config(head, eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    question = detail(conversion.diagnose(target, head), "head")
    assert "[1, 3, 4]: one more of each is [2, 4, 5], the usual choice for 8 layers" in question
    assert "--layer-ids leaving or --layer-ids entering" in question
    leaving = conversion.diagnose(target, head, layer_ids="leaving")
    assert statuses(leaving)["auxiliary layers"] == "ok"
    expected = "(2, 4, 5), the default of this target: (1, 3, 4) in config.json"
    assert detail(leaving, "auxiliary layers").startswith(expected)
    entering = conversion.diagnose(target, head, layer_ids="entering")
    assert statuses(entering)["auxiliary layers"] == "warning"
    warning = detail(entering, "auxiliary layers")
    assert "(1, 3, 4)" in warning
    assert "starts with 1" in warning
    assert "(2, 4, 5), the default of this target" in warning


@pytest.mark.parametrize(
    ("rates", "method", "cause"),
    [
        ((0.0, 0.0, 0.0), "eagle3", "d2t"),
        ((0.6, 0.05, 0.0), "eagle3", "feedback norm"),
        ((0.6, 0.5, 0.4), "eagle3", None),
        ((0.0, 0.0, 0.0), "dflash", "z-lab's ids are one lower"),
        ((0.6, 0.05, 0.0), "p-eagle", "mask_hidden"),
        ((0.6, 0.05), "mtp", "trained on the first token alone"),
        ((0.6, 0.05), "medusa", "order of the heads"),
        ((0.6,), "medusa", None),
    ],
)
def test_the_pattern_of_rates_suggests_the_cause(rates: tuple[float, ...], method: str, cause: str | None) -> None:
    agreement = Agreement(rates=rates, counts=(100, 60, 30)[: len(rates)])
    suspected = suspected_cause(agreement, HEADS[method].suspects)
    if cause is None:
        assert suspected is None
    else:
        assert suspected is not None
        assert cause in suspected


@pytest.mark.skipif(not (GOLDEN / "vllm").exists(), reason="golden checkpoints are not here")
def test_the_doctor_tells_a_weak_head_from_a_lost_map(tmp_path: Path) -> None:
    trace = json.loads((GOLDEN / "vllm/trace_eagle3_k3_float32.json").read_text())
    prompts = [request["prompt"] for request in trace["requests"]][:4]
    checks = conversion.diagnose(GOLDEN / "vllm/target", GOLDEN / "vllm/eagle3", prompts=prompts)
    assert statuses(checks)["agreement"] == "warning"
    assert "conditional acceptance 0.18 / " in detail(checks, "agreement")
    assert "Nothing looks broken" in detail(checks, "agreement")
    assert "failure" not in statuses(checks).values()

    target = conversion.read_target(GOLDEN / "vllm/target")
    head = conversion.read_head(GOLDEN / "vllm/eagle3", target.config)
    assert head.draft_to_target is not None
    lost = dataclasses.replace(head, draft_to_target=np.roll(head.draft_to_target, 1))
    agreement = forced_agreement(target, lost, prompts)
    assert "d2t" in (suspected_cause(agreement, HEADS["eagle3"].suspects) or "")


# By checkpoint: a check for this method alone, and words of its detail.
METHOD_CHECKS = {
    "EAGLE-3 head (eagle layout)": ("auxiliary layers", "the default 2, L//2, L-3"),
    "EAGLE-3.1 head (vllm layout)": ("norm flags", "fc_norm True"),
    "P-EAGLE head (sglang layout)": ("mask token", "id 57"),
    "EAGLE-1/2 head (eagle layout)": ("fc bias", "cannot go there"),
    "MTP head (deepseek layout)": ("order of the halves", "the embedding first, as the deepseek layout"),
    "Medusa head (vllm layout)": ("heads", "at most 3 tokens; published trees that fit: medusa-vicuna-33b-stage1"),
    "DFlash head (vllm layout)": ("block", "block of 5 rows, each sees the whole block: only K = 4 was trained"),
    "JetSpec head (vllm layout)": ("block", "any K up to 4"),
    "DSpark head (vllm layout)": ("confidence", "a head of its own"),
    "draft model": ("size", "2 layers of width 32, target 8"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_doctor_examines_every_method(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agreement = Agreement(rates=(0.19, 0.1), counts=(100, 19))
    monkeypatch.setattr("eagle3_jax.conversion.doctor.forced_agreement", lambda *_: agreement)
    checks = conversion.diagnose(write_llama(tmp_path / "target"), CHECKPOINTS[name](tmp_path / "drafter"))
    status = statuses(checks)
    assert "failure" not in status.values(), checks
    if name != "draft model":
        assert detail(checks, "head").startswith(name.replace(" head (", ", ").removesuffix(")"))
    check, words = METHOD_CHECKS[name]
    assert words in detail(checks, check)
    # A rate of one in five is no sign of a fault, and no gain either.
    assert status["agreement"] == "warning"
    assert "was it trained for this target" in detail(checks, "agreement")


def test_agreement_is_measured_as_far_as_a_drafter_reaches(tmp_path: Path) -> None:
    head = CHECKPOINTS["Medusa head (vllm layout)"](tmp_path / "drafter")
    checks = conversion.diagnose(write_llama(tmp_path / "target"), head)
    assert re.search(r"conditional acceptance [\d./ ]+ at draft positions 0 to 2 ", detail(checks, "agreement"))
    assert statuses(checks)["agreement"] == "warning"  # random weights, and random prompts


def test_all_rows_of_a_block_are_measured_and_the_target_always_agrees_with_itself(tmp_path: Path) -> None:
    target = conversion.read_target(write_llama(tmp_path / "target"))
    agreement = forced_agreement(target, target, [[1, 2, 3]], num_cuts=3)
    assert agreement.rates == (1.0, 1.0, 1.0)
    assert agreement.counts == (3, 3, 3)
    block = conversion.read_head(CHECKPOINTS["DFlash head (vllm layout)"](tmp_path / "head"), target.config)
    assert len(forced_agreement(target, block, [[1, 2, 3]], num_cuts=3).rates) == 4


def test_a_draft_model_of_other_tokens_is_a_failure(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    draft_model = write_llama(tmp_path / "draft")
    for directory, words in ((target, "abc"), (draft_model, "acb")):
        vocab = {word: index for index, word in enumerate(words)}
        model = {"type": "WordLevel", "unk_token": "a", "vocab": vocab}
        (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    checks = conversion.diagnose(target, draft_model)
    assert statuses(checks)["tokenizer"] == "failure"
    assert "the token 'b' is id 2 there and id 1 here" in detail(checks, "tokenizer")
    assert "costs as much as one of the target's" in detail(checks, "size")
    assert statuses(checks)["agreement"] == "skipped"
    assert detail(checks, "agreement") == "tokenizer: see above"
    smaller = write_llama(tmp_path / "smaller", dataclasses.replace(TARGET, vocab_size=60))
    assert statuses(conversion.diagnose(target, smaller))["vocabulary"] == "failure"


def test_a_mask_token_that_texts_contain_is_a_warning(tmp_path: Path) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "b": 1, "<mask>": 2}}
    added = [{"id": 2, "content": "<mask>", "special": True, **flags}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": model}))
    status = {token: mask_token(token, (5,), tmp_path).status for token in (1, 2, 5, 9)}
    assert status == {1: "warning", 2: "ok", 5: "warning", 9: "ok"}


def test_inspect_alone_describes_the_bundled_pair(capsys: Any) -> None:
    assert run(["inspect", "--json"]) == 0
    kinds = [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["target: Llama", "draft head: EAGLE-3"]
    assert run(["inspect"]) == 0
    out = capsys.readouterr().out
    assert all(kind in out for kind in kinds)


def test_doctor_alone_examines_the_bundled_pair(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The measurement takes seconds and is tested elsewhere.
    agreement = Agreement(rates=(0.7, 0.7, 0.6), counts=(20, 14, 10))
    monkeypatch.setattr("eagle3_jax.conversion.doctor.forced_agreement", lambda *_: agreement)
    assert run(["doctor", "--json", "--compilation-cache", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
