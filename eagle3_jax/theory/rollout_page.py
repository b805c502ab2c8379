"""The page of a staged plan: its numbers, commands and queries in the text of ``rollout.md``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from eagle3_jax.theory.rollout import RolloutPlan


def to_markdown(plan: RolloutPlan, *, target: str, head: str) -> str:
    """The plan as a page.

    Args:
        plan: Its numbers.
        target: Directory or hub id of the target, for the commands.
        head: The same of the head.
    """
    traffic, deployment, k = plan.traffic, plan.deployment, plan.num_draft_tokens
    obstacles = "".join(f"- **Do not start.** {text}\n" for text in plan.obstacles)
    facts = [
        ("target, head", f"{deployment.target.name}, {deployment.head.name if deployment.head else 'none'}"),
        (
            "replica",
            f"{deployment.num_accelerators} x {deployment.accelerator.name}, weights {deployment.weights}, "
            f"cache {deployment.cache}",
        ),
        (
            "traffic",
            f"{traffic.requests_per_second:g} requests/s, {traffic.prompt_tokens} + {traffic.output_tokens} tokens, "
            f"{traffic.concurrency} sequences at the peak",
        ),
        ("draft", f"chain of K = {k}"),
        (
            "expected",
            f"τ {plan.expected.mean_acceptance_length:.2f}: draft acceptance rate "
            f"{plan.expected.draft_acceptance_rate:.2f}, conditional acceptance rate "
            f"{plan.expected.conditional_acceptance_rate:.2f}",
        ),
        (
            "costs at the peak",
            f"v {plan.verify_cost:.2f}, c {plan.draft_cost:.3f}, {'measured' if plan.measured else 'from datasheets'}: "
            f"break-even τ {plan.break_even_tau:.2f}, S {plan.predicted_speedup:.2f}",
        ),
        (
            "roofline stops paying at",
            "no batch" if plan.break_even_batch is None else f"{plan.break_even_batch} sequences",
        ),
        (
            "memory at the peak",
            f"{plan.memory.total / 1e9:.1f} of {plan.memory.budget / 1e9:.1f} GB on each; the caches hold "
            f"{plan.memory.cache_capacity_tokens:,.0f} tokens",
        ),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in facts)
    template = Path(__file__).with_name("rollout.md").read_text(encoding="utf-8")
    return template.format(
        title=deployment.target.name,
        obstacles=f"{obstacles}\n" if obstacles else "",
        facts=table,
        validate=f"pytest validation --gpu --target {shlex.quote(target)} --drafter {shlex.quote(head)}",
        doctor=f"eagle3 doctor --target {shlex.quote(target)} --drafter {shlex.quote(head)}",
        serve=_serve(plan, target=target, head=head),
        plain=_serve(plan, target=target, head=None),
        tau=plan.expected.mean_acceptance_length,
        least_tau=plan.least_tau,
        break_even=plan.break_even_tau,
        least_rate=(plan.least_tau - 1) / k,
        error=plan.tau_standard_error,
        ratio=plan.largest_time_ratio,
        needed=plan.requests_for_p99,
        stages="\n".join(f"| {stage.share:.0%} | {stage.hours:g} h | {stage.requests:,.0f} |" for stage in plan.stages),
        **_queries(plan),
    )


def _serve(plan: RolloutPlan, *, target: str, head: str | None) -> str:
    words = ["vllm", "serve", target]
    if plan.deployment.cache in ("fp8",):
        words += ["--kv-cache-dtype", plan.deployment.cache]
    if plan.deployment.num_accelerators > 1:
        words += ["--tensor-parallel-size", str(plan.deployment.num_accelerators)]
    if head is not None:
        settings = {
            "method": "eagle3",
            "model": head,
            "num_speculative_tokens": plan.num_draft_tokens,
            "num_speculative_tokens_per_batch_size": [
                [part.first, part.last, part.num_draft_tokens] for part in plan.schedule
            ],
        }
        words += ["--speculative-config", json.dumps(settings)]
    return shlex.join(words)


def _queries(plan: RolloutPlan) -> dict[str, str]:
    def rate(name: str) -> str:
        return f'sum(rate(vllm:spec_decode_{name}_total{{job="vllm-spec"}}[15m]))'

    def quantile(q: float, name: str, job: str) -> str:
        return f'histogram_quantile({q:g}, sum by (le) (rate(vllm:{name}_seconds_bucket{{job="{job}"}}[15m])))'

    accepted, drafts, drafted = rate("num_accepted_tokens"), rate("num_drafts"), rate("num_draft_tokens")
    time, first = "request_time_per_output_token", "time_to_first_token"
    per_position = 'sum by (position) (rate(vllm:spec_decode_num_accepted_tokens_per_pos_total{job="vllm-spec"}[15m]))'
    return {
        "tau_query": f"1 + {accepted}\n  / {drafts}",
        "rate_query": f"{accepted}\n  / {drafted}",
        "position_query": f"{per_position}\n  / scalar({drafts})",
        "median_query": f"{quantile(0.5, time, 'vllm-spec')}\n  / {quantile(0.5, time, 'vllm-plain')}",
        "tail_query": f"{quantile(0.99, time, 'vllm-spec')}\n  / {quantile(0.99, time, 'vllm-plain')}",
        "first_query": f"{quantile(0.99, first, 'vllm-spec')}\n  / {quantile(0.99, first, 'vllm-plain')}",
        "tau_alert": f"1 + {accepted} / {drafts} < {plan.break_even_tau:.2f}",
        "silent_alert": f'{drafts} == 0\n  and sum(rate(vllm:generation_tokens_total{{job="vllm-spec"}}[15m])) > 0',
    }
