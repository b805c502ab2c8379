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
# # 05 · Draft trees
#
# In a chain, the first rejected token also rejects all later ones. A tree drafts several
# continuations. One forward pass of the target verifies all of them. After this notebook you can
#
# - build the dynamic tree of EAGLE-2, level by level, equal to the library's draft;
# - read an ancestor mask, and name the position of each node;
# - classify every node of a round as accepted, rejected or never visited;
# - compare the gain of a larger tree (τ) with its cost (v);
# - write the loop that joins all parts, and compare it with a decoder in one file.
#
# The notebook takes two to three minutes on two CPU cores. It needs only
# `pip install -e '.[notebooks]'`. It uses the small pair of the package, and for one picture the
# chat model, which is downloaded once (93 MB). Read [01](01_memory_bound_decoding.ipynb),
# [02](02_speculative_sampling.ipynb) and [03](03_eagle3_head.ipynb) first.
#
# **Exercises** work as in [00](00_watch_it_draft.ipynb): write a function, or use its answer.

# %% tags=["hide-input"]
import first_cell

first_cell.start()

import dataclasses
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import nano_eagle3 as nano  # examples/nano_eagle3.py: the whole method in one file
import numpy as np
from chat import load_chat
from exercises import checked
from pictures import style, trees
from pictures.moving import Moving

import eagle3_jax as e3
from eagle3_jax.bench.step_costs import target_seconds
from eagle3_jax.drafters.eagle3 import Eagle3Head
from eagle3_jax.measure import trace
from eagle3_jax.models.context import BlockContext
from eagle3_jax.models.functional import bind
from eagle3_jax.models.layers import embed
from eagle3_jax.prompts import benchmark
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.bounds import round_bound
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment
from eagle3_jax.tree import ancestor_mask, causal_mask, depths

target = e3.load_target()
head = e3.load_drafter(target=target)
tokenizer = target.tokenizer
config = head.drafter.config
texts = benchmark.shipped()
prompt = tokenizer.encode(texts[34]).ids[-64:]
print(tokenizer.decode(prompt))
print(
    f"{len(prompt)} tokens; target vocabulary {target.vocab_size}, draft vocabulary"
    f" {config.draft_vocab_size}"
)

# %% [markdown]
# ## Dynamic trees
#
# Three numbers describe a dynamic tree. The values below are those of the official code.
#
# - `num_nodes`: nodes that the target verifies, root included;
# - `max_depth`: levels below the root;
# - `top_k`: expanded nodes per level, and children per expanded node.

# %%
TREE = e3.DynamicTree(num_nodes=60, max_depth=8, top_k=10)
decoder = e3.SpeculativeDecoder(target, head, tree=TREE)
NEW = 24

rounds = []  # for every round: the text before it, its draft, and the verdict
known = list(prompt)
state = decoder.prefill([prompt], max_new_tokens=NEW)
known.append(int(state.tokens[0, len(prompt)]))
while bool(state.running[0]):
    latest = decoder.step(state)
    state = latest.state
    draft = latest.draft
    verdict = latest.verdict
    path = [int(node) for node in verdict.path[0] if node >= 0]
    rounds.append(
        {
            "known": list(known),
            "tokens": np.asarray(draft.tokens[0]),
            "parents": np.asarray(draft.parents[0]),
            "positions": np.asarray(latest.positions[0]),
            "path": path,
            "next": int(verdict.next_token[0]),
        }
    )
    known += [*rounds[-1]["tokens"][path].tolist(), rounds[-1]["next"]]

plain = e3.SpeculativeDecoder(target).generate([prompt], max_new_tokens=NEW).tokens[0]
assert known[len(prompt) :][:NEW] == plain, "a tree never changes the text"
lengths = [len(round_["path"]) + 1 for round_ in rounds]
print(f"{len(rounds)} rounds for {NEW} tokens; tokens per round: {lengths}")

# %% [markdown]
# ## EAGLE-2 tree construction
#
# The score of a node is the *sum* of the head's log-probabilities on its path. It estimates the
# log-probability that verification accepts the whole path.
#
# 1. Take the `top_k` most likely tokens after the root: the first level.
# 2. Run the head on the `top_k` best nodes of the latest level, and score the `top_k` children of
#    each.
# 3. Repeat step 2 down to `max_depth`. All scored nodes form a pool.
# 4. Keep the `num_nodes - 1` best nodes of the pool, in the order in which they were scored.
#
# The library runs the head on a level in one forward pass, with a tree mask over its cache. In this
# notebook every node is a row with the whole text before it, without a cache or a tree mask.
# `run_head` runs the network. All other code is numpy.
#
# **Exercise: step 4.** `scores` and `parents` describe the pool, in the order in which its nodes
# were scored. A parent of −1 is the root. In the draft, the root is node 0 and the kept nodes
# follow it. So their parents get new numbers. Of equal scores, the earlier node is kept.


# %%
def keep_best(scores, parents, count):
    """Returns the pool indices of the kept nodes in ascending order, and their new parents.

    Args:
        scores: Scores of the pool, `[P]`.
        parents: Pool indices of the parents, `[P]`; −1 is the root.
        count: Number of nodes to keep, without the root.
    """
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def keep_best_answer(scores, parents, count):
    chosen = np.sort(np.argsort(-np.asarray(scores), kind="stable")[:count])
    number = {-1: 0} | {int(entry): node for node, entry in enumerate(chosen, start=1)}
    return chosen, np.array([number[int(parents[entry])] for entry in chosen])


