"""The doctor names the faults and the suspicions of a target and a head."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TARGET, Head, edit_config, edit_tensors, write_checkpoint, write_llama
from heads_on_disk import CHECKPOINTS
from tokenizers import Tokenizer, models

from eagle3_jax import conversion
from eagle3_jax.cli import run
from eagle3_jax.conversion.acceptance import Agreement, forced_agreement
from eagle3_jax.conversion.doctor import suspected_cause
from eagle3_jax.conversion.heads import HEADS
from eagle3_jax.conversion.heads.head import mask_token

GOLDEN = Path(__file__).parent.parent / "golden"


def examined(*arguments: Any, **options: Any) -> dict[str, conversion.Check]:
    """Returns the doctor's checks by name."""
    return {check.name: check for check in conversion.diagnose(*arguments, **options)}


def expect(check: conversion.Check, status: str, *words: str) -> None:
    """Compares the status of a check, and searches its detail for words."""
    assert check.status == status, check
    assert all(word in check.detail for word in words), check


def test_an_unreadable_checkpoint_is_a_failure_and_later_checks_are_skipped(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    head = Head().write(tmp_path / "head")
    patches = {"patches.weight": np.ones(3, np.float32)}
    vision = write_checkpoint(tmp_path / "vision", {"model_type": "vit"}, patches)
    first, second, *later = conversion.diagnose(target, vision)
    expect(first, "ok")
    expect(second, "failure", "neither a target nor a draft head")
    assert {check.status for check in later} == {"skipped"}
    checks = examined(tmp_path / "nowhere", head)
    assert (checks["target"].status, checks["method"].status) == ("failure", "ok")


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
    # One fault for each check, from the layers to the tokenizer.
    edit_config(head, eagle_aux_hidden_state_layer_ids=[1, 4, 6])

    checks = examined(target, head)
    expected = {
        "widths": "differs from the target's",
        "vocabulary": "d2t is all zero",
        "auxiliary layers": "try --layer-ids leaving: (2, 5, 7)",
        "norm flags": "old SpecForge files",
        "rope": "theta 500",
        "positions": "head 64, target 128",
        "dtype": "head float16, target float32",
        "tokenizer": "at the target but",
        "chat template": "the target has none",
    }
    for name, words in expected.items():
        expect(checks[name], "warning", words)
    expect(checks["weights of the head"], "failure", "fc.kernel holds NaN")
    expect(checks["agreement"], "skipped")


def test_a_list_of_left_layers_is_recognised_by_the_default_of_the_target(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    head = Head().write(tmp_path / "head")
    edit_config(head, eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    usual = "[1, 3, 4]: one more of each is [2, 4, 5], the usual choice for 8 layers"
    expect(
        examined(target, head)["head"],
        "failure",
        usual,
        "--layer-ids leaving or --layer-ids entering",
    )

    leaving = examined(target, head, layer_ids="leaving")["auxiliary layers"]
    expect(leaving, "ok", "(2, 4, 5), the default of this target: (1, 3, 4) in config.json")
    entering = examined(target, head, layer_ids="entering")["auxiliary layers"]
    expect(
        entering, "warning", "(1, 3, 4)", "starts with 1", "(2, 4, 5), the default of this target"
    )


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
def test_the_pattern_of_rates_suggests_the_cause(
    rates: tuple[float, ...], method: str, cause: str | None
) -> None:
    agreement = Agreement(rates=rates, counts=(100, 60, 30)[: len(rates)])
    suspected = suspected_cause(agreement, HEADS[method].suspects)
    assert (suspected is None) == (cause is None)
    assert (cause or "") in (suspected or "")


@pytest.mark.skipif(not (GOLDEN / "vllm").exists(), reason="golden checkpoints are not here")
def test_the_doctor_tells_a_weak_head_from_a_lost_map(tmp_path: Path) -> None:
    trace = json.loads((GOLDEN / "vllm/trace_eagle3_k3_float32.json").read_text())
    prompts = [request["prompt"] for request in trace["requests"]][:4]
    checks = examined(GOLDEN / "vllm/target", GOLDEN / "vllm/eagle3", prompts=prompts)
    expect(checks["agreement"], "warning", "conditional acceptance 0.18 / ", "Nothing looks broken")
    assert all(check.status != "failure" for check in checks.values())

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
    "MTP head (deepseek layout)": (
        "order of the halves",
        "the embedding first, as the deepseek layout",
    ),
    "Medusa head (vllm layout)": (
        "heads",
        "at most 3 tokens; published trees that fit: medusa-vicuna-33b-stage1",
    ),
    "DFlash head (vllm layout)": (
        "block",
        "block of 5 rows, each sees the whole block: only K = 4 was trained",
    ),
    "DFlash head (transformers layout)": ("block", "layer 0 sees 3 positions behind and ahead"),
    "JetSpec head (vllm layout)": ("block", "any K up to 4"),
    "DSpark head (vllm layout)": ("confidence", "a head of its own"),
    "DFlash2 head (vllm layout)": ("selector", "5 candidates for each token"),
    "Gemma 4 assistant head (huggingface layout)": ("keys", "of target layers 7 (all tokens)"),
    "draft model": ("size", "2 layers of width 32, target 8"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_doctor_examines_every_method(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreement = Agreement(rates=(0.19, 0.1), counts=(100, 19))
    monkeypatch.setattr("eagle3_jax.conversion.doctor.forced_agreement", lambda *_: agreement)
    checks = examined(write_llama(tmp_path / "target"), CHECKPOINTS[name](tmp_path / "drafter"))
    assert all(check.status != "failure" for check in checks.values()), checks
    if name != "draft model":
        assert checks["head"].detail.startswith(name.replace(" head (", ", ").removesuffix(")"))
    check, words = METHOD_CHECKS[name]
    assert words in checks[check].detail
    # A rate of one in five is neither a sign of a fault nor a gain.
    expect(checks["agreement"], "warning", "was it trained for this target")


def test_agreement_is_measured_as_far_as_a_drafter_reaches(tmp_path: Path) -> None:
    head = CHECKPOINTS["Medusa head (vllm layout)"](tmp_path / "drafter")
    agreement = examined(write_llama(tmp_path / "target"), head)["agreement"]
    assert re.search(
        r"conditional acceptance [\d./ ]+ at draft positions 0 to 2 ", agreement.detail
    )
    assert agreement.status == "warning"  # random weights, and random prompts


def test_all_rows_of_a_block_are_measured_and_the_target_always_agrees_with_itself(
    tmp_path: Path,
) -> None:
    target = conversion.read_target(write_llama(tmp_path / "target"))
    agreement = forced_agreement(target, target, [[1, 2, 3]], num_cuts=3)
    assert agreement == Agreement(rates=(1.0, 1.0, 1.0), counts=(3, 3, 3))
    block = conversion.read_head(
        CHECKPOINTS["DFlash head (vllm layout)"](tmp_path / "head"), target.config
    )
    assert len(forced_agreement(target, block, [[1, 2, 3]], num_cuts=3).rates) == 4


def test_a_draft_model_of_other_tokens_is_a_failure(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    draft_model = write_llama(tmp_path / "draft")
    for directory, words in ((target, "abc"), (draft_model, "acb")):
        write_words(directory, words)
    checks = examined(target, draft_model)
    expect(checks["tokenizer"], "failure", "the token 'b' is id 2 there and id 1 here")
    expect(checks["size"], "warning", "costs as much as one of the target's")
    assert checks["agreement"] == conversion.Check("agreement", "skipped", "tokenizer: see above")
    smaller = write_llama(tmp_path / "smaller", dataclasses.replace(TARGET, vocab_size=60))
    expect(examined(target, smaller)["vocabulary"], "failure")


def write_words(directory: Path, words: Iterable[str], *special: str) -> None:
    """Writes a tokenizer of words and special tokens."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "a"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(directory / "tokenizer.json"))


def test_a_mask_token_that_texts_contain_is_a_warning(tmp_path: Path) -> None:
    write_words(tmp_path, "ab", "<mask>")
    status = {token: mask_token(token, (5,), tmp_path).status for token in (1, 2, 5, 9)}
    assert status == {1: "warning", 2: "ok", 5: "warning", 9: "ok"}


def test_inspect_alone_describes_the_bundled_pair(capsys: Any) -> None:
    assert run(["inspect", "--json"]) == 0
    kinds = [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["target: Llama", "draft head: EAGLE-3"]
    assert run(["inspect"]) == 0
    out = capsys.readouterr().out
    assert all(kind in out for kind in kinds)


def test_doctor_alone_examines_the_bundled_pair(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The measurement takes seconds and is tested elsewhere.
    agreement = Agreement(rates=(0.7, 0.7, 0.6), counts=(20, 14, 10))
    monkeypatch.setattr("eagle3_jax.conversion.doctor.forced_agreement", lambda *_: agreement)
    assert run(["doctor", "--json", "--compilation-cache", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
