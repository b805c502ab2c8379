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
# # 03 · Speed, roofline, latency and tuning
#
# This notebook measures the speed-up of chains and trees with an interval, places every method on
# the roofline of this device, measures latency, and chooses the draft length by batch size. It uses
# the functions of `eagle3_jax.bench`. Read [01](01_this_machine.ipynb) first. The project's
# benchmark is on the page [Measured numbers](../../docs/numbers.md).

# %% tags=["hide-input"]
import sys

sys.path.insert(0, "..")  # where first_cell, machine and pictures are

import first_cell

first_cell.start(repository=True, device=False)

import machine

here = machine.start()
here.banner("vLLM")

# %% tags=["hide-input"]
import dataclasses
import time

import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display
from pictures.style import SERIES
from pictures.times import stacked_steps

from eagle3_jax import DynamicTree, SpeculativeDecoder
from eagle3_jax import loop as loops
from eagle3_jax.bench.contenders import DecoderContender
from eagle3_jax.bench.random_models import random_pair
from eagle3_jax.bench.roofline import least_bytes_per_second
from eagle3_jax.bench.run import measure
from eagle3_jax.bench.tables import show, to_markdown
from eagle3_jax.bench.tune import break_even, tune
from eagle3_jax.drafters import NGram
from eagle3_jax.theory.accelerators import custom_accelerator
from eagle3_jax.theory.bounds import forward_work
from eagle3_jax.theory.memory import Deployment
from eagle3_jax.theory.speedup import (
    TrafficClass,
    conditional_rate_from_tau,
    simulate,
    tau_from_conditional_rate,
    tau_from_draft_rate,
)
from eagle3_jax.verifiers.simulated import SimulatedAcceptance
from validation import speeds
from validation.engines.vllm.bridge import EngineOptions, VLLMUnavailable, eagle3
from validation.engines.vllm.contender import VLLMContender
from validation.speeds import chain, faults, tree
from validation.subject import CONTEXT, some_prompts

# %% [markdown]
# ## Speed-up over plain decoding
#
# Plain decoding, an EAGLE-3 chain, an EAGLE-3 tree, prompt lookup and, if configured, vLLM are
# measured in turns. On a GPU, the shipped pair is so small that only kernel launches would be
# measured. Without other weights, a model with the shape of Llama-3.1-8B, random weights and
# simulated acceptance replaces it. The cost of a round is that of the real model. The acceptance is
# an assumption.

# %%
K = here.draft_tokens(3)
TREE = here.amount(
    cpu=DynamicTree(num_nodes=16, max_depth=4, top_k=4),
    gpu=DynamicTree(num_nodes=60, max_depth=8, top_k=10),
)
LIMIT, REPEATS = here.amount(cpu=(24, 3), gpu=(128, 5))
RANDOM = here.on_gpu and not speeds.is_quoted(here.subject, here.setting)
dtype = here.dtype
simulated = None
deep = None
if RANDOM:
    pair = random_pair("Llama-3.1-8B")
    dtype = "bfloat16"
    simulated = SimulatedAcceptance.of_conditional_rate(0.7, K)
    deep = SimulatedAcceptance.of_conditional_rate(0.7, TREE.max_depth)
    prompts = np.random.default_rng(0).integers(0, pair[0].vocab_size, (4, CONTEXT)).tolist()
else:
    pair = here.pair
    prompts = some_prompts(here.subject, 4)
pair_name = pair[0].name if RANDOM else here.subject.name
print(
    f"{pair_name}, {dtype}, batch 1, {len(prompts)} prompts of {CONTEXT} tokens, {LIMIT} new;"
    f" {here.device}"
)

