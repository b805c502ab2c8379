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
# # 04 · KV caches
#
# After this notebook you can
#
# - describe the content of the target's cache and the head's cache after every round, slot by slot;
# - explain how rejected draft tokens are handled in arrays of fixed shape;
# - show that a rejected draft changes no later result, bit for bit;
# - check that caches are updated in place and that a program compiles once.
#
# The notebook takes about two minutes on two CPU cores, offline. It needs only
# `pip install -e '.[notebooks]'`. It uses the small pair of the package. Read
# [01](01_memory_bound_decoding.ipynb), [02](02_speculative_sampling.ipynb) and
# [03](03_eagle3_head.ipynb) first.
#
# **Exercises** work as in [00](00_watch_it_draft.ipynb): write a function, or use its answer.

# %% tags=["hide-input"]
import first_cell

first_cell.start()

import dataclasses
import json
from unittest import mock

import jax
import jax.numpy as jnp
import jaxtyping
import matplotlib.pyplot as plt
import nano_eagle3 as nano  # examples/nano_eagle3.py: the whole method in one file
import numpy as np
from exercises import checked
from pictures.slots import COMMITTED, EMPTY, NEW, REFUSED, moved, slot_map

import eagle3_jax as e3
from eagle3_jax import loop as loops
from eagle3_jax.cache import KeyValues
from eagle3_jax.drafters import Eagle3Drafter, Plain
from eagle3_jax.files.sources import bundled
from eagle3_jax.measure.timing import CompileClock
from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment
from eagle3_jax.tree import ancestor_mask, causal_mask, depths

target = e3.load_target()
drafter = e3.load_drafter(target=target)
K = 4
decoder = e3.SpeculativeDecoder(target, drafter, num_speculative_tokens=K, stop_tokens=())
rows = [json.loads(line) for line in bundled("prompts.jsonl").read_text().splitlines()]
sizes = (14, 18, 16, 22)
prompts = [
    target.tokenizer.encode(row["prompt"]).ids[:size]
    for row, size in zip(rows[::9], sizes, strict=False)
]
state = decoder.prefill(prompts, max_new_tokens=40)

# %% [markdown]
# ## Committed slots
#
# Attention needs the keys and values of all earlier tokens. The target and the head each keep them
# in a cache. A cache has a buffer of fixed size per layer and one number per row: `length[b]`, the
# number of **committed** slots of row `b`. Attention ignores all slots past `length`.


# %%
def buffers(cache):
    layer = cache.layers[0]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))
    return (
        f"{len(cache.layers):2} layers of keys and values {layer.keys.shape}, {size / 1e6:.2f} MB"
    )


B, C, S, H = state.cache.layers[0].keys.shape
print("target:", buffers(state.cache))
print("head:  ", buffers(state.drafter.cache))
ours = state.cache.length
heads = state.drafter.cache.length
print("lengths: text", state.length, " target's cache", ours, " head's cache", heads)
assert np.array_equal(ours, state.length - 1), "all tokens except the root"
assert np.array_equal(heads, ours), "one pair for each token that the target has processed"
assert len(state.cache.layers) == 12 * len(state.drafter.cache.layers)

# %% [markdown]
# Slot `t` of the target's cache belongs to token `x_t`. Slot `t` of the head's cache belongs to the
# pair `(f_t, x_{t+1})`. Both caches are one shorter than the text. The target has chosen the last
# token, the **root**, but has not processed it yet.
#
# ## One round, step by step
#
# `decoder.step` is one compiled program. The cell runs its parts one after the other and reads both
# caches after each part. A slot was written if its keys are not all zero. The prefill ran a block
# of 32 tokens, so the cell first sets the padding after the prompt to zero.


# %%
def wiped(cache, value=0.0):
    """The cache with every uncommitted slot set to one value."""
    known = (jnp.arange(S) < cache.length[:, None])[:, None, :, None]
    layers = jax.tree.map(lambda leaf: jnp.where(known, leaf, value), cache.layers)
    return cache.replace(layers=layers)


