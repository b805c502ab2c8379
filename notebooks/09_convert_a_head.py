# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 · Convert a PyTorch head, find the port bug
#
# Draft heads are published as PyTorch files, and every engine has its own names for their tensors. Porting one is easy
# to get *almost* right, and speculative decoding hides the mistake: the text stays the target's own, only the speed is
# gone. After this notebook you can
#
# - convert an official EAGLE-3 checkpoint, and say what of it is checked and what cannot be;
# - take a head to another engine's layout and back without losing a bit;
# - read the symptoms of a bad port from τ and acceptance by position;
# - find the cause by bisection, comparing hidden states with a head that works.
#
# It takes about a minute on a laptop's CPU, works offline, and uses the shipped pair. It needs PyTorch, because the
# checkpoint is a pickle. Read 01, 02 and 04 first.

# %%
import first_cell

first_cell.start(also=("torch",))

# %%
import dataclasses
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch
from pictures import style
from safetensors.torch import load_file

import eagle3_jax as e3
from eagle3_jax import conversion, prompts
from eagle3_jax.conversion import CheckpointError, rules
from eagle3_jax.load import bundled

HERE = Path(tempfile.mkdtemp(prefix="eagle3-heads-"))
target = e3.load_target()
description = conversion.read_target(bundled("target")).config

# %% [markdown]
# ## An official checkpoint
#
# The official repository publishes a head as `pytorch_model.bin`, a pickle of fifteen tensors (fourteen where the draft
# vocabulary is the whole one), and a `config.json` that is silent about most things. We write the shipped head in just
# that form, so that there is something to convert.

# %%
official = HERE / "official"
shipped = conversion.read_head(bundled("eagle3"), description)
conversion.write_head(shipped, official, "eagle")
torch.save(load_file(official / "model.safetensors"), official / "pytorch_model.bin")
(official / "model.safetensors").unlink()

for name, tensor in sorted(torch.load(official / "pytorch_model.bin", weights_only=True).items()):
    print(f"{name:42} {tuple(tensor.shape)!s:14} {str(tensor.dtype).removeprefix('torch.')}")

# %% [markdown]
# What to look at: `fc` takes three features side by side (3 × 256) to the head's width; the attention projections of
# `midlayer` are twice as wide at their input, because they read the embedding beside the feature; two norms,
# `input_layernorm` for the *embedding* and `hidden_norm` for the *feature*; `lm_head` has one row per draft token, and
# `d2t` maps draft ids to target ids as an **offset**: target id = draft id + `d2t[draft id]`. Nothing says which target
# layers the features come from: official heads leave it to the code (2, L/2, L-3).
#
# `inspect` says what a directory is without running it.

# %%
about = conversion.describe(official)
print(f"{about.kind}; {about.dialect} layout; loadable: {about.loadable}")
print(f"{about.num_tensors} tensors, {about.num_parameters:,} parameters, {about.dtypes}")
print(f"note: {about.note.replace(str(HERE), '...')}")
assert about.kind == "draft head: EAGLE-3"
assert about.loadable
assert "target" in about.note, (
    "an official head alone does not say which features it reads: it needs its target"
)

# %% [markdown]
# ## Convert
#
# `eagle3 convert` and `conversion.convert` are the same function. It goes through a rule table with one line per
# tensor: the name there, the name here, and how it is laid out. A rule is read in both directions, and a checkpoint
# must be consumed to its last tensor.

# %%
conversion.convert(official, HERE / "native", "jax", target=description)
converted = e3.load_drafter(HERE / "native", target=target)
reference = e3.load_drafter(target=target)
texts = [target.tokenizer.encode(text).ids[-64:] for text in prompts.shipped()[::6]][:8]
LIMIT, CHAIN = 40, 5


def run(drafter):
    """Texts and counters of a head on the same prompts."""
    decoder = e3.SpeculativeDecoder(target, drafter, num_speculative_tokens=CHAIN, stop_tokens=())
    result = decoder.generate(texts, max_new_tokens=LIMIT)
    return result.tokens, result.stats


