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
# # 01 · Why decoding is memory-bound
#
# A language model that generates one token at a time spends most of its time reading weights. Its
# arithmetic units are idle during that time. Speculative decoding uses them. After this notebook
# you can
#
# - compute the bytes that one decoding step reads, and bound tokens per second from a data sheet;
# - place a decoding step on a roofline;
# - explain why verifying six tokens costs about as much as generating one, and at which batch size
#   that ends;
# - read `S = τ / (v + K·c)`, the speed-up formula of all later notebooks.
#
# The notebook takes about a minute on two CPU cores, offline. It needs only
# `pip install -e '.[notebooks]'`. It uses the small pair of models of the package.
# [00](00_watch_it_draft.ipynb) shows the method on a chat model.
#
# **Exercises.** A function with `raise NotImplementedError` is yours to write. The folded cell
# below it has an answer. The cell after that checks your function. If you leave the function as it
# is, the notebook uses the answer.

# %% tags=["hide-input"]
import first_cell

first_cell.start()

import dataclasses
import itertools
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from exercises import checked
from pictures.moving import Moving
from pictures.rooflines import Step, roofline

import eagle3_jax as e3
from eagle3_jax.bench.comparison import compare_with_plain
from eagle3_jax.bench.roofline import bandwidths
from eagle3_jax.bench.step_costs import draft_seconds, target_seconds
from eagle3_jax.drafters.plain import Plain
from eagle3_jax.measure.timing import Spread
from eagle3_jax.measure.trace import record
from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.accelerators import KNOWN_ACCELERATORS
from eagle3_jax.theory.bounds import break_even_batch, check_claim, forward_work, round_bound
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment
from eagle3_jax.theory.speedup import speedup

# %% [markdown]
# ## Bytes read by one decoding step
#
# To generate one token, the model multiplies every weight matrix by one vector. The chip reads all
# weights from memory. It also reads the keys and values of all earlier tokens (the *KV cache*). The
# arithmetic is small: two operations per weight.
#
# `eagle3_jax.theory` counts the bytes and operations of a model from its configuration. The cell
# below counts them for two published models on an H200, for one sequence with a context of 1,024
# tokens. The 70-billion model has 8-bit weights. The bytes divided by the bandwidth are a lower
# bound of the step time.

# %%
H200 = KNOWN_ACCELERATORS["h200"]
CONTEXT = 1024


def deployed(name, weights, accelerator=H200):
    target = KNOWN_MODELS[name]
    return Deployment(
        target=target, head=usual_head(target), accelerator=accelerator, weights=weights
    )


small = deployed("Llama-3.1-8B", "bfloat16")
large = deployed("Llama-3.3-70B", "fp8")

print(f"{'':24} {'weights':>9} {'cache':>9} {'lower bound':>11} {'upper bound':>15}")
for name, deployment in (("Llama-3.1-8B, bfloat16", small), ("Llama-3.3-70B, FP8", large)):
    weights = deployment.streamed_bytes(deployment.target)
    cache = CONTEXT * deployment.cache_bytes_per_token(deployment.target)
    bound = round_bound(deployment, batch=1, context=CONTEXT, num_draft_tokens=5)
    print(
        f"{name:24} {weights / 1e9:6.2f} GB {cache / 1e9:6.2f} GB {1e3 * bound.plain_seconds:8.2f}"
        f" ms {bound.plain_tokens_per_second:7.0f} tokens/s"
    )
    assert bound.plain_limit == "memory", "one sequence is bound by reading"
    read = (
        weights + cache + deployment.cache_bytes_per_token(deployment.target)
    ) / H200.bandwidth_bytes_per_second
    assert abs(bound.plain_seconds / read - 1) < 1e-9, (
        "the bound is bytes over bandwidth, the new token's own included"
    )

# %% [markdown]
# The last column is an upper bound of the speed. Real kernels stay below it. A report of more
# tokens per second for one sequence on this chip is wrong.
#
# ## Arithmetic intensity and the ridge point
#
# The **arithmetic intensity** of a step is its number of operations per byte read. The **ridge
# point** of a chip is its peak arithmetic divided by its bandwidth. A step with an intensity below
# the ridge point is memory-bound. A step with an intensity above it is compute-bound.
#
# **Exercise: the lower bound.** Reading and arithmetic run at the same time. The slower of the two
# bounds the step.


