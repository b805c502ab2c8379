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
# # 04 · Inside EAGLE-3
#
# After this notebook you will be able to
#
# - say what each tensor of an EAGLE-3 checkpoint does, and compute the head by hand in thirty lines of `jax.numpy`;
# - say which token meets which feature at which position, and what is fed back;
# - measure what each part of the head is worth, by taking it away;
# - recognise the classic mistakes in a port of a head by the mark that they leave.
#
# It takes under a minute on a laptop CPU, offline, with the pair that ships with the package: a target of 12 layers
# and an EAGLE-3 head for it. Read 01 and 02 before. The method is Li et al., *EAGLE-3* (arXiv 2503.01840).

# %%
import first_cell

first_cell.start()

# %%
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import treescope
from pictures.anatomy import eagle3_head
from pictures.style import SERIES
from safetensors.flax import load_file

import eagle3_jax as e3
from eagle3_jax import trace
from eagle3_jax.drafters import Eagle3Drafter, Plain
from eagle3_jax.drafters.eagle3 import Eagle3Head
from eagle3_jax.load import bundled
from eagle3_jax.models.config import usual_head
from eagle3_jax.models.functional import bind
from eagle3_jax.models.memory import causal_mask
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.sizes import parameters
from eagle3_jax.training.batches import TTTBatch
from eagle3_jax.training.ttt import TTTConfig, ttt_loss

target = e3.load_target()
drafter = e3.load_drafter(target=target)
config, layers = drafter.drafter.config, target.model.config.num_layers
eagle3_head(config, layers)

# %% [markdown]
# ## What is in the checkpoint
#
# The picture above is the whole head; the rest of this notebook walks along its arrows. The file holds it under the
# names of the official PyTorch code, matrices as `[out, in]`. There is no embedding in it: the head borrows the
# target's.

# %%
checkpoint = load_file(bundled("eagle3/model.safetensors"))
for name, tensor in checkpoint.items():
    print(f"{name:46}{tensor.shape!s:14}{tensor.dtype}")

weights = [tensor for tensor in checkpoint.values() if tensor.dtype == jnp.bfloat16]
count = sum(tensor.size for tensor in weights)
print(f"\n{count:,} parameters, {2 * count / 1e6:.2f} MB in bfloat16; the target has", end=" ")
print(f"{parameters(target.model.config).total:,}")
assert count == parameters(config).total, "the description of the head counts the same parameters"
assert drafter.params["embedding"] is target.params["embedding"], "one array, used by both models"

# %% [markdown]
# The library keeps the same numbers with matrices as `[in, out]`, queries, keys and values in one product, gate and
# up in another. `treescope` shows them; unfold a leaf to see its shape and statistics.

# %%

treescope.show(drafter.params["head"])

# %% [markdown]
# Where do the parameters sit? Mostly in the MLP and in the output matrix. The same function
# that counted above counts the head that is usual for Llama-3.1-8B: a draft vocabulary of 32,000 where the target has
# 128,256.

# %%
PARTS = {
    "fc": lambda n: n.fusion,
    "attention": lambda n: n.query_output + n.key_value,
    "MLP": lambda n: n.mlp,
    "output": lambda n: n.output,
}
heads = {"shipped head": config, "head of Llama-3.1-8B": usual_head(KNOWN_MODELS["Llama-3.1-8B"])}
fig, ax = plt.subplots(figsize=(7.2, 1.9))
for row, one in enumerate(heads.values()):
    sizes, left = parameters(one), 0.0
    for (part, pick), color in zip(PARTS.items(), SERIES, strict=False):
        share = pick(sizes) / sizes.total
        ax.barh(row, share, left=left, color=color, label=part if row == 0 else None)
        ax.text(
            left + share / 2,
            row,
            f"{share:.0%}",
            ha="center",
            va="center",
            color="white",
            fontsize=8,
        )
        left += share
ax.set(
    yticks=range(len(heads)),
    yticklabels=list(heads),
    xlim=(0, 1),
    xlabel="share of the head's parameters",
)
ax.xaxis.set_major_formatter("{x:.0%}")
ax.set_title("Where the parameters of a head sit", pad=22)
ax.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.2)
ax.grid(axis="y", visible=False)
plt.show()