def wiped_both(state, value=0.0):
    head = state.drafter.replace(cache=wiped(state.drafter.cache, value))
    return state.replace(cache=wiped(state.cache, value), drafter=head)


def status(layer, before, after, row):
    """Content of each slot of a row, read from its keys."""
    written = np.abs(np.asarray(layer.keys[row])).max(axis=(0, 2)) > 0
    slot = np.arange(len(written))
    kind = np.where(written, REFUSED, EMPTY)
    kind = np.where(slot < int(after[row]), NEW, kind)
    return np.where(slot < int(before[row]), COMMITTED, kind)


state = wiped_both(state)
loop = decoder.loop
params = decoder.params
n = state.cache.length
draft = loop.drafter.propose(params.drafter, state.drafter, state.keys, state.sampling)
mask = causal_mask(K + 1)
positions = n[:, None] + jnp.arange(K + 1)
out = loop.target(
    params.target, draft.tokens, positions, mask, state.cache, aux_layers=loop.drafter.aux_layers
)
best = jnp.argmax(target.model.unembed(target.params, out.final), axis=-1)
verdict = e3.verify_greedy(draft, best, max_depth=K)
count = verdict.num_accepted + 1  # accepted tokens and the root
after = state.cache.commit(out.written, count)
seen = e3.Observation(
    tokens=draft.tokens, features=out.features, length=count, next_token=verdict.next_token
)
observed = loop.drafter.observe(params.drafter, draft.state, seen)


def first(cache):
    return cache.layers[0]


guessed = first(draft.state.cache)
written = type(first(state.cache))(**out.written[0]._asdict())
head_layers = [first(state.drafter.cache), guessed, guessed, first(observed.cache)]
target_layers = [first(state.cache), first(state.cache), written, first(after)]
lengths = [n, n, n, after.length]
names = ["before", "propose", "verify", "commit, observe"]
# A row with a partly rejected draft.
row = int(np.argmax((verdict.num_accepted > 0) & (verdict.num_accepted < K)))
print("accepted of", K, "draft tokens:", verdict.num_accepted, "  lengths", n, "->", after.length)
assert 0 < int(verdict.num_accepted[row]) < K
assert np.array_equal(observed.cache.length, after.length)
assert np.array_equal(after.length, n + verdict.num_accepted + 1)

# %% tags=["hide-input"]
low = int(n[row]) - 4
fig, axes = plt.subplots(2, 1, figsize=(7.6, 4.2), sharex=True)
for ax, layers, title in zip(
    axes, (head_layers, target_layers), ("Head's cache", "Target's cache"), strict=True
):
    shown = np.stack(
        [status(layer, n, end, row) for layer, end in zip(layers, lengths, strict=True)]
    )
    slot_map(
        shown[:, low : low + 14], ax=ax, first=low, rows=names, title=title, legend=ax is axes[0]
    )
axes[0].set_xlabel("")
plt.show()

# %% [markdown]
# - **propose**: the head drafts `K` tokens. It writes `K − 1` slots after its committed ones. The
#   target has not run.
# - **verify**: the target writes the root and all `K` draft tokens after its committed slots. It
#   attends over the whole buffer under one mask.
# - **commit**: `length` increases by the number of accepted tokens plus one for the root. No slot
#   is erased or copied.
# - **observe**: the head runs over the committed pairs again, with the target's features. This
#   overwrites the slots written by `propose`. Then the head's `length` increases.
#
# **Exercise: the mask of verification.** The block has `T` tokens: the root and the draft. Token
# `t` of the block is written to slot `length + t`. It attends to all committed slots, and to the
# tokens of the block that `block` allows. For a chain, `block` is the causal mask; notebook
# [05](05_draft_trees.ipynb) has the one of a tree.


# %%
def cache_mask(length, block, capacity):
    """Returns the slots that each token of the block attends to, `[T, capacity]` of booleans.

    Args:
        length: Number of committed slots.
        block: `[T, T]`, the tokens of the block that each token attends to.
        capacity: Number of slots of the cache.
    """
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def cache_mask_answer(length, block, capacity):
    mask = np.zeros((len(block), capacity), bool)
    mask[:, :length] = True
    mask[:, length : length + len(block)] = block
    return mask


