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
# # 06 · Losslessness
#
# Speculative decoding is lossless if its texts have the target's *distribution*. After this
# notebook you can
#
# - list the guarantees for one request and for a request in a batch;
# - distinguish an approximate tie of bfloat16 logits from a bug, and choose a baseline that is
#   equal bit for bit;
# - name the test that catches a given bug, and the tests that miss it;
# - explain why no output shows a broken head.
#
# The notebook takes about three minutes on two CPU cores, offline. It needs only
# `pip install -e '.[notebooks]'` in a checkout, whose tests it uses. Read
# [01](01_memory_bound_decoding.ipynb) and [02](02_speculative_sampling.ipynb) first.
#
# **Exercises** work as in [00](00_watch_it_draft.ipynb): write a function, or use its answer.

# %% tags=["hide-input"]
import first_cell

first_cell.start(repository=True)

import contextlib
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from exercises import checked
from matplotlib import pyplot as plt
from mutants import inject_bug  # tests/helpers/mutants.py: injected bugs
from pictures import bars, style
from pictures.maps import table_map

import eagle3_jax as e3
from eagle3_jax import acceptance
from eagle3_jax.drafters import Plain
from eagle3_jax.loop import SpeculativeLoop
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.prompts.benchmark import shipped
from eagle3_jax.tree import causal_mask
from validation.forcing import forced_logits
from validation.margin import TIE_ULPS, bfloat16_ulp
from validation.statistics import (
    Score,
    directed,
    kolmogorov_smirnov,
    randomised_pit,
    surprisal,
    towards,
)

# %% [markdown]
# ## Guarantees
#
# | decoding | equal to the reference |
# |---|---|
# | greedy, float32 | the text of plain decoding, token for token |
# | greedy, bfloat16 | the text of plain decoding, except at approximately tied logits |
# | greedy, bfloat16, against plain decoding in blocks of the same shape | every bit |
# | sampled | the distribution of texts |
# | with other requests in a batch of the same size | every bit of a request |
# | **not** guaranteed | the text of plain decoding with the same seed |
# | **not** guaranteed | the same bits in another batch size or block size |
#
# The first cell checks the first row: eight held-out prompts, a chain of three, float32.

# %%
K = 3
NEW = 40
prompts = shipped()[0:40:5]
target = e3.load_target()
head = e3.load_drafter(target=target)


def greedy(drafter=None, **options):
    return e3.SpeculativeDecoder(target, drafter, stop_tokens=(), **options).generate(
        prompts, max_new_tokens=NEW
    )


plain = greedy()
chain = greedy(head, num_speculative_tokens=K)
same = sum(a == b for a, b in zip(chain.tokens, plain.tokens, strict=True))
print(f"{same} of {len(prompts)} texts are equal; τ = {chain.stats.mean_acceptance_length:.2f}")
assert chain.tokens == plain.tokens, "greedy speculation generates the text of plain decoding"

# %% [markdown]
# ## Seeds and batches
#
# With the same seed, plain and speculative decoding sample different texts. This is correct:
# speculation uses its random numbers for other decisions. The same decoder with the same seed
# repeats its text. A request does not depend on the other requests in its batch, because its random
# numbers depend only on its key and its position.

# %%
sampled = e3.SamplingParams(temperature=1.0)
sampled_drafts = {"num_speculative_tokens": K, "draft_sampling": e3.DraftSampling.PROBABILISTIC}
two = {
    "plain": e3.SpeculativeDecoder(target, stop_tokens=()),
    "drafted": e3.SpeculativeDecoder(target, head, stop_tokens=(), **sampled_drafts),
}
texts = {
    name: decoder.generate(prompts, max_new_tokens=24, sampling=sampled, seed=1).tokens
    for name, decoder in two.items()
}
again = two["drafted"].generate(prompts, max_new_tokens=24, sampling=sampled, seed=1).tokens
others = [prompts[0], *reversed(prompts[1:])]
next_to_others = two["drafted"].generate(others, max_new_tokens=24, sampling=sampled, seed=1).tokens

for name, rows in texts.items():
    print(f"{name:8}", repr(target.tokenizer.decode(rows[0]))[:90])
