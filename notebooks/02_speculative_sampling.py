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
# A cheap head drafts tokens, and the generated text still has exactly the distribution of the expensive target. After
# this notebook you can
#
# - write the acceptance rule in ten lines of numpy and read the acceptance probability off a plot;
# - compare these lines with the library's compiled rule, decision by decision;
# - prove that the rule is lossless by enumeration in rational numbers;
# - recognize five ways of getting the rule almost right.
#
# The notebook runs on a laptop CPU, offline. Read [01](01_memory_bound_decoding.ipynb) before.

# %% tags=["hide-input"]
import first_cell

first_cell.start(repository=True)

# %% [markdown]
# ## The rule in ten lines
#
# The target has a distribution `p` over four tokens, the drafter a distribution `q`. The drafter samples a token `x`
# from `q`. The rule accepts `x` if `u · q(x) < p(x)`, with `u` uniform in [0, 1). If it rejects `x`, it samples
# another token from the **residual** `max(p − q, 0)`, divided by its sum.

# %%
import numpy as np

p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.2, 0.5, 0.1, 0.2])
rng = np.random.default_rng(0)
residual = np.maximum(p - q, 0)
output = np.zeros(4)
for _ in range(100_000):
    x = rng.choice(4, p=q)
    if not rng.random() * q[x] < p[x]:
        x = rng.choice(4, p=residual / residual.sum())
    output[x] += 1 / 100_000

accepted = np.minimum(p, q)  # probability that x is drafted and accepted
print("p     ", p, "\nq     ", q, "\noutput", output.round(3))
assert np.abs(output - p).max() < 0.01, "the output distribution is the target's"
assert np.allclose(accepted + residual, p), "accepted and residual mass add up to p"
assert np.isclose(residual.sum(), 1 - accepted.sum()), "a rejection has the mass of the residual"

# %% [markdown]
# That is the whole proof for one token. A token `x` is drafted and accepted with probability `min(p, q)`. A rejection
# has probability `1 − Σ min(p, q)`, which equals `Σ max(p − q, 0)`. Therefore the output has the distribution `min(p,
# q) + max(p − q, 0) = p`.
#
# The acceptance probability is `α = Σ min(p, q)`. It equals one minus the *total variation distance* of the two
# distributions. The rest of this notebook checks the rule on the distributions of a real pair.

# %% tags=["hide-input"]
import functools
import itertools
import random
from collections import Counter
from fractions import Fraction
from math import exp, sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
import oracle  # tests/helpers/oracle.py: the published rules as plain loops
from matplotlib import pyplot as plt
from mutants import planted  # tests/helpers/mutants.py: injected bugs
from pictures import bars

import eagle3_jax as e3
from eagle3_jax.prompts import shipped
from validation.forcing import forced_logits
from validation.statistics import goodness_of_fit, smallest_deviation

# %% [markdown]
# ## Distributions of a real pair
#
# The target has just generated `parser = argparse.ArgumentParser`. It has a distribution `p` over its 4,096 tokens,
# the head a distribution `q`. The head samples three draft tokens at temperature 1. One forward pass of the target
# gives `p` after each of them. The same is done for fifteen other prompts.

# %%
K = 3
target = e3.load_target()
head = e3.load_drafter(target=target)
decoder = e3.SpeculativeDecoder(
    target, head, num_speculative_tokens=K, draft_sampling=e3.DraftSampling.PROBABILISTIC
)
V = target.vocab_size
pieces = [target.tokenizer.decode([token]) for token in range(V)]


def round_of(state):
    """Plays a round and returns the new state, the draft tokens [B K+1], p [B K+1 V] and q [B K V]."""
    lengths = np.asarray(state.length)
    known = [
        row[: end - 1].tolist() for row, end in zip(np.asarray(state.tokens), lengths, strict=True)
    ]
    played = decoder.step(state)
    draft = jax.device_get(played.draft)
    texts = [before + chain.tolist() for before, chain in zip(known, draft.tokens, strict=True)]
    logits = np.stack([one[-(K + 1) :] for one in forced_logits(target, texts)])  # no cache
    return played.state, draft.tokens, np.asarray(jax.nn.softmax(logits)), draft.probs[:, 1:]


