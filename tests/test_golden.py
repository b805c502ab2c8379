"""Every integer of runs recorded from the official EAGLE code and from vLLM; see ``golden/``.

A drafter that is merely plausible still decodes losslessly; only traces of the official code show
that it is EAGLE-3.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import tiny

from eagle3_jax import (
    DynamicTree,
    SpeculationStats,
    SpeculativeDecoder,
)

pytestmark = pytest.mark.core

TREE = DynamicTree(num_nodes=60, max_depth=8, top_k=10)


def parents_of(tree_mask: list[str]) -> list[int]:
    """Returns the parent of every node, its deepest proper ancestor.

    The official code stores only the mask.
    """
    parents = [-1]
    for node, row in enumerate(tree_mask[1:], 1):
        ancestors = [seen for seen in range(node) if row[seen] == "1"]
        parents.append(max(ancestors))
    return parents


def check_official_trace(head: str, trace: str, rounds: int | None = None) -> None:
    target, drafter = tiny.golden_pair("official", head)
    recorded = tiny.golden_trace(f"official/{trace}.json")
    recorded_tree = DynamicTree(
        num_nodes=recorded["total_token"], max_depth=recorded["depth"] + 1, top_k=recorded["top_k"]
    )
    assert recorded_tree == TREE

    decoder = SpeculativeDecoder(target, drafter, tree=TREE, stop_tokens=())
    # The official code keeps the last token that the target chose to itself.
    new_tokens = len(recorded["output"]) - len(recorded["prompt"]) + 1

    played = 0
    for ours, theirs in zip(
        decoder.rounds(recorded["prompt"], max_new_tokens=new_tokens),
        recorded["rounds"],
        strict=False,
    ):
        assert ours.draft.tokens[0].tolist() == theirs["draft_tokens"], f"tokens of round {played}"
        parents = theirs.get("parents") or parents_of(theirs["tree_mask"])
        assert ours.draft.parents[0].tolist() == parents, f"parents of round {played}"
        depths = (np.asarray(ours.positions[0]) - theirs["input_len"]).tolist()
        assert depths == theirs["tree_position_ids"]
        accepted = int(ours.verdict.num_accepted[0])
        assert accepted == theirs["accept"], f"acceptance in round {played}"

        played += 1
        if played == rounds:
            return

        length = int(ours.state.length[0])
        output = recorded["output"]
        text = ours.state.tokens[0, :length].tolist()
        assert text[: len(output)] == output[:length]

    assert played == len(recorded["rounds"])


def test_a_drafted_tree_equals_the_official_code_node_by_node() -> None:
    check_official_trace("eagle3", "trace_eagle3_greedy_fp32")


@pytest.mark.torch
def test_a_deep_drafted_tree_equals_the_official_code_node_by_node() -> None:
    check_official_trace("eagle3_sharp", "trace_sharp_60_7_10")


@pytest.mark.torch
def test_a_drafted_tree_of_an_eagle1_head_equals_the_official_code_node_by_node() -> None:
    """Runs the head of EAGLE-1 with the tree of EAGLE-2."""
    check_official_trace("eagle1", "trace_eagle1_greedy_fp32")


@pytest.mark.torch
def test_the_first_drafted_tree_equals_the_official_code() -> None:
    """Compares the tree after the prompt: nine runs of the head and no verification."""
    target, head = tiny.golden_pair("official", "eagle3_sharp")
    recorded = tiny.golden_trace("official/trace_sharp_60_7_10.json")
    decoder = SpeculativeDecoder(target, head, tree=TREE)
    state = decoder.prefill(recorded["prompt"])
    draft = jax.jit(decoder.loop.drafter.propose)(
        head.params, state.drafter, state.keys, state.sampling
    )
    assert draft.tokens[0].tolist() == recorded["rounds"][0]["draft_tokens"]
    assert draft.parents[0].tolist() == parents_of(recorded["rounds"][0]["tree_mask"])


def vllm_decoder() -> tuple[SpeculativeDecoder, dict[str, Any]]:
    recorded = tiny.golden_trace("vllm/trace_eagle3_k3_float32.json")
    return SpeculativeDecoder(
        *tiny.golden_pair("vllm"),
        num_speculative_tokens=recorded["num_speculative_tokens"],
        stop_tokens=(),
    ), recorded


def check_vllm_counters(requests: int = 4) -> None:
    """Compares requests in ragged batches of four: tokens, and each request's counts of drafts."""
    decoder, recorded = vllm_decoder()
    results = []
    drafted = recorded["num_speculative_tokens"]

    for start in range(0, requests, 4):
        batch = recorded["requests"][start : start + 4]
        result = decoder.generate(
            [request["prompt"] for request in batch], max_new_tokens=recorded["max_new_tokens"]
        )
        assert result.tokens == [request["output"] for request in batch]

        for row, request in zip(result.rows, batch, strict=True):
            assert int(row.stats.num_accepted_tokens) == sum(request["per_step_accepted"])
            assert int(row.stats.num_draft_tokens) == sum(request["per_step_drafted"])
            assert int(row.stats.num_drafts) == len(request["per_step_drafted"])
            reached = [
                sum(count > position for count in request["per_step_accepted"])
                for position in range(drafted)
            ]
            assert row.stats.num_accepted_tokens_per_pos.tolist() == reached
        results.append(result.stats)

    if requests == len(recorded["requests"]):
        counters = {
            f"spec_decode_{name}": value
            for name, value in SpeculationStats.merge(results).to_json().items()
        }
        assert {name: counters[name] for name in recorded["metrics"]} == recorded["metrics"]


def test_a_recorded_vllm_run_is_reproduced_with_all_its_counters() -> None:
    check_vllm_counters(requests=20)


def test_a_recorded_vllm_run_is_reproduced_step_by_step() -> None:
    decoder, recorded = vllm_decoder()
    requests = recorded["requests"]
    accepted: list[list[int]] = [[] for _ in requests]
    batch = [request["prompt"] for request in requests]
    running = [True] * len(requests)
    for played in decoder.rounds(batch, max_new_tokens=recorded["max_new_tokens"]):
        for row, count in enumerate(played.verdict.num_accepted.tolist()):
            if running[row]:
                accepted[row].append(count)
        running = played.state.running.tolist()
    assert accepted == [request["per_step_accepted"] for request in requests]