# %%
contenders = [
    chain(pair, dtype, 0),
    chain(pair, dtype, K, simulated),
    tree(pair, dtype, TREE, deep),
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
    streams=here.amount(cpu=2, gpu=16),
    large=here.amount(cpu=2**27, gpu=2**32),
)
assert not faults(report), "; ".join(faults(report))
rows = []
for row in report.rows:
    speed = row.decode_tokens_per_second
    ratio = row.ratio_interval
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
    "speed-up over plain",
    "95 % interval",
    "τ/(v+G·c)",
    "τ",
    "share of bandwidth",
]
display(Markdown(f"{pair_name}, batch 1, on **{here.device}**\n\n" + to_markdown(columns, rows)))
best = max(report.rows[1:], key=lambda row: row.ratio_interval.value)
interval = best.ratio_interval
here.verdict(
    "speed-up",
    f"{best.name}: {interval.value:.2f}x plain decoding ({show(interval.low)} to"
    f" {show(interval.high)})",
)

# %% [markdown]
# The interval is a bootstrap over pairs of consecutive runs. `τ/(v+G·c)` is the prediction of the
# cost model from separate measurements; `G` is the number of draft steps.
# `validation.speeds.faults` checks two things: no program was compiled during a measurement, and no
# method exceeded the memory bandwidth of the device. The plot shows the parts of a round.

# %% tags=["hide-input"]
timed = [row for row in report.rows if row.step_seconds is not None]
costs = [row.step_seconds for row in timed]
for row in timed:
    if (
        row.verify_cost is not None
        and row.predicted_ratio is not None
        and row.acceptance is not None
    ):
        needed = row.verify_cost + row.num_draft_steps * row.draft_cost
        tau = row.acceptance.mean_acceptance_length
        print(f"{row.name}: break-even τ {needed:.2f}, measured τ {tau:.2f}")
        assert abs(tau / needed - row.predicted_ratio) < 1e-9
stacked_steps(
    [row.name for row in timed],
    {
        "draft": [1e3 * row.num_draft_steps * row.step_seconds.draft_seconds for row in timed],
        "verify": [1e3 * max(0.0, cost.verify_seconds - cost.commit_seconds) for cost in costs],
        "commit": [1e3 * cost.commit_seconds for cost in costs],
    },
    title=f"Parts of a round, {here.device}",
)

# %% [markdown]
# ## Roofline
#
# A forward pass reads every weight once, for any number of tokens. So verification has more
# operations per byte than a plain step. The slope is the bandwidth **measured on this machine**.
# The plot has a flat part if the data sheet of this device is known.

# %%
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
        draft_step = forward_work(
            deployment,
            deployment.head,
            batch=1,
            context=CONTEXT + step,
            tokens=1,
            logits=1,
            fuse=step == 0,
        )
        total = [
            total[0] + draft_step.num_bytes,
            total[1] + draft_step.layer_flops + draft_step.other_flops,
        ]
    return total


NODES = {contenders[0].name: 1, contenders[1].name: K + 1, contenders[2].name: TREE.num_nodes}
points = {}
for row in report.rows:
    if row.name in NODES:
        moved, computed = work_of_a_round(row, NODES[row.name])
        tau = 1.0 if row.acceptance is None else row.acceptance.mean_acceptance_length
        seconds = tau / row.decode_tokens_per_second.median
        points[row.name] = (computed / moved, computed / seconds, moved / seconds / bandwidth)

# %% tags=["hide-input"]
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
axes.set_xlabel("operations per byte of weights and caches")
axes.set_ylabel("operations per second")
axes.set_title(f"Roofline of {pair_name} on {here.device}")
axes.legend(fontsize="small")
if peak is None:
    print("no flat part: the data sheet of this device is not known")
plt.show()

# %%
ordered = [points[name][0] for name in NODES if name in points]
assert ordered == sorted(ordered), "more nodes for the same bytes are more operations per byte"
plain_share = points[contenders[0].name][2]
bandwidth_share = report.rows[0].bandwidth_share
assert 0 < bandwidth_share <= 1.0
assert abs(plain_share / bandwidth_share - 1) < 0.25, (
    "two counts of the bytes differ by more than the caches"
)
here.verdict(
    "share of roofline", f"plain decoding reaches {plain_share:.0%} of the measured bandwidth"
)