large, base = parameters(heads["head of Llama-3.1-8B"]), parameters(KNOWN_MODELS["Llama-3.1-8B"])
print(
    f"Llama-3.1-8B: head {large.total / 1e6:.1f} M, target {base.total / 1e9:.2f} B: {large.total / base.total:.1%}"
)
assert large.mlp + large.output > 0.7 * large.total, "most of a large head"
assert abs(2 * large.total - 849.4e6) < 0.1e6, (
    "two bytes each: the 850 MB file that is published for Llama-3.1-8B"
)

# %% [markdown]
# ## The tools: a Llama block in plain `jax.numpy`
#
# The head's layer is a Llama block whose attention reads twice the width, so these four functions serve for the
# target and for the head. They use the checkpoints' own tensors and nothing of the library. One sequence, no batch,
# float32.

# %%
EPS, HEADS, KV_HEADS, SIZE, THETA = 1e-5, 4, 2, 64, 10_000.0
times = functools.partial(jnp.matmul, precision="highest")  # all bits of float32, on GPUs too


def norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def rotate(x, positions):  # x: [T heads H]
    angles = positions[:, None] * THETA ** (-jnp.arange(0, SIZE, 2) / SIZE)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(z, w, prefix, positions, past=None):  # z: [T D_in]; past: keys and values before it
    rows = len(z)
    q, k, v = (
        times(z, w[f"{prefix}.{one}_proj.weight"].T).reshape(rows, -1, SIZE) for one in "qkv"
    )
    q, k = rotate(q, positions), rotate(k, positions)
    if past is not None:
        k, v = jnp.concatenate([past[0], k]), jnp.concatenate([past[1], v])
    shared = [jnp.repeat(one, HEADS // KV_HEADS, axis=1).transpose(1, 0, 2) for one in (k, v)]
    scores = times(q.transpose(1, 0, 2), shared[0].transpose(0, 2, 1)) / SIZE**0.5
    seen = jnp.tril(jnp.ones(scores.shape[1:], bool), scores.shape[2] - rows)
    mixed = times(jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), shared[1])
    return times(mixed.transpose(1, 0, 2).reshape(rows, -1), w[f"{prefix}.o_proj.weight"].T), (k, v)


def mlp(x, w, prefix):
    gate, up, down = (w[f"{prefix}.{one}_proj.weight"].T for one in ("gate", "up", "down"))
    return times(jax.nn.silu(times(x, gate)) * times(x, up), down)


def difference(ours, theirs):  # largest, in units of the reference's largest entry
    return float(jnp.abs(ours - theirs).max() / jnp.abs(theirs).max())


# %% [markdown]
# ## Three taps
#
# The head reads three *features*: the target's residual stream as it **enters** layers 2, 6 and 9 (in general `2,
# L//2, L−3`), before any norm. A residual stream is a running sum: the embedding, plus what every layer adds. Below
# the target is run by hand, and the stream that enters each layer is kept.

# %%
rows = [json.loads(line) for line in bundled("prompts.jsonl").read_text().splitlines()]
ids = target.tokenizer.encode(rows[0]["prompt"]).ids[:48]
tokens, positions = jnp.array(ids), jnp.arange(len(ids))

single = load_file(bundled("target/model.safetensors"))
tw = {name: tensor.astype(jnp.float32) for name, tensor in single.items()}
x, entering = tw["model.embed_tokens.weight"][tokens], []
for i in range(layers):
    entering.append(x)
    block = f"model.layers.{i}"
    added, _ = attend(
        norm(x, tw[f"{block}.input_layernorm.weight"]), tw, f"{block}.self_attn", positions
    )
    x = x + added
    x = x + mlp(norm(x, tw[f"{block}.post_attention_layernorm.weight"]), tw, f"{block}.mlp")
final = norm(x, tw["model.norm.weight"])

taps = config.aux_layers
out = target.model(
    target.params, tokens[None], positions[None], causal_mask(len(ids)), aux_layers=taps
)
features = jnp.stack([entering[i] for i in taps], axis=1)  # [T 3 D]
print(
    f"taps {taps}; by hand and by the library: features differ by {difference(features, out.features[0]):.1e},"
)
print(f"final states by {difference(final, out.final[0]):.1e} of their largest entry")
assert taps == (2, layers // 2, layers - 3)
assert difference(features, out.features[0]) < 1e-5 and difference(final, out.final[0]) < 1e-5

# %% [markdown]
# Two things to see in these streams. They are not normalised: their size grows with depth, so the three chunks reach
# `fc` in different sizes. And neighbouring layers are alike, because each adds a little to the sum; which is why a
# tap that is off by one is a mistake that nothing announces.

# %%
streams = jnp.stack([*entering, x])
size = jnp.sqrt(jnp.mean(streams**2, axis=(1, 2)))
units = streams / jnp.linalg.norm(streams, axis=-1, keepdims=True)
alike = jnp.einsum("itd,jtd->ijt", units, units).mean(-1)
fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4), width_ratios=(1.25, 1))
left.bar(
    range(layers + 1),
    size,
    color=["#d97634" if i in taps else "#c3cad3" for i in range(layers + 1)],
)
left.set(
    xlabel="stream entering layer (12: leaving the last)",
    ylabel="root mean square",
    xticks=range(layers + 1),
)
left.set_title("Features grow with depth; the taps in orange")
image = right.imshow(alike, cmap="viridis", vmin=0, vmax=1, origin="lower")
right.set(
    xlabel="stream entering layer", ylabel="stream entering layer", xticks=range(0, layers + 1, 2)
)
right.set_title("Neighbours are alike")
right.grid(visible=False)
fig.colorbar(image, ax=right, label="mean cosine", shrink=0.85)
plt.show()