same = sum(a == b for a, b in zip(texts["plain"], texts["drafted"], strict=True))
print(f"same seed, plain and drafted: {same} of {len(prompts)} texts are equal")
assert same < len(prompts), "the same seed does not mean the same text"
assert again == texts["drafted"] and next_to_others[0] == again[0], (
    "a decoder repeats its text, in any batch of this size"
)


def last_state(decoder, prompts, **options):
    """The state after a whole generation: tokens, counters and both caches."""
    state = decoder.prefill(prompts, max_new_tokens=16, **options)
    while np.any(state.running):
        state = decoder.step(state).state
    return jax.device_get(state)


def differing(first_cache, second_cache, rows):
    """Counts the numbers in committed slots of two target caches: those that differ, and all."""
    compared = different = 0
    for leaf, theirs in zip(
        jax.tree.leaves(first_cache.layers), jax.tree.leaves(second_cache.layers), strict=True
    ):
        for row in rows:
            length = min(first_cache.length[row], second_cache.length[row])
            same = leaf[row, :, :length] == theirs[row, :, :length]
            compared = compared + same.size
            different = different + np.count_nonzero(~same)
    return different, compared


in_order, moved = (
    last_state(two["drafted"], texts, sampling=sampled, seed=1) for texts in (prompts, others)
)
assert differing(in_order.cache, moved.cache, [0])[0] == 0, "every bit of its cache is the same"

# %% [markdown]
# ## Approximately tied logits
#
# Plain decoding runs the target on one token at a time, verification on a block of `K + 1`. These
# are two compiled programs that add the same products in a different order. So their logits differ
# slightly. If two logits are approximately tied, the argmax can change, *without any drafter*.
#
# A **unit in the last place** is the distance to the next larger floating-point number. bfloat16
# has 8 significant bits: a power of two has 128 numbers between itself and the next one. So numbers
# between 8 and 16 are 1/16 apart.
#
# **Exercise: the unit.**


# %%
def unit_in_last_place(values):
    """Returns the unit in the last place of bfloat16 at each positive value, `[N]` in float64."""
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def unit_in_last_place_answer(values):
    return 2.0 ** (np.floor(np.log2(values)) - 7)


# %%
def check_unit_in_last_place(unit_in_last_place):
    assert np.allclose(unit_in_last_place(np.array([8.0, 15.9])), 1 / 16), (
        "numbers from 8 to 16 are 1/16 apart"
    )

    values = np.geomspace(0.01, 200, 60).astype(ml_dtypes.bfloat16)
    # the next number has the next bit pattern
    above = (values.view(np.uint16) + 1).view(ml_dtypes.bfloat16)
    gaps = above.astype(float) - values.astype(float)
    units = unit_in_last_place(values.astype(float))

    wrong = np.flatnonzero(~np.isclose(units, gaps))
    assert not wrong.size, (
        f"after {values[wrong[0]]} the next number is {above[wrong[0]]}, {gaps[wrong[0]]} higher"
    )

    assert np.allclose(unit_in_last_place(np.array([20.0])), bfloat16_ulp(20.0)), (
        "the unit of the validation"
    )


unit_in_last_place = checked(
    unit_in_last_place, unit_in_last_place_answer, check_unit_in_last_place
)

# %% [markdown]
# `advance` feeds one given token, in a block of one token or in a block of four with padding after
# it. Both programs follow the same text.


# %%
@functools.partial(jax.jit, static_argnums=(0, 1))
def advance(model, block, params, cache, root):
    """Logits after the root, run in a block of this size, and the cache with the root in it."""
    tokens = jnp.zeros((root.size, block), jnp.int32).at[:, 0].set(root)
    positions = cache.length[:, None] + jnp.arange(block, dtype=jnp.int32)
    output = model(params, tokens, positions, causal_mask(block), cache)
    return model.unembed(params, output.final)[:, 0], cache.commit(
        output.written, jnp.ones_like(root)
    )


