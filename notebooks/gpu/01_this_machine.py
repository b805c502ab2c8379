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
# # 01 · Is this machine ready?
#
# Afterwards you can
#
# - say which numbers of the next eight notebooks will be this machine's own, and which come from a stand-in;
# - configure all nine by environment variables;
# - tell whether float32 is float32 here, and whether the same program gives the same bits twice;
# - plan the memory of two engines, each with target and head, on one device.
#
# It takes seconds, on a GPU or a laptop CPU, offline with the shipped pair. To be read before: 01, 02 and 04 of the
# main series help, none is needed.

# %%
import sys

sys.path.insert(0, "..")  # where first_cell, machine and pictures are

import first_cell

first_cell.start(repository=True, device=False)

import machine

here = machine.start()
here.banner("vLLM", "price")

# %% [markdown]
# The box above stands at the top of every notebook of this series. *Real* means: of this machine, this pair, this
# vLLM. A *stand-in* keeps the story going: the shipped pair in place of weights, a CPU in place of a GPU, the
# committed record of an earlier run in place of vLLM. If there is an NVIDIA GPU but a jax without CUDA, the first cell
# says what to install, and nothing runs.
#
# ## What to set
#
# Everything is named by environment variables, set before Jupyter or `make gpu-notebooks` starts. They are the
# options of `pytest validation` under other names.

# %%
import os

from IPython.display import Markdown

from eagle3_jax.bench.tables import flat, show, to_markdown

rows = [
    [f"`{name}`", meaning, "set" if os.environ.get(name, "").strip() else "–"]
    for name, meaning in machine.VARIABLES.items()
]
Markdown(to_markdown(["variable", "names", "here"], rows))

# %% [markdown]
# ## What is installed
#
# These are the facts that every report of the validation keeps: enough for a stranger to judge a number, nothing that
# is private to this machine.

# %%
from eagle3_jax.bench.environment import environment

facts = dict(
    flat(environment(target=here.configuration.target, drafter=here.configuration.drafter))
)
shown = ("versions.", "jax.", "cpu.", "python", "platform", "target.sha256", "drafter.sha256")
Markdown(
    to_markdown(
        ["fact", "value"], [[k, str(v)[:60]] for k, v in facts.items() if k.startswith(shown)]
    )
)

# %%
import shutil
import subprocess

if shutil.which("nvidia-smi"):
    asked = "name,driver_version,memory.total,clocks.max.sm,power.limit,ecc.mode.current,mig.mode.current"
    told = subprocess.run(
        ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"], capture_output=True, text=True
    )
    print(told.stdout.strip() or "nvidia-smi is here and told nothing")
else:
    print("no NVIDIA driver: nvidia-smi is not here")

# %% [markdown]
# ## Is float32 float32?
#
# NVIDIA's tensor cores multiply float32 as TensorFloat-32 unless they are told otherwise: ten bits of mantissa.
# Greedy texts of two engines then part where nothing ties. The validation computes under
# `jax_default_matmul_precision = "highest"`; here is how far such a product is from float64, beside one whose
# operands were rounded as TensorFloat-32 would round them.

# %%
import jax
import jax.numpy as jnp
import numpy as np

from validation import device

rng = np.random.default_rng(0)
left, right = (
    rng.standard_normal((256, 1024), np.float32),
    rng.standard_normal((1024, 256), np.float32),
)
exact = left.astype(np.float64) @ right.astype(np.float64)


def apart(product):
    """Largest error over the root mean square of the exact product."""
    return float(np.abs(np.asarray(product, np.float64) - exact).max() / np.sqrt(np.mean(exact**2)))