assert size[taps[0]] < size[taps[1]] < size[taps[2]], "the high tap is the loudest"
assert all(alike[i, i + 1] > 0.7 for i in range(1, layers)), (
    "one layer further is nearly the same vector"
)

# %% [markdown]
# ## fc: three features become one
#
# The three are laid side by side, low layer first, `[3·D]`, and one matrix without a bias brings them to the head's
# width. No gate, no attention over layers: a matrix.

# %%
w = {
    name: tensor.astype(jnp.float32)
    for name, tensor in checkpoint.items()
    if tensor.dtype == jnp.bfloat16
}
fused = times(features.reshape(len(ids), -1), w["fc.weight"].T)

head = bind(Eagle3Head, config, drafter.drafter.precision, drafter.params["head"])
theirs = head.fuse(out.features)[0]
print(
    f"{features.shape} -> {fused.shape}, differs from the library by {difference(fused, theirs):.1e}"
)
assert difference(fused, theirs) < 1e-5

# %% [markdown]
# ## Which token meets which feature
#
# The feature `f_t` says what the target thought when it had read `x_t`. By the time the head runs, the next token
# `x_{t+1}` is known as well, and it is what the target's choice was *after* `f_t`. So the head pairs `f_t` with the
# **next** token and predicts the one after that, `x_{t+2}`; it does so at rotary position `t`. Tokens are shifted by
# one, positions are not. For the last pair the next token is the **root**: chosen by the target, not yet run through
# it.

# %%
root = int(jnp.argmax(target.model.unembed(target.params, out.final)[0, -1]))
shifted = jnp.array([*ids[1:], root])
text = [repr(target.tokenizer.decode([one])) for one in [*ids, root]]
print(f"{'position t':>10}  {'feature after':>16}  {'paired with':>16}  predicts")
for t in range(len(ids) - 5, len(ids)):
    ahead = text[t + 2] if t + 2 < len(text) else "the first draft token"
    print(f"{t:>10}  {text[t]:>16}  {text[t + 1]:>16}  {ahead}")

# %% [markdown]
# ## The layer
#
# The token's embedding and the fused feature each get a norm of their own and are laid side by side, **embedding
# first**. Only queries, keys and values see both; that is why these three matrices are twice as wide. The residual
# starts from the fused feature, **not** normed, and the embedding has no residual path: it enters through attention
# alone. The final norm stands before the output matrix only.


# %%
def head_step(token_ids, stream, positions, past=None):
    embedded = tw["model.embed_tokens.weight"][token_ids]
    both = [
        norm(embedded, w["midlayer.input_layernorm.weight"]),
        norm(stream, w["midlayer.hidden_norm.weight"]),
    ]
    added, kept = attend(jnp.concatenate(both, axis=-1), w, "midlayer.self_attn", positions, past)
    x = stream + added
    return x + mlp(norm(x, w["midlayer.post_attention_layernorm.weight"]), w, "midlayer.mlp"), kept


def draft_logits(output):
    return times(norm(output, w["norm.weight"]), w["lm_head.weight"].T)


