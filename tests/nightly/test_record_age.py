"""The age of committed records: what a nightly run can mend, and a commit cannot."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import validated

from validation.runs import load

ROOT = Path(__file__).parent.parent.parent


def test_the_record_of_the_validation_is_of_recent_code() -> None:
    commit = load(validated.RECORD).environment["git"]["commit"]
    git = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", "eagle3_jax", "conversion"]
    result = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        reason = result.stderr.strip()
        pytest.skip(f"this checkout lacks the commit {commit[:10]}, so the record's age is unknown: {reason}")
    assert int(result.stdout) <= validated.MOST_COMMITS, "run the validation again: make validation, --complete"