prompts = ["def main(argv=None):\n    parser = argparse.", *shipped()[:45:3]]
state = decoder.prefill(prompts, max_new_tokens=64, seed=4)  # greedy first token
state = state.replace(sampling=e3.SamplingParams(temperature=1.0))
state, tokens, all_p, all_q = round_of(state)
drafted, p, q = tokens[0, 1:], all_p[0], all_q[0]
print("after", repr(pieces[tokens[0, 0]]), "the head sampled", [pieces[token] for token in drafted])
assert pieces[tokens[0, 0]] == "ArgumentParser"
assert np.allclose(p.sum(-1), 1, atol=1e-5) and np.allclose(q.sum(-1), 1, atol=1e-5)

# %% [markdown]
# The blue outlines are `p`, the orange bars are `q`. The filled part is `min(p, q)`: its area is the acceptance
# probability. The hatched part is the residual. Filled and hatched parts together are `p`.

# %%
figure = bars.laws(
    p[0],
    q[0],
    labels=pieces,
    residual=True,
    top=10,
    title="p and q after `argparse.ArgumentParser`",
)
alpha = np.minimum(p[0], q[0]).sum()
distance = np.abs(p[0] - q[0]).sum() / 2
print(f"Σ min(p, q) = {alpha:.4f}, 1 - TV = {1 - distance:.4f}")
assert abs(alpha - (1 - distance)) < 1e-5, "acceptance is 1 - TV"

# %% [markdown]
# ## Chains of K tokens
#
# For `K` draft tokens the rule takes one after the other. At the first rejection it samples from the residual and
# stops. If it accepts all of them, it samples one more token from the target, whose distribution after the last draft
# token is known already (the **bonus**). So every round adds at least one token.
#
# The library samples a token from two uniforms: the first one chooses a group of 64 tokens, the second one the token
# in the group. A cumulative sum over a whole vocabulary would round too much
# ([why](../docs/design.md#13-sampling-a-token-by-base-64-digits)). With the same draft and the same 512 sets of
# uniforms, these lines decide as `e3.verify`, which is compiled and handles batches and trees.


# %%
def invert(masses, uniform):
    return int(np.searchsorted(np.cumsum(masses), uniform * masses.sum(), side="right"))


def draw(p, uniforms):
    group = invert(p.reshape(64, 64).sum(axis=1), uniforms[0])
    return 64 * group + invert(p.reshape(64, 64)[group], uniforms[1])


def play(tokens, p, q, accept, choose):
    for k, x in enumerate(tokens):
        if not accept[k] * q[k, x] < p[k, x]:
            return [*tokens[:k], draw(np.maximum(p[k] - q[k], 0), choose)]  # the correction
    return [*tokens, draw(p[len(tokens)], choose)]  # the bonus


ROWS = 512
uniforms = e3.uniforms(jax.random.split(jax.random.key(1), ROWS), K + 1 + e3.num_digits(V))
accept, choose = uniforms[:, : K + 1], uniforms[:, K + 1 :]
many = lambda array: jnp.broadcast_to(jnp.asarray(array), (ROWS, *np.shape(array)))
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
    return [play(drafted.tolist(), p, q, a[1:], c) for a, c in pairs]


ours, library = added_by_hand(q), added_by_library(chain)
print("accepted tokens:", dict(sorted(Counter(len(row) - 1 for row in ours).items())))
assert ours == library, "ten lines of numpy decide as e3.verify"

# %% [markdown]
# Every position is the same game with its own pair of distributions, given that all tokens before it were accepted.
# For *these* three tokens the probability of accepting `x` is `min(1, p(x)/q(x))`. The probability of reaching
# position `k` is the product. The 512 rows must follow the products.

# %%
chance = np.minimum(1, p[np.arange(K), drafted] / q[np.arange(K), drafted])
reach = np.cumprod(chance)
for k in range(K):
    seen = np.mean([len(row) > k + 1 for row in library])
    noise = sqrt(reach[k] * (1 - reach[k]) / ROWS)
    print(f"first {k + 1} accepted: expected {reach[k]:.3f}, in 512 rows {seen:.3f}")
    assert abs(seen - reach[k]) <= 5 * noise + 1e-9, "acceptance multiplies along the chain"

# %% [markdown]
# ## Greedy drafts: a point mass
#
# Most engines draft greedily: `x` is the most likely token of the head. It was sampled from a **point mass**, so
# `q(x) = 1`. The rule does not change: it accepts `x` with probability `p(x)`, and the residual is `p` without `x`.
# What counts is the distribution that the token was *sampled from*, not what the network believed.
#
# A point mass is accepted with probability `p(x)`, a sampled token with probability `Σ min(p, q)`. The plot compares
# both over the 96 first positions of six rounds.

