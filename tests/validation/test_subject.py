"""What ``pytest validation`` validates: the pair that it chooses, its questions, and a rehearsal of a run on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_jax.files.sources import bundled
from eagle3_jax.prompts.benchmark import shipped
from validation import speeds
from validation.subject import DEFAULT_TARGET, Setting, choose
from validation.tasks import discordant_interval, is_right, questions

ROOT = Path(__file__).parent.parent.parent


def test_the_default_is_the_shipped_pair_with_its_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = choose(Setting())
    assert (subject.name, subject.reason) == ("the shipped pair", "")
    assert [prompt.text for prompt in subject.prompts] == shipped()
    assert subject.pair("float32")[0] is subject.pair("float32")[0]
    with pytest.raises(ValueError, match="no chat template"):
        questions(subject, rehearsal=False)
    with pytest.raises(ValueError, match="--target was given without"):
        choose(Setting(target="somewhere"))

    def unreachable(source: object, part: str) -> Path:
        raise ValueError(f"{source} could not be downloaded: no network")

    monkeypatch.setattr("validation.subject.locate", unreachable)
    subject = choose(Setting(gpu=True))
    assert subject.name == "the shipped pair" and subject.dtypes[0] == "bfloat16"
    assert (
        subject.description["not the default"]
        == f"{DEFAULT_TARGET} could not be downloaded: no network"
    )
    with pytest.raises(ValueError, match="mine could not be downloaded"):
        choose(Setting(gpu=True, target="mine", drafter="my-head"))


def test_on_a_gpu_one_precision_is_loaded_at_a_time() -> None:
    """Two precisions of an 8B model do not fit next to vLLM."""
    for gpu, loaded in ((True, ["bfloat16"]), (False, ["float32", "bfloat16"])):
        subject = choose(
            Setting(gpu=gpu, target=str(bundled("target")), drafter=str(bundled("eagle3")))
        )
        subject.pair("float32")
        subject.pair("bfloat16")
        assert list(subject._pairs) == loaded


def test_an_engine_that_does_not_fit_is_missing_and_another_error_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = [
        "CUDA out of memory. Tried to allocate 16 GiB",
        "CUDA error: device-side assert triggered",
    ]

    def load(directory: Path, **options: object) -> list:
        raise RuntimeError(messages[len(missing)])

    monkeypatch.setattr(speeds.TransformersContender, "load", load)
    missing: list[list] = []
    assert speeds.transformers_or_why_not(choose(Setting()), 4, Setting(gpu=True), missing) == []
    assert missing[0][0] == "transformers generate" and missing[0][-1] == messages[0]
    with pytest.raises(RuntimeError, match="device-side"):
        speeds.transformers_or_why_not(choose(Setting()), 4, Setting(gpu=True), missing)


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        ("First 3, then 4, so the answer is 12.", "3 + 4 = <<3+4=7>>7 apples\n#### 12", True),
        ("#### 9 because of 4", "#### 9", True),
        ("The total is 1200.50", "#### $1,200.50 in all", True),
        ("It is -3", "so 12 apples\n#### -3.00", True),
        ("The total is 108.", "...\n#### 1080", False),
        ("no idea", "#### 7", False),
    ],
)
def test_an_answer_is_right_if_its_number_is(text: str, reference: str, right: bool) -> None:
    assert is_right(text, reference) is right


def test_only_questions_that_one_side_missed_count_for_a_difference() -> None:
    low, high = discordant_interval(4, 4)
    assert low < 0.5 < high
    # The bound is the share p with (1 - p)^n = 0.005, so 12 of 12 are a difference and 3 of 3 are
    # none.
    assert discordant_interval(0, 12) == (0, pytest.approx(1 - 0.005 ** (1 / 12)))
    assert discordant_interval(0, 12)[1] < 0.5 < discordant_interval(0, 3)[1]


def test_a_rehearsal_runs_the_flow_of_a_gpu(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "pytest", "validation/test_task_sanity.py", "validation/test_speed.py", "--gpu",
        "--rehearse", "--price-per-hour", "3.6", "-k", "accuracy_does_not or Qwen3-tiny-batch-1]",
        "--report-dir", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["rehearsal"] is True and report["verdict"] != "passed"
    ran = {check["level"]: check for check in report["checks"] if check["verdict"] == "passed"}
    assert ran["L7"]["numbers"]["questions"] == 8
    rows = ran["L9"]["tables"][0]["rows"]
    assert [row[0] for row in rows] == ["plain bfloat16", "chain K=3", "tree N=16 G=4"]
    assert all(isinstance(row[13], float) for row in rows), "the cost"
