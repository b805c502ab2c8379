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
# # 02 · Speculative sampling from scratch
#
# A cheap head guesses tokens, and the text that comes out still has exactly the distribution of the expensive target.
# That sounds like a trick. It is two lines of arithmetic, and here you take them apart on the distributions of a real
# model. Afterwards you can
#
# - say what the coin `u · q(x) < p(x)` does, and read the acceptance probability off a picture;
# - write the rule in ten lines of numpy, and see it decide as the compiled loop decides, round after round;
# - prove it: by enumeration in rational numbers, with a distance of exactly 0 from the target's law;
# - recognise five ways of getting it almost right, and say which token of the text each of them spoils.
#
# It takes half a minute on a laptop CPU, offline, with the pair that ships with the package. Read 01 before.

# %%
import first_cell

first_cell.start(repository=True)

# %%
import functools
import itertools
import random
from collections import Counter
from fractions import Fraction
from math import exp, sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle  # tests/helpers/oracle.py: the published rules as plain loops
from matplotlib import pyplot as plt
from mutants import planted  # tests/helpers/mutants.py: bugs on demand
from pictures import bars, style

import eagle3_jax as e3
from eagle3_jax.acceptance import verification_uniforms
from eagle3_jax.loop import (
    _VERIFY as VERIFY,  # the purpose that a round's verification dice are rolled for
)
from eagle3_jax.prompts import shipped
from eagle3_jax.sampling import keys_at
from validation.forcing import forced_logits
from validation.statistics import goodness_of_fit, smallest_deviation

# %% [markdown]
# ## Two laws at one place
#
# The target has just written `parser = argparse.ArgumentParser`. What comes next? The target has a distribution `p`
# over its 4,096 tokens, the head a distribution `q`. We let the head draft three tokens by *drawing* them at
# temperature 1, and ask the target, in one forward pass, for `p` after each of them. Fifteen prompts that ship with the
# package come along for later.

# %%
K = 3
target = e3.load_target()
head = e3.load_drafter(target=target)
drawn = e3.DraftSampling.PROBABILISTIC
decoder = e3.SpeculativeDecoder(target, head, num_speculative_tokens=K, draft_sampling=drawn)
V = target.vocab_size
pieces = [target.tokenizer.decode([token]) for token in range(V)]


class Place(NamedTuple):
    """A round of 16 rows: what was drafted, what both models thought, the dice, and what the compiled round decided."""

    tokens: np.ndarray  # [B K+1], the root first
    p: np.ndarray  # [B K+1 V], the target's law after each of them
    q: np.ndarray  # [B K V], the law that each drafted token was drawn from
    accept: np.ndarray  # [B K], a uniform for each drafted token
    choose: np.ndarray  # [B 2], uniforms that draw the token after the accepted ones
    emitted: list[list[int]]  # what the compiled round wrote


def round_of(state):
    """Play a round through the compiled loop and look at everything that it was decided on."""
    known = [
        row[: end - 1].tolist()
        for row, end in zip(np.asarray(state.tokens), np.asarray(state.length), strict=True)
    ]
    accept, choose = verification_uniforms(keys_at(state.keys, state.length, VERIFY), K + 1, V)
    played = decoder.step(state)
    draft, verdict = jax.device_get((played.draft, played.verdict))
    sequences = [before + chain.tolist() for before, chain in zip(known, draft.tokens, strict=True)]
    logits = np.stack(
        [one[-(K + 1) :] for one in forced_logits(target, sequences)]
    )  # one plain forward, no cache
    ends = zip(draft.tokens, verdict.num_accepted, verdict.next_token, strict=True)
    emitted = [[*chain[1 : count + 1].tolist(), int(last)] for chain, count, last in ends]
    p = np.asarray(jax.nn.softmax(logits, axis=-1))
    return played.state, Place(
        draft.tokens, p, draft.probs[:, 1:], *map(np.asarray, (accept[:, 1:], choose)), emitted
    )


prompts = ["def main(argv=None):\n    parser = argparse.", *shipped()[:45:3]]
state = decoder.prefill(
    prompts, max_new_tokens=64, seed=4
)  # greedy, so that the first token is the likeliest
state = state.replace(sampling=e3.SamplingParams(temperature=1.0))  # from here on tokens are drawn
state, place = round_of(state)
p, q = place.p[0], place.q[0]

