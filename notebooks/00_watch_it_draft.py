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
# # 00 · Watch it draft
#
# A chat model answers a question twice: one token at a time, then with a small model that drafts
# ahead. The text is the same, and the second run needs fewer passes through the chat model. After
# this notebook you can
#
# - say what a round is, and what accepted, corrected and bonus tokens are;
# - read `τ` off a colored text.
#
# There are no formulas. The notebook takes less than a minute on two CPU cores. It needs only
# `pip install -e '.[notebooks]'`. It downloads SmolLM2-135M-Instruct once (93 MB); without a
# network, a small model of the package continues code instead.

# %% tags=["hide-input"]
import first_cell

first_cell.start()

from chat import load_chat
from exercises import checked
from IPython.display import HTML, display
from pictures.strips import PROMPT, TokenStrip, svg, tokens_of

import eagle3_jax as e3
from eagle3_jax.measure.trace import record

# %% [markdown]
# ## Two runs, one text
#
# Change the question and run the notebook again, if you like.

# %%
QUESTION = "Give me one tip for learning a language."
K = 3  # tokens that are drafted in each round
target, head, prompts = load_chat([QUESTION], ["def read_config(path):\n"])
plain = e3.SpeculativeDecoder(target)
drafting = e3.SpeculativeDecoder(target, head, num_speculative_tokens=K)

request = {"max_new_tokens": [60], "sampling": e3.SamplingParams(), "seed": 0}
one_by_one = record(plain, prompts, **request)
drafted = record(drafting, prompts, **request)
passes = len(one_by_one.prompts[0]["rounds"])
rounds = drafted.prompts[0]["rounds"]
print(drafted.result.texts[0])
print(f"\nplain: {passes} passes of the chat model; with drafts: {len(rounds)}")
assert drafted.result.tokens == one_by_one.result.tokens, "the same text, token for token"
assert len(rounds) < passes, "fewer passes"


# %% [markdown]
# Watch both runs. Every half second, each of them makes one pass of the chat model. The plain run
# adds one token per pass. The run with drafts often adds several.


# %% tags=["hide-input"]
def strip(trace, caption=""):
    tokens = tokens_of(trace.prompts[0], target.tokenizer)
    return TokenStrip([token for token in tokens if token.kind != PROMPT], caption)


lanes = [
    (f"One token at a time: {passes} passes", strip(one_by_one, "The same text, written twice")),
    (f"With drafts: {len(rounds)} passes", strip(drafted)),
]
HTML(svg(lanes, seconds_per_round=0.5))

# %% [markdown]
# ## A round
#
# A pass with a draft is called a **round**:
#
# 1. The **draft head**, a small network, proposes `K` tokens. This is cheap.
# 2. The chat model, the **target**, reads all of them in *one* pass. For each of them it knows
#    which token it would have written there itself.
# 3. Draft tokens are **accepted** (green) from the left, as long as they are the target's own
#    choice.
# 4. At the first wrong token, the target's own choice replaces it: this token is **corrected**
#    (orange). If no draft token was wrong, the pass gives one token more, a **bonus** (blue).
#
# So every round adds at least one token, and every token is the target's own choice. The head can
# only change how many rounds are needed. The table has the first rounds of the run.


# %%
def piece(token):
    return repr(target.tokenizer.decode([token]))


for number, round_ in enumerate(rounds[:8], start=1):
    proposed = [piece(token) for token in round_["tokens"][1:]]
    count = len(round_["path"])
    last = "bonus" if count == K else "corrected"
    print(f"round {number}: drafted {', '.join(proposed)}")
    print(f"         {count} accepted, then {piece(round_['next_token'])} ({last})")

# %% [markdown]
# Hover over a token for its round. The first token comes from reading the question; no round has
# added it.

# %%
display(strip(drafted, "The run with drafts"))

# %% [markdown]
# ## Tokens per round: τ
#
# The mean number of tokens that a round adds is called `τ` (tau), the **mean acceptance length**.
# Without drafts it is 1.
#
# **Exercise.** All notebooks have exercises of this form. A function with
# `raise NotImplementedError` is yours to write. The folded cell below it has an answer. The cell
# after that checks your function. If you leave the function as it is, the notebook uses the answer.


# %%
def mean_acceptance_length(accepted):
    """Returns `τ`. `accepted` is a list: the number of accepted draft tokens of each round."""
    raise NotImplementedError  # your code here


# %% tags=["hide-input", "answer"]
def mean_acceptance_length_answer(accepted):
    return 1 + sum(accepted) / len(accepted)


# %%
def check_mean_acceptance_length(mean_acceptance_length):
    assert abs(mean_acceptance_length([0, 0, 0]) - 1) < 1e-9, (
        "a round without accepted tokens adds one token"
    )
    assert abs(mean_acceptance_length([3, 3]) - 4) < 1e-9, (
        "three accepted tokens and a bonus are four tokens"
    )
    assert abs(mean_acceptance_length([2, 0, 1]) - 2) < 1e-9, (
        "three rounds add 3 + 1 + 2 tokens: 6 / 3"
    )


mean_acceptance_length = checked(
    mean_acceptance_length, mean_acceptance_length_answer, check_mean_acceptance_length
)

# %%
tau = mean_acceptance_length([len(round_["path"]) for round_ in rounds])
print(f"τ = {tau:.2f} tokens per round")
assert abs(tau - drafted.result.stats.mean_acceptance_length) < 1e-6, "the library counts the same"
assert 1 < tau <= K + 1, "a round adds at most K accepted tokens and one more"

# %% [markdown]
# A run with `τ = 2` needs half of the passes. It is less than twice as fast, because drafting and
# longer passes also take time. The next notebook explains why one pass over several tokens costs
# about as much as a pass over one.
#
# ## Checked claims
#
# - Both runs generate the same text, token for token.
# - The run with drafts needs fewer passes of the target.
# - `τ` is one plus the mean number of accepted draft tokens. It is at most `K + 1`.
#
# **Next:** [01](01_memory_bound_decoding.ipynb), why decoding is memory-bound.
