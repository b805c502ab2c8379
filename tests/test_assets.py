"""The bundled pair: it loads by default, its drafts are accepted, it never saw measured prompts."""

from __future__ import annotations

import json

import tiny
from corpus import HELD_OUT

import eagle3_jax as e3
from eagle3_jax.files.sources import bundled


def prompts(kind: str) -> list[str]:
    rows = [
        json.loads(line)
        for line in bundled("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [row["prompt"] for row in rows if row["kind"] == kind]


def test_it_drafts_and_writes_what_the_target_writes(shipped: e3.LoadedTarget) -> None:
    drafter = e3.load_drafter(target=shipped)
    code = prompts("code")[:4]
    drafted = tiny.check_same_text(
        shipped, drafter, code, max_new_tokens=48, num_speculative_tokens=5
    )
    # This is far below what is reported, and far above a head that does not fit.
    assert drafted.stats.mean_acceptance_length > 1.5


def test_prompts_come_from_held_out_files_alone() -> None:
    assert len(HELD_OUT) == 33
    rows = [
        json.loads(line)
        for line in bundled("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert {row["name"].rpartition(":")[0] for row in rows} <= HELD_OUT


def test_together_it_is_small() -> None:
    size = sum(path.stat().st_size for path in bundled("").rglob("*") if path.is_file())
    assert size < 60e6