def along_one_text(dtype, prompts, steps):
    """Logits of both programs at every step of one greedy text, ``[2, steps, B, V]``."""
    model = e3.load_target(dtype=dtype)
    state = e3.SpeculativeDecoder(model, stop_tokens=()).prefill(prompts, max_new_tokens=steps + 1)
    root = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]

    caches = {1: state.cache, K + 1: state.cache}
    seen = []

    for _ in range(steps):
        logits = {}
        for block in caches:
            logits[block], caches[block] = advance(
                model.model, block, model.params, caches[block], root
            )
        seen.append([np.asarray(row) for row in logits.values()])
        root = jnp.argmax(logits[1], axis=-1).astype(jnp.int32)
    return np.array(seen).swapaxes(0, 1)


logits_of = {}
for dtype, steps in (("float32", 8), ("bfloat16", 28)):
    single, block = along_one_text(dtype, shipped()[14:38], steps)
    ulp = unit_in_last_place(np.abs(single.max(-1)).astype(float))
    ranked = np.sort(single, axis=-1)
    chosen = np.take_along_axis(single, block.argmax(-1)[..., None], -1)[..., 0]
    logits_of[dtype] = (
        single,
        block,
        (single.max(-1) - chosen) / ulp,
        (ranked[..., -1] - ranked[..., -2]) / ulp,
    )
    flips = single.argmax(-1) != block.argmax(-1)
    largest_gap = np.abs(single - block).max()
    print(
        f"{dtype:9} {flips.size} positions: largest difference of logits {largest_gap:.1g},"
        f" different argmax at {flips.sum()}"
    )
    if dtype == "float32":
        assert largest_gap < 1e-3 and flips.sum() == 0, (
            "in float32 the two programs choose the same tokens here"
        )

single, block, gap, margin = logits_of["bfloat16"]
near = margin <= TIE_ULPS
print(
    f"bfloat16: the two largest logits are within two units at {near.mean():.0%} of the positions"
)
print("gaps at a different argmax, in units in the last place:", gap[flips].tolist())
assert (single != block).any(), "the two programs round differently"
assert near.any() and (gap[flips] <= TIE_ULPS).all(), "every change is an approximate tie"

# %% [markdown]
# The two largest logits are often equal or one or two units apart. The left plot counts the margins
# between them. The right plot shows the logits of both programs at one position.

# %% tags=["hide-input"]
figure, (margin_axes, logit_axes) = plt.subplots(1, 2, figsize=(10.5, 3.8), width_ratios=(1.5, 1))
steps = np.minimum(np.round(margin), 12)


def counts(chosen):
    return np.bincount(steps[chosen].astype(int), minlength=13)


margin_axes.bar(range(13), counts(~flips), color=style.TARGET, label="same argmax")
margin_axes.bar(
    range(13),
    counts(flips),
    bottom=counts(~flips),
    color=style.COLOURS[style.REJECTED],
    label="different argmax",
)
margin_axes.axvspan(-0.5, TIE_ULPS + 0.5, color=style.DRAFTER, alpha=0.12, label="approximate tie")
margin_axes.set_xticks(range(12))
title = f"bfloat16: margins of {margin.size} positions"
margin_axes.set(xlim=(-0.6, 11.6), ylim=(0, 1.5 * counts(margin < 12)[:12].max()), title=title)
margin_axes.set(xlabel="margin of the largest logit, units", ylabel="positions")
margin_axes.legend()

step, row = np.argwhere(flips)[0] if flips.any() else np.argwhere(near)[0]
pair = np.array([single[step, row], block[step, row]])
top = np.argsort(-pair.max(0))[:4]
unit = float(bfloat16_ulp(pair.max()))
for token, marker in zip(top, "os^D", strict=True):
    name = bars.visible(target.tokenizer.decode([int(token)]))
    logit_axes.plot((0, 1), pair[:, token], marker=marker, label=f"{name!r}")
low = pair[:, top].min()
high = pair[:, top].max()
logit_axes.set_yticks(np.arange(low - unit, high + 2 * unit, unit))
logit_axes.set(
    xlim=(-0.3, 1.9), ylabel="logit (lines: bfloat16 numbers)", title="Logits of one position"
)
logit_axes.set_xticks((0, 1), ("block of 1", f"block of {K + 1}"))
logit_axes.legend(loc="center right", fontsize="small")
assert (pair[:, top] % bfloat16_ulp(pair[:, top]) == 0).all(), "every logit is a bfloat16 number"

