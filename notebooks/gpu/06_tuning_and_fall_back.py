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
# # 06 · How much to draft, and when to stop
#
# Afterwards you can
#
# - choose K for a batch size from measured costs instead of a rule of thumb;
# - show that acceptance does not depend on the batch, while the cost of a round does;
# - find the batch from which plain decoding is faster, and write the schedule that falls back.
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
# ## Measure once, decide everywhere
#
# A draft pays by `S = τ / (v + K·c)`. τ belongs to the text and the head; `v`, a verification, and `c`, a draft step,
# are counted in plain steps and grow with the batch. `eagle3_jax.bench.tune.tune` measures all three, in
# turns, with every draft by itself; it is what `eagle3 tune` calls.

# %%
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown
from pictures.style import SERIES

from eagle3_jax import SpeculativeDecoder
from eagle3_jax.bench.tables import show, to_markdown
from eagle3_jax.bench.tune import break_even, rules_of_thumb, tune
from validation.speeds import is_quoted, some_prompts

BATCHES = here.amount(cpu=(1, 8), gpu=(1, 4, 16, 64, 128))
CHAINS = here.amount(cpu=(1, 3), gpu=(1, 2, 3, 4, 5, 6, 7))
LIMIT, REPEATS, ROUNDS = here.amount(cpu=(20, 2, 6), gpu=(128, 5, 16))
target, drafter = here.pair
prompts = some_prompts(here.subject, here.amount(cpu=4, gpu=16))
if here.on_gpu and not is_quoted(here.subject, here.setting):
    print(
        "On a GPU the shipped pair waits for launches: no speed below is a claim. Name a pair (EAGLE3_TARGET)."
    )
tuning = tune(
    target,
    drafter,
    prompts,
    batches=BATCHES,
    chains=CHAINS,
    max_new_tokens=LIMIT,
    repeats=REPEATS,
    rounds=ROUNDS,
    check=here.on_gpu,
)
rows = []
for one in tuning.batches:
    for candidate in one.candidates:
        gain, chosen = candidate.speedup, one.best is candidate
        costs = [f"{candidate.verify_cost:.2f}", f"{candidate.draft_cost:.3f}"]
        tau = f"{candidate.shape.mean_acceptance_length:.2f}"
        told = f"{gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f})"
        rows.append(
            [one.batch, candidate.shape.name, tau, *costs, told, "the choice" if chosen else ""]
        )
    if one.best is None:
        rows.append([one.batch, "plain", "1.00", "1.00", "–", "1", "the choice"])
columns = ["batch", "draft", "τ", "v", "c", "S, with quartiles", ""]
Markdown(
    f"{here.subject.name}, {here.dtype}, {len(prompts)} prompts, on **{here.device}**\n\n"
    + to_markdown(columns, rows)
)

# %% [markdown]
# ## Flat and rising
#
# What articles call "acceptance falls with the batch" is the cost of a round that rises. Below, τ of one chain is
# decoded again at every batch size, on the same prompts: greedy decoding accepts the same whoever sits beside it.

# %%
K = CHAINS[-1] if not here.on_gpu else 3
decoder = SpeculativeDecoder(target, drafter, num_speculative_tokens=K, stop_tokens=())
lengths, accepted = [], []
for batch in BATCHES:
    rows_of_batch = [prompts[index % len(prompts)] for index in range(max(batch, len(prompts)))]
    counts = []
    for start in range(0, len(rows_of_batch), batch):
        result = decoder.generate(rows_of_batch[start : start + batch], max_new_tokens=LIMIT)
        counts += [
            (int(row.stats.num_accepted_tokens), int(row.stats.num_drafts)) for row in result.rows
        ]
    same = counts[: len(prompts)]
    lengths.append(1 + sum(one for one, _ in same) / sum(rounds for _, rounds in same))
    accepted.append(same)
