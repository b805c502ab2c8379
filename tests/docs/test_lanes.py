"""Continuous integration runs every test once, slow ones excepted; those run every night."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import injected_bugs
import markers

ROOT = Path(__file__).parent.parent.parent


def test_the_lanes_partition_the_tests() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lanes = re.findall(r'MARKS="([^"]+)"', text)
    assert len(lanes) == 4
    for torch, bits, slow in itertools.product((False, True), repeat=3):
        chosen = [eval(lane, {"torch": torch, "bits": bits, "slow": slow}) for lane in lanes]
        assert sum(chosen) == (not slow)  # `make nightly` runs the slow ones


def test_the_names_of_slow_tests_exist() -> None:
    for name in markers.SLOW:
        file, _, test = name.partition("::")
        source = markers.source_of(file)
        assert source is not None and test in source.defined, name


def test_every_injected_bug_finds_its_function() -> None:
    """`make nightly` runs their checks. This only shows that no rename has left a bug behind."""
    for mutant in injected_bugs.BUGS.values():
        with mutant.injected():
            pass


def test_a_test_that_needs_pytorch_is_found() -> None:
    assert markers.needs_torch("test_sampling", "test_probabilities_are_those_of_transformers")
    assert not markers.needs_torch("test_sampling", "test_half_precision_logits_become_float32_probabilities")
    assert markers.needs_torch("test_feedback_heads", "test_a_head_drafts_as_its_torch_twin_round_after_round")
