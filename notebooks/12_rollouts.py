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
# # 12 · Rollouts in reinforcement learning
#
# A policy answers prompts, answers get rewards, and the policy learns to write answers with more
# reward. Half of the time it decodes. After this notebook you can
#
# - write the smallest policy gradient for a language model, and use drafts in it;
# - explain why drafts do not change the gradient's expectation;
# - say what happens to the acceptance of a frozen head while the policy moves.
#
# It takes two minutes of two cores. Read [02](02_speculative_sampling.ipynb) first. The page
# [Rollouts](../docs/rollouts.md) has the same for [Tunix](https://github.com/google/tunix).

# %% tags=["hide-input"]
import first_cell

first_cell.start()

import json

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
import rollouts  # examples/rollouts.py
from pictures import policies, style

import eagle3_jax as e3
from eagle3_jax.engine.refill import complete
from eagle3_jax.prompts.request import Request

style.use()
policy = e3.load_target(dtype="float32")
head = e3.load_drafter(target=policy)
plain = e3.SpeculativeDecoder(policy)
drafted = e3.SpeculativeDecoder(
    policy, head, num_speculative_tokens=3, draft_sampling="probabilistic"
)

# %% [markdown]
# ## Answers and their rewards
#
# The task is to write the body of a function. The reward is computed by a program: the share of an
# answer's lines after which the text still parses as Python. A *group* has several answers to one
# prompt. `share_prompts` runs its prompt once.

# %%
PROMPTS = ("def read_line(line, default=None):", "def make_key(key, *args):")
SAMPLES = 8
NEW_TOKENS = 48


def roll_out(decoder, step):
    """Returns the answers of a step, group by group."""
    requests = [
        Request(prompt, NEW_TOKENS, temperature=1.0, seed=1000 * step + 100 * group + sample)
        for group, prompt in enumerate(PROMPTS)
        for sample in range(SAMPLES)
    ]
    ended = complete(
        decoder, requests, slots=len(requests), logprobs=0, share_prompts=True, capacity=96
    )
    return [answer for _, answer in sorted(ended, key=lambda pair: pair[0])]


def rewards_of(answers):
    """Returns the rewards, a row for each group."""
    texts = [
        (prompt, answers[group * SAMPLES + sample].text)
        for group, prompt in enumerate(PROMPTS)
        for sample in range(SAMPLES)
    ]
    values = [rollouts.reward(prompt, text) for prompt, text in texts]
    return np.array(values).reshape(len(PROMPTS), SAMPLES)


answers = roll_out(drafted, step=0)
print(PROMPTS[0] + answers[0].text)
print("rewards of its group:", rewards_of(answers)[0].round(2))

# %% [markdown]
# ## The gradient
#
# For an answer $y$ with reward $r$ the policy gradient is $(r - b) \nabla \log p(y)$. The baseline
# $b$ is the mean reward of the group, as in GRPO. Its expectation is over answers *of the policy*.
# An engine that samples another distribution gives another gradient, and no later step repairs it.
# Verified drafts keep the distribution, so they keep the gradient.
#
# `rollouts.update` takes one step of Adam on the mean over tokens. `with_params` gives the next
# step's decoder the new policy. Nothing is compiled again, and no array of the old policy is left:
# the head reads the embedding of the new one.

# %%
optimizer = optax.adam(1e-4)


def learn(decoder, steps):
    """Trains a policy; returns rewards, tokens per round, and the decoder of the trained policy."""
    state = optimizer.init(policy.params)
    rewards = []
    pace = []
    for step in range(steps):
        answers = roll_out(decoder, step)
        values = rewards_of(answers)
        batch = rollouts.batch_of(answers, values)
        params, state, _ = rollouts.update(
            policy.model, optimizer, decoder.params.target, state, batch
        )
        decoder = decoder.with_params(params)
        rewards.append(values.mean())
        pace.append(rollouts.tokens_per_round(answers))
    return rewards, pace, decoder


STEPS = 12
rewards, pace, trained = learn(drafted, STEPS)
rewards_plain, pace_plain, _ = learn(plain, STEPS)

figure, (reward_axes, pace_axes) = plt.subplots(1, 2, figsize=(8.4, 3.2))
for axes, curves, label in (
    (reward_axes, (rewards_plain, rewards), "reward"),
    (pace_axes, (pace_plain, pace), "tokens per round"),
):
    for curve, name in zip(curves, ("plain rollouts", "drafted rollouts"), strict=True):
        axes.plot(curve, label=name)
    axes.set(xlabel="step of the policy", ylabel=label, ylim=(0, None))
    axes.legend()
plt.show()

assert all(value == 1 for value in pace_plain), "plain decoding gives a token in each round"
assert min(pace) > 1.5, "the head's drafts are accepted at temperature 1, too"

# %% [markdown]
# The two curves of the reward are two samples of one distribution: the same seeds, but a round with
# a draft uses other random numbers.
#
# ## The same log-probabilities
#
# Verification computes the log-probability of every token that it writes. In float32 it is that of
# the trainer's forward pass up to rounding. Where the rollout runs in another type than the
# trainer, it is not, with drafts and without: the rollouts are then those of another policy.

# %%
answers = roll_out(trained, STEPS)
batch = rollouts.batch_of(answers, rewards_of(answers))
scores = jax.jit(rollouts.log_probabilities, static_argnums=0)(
    policy.model, trained.params.target, batch.tokens
)
difference = rollouts.drift(answers, np.asarray(scores))
print(f"largest difference of a token: {difference['largest']:.1e}")
assert difference["largest"] < 1e-4, "both forwards compute the same policy"

# %% [markdown]
# ## A hundred steps
#
# `examples/rollouts.py` trained for a hundred steps, with three seeds. Each curve is the mean of
# the seeds, the band their range. The *refreshed head* takes a step of its own objective on eight
# answers after every step of the policy; the frozen head stays as it was. n-grams and siblings look
# drafts up, in the answer itself and in all answers of the batch.

# %%
record = json.loads((first_cell.ROOT / "validation/results/rollouts-shipped-pair.json").read_text())
runs = record["train"]["runs"]
policies.acceptance_and_reward(runs)
plt.show()

for lines in policies.lines_of(runs, "drafted"):
    refreshed, frozen = (
        np.mean([line[name]["tokens_per_round"] for line in lines[-20:] if name in line])
        for name in ("refreshed head", "frozen head")
    )
    assert refreshed > frozen, "a head that keeps learning is accepted more often"

# %% [markdown]
# The reward rises because the policy finds out that docstrings and comments always parse. That is
# what it was asked for. Look at its text before you trust a reward:

# %%
print(PROMPTS[0] + answers[0].text)

# %% [markdown]
# ## Checked claims
#
# - Plain decoding writes a token in each round, and a head's drafts are accepted at temperature 1:
#   more than 1.5 tokens in each round, at every step of this notebook's policy.
# - In float32 no log-probability of a rollout is more than 1e-4 from that of the trainer.
# - In every recorded run the refreshed head has more tokens accepted than the frozen one, in the
#   last 20 of 100 steps.
