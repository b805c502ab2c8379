# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · Cost, rollout and published claims
#
# This notebook computes the cost of a million tokens from measured speeds, plans a staged rollout,
# and compares published throughputs with the limits of the hardware. Read
# [03](03_speed_and_tuning.ipynb) first.

# %% tags=["hide-input"]
import sys

sys.path.insert(0, "..")  # where first_cell, machine and pictures are

import first_cell

first_cell.start(repository=True, device=False)

import machine

here = machine.start()
here.banner("rounds", "price")

# %% tags=["hide-input"]

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display
from pictures.style import SERIES

from eagle3_jax.measure.tables import show, to_markdown
from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.bounds import check_claim, round_bound
from eagle3_jax.theory.cost import cost_of, cost_per_million_tokens
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment
from eagle3_jax.theory.rollout import MeasuredCosts, Traffic, plan_rollout
from eagle3_jax.theory.rollout import to_markdown as rollout_page
from eagle3_jax.theory.speedup import (
    conditional_rate_from_tau,
    tau_from_conditional_rate,
    tau_from_draft_rate,
)

PUBLISHED = {2: 2.36, 3: 2.79, 4: 3.08, 5: 3.32, 6: 3.46, 7: 3.54}  # vLLM, Llama-3.1-8B, MT-Bench


def served(name, gpu, weights):
    """Deployment of a known model with its usual head on a known device."""
    model = KNOWN_MODELS[name]
    return Deployment(
        target=model, head=usual_head(model), accelerator=accelerator_named(gpu), weights=weights
    )


# %% [markdown]
# ## Cost of a million tokens
#
# The cost is `price / 3600 / speed · 10⁶`, with the price per hour and the speed in tokens per
# second. The speeds are those of level L9, without the prefill. The largest batch is the one that a
# server would run.

# %%
BUSY = 0.4
price = here.price_per_hour
rows = []
costs = {}
for speed in here.speeds:
    full, real = (
        cost_of(speed.tokens_per_second, price_per_hour=price, busy=share) for share in (1.0, BUSY)
    )
    cost = full.per_million_tokens
    costs[speed.batch, speed.method] = cost
    figures = [speed.tokens_per_second, cost, real.per_million_tokens]
    rows.append([speed.batch, speed.method, *map(show, figures)])
    assert abs(cost * speed.tokens_per_second * 3600 / 1e6 - price) < 1e-6 * price
columns = ["batch", "method", "tokens/s", "cost of 1M tokens", f"cost at {BUSY:.0%} utilization"]
title = f"Level L9, on **{here.device}**; costs {here.price_named}"
display(Markdown(f"{title}\n\n{to_markdown(columns, rows)}"))

# %%
batches = sorted({speed.batch for speed in here.speeds})
smallest = batches[0]
full = batches[-1]
drafts = {
    method: cost
    for (batch, method), cost in costs.items()
    if batch == full and method.startswith(("chain", "tree"))
}
plain = next(speed for speed in here.speeds if speed.batch == full)
assert plain.method.startswith("plain")
assert drafts, f"the report has no speed of a chain or tree at batch {full} (level L9)"
cheapest = min(drafts, key=drafts.__getitem__)
ratio_at_smallest = next(
    speed.ratio for speed in here.speeds if (speed.batch, speed.method) == (smallest, cheapest)
)
slide = costs[full, plain.method] / ratio_at_smallest
print(f"batch {full}: plain {show(costs[full, plain.method])}, {cheapest} {show(drafts[cheapest])}")
print(f"common mistake: plain divided by the speed-up at batch {smallest}: {show(slide)}")
here.verdict(
    "cost",
    f"{cheapest}: {drafts[cheapest] / costs[full, plain.method]:.2f}x the cost of plain decoding,"
    f" batch {full}",
    needs="price",
)

# %% [markdown]
# The batch size has the largest effect: more rows share one reading of the weights. Speculation
# multiplies the speed by the ratio at *your* batch size. This ratio can be below 1.
#
# ## Rollout plan
#
# `eagle3_jax.theory.rollout` plans stages from traffic, acceptance and measured costs. Each stage
# has a duration, a metric, and a limit for going back. The plan is for Llama-3.1-8B on an H100,
# with the costs of a round that `h200.py` measured and the τ that vLLM published for MT-Bench.

