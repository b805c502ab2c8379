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
# # 05 · Speed, and the roofline above it
#
# Afterwards you can
#
# - measure a speed-up that somebody else can believe: in turns, after a warm-up, with an interval;
# - predict it from τ and the cost of a round, and see where the prediction misses;
# - place every way of decoding under the roofline of the device that it ran on.
#
# It takes about half a minute of CPU on the shipped pair; times depend on what else the machine does. Read before:
# [01](01_this_machine.ipynb).

# %%
import sys

sys.path.insert(0, "..")  # where first_cell, machine and pictures are

import first_cell

first_cell.start(repository=True, device=False)

import machine

here = machine.start()
here.banner("vLLM")

# %% [markdown]
# ## Who runs
#
# Plain decoding, an EAGLE-3 chain, an EAGLE-3 tree, and drafts by prompt lookup; vLLM too where there is one. On a
# GPU without weights the shipped pair would only time launches, so its place is taken by the shape of Llama-3.1-8B
# with random weights and drafts accepted by dice: a round costs what the real model's costs, and the acceptance is
# given, not measured.

# %%
import dataclasses

import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown
from pictures.style import SERIES

from eagle3_jax import DynamicTree, SpeculativeDecoder
from eagle3_jax.bench.contenders import DecoderContender
from eagle3_jax.bench.random_models import random_pair
from eagle3_jax.bench.run import measure
from eagle3_jax.bench.tables import show, to_markdown
from eagle3_jax.drafters import NGram
from eagle3_jax.engines.vllm.bridge import EngineOptions, VLLMUnavailable, eagle3
from eagle3_jax.engines.vllm.contender import VLLMContender
from eagle3_jax.verifiers.simulated import SimulatedAcceptance
from validation import speeds
from validation.speeds import CONTEXT, chain, faults, some_prompts, tree

K = here.draft_tokens(3)
TREE = here.amount(
    cpu=DynamicTree(num_nodes=16, max_depth=4, top_k=4),
    gpu=DynamicTree(num_nodes=60, max_depth=8, top_k=10),
)
LIMIT, REPEATS = here.amount(cpu=(24, 3), gpu=(128, 5))
RANDOM = here.on_gpu and not speeds.is_quoted(here.subject, here.setting)
dtype, dice, deep_dice = here.dtype, None, None
if RANDOM:
    pair, dtype = random_pair("Llama-3.1-8B"), "bfloat16"
    dice = SimulatedAcceptance.of_conditional_rate(0.7, K)
    deep_dice = SimulatedAcceptance.of_conditional_rate(0.7, TREE.max_depth)
    prompts = np.random.default_rng(0).integers(0, pair[0].vocab_size, (4, CONTEXT)).tolist()
else:
    pair, prompts = here.pair, some_prompts(here.subject, 4)
what = pair[0].name if RANDOM else here.subject.name
print(
    f"{what}, {dtype}, batch 1, {len(prompts)} prompts of {CONTEXT} tokens, {LIMIT} new; {here.device}"
)

# %%
contenders = [
    chain(pair, dtype, 0),
    chain(pair, dtype, K, dice),
    tree(pair, dtype, TREE, deep_dice),
]
if not RANDOM:
    contenders.append(
        DecoderContender("n-gram K=5", dtype, SpeculativeDecoder(pair[0], NGram(5), stop_tokens=()))
    )
if here.vllm is not None and not RANDOM:
    options = EngineOptions(
        model=str(here.subject.target_directory),
        dtype=here.shared_dtype,
        speculative=eagle3(here.subject.drafter_directory, K),
        eager=False,
    )
    try:
        contenders.append(
            VLLMContender(f"vLLM eagle3 K={K}", here.shared_dtype, here.vllm.engine(options))
        )
    except VLLMUnavailable as reason:
        print(f"vLLM: {reason}")
report = measure(
    contenders,
    prompts,
    max_new_tokens=LIMIT,
    repeats=REPEATS,
    baselines=[contenders[0].name],
    cost_rounds=8,
    streams=0,
    large=here.amount(cpu=2**27, gpu=2**32),
)
assert not faults(report), "; ".join(faults(report))
rows = []
for row in report.rows:
    speed, ratio = row.decode_tokens_per_second, row.ratio_interval
    tau = 1.0 if row.acceptance is None else row.acceptance.mean_acceptance_length
    interval = "–" if ratio.low is None else f"{ratio.low:.2f} to {ratio.high:.2f}"
    predicted = "–" if row.predicted_ratio is None else f"{row.predicted_ratio:.2f}"
    share = "–" if row.bandwidth_share is None else f"{row.bandwidth_share:.0%}"
    rows.append(
        [
            row.name,
            row.dtype,
            show(speed.median),
            f"{ratio.value:.2f}",
            interval,
            predicted,
            f"{tau:.2f}",
            share,
        ]
    )
columns = [
    "method",
    "precision",
    "tokens/s",
    "over plain",
    "95 % interval",
    "τ/(v+G·c)",
    "τ",
    "share of bandwidth",
]
Markdown(f"{what}, batch 1, on **{here.device}**\n\n" + to_markdown(columns, rows))

