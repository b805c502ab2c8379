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
# Draft heads are published as PyTorch files, and every engine has its own names for their tensors. A port is easy to
# get *almost* right, and speculative decoding hides the mistake: the text is still the target's, only the speed is
# lost. After this notebook you can
#
# - convert an official EAGLE-3 checkpoint, and say what the converter can check and what it cannot;
# - convert a head to another engine's layout and back without losing a bit;
# - read the symptoms of a bad port from τ and acceptance by position;
# - find the cause by comparing hidden states with a head that works.
#
# The notebook runs on a laptop CPU, offline, with the shipped pair. It needs PyTorch, because the checkpoint is a
# pickle. Read [01](01_memory_bound_decoding.ipynb), [02](02_speculative_sampling.ipynb) and
# [03](03_eagle3_head.ipynb) before.

# %% tags=["hide-input"]
import first_cell

first_cell.start(also=("torch",))

# %% tags=["hide-input"]
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
from eagle3_jax import conversion, prompts
from eagle3_jax.conversion import CheckpointError, rules
from eagle3_jax.drafters.eagle3 import Eagle3Head
from eagle3_jax.load import bundled
from eagle3_jax.models.functional import bind
from eagle3_jax.models.layers import embed
from eagle3_jax.models.memory import BlockMemory, causal_mask

HERE = Path(tempfile.mkdtemp(prefix="eagle3-heads-"))
target = e3.load_target()
description = conversion.read_target(bundled("target")).config

# %% [markdown]
# ## Official checkpoint format
#
# The official repository publishes a head as `pytorch_model.bin`, a pickle of fifteen tensors (fourteen if the draft
# vocabulary is the whole one), and a short `config.json`. The cell writes the shipped head in this format.
# `conversion.describe` (`eagle3 inspect`) reads it without running it.
#
# - `fc` takes three features (3 × 256) to the width of the head. The attention projections of `midlayer` have twice
#   the input width.
# - `input_layernorm` is the norm of the *embedding*, `hidden_norm` the norm of the *feature*.
# - `d2t` maps draft ids to target ids as an **offset**.
# - No entry says which target layers the features come from. Official heads leave it to the code (2, L/2, L-3).

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
assert "target" in about.note, "the feature layers follow from the target"

# %% [markdown]
# ## Conversion
#
# `eagle3 convert` and `conversion.convert` are the same function. It uses a table with one rule per tensor: the name
# there, the name here, and the layout. A rule works in both directions, and every tensor of a checkpoint must be
# used.

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
    """Whether two nested parameters are equal bit for bit, types included."""
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
assert good_text == there_and_back == plain, "lossless: the text is the target's"
assert good.to_json() == again.to_json(), "the converted head drafts the same, round by round"
print(
    f"τ {good.mean_acceptance_length:.2f}, by position {[round(x, 2) for x in good.acceptance_per_position]}"
)

# %% [markdown]
# ## Refused checkpoints
#
# The official loader uses `strict=False`: a missing tensor keeps its random initial values, an unknown one is
# ignored. Here each of these is an error of one line. One mistake passes: a transposed square matrix has the right
# name, shape and type.


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
# ## Layouts of SGLang and vLLM
#
# SGLang and SpecForge share the official names and need their own `config.json`. vLLM's layout stores every flag. A
# head that a layout cannot express is refused. The shipped head passes through all layouts without losing a bit.

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
# ## Five ports with one bug each
#
# The next cell makes five ports of the head. Each has one classic mistake, and all of them load without an error.
#
# | mistake | cause |
# |---|---|
# | the map `d2t` lost and saved as zeros | an export that drops buffers |
# | `q` and `k` in interleaved order of rotary pairs, not in halves | GPT-J and Meta's files against Hugging Face |
# | features in reverse order before `fc` | a list of layers in another order |
# | norms of embedding and feature swapped | `input_layernorm` sounds like the input of the layer |
# | `o_proj` transposed | PyTorch stores `[out, in]`, JAX multiplies by `[in, out]` |
#
# The ports get the letters A to E in random order.


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
# ### Symptoms: τ and acceptance by position

# %%
symptoms = {"good": good}
for letter, drafter in heads.items():
    tokens, symptoms[letter] = run(drafter)
    assert tokens == plain, f"head {letter} changed the text: no drafter can do that"
