"""L8, without anybody's program: runs of vLLM and of the official EAGLE code that were recorded, integer for integer.

The checks are those of ``tests``, which run on every commit; here they run on the device that is validated.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import test_golden
import test_recorded_drafters

from validation.checks import Check

pytestmark = pytest.mark.level("L8")


def test_recorded_rounds_of_vllm(check: Check) -> None:
    """Tokens, and of every request how much was drafted and accepted, and vLLM's own counters."""
    recorded = test_golden.vllm_decoder()[1]
    test_golden.check_vllm_counters(requests=len(recorded["requests"]))
    check.number(requests=len(recorded["requests"]), rounds=recorded["metrics"]["spec_decode_num_drafts"])


@pytest.mark.parametrize("name", test_recorded_drafters.NAMES)
def test_recorded_rounds_of_other_methods(check: Check, tmp_path: Path, name: str) -> None:
    """Tokens, accepted counts of every round, and vLLM's own counters."""
    found = test_recorded_drafters.check_recorded_rounds(name, tmp_path)
    check.number(requests=len(found.ours), rounds=int(found.stats.num_drafts))


def test_recorded_trees_of_the_official_code(check: Check) -> None:
    """Tokens, parents and acceptance of every node of every round."""
    test_golden.check_official_trace("eagle3", "trace_eagle3_greedy_fp32")
    check.number(nodes_per_round=test_golden.TREE.num_nodes)


def test_recorded_deep_trees_of_the_official_code(check: Check) -> None:
    """Of a head that is sure of itself, so that deep nodes are accepted."""
    pytest.importorskip("torch", reason="this head is a pickle of PyTorch")
    test_golden.check_official_trace("eagle3_sharp", "trace_sharp_60_7_10")
    check.number(nodes_per_round=test_golden.TREE.num_nodes)