# %%
def check_keep_best(keep_best):
    parents = np.array([-1, -1, -1, 0, 0, 2, 3, 5])
    scores = np.array([-0.5, -2.0, -1.0, -0.7, -1.0, -1.2, -0.9, -3.0])
    chosen, new_parents = keep_best(scores, parents, 5)
    assert len(chosen) == len(new_parents) == 5, "five nodes are kept"
    assert set(np.asarray(chosen).tolist()) == {
        0,
        2,
        3,
        4,
        6,
    }, "the five highest scores are those of 0, 2, 3, 4, 6"

    assert list(chosen) == [0, 2, 3, 4, 6], "kept nodes stay in the order in which they were scored"
    assert list(new_parents) == [
        0,
        0,
        1,
        1,
        3,
    ], "parents are numbers of the draft: node 3 of the pool is node 3"

    chosen, _ = keep_best(np.array([-1.0, -1.0, -1.0]), np.array([-1, 0, 1]), 2)
    assert list(chosen) == [0, 1], "of equal scores, the earlier node is kept"


keep_best = checked(keep_best, keep_best_answer, check_keep_best)

# %%
# room for text and guesses: one shape, one compilation
SIZE = len(prompt) + NEW + TREE.max_depth + 8
POSITIONS = jnp.arange(SIZE, dtype=jnp.int32)[None]


@jax.jit
def fused_features(tokens):
    """The target's features after `fc` at every position, [1 S D]."""
    out = target.model(
        target.params, tokens, POSITIONS, causal_mask(SIZE), aux_layers=config.aux_layers
    )
    return bind(Eagle3Head, config, head.drafter.precision, head.params["head"]).fuse(out.features)


@jax.jit
def run_head(tokens, stream, last):
    """Log-probabilities [R W] and outputs [R D] after column `last` of tokens [R S]."""
    network = bind(Eagle3Head, config, head.drafter.precision, head.params["head"])
    embedded = embed(head.params["embedding"], tokens, head.drafter.precision)
    positions = jnp.broadcast_to(POSITIONS, tokens.shape)
    outputs, _ = network(embedded, stream, positions, [BlockContext(mask=causal_mask(SIZE))])
    newest = jnp.take(outputs, last, axis=1)
    return jax.nn.log_softmax(network.logits(newest[:, None])[:, 0]), newest


def after_root(known):
    """Rows for run_head: pairs (feature of t, token t + 1) of the text, once per expanded node."""
    n = len(known) - 1  # the last token is the root: chosen, but not yet processed by the target
    padded = np.zeros((1, SIZE), np.int32)
    padded[0, :n] = known[:-1]
    tokens = np.zeros((TREE.top_k, SIZE), np.int32)
    tokens[:, :n] = known[1:]
    stream = np.repeat(np.asarray(fused_features(padded)), TREE.top_k, axis=0)
    return n, tokens, stream


def best(values, count):
    """Indices of the largest values. Of equal values, the lower index comes first."""
    return np.argsort(-values, kind="stable")[:count]


# %%
to_target = np.asarray(head.params["draft_to_target"])


def dynamic_tree(known, topology):
    """Tokens, parents, scores and probabilities of a dynamic tree, and the scores of the pool."""
    n, tokens, stream = after_root(known)
    logq, outputs = (np.array(x) for x in run_head(tokens, stream, n - 1))

    first = best(logq[0], topology.top_k)
    # score, token, parent in the pool, its own ln q
    pool = [(logq[0, i], to_target[i], -1, logq[0, i]) for i in first]
    # Pool indices of the nodes that are expanded next, and the row of run_head that each continues.
    frontier = np.arange(topology.top_k)
    rows = np.zeros(topology.top_k, int)

    for level in range(1, topology.max_depth):
        # The draft token replaces the token. The head's output at its parent replaces the feature.
        tokens = tokens[rows]
        stream = stream[rows]
        tokens[:, n - 1 + level] = [pool[node][1] for node in frontier]
        stream[:, n - 1 + level] = outputs[rows]
        logq, outputs = (np.array(x) for x in run_head(tokens, stream, n - 1 + level))

        # Each new node has the sum of ln q on its path as its score.
        start = len(pool)
        for row, node in enumerate(frontier):
            pool += [
                (np.float32(pool[node][0] + logq[row, i]), to_target[i], node, logq[row, i])
                for i in best(logq[row], topology.top_k)
            ]

        frontier = start + best(np.array([entry[0] for entry in pool[start:]]), topology.top_k)
        rows = (frontier - start) // topology.top_k

    # Of the whole pool, the best nodes are the draft.
    scores = np.array([entry[0] for entry in pool])
    chosen, parents = keep_best(
        scores, np.array([entry[2] for entry in pool]), topology.num_nodes - 1
    )

    return {
        "tokens": np.array([known[-1], *(pool[entry][1] for entry in chosen)]),
        "parents": np.array([-1, *parents]),
        "score": np.array([0.0, *scores[chosen]]),
        "q": np.exp([0.0, *(pool[entry][3] for entry in chosen)]),
        "pool": np.sort(scores)[::-1],
    }


by_hand = [dynamic_tree(round_["known"], TREE) for round_ in rounds]
for built, theirs in zip(by_hand, rounds, strict=True):
    assert (built["tokens"] == theirs["tokens"]).all(), "tokens differ"
    assert (built["parents"] == theirs["parents"]).all(), "parents differ"
closest = min(
    built["pool"][TREE.num_nodes - 2] - built["pool"][TREE.num_nodes - 1] for built in by_hand
)
assert closest > 1e-4, "the choice of the last node does not depend on rounding"
print(f"{len(rounds)} trees of {TREE.num_nodes} nodes: tokens and parents are equal")
print(
    f"pool of {TREE.num_candidates} scored nodes; smallest gap between the last kept and the first"
    f" dropped: {closest:.5f}"
)