# %%
firsts = list(zip(all_p[:, 0], all_q[:, 0], strict=True))
for _ in range(5):
    state, _, more_p, more_q = round_of(state)
    firsts += zip(more_p[:, 0], more_q[:, 0], strict=True)
if_sampled = np.array([np.minimum(a, b).sum() for a, b in firsts])
if_greedy = np.array([a[b.argmax()] for a, b in firsts])

figure, ax = plt.subplots(figsize=(4.6, 4.2))
ax.scatter(if_greedy, if_sampled, 18)
ax.plot([0, 1], [0, 1], color="0.6", linewidth=1)
ax.set(xlabel="accepted if greedy: p(x)", ylabel="accepted if sampled: Σ min(p, q)")
ax.set_title("Temperature 1: above the line, sampling the draft is better")
print(f"mean acceptance: sampled {if_sampled.mean():.3f}, greedy {if_greedy.mean():.3f}")
assert if_sampled.mean() > 1.5 * if_greedy.mean(), "sampled drafts are accepted more often"
assert 0.5 < np.mean(if_sampled > if_greedy) < 1, "mostly, not everywhere"

one_hot = np.eye(V, dtype=np.float32)[tokens[0]]
points = [added_by_library(chain.replace(probs=probs)) for probs in (None, many(one_hot))]
assert points[0] == points[1] == added_by_hand(one_hot[1:]), "a point mass is q one-hot"

# %% [markdown]
# ## Proof by enumeration
#
# A text generated round by round has *exactly* the distribution of the target. The cell proves it for a small
# example: four tokens, `K = 2`, and another `p` and `q` after every prefix, in rational numbers. `law_of_round` adds
# up everything that one round can do. The oracle of the test suite chains rounds until four tokens are generated: two
# draft tokens, their bonus, and one token of the next round.


# %%
def laws_after(name, size=4):
    """Another distribution after every prefix, in rational numbers."""

    @functools.cache
    def after(prefix):
        weights = [random.Random(f"{name} {prefix} {token}").randint(1, 9) for token in range(size)]
        return [Fraction(weight, sum(weights)) for weight in weights]

    return after


P, Q = laws_after("target"), laws_after("draft")


class Rule(NamedTuple):
    """The three decisions of speculative sampling; replace one to inject a bug."""

    keep: callable = lambda p, q: min(Fraction(1), p / q)
    refused: callable = oracle.residual
    bonus: callable = lambda p, q: p


def law_of_round(rule, prefix, left=2):
    """Probability of everything that one round can add after a prefix."""
    p, q = P(prefix), Q(prefix)
    if not left:
        return {(token,): mass for token, mass in enumerate(rule.bonus(p, q))}
    law = Counter()
    for x in range(len(p)):  # drafted with probability q(x)
        keep = rule.keep(p[x], q[x])
        for rest, mass in law_of_round(rule, (*prefix, x), left - 1).items():
            law[(x, *rest)] += q[x] * keep * mass
        for token, mass in enumerate(rule.refused(p, q) if keep < 1 else ()):
            law[(token,)] += q[x] * (1 - keep) * mass
    return law


def total_variation(rule, horizon=4):
    written = oracle.law_of_rounds(lambda prefix: law_of_round(rule, prefix), horizon)
    return oracle.total_variation(written, oracle.autoregressive_law(P, horizon))


law = oracle.law_of_rounds(lambda prefix: law_of_round(Rule(), prefix), 4)
print(f"{len(law)} texts")
print("total variation distance from the target's distribution:", total_variation(Rule()))
assert len(law) == 4**4 and sum(law.values()) == 1
assert total_variation(Rule()) == 0, "exactly, in rational numbers"

# %% [markdown]
# The distance is zero, not small. The test suite runs the same enumeration against the code of `e3.verify`, for
# chains and trees ([test_exact_law.py](../tests/core/test_exact_law.py)).
#
# ## Common mistakes
#
# These five mistakes are easy to make. transformers once shipped the third one. The enumeration gives the exact
# distance of each from the target, and *after how many tokens* it shows.

# %%
uniform = lambda p, q: [
    Fraction(weight > 0, sum(r > 0 for r in oracle.residual(p, q)))
    for weight in oracle.residual(p, q)
]


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

figure, ax = plt.subplots()
for (name, values), marker in zip(distances.items(), "os^Dv", strict=True):
    ax.plot((1, 2, 3, 4), [float(value) for value in values], marker=marker, label=name)