# %%
def check_cache_mask(cache_mask):
    for length, size in ((5, 3), (0, 4), (9, 1)):
        block = np.tril(np.ones((size, size), bool))
        mask = np.asarray(cache_mask(length, block, 12))
        assert mask.shape == (size, 12), "a row for each token of the block, a column for each slot"
        assert mask[:, :length].all(), "every token attends to all committed slots"
        assert not mask[:, length + size :].any(), "no token attends to a slot after the block"
        assert np.array_equal(mask[:, length : length + size], block), (
            "in the block, `block` decides"
        )
        theirs = nano.cache_mask(length, jnp.array(block), 12)
        assert np.array_equal(mask, theirs), "cache_mask of nano_eagle3.py is another mask"


cache_mask = checked(cache_mask, cache_mask_answer, check_cache_mask)

# %% [markdown]
# There is no rollback. A rejected draft token is in a slot past `length`, and the next round
# overwrites it. The plot shows up to twelve rounds.

# %%
state = wiped_both(decoder.prefill(prompts, max_new_tokens=40))
histories = ([], [])
lengths = []
start = np.asarray(state.cache.length)
while np.any(state.running) and len(lengths) < 12:
    before = np.asarray(state.cache.length)
    state = decoder.step(state).state
    lengths.append(np.asarray(state.length))
    for history, cache in zip(histories, (state.drafter.cache, state.cache), strict=True):
        history.append(status(cache.layers[0], before, cache.length, row))

assert np.array_equal(histories[0], histories[1]), (
    "both caches have the same slots in the same states"
)
grown = np.diff(np.stack([start + 1, *lengths]), axis=0)
assert all(len(set(steps)) > 1 for steps in grown), "every row advances at its own pace"

# %% tags=["hide-input"]
low = int(start[row]) - 3
high = int(lengths[-1][row]) + K + 1
fig, ax = plt.subplots(figsize=(8.2, 3.6))
rounds = [str(number) for number in range(1, len(lengths) + 1)]
slot_map(
    np.stack(histories[1])[:, low:high],
    ax=ax,
    first=low,
    rows=rounds,
    title="Both caches after each round",
)
ax.set_ylabel("round")
plt.show()

# %% [markdown]
# ## Rejected drafts and uncommitted slots
#
# **Uncommitted slots are never read.** After the prefill, the cell fills every slot past `length`
# in both caches with 10⁴. The tokens and the bits of every committed slot must stay the same.


# %%
def finished(decoder, prompts, spoil=None, **options):
    state = decoder.prefill(prompts, **options)
    state = state if spoil is None else wiped_both(state, spoil)
    while np.any(state.running):
        state = decoder.step(state).state
    return state


def known(cache):
    """Every committed key and value, layer after layer, as numpy arrays."""
    lengths = np.asarray(cache.length)
    leaves = [np.asarray(leaf) for layer in cache.layers for leaf in (layer.keys, layer.values)]
    return [leaf[row, :, :end] for leaf in leaves for row, end in enumerate(lengths)]


def same_bits(first_cache, second_cache):
    return all(
        np.array_equal(a, b) for a, b in zip(known(first_cache), known(second_cache), strict=True)
    )


clean = finished(decoder, prompts, max_new_tokens=40)
spoilt = finished(decoder, prompts, spoil=1e4, max_new_tokens=40)
assert np.array_equal(clean.tokens, spoilt.tokens)
assert same_bits(clean.cache, spoilt.cache) and same_bits(clean.drafter.cache, spoilt.drafter.cache)
compared = sum(leaf.size for leaf in known(clean.cache))
print(f"filled slots changed no token and none of {compared:,} numbers of the target's cache")

# %% [markdown]
# **A chain and plain decoding are equal bit for bit.** `Plain(num_nodes=K+1)` decodes without a
# drafter in blocks of the same shape, with padding after the root. Every key and value of every
# layer equals that of the chain. So rejected tokens did not change any committed slot. A prefill of
# the whole text is a program of another shape. Its numbers agree up to rounding.

