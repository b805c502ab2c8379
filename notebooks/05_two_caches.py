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
# # 05 · Two caches
#
# After this notebook you will be able to
#
# - say what the target's cache and the head's cache hold after every round, slot by slot;
# - explain how drafts are rolled back in arrays of fixed shape: write, then commit, and never undo;
# - show that a refused draft leaves no bit behind, and what is equal to the last bit and what is not;
# - check for a program of your own that its caches are updated in place and that it compiles once.
#
# It takes under a minute on a laptop CPU, offline, with the pair that ships with the package, in a checkout of the
# repository (two bugs are planted with a helper of its tests). Read 01, 02 and 04 before.

# %%
import first_cell

first_cell.start(repository=True)

# %%
import dataclasses
import json

import jax
import jax.numpy as jnp
import jaxtyping
import matplotlib.pyplot as plt
import numpy as np
from pictures.slots import COMMITTED, EMPTY, NEW, REFUSED, moved, slot_map
from pictures.style import ACCEPTED, COLOURS, REJECTED

import eagle3_jax as e3
from eagle3_jax import loop as loops
from eagle3_jax.drafters import Eagle3Drafter, Plain
from eagle3_jax.load import bundled
from eagle3_jax.models.config import usual_head
from eagle3_jax.models.memory import causal_mask
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment
from eagle3_jax.tree import ancestor_mask, depths

target = e3.load_target()
drafter = e3.load_drafter(target=target)
K = 4
decoder = e3.SpeculativeDecoder(target, drafter, num_speculative_tokens=K, stop_tokens=())
rows = [json.loads(line) for line in bundled("prompts.jsonl").read_text().splitlines()]
sizes = (14, 18, 16, 22)
prompts = [
    target.tokenizer.encode(one["prompt"]).ids[:size]
    for one, size in zip(rows[::9], sizes, strict=False)
]
state = decoder.prefill(prompts, max_new_tokens=40)

# %% [markdown]
# ## Two caches, one bookkeeping
#
# Attention needs the keys and values of every token before. The target keeps them, layer by layer, and so does the
# head, which is a model with attention of its own. Each cache is a buffer of fixed size and one number per row:
# `length[b]`, how many slots of row `b` are **committed**. Whatever lies at or behind `length` is garbage by
# definition.


# %%
def buffers(cache):
    one = cache.layers[0]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))
    return f"{len(cache.layers):2} layers of keys and values {one.keys.shape}, {size / 1e6:.2f} MB"


B, C, S, H = state.cache.layers[0].keys.shape
print("target:", buffers(state.cache))
print("head:  ", buffers(state.drafter.cache))
ours, heads = state.cache.length, state.drafter.cache.length
print("lengths: text", state.length, " target's cache", ours, " head's cache", heads)
assert np.array_equal(ours, state.length - 1), "all but the root"
assert np.array_equal(heads, ours), "one pair for each token that the target has read"
assert len(state.cache.layers) == 12 * len(state.drafter.cache.layers)

# %% [markdown]
# Slot `t` of the target's cache holds token `x_t`, at position `t`. Slot `t` of the head's cache holds the pair
# `(f_t, x_{t+1})`, at position `t` too (04). Both are one short of the text: its last token, the **root**, was chosen
# and has not been run. So it is in no slot of the target's cache, and as the token of the last pair it is in the
# head's.
#
# ## One round in slow motion
#
# `decoder.step` is one compiled program. Here are its parts, one after the other, with a look into both caches after
# each. What a slot holds is read from the buffers: a slot was written when its keys are not all zero. (The prefill
# ran a block of 128 tokens, so padding lies behind the prompt. It is wiped first, for the picture's sake.)


# %%
def wiped(cache, value=0.0):
    """The cache with every slot that is not committed set to one value."""
    known = (jnp.arange(S) < cache.length[:, None])[:, None, :, None]
    layers = jax.tree.map(lambda leaf: jnp.where(known, leaf, value), cache.layers)
    return cache.replace(layers=layers)


