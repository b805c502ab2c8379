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
# # 08 · Convert a PyTorch head
#
# Draft heads are published as PyTorch files, and every engine uses different tensor names.
# Speculative decoding hides mistakes in a port: the text is still the target's, but the speed-up is
# lost. After this notebook you can
#
# - convert an official EAGLE-3 checkpoint, and list the mistakes that the converter detects and
#   those it cannot detect;
# - convert a head to another engine's layout and back without losing a bit;
# - read the symptoms of a bad port from τ and acceptance by position;
# - find the cause by comparing hidden states with a correct head.
#
# The notebook runs on a laptop CPU, offline, with the shipped pair. It needs PyTorch, because the
# checkpoint is a pickle. Read [01](01_memory_bound_decoding.ipynb),
# [02](02_speculative_sampling.ipynb) and [03](03_eagle3_head.ipynb) first.

# %% tags=["hide-input"]
import first_cell

first_cell.start(also=("torch",))

import dataclasses
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch
from pictures.maps import table_map
from pictures.ribbons import acceptance_ribbons
from safetensors.torch import load_file

import eagle3_jax as e3
from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError, rules
from eagle3_jax.drafters.eagle3 import Eagle3Head
from eagle3_jax.files.sources import bundled
from eagle3_jax.models.context import BlockContext
from eagle3_jax.models.functional import bind
from eagle3_jax.models.layers import embed
from eagle3_jax.prompts import benchmark
from eagle3_jax.tree import causal_mask

HERE = Path(tempfile.mkdtemp(prefix="eagle3-heads-"))
target = e3.load_target()
description = conversion.read_target(bundled("target")).config

# %% [markdown]
# ## Official checkpoint format
#
# The official repository publishes a head as `pytorch_model.bin` and a short `config.json`.
# `pytorch_model.bin` is a pickle of tensors. The cell writes the shipped head in this format.
# `conversion.describe` (`eagle3 inspect`) reads the checkpoint without executing code from it.
#
# - `fc` maps three features (3 × 256) to the width of the head. The attention projections of
#   `midlayer` have twice the input width.
# - `input_layernorm` is the norm of the *embedding*, `hidden_norm` the norm of the *feature*.
# - `d2t` maps draft ids to target ids as an **offset**.
# - The checkpoint does not contain the target layers of the features. The official code sets them
#   (2, L/2, L-3).

# %%
official = HERE / "official"
shipped = conversion.read_head(bundled("eagle3"), description)
conversion.write_head(shipped, official, "eagle")
torch.save(load_file(official / "model.safetensors"), official / "pytorch_model.bin")
(official / "model.safetensors").unlink()

for name, tensor in sorted(torch.load(official / "pytorch_model.bin", weights_only=True).items()):
    print(f"{name:42} {tuple(tensor.shape)!s:14} {str(tensor.dtype).removeprefix('torch.')}")

about = conversion.describe(official)
print(f"{about.kind}; {about.dialect} layout; {about.num_parameters:,} parameters, {about.dtypes}")
print(f"note: {about.note.replace(str(HERE), '...')}")
assert about.kind == "draft head: EAGLE-3" and about.loadable
assert "target" in about.note, "the feature layers depend on the target"

# %% [markdown]
# ## Conversion
#
# `eagle3 convert` and `conversion.convert` are the same function. It uses a table with one rule per
# tensor: the name in the checkpoint, the name in this library, and the layout. A rule works in both
# directions. Every tensor of a checkpoint must match a rule.

# %%
conversion.convert(official, HERE / "native", "jax", target=description)
converted = e3.load_drafter(HERE / "native", target=target)
reference = e3.load_drafter(target=target)
texts = [target.tokenizer.encode(text).ids[-64:] for text in benchmark.shipped()[::6]][:8]
LIMIT = 40
CHAIN = 5


def run(drafter):
    """Texts and acceptance counters of a head on the prompts."""
    decoder = e3.SpeculativeDecoder(target, drafter, num_speculative_tokens=CHAIN, stop_tokens=())
    result = decoder.generate(texts, max_new_tokens=LIMIT)
    return result.tokens, result.stats


def bits(leaf):
    array = np.asarray(leaf)
    return array.dtype, array.shape, np.ascontiguousarray(array).tobytes()


def same_bits(first, second):
    """Whether two nested parameters are equal bit for bit, types included."""
    first_leaves = dict(rules.flatten(first))
    second_leaves = dict(rules.flatten(second))
    return first_leaves.keys() == second_leaves.keys() and all(
        bits(first_leaves[key]) == bits(second_leaves[key]) for key in first_leaves
    )