for built in by_hand:
    below = np.arange(1, TREE.num_nodes)
    assert (built["score"][below] <= built["score"][built["parents"][below]]).all()
    assert (built["parents"][below] < below).all(), "every parent comes before its children"

# %% [markdown]
# Step 4 never keeps a node without its parent. A log-probability is at most 0, so scores never rise
# along a path. Of equal scores, step 4 keeps the earlier node in the pool, and parents come before
# their children.
#
# ## Tree attention mask
#
# The target verifies all 60 nodes in one forward pass. Each node may attend to the text, its
# ancestors and itself. Its *position* is the root's position plus its depth. So all nodes of a
# level share a position.
#
# **Exercise: the ancestor mask.** A parent has a lower number than its children.


# %%
def ancestors(parents):
    """Returns which nodes each node attends to, `[N, N]`. `parents` is `[N]`, −1 at the root."""
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def ancestors_answer(parents):
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


# %%
def check_ancestors(ancestors):
    parents = np.array([-1, 0, 0, 1, 1, 2, 3])
    mask = np.asarray(ancestors(parents))
    assert mask.shape == (7, 7), "a row and a column for each node"
    assert mask.diagonal().all(), "every node attends to itself"
    assert not np.triu(mask, 1).any(), "no node attends to a later one"
    assert not mask[2, 1], "node 2 does not attend to its sibling, node 1"
    assert mask[6, 1] and mask[6, 0], "node 6 attends to all its ancestors: 3, 1 and 0"
    theirs = nano.ancestors(jnp.array(parents), 3)
    assert np.array_equal(mask, theirs), "ancestors of nano_eagle3.py is another mask"


ancestors = checked(ancestors, ancestors_answer, check_ancestors)

# %%
round_ = max(rounds, key=lambda round_: len(round_["path"]))
mask = np.asarray(ancestors(round_["parents"]))
library = ancestor_mask(jnp.asarray(round_["parents"])[None], TREE.max_depth)[0]
assert np.array_equal(mask, library), "your mask and the library's"
level = np.asarray(depths(jnp.asarray(mask)[None]))[0]
pieces = [tokenizer.decode([int(token)]) for token in round_["tokens"]]
assert (round_["positions"] == len(round_["known"]) - 1 + level).all(), (
    "a node's position is the root's position plus its depth"
)
assert (mask.sum(axis=1) == level + 1).all(), (
    "a node attends to one node of each level, from the root to its own"
)
assert (mask & (level[:, None] == level[None, :])).sum() == TREE.num_nodes, (
    "on its own level it attends only to itself"
)

# %% tags=["hide-input"]
count = 24
trees.mask_map(
    mask[:count, :count],
    pieces[:count],
    depths=level[:count],
    title=f"Ancestor mask, first {count} of {len(mask)} nodes",
)

# %% [markdown]
# ## Verification of a tree
#
# Verification starts at the root and tries the children in order of `q`. The first child that
# equals the target's choice is **accepted**, and verification continues with its children. Children
# tried before it are **rejected**. Nodes after an accepted sibling and below a rejected node are
# **never visited**. If no child equals the target's choice, the target adds its choice as a
# *correction*. If there was no child, this token is a *bonus*.
#
# **Exercise: the accepted path.** `choice` has the target's most likely token after each node.


# %%
def accepted_path(tokens, parents, choice):
    """Returns the accepted nodes below the root, in order.

    Args:
        tokens: `[N]`, tokens of the draft; node 0 is the root.
        parents: `[N]`, with −1 at the root.
        choice: `[N]`, the token that the target chooses after each node.
    """
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def accepted_path_answer(tokens, parents, choice):
    path = []
    current = 0
    for node in range(1, len(tokens)):
        if parents[node] == current and tokens[node] == choice[current]:
            path.append(node)
            current = node
    return path


# %%
def check_accepted_path(accepted_path):
    parents = np.array([-1, 0, 0, 1, 1, 2, 2])
    tokens = np.array([9, 4, 5, 6, 7, 6, 8])
    for choice, expected in (
        ([5, 0, 8, 0, 0, 0, 3], [2, 6]),  # node 2, then node 6; the target adds token 3, a bonus
        ([4, 7, 0, 0, 1, 0, 0], [1, 4]),
        ([5, 6, 1, 0, 0, 0, 0], [2]),  # node 3 has token 6, but its parent is not accepted
        ([3, 6, 6, 0, 0, 0, 0], []),  # no child of the root is right
    ):
        path = [int(node) for node in accepted_path(tokens, parents, np.array(choice))]
        assert path == expected, f"choices {choice}: the path is {expected}, not {path}"


accepted_path = checked(accepted_path, accepted_path_answer, check_accepted_path)

# %% [markdown]
# One forward pass over the text and the tree, without a cache, gives the target's probability `p`
# of each node. Move the slider through the rounds. Hover over a node for its `p`, `q` and score.

# %%
WIDTH = len(prompt) + NEW + 8


def block_of(round_):
    """Tokens, positions and mask of the text, padded to one width, with the tree after it."""
    n = len(round_["known"]) - 1
    count = len(round_["tokens"])
    tokens = np.zeros(WIDTH + count, np.int32)
    tokens[:n] = round_["known"][:-1]
    tokens[WIDTH:] = round_["tokens"]
    tree_mask = np.asarray(ancestor_mask(jnp.asarray(round_["parents"])[None], TREE.max_depth))[0]
    mask = np.tril(np.ones((len(tokens), len(tokens)), bool))
    mask[WIDTH:, n:WIDTH] = False  # no node of the tree attends to the padding
    mask[WIDTH:, WIDTH:] = tree_mask
    positions = np.concatenate([np.arange(WIDTH), n + tree_mask.sum(axis=1) - 1]).astype(np.int32)
    return tokens[None], positions[None], mask[None]


