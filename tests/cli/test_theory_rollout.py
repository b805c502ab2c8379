"""The staged plan: its gates from measured costs, its page from real metrics."""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest
from deployments import served

from eagle3_jax.theory.rollout import (
    MeasuredCosts,
    Traffic,
    accepted_variance,
    plan_rollout,
    requests_to_judge_p99,
    to_markdown,
)


def planned(**changes) -> str:
    plan = rollout_plan(**changes)
    return to_markdown(plan, target="org/target", head="org/head")


def rollout_plan(requests_per_second: float = 5.0, concurrency: int = 16, alpha: float = 0.75, **changes):
    return plan_rollout(
        served(),
        Traffic(
            requests_per_second=requests_per_second, prompt_tokens=1024, output_tokens=256, concurrency=concurrency
        ),
        num_draft_tokens=4,
        conditional_acceptance_rate=alpha,
        **changes,
    )


def test_the_variance_of_accepted_tokens_by_enumeration():
    alpha, k = 0.6, 3
    law = [0.4, 0.24, 0.144, 0.216]  # 0.6^j · 0.4, and 0.6³
    mean = sum(j * p for j, p in enumerate(law))
    assert accepted_variance(alpha, k) == pytest.approx(sum(p * (j - mean) ** 2 for j, p in enumerate(law)))


def test_stages_last_until_a_99th_percentile_can_be_judged():
    assert requests_to_judge_p99() == math.ceil(3.8416 * 0.0099 / 0.0025**2) == 6086
    stages = rollout_plan().stages
    assert [(stage.share, stage.hours) for stage in stages] == [(0.01, 34), (0.1, 24.0), (0.5, 24.0), (1.0, 168.0)]
    assert stages[0].requests == pytest.approx(34 * 180)
    assert rollout_plan(requests_per_second=500.0).stages[0].hours == 1.0


def test_gates_follow_from_measured_costs():
    plan = rollout_plan(measured=MeasuredCosts(1.4, 0.1))
    tau = 1 + 0.75 + 0.5625 + 0.421875 + 0.31640625
    assert plan.expected.mean_acceptance_length == pytest.approx(tau)
    assert plan.break_even_tau == pytest.approx(1.8)
    assert plan.least_tau == pytest.approx((1.8 + tau) / 2)
    assert plan.largest_time_ratio == pytest.approx((1 + 1.8 / tau) / 2)
    assert not plan.obstacles


def test_what_cannot_work_is_not_to_be_started():
    slow = rollout_plan(measured=MeasuredCosts(4.0, 0.1))
    assert any("speed" in text for text in slow.obstacles)
    full = rollout_plan(concurrency=1000)
    assert any("memory" in text for text in full.obstacles)
    assert "**Do not start.**" in to_markdown(full, target="t", head="h")


def test_the_schedule_covers_every_batch_once_and_drafts_less_in_large_ones():
    schedule = rollout_plan(concurrency=512).schedule
    assert schedule[0].first == 1
    assert schedule[-1].last == 1024
    for left, right in itertools.pairwise(schedule):
        assert right.first == left.last + 1
    lengths = [part.num_draft_tokens for part in schedule]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 4 > lengths[-1]


def test_the_page_has_real_metrics_and_commands_that_parse():
    page = planned()
    names = set(re.findall(r"vllm:(\w+)", page))
    assert names == {
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_drafts_total",
        "request_time_per_output_token_seconds_bucket",
        "time_to_first_token_seconds_bucket",
        "generation_tokens_total",
        "num_preemptions_total",
        "num_requests_running",
        "kv_cache_usage_perc",
    }
    config = re.search(r"--speculative-config '(.*?)'", page)
    assert config is not None
    settings = json.loads(config[1])
    assert settings["method"] == "eagle3"
    assert settings["num_speculative_tokens_per_batch_size"][0][0] == 1
    patch = re.search(r"--type=json -p '(.*?)'", page, re.DOTALL)
    assert patch is not None
    assert [step["value"] for step in json.loads(patch[1])] == [100, 0]
    assert "pytest validation --gpu --target org/target --drafter org/head" in page
    for share in ("| 1% |", "| 10% |", "| 50% |", "| 100% |"):
        assert share in page