# %% [markdown]
# ## Latency
#
# - **TTFT**, time to first token: the prefill. Speculation does not shorten it.
# - **TPOT**, time per output token after the first: the mean over an answer.
# - **chunk**: the time between two outputs of a stream. With speculation, a chunk has several
#   tokens, so chunk waits of both methods are not comparable. Percentiles over single tokens are
#   misleading, because all tokens of a chunk except the first one arrive without a wait.

# %%
waits = {"TTFT": "first_token", "TPOT": "per_token", "chunk": "chunk"}
rows = []
for row in report.rows:
    for wait, field in waits.items():
        distribution = getattr(row, field)
        if distribution is not None:
            times = (distribution.p50, distribution.p90, distribution.p99)
            rows.append([row.name, wait, *(f"{1e3 * seconds:.2f}" for seconds in times)])
            assert 0 < distribution.p50 <= distribution.p90 <= distribution.p99

alpha = conditional_rate_from_tau(max(1.05, best.acceptance.mean_acceptance_length), K)
spread = min(alpha, 1 - alpha) * 0.9
mixes = ([(1.0, alpha)], [(0.5, alpha + spread), (0.5, alpha - spread)])
tails = []
for mix in mixes:
    traffic = [TrafficClass(share=share, conditional_acceptance_rate=rate) for share, rate in mix]
    size = {"num_requests": 4000, "output_tokens": 128, "seed": 0}
    tails.append(simulate(traffic, num_draft_tokens=K, verify_cost=1.2, draft_cost=0.15, **size))
tails = [row.time_per_output_token.p99 for row in tails]
print(f"simulated p99 of TPOT, plain steps: {tails[0]:.2f}; with mixed requests {tails[1]:.2f}")
assert tails[1] > tails[0], "mixed traffic has the longer tail"
title = f"{pair_name}, batch 1, {here.device}"
Markdown(f"{title}\n\n" + to_markdown(["method", "wait", "p50 ms", "p90 ms", "p99 ms"], rows))

# %% [markdown]
# ## Draft length by batch size
#
# τ depends on the text and the head. The costs `v` and `c` depend on the batch size.
# `eagle3_jax.bench.tune.tune` (`eagle3 tune`) measures all three, in turns, and chooses a draft
# length for every batch size. If two lengths differ by less than the spread of the repeats, it
# chooses the shorter one.

# %%
BATCHES = here.amount(cpu=(1, 8), gpu=(1, 4, 16, 64, 128))
CHAINS = here.amount(cpu=(1, 3), gpu=(1, 2, 3, 4, 5, 6, 7))
TOKENS, RUNS, ROUNDS = here.amount(cpu=(20, 2, 6), gpu=(128, 5, 16))
if here.on_gpu and RANDOM:
    print("On a GPU, the shipped pair measures only kernel launches. Set EAGLE3_TARGET.")
texts = some_prompts(here.subject, here.amount(cpu=4, gpu=16))
amount = {"max_new_tokens": TOKENS, "repeats": RUNS, "rounds": ROUNDS, "check": here.on_gpu}
tuning = tune(*here.pair, texts, batches=BATCHES, chains=CHAINS, **amount)

# %% tags=["hide-input"]
figure, axes = plt.subplots()
for index, candidate in enumerate(tuning.batches[0].candidates):
    gains = [batch.candidates[index].speedup for batch in tuning.batches]
    low = [gain.low for gain in gains]
    high = [gain.high for gain in gains]
    axes.plot(BATCHES, [gain.median for gain in gains], "o-", label=candidate.shape.name)
    axes.fill_between(BATCHES, low, high, alpha=0.15)