def same_bits(first, second):
    """Whether two nested parameters are equal to the bit, types included."""
    one, other = dict(rules.flatten(first)), dict(rules.flatten(second))
    bits = lambda leaf: (leaf.dtype, leaf.shape, np.ascontiguousarray(leaf).tobytes())
    return one.keys() == other.keys() and all(
        bits(np.asarray(one[key])) == bits(np.asarray(other[key])) for key in one
    )


plain = e3.SpeculativeDecoder(target, stop_tokens=()).generate(texts, max_new_tokens=LIMIT).tokens
good_text, good = run(reference)
there_and_back, again = run(converted)
assert same_bits(converted.params["head"], reference.params["head"]), (
    "the conversion changed a parameter"
)
assert good_text == there_and_back == plain, "lossless: the text is the target's own"
assert good.to_json() == again.to_json(), "the converted head drafts the same, round by round"
print(
    f"τ {good.mean_acceptance_length:.2f}, by position {[round(x, 2) for x in good.acceptance_per_position]}"
)

# %% [markdown]
# ## What a strict reader refuses
#
# The official loader reads with `strict=False`: a missing tensor keeps its random start, an unknown one is dropped, and
# nobody hears of it. Here each of these ends in one line. Watch what is *not* refused, too.


# %%
def edited(name, change):
    """A copy of the official checkpoint after a change of its tensors; its directory."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(official, folder)
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    change(tensors)
    torch.save(
        {key: value.contiguous() for key, value in tensors.items()}, folder / "pytorch_model.bin"
    )
    return folder


def replace(key, function):
    """A change of one tensor."""
    return lambda tensors: tensors.update({key: function(tensors[key])})


OUT = "midlayer.self_attn.o_proj.weight"
attempts = {
    "a tensor is missing": lambda tensors: tensors.pop("midlayer.hidden_norm.weight"),
    "one too many": lambda tensors: tensors.update(
        {"midlayer.self_attn.q_norm.weight": torch.ones(64)}
    ),
    "fc transposed": replace("fc.weight", torch.t),
    "d2t holds ids": replace("d2t", lambda offset: offset + torch.arange(len(offset))),
    "o_proj transposed": replace(OUT, torch.t),
}
accepted, refusals = [], []
for name, change in attempts.items():
    try:
        conversion.read_head(edited("attempt", change), description)
        accepted.append(name)
        print(f"{name}: read without complaint\n")
    except CheckpointError as error:
        refusals.append(str(error))
        print(f"{name}:\n    {str(error).replace(str(HERE), '...')}\n")
assert accepted == ["o_proj transposed"], "all but the square matrix are refused"
assert all("\n" not in refusal for refusal in refusals), "a refusal is one line"

# %% [markdown]
# The last one slipped through: `o_proj` is square, and a transposed square matrix has the right name, shape and type.
# No structural check can see it. That is what the rest of this notebook is about.
#
# ## To other engines and back
#
# SGLang and SpecForge share the official names and need their own `config.json`; vLLM's layout spells every flag out. A
# head that a layout cannot express is refused by name instead of being bent. Ours fits all of them, so the way through
# all layouts ends where it began.

# %%
for before, after in (
    ("native", "sglang"),
    ("sglang", "vllm"),
    ("vllm", "eagle"),
    ("eagle", "jax"),
):
    conversion.convert(HERE / before, HERE / after, after, target=description)
last = conversion.read_head(HERE / "jax", description)
assert same_bits(last.head, shipped.head), "a bit was lost on the way"
assert (last.draft_to_target == shipped.draft_to_target).all()
assert last.config == shipped.config
print("official (PyTorch) -> native -> sglang -> vllm -> eagle -> native: equal to the bit")

# %% [markdown]
# ## Five ports, one bug each
#
# Now the detective part. Somebody ported the head five times and made one classic mistake each time. All five load
# without a word, and all five are on disk as ordinary checkpoints. The mistakes, in no particular order:
#
# | mistake | where it comes from |
# |---|---|
# | the map `d2t` was lost and saved as zeros | an export that drops buffers |
# | `q` and `k` in interleaved order of rotary pairs, not in halves | GPT-J and Meta's files against Hugging Face |
# | the features in reverse order before `fc` | a list of layers that was sorted the other way, or popped from the end |
# | the norms of embedding and feature swapped | `input_layernorm` sounds like the input of the layer |
# | `o_proj` transposed | PyTorch stores `[out, in]`, JAX multiplies by `[in, out]` |
#
# The cell below makes them, and deals them out under the letters A to E. Do not read its shuffle too closely.


# %%
def interleaved(weight, head_dim=64):
    """Rows of a projection, from halves [a0 a1 .. b0 b1 ..] to pairs [a0 b0 a1 b1 ..]."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def swap_norms(tensors):
    """The two norms of the first layer change places."""
    one, other = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
    tensors[one], tensors[other] = tensors[other], tensors[one]


