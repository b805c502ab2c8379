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
# # 11 · Certify a server
#
# `eagle3 certify --url URL` tells whether the texts of a server follow the distribution that it
# reports. After this notebook you can
#
# - explain why the place of a token in its distribution is uniform, whatever was drafted;
# - plant an error in a sampler, and say after how many requests a certificate finds it;
# - say what a verdict does not mean.
#
# The notebook needs no model and no network. Read [02](02_speculative_sampling.ipynb) first. The
# command and its report are on the page [Certify a server](../docs/certify.md).

# %% tags=["hide-input"]
import first_cell

first_cell.start(device=False)

import numpy as np
from faulty_sampler import CORRECT, FAULTS, Fault, FaultySampler
from matplotlib import pyplot as plt

from eagle3_jax.certify.statistics import judge

# %% [markdown]
# ## The place of a token
#
# A server reports the log-probabilities of the likeliest tokens at each position, and the token
# that it wrote. Put the tokens of a position one behind the other on a line from 0 to 1, the
# likeliest first, each as long as it is probable. The written token covers a piece of this line.
# Its **place** is a random point in that piece.
#
# If the token was sampled from this distribution, its place is uniform on [0, 1]. That holds for
# every position, so places of all prompts can be counted together. Drafts do not matter: the rule
# of notebook 02 makes the token follow the target's distribution whatever was proposed.

# %%
probs = np.array([0.5, 0.3, 0.2])
rng = np.random.default_rng(0)


def place_of(token, number):
    return probs[:token].sum() + number * probs[token]


tokens = rng.choice(3, size=20_000, p=probs)
places = [place_of(token, number) for token, number in zip(tokens, rng.random(20_000), strict=True)]
counts = np.histogram(places, bins=20, range=(0, 1))[0]
print("expected 1,000 in each of 20 cells:", counts.min(), "to", counts.max())
assert counts.min() > 850
assert counts.max() < 1150

# %% [markdown]
# ## Plant an error
#
# `FaultySampler` is a target with a vocabulary of 64, a drafter that resembles it, and a chain of
# three drafts. It reports the target's own distribution, as an honest but faulty server does.
# Change `fault` and run the cells again. `willing` multiplies the probability of acceptance, and
# `likeliest` makes the drafter propose its likeliest token. These are the errors that the tables of
# the page have:

# %%
for name in FAULTS:
    print(name)

# %%
fault = Fault(draft_temperature=0.7)  # drafts are sampled at 0.7 but judged as if sampled at 1
correct = FaultySampler(CORRECT).draws(256, 32)
faulty = FaultySampler(fault).draws(256, 32)


def places_of(draws):
    """Returns the places of the tokens that drafts may reach."""
    draws = draws[draws.index > 0]
    before = np.where(np.arange(draws.probs.shape[1]) < draws.cells[:, None], draws.probs, 0).sum(
        axis=1
    )
    within = np.take_along_axis(draws.probs, draws.cells[:, None], axis=1)[:, 0]
    return before + np.random.default_rng(1).random(len(draws)) * within


figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), sharey=True)
for axis, draws, title in zip(axes, (correct, faulty), ("correct", "faulty"), strict=True):
    axis.hist(places_of(draws), bins=20, range=(0, 1), density=True)
    axis.axhline(1, color="black", linewidth=1)
    axis.set(title=title, xlabel="place in the distribution")
axes[0].set_ylabel("density")
plt.show()

# %% [markdown]
# Drafts sampled too cold are likely tokens, and all of them are judged as if they had been rarer.
# So low places, which belong to likely tokens, come too often.
#
# ## The tests
#
# `judge` makes several tests, because no single one sees every error. A certificate divides 10⁻⁶,
# the probability that a correct server fails, among them.

# %%
for test in judge(faulty[faulty.index > 0]):
    print(f"{test.name:<36} p = {test.p_value:<8.1g} {test.detail}")