print(
    "after",
    repr(pieces[place.tokens[0, 0]]),
    "the head drew",
    [pieces[token] for token in place.tokens[0, 1:]],
)
assert pieces[place.tokens[0, 0]] == "ArgumentParser"
assert np.allclose(p.sum(-1), 1, atol=1e-5) and np.allclose(q.sum(-1), 1, atol=1e-5)

# %% [markdown]
# The blue outlines are `p`, the orange bars `q`. The filled part is what both have: `min(p, q)`. The head knows that a
# bracket comes, and is less sure of it than the target.

# %%
figure = bars.laws(
    p[0], q[0], labels=pieces, top=10, title="What comes after `argparse.ArgumentParser`"
)
# %% [markdown]
# ## The coin
#
# A token `x` is drawn from `q`. It is kept when `u · q(x) < p(x)`, with `u` uniform in [0, 1). The point with height `u
# · q(x)` in the column of `x` is spread evenly below the orange bars: throw darts at `q`, and keep those that land
# below `p` as well. In the column of a token that the head likes less than the target does, every dart is kept; in the
# others only the part of them below the blue line.

# %%
rng = np.random.default_rng(0)
tokens = rng.choice(V, size=200_000, p=np.float64(q[0]) / q[0].sum(dtype=np.float64))
heights = rng.random(tokens.size) * q[0][tokens]
figure = bars.darts(
    p[0],
    q[0],
    tokens[:700],
    heights[:700],
    labels=pieces,
    title="700 darts below q; those below p are kept",
)
# %% [markdown]
# Evenly spread below `q`, whose area is 1: so the share that is kept is the area below both, `Σ min(p, q)`. Call it α.
#
# It is also one minus the *total variation distance* of the two laws. The distance is the part of `p` that sticks out
# above `q`, `Σ max(p − q, 0)`, and what does not stick out is `min(p, q)`. The better the head agrees with the target,
# the more is kept, and nothing else matters.

# %%
alpha = np.minimum(p[0], q[0]).sum()
distance = np.abs(p[0] - q[0]).sum() / 2
kept = heights < p[0][tokens]
noise = sqrt(alpha * (1 - alpha) / tokens.size)

print(
    f"Σ min(p, q) = {alpha:.4f}, 1 - TV = {1 - distance:.4f}, of 200,000 darts kept {kept.mean():.4f} ± {noise:.4f}"
)
assert abs(alpha - (1 - distance)) < 1e-5, "acceptance is 1 - TV"
assert abs(kept.mean() - alpha) < 5 * noise, "the coin accepts with probability Σ min(p, q)"

# %% [markdown]
# ## What is left: the residual
#
# The darts that are kept are distributed like `min(p, q)`. What is missing from `p` is the hatched part, `max(p - q,
# 0)`: exactly the mass of a refusal, `1 - α`. So when a token is refused, draw the next one from the hatched part, made
# to sum to one. Then what is emitted has the law
#
# `min(p, q) + (1 - α) · max(p - q, 0) / (1 - α)  =  p`.
#
# That is the whole proof for one token. Note what the residual is not: it is not `p`, it is not a softmax of anything,
# and the refused token can never come out of it.

# %%
figure = bars.laws(
    p[0],
    q[0],
    labels=pieces,
    residual=True,
    top=10,
    title="Kept (filled) and residual (hatched) make p",
)

residual = np.maximum(p[0] - q[0], 0)
assert np.allclose(np.minimum(p[0], q[0]) + residual, p[0], atol=1e-7), (
    "kept and residual make p, token by token"
)
assert abs(residual.sum() - (1 - alpha)) < 1e-5, "the residual has the mass of a refusal"
assert residual[tokens[~kept]].max() == 0, "no refused token has residual mass"

# %% [markdown]
# ## The rule in ten lines
#
# For `K` drafted tokens: take one after the other; at the first refusal draw from the residual and stop; if nothing is
# refused draw one more token from the target, for its law behind the last draft is already there. Every round emits at
# least one token.
#
# A token is drawn from two uniforms: the first chooses one of 64 groups of 64 tokens, the second the token in it. The
# library does it so because a cumulative sum over a whole vocabulary rounds too much
# (`docs/decisions/0013-tokens-are-drawn-digit-by-digit.md`).


# %%
def invert(masses, uniform):
    return int(np.searchsorted(np.cumsum(masses), uniform * masses.sum(), side="right"))