# %% [markdown]
# Nothing here asserts who is faster. What is asserted makes the table worth reading (`validation.speeds.faults`):
# nothing was compiled while times were taken, and nobody read memory faster than the device can.
#
# ## The speed-up, its interval, and what was predicted
#
# The interval is a bootstrap over pairs of runs that were neighbours in time. The cross is the cost model `S = τ / (v
# + G·c)`, whose three numbers were measured apart from the speed that they predict.

# %%
drafting = [row for row in report.rows if row.name != report.baseline]
figure, axes = plt.subplots(figsize=(7.2, 0.5 * len(drafting) + 1.4))
for place, row in enumerate(drafting):
    ratio = row.ratio_interval
    axes.plot(ratio.value, place, "o", color=SERIES[0])
    if ratio.low is not None:
        axes.plot([ratio.low, ratio.high], [place, place], color=SERIES[0], linewidth=2)
    if row.predicted_ratio is not None:
        axes.plot(row.predicted_ratio, place, "x", color=SERIES[1], markersize=9, markeredgewidth=2)
axes.plot([], [], "o-", color=SERIES[0], label="measured, 95 % interval")
axes.plot([], [], "x", color=SERIES[1], label="predicted")
axes.axvline(1.0, color="#9aa0a6", linewidth=1)
axes.set_yticks(range(len(drafting)), [row.name for row in drafting])
axes.set_ylim(len(drafting) - 0.5, -0.5)
axes.set_xlabel(f"decode speed over plain decoding, batch 1, {here.device}")
axes.set_title("Right of the line drafting pays")
axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()

# %% [markdown]
# ## What a round consists of

# %%
figure, axes = plt.subplots(figsize=(7.2, 2.6))
timed = [row for row in report.rows if row.step_seconds is not None]
for place, row in enumerate(timed):
    costs = row.step_seconds
    drafts = row.num_draft_steps * costs.draft_seconds
    edges = [
        1e3 * part
        for part in (drafts, costs.verify_seconds - costs.commit_seconds, costs.commit_seconds)
    ]
    start = 0.0
    for part, size, colour in zip(
        ("draft", "verify", "commit"), edges, (SERIES[1], SERIES[0], SERIES[2]), strict=True
    ):
        axes.barh(place, size, left=start, color=colour, label=part if place == 0 else None)
        start += max(size, 0.0)
axes.set_yticks(range(len(timed)), [row.name for row in timed])
axes.invert_yaxis()
axes.set_xlabel(f"ms a round, each part timed alone, {here.device}")
axes.set_title("A round: drafting, verification, commit")
axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()

# %% [markdown]
# ## Under the roofline
#
# A forward reads every weight once, however many tokens it is given. So verification of a draft moves to the right,
# to more operations for each byte, at the same bytes: that is where speculation gets its speed from. The slope is the
# bandwidth **measured here**, around the runs; a flat part is drawn only where a datasheet is known for this device.
# `eagle3_jax.theory.bounds` counts bytes and operations of both models' forwards; embedding rows and activations are
# left out.

# %%
from eagle3_jax.theory.accelerators import custom_accelerator
from eagle3_jax.theory.bounds import forward_work
from eagle3_jax.theory.memory import Deployment

bandwidth = report.bytes_per_second
weights = "float32" if dtype == "float32" else "bfloat16"
deployment = Deployment(
    target=pair[0].model.config,
    head=pair[1].drafter.config,
    accelerator=custom_accelerator(gb_per_s=bandwidth / 1e9, base=here.accelerator),
    weights=weights,
    cache=weights,
)


def work_of_a_round(row, nodes):
    """Bytes and operations of verification and all draft steps."""
    verify = forward_work(
        deployment, deployment.target, batch=1, context=CONTEXT, tokens=nodes, logits=nodes
    )
    total = [verify.num_bytes, verify.layer_flops + verify.other_flops]
    for step in range(row.num_draft_steps if row.step_seconds is not None else 0):
        one = forward_work(
            deployment,
            deployment.head,
            batch=1,
            context=CONTEXT + step,
            tokens=1,
            logits=1,
            fuse=step == 0,
        )
        total = [total[0] + one.num_bytes, total[1] + one.layer_flops + one.other_flops]
    return total


NODES = {contenders[0].name: 1, contenders[1].name: K + 1, contenders[2].name: TREE.num_nodes}
points = {}
for row in report.rows:
    if row.name in NODES:
        moved, computed = work_of_a_round(row, NODES[row.name])
        tau = 1.0 if row.acceptance is None else row.acceptance.mean_acceptance_length
        seconds = tau / row.decode_tokens_per_second.median
        points[row.name] = (computed / moved, computed / seconds, moved / seconds / bandwidth)
figure, axes = plt.subplots(figsize=(7.2, 4.0))
intensities = np.geomspace(
    min(p[0] for p in points.values()) / 2, max(p[0] for p in points.values()) * 4, 50
)
roof = intensities * bandwidth
peak = here.accelerator.peak_flops if here.accelerator else None
if peak is not None:
    roof = np.minimum(roof, peak)