taus = {letter: stats.mean_acceptance_length for letter, stats in symptoms.items()}
print("τ:", {letter: round(tau, 2) for letter, tau in taus.items()})
assert max(taus[letter] for letter in heads) < taus["good"], "every bug costs τ"
unnoticed = [letter for letter in heads if taus[letter] > 0.85 * taus["good"]]
assert len(unnoticed) == 2, "two of them cost less than 15 % of τ"
acceptance_ribbons(
    {letter: stats.acceptance_per_position for letter, stats in symptoms.items()},
    rounds={letter: int(stats.num_drafts) for letter, stats in symptoms.items()},
    title="Acceptance by position (same text)",
)

# %% [markdown]
# Every bug costs speed. Two cost so little that without a reference nobody would look for a bug. The symptom does not
# name the cause.
#
# ### `eagle3 doctor`
#
# `eagle3 doctor` checks target and head together: sizes, vocabulary, layers, norms, rotary settings, broken weights,
# and how often the first drafts agree with the target. It finds the lost map. The other four heads are well-formed.

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
assert findings[lost]["vocabulary"].status == "warning", "a map of zeros is reported"
assert findings["good"]["vocabulary"].status == "ok"
assert findings[lost]["agreement"].status == "failure", "its first drafts never agree"
clean = [letter for letter in ports if findings[letter]["vocabulary"].status == "ok"]
assert len(clean) == 4, "the other four are well-formed"

# %% [markdown]
# ### Bisection by hidden states
#
# Feed a good head and a suspect the same text, features and tokens, and compare every intermediate result in the
# order of computation. The first difference shows the bug. In a real port the good head is the PyTorch original.
#
# Position 0 attends only to itself, so its attention weights are 1 whatever the queries and keys are. If attention is
# right at position 0 and wrong after it, the values and `o_proj` are right and the *scores* are wrong: `q`, `k`, or
# the rotary embedding.

# %%
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

grid = np.array([[table[letter][name] for letter in heads] for name in table["A"]])
table_map(
    grid, list(table["A"]), list(heads), title="Relative difference from the good head", most=1.5
)
plt.show()

# %% [markdown]
# Read a column from top to bottom and stop at the first number that is not zero. (* The normed feature follows the
# fused one, so an error in the fusion shows in both.)
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
    """The cause, from the first entry of a column that is not zero."""
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
# Some bugs are in no tensor: they are in the code around the head, and no converter can see them. The most common one
# pairs the feature of position `t` with token `t` instead of `t + 1`. A drafter is a small protocol, so a subclass
# can inject the bug.


# %%
@dataclasses.dataclass(frozen=True)
class Unshifted(type(reference.drafter)):
    """Pairs each feature with its own token, not with the next one."""

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
assert tokens == plain, "even now the text is right"
assert stats.mean_acceptance_length < 0.75 * good.mean_acceptance_length, (
    "the head is nearly useless"
)
print(
    f"without the shift: τ {stats.mean_acceptance_length:.2f} instead of {good.mean_acceptance_length:.2f}; same text"
)

# %% [markdown]
# Test a port by comparing hidden states with the original, never by its text. Keep a head's τ on fixed prompts in a
# test.
#
# ## Exercises
#
# **1.** Why does a port with `q` and `k` interleaved still accept anything?
#
# <details><summary>Answer</summary>
#
# A permutation that is the same in `q` and `k` does not change a dot product. Only the rotation turns the wrong
# pairs, so attention by content survives in part and attention by position is lost. The feature also goes around
# attention by the residual path.
#
# </details>
#
# **2.** Undo the mistake of one suspect in its checkpoint. Does its τ come back?
#
# <details><summary>Answer</summary>
#
# Yes, with every counter. The cell below does it for the swapped norms.
#
# </details>
#
# **3.** A head is fine at the first position and collapses at the second. Which part of the port do you suspect?
#
# <details><summary>Answer</summary>
#
# The head's own output, which replaces the features from the second draft token on. EAGLE-3 feeds it back *before*
# the last norm. A port that feeds back the normed state, runs `fc` on it, or gives it the wrong position is right
# once and wrong afterwards.
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
# - A missing tensor, an extra one, a transposed `fc` and a `d2t` of ids are refused, each in one line. A transposed
#   square matrix is not.
# - Through the layouts of SGLang, vLLM and the official code and back, no bit is lost.
# - Five well-formed ports with a bug each, and a sixth with a bug in the code, generate exactly the target's text.
#   Each has a lower τ.
# - The doctor reports the lost `d2t`. A comparison of hidden states finds the other four.
# - Undoing a mistake restores every counter.
#
# **Next:** [09](09_train_a_head.ipynb), training a head.