# %% [markdown]
# ## Baseline of the same block size
#
# `Plain(num_nodes=K + 1)` decodes without a drafter in blocks of `K + 1`, with padding after the
# root. Speculative decoding gives the same keys and values in the target's cache, bit for bit, in
# float32 and in bfloat16.

# %%
for dtype in ("float32", "bfloat16"):
    model = e3.load_target(dtype=dtype)
    decoders = (
        e3.SpeculativeDecoder(
            model, e3.load_drafter(target=model), num_speculative_tokens=K, stop_tokens=()
        ),
        e3.SpeculativeDecoder(model, Plain(num_nodes=K + 1), stop_tokens=()),
    )
    drafted, shaped = (last_state(decoder, prompts) for decoder in decoders)
    different, compared = differing(drafted.cache, shaped.cache, range(len(prompts)))
    print(f"{dtype:9} {compared:,} numbers in the caches compared, {different} differ")
    assert np.array_equal(drafted.tokens, shaped.tokens), "the same tokens"
    assert different == 0, "the same bits"

# %% [markdown]
# ## Injected bugs and tests
#
# A test is useful if it catches bugs. `inject_bug(function, old, new)` replaces a piece of a
# function's source. Then the programs are compiled again. The next cells run seven tests on seven
# bugs.
#
# Two tests run the whole loop greedily. The first one compares the text with plain decoding. The
# second one measures τ. Five tests use sampled tokens for pairs `p`, `q` of the shipped models.
# Each token that a round adds must have its distribution `p`, for any draft. So any score of a
# token has a known mean and variance. The normalized sum over many tokens is approximately a
# standard normal `z`:
#
# - **surprisal**: `−ln p(x)`. Detects a text with too likely or too unlikely tokens.
# - **rank**: the rank of the token in `p`, made uniform (probability integral transform), then a
#   Kolmogorov–Smirnov test.
# - **directed**: `ln(q(x)/p(x))`. Detects a shift of the text towards the draft.
# - **bonus**: the directed score for the tokens after an accepted draft.
# - **resampled**: sample from the declared `q` with the same uniforms, and compare with the draft
#   token. No statistics.
#
# **Exercise: the normalized sum.** Every token of the vocabulary has a score. The score of the
# sampled token has a known mean and variance under `p`.


# %%
def z_score(scores, p, tokens):
    """Returns the normalized sum of scores: mean 0 and variance 1 if the tokens follow `p`.

    Args:
        scores: Score of each token of the vocabulary at each position, `[N, V]`.
        p: Distribution at each position, `[N, V]`.
        tokens: Sampled tokens, `[N]`.
    """
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def z_score_answer(scores, p, tokens):
    observed = scores[np.arange(len(tokens)), tokens]
    mean = (p * scores).sum(axis=1)
    variance = (p * scores**2).sum(axis=1) - mean**2
    return (observed - mean).sum() / np.sqrt(variance.sum())


# %%
def check_z_score(z_score):
    half = np.array([[0.5, 0.5]] * 16)
    z = z_score(np.array([[0.0, 2.0]] * 16), half, np.ones(16, int))
    assert np.isclose(z, 4), "16 scores of 2 with mean 1 and variance 1: (32 - 16) / sqrt(16) = 4"
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(6), 500)
    q = rng.dirichlet(np.ones(6), 500)
    tokens = np.array([rng.choice(6, p=row) for row in p])
    for scores in (-np.log(p), np.log(q / p)):
        expected = Score.of(scores, p, tokens).z
        assert np.isclose(z_score(scores, p, tokens), expected), "the validation computes another z"


z_score = checked(z_score, z_score_answer, check_z_score)

# %% [markdown]
# The next cell collects pairs `p`, `q` from rounds of the shipped models.


