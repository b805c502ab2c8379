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
# # 07 · Measuring acceptance, speed-up, latency and batches
#
# Many published figures of speculative decoding are not comparable, because their definitions
# differ or are missing. After this notebook you can
#
# - distinguish the two quantities that are both called "acceptance rate";
# - measure `τ`, `v` and `c`, predict a speed-up, and compare it with runs in turns and an A/A
#   control;
# - show that `τ` does not depend on the batch size while the time of a round does, and draft by a
#   schedule;
# - report latency correctly.
#
# The notebook takes about three minutes on two CPU cores. It needs only
# `pip install -e '.[notebooks]'`. It uses the small pair of the package, and downloads a chat model
# once (93 MB); without a network, the small pair replaces it. Read
# [01](01_memory_bound_decoding.ipynb), [02](02_speculative_sampling.ipynb) and
# [03](03_eagle3_head.ipynb) first. Times are printed with their spread and never asserted. The
# project's benchmark is on the page [Measured numbers](../docs/numbers.md).
#
# **Exercises** work as in [00](00_watch_it_draft.ipynb): write a function, or use its answer.

# %% tags=["hide-input"]
import first_cell

first_cell.start()

import itertools
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from chat import load_chat
from exercises import checked
from pictures.ribbons import acceptance_ribbons
from pictures.times import stacked_steps, twin
from scipy.stats import binomtest

import eagle3_jax as e3
from eagle3_jax.bench.contenders import DecoderContender
from eagle3_jax.bench.rounds import timed_rounds
from eagle3_jax.bench.step_costs import step_costs
from eagle3_jax.drafters.plain import Plain
from eagle3_jax.engine.engine import Engine
from eagle3_jax.files.sources import bundled
from eagle3_jax.measure.timing import CompileClock, Latency, Spread
from eagle3_jax.prompts.benchmark import in_turn, read_prompts
from eagle3_jax.prompts.request import Request
from eagle3_jax.theory.speedup import (
    TrafficClass,
    blended_tau,
    conditional_rate_from_tau,
    simulate,
    speedup,
    tau_from_conditional_rate,
    tau_from_draft_rate,
)
from eagle3_jax.types import SamplingMode

# %% [markdown]
# ## Draft acceptance rate and conditional acceptance rate
#
# The cell decodes twelve held-out prompts, six of code and six of prose, with 48 new tokens each,
# greedily, with a chain of `K = 5`. Four counters record everything about acceptance.

# %%
NEW = 48
target = e3.load_target(dtype="mixed")
head = e3.load_drafter(target=target)
file = bundled("prompts.jsonl")
held_out = read_prompts(file, target, max_new_tokens=NEW, length=64)
chosen = in_turn(held_out, 12)
prompts = [prompt.tokens for prompt in chosen]
assert [prompt.category for prompt in chosen] == ["code"] * 6 + ["prose"] * 6


def chain(length):
    """A decoder with a chain of this length. Without stop tokens, all rows have equal lengths."""
    return e3.SpeculativeDecoder(target, head, num_speculative_tokens=length, stop_tokens=())


result = chain(5).generate(prompts, max_new_tokens=NEW)
stats = result.stats
stats.to_json()

# %% [markdown]
# - The **draft acceptance rate** `r` is the number of accepted tokens divided by the number of
#   drafted tokens. `τ = 1 + K·r` holds exactly for any run.
# - The **conditional acceptance rate** at a position is the share accepted *among the rounds that
#   reached this position*. If it is the same `α` at all positions, then
#   `τ = 1 + α + … + α^K = (1 - α^(K+1)) / (1 - α)`. This is a model, and the measurement can
#   contradict it.
#
# **Exercise: three rates.** `counts[k]` is the number of rounds that accepted the draft token at
# position `k`. A token is accepted only after all tokens before it.