# %%
matched = finished(
    e3.SpeculativeDecoder(target, Plain(num_nodes=K + 1), stop_tokens=()),
    prompts,
    max_new_tokens=40,
)
stats = e3.SpeculationStats.merge([clean.stats])
print(f"accepted {stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens")
assert np.array_equal(clean.tokens, matched.tokens) and same_bits(clean.cache, matched.cache)
assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens

lengths = np.asarray(clean.cache.length).tolist()
text = [np.asarray(clean.tokens[row, :end]).tolist() for row, end in enumerate(lengths)]
fresh = decoder.prefill(text, max_new_tokens=1)


def apart(first_cache, second_cache):
    """Largest difference, relative to the largest entry."""
    pairs = zip(known(first_cache), known(second_cache), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


for name, ours, theirs in (
    ("target", clean.cache, fresh.cache),
    ("head", clean.drafter.cache, fresh.drafter.cache),
):
    print(f"{name:7} largest relative difference from a fresh prefill: {apart(ours, theirs):.1e}")
    assert apart(ours, theirs) < 1e-4

# %% [markdown]
# ## Commit of a tree path
#
# The nodes of a tree are written to consecutive slots, in the order of their numbers. The accepted
# path is usually not at the front. `commit` moves it to the front: it reads all slots of the path,
# then writes them. The rotary position of a node is `length + depth`, so siblings share a position.
# After the move, slot and position agree again.
#
# **Exercise: the commit.** The target has written node `i` to slot `length + i`. The accepted path
# starts with the root, node 0. Slots after the new length may hold anything.


# %%
def commit(keys, length, path):
    """Returns the keys after a commit, and the new length.

    Args:
        keys: `[S, ...]`, one layer of the cache of one text.
        length: Number of committed slots before the round.
        path: Accepted nodes from the root on, in order, such as `[0, 2, 5]`.
    """
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def commit_answer(keys, length, path):
    after = keys.copy()
    after[length : length + len(path)] = keys[length + np.array(path)]
    return after, length + len(path)


# %%
def check_commit(commit):
    keys = np.arange(20.0)[:, None] * np.ones(2)  # slot s holds the number s
    for length, path in ((6, [0, 2, 5]), (6, [0]), (0, [0, 1, 2, 3]), (10, [0, 4, 6, 9])):
        after, new_length = commit(keys.copy(), length, path)
        slots = np.asarray(after)[:new_length, 0].astype(int).tolist()
        assert new_length == length + len(path), "the root and the accepted nodes are committed"
        assert slots[:length] == list(range(length)), "committed slots do not change"
        expected = [length + node for node in path]
        assert slots[length:] == expected, (
            f"path {path}, length {length}: slots {expected} move to the front"
        )


commit = checked(commit, commit_answer, check_commit)

# %% [markdown]
# The next cell takes a round of a real tree. It compares your commit with the library's, in every
# layer.

# %%
TREE = e3.DynamicTree(num_nodes=16, max_depth=5, top_k=4)
trees = e3.SpeculativeDecoder(target, drafter, tree=TREE, stop_tokens=())
state = wiped_both(trees.prefill(prompts, max_new_tokens=40))
has_gap = False
while not has_gap:
    running = np.asarray(state.running)
    assert running.any(), "no path with a gap"
    saved = jax.tree.map(jnp.copy, state)  # the step consumes its state
    played = trees.step(state)
    state = played.state
    paths = [[0, *nodes[nodes >= 0].tolist()] for nodes in np.asarray(played.verdict.path)]
    row = max(np.flatnonzero(running), key=lambda row: paths[row][-1] - len(paths[row])).item()
    path = paths[row]
    has_gap = len(path) >= 4 and path != list(range(len(path)))

mask = ancestor_mask(played.draft.parents, TREE.max_depth)
out = trees.loop.target(target.params, played.draft.tokens, played.positions, mask, saved.cache)
count = played.verdict.num_accepted + 1
committed = saved.cache.commit(
    out.written, count, jnp.maximum(jnp.pad(played.verdict.path, ((0, 0), (1, 0))), 0)
)
n = int(saved.cache.length[row])
for written, layer in zip(out.written, committed.layers, strict=True):
    keys, new_length = commit(np.asarray(written.keys[row]).swapaxes(0, 1), n, path)
    library = np.asarray(layer.keys[row]).swapaxes(0, 1)
    assert np.array_equal(keys[:new_length], library[:new_length]), (
        "your commit and the library's, bit for bit"
    )
    assert np.array_equal(
        library[n:new_length], np.asarray(written.keys)[row, :, n + np.array(path)]
    ), "the bits do not change"
level = np.asarray(depths(mask))[row]
places = np.asarray(played.positions)[row]
assert np.array_equal(places, n + level), "position = length + depth"
assert len(set(places.tolist())) <= TREE.max_depth + 1 < TREE.num_nodes
grown_in_trees = finished(trees, prompts, max_new_tokens=40)
assert np.array_equal(grown_in_trees.tokens[:, :60], clean.tokens[:, :60]), "the same texts"
assert apart(grown_in_trees.cache, clean.cache) < 1e-4, "equal up to rounding"
print("accepted path:", path)

# %% tags=["hide-input"]
moved(path, TREE.num_nodes, first=n, title="Commit of the accepted path (green); × is ignored")

# %% [markdown]
# ## Updates in place, one compilation
#
# The caches are the largest arrays after the weights. `step` *donates* its state: the input buffers
# become the output buffers. The cell checks this in three ways. The address of a buffer stays the
# same. The input array is deleted. The compiler reports how many bytes of its inputs are reused as
# outputs.
#
# A program is compiled for fixed shapes. A prompt of up to 64 tokens is padded to 16, 32 or 64, a
# longer one to a multiple of 128. A row of a cache holds the padded prompt or the whole text,
# whichever is longer, and a draft, rounded up to a multiple of 128 slots. The lengths and limits
# themselves are data. So all prompts of one size class share their programs, and another size class
# compiles again.

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
assert all(leaf.is_deleted() for leaf in old), "the input array is deleted"

jaxtyping.config.update("jaxtyping_disable", True)  # lowering puts shapes into typed structures
compiled = loops.step.lower(decoder.loop, decoder.params, state).compile().memory_analysis()
jaxtyping.config.update("jaxtyping_disable", False)
size = sum(leaf.nbytes for leaf in new)
alias = compiled.alias_size_in_bytes
scratch = compiled.temp_size_in_bytes
print(
    f"caches {size / 1e6:.2f} MB, updated in place {alias / 1e6:.2f} MB, scratch"
    f" {scratch / 1e6:.2f} MB"
)
assert compiled.alias_size_in_bytes >= size

clocks = []
for batch in (
    [(prompts[0], 8, 0)],  # 14 tokens, padded to 16; rows of 128 slots
    # at most 16 tokens: the same
    [(prompts[1][:9], 30, 1), (prompts[2][:3], 50, 2), (prompts[2], 90, 3)],
    [(prompts[3], 8, 0)],  # 22 tokens, padded to 32
    [(prompts[0], 120, 0)],  # rows of 256 slots
):
    with CompileClock() as clock:
        for prompt, limit, seed in batch:
            decoder.generate(prompt, max_new_tokens=limit, seed=seed)
    clocks.append(clock.programs)
first_prompt, same_class, longer_prompt, higher_limit = clocks
print(f"compiled programs: first prompt {first_prompt}, three more of its size class {same_class}")
print(f"another size class: longer prompt {longer_prompt}, higher limit {higher_limit}")
assert same_class == 0 < min(first_prompt, longer_prompt, higher_limit), (
    "one set of programs for a size class"
)

# %% [markdown]
# ## Cache memory per token
#
# The head's cache has the size of one layer of the target's cache. A layer needs `2·C·H` numbers
# per token (`C` key heads of `H` numbers, keys and values). The cell compares the formula with the
# buffers of the shipped pair. For large models the head's share is small.

# %%
shipped = (target.model.config, drafter.drafter.config, "float32")
models = {name: KNOWN_MODELS[name] for name in ("Llama-3.1-8B", "Llama-3.3-70B")}
named = {name: (model, usual_head(model), "bfloat16") for name, model in models.items()}
print(
    f"{'':16}{'cache':>10}{'target, bytes':>16}{'head, bytes':>14}{'head/target':>13}"
    f"{'head, 8 x 8192 tokens':>24}"
)
share_of_head = {}
for name, (big, small, kind) in ({"shipped pair": shipped} | named).items():
    plan = Deployment(target=big, head=small, accelerator=accelerator_named("H200"), cache=kind)
    ours = plan.cache_bytes_per_token(big)
    extra = plan.cache_bytes_per_token(small)
    print(
        f"{name:16}{kind:>10}{ours:>16,.0f}{extra:>14,.0f}{extra / ours:>13.1%}"
        f"{extra * 8 * 8192 / 1e6:>21,.0f} MB"
    )
    share_of_head[name] = extra / (ours + extra)
    assert extra * big.num_layers == ours, "one layer of the target's shape"
    assert extra > 0
    if name == "shipped pair":
        caches = (state.cache, state.drafter.cache)
        real = [sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers)) for cache in caches]
        assert [
            ours * len(prompts) * S,
            extra * len(prompts) * S,
        ] == real, "the formula gives the size of the real buffers"