# %%
def real_pairs(rounds=6, size=128):
    """Pairs (p, q) at positions of real texts: the 127 most likely tokens, the others as one."""
    decoder = two["drafted"]
    pairs = []
    state = decoder.prefill(prompts, max_new_tokens=64).replace(sampling=sampled)
    for _ in range(rounds):
        known = [
            row[: end - 1].tolist()
            for row, end in zip(np.asarray(state.tokens), state.length, strict=True)
        ]
        played = decoder.step(state)
        state = played.state

        draft = jax.device_get(played.draft)
        fed = [before + nodes.tolist() for before, nodes in zip(known, draft.tokens, strict=True)]
        for logits, q in zip(forced_logits(target, fed), draft.probs, strict=True):
            pairs += [(jax.nn.softmax(logits[-K - 1 + k]), q[k + 1]) for k in range(K)]

    # The most likely tokens under either distribution, then the mass of all others.
    p, q = np.array(pairs, np.float64).swapaxes(0, 1)
    likely = np.argsort(-np.maximum(p, q), axis=1)[:, : size - 1]
    cut = [np.take_along_axis(dist, likely, axis=1) for dist in (p, q)]
    completed = [
        np.concatenate([dist, np.maximum(1 - dist.sum(1, keepdims=True), 0)], axis=1)
        for dist in cut
    ]
    return [dist / dist.sum(1, keepdims=True) for dist in completed]


P, Q = real_pairs()
print(f"{len(P)} positions; mean Σ min(p, q) = {np.minimum(P, Q).sum(1).mean():.2f}")

# %% [markdown]
# Each simulated round has one draft token. `propose` samples it from `q` and returns the token and
# the declared distribution. The rule accepts or rejects it. A bonus follows an accepted draft.


# %%
def honest(q, uniforms):
    return e3.draw(q, uniforms), q


def sampling_tests(propose, repeats=48):
    """Runs many rounds with e3.verify and scores the tokens that they add."""
    p = jnp.asarray(P, jnp.float32)
    q = jnp.asarray(Q, jnp.float32)
    n = len(P)
    digits = e3.num_digits(P.shape[1])

    def with_next(dist):
        """Distributions after the root and after the draft."""
        return jnp.stack([dist, jnp.roll(dist, -1, axis=0)], axis=1)

    @jax.jit
    def play(keys, p, q):
        uniforms = e3.uniforms(keys, 2 + 2 * digits)
        x, declared = propose(q, uniforms[:, 2 : 2 + digits])
        draft = e3.Draft(
            tokens=jnp.stack([jnp.zeros_like(x), x], axis=1),
            parents=jnp.broadcast_to(jnp.array([-1, 0], jnp.int32), (n, 2)),
            valid=jnp.ones((n, 2), bool),
            # The root's entry is ignored; one injected bug reads it.
            probs=with_next(q)[:, ::-1].at[:, 1].set(declared),
        )

        verdict = e3.verify(
            draft,
            with_next(p),
            accept=uniforms[:, :2],
            choose=uniforms[:, 2 + digits :],
            max_depth=1,
        )

        return (
            x,
            verdict.num_accepted > 0,
            verdict.next_token,
            e3.draw(declared, uniforms[:, 2 : 2 + digits]),
        )

    keys = jax.random.split(jax.random.key(0), (repeats, n))
    x, accepted, last, again = (
        np.concatenate(column)
        for column in zip(*[jax.device_get(play(key, p, q)) for key in keys], strict=True)
    )
    dists = [
        np.tile(dist, (repeats, 1))
        for dist in (P, Q, np.roll(P, -1, axis=0), np.roll(Q, -1, axis=0))
    ]
    first = np.where(accepted, x, last)
    bonus = last[accepted]
    spread = np.random.default_rng(0).random(first.size)
    return {
        "surprisal z": surprisal(dists[0], first).z,
        "rank p": kolmogorov_smirnov(randomised_pit(dists[0], first, spread, order=-dists[0])),
        "directed z": z_score(towards(dists[0], dists[1]), dists[0], first),
        "bonus z": directed(dists[2][accepted], dists[3][accepted], bonus).z,
        "resampled": float(np.mean(x == again)),
    }


def loop_tests():
    result = greedy(head, num_speculative_tokens=K)
    same = sum(a == b for a, b in zip(result.tokens, plain.tokens, strict=True))
    return {"greedy texts": same, "τ": result.stats.mean_acceptance_length}


