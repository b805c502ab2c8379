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
# This notebook compares this library with vLLM in three ways: greedy tokens one by one, the
# distribution of sampled tokens, and accepted draft tokens round by round. It uses the functions of
# levels L5, L6 and L8 of the [validation](../../docs/validation.md). Without vLLM, it compares with
# this library's target or with the committed record. Read [01](01_this_machine.ipynb) first.

# %% tags=["hide-input"]
import sys

sys.path.insert(0, "..")  # where first_cell, machine and pictures are

import first_cell

first_cell.start(repository=True, device=False, also=("torch", "transformers"))

import machine

here = machine.start()
here.banner("vLLM")

# %% tags=["hide-input"]
import dataclasses
import itertools
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")
from transformers.utils import logging

logging.disable_progress_bar()

import matplotlib.pyplot as plt
import numpy as np
import tiny
from IPython.display import Markdown, display
from pictures.ribbons import acceptance_ribbons
from pictures.style import DRAFTER, TARGET

from eagle3_jax import SpeculativeDecoder, load_drafter, load_target
from eagle3_jax.bench.memory import is_out_of_memory
from eagle3_jax.bench.tables import to_markdown
from validation import second_token
from validation.agreement import Judged, both_directions, decoders_of, ours
from validation.emissions import Reference, Warpers
from validation.engines.vllm.bridge import (
    Completion,
    EngineOptions,
    Generated,
    VLLMError,
    VLLMUnavailable,
    eagle3,
)
from validation.forcing import by_blocks, reference
from validation.internals import compare_with_recorded, recording
from validation.margin import TIE_ULPS, WRONG_ULPS, Agreement, Control, classify, tie_tolerance
from validation.parity import COUNTERS, Parity, first_difference, parity, play, stats_of
from validation.sampled import METHODS, MOST_Z, decoder_of, judge, sample
from validation.statistics import smallest_shift
from validation.subject import SHIPPED

here.exactly()
subject = here.subject
CONTEXT = 100
prompts = [prompt[-CONTEXT:] for prompt in subject.prompt_tokens[: here.amount(cpu=6, gpu=56)]]
LIMIT = here.amount(cpu=24, gpu=128)

# %% [markdown]
# ## Greedy tokens: agreement and ties
#
# Two correct engines add the same bfloat16 products in a different order. If two logits are
# approximately tied, they can choose different tokens, and the rest of the texts differs. So each
# engine scores the text of the *other* engine, token by token, with teacher forcing. The scoring
# engine is the judge. A token is
#
# - **agreed** if it is the judge's most likely token;
# - a **tie** if it is the judge's second choice and its logit is at most two bfloat16 units in the
#   last place lower (1e-3 in float32);
# - a **disagreement** otherwise.


# %%
def on_our_own(dtype, names):
    """Without vLLM: scores the texts of our decoders with our target, in one pass with float32 sums."""
    target, drafter = subject.pair(dtype)
    decoders = {
        name: decoder for name, decoder in decoders_of(target, drafter).items() if name in names
    }
    texts = ours(decoders, prompts, max_new_tokens=LIMIT, singly=0)
    judge = "our target, one pass, sums in float32"
    return [
        Judged(name, judge, dtype, outputs, reference(target, prompts, outputs))
        for name, outputs in texts.items()
    ]