def draw(p, dice):
    group = invert(p.reshape(64, 64).sum(axis=1), dice[0])
    return 64 * group + invert(p.reshape(64, 64)[group], dice[1])


def play(tokens, p, q, accept, choose):
    for k, x in enumerate(tokens):
        if not accept[k] * q[k, x] < p[k, x]:
            return [*tokens[:k], draw(np.maximum(p[k] - q[k], 0), choose)]  # the correction
    return [*tokens, draw(p[len(tokens)], choose)]  # the bonus


# %% [markdown]
# The library's rule is `e3.verify`, compiled, for batches and trees. Given the same draft and the same 512 sets of
# uniforms, does it decide the same?

# %%
ROWS = 512
dice = e3.uniforms(jax.random.split(jax.random.key(1), ROWS), K + 1 + e3.num_digits(V))
accept, choose = dice[:, : K + 1], dice[:, K + 1 :]
many = lambda array: jnp.broadcast_to(jnp.asarray(array), (ROWS, *np.shape(array)))
chain = e3.Draft(
    tokens=many(place.tokens[0]),
    parents=many(jnp.arange(K + 1, dtype=jnp.int32) - 1),
    valid=many(jnp.ones(K + 1, bool)),
    probs=many(np.concatenate([np.zeros((1, V), np.float32), q])),  # the root was not drawn
)
verify = jax.jit(e3.verify, static_argnames="max_depth")


def emitted_by(verdict, draft):
    """Tokens of each row: the accepted path, then the next token."""
    path, count, last = map(np.asarray, (verdict.path, verdict.num_accepted, verdict.next_token))
    drafted = np.take_along_axis(np.asarray(draft.tokens), np.maximum(path, 0), axis=1)
    return [[*row[:n].tolist(), int(end)] for row, n, end in zip(drafted, count, last, strict=True)]


by_library = emitted_by(verify(chain, many(p), accept=accept, choose=choose, max_depth=K), chain)
ours = [
    play(place.tokens[0, 1:].tolist(), p, q, a[1:], c)
    for a, c in zip(np.asarray(accept), np.asarray(choose), strict=True)
]
lengths = Counter(len(row) - 1 for row in ours)
print(
    f"{sum(a == b for a, b in zip(ours, by_library, strict=True))} of {ROWS} decisions are the same;",
    end=" ",
)
print("accepted tokens:", dict(sorted(lengths.items())))
assert ours == by_library, "ten lines of numpy decide as e3.verify"

# %% [markdown]
# And the compiled loop? A round's uniforms are a function of the row's key and of how long its text is, so they can be
# computed again afterwards. Six rounds of sixteen rows, drafted by the head, verified behind a cache, decided inside
# one compiled program; beside them the ten lines, on the target's law from a plain forward without a cache.

# %%
rounds = [place]
for _ in range(5):
    state, one = round_of(state)
    rounds.append(one)

replayed = [
    play(one.tokens[row, 1:].tolist(), one.p[row], one.q[row], one.accept[row], one.choose[row])
    for one in rounds
    for row in range(len(prompts))
]
decided = [emitted for one in rounds for emitted in one.emitted]
same = sum(a == b for a, b in zip(replayed, decided, strict=True))
print(f"{same} of {len(decided)} rounds of the compiled loop come out token for token; ", end="")
print(f"{np.mean([len(row) for row in decided]):.2f} tokens a round")
assert same == len(decided), "the loop's decisions can be replayed from its dice"

# %% [markdown]
# ## K steps
#
# Every position is the same game with its own pair of laws, given that all before it was kept. The next picture shows
# the three positions of the first round. For *these* three tokens the chance of keeping `x` is `min(1, p(x)/q(x))`, and
# the chance of getting as far as position `k` is the product: a chain is only as good as its first links. The 512 rows
# from above had these very tokens, so their counts must follow the products.

# %%
figure, axes = plt.subplots(1, K, figsize=(11, 3.3))
drafted = place.tokens[0, 1:]
chance = np.minimum(1, p[np.arange(K), drafted] / q[np.arange(K), drafted])
for k, ax in enumerate(axes):
    title = f"position {k + 1}: drew {pieces[drafted[k]]!r}, kept with {chance[k]:.2f}"
    bars.laws(p[k], q[k], labels=pieces, top=5, ax=ax, title=title)
    if k:
        ax.get_legend().remove()
        ax.set_ylabel("")

