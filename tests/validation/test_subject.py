"""What ``pytest validation`` validates: the pair that it chooses, its questions, and the speeds that it quotes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("scipy")

from eagle3_jax.bench.results import Report
from eagle3_jax.engines.memory import SHARE_OF_JAX, SHARE_OF_VLLM, share_memory
from eagle3_jax.load import bundled
from eagle3_jax.models.config import usual_head
from eagle3_jax.prompts import shipped
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment, memory_plan
from validation import speeds
from validation.device import share_of_jax
from validation.runs import Check
from validation.subject import DEFAULT_TARGET, Setting, choose
from validation.tasks import answered_number, discordant_interval, is_right, questions, reference_number

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("changes", [{}, {"gpu": True, "rehearsal": True}])
def test_the_default_is_the_shipped_pair_with_its_prompts(changes: dict[str, bool]) -> None:
    subject = choose(Setting(**changes))
    assert (subject.name, subject.reason) == ("the shipped pair", "")
    assert [prompt.text for prompt in subject.prompts] == shipped()
    assert all(len(tokens) > 8 for tokens in subject.prompt_tokens)
    dtype = subject.dtypes[0]
    assert subject.pair(dtype)[0] is subject.pair(dtype)[0]
    loaded = subject.pair(dtype)[0]
    subject.release()
    assert subject.pair(dtype)[0] is not loaded
    assert subject.description["questions"] == "plain text: the target has no chat template"


def test_a_gpu_run_without_the_hub_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(source: object, part: str) -> Path:
        raise ValueError(f"{source} could not be downloaded: no network")

    monkeypatch.setattr("validation.subject.locate", unreachable)
    subject = choose(Setting(gpu=True))
    assert subject.name == "the shipped pair"
    assert subject.dtypes[0] == "bfloat16"
    assert {prompt.max_new_tokens for prompt in subject.prompts} == {256}
    assert subject.description["not the default"] == f"{DEFAULT_TARGET} could not be downloaded: no network"
    with pytest.raises(ValueError, match="mine could not be downloaded"):
        choose(Setting(gpu=True, target="mine", drafter="my-head"))


def test_on_a_gpu_one_precision_is_loaded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of an 8B model do not fit beside vLLM."""
    for gpu, left in ((True, ["bfloat16"]), (False, ["float32", "bfloat16"])):
        subject = choose(Setting(gpu=gpu, target=str(bundled("target")), drafter=str(bundled("eagle3"))))
        subject.pair("float32")
        subject.pair("bfloat16")
        assert list(subject._pairs) == left


@pytest.mark.parametrize("given", ["target", "drafter"])
def test_half_a_pair_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=f"--{given} was given without"):
        choose(Setting(**{given: "somewhere"}))


def test_the_shipped_pairs_speed_on_a_gpu_is_no_claim() -> None:
    check, subject = Check("L9", "speed"), choose(Setting())
    assert speeds.is_quoted(subject, Setting(gpu=False))
    assert not speeds.is_quoted(subject, Setting(gpu=True))
    assert speeds.is_quoted(dataclasses.replace(subject, name="8B"), Setting(gpu=True))
    report = Report(
        rows=[], baseline="plain", num_prompts=4, max_new_tokens=100, repeats=3, batch_size=1,
        programs_after_warm_up=0, bytes_per_second=None, not_measured=[],
    )  # fmt: skip
    speeds.keep(check, report, None, [], title="No claim: ", quoted=False)
    assert check.tables[0].title.startswith("No claim: ") and not check.plots
    assert list(check.numbers) == ["note"]


def test_a_rival_that_does_not_fit_is_missing_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(directory: Path, **options: object) -> list:
        raise RuntimeError(said)

    monkeypatch.setattr(speeds.TransformersContender, "load", load)
    missing: list[list] = []
    said = "CUDA out of memory. Tried to allocate 16 GiB"
    setting = Setting(gpu=True)
    assert speeds.transformers_or_why_not(choose(Setting()), 4, setting, missing) == []
    assert missing[0][0] == "transformers generate" and missing[0][-1] == said
    said = "CUDA error: device-side assert triggered"
    with pytest.raises(RuntimeError, match="device-side"):
        speeds.transformers_or_why_not(choose(Setting()), 4, setting, missing)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He has 3 + 4 = <<3+4=7>>7 apples\n#### 7", "7"),
        ("#### $1,200.50 in all", "1200.5"),
        ("so 12 apples\n#### -3.00", "-3"),
        ("#### none", None),
        ("no mark: 5", None),
    ],
)
def test_the_number_of_a_reference(text: str, number: str | None) -> None:
    assert reference_number(text) == number


