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
# # 01 · Why decoding is bound by bandwidth
#
# Speculative decoding rests on one fact about hardware: a language model that writes one token at a time spends its
# time *reading weights*, not computing. After this notebook you can
#
# - say what a decoding step reads, and bound tokens per second from a data sheet before you rent anything;
# - place a step on a roofline, and see how far left of the ridge it lies on an H200;
# - explain why checking six tokens costs about as much as writing one, and at which batch that ends;
# - read `S = τ / (v + K·c)`, the formula that all other notebooks measure.
#
# It takes about half a minute on a laptop CPU, offline, with the pair that ships with the package. Nothing to read
# before.

# %%
import first_cell

first_cell.start()

# %% [markdown]
# ## What a step reads
#
# To write one token, every weight is used once: each matrix is multiplied by one vector. So all weights travel from
# memory to the cores, and so do the keys and values of every token before (the *cache*). The arithmetic is small
# beside that: two operations for each weight.
#
# `eagle3_jax.theory` counts both from the description of a model alone. Below: two published models on an H200 (the
# 70-billion one with 8-bit weights), one sequence, 1,024 tokens behind it. A step cannot be faster than its bytes over
# the bandwidth.

# %%
import dataclasses

from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.accelerators import KNOWN_ACCELERATORS
from eagle3_jax.theory.bounds import check_claim, forward_work, round_bound
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment

H200 = KNOWN_ACCELERATORS["h200"]
CONTEXT = 1024


def deployed(name, weights, accelerator=H200):
    target = KNOWN_MODELS[name]
    return Deployment(
        target=target, head=usual_head(target), accelerator=accelerator, weights=weights
    )


small, large = deployed("Llama-3.1-8B", "bfloat16"), deployed("Llama-3.3-70B", "fp8")

print(f"{'':24} {'weights':>9} {'cache':>9} {'least time':>11} {'at most':>15}")
for name, one in (("Llama-3.1-8B, bfloat16", small), ("Llama-3.3-70B, FP8", large)):
    weights = one.streamed_bytes(one.target)
    cache = CONTEXT * one.cache_bytes_per_token(one.target)
    bound = round_bound(one, batch=1, context=CONTEXT, num_draft_tokens=5)
    print(
        f"{name:24} {weights / 1e9:6.2f} GB {cache / 1e9:6.2f} GB {1e3 * bound.plain_seconds:8.2f} ms "
        f"{bound.plain_tokens_per_second:7.0f} tokens/s"
    )
    assert bound.plain_limit == "memory", "one sequence is bound by reading"
    read = (
        weights + cache + one.cache_bytes_per_token(one.target)
    ) / H200.bandwidth_bytes_per_second
    assert abs(bound.plain_seconds / read - 1) < 1e-9, (
        "the bound is bytes over bandwidth, the new token's own included"
    )

# %% [markdown]
# Those are upper bounds. Nobody's kernels reach them, but nobody can exceed them either: whoever reports more tokens
# per second for one sequence on this chip has mislabelled a table.
#
# ## Arithmetic intensity, and the ridge
#
# The **arithmetic intensity** of a step is operations per byte read. Hardware has such a number too: peak over
# bandwidth, its **ridge**. A step whose intensity is below the ridge waits for memory; above, for arithmetic.
#
# A plain step of one sequence multiplies and adds once for every 2-byte weight: intensity 1. Feeding more tokens, from
# other sequences or from a draft, raises the intensity, because they share the reading of the weights.

# %%
ridge = H200.peak_flops / H200.bandwidth_bytes_per_second


def intensity(deployment, batch, tokens):
    work = forward_work(
        deployment,
        deployment.target,
        batch=batch,
        context=CONTEXT,
        tokens=tokens,
        logits=tokens,
        fuse=False,
    )
    return (work.layer_flops + work.other_flops) / work.num_bytes


