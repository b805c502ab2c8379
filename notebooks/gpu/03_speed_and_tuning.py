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
# # 03 · Speed, roofline, latency and draft length
#
# This notebook reads the speeds of level L9 of the [validation](../../docs/validation.md) and the
# rounds that [h200.py](../../examples/h200.py) timed. It explains the speed-up of drafts by the
# parts of a round, places plain decoding on the roofline, and chooses a draft by batch size. Read
# [01](01_this_machine.ipynb) first. The project's benchmark is on the page
# [Measured numbers](../../docs/numbers.md).

# %% tags=["hide-input"]
import sys

sys.path.insert(0, "..")  # where first_cell, machine and pictures are

import first_cell

first_cell.start(repository=True, device=False)

import machine

here = machine.start()
here.banner("vLLM", "rounds")

# %% tags=["hide-input"]
import matplotlib.pyplot as plt
from IPython.display import Markdown, display
from pictures.style import SERIES
from pictures.times import stacked_steps

from eagle3_jax.measure.tables import show, to_markdown
from eagle3_jax.theory.speedup import TrafficClass, simulate, speedup

# %% [markdown]
# ## Speed-up over plain decoding
#
# In each repeat, all methods decode the same prompts in turn. A ratio is between neighbors in time,
# so a slower minute affects both. The interval has the quartiles of the repeats. The check fails if
# a program was compiled during a measurement, or if a method reads memory faster than the device
# can. On a GPU, the shipped pair is so small that only kernel launches would be measured, so a
# model of a real shape with random weights replaces it: the cost of a round is real, the acceptance
# is an assumption.

# %%
speeds = here.speeds
rows = [
    [
        speed.batch,
        speed.method,
        show(speed.tokens_per_second),
        f"{speed.ratio:.2f}",
        f"{speed.low:.2f} to {speed.high:.2f}",
        f"{speed.tau:.2f}",
    ]
    for speed in speeds
]
columns = ["batch", "method", "tokens/s", "speed-up over plain", "quartiles", "τ"]
display(Markdown(f"Level L9, on **{here.device}**\n\n" + to_markdown(columns, rows)))
smallest = min(speed.batch for speed in speeds)
drafted = [
    speed for speed in speeds if speed.tau > 1 and speed.method.startswith(("chain", "tree"))
]
assert drafted, "the report has no speed of a chain or tree (level L9)"
best = max((speed for speed in drafted if speed.batch == smallest), key=lambda speed: speed.ratio)
here.verdict(
    "speed-up",
    f"{best.method}: {best.ratio:.2f}x plain decoding ({best.low:.2f} to {best.high:.2f}), batch"
    f" {best.batch}",
)

# %% [markdown]
# ## Parts of a round
#
# A round of a chain of 5 is a pass of the target over 6 tokens, 5 steps of the head, and the rest:
# acceptance, the commit and launches. In plain steps, the target's pass costs `v` and a draft step
# `c`. The round pays off if τ is larger than `v + K·c`, the break-even τ.

# %%
K = 5
timed = here.rounds("round")
step = timed.seconds("plain")
target_pass = timed.seconds("target alone")
draft = K * timed.seconds("draft step")
chain = timed.seconds("chain")
v = timed.seconds("verify 6") / step
c = timed.seconds("draft step") / step
even = v + K * c
print(f"{timed.origin}: plain step {1e3 * step:.2f} ms, v = {v:.3f}, c = {c:.3f}")
print(f"break-even τ {even:.2f}, round of the chain {chain / step:.2f} plain steps")
for tau in (1.0, 2.0, 3.0):
    predicted = speedup(tau, num_draft_tokens=K, verify_cost=v, draft_cost=c)
    assert abs(predicted - tau / even) < 1e-9
    print(f"  τ = {tau}: predicted speed-up {predicted:.2f}")
assert 1.0 <= v < K + 1, "verification of 6 tokens costs less than 6 plain steps"
assert abs(chain / step - even) < 0.15 * even, "a round is the sum of its parts"

# %% tags=["hide-input"]
stacked_steps(
    ["plain step", f"round of a chain of {K}"],
    {
        "verify": [1e3 * step, 1e3 * target_pass],
        "draft": [0.0, 1e3 * draft],
        "acceptance, commit, launches": [0.0, 1e3 * max(0.0, chain - target_pass - draft)],
    },
    title=f"Parts of a round, Llama-3.1-8B's shape, {timed.origin}",
)

# %% [markdown]
# ## Roofline
#
# A plain step reads every weight and the cache once. So its time is at least these bytes over the
# bandwidth of a copy on the same device. Fewer bytes per weight make a faster step, but not in
# proportion: what does not read weights takes the same time.

# %%
weights = here.rounds("weights")
copy = weights.figures["copy_bytes_per_second"]
kinds = [kind for kind in weights.figures["step_bytes"] if f"{kind}, plain" in weights.figures]
shares = {}
for kind in kinds:
    read = weights.figures["step_bytes"][kind]
    shares[kind] = read / weights.seconds(f"{kind}, plain") / copy
    print(
        f"{kind:9} {read / 1e9:5.1f} GB, {1e3 * weights.seconds(f'{kind}, plain'):.2f} ms,"
        f" {shares[kind]:.0%} of a copy's {copy / 1e12:.2f} TB/s ({weights.origin})"
    )