output, known = head_step(shifted, fused, positions)
seen = e3.Observation(
    tokens=tokens[None],
    features=out.features,
    length=jnp.array([len(ids)]),
    next_token=jnp.array([root]),
)
empty = drafter.drafter.init(drafter.params, 1, 128)
state = drafter.drafter.observe(drafter.params, empty, seen)
kept = [
    getattr(state.cache.layers[0], name)[0, :, : len(ids)].transpose(1, 0, 2)
    for name in ("keys", "values")
]
for name, ours, theirs in (
    ("output at the last pair", output[-1], state.output[0]),
    ("keys of the head's cache", known[0], kept[0]),
    ("values of the head's cache", known[1], kept[1]),
    ("draft logits", draft_logits(output[-1]), head.logits(state.output[:, None])[0, 0]),
):
    print(f"{name:28}{ours.shape!s:15} differ by {difference(ours, theirs):.1e}")
    assert difference(ours, theirs) < 1e-5, name

# %% [markdown]
# ## The draft vocabulary
#
# The head's output matrix knows 2,048 of the target's 4,096 tokens: the frequent ones. A draft id becomes a target id
# by `d2t`, which holds **offsets**: `target = draft + d2t[draft]`. `t2d` says of every target token whether it can be
# drafted; inference does not need it. In memory the library keeps absolute ids.

# %%
d2t, t2d = np.array(checkpoint["d2t"]), np.array(checkpoint["t2d"])
absolute = np.arange(len(d2t)) + d2t
assert np.array_equal(absolute, drafter.params["draft_to_target"]) and np.array_equal(
    absolute, np.flatnonzero(t2d)
)
assert np.all(np.diff(absolute) > 0), "sorted, without repetition"
best = jax.lax.top_k(draft_logits(output[-1]), 5)[1]
for one in best.tolist():
    piece = target.tokenizer.decode([absolute[one]])
    print(f"draft id {one:5} + offset {d2t[one]:5} = target id {absolute[one]:5}  {piece!r}")

# %% [markdown]
# ## What is fed back
#
# For the second draft token there is no feature: the target has not run yet. The head's own output takes its place,
# as it left the layer, **before** the final norm and past `fc`. The drafted token takes the place of the next token,
# the position goes on by one, and keys and values of the step join those of the pairs. Four more steps and a chain of
# five is drafted by hand; the library's `propose` gives the same tokens.

# %%
stream, past, drafted = output[-1:], known, []
for depth in range(drafter.drafter.max_depth):
    drafted.append(int(absolute[jnp.argmax(draft_logits(stream[-1]))]))
    stream, step = head_step(jnp.array(drafted[-1:]), stream, jnp.array([len(ids) + depth]), past)
    past = step

proposed = drafter.drafter.propose(
    drafter.params, state, jax.random.split(jax.random.key(0), 1), e3.SamplingParams()
)
print("by hand:     ", drafted, repr(target.tokenizer.decode(drafted)))
print("the library: ", proposed.tokens[0, 1:].tolist(), " after the root", text[-1])
assert drafted == proposed.tokens[0, 1:].tolist()

# %% [markdown]
# That is all of EAGLE-3 but for trees, which are notebook 06. What is left to ask is what each part is worth.
#
# ## Take a part away, and watch τ
#
# A drafter cannot change the text, so everything may be broken in it, and only τ moves. The drafter below reads the
# stream of **every** layer and meddles with what reaches the head. What it does is data and not code, so all variants
# share one compiled program: which layers are tapped, what share of each tap is kept, what stands in its place, and
# whether the shift of the tokens is forgotten.


# %%
@dataclasses.dataclass(frozen=True)
class Meddled:
    inner: Eagle3Drafter
    aux_layers: tuple[int, ...] = tuple(range(layers + 1))
    is_chain: bool = True

    @property
    def num_nodes(self):
        return self.inner.num_nodes

    @property
    def max_depth(self):
        return self.inner.max_depth

    def init(self, params, batch, capacity):
        return self.inner.init(params["drafter"], batch, capacity)

    def observe(self, params, state, seen):
        features = seen.features[:, :, params["taps"]] * params["keep"][:, None] + params["instead"]
        last = jnp.take_along_axis(seen.tokens, jnp.maximum(seen.length - 1, 0)[:, None], axis=1)[
            :, 0
        ]
        late = seen.replace(
            tokens=jnp.roll(seen.tokens, 1, axis=1), next_token=last
        )  # every token one pair too late
        seen = jax.tree.map(lambda a, b: jnp.where(params["unshifted"], a, b), late, seen)
        return self.inner.observe(params["drafter"], state, seen.replace(features=features))

    def propose(self, params, state, keys, sampling):
        return self.inner.propose(params["drafter"], state, keys, sampling)


