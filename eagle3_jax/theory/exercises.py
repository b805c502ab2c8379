"""Exercises on the theory; the answers are computed."""

from __future__ import annotations

from typing import NamedTuple

from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.accelerators import KNOWN_ACCELERATORS
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment
from eagle3_jax.theory.sizes import parameters
from eagle3_jax.theory.speedup import (
    blended_tau,
    draft_rate_from_tau,
    rates_for_speedup,
    speedup,
    tau_from_conditional_rate,
    tau_from_draft_rate,
)


class Exercise(NamedTuple):
    """A question with its answer."""

    question: str
    answer: str


def exercises() -> list[Exercise]:
    """Five questions that articles on EAGLE-3 in production ask their readers."""
    return [_rate_for_a_speedup(), _blended_traffic(), _modes(), _tail(), _head_or_draft_model()]


def _rate_for_a_speedup() -> Exercise:
    lines = []
    for overhead in (0.1, 0.15, 0.5, 1.0):
        found = [
            rates_for_speedup(wanted, num_draft_tokens=5, verify_cost=1.0, draft_cost=overhead / 5)
            for wanted in (2.0, 3.0)
        ]
        drafts = " and ".join(f"{r.draft_acceptance_rate:.2f}" if r else "impossible" for r in found)
        conditionals = " and ".join(f"{r.conditional_acceptance_rate:.3f}" if r else "impossible" for r in found)
        lines.append(f"K·c = {overhead:g}: draft acceptance rate {drafts}, conditional acceptance rate {conditionals}")
    return Exercise(
        "With K = 5 and a verification that costs one plain step (v = 1), what is needed for 2x and for 3x?",
        "τ = S·(1 + K·c), then either formula backwards. " + ". ".join(lines) + ". The same system has both rates: say "
        "which one you mean.",
    )


def _blended_traffic() -> Exercise:
    shares = (0.7, 0.3)
    draft = blended_tau(shares, [tau_from_draft_rate(rate, 5) for rate in (0.7, 0.4)])
    conditional = blended_tau(shares, [tau_from_conditional_rate(rate, 5) for rate in (0.7, 0.4)])
    low, high = (speedup(draft, num_draft_tokens=5, verify_cost=1.0, draft_cost=c) for c in (0.03, 0.02))
    least, most = (speedup(conditional, num_draft_tokens=5, verify_cost=1.0, draft_cost=c) for c in (0.03, 0.02))
    return Exercise(
        "70 % of the output tokens are chat at 0.7, 30 % code at 0.4, K = 5. What is the blended rate? Does it pay?",
        "Not 0.61: the worse class needs more rounds for its tokens and weighs more. As draft acceptance rates: τ 4.5 "
        f"and 3, blended 1/(0.7/4.5 + 0.3/3) = {draft:.2f}, a rate of {draft_rate_from_tau(draft, 5):.3f}, "
        f"S {low:.1f} to {high:.1f} at v = 1. As conditional acceptance rates: "
        f"τ {tau_from_conditional_rate(0.7, 5):.2f} and {tau_from_conditional_rate(0.4, 5):.2f}, "
        f"blended {conditional:.2f}, S {least:.1f} to {most:.1f}. It pays while batches are small; for the code share "
        f"alone no longer once v + K·c exceeds {tau_from_conditional_rate(0.4, 5):.2f}.",
    )


def _modes() -> Exercise:
    return Exercise(
        "Which ways of drafting does vLLM have, and do they work with chunked prefill?",
        "More than draft model, EAGLE and n-gram: also suffix, Medusa, MLP speculators, EAGLE-3, the MTP family, "
        "DFlash and a class of your own. Chunked prefill is on by default with all of them. It removes the wait behind "
        "long prompts; it cannot bring the time to first token below one pass over the weights.",
    )


def _tail() -> Exercise:
    return Exercise(
        "The mean time per token falls by 25 % and P99 rises by 15 %. Why, and what to do?",
        "Rejected tokens cost no second pass: the correction comes from the same verification, so every round emits at "
        "least one token. But every round is longer (verification of B·(K+1) tokens, K draft passes), and requests "
        "that accept little pay for it; a full batch, a full cache and preemption add to it. Gaps between chunks "
        "also grow, as several tokens share a chunk: compare time per output token. Draft fewer tokens, and fewer "
        "still in large batches (num_speculative_tokens_per_batch_size); capture graphs for B·(K+1) tokens.",
    )


def _head_or_draft_model() -> Exercise:
    target, small = KNOWN_MODELS["Llama-3.3-70B"], KNOWN_MODELS["Llama-3.2-1B"]
    head = usual_head(target)
    deployment = Deployment(target=target, head=head, accelerator=KNOWN_ACCELERATORS["h200"], weights="fp8")
    in_bfloat16 = Deployment(target=small, head=None, accelerator=KNOWN_ACCELERATORS["h200"])
    per_pass = deployment.streamed_bytes(head) - 2 * parameters(head).fusion
    kib = [
        deployment.cache_bytes_per_token(head) / 1024,
        in_bfloat16.cache_bytes_per_token(small) / 1024,
        deployment.cache_bytes_per_token(target) / 1024,
    ]
    return Exercise(
        "What does an EAGLE-3 head for Llama-3.3-70B need, and what a 1B draft model?",
        f"Weights {deployment.weight_bytes(head) / 1e9:.2f} GB ({parameters(head).total / 1e9:.3f} billion) against "
        f"{in_bfloat16.weight_bytes(small) / 1e9:.2f} GB; cache per token {kib[0]:.0f} KiB against {kib[1]:.0f} KiB "
        f"(target {kib[2]:.0f} KiB). A draft pass reads {per_pass / 1e9:.2f} GB, so its c is at least "
        f"{per_pass / deployment.streamed_bytes(target):.3f} of an FP8 target's step; and it is "
        "one layer in series, not sixteen.",
    )
