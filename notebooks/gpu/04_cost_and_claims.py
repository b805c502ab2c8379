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
here.banner("price")

# %% tags=["hide-input"]

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display
from pictures.style import SERIES

from eagle3_jax.bench.run import measure
from eagle3_jax.bench.tables import show, to_markdown
from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.accelerators import accelerator_named, custom_accelerator
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
from validation.speeds import chain, faults, is_quoted
from validation.subject import some_prompts

# %% [markdown]
# ## Cost of a million tokens
#
# The cost is `price / 3600 / speed · 10⁶`, with the price per hour and the speed in tokens per
# second. The speed includes the prefill. It is measured at batch 1 and at larger batches, because
# servers run larger batches.

# %%
K = 3
BATCHES = here.amount(cpu=(1, 8), gpu=(1, 8, 32))
LIMIT, REPEATS = here.amount(cpu=(24, 2), gpu=(128, 5))
pair = here.pair
dtype = here.dtype
price = here.price_per_hour
if here.on_gpu and not is_quoted(here.subject, here.setting):
    print("On a GPU, the shipped pair measures only kernel launches. Set EAGLE3_TARGET.")
reports = {}
for batch in BATCHES:
    contenders = [chain(pair, dtype, 0), chain(pair, dtype, K)]
    reports[batch] = measure(
        contenders,
        some_prompts(here.subject, max(batch, 4)),
        max_new_tokens=LIMIT,
        repeats=REPEATS,
        baselines=[contenders[0].name],
        batch_size=batch,
        cost_rounds=8,
        streams=0,
        large=here.amount(cpu=2**26, gpu=2**32) if batch == 1 else 0,
    )
    assert not faults(reports[batch]), "; ".join(faults(reports[batch]))

# %%
BUSY = 0.4
rows = []
costs = {}
for batch, report in reports.items():
    for row in report.rows:
        speed = row.total_tokens_per_second
        full, real = (
            cost_of(speed.median, price_per_hour=price, busy=share) for share in (1.0, BUSY)
        )
        interval = sorted(
            cost_per_million_tokens(speed_bound, price) for speed_bound in (speed.low, speed.high)
        )
        costs[batch, row.name] = (full.per_million_tokens, *interval)
        figures = [
            show(value)
            for value in (speed.median, full.per_million_tokens, real.per_million_tokens)
        ]
        rows.append([batch, row.name, *figures])
columns = [
    "batch",
    "method",
    "tokens/s, prefill included",
    "cost of 1M tokens",
    f"cost at {BUSY:.0%} utilization",
]
title = f"{here.subject.name}, {dtype}, on **{here.device}**; costs {here.price_named}"
display(Markdown(f"{title}\n\n{to_markdown(columns, rows)}"))
for (batch, name), (cost, *_) in costs.items():
    row = next(row for row in reports[batch].rows if row.name == name)
    assert abs(cost * row.total_tokens_per_second.median * 3600 / 1e6 - price) < 1e-6 * price
names = [row.name for row in reports[1].rows]
full = BATCHES[-1]
plain, fast = (costs[full, name][0] for name in names)
slide = plain / reports[1].rows[1].total_ratio_interval.value
print(f"batch {full}: plain {show(plain)}, {names[1]} {show(fast)}")
print(f"common mistake: plain divided by the speed-up at batch 1: {show(slide)}")
here.verdict(
    "cost",
    f"{names[1]}: {fast / plain:.2f}x the cost of plain decoding, batch {full}",
    needs="price",
)

# %% [markdown]
# The batch size has the largest effect: more rows share one reading of the weights. Speculation
# multiplies the speed by the ratio at *your* batch size. This ratio can be below 1.
#
# ## Rollout plan
#
# `eagle3_jax.theory.rollout` plans stages from traffic, acceptance and measured costs. Each stage
# has a duration, a metric, and a limit for going back. The plan uses the costs of the largest batch
# above.

# %%
measured = reports[BATCHES[-1]].rows[1]
tau = measured.acceptance.mean_acceptance_length
alpha = conditional_rate_from_tau(tau, K)
weights = "float32" if dtype == "float32" else "bfloat16"
deployment = Deployment(
    target=pair[0].model.config,
    head=pair[1].drafter.config,
    accelerator=custom_accelerator(
        gb_per_s=reports[1].bytes_per_second / 1e9,
        base=here.accelerator,
        memory_gb=None if here.accelerator else 16.0,  # assumed
    ),
    weights=weights,
    cache=weights,
    target_name=here.subject.name,
    head_name="its EAGLE-3 head",
)
traffic = Traffic(
    requests_per_second=2.0, prompt_tokens=100, output_tokens=128, concurrency=BATCHES[-1]
)
plan = plan_rollout(
    deployment,
    traffic,
    num_draft_tokens=K,
    conditional_acceptance_rate=alpha,
    measured=MeasuredCosts(measured.verify_cost, measured.draft_cost),
)
print(f"measured at batch {BATCHES[-1]} on {here.device}:")
print(f"v = {plan.verify_cost:.2f}, c = {plan.draft_cost:.3f}, τ = {tau:.2f}")
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
assert (plan.predicted_speedup > 1.0) == (plan.least_tau < tau), "the gate is below the measured τ"
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
def served(name, gpu, weights):
    """Deployment of a known model with its usual head on a known device."""
    model = KNOWN_MODELS[name]
    return Deployment(
        target=model, head=usual_head(model), accelerator=accelerator_named(gpu), weights=weights
    )


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
for row in reports[1].rows:
    assert row.bandwidth_share is None or row.bandwidth_share <= 1.0

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
PUBLISHED = {2: 2.36, 3: 2.79, 4: 3.08, 5: 3.32, 6: 3.46, 7: 3.54}  # vLLM, Llama-3.1-8B, MT-Bench
rows = []
for k, rate, claimed in ARTICLE:
    formulas = tau_from_draft_rate(rate, k), tau_from_conditional_rate(rate, k)
    rows.append([k, rate, claimed, *(f"{estimate:.2f}" for estimate in formulas)])
    assert min(abs(claimed - estimate) for estimate in formulas) > 0.3, (
        "one of the formulas fits after all"
    )
gains = np.diff(list(PUBLISHED.values()))
assert np.all(gains > -0.02) and gains[-1] < gains[0], "each further token gains less"
taus = {
    batch: report.rows[1].acceptance.mean_acceptance_length for batch, report in reports.items()
}
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
# - Cost times speed equals the price. No program was compiled during a measurement.
# - The break-even τ is `v + K·c`. If speculation pays off, the gate is below the measured τ. Stages
#   grow to all traffic.
# - Every throughput of the articles is impossible at its batch size. Every figure with a documented
#   setup is possible.
# - The article's acceptance table fits neither formula. Acceptance does not depend on the batch
#   size.
# - The articles' latencies are shorter than one reading of the weights. Their cost arithmetic is
#   correct.