axes.axhline(1.0, color="#3c4043", linewidth=1)
axes.set(xscale="log", xlabel=f"batch size, {here.device}", ylabel="S = τ / (v + K·c)")
axes.set_title("Speed-up by batch size and draft length")
axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
axes.minorticks_off()
axes.legend(fontsize="small")
plt.show()

# %%
chosen = {
    batch.batch: "plain" if batch.best is None else batch.best.shape.name
    for batch in tuning.batches
}
for batch in tuning.batches:
    for candidate in batch.candidates:
        even = break_even(candidate)
        tau = candidate.shape.mean_acceptance_length
        print(
            f"batch {batch.batch:3}, {candidate.shape.name}: τ {tau:.2f}, break-even τ "
            f"{even.mean_acceptance_length:.2f}, S {candidate.speedup.median:.2f}"
        )
if tuning.schedule is not None:
    print("schedule:", tuning.schedule.to_lists())
    assert tuning.schedule.to_lists()[-1][2] == 0, (
        "above the largest measured batch nothing is drafted"
    )
longest = tuning.batches[0].candidates[-1].shape
count = longest.num_draft_tokens
rate = (longest.mean_acceptance_length - 1) / count
assert abs(tau_from_draft_rate(rate, count) - longest.mean_acceptance_length) < 1e-9
assert tau_from_conditional_rate(rate, count) < longest.mean_acceptance_length or rate in (0.0, 1.0)
here.verdict("best K by batch", ", ".join(f"{batch}: {name}" for batch, name in chosen.items()))

# %% [markdown]
# ## Common mistakes
#
# **Not waiting for the device.** JAX returns before the device has finished. The cell times the
# same launch without and with `block_until_ready`. The bandwidth check reports the impossible
# speed.

# %%
decoder = contenders[0].decoder
state = jax.block_until_ready(decoder.prefill(prompts[:1], max_new_tokens=LIMIT))
start = time.perf_counter()
launched = loops.run(decoder.loop, decoder.params, state)
believed = (LIMIT - 1) / (time.perf_counter() - start)
jax.block_until_ready(launched)
waited = (LIMIT - 1) / (time.perf_counter() - start)
for name, speed in (("without waiting", believed), ("with waiting", waited)):
    needs = least_bytes_per_second(pair[0], tokens_per_second=speed, tokens_per_round=1.0, rows=1)
    print(
        f"{name:15} {speed:12,.0f} tokens/s need {needs / 1e9:9,.1f} GB/s of {bandwidth / 1e9:.1f}"
    )
fast = dataclasses.replace(report.rows[0], bandwidth_share=1.4)
broken = dataclasses.replace(report, rows=[fast, *report.rows[1:]], programs_after_warm_up=2)
print("; ".join(faults(broken)))
assert len(faults(broken)) == 2, "an impossible speed and a compilation were not detected"

# %% [markdown]
# ## Exercises
#
# **1.** Verification of 4 tokens reads as many bytes as a plain step. Why is `v` above 1?
#
# <details><summary>Answer</summary>
#
# It computes logits of all nodes, attention for more queries, acceptance and commit. On a CPU the
# arithmetic itself takes time. On a GPU kernel launches do.
#
# </details>
#
# **2.** Two runs on different days differ by 8 %. Which number should a report contain?
#
# <details><summary>Answer</summary>
#
# The speed-up with its interval. Both methods were measured in turns, so a slower day affects both.
#
# </details>
#
#
# ## Checked claims
#
# - No program was compiled during a measurement, and no method exceeded the measured bandwidth.
# - The break-even τ and the predicted speed-up follow from the same model. More nodes have more
#   operations per byte.
# - Percentiles are in order. Mixed traffic of the same mean rate has a longer tail.
# - The schedule drafts nothing above the largest measured batch. The two definitions of "acceptance
#   rate" give different values of τ.
# - The checks report an impossible speed and a compilation during a measurement.
#
# **Next:** [04](04_cost_and_claims.ipynb), cost and published claims.
