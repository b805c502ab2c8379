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
# # 02 · Equality with vLLM: greedy, sampling, acceptance
#
# The validation compares this library with vLLM in three ways: greedy tokens one by one (levels L4
# and L5), the distribution of sampled tokens (L6), and accepted draft tokens round by round (L8).
# This notebook reads its report, explains the comparisons and plots them. Read
# [01](01_this_machine.ipynb) first.

# %% tags=["hide-input"]
import sys

sys.path.insert(0, "..")  # where first_cell, machine and pictures are

import first_cell

first_cell.start(repository=True, device=False)

import machine

here = machine.start()
here.banner("vLLM")

# %% tags=["hide-input"]
import itertools
import json

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display
from pictures.ribbons import acceptance_ribbons
from pictures.style import DRAFTER, TARGET

from eagle3_jax.measure.tables import to_markdown
from validation import second_token
from validation.sampled import MOST_Z


def case_of(check):
    """The case of a check, in brackets after its name."""
    return check.name.partition("[")[2].rstrip("]")


def tables_of(checks):
    """All tables of these checks as Markdown, with their cases."""
    titled = [(check, table) for check in checks for table in check.tables]
    return "\n\n".join(
        f"**{case_of(check) or table.title}**\n\n{to_markdown(table.columns, table.rows)}"
        for check, table in titled
    )


# %% [markdown]
# ## Greedy tokens: agreement and ties
#
# Two correct engines add the same bfloat16 products in a different order. If two logits are
# approximately tied, they can choose different tokens, and the rest of the texts differs. So each
# engine scores the text of the *other* engine, token by token, with teacher forcing. The scoring
# engine is the judge. A token is
#
# - **its choice** if it is the judge's most likely token;
# - a **tie** if it is the judge's second choice and its logit is at most two bfloat16 units in the
#   last place lower (1e-3 in float32);
# - a **disagreement** otherwise.
#
# In the tables, `A/A` compares two plain runs of one engine: ties occur without a drafter, too. The
# column of equal texts does not distinguish ties from bugs.

# %%
pairs = here.checks("L5", "the pair agrees")
for check in pairs:
    assert check.numbers["disagreements"] == 0, f"{check.name}: a token that no rounding explains"
exact = [check for check in pairs if "bfloat16" not in check.name]
assert not any(check.numbers["ties"] for check in exact), "in float32 ties are very rare"
Markdown(tables_of(pairs) or "L5 did not run.")

# %% [markdown]
# Level L4 does the same without vLLM: the judge is the target itself, in one pass with float32
# sums. Rounding also changes the argmax of plain decoding at ties. So the limit for speculation is
# a Poisson quantile of the rate of plain decoding, at one in a million.

# %%
controls = here.checks("L4", "every token is the reference choice or a tie")
names = ("tokens", "ties", "disagreements", "ties_of_plain_decoding", "disagreements_allowed")
for check in controls:
    assert check.numbers["disagreements"] <= check.numbers["disagreements_allowed"], check.name
display(
    Markdown(
        to_markdown(
            ["precision", *(name.replace("_", " ") for name in names)],
            [[case_of(check), *map(check.numbers.get, names)] for check in controls],
        )
    )
)
scored = sum(check.numbers["tokens_scored"] for check in pairs)
ties = sum(check.numbers["ties"] for check in pairs)
here.verdict(
    "greedy",
    f"{scored:,} tokens scored, {ties} ties, 0 disagreements" if pairs else "L5 did not run",
    needs="vLLM",
)

# %% [markdown]
# ## Distribution of sampled tokens
#
# Every token at index *j* of a round must have the distribution *p*: the target's after
# temperature, top-k and top-p. This holds **for any draft**. transformers computes *p* of every
# token with teacher forcing. The sum of the scores of all tokens is compared with its exact mean
# and variance. With an exact sampler, every bar is a sample of a standard normal distribution.
# *Entropy* detects a text with too likely tokens. *Directed* detects a shift towards the draft.

# %%
sampled = here.checks("L6", "sampled tokens follow")
largest = max((check.numbers["largest_z"] for check in sampled), default=0.0)
for check in sampled:
    assert check.numbers["largest_z"] <= MOST_Z, f"{check.name}: not the target's distribution"
    print(f"{case_of(check)}: {check.numbers['tokens']:,} tokens; detects {check.sees or '–'}")

