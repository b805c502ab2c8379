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
# # 02 · The same prompts through JAX and vLLM
#
# Afterwards you can
#
# - compare two engines token by token instead of text by text;
# - tell a tie from a disagreement, and show every tie with its margin;
# - say how many ties rounding explains, from a control in which nothing is drafted.
#
# It takes about half a minute of CPU on the shipped pair, more beside a real vLLM. Read before:
# [01](01_this_machine.ipynb).

# %%
import sys

sys.path.insert(0, "..")  # where first_cell, machine and pictures are

import first_cell

first_cell.start(repository=True, device=False)

import machine

here = machine.start()
here.banner("vLLM")

# %% [markdown]
# ## Why texts are not compared
#
# Two correct engines multiply the same bfloat16 weights in another order. Where two logits nearly tie, their argmaxes
# part, and from there on the texts have nothing to do with each other. So each side scores the *other's* text, token
# by token, along that text (teacher forcing). A token is
#
# - **agreed on** if it is the judge's own choice;
# - a **tie** if it is the judge's second choice, at most two bfloat16 units in the last place below (1e-3 in
#   float32);
# - a **disagreement** otherwise.
#
# The functions are those of level L5: `validation.agreement.both_directions` where there is a vLLM; without one, our
# own target is the judge, in one pass with every sum in float32, which has no part in how a decoder writes.

# %%
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown

from eagle3_jax.bench.tables import to_markdown
from eagle3_jax.engines.memory import is_out_of_memory
from eagle3_jax.engines.vllm.bridge import VLLMError, VLLMUnavailable, eagle3
from validation.agreement import Judged, both_directions, decoders_of, ours
from validation.forcing import by_blocks, reference
from validation.margin import TIE_ULPS, WRONG_ULPS, Agreement, Control, classify, tie_tolerance

here.exactly()
subject, CONTEXT = here.subject, 100
prompts = [prompt[-CONTEXT:] for prompt in subject.prompt_tokens[: here.amount(cpu=6, gpu=56)]]
LIMIT = here.amount(cpu=24, gpu=128)
print(
    f"{len(prompts)} prompts of up to {CONTEXT} tokens, {LIMIT} new tokens each; {subject.name} on {here.device}"
)

# %% [markdown]
# ## Generate and judge
#
# Ours: plain decoding, n-gram drafts, an EAGLE-3 tree, an EAGLE-3 chain. vLLM: plain, and the same head. In bfloat16,
# where rounding shows.


# %%
def on_our_own(dtype, names):
    """Without vLLM: our decoders' texts, judged by the target in one pass of float32 sums."""
    target, drafter = subject.pair(dtype)
    decoders = {name: one for name, one in decoders_of(target, drafter).items() if name in names}
    texts = ours(decoders, prompts, max_new_tokens=LIMIT, singly=0)
    judge = "our target, one pass, sums in float32"
    return [
        Judged(name, judge, dtype, outputs, reference(target, prompts, outputs))
        for name, outputs in texts.items()
    ]


def beside_vllm(dtype, names):
    """Both directions, with vLLM."""
    target, drafter = subject.pair(dtype)
    decoders = {name: one for name, one in decoders_of(target, drafter).items() if name in names}
    found = both_directions(
        here.vllm,
        subject.target_directory,
        target,
        decoders,
        prompts,
        speculative=[eagle3(subject.drafter_directory, here.draft_tokens(5))],
        dtype=dtype,
        max_new_tokens=LIMIT,
        singly=0,
    )
    assert not found.unexplained, "; ".join(found.unexplained)
    return found.all


NAMES = (
    ("plain", "EAGLE-3 chain")
    if not here.on_gpu
    else ("plain", "n-gram", "EAGLE-3 tree", "EAGLE-3 chain")
)


def run(dtype, names):
    """Beside vLLM where there is one that can."""
    if here.vllm is None:
        return on_our_own(dtype, names)
    try:
        return beside_vllm(dtype, names)
    except VLLMUnavailable as reason:  # a server is what it was started as
        print(f"vLLM: {reason}; our own target is the judge of {dtype}")
        return on_our_own(dtype, names)


judged = run("bfloat16", NAMES)

