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
# # 02 · Speculative sampling
#
# A cheap head drafts tokens. An acceptance rule decides which of them to keep. The generated text
# has exactly the distribution of the expensive target. After this notebook you can
#
# - write the acceptance rule, the residual and a whole round, and explain each of them with a
#   picture;
# - compare your round with the library's compiled rule, decision by decision;
# - prove by enumeration in rational numbers that the rule is lossless;
# - recognize five common mistakes in the rule.
#
# The notebook takes one to two minutes on two CPU cores. It needs only
# `pip install -e '.[notebooks]'`. It downloads the chat model once (93 MB); without a network, the
# small pair of the package replaces it. Read [01](01_memory_bound_decoding.ipynb) first.
#
# **Exercises** work as in [00](00_watch_it_draft.ipynb): write a function, or use its answer.

# %% tags=["hide-input"]
import first_cell

first_cell.start()

import functools
import itertools
import random
from collections import Counter
from fractions import Fraction
from math import exp, sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
import nano_eagle3 as nano  # examples/nano_eagle3.py: the whole method in one file
import numpy as np
from chat import load_chat
from exercises import checked
from matplotlib import pyplot as plt
from pictures.moving import Moving
from scipy import optimize, stats

import eagle3_jax as e3
from eagle3_jax.prompts.benchmark import shipped
from eagle3_jax.tree import causal_mask

# %% [markdown]
# ## Acceptance rule for one token
#
# The target has a distribution `p` over four tokens, the drafter a distribution `q`. The drafter
# samples a token `x` from `q`. The rule accepts `x` with probability `min(1, p(x) / q(x))`.
#
# Move the sliders. The green part of both bars is `min(p, q)`: a token is drafted *and* accepted
# with this probability. The pink part of `q` is drafted too often, so it is rejected. The violet
# part of `p` is missing. It is the **residual**, `max(p − q, 0)`. Pink and violet have the same
# mass. After a rejection, the rule samples from the residual, divided by its sum. So green and
# violet add up to `p`, for any drafter. A larger error only lowers the accepted share.

# %%
p = np.array([0.5, 0.3, 0.15, 0.05])  # target
q = np.array([0.2, 0.5, 0.1, 0.2])  # drafter
logits = {"target": np.log(p).tolist(), "drafter": np.log(q).tolist()}
Moving(
    "acceptance", {"labels": list("ABCD"), "title": "Target p and drafter q, four tokens", **logits}
)

# %% [markdown]
# **Exercise: the acceptance probability.** Write it in one line of numpy.


# %%
def acceptance(p, q):
    """Returns for each draft token the probability that it is accepted. All arrays are `[V]`."""
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def acceptance_answer(p, q):
    return np.minimum(1, p / q)


# %%
def check_acceptance(acceptance):
    keep = acceptance(np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.6, 0.2]))
    assert np.isclose(keep[0], 1), "p = 0.5 is above q = 0.2, so a drafted token is always accepted"
    assert np.isclose(keep[1], 0.5), (
        "p = 0.3 is half of q = 0.6, so half of the drafted tokens are accepted"
    )
    assert np.isclose(keep[2], 1), "where p and q are equal, every drafted token is accepted"


acceptance = checked(acceptance, acceptance_answer, check_acceptance)

# %% [markdown]
# **Exercise: the residual.** After a rejection, the rule samples from this distribution.


# %%
def residual(p, q):
    """Returns the distribution after a rejection, `[V]`."""
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def residual_answer(p, q):
    missing = np.maximum(p - q, 0)
    return missing / missing.sum()


# %%
def check_residual(residual):
    for p, q in np.random.default_rng(0).dirichlet(np.ones(5), (100, 2)):
        after = residual(p, q)
        assert np.isclose(after.sum(), 1), "the residual is a distribution, so it sums to 1"
        assert np.all(after[q > p] == 0), "a token that q has too often is not sampled again"
        accepted = np.minimum(p, q)
        output = accepted + (1 - accepted.sum()) * after
        assert np.allclose(output, p), "accepted tokens and tokens of the residual together have p"


residual = checked(residual, residual_answer, check_residual)

