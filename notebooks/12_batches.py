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
# # 12 · Batches: one request, eight neighbours, the same bits
#
# A request that is decoded beside others should not notice them. And a batch changes what drafting is worth. After
# this notebook you can
#
# - say what a request's neighbours can change (nothing), what the *size* of the batch can change (the last bits of
#   floats), and check both yourself, greedily and sampled;
# - see rows of one batch advance at their own pace, and stop for reasons of their own;
# - draft by a schedule, fewer tokens while many rows run, and measure it beside a fixed `K`;
# - recognise two classic mistakes: randomness by place in the batch, and batches in which everybody waits for the
#   slowest.
#
# It takes about a minute on a laptop CPU, offline, inside a checkout (it borrows helpers from `tests` and
# `validation`); most of that is compilation, which is kept for the next time. Read 01, 02 and 04 before.

# %%
import first_cell

first_cell.start(repository=True)

# %% [markdown]
# ## Requests, and a batch of them
#
# A request is a prompt and a **key**. What is drawn for it depends on that key and on the position in its text, on
# nothing else. `e3.Prompts` is the batch as the compiled loop takes it; `decode` below prefills it and runs it to its
# end, and gives the whole final state back: tokens, counters and both caches.

# %%
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tiny  # helpers of the tests

import eagle3_jax as e3
from eagle3_jax import loop as loops
from eagle3_jax.checks import per_row, sampling_mode_of
from eagle3_jax.prompts import Renderer, in_turn, read_prompts
from eagle3_jax.sampling import row_keys
from eagle3_jax.sources import bundled

NEW, K, CAPACITY = 48, 3, 128
target = e3.load_target()  # float32
head = e3.load_drafter(target=target)
file = bundled("prompts.jsonl")
held_out = read_prompts(file, target, Renderer("continued as they stand"), max_new_tokens=NEW)
texts = [
    prompt.tokens[-20 - 4 * index :] for index, prompt in enumerate(in_turn(held_out, 8))
]  # of many lengths
keys = row_keys(2024, len(texts))  # one for each request, whatever row it will be in
chain = e3.SpeculativeDecoder(target, head, num_speculative_tokens=K, stop_tokens=())
drawn = e3.SpeculativeDecoder(
    target,
    head,
    num_speculative_tokens=K,
    stop_tokens=(),
    draft_sampling=e3.DraftSampling.PROBABILISTIC,
)
WARM = e3.SamplingParams(temperature=0.8)


def decode(decoder, order, sampling=None, *, keys=keys, limit=NEW):
    """Requests in this order as one batch, run to the end."""
    batch = tiny.prompts(
        [texts[index] for index in order], limit=limit, sampling=sampling, width=64
    )
    batch = batch.replace(keys=jnp.stack([keys[index] for index in order]))
    loop = dataclasses.replace(
        decoder.loop, sampling_mode=sampling_mode_of(per_row(batch.sampling, len(order)))
    )
    state = loops.prefill(loop, decoder.params, batch, capacity=CAPACITY)
    return jax.device_get(loops.run(loop, decoder.params, state))


def row(state, index):
    """Everything of one row."""
    return jax.tree.map(lambda leaf: leaf[index], state)


def written(state, index):
    """The whole text of a row."""
    return state.tokens[index, : state.length[index]].tolist()


together = {"greedy": decode(chain, range(8)), "sampled": decode(drawn, range(8), WARM)}
print("prompts of", [len(text) for text in texts], "tokens;", NEW, "new ones each")
for how, state in together.items():
    own = e3.SpeculationStats.merge([state.stats]).mean_acceptance_length
    print(
        f"{how:8} τ = {own:.2f}: {target.tokenizer.decode(written(state, 0)[len(texts[0]) :])[:70]!r}"
    )

# %% [markdown]
# ## Other neighbours: the same bits
#
# The same request in the same row, beside the same seven in another order, and beside seven copies of one. All shapes
# are the same, so it is the same program, and a row's numbers are computed from that row alone. Compared below: not
# just tokens but every key and value in both caches, bit for bit.