def lose_map(tensors):
    """A map of zeros, and the membership mask that goes with it."""
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    tensors["t2d"] = torch.arange(len(tensors["t2d"])) < len(tensors["d2t"])


def interleave(tensors):
    """Queries and keys for the other convention of rotary pairs."""
    for key in "qk":
        name = f"midlayer.self_attn.{key}_proj.weight"
        tensors[name] = interleaved(tensors[name])


mistakes = {
    "d2t lost": lose_map,
    "q and k interleaved": interleave,
    "features reversed": replace("fc.weight", lambda w: torch.cat(w.chunk(3, dim=1)[::-1], dim=1)),
    "norms swapped": swap_norms,
    "o_proj transposed": replace(OUT, torch.t),
}
order = np.random.default_rng(11).permutation(len(mistakes))
SECRET = {letter: list(mistakes)[index] for letter, index in zip("ABCDE", order, strict=True)}
ports = {letter: edited(letter, mistakes[name]) for letter, name in SECRET.items()}
heads = {letter: e3.load_drafter(folder, target=target) for letter, folder in ports.items()}

# %% [markdown]
# ### Symptoms
#
# First the text, then the counters.

# %%
symptoms = {"good": good}
for letter, drafter in heads.items():
    tokens, symptoms[letter] = run(drafter)
    assert tokens == plain, f"head {letter} changed the text: that no drafter can do"
print(f"all {len(heads)} heads write the target's text, token for token\n")
print("head     τ     acceptance by position            conditional")
for letter, stats in symptoms.items():
    by_position = " ".join(f"{share:.2f}" for share in stats.acceptance_per_position)
    conditional = " ".join(f"{share:.2f}" for share in stats.conditional_acceptance_rate)
    print(f"{letter:5} {stats.mean_acceptance_length:5.2f}   {by_position}   {conditional}")

# %%
figure, axes = plt.subplots()
colours = [style.COLOURS[style.ACCEPTED], *style.SERIES[:2], *style.SERIES[3:]]
for (letter, stats), colour in zip(symptoms.items(), colours, strict=True):
    label = f"{letter} (τ {stats.mean_acceptance_length:.2f})"
    axes.plot(
        range(1, CHAIN + 1), stats.acceptance_per_position, marker="o", color=colour, label=label
    )
axes.set(
    title="Same text, another speed: share of rounds that accepted each position",
    xlabel="position in the draft",
    ylabel="share of rounds",
    xticks=range(1, CHAIN + 1),
    ylim=(0, None),
)
axes.legend()
worst = max(symptoms[letter].mean_acceptance_length for letter in heads)
assert worst < good.mean_acceptance_length, "every bug costs τ"
unnoticed = [
    letter
    for letter in heads
    if symptoms[letter].mean_acceptance_length > 0.85 * good.mean_acceptance_length
]
assert len(unnoticed) == 2, "two of them cost less than 15 % of τ"

# %% [markdown]
# Every one of them costs speed, but two of them so little that without a reference nobody would look for a bug: these
# are the ones that live for years. And the symptom alone does not name the cause.
#
# ### The doctor
#
# `eagle3 doctor` looks at target and head together: sizes, vocabulary, layers, norms, rotary settings, broken weights,
# and how often the first drafts agree with the target on prompts that you give it.