# %%
accept = acceptance(p, q)
rejected = np.sum(q * (1 - accept))  # probability that the draft token is rejected
# drafted and accepted, or sampled from the residual
output = q * accept + rejected * residual(p, q)
for name, values in {
    "p": p,
    "q": q,
    "accept": accept,
    "residual": residual(p, q),
    "output": output,
}.items():
    print(f"{name:9}", values.round(3))
assert np.allclose(output, p), "the output has the target's distribution"
assert np.isclose(np.maximum(p - q, 0).sum(), rejected), "a rejection has the mass of the residual"

# %% [markdown]
# This is the whole proof for one token. Token `x` is drafted and accepted with probability
# `min(p, q)`. The draft is rejected with probability `1 − Σ min(p, q)`, which equals
# `Σ max(p − q, 0)`. Therefore the output has the distribution `min(p, q) + max(p − q, 0) = p`.
#
# The acceptance probability is `α = Σ min(p, q)`. It equals one minus the *total variation
# distance* of the two distributions.
#
# ## Distributions of a chat model
#
# The chat model answers a question. It has the distribution `p` of the next token, its head the
# distribution `q`. The picture shows the most likely tokens of both. Lower the temperature: both
# distributions get narrower, and they agree more or less than before, depending on their best
# tokens.

# %%
QUESTION = "Give me one tip for learning a language."
ANSWER = "One tip that can help you learn a language is to immerse yourself in the culture of"
chat_target, chat_head, chat_prompts = load_chat(
    [QUESTION], ["def main(argv=None):\n    parser = argparse."]
)
is_chat = chat_target.chat_template is not None
begun = chat_prompts[0] + (chat_target.tokenizer.encode(ANSWER).ids if is_chat else [])


def distributions_of_next(target, head, tokens):
    """Returns the text with one more greedy token, then p and q of the token after it."""
    sampling = e3.SamplingParams(temperature=1.0)
    decoder = e3.SpeculativeDecoder(
        target, head, num_speculative_tokens=1, draft_sampling=e3.DraftSampling.PROBABILISTIC
    )

    state = decoder.prefill([tokens], max_new_tokens=8)
    text = state.tokens[:, : len(tokens) + 1]
    drafted = decoder.step(state.replace(sampling=sampling)).draft

    # The target over the text; the last position predicts the token after it.
    positions = jnp.arange(text.shape[1])[None]
    final = target.model(target.params, text, positions, causal_mask(text.shape[1])).final
    logits = target.model.unembed(target.params, final[:, -1:])

    return (
        text[0].tolist(),
        np.asarray(jax.nn.softmax(logits[0, 0])),
        np.asarray(drafted.probs[0, 1]),
    )


chat_text, chat_p, chat_q = distributions_of_next(chat_target, chat_head, begun)
chat_alpha = np.minimum(chat_p, chat_q).sum()
chat_distance = np.abs(chat_p - chat_q).sum() / 2
shown = chat_text[len(chat_prompts[0]) :] if is_chat else chat_text
print(QUESTION if is_chat else "code", "\n", chat_target.tokenizer.decode(shown), "…")
print(f"Σ min(p, q) = {chat_alpha:.4f}, 1 - TV = {1 - chat_distance:.4f}")
assert abs(chat_alpha - (1 - chat_distance)) < 1e-4, "acceptance is 1 - TV"

# %%
likely = np.argsort(-np.maximum(chat_p, chat_q))[:7]
likely = likely[np.argsort(-chat_p[likely])]
labels = [chat_target.tokenizer.decode([int(token)]).strip() for token in likely]
logits = {
    name: np.log(np.maximum(dist[likely], 1e-6)).tolist()
    for name, dist in (("target", chat_p), ("drafter", chat_q))
}
Moving(
    "acceptance",
    {"labels": labels, "title": "Next token of the answer, seven tokens only", **logits},
)