# %%
REORDERED, COPIES = [0, 7, 6, 5, 4, 3, 2, 1], [0, 5, 5, 5, 5, 5, 5, 5]
for how, (decoder, sampling) in {"greedy": (chain, None), "sampled": (drawn, WARM)}.items():
    for order in (REORDERED, COPIES):
        other = decode(decoder, order, sampling)
        mine, theirs = (row(tiny.known(state), 0) for state in (together[how], other))
        assert written(other, 0) == written(together[how], 0), "the same text"
        assert tiny.same_bits((mine.cache, mine.drafter), (theirs.cache, theirs.drafter)), (
            "and the same bits"
        )
        print(f"{how:8} beside {order[1:]}: tokens, both caches and counters equal, bit for bit")
        assert tiny.same_bits(mine.stats, theirs.stats)

# %% [markdown]
# ## Alone: the same tokens, other last bits
#
# A batch of one is another *program*: other shapes, other loops, sums in another order. Floating-point sums depend on
# their order, so nobody can promise bits across sizes, and this library does not. What happens on this machine?

# %%
alone = {"greedy": decode(chain, [0]), "sampled": decode(drawn, [0], WARM)}


def largest_difference(one, other):
    """Between the keys and values of two rows, both caches."""
    pairs = zip(
        jax.tree.leaves((one.cache, one.drafter)),
        jax.tree.leaves((other.cache, other.drafter)),
        strict=True,
    )
    return max(
        float(np.max(np.abs(a - b))) for a, b in pairs if np.issubdtype(a.dtype, np.floating)
    )


for how, state in alone.items():
    mine, theirs = row(tiny.known(together[how]), 0), row(tiny.known(state), 0)
    same, bits = (
        written(state, 0) == written(together[how], 0),
        tiny.same_bits(mine.cache, theirs.cache),
    )
    away = largest_difference(mine, theirs) if same else float("nan")
    print(
        f"{how:8} tokens equal: {same}; bits of the caches equal: {bits}; largest difference {away:.1e}"
    )
    assert not away > 1e-3, "a sum in another order differs in its last digits"

# %% [markdown]
# Small differences in the caches, and the same tokens. Luck? No: **margins**. A greedy token changes only where the
# two best logits are closer than the noise. Below, the gap between the best and the second best at every position of
# the text, beside the largest difference between the logits of both batch sizes.

# %%
import matplotlib.pyplot as plt

from eagle3_jax.models.memory import causal_mask
from validation.margin import FLOAT32_TOLERANCE


@jax.jit
def logits_of(params, tokens):
    """After every token of some texts, fed one by one through the cache: ``[T B V]``."""

    def one(cache, column):
        output = target.model(params, column[:, None], cache.length[:, None], causal_mask(1), cache)
        logits = target.model.unembed(params, output.final)[:, 0]
        return cache.commit(output.written, jnp.ones_like(cache.length)), logits

    return jax.lax.scan(one, target.model.init_cache(tokens.shape[0], CAPACITY), tokens.T)[1]


shortest = int(together["greedy"].length.min())
block = jnp.asarray(together["greedy"].tokens[:, :shortest])
eight, one = (np.asarray(logits_of(target.params, some))[:, 0] for some in (block, block[:1]))
best = np.sort(eight[len(texts[0]) - 1 : -1], axis=-1)
gaps, noise = best[:, -1] - best[:, -2], float(np.max(np.abs(eight - one)))

figure, axes = plt.subplots()
axes.semilogy(gaps, marker="o", markersize=4, linestyle="", label="gap between the two best logits")
axes.axhline(max(noise, 1e-8), color="#d97634", label="largest difference between batch sizes")
axes.axhline(FLOAT32_TOLERANCE, color="#9aa0a6", linestyle="--", label="what counts as a near tie")
axes.set(xlabel="token of the text", ylabel="logits", title="How far every choice is from a tie")
axes.legend(loc="lower left", bbox_to_anchor=(0, 0.1))
plt.show()
print(f"smallest gap {gaps.min():.1e}, noise {noise:.1e}")

