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
# # 08 · Cost of a million tokens, and the way into production
#
# Afterwards you can
#
# - turn measured speeds into cost per million tokens, idle hours included;
# - say what a speed-up is worth at a given batch, and that it is not the speed-up at batch 1;
# - derive a staged rollout, with its gates, from the numbers just measured.
#
# It takes about half a minute of CPU on the shipped pair. Read before: [05](05_speed_and_roofline.ipynb) and
# [06](06_tuning_and_fall_back.ipynb).

# %%
import sys

sys.path.insert(0, "..")  # where first_cell, machine and pictures are

import first_cell

first_cell.start(repository=True, device=False)

import machine

here = machine.start()
here.banner("price")

# %% [markdown]
# ## Measure, then multiply
#
# A price is paid by the hour and speeds are measured in tokens a second: `price / 3600 / speed · 10⁶`. Everything hard
# is in the speed. It is measured here with the prefill included, since that is paid too, at a batch of one and at a
# fuller one, because machines that serve are full.

# %%
import dataclasses

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown
from pictures.style import SERIES

from eagle3_jax.bench.run import measure
from eagle3_jax.bench.tables import show, to_markdown
from eagle3_jax.theory.cost import cost_of, cost_per_million_tokens
from validation.speeds import chain, faults, is_quoted, some_prompts

K = 3
BATCHES = here.amount(cpu=(1, 8), gpu=(1, 8, 32))
LIMIT, REPEATS = here.amount(cpu=(24, 2), gpu=(128, 5))
pair, dtype, price = here.pair, here.dtype, here.price_per_hour
if here.on_gpu and not is_quoted(here.subject, here.setting):
    print(
        "On a GPU the shipped pair waits for launches: no cost below is a claim. Name a pair (EAGLE3_TARGET)."
    )
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
rows, costs = [], {}
for batch, report in reports.items():
    for row in report.rows:
        speed = row.total_tokens_per_second
        full, real = (
            cost_of(speed.median, price_per_hour=price, busy=share) for share in (1.0, BUSY)
        )
        ends = sorted(cost_per_million_tokens(one, price) for one in (speed.low, speed.high))
        costs[batch, row.name] = (full.per_million_tokens, *ends)
        told = [
            show(value)
            for value in (speed.median, full.per_million_tokens, real.per_million_tokens)
        ]
        rows.append([batch, row.name, *told])
columns = [
    "batch",
    "method",
    "tokens/s, prefill included",
    "cost of 1M tokens",
    f"busy {BUSY:.0%} of the hours",
]
title = f"{here.subject.name}, {dtype}, on **{here.device}**; costs {here.price_named}"
Markdown(f"{title}\n\n{to_markdown(columns, rows)}")

# %%
figure, axes = plt.subplots()
names = [row.name for row in reports[BATCHES[0]].rows]
for place, name in enumerate(names):
    found = np.array([costs[batch, name] for batch in BATCHES])
    where = np.arange(len(BATCHES)) + (place - 0.5) * 0.38
    errors = np.abs(found[:, 1:].T - found[:, 0])
    axes.bar(where, found[:, 0], 0.36, yerr=errors, capsize=3, color=SERIES[place], label=name)
axes.set_xticks(range(len(BATCHES)), [f"batch {batch}" for batch in BATCHES])
axes.set_ylabel(f"cost of a million tokens\n({here.price_named})", fontsize="small")
axes.set_title(f"What a million tokens cost on {here.device}, quartiles of the repeats")
axes.legend(fontsize="small")
for (batch, name), (cost, _, _) in costs.items():
    speed = next(
        row for row in reports[batch].rows if row.name == name
    ).total_tokens_per_second.median
    assert abs(cost * speed * 3600 / 1e6 - price) < 1e-6 * price, "cost times speed is the price"

# %% [markdown]
# The batch does most of the work: it divides the weights that a step reads over more rows. What speculation adds on top
# is the ratio of the two bars at *your* batch, and it may be below 1.

# %%
for batch in BATCHES:
    plain, fast = (costs[batch, name][0] for name in names)
    row = reports[batch].rows[1]
    interval = row.total_ratio_interval
    print(f"batch {batch}: {names[1]} costs {fast / plain:.2f} of plain decoding; "
          f"speed-up {interval.value:.2f} ({show(interval.low)} to {show(interval.high)})")  # fmt: skip

# %% [markdown]
# ## The plan
#
# `eagle3_jax.theory.rollout` turns traffic, acceptance and costs into stages with gates: what must be measured, for how
# long, and below which value one goes back. Given here are the costs `v` and `c` that were measured at the largest
# batch above. The device is described by the bandwidth measured here; where no datasheet is known for it, its memory is
# a number to plan with, not a measurement.