# %%
K = 5
timed = here.rounds("round")
step = timed.seconds("plain")
measured = MeasuredCosts(timed.seconds("verify 6") / step, timed.seconds("draft step") / step)
tau = PUBLISHED[K]
traffic = Traffic(requests_per_second=2.0, prompt_tokens=100, output_tokens=128, concurrency=1)
plan = plan_rollout(
    served("Llama-3.1-8B", "H100", "bfloat16"),
    traffic,
    num_draft_tokens=K,
    conditional_acceptance_rate=conditional_rate_from_tau(tau, K),
    measured=measured,
)
print(f"measured at batch 1 on {timed.origin}:")
print(f"v = {plan.verify_cost:.2f}, c = {plan.draft_cost:.3f}; published τ = {tau:.2f}")
print(
    f"break-even τ {plan.break_even_tau:.2f}; predicted S {plan.predicted_speedup:.2f}; gate on τ"
    f" {plan.least_tau:.2f}"
)
print("obstacles:", "; ".join(plan.obstacles) or "none")
for stage in plan.stages:
    print(
        f"  {stage.share:4.0%} of the traffic for {stage.hours:6.1f} hours, {stage.requests:9,.0f}"
        " requests"
    )

assert plan.measured, "the plan uses measured costs"
assert abs(plan.break_even_tau - (plan.verify_cost + K * plan.draft_cost)) < 1e-9
assert (plan.predicted_speedup > 1.0) == (plan.least_tau < tau), "the gate is below the published τ"
assert bool(plan.obstacles) >= (plan.predicted_speedup <= 1.0), (
    "a plan without a speed-up lists an obstacle"
)
shares = [stage.share for stage in plan.stages]
assert shares == sorted(shares) and shares[-1] == 1.0
lines = rollout_page(plan, target="TARGET", head="HEAD").splitlines()[:28]
Markdown(
    "\n".join(line.replace("# ", "#### ", 1) if line.startswith("#") else line for line in lines)
)

# %% [markdown]
# ## Published throughputs
#
# Articles on EAGLE-3 report tokens per second for Llama-3.3-70B in FP8 "at batch 1 to 4". Every
# decoding step reads all weights, so memory bandwidth is an upper bound. `check_claim` assumes the
# best case: batch 4, no context, free drafting, and acceptance of all 5 draft tokens. The other
# rows are figures with a documented setup.

# %%
BIG = ("Llama-3.3-70B", "fp8")
SMALL = ("Llama-3.1-8B", "bfloat16")
CLAIMS = [  # who, model, device, batch, K, tokens/s
    ("articles, plain, batch 1-4", BIG, "H100-PCIe", 4, 0, 1200.0),
    ("articles, plain, batch 1-4", BIG, "H100", 4, 0, 1500.0),
    ("articles, plain, batch 1-4", BIG, "H200", 4, 0, 1700.0),
    ("articles, plain, batch 1-4", BIG, "B200", 4, 0, 2400.0),
    ("articles, EAGLE-3, batch 1-4", BIG, "H100-PCIe", 4, 5, 3600.0),
    ("articles, EAGLE-3, batch 1-4", BIG, "H100", 4, 5, 4400.0),
    ("articles, EAGLE-3, batch 1-4", BIG, "H200", 4, 5, 6200.0),
    ("articles, EAGLE-3, batch 1-4", BIG, "B200", 4, 5, 8500.0),
    ("articles, plain, 8B", SMALL, "L40S", 4, 0, 3800.0),
    ("TensorRT-LLM by NVIDIA, plain", BIG, "H200", 1, 0, 51.14),
    ("SGLang documentation, plain", SMALL, "H100", 1, 0, 158.34),
    ("vLLM pull request 16937, plain", SMALL, "H100", 1, 0, 133.0),
    ("vLLM pull request 16937, EAGLE-3", SMALL, "H100", 1, 2, 220.21),
]
rows = []
shares = {}
for who, (model, weights), gpu, batch, k, speed in CLAIMS:
    claim = check_claim(
        served(model, gpu, weights),
        tokens_per_second=speed,
        batch=batch,
        context=0,
        num_draft_tokens=k,
    )
    shares[f"{who}, {gpu}"] = (claim.share_of_bound, claim.possible)
    figures = [show(speed), show(claim.bound), f"{claim.share_of_bound:.2f}"]
    needed = "none" if claim.batch_needed is None else claim.batch_needed
    rows.append([who, model, gpu, *figures, needed, "possible" if claim.possible else "IMPOSSIBLE"])
columns = [
    "source",
    "model",
    "device (data sheet)",
    "tokens/s",
    "bound",
    "share of bound",
    "batch needed",
    "verdict",
]

for row in rows:
    expected = "IMPOSSIBLE" if row[0].startswith("articles") else "possible"
    assert row[-1] == expected, f"{row[0]} on {row[2]} was found {row[-1]}"

# %% tags=["hide-input"]
figure, axes = plt.subplots(figsize=(8.4, 0.28 * len(shares) + 1.2))
colours = [SERIES[0] if possible else SERIES[3] for _, possible in shares.values()]
axes.barh(list(shares), [share for share, _ in shares.values()], color=colours)
axes.axvline(1.0, color="#3c4043", linewidth=1.2)
axes.invert_yaxis()
axes.set(
    xscale="log",
    xlabel="tokens/s divided by the upper bound, by data sheet",
    title="Published throughputs; right of the line: impossible",
)
plt.show()