K, NEW = 5, 61
code, prose = ([one["prompt"] for one in rows if one["kind"] == kind] for kind in ("code", "prose"))
prompts = code[::10] + prose[::6]
chain = drafter.drafter.with_topology(e3.Chain(K), None)
intact = {
    "drafter": drafter.params,
    "taps": jnp.array(taps),
    "keep": jnp.ones(3),
    "instead": jnp.zeros((3, config.width)),
    "unshifted": jnp.array(False),
}


def run(**changes):
    loaded = e3.LoadedDrafter(Meddled(chain), intact | changes)
    return e3.SpeculativeDecoder(target, loaded, stop_tokens=()).generate(
        prompts, max_new_tokens=NEW
    )


plain = e3.SpeculativeDecoder(target, Plain(num_nodes=K + 1), stop_tokens=()).generate(
    prompts, max_new_tokens=NEW
)
whole = run()
direct = e3.SpeculativeDecoder(target, drafter, num_speculative_tokens=K, stop_tokens=())
assert whole.tokens == plain.tokens, "the text of plain decoding"
print(
    f"{len(prompts)} prompts, {NEW} new tokens each: τ = {whole.stats.mean_acceptance_length:.2f}"
)

# %% [markdown]
# `mean` puts the tap's mean over other text in its place, `zero` nothing. A tap replaced by its mean says nothing
# about the token at hand but leaves `fc` an input of the usual size. "No embedding" zeroes the table that the head
# reads, "no feature" all three taps (its own output is still fed back), and a random head is the floor.

# %%
other = jnp.array([target.tokenizer.encode(one["prompt"]).ids[:64] for one in rows[1::8]][:4])
place = jnp.broadcast_to(jnp.arange(64), other.shape)
streams = target.model(target.params, other, place, causal_mask(64), aux_layers=taps).features
mean = streams.mean((0, 1))  # [3 D]


def without(*which, by_mean):
    keep = jnp.array([0.0 if i in which else 1.0 for i in range(3)])
    return {"keep": keep, "instead": (1 - keep)[:, None] * (mean if by_mean else 0 * mean)}


random_head = drafter.params | {"head": drafter.drafter.init_params(jax.random.key(0))}
variants = {
    "as it is": {},
    "low tap: mean": without(0, by_mean=True),
    "middle tap: mean": without(1, by_mean=True),
    "high tap: mean": without(2, by_mean=True),
    "low tap: zero": without(0, by_mean=False),
    "middle tap: zero": without(1, by_mean=False),
    "high tap: zero": without(2, by_mean=False),
    "high tap alone": without(0, 1, by_mean=True),
    "no feature": without(0, 1, 2, by_mean=False),
    "no embedding": {"drafter": drafter.params | {"embedding": 0 * drafter.params["embedding"]}},
    "random head": {"drafter": random_head},
}
results = {name: run(**changes) for name, changes in variants.items()}
tau = {name: one.stats.mean_acceptance_length for name, one in results.items()}
assert all(one.tokens == plain.tokens for one in results.values()), (
    "whatever is broken, the text is the target's"
)


# %%
names = list(tau)[::-1]
fig, ax = plt.subplots(figsize=(7.2, 4.2))
ax.barh(
    names,
    [tau[name] for name in names],
    color=[SERIES[2] if name == "as it is" else SERIES[0] for name in names],
)
for row, name in enumerate(names):
    ax.text(tau[name] + 0.03, row, f"{tau[name]:.2f}", va="center", fontsize=8)
ax.axvline(1, color="#57606a", linewidth=1, linestyle="--")
ax.set(xlim=(0, 3.5), xlabel=f"τ, tokens per round (1: nothing accepted; at most K + 1 = {K + 1})")
ax.set_title("What each part is worth; the text is the same in every row")
ax.grid(axis="y", visible=False)
plt.show()

# %%
floor, ceiling = tau["random head"], tau["as it is"]
assert all(one < ceiling for name, one in tau.items() if name != "as it is"), "every part is used"
assert tau["high tap: mean"] < min(tau["low tap: mean"], tau["middle tap: mean"]), (
    "the high tap carries most"
)
assert tau["high tap alone"] < min(tau["low tap: mean"], tau["middle tap: mean"]), (
    "one tap does not do for three"
)
assert tau["no feature"] - 1 < 0.2 * (ceiling - 1), "without features hardly anything is left"
assert tau["no embedding"] - 1 < 0.3 * (ceiling - 1), "nor without knowing which token was chosen"
assert floor < 1.05, "a head that knows nothing"

