"""What `inspect` and `doctor` say of checkpoints of ours, and that the bundled pair needs no arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_jax import conversion
from eagle3_jax.cli import run
from eagle3_jax.conversion.acceptance import Agreement

OFFICIAL = Path(__file__).parent / "golden" / "official"


@pytest.mark.parametrize("to", ["jax", "eagle", "sglang", "vllm"])
def test_a_description_names_the_layout_that_was_written(tmp_path: Path, to: str) -> None:
    config = conversion.read_target(OFFICIAL / "target").config
    conversion.convert(OFFICIAL / "eagle3", tmp_path / "head", to, config)
    description = conversion.describe(tmp_path / "head")
    assert (description.dialect, description.loadable) == (to, True)


def test_what_needs_its_target_has_a_note_and_no_problem() -> None:
    pytest.importorskip("torch")  # one of them is a pickle
    for head in ("eagle3", "eagle1"):
        description = conversion.describe(OFFICIAL / head)
        assert (description.loadable, description.problem) == (True, "")
        assert "give the target as well" in description.note


def test_inspect_alone_describes_the_bundled_pair(capsys: Any) -> None:
    assert run(["inspect", "--json"]) == 0
    kinds = [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["target: Llama", "draft head: EAGLE-3"]
    assert run(["inspect"]) == 0
    out = capsys.readouterr().out
    assert all(kind in out for kind in kinds)


def test_doctor_alone_examines_the_bundled_pair(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Measuring it takes seconds and is tested elsewhere.
    agreement = Agreement(rates=(0.7, 0.7, 0.6), counts=(20, 14, 10))
    monkeypatch.setattr("eagle3_jax.conversion.doctor.forced_agreement", lambda *_: agreement)
    assert run(["doctor", "--json", "--compilation-cache", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_another_target_needs_a_head_of_its_own(capsys: Any) -> None:
    assert run(["doctor", "--target", str(OFFICIAL / "target")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "add --drafter DIRECTORY" in err