@jax.jit
def target_probs(tokens, positions, mask):
    """The target's distribution after every node of the tree, [N V]."""
    out = target.model(target.params, tokens, positions, mask)
    return jax.nn.softmax(target.model.unembed(target.params, out.final[0, WIDTH:]))


for round_ in rounds:
    probs = np.asarray(target_probs(*block_of(round_)))
    round_["probs"] = probs
    round_["p"] = probs[np.maximum(round_["parents"], 0), round_["tokens"]]
    round_["argmax"] = probs.argmax(axis=1)
    round_["status"] = trees.statuses(round_["parents"], round_["path"])
    path = accepted_path(round_["tokens"], round_["parents"], round_["argmax"])
    assert path == round_["path"], "your path and the library's"
    end = path[-1] if path else 0
    assert round_["argmax"][end] == round_["next"], "the added token is the target's choice"
    for node, status in enumerate(round_["status"]):
        chosen = round_["tokens"][node] == round_["argmax"][max(round_["parents"][node], 0)]
        if status == style.ACCEPTED:
            assert chosen, "a greedy target accepts its own argmax"
        if status == style.REJECTED:
            assert not chosen, "a greedy target rejects every other token"


# %% tags=["hide-input"]
def shown(round_, built, number):
    """The arguments of a picture: the draft, then the token that the target added."""
    end = round_["path"][-1] if round_["path"] else 0
    kind = style.CORRECTED if end in round_["parents"] else style.BONUS

    return {
        "tokens": [tokenizer.decode([int(token)]) for token in [*round_["tokens"], round_["next"]]],
        "parents": [*round_["parents"].tolist(), end],
        "kinds": [*round_["status"], kind],
        "p": [None, *round_["p"][1:].tolist(), float(round_["probs"][end, round_["next"]])],
        "q": [None, *built["q"][1:].tolist(), None],
        "score": [None, *built["score"][1:].tolist(), None],
        "title": (
            f"Round {number}: {len(round_['path'])} of {TREE.num_nodes - 1} draft tokens accepted,"
            " one token added"
        ),
    }


pictures = [
    shown(round_, built, number)
    for number, (round_, built) in enumerate(zip(rounds, by_hand, strict=True), start=1)
]
counts = {
    kind: sum(round_["status"].count(kind) for round_ in rounds)
    for kind in (style.ACCEPTED, style.REJECTED, style.UNVISITED)
}
print(", ".join(f"{kind} {count}" for kind, count in counts.items()))
assert counts[style.UNVISITED] > sum(counts.values()) / 2, "most nodes are never visited"
Moving("rounds", {"title": "Recorded rounds with a draft tree", "rounds": pictures})

# %% [markdown]
# Most nodes are never visited. The drafter does not know the branch that the target will take.
#
# ## One round of a chat model, step by step
#
# The chat model answers a question with a tree of twelve nodes. The cell takes the round that
# accepted most nodes. Step through it: propose, mask, verify, accept, commit.

# %%
QUESTION = "Give me one tip for learning a language."
chat_target, chat_head, chat_prompts = load_chat([QUESTION], ["def read_config(path):\n"])
chat_tree = e3.DynamicTree(num_nodes=12, max_depth=4, top_k=3)
chat_decoder = e3.SpeculativeDecoder(chat_target, chat_head, tree=chat_tree)
state = chat_decoder.prefill(chat_prompts, max_new_tokens=40)
played = []
while bool(state.running[0]):
    text = np.asarray(state.tokens[0, : int(state.length[0]) - 1])
    latest = chat_decoder.step(state)
    state = latest.state
    played.append(
        (text, np.asarray(latest.draft.tokens[0]), np.asarray(latest.draft.parents[0]), latest)
    )
text, nodes, parents, latest = max(played, key=lambda entry: int(entry[-1].verdict.num_accepted[0]))


def choices_after(model, text, nodes, parents):
    """The target's choice after every node of a tree, in one pass over text and tree."""
    count = len(text)
    mask = np.tril(np.ones((count + len(nodes), count + len(nodes)), bool))
    mask[count:, count:] = ancestors(parents)
    positions = np.concatenate([np.arange(count), count + ancestors(parents).sum(axis=1) - 1])
    tokens = np.concatenate([text, nodes]).astype(np.int32)
    final = model.model(
        model.params, tokens[None], positions[None].astype(np.int32), mask[None]
    ).final
    return np.asarray(jnp.argmax(model.model.unembed(model.params, final[0, count:]), axis=-1))


chat_choice = choices_after(chat_target, text, nodes, parents)
chat_path = accepted_path(nodes, parents, chat_choice)
print("the text so far:", repr(chat_target.tokenizer.decode(text[len(chat_prompts[0]) :])))
print(f"{len(chat_path)} draft tokens are accepted")
assert chat_path == [int(node) for node in latest.verdict.path[0] if node >= 0], (
    "your path and the library's"
)


# %% tags=["hide-input"]
def texts_of(ids):
    return [chat_target.tokenizer.decode([int(token)]) for token in ids]


Moving(
    "draft_tree",
    {
        "tokens": texts_of(nodes),
        "parents": parents.tolist(),
        "ids": nodes.tolist(),
        "choices": texts_of(chat_choice),
        "choice_ids": chat_choice.tolist(),
        "length": len(text),
        "title": "One round with a draft tree",
    },
)