# %% [markdown]
# The high tap carries most, the other two add to it, and neither features nor the embedding alone are of much use:
# features say what the target expected, the embedding says what was chosen. Read the chart for what it is. It shows
# what *this* head leans on. A head that was trained without a tap would learn to do with less, so this is not the
# ablation of the paper, which trains each variant anew.
#
# ## Eating its own output
#
# From the second draft token on the head reads its own output where it would want a feature. It was trained on that:
# the *training-time test* unrolls the head on its own outputs (with the tokens of the text, not its own). The
# library's training objective counts the hits at each depth, so it can be asked here, on the text that the target
# wrote above. Beside it: what the head would hit with true features at every depth, and what it did hit in the rounds
# of the real run, where only drafts whose ancestors were all right come so far.

# %%
traced = trace.record(
    direct, prompts, max_new_tokens=[NEW] * len(prompts), sampling=e3.SamplingParams(), seed=0
)
assert traced.result.tokens == plain.tokens
stats = traced.result.stats

starts = [len(one.prompt_tokens) for one in plain.rows]
longest = max(starts) + NEW
texts, learn = np.zeros((len(prompts), longest), np.int32), np.zeros((len(prompts), longest), bool)
for index, one in enumerate(plain.rows):
    texts[index, : starts[index] + NEW] = one.prompt_tokens + one.tokens
    learn[index, starts[index] - 1 : starts[index] + NEW - 2] = (
        True  # entry t is about x_{t+2}: written by the target
    )
real = np.arange(longest) < np.array(starts)[:, None] + NEW
batch = TTTBatch(
    tokens=jnp.array(texts), attention_mask=jnp.array(real), loss_mask=jnp.array(learn)
)
frozen = {
    "target_params": target.params,
    "embedding": drafter.params["embedding"],
    "draft_to_target": drafter.params["draft_to_target"],
}
ttt = TTTConfig(num_steps=K, denominator="supervised")
objective = jax.jit(
    lambda head_params: ttt_loss(chain, target.model, head_params, frozen, batch, ttt)[1]
)
metrics = {name: float(value) for name, value in objective(drafter.params["head"]).items()}
hits = [metrics[f"accuracy_{depth}"] for depth in range(K)]
conditional = stats.conditional_acceptance_rate

depths = range(1, K + 1)
fig, ax = plt.subplots(figsize=(7.2, 3.2))
ax.plot(depths, [hits[0]] * K, "--", color=SERIES[2], label="true features at every depth")
ax.plot(
    depths,
    hits,
    "o-",
    color=SERIES[0],
    label="own output, tokens of the text: the training-time test",
)
ax.plot(
    depths,
    conditional,
    "s-",
    color=SERIES[1],
    label="own output, in real rounds: conditional acceptance",
)
ax.set(ylim=(0, 1), xticks=depths, xlabel="depth of the draft token", ylabel="share of hits")
ax.set_title("What it costs the head to eat its own output")
ax.legend(loc="lower left")
plt.show()

simulated, measured = metrics["simulated_tau"], stats.mean_acceptance_length
print(
    "training-time test:    ",
    *(f"{one:.2f}" for one in hits),
    f"  τ of a chain on this text {simulated:.2f}",
)
print(
    "conditional acceptance:",
    *(f"{one:.2f}" for one in conditional),
    f"  τ of the real rounds      {measured:.2f}",
)
assert hits[0] > hits[1] > hits[4], "each step without a true feature costs hits"
assert min(conditional[3:]) > max(hits[3:]), "what comes as far as depth 4 is easy text"

# %% [markdown]
# The training-time test falls with depth: that is the price of drafting without the target. Conditional acceptance does
# not fall in the same way although the head is no better off. It starts lower, because a round starts where the one
# before failed, and it ends higher, because the rounds that get as far as depth 4 are those in which the text is easy.
# Two curves that look alike in papers can be either; say which one you mean.
#
# ## What the head can never say
#
# Half of the target's tokens are outside the draft vocabulary. When the target wants one of them the path ends there,
# whatever the head thinks. How often is that?

# %%
written = np.concatenate([one.tokens for one in plain.rows])
covered = t2d[written].mean()
refused = [
    one["next_token"]
    for prompt in traced.prompts
    for one in prompt["rounds"]
    if one["num_accepted"] < K
]
outside = [token for token in refused if not t2d[token]]
print(f"{t2d.mean():.0%} of the vocabulary covers {covered:.1%} of what the target wrote")
print(
    f"{len(refused)} rounds ended in a refusal; in {len(outside)} the right token could not have been drafted:"
)
print("  ", *sorted({repr(target.tokenizer.decode([token])) for token in outside}))
assert len(d2t) == 2048 == target.vocab_size // 2
assert covered > 0.95, "frequent tokens make up nearly all of a text"
assert len(outside) < 0.15 * len(refused), "few refusals are the vocabulary's fault"