# %% tags=["hide-input"]
figure, all_axes = plt.subplots(
    1, max(1, len(sampled)), figsize=(4.2 * max(1, len(sampled)), 4.4), squeeze=False
)
for axes, check in zip(all_axes[0], sampled, strict=False):
    rows = [row for row in check.tables[0].rows if row[2] != ""]
    places = np.arange(len(rows))
    axes.barh(places - 0.2, [row[2] for row in rows], 0.38, color=TARGET, label="entropy")
    directed = [row[3] or 0.0 for row in rows]
    axes.barh(places + 0.2, directed, 0.38, color=DRAFTER, label="directed")
    axes.set_yticks(places, [f"{row[0]} ({row[1]})" for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.axvspan(-MOST_Z, MOST_Z, color="#9aa0a6", alpha=0.12)
    axes.set(xlabel=f"z ({here.device})", title=case_of(check))
all_axes[0][0].legend(fontsize="small")
plt.show()

# %% [markdown]
# The second token of an answer is the first one that comes from a round. For a tiny target its
# distribution can be enumerated. Both engines sample this token thousands of times. A row *as
# shipped* with p = 0 is expected on a CPU: the CPU build of vLLM 0.32.0 samples wrongly under
# speculation. The check then compares with a vLLM that is repaired in its process.

# %%
second = here.checks("L6", "a verified token follows")
for row in itertools.chain.from_iterable(check.tables[0].rows for check in second):
    if not row[0].endswith("as shipped"):
        assert min(row[2:]) > second_token.ALPHA, f"{row[0]} does not have the distribution"
display(Markdown(tables_of(second) or "The comparison with vLLM did not run."))
here.verdict(
    "sampling",
    f"largest |z| {largest:.1f} (limit {MOST_Z:g}) over {len(sampled)} kinds of draft"
    if sampled
    else "L6 did not run",
    needs="vLLM",
)

# %% [markdown]
# ## Accepted draft tokens, round by round
#
# Verification corrects any draft, so a wrong port of a head still generates the correct text. Only
# its acceptance is lower. So both engines run the same head in float32. The check compares every
# round of every request, and all counters.

# %%
rounds = {f"K={case_of(check)}": check for check in here.checks("L8", "every round accepts")}
shares = {}
rows = []
for name, check in rounds.items():
    (table,) = check.tables
    assert table.column("ours") == table.column("vLLM"), f"{check.name}: counters differ"
    ours = dict(zip(table.column("counter"), table.column("ours"), strict=True))
    accepted = json.loads(ours["num_accepted_tokens_per_pos"])
    shares[name] = [count / check.numbers["rounds"] for count in accepted]
    tau = check.numbers["mean_acceptance_length"]
    assert all(late <= early for early, late in itertools.pairwise(accepted))
    assert abs(1 + sum(shares[name]) - tau) < 1e-9
    rows.append([name, check.numbers["prompts"], check.numbers["rounds"], f"{tau:.3f}"])
display(Markdown(to_markdown(["draft", "requests", "rounds", "τ of both engines"], rows)))
total = sum(check.numbers["rounds"] for check in rounds.values())
here.verdict(
    "acceptance",
    f"{', '.join(rounds)}: all of {total:,} rounds and all counters equal"
    if rounds
    else "L8 did not run",
    needs="vLLM",
)

# %% tags=["hide-input"]
if shares:
    display(
        acceptance_ribbons(
            shares,
            rounds={name: check.numbers["rounds"] for name, check in rounds.items()},
            title=f"Acceptance by position, both engines ({here.device})",
        )
    )

# %% [markdown]
# Inside vLLM, the check also reads the inputs and outputs of the head: features of the target and
# draft logits, for every kind of head. Rounding gives differences of 1e-6, a wrong layer, norm or
# position 1e-1.

# %%
kinds = here.checks("L8", "a head of every variation")
rows = []
for check in kinds:
    apart_by = [check.numbers[name] for name in ("features_apart", "draft_logits_apart")]
    assert max(apart_by) < 1e-4, f"{check.name}: more than rounding"
    figures = [f"{difference:.1e}" for difference in apart_by]
    rows.append([case_of(check), check.numbers["rounds_compared_inside"], *figures])
columns = ["head", "rounds", "difference of features", "difference of draft logits"]
Markdown(to_markdown(columns, rows))

# %% [markdown]
# ## Common mistakes
#
# A comparison is useful only if it detects errors. So the checks of other drafting methods run a
# second time with an error in the port, such as a feature of another layer. Every check must see
# the error, even where τ hardly changes: it compares rounds, not means.

# %% tags=["hide-input"]
methods = here.checks("L8", "every method accepts")
injected = []
for check in methods:
    right = check.numbers["mean_acceptance_length"]
    errors = {name: tau for name, tau in check.numbers.items() if name.startswith("with ")}
    injected += [(f"{case_of(check)}: {name}", right, tau) for name, tau in errors.items()]
figure, axes = plt.subplots(figsize=(8.4, 0.34 * len(injected) + 1.2))
places = np.arange(len(injected))
axes.barh(places - 0.2, [right for _, right, _ in injected], 0.38, color=TARGET, label="right")
axes.barh(places + 0.2, [tau for *_, tau in injected], 0.38, color=DRAFTER, label="with the error")
axes.set_yticks(places, [name for name, *_ in injected], fontsize="small")
axes.invert_yaxis()
axes.set(xlabel="τ", title=f"Errors that the comparison of rounds detects ({here.device})")
axes.legend(fontsize="small")
plt.show()

# %% [markdown]
# ## Exercises
#
# **1.** Why must a tie be the judge's *second* choice? Three logits can be within two units.
#
# <details><summary>Answer</summary>
#
# This is rare. A rule that accepts every token within two units also accepts a bug that always
# chooses the third one.
#
# </details>
#
# **2.** Is "accepted tokens have the distribution *p*" a valid test?
#
# <details><summary>Answer</summary>
#
# No, it fails for a correct sampler. Accepted tokens have the distribution `min(p, q)` and
# corrected tokens the residual `max(p - q, 0)`, both normalized. Only their mixture is *p*.
#
# </details>
#
# **3.** τ of both engines agrees to three digits, but single rounds differ. Is this sufficient?
#
# <details><summary>Answer</summary>
#
# No. Both engines are deterministic, so equal heads give equal rounds. A mean can hide two errors
# that cancel.
#
# </details>
#
#
# ## Checked claims
#
# - In both precisions, no token that the other engine scores is a disagreement. In float32 there is
#   no tie.
# - Speculation has no more disagreements with the reference than rounding explains.
# - In every stratum, scores of sampled tokens are within ±5. Second tokens have the enumerated
#   distribution.
# - Accepted counts of every round and all counters equal those of vLLM, for all draft lengths.
# - Features and draft logits of all kinds of head differ by less than 1e-4.
#
# **Next:** [03](03_speed_and_tuning.ipynb), speed.