def wiped_both(state, value=0.0):
    head = state.drafter.replace(cache=wiped(state.drafter.cache, value))
    return state.replace(cache=wiped(state.cache, value), drafter=head)


def status(layer, before, after, row):
    """What each slot of a row holds, told from its keys."""
    written = np.abs(np.asarray(layer.keys[row])).max(axis=(0, 2)) > 0
    slot = np.arange(len(written))
    kind = np.where(written, REFUSED, EMPTY)
    kind = np.where(slot < int(after[row]), NEW, kind)
    return np.where(slot < int(before[row]), COMMITTED, kind)


state = wiped_both(state)
loop, params, n = decoder.loop, decoder.params, state.cache.length
draft = loop.drafter.propose(params.drafter, state.drafter, state.keys, state.sampling)
mask, positions = causal_mask(K + 1), n[:, None] + jnp.arange(K + 1)
out = loop.target(
    params.target, draft.tokens, positions, mask, state.cache, aux_layers=loop.drafter.aux_layers
)
best = jnp.argmax(target.model.unembed(target.params, out.final), axis=-1)
verdict = e3.verify_greedy(draft, best, max_depth=K)
count = verdict.num_accepted + 1  # what was accepted, and the root in front of it
after = state.cache.commit(out.written, count)
seen = e3.Observation(
    tokens=draft.tokens, features=out.features, length=count, next_token=verdict.next_token
)
observed = loop.drafter.observe(params.drafter, draft.state, seen)


def first(cache):
    return cache.layers[0]


guessed, written = first(draft.state.cache), type(first(state.cache))(**out.written[0]._asdict())
head_layers = [first(state.drafter.cache), guessed, guessed, first(observed.cache)]
target_layers = [first(state.cache), first(state.cache), written, first(after)]
ends = [n, n, n, after.length]
names = ["before", "propose", "verify", "commit, observe"]
row = int(
    np.argmax((verdict.num_accepted > 0) & (verdict.num_accepted < K))
)  # a row of which a part was refused
low = int(n[row]) - 4
fig, axes = plt.subplots(2, 1, figsize=(7.6, 4.2), sharex=True)
for ax, layers, title in zip(
    axes, (head_layers, target_layers), ("Head's cache", "Target's cache"), strict=True
):
    shown = np.stack([status(layer, n, end, row) for layer, end in zip(layers, ends, strict=True)])
    slot_map(
        shown[:, low : low + 14], ax=ax, first=low, rows=names, title=title, legend=ax is axes[0]
    )
axes[0].set_xlabel("")
plt.show()
print("accepted of", K, "draft tokens:", verdict.num_accepted, "  lengths", n, "->", after.length)
assert 0 < int(verdict.num_accepted[row]) < K
assert np.array_equal(observed.cache.length, after.length)
assert np.array_equal(after.length, n + verdict.num_accepted + 1)

# %% [markdown]
# Read it from top to bottom.
#
# - **propose**: the head writes its guesses behind its committed slots. One fewer than it drafts, because nothing is
#   drafted after the last one. The target has not moved.
# - **verify**: the target writes the root and all `K` draft tokens behind its committed slots, layer by layer, and
#   attends over the whole buffer under one mask.
# - **commit**: `length` rises by what was accepted and the root. That is all: nothing is erased, nothing is copied.
# - **observe**: the head runs again over the pairs of what was committed, now with the target's true features, and
#   writes over its own guesses. Only then does its `length` rise.
#
# So there is no rollback. A refused draft is a slot behind `length`, and the next round writes over it. The same two
# caches over a dozen rounds, seen after each:

# %%
state, histories, lengths = wiped_both(decoder.prefill(prompts, max_new_tokens=40)), ([], []), []
start = np.asarray(state.cache.length)
while np.any(state.running) and len(lengths) < 12:
    before = np.asarray(state.cache.length)
    state = decoder.step(state).state
    lengths.append(np.asarray(state.length))
    for history, cache in zip(histories, (state.drafter.cache, state.cache), strict=True):
        history.append(status(cache.layers[0], before, cache.length, row))

low, high = int(start[row]) - 3, int(lengths[-1][row]) + K + 1
fig, ax = plt.subplots(figsize=(8.2, 3.6))
rounds = [str(number) for number in range(1, len(lengths) + 1)]
slot_map(
    np.stack(histories[1])[:, low:high],
    ax=ax,
    first=low,
    rows=rounds,
    title="Either cache after each round",
)
ax.set_ylabel("round")
plt.show()
assert np.array_equal(histories[0], histories[1]), (
    "after a round both caches have the same slots in the same states"
)

fig, ax = plt.subplots(figsize=(7.2, 2.6))
for index, line in enumerate(np.stack([start + 1, *lengths]).T):
    ax.step(range(len(line)), line, where="post", label=f"row {index}")
ax.set(xlabel="round", ylabel="tokens known", title="Every row has a length of its own")
ax.legend(ncols=4)
plt.show()
grown = np.diff(np.stack([start + 1, *lengths]), axis=0)
assert all(len(set(steps)) > 1 for steps in grown), "in no round did all rows grow alike"

# %% [markdown]
# ## A refused draft leaves no bit behind
#
# Three checks, from the strictest down.
#
# **Garbage is never read.** After the prefill every slot behind `length`, in both caches, is filled with 10⁴; the
# generation must not notice: the same tokens, and the same bits in every committed slot.


# %%
def finished(decoder, prompts, spoil=None, **options):
    state = decoder.prefill(prompts, **options)
    state = state if spoil is None else wiped_both(state, spoil)
    while np.any(state.running):
        state = decoder.step(state).state
    return state


def known(cache):
    """Every committed key and value, layer after layer, as numpy arrays."""
    ends = np.asarray(cache.length)
    leaves = [np.asarray(leaf) for layer in cache.layers for leaf in (layer.keys, layer.values)]
    return [leaf[row, :, :end] for leaf in leaves for row, end in enumerate(ends)]


def same_bits(one, other):
    return all(np.array_equal(a, b) for a, b in zip(known(one), known(other), strict=True))


clean = finished(decoder, prompts, max_new_tokens=40)
spoilt = finished(decoder, prompts, spoil=1e4, max_new_tokens=40)
assert np.array_equal(clean.tokens, spoilt.tokens)
assert same_bits(clean.cache, spoilt.cache) and same_bits(clean.drafter.cache, spoilt.drafter.cache)
compared = sum(leaf.size for leaf in known(clean.cache))
print(f"spoilt slots changed none of {compared:,} numbers of the target's cache, and no token")

# %% [markdown]
# **A chain and plain decoding, bit for bit.** `Plain(num_nodes=K+1)` decodes without a drafter in blocks of the same
# shape, one root and padding. A token that was verified in the middle of a draft found those before it in the slots
# where plain decoding has them, so its sums ran in the same order: every key and value of every layer is equal to the
# last bit. Had a refused token left anything, it would show here.

# %%
matched = finished(
    e3.SpeculativeDecoder(target, Plain(num_nodes=K + 1), stop_tokens=()),
    prompts,
    max_new_tokens=40,
)
stats = e3.SpeculationStats.merge([clean.stats])
print(
    f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens were accepted, the others refused"
)
assert np.array_equal(clean.tokens, matched.tokens) and same_bits(clean.cache, matched.cache)
assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens

# %% [markdown]
# **A fresh prefill, to rounding.** Feed the whole text to an empty cache at once. The numbers are the same but for
# the order of sums, since a block of another shape is another program. For the target and for the head:

# %%
text = [
    np.asarray(clean.tokens[row, : int(end)]).tolist()
    for row, end in enumerate(np.asarray(clean.cache.length))
]
fresh = decoder.prefill(text, max_new_tokens=1)