# %% [markdown]
# ## Chains of K tokens
#
# The rule processes `K` draft tokens in order. At the first rejection it samples from the residual
# and stops. If it accepts all of them, it samples one more token, the **bonus**, from the target's
# distribution after the last draft token. So every round adds at least one token.
#
# A uniform `u` in [0, 1) accepts `x` if `u · q(x) < p(x)`, which has probability
# `min(1, p(x) / q(x))`. `draw` samples a token from a distribution: the first uniform chooses a
# group of 64 tokens, the next one a token in the group. A cumulative sum over the whole vocabulary
# would have larger rounding errors ([design notes](../docs/design.md)).


# %%
def draw(p, uniforms):
    if p.size <= 64:
        return int(np.searchsorted(np.cumsum(p), uniforms[-1] * p.sum(), side="right"))
    groups = p.reshape(-1, 64)
    group = draw(groups.sum(axis=1), uniforms[:-1])
    return 64 * group + draw(groups[group], uniforms[-1:])


# %% [markdown]
# **Exercise: a round.** `p` has a row more than `q`: row `k` is the target's distribution before
# draft token `k`, the last row is the one after all draft tokens. Use `draw`.


# %%
def verify_chain(tokens, p, q, accept, choose):
    """Returns the tokens that a round adds, as a list.

    Args:
        tokens: The `K` draft tokens.
        p: The target's distributions, `[K + 1, V]`.
        q: The drafter's distributions, `[K, V]`.
        accept: Uniforms of the `K` decisions.
        choose: Uniforms for `draw`, which samples the last token.
    """
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def verify_chain_answer(tokens, p, q, accept, choose):
    for k, x in enumerate(tokens):
        if not accept[k] * q[k, x] < p[k, x]:
            return [*tokens[:k], draw(np.maximum(p[k] - q[k], 0), choose)]  # the correction
    return [*tokens, draw(p[len(tokens)], choose)]  # the bonus


# %% [markdown]
# The check compares 300 random rounds with `verify` of
# [nano_eagle3.py](../examples/nano_eagle3.py), a complete decoder in one file. After the notebooks
# 02 to 05 you have written its parts.


# %%
def check_verify_chain(verify_chain):
    rng = np.random.default_rng(0)
    theirs = jax.jit(nano.verify, static_argnums=4)
    for _ in range(300):
        p = rng.dirichlet(np.full(6, 0.7), 3).astype(np.float32)
        q = rng.dirichlet(np.full(6, 0.7), 2).astype(np.float32)
        tokens = [int(rng.choice(6, p=dist / dist.sum())) for dist in q.astype(float)]
        accept = rng.random(2, np.float32)
        choose = rng.random(1, np.float32)

        draft = nano.Draft(jnp.array([0, *tokens]), jnp.array([-1, 0, 1]), jnp.array([q[0], *q]))
        _, count, last = theirs(draft, p, jnp.array([0, *accept]), choose, 2)
        expected = [*tokens[: int(count)], int(last)]

        added = list(verify_chain(tokens, p, q, accept, choose))
        assert added[: int(count)] == expected[:-1], (
            f"{int(count)} draft tokens are accepted in this round"
        )
        assert len(added) == len(expected), "a round adds the accepted tokens and one more"
        kind = "bonus, sampled from p" if count == 2 else "correction, sampled from the residual"
        assert added == expected, f"the last token is a {kind}"


verify_chain = checked(verify_chain, verify_chain_answer, check_verify_chain)

# %% [markdown]
# The next cells apply your round to real distributions. The shipped target has just generated
# `parser = argparse.ArgumentParser`. Its head samples three draft tokens at temperature 1. One
# forward pass of the target gives `p` after each of them. Fifteen other prompts are processed in
# the same batch. The small pair is used because its vocabulary of 4,096 tokens makes many rounds
# cheap.

# %%
K = 3
target = e3.load_target()
head = e3.load_drafter(target=target)
decoder = e3.SpeculativeDecoder(
    target, head, num_speculative_tokens=K, draft_sampling=e3.DraftSampling.PROBABILISTIC
)
V = target.vocab_size
pieces = [target.tokenizer.decode([token]) for token in range(V)]


@jax.jit
def distributions_after(tokens):
    """The target's distribution after every token, [B T V], in one pass without a cache."""
    width = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
    final = target.model(target.params, tokens, positions, causal_mask(width)).final
    return jax.nn.softmax(target.model.unembed(target.params, final))