reach = np.cumprod(chance)  # all of the first k kept
for k in range(K):
    seen, noise = (
        np.mean([len(row) > k + 1 for row in by_library]),
        sqrt(reach[k] * (1 - reach[k]) / ROWS),
    )
    print(f"first {k + 1} kept: expected {reach[k]:.3f}, of 512 rows {seen:.3f}")
    assert abs(seen - reach[k]) <= 5 * noise + 1e-9, "acceptance multiplies along the chain"

# %% [markdown]
# ## A special case: the draft is certain
#
# Most engines draft greedily: `x` is the likeliest token of the head, and its `q` is a **point mass**, all of its
# probability on one token, because that is what `x` was drawn from. The rule needs no change. `q(x) = 1`, so the coin
# is `u < p(x)`; the residual is `p` without `x`. People who read this in EAGLE's code often take the 1 for a bug. It is
# not: what counts is the law that the token was *drawn from*, not what the network believed.
#
# Which is better? A point mass is kept with probability `p(x)`, a drawn token with `Σ min(p, q)`. Over the 96 first
# positions from above:

# %%
firsts = [(one.p[row, 0], one.q[row, 0]) for one in rounds for row in range(len(prompts))]
if_drawn = np.array([np.minimum(a, b).sum() for a, b in firsts])
if_certain = np.array([a[b.argmax()] for a, b in firsts])

figure, ax = plt.subplots(figsize=(4.6, 4.2))
ax.scatter(if_certain, if_drawn, 18, style.SERIES[0])
ax.plot([0, 1], [0, 1], color="0.6", linewidth=1)
ax.set(
    xlabel="kept if likeliest: p(x)",
    ylabel="kept if drawn: Σ min(p, q)",
    xlim=(-0.02, 1.02),
    ylim=(-0.02, 1.02),
)
ax.set_title("At temperature 1: points above the line gain by drawing")
print(
    f"mean chance of keeping the first token: drawn {if_drawn.mean():.3f}, likeliest {if_certain.mean():.3f}"
)
print(f"drawing is better at {np.mean(if_drawn > if_certain):.0%} of the places")
assert if_drawn.mean() > 1.5 * if_certain.mean(), (
    "at temperature 1 drawn tokens are kept more often"
)
assert 0.5 < np.mean(if_drawn > if_certain) < 1, "mostly, not everywhere"

# A point mass needs no distribution: leaving `probs` out, and writing the one-hot rows, come to the same decisions.
one_hot = np.eye(V, dtype=np.float32)[place.tokens[0]]
points = [
    emitted_by(
        verify(chain.replace(probs=probs), many(p), accept=accept, choose=choose, max_depth=K),
        chain,
    )
    for probs in (None, many(one_hot))
]
by_hand = [
    play(drafted.tolist(), p, one_hot[1:], a[1:], c)
    for a, c in zip(np.asarray(accept), np.asarray(choose), strict=True)
]
assert points[0] == points[1] == by_hand, "a point mass is the same rule with q one-hot"

# %% [markdown]
# ## The proof, without statistics
#
# Now the claim itself: a text written round by round has *exactly* the law of the target alone. On a toy that can be
# enumerated: four tokens, `K = 2`, and after every prefix another `p` and another `q`, in rational numbers.
# `law_of_round` adds up everything that one round can do: each draft, kept or refused at each place, each token after
# it. The oracle of the test suite chains rounds until four tokens are written (two drafts, their bonus, and one token
# of the next round) and writes down the law of the target alone.


# %%
def laws_after(name, size=4):
    """Another distribution after every prefix, in fractions."""

    @functools.cache
    def after(prefix):
        weights = [random.Random(f"{name} {prefix} {token}").randint(1, 9) for token in range(size)]
        return [Fraction(weight, sum(weights)) for weight in weights]

    return after


P, Q = laws_after("target"), laws_after("draft")


class Rule(NamedTuple):
    """The three decisions of speculative sampling; replace one to plant a bug."""

    keep: callable = lambda p, q: min(Fraction(1), p / q)
    refused: callable = oracle.residual
    bonus: callable = lambda p, q: p