# %% [markdown]
# ## A bet
#
# A drafter that proposes its likeliest token has the same draft each time the text is the same. A
# wrong acceptance then makes this one token too frequent, and all others too rare. So the
# certificate bets: before each token it names another distribution, such as one in which the
# likeliest token is 20 % more frequent, and multiplies the ratios of the two probabilities. Under a
# correct sampler the product is 1 on average, so it exceeds a million with a probability of at most
# one in a million. Under the error that the bet names it grows.

# %%
p = 0.5  # of the draft, by the target
willing = 1.2  # what the bet says of it


def gain_of(probability, number=1000):
    """Returns the growing gain, in powers of ten, where the draft comes with a probability."""
    is_draft = np.random.default_rng(2).random(number) < probability
    ratios = np.where(is_draft, willing, (1 - willing * p) / (1 - p))
    return np.log10(ratios).cumsum()


plt.figure(figsize=(8, 2.6))
for name, probability in (("faulty", willing * p), ("correct", p)):
    plt.plot(gain_of(probability), label=name)
plt.axhline(6, color="black", linewidth=1)
plt.xlabel("tokens")
plt.ylabel("gain, power of ten")
plt.legend()
plt.show()
assert gain_of(willing * p).max() > 6
assert gain_of(p).max() < 6

# %% [markdown]
# A real certificate knows neither the draft nor the size of the error. It spreads its stake over
# tokens and sizes, which costs a factor, not the slope. `fewest_tokens` says how many tokens the
# best test needs that does know the error:

# %%
LEVEL = 1e-6 / 12


def requests_until_found(fault, most=8192):
    sampler = FaultySampler(fault)
    requests = 32
    while requests <= most:
        draws = sampler.draws(requests, 6, seed=requests)
        if min(test.p_value for test in judge(draws[draws.index > 0])) < LEVEL:
            return requests
        requests *= 2
    return None


chosen = [name for name in FAULTS if "10 %" not in name and "5 %" not in name]
num_requests = {name: requests_until_found(FAULTS[name]) for name in chosen}
for name, requests in num_requests.items():
    fewest = FaultySampler(FAULTS[name]).fewest_tokens()
    seen = "not by 40,960" if requests is None else f"{5 * requests:,}"
    print(f"{name:<50} {seen:>14} tokens; any test: {fewest:,.0f}")
assert num_requests["greedy drafts judged as if sampled"] <= 256
assert num_requests["likeliest draft, every one accepted"] <= 256
assert requests_until_found(CORRECT, most=2048) is None

# %% [markdown]
# **Exercise.** Plant `Fault(likeliest=True, willing=1.2)`, `1.1` and `1.05`. Predict first: by
# which factor does `fewest_tokens` grow when the error halves?
#
# <details><summary>Answer</summary>
#
# By nearly four: a deviation ε adds ε² to the expected gain of each token.
#
# </details>

# %%
for willing in (1.2, 1.1, 1.05):
    print(
        f"willing {willing}:"
        f" {FaultySampler(Fault(likeliest=True, willing=willing)).fewest_tokens():,.0f} tokens"
    )

# %% [markdown]
# ## What a verdict means
#
# *Lossless*: no test found a deviation, everything on the certificate's list was seen, and the
# verdict names the errors of acceptance that it would have found. It does not say that the reported
# distribution is that of the model: a wrong model that reports itself honestly passes.
#
# *Not lossless*: a test failed whose control did not. The control draws tokens behind the same
# texts where no draft reaches.
#
# *Inconclusive*: something on the list is missing. Reports that cannot be read, a server that
# drafted nothing, too few tokens, and first tokens that do not follow the reports either are never
# agreement.
#
# ## Checked claims
#
# - Places of 20,000 tokens from a known distribution are uniform within the spread of counts.
# - Greedy drafts that are judged as if sampled, and an acceptance of every draft that is the
#   likeliest token, are found by 256 requests at most. A correct sampler is not found out by 2,048.
# - A bet on an acceptance 20 % too willing gains a million within 1,000 tokens where that is true,
#   and not where it is not.