def round_of(state):
    """Plays a round. Returns the new state, the draft tokens [B K+1], p [B K+1 V], q [B K V]."""
    texts = np.pad(np.asarray(state.tokens), ((0, 0), (0, K)))
    # the slot of the newest token, which is the root of the draft
    root_slots = np.asarray(state.length) - 1

    played = decoder.step(state)
    draft = jax.device_get(played.draft)
    for text, slot, chain in zip(texts, root_slots, draft.tokens, strict=True):
        text[slot : slot + K + 1] = chain

    probs = distributions_after(texts)
    p = np.stack(
        [row[slot : slot + K + 1] for row, slot in zip(np.asarray(probs), root_slots, strict=True)]
    )
    return played.state, draft.tokens, p, draft.probs[:, 1:]


prompts = ["def main(argv=None):\n    parser = argparse.", *shipped()[:45:3]]
state = decoder.prefill(prompts, max_new_tokens=64, seed=27)  # greedy first token
state = state.replace(sampling=e3.SamplingParams(temperature=1.0))
state, tokens, all_p, all_q = round_of(state)
drafted = tokens[0, 1:]
p = all_p[0]
q = all_q[0]
print("after", repr(pieces[tokens[0, 0]]), "the head sampled", [pieces[token] for token in drafted])
assert pieces[tokens[0, 0]] == "ArgumentParser"
assert np.allclose(p.sum(-1), 1, atol=1e-5) and np.allclose(q.sum(-1), 1, atol=1e-5)
alpha = np.minimum(p[0], q[0]).sum()

# %% [markdown]
# The cell applies your round to this draft with 512 sets of uniforms. It compares the result with
# `e3.verify`, which is compiled and handles batches and trees.

# %%
ROWS = 512
uniforms = e3.uniforms(jax.random.split(jax.random.key(1), ROWS), K + 1 + e3.num_digits(V))
accept = uniforms[:, : K + 1]
choose = uniforms[:, K + 1 :]


def many(array):
    """The same array in every row."""
    return jnp.broadcast_to(jnp.asarray(array), (ROWS, *np.shape(array)))


chain = e3.Draft(
    tokens=many(tokens[0]),
    parents=many(jnp.arange(K + 1, dtype=jnp.int32) - 1),
    valid=many(jnp.ones(K + 1, bool)),
    probs=many(np.concatenate([np.zeros((1, V), np.float32), q])),  # the root was not sampled
)
verify = jax.jit(e3.verify, static_argnames="max_depth")


def added_by_library(draft):
    """Tokens that each row adds: the accepted path, then the next token."""
    verdict = verify(draft, many(p), accept=accept, choose=choose, max_depth=K)
    path, count, last = map(np.asarray, (verdict.path, verdict.num_accepted, verdict.next_token))
    taken = np.take_along_axis(np.asarray(draft.tokens), np.maximum(path, 0), axis=1)
    return [[*row[:n].tolist(), int(end)] for row, n, end in zip(taken, count, last, strict=True)]


def added_by_hand(q):
    pairs = zip(np.asarray(accept), np.asarray(choose), strict=True)
    return [verify_chain(drafted.tolist(), p, q, a[1:], c) for a, c in pairs]


ours = added_by_hand(q)
library = added_by_library(chain)
print("accepted tokens:", dict(sorted(Counter(len(row) - 1 for row in ours).items())))
assert ours == library, "your round and e3.verify make the same decisions"

# %% [markdown]
# Every position has its own pair of distributions. It is reached only if all tokens before it were
# accepted. So the probability of accepting the first `k` of *these* three tokens is a product of
# `min(1, p(x)/q(x))`. The cell compares the products with the frequencies in the 512 rows.

# %%
chance = np.minimum(1, p[np.arange(K), drafted] / q[np.arange(K), drafted])
reach = np.cumprod(chance)
assert chance.max() < 0.98, "every one of the three tokens can be rejected"
for k in range(K):
    seen = np.mean([len(row) > k + 1 for row in library])
    noise = sqrt(reach[k] * (1 - reach[k]) / ROWS)
    print(f"first {k + 1} accepted: expected {reach[k]:.3f}, in 512 rows {seen:.3f}")
    assert abs(seen - reach[k]) <= 5 * noise + 1e-9, "acceptance multiplies along the chain"