# %%
given = texts[:3]
findings = {}
for letter in ("good", *ports):
    checks = conversion.diagnose(bundled("target"), ports.get(letter, official), prompts=given)
    findings[letter] = {check.name: check for check in checks}
    odd = [check.name for check in checks if check.status != "ok"]
    agreement = findings[letter]["agreement"].detail
    print(f"{letter:5} noted: {', '.join(odd)}\n      {agreement.partition(' at draft')[0]}")
lost = next(letter for letter, name in SECRET.items() if name == "d2t lost")
assert findings[lost]["vocabulary"].status == "warning", "a map of zeros is named for what it is"
assert findings["good"]["vocabulary"].status == "ok"
assert findings[lost]["agreement"].status == "failure", "and its first drafts never agree"
clean = [letter for letter in ports if findings[letter]["vocabulary"].status == "ok"]
assert len(clean) == 4, "the other four are well-formed: only their drafts are bad"

# %% [markdown]
# The doctor names one of the five outright (its line on the vocabulary), and that first drafts never agree. The chat
# template is noted for every head: the shipped target has none. The other four are well-formed heads, only worse ones,
# and what is wrong *inside* a well-formed head it cannot know. For that there is bisection.
#
# ### Bisection
#
# Feed the good head and a suspect the same text, features and tokens, and compare every intermediate result in the
# order in which it is computed. The first one that differs is where the bug is. In a real port the good head is the
# PyTorch original; here it is the shipped one.
#
# One trick is worth remembering. Position 0 attends to nothing but itself, so its attention weights are 1 whatever the
# queries and keys are. If attention is right at position 0 and wrong behind it, the values and `o_proj` are right and
# the *scores* are wrong: `q`, `k`, or the rotary embedding.

# %%
from eagle3_jax.drafters.eagle3 import Eagle3Head
from eagle3_jax.models.functional import bind
from eagle3_jax.models.layers import embed
from eagle3_jax.models.memory import BlockMemory, causal_mask

config, precision = reference.drafter.config, reference.drafter.precision
text = jnp.asarray([(texts[0] + good_text[0])[:64]], jnp.int32)
positions = jnp.arange(text.shape[1] - 1, dtype=jnp.int32)[None]
mask = causal_mask(text.shape[1] - 1)
features = target.model(
    target.params, text[:, :-1], positions, mask, aux_layers=config.aux_layers
).features


@jax.jit
def stages(params):
    """Everything that the head computes over a text, in order."""
    network = bind(Eagle3Head, config, precision, params["head"])
    layer, memory = network.first, BlockMemory(mask=mask)
    fused = network.fuse(features)
    embedding = layer.embedding_norm(embed(params["embedding"], text[:, 1:], precision))
    feature = layer.feature_norm(fused)
    # From here on each stage is given what the good head had before it, so that an error does not spread.
    clean = bind(Eagle3Head, config, precision, reference.params["head"])
    right = clean.fuse(features)
    both = [clean.first.embedding_norm(embed(params["embedding"], text[:, 1:], precision))]
    both = jnp.concatenate([*both, clean.first.feature_norm(right)], axis=-1)
    attended, _ = layer.attention(both, positions, memory)
    after = right + clean.first.attention(both, positions, memory)[0]
    through = layer.mlp(layer.mlp_norm(after))
    final = after + clean.first.mlp(clean.first.mlp_norm(after))
    logits = network.logits(final)
    ids = params["draft_to_target"][jnp.argmax(logits, axis=-1)]
    return {
        "fused features": fused,
        "normed embedding": embedding,
        "normed feature*": feature,
        "attention, position 0": attended[:, :1],
        "attention, behind it": attended[:, 1:],
        "mlp": through,
        "logits": logits,
        "target ids": jax.nn.one_hot(ids, config.vocab_size),
    }


def distance(one, other):
    """Relative difference of two results."""
    return float(jnp.linalg.norm(one - other) / jnp.linalg.norm(other))


truth = stages(reference.params)
table = {
    letter: {name: distance(x, truth[name]) for name, x in stages(heads[letter].params).items()}
    for letter in heads
}
assert all(distance(x, truth[name]) == 0 for name, x in stages(converted.params).items()), (
    "the good port differs nowhere"
)