# %%
bound = round_bound(served(BIG[0], "H200", BIG[1]), batch=1, context=0, num_draft_tokens=5)
assert bound.plain_seconds > 8e-3, "a time to first token of 8 ms is impossible"
assert bound.verify_seconds / 6 > 0.3e-3, "0.3 ms between tokens is impossible"
for speed, cost in {1700.0: 0.229, 3800.0: 0.102, 6200.0: 0.063}.items():
    assert abs(cost_per_million_tokens(speed, 1.40) - cost) < 0.0006, (
        "the articles' cost arithmetic is correct"
    )
Markdown(to_markdown(columns, rows))

# %% [markdown]
# The column "batch needed" has the smallest batch size at which plain decoding can reach a figure.
# The articles' figures are probably throughputs of a loaded server.
#
# ## Published acceptance rates
#
# For the draft acceptance rate, `τ = 1 + K·r` is an identity. For the conditional acceptance rate,
# `τ = (1 - α^(K+1))/(1 - α)`. The table of one article fits neither formula. The same article
# reports an acceptance that falls from 0.82 to 0.52 between batch 1 and 64. Acceptance depends on
# *p* and *q*. It does not depend on the batch size.

# %%
# K, rate, tokens per step
ARTICLE = [(3, 0.84, 2.4), (5, 0.82, 3.5), (8, 0.79, 5.0), (12, 0.74, 6.1)]
rows = []
for k, rate, claimed in ARTICLE:
    formulas = tau_from_draft_rate(rate, k), tau_from_conditional_rate(rate, k)
    rows.append([k, rate, claimed, *(f"{estimate:.2f}" for estimate in formulas)])
    assert min(abs(claimed - estimate) for estimate in formulas) > 0.3, (
        "one of the formulas fits after all"
    )
gains = np.diff(list(PUBLISHED.values()))
assert np.all(gains > -0.02) and gains[-1] < gains[0], "each further token gains less"
taus = {speed.batch: speed.tau for speed in here.speeds if speed.method == cheapest}
print("τ by batch size, measured:", {batch: round(length, 3) for batch, length in taus.items()})
assert max(taus.values()) - min(taus.values()) < 0.1 * max(taus.values())
Markdown(
    to_markdown(["K", "rate (article)", "tokens per step (article)", "1 + K·r", "geometric"], rows)
)

# %% [markdown]
# ## Common mistakes
#
# **Checking a claim at a different batch size or precision.** 6,200 tokens/s is possible at batch
# 32. In int4 the 70B model reads fewer bytes, but 6,200 tokens/s is still impossible at batch 4.

# %%
for weights, batch, possible in (("fp8", 32, True), ("int4", 4, False)):
    deployment = served(BIG[0], "H200", weights)
    claimed = {"tokens_per_second": 6200, "batch": batch, "context": 0, "num_draft_tokens": 5}
    claim = check_claim(deployment, **claimed)
    print(f"{weights}, batch {batch}: {claim.share_of_bound:.2f} of the bound")
    assert claim.possible == possible

# %% [markdown]
# ## Exercises
#
# **1.** Which speed gives a cost of 0.50 per million tokens, at a price of 3.50 per hour?
#
# <details><summary>Answer</summary>
#
# `3.5 / 3600 / 0.5 · 10⁶`, about 1,944 tokens/s.
#
# </details>
#
# **2.** vLLM has τ = 2.79 at K = 3. Which two "acceptance rates" can an article report for it?
#
# <details><summary>Answer</summary>
#
# The draft acceptance rate `(2.79 - 1) / 3 = 0.60`, and the larger conditional acceptance rate. The
# cell computes both.
#
# </details>

# %%
draft = (PUBLISHED[3] - 1) / 3
conditional = conditional_rate_from_tau(PUBLISHED[3], 3)
print(f"draft acceptance rate {draft:.2f}, conditional acceptance rate {conditional:.2f}")
assert conditional > draft
assert abs(cost_per_million_tokens(3.5 / 3600 / 0.5 * 1e6, 3.5) - 0.5) < 1e-12

# %% [markdown]
# ## Checked claims
#
# - Cost times speed equals the price.
# - The break-even τ is `v + K·c`. If speculation pays off, the gate is below the published τ.
#   Stages grow to all traffic.
# - Every throughput of the articles is impossible at its batch size. Every figure with a documented
#   setup is possible.
# - The article's acceptance table fits neither formula. For one τ, the two acceptance rates differ.
#   Acceptance does not depend on the batch size.
# - The articles' latencies are shorter than one reading of the weights. Their cost arithmetic is
#   correct.