# %%
def rates(rounds, counts):
    """Returns `τ`, the draft acceptance rate, and the conditional rate at each position.

    Args:
        rounds: Number of rounds. Each of them drafts `len(counts)` tokens.
        counts: Number of rounds that accepted the token at each position.
    """
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def rates_answer(rounds, counts):
    accepted = sum(counts)
    reached = [rounds, *counts[:-1]]
    conditional = [count / before for count, before in zip(counts, reached, strict=True)]
    return 1 + accepted / rounds, accepted / (rounds * len(counts)), conditional


# %%
def check_rates(rates):
    tau, rate, conditional = rates(10, [8, 6, 3])
    assert np.isclose(tau, 2.7), "10 rounds accept 17 tokens and add one more each: 27 / 10"
    assert np.isclose(rate, 17 / 30), "17 of 30 drafted tokens are accepted"
    assert np.allclose(conditional, [8 / 10, 6 / 8, 3 / 6]), (
        "position 2 is reached only by the 8 rounds before it"
    )

    alpha = 0.7
    counts = [1000 * alpha, 1000 * alpha**2, 1000 * alpha**3]
    expected = tau_from_conditional_rate(alpha, 3)
    assert np.isclose(rates(1000, counts)[0], expected), (
        "a constant conditional rate has the τ of the formula"
    )


rates = checked(rates, rates_answer, check_rates)

# %%
counts = np.asarray(stats.num_accepted_tokens_per_pos).tolist()
by_hand = rates(int(stats.num_drafts), counts)
assert np.isclose(by_hand[0], stats.mean_acceptance_length)
assert np.isclose(by_hand[1], stats.draft_acceptance_rate)
assert np.allclose(by_hand[2], stats.conditional_acceptance_rate)
tau = stats.mean_acceptance_length
rate = stats.draft_acceptance_rate
alpha = conditional_rate_from_tau(tau, 5)
print(
    f"τ = {tau:.3f}: draft acceptance rate {rate:.3f}, constant conditional acceptance rate"
    f" {alpha:.3f}"
)
print(
    "conditional, by position:  ",
    "  ".join(f"{share:.3f}" for share in stats.conditional_acceptance_rate),
)
print(
    "of all rounds, by position:",
    "  ".join(f"{share:.3f}" for share in stats.acceptance_per_position),
)

assert abs(tau_from_draft_rate(rate, 5) - tau) < 1e-9, "τ = 1 + K·r is an identity"
assert abs(tau - 1 - sum(stats.acceptance_per_position)) < 1e-9, (
    "τ is one plus the shares by position"
)
assert np.allclose(np.cumprod(stats.conditional_acceptance_rate), stats.acceptance_per_position)
assert alpha > rate + 0.1, "the conditional rate is larger: a report must name the rate"

# %% [markdown]
# ## τ by draft length
#
# Each `K` is measured in a separate run. Two formulas are fitted at `K = 3` and extrapolated to the
# other lengths. The line assumes a constant *draft* acceptance rate, the curve a constant
# *conditional* acceptance rate.

# %%
contenders = {
    length: DecoderContender(f"K={length}", "mixed", chain(length)) for length in (1, 3, 5)
}
stats_of = {5: stats}
for length in (1, 2, 7):
    stats_of[length] = chain(length).generate(prompts, max_new_tokens=NEW).stats
with CompileClock() as first:
    run = contenders[3].run(prompts, NEW)
with CompileClock() as again:
    repeated = contenders[3].run(prompts, NEW)
stats_of[3] = run.stats_of(range(12))

lengths = sorted(stats_of)
measured = [stats_of[length].mean_acceptance_length for length in lengths]
at3 = stats_of[3]
line = [tau_from_draft_rate(at3.draft_acceptance_rate, k) for k in lengths]
curve = [
    tau_from_conditional_rate(conditional_rate_from_tau(at3.mean_acceptance_length, 3), k)
    for k in lengths
]
for k, tau_k, straight, bent in zip(lengths, measured, line, curve, strict=True):
    print(f"K = {k}: measured {tau_k:.3f}, line {straight:.3f}, curve {bent:.3f}")