def apart(one, other):
    return max(
        float(np.abs(a - b).max() / np.abs(b).max())
        for a, b in zip(known(one), known(other), strict=True)
    )


for name, ours, theirs in (
    ("target", clean.cache, fresh.cache),
    ("head", clean.drafter.cache, fresh.drafter.cache),
):
    equal = "" if same_bits(ours, theirs) else "not "
    print(
        f"{name:7} largest difference {apart(ours, theirs):.1e} of the largest entry; {equal}bit for bit"
    )
    assert apart(ours, theirs) < 1e-4

# %% [markdown]
# ## A tree has to move
#
# A tree writes all its nodes side by side, in the order of their numbers. The accepted path is mostly not at the
# front, so `commit` first moves it there: all reads, then all writes. Here is a round of a tree with 16 nodes whose
# path has gaps.

# %%
TREE = e3.DynamicTree(num_nodes=16, max_depth=5, top_k=4)
trees = e3.SpeculativeDecoder(target, drafter, tree=TREE, stop_tokens=())
state = wiped_both(trees.prefill(prompts, max_new_tokens=40))
found = False
while not found:
    running = np.asarray(state.running)
    assert running.any(), "no path with a gap"
    saved = jax.tree.map(jnp.copy, state)  # the step consumes its state; this copy is for looking
    played = trees.step(state)
    state = played.state
    paths = [[0, *one[one >= 0].tolist()] for one in np.asarray(played.verdict.path)]
    row = max(np.flatnonzero(running), key=lambda row: paths[row][-1] - len(paths[row])).item()
    path = paths[row]
    found = len(path) >= 4 and path != list(range(len(path)))

mask = ancestor_mask(played.draft.parents, TREE.max_depth)
out = trees.loop.target(target.params, played.draft.tokens, played.positions, mask, saved.cache)
count = played.verdict.num_accepted + 1
committed = saved.cache.commit(
    out.written, count, jnp.maximum(jnp.pad(played.verdict.path, ((0, 0), (1, 0))), 0)
)
n = int(saved.cache.length[row])
for written, layer in zip(out.written, committed.layers, strict=True):
    for place, node in enumerate(path):
        assert np.array_equal(layer.keys[row, :, n + place], written.keys[row, :, n + node]), (
            "moved as it was"
        )
print(
    "path",
    path,
    "written in slots",
    [n + node for node in path],
    "committed in",
    list(range(n, n + len(path))),
)
moved(
    path,
    TREE.num_nodes,
    first=n,
    title="The accepted path (green) is moved side by side; × is garbage",
)

# %% [markdown]
# The path of a tree was verified among its siblings' slots and moved afterwards, so its sums ran in another order.
# Against the chain above the caches of a whole generation with this tree are equal to rounding, and not bit for bit.

# %%
grown_in_trees = finished(trees, prompts, max_new_tokens=40)
print(f"tree against chain: {apart(grown_in_trees.cache, clean.cache):.1e} of the largest entry")
assert np.array_equal(grown_in_trees.tokens[:, :60], clean.tokens[:, :60]), "the same texts"
assert apart(grown_in_trees.cache, clean.cache) < 1e-4
assert not same_bits(grown_in_trees.cache, clean.cache)

# %% [markdown]
# ## Positions are not slots
#
# The rotary position of a node is `length + depth`, wherever it lies: siblings share one. When the path has moved,
# slot and position agree again, as they do in plain decoding; that is why the move has to happen before the next
# round. The head counts one less, since the pair `(f_t, x_{t+1})` stands at `t`: the first draft token, of depth 1 in
# the tree, is run at the position `length`, as in 04.