# %% [markdown]
# ## Common mistakes
#
# **Rolling back a tree by length only.** This is correct for a chain. For a tree, the committed
# slots then hold the nodes with the lowest numbers instead of the accepted path. The target's cache
# is wrong, so the **text** changes.

# %%
long = [target.tokenizer.encode(row["prompt"]).ids for row in rows[::8]]
plain = e3.SpeculativeDecoder(target, stop_tokens=()).generate(long, max_new_tokens=61)
tree_text = trees.generate(long, max_new_tokens=61)


def commit_by_length(self, written, length, count, nodes=None):
    """The bug: the slots stay where they were written."""
    return KeyValues(keys=written.keys, values=written.values)


with mock.patch.object(KeyValues, "commit", commit_by_length):
    jax.clear_caches()  # compiled programs contain the right commit
    by_length = trees.generate(long, max_new_tokens=61)
jax.clear_caches()


def parted(tokens):
    """For every text, the index of the first token that differs from plain decoding."""
    pairs = [
        list(zip(ours, theirs, strict=True))
        for ours, theirs in zip(tokens, plain.tokens, strict=True)
    ]
    return [next((index for index, (a, b) in enumerate(text) if a != b), None) for text in pairs]


print("first wrong token, with commit of the path:", parted(tree_text.tokens))
print("first wrong token, rolled back by length:  ", parted(by_length.tokens))
print(
    f"τ {tree_text.stats.mean_acceptance_length:.2f} and"
    f" {by_length.stats.mean_acceptance_length:.2f}"
)
assert (
    parted(by_length.tokens).count(None) <= len(long) // 2 < parted(tree_text.tokens).count(None)
), "the bug changes the text"