plain = e3.SpeculativeDecoder(target, stop_tokens=()).generate(texts, max_new_tokens=LIMIT).tokens
good_text, good = run(reference)
there_and_back, again = run(converted)
assert same_bits(converted.params["head"], reference.params["head"]), (
    "the conversion changes no parameter"
)
assert good_text == there_and_back == plain, "lossless: the text is the target's"
assert good.to_json() == again.to_json(), "the converted head drafts the same, round by round"
print(
    f"τ {good.mean_acceptance_length:.2f}, by position"
    f" {[round(x, 2) for x in good.acceptance_per_position]}"
)

# %% [markdown]
# ## Rejected checkpoints
#
# The official loader uses `strict=False`: a missing tensor keeps its random initial values, and an
# unknown tensor is ignored. This library raises a one-line error in both cases. The last mistake
# below is not detected: a transposed square matrix has the correct name, shape and type.


# %%
def edited(name, change):
    """Directory of a copy of the official checkpoint with changed tensors."""
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
accepted = []
refusals = []
for name, change in attempts.items():
    try:
        conversion.read_head(edited("attempt", change), description)
        accepted.append(name)
        print(f"{name}: no error\n")
    except CheckpointError as error:
        refusals.append(str(error))
        print(f"{name}:\n    {str(error).replace(str(HERE), '...')}\n")
assert accepted == ["o_proj transposed"], "all except the square matrix are rejected"
assert all("\n" not in refusal for refusal in refusals), "an error is one line"

# %% [markdown]
# ## Layouts of SGLang and vLLM
#
# SGLang and SpecForge use the official tensor names with a different `config.json`. vLLM's layout
# stores every flag. If a layout cannot express a head, the conversion raises an error. The cell
# converts the shipped head through all layouts and compares every bit.

# %%
for before, after in (
    ("native", "sglang"),
    ("sglang", "vllm"),
    ("vllm", "eagle"),
    ("eagle", "jax"),
):
    conversion.convert(HERE / before, HERE / after, after, target=description)
last = conversion.read_head(HERE / "jax", description)
assert same_bits(last.head, shipped.head), "no bit is lost"
assert (last.draft_to_target == shipped.draft_to_target).all()
assert last.config == shipped.config
print("official (PyTorch) -> native -> sglang -> vllm -> eagle -> native: every bit is equal")

# %% [markdown]
# ## Five ports with one bug each
#
# The next cell makes five ports of the head. Each has one common mistake, and all of them load
# without an error.
#
# | mistake | cause |
# |---|---|
# | `d2t` lost and saved as zeros | an export that drops buffers |
# | `q` and `k` in interleaved rotary pairs | GPT-J and Meta use pairs, Hugging Face halves |
# | features in reverse order before `fc` | a list of layers in a different order |
# | norms of embedding and feature swapped | `input_layernorm` sounds like the input of the layer |
# | `o_proj` transposed | PyTorch stores `[out, in]`, JAX multiplies by `[in, out]` |
#
# The ports get the letters A to E in random order.