# %%
rows = []
for one in judged:
    counted = one.agreed
    agreed = counted.tokens - counted.ties - counted.disagreements
    same = f"{one.texts_shared(judged[0].outputs)} of {len(one.outputs)}"
    rows.append(
        [one.by, one.scored_by, counted.tokens, agreed, counted.ties, counted.disagreements, same]
    )
columns = [
    "written by",
    "scored by",
    "tokens",
    "agreed",
    "ties",
    "disagreements",
    f"texts as those of '{judged[0].by}'",
]
Markdown(f"bfloat16, ours on {here.device}\n\n" + to_markdown(columns, rows))

# %% [markdown]
# The last column is what a comparison of texts would have said. It counts whole texts that part at some tie, and says
# nothing of whether anything is wrong.
#
# ## Every tie, with its margin
#
# Each point is a token that is not its judge's choice: how far below, in bfloat16 units in the last place, over the
# height of the judge's best logit. Ties end at two units; beyond eight, no rounding has been seen.

# %%
figure, axes = plt.subplots()
apart = 0
for one in judged:
    off = one.gaps > 0
    apart += int(off.sum())
    axes.plot(
        one.values[off],
        one.units[off],
        "o",
        markersize=5,
        alpha=0.7,
        label=f"{one.by}: {int(off.sum())}",
    )
axes.axhline(TIE_ULPS, color="#2a9d74", linewidth=1)
axes.axhline(WRONG_ULPS, color="#c05a8e", linewidth=1, linestyle="--")
axes.text(
    1.0,
    TIE_ULPS,
    " ties end ",
    ha="right",
    va="bottom",
    transform=axes.get_yaxis_transform(),
    fontsize="small",
)
axes.text(
    1.0,
    WRONG_ULPS,
    " wrong ",
    ha="right",
    va="top",
    transform=axes.get_yaxis_transform(),
    fontsize="small",
)
axes.set_ylim(-0.2, WRONG_ULPS + 0.5)
axes.set_xlabel(f"highest logit of the judge ({here.device})")
axes.set_ylabel("gap to it, bfloat16 units")
total = sum(one.agreed.tokens for one in judged)
axes.set_title(f"{apart} of {total} tokens are not the judge's choice; all of them are nearly tied")
axes.legend(fontsize="small")
print(f"largest gap: {max(float(one.units.max()) for one in judged):.2f} units")

# %%
rows = []
for one in judged:
    for index in np.flatnonzero(one.gaps > 0):
        prompt, place = divmod(int(index), LIMIT)
        written, best = one.outputs[prompt][place], one.scored[prompt].best[place]
        text = [
            repr(subject.pair("bfloat16")[0].tokenizer.decode([token])) for token in (written, best)
        ]
        verdict = Agreement(int(one.verdicts[index])).name.lower()
        rows.append(
            [
                one.by,
                prompt,
                place,
                *text,
                f"{one.gaps[index]:.4f}",
                f"{one.units[index]:.2f}",
                verdict,
            ]
        )
columns = [
    "written by",
    "prompt",
    "new token",
    "wrote",
    "the judge prefers",
    "gap",
    "units",
    "verdict",
]
Markdown(
    f"The first {min(len(rows), 16)} of {len(rows)} (bfloat16, {here.device})\n\n"
    + to_markdown(columns, rows[:16])
)

# %% [markdown]
# ## How many are allowed
#
# Not a matter of taste: plain decoding flips too. The control feeds the very same text to the same target one token
# at a time, and in blocks of six as verification does, with no drafter anywhere, and counts how often the two
# argmaxes differ. An upper bound of that rate, and its Poisson quantile at one in a million, is what speculation may
# show.

# %%
target = subject.pair("bfloat16")[0]
chain = next(one for one in judged if one.by.startswith("ours, EAGLE-3 chain"))
single = by_blocks(target, prompts, chain.outputs, block=1)
blocks = by_blocks(target, prompts, chain.outputs, block=6)
plain = np.concatenate([one.best for one in single])
noise = Control(int(np.sum(np.concatenate([one.best for one in blocks]) != plain)), len(plain))
flips = int(np.sum(np.concatenate(chain.outputs) != plain))
allowed = noise.allowed(len(plain))
print(
    f"{noise.tokens} tokens: {noise.flips} flips without a drafter, {flips} with one; allowed {allowed}"
)
assert flips <= allowed, "speculation departs from plain decoding more often than rounding does"
for one in judged:
    assert not np.any(one.units > WRONG_ULPS), f"{one.by}: a gap that no rounding explains"
    # A judge with other sums may differ by a little more than a tie now and then, as plain decoding does.
    assert one.agreed.disagreements <= Control(0, one.agreed.tokens).allowed(one.agreed.tokens)