assert abs(line[lengths.index(3)] - at3.mean_acceptance_length) < 1e-9, (
    "at K = 3 both formulas are exact"
)
assert abs(curve[lengths.index(3)] - at3.mean_acceptance_length) < 1e-9
assert sorted(measured) == measured, "longer drafts add more tokens per round"
assert line[-1] - measured[-1] > 2 * abs(curve[-1] - measured[-1]), (
    "at K = 7 the curve is much closer"
)

# %% tags=["hide-input"]
figure, axes = plt.subplots()
axes.plot(lengths, line, linestyle=":", label="1 + K·r, r of K = 3")
axes.plot(lengths, curve, linestyle="--", label="(1 - α$^{K+1}$) / (1 - α), α of K = 3")
axes.plot(lengths, measured, marker="o", label="measured, one run each")
axes.set(xlabel="draft length K", ylabel="τ, tokens per round", xticks=lengths)
axes.set_title("Mean acceptance length by draft length")
axes.legend()
plt.show()

# %% [markdown]
# ## Acceptance by task
#
# Acceptance depends on the *pair and the text*. The plot shows it by position, with 95 % intervals.
# To get `τ` of both tasks together, sum the counters (`SpeculationStats.merge`). The plain average
# of the two values of `τ` is wrong. The merged `τ` is the arithmetic mean weighted by *rounds*, or
# the harmonic mean weighted by *tokens*.

# %%
by_task = {"code": result.rows[:6], "prose": result.rows[6:]}
tasks = {
    name: e3.SpeculationStats.merge(row.stats for row in rows) for name, rows in by_task.items()
}
for name, task_stats in tasks.items():
    print(
        f"{name:6} τ = {task_stats.mean_acceptance_length:.3f} over {int(task_stats.num_drafts)}"
        " rounds"
    )
    shares = task_stats.acceptance_per_position
    assert sorted(shares, reverse=True) == shares, (
        "a position is accepted only after all earlier ones"
    )

merged = e3.SpeculationStats.merge(tasks.values()).mean_acceptance_length
taus = [task_stats.mean_acceptance_length for task_stats in tasks.values()]
rounds = np.array([int(task_stats.num_drafts) for task_stats in tasks.values()])
by_tokens = rounds * taus / np.dot(rounds, taus)
print(f"merged τ = {merged:.3f}, plain mean of both {np.mean(taus):.3f}")
assert abs(merged - np.dot(rounds / rounds.sum(), taus)) < 1e-9, "weighted by rounds"
assert abs(merged - blended_tau(by_tokens.tolist(), taus)) < 1e-9, "harmonic mean by tokens"
assert max(taus) / min(taus) > 1.05, "prompts alone change τ"

# %% tags=["hide-input"]
acceptance_ribbons(
    {name: task_stats.acceptance_per_position for name, task_stats in tasks.items()},
    rounds={name: int(task_stats.num_drafts) for name, task_stats in tasks.items()},
    title="Acceptance by position and task, K = 5",
)

# %% [markdown]
# ### Tasks of a chat model
#
# The shipped pair knows code and documentation only. SmolLM2-135M-Instruct answers questions; its
# head is in the package. The answers with drafts are those of plain decoding in blocks of `K + 1`
# tokens. Three questions are not a benchmark: the page [Measured numbers](../docs/numbers.md) has
# more.

# %%
questions = {
    "knowledge": "What is the capital of France, and what is it known for?",
    "code": (
        'Complete this function.\n\ndef is_even(number: int) -> bool:\n    """Whether a number is'
        ' even."""\n'
    ),
    "arithmetic": (
        "Anna has 12 apples. She gives 5 to Ben and buys 7 more. How many apples does she have?"
    ),
}
pieces = [target.tokenizer.decode(prompt) for prompt in prompts[:3]]
chat_target, chat_head, chat_prompts = load_chat([*questions.values()], pieces)
speculative = e3.SpeculativeDecoder(chat_target, chat_head, num_speculative_tokens=3)
drafted = speculative.generate(chat_prompts, max_new_tokens=64)
in_blocks = e3.SpeculativeDecoder(chat_target, Plain(4)).generate(chat_prompts, max_new_tokens=64)
assert drafted.texts == in_blocks.texts
for name, row in zip(questions, drafted.rows, strict=True):
    print(f"{name}, τ = {row.stats.mean_acceptance_length:.2f}: {row.text}\n")