# %%
def interleaved(weight, head_dim=64):
    """Reorders rows of a projection from halves [a0 a1 .. b0 b1 ..] to pairs [a0 b0 a1 b1 ..]."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def swap_norms(tensors):
    """Exchanges the two norms of the first layer."""
    input_norm = "midlayer.input_layernorm.weight"
    hidden_norm = "midlayer.hidden_norm.weight"
    tensors[input_norm], tensors[hidden_norm] = tensors[hidden_norm], tensors[input_norm]


def lose_map(tensors):
    """Sets the map to zeros, with a consistent membership mask."""
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    tensors["t2d"] = torch.arange(len(tensors["t2d"])) < len(tensors["d2t"])


def interleave(tensors):
    """Reorders queries and keys for interleaved rotary pairs."""
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
# ### Symptoms: τ and acceptance by position

# %%
symptoms = {"good": good}
for letter, drafter in heads.items():
    tokens, symptoms[letter] = run(drafter)
    assert tokens == plain, f"head {letter} generates the target's text"
taus = {letter: stats.mean_acceptance_length for letter, stats in symptoms.items()}
print("τ:", {letter: round(tau, 2) for letter, tau in taus.items()})
assert max(taus[letter] for letter in heads) < taus["good"], "every bug lowers τ"
unnoticed = [letter for letter in heads if taus[letter] > 0.85 * taus["good"]]
assert len(unnoticed) == 2, "two of them lower τ by less than 15 %"

# %% tags=["hide-input"]
acceptance_ribbons(
    {letter: stats.acceptance_per_position for letter, stats in symptoms.items()},
    rounds={letter: int(stats.num_drafts) for letter, stats in symptoms.items()},
    title="Acceptance by position, good head and five ports",
)

# %% [markdown]
# Every bug lowers τ. Two of them lower it so little that only a comparison with a reference shows a
# bug. The symptom does not identify the cause.
#
# ### `eagle3 doctor`
#
# `eagle3 doctor` checks target and head together: sizes, vocabulary, layers, norms, rotary
# settings, invalid weights, and the agreement of the first draft tokens with the target. It finds
# the lost map. The other four heads are well-formed.

# %%
few_texts = texts[:3]
findings = {}
for letter in ("good", *ports):
    checks = conversion.diagnose(bundled("target"), ports.get(letter, official), prompts=few_texts)
    findings[letter] = {check.name: check for check in checks}
    odd = [check.name for check in checks if check.status != "ok"]
    agreement = findings[letter]["agreement"].detail
    print(f"{letter:5} not ok: {', '.join(odd)}\n      {agreement.partition(' at draft')[0]}")
lost = next(letter for letter, name in SECRET.items() if name == "d2t lost")
assert findings[lost]["vocabulary"].status == "warning", "a map of zeros is reported"
assert findings["good"]["vocabulary"].status == "ok"
assert findings[lost]["agreement"].status == "failure", "its first draft tokens never agree"
clean = [letter for letter in ports if findings[letter]["vocabulary"].status == "ok"]
assert len(clean) == 4, "the other four are well-formed"

# %% [markdown]
# ### Bisection by hidden states
#
# Feed the good head and the suspect the same text and features. Compare every intermediate result
# in the order of computation. The first difference shows the bug. For a real port, the reference is
# the PyTorch original.
#
# Position 0 attends only to itself, so its attention weight is 1 for any queries and keys. If
# attention is correct at position 0 and wrong after it, then the values and `o_proj` are correct.
# The *scores* are wrong: `q`, `k`, or the rotary embedding.

# %%
config = reference.drafter.config
precision = reference.drafter.precision
text = jnp.asarray([(texts[0] + good_text[0])[:64]], jnp.int32)
positions = jnp.arange(text.shape[1] - 1, dtype=jnp.int32)[None]
mask = causal_mask(text.shape[1] - 1)
features = target.model(
    target.params, text[:, :-1], positions, mask, aux_layers=config.aux_layers
).features


@jax.jit
def stages(params):
    """Intermediate results of the head over a text, in the order of computation."""
    network = bind(Eagle3Head, config, precision, params["head"])
    layer = network.first
    memory = BlockContext(mask=mask)
    fused = network.fuse(features)
    embedding = layer.embedding_norm(embed(params["embedding"], text[:, 1:], precision))
    feature = layer.feature_norm(fused)

    # From here on each stage gets the good head's input, so an error does not spread.
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
        "attention, later": attended[:, 1:],
        "mlp": through,
        "logits": logits,
        "target ids": jax.nn.one_hot(ids, config.vocab_size),
    }


def distance(result, expected):
    """Relative difference of two results."""
    return float(jnp.linalg.norm(result - expected) / jnp.linalg.norm(expected))


truth = stages(reference.params)
table = {
    letter: {name: distance(x, truth[name]) for name, x in stages(heads[letter].params).items()}
    for letter in heads
}
assert all(distance(x, truth[name]) == 0 for name, x in stages(converted.params).items()), (
    "the correct port has no difference"
)

# %% tags=["hide-input"]
grid = np.array([[table[letter][name] for letter in heads] for name in table["A"]])
table_map(
    grid, list(table["A"]), list(heads), title="Relative difference from the good head", most=1.5
)
plt.show()

# %% [markdown]
# Read a column from top to bottom and stop at the first number that is not zero. (* The normed
# feature depends on the fused features, so an error in the fusion affects both.)
#
# - Fused features differ: the features were **reversed** before `fc`.
# - Fused features agree, both norms differ: the norms were **swapped**.
# - Attention differs at position 0: `o_proj` was **transposed**.
# - Attention agrees at position 0 and differs later: `q` and `k` are **interleaved**.
# - Everything agrees up to the logits, and the target ids differ: **`d2t` was lost**.
#
# The next cell applies these rules and compares the result with the injected bugs.


# %%
def verdict(column, tolerance=1e-6):
    """Cause of the first entry of a column that is not zero."""
    differs = {name: value > tolerance for name, value in column.items()}
    if differs["fused features"]:
        return "features reversed"
    if differs["normed embedding"] and differs["normed feature*"]:
        return "norms swapped"
    if differs["attention, position 0"]:
        return "o_proj transposed"
    if differs["attention, later"]:
        return "q and k interleaved"
    return "d2t lost" if differs["target ids"] and not differs["logits"] else "not found"


for letter, column in table.items():
    assert verdict(column) == SECRET[letter], (
        f"head {letter} is {SECRET[letter]}, not {verdict(column)}"
    )
    print(f"{letter}: {SECRET[letter]:22} τ {taus[letter]:.2f} instead of {taus['good']:.2f}")

# %% [markdown]
# ## Common mistakes
#
# Some bugs are in the code around the head, and no converter can detect them. The most common one
# pairs the feature of position `t` with token `t` instead of token `t + 1`. The subclass below
# injects this bug.


# %%
@dataclasses.dataclass(frozen=True)
class Unshifted(type(reference.drafter)):
    """Pairs each feature with its own token instead of the next token."""

    def observe(self, params, state, seen):
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
assert tokens == plain, "the text does not change"
assert stats.mean_acceptance_length < 0.75 * good.mean_acceptance_length, "τ falls"
print(
    f"without the shift: τ {stats.mean_acceptance_length:.2f} instead of"
    f" {good.mean_acceptance_length:.2f}; same text"
)

# %% [markdown]
# Test a port by comparing hidden states with the original. A comparison of texts is not enough. Add
# a regression test for τ of the head on fixed prompts.
#
# ## Exercises
#
# **1.** Why does a port with interleaved `q` and `k` still accept some tokens?
#
# <details><summary>Answer</summary>
#
# The same permutation of `q` and `k` does not change a dot product. Only the rotation uses wrong
# pairs. So attention by content still works in part, and attention by position is lost. The feature
# also bypasses attention on the residual path.
#
# </details>
#
# **2.** Undo the mistake in the checkpoint of one suspect. Is its τ restored?
#
# <details><summary>Answer</summary>
#
# Yes, and so is every counter. The cell below does this for the swapped norms.
#
# </details>
#
# **3.** Acceptance is good at the first position and collapses at the second. Which part of the
# port is wrong?
#
# <details><summary>Answer</summary>
#
# The feedback of the head's own output, which replaces the features from the second draft token on.
# EAGLE-3 feeds it back *before* the last norm. A port that feeds back the normed output, applies
# `fc` to it, or uses a wrong position is correct only at the first position.
#
# </details>

# %%
# Exercise 2.
letter = next(letter for letter, name in SECRET.items() if name == "norms swapped")
tensors = torch.load(ports[letter] / "pytorch_model.bin", weights_only=True)
swap_norms(tensors)
torch.save(tensors, ports[letter] / "pytorch_model.bin")
assert run(e3.load_drafter(ports[letter], target=target))[1].to_json() == good.to_json()

# Exercise 3: the normed output is fed back.
fed_back = dataclasses.replace(
    reference.drafter, config=dataclasses.replace(config, norm_output=True)
)
tokens, stats = run(dataclasses.replace(reference, drafter=fed_back))
first, second = stats.conditional_acceptance_rate[:2]
print(
    f"normed feedback: {first:.2f} at the first position, {second:.2f} at the second (given the"
    " first)"
)
print(
    f"good head:       {good.conditional_acceptance_rate[0]:.2f} and"
    f" {good.conditional_acceptance_rate[1]:.2f}"
)
assert tokens == plain
assert second < 0.8 * good.conditional_acceptance_rate[1], "acceptance falls at the second position"
shutil.rmtree(HERE)

# %% [markdown]
# ## Checked claims
#
# - A PyTorch checkpoint in the official layout converts to the shipped head, bit for bit, and
#   drafts the same.
# - A missing tensor, an extra one, a transposed `fc` and a `d2t` of ids each raise a one-line
#   error. A transposed square matrix does not.
# - Conversion through the layouts of SGLang, vLLM and the official code and back loses no bit.
# - Five well-formed ports with one bug each, and a sixth with a bug in the code, generate exactly
#   the target's text. Each has a lower τ.
# - The doctor reports the lost `d2t`. A comparison of hidden states finds the other four.
# - Undoing a mistake restores every counter.
#
# **Next:** [09](09_train_a_head.ipynb), training a head.