# %%
level = np.asarray(depths(mask))[row]
slots, places = n + np.arange(TREE.num_nodes), np.asarray(played.positions)[row]
fig, ax = plt.subplots(figsize=(7.2, 3.0))
ax.plot(slots, slots, "--", color="#57606a", linewidth=1, label="slot = position (a chain)")
for node, parent in enumerate(np.asarray(played.draft.parents)[row]):
    if parent >= 0:
        ax.plot(
            [slots[parent], slots[node]],
            [places[parent], places[node]],
            color="#c3cad3",
            linewidth=0.8,
            zorder=1,
        )
inside = np.isin(np.arange(TREE.num_nodes), path)
ax.scatter(
    slots[~inside],
    places[~inside],
    color=COLOURS[REJECTED],
    marker="x",
    label="refused or never visited",
)
ax.scatter(slots[inside], places[inside], color=COLOURS[ACCEPTED], label="accepted")
ax.set(xlabel="slot in the target's cache", ylabel="rotary position", yticks=sorted(set(places)))
ax.set_title("Nodes of one level share a position")
ax.set_ylim(places.min() - 0.5, places.max() + 1.5)
ax.legend(loc="upper left", ncols=3, fontsize=8)
plt.show()
assert np.array_equal(places, n + level) and len(set(places)) <= TREE.max_depth + 1 < TREE.num_nodes

# %% [markdown]
# ## In place, and compiled once
#
# The caches are the largest arrays after the weights. `step` *donates* its state: the buffers that come in are the
# buffers that go out. Three ways to see it: the address of a buffer stays; the array that went in is gone; and the
# compiler says how many bytes of its inputs are its outputs, and how many it needs besides.

# %%
state = decoder.prefill(prompts, max_new_tokens=40)
state = decoder.step(state).state
old = [
    leaf for cache in (state.cache, state.drafter.cache) for leaf in jax.tree.leaves(cache.layers)
]
where = [leaf.unsafe_buffer_pointer() for leaf in old]
state = decoder.step(state).state
new = [
    leaf for cache in (state.cache, state.drafter.cache) for leaf in jax.tree.leaves(cache.layers)
]
assert [leaf.unsafe_buffer_pointer() for leaf in new] == where, "the same memory"
assert all(leaf.is_deleted() for leaf in old), "what went in is gone"

jaxtyping.config.update(
    "jaxtyping_disable", True
)  # lowering hands descriptions of arrays to typed structures
compiled = loops.step.lower(decoder.loop, decoder.params, state).compile().memory_analysis()
jaxtyping.config.update("jaxtyping_disable", False)
size = sum(leaf.nbytes for leaf in new)
alias, scratch = compiled.alias_size_in_bytes, compiled.temp_size_in_bytes
print(
    f"caches {size / 1e6:.2f} MB, updated in place {alias / 1e6:.2f} MB, scratch {scratch / 1e6:.2f} MB"
)
assert compiled.alias_size_in_bytes >= size

# %% [markdown]
# A compiled program is made for shapes. Prompts and limits are rounded up to steps of 128, and lengths are data, so
# all prompts of a bucket share one program. The other way, a cache that grows by concatenation, is a new shape for
# every length: below the same attention over a growing and over a fixed buffer, counted by JAX itself.

# %%
before = loops.generate._cache_size()
decoder.generate(prompts[0], max_new_tokens=8)
first = loops.generate._cache_size()
for prompt, limit, seed in ((prompts[1], 30, 1), (prompts[2][:3], 50, 2), (prompts[0] * 4, 5, 3)):
    decoder.generate(prompt, max_new_tokens=limit, seed=seed)
same = loops.generate._cache_size()
decoder.generate(prompts[0] * 10, max_new_tokens=5)
print(
    "programs: after the first prompt",
    first - before,
    ", after three others",
    same - before,
    end=" ",
)
print(", after one of", len(prompts[0] * 10), "tokens", loops.generate._cache_size() - before)
assert same == first == before + 1 and loops.generate._cache_size() == before + 2


def attention(query, keys, seen):
    return jax.nn.softmax(jnp.where(seen, keys @ query, -jnp.inf)) @ keys