# %%
def step_bound(num_bytes, operations, bandwidth, peak):
    """Returns the lower bound of a step in seconds.

    Args:
        num_bytes: Bytes that the step reads.
        operations: Operations that it computes.
        bandwidth: Bytes per second.
        peak: Operations per second.
    """
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def step_bound_answer(num_bytes, operations, bandwidth, peak):
    return max(num_bytes / bandwidth, operations / peak)


# %%
def check_step_bound(step_bound):
    plain = step_bound(16e9, 16e9, 4e12, 1e15)
    assert abs(plain - 0.004) < 1e-9, "16 GB at 4 TB/s take 4 ms; the arithmetic is faster"

    large_batch = step_bound(16e9, 16e12, 4e12, 1e15)
    assert abs(large_batch - 0.016) < 1e-9, (
        "a thousand times the arithmetic takes 16 ms, longer than reading"
    )

    model = deployed("Llama-3.1-8B", "bfloat16")
    for batch, tokens in ((1, 1), (1, 6), (64, 6), (512, 6)):
        work = forward_work(
            model, model.target, batch=batch, context=CONTEXT, tokens=tokens, logits=tokens
        )
        operations = work.layer_flops + work.other_flops
        seconds = step_bound(
            work.num_bytes, operations, H200.bandwidth_bytes_per_second, H200.peak_flops
        )
        bound = round_bound(model, batch=batch, context=CONTEXT, num_draft_tokens=tokens - 1)
        assert abs(seconds / bound.verify_seconds - 1) < 1e-9, (
            f"{batch} sequences, {tokens} tokens on an H200"
        )


step_bound = checked(step_bound, step_bound_answer, check_step_bound)

# %% [markdown]
# A plain step of one sequence has intensity 1. More tokens, from other sequences or from a draft,
# raise the intensity, because they share one reading of the weights.

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
    step = "plain step" if tokens == 1 else f"verify {tokens}"
    print(f"{batch:3} sequences, {step:12} {intensity(small, batch, tokens):12.1f}")

assert 0.9 < intensity(small, 1, 1) < 1.1, "two operations for each two-byte weight"
assert 5.9 < intensity(small, 1, 6) < 6.3, "six tokens share one reading of the weights"
assert ridge > 200, "an H200 could do two hundred times more arithmetic in the time of that reading"

# %% [markdown]
# ## Roofline
#
# A **roofline** shows the attainable arithmetic over the intensity. The slope is the memory limit,
# the flat part is the arithmetic limit. Choose an accelerator in the list. The points are steps of
# Llama-3.1-8B at several batch sizes. Hover over a point for its lower bound in time.
#
# Compare the leftmost circle with the leftmost diamond (batch 1). The diamond has six times the
# arithmetic. On the slope, both take the same time.

# %% tags=["hide-input"]
STEPS = [(batch, tokens) for batch in (1, 8, 64, 256) for tokens in (1, 6)]
OFFERED = ["h200", "h100", "b200", "a100-80gb", "l40s", "l4"]
OFFERED += ["rtx-4090", "mi300x", "tpu-v5e", "tpu-v6e"]


def descriptions(chip):
    """Lower bound of the time of each step on a chip, as text."""
    here = dataclasses.replace(small, accelerator=chip)
    bounds = [
        round_bound(here, batch=batch, context=CONTEXT, num_draft_tokens=tokens - 1)
        for batch, tokens in STEPS
    ]
    return [
        f"{batch} × {tokens} tokens: at least {1e3 * bound.verify_seconds:.2f} ms, bound by"
        f" {bound.verify_limit}"
        for (batch, tokens), bound in zip(STEPS, bounds, strict=True)
    ]