ax.plot((1, 2, 3, 4), [0] * 4, color="0.3", marker=".", label="the rule")
ax.set(
    xlabel="tokens in the text",
    ylabel="total variation distance",
    xticks=(1, 2, 3, 4),
    ylim=(-0.03, 0.7),
)
ax.set_title("Exact distance from the target's distribution")
ax.legend(fontsize="small", ncols=2)
for name, values in distances.items():
    print(f"{name:26} " + "  ".join(f"{float(value):.4f}" for value in values))

assert all(values[3] > Fraction(1, 100) for values in distances.values()), (
    "every mistake changes the distribution"
)
assert all(values == sorted(values) for values in distances.values()), (
    "a longer text never shows less"
)
bonus = distances["the bonus is sampled from q"]
assert bonus[0] == bonus[1] == 0 < bonus[2], "a wrong bonus cannot be seen before token K + 1"

# %% [markdown]
# A wrong bonus cannot be seen in the first `K` tokens, because the bonus is token `K + 1`. A test needs a horizon of
# `K + 2` tokens to see also whether the next round starts correctly.
#
# ## Siblings in a draft tree
#
# A tree offers a second draft token for the same position. After the first one is rejected, the target's distribution
# is the residual. So the second token is judged against the residual, and so on (the rule of SpecInfer). The
# distribution stays exact for any number of siblings sampled from `q`. It becomes wrong if the second sibling is
# judged against the whole `p` again.


# %%
def one_level(p, q, siblings, *, forget=False):
    """Distribution of the token at one level, and the probability that a sibling is accepted."""
    law, want, refused = [Fraction(0)] * len(p), p, Fraction(1)
    for _ in range(siblings):
        keep = [min(a, b) for a, b in zip(want, q, strict=True)]
        law = [mass + refused * kept for mass, kept in zip(law, keep, strict=True)]
        refused *= 1 - sum(keep)
        rest = [max(a - b, Fraction(0)) for a, b in zip(want, q, strict=True)]
        total = sum(rest)
        want = p if forget else [mass / total for mass in rest]
    return [mass + refused * last for mass, last in zip(law, want, strict=True)], 1 - refused


p1, q1 = P(()), Q(())
for siblings in (1, 2, 3):
    law, chance = one_level(p1, q1, siblings)
    print(f"siblings: {siblings}, one is accepted with probability {float(chance):.3f}")
    assert law == p1, "exact for any number of siblings"
wrong, _ = one_level(p1, q1, 2, forget=True)
assert oracle.total_variation(dict(enumerate(wrong)), dict(enumerate(p1))) > Fraction(1, 100)

p0, q0 = np.float64(p[0]), np.float64(q[0])
by_samples = [one_level(p0.tolist(), q0.tolist(), n)[1] for n in range(1, 9)]
by_rank = np.cumsum(p0[np.argsort(-q0)])[:8]
print("real pair, 1 to 8 siblings sampled from q:", np.round(by_samples, 2))
print("real pair, the 1 to 8 most likely of q:   ", by_rank.round(2))
assert all(a <= b + 1e-12 for a, b in itertools.pairwise(by_samples)), "a sibling never hurts"
assert by_rank[0] < by_samples[0] < by_rank[-1], "one: sampling wins; eight: a list wins"

# %% [markdown]
# ## Statistical test of the compiled rule
#
# A proof is about a rule, and a program could still be wrong. The next cell samples 40,960 tokens through the
# compiled code and compares the frequencies with `p` by Pearson's chi-square test. The cell also prints the smallest
# deviation that the test would detect nine times in ten, and runs the test on an injected bug.


# %%
def frequencies(chunks=40, rows=1024):
    """Counts of the first token of a round, drafted from q and judged by e3.verify."""

    @jax.jit
    def emit(keys, p, q):
        uniforms = e3.uniforms(keys, 2 + 2 * e3.num_digits(V))
        x = e3.draw(jnp.broadcast_to(q, (rows, V)), uniforms[:, 2:4])
        root = jnp.zeros_like(x)
        draft = e3.Draft(
            tokens=jnp.stack([root, x], axis=1),
            parents=jnp.broadcast_to(jnp.array([-1, 0], jnp.int32), (rows, 2)),
            valid=jnp.ones((rows, 2), bool),
            probs=jnp.broadcast_to(q, (rows, 2, V)),
        )
        laws = jnp.broadcast_to(p, (rows, 2, V))
        verdict = e3.verify(
            draft, laws, accept=uniforms[:, :2], choose=uniforms[:, 4:], max_depth=1
        )
        return jnp.where(verdict.num_accepted > 0, x, verdict.next_token)

    keys = jax.random.split(jax.random.key(2), (chunks, rows))
    return Counter(np.concatenate([np.asarray(emit(key, p[0], q[0])) for key in keys]).tolist())