axes.loglog(intensities, roof, color="#3c4043", label=f"{bandwidth / 1e9:.0f} GB/s, measured")
for (name, (intensity, achieved, share)), colour in zip(points.items(), SERIES, strict=False):
    axes.plot(
        intensity,
        achieved,
        "o",
        color=colour,
        markersize=8,
        label=f"{name}: {share:.0%} of the slope",
    )
    axes.plot(
        [intensity, intensity], [achieved, intensity * bandwidth], ":", color=colour, linewidth=1
    )
axes.set_xlabel("operations for each byte of weights and caches")
axes.set_ylabel("operations per second")
axes.set_title(f"What {what} reached on {here.device}")
axes.legend(fontsize="small")
if peak is None:
    print("no flat part: the peak of this device is not measured, and no datasheet is known for it")

# %%
ordered = [points[name][0] for name in NODES if name in points]
assert ordered == sorted(ordered), "more nodes for the same bytes are more operations a byte"
plain_share = points[contenders[0].name][2]
told = report.rows[0].bandwidth_share
print(
    f"plain decoding: {plain_share:.0%} with caches, {told:.0%} as the report counts, which leaves them out"
)
assert 0 < told <= 1.0
assert abs(plain_share / told - 1) < 0.25, (
    "two counts of the bytes of a step differ by more than the caches"
)

# %% [markdown]
# ## Beside vLLM, on record
#
# Speeds of the newest committed run, measured **there**: they are not to be compared with the figures above, but with
# each other.

# %%
parts = [f"Record of **{machine.described(here.record)}**"]
for check in here.record["L9"].checks:
    if check.name.startswith("speed beside vllm"):
        for table in check.tables:
            kept = ["method", "precision", "batch", "tokens/s", "over plain", "τ"]
            cells = zip(*(table.column(name) for name in kept[:5]), table.column("τ"), strict=True)
            parts.append(
                f"{table.title}\n\n" + to_markdown(kept, [list(map(show, row)) for row in cells])
            )
assert here.record["L9"].verdict == "passed" and len(parts) > 1
Markdown("\n\n".join(parts))

# %% [markdown]
# ## What would go wrong
#
# The usual way to a fine number is to time without waiting: JAX returns before the device has finished. Here the same
# launch is timed without `block_until_ready`. The bound calls it out, because it knows what the device can read.

# %%
import time

from eagle3_jax import loop as loops
from eagle3_jax.bench.roofline import least_bytes_per_second

decoder = contenders[0].decoder
state = jax.block_until_ready(decoder.prefill(prompts[:1], max_new_tokens=LIMIT))
start = time.perf_counter()
launched = loops.run(decoder.loop, decoder.params, state)
believed = (LIMIT - 1) / (time.perf_counter() - start)
jax.block_until_ready(launched)
waited = (LIMIT - 1) / (time.perf_counter() - start)
for name, speed in (("not waited for", believed), ("waited for", waited)):
    needs = least_bytes_per_second(pair[0], tokens_per_second=speed, tokens_per_round=1.0, rows=1)
    print(
        f"{name:15} {speed:12,.0f} tokens/s would read {needs / 1e9:9,.1f} GB/s of {bandwidth / 1e9:.1f}"
    )
fast = dataclasses.replace(report.rows[0], bandwidth_share=1.4)
planted = dataclasses.replace(report, rows=[fast, *report.rows[1:]], programs_after_warm_up=2)
print("; ".join(faults(planted)))
assert len(faults(planted)) == 2, "an impossible speed and a compilation went unseen"

# %% [markdown]
# ## Exercises
#
# **1.** What τ must the chain have to break even, with the costs just measured?
#
# <details><summary>Answer</summary>
#
# `τ = v + G·c`, which is what a round costs in plain steps. The next cell computes it.
#
# </details>

# %%
for row in drafting:
    if row.verify_cost is not None:
        needed = row.verify_cost + row.num_draft_steps * row.draft_cost
        tau = row.acceptance.mean_acceptance_length
        print(
            f"{row.name}: breaks even at τ {needed:.2f}, has {tau:.2f}: S = {tau / needed:.2f} by the model"
        )
        assert abs(tau / needed - row.predicted_ratio) < 1e-9

# %% [markdown]
# **2.** Verification of 4 tokens reads the bytes of a plain step. Why is `v` above 1 all the same?
#
# <details><summary>Answer</summary>
#
# Logits of all nodes, attention over more queries, acceptance and commit, and on a CPU arithmetic itself: the slope
# ends early there. On a GPU the remainder is launches.
#
# </details>
#
# **3.** Two runs on different days differ by 8 %. Which figure of the table would you quote?
#
# <details><summary>Answer</summary>
#
# The ratio with its interval: both sides of it were measured in turns, so that a slower day slows both. Tokens per
# second belong to that machine on that day.
#
# </details>
#
# ## What was claimed and checked
#
# - Nothing was compiled while times were taken, and nobody outran the measured bandwidth.
# - The break-even τ and the predicted speed-up are the same model.
# - More nodes are more operations for each byte.
# - A planted impossible speed, and a compilation in between, are called out.
#
# Next: [06, how much to draft at which batch](06_tuning_and_fall_back.ipynb).