chips = [KNOWN_ACCELERATORS[name] for name in OFFERED]
points = [
    Step(
        "plain step" if tokens == 1 else "verify 6 tokens",
        intensity(small, batch, tokens),
        f"batch {batch}",
    )
    for batch, tokens in STEPS
]
for chip in chips:
    bound = round_bound(
        dataclasses.replace(small, accelerator=chip), batch=1, context=CONTEXT, num_draft_tokens=5
    )
    assert bound.verify_limit == "memory", "verifying six tokens of one sequence is memory-bound"
    assert bound.verify_cost < 1.001, "verifying six tokens costs as much as a plain step"
roofline(points, chips, [descriptions(chip) for chip in chips])

# %% [markdown]
# ## Verification cost by batch size
#
# More sequences raise the intensity, as draft tokens do. At some batch size a step reaches the
# ridge point. Let `v` be the cost of verifying `K + 1` tokens, in plain steps. `v` is 1 on the
# slope and rises towards `K + 1` on the flat part. The left plot shows the bound of `v` on an H200.
# The right plot shows the upper bound of the speed-up for a drafter that adds three tokens per
# round.

# %% tags=["hide-input"]
TAU = 3.0
K = 5
batches = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
figure, (cost_axes, speedup_axes) = plt.subplots(1, 2, figsize=(9, 3.4))
for name, deployment in (("Llama-3.1-8B, bfloat16", small), ("Llama-3.3-70B, FP8", large)):
    bounds = [
        round_bound(deployment, batch=batch, context=CONTEXT, num_draft_tokens=K)
        for batch in batches
    ]
    costs = [bound.verify_cost for bound in bounds]
    cost_axes.plot(batches, costs, marker="o", label=name)
    speedup_axes.plot(batches, [bound.speedup(TAU) for bound in bounds], marker="o", label=name)
    assert costs[0] < 1.001 and all(a <= b + 1e-12 for a, b in itertools.pairwise(costs)), (
        "v never falls with the batch size"
    )
    assert costs[-1] > 3, "in a large batch, verifying six tokens costs several plain steps"
cost_axes.set(
    xscale="log",
    xlabel="sequences",
    ylabel="v, plain steps",
    title=f"Cost of verifying {K + 1} tokens",
)
speedup_axes.set(
    xscale="log",
    xlabel="sequences",
    ylabel="upper bound of the speed-up S",
    title=f"Speed-up with {TAU:g} tokens per round",
)
speedup_axes.axhline(1, color="black", linewidth=1)
cost_axes.legend()
plt.show()

for name, deployment in (("Llama-3.1-8B", small), ("Llama-3.3-70B", large)):
    batch = break_even_batch(
        deployment, context=CONTEXT, num_draft_tokens=K, mean_acceptance_length=TAU
    )
    print(f"{name}: with {TAU:g} tokens per round, drafting stops paying off at {batch} sequences")

# %% [markdown]
# ## Measurement on this machine
#
# The next cell measures how fast this CPU reads memory and multiplies matrices. The cell after it
# times a forward pass of the shipped target (10.9 million parameters) over 1, 2, 4, … tokens.
# `eagle3_jax.bench` runs several forward passes in one compiled program. It compiles before it
# starts the clock and waits for the result before it stops the clock. The block sizes are measured
# in turns, five times.
#
# The precision is `mixed`: bfloat16 weights and products, sums in float32. On CPUs, this precision
# makes a block of several tokens cheap.

# %%
target = e3.load_target(dtype="mixed")
head = e3.load_drafter(target=target)
prompt = target.tokenizer.encode("def read_config(path):\n").ids


def multiply_speed(size=1024, repeats=5):
    """Operations per second of a product of two square bfloat16 matrices, with float32 sums."""
    matrix = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    jax.block_until_ready(product(matrix, matrix))
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(product(matrix, matrix))
        taken.append(time.perf_counter() - start)
    return 2 * size**3 / min(taken)