growing, fixed = (jax.jit(lambda *arrays: attention(*arrays)) for _ in range(2))
keys, buffer, drawn = (
    jnp.zeros((0, 64)),
    jnp.zeros((32, 64)),
    jax.random.normal(jax.random.key(0), (20, 64)),
)
for length, key in enumerate(drawn, start=1):
    keys = jnp.concatenate([keys, key[None]])
    buffer = buffer.at[length - 1].set(key)
    wide, narrow = (
        fixed(key, buffer, jnp.arange(32) < length),
        growing(key, keys, jnp.ones(length, bool)),
    )
    assert np.allclose(wide, narrow, atol=1e-5)
print("programs for 20 tokens: growing", growing._cache_size(), ", fixed", fixed._cache_size())
assert (growing._cache_size(), fixed._cache_size()) == (20, 1)

# %% [markdown]
# ## What a token costs
#
# "EAGLE-3 needs no cache of its own" can be read here and there. It does: one layer's worth, for every token. The
# formula is `2·C·H` numbers per layer, and it gives exactly the buffers of the shipped pair. For large models a layer
# is a small part of all layers, and not nothing where memory is what limits the batch.

# %%
shipped = (target.model.config, drafter.drafter.config, "float32")
models = {name: KNOWN_MODELS[name] for name in ("Llama-3.1-8B", "Llama-3.3-70B")}
named = {name: (model, usual_head(model), "bfloat16") for name, model in models.items()}
print(
    f"{'':16}{'cache':>10}{'target, bytes':>16}{'head, bytes':>14}{'head/target':>13}{'head, 8 x 8192 tokens':>24}"
)
for name, (big, small, kind) in ({"shipped pair": shipped} | named).items():
    plan = Deployment(target=big, head=small, accelerator=accelerator_named("H200"), cache=kind)
    ours, extra = plan.cache_bytes_per_token(big), plan.cache_bytes_per_token(small)
    print(
        f"{name:16}{kind:>10}{ours:>16,.0f}{extra:>14,.0f}{extra / ours:>13.1%}{extra * 8 * 8192 / 1e6:>21,.0f} MB"
    )
    assert extra * big.num_layers == ours, "one layer of the target's shape"
    assert extra > 0
    if name == "shipped pair":
        caches = (state.cache, state.drafter.cache)
        real = [sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers)) for cache in caches]
        assert [ours * len(prompts) * S, extra * len(prompts) * S] == real, (
            "the formula counts the real buffers"
        )

# %% [markdown]
# ## What would go wrong
#
# Three mistakes. The first is to roll a *tree* back by length alone, as one may with a chain: the slots then hold the
# nodes with the lowest numbers and not the path. That changes the target's own cache, so this one changes the
# **text**.

# %%
from mutants import planted

from eagle3_jax.cache import KeyValues

long = [target.tokenizer.encode(one["prompt"]).ids for one in rows[::8]]
plain = e3.SpeculativeDecoder(target, stop_tokens=()).generate(long, max_new_tokens=61)
tree_text = trees.generate(long, max_new_tokens=61)
with planted(KeyValues.commit, "compact_accepted(buffer, length, count, nodes)", "buffer"):
    by_length = trees.generate(long, max_new_tokens=61)


def parted(tokens):
    """For every text, the first token that is not the target's."""
    pairs = [
        list(zip(ours, theirs, strict=True))
        for ours, theirs in zip(tokens, plain.tokens, strict=True)
    ]
    return [next((place for place, (a, b) in enumerate(text) if a != b), None) for text in pairs]


print("first token that is not the target's, tree moved:    ", parted(tree_text.tokens))
print("first token that is not the target's, by length only:", parted(by_length.tokens))
print(
    f"τ {tree_text.stats.mean_acceptance_length:.2f} and {by_length.stats.mean_acceptance_length:.2f}"
)
assert (
    parted(by_length.tokens).count(None) <= len(long) // 2 < parted(tree_text.tokens).count(None)
), "another text"