# %% [markdown]
# ## Static and dynamic trees: τ by number of nodes
#
# Before EAGLE-2, trees were *static*: every round used the same shape, given as paths of child
# ranks. `(0, 1)` is the second child of the first child. A dynamic tree of the same size is deep
# where the head is confident and wide where it is uncertain. The cell measures τ for chains, one
# static tree and dynamic trees on the same prompts. All of them generate the same text.

# %%
few = [tokenizer.encode(text).ids[-64:] for text in texts[::8]][:6]
LIMIT = 40


def run(**draft):
    """Greedy texts and τ of a kind of draft."""
    result = e3.SpeculativeDecoder(target, head, stop_tokens=(), **draft).generate(
        few, max_new_tokens=LIMIT
    )
    return result.tokens, result.stats


wide_then_thin = [(rank,) for rank in range(4)]
wide_then_thin += [
    (rank, child) for rank, children in enumerate((3, 2, 1, 1)) for child in range(children)
]
wide_then_thin += [(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0, 0)]
STATIC = e3.StaticTree(tuple(wide_then_thin))
drafts = {
    "chain": [(k + 1, {"num_speculative_tokens": k}) for k in (1, 3, 7)],
    "static tree": [(STATIC.num_nodes, {"tree": STATIC})],
    "dynamic tree": [
        (n, {"tree": e3.DynamicTree(num_nodes=n, max_depth=depth, top_k=10)})
        for n, depth in ((STATIC.num_nodes, 7), (60, 8))
    ],
}
written = e3.SpeculativeDecoder(target, stop_tokens=()).generate(few, max_new_tokens=LIMIT).tokens
measured = {}
for name, sizes in drafts.items():
    for nodes, draft in sizes:
        tokens, stats = run(**draft)
        assert tokens == written, f"{name} of {nodes} nodes changed the text"
        measured[name, nodes] = stats
        print(f"{name:13} {nodes:3} nodes   τ {stats.mean_acceptance_length:.2f}")

# %% tags=["hide-input"]
figure, axes = plt.subplots()
colours = dict(zip(drafts, style.SERIES, strict=False))
for name, colour in colours.items():
    sizes = [nodes for nodes, _ in drafts[name]]
    taus = [measured[name, nodes].mean_acceptance_length for nodes in sizes]
    axes.plot(sizes, taus, marker="o", color=colour, label=name)
axes.set(
    title="Mean acceptance length by number of nodes",
    xlabel="nodes verified per round (root included)",
    ylabel="τ (tokens per round)",
    ylim=(1, None),
)
axes.set_xscale("log", base=2)
axes.set_xticks([2, 4, 8, 16, 32, 60], ["2", "4", "8", "16", "32", "60"])
axes.legend()
tau = {key: stats.mean_acceptance_length for key, stats in measured.items()}
plt.show()

# %%
assert tau["dynamic tree", 60] > tau["chain", 8], (
    "the large tree has a higher τ than the long chain"
)
same_size = tau["dynamic tree", STATIC.num_nodes] / tau["static tree", STATIC.num_nodes]
assert same_size > 0.97, "a dynamic tree is no worse than a static one"
assert tau["chain", 2] < tau["chain", 4] < tau["chain", 8], "a longer chain has a higher τ"


def gain(name, few, many):
    """Gain of τ per node, between two numbers of nodes."""
    return (tau[name, many] - tau[name, few]) / (many - few)


late = (gain("chain", 4, 8), gain("dynamic tree", STATIC.num_nodes, 60))
assert max(late) < gain("chain", 2, 4) / 2, (
    "later nodes gain less than half as much as earlier ones"
)
first = {key: stats.acceptance_per_position[0] for key, stats in measured.items()}
assert first["dynamic tree", 60] > first["chain", 8] > 0.5, "the tree gains at the first level"

# %% [markdown]
# The gain per node falls fast with the number of nodes. A deep node of a chain is accepted only if
# every token before it is. A tree also has second and third choices at the *first* levels.
#
# ## Verification cost of a node
#
# `v` is the cost of verifying a whole draft, in plain steps. In the memory-bound regime, additional
# nodes cost little. In the compute-bound regime, every node adds its full cost. The first column is
# measured on this machine. The others are the roofline bound of Llama-3.1-8B on an H200.

# %%
h200 = Deployment(
    target=KNOWN_MODELS["Llama-3.1-8B"], head=None, accelerator=accelerator_named("H200")
)
sizes = (1, 16, 60)


def seconds(nodes):
    """Time of one forward pass of the shipped target over a block, with its logits."""
    decoder = e3.SpeculativeDecoder(target, e3.drafters.Plain(nodes), stop_tokens=())
    return min(target_seconds(decoder, [prompt], max_new_tokens=64, rounds=8) for _ in range(3))


here = [seconds(nodes) for nodes in sizes]
bound = {
    batch: [
        round_bound(h200, batch=batch, context=1024, num_draft_tokens=nodes - 1).verify_cost
        for nodes in sizes
    ]
    for batch in (1, 8, 64)
}
print("nodes   v measured   bound of v on an H200 at batch 1 / 8 / 64")
for index, nodes in enumerate(sizes):
    by_batch = " / ".join(f"{bound[batch][index]:.2f}" for batch in bound)
    print(f"{nodes:5} {here[index] / here[0]:12.2f}   {by_batch}")
assert bound[1][-1] < 1.05, "batch 1: 60 nodes cost less than 5 % more than one token"
assert bound[64][-1] > 5, "batch 64: a tree of 60 nodes costs more than five plain steps"
assert max(tau.values()) < bound[64][-1]