def from_the_top_50(q, uniforms):
    """A bug of transformers: samples after top-k and declares the whole q."""
    least = jax.lax.top_k(q, 50)[0][:, -1:]
    return e3.draw(jnp.where(q >= least, q, 0.0), uniforms), q


def rounded(q, uniforms):
    """Samples the draft from bfloat16 probabilities and declares those in float32."""
    return e3.draw(q.astype(jnp.bfloat16).astype(jnp.float32), uniforms), q


RESIDUAL = "jnp.where(is_child, rejected_p, walk.p)"
COMMIT = "state.cache.commit(output.written, count, None"


def rule(old, new):
    """A bug of the acceptance rule: a part of its source is replaced."""
    return inject_bug, (acceptance._walk, old, new), honest


BUGS = {
    "none": (contextlib.nullcontext, (), honest),
    "rejected drafts stay in the cache": (
        inject_bug,
        (SpeculativeLoop.step, COMMIT, COMMIT.replace("count", "jnp.full_like(count, num_nodes)")),
        honest,
    ),
    "the residual is a softmax": rule(
        RESIDUAL, "jnp.where(is_child, jax.nn.softmax(rejected_p), walk.p)"
    ),
    "sampled from the top 50, declared whole": (contextlib.nullcontext, (), from_the_top_50),
    "a rejection resamples from p": rule(RESIDUAL, "walk.p"),
    "the bonus is sampled from q": rule(
        "next_token = draw(walk.p, choose)",
        "next_token = draw(jnp.where(walk.count == max_depth, draft.probs[0], walk.p), choose)",
    ),
    "q is sampled in bfloat16, declared in float32": (contextlib.nullcontext, (), rounded),
    "the head reads its layers in reverse": (
        inject_bug,
        (Decoder.__call__, "for layer in aux_layers]", "for layer in reversed(aux_layers)]"),
        honest,
    ),
}

measured = {}
for name, (context, arguments, propose) in BUGS.items():
    with context(*arguments):
        measured[name] = {**loop_tests(), **sampling_tests(propose)}

# %% [markdown]
# ## Coverage of bugs by tests
#
# A test catches a bug if a text changes, if `|z| > 5` or `p < 10⁻⁶`, if a resampled token differs,
# or if τ falls by more than 10 %. A green cell means that the test catches the bug.

# %%
healthy = measured["none"]
CAUGHT = {
    "greedy texts": lambda value: value < len(prompts),
    "τ": lambda value: value < 0.9 * healthy["τ"],
    "surprisal z": lambda value: abs(value) > 5,
    "rank p": lambda value: value < 1e-6,
    "directed z": lambda value: abs(value) > 5,
    "bonus z": lambda value: abs(value) > 5,
    "resampled": lambda value: value < 1,
}
caught = {
    bug: {test for test, value in row.items() if CAUGHT[test](value)}
    for bug, row in measured.items()
}

assert caught["none"] == set(), "no test fails without a bug"
assert "greedy texts" in caught["rejected drafts stay in the cache"], (
    "greedy equality catches errors of the cache"
)
softmax = caught["the residual is a softmax"]
assert {
    "surprisal z",
    "rank p",
} <= softmax and "greedy texts" not in softmax, "only sampled text shows the bug"
again = caught["a rejection resamples from p"]
assert "directed z" in again and not again & {
    "greedy texts",
    "rank p",
    "surprisal z",
    "τ",
}, "only a directed test catches it"
bonus = caught["the bonus is sampled from q"]
assert "bonus z" in bonus and not bonus & {
    "directed z",
    "rank p",
    "surprisal z",
}, "only the test at the bonus catches it"
assert caught["q is sampled in bfloat16, declared in float32"] == {"resampled"}, (
    "only a deterministic test catches it"
)
assert caught["the head reads its layers in reverse"] == {"τ"}, (
    "no test of the output catches a broken head"
)

# %% tags=["hide-input"]
hits = np.array([[test in tests for test in CAUGHT] for tests in caught.values()], float)
words = [[f"{row[test]:.3g}" for test in CAUGHT] for row in measured.values()]
look = {"words": words, "colours": "Greens", "most": 1.4}
table_map(hits, list(caught), list(CAUGHT), title="Result of each test; green: caught", **look)
plt.show()