print(f"ridge of an H200 in bfloat16: {ridge:.0f} operations per byte\n")
print("Llama-3.1-8B, bfloat16        operations per byte")
for batch, tokens in ((1, 1), (1, 6), (8, 1), (8, 6), (64, 1), (64, 6)):
    what = "plain step" if tokens == 1 else f"checking {tokens}"
    print(f"{batch:3} sequences, {what:12} {intensity(small, batch, tokens):12.1f}")

assert 0.9 < intensity(small, 1, 1) < 1.1, "two operations for each two-byte weight"
assert 5.9 < intensity(small, 1, 6) < 6.3, "six tokens share one reading of the weights"
assert ridge > 200, "an H200 could do two hundred times more arithmetic in the time of that reading"

# %% [markdown]
# The picture of this is the **roofline**: attainable arithmetic over intensity, a slope (memory) that ends in a flat
# roof (arithmetic). Choose an accelerator in the list. The points are steps of Llama-3.1-8B in batches; they keep
# their intensity, and the roof moves above them. Point at one for its least time.
#
# Look at batch 1, the leftmost circle and the leftmost diamond. Between them is a factor of six in arithmetic, and on
# the slope arithmetic is free: both take the same time.

# %%
from pictures.rooflines import Step, roofline

STEPS = [(batch, tokens) for batch in (1, 8, 64, 256) for tokens in (1, 6)]
OFFERED = (
    "h200",
    "h100",
    "b200",
    "a100-80gb",
    "l40s",
    "l4",
    "rtx-4090",
    "mi300x",
    "tpu-v5e",
    "tpu-v6e",
)


def said(chip):
    """The least time of each step on a chip, in words."""
    here = dataclasses.replace(small, accelerator=chip)
    bounds = [
        round_bound(here, batch=batch, context=CONTEXT, num_draft_tokens=tokens - 1)
        for batch, tokens in STEPS
    ]
    return [
        f"{batch} × {tokens} tokens: at least {1e3 * bound.verify_seconds:.2f} ms, bound by {bound.verify_limit}"
        for (batch, tokens), bound in zip(STEPS, bounds, strict=True)
    ]


chips = [KNOWN_ACCELERATORS[name] for name in OFFERED]
points = [
    Step(
        "plain step" if tokens == 1 else "checking 6 tokens",
        intensity(small, batch, tokens),
        f"batch {batch}",
    )
    for batch, tokens in STEPS
]
roofline(points, chips, [said(chip) for chip in chips])

# %%
for chip in chips:
    bound = round_bound(
        dataclasses.replace(small, accelerator=chip), batch=1, context=CONTEXT, num_draft_tokens=5
    )
    assert bound.verify_limit == "memory", (
        "on every chip offered, six tokens of one sequence are on the slope"
    )
    assert bound.verify_cost < 1.001, "so checking them costs what a plain step costs"

# %% [markdown]
# ## Why it ends with the batch
#
# Other sequences raise the intensity as well as drafts do, and at some batch the slope is used up. Call `v` the cost
# of checking `K + 1` tokens in plain steps. It is 1 on the slope and rises towards `K + 1` on the roof. Below: the
# bound of `v` on an H200, and what a drafter that gets three tokens out of each round can gain at most.

# %%
import itertools

import matplotlib.pyplot as plt

from eagle3_jax.theory.bounds import break_even_batch

TAU, K = 3.0, 5
batches = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
for name, one in (("Llama-3.1-8B, bfloat16", small), ("Llama-3.3-70B, FP8", large)):
    bounds = [
        round_bound(one, batch=batch, context=CONTEXT, num_draft_tokens=K) for batch in batches
    ]
    costs = [bound.verify_cost for bound in bounds]
    left.plot(batches, costs, marker="o", label=name)
    right.plot(batches, [bound.speedup(TAU) for bound in bounds], marker="o", label=name)
    assert costs[0] < 1.001 and all(a <= b + 1e-12 for a, b in itertools.pairwise(costs)), (
        "v only rises"
    )
    assert costs[-1] > 3, "and in a large batch six tokens cost several steps"