def with_vllm(dtype, names):
    """With vLLM: each engine scores the texts of the other one."""
    target, drafter = subject.pair(dtype)
    decoders = {
        name: decoder for name, decoder in decoders_of(target, drafter).items() if name in names
    }
    judgements = both_directions(
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
    assert not judgements.unexplained, "; ".join(judgements.unexplained)
    return judgements.all


NAMES = here.amount(
    cpu=("plain", "EAGLE-3 chain"), gpu=("plain", "n-gram", "EAGLE-3 tree", "EAGLE-3 chain")
)


def run(dtype, names):
    """Compares with vLLM if it supports the precision, otherwise with our target."""
    if here.vllm is None:
        return on_our_own(dtype, names)
    try:
        return with_vllm(dtype, names)
    except VLLMUnavailable as reason:  # a running server has a fixed precision
        print(f"vLLM: {reason}; our target is the judge of {dtype}")
        return on_our_own(dtype, names)


judged = run("bfloat16", NAMES)

# %%
rows = []
for judgement in judged:
    counted = judgement.agreed
    agreed = counted.tokens - counted.ties - counted.disagreements
    same = f"{judgement.texts_shared(judged[0].outputs)} of {len(judgement.outputs)}"
    rows.append(
        [
            judgement.by,
            judgement.scored_by,
            counted.tokens,
            agreed,
            counted.ties,
            counted.disagreements,
            same,
        ]
    )
columns = [
    "generated by",
    "scored by",
    "tokens",
    "agreed",
    "ties",
    "disagreements",
    f"texts equal to '{judged[0].by}'",
]
Markdown(f"bfloat16, ours on {here.device}\n\n" + to_markdown(columns, rows))

# %% [markdown]
# The last column compares whole texts. It does not distinguish ties from bugs. The plot shows every
# token that is not the judge's choice, by its gap in bfloat16 units. A tie has at most two units. A
# gap of more than eight units is an error.

# %% tags=["hide-input"]
figure, axes = plt.subplots()
for judgement in judged:
    off = judgement.gaps > 0
    axes.plot(
        judgement.values[off],
        judgement.units[off],
        "o",
        alpha=0.7,
        label=f"{judgement.by}: {int(off.sum())}",
    )
axes.axhline(TIE_ULPS, color="#2a9d74", label="limit of a tie")
axes.axhline(WRONG_ULPS, color="#c05a8e", linestyle="--", label="limit of an error")
axes.set(ylim=(-0.2, WRONG_ULPS + 0.5), ylabel="gap, bfloat16 units")
axes.set(
    xlabel=f"largest logit of the judge ({here.device})",
    title="Tokens that are not the judge's choice",
)
axes.legend(fontsize="small")
plt.show()

# %% [markdown]
# Rounding also changes the argmax of plain decoding at ties. The control measures this without a
# drafter. It feeds the same text to the same target one token at a time and in blocks of six, the
# block size of verification, and counts different argmaxes. The limit for speculation is the
# Poisson quantile of this rate at one in a million. In float32 no disagreement is allowed.

# %%
target = subject.pair("bfloat16")[0]
chain = next(judgement for judgement in judged if judgement.by.startswith("ours, EAGLE-3 chain"))
single = by_blocks(target, prompts, chain.outputs, block=1)
blocks = by_blocks(target, prompts, chain.outputs, block=6)
plain = np.concatenate([row.best for row in single])
noise = Control(int(np.sum(np.concatenate([row.best for row in blocks]) != plain)), len(plain))
flips = int(np.sum(np.concatenate(chain.outputs) != plain))
allowed = noise.allowed(len(plain))
print(
    f"{noise.tokens} tokens: {noise.flips} changed without a drafter, {flips} with a drafter; limit"
    f" {allowed}"
)
assert flips <= allowed, "speculation changes more tokens than rounding explains"
for judgement in judged:
    assert not np.any(judgement.units > WRONG_ULPS), (
        f"{judgement.by}: a gap that no rounding explains"
    )
    # A judge with different sums can exceed the limit of a tie slightly, as plain decoding can.
    assert judgement.agreed.disagreements <= Control(0, judgement.agreed.tokens).allowed(
        judgement.agreed.tokens
    )

try:
    exact = run("float32", NAMES[-1:] if not here.on_gpu else NAMES)
except VLLMError as error:
    if not is_out_of_memory(error):
        raise
    exact = []
    print("not run: two engines with float32 weights do not fit into this memory")
counts = [(judgement.agreed.tokens, judgement.agreed.disagreements) for judgement in exact]
print("float32, tokens and disagreements:", counts)
assert not any(disagreements for _, disagreements in counts)
level = here.record["L5"]
assert level.verdict == "passed"
assert all(check.numbers["disagreements"] == 0 for check in level.checks[:2])
here.verdict(
    "greedy",
    f"{sum(judgement.agreed.tokens for judgement in judged):,} tokens,"
    f" {sum(judgement.agreed.ties for judgement in judged)} ties,"
    f" {sum(judgement.agreed.disagreements for judgement in judged)} disagreements in bfloat16;"
    " none in float32",
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
pair = subject.pair("float32")
judge_model = Reference(subject.target_directory)
many = here.on_gpu and subject.name == SHIPPED  # the reference runs on the host
BATCHES = (((Warpers(0.7), Warpers(1.0)), *((20, 180) if many else (6, 40))),)
CHOSEN = [name for name in METHODS if many or "sampled" in name or "plain" in name]
sampled = {
    name: sample(decoder_of(name, *pair), subject.prompt_tokens, judge_model, batches=BATCHES)
    for name in CHOSEN
}
verdicts = {name: judge(sample) for name, sample in sampled.items()}
for name, verdict in verdicts.items():
    assert not verdict.wrong, f"{name}: {'; '.join(verdict.wrong)}"
    print(
        f"{name}: largest |z| {max(map(abs, verdict.scores)):.2f}, smallest p"
        f" {min(verdict.p_values):.2g};"
    )
    detected = smallest_shift(max(verdict.judged), MOST_Z)
    print(f"    detects a relative deviation of probabilities of {detected:.0%} (root mean square)")

# %% tags=["hide-input"]
figure, all_axes = plt.subplots(1, len(verdicts), figsize=(4.2 * len(verdicts), 3.6), squeeze=False)
for axes, (name, verdict) in zip(all_axes[0], verdicts.items(), strict=True):
    rows = [row for row in verdict.rows if row[2] != ""]
    places = np.arange(len(rows))
    axes.barh(places - 0.2, [row[2] for row in rows], 0.38, color=TARGET, label="entropy")
    axes.barh(places + 0.2, [row[3] or 0.0 for row in rows], 0.38, color=DRAFTER, label="directed")
    axes.set_yticks(places, [f"{row[0]} ({row[1]})" for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.axvspan(-MOST_Z, MOST_Z, color="#9aa0a6", alpha=0.12)
    axes.set(xlabel="z", title=name)
all_axes[0][0].legend(fontsize="small")
plt.show()

# %% [markdown]
# The second token of an answer is the first one that comes from a round. For a tiny target its
# distribution can be enumerated. Both engines sample this token thousands of times. Without vLLM,
# the rows of vLLM come from the committed record. A row *as shipped* with p = 0 is expected: the
# CPU build of vLLM 0.32.0 samples wrongly under speculation. The check then compares with a vLLM
# that is repaired in its process. On CUDA, a vLLM that samples wrongly fails this notebook.

# %%
SETTING = "T=1"
exact = second_token.exact_distribution(SETTING)
COUNT = second_token.DRAWS if here.on_gpu or here.vllm_process is not None else 1024
draws = second_token.ours(SETTING, COUNT)
if here.vllm_process is not None:
    draws |= second_token.vllms(here.vllm_process, SETTING)
fits = second_token.fits(draws, exact)
rows = [
    [name, "here", round(fit.distance, 4), f"{fit.chi_square:.2g}", f"{fit.g_test:.2g}"]
    for name, fit in fits.items()
]
recorded = here.record.table("L6", second_token.title(SETTING))
if here.vllm_process is None:
    when = machine.described(here.record)
    rows += [
        [row[0], f"{when}, {second_token.DRAWS} samples", row[1], f"{row[2]:.2g}", f"{row[3]:.2g}"]
        for row in recorded.rows
        if "vLLM" in row[0]
    ]
columns = ["sampled by", "when and where", "total variation distance", "p (chi-square)", "p (G)"]
display(Markdown(f"Second token at {SETTING}\n\n" + to_markdown(columns, rows)))

for name, fit in fits.items():
    if name != second_token.SHIPPED:
        assert second_token.follows(fit), f"{name} does not have the target's distribution"
if second_token.SHIPPED in fits and here.vllm_process.versions["device"] != "cpu":
    assert second_token.follows(fits[second_token.SHIPPED]), "vLLM samples wrongly"
largest = max(max(map(abs, verdict.scores)) for verdict in verdicts.values())
here.verdict(
    "sampling",
    f"largest |z| {largest:.1f} (limit {MOST_Z:g}); the second token has the target's distribution",
    needs="vLLM",
)

# %% [markdown]
# ## Accepted draft tokens, round by round
#
# Verification corrects any draft, so a wrong port of a head still generates the correct text. Only
# its acceptance is lower. So both engines run the same head in float32, and the cell compares every
# round of every request. Without vLLM, it compares with a recorded run of vLLM with a tiny pair
# (`tests/golden`).

# %%
BATCH = 8


def recorded_run():
    """Runs the recorded prompts and compares with the recorded rounds of vLLM."""
    trace = tiny.golden_trace("vllm/trace_eagle3_k3_float32.json")
    tiny_target = load_target(second_token.DIRECTORY / "target")
    tiny_head = load_drafter(second_token.DIRECTORY / "eagle3", target=tiny_target)
    length = trace["num_speculative_tokens"]
    decoder = SpeculativeDecoder(
        tiny_target, tiny_head, num_speculative_tokens=length, stop_tokens=()
    )
    requests = trace["requests"]
    played = play(
        decoder,
        [request["prompt"] for request in requests],
        max_new_tokens=trace["max_new_tokens"],
        batch_size=4,
    )
    completions = [
        Completion(
            tokens=request["output"],
            accepted=request["per_step_accepted"],
            drafted=request["per_step_drafted"],
        )
        for request in requests
    ]
    counters = {name: trace["metrics"][f"spec_decode_{name}"] for name in COUNTERS}
    theirs = Generated(completions=completions, seconds=0.0, counters=counters)
    return Parity(played, theirs, stats_of(played, trace["num_speculative_tokens"]))


def rounds_of_both(length):
    """Runs the pair in both engines, with a chain of this length."""
    options = EngineOptions(
        model=str(subject.target_directory),
        speculative=eagle3(subject.drafter_directory, length),
        max_num_seqs=BATCH,
    )
    engine = here.vllm.engine(options)
    decoder = SpeculativeDecoder(
        *subject.pair("float32"), num_speculative_tokens=length, stop_tokens=()
    )
    prompts = [prompt[-CONTEXT:] for prompt in subject.prompt_tokens[: here.amount(cpu=8, gpu=24)]]
    return parity(decoder, engine, prompts, max_new_tokens=LIMIT, batch_size=BATCH)


parities = {}
if here.vllm is None:
    parities["K=3, the recorded tiny pair"] = recorded_run()
else:
    for length in sorted(
        {here.draft_tokens(length) for length in here.amount(cpu=(3,), gpu=range(1, 8))}
    ):
        try:
            parities[f"K={length}"] = rounds_of_both(length)
        except VLLMUnavailable as reason:  # a running server has a fixed draft length
            print(f"K={length}: {reason}")
        except VLLMError as error:
            if not is_out_of_memory(error):
                raise
            print(
                "two engines with float32 weights do not fit into this memory; using the"
                " recorded run"
            )
            parities["K=3, the recorded tiny pair"] = recorded_run()
            break
for name, parity_ in parities.items():
    rounds = sum(len(row.accepted) for row in parity_.ours)
    print(
        f"{name}: {len(parity_.ours)} requests, {rounds} rounds, τ ="
        f" {parity_.stats.mean_acceptance_length:.3f}"
    )

assert parities, "vLLM supports none of these draft lengths"
for name, parity_ in parities.items():
    assert parity_.difference is None, f"{name}: {parity_.difference}"
    assert all(our_count == vllm_count for our_count, vllm_count in parity_.counters.values())
    shares = parity_.stats.acceptance_per_position
    assert all(late <= early for early, late in itertools.pairwise(shares))
    assert abs(1 + sum(shares) - parity_.stats.mean_acceptance_length) < 1e-9
recorded = [
    check for check in here.record["L8"].checks if check.name.startswith("every round accepts")
]
for check in recorded:
    assert check.tables[0].column("ours") == check.tables[0].column("vLLM"), check.name
display(
    here.verdict(
        "acceptance", f"{', '.join(parities)}: all rounds and counters equal", needs="vLLM"
    )
)

# %% tags=["hide-input"]
acceptance_ribbons(
    {name: parity_.stats.acceptance_per_position for name, parity_ in parities.items()},
    rounds={name: int(parity_.stats.num_drafts) for name, parity_ in parities.items()},
    title=f"Acceptance by position, both engines ({here.device})",
)

# %% [markdown]
# If vLLM runs in its own process (`EAGLE3_VLLM_PYTHON`), the cell also compares the inputs and
# outputs of its head: features of the target and draft logits. The table shows this comparison for
# the kinds of head in the committed record.

# %%
TOLERANCE = 1e-4  # rounding gives 1e-6, a wrong layer, norm or position 1e-1
if here.vllm_process is not None and "K=3, the recorded tiny pair" not in parities:
    options = EngineOptions(
        model=str(subject.target_directory),
        speculative=eagle3(subject.drafter_directory, 3),
        max_num_seqs=BATCH,
        first_runner=True,
    )
    engine = here.vllm_process.engine(options)
    ours = recording(
        SpeculativeDecoder(*subject.pair("float32"), num_speculative_tokens=3, stop_tokens=())
    )
    prompt = subject.prompt_tokens[0][-CONTEXT:]
    recorded_rounds = engine.record(prompt, max_new_tokens=16)  # with all logits of every round
    close = compare_with_recorded(ours, prompt, recorded_rounds, max_new_tokens=16)
    print(
        f"{close.rounds} rounds, relative differences: features {close.features:.1e}, draft logits"
        f" {close.logits:.1e}"
    )
    assert close.rounds and close.drafts_differ == 0
    assert max(close.features, close.logits) < TOLERANCE
kinds = [
    check
    for check in here.record["L8"].checks
    if check.name.startswith("a head of every variation")
]
rows = [
    [check.name.partition("[")[2].rstrip("]"), check.numbers["rounds_compared_inside"]]
    + [f"{check.numbers[name]:.1e}" for name in ("features_apart", "draft_logits_apart")]
    for check in kinds
]
assert max(float(cell) for row in rows for cell in row[2:]) < TOLERANCE
columns = ["head", "rounds", "difference of features", "difference of draft logits"]
Markdown(f"Record of {machine.described(here.record)}\n\n" + to_markdown(columns, rows))

# %% [markdown]
# ## Common mistakes
#
# A comparison is useful only if it detects errors. The cell injects three: a wrong token in a text,
# samples of another temperature, and a head with features of the wrong layers.

# %%
broken = [list(output) for output in chain.outputs[:1]]
broken[0][9] = (broken[0][9] + 1) % target.vocab_size
scored = reference(target, prompts[:1], broken)[0]
wrong_at = classify(scored.gap, scored.rank, tie_tolerance(scored.best_value, "bfloat16"))
assert wrong_at[9] == Agreement.DISAGREE, "an injected error was classified as a tie"
assert not np.any(wrong_at[:9] == Agreement.DISAGREE), "earlier tokens are not affected"

wrong_draws = {"samples at T=1": draws["ours, EAGLE-3"]}
for fit in second_token.fits(
    wrong_draws, second_token.exact_distribution("T=0.7, top-p 0.9")
).values():
    assert not second_token.follows(fit), "a wrong temperature was not detected"

right_layers = pair[1].drafter.config.aux_layers
wrong_layers = (*(layer + 1 for layer in right_layers[:-1]), right_layers[-1] - 1)
config = dataclasses.replace(pair[1].drafter.config, aux_layers=wrong_layers)
ported = dataclasses.replace(pair[1], drafter=dataclasses.replace(pair[1].drafter, config=config))
runs = {}
for name, head in (("right", pair[1]), ("wrong", ported)):
    decoder = SpeculativeDecoder(pair[0], head, num_speculative_tokens=3, stop_tokens=())
    runs[name] = play(decoder, prompts[:4], max_new_tokens=24, batch_size=4)
    print(f"{name} layers: τ = {stats_of(runs[name], 3).mean_acceptance_length:.2f}")
assert [row.tokens for row in runs["right"]] == [row.tokens for row in runs["wrong"]]
completions = [Completion(tokens=row.tokens, accepted=row.accepted) for row in runs["right"]]
difference = first_difference(
    runs["wrong"], Generated(completions=completions, seconds=0.0, counters={})
)
assert difference is not None and "round" in difference, "wrong layers were not detected"

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
# - In bfloat16, no gap exceeds eight units, and rounding explains all disagreements. In float32 and
#   in the committed record of L5 there is no disagreement.
# - Speculation changes no more argmaxes than the same blocks without a drafter, within the limit.
# - In every stratum, scores of sampled tokens are within ±5. Second tokens have the enumerated
#   distribution.
# - Tokens, accepted counts of every round and all counters equal those of vLLM.
# - In the committed record, accepted counts are equal for all draft lengths. Features and draft
#   logits of all kinds of head differ by less than 1e-4.
# - The comparisons detect a wrong token, a wrong temperature and features of wrong layers.
#
# **Next:** [03](03_speed_and_tuning.ipynb), speed.