# %% [markdown]
# - **A cache that keeps rejected drafts** changes the text. Greedy equality is the test for tokens,
#   positions and caches.
# - **A softmax of the residual** does not change greedy text, because greedy decoding has no
#   residual. The sampled text contains too many unlikely tokens.
# - **Resampling from `p`** shifts the text towards the draft. The mean surprisal and the ranks
#   hardly change. Only the *directed* test along `ln(q/p)` catches it.
# - **A bonus from `q`** changes only the bonus token.
# - **A `q` rounded to bfloat16** changes every probability by less than one part in 256. Sampling
#   again from the declared distribution needs no statistics.
# - **A head that reads its features in reverse** is lossless. Only τ falls. Compare τ and the
#   accepted tokens of every round with another implementation (level 8 of the
#   [validation](../docs/validation.md)).
#
# ## Common mistakes
#
# A common mistake is to raise the tolerance of a bfloat16 comparison with plain decoding until the
# test passes. A test that accepts any text after the first difference also accepts a bug. With the
# cache bug from above, the first wrong token is far from an approximate tie.

# %%
with inject_bug(
    SpeculativeLoop.step, COMMIT, COMMIT.replace("count", "jnp.full_like(count, num_nodes)")
):
    spoilt = greedy(head, num_speculative_tokens=K).tokens
parted = [
    next((i for i, pair in enumerate(zip(*rows, strict=True)) if len(set(pair)) > 1), None)
    for rows in zip(spoilt, plain.tokens, strict=True)
]
coder = e3.SpeculativeDecoder(target)
fed = [
    coder.target.encode(prompt) + text[:index]
    for prompt, text, index in zip(prompts, plain.tokens, parted, strict=True)
]
units = []
for logits, text, index in zip(forced_logits(target, fed), spoilt, parted, strict=True):
    if index is not None:
        units.append(
            float((logits[-1].max() - logits[-1][text[index]]) / bfloat16_ulp(logits[-1].max()))
        )
print(
    "gap between the largest logit and that of the first wrong token, in bfloat16 units:",
    np.round(units, 1).tolist(),
)
assert max(units) > 4 * TIE_ULPS, "the bug changes tokens that are not tied"

# %% [markdown]
# ## Exercises
#
# **1.** In bfloat16, greedy decoding with speculation gives a different text than without. Name two
# experiments that distinguish an approximate tie from a bug.
#
# <details><summary>Answer</summary>
#
# Compare with plain decoding in blocks of `K + 1` (`Plain(num_nodes=K + 1)`). A difference in any
# bit is a bug. Or feed the common prefix to the target in float32. The two tokens at the first
# difference must be its two most likely ones, within two bfloat16 units.
#
# </details>
#
# **2.** Why does the surprisal test miss resampling from `p`?
#
# <details><summary>Answer</summary>
#
# The output distribution is `min(p, q) + (1 − α) p`. Compared with `p`, tokens that the head
# overrates gain mass and tokens that it underrates lose mass. Both groups contain likely and
# unlikely tokens, so the mean surprisal hardly changes.
#
# </details>
#
# **3.** Can one test sampling by comparing the texts of one seed, with and without speculation?
#
# <details><summary>Answer</summary>
#
# No. The texts differ although both are correct, because the two programs use the same random
# numbers for different decisions. Compare distributions.
#
# </details>
#
#
# ## Checked claims
#
# - Greedy speculation generates the text of plain decoding in float32. Sampled texts of one seed
#   are repeatable and differ from those of plain decoding.
# - Other requests in a batch change no token and no bit of a request.
# - Two block sizes round differently. In float32 the argmax never changed. In bfloat16 every change
#   was within two units.
# - Compared with plain decoding of the same shape, tokens, keys and values are equal bit for bit,
#   in both precisions.
# - Each of seven bugs is caught by one test and missed by others. Only τ shows a broken head.
#
# **Next:** [07](07_measuring_and_batches.ipynb), measuring the speed-up.
