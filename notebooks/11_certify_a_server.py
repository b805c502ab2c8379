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
# %% [markdown]
# # 11 · Certify a server
#
# `eagle3 certify --url URL` tells whether the texts of a server follow the distribution that it reports. After this
# notebook you can
#
# - explain why the place of a token in its distribution is uniform, whatever was drafted;
# - plant an error in a sampler, and say after how many requests a certificate finds it;
# - say what a verdict does not mean.
#
# The notebook needs no model and no network. Read [02](02_speculative_sampling.ipynb) first. The command and its report
# are on the page [Certify a server](../docs/certify.md).

# %% tags=["hide-input"]
import first_cell

first_cell.start(device=False)

import numpy as np
from matplotlib import pyplot as plt

from eagle3_jax.certify import Sampling, judge
from eagle3_jax.certify.faulty import CORRECT, FAULTS, Fault, FaultySampler

# %% [markdown]
# ## The place of a token
#
# A server reports the log-probabilities of the likeliest tokens at each position, and the token that it wrote. Put the
# tokens of a position one behind the other on a line from 0 to 1, the likeliest first, each as long as it is probable.
# The written token covers a piece of this line. Its **place** is a random point in that piece.
#
# If the token was sampled from this distribution, its place is uniform on [0, 1]. That holds for every position, so places
# of all prompts can be counted together. Drafts do not matter: the rule of notebook 02 makes the token follow the
# target's distribution whatever was proposed.

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
# `FaultySampler` is a target with a vocabulary of 64, a drafter that resembles it, and a chain of three drafts. It
# reports the target's own distribution, as an honest but faulty server does. Change `fault` and run the cells again.
# `willing` multiplies the probability of acceptance; these are the other errors:

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
    before = np.where(np.arange(draws.probs.shape[1]) < draws.cells[:, None], draws.probs, 0).sum(axis=1)
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
# Drafts sampled too cold are likely tokens, and all of them are judged as if they had been rarer. So low places, which
# belong to likely tokens, come too often.
#
# ## The tests
#
# `judge` makes several tests, because no single one sees every error. A certificate divides 10⁻⁶, the probability that a
# correct server fails, among them.

# %%
for test in judge(faulty[faulty.index > 0], alpha=1e-7):
    print(f"{test.name:<36} p = {test.p_value:<8.1g} {test.detail}")

# %% [markdown]
# ## After how many requests?
#
# The number of requests doubles until the certificate falls. Small errors need many: to see half the deviation takes four
# times as many tokens.

# %%
LEVEL = 1e-6 / 12


def requests_until_found(fault, most=8192):
    sampler = FaultySampler(fault, sampling=Sampling(top_p=0.9) if fault.plain_acceptance else None)
    requests = 32
    while requests <= most:
        draws = sampler.draws(requests, 32, seed=requests)
        if min(test.p_value for test in judge(draws[draws.index > 0], alpha=LEVEL)) < LEVEL:
            return requests
        requests *= 2
    return None


num_requests = {name: requests_until_found(injected) for name, injected in FAULTS.items()}
for name, requests in num_requests.items():
    print(f"{name:<50} {requests or 'not by 8,192'}")
assert num_requests["greedy drafts judged as if sampled"] <= 256
assert requests_until_found(CORRECT, most=2048) is None

# %% [markdown]
# **Exercise.** Plant `Fault(willing=1.2)`, `1.5` and `2.0`. Predict first: by which factor does the number of requests
# fall when the error doubles?
#
# <details><summary>Answer</summary>
#
# By about four, as long as the error is small: a deviation ε has a statistic that grows with the number of tokens times
# ε². The rule `min(1, p/q)` saturates, so doubling `willing` less than doubles the deviation.
#
# </details>

# %%
for willing in (1.2, 1.5, 2.0):
    print(f"willing {willing}: {requests_until_found(Fault(willing=willing), most=32768)} requests")

# %% [markdown]
# ## What a verdict means
#
# *Lossless within δ*: no test found a deviation, and a shift of more than δ of the probability between the twenty cells
# would have been found with 90 % power. It does not say that the reported distribution is that of the model: a wrong
# model that reports itself honestly passes. And errors that cancel over all tokens need many answers to the same prompt.
#
# *Inconclusive*: first tokens, which no draft reaches, do not follow the reports either. Then the reports are of
# something else, for example before a warper that the certificate was not told of.
#
# ## Checked claims
#
# - Places of 20,000 tokens from a known distribution are uniform within the spread of counts.
# - Greedy drafts that are judged as if sampled are found by 256 requests at most. A correct sampler is not found out by
#   2,048.
