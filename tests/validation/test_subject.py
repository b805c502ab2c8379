"""What ``pytest validation`` validates, right answers, and a rehearsal of a run on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from validation.subject import DEFAULT_TARGET, Setting, choose
from validation.tasks import discordant_interval, is_right

ROOT = Path(__file__).parent.parent.parent


def test_the_shipped_pair_takes_the_place_of_the_default_and_never_of_a_named_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(source: object, part: str) -> Path:
        raise ValueError(f"{source} could not be downloaded: no network")

    monkeypatch.setattr("validation.subject.locate", unreachable)
    subject = choose(Setting(gpu=True))
    assert subject.name == "the shipped pair" and subject.dtypes[0] == "bfloat16"
    assert subject.reason == f"{DEFAULT_TARGET} could not be downloaded: no network"
    with pytest.raises(ValueError, match="mine could not be downloaded"):
        choose(Setting(gpu=True, target="mine", drafter="my-head"))


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
    # not.
    assert discordant_interval(0, 12) == (0, pytest.approx(1 - 0.005 ** (1 / 12)))
    assert discordant_interval(0, 12)[1] < 0.5 < discordant_interval(0, 3)[1]


def test_a_rehearsal_runs_the_flow_of_a_gpu(tmp_path: Path) -> None:
    files = ["validation/test_task_sanity.py", "validation/test_speed.py"]
    options = ["--gpu", "--rehearse", "-k", "accuracy_does_not or Qwen3-tiny-batch-1]"]
    command = [sys.executable, "-m", "pytest", *files, *options, "--report-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["rehearsal"] is True and report["verdict"] != "passed"
    passed = {check["level"] for check in report["checks"] if check["verdict"] == "passed"}
    assert passed == {"L7", "L9"}