assert noise < FLOAT32_TOLERANCE, "float32 sums in another order differ little"
if written(alone["greedy"], 0) != written(together["greedy"], 0):  # then only at a near tie
    mine, theirs = (written(state, 0) for state in (together["greedy"], alone["greedy"]))
    parted = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    assert gaps[parted - len(texts[0])] < FLOAT32_TOLERANCE, (
        "texts may part at a near tie, and nowhere else"
    )

# %% [markdown]
# So the promise has three steps:
#
# | what changes | what stays |
# |---|---|
# | the neighbours, at one batch size | every bit |
# | drafting or not, in blocks of one size (`Plain(num_nodes=N)`) | every bit, of a chain |
# | the batch size, or the block size | tokens up to near ties; randomness exactly |
#
# The second line, checked: plain decoding in blocks of `K + 1` rows, of which all but the root are padding, beside the
# chain. Every key and value of the target is equal.

# %%
from eagle3_jax.drafters import Plain

matched = e3.SpeculativeDecoder(target, Plain(num_nodes=K + 1), stop_tokens=())
plain = decode(matched, range(8))
assert np.array_equal(plain.tokens, together["greedy"].tokens)
assert tiny.same_bits(tiny.known(plain.cache), tiny.known(together["greedy"].cache))
print("plain in blocks of four = chain of three, bit for bit, in all eight rows")

# %% [markdown]
# And the third line's second half: the random numbers. They are a function of key and position, so a request draws
# with the same numbers in a batch of one and of eight.

# %%
from eagle3_jax.sampling import keys_at, uniforms

positions = jnp.arange(30, 38)
at_once = uniforms(keys_at(keys, positions, 1), 2)
by_itself = uniforms(keys_at(keys[3:4], positions[3:4], 1), 2)
assert np.array_equal(at_once[3], by_itself[0]), (
    "integers hashed, nothing summed: exact on any machine"
)
assert len(np.unique(np.asarray(at_once))) == at_once.size, "and different for each request"

# %% [markdown]
# ## Every row at its own pace
#
# Eight requests, each with a limit of its own; one of them also has a stop token of its own. In a round a row writes
# between one and `K + 1` tokens; a row that has ended stays as it is. Watch the picture from left to right: no row
# waits.

# %%
LIMITS = [12, 48, 20, 40, 28, 48, 36, 16]
STOPPED = 5  # this row gets a stop token that its text is known to contain
full = written(together["greedy"], STOPPED)[len(texts[STOPPED]) :]
stop = full[20]


def with_a_stop(state):
    stops = np.full((8, 1), -1, np.int32)
    stops[STOPPED] = stop
    return state.replace(stop_tokens=jnp.asarray(stops))


batch = with_a_stop(tiny.prompts(texts, limit=LIMITS, width=64)).replace(keys=keys)
state = loops.prefill(chain.loop, chain.params, batch, capacity=CAPACITY)
lengths = [np.asarray(state.length)]
while bool(np.any(state.running)):
    state = chain.step(state).state
    lengths.append(np.asarray(state.length))
advance = np.diff(np.stack(lengths), axis=0).T  # [rows, rounds]

for index in range(8):
    asked = full[: full.index(stop) + 1] if index == STOPPED else None
    mine = np.asarray(state.tokens)[index, len(texts[index]) : int(state.length[index])].tolist()
    whole = written(together["greedy"], index)[len(texts[index]) :]
    assert mine == (asked if index == STOPPED else whole[: LIMITS[index]]), (
        "each row ends exactly where it should"
    )
reasons = [e3.FinishReason(int(reason)) for reason in state.finish]
assert [reason is e3.FinishReason.STOP for reason in reasons] == [
    index == STOPPED for index in range(8)
]

# %%
from matplotlib.colors import BoundaryNorm, ListedColormap

