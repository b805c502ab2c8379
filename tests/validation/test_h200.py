"""The script for ten minutes on a GPU runs at tiny shapes, and its rounds read full caches."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import h200
import pytest

COMPILED = Path(tempfile.gettempdir()) / "eagle3-jax-tests-compiled"
MEASURED = ["text", "device", "round"]


def test_a_rehearsal_measures_once_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "h200.json"
    options = ["--rehearse", "--output", str(output), "--compilation-cache", str(COMPILED)]
    monkeypatch.setattr(sys, "argv", ["h200.py", *options, "--only", *MEASURED])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

    h200.main()
    record = json.loads(output.read_text())
    status = {name: part["status"] for name, part in record["parts"].items()}
    assert status == dict.fromkeys(MEASURED, "done")
    assert record["parts"]["text"]["figures"]["same text"] is True
    rounds = record["parts"]["round"]["figures"]
    assert rounds["plain"]["round_in_bases"]["median"] == 1
    assert rounds["chain"]["rounds"] < rounds["plain"]["rounds"] == 63

    h200.main()
    assert json.loads(output.read_text()) == record, "the second run measured something again"


@pytest.mark.parametrize("setting", [h200.FULL, h200.REHEARSAL], ids=["full", "rehearsal"])
def test_caches_are_full_while_rounds_are_timed(setting: h200.Setting) -> None:
    """Attention reads the committed slots only, so the prompt must fill the cache."""
    for context in (setting.context, *setting.contexts):
        options = h200.sizes(setting, 2, context)
        (length,) = {len(prompt) for prompt in options["prompts"]}
        assert length + options["max_new_tokens"] + h200.LARGEST == context
        # Rounds end after the tokens and not at the limit.
        assert options["max_new_tokens"] > setting.tokens