# %% [markdown]
# Use a large tree for one or a few sequences on hardware with unused arithmetic. For many
# sequences, short chains or no drafts are faster. `eagle3 tune` finds the best draft for your
# machine.
#
# ## Trees at temperature 1
#
# At temperature 1 the target samples from `p`. The tree is still deterministic, so each sibling is
# a point mass. The exact rule tries the siblings in order and accepts `x` with probability `p(x)`.
# If it rejects `x`, it removes the mass of `x` from `p`, normalizes the rest and tries the next
# sibling. In total, each sibling is accepted with probability exactly `p(x)`. Some sibling is
# accepted with probability `Σ p(x)`.

# %%
hot = trace.record(
    e3.SpeculativeDecoder(target, head, tree=TREE, stop_tokens=()),
    few,
    max_new_tokens=[LIMIT] * len(few),
    sampling=e3.SamplingParams(temperature=1.0),
    seed=0,
)
width = max(len(row) for row in few) + LIMIT


@jax.jit
def probs_of(tokens):
    """The target's distribution after every token of a text."""
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
    out = target.model(target.params, tokens, positions, causal_mask(width))
    return jax.nn.softmax(target.model.unembed(target.params, out.final))


# the accepted child of the root; p of all children
ranks = []
expected = []
for ids, row, traced in zip(few, hot.result.tokens, hot.prompts, strict=True):
    text = [*ids, *row]
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(text)] = text
    probs = np.asarray(probs_of(padded))[0]
    for found_round in traced["rounds"]:
        children = [node for node, parent in enumerate(found_round["parents"]) if parent == 0]
        expected.append(
            [
                float(probs[found_round["positions"][0], found_round["tokens"][node]])
                for node in children
            ]
        )
        taken = found_round["path"][:1]
        ranks.append(children.index(taken[0]) if taken else None)

sums = np.array([sum(mass) for mass in expected])
taken = sum(rank is not None for rank in ranks)
deviation = (taken - sums.sum()) / np.sqrt((sums * (1 - sums)).sum())
first_only = sum(mass[0] for mass in expected)
print(
    f"{taken} of {len(ranks)} rounds accepted a child of the root; expected Σ p = {sums.sum():.1f}"
    f" ({deviation:+.2f} σ)"
)
print(f"the first sibling only, as in a chain: Σ p = {first_only:.1f}")
assert abs(deviation) < 4, "the number of accepted children agrees with Σ p"
assert sums.sum() > 1.5 * first_only, (
    "siblings are accepted much more often than the first one alone"
)

# %% [markdown]
# ## All parts together: the loop
#
# A round has five steps: propose, verify, accept, commit, observe. The folded cell has the networks
# of [nano_eagle3.py](../examples/nano_eagle3.py) with their caches, as an object `pair`:
#
# - `pair.start(prompt)` runs the prompt through target and head, and returns the first token.
# - `pair.propose()` returns tokens and parents of a draft. Node 0 is the newest token of the text.
# - `pair.verify(tokens, parents, mask)` runs the target over the draft and returns its choice after
#   each node.
# - `pair.commit(nodes)` keeps the root and the accepted nodes in the target's cache, in this order.
# - `pair.observe(added)` gives the head the tokens that the round has added, with the target's
#   features.
#
# **Exercise: the loop.** Use `ancestors` and `accepted_path`.


# %%
def generate(pair, prompt, max_new_tokens):
    """Returns the new tokens, at most `max_new_tokens`, and the number of rounds."""
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def generate_answer(pair, prompt, max_new_tokens):
    new = [pair.start(prompt)]
    rounds = 0
    while len(new) < max_new_tokens:
        tokens, parents = pair.propose()
        choice = pair.verify(tokens, parents, ancestors(parents))
        path = accepted_path(tokens, parents, choice)
        end = path[-1] if path else 0
        added = [*(int(tokens[node]) for node in path), int(choice[end])]

        pair.commit([0, *path])
        pair.observe(added)
        new += added
        rounds += 1
    return new[:max_new_tokens], rounds


# %% tags=["hide-input"]
class ScriptedPair:
    """A pair for the check: the target counts 3, 4, 5, …; 2, 1 or 0 draft tokens are right."""

    def __init__(self):
        self.committed = 0  # the number of tokens in the target's cache
        self.text = []
        self.rounds = 0
        self.step = "start"

    def expect(self, step, before):
        assert self.step in before, f"{step} was called after {self.step}"
        self.step = step

    def start(self, prompt):
        self.expect("start", ["start"])
        self.text = [*prompt, 3]
        self.committed = len(prompt)
        return 3

    def propose(self):
        self.expect("propose", ["start", "observe"])
        root = self.text[-1]
        wrong = (0, 10, 20)[self.rounds % 3]
        self.rounds += 1
        tokens = np.array([root, 50, root + 1 + (wrong == 20) * 30, root + 2 + wrong, 60])
        return tokens, np.array([-1, 0, 0, 2, 3])

    def verify(self, tokens, parents, mask):
        self.expect("verify", ["propose"])
        expected = ancestors_answer(parents)
        assert np.array_equal(mask, expected), "the mask is the ancestor mask of the draft"
        self.choice = np.asarray(tokens) + 1
        return self.choice

    def commit(self, nodes):
        self.expect("commit", ["verify"])
        expected = ([0, 2, 3], [0, 2], [0])[(self.rounds - 1) % 3]
        assert [int(node) for node in nodes] == expected, (
            f"the root and the accepted nodes are {expected}"
        )
        self.committed += len(nodes)

    def observe(self, added):
        self.expect("observe", ["commit"])
        number = (3, 2, 1)[(self.rounds - 1) % 3]
        count = [self.text[-1] + 1 + index for index in range(number)]
        assert list(added) == count, (
            "a round adds the accepted tokens and the target's choice after the last one"
        )
        self.text += added