shades = ListedColormap(["#eceff1", "#cfe3f3", "#93c1e6", "#4f93cf", "#1f5f9c"])
figure, axes = plt.subplots(figsize=(9, 3.4))
mesh = axes.pcolormesh(
    advance, cmap=shades, norm=BoundaryNorm(np.arange(-0.5, K + 2), shades.N), edgecolors="white"
)
for index in range(8):
    ended = np.flatnonzero(advance[index])[-1] + 1
    axes.annotate(
        reasons[index].name.lower(), (ended + 0.15, index + 0.5), va="center", fontsize="small"
    )
axes.set_yticks(np.arange(8) + 0.5, [f"row {index}, limit {LIMITS[index]}" for index in range(8)])
axes.invert_yaxis()
axes.grid(visible=False)
axes.set(
    xlabel="round",
    title="Tokens that each row writes in each round: rows advance and end on their own",
)
figure.colorbar(mesh, ax=axes, ticks=range(K + 2), label="tokens")
plt.show()
assert advance.max() <= K + 1 and (advance[:, 0] > 0).all()
assert all((np.diff((line > 0).astype(int)) <= 0).all() for line in advance), (
    "a row writes until it ends, then never"
)
assert len({tuple(line[:8]) for line in advance}) > 4, "rows advance differently"

# %% [markdown]
# ## How much to draft: a schedule
#
# In a larger batch a verification costs more, so shorter drafts are best there (01, 08). A `SpeculationSchedule` says
# how much to draft at how many *running* rows, in vLLM's form. Below: one token while five to eight rows run, two for
# three or four, three for one or two. In `generate` the schedule is one loop after the other, each compiled for as
# many rows as it begins with: rows that have ended leave the batch and cost nothing any more.
#
# A batch drains: limits from 12 to 90 tokens. First the rounds themselves, with what the schedule chose.

# %%
SCHEDULE = e3.SpeculationSchedule(((1, 2, 3), (3, 4, 2), (5, 8, 1)))
DRAIN = [12, 18, 24, 32, 42, 54, 70, 90]
fast = e3.load_target(dtype="mixed")
fast_head = e3.load_drafter(target=fast)
decoders = {
    "plain": e3.SpeculativeDecoder(fast, stop_tokens=()),
    "K = 3": e3.SpeculativeDecoder(fast, fast_head, num_speculative_tokens=3, stop_tokens=()),
    "schedule": e3.SpeculativeDecoder(fast, fast_head, schedule=SCHEDULE, stop_tokens=()),
}
running, drafted = [8], []
for played in decoders["schedule"].rounds(texts, max_new_tokens=DRAIN):
    drafted.append(int(np.asarray(played.draft.valid)[:, 1:].sum(axis=1).max()))
    running.append(int(np.sum(played.state.running)))
assert drafted == [SCHEDULE.length_at(rows) for rows in running[:-1]], (
    "every round drafts what the schedule says"
)
assert set(drafted) == {1, 2, 3}

figure, axes = plt.subplots(figsize=(7.2, 3))
axes.step(range(len(drafted)), running[:-1], where="post", label="rows running")
axes.step(
    range(len(drafted)), drafted, where="post", linestyle="--", label="tokens drafted per row"
)
axes.set(
    xlabel="round",
    ylabel="rows, tokens",
    ylim=(0, 8.6),
    title="The batch drains, and drafts get longer",
)
axes.legend()
plt.show()

# %% [markdown]
# Now the clock: all three ways in turns, five times, after a warm-up that compiles. Printed with quartiles; which one
# wins is your machine's affair. That they write the same tokens is not.

# %%
from eagle3_jax.bench.timing import Spread

seconds, results = {name: [] for name in decoders}, {}
for repeat in range(6):  # the first one compiles
    for name, decoder in decoders.items():
        results[name] = decoder.generate(texts, max_new_tokens=DRAIN)
        if repeat:
            seconds[name].append(results[name].seconds)

print(f"{'':9} {'tokens/s':>20}   ratio to plain, paired")
for name, taken in seconds.items():
    speed = Spread.of([sum(DRAIN) / one for one in taken])
    ratio = Spread.of([a / b for a, b in zip(seconds["plain"], taken, strict=True)])
    print(
        f"{name:9} {speed.median:6.0f} ({speed.low:5.0f}-{speed.high:5.0f})   {ratio.median:.2f} "
        f"({ratio.low:.2f}-{ratio.high:.2f})   τ {results[name].stats.mean_acceptance_length:.2f}"
    )