# %% [markdown]
# ## Speed-up: measured and predicted
#
# `v` is the cost of a verification and `c` the cost of a forward pass of the head, both in plain
# steps. Each is timed in a separate compiled loop. The real runs are measured **in turns**: plain,
# plain again, `K = 1`, `3`, `5`, then from the start again. The second plain run is the **A/A
# control**. Its ratio to the first run shows the noise of the machine.

# %%
REPEATS = 5
plain = DecoderContender("plain", "mixed", e3.SpeculativeDecoder(target, stop_tokens=()))
turns = {"plain": plain, "A/A": plain} | {
    contender.name: contender for contender in contenders.values()
}
tried = [prompts[0], prompts[6]]
blocks = {k: e3.SpeculativeDecoder(target, Plain(k + 1), stop_tokens=()) for k in (1, 3, 5)}
seconds = {name: [] for name in turns}
step = []
verify = {k: [] for k in blocks}
parts = []
for repeat in range(REPEATS + 1):  # the first one compiles
    pace = timed_rounds(plain.decoder, tried[:1], max_new_tokens=NEW, tokens=32)
    checks = {
        k: timed_rounds(block, tried[:1], max_new_tokens=NEW, tokens=32)
        for k, block in blocks.items()
    }
    costs = step_costs(chain(3), tried[:1], max_new_tokens=NEW, rounds=32)
    runs = {
        name: [contender.run([prompt], NEW) for prompt in tried]
        for name, contender in turns.items()
    }
    if repeat:
        step.append(pace.seconds_per_round)
        parts.append(costs)
        for k, check in checks.items():
            verify[k].append(check.seconds_per_round)
        for name, pair in runs.items():
            seconds[name].append(sum(run.decode_seconds for run in pair))