assert all(0 < share <= 1.05 for share in shares.values()), "no step is faster than a copy"
here.verdict(
    "share of roofline",
    f"plain decoding in {kinds[0]} reaches {shares[kinds[0]]:.0%} of a copy's speed",
    needs="rounds",
)

# %% tags=["hide-input"]
figure, axes = plt.subplots(figsize=(7.2, 1.2 + 0.5 * len(kinds)))
least = [1e3 * weights.figures["step_bytes"][kind] / copy for kind in kinds]
axes.barh(kinds, [1e3 * weights.seconds(f"{kind}, plain") for kind in kinds], color=SERIES[0])
axes.plot(least, kinds, "k|", markersize=22, label="at the speed of a copy")
axes.invert_yaxis()
axes.set(xlabel="milliseconds of a plain step", title=f"Llama-3.1-8B's shape, {weights.origin}")
axes.legend(fontsize="small")
plt.show()

# %% [markdown]
# ## Latency
#
# - **TTFT**, time to first token: the prefill. Speculation does not shorten it.
# - **TPOT**, time per output token after the first: the mean over an answer.
#
# Percentiles over single tokens are misleading: a round adds several tokens, and all except the
# first one arrive without a wait. The simulation shows a tail: requests with different acceptance
# have a longer one than requests with the same mean rate.

# %%
rows = []
for speed in speeds:
    for wait, (middle, late) in speed.waits.items():
        rows.append([speed.batch, speed.method, wait, f"{middle:.2f}", f"{late:.2f}"])
        assert 0 < middle <= late

mixes = ([(1.0, 0.6)], [(0.5, 0.9), (0.5, 0.3)])
tails = []
for mix in mixes:
    traffic = [TrafficClass(share=share, conditional_acceptance_rate=rate) for share, rate in mix]
    size = {"num_requests": 4000, "output_tokens": 128, "seed": 0}
    result = simulate(traffic, num_draft_tokens=K, verify_cost=v, draft_cost=c, **size)
    tails.append(result.time_per_output_token.p99)
print(f"simulated p99 of TPOT, plain steps: {tails[0]:.2f}; with mixed requests {tails[1]:.2f}")
assert tails[1] > tails[0], "mixed traffic has the longer tail"
columns = ["batch", "method", "wait", "p50 ms", "p99 ms"]
Markdown(f"Level L9, {here.device}\n\n" + to_markdown(columns, rows))

# %% [markdown]
# ## Draft by batch size
#
# τ depends on the text and the head. The costs `v` and `c` grow with the batch size, because a
# larger batch has less idle arithmetic. For a schedule of your own pair, run `eagle3 tune`: it
# measures τ and both costs in turns, and chooses a draft length for every batch size.

# %%
by_batch = {}
for speed in drafted:
    by_batch.setdefault(speed.batch, []).append(speed)
chosen = {}
for batch, candidates in sorted(by_batch.items()):
    fastest = max(candidates, key=lambda speed: speed.ratio)
    # A draft whose lower quartile is not above 1 may be slower than plain decoding.
    chosen[batch] = fastest.method if fastest.low > 1.0 else "plain"
    print(f"batch {batch:3}: {fastest.method}, {fastest.ratio:.2f}x; chosen: {chosen[batch]}")
batches = here.rounds("batches")
print("rounds by batch size:", "not measured" if batches is None else batches.origin)
for name, figure in ({} if batches is None else batches.figures).items():
    if "speed_in_bases" in figure:
        print(f"  {name}: {figure['speed_in_bases']['median']:.2f} times the speed of the chain")
here.verdict("best K by batch", ", ".join(f"{batch}: {name}" for batch, name in chosen.items()))

# %% tags=["hide-input"]
figure, axes = plt.subplots()
sizes = sorted(by_batch)
for method, colour in zip(
    dict.fromkeys(speed.method for speed in drafted), SERIES * 2, strict=False
):
    of_method = sorted((s for s in drafted if s.method == method), key=lambda speed: speed.batch)
    at = [sizes.index(speed.batch) for speed in of_method]
    axes.plot(at, [speed.ratio for speed in of_method], "o-", color=colour, label=method)
    axes.fill_between(
        at,
        [speed.low for speed in of_method],
        [speed.high for speed in of_method],
        color=colour,
        alpha=0.15,
    )
axes.axhline(1.0, color="#3c4043", linewidth=1)
axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
axes.set(xlabel=f"batch size, {here.device}", ylabel="speed-up over plain decoding")
axes.set_title("Speed-up by batch size")
axes.legend(fontsize="small")
plt.show()

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
# - The break-even τ and the predicted speed-up follow from the same model. A round of a chain is
#   the sum of its parts. Verification of 6 tokens costs less than 6 plain steps.
# - No plain step is faster than a copy of its bytes.
# - Percentiles are in order. Mixed traffic of the same mean rate has a longer tail.
#
# **Next:** [04](04_cost_and_claims.ipynb), cost and published claims.