# %%
names = [  # in the order in which they are computed
    "fused features",
    "normed embedding",
    "normed feature*",
    "attention, position 0",
    "attention, behind it",
    "mlp",
    "logits",
    "target ids",
]
assert set(names) == set(truth)
grid = np.array([[table[letter][name] for letter in heads] for name in names])
figure, axes = plt.subplots(figsize=(6.0, 3.8))
image = axes.imshow(np.minimum(grid, 1.5), cmap="Oranges", vmin=0, vmax=1.5, aspect="auto")
for row, column in np.ndindex(*grid.shape):
    axes.text(column, row, f"{grid[row, column]:.2f}", ha="center", va="center", size=8)
axes.set_xticks(range(len(heads)), heads)
axes.set_yticks(range(len(names)), names)
axes.set(title="Where each suspect differs from the good head (relative)", xlabel="suspect")
axes.grid(visible=False)
colorbar = figure.colorbar(image, label="relative difference")

# %% [markdown]
# Read a column from top to bottom, and stop at the first number that is not zero. (* the normed feature comes after the
# fused one, so an error in the fusion shows in both.) Before you open the answer: which letter is which?
#
# <details><summary>Answer</summary>
#
# - Fused features differ, and with them the normed feature: the features were **reversed** before `fc`.
# - Fused features agree, both norms differ: the norms were **swapped**.
# - Attention differs at position 0 already: values or output projection. The weights of `v` and `o` tell which; here
#   `o_proj` was **transposed**.
# - Attention agrees at position 0 and differs behind it: the scores. `q` and `k` are **interleaved**.
# - Everything agrees up to the logits, and the target ids differ: **`d2t` was lost**. The doctor had said so.
#
# The next cell decides by these rules alone and compares with what was planted.
#
# </details>


# %%
def verdict(column, tolerance=1e-6):
    """The cause, from where a column of the table is not zero."""
    differs = {name: value > tolerance for name, value in column.items()}
    if differs["fused features"]:
        return "features reversed"
    if differs["normed embedding"] and differs["normed feature*"]:
        return "norms swapped"
    if differs["attention, position 0"]:
        return "o_proj transposed"
    if differs["attention, behind it"]:
        return "q and k interleaved"
    return "d2t lost" if differs["target ids"] and not differs["logits"] else "not found"


for letter, column in table.items():
    assert verdict(column) == SECRET[letter], (
        f"head {letter} is {SECRET[letter]}, not {verdict(column)}"
    )
cost = {
    SECRET[letter]: good.mean_acceptance_length - symptoms[letter].mean_acceptance_length
    for letter in heads
}
for name, lost_tau in sorted(cost.items(), key=lambda pair: -pair[1]):
    letter = next(letter for letter in SECRET if SECRET[letter] == name)
    print(f"{letter}: {name:22} costs {lost_tau:.2f} of τ {good.mean_acceptance_length:.2f}")

# %% [markdown]
# ## What would go wrong
#
# Some bugs are in no tensor at all: they sit in the code around the head, and no converter can see them. The most
# common one pairs the feature of position `t` with token `t` instead of `t + 1`: the shift was forgotten. A drafter is
# a small protocol, so we can plant it around the good head.


# %%
@dataclasses.dataclass(frozen=True)
class Unshifted(type(reference.drafter)):
    """Pairs each feature with its own token, not with the next one."""

    def observe(self, params, state, seen):
        """As the right one does, but for the tokens that it is shown."""
        late = jnp.roll(seen.tokens, 1, axis=1).at[:, 0].set(seen.tokens[:, 0])
        last = jnp.take_along_axis(seen.tokens, jnp.maximum(seen.length - 1, 0)[:, None], axis=1)[
            :, 0
        ]
        after = super().observe(
            params, state, dataclasses.replace(seen, tokens=late, next_token=last)
        )
        return dataclasses.replace(
            after, root=jnp.where(seen.length > 0, seen.next_token, state.root)
        )