# %% [markdown]
# The second is to spare the head its second look at what was accepted. The planted bug feeds it its own last output
# where the target's features belong, for all pairs of a round but the first. The tokens are right, so the text stays; τ
# falls.

# %%
TRUE = "head.fuse(seen.features)"
STALE = f"{TRUE} if fed > {K + 1} else jnp.where(jnp.arange(fed)[None, :, None] > 0, state.output[:, None], {TRUE})"
right = decoder.generate(long, max_new_tokens=61)
with planted(Eagle3Drafter.observe, TRUE, STALE):
    stale = decoder.generate(long, max_new_tokens=61)
print(
    f"τ {right.stats.mean_acceptance_length:.2f}, without the second look {stale.stats.mean_acceptance_length:.2f}"
)
assert stale.tokens == right.tokens, "the same text"
assert stale.stats.mean_acceptance_length < right.stats.mean_acceptance_length - 0.2

# %% [markdown]
# A milder form of it is worse to find: run the pairs again, but leave the keys and values in the cache that were
# written while guessing, where the guess was accepted. They stem from the head's own output, and the head was trained
# on just that (04), so τ hardly notices. A comparison of the cache with a fresh one does.


# %%
class KeepsGuesses(Eagle3Drafter):
    def observe(self, params, state, seen):
        after = super().observe(params, state, seen)
        slot, n = jnp.arange(state.cache.layers[0].capacity)[None, :], state.cache.length[:, None]
        guesses = jnp.minimum(seen.length - 1, self.max_depth - 1)[
            :, None
        ]  # accepted, and run while drafting
        own = ((slot >= n) & (slot < n + guesses) & (n > 0))[:, None, :, None]
        layers = jax.tree.map(
            lambda old, new: jnp.where(own, old, new), state.cache.layers, after.cache.layers
        )
        return after.replace(cache=after.cache.replace(layers=layers))


fields = {
    field.name: getattr(drafter.drafter, field.name) for field in dataclasses.fields(Eagle3Drafter)
}
keeps = e3.LoadedDrafter(KeepsGuesses(**fields), drafter.params)
keeping = e3.SpeculativeDecoder(target, keeps, num_speculative_tokens=K, stop_tokens=())
kept_state = finished(keeping, prompts, max_new_tokens=40)
taus, gaps = [], []
for name, one in (("observed again", clean), ("guesses kept", kept_state)):
    taus.append(e3.SpeculationStats.merge([one.stats]).mean_acceptance_length)
    gaps.append(apart(one.drafter.cache, fresh.drafter.cache))
    print(
        f"{name:15} τ {taus[-1]:.2f}; the head's cache is {gaps[-1]:.1e} of its largest entry from a fresh one"
    )
assert np.array_equal(kept_state.tokens, clean.tokens)
assert abs(taus[1] - taus[0]) < 0.5 and gaps[1] > 0.01 > 100 * gaps[0], (
    "τ does not show it, the cache does"
)

# %% [markdown]
# The third is to use a state twice. It was donated: its buffers are someone else's now. JAX would say so of an array;
# the decoder says what to do.

# %%
state = decoder.prefill(prompts, max_new_tokens=8)
used = state
state = decoder.step(state).state
try:
    decoder.step(used)
except ValueError as error:
    print(error)
else:
    raise AssertionError("a consumed state was accepted")