# %% [markdown]
# ## float32: nothing to explain
#
# The same in float32, where rounding is a thousand times finer.

# %%
try:
    exact = run("float32", NAMES[-1:] if not here.on_gpu else NAMES)
except VLLMError as error:
    if not is_out_of_memory(error):
        raise
    exact = []
    print("not run: two engines with float32 weights do not fit here, as 01 said")
for one in exact:
    print(
        f"{one.by:28} {one.agreed.tokens} tokens, {one.agreed.ties} ties, {one.agreed.disagreements} disagreements"
    )
    assert one.agreed.disagreements == 0, f"{one.by} disagrees with {one.scored_by} in float32"

# %% [markdown]
# ## Beside vLLM, on record
#
# The newest committed run of the validation, whatever this machine has: both directions, every way of decoding.

# %%
level = here.record["L5"]
parts = [f"**L5 {level.verdict}**, {machine.described(here.record)}"]
for check in level.checks[:2]:
    parts += [check.tables[0].title, to_markdown(check.tables[0].columns, check.tables[0].rows)]
    assert check.numbers["disagreements"] == 0, "the record holds a disagreement"
assert level.verdict == "passed"
Markdown("\n\n".join(parts))

# %% [markdown]
# ## What would go wrong
#
# A wrong engine does not tie: it writes tokens that the judge ranks third or lower, or far below. Here the tenth
# token of the first text is replaced by one that the judge ranks lower; scored the same way, it cannot pass.

# %%
broken = [list(output) for output in chain.outputs[:1]]
broken[0][9] = (broken[0][9] + 1) % target.vocab_size
scored = reference(target, prompts[:1], broken)[0]
tolerance = tie_tolerance(scored.best_value, "bfloat16")
verdicts = classify(scored.gap, scored.rank, tolerance)
print(f"token 9: rank {scored.rank[9]}, gap {scored.gap[9]:.2f}, a tie ends at {tolerance[9]:.3f}")
print(f"{int((verdicts == Agreement.DISAGREE).sum())} of {len(verdicts)} tokens disagree after it")
assert verdicts[9] == Agreement.DISAGREE, "a planted error passed as a tie"
assert not np.any(verdicts[:9] == Agreement.DISAGREE), (
    "what stands before the error is judged as before"
)

# %% [markdown]
# ## Exercises
#
# **1.** The judge's choice has logit 20.1. How far below may a tie lie?
#
# <details><summary>Answer</summary>
#
# Between 16 and 32 bfloat16 steps by 2⁻³ = 0.125, so two units are 0.25. The next cell asks the function.
#
# </details>

# %%
allowed = float(tie_tolerance(20.1, "bfloat16"))
print(f"{allowed} of a logit")
assert allowed == 0.25

# %% [markdown]
# **2.** Why must a tie be the judge's *second* choice? Three logits may lie within two units.
#
# <details><summary>Answer</summary>
#
# They may, and rarely do. A rule that took every near token would also take a bug that always writes the third; a
# rank of at most 2 costs next to nothing where engines are right, and the allowance of the control covers the rest.
#
# </details>
#
# **3.** Both directions are scored. What would be missed if only ours were scored by vLLM?
#
# <details><summary>Answer</summary>
#
# Nothing of ours; but vLLM's own errors would never be seen, and with them the cases in which *our* judge is wrong: a
# prompt on which only vLLM's text reaches a position or a token that we get wrong.
#
# </details>
#
# ## What was claimed and checked
#
# - No token in bfloat16 lies beyond eight units, and disagreements are no more than rounding explains.
# - Speculation flips no more argmaxes than the same blocks do without a drafter.
# - In float32 there is no disagreement.
# - The committed record of L5 passed, without a disagreement.
# - A planted wrong token is called a disagreement, and only from its place on.
#
# Next: [03, sampled tokens](03_sampling_equivalence.ipynb).