# %%
from eagle3_jax.theory.accelerators import custom_accelerator
from eagle3_jax.theory.memory import Deployment
from eagle3_jax.theory.rollout import MeasuredCosts, Traffic, plan_rollout
from eagle3_jax.theory.speedup import conditional_rate_from_tau

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
        memory_gb=None if here.accelerator else 16.0,  # a number to plan with, not this machine's
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
    f"break-even τ {plan.break_even_tau:.2f}; predicted S {plan.predicted_speedup:.2f}; gate on τ {plan.least_tau:.2f}"
)
print("obstacles:", "; ".join(plan.obstacles) or "none")
for stage in plan.stages:
    print(
        f"  {stage.share:4.0%} of the traffic for {stage.hours:6.1f} hours, {stage.requests:9,.0f} requests"
    )

# %%
assert plan.measured, "the plan must rest on measured costs"
assert abs(plan.break_even_tau - (plan.verify_cost + K * plan.draft_cost)) < 1e-9
assert (plan.predicted_speedup > 1.0) == (plan.least_tau < tau), (
    "the gate lies between break-even and what is expected"
)
assert bool(plan.obstacles) >= (plan.predicted_speedup <= 1.0), "a plan that loses must say so"
shares = [stage.share for stage in plan.stages]
assert shares == sorted(shares) and shares[-1] == 1.0

# %% [markdown]
# The first lines of the page that would be handed over (`rollout.to_markdown`); commands and queries follow in it.

# %%
from eagle3_jax.theory.rollout import to_markdown as page

text = page(plan, target="TARGET", head="HEAD")
lines = text.splitlines()
Markdown(
    "\n".join(
        line.replace("# ", "#### ", 1) if line.startswith("#") else line for line in lines[:28]
    )
)

# %% [markdown]
# ## How a gate moves
#
# Over τ: the predicted speed-up with the costs above. Left of the line at break-even the rollout must not go on.

# %%
lengths = np.linspace(1.0, K + 1.0, 61)
cost = plan.break_even_tau
figure, axes = plt.subplots()
axes.plot(lengths, lengths / cost, color=SERIES[0])
axes.axhline(1.0, color="#3c4043", linewidth=1)
marks = (
    (cost, "break-even", "#c05a8e"),
    (plan.least_tau, "gate", SERIES[5]),
    (tau, "measured", SERIES[2]),
)
for value, name, colour in marks:
    axes.axvline(value, color=colour, linestyle="--", label=f"{name}: τ = {value:.2f}")
axes.set_xlabel("τ, tokens a round")
axes.set_ylabel("predicted S")
axes.set_title(f"Costs measured at batch {BATCHES[-1]} on {here.device}")
axes.legend(fontsize="small")
plt.show()

# %% [markdown]
# ## What would go wrong
#
# Multiply the cost at a full batch by the speed-up at batch 1: the most common slide. Beside it, the honest figure.

# %%
one, full = reports[BATCHES[0]].rows[1], reports[BATCHES[-1]].rows[1]
plain_cost = costs[BATCHES[-1], names[0]][0]
slide = plain_cost / one.total_ratio_interval.value
print(f"plain at batch {BATCHES[-1]}: {show(plain_cost)}; divided by the speed-up at batch 1: {show(slide)}; "
      f"measured: {show(costs[BATCHES[-1], names[1]][0])} ({here.price_named})")  # fmt: skip
worse = dataclasses.replace(plan, verify_cost=plan.expected.mean_acceptance_length + 1.0)
print("with a verification that costs more than τ:", "; ".join(worse.obstacles))
assert worse.predicted_speedup < 1.0 and worse.obstacles, "a plan that loses money was let through"

# %% [markdown]
# ## Exercises
#
# **1.** The machine is busy 40 % of the hours. Does speculation save more or less money per million tokens?
#
# <details><summary>Answer</summary>
#
# The ratio stays the same, the amount grows: every token pays for idle hours in proportion. But a machine that is idle
# 60 % of the time is not short of speed; what speculation sells there is latency, or fewer machines.
#
# </details>
#
# **2.** What speed do 0.50 a million tokens need, at 3.50 an hour?
#
# <details><summary>Answer</summary>
#
# `3.5 / 3600 / 0.5 · 10⁶`, which the next cell computes.
#
# </details>

# %%
speed = 3.5 / 3600 / 0.5 * 1e6
print(f"{speed:,.0f} tokens/s of the whole machine")
assert abs(cost_per_million_tokens(speed, 3.5) - 0.5) < 1e-12

# %% [markdown]
# **3.** Why does the plan gate on the *ratio* of the times per token of two pools, and on τ only as a diagnosis?
#
# <details><summary>Answer</summary>
#
# The ratio is what users and bills feel, and both pools live through the same day. τ can be fine while rounds got
# dearer (a fuller batch), and can fall while the ratio still pays.
#
# </details>
#
# ## What was claimed and checked
#
# - Cost times speed is the price.
# - Break-even is `v + K·c`, the gate lies between it and the measured τ, and stages grow to the whole traffic.
# - A plan whose rounds cost more than they bring names an obstacle.
#
# Next: [09, what articles report](09_claims.ipynb).