fields = {
    field.name: getattr(reference.drafter, field.name)
    for field in dataclasses.fields(reference.drafter)
}
unshifted = dataclasses.replace(reference, drafter=Unshifted(**fields))
tokens, stats = run(unshifted)
assert tokens == plain, "even now the text is right"
assert stats.mean_acceptance_length < 0.75 * good.mean_acceptance_length, (
    "and the head is nearly useless"
)
print(
    f"without the shift: τ {stats.mean_acceptance_length:.2f} in place of {good.mean_acceptance_length:.2f}; same text"
)

# %% [markdown]
# Two rules follow. Test a port by comparing hidden states with the original, never by its text. And keep a number: a
# head's τ on fixed prompts, in a test, so that a port that loses a fifth of it fails.
#
# ## Exercises
#
# **1.** Which of the five bugs would `conversion` have caught if the head were 320 wide, with four
# heads of 64 (in a layout that can say so)?
#
# <details><summary>Answer</summary>
#
# `o_proj` would be `[320, 256]`, no longer square, and its transpose would be refused by shape. All the others keep
# every shape whatever the sizes are.
#
# </details>
#
# **2.** Why does a port with `q` and `k` interleaved still accept anything?
#
# <details><summary>Answer</summary>
#
# A permutation that is the same in `q` and `k` does not change a dot product: without rotary embeddings nothing would
# have changed at all. Only the rotation now turns the wrong pairs by the wrong angles, so attention by content
# survives in part and attention by position is lost. The feature itself, moreover, goes around attention by the
# residual path.
#
# </details>
#
# **3.** Undo the mistake of one suspect in its checkpoint, and check that its τ comes back.
#
# <details><summary>Answer</summary>
#
# ```python
# letter = next(letter for letter, name in SECRET.items() if name == "norms swapped")
# tensors = torch.load(ports[letter] / "pytorch_model.bin", weights_only=True)
# swap_norms(tensors)
# torch.save(tensors, ports[letter] / "pytorch_model.bin")
# assert run(e3.load_drafter(ports[letter], target=target))[1].to_json() == good.to_json()
# ```
#
# </details>
#
# **4.** A head is fine at the first position and collapses at the second. Which part of the port do you suspect?
#
# <details><summary>Answer</summary>
#
# What the second draft token has and the first has not: the head's own output, fed back in place of the features.
# EAGLE-3 feeds it back *before* the last norm; a port that feeds back the normed state (`norm_output`), runs `fc` over
# it, or gives the guess the wrong position is right once and wrong ever after. The cell below plants it. `doctor` knows
# this signature.
#
# </details>

# %%
# Exercise 3.
letter = next(letter for letter, name in SECRET.items() if name == "norms swapped")
tensors = torch.load(ports[letter] / "pytorch_model.bin", weights_only=True)
swap_norms(tensors)
torch.save(tensors, ports[letter] / "pytorch_model.bin")
assert run(e3.load_drafter(ports[letter], target=target))[1].to_json() == good.to_json()

# Exercise 4: the normed output is fed back.
fed_back = dataclasses.replace(
    reference.drafter, config=dataclasses.replace(config, norm_output=True)
)
tokens, stats = run(dataclasses.replace(reference, drafter=fed_back))
first, second = stats.conditional_acceptance_rate[:2]
print(
    f"normed feedback: {first:.2f} at the first position, {second:.2f} at the second (given the first)"
)
print(
    f"good head:       {good.conditional_acceptance_rate[0]:.2f} and {good.conditional_acceptance_rate[1]:.2f}"
)
assert tokens == plain
assert second < 0.8 * good.conditional_acceptance_rate[1], "the second position suffers"
shutil.rmtree(HERE)

# %% [markdown]
# ## What was claimed and checked
#
# - A PyTorch checkpoint in the official layout converts to the shipped head, bit for bit, and drafts the same.
# - A missing tensor, one too many, a transposed `fc` and a `d2t` of ids are refused, each in one line; a transposed
#   square matrix is not.
# - Through the layouts of SGLang, vLLM and the official code and back, no bit is lost.
# - Five well-formed ports with a bug each, and a sixth with a bug in the code, write exactly the target's text; each
#   has a lower τ.
# - The doctor names the lost `d2t`; a comparison of hidden states finds the other four.
# - Undoing a mistake brings every counter back.
#
# **Next:** 10 on writing a drafter of your own, 11 on training a head.