full = dataclasses.replace(heads["head of Llama-3.1-8B"], draft_vocab_size=128_256)
saved = parameters(full).total / large.total
print(
    f"for Llama-3.1-8B the whole vocabulary would make a head {saved:.2f} times as large; it is read K times a round"
)
assert saved > 1.9

# %% [markdown]
# ## What would go wrong
#
# Nothing crashes when a head is ported wrongly, and no text changes. Only τ falls, and one has to know what it should
# be. Six mistakes from real ports: offsets taken for ids; taps off by one, either way; taps in the wrong order; the
# two norms in front of attention exchanged; the tokens not shifted; and the normed output fed back (which EAGLE-3.1
# heads want, and others do not). The map shows how often each depth was accepted given that those before it were: the
# fingerprint of a mistake.

# %%
first = drafter.params["head"]["first"]
exchanged = first | {
    "embedding_norm": first["feature_norm"],
    "feature_norm": first["embedding_norm"],
}
mistakes = {
    "as it is": {},
    "d2t taken for ids": {"drafter": drafter.params | {"draft_to_target": jnp.array(d2t)}},
    "taps one layer early": {"taps": jnp.array(taps) - 1},
    "taps one layer late": {"taps": jnp.array(taps) + 1},
    "taps in reverse order": {"taps": jnp.array(taps[::-1])},
    "norms exchanged": {
        "drafter": drafter.params | {"head": drafter.params["head"] | {"first": exchanged}}
    },
    "tokens not shifted": {"unshifted": jnp.array(True)},
}
broken = {name: run(**changes) for name, changes in mistakes.items()}
normed = dataclasses.replace(chain, config=dataclasses.replace(config, norm_output=True))
decoder = e3.SpeculativeDecoder(target, e3.LoadedDrafter(normed, drafter.params), stop_tokens=())
broken["normed output fed back"] = decoder.generate(prompts, max_new_tokens=NEW)
assert all(one.tokens == plain.tokens for one in broken.values()), "the text never shows it"

table = np.array([one.stats.conditional_acceptance_rate for one in broken.values()])
worth = {name: one.stats.mean_acceptance_length for name, one in broken.items()}
fig, ax = plt.subplots(figsize=(7.2, 3.6))
image = ax.imshow(table, cmap="Blues", vmin=0, vmax=1, aspect="auto")
for (row, column), value in np.ndenumerate(table):
    ax.text(
        column,
        row,
        f"{value:.2f}",
        ha="center",
        va="center",
        color="white" if value > 0.6 else "black",
        fontsize=8,
    )
ax.set(
    xticks=range(K), xticklabels=depths, xlabel="depth of the draft token", yticks=range(len(worth))
)
ax.set_yticklabels([f"{name}   τ {one:.2f}" for name, one in worth.items()])
ax.set_title("Conditional acceptance by depth")
ax.grid(visible=False)
fig.colorbar(image, ax=ax)
plt.show()

# %%
right, early, late = (
    worth[name] for name in ("as it is", "taps one layer early", "taps one layer late")
)
assert worth["d2t taken for ids"] < 1.1 and worth["tokens not shifted"] < 1.5, (
    "these two leave next to nothing"
)
assert worth["taps in reverse order"] < right - 0.5 and worth["norms exchanged"] < right - 0.1
fed = table[list(worth).index("normed output fed back")]
assert fed[0] > table[0][0] - 0.1, "the first token needs no feedback"
assert fed[1] < table[0][1] - 0.2 and fed[2] < table[0][2] - 0.2, "all others do"
assert abs(early - right) < 0.4 and abs(late - right) < 0.6, (
    "off by one hides in the noise of a few prompts"
)

unshifted = table[list(worth).index("tokens not shifted")]
assert unshifted[0] < 0.3 < unshifted[2], "the first token is hard, the others are easier"
pairs = zip(broken["taps one layer early"].rows, broken["as it is"].rows, strict=True)
wins = sum(
    one.stats.mean_acceptance_length > other.stats.mean_acceptance_length for one, other in pairs
)
assert wins > 0, "and wins on some prompts"