bandwidth = max(bandwidths(2**28).values())
arithmetic = multiply_speed()
print(f"bandwidth {bandwidth / 1e9:.0f} GB/s, {arithmetic / 1e9:.0f} billion operations per second")
print(f"ridge point of this machine: {arithmetic / bandwidth:.0f} operations per byte")

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
for size, milliseconds in spread.items():
    ratio = Spread.of([ours / plain for ours, plain in zip(taken[size], taken[1], strict=True)])
    print(
        f"{size:3} tokens: {milliseconds.median:6.2f} ms"
        f" ({milliseconds.low:.2f}-{milliseconds.high:.2f})   v = {ratio.median:.2f}"
        f" ({ratio.low:.2f}-{ratio.high:.2f})   {milliseconds.median / size:.2f} ms per token"
    )

# %% [markdown]
# The time per token in the last column falls with the number of tokens. The curve below is flat at
# first, then rises. A CPU with few cores has a lower ridge point than an H200, so `v` rises
# earlier. The dashed lines show the time for reading the bytes and the time for the arithmetic, at
# the speeds measured above. A large CPU cache can hold all weights of this target, so a step can be
# faster than the line for reading.

# %% tags=["hide-input"]
# In the precision mixed, the caches are in float32.
here = Deployment(target=target.model.config, head=None, accelerator=H200, cache="float32")
works = [
    forward_work(here, here.target, batch=1, context=256, tokens=size, logits=size)
    for size in SIZES
]
reading = [1e3 * work.num_bytes / bandwidth for work in works]
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
    label="proportional to the tokens",
)
axes.plot(SIZES, reading, color="#444", linestyle="--", label="reading only")
axes.plot(SIZES, computing, color="#444", linestyle="-.", label="arithmetic only")
axes.set(xscale="log", yscale="log", title="Time of a forward pass by number of tokens")
axes.set(xlabel="tokens in one forward pass", ylabel="time, ms")
axes.set_xticks(SIZES, map(str, SIZES), minor=False)
axes.minorticks_off()
axes.legend()
plt.show()

assert abs(reading[-1] / reading[0] - 1) < 0.1, "32 tokens read the same weights as one"
assert 25 < computing[-1] / computing[0] < 40, "they compute 32 times as much"

# %% [markdown]
# ## One round of speculative decoding
#
# In each **round**, a small **draft head** proposes `K` tokens. The target runs on all of them in
# one forward pass. It keeps the tokens that it would have generated itself and adds one more token.
#
# The cell decodes one text with the shipped target, plain and with the head (`K = 3`).
# [00](00_watch_it_draft.ipynb) shows the tokens of such runs by their origin.

# %%
plain = e3.SpeculativeDecoder(target, stop_tokens=())
chain = e3.SpeculativeDecoder(target, head, num_speculative_tokens=3, stop_tokens=())
request = {"max_new_tokens": [64], "sampling": e3.SamplingParams(), "seed": 0}
one_by_one = record(plain, [prompt], **request)
speculated = record(chain, [prompt], **request)
rounds = len(speculated.prompts[0]["rounds"])

assert speculated.result.tokens == one_by_one.result.tokens, "speculation does not change the text"
assert len(one_by_one.prompts[0]["rounds"]) == 63, "plain: one forward pass per token"
assert rounds < 40, "with the head, many forward passes add more than one token"
print(f"plain: 63 forward passes; with the head: {rounds} rounds")

# %% [markdown]
# ## Speed-up formula `S = τ / (v + K·c)`
#
# - `τ`, the **mean acceptance length**, is the mean number of tokens that a round adds: the
#   accepted tokens plus one.
# - `v` is the cost of verifying `K + 1` tokens, in plain steps.
# - `c` is the cost of one forward pass of the head, in plain steps. A round has `K` of them.
#
# A round costs `v + K·c` plain steps and adds `τ` tokens. Therefore the speed-up is
# `S = τ / (v + K·c)`. Move the sliders. Which number makes a draft slower than plain decoding?

# %%
Moving(
    "speedup", {"tau": 2.4, "v": 1.2, "c": 0.1, "K": 3, "title": "Time of a round, in plain steps"}
)

# %% [markdown]
# **Exercise: the longest draft that pays off.** `taus[k]` is `τ` of a chain of `k` tokens,
# `verify_costs[k]` is `v` of its verification. Entry 0 is plain decoding.


