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
# # 07 · What users wait for
#
# Afterwards you can
#
# - tell TTFT, TPOT and the wait between two chunks apart, and know which of them speculation changes;
# - read percentiles, and see the tail that a mean acceptance length hides;
# - say what chunked prefill buys, and what it cannot.
#
# It takes about half a minute of CPU on the shipped pair. Read before: [05](05_speed_and_roofline.ipynb).

# %%
import sys

sys.path.insert(0, "..")  # where first_cell, machine and pictures are

import first_cell

first_cell.start(repository=True, device=False)

import machine

here = machine.start()
here.banner()

# %% [markdown]
# ## Three waits
#
# - **TTFT**, time to first token: the prefill. Speculation does not shorten it; the drafter's own prefill adds a
#   little.
# - **TPOT**, time per output token after the first: the mean over an answer, where speculation gains.
# - **the wait between two chunks** of a stream: a round, which is *longer* than a plain step and brings several tokens.
#
# `eagle3_jax.bench.run.measure` takes all three of every contender, in turns.

# %%
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown
from pictures.style import SERIES

from eagle3_jax.bench.run import measure
from eagle3_jax.bench.tables import to_markdown
from validation.speeds import chain, faults, is_quoted, some_prompts

LIMIT, REPEATS = here.amount(cpu=(24, 2), gpu=(128, 5))
K = 3
pair, dtype = here.pair, here.dtype
prompts = some_prompts(here.subject, here.amount(cpu=6, gpu=32))
if here.on_gpu and not is_quoted(here.subject, here.setting):
    print(
        "On a GPU the shipped pair waits for launches: no time below is a claim. Name a pair (EAGLE3_TARGET)."
    )
contenders = [chain(pair, dtype, 0), chain(pair, dtype, K)]
report = measure(
    contenders,
    prompts,
    max_new_tokens=LIMIT,
    repeats=REPEATS,
    baselines=[contenders[0].name],
    cost_rounds=0,
    streams=here.amount(cpu=3, gpu=16),
)
assert not faults(report), "; ".join(faults(report))
waits = {"TTFT": "first_token", "TPOT": "per_token", "between chunks": "chunk"}
rows = [
    [
        row.name,
        wait,
        *(f"{1e3 * getattr(getattr(row, field), p):.2f}" for p in ("p50", "p90", "p99")),
    ]
    for wait, field in waits.items()
    for row in report.rows
]
title = f"{here.subject.name}, {dtype}, batch 1, {len(prompts)} prompts, {REPEATS} repeats, on **{here.device}**"
Markdown(f"{title}\n\n" + to_markdown(["method", "wait", "p50 ms", "p90 ms", "p99 ms"], rows))

# %%
figure, all_axes = plt.subplots(1, 3, figsize=(9.6, 3.2))
for axes, (wait, field) in zip(all_axes, waits.items(), strict=True):
    for place, row in enumerate(report.rows):
        found = getattr(row, field)
        heights = [1e3 * found.p50, 1e3 * found.p90, 1e3 * found.p99]
        axes.bar(
            np.arange(3) + (place - 0.5) * 0.38, heights, 0.36, color=SERIES[place], label=row.name
        )
    axes.set_xticks(range(3), ["p50", "p90", "p99"])
    axes.set_title(wait, fontsize="medium")
    axes.set_ylabel("ms")
all_axes[0].legend(fontsize="small")
figure.suptitle(f"What users wait for, batch 1, {here.device}", fontsize="medium")
for row in report.rows:
    for field in waits.values():
        found = getattr(row, field)
        assert 0 < found.p50 <= found.p90 <= found.p99

# %% [markdown]
# TPOT is the wait between chunks divided by the tokens that a chunk brings. A dashboard that takes one for the other
# reports a slowdown where there is a speed-up. (A stream is driven by the host a round at a time, so its waits are
# longer than a round inside the compiled loop.)

# %%
for row in report.rows:
    tau = 1.0 if row.acceptance is None else row.acceptance.mean_acceptance_length
    print(f"{row.name:16} p50: {1e3 * row.chunk.p50:7.2f} ms between chunks of {tau:.2f} tokens, "
          f"{1e3 * row.per_token.p50:7.2f} ms a token")  # fmt: skip
assert report.rows[1].acceptance.mean_acceptance_length > 1.0, (
    "a chunk of the chain brings more than one token"
)

# %% [markdown]
# ## First token, by length of the prompt