# %% [markdown]
# ## Greedy drafts: a point mass
#
# Most engines draft greedily: `x` is the most likely token of the head. Then the draft distribution
# is a **point mass** with `q(x) = 1`. The rule accepts `x` with probability `p(x)`, and the
# residual is `p` without `x`. The rule needs the distribution that the token was *sampled from*.
# The output of the network is a different distribution.
#
# A greedy draft token is accepted with probability `p(x)`, a sampled one with probability
# `Σ min(p, q)`. The plot compares both for the first positions of six rounds.

# %%
firsts = list(zip(all_p[:, 0], all_q[:, 0], strict=True))
for _ in range(5):
    state, _, more_p, more_q = round_of(state)
    firsts += zip(more_p[:, 0], more_q[:, 0], strict=True)
if_sampled = np.array([np.minimum(a, b).sum() for a, b in firsts])
if_greedy = np.array([a[b.argmax()] for a, b in firsts])

print(f"mean acceptance: sampled {if_sampled.mean():.3f}, greedy {if_greedy.mean():.3f}")
assert if_sampled.mean() > 1.5 * if_greedy.mean(), (
    "on average, sampled drafts are accepted more often"
)
assert 0.5 < np.mean(if_sampled > if_greedy) < 1, "at most positions, but not at all"

one_hot = np.eye(V, dtype=np.float32)[tokens[0]]
points = [added_by_library(chain.replace(probs=probs)) for probs in (None, many(one_hot))]
assert points[0] == points[1] == added_by_hand(one_hot[1:]), "a point mass is q one-hot"

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(4.6, 4.2))
ax.scatter(if_greedy, if_sampled, 18)
ax.plot([0, 1], [0, 1], color="0.6", linewidth=1)
ax.set(xlabel="greedy draft: p(x)", ylabel="sampled draft: Σ min(p, q)")
ax.set_title("Acceptance probability at temperature 1")
plt.show()

# %% [markdown]
# ## Proof by enumeration
#
# A text generated round by round has *exactly* the distribution of the target. The cell proves this
# for a small example in rational numbers: a vocabulary of four tokens, `K = 2`, and a different `p`
# and `q` after every prefix. `outcomes_of_round` computes the probability of every outcome of one
# round. `by_rounds` chains rounds until four tokens are generated: two draft tokens, their bonus,
# and one token of the next round.


# %%
def distributions_named(name, size=4):
    """A different distribution after every prefix, in rational numbers."""

    @functools.cache
    def after(prefix):
        weights = [random.Random(f"{name} {prefix} {token}").randint(1, 9) for token in range(size)]
        return [Fraction(weight, sum(weights)) for weight in weights]

    return after


def exact_residual(p, q):
    missing = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    return [mass / sum(missing) for mass in missing]


P = distributions_named("target")
Q = distributions_named("draft")


class Rule(NamedTuple):
    """The three decisions of speculative sampling; replace one to inject a bug."""

    keep: callable = lambda p, q: min(Fraction(1), p / q)
    refused: callable = exact_residual
    bonus: callable = lambda p, q: p


def outcomes_of_round(rule, prefix, levels=2):
    """Probability of every sequence of tokens that one round can add after a prefix."""
    p = P(prefix)
    q = Q(prefix)
    if not levels:
        return {(token,): mass for token, mass in enumerate(rule.bonus(p, q))}

    dist = Counter()
    for x in range(len(p)):  # drafted with probability q(x)
        keep = rule.keep(p[x], q[x])
        for continuation, mass in outcomes_of_round(rule, (*prefix, x), levels - 1).items():
            dist[(x, *continuation)] += q[x] * keep * mass
        for token, mass in enumerate(rule.refused(p, q) if keep < 1 else ()):
            dist[(token,)] += q[x] * (1 - keep) * mass
    return dist