# %% [markdown]
# **Skipping `observe` for accepted tokens.** A head without the target's features lowers τ
# ([03](03_eagle3_head.ipynb)). A weaker form is harder to find: the head runs on the pairs again,
# but its cache keeps the keys and values written while drafting. τ hardly changes. A comparison of
# the cache with that of a fresh prefill shows the bug.


# %%
class KeepsGuesses(Eagle3Drafter):
    def observe(self, params, state, seen):
        after = super().observe(params, state, seen)
        slot = jnp.arange(state.cache.layers[0].capacity)[None, :]
        n = state.cache.length[:, None]

        # Accepted tokens that the head processed while drafting keep their slots.
        guesses = jnp.minimum(seen.length - 1, self.max_depth - 1)[:, None]
        guessed_slots = ((slot >= n) & (slot < n + guesses) & (n > 0))[:, None, :, None]
        layers = jax.tree.map(
            lambda old, new: jnp.where(guessed_slots, old, new),
            state.cache.layers,
            after.cache.layers,
        )
        return after.replace(cache=after.cache.replace(layers=layers))


fields = {
    field.name: getattr(drafter.drafter, field.name) for field in dataclasses.fields(Eagle3Drafter)
}
keeping = e3.SpeculativeDecoder(
    target,
    e3.LoadedDrafter(KeepsGuesses(**fields), drafter.params),
    num_speculative_tokens=K,
    stop_tokens=(),
)
kept_state = finished(keeping, prompts, max_new_tokens=40)
taus = []
gaps = []
for name, finished_state in (("observed again", clean), ("draft entries", kept_state)):
    taus.append(e3.SpeculationStats.merge([finished_state.stats]).mean_acceptance_length)
    gaps.append(apart(finished_state.drafter.cache, fresh.drafter.cache))
    print(
        f"{name:15} τ {taus[-1]:.2f}; relative difference of the head's cache from a fresh one"
        f" {gaps[-1]:.1e}"
    )