# %%
room = pair[0].max_positions - 64
LENGTHS = [
    length for length in here.amount(cpu=(16, 64, 256), gpu=(64, 256, 1024, 2048)) if length < room
]
long = [token for prompt in here.subject.prompt_tokens for token in prompt]
long = (long * (1 + LENGTHS[-1] // len(long)))[: LENGTHS[-1]]
first = {one.name: [] for one in contenders}
for length in LENGTHS:
    for one in contenders:
        one.run([long[:length]], 2)  # compiles
    taken = [[one.run([long[:length]], 2).prefill_seconds for one in contenders] for _ in range(5)]
    for one, seconds in zip(contenders, np.median(taken, axis=0), strict=True):
        first[one.name].append(1e3 * float(seconds))
figure, axes = plt.subplots()
for (name, milliseconds), colour in zip(first.items(), SERIES, strict=False):
    axes.plot(LENGTHS, milliseconds, "o-", color=colour, label=name)
axes.set_ylim(0)
axes.set_xlabel("tokens of the prompt")
axes.set_ylabel(f"TTFT, ms ({here.device})")
axes.set_title("Speculation does not shorten the first wait")
axes.legend(fontsize="small")
print(
    "the drafter adds", ", ".join(f"{b - a:+.2f} ms" for a, b in zip(*first.values(), strict=True))
)

# %% [markdown]
# ## Prompts in pieces
#
# Chunked prefill feeds a long prompt in pieces of N tokens between the rounds of other rows. This library prefills a
# prompt whole; vLLM chunks by default. What it buys can be had from the same forward: `target_seconds` times the target
# over N tokens behind the cache. A prompt of P tokens takes P/N pieces; meanwhile a row beside it waits one piece a
# token instead of the whole prefill.

# %%
from eagle3_jax import SpeculativeDecoder
from eagle3_jax.bench.step_costs import target_seconds
from eagle3_jax.drafters import Plain

PIECES = [
    piece for piece in here.amount(cpu=(1, 8, 64), gpu=(1, 16, 64, 256, 512)) if piece < room - 128
]
PROMPT = 512
sizes = {}
for piece in PIECES:
    whole = SpeculativeDecoder(pair[0], Plain(piece), stop_tokens=())
    asked = {"max_new_tokens": 16, "rounds": 6}
    target_seconds(whole, prompts[:1], **asked)  # compiles
    sizes[piece] = min(target_seconds(whole, prompts[:1], **asked) for _ in range(2))
figure, all_axes = plt.subplots(1, 2, figsize=(9.0, 3.3))
totals = [1e3 * PROMPT / piece * seconds for piece, seconds in sizes.items()]
stalls = [1e3 * seconds for seconds in sizes.values()]
for axes, values, title, colour in zip(
    all_axes,
    (totals, stalls),
    (f"TTFT of {PROMPT} tokens in pieces", "What a row beside it waits"),
    SERIES,
    strict=False,
):
    axes.semilogx(PIECES, values, "o-", color=colour)
    axes.set_ylim(0, 1.1 * max(values))
    axes.set_xticks(PIECES, [str(piece) for piece in PIECES])
    axes.minorticks_off()
    axes.set_xlabel("tokens a piece")
    axes.set_ylabel(f"ms ({here.device})", fontsize="small")
    axes.set_title(title, fontsize="medium")
share = stalls[0] / stalls[-1]
print(
    f"a piece of {PIECES[-1]} tokens stalls the others {1 / share:.1f} times as long as a plain step"
)

# %% [markdown]
# Small pieces are kind to the rows beside and hard on the prompt: each piece reads all weights again. No piece makes
# TTFT shorter than one whole pass. That floor follows from the datasheet alone:

# %%
from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.bounds import forward_work
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment


def floor(name, tokens, pieces=1):
    """Least seconds of a prefill by the roofline, on the datasheet of this device, or of an H200."""
    sheet = here.accelerator or accelerator_named("H200")
    model = KNOWN_MODELS[name]
    deployment = Deployment(target=model, head=usual_head(model), accelerator=sheet, weights="fp8")
    size, total = tokens // pieces, 0.0
    for piece in range(pieces):
        work = forward_work(deployment, model, batch=1, context=piece * size, tokens=size, logits=1)
        total += max(
            work.memory_seconds(deployment), work.compute_seconds(deployment, quantised=True)
        )
    return total


sheet = (here.accelerator or accelerator_named("H200")).name
whole, pieces = floor("Llama-3.3-70B", 512), floor("Llama-3.3-70B", 512, pieces=16)
print(f"Llama-3.3-70B in FP8, 512 tokens on a {sheet}, from its datasheet:")
print(f"  whole {1e3 * whole:.1f} ms at least, in 16 pieces {1e3 * pieces:.1f} ms")
assert pieces > whole, "pieces cannot be faster than the whole"

# %% [markdown]
# ## The tail
#
# τ is a mean. A request whose text the head does not understand gets rounds of one token, each dearer than a plain
# step.
# `theory.speedup.simulate` decodes requests by the geometric law with the rate that was just measured, and with mixed
# traffic of the same mean rate.

# %%
from eagle3_jax.theory.speedup import TrafficClass, conditional_rate_from_tau, simulate

measured = report.rows[1]
alpha = conditional_rate_from_tau(measured.acceptance.mean_acceptance_length, K)
spread = min(alpha, 1 - alpha) * 0.9
mixes = {
    f"every request at {alpha:.2f}": [TrafficClass(share=1.0, conditional_acceptance_rate=alpha)],
    "half above, half below": [
        TrafficClass(share=0.5, conditional_acceptance_rate=alpha + spread),
        TrafficClass(share=0.5, conditional_acceptance_rate=alpha - spread),
    ],
}
found = {
    name: simulate(
        mix,
        num_draft_tokens=K,
        verify_cost=1.2,
        draft_cost=0.15,
        num_requests=4000,
        output_tokens=128,
        seed=0,
    )
    for name, mix in mixes.items()
}
rows = []
for name, one in found.items():
    p = one.time_per_output_token
    rows.append([name, f"{one.mean_acceptance_length:.2f}", f"{one.speedup:.2f}", *(f"{x:.2f}" for x in (p.p50, p.p99)),
                 f"{one.slower_than_plain:.0%}"])  # fmt: skip
narrow, wide = found.values()
assert wide.time_per_output_token.p99 > narrow.time_per_output_token.p99, (
    "mixed traffic has the longer tail"
)
columns = ["requests", "τ", "S", "p50 TPOT in plain steps", "p99", "slower than plain"]
Markdown("Simulated with v = 1.2 and c = 0.15, not measured\n\n" + to_markdown(columns, rows))

# %% [markdown]
# ## What would go wrong
#
# The classical trap is a percentile of the wrong thing: p99 of the waits between *tokens* when tokens come in chunks.
# All tokens of a chunk but the first "wait" nothing, so the median collapses to zero, and nobody can be that fast.

# %%
rng = np.random.default_rng(0)
rounds = rng.choice([1, 2, 3, 4], p=[0.4, 0.2, 0.15, 0.25], size=400)
between_chunks = np.full(len(rounds), 10.0)
between_tokens = np.concatenate([[10.0] + [0.0] * (count - 1) for count in rounds])
per_token = 10.0 * len(rounds) / rounds.sum()
print(f"rounds of 10 ms: TPOT {per_token:.2f} ms; median wait between tokens {np.median(between_tokens):.2f} ms, "
      f"between chunks {np.median(between_chunks):.2f} ms")  # fmt: skip
assert np.median(between_tokens) == 0.0 and abs(between_tokens.mean() - per_token) < 1e-9

# %% [markdown]
# ## Exercises
#
# **1.** An article reports a TTFT that falls from 45 to 15 ms by switching EAGLE-3 on. What do you answer?
#
# <details><summary>Answer</summary>
#
# The first token comes out of the target's prefill, which speculation does not touch; the drafter's prefill comes on
# top. Something else was changed: chunked prefill, a cached prefix, a shorter queue.
#
# </details>
#
# **2.** The chain's waits between chunks are longer than plain decoding's, at p50 and at p99. Is the service slower?
#
# <details><summary>Answer</summary>
#
# Not by that: a chunk brings τ tokens. Compare TPOT per request. Only a reader who needs every single token at once,
# with no chunk ahead, could mind.
#
# </details>
#
# **3.** With v = 1.2 and c = 0.15, which acceptance makes a request slower than plain decoding?
#
# <details><summary>Answer</summary>
#
# τ below `v + K·c`, which the next cell turns into a conditional rate.
#
# </details>

# %%
limit = conditional_rate_from_tau(1.2 + K * 0.15, K)
print(f"τ below {1.2 + K * 0.15:.2f}, a conditional acceptance rate below {limit:.2f}")
low = simulate(
    [TrafficClass(share=1.0, conditional_acceptance_rate=limit * 0.8)],
    num_draft_tokens=K, verify_cost=1.2, draft_cost=0.15, num_requests=500, output_tokens=512, seed=1,
)  # fmt: skip
assert low.speedup < 1.0

# %% [markdown]
# ## What was claimed and checked
#
# - Percentiles are in order, nothing was compiled while times were taken, and a chunk of the chain brings more than one
#   token.
# - A prefill in pieces has a higher floor than a whole one.
# - Mixed traffic of the same mean rate has a longer tail.
# - The mean of waits between tokens is TPOT, and their median is not.
#
# Next: [08, what it costs](08_cost_and_rollout.ipynb).