def by_rounds(rule, horizon):
    """Distribution of the texts that rounds generate, cut at the horizon."""
    finished = Counter()
    running = {(): Fraction(1)}
    while running:
        longer = Counter()
        for prefix, mass in running.items():
            for added, weight in outcomes_of_round(rule, prefix).items():
                text = (*prefix, *added)[:horizon]
                texts = finished if len(text) == horizon else longer
                texts[text] += mass * weight
        running = longer
    return finished


def one_by_one(horizon):
    """Distribution of the target's own texts: p(x1) p(x2 | x1) ..."""
    texts = {(): Fraction(1)}
    for _ in range(horizon):
        texts = {
            (*text, x): mass * w for text, mass in texts.items() for x, w in enumerate(P(text))
        }
    return texts


def total_variation(rule, horizon=4):
    ours = by_rounds(rule, horizon)
    return sum(abs(mass - ours[text]) for text, mass in one_by_one(horizon).items()) / 2


dist = by_rounds(Rule(), 4)
print(f"{len(dist)} texts")
print("total variation distance from the target's distribution:", total_variation(Rule()))
assert len(dist) == 4**4 and sum(dist.values()) == 1
assert total_variation(Rule()) == 0, "exactly, in rational numbers"

# %% [markdown]
# The distance is exactly zero. The test suite runs the same enumeration against the code of
# `e3.verify`, for chains and trees
# ([test_exact_distribution.py](../tests/test_exact_distribution.py)).
#
# ## Common mistakes
#
# The enumeration gives the exact distance from the target for five mistakes, by length of the text.
# A release of transformers contained the third one.


# %%
def uniform(p, q):
    """All tokens of the residual, with the same probability."""
    possible = [weight > 0 for weight in exact_residual(p, q)]
    return [Fraction(weight, sum(possible)) for weight in possible]


def softmax_of_residual(p, q):
    """A softmax of max(p - q, 0) instead of a division by its sum."""
    weights = [Fraction(exp(max(a - b, 0))) for a, b in zip(p, q, strict=True)]
    return [weight / sum(weights) for weight in weights]


mistakes = {
    "the ratio is reversed": Rule(keep=lambda p, q: min(Fraction(1), q / p)),
    "resampled from p": Rule(refused=lambda p, q: p),
    "the residual is a softmax": Rule(refused=softmax_of_residual),
    "the residual is uniform": Rule(refused=uniform),
    "the bonus is sampled from q": Rule(bonus=lambda p, q: q),
}
distances = {
    name: [total_variation(rule, n) for n in (1, 2, 3, 4)] for name, rule in mistakes.items()
}

print(f"{'tokens':28}1       2       3       4")
for name, values in distances.items():
    print(f"{name:27} " + "  ".join(f"{float(value):.4f}" for value in values))

assert all(values[3] > Fraction(1, 100) for values in distances.values()), (
    "every mistake changes the distribution"
)
assert all(values == sorted(values) for values in distances.values()), (
    "the distance never falls with the length"
)
bonus = distances["the bonus is sampled from q"]
assert bonus[0] == bonus[1] == 0 < bonus[2], "a wrong bonus is invisible before token K + 1"

# %% tags=["hide-input"]
figure, ax = plt.subplots()
for (name, values), marker in zip(distances.items(), "os^Dv", strict=True):
    ax.plot((1, 2, 3, 4), [float(value) for value in values], marker=marker, label=name)
ax.plot((1, 2, 3, 4), [0] * 4, color="0.3", marker=".", label="correct rule")
ax.set(xlabel="length of the text, tokens", ylabel="total variation distance")
ax.set(xticks=(1, 2, 3, 4), ylim=(-0.03, 0.7))
ax.set_title("Exact distance from the target's distribution, five mistakes")
ax.legend(fontsize="small", ncols=2)
plt.show()

# %% [markdown]
# A wrong bonus does not change the first `K` tokens, because the bonus is token `K + 1`. A test
# needs at least `K + 2` tokens to check that the next round starts correctly.
#
# ## Siblings in a draft tree
#
# A tree has several draft tokens (siblings) for the same position. After the first sibling is
# rejected, the residual replaces the target's distribution. The second sibling is accepted or
# rejected under the residual, and so on (the rule of SpecInfer). The output distribution is exact
# for any number of siblings sampled from `q`. It is wrong if the second sibling is compared with
# the original `p` again.