def ratio(above, below):
    """Ratios within each repeat, so a slow repeat affects both sides."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


c = ratio([part.draft_seconds for part in parts], step)
print(
    f"plain step {1e3 * Spread.of(step).median:.2f} ms, c = {c.median:.3f}"
    f" ({c.low:.3f}-{c.high:.3f})\n"
)
control = ratio(seconds["plain"], seconds["A/A"])
print(f"A/A  measured {control.median:.2f} ({control.low:.2f}-{control.high:.2f})")
for k in blocks:
    v = ratio(verify[k], step)
    gain = ratio(seconds["plain"], seconds[f"K={k}"])
    tau_k = e3.SpeculationStats.merge([run.stats for run in runs[f"K={k}"]]).mean_acceptance_length
    predicted = speedup(tau_k, num_draft_tokens=k, verify_cost=v.median, draft_cost=c.median)
    print(
        f"K={k}  measured {gain.median:.2f} ({gain.low:.2f}-{gain.high:.2f})  predicted"
        f" {predicted:.2f}",
        end="",
    )
    print(f": τ {tau_k:.2f}, v {v.median:.2f} ({v.low:.2f}-{v.high:.2f})")

texts = {name: [run.tokens[0] for run in pair] for name, pair in runs.items()}
assert texts["A/A"] == texts["plain"], "the control generates the same text"

# %% [markdown]
# A difference below the spread of the A/A control is noise. The plot divides a round of `K = 3`
# into drafting, verification, commit and the host. Only a *stream* waits for the host: `generate`
# runs all rounds in one program.


# %%
def streamed(contender, prompt):
    """Time to the first token, then the wait and the number of tokens of each later chunk."""
    begin = time.perf_counter()
    state = jax.block_until_ready(contender.decoder.prefill([prompt], max_new_tokens=NEW))
    last = time.perf_counter()
    length = int(state.length[0])
    first = last - begin
    waits = []
    sizes = []

    while bool(state.running[0]):
        state = contender.decoder.step(state).state
        now_long = int(state.length[0])  # reading it waits for the round
        now = time.perf_counter()

        waits.append(now - last)
        sizes.append(now_long - length)
        last = now
        length = now_long
    return first, waits, sizes


for contender in (plain, contenders[3]):
    streamed(contender, prompts[0])  # compiles
streams = {contender.name: [] for contender in (plain, contenders[3])}
for prompt in prompts[::2]:
    for contender in (plain, contenders[3]):  # in turns
        streams[contender.name].append(streamed(contender, prompt))


def middle(values):
    """Median, in milliseconds."""
    return 1e3 * Spread.of(values).median


draft = 3 * middle([part.draft_seconds for part in parts])
commit = middle([part.commit_seconds for part in parts])
checking = middle(verify[3]) - commit
plainly = middle(step)
waited = {
    name: middle([wait for _, waits, _ in all_of_it for wait in waits])
    for name, all_of_it in streams.items()
}
host = {
    "plain": max(0.0, waited["plain"] - plainly),
    "K=3": max(0.0, waited["K=3"] - draft - checking - commit),
}

# %% tags=["hide-input"]
stacked_steps(
    ["plain step", "round of K = 3"],
    {
        "draft": [0, draft],
        "verify": [plainly, checking],
        "commit": [0, commit],
        "host": list(host.values()),
    },
    title="Parts of a step (medians)",
)

# %% [markdown]
# ## Batch size
#
# The same twelve prompts are decoded in batches of 1, 4 and 12. `τ` does not depend on the batch
# size, because `p` and `q` do not. The *cost* of a round does: verifying four tokens of twelve rows
# is the arithmetic of 48 tokens.


# %%
def in_batches(contender, size):
    return [
        contender.run(prompts[start : start + size], NEW) for start in range(0, len(prompts), size)
    ]


SIZES = (1, 4, 12)
by_batch = {size: {"tau": 0.0, "round": [], "cost": [], "gain": []} for size in SIZES}
for repeat in range(4):  # the first one compiles
    for size, batch_figures in by_batch.items():
        theirs = in_batches(plain, size)
        ours = in_batches(contenders[3], size)
        rounds = sum(int(np.max(run.stats.num_drafts)) for run in ours)  # rounds of the slowest row
        our_seconds = sum(run.decode_seconds for run in ours)
        plain_seconds = sum(run.decode_seconds for run in theirs)
        batch_figures["tau"] = e3.SpeculationStats.merge(
            [run.stats for run in ours]
        ).mean_acceptance_length
        # Tokens of a row per round of its batch.
        batch_figures["of the slowest"] = (NEW - 1) * len(ours) / rounds
        if repeat:
            batch_figures["round"].append(1e3 * our_seconds / rounds)
            batch_figures["cost"].append(
                our_seconds / rounds / (plain_seconds / (NEW - 1) / len(theirs))
            )
            batch_figures["gain"].append(plain_seconds / our_seconds)

for size, batch_figures in by_batch.items():
    cost = Spread.of(batch_figures["cost"])
    gain = Spread.of(batch_figures["gain"])
    print(
        f"batch {size:2}: τ {batch_figures['tau']:.3f}; round {cost.median:.2f}"
        f" ({cost.low:.2f}-{cost.high:.2f}) plain steps; speed-up {gain.median:.2f}"
        f" ({gain.low:.2f}-{gain.high:.2f})"
    )
taus = [batch_figures["tau"] for batch_figures in by_batch.values()]
assert max(taus) - min(taus) < 0.03 * taus[0], (
    "τ does not depend on the batch size, except for approximate ties"
)
slowest = [batch_figures["of the slowest"] for batch_figures in by_batch.values()]
assert sorted(slowest, reverse=True) == slowest and slowest[-1] < 0.8 * taus[-1], (
    "a batch waits for its slowest row"
)

# %% tags=["hide-input"]
middles = [Spread.of(batch_figures["round"]) for batch_figures in by_batch.values()]
twin(
    SIZES,
    taus,
    [spread.median for spread in middles],
    labels=("batch size", "τ, tokens per round", "time of a round, ms"),
    right_range=[(spread.low, spread.high) for spread in middles],
    title="τ and the time of a round by batch size",
)

# %% [markdown]
# The measured speed-up is below `τ` divided by the cost of a round, because a batch ends when its
# *last* row ends. A server with continuous batching does not have this loss.
#
# ## Speculation schedules
#
# A `SpeculationSchedule` sets the draft length by the number of *running* rows, in vLLM's format.
# The schedule below drafts three tokens while one or two rows run, two tokens for three or four
# rows, one token for five to eight rows. The limits from 12 to 90 tokens end the rows one after the
# other. Plain decoding, `K = 3` and the schedule are measured in turns.

# %%
SCHEDULE = e3.SpeculationSchedule(((1, 2, 3), (3, 4, 2), (5, 8, 1)))
DRAIN = [12, 18, 24, 32, 42, 54, 70, 90]
decoders = {
    "plain": plain.decoder,
    "K = 3": chain(3),
    "schedule": e3.SpeculativeDecoder(target, head, schedule=SCHEDULE, stop_tokens=()),
}
running = [8]
drafted = []
for played in decoders["schedule"].rounds(prompts[:8], max_new_tokens=DRAIN):
    drafted.append(int(np.asarray(played.draft.valid)[:, 1:].sum(axis=1).max()))
    running.append(int(np.sum(played.state.running)))
print("rows running: ", running[:-1], "\ntokens drafted:", drafted)
assert drafted == [SCHEDULE.length_at(rows) for rows in running[:-1]]
assert set(drafted) == {1, 2, 3}

taken = {name: [] for name in decoders}
results = {}
for repeat in range(4):  # the first one compiles
    for name, decoder in decoders.items():
        results[name] = decoder.generate(prompts[:8], max_new_tokens=DRAIN)
        if repeat:
            taken[name].append(results[name].seconds)
scheduled = {name: result.stats.mean_acceptance_length for name, result in results.items()}
for name, times in taken.items():
    gain = ratio(taken["plain"], times)
    print(
        f"{name:9} τ {scheduled[name]:.2f}, speed-up {gain.median:.2f}"
        f" ({gain.low:.2f}-{gain.high:.2f})"
    )
assert 1 == scheduled["plain"] < scheduled["schedule"] < scheduled["K = 3"]

# %% [markdown]
# ## Latency
#
# - **TTFT**, time to first token: the prefill. Speculation never shortens it.
# - **TPOT**, time per output token: the time of a request after its first token, divided by the
#   number of tokens after the first.
# - **Chunk wait** (often called *inter-token latency*): the time between two outputs of the stream.
#   With speculation, a chunk holds several tokens, and a round is longer than a plain step.
#
# *Mean chunk wait = TPOT × tokens per chunk*. Report TPOT. Label chunk waits as chunk waits. Report
# p50, p90 and p99.


# %%
def shown(values):
    latency = Latency.of([1e3 * value for value in values])
    return f"{latency.p50:6.2f} {latency.p90:6.2f} {latency.p99:6.2f}"


print(
    f"{'ms':6} {'TTFT p50 p90 p99':>21}   {'TPOT p50 p90 p99':>21}   {'chunk wait p50 p90 p99':>22}"
)
for name, found_streams in streams.items():
    per_token = [sum(waits) / sum(sizes) for _, waits, sizes in found_streams]
    waits = [wait for _, all_waits, _ in found_streams for wait in all_waits]
    sizes = [size for *_, all_sizes in found_streams for size in all_sizes]
    print(
        f"{name:6} {shown([first for first, *_ in found_streams]):>21}   {shown(per_token):>21}  "
        f" {shown(waits):>22}"
    )
    assert abs(np.mean(waits) - np.mean(sizes) * sum(waits) / sum(sizes)) < 1e-9, (
        "wait = TPOT × tokens per chunk"
    )
    assert sum(sizes) == len(found_streams) * (NEW - 1)
assert len(waits) < sum(sizes), "fewer chunks than tokens"
assert len([wait for _, all_waits, _ in streams["plain"] for wait in all_waits]) == sum(sizes), (
    "plain decoding: one chunk per token"
)

# %% [markdown]
# A mean hides the requests with low acceptance, which still pay the cost of every draft. The cell
# simulates two classes of requests. Times are in plain steps.

# %%
easy = TrafficClass(share=0.8, conditional_acceptance_rate=0.8)
hard = TrafficClass(share=0.2, conditional_acceptance_rate=0.3)
size = {"num_requests": 4000, "output_tokens": 128, "seed": 0}
tail = simulate([easy, hard], num_draft_tokens=5, verify_cost=1.3, draft_cost=0.08, **size)
per_token = tail.time_per_output_token
print(
    f"speed-up of all requests {tail.speedup:.2f}; slower than plain:"
    f" {100 * tail.slower_than_plain:.0f} % of them"
)
print(
    f"time per token in plain steps: p50 {per_token.p50:.2f}, p90 {per_token.p90:.2f}, p99"
    f" {per_token.p99:.2f}"
)
assert tail.speedup > 1.3 and per_token.p99 > 1 > per_token.p50, (
    "faster on average, slower in the tail"
)
assert 0.15 < tail.slower_than_plain < 0.21, "the requests of the hard class"

# %% [markdown]
# ## Requests that come and go
#
# So far all rows of a batch began together. An engine gives a row that ends to the next request.
# Here a number of users send the requests, and each waits for an answer before the next request.
# The time to first token now contains the wait for a row, and a chunk wait contains the prefill of
# other requests. The page [Serve a model](../docs/serving.md#under-load) measures a server so, with
# `vllm bench serve`.

# %%
SLOTS = 4
requests = [
    Request(prompt, 12 + 2 * number, ignore_stop=True) for number, prompt in enumerate(prompts)
]
engines = {}
for name, decoder in {
    "plain": e3.SpeculativeDecoder(target, stop_tokens=()),
    "K = 3": chain(3),
}.items():
    engines[name] = Engine(decoder, slots=SLOTS, capacity=192, sampling_mode=SamplingMode.GREEDY)
    engines[name].run(requests[:SLOTS])  # compiles

seen = {name: [] for name in engines}
print(f"{'':6} users tokens/s    τ {'TTFT p50 p90 p99':>25} {'chunk wait p50 p90 p99':>24}")
for name, users in itertools.product(engines, (1, 4, 8)):
    engine = engines[name]
    moments = {}  # of each request: when it was sent, then its chunks
    last_events = {}
    while len(last_events) < len(requests):
        sent = len(moments)
        if sent < len(requests) and sent - len(last_events) < users:
            moments[engine.submit(requests[sent])] = [time.perf_counter()]
            continue
        for event in engine.tick():
            moments[event.request_id].append(time.perf_counter())
            if event.output is not None:
                last_events[event.request_id] = event

    answers = [last_events[request_id].output for request_id in moments]
    acceptance = e3.SpeculationStats.merge([event.stats for event in last_events.values()])
    seen[name].append((answers, acceptance))
    times = list(moments.values())
    speed = sum(map(len, answers)) / (max(map(max, times)) - times[0][0])
    firsts = shown([chunks[1] - chunks[0] for chunks in times])
    waits = shown(np.concatenate([np.diff(chunks[1:]) for chunks in times]))
    tau = acceptance.mean_acceptance_length
    print(f"{name:6} {users:5} {speed:8.0f} {tau:4.2f} {firsts:>25} {waits:>24}")
for by_users in seen.values():
    assert by_users[0] == by_users[1] == by_users[2], (
        "texts and acceptance do not depend on the other requests"
    )

# %% [markdown]
# ## Common mistakes
#
# - **Not waiting for the result.** JAX returns before the work is done.
# - **Timing the compilation.** The first call of every shape compiles. `CompileClock` counts the
#   programs.
# - **Comparing different prompts.** *One* head has two values of `τ` on code and prose (above).

# %%
square = jnp.eye(768)
work = jax.jit(lambda m: jax.lax.fori_loop(0, 8, lambda _, x: x @ m, m))
jax.block_until_ready(work(square))
handed = []
done = []
for _ in range(5):
    start = time.perf_counter()
    result = work(square)
    handed.append(1e3 * (time.perf_counter() - start))
    jax.block_until_ready(result)
    done.append(1e3 * (time.perf_counter() - start))
print(
    f"call returned after {Spread.of(handed).median:.2f} ms, done after"
    f" {Spread.of(done).median:.2f} ms"
)

print(f"compiled programs: first run {first.programs}, second run {again.programs}")
assert first.programs > 0 and again.programs == 0
assert run.tokens == repeated.tokens, "the same text"

# %% [markdown]
# ## Rules for measurements
#
# 1. Name the quantity: draft acceptance rate, conditional acceptance rate, or `τ`. Report it with
#    `K`, the prompts and the temperature.
# 2. Measure tokens per round and milliseconds per round separately.
# 3. Compile first, wait for the result, measure in turns, and compute ratios within a repeat.
# 4. Report median and quartiles, and the A/A control next to the effect.
# 5. Compare a tree with a chain of the same budget, and a chain with the fastest plain decoding.
# 6. Measure every `K` in its own run (question 2). Sum counters. Do not average rates.
#
# `eagle3 bench` and `eagle3 tune` follow these rules.
#
# ## Questions
#
# **1.** A paper reports "acceptance rate 0.8 with `K = 5`". What is `τ` for each of the two
# definitions?
#
# <details><summary>Answer</summary>
#
# `1 + 5·0.8 = 5` for the draft acceptance rate. `(1 - 0.8⁶)/(1 - 0.8) ≈ 3.69` for the conditional
# acceptance rate. The two differ by a factor of 1.36.
#
# </details>
#
# **2.** The run with `K = 7` gives the shares `s₁` and `s₂` of rounds that accept the first and the
# second token. Why is `1 + s₁ + s₂` not the `τ` of `K = 2`?
#
# <details><summary>Answer</summary>
#
# The rounds of a longer draft start at other positions. A long draft covers easy text in few
# rounds, so more of its rounds start at hard text. Therefore its first positions have lower rates.
#
# </details>
#
# **3.** A method is faster than plain decoding in 5 of 7 repeats. Is this a speed-up, by a sign
# test?
#
# <details><summary>Answer</summary>
#
# This is not evidence of one. By chance, 5 or more of 7 repeats have the same sign with probability
# 0.45.
#
# </details>

# %%
print(f"1. {tau_from_draft_rate(0.8, 5):.2f} or {tau_from_conditional_rate(0.8, 5):.2f}")
truncated = 1 + sum(stats_of[7].acceptance_per_position[:2])
print(
    f"2. K = 2 computed from the run of K = 7: {truncated:.3f}; measured"
    f" {stats_of[2].mean_acceptance_length:.3f}"
)
print(f"3. p = {binomtest(5, 7).pvalue:.2f}")
assert abs(tau_from_draft_rate(0.8, 5) / tau_from_conditional_rate(0.8, 5) - 1.36) < 0.01
assert truncated < stats_of[2].mean_acceptance_length, (
    "computed from the longer draft, τ is too low"
)
assert abs(binomtest(5, 7).pvalue - 0.45) < 0.01

# %% [markdown]
# ## Checked claims
#
# - `τ = 1 + K·r` and `τ = 1 + Σ` shares by position are identities. The shares are products of
#   conditional rates.
# - Fitted at `K = 3`, the geometric formula extrapolates to `K = 7` far better than the line.
# - The merged `τ` is the arithmetic mean weighted by rounds and the harmonic mean weighted by
#   tokens.
# - `τ` is the same at batch 1, 4 and 12. A batch waits for its slowest row. The A/A control
#   generates the same text.
# - Each round of a schedule drafts the scheduled number of tokens.
# - Mean chunk wait = TPOT × tokens per chunk. The mean can improve while a fifth of the requests
#   become slower.
# - Texts and acceptance of requests that come and go do not depend on the load.
# - A second run compiles nothing. Prompts alone change `τ`. The first positions of a long draft
#   have lower rates.
#
# **Next:** [08](08_convert_a_head.ipynb), converting a PyTorch head.