left.set(
    xscale="log",
    xlabel="sequences",
    ylabel="v, plain steps",
    title=f"Checking {K + 1} tokens is free until it is not",
)
right.set(
    xscale="log",
    xlabel="sequences",
    ylabel="bound of the speed-up S",
    title=f"What {TAU:g} tokens per round are worth",
)
right.axhline(1, color="black", linewidth=1)
left.legend()
plt.show()

for name, one in (("Llama-3.1-8B", small), ("Llama-3.3-70B", large)):
    batch = break_even_batch(one, context=CONTEXT, num_draft_tokens=K, mean_acceptance_length=TAU)
    print(f"{name}: at {TAU:g} tokens per round nothing is left to gain from {batch} sequences on")

# %% [markdown]
# ## This machine
#
# Now measure instead of counting. First the two roofs of the CPU that runs this notebook: how fast it streams memory,
# and how fast it multiplies matrices. Then the forward of the shipped target (10.9 million parameters) over 1, 2, 4, …
# tokens, with `eagle3_jax.bench`: several forwards in one compiled program, compiled before the clock starts and
# waited for before it stops, all sizes in turns, five times.
#
# The precision is `mixed`: bfloat16 weights and products, sums in float32. On CPUs it is the one in which several rows
# cost little more than one.

# %%
import time

import jax
import jax.numpy as jnp

import eagle3_jax as e3
from eagle3_jax.bench.roofline import bandwidths, step_bytes
from eagle3_jax.bench.step_costs import draft_seconds, target_seconds
from eagle3_jax.bench.timing import Spread
from eagle3_jax.drafters.plain import Plain

target = e3.load_target(dtype="mixed")
head = e3.load_drafter(target=target)
prompt = target.tokenizer.encode("def read_config(path):\n").ids
slots = 256  # of the caches below; a step reads them all


def multiply_speed(size=1024, repeats=5):
    """Operations per second of a product of square bfloat16 matrices, summed in float32."""
    matrix = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    jax.block_until_ready(product(matrix, matrix))
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(product(matrix, matrix))
        taken.append(time.perf_counter() - start)
    return 2 * size**3 / min(taken)


weight_bytes = step_bytes(target, rows=1, context=0)
streamed = bandwidths(2**28)
arithmetic = multiply_speed()
print(
    "streaming 268 MB: "
    + ", ".join(f"{way} {speed / 1e9:.0f} GB/s" for way, speed in streamed.items())
)
print(f"multiplying matrices: {arithmetic / 1e9:.0f} billion operations per second")
print(f"ridge of this machine: about {arithmetic / max(streamed.values()):.0f} operations per byte")
caches = step_bytes(target, rows=1, context=slots) - weight_bytes
print(
    f"a step reads {weight_bytes / 1e6:.1f} MB of weights and at most {caches / 1e6:.1f} MB of caches"
)

# %%
SIZES = (1, 2, 4, 6, 16, 32)
decoders = {size: e3.SpeculativeDecoder(target, Plain(size), stop_tokens=()) for size in SIZES}
taken = {size: [] for size in SIZES}
for repeat in range(6):  # the first one compiles
    for size, decoder in decoders.items():
        seconds = target_seconds(decoder, [prompt], max_new_tokens=64, rounds=16)
        if repeat:
            taken[size].append(1e3 * seconds)

spread = {size: Spread.of(times) for size, times in taken.items()}
for size, one in spread.items():
    ratio = Spread.of([ours / plain for ours, plain in zip(taken[size], taken[1], strict=True)])
    print(
        f"{size:3} tokens: {one.median:6.2f} ms ({one.low:.2f}-{one.high:.2f})   v = {ratio.median:.2f} "
        f"({ratio.low:.2f}-{ratio.high:.2f})   {one.median / size:.2f} ms a token"
    )