# %% [markdown]
# ## Exercises
#
# **1.** Eight prompts of 300 tokens, 200 new tokens each, K = 5, float32: how long are the rows of the caches, and what
# do the caches of the shipped pair take?
#
# <details><summary>Answer</summary>
#
# A row needs room for prompt, new tokens and a whole draft behind the last root: 300 + 200 + 6 = 506, rounded up to
# 512. Thirteen layers, a key and a value for 2 heads of 64 numbers, 4 bytes: 13 · 2 · 2 · 64 · 4 · 512 · 8 bytes, 54.5
# MB. The cell below asks the models.
#
# </details>
#
# **2.** In a chain of `K` the head writes `K − 1` guesses. How many does it write for the tree above, of which the
# target sees 16 nodes?
#
# <details><summary>Answer</summary>
#
# It runs every node that may get children: 4 on each level but the last, 16 in all, although one root and 15 nodes are
# verified. A head may run more nodes than the target sees, or fewer. `TREE.num_expanded` says it.
#
# </details>
#
# **3.** Wipe the *head's* committed slots after the prefill, and leave the target's alone. What happens to the text,
# and what to τ?
#
# <details><summary>Answer</summary>
#
# The text stays, as with anything that is done to a drafter. τ falls, since the head's attention then looks at zeros
# where the prompt was. It recovers with every round, as new pairs are observed: for that the cell below looks at the
# first 24 tokens alone.
#
# </details>
#
# **4.** Llama-3.3-70B with a head: how many per cent fewer tokens fit into a given cache memory because of the head?
#
# <details><summary>Answer</summary>
#
# Both caches take 81 layers' worth a token where the target's alone takes 80: 1 − 80/81, 1.2 %. Small, and not nothing.
#
# </details>

# %%
shapes = [
    jax.eval_shape(lambda: target.model.init_cache(8, 512)),
    jax.eval_shape(lambda: loop.drafter.init(None, 8, 512).cache),
]
taken = sum(
    leaf.size * leaf.dtype.itemsize for one in shapes for leaf in jax.tree.leaves(one.layers)
)
assert taken == 13 * 2 * 2 * 64 * 4 * 512 * 8 and round(taken / 1e6, 1) == 54.5
assert TREE.num_expanded == 16 == TREE.num_nodes and e3.Chain(K).num_expanded == K - 1

taus = {}
for name, forgets in (("as it is", False), ("head's cache wiped", True)):
    state = decoder.prefill(long, max_new_tokens=24)
    if forgets:
        zero = jax.tree.map(jnp.zeros_like, state.drafter.cache.layers)
        state = state.replace(
            drafter=state.drafter.replace(cache=state.drafter.cache.replace(layers=zero))
        )
    while np.any(state.running):
        state = decoder.step(state).state
    taus[name] = (
        e3.SpeculationStats.merge([state.stats]).mean_acceptance_length,
        np.asarray(state.tokens),
    )
print("exercise 3:", {name: round(one, 2) for name, (one, _) in taus.items()})
assert np.array_equal(taus["as it is"][1], taus["head's cache wiped"][1])
assert taus["head's cache wiped"][0] < taus["as it is"][0] - 0.1
big, small, kind = named["Llama-3.3-70B"]
plan = Deployment(target=big, head=small, accelerator=accelerator_named("H200"), cache=kind)
share = plan.cache_bytes_per_token(small) / (
    plan.cache_bytes_per_token(big) + plan.cache_bytes_per_token(small)
)
print(f"exercise 4: {share:.1%}")
assert abs(share - 1 / 81) < 1e-9

# %% [markdown]
# ## What was claimed and checked
#
# - Both caches have `length − 1` committed slots in every row, and the same slots in the same states after every round.
# - What lies behind `length` is never read: spoilt, it changes no token and no bit.
# - A chain's keys and values are those of plain decoding in blocks of its shape, bit for bit; those of a fresh prefill
#   to 10⁻⁴.
# - A tree's path is moved as it was written; nodes of one level share a rotary position.
# - Both caches are updated in place; one program serves all prompts of a bucket, a growing cache needs one for every
#   length.
# - The head's cache is one layer's worth for every token; the formula counts the real buffers.
# - A tree rolled back by length alone breaks the text; a head without its second look costs τ and leaves the text; a
#   used state is refused.
#
# Next: 06, trees; 07, what exact means in floating point.