# %%
def best_length(taus, verify_costs, draft_cost):
    """Returns the draft length with the largest speed-up; 0 if no draft is faster than plain."""
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def best_length_answer(taus, verify_costs, draft_cost):
    gains = [
        tau / (v + k * draft_cost)
        for k, (tau, v) in enumerate(zip(taus, verify_costs, strict=True))
    ]
    return gains.index(max(gains))


# %%
def check_best_length(best_length):
    taus = [1.0, 1.7, 2.2, 2.5]
    assert best_length(taus, [1, 1, 1, 1], 0.0) == 3, (
        "if drafts and verification are free, the longest is best"
    )
    assert best_length(taus, [1, 1, 1, 1], 0.25) == 2, (
        "2.2 / 1.5 is above 1.7 / 1.25 and 2.5 / 1.75"
    )
    assert best_length(taus, [1, 2, 3, 4], 0.0) == 0, (
        "if v is K + 1, no draft is faster than plain decoding"
    )
    assert best_length([1, 1.9, 2.0], [1, 1.0, 1.0], 0.3) == 1, "1.9 / 1.3 is above 2.0 / 1.6"

    for k in range(4):
        gain = speedup(taus[k], num_draft_tokens=k, verify_cost=1.1, draft_cost=0.1)
        best = best_length(taus, [1.1] * 4, 0.1)
        largest = speedup(taus[best], num_draft_tokens=best, verify_cost=1.1, draft_cost=0.1)
        assert largest >= gain, "the library computes a larger speed-up for another length"


best_length = checked(best_length, best_length_answer, check_best_length)

# %% [markdown]
# The next cell measures `τ`, `v` and `c` separately and predicts `S`. It compares the prediction
# with the ratio of the times of two real runs, measured in turns.

# %%
stats = speculated.result.stats
tau = stats.mean_acceptance_length
assert tau == 1 + int(stats.num_accepted_tokens) / rounds, (
    "a round adds the accepted tokens plus one"
)

verify = [ours / step for ours, step in zip(taken[4], taken[1], strict=True)]
draft = []
for repeat in range(6):  # the first one compiles
    seconds = draft_seconds(chain, [prompt], max_new_tokens=64, rounds=16)
    if repeat:
        draft.append(1e3 * seconds / spread[1].median)
v = Spread.of(verify)
c = Spread.of(draft)
compared = compare_with_plain(
    chain, [prompt], max_new_tokens=[64], sampling=e3.SamplingParams(), seed=0, repeats=7
)
measured = Spread.of(compared.ratios)
expected = speedup(tau, num_draft_tokens=3, verify_cost=v.median, draft_cost=c.median)

print(
    f"τ = {tau:.2f}, v = {v.median:.2f} ({v.low:.2f}-{v.high:.2f}), c = {c.median:.3f}"
    f" ({c.low:.3f}-{c.high:.3f})"
)
print(
    f"predicted S = {expected:.2f}; measured {measured.median:.2f}"
    f" ({measured.low:.2f}-{measured.high:.2f})"
)
assert compared.same_output, "the same tokens again"

# %% [markdown]
# The prediction is approximate. `v` and `c` are timed in separate loops. A round also includes
# acceptance and bookkeeping, and the measured ratio includes the prefill. The formula shows which
# of the three numbers to improve. Notebook [07](07_measuring_and_batches.ipynb) measures them for
# several `K` and batch sizes.
#
# ## Common mistakes
#
# **Dividing peak arithmetic by the operations per token.** The quotient has the unit of a speed,
# and many published tables print such numbers for "batch 1 to 4". The cell compares it with the
# memory bound of the 70-billion model.

# %%
in_bfloat16 = dataclasses.replace(large, weights="bfloat16")
work = forward_work(in_bfloat16, large.target, batch=1, context=CONTEXT, tokens=1, logits=1)
wished = H200.peak_flops / (work.layer_flops + work.other_flops)
allowed = round_bound(
    in_bfloat16, batch=1, context=CONTEXT, num_draft_tokens=0
).plain_tokens_per_second
print(f"peak / operations: {wished:,.0f} tokens/s; bandwidth / bytes: {allowed:.0f} tokens/s")
print(f"too high by a factor of {wished / allowed:.0f}")
assert abs(wished / allowed * intensity(in_bfloat16, 1, 1) / ridge - 1) < 1e-6, (
    "the factor is the ridge point divided by the intensity"
)