# %% [markdown]
# `τ` of the schedule is below that of `K = 3`, because it drafted less; what counts is the clock. The comparison of
# texts allows for near ties, as everything here does that changes shapes: where two texts part, the two tokens' logits
# must be within two units in the last place.

# %%
from validation.margin import tie_tolerance


def same_up_to_near_ties(mine, theirs, prompt):
    """Whether two texts are equal, or part where their tokens' logits nearly tie."""
    parted = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
    if parted is None:
        return True
    before = jnp.asarray([prompt + mine[:parted]])
    positions = jnp.arange(before.shape[1])[None]
    output = fast.model(fast.params, before, positions, causal_mask(before.shape[1]))
    last = np.asarray(fast.model.unembed(fast.params, output.final))[0, -1]
    return abs(last[mine[parted]] - last[theirs[parted]]) <= tie_tolerance(last.max(), "mixed")


for name, result in results.items():
    for mine, theirs, prompt in zip(result.tokens, results["plain"].tokens, texts, strict=True):
        assert same_up_to_near_ties(mine, theirs, prompt), (
            f"{name} wrote another text than plain decoding"
        )
    equal = sum(a == b for a, b in zip(result.tokens, results["plain"].tokens, strict=True))
    print(f"{name:9} {equal} of 8 texts equal to plain decoding, the others part at a near tie")
tau = {name: result.stats.mean_acceptance_length for name, result in results.items()}
assert 1 == tau["plain"] < tau["schedule"] < tau["K = 3"], "shorter drafts write less per round"

# %% [markdown]
# ## What would go wrong
#
# **Randomness by place in the batch.** If a request draws with the number of its *row*, its text depends on where a
# scheduler put it, and nobody can repeat a single request. Planted here: keys by row instead of keys by request.

# %%
MOVED = [5, 1, 2, 3, 4, 0, 6, 7]  # request 0 is now in row 5
right = decode(drawn, MOVED, WARM)
assert written(right, 5) == written(together["sampled"], 0), (
    "with its own key it writes what it wrote in row 0"
)

by_row = row_keys(7, 8)
first = decode(drawn, range(8), WARM, keys=by_row)
moved = decode(
    drawn, MOVED, WARM, keys=[by_row[MOVED.index(index)] for index in range(8)]
)  # row 5 draws with key 5
assert written(moved, 5) != written(first, 0), "the bug shows"
for name, state, place in (("row 0", first, 0), ("row 5", moved, 5)):
    print(f"{name}: {target.tokenizer.decode(written(state, place)[len(texts[0]) :])[:80]!r}")

# %% [markdown]
# `decoder.generate` numbers keys by row, since all it is given is a list and a seed. Whoever schedules requests gives
# each its own key, as above.
#
# **Everybody waits for the slowest.** The simplest batched loop keeps one length for all rows, so a round commits as
# many tokens as the *least* lucky row accepted. The output stays right, and that is why nobody notices. Here is that
# bug as an acceptance rule of our own: all rows accept the smallest count, and go on with their own next token.


# %%
@dataclasses.dataclass(frozen=True)
class MinimumAdvance:
    """Exact, and slow: every row accepts as little as the one that accepts least."""

    lossless = True

    def __call__(self, draft, logits, sampling, keys, *, sampling_mode, max_depth):
        own = e3.Exact()(
            draft, logits, sampling, keys, sampling_mode=sampling_mode, max_depth=max_depth
        )
        count = jnp.min(own.num_accepted)
        cut = jnp.take(
            jnp.concatenate([own.path, own.path[:, -1:]], axis=1), count, axis=1
        )  # the first node given up
        instead = jnp.take_along_axis(draft.tokens, jnp.maximum(cut, 0)[:, None], axis=1)[:, 0]
        return e3.Verdict(
            path=jnp.where(jnp.arange(max_depth) < count, own.path, -1),
            num_accepted=jnp.full_like(own.num_accepted, count),
            next_token=jnp.where(own.num_accepted > count, instead, own.next_token),
        )