def as_tensor_float_32(x):
    """Ten bits of mantissa, rounded to nearest."""
    bits = x.view(np.uint32)
    return ((bits + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


with device.products("L5"):
    highest = apart(jnp.asarray(left) @ jnp.asarray(right))
default = apart(jnp.asarray(left) @ jnp.asarray(right))
rounded = apart(
    as_tensor_float_32(left).astype(np.float64) @ as_tensor_float_32(right).astype(np.float64)
)
print(f"on {here.device}, largest error over the size of the result")
print(f"  as the validation multiplies  {highest:.1e}")
print(f"  as JAX does unasked           {default:.1e}")
print(f"  operands of ten bits          {rounded:.1e}")
assert highest < 1e-5, "float32 is not float32 here, whatever was asked for"
assert rounded > 20 * highest, "the check could not tell TensorFloat-32 from float32"

# %% [markdown]
# ## The same bits twice
#
# Bits that are compared come from programs compiled with the options below (`validation.device.exact_options`). On a
# GPU they keep the autotuner from choosing kernels by a stopwatch, and XLA from keeping bits of a bfloat16 that
# another program rounds away. A program is compiled twice here, run twice each, and all four results must be one.

# %%
print("options of the compiler:", device.exact_options())


def step(x, w):
    return jax.nn.softmax(jnp.tanh(x @ w) @ w.T)


bits = set()
for _ in range(2):
    jax.clear_caches()
    program = jax.jit(step, compiler_options=device.exact_options())
    for _ in range(2):
        bits.add(np.asarray(program(jnp.asarray(left), jnp.asarray(right))).tobytes())
assert len(bits) == 1, "the same program gave other bits; texts of two runs cannot be compared here"
print(f"4 runs of 2 compilations, {len(bits)} result")

# %% [markdown]
# ## Memory for two engines
#
# Comparing engines means that both hold target and head at the same time: JAX takes what it needs up to its share
# (`XLA_CLIENT_MEM_FRACTION`), vLLM takes its own at its start (`EAGLE3_VLLM_MEMORY`). `eagle3_jax.theory.memory`
# counts weights, both caches, activations and a reserve. Below: Llama-3.1-8B with its EAGLE-3 head, batch 8, 2,048
# tokens each, K = 5. On a known device its datasheet is used; otherwise an H100 and an H200 are planned for, which
# are **not** this machine.

# %%
from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment, memory_plan
from validation.device import share_of_jax

NAME = "Llama-3.1-8B"
share = here.configuration.vllm_memory
devices = (
    [here.accelerator]
    if here.accelerator
    else [accelerator_named("H100"), accelerator_named("H200")]
)


def plans(accelerator, weights):
    """Ours in JAX's share, and vLLM's in its own."""
    target = KNOWN_MODELS[NAME]
    cache = "float32" if weights == "float32" else "bfloat16"
    one = Deployment(
        target=target,
        head=usual_head(target),
        accelerator=accelerator,
        weights=weights,
        cache=cache,
        target_name=NAME,
    )
    asked = {"batch": 8, "context": 2048, "num_draft_tokens": 5, "prefill_tokens": 2048}
    return {
        "JAX": memory_plan(one, **asked, utilization=share_of_jax()),
        "vLLM": memory_plan(one, **asked, utilization=share),
    }


found = {
    (accelerator.name, weights, engine): plan
    for accelerator in devices
    for weights in ("bfloat16", "float32")
    for engine, plan in plans(accelerator, weights).items()
}
rows = [
    [*key, show(plan.total / 1e9), show(plan.budget / 1e9), "yes" if plan.fits else "NO"]
    for key, plan in found.items()
]
Markdown(
    to_markdown(
        ["device (datasheet)", "weights", "engine", "GB needed", "GB it may take", "fits"], rows
    )
)

# %%
import matplotlib.pyplot as plt
from pictures.style import SERIES

parts = ("target_weights", "head_weights", "target_cache", "head_cache", "activations", "reserve")
figure, axes = plt.subplots(figsize=(8.4, 0.42 * len(found) + 1.4))
left_edge = np.zeros(len(found))
for part, colour in zip(parts, SERIES, strict=True):
    sizes = np.array([getattr(plan, part) / 1e9 for plan in found.values()])
    axes.barh(range(len(found)), sizes, left=left_edge, color=colour, label=part.replace("_", " "))
    left_edge += sizes
budgets = [plan.budget / 1e9 for plan in found.values()]
axes.plot(budgets, range(len(found)), "k|", markersize=16, markeredgewidth=2, label="may take")
axes.set_yticks(range(len(found)), [" · ".join(key) for key in found])
axes.invert_yaxis()
axes.set_xlabel("GB on one device, from datasheets")
axes.set_title(f"{NAME} and its head in two engines: bfloat16 fits where float32 may not")
axes.legend(ncols=1, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
plt.show()

# %%
for plan in found.values():
    counted = sum(getattr(plan, part) for part in parts)
    assert abs(counted - plan.total) < 1.0, "the bars are not the whole of the plan"
for accelerator in devices:
    if accelerator.memory_bytes >= 140e9:
        wide = [
            plan
            for (name, weights, _), plan in found.items()
            if (name, weights) == (accelerator.name, "bfloat16")
        ]
        assert all(plan.fits for plan in wide), "two engines in bfloat16 should fit an H200"

# %% [markdown]
# What JAX says of the device now, and the switches that divide it. `XLA_PYTHON_CLIENT_PREALLOCATE=false` lets JAX
# grow instead of taking its share at once. Both are settled when JAX first touches the device, so the first cell has
# set them, unless you had: what is left is vLLM's.

# %%
stats = jax.devices()[0].memory_stats() or {}
told = {name: show(stats[name] / 1e9) for name in ("bytes_limit", "bytes_in_use") if name in stats}
print(f"{here.device}: {told or 'keeps no account of its memory'}")
for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION", "XLA_FLAGS"):
    print(f"  {name} = {os.environ.get(name, '(not set)')}")
assert os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"), (
    "it was settled before the device was touched"
)

# %% [markdown]
# ## Does it decode?
#
# The smallest end-to-end run: a prompt through plain decoding and through a chain of three draft tokens in float32,
# where greedy decoding leaves no room for taste.

# %%
from eagle3_jax import SpeculativeDecoder

pair = here.subject.pair("float32")
prompt = here.subject.prompt_tokens[0][-64:]
plain = SpeculativeDecoder(pair[0], stop_tokens=()).generate([prompt], max_new_tokens=24)
fast = SpeculativeDecoder(*pair, num_speculative_tokens=3, stop_tokens=()).generate(
    [prompt], max_new_tokens=24
)
assert fast.tokens == plain.tokens, "speculation changed the text"
print(
    f"{here.subject.name}: {len(fast.tokens[0])} tokens, equal; τ = {fast.stats.mean_acceptance_length:.2f}"
)

# %% [markdown]
# ## What will run, and what will not

# %%
NEEDS = {
    "01 this machine": (),
    "02 greedy, beside vLLM": ("vLLM",),
    "03 sampling": ("vLLM",),
    "04 acceptance": ("vLLM",),
    "05 speed": (),
    "06 tuning": (),
    "07 latency": (),
    "08 cost": ("price",),
    "09 claims": (),
}
rows = []
for name, needs in NEEDS.items():
    banner = here.banner(*needs)
    missing = ", ".join(part.name for part in banner.missing)
    rows.append(
        [name, ", ".join(part.name for part in banner.parts if part.real) or "–", missing or "–"]
    )
assert all(real != "–" or missing != "–" for _, real, missing in rows)
Markdown(to_markdown(["notebook", "real here", "stand-in"], rows))

# %% [markdown]
# ## What would go wrong
#
# A misspelt variable would be ignored by most programs, and you would publish numbers of the shipped pair under the
# name of your own. It is refused, and so is whatever cannot be meant.

# %%
refused = []
for environ in (
    {"EAGLE3_TARGETS": "/models/Llama"},
    {"EAGLE3_TARGET": "/models/Llama"},
    {"EAGLE3_DTYPE": "fp8"},
    {"EAGLE3_VLLM_MEMORY": "30"},
):
    try:
        machine.start(environ)
    except SystemExit as line:
        refused.append(str(line))
        print(line)
assert len(refused) == 4 and all("\n" not in line for line in refused)

# %% [markdown]
# ## Exercises
#
# **1.** How many sequences of 4,096 tokens fit beside vLLM, in bfloat16, on the first device of the table?
#
# <details><summary>Answer</summary>
#
# `eagle3_jax.theory.bounds.largest_batch(deployment, context=4096, num_draft_tokens=5, utilization=0.97 - share)`,
# which the next cell computes.
#
# </details>

# %%
from eagle3_jax.theory.bounds import largest_batch

target = KNOWN_MODELS[NAME]
deployment = Deployment(target=target, head=usual_head(target), accelerator=devices[0])
rows_that_fit = largest_batch(
    deployment, context=4096, num_draft_tokens=5, utilization=0.97 - share
)
print(f"{rows_that_fit} on a {devices[0].name}, by its datasheet")
assert rows_that_fit >= 1

# %% [markdown]
# **2.** Why does a comparison of texts want float32 in both engines, although nobody serves in float32?
#
# <details><summary>Answer</summary>
#
# In bfloat16 two correct engines sum in other orders and write other texts wherever two logits nearly tie (02 shows
# how often). In float32 such ties are a thousand times rarer, so that any difference is a bug.
#
# </details>
#
# **3.** The check of determinism compiled the program twice. Why is running it twice not enough?
#
# <details><summary>Answer</summary>
#
# One executable repeats itself. What differs is what the autotuner picks at the next compilation, in the next
# process: kernels that are equally fast and add in other orders.
#
# </details>
#
# ## What was claimed and checked
#
# - Products have all bits of float32 here, and the check would have seen TensorFloat-32.
# - A program compiled twice gives the same bits.
# - The plan's bars add up to its total; two engines in bfloat16 fit a device of 140 GB or more.
# - Plain decoding and a chain write the same float32 text.
# - Variables that cannot be meant are refused, each in one line.
#
# Next: [02, the same prompts through both engines](02_greedy_beside_vllm.ipynb).