# %%
def check_generate(generate):
    for max_new_tokens in (1, 2, 9, 10):
        pair = ScriptedPair()
        new, rounds = generate(pair, [1, 2], max_new_tokens)
        assert len(new) == max_new_tokens, f"{max_new_tokens} new tokens"
        assert list(new) == list(range(3, 3 + max_new_tokens)), (
            "the text is that of the target alone"
        )
        assert rounds == pair.rounds, "the number of rounds"
        expected = {1: 0, 2: 1, 9: 4, 10: 4}[max_new_tokens]
        assert rounds == expected, f"{expected} rounds are enough for {max_new_tokens} tokens"


generate = checked(generate, generate_answer, check_generate)

# %% [markdown]
# The last cells run your loop with the real networks. They compare it with `nano_eagle3.generate`,
# which runs the same steps in one compiled program, and with the library.


# %% tags=["hide-input"]
@functools.partial(jax.jit, static_argnums=1)
def target_pass(w, config, *arguments):
    logits, features, cache = nano.run_target(w, config, *arguments)
    return jnp.argmax(logits, axis=-1), features, cache


@functools.partial(jax.jit, static_argnums=2)
def head_pass(head, embedding, config, *arguments):
    output, cache = nano.run_head(head, embedding, config, *arguments)
    return output, nano.head_logits(head, config, output), cache


class Pair:
    """The networks of nano_eagle3 with their caches, for one text and trees of one shape."""

    def __init__(self, shape, capacity):
        self.w, config = nano.load(nano.SHIPPED / "target")
        self.head, head_config = nano.load(nano.SHIPPED / "eagle3")
        self.config = config._replace(head_theta=head_config.theta)
        self.embedding = self.w["model.embed_tokens.weight"]
        self.ids = jnp.arange(len(self.head["d2t"])) + self.head["d2t"]
        self.shape = shape
        kv_shape = (2, capacity, self.config.num_kv_heads, self.config.head_dim)
        self.cache = jnp.zeros((self.config.num_layers, *kv_shape))
        self.head_cache = jnp.zeros(kv_shape)
        self.length = 0  # committed tokens; the root is not one of them

    def run_head(self, tokens, stream, positions, cache, length, block):
        return head_pass(
            self.head, self.embedding, self.config, tokens, stream, positions, cache, length, block
        )

    def start(self, prompt):
        causal = np.tril(np.ones((len(prompt), len(prompt)), bool))
        choice = self.verify(np.array(prompt), None, causal)
        first = int(choice[-1])
        self.length = len(prompt)
        self.observe([*prompt[1:], first])
        return first

    def propose(self):
        caches = [self.head_cache]  # the last one has the guesses of the draft, and is not kept

        def run(tokens, output, depth, mask):
            positions = jnp.full(tokens.shape, self.length + depth)
            output, logits, cache = self.run_head(
                tokens, output, positions, caches[-1], self.length, mask
            )
            caches.append(cache)
            return output, logits

        logits = nano.head_logits(self.head, self.config, self.output)
        draft = nano.draft_tree(
            run, self.output, logits, self.shape, self.ids, jnp.array(self.root)
        )
        return np.asarray(draft.tokens), np.asarray(draft.parents)

    def verify(self, tokens, parents, mask):
        positions = self.length + mask.sum(axis=1) - 1
        choice, self.features, self.cache = target_pass(
            self.w, self.config, tokens, positions, self.cache, self.length, mask
        )
        return np.asarray(choice)

    def commit(self, nodes):
        nodes = np.array(nodes)
        accepted = self.cache[:, :, self.length + nodes]
        self.cache = self.cache.at[:, :, self.length : self.length + len(nodes)].set(accepted)
        self.features = self.features[nodes]
        self.length += len(nodes)

    def observe(self, added):
        count = len(added)
        # One shape for all rounds; slots after the added ones are ignored.
        size = max(count, self.shape.depth + 1)
        tokens = np.pad(np.array(added), (0, size - count))

        fused = jnp.pad(self.features @ self.head["fc.weight"].T, ((0, size - count), (0, 0)))
        start = self.length - count
        causal = np.tril(np.ones((size, size), bool))

        output, _, self.head_cache = self.run_head(
            tokens, fused, start + np.arange(size), self.head_cache, start, causal
        )

        self.output = output[count - 1][None]
        self.root = added[-1]


# %%
SHAPE = nano.Shape(depth=4, num_nodes=12, k=3)
pair = Pair(SHAPE, capacity=len(prompt) + NEW + 24)
new, count = generate(pair, prompt, NEW)
print(tokenizer.decode(new))

options = {"config": pair.config, "shape": SHAPE, "max_new_tokens": NEW}
final = nano.generate(pair.w, pair.head, jnp.array(prompt), 0, **options)
in_one_file = np.asarray(final.text)[len(prompt) : int(final.length)].tolist()
print(
    f"{len(new)} tokens in {count} rounds; nano_eagle3: {len(in_one_file)} in {int(final.rounds)}"
)
assert new == in_one_file == plain, (
    "your loop, nano_eagle3 and plain decoding generate the same text"
)
assert count == int(final.rounds), "your loop needs as many rounds as nano_eagle3"