# %% [markdown]
# Two things to see. A token gets much cheaper in company: the time per token in the last column falls. And the curve
# is flat at first, then rises: on a CPU with few cores the ridge lies at tens of operations per byte, not hundreds, so
# `v` rises sooner than on an H200. (This target is small, too: norms, softmax and the rotary embedding of each row
# weigh more here than in a large model; `docs/speed.md` takes a round apart and shows larger shapes.)
#
# The dashed lines are what reading the bytes and doing the arithmetic would take at the speeds measured above. The
# weights fit into a large cache, so a step may even read faster than memory streams.

# %%
here = Deployment(
    target=target.model.config, head=None, accelerator=H200, cache="float32"
)  # mixed: caches in float32
works = [
    forward_work(here, here.target, batch=1, context=slots, tokens=size, logits=size)
    for size in SIZES
]
reading = [1e3 * work.num_bytes / max(streamed.values()) for work in works]
computing = [1e3 * (work.layer_flops + work.other_flops) / arithmetic for work in works]

figure, axes = plt.subplots()
middle = [spread[size].median for size in SIZES]
axes.fill_between(
    SIZES, [spread[s].low for s in SIZES], [spread[s].high for s in SIZES], alpha=0.2, linewidth=0
)
axes.plot(SIZES, middle, marker="o", label="measured (median, quartiles)")
axes.plot(
    SIZES,
    [middle[0] * size for size in SIZES],
    color="#9aa0a6",
    linestyle=":",
    label="one at a time",
)
axes.plot(SIZES, reading, color="#444", linestyle="--", label="reading alone")
axes.plot(SIZES, computing, color="#444", linestyle="-.", label="arithmetic alone")
axes.set(xscale="log", yscale="log", title="Several tokens share one reading of the weights")
axes.set(xlabel="tokens in one forward", ylabel="time of a forward, ms")
axes.set_xticks(SIZES, map(str, SIZES), minor=False)
axes.minorticks_off()
axes.legend()
plt.show()

assert abs(reading[-1] / reading[0] - 1) < 0.1, (
    "thirty-two tokens read what one reads, and their own keys and values"
)
assert 25 < computing[-1] / computing[0] < 40, "but they compute thirty-two times as much"

# %% [markdown]
# ## From there to speculation
#
# A model writes token `t + 1` after token `t`; nobody can feed it tokens that do not exist yet. Unless somebody
# *guesses* them. A small **draft head** proposes `K` tokens, the target looks at all of them in one forward, keeps
# those that it would have written itself, and adds one of its own. That is a **round**.
#
# Here is a text of the shipped target, written plainly and with its head (`K = 3`). Every colour is a way in which a
# token came about; hover over a token for its round. The texts are the same, the number of forwards is not.

# %%
from pictures.strips import TokenStrip, tokens_of

from eagle3_jax.trace import record

plain = e3.SpeculativeDecoder(target, stop_tokens=())
chain = e3.SpeculativeDecoder(target, head, num_speculative_tokens=3, stop_tokens=())
asked = {"max_new_tokens": [64], "sampling": e3.SamplingParams(), "seed": 0}
one_by_one, speculated = record(plain, [prompt], **asked), record(chain, [prompt], **asked)
rounds = len(speculated.prompts[0]["rounds"])

assert speculated.result.tokens == one_by_one.result.tokens, "speculation does not change the text"
assert len(one_by_one.prompts[0]["rounds"]) == 63, (
    "plainly, every token but the prefill's takes a forward"
)
assert rounds < 40, "with the head, many forwards write more than one"

TokenStrip(
    tokens_of(one_by_one.prompts[0], target.tokenizer), "Plain: 63 forwards after the prompt's"
)

# %%
TokenStrip(
    tokens_of(speculated.prompts[0], target.tokenizer),
    f"With the head: {rounds} forwards after the prompt's",
)

# %% [markdown]
# ## `S = τ / (v + K·c)`
#
# - `τ`, the **mean acceptance length**, is how many tokens a round writes: those accepted and one more.
# - `v` is what checking `K + 1` tokens costs, in plain steps. You have seen why it can be near 1.
# - `c` is what one pass of the head costs, in plain steps; there are `K` of them in a round.
#
# A round costs `v + K·c` plain steps and writes `τ` tokens, so the speed-up is `S = τ / (v + K·c)`. Measured apart,
# and then beside the ratio of the two real runs, which take turns:

# %%
from eagle3_jax.bench.comparison import compare_with_plain
from eagle3_jax.theory.speedup import speedup

stats = speculated.result.stats
tau = stats.mean_acceptance_length
assert tau == 1 + int(stats.num_accepted_tokens) / rounds, (
    "one token a round besides those accepted"
)

verify = [ours / step for ours, step in zip(taken[4], taken[1], strict=True)]
draft = []
for repeat in range(6):  # the first one compiles
    seconds = draft_seconds(chain, [prompt], max_new_tokens=64, rounds=16)
    if repeat:
        draft.append(1e3 * seconds / spread[1].median)
v, c = Spread.of(verify), Spread.of(draft)
compared = compare_with_plain(
    chain, [prompt], max_new_tokens=[64], sampling=e3.SamplingParams(), seed=0, repeats=7
)
measured = Spread.of(compared.ratios)
expected = speedup(tau, num_draft_tokens=3, verify_cost=v.median, draft_cost=c.median)

print(
    f"τ = {tau:.2f}, v = {v.median:.2f} ({v.low:.2f}-{v.high:.2f}), c = {c.median:.3f} ({c.low:.3f}-{c.high:.3f})"
)
print(
    f"predicted S = {expected:.2f}; measured {measured.median:.2f} ({measured.low:.2f}-{measured.high:.2f})"
)
assert compared.same_output, "and again the same tokens"

# %% [markdown]
# Prediction and measurement need not agree to the digit: `v` and `c` are timed in loops of their own, the round has
# acceptance and bookkeeping besides, the ratio includes the prefill, and this machine has other work to do. The
# formula tells you *which* of the three numbers to improve. Notebook 08 measures all of them properly.
#
# ## What would go wrong
#
# **Dividing the peak by the operations per token.** A data sheet promises 989·10¹² bfloat16 operations per second; a
# token of a 70-billion-parameter model takes 141·10⁹. Their quotient looks like a speed. Many published tables contain
# such numbers under "batch 1 to 4". The roofline refuses them:

# %%
in_bfloat16 = dataclasses.replace(large, weights="bfloat16")
work = forward_work(in_bfloat16, large.target, batch=1, context=CONTEXT, tokens=1, logits=1)
wished = H200.peak_flops / (work.layer_flops + work.other_flops)
allowed = round_bound(
    in_bfloat16, batch=1, context=CONTEXT, num_draft_tokens=0
).plain_tokens_per_second
print(f"peak over operations: {wished:,.0f} tokens/s; bytes over bandwidth: {allowed:.0f}")
print(f"wrong by a factor of {wished / allowed:.0f}")
assert abs(wished / allowed * intensity(in_bfloat16, 1, 1) / ridge - 1) < 1e-6, (
    "the factor is ridge over intensity"
)

claim = check_claim(large, tokens_per_second=6200, batch=4, context=CONTEXT, num_draft_tokens=5)
print(
    f"\n'6,200 tokens/s with EAGLE-3 at batch 4': with every draft accepted at most {claim.bound:,.0f};"
    f"\nplain decoding would need a batch of {claim.batch_needed} to get there"
)
assert not claim.possible and 3.5 < claim.share_of_bound < 4.2, "off by a factor of almost four"