# %%
def one_level(p, q, siblings, *, forget=False):
    """Distribution of the token at one level, and the probability that a sibling is accepted."""
    dist = [Fraction(0)] * len(p)
    want = p
    refused = Fraction(1)
    for _ in range(siblings):
        keep = [min(a, b) for a, b in zip(want, q, strict=True)]
        dist = [mass + refused * share for mass, share in zip(dist, keep, strict=True)]
        refused *= 1 - sum(keep)
        residual = [max(a - b, Fraction(0)) for a, b in zip(want, q, strict=True)]
        total = sum(residual)
        want = p if forget else [mass / total for mass in residual]
    return [mass + refused * last for mass, last in zip(dist, want, strict=True)], 1 - refused


p1 = P(())
q1 = Q(())
for siblings in (1, 2, 3):
    dist, chance = one_level(p1, q1, siblings)
    print(f"siblings: {siblings}, one is accepted with probability {float(chance):.3f}")
    assert dist == p1, "exact for any number of siblings"
wrong, _ = one_level(p1, q1, 2, forget=True)
assert sum(abs(a - b) for a, b in zip(wrong, p1, strict=True)) / 2 > Fraction(1, 100)

p0 = np.float64(p[0])
q0 = np.float64(q[0])
by_samples = [one_level(p0.tolist(), q0.tolist(), n)[1] for n in range(1, 9)]
by_rank = np.cumsum(p0[np.argsort(-q0)])[:8]
print("real pair, accepted with 1 to 8 siblings sampled from q:  ", np.round(by_samples, 2))
print("real pair, accepted with the 1 to 8 most likely tokens of q:", by_rank.round(2))
assert all(a <= b + 1e-12 for a, b in itertools.pairwise(by_samples)), (
    "more siblings never lower the acceptance"
)
assert by_rank[0] < by_samples[0] < by_rank[-1], (
    "one sibling: sampling is better; eight: the most likely tokens are"
)

# %% [markdown]
# ## Statistical test of the compiled rule
#
# The enumeration proves the rule. The compiled program needs a test of its own. The next cell
# samples 40,960 tokens with the compiled code and compares their frequencies with `p` by Pearson's
# chi-square test. It prints the smallest deviation that the test detects with a probability of 90
# %. It also runs the test on a bug: the draft is sampled at temperature 0.5, but the head declares
# the distribution of temperature 1.


# %%
def frequencies(sampled_from, chunks=40, rows=1024):
    """Counts of the first token of a round that e3.verify verifies with the declared q."""

    @jax.jit
    def emit(keys, p, q, sampled_from):
        uniforms = e3.uniforms(keys, 2 + 2 * e3.num_digits(V))
        x = e3.draw(jnp.broadcast_to(sampled_from, (rows, V)), uniforms[:, 2:4])

        root = jnp.zeros_like(x)
        draft = e3.Draft(
            tokens=jnp.stack([root, x], axis=1),
            parents=jnp.broadcast_to(jnp.array([-1, 0], jnp.int32), (rows, 2)),
            valid=jnp.ones((rows, 2), bool),
            probs=jnp.broadcast_to(q, (rows, 2, V)),
        )

        dists = jnp.broadcast_to(p, (rows, 2, V))
        verdict = e3.verify(
            draft, dists, accept=uniforms[:, :2], choose=uniforms[:, 4:], max_depth=1
        )
        return jnp.where(verdict.num_accepted > 0, x, verdict.next_token)

    keys = jax.random.split(jax.random.key(2), (chunks, rows))
    tokens = np.concatenate([np.asarray(emit(key, p[0], q[0], sampled_from)) for key in keys])
    return np.bincount(tokens, minlength=V)


def cells_of(values, expected):
    """Values of the tokens that are expected ten times or more, and the sum of all others."""
    frequent = expected >= 10
    return np.append(values[frequent], values[~frequent].sum())