exact = dict(enumerate(np.float64(p[0]) / p[0].sum(dtype=np.float64)))
right = frequencies()
with planted(e3.verify, "jnp.where(child, rest, walk.p)", "walk.p"):
    again_from_p = frequencies()

fits = {
    "the rule": goodness_of_fit(right, exact),
    "resampled from p": goodness_of_fit(again_from_p, exact),
}
for name, fit in fits.items():
    print(
        f"{name:20} {fit.draws} draws, {fit.degrees} degrees of freedom, chi-square p = {fit.chi_square:.2g}"
    )
visible = smallest_deviation(fits["the rule"].draws, fits["the rule"].degrees, alpha=1e-6)
print(f"detected nine times in ten: probabilities off by {visible:.1%} (root mean square)")
assert fits["the rule"].chi_square > 1e-6, "the compiled rule has the target's distribution"
assert fits["resampled from p"].chi_square < 1e-6, "the same test finds the injected bug"
assert visible < 0.1

# %% [markdown]
# ## Exercises
#
# **1.** For which `q` is every draft rejected? What is the output then?
#
# <details><summary>Answer</summary>
#
# `q` has all its mass on tokens that have no mass under `p`: `Σ min(p, q) = 0`. The residual is `p` itself, so each
# round adds one token sampled from `p`. This is slow and still exact.
#
# </details>
#
# **2.** The head samples at temperature 0.5 and declares that distribution as `q`, while the target samples at
# temperature 1. Is the output exact? And if the head samples at 0.5 and declares the distribution of temperature 1?
#
# <details><summary>Answer</summary>
#
# The first case is exact: `q` only has to be the distribution that the token was sampled from. In the second case the
# output is wrong by the total variation distance printed below. No check inside a decoder can see it.
#
# </details>
#
# **3.** Show that no exact rule accepts a token sampled from `q` more often.
#
# <details><summary>Answer</summary>
#
# A drafted and accepted token `x` has probability at most `q(x)`, because it has to be drafted, and at most `p(x)`,
# because that is its share of the output. The sum over all tokens is at most `Σ min(p, q)`, which the rule reaches.
#
# </details>

# %%
nothing, everything = (
    [Fraction(0), Fraction(1), Fraction(0)],
    [Fraction(1, 2), Fraction(0), Fraction(1, 2)],
)
assert one_level(everything, nothing, 1) == (everything, 0), "exercise 1"

cooler = q0**2 / (q0**2).sum()  # temperature 0.5
keep = np.minimum(1, np.divide(p0, q0, out=np.ones_like(p0), where=q0 > 0))
rest = np.maximum(p0 - q0, 0)
dishonest = cooler * keep + (1 - (cooler * keep).sum()) * rest / rest.sum()
lost = np.abs(dishonest - p0).sum() / 2
print(f"2. accepted: {alpha:.3f} at temperature 1, {np.minimum(p0, cooler).sum():.3f} at 0.5")
print(f"   sampled at 0.5 and declared at 1: total variation distance {lost:.3f}")
assert abs(dishonest.sum() - 1) < 1e-9 and lost > 0.02

# %% [markdown]
# ## What was claimed and checked
#
# - Accepted mass and residual mass add up to `p`. The acceptance probability is `Σ min(p, q) = 1 − TV`.
# - Ten lines of numpy decide as `e3.verify` on the same uniforms. Acceptance multiplies along a chain.
# - A greedy draft is the same rule with a one-hot `q`. At temperature 1, sampled drafts are accepted more often on
#   average.
# - The distribution of a text of `K + 2` tokens is the target's, with a total variation distance of exactly 0. Five
#   mistakes change it, and a wrong bonus cannot be seen before token `K + 1`.
# - Any number of siblings is exact if each is judged against the residual of the one before.
# - The compiled rule follows the target's distribution in 40,960 samples, by a test that finds an injected bug.
#
# **Next:** [03](03_eagle3_head.ipynb), the draft head from inside.