# %% [markdown]
# **Judging a GPU by a CPU.** The `v` measured above belongs to this machine and this model. Copy the method, never the
# number.
#
# ## Exercises
#
# **1.** The head of Llama-3.3-70B has 1.4 billion parameters. What is `c` at least, at batch 1 on an H200 with an FP8
# target? Why does it hardly depend on the chip?
#
# <details><summary>Answer</summary>
#
# A pass of the head reads the head, about 2.4 GB without the fusion that only the first pass uses, a plain step reads
# 70.6 GB. Both are on the slope, so the bandwidth cancels: `c` is a ratio of bytes, about 0.035 (computed below).
#
# </details>
#
# **2.** Weights in int4 instead of bfloat16: does speculation gain more or less on Llama-3.1-8B at batch 1? At batch
# 64?
#
# <details><summary>Answer</summary>
#
# At batch 1 less: the target's step shrinks to a third while the head keeps its 16 bits, so `c` grows. At batch 64
# much less: the arithmetic is the same (products are still bfloat16) but there is less reading to hide it behind, so
# `v` leaves 1 earlier. The cell below prints both.
#
# </details>
#
# **3.** How does the break-even batch of Llama-3.1-8B at `τ = 3`, `K = 5` change when every sequence has 8,192 tokens
# behind it?
#
# <details><summary>Answer</summary>
#
# There is none any more: every sequence brings a gigabyte of keys and values that only it uses, so batching does not
# raise the intensity beyond what one sequence's attention has, and reading stays the limit. (Kernels and acceptance
# suffer from long contexts too; this is a bound.)
#
# </details>
#
# **4.** With `v = 1` and `c = 0.05`, which `τ` does a chain of `K = 5` need for `S = 2`? Can `K = 1` reach `S = 2`?
#
# <details><summary>Answer</summary>
#
# `τ = 2·(1 + 5·0.05) = 2.5`. With `K = 1` a round writes at most 2 tokens and costs 1.05, so `S` stays below 1.91.
#
# </details>

# %%
bound = round_bound(large, batch=1, context=CONTEXT, num_draft_tokens=5)
print(f"1. c = {bound.draft_cost:.4f} on an H200")
for key in ("h100", "l40s", "mi300x"):
    elsewhere = dataclasses.replace(large, accelerator=KNOWN_ACCELERATORS[key])
    other = round_bound(elsewhere, batch=1, context=CONTEXT, num_draft_tokens=5)
    assert abs(other.draft_cost / bound.draft_cost - 1) < 1e-6, "the bandwidth cancels"

gains = {}
for weights, batch in itertools.product(("bfloat16", "int4"), (1, 64)):
    lighter = dataclasses.replace(small, weights=weights)
    found = round_bound(lighter, batch=batch, context=CONTEXT, num_draft_tokens=K)
    gains[weights, batch] = gain = found.speedup(TAU)
    print(
        f"2. {weights:8} batch {batch:2}: v {found.verify_cost:.2f}, c {found.draft_cost:.3f}, S {gain:.2f}"
    )

short, long = (
    break_even_batch(small, context=context, num_draft_tokens=K, mean_acceptance_length=TAU)
    for context in (128, 8192)
)
print(f"3. {short} sequences at 128 tokens, {long} at 8,192")
enough = speedup(2.5, num_draft_tokens=5, verify_cost=1.0, draft_cost=0.05)
most = speedup(2.0, num_draft_tokens=1, verify_cost=1.0, draft_cost=0.05)
print(f"4. {enough:.2f} with K = 5, at most {most:.2f} with K = 1")

assert 0.030 < bound.draft_cost < 0.040
assert all(gains["int4", batch] < gains["bfloat16", batch] for batch in (1, 64))
assert short is not None and long is None
assert abs(enough - 2) < 1e-9 and most < 1.91

# %% [markdown]
# ## What was claimed and checked
#
# - One sequence is bound by reading, and the bound is bytes over bandwidth; intensity is 1, and 6 for six tokens.
# - An H200's ridge lies above 200 operations per byte; on ten accelerators checking six tokens is free at batch 1.
# - `v` only rises with the batch; the factor by which peak arithmetic misleads is ridge over intensity.
# - Speculation wrote the same tokens in fewer forwards; `τ` is one plus accepted tokens per round.
# - A published claim of 6,200 tokens/s is impossible by almost a factor of four.
#
# Times were printed and never asserted.
#
# **Next:** 02, how a guess can be accepted without changing the law of the text. 08 measures `τ`, `v` and `c`
# properly.