def law_of_round(rule, prefix, left=2):
    """What one round emits after a prefix, and with which probability."""
    p, q = P(prefix), Q(prefix)
    if not left:
        return {(token,): mass for token, mass in enumerate(rule.bonus(p, q))}
    law = Counter()
    for x in range(len(p)):  # drafted with q(x)
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
first = next(iter(law))
print(f"{len(law)} texts; the probability of {first} is {law[first]}")
print("total variation from the target's law:", total_variation(Rule()))
assert len(law) == 4**4 and sum(law.values()) == 1
assert total_variation(Rule()) == 0, "exactly, in rational numbers"

# %% [markdown]
# Not small: zero. The test suite runs the same enumeration against the code of `e3.verify` itself, driven into every
# box of uniforms in which the rule must decide alike, for chains and trees (`tests/core/test_exact_law.py`).
#
# ## What would go wrong
#
# Five mistakes that are easily made; transformers once shipped the third. The same enumeration gives their distance
# from the target, exactly, and *after how many tokens* of the text it shows.

# %%
uniform = lambda p, q: [
    Fraction(weight > 0, sum(r > 0 for r in oracle.residual(p, q)))
    for weight in oracle.residual(p, q)
]


def softmax_of_residual(p, q):
    """A softmax of max(p - q, 0), where it should be divided by its sum."""
    weights = [Fraction(exp(max(a - b, 0))) for a, b in zip(p, q, strict=True)]
    return [weight / sum(weights) for weight in weights]


mistakes = {
    "the ratio is reversed": Rule(keep=lambda p, q: min(Fraction(1), q / p)),
    "drawn again from p": Rule(refused=lambda p, q: p),
    "the residual is a softmax": Rule(refused=softmax_of_residual),
    "the residual is uniform": Rule(refused=uniform),
    "the bonus comes from q": Rule(bonus=lambda p, q: q),
}
distances = {
    name: [total_variation(rule, n) for n in (1, 2, 3, 4)] for name, rule in mistakes.items()
}

figure, ax = plt.subplots()
for (name, values), marker in zip(distances.items(), "os^Dv", strict=True):
    ax.plot((1, 2, 3, 4), [float(value) for value in values], marker=marker, label=name)
ax.plot((1, 2, 3, 4), [0] * 4, color="0.3", marker=".", label="the rule")
ax.set(
    xlabel="tokens of the text",
    ylabel="total variation distance",
    xticks=(1, 2, 3, 4),
    ylim=(-0.03, 0.7),
)
ax.set_title("How far the text's law is from the target's, exactly")
ax.legend(fontsize="small", ncols=2)
for name, values in distances.items():
    print(f"{name:26} " + "  ".join(f"{float(value):.4f}" for value in values))

assert all(values[3] > Fraction(1, 100) for values in distances.values()), (
    "every mistake moves the law"
)
assert all(values == sorted(values) for values in distances.values()), (
    "a longer text never shows less"
)
bonus = distances["the bonus comes from q"]
assert bonus[0] == bonus[1] == 0 < bonus[2], "a wrong bonus cannot be seen before token K + 1"

# %% [markdown]
# The wrong bonus is the instructive one: a test that looks at the first `K` tokens of a text finds nothing, because the
# bonus is token `K + 1`. A horizon of `K + 2` also sees whether the next round begins where this one ended.
#
# ## Two siblings
#
# A tree offers a second guess for the same place. After the first is refused, the target's remaining wish is the
# residual; so the second is judged against *that*, and after it against what is then left (SpecInfer's rule). For `n`
# siblings drawn from the same `q`:


# %%
def one_level(p, q, siblings, *, forget=False):
    """The law of the token at one level, and the chance that some sibling is kept. `forget` is a bug."""
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
    apart = sum(abs(a - b) for a, b in zip(law, p1, strict=True)) / 2
    print(f"siblings: {siblings}, total variation {apart}, one is kept with {float(chance):.3f}")
    assert law == p1, "exact for any number of siblings"
wrong, _ = one_level(p1, q1, 2, forget=True)
lost = sum(abs(a - b) for a, b in zip(wrong, p1, strict=True)) / 2
print(f"if the second sibling sees the whole of p again: TV {lost} = {float(lost):.3f}")
assert lost > Fraction(1, 100)

# %% [markdown]
# At our real place, siblings drawn from `q` and, as EAGLE's trees have them, the likeliest tokens of `q` in order. A
# refused point mass takes only its own token out of `p`, so the chance of keeping one of the `n` likeliest is the sum
# of their `p`.