steps = [1e3 * one.plain_step.median for one in tuning.batches]
figure, axes = plt.subplots()
axes.semilogx(BATCHES, lengths, "o-", color=SERIES[2])
axes.set_ylim(0, K + 1.2)
axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES], minor=False)
axes.minorticks_off()
axes.set_xlabel(f"batch, {here.device}")
axes.set_ylabel(f"τ of K={K}, tokens a round", color=SERIES[2])
other = axes.twinx()
other.plot(BATCHES, steps, "s--", color=SERIES[1])
other.set_ylim(0, max(steps) * 1.15)
other.set_ylabel("ms a plain step", color=SERIES[1])
other.grid(False)
axes.set_title("τ is flat, the step gets dearer")
plt.show()

# %%
print(
    "τ by batch:",
    ", ".join(f"{batch}: {tau:.3f}" for batch, tau in zip(BATCHES, lengths, strict=True)),
)
# In low precision a tie may fall the other way in another batch; a tenth is far beyond what ties do.
assert max(lengths) - min(lengths) < 0.1 * max(lengths), (
    "τ depends on the batch: the rows of a batch see each other"
)

# %% [markdown]
# ## Where it stops to pay
#
# S over batch and K. Above the line at 1 drafting pays; the dot is the choice at each batch, which prefers a shorter
# draft when a longer one is better only within the spread of the repeats.

# %%
figure, axes = plt.subplots()
for index, name in enumerate(candidate.shape.name for candidate in tuning.batches[0].candidates):
    gains = [one.candidates[index].speedup for one in tuning.batches]
    middle, low, high = (
        [getattr(gain, key) for gain in gains] for key in ("median", "low", "high")
    )
    axes.semilogx(
        BATCHES, middle, "o-", color=SERIES[index % len(SERIES)], label=name, markersize=4
    )
    axes.fill_between(BATCHES, low, high, color=SERIES[index % len(SERIES)], alpha=0.15)
for one in tuning.batches:
    height = 1.0 if one.best is None else one.best.speedup.median
    axes.plot(
        one.batch, height, "o", markersize=13, markerfacecolor="none", markeredgecolor="black"
    )
axes.axhline(1.0, color="#3c4043", linewidth=1)
axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
axes.minorticks_off()
axes.set_xlabel(f"batch, {here.device}")
axes.set_ylabel("S = τ / (v + K·c)")
axes.set_title("Rings: what is chosen; below the line, plain decoding")
axes.legend(fontsize="small")
plt.show()

# %%
fall_back = next((one.batch for one in tuning.batches if one.best is None), None)
print("schedule:", None if tuning.schedule is None else tuning.schedule.to_lists())
print(
    "falls back to plain decoding",
    f"from batch {fall_back} on" if fall_back else "beyond every batch measured here",
)
for one in tuning.batches:
    for candidate in one.candidates:
        even = break_even(candidate)
        pays = candidate.shape.mean_acceptance_length > even.mean_acceptance_length
        gain = candidate.shape.mean_acceptance_length / even.mean_acceptance_length
        assert pays == (gain > 1.0), "break-even and speed-up are one model"
if tuning.schedule is not None:
    assert tuning.schedule.to_lists()[-1][2] == 0, "above what was measured nothing may be drafted"

# %% [markdown]
# On a device with a datasheet the roofline says where the end must be at the latest; a real engine gets there earlier.

# %%
from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.bounds import break_even_batch, round_bound
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment

model = KNOWN_MODELS["Llama-3.1-8B"]
sheet = here.accelerator or accelerator_named("H200")
deployment = Deployment(target=model, head=usual_head(model), accelerator=sheet)
sizes = [2**power for power in range(10)]
figure, axes = plt.subplots()
for tau, colour in zip((1.5, 2.0, 2.8), SERIES, strict=False):
    bounds = [
        round_bound(deployment, batch=size, context=1024, num_draft_tokens=3) for size in sizes
    ]
    axes.semilogx(
        sizes, [bound.speedup(tau) for bound in bounds], color=colour, label=f"τ = {tau}", base=2
    )
    end = break_even_batch(deployment, context=1024, num_draft_tokens=3, mean_acceptance_length=tau)
    print(
        f"Llama-3.1-8B, {sheet.name}, K=3, τ = {tau}: {'pays at every batch' if end is None else f'ends at {end}'}"
    )