# %% [markdown]
# ## Common mistakes
#
# A wrapper injects two common bugs into the target. The first one replaces the ancestor mask by the
# causal mask, so siblings attend to each other. The second one computes positions from the node
# index instead of the depth.


# %%
@dataclasses.dataclass(frozen=True)
class Mistaken:
    """A target with a bug in verification and a correct prefill."""

    model: object
    causal: bool = False
    by_index: bool = False

    vocab_size = property(lambda self: self.model.vocab_size)

    def init_cache(self, batch, capacity):
        return self.model.init_cache(batch, capacity)

    def unembed(self, params, final):
        return self.model.unembed(params, final)

    def __call__(self, params, tokens, positions, mask, cache=None, aux_layers=(), length=None):
        """Applies the bug if there is a draft to verify."""
        if cache is not None and self.causal:
            mask = causal_mask(tokens.shape[1])
        if cache is not None and self.by_index:
            positions = positions[:, :1] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        return self.model(params, tokens, positions, mask, cache, aux_layers, length)


SMALL = e3.DynamicTree(num_nodes=20, max_depth=5, top_k=4)
cases = (
    ("causal mask", {"causal": True}, "tree", {"tree": SMALL}),
    ("positions by index", {"by_index": True}, "tree", {"tree": SMALL}),
    ("both", {"causal": True, "by_index": True}, "chain", {"num_speculative_tokens": 3}),
)
print(f"{'bug':20} {'draft':8} {'τ':>5}   texts equal to the target's")
for name, bug, kind, shape in cases:
    broken = dataclasses.replace(target, model=Mistaken(target.model, **bug))
    result = e3.SpeculativeDecoder(broken, head, stop_tokens=(), **shape).generate(
        few, max_new_tokens=LIMIT
    )
    same = sum(ours == truth for ours, truth in zip(result.tokens, written, strict=True))
    print(f"{name:20} {kind:8} {result.stats.mean_acceptance_length:5.2f}   {same} of {len(few)}")
    if kind == "tree":
        assert same < len(few), "the bug changes the text"
    else:
        assert same == len(few), "the mask of a chain is causal, and its depth is its index"

# %% [markdown]
# Both bugs change the *text* of a tree, because verification uses a wrong context. They have no
# effect on a chain: its ancestor mask is causal and its depth equals its index. So a test needs a
# tree. The program raises no error. Only the comparison with plain decoding shows the bug. The same
# bugs in the *head* would only lower τ.
#
# ## Questions
#
# **1.** `top_k=10` and `max_depth=8`: how many nodes are scored per round, and on how many does the
# head run? Which number determines the time?
#
# <details><summary>Answer</summary>
#
# The first level scores `k` nodes, each further level `k²`: `10 + 7·100 = 710`
# (`TREE.num_candidates`). The head runs on the `k` best nodes of each level except the last:
# `10·7 = 70` (`TREE.num_expanded`), in 7 forward passes after that of the root. The number of
# forward passes determines the time.
#
# </details>
#
# **2.** What happens if the score is the *last* log-probability instead of the sum?
#
# <details><summary>Answer</summary>
#
# A child can then have a higher score than its parent and be kept without it. The cell below counts
# these nodes.
#
# </details>
#
# **3.** Write a chain as a `StaticTree`. Does it draft the same tokens?
#
# <details><summary>Answer</summary>
#
# Yes. The loop verifies it with the ancestor mask, as any tree.
#
# </details>
#
# **4.** At which batch size on an H200 would you stop using a tree of 60?
#
# <details><summary>Answer</summary>
#
# A round adds τ tokens and costs at least `v` plain steps, so it pays off only while `v < τ`. The
# cell below computes the bound for every batch.
#
# </details>

# %%
above = [
    int((built["q"][1:] > built["q"][built["parents"][1:]])[built["parents"][1:] > 0].sum())
    for built in by_hand
]
print(f"2. kept nodes with a higher log-probability than their parent: {sum(above)}")
assert TREE.num_candidates == 710 and TREE.num_expanded == 70 and sum(above) > 0

as_tree = e3.StaticTree(tuple((0,) * depth for depth in range(1, 4)))
tokens, stats = run(tree=as_tree)
assert tokens == written
assert stats.acceptance_per_position == measured["chain", 4].acceptance_per_position

costs = [
    round_bound(h200, batch=b, context=1024, num_draft_tokens=59).verify_cost for b in range(1, 65)
]
stop = next(b for b, cost in enumerate(costs, start=1) if cost > tau["dynamic tree", 60])
print(f"4. from batch {stop} on, a tree of 60 nodes cannot pay off")
assert 8 < stop < 64

# %% [markdown]
# ## Checked claims
#
# - Chains, static trees and dynamic trees generate the text of plain decoding, token for token.
# - The tokens and parents of the dynamic tree built by hand equal the library's in every round.
# - The mask, the accepted path and the loop written by hand equal those of the library and of
#   `nano_eagle3.py`.
# - Scores never rise along a path, and parents come before their children.
# - A node attends to one node of each level above it. Its position is the root's position plus its
#   depth.
# - Accepted nodes are the target's argmax, rejected ones are not. The added token is the target's
#   argmax.
# - The large tree has a higher τ than the long chain. A dynamic tree is no worse than a static one
#   of its size.
# - By the roofline bound on an H200, verifying 60 nodes costs less than 5 % more than a plain step
#   at batch 1. At batch 64 it costs more than τ plain steps.
# - At temperature 1, the number of rounds that accept a child of the root agrees with `Σ p`.
# - A causal mask or positions by index change the text with a tree. They change nothing with a
#   chain.
#
# **Next:** [06](06_losslessness.ipynb), losslessness in floating point.