wrong = target.model(
    target.params, tokens[None], positions[None], causal_mask(len(ids)), aux_layers=(1, 5, 8)
).features
far, near = difference(features, wrong[0]), difference(features, out.features[0])
print(
    f"taps one layer early: τ {early:.2f}, with the right ones {right:.2f}; ahead on {wins} of {len(prompts)} prompts."
)
print(
    f"But the features are {far:.2f} of their largest entry away from those by hand, the right ones {near:.0e}"
)
assert far > 0.05 > 1e4 * near

# %% [markdown]
# Each mistake has its own mark. Offsets taken for ids: nothing is ever accepted. No shift: the first token mostly
# fails, and where luck got it right the others follow more easily. Normed feedback: depth 1 is as good as ever, what
# comes after it collapses. And the worst one is the mildest: **taps off by one** cost so little that no τ of a few
# prompts betrays them; on some prompts they even win. Compare numbers, not rates: features and draft logits against a
# reference, as was done above piece by piece. The tests of this library do so against recorded runs of the official
# code and of vLLM.
#
# ## Exercises
#
# **1.** The head's attention reads twice the width of a layer of the target. Does a token take twice the cache?
#
# <details><summary>Answer</summary>
#
# No. Only the *inputs* of the query, key and value products are `2·D` wide. What they give is as wide as in any
# layer, and that is what is kept: `2·C·H` numbers a token, one key and one value for each key head.
#
# ```python
# assert known[0].shape == (len(ids), KV_HEADS, SIZE)
# ```
#
# </details>
#
# **2.** Which layer would you tap in place of the high one? Try 7, 8, 10 and 11 with `run(taps=...)`. Why is 11 the
# worst of them, although it is the closest to the answer?
#
# <details><summary>Answer</summary>
#
# ```python
# for layer in (7, 8, 10, 11):
#     print(layer, run(taps=jnp.array([2, 6, layer])).stats.mean_acceptance_length)
# ```
#
# The neighbours of 9 do nearly as well as 9 itself, layer 11 clearly worse; the cell below checks it. `fc` was
# trained on the stream that enters layer 9. The further away, the larger and the more unlike it the stream becomes
# (first chart). This says nothing about how good a head trained on layer 11 would be.
#
# </details>
#
# **3.** By how much could τ have risen at most on this text, had every token been in the draft vocabulary?
#
# <details><summary>Answer</summary>
#
# Hardly. A round that ended in a token outside the vocabulary would have gone on by at most the rest of its chain, so
# accepted tokens rise by at most `K` for each; the cell below prints the bound.
#
# </details>
#
# **4.** A head drafts with conditional acceptance .70, .35, .20, .10 by depth. Which two mistakes would you look for
# first, and which not at all?
#
# <details><summary>Answer</summary>
#
# Depth 1 is healthy, so vocabulary, shift, taps and norms are right: they would all show at depth 1. What only
# drafting does is wrong: what is fed back (normed or not, through `fc` or past it), or the positions of the draft
# steps. A head trained without the training-time test looks like that too.
#
# </details>

# %%
assert known[0].shape == (len(ids), KV_HEADS, SIZE)  # exercise 1
instead = {
    layer: run(taps=jnp.array([2, 6, layer])).stats.mean_acceptance_length
    for layer in (7, 8, 10, 11)
}
print(
    "exercise 2:",
    {layer: round(one, 2) for layer, one in instead.items()},
    "with 9:",
    round(right, 2),
)
assert instead[11] < right - 0.1 and max(instead[8], instead[10]) > instead[11]
most = 1 + (stats.num_accepted_tokens + K * len(outside)) / stats.num_drafts
print(f"exercise 3: at most {most:.2f}, measured {stats.mean_acceptance_length:.2f}")
assert most < stats.mean_acceptance_length + 0.1

# %% [markdown]
# ## What was claimed and checked
#
# - The checkpoint holds as many parameters as its description says, 850 MB for Llama-3.1-8B, and no embedding.
# - Features are the streams entering layers `2, L//2, L−3`, before any norm: target and library agree to 10⁻⁵.
# - `fc`, the layer, its cache, the draft logits, `d2t`, and a chain of five tokens drafted by hand equal the
#   library's.
# - Every part is used; the high tap carries most; the text never changes.
# - Each step without a true feature costs hits; easy text comes far.
# - The draft vocabulary covers nearly everything that was written.
# - Six mistakes keep the text and leave a mark by depth, but for taps off by one, which only a comparison of numbers
#   finds.
#
# Next: 05, where these keys and values live and what becomes of them when a draft is refused; 06, trees.