# %%
p0, q0 = np.float64(p[0]), np.float64(q[0])
by_draws = [one_level(p0.tolist(), q0.tolist(), n)[1] for n in range(1, 9)]
by_rank = np.cumsum(p0[np.argsort(-q0)])[:8]

figure, ax = plt.subplots(figsize=(6.4, 3.4))
ax.plot(range(1, 9), by_draws, marker="o", label="drawn from q")
ax.plot(range(1, 9), by_rank, marker="s", label="the likeliest of q, in order")
ax.set(
    xlabel="siblings",
    ylabel="chance that one is kept",
    ylim=(0, 1.02),
    title="More guesses for one place",
)
ax.legend()
assert all(a <= b + 1e-12 for a, b in itertools.pairwise(by_draws)), "another sibling never hurts"
assert abs(by_draws[0] - alpha) < 1e-5 and by_rank[0] < by_draws[0] < by_rank[-1], (
    "one: drawing wins; eight: a list does"
)

# %% [markdown]
# ## Many draws of the compiled function
#
# A proof is about a rule; a program could still have it wrong. So draw 40,960 times through the compiled code at the
# real place, all 4,096 tokens, and compare the frequencies with `p` by Pearson's test. A test that finds nothing says
# little unless it says what it *would have found*: so the size of a deviation that it sees nine times in ten is printed
# with it, at a false alarm in a million.


# %%
def frequencies(chunks=40, rows=1024):
    """How often each token comes first in a round, drafted from q and judged by e3.verify as it now is."""

    @jax.jit
    def emit(keys, p, q):
        dice = e3.uniforms(keys, 2 + 2 * e3.num_digits(V))
        x = e3.draw(jnp.broadcast_to(q, (rows, V)), dice[:, 2:4])
        root = jnp.zeros_like(x)
        draft = e3.Draft(
            tokens=jnp.stack([root, x], axis=1),
            parents=jnp.broadcast_to(jnp.array([-1, 0], jnp.int32), (rows, 2)),
            valid=jnp.ones((rows, 2), bool),
            probs=jnp.broadcast_to(q, (rows, 2, V)),
        )
        laws = jnp.broadcast_to(p, (rows, 2, V))
        verdict = e3.verify(draft, laws, accept=dice[:, :2], choose=dice[:, 4:], max_depth=1)
        return jnp.where(verdict.num_accepted > 0, x, verdict.next_token)

    keys = jax.random.split(jax.random.key(2), (chunks, rows))
    return Counter(np.concatenate([np.asarray(emit(key, p[0], q[0])) for key in keys]).tolist())


law = dict(enumerate(np.float64(p[0]) / p[0].sum(dtype=np.float64)))
right = frequencies()
with planted(e3.verify, "jnp.where(child, rest, walk.p)", "walk.p"):
    again_from_p = frequencies()

fits = {
    "the rule": goodness_of_fit(right, law),
    "drawn again from p": goodness_of_fit(again_from_p, law),
}
for name, fit in fits.items():
    print(
        f"{name:20} {fit.draws} draws, {fit.degrees} degrees of freedom, chi-square p = {fit.chi_square:.2g}"
    )
visible = smallest_deviation(fits["the rule"].draws, fits["the rule"].degrees, alpha=1e-6)
print(f"seen nine times in ten: probabilities that are off by {visible:.1%} (root mean square)")
assert fits["the rule"].chi_square > 1e-6, "the compiled rule has the target's law"
assert fits["drawn again from p"].chi_square < 1e-6, "and the same test finds the planted bug"
assert visible < 0.1

# %%
top = np.argsort(-p[0])[:8]
figure, ax = plt.subplots()
share = lambda counts: np.array([counts[int(token)] for token in top]) / sum(counts.values())
for shift, values, colour, name in (
    (-0.27, p[0][top], style.TARGET, "p, exactly"),
    (0, share(right), style.COLOURS[style.ACCEPTED], "40,960 draws, the rule"),
    (0.27, share(again_from_p), style.COLOURS[style.REJECTED], "40,960 draws, drawn again from p"),
):
    ax.bar(np.arange(8) + shift, values, 0.25, color=colour, label=name)
ax.set_xticks(range(8), [bars.visible(pieces[token]) for token in top], family="monospace")
ax.set(ylabel="probability", title="What is emitted first, counted")
ax.legend()
assert abs(share(right)[0] - p[0][top[0]]) < 0.015 < abs(share(again_from_p)[0] - p[0][top[0]]), (
    "seen by eye, too"
)