waiting = e3.SpeculativeDecoder(
    target, head, num_speculative_tokens=K, stop_tokens=(), verifier=MinimumAdvance()
)
slowest = decode(waiting, range(8))
assert np.array_equal(slowest.tokens, together["greedy"].tokens), "the texts are right"
taus = [
    e3.SpeculationStats.merge([state.stats]).mean_acceptance_length
    for state in (together["greedy"], slowest)
]
rounds = [int(np.max(state.stats.num_drafts)) for state in (together["greedy"], slowest)]
for how, tau, count in zip(
    ("each at its own pace", "all at the slowest"), taus, rounds, strict=True
):
    print(f"{how:21} τ = {tau:.2f}, {count} rounds")
assert taus[1] < 0.75 * taus[0] and rounds[1] > rounds[0], "most of the gain is gone"
assert len(set(slowest.stats.num_accepted_tokens.tolist())) == 1, (
    "and what a request gains depends on its neighbours"
)

# %% [markdown]
# ## Exercises
#
# **1.** If each of eight rows accepts its first token with probability 0.7, how often do *all* of them? What does that
# say about the minimum advance at batch 32?
#
# <details><summary>Answer</summary>
#
# `0.7⁸ ≈ 0.058`. At 32 rows `0.7³² ≈ 10⁻⁵`: `τ` is 1, and drafting is pure cost.
#
# </details>
#
# **2.** Why does `SpeculativeDecoder` round up capacities and prompt widths to steps of 128, and what would `decode`
# above lose if it did not fix `width` and `CAPACITY`?
#
# <details><summary>Answer</summary>
#
# Shapes decide the program. Without fixed ones every set of requests would compile again, and requests of another
# batch would run in other shapes: bits equal by luck at best.
#
# </details>
#
# **3.** In the drain above, how many rows are running on average over the rounds? Why does that number matter for the
# ratio that was printed?
#
# <details><summary>Answer</summary>
#
# Computed below. A batch that nobody refills runs mostly with few rows, where drafting pays: a drain flatters long
# drafts compared with a server that refills its rows.
#
# </details>
#
# **4.** The same request at another temperature: which random numbers does it draw with?
#
# <details><summary>Answer</summary>
#
# The same ones: they are a function of key and position. The distribution they are looked up in is another.
#
# </details>
#
# **5.** Write the schedule that never drafts above four rows, in vLLM's form, so that both engines mean the same.
#
# <details><summary>Answer</summary>
#
# `[[1, 4, 3], [5, 512, 0]]`: vLLM carries the last length on above the last entry, so the zero is said explicitly.
#
# </details>

# %%
print(f"1. {0.7**8:.3f} and {0.7**32:.0e}")
print(f"3. {np.mean(running[:-1]):.1f} of 8 rows")
never = e3.SpeculationSchedule.from_lists([[1, 4, 3], [5, 512, 0]])
print("5.", [never.length_at(rows) for rows in (1, 4, 5, 600)])
assert abs(0.7**8 - 0.058) < 0.001 and 0.7**32 < 2e-5
assert np.mean(running[:-1]) < 6
assert [never.length_at(rows) for rows in (1, 4, 5, 600)] == [3, 3, 0, 0]

# %% [markdown]
# ## What was claimed and checked
#
# - Neighbours reordered or replaced: tokens, both caches and counters of a row equal bit for bit, greedy and sampled.
# - A batch of one: logits within float32 noise, tokens equal up to near ties; random numbers exactly equal.
# - A chain and plain decoding in blocks of its size: every key and value equal.
# - Rows end exactly at their own limit or stop token, and write nothing afterwards.
# - Each round of a schedule drafts what it says; all three ways write plain decoding's texts.
# - Keys by row change a request's text when it moves; keys by request do not. Minimum advance keeps texts and loses
#   `τ`.
#
# Times were printed and never asserted.
#
# **Next:** 09 and 10, heads from elsewhere, and drafters and rules of your own.