claim = check_claim(large, tokens_per_second=6200, batch=4, context=CONTEXT, num_draft_tokens=5)
print(
    "\nclaim: 6,200 tokens/s with EAGLE-3 at batch 4; upper bound with every draft accepted:"
    f" {claim.bound:,.0f}\nplain decoding would need batch {claim.batch_needed} for this speed"
)
assert not claim.possible and 3.5 < claim.share_of_bound < 4.2, "off by a factor of almost four"

# %% [markdown]
# **Applying a CPU's `v` to a GPU.** The `v` measured above is valid for this machine and this model
# only.
#
# ## Questions
#
# **1.** The head of Llama-3.3-70B has 1.4 billion parameters. What is the lower bound of `c` at
# batch 1 on an H200 with an FP8 target? Why does it hardly depend on the chip?
#
# <details><summary>Answer</summary>
#
# About 0.018. A forward pass of the head reads about 1.2 GB in FP8. A plain step reads 70.6 GB.
# Both are memory-bound, so the bandwidth cancels and `c` is a ratio of bytes.
#
# </details>
#
# **2.** How does the break-even batch of Llama-3.1-8B at `τ = 3`, `K = 5` change when every
# sequence has a context of 8,192 tokens?
#
# <details><summary>Answer</summary>
#
# There is no break-even batch any more. Every sequence adds a gigabyte of keys and values that no
# other sequence uses. So the intensity hardly rises with the batch, and the step stays
# memory-bound.
#
# </details>
#
# **3.** With `v = 1` and `c = 0.05`, which `τ` does a chain of `K = 5` need for `S = 2`? Can
# `K = 1` reach `S = 2`?
#
# <details><summary>Answer</summary>
#
# `τ = 2·(1 + 5·0.05) = 2.5`. No: with `K = 1` a round adds at most 2 tokens and costs 1.05, so `S`
# is at most 1.905.
#
# </details>

# %%
bound = round_bound(large, batch=1, context=CONTEXT, num_draft_tokens=5)
for key in ("h100", "l40s", "mi300x"):
    elsewhere = dataclasses.replace(large, accelerator=KNOWN_ACCELERATORS[key])
    rival_bound = round_bound(elsewhere, batch=1, context=CONTEXT, num_draft_tokens=5)
    assert abs(rival_bound.draft_cost / bound.draft_cost - 1) < 1e-6, "the bandwidth cancels"
short, long = (
    break_even_batch(small, context=context, num_draft_tokens=K, mean_acceptance_length=TAU)
    for context in (128, 8192)
)
enough = speedup(2.5, num_draft_tokens=5, verify_cost=1.0, draft_cost=0.05)
most = speedup(2.0, num_draft_tokens=1, verify_cost=1.0, draft_cost=0.05)
print(f"1. c = {bound.draft_cost:.4f}   2. {short} sequences at 128 tokens, {long} at 8,192")
print(f"3. {enough:.2f} with K = 5, at most {most:.2f} with K = 1")
assert 0.015 < bound.draft_cost < 0.020
assert short is not None and long is None
assert abs(enough - 2) < 1e-9 and most < 1.91

# %% [markdown]
# ## Checked claims
#
# - A decoding step of one sequence is memory-bound. Its lower bound is bytes divided by bandwidth.
#   Its intensity is 1, and 6 for six tokens.
# - The ridge point of an H200 is above 200 operations per byte. On ten accelerators, verifying six
#   tokens at batch 1 costs as much as a plain step, by the bound.
# - `v` never falls with the batch size. Dividing peak arithmetic by operations per token is too
#   high by a factor of ridge point divided by intensity.
# - Speculation generated the same tokens in fewer forward passes. `τ` is one plus the accepted
#   tokens per round.
# - A published claim of 6,200 tokens/s is almost four times its upper bound.
#
# Times are printed and never asserted.
#
# **Next:** [02](02_speculative_sampling.ipynb), the acceptance rule that keeps the target's
# distribution.