# %% [markdown]
# ## Exercises
#
# **1.** At which `q` is nothing ever kept? What is then emitted, and from which law?
#
# <details><summary>Answer</summary>
#
# Where `q` has all its mass on tokens that `p` gives none: `Σ min(p, q) = 0`. Every draft is refused, the residual is
# `p` itself, and each round emits one token from `p`. Slow and still exact. The next cell checks it.
#
# </details>
#
# **2.** At which `q` is everything kept, and what becomes of the residual? What must a program do there?
#
# <details><summary>Answer</summary>
#
# At `q = p`. The residual is 0 everywhere, and dividing by its sum would give "not a number". In real arithmetic no
# refusal can happen there; rounding can bring one about all the same. `e3.verify` takes the token when the residual has
# no mass, which is the only thing left to emit. The next cell runs it.
#
# </details>
#
# **3.** The head drafts at temperature 0.5 and declares that law as `q`, while the target samples at 1. Is the text
# still exact? Is more or less kept at our place? And if it draws at 0.5 and declares the law of temperature 1?
#
# <details><summary>Answer</summary>
#
# Exact: the rule never asks where `q` comes from, it must only be the law that the token was drawn from. How much is
# kept is `Σ min(p, q)` with the new `q`, printed below. In the last case `q` is not what was drawn from, and the law of
# the text is wrong by the total variation printed there, although both networks are fine. This is the one thing that no
# check inside a decoder can see.
#
# </details>
#
# **4.** Show that no other rule keeps a token drawn from `q` more often and is still exact.
#
# <details><summary>Answer</summary>
#
# Whatever is decided, the kept token `x` comes out with probability at most `q(x)`, since it has to be drafted, and at
# most `p(x)`, since that is its share of the text. So the kept mass of each token is at most `min(p(x), q(x))`, and
# their sum at most `Σ min(p, q)`, which the coin reaches.
#
# </details>

# %%
# Exercises 1 and 2.
nothing, everything = (
    [Fraction(0), Fraction(1), Fraction(0)],
    [Fraction(1, 2), Fraction(0), Fraction(1, 2)],
)
law, chance = one_level(everything, nothing, 1)
assert chance == 0 and law == everything
same = chain.replace(probs=many(np.concatenate([np.zeros((1, V), np.float32), p[:K]])))  # q = p
verdict = verify(same, many(p), accept=accept, choose=choose, max_depth=K)
assert np.asarray(verdict.num_accepted).min() == K, "q = p: all is kept in every row"

# Exercise 3.
cooler = q0**2 / (q0**2).sum()  # temperature 0.5
print(
    f"kept: {np.minimum(p0, q0).sum():.3f} at temperature 1, {np.minimum(p0, cooler).sum():.3f} at 0.5"
)
keep = np.minimum(
    1, np.divide(p0, q0, out=np.ones_like(p0), where=q0 > 0)
)  # decided with q of temperature 1
rest = np.maximum(p0 - q0, 0)
dishonest = cooler * keep + (1 - (cooler * keep).sum()) * rest / rest.sum()
print(f"drawn at 0.5 and declared at 1: total variation {np.abs(dishonest - p0).sum() / 2:.3f}")
assert abs(dishonest.sum() - 1) < 1e-9 and np.abs(dishonest - p0).sum() / 2 > 0.02

# %% [markdown]
# ## What was claimed and checked
#
# - The coin keeps a token with probability `Σ min(p, q) = 1 - TV`: at a real place, by 200,000 darts.
# - Kept mass and residual make `p`, token by token, and no refused token has residual mass.
# - Ten lines of numpy decide as `e3.verify` on the same uniforms, and as the compiled loop in every round replayed.
# - A greedy draft is the same rule with a one-hot `q`; drawing is kept more often at temperature 1, not everywhere.
# - The law of a text of `K + 2` tokens is the target's with a total variation of exactly 0; five mistakes are not, and
#   a wrong bonus cannot be seen before token `K + 1`.
# - Any number of siblings is exact if each is judged against what the one before has left.
# - The compiled function has the target's law in 40,960 draws, by a test that finds a planted bug.
#
# ## Next
#
# 04 follows the rounds of a tree. 07 plants bugs that some tests catch and others do not. 10 writes a drafter and an
# acceptance rule of your own.