cooler = np.float32(q0**2 / (q0**2).sum())  # temperature 0.5
samples = {"the rule": frequencies(q[0]), "wrong declaration": frequencies(cooler)}
count = samples["the rule"].sum()
expected = count * p0 / p0.sum()
p_values = {}
for name, counts in samples.items():
    test = stats.chisquare(cells_of(counts, expected), cells_of(expected, expected))
    p_values[name] = test.pvalue
    print(
        f"{name:20} {counts.sum()} samples, chi-square {test.statistic:.1f}, p = {test.pvalue:.2g}"
    )

degrees = cells_of(expected, expected).size - 1
limit = stats.chi2.isf(1e-6, degrees)
strength = optimize.brentq(lambda s: stats.ncx2.sf(limit, degrees, s) - 0.9, 1, 1e4)
visible = sqrt(strength / count)
print(
    f"{degrees} degrees of freedom; detected with probability 90 %: relative deviation of"
    f" {visible:.1%} (rms)"
)
assert p_values["the rule"] > 1e-6, "the compiled rule has the target's distribution"
assert p_values["wrong declaration"] < 1e-6, "the same test detects the bug"
assert visible < 0.1

# %% [markdown]
# ## Questions
#
# **1.** For which `q` is every draft rejected? What is the output then?
#
# <details><summary>Answer</summary>
#
# Every draft is rejected if `Σ min(p, q) = 0`, that is, if `p` is zero wherever `q` is not. The
# residual is then `p` itself, so each round adds one token sampled from `p`. The output is exact,
# and drafting only costs time.
#
# </details>
#
# **2.** The head samples at temperature 0.5 and declares that distribution as `q`, while the target
# samples at temperature 1. Is the output exact? And if the head samples at 0.5 and declares the
# distribution of temperature 1?
#
# <details><summary>Answer</summary>
#
# Yes in the first case: `q` has to be the distribution that the token was sampled from, and it is.
# No in the second case: the output is wrong by the total variation distance printed below. No check
# inside a decoder can detect it.
#
# </details>
#
# **3.** Show that no exact rule accepts a token sampled from `q` with a higher probability.
#
# <details><summary>Answer</summary>
#
# The probability that `x` is drafted and accepted is at most `q(x)`, because it must be drafted. It
# is also at most `p(x)`, because `x` has probability `p(x)` in the output. The sum over all tokens
# is at most `Σ min(p, q)`. The rule reaches this bound.
#
# </details>

# %%
nothing = [Fraction(0), Fraction(1), Fraction(0)]
everything = [Fraction(1, 2), Fraction(0), Fraction(1, 2)]
assert one_level(everything, nothing, 1) == (everything, 0), "question 1"

keep = np.minimum(1, np.divide(p0, q0, out=np.ones_like(p0), where=q0 > 0))
excess = np.maximum(p0 - q0, 0)
dishonest = cooler * keep + (1 - (cooler * keep).sum()) * excess / excess.sum()
lost = np.abs(dishonest - p0).sum() / 2
print(f"2. accepted: {alpha:.3f} at temperature 1, {np.minimum(p0, cooler).sum():.3f} at 0.5")
print(f"   sampled at 0.5 and declared at 1: total variation distance {lost:.3f}")
assert abs(dishonest.sum() - 1) < 1e-9 and lost > 0.02

# %% [markdown]
# ## Checked claims
#
# - Accepted mass and residual mass add up to `p`. The acceptance probability is
#   `Σ min(p, q) = 1 − TV`.
# - A numpy version and `e3.verify` make the same decisions on the same uniforms. Acceptance
#   multiplies along a chain.
# - A greedy draft is the same rule with a one-hot `q`. At temperature 1, sampled drafts are
#   accepted more often on average.
# - A text of `K + 2` tokens has the target's distribution, with a total variation distance of
#   exactly 0. Five mistakes change the distribution. A wrong bonus is invisible before token
#   `K + 1`.
# - Any number of siblings is exact if each one is verified under the residual of the one before.
# - The tokens of the compiled rule follow the target's distribution in 40,960 samples. The test
#   detects a draft that declares a wrong distribution.
#
# **Next:** [03](03_eagle3_head.ipynb), the draft head, layer by layer.