def test_an_answer_is_its_last_number() -> None:
    assert answered_number("First 3, then 4, so the answer is 12.") == "12"
    assert answered_number("#### 9 because of 4") == "9"
    assert answered_number("no idea") is None
    assert is_right("The total is $1,080.", "...\n#### 1080")
    assert not is_right("The total is 108.", "...\n#### 1080")


def test_code_is_right_when_it_begins_as_the_reference() -> None:
    reference = "    for e in l:\n        if e >= t:\n            return False\n    return True\n"
    assert is_right(
        "    for e in l:  # each\n\n        if e >= t:\n            return False\n    return True\n\nprint()", reference
    )
    assert not is_right("    return all(e < t for e in l)\n", reference)


def test_only_questions_that_one_side_missed_speak_about_a_difference() -> None:
    low, high = discordant_interval(4, 4)
    assert low < 0.5 < high
    assert discordant_interval(0, 12)[1] < 0.5  # 2 · 2^-12 < 0.01
    assert discordant_interval(0, 3)[1] > 0.5


def test_task_sanity_needs_a_target_that_answers_and_answers_to_compare() -> None:
    subject = choose(Setting())
    with pytest.raises(ValueError, match="no chat template"):
        questions(subject, rehearsal=False)
    assert len(questions(subject, rehearsal=True)) == 8


def validate(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, dict]:
    command = [sys.executable, "-m", "pytest", "--report-dir", str(tmp_path), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    report = tmp_path / "report.json"
    return done, json.loads(report.read_text()) if report.is_file() else {}


def test_a_rehearsal_runs_the_flow_and_says_that_it_is_one(tmp_path: Path) -> None:
    done, report = validate(
        tmp_path, "validation/test_task_sanity.py", "validation/test_speed.py", "--gpu", "--rehearse",
        "--price-per-hour", "3.6", "-k", "accuracy_does_not or Qwen3-tiny-batch-1]",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert report["rehearsal"] is True
    assert report["verdict"] != "passed"
    ran = {check["level"]: check for check in report["checks"] if check["verdict"] == "passed"}
    assert ran["L7"]["numbers"]["questions"] == 8
    rows = ran["L9"]["tables"][0]["rows"]
    assert [row[0] for row in rows] == ["plain bfloat16", "chain K=3", "tree N=16 G=4"]
    assert "accepted with probability 0.7" in ran["L9"]["tables"][0]["title"]
    assert all(isinstance(row[13], float) for row in rows)  # the cost
    assert report["environment"]["subject"]["name"] == "the shipped pair"


def test_what_the_guide_says_of_memory_is_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three engines share the device; the smallest share, vLLM's, decides. JAX's is read as it is set."""
    guide = " ".join((ROOT / "docs" / "validation.md").read_text().split())
    target = KNOWN_MODELS["Llama-3.1-8B"]
    fits, share_in_float32 = {}, 0.33
    for weights in ("bfloat16", "float32"):
        for name in ("H100", "H200"):
            one = Deployment(
                target=target,
                head=usual_head(target),
                accelerator=accelerator_named(name),
                weights=weights,
                cache=weights,
            )
            for share in (SHARE_OF_JAX, SHARE_OF_VLLM if weights == "bfloat16" else share_in_float32):
                plan = memory_plan(
                    one, batch=8, context=2048, num_draft_tokens=5, prefill_tokens=2048, utilization=share
                )
                fits[weights, name, share] = plan.fits
            assert f"{plan.total / 1e9:.0f} GB" in guide
            assert f"{one.accelerator.memory_bytes / 1e9:.0f} GB" in guide
    assert f"`--vllm-memory {share_in_float32}` gives it {plan.budget / 1e9:.0f} GB" in guide
    assert all(fit is (key[:2] != ("float32", "H100")) for key, fit in fits.items())
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, "")  # so that they are put back
        monkeypatch.delenv(name)
    assert share_of_jax() == 0.75
    share_memory()
    assert share_of_jax() == SHARE_OF_JAX