axes.axhline(1.0, color="#3c4043", linewidth=1)
axes.set_xlabel("batch")
axes.set_ylabel("S, at most")
axes.set_title(f"Roofline of Llama-3.1-8B on a {sheet.name}, from its datasheet: nothing measured")
axes.legend(fontsize="small")
ends = [
    break_even_batch(deployment, context=1024, num_draft_tokens=3, mean_acceptance_length=tau)
    or np.inf
    for tau in (1.2, 1.5, 2.0, 2.8)
]
assert ends == sorted(ends), "who accepts more may draft at larger batches"

# %% [markdown]
# ## Rules of thumb beside the measurement

# %%
rules = [rule for one in tuning.batches for rule in rules_of_thumb(one)]
rows = [
    [one.batch, one.rule, one.rule_says, one.measured, "yes" if one.agrees else "no"]
    for one in rules
]
Markdown(to_markdown(["batch", "rule", "it says", f"measured on {here.device}", "agrees"], rows))

# %% [markdown]
# ## What would go wrong
#
# Take τ from the run of the longest chain and cut it: "the first token was accepted so often, hence K = 1 has that τ".
# A shorter chain has the same chance *at one place*, but its rounds begin at other places of the text. Beside it, the
# other common mistake: the conditional rate put into the formula of the draft rate.

# %%
from eagle3_jax.theory.speedup import tau_from_conditional_rate, tau_from_draft_rate

longest, shortest = tuning.batches[0].candidates[-1].shape, tuning.batches[0].candidates[0].shape
cut = 1 + sum(longest.acceptance_per_position[: shortest.num_draft_tokens])
print(
    f"τ of {shortest.name}: measured {shortest.mean_acceptance_length:.3f}, cut from {longest.name} {cut:.3f}"
)
count = longest.num_draft_tokens
rate = (longest.mean_acceptance_length - 1) / count
right, wrong = tau_from_draft_rate(rate, count), tau_from_conditional_rate(rate, count)
print(
    f"draft acceptance rate {rate:.2f}, {longest.name}: τ {right:.2f}; as a conditional rate {wrong:.2f}"
)
assert abs(right - longest.mean_acceptance_length) < 1e-9, (
    "1 + K·r is an identity of the draft acceptance rate"
)
assert wrong < right or rate in (0.0, 1.0), (
    "the two formulas differ wherever some drafts are refused"
)

# %% [markdown]
# ## Exercises
#
# **1.** Which conditional acceptance rate would let the longest chain break even at the largest batch measured?
#
# <details><summary>Answer</summary>
#
# `break_even(candidate).needed.conditional_acceptance_rate`, or `None` where not even full acceptance would do.
#
# </details>

# %%
candidate = tuning.batches[-1].candidates[-1]
needed = break_even(candidate).needed
told = "no rate would do" if needed is None else f"{needed.conditional_acceptance_rate:.2f}"
print(f"{candidate.shape.name} at batch {tuning.batches[-1].batch}: {told}; measured rate: "
      f"{show(break_even(candidate).measured.conditional_acceptance_rate)}")  # fmt: skip
assert needed is None or 0.0 <= needed.conditional_acceptance_rate <= 1.0

# %% [markdown]
# **2.** The schedule ends with an entry of length 0. Why is it written, if nothing was measured up there?
#
# <details><summary>Answer</summary>
#
# Because silence means different things: this library decodes plainly above the last entry, vLLM carries the last
# length on. Where nothing is known, not drafting is the safe side.
#
# </details>
#
# **3.** A server refills its batch as rows finish. Does it fall back at the batch found here?
#
# <details><summary>Answer</summary>
#
# It may keep drafting somewhat longer. A closed batch waits for its slowest row, which costs `rows_running`; costs `v`
# and
# `c` are the same, so the decision at full batches carries over.
#
# </details>
#
# ## What was claimed and checked
#
# - τ of the same prompts does not depend on the batch.
# - Break-even and speed-up agree, and the schedule drafts nothing above what was measured.
# - The two meanings of "acceptance rate" give two values of τ, of which one is right.
# - On the roofline, who accepts more may draft at larger batches.
#
# Next: [07, what users wait for](07_latency.ipynb).