assert np.array_equal(kept_state.tokens, clean.tokens)
assert abs(taus[1] - taus[0]) < 0.5 and gaps[1] > 0.01 > 100 * gaps[0], (
    "τ does not show the bug, the cache does"
)

# %% [markdown]
# **Using a state twice.** `step` has donated its buffers. The decoder raises an error.

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
# ## Questions
#
# **1.** Eight prompts of 300 tokens, 200 new tokens each, K = 5, float32: how long are the rows of
# the caches, and how much memory do the caches of the shipped pair take?
#
# <details><summary>Answer</summary>
#
# A row holds the prompt, the new tokens, and a root with a whole draft: 300 + 200 + 6 = 506 slots,
# rounded up to 512. There are 13 layers, with keys and values, 2 heads of 64 numbers, 4 bytes each:
# 13 · 2 · 2 · 64 · 4 · 512 · 8 bytes = 54.5 MB.
#
# </details>
#
# **2.** For a chain of `K` the head writes `K − 1` slots. How many does it write for the tree above
# with 16 nodes?
#
# <details><summary>Answer</summary>
#
# 16. It runs on every node that can have children: 4 on each level except the last.
#     `TREE.num_expanded` is this number.
#
# </details>
#
# **3.** By how many percent does a head reduce the number of tokens that fit into a given cache
# memory of Llama-3.3-70B?
#
# <details><summary>Answer</summary>
#
# By 1.2 %. The target's cache has 80 layers, both caches together have 81: 1 − 80/81 = 1.2 %.
#
# </details>

# %%
shapes = [
    jax.eval_shape(lambda: target.model.init_cache(8, 512)),
    jax.eval_shape(lambda: loop.drafter.init(None, 8, 512).cache),
]
leaves = [leaf for cache in shapes for leaf in jax.tree.leaves(cache.layers)]
taken = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
assert taken == 13 * 2 * 2 * 64 * 4 * 512 * 8 and round(taken / 1e6, 1) == 54.5
assert TREE.num_expanded == 16 == TREE.num_nodes and e3.Chain(K).num_expanded == K - 1
share = share_of_head["Llama-3.3-70B"]
print(f"question 3: {share:.1%}")
assert abs(share - 1 / 81) < 1e-9

# %% [markdown]
# ## Checked claims
#
# - For a text of `n` tokens, both caches have `n − 1` committed slots in every row. After every
#   round, the same slots of both caches are in the same state.
# - Slots past `length` are never read. Other values in them change no token and no bit.
# - The keys and values of a chain equal those of plain decoding in blocks of the same shape, bit
#   for bit. They equal those of a fresh prefill to 10⁻⁴.
# - The mask of verification equals that of `nano_eagle3.py`. The commit written by hand equals the
#   library's, bit for bit.
# - `commit` moves the path of a tree without changing its bits. Nodes of one level share a rotary
#   position.
# - Both caches are updated in place, and one set of programs serves all prompts of a size class.
# - The head's cache has the size of one layer of the target's. The formula gives the size of the
#   real buffers.
# - A tree rolled back by length only changes the text. A head that keeps the entries of its draft
#   changes the cache, not the text. A used state raises an error.
#
# **Next:** [05](05_draft_trees.ipynb), draft trees.
