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
# # 01 · This machine
#
# This notebook tells whether this machine is ready for the three others: which numbers will be real and which come
# from a stand-in, whether float32 is float32, whether the same program gives the same bits twice, and what fits into
# its memory. It runs in seconds, on a GPU or a laptop CPU.

# %% tags=["hide-input"]
import sys

sys.path.insert(0, "..")  # where first_cell, machine and pictures are

import first_cell

first_cell.start(repository=True, device=False)

import machine

here = machine.start()
here.banner("vLLM", "price")

# %% [markdown]
# The box above is at the top of every notebook of this series. *Real* means: of this machine, this pair, this vLLM. A
# *stand-in* replaces a missing part: the shipped pair for weights, a CPU for a GPU, the committed record of an
# earlier run for vLLM.
#
# ## Environment variables
#
# Set them before Jupyter or `make gpu-notebooks` starts. They are the options of `pytest validation` under other
# names. A misspelled variable is refused, so that numbers of the shipped pair never carry the name of another.

# %% tags=["hide-input"]
import os
import shutil
import subprocess

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown
from pictures.style import SERIES

from eagle3_jax import SpeculativeDecoder
from eagle3_jax.bench.environment import environment
from eagle3_jax.bench.tables import flat, show, to_markdown
from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.bounds import largest_batch
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment, memory_plan
from validation import device

refused = []
for environ in ({"EAGLE3_TARGETS": "/models/Llama"}, {"EAGLE3_TARGET": "/models/Llama"}):
    try:
        machine.start(environ)
    except SystemExit as line:
        refused.append(str(line))
assert len(refused) == 2 and all("\n" not in line for line in refused)
rows = [
    [f"`{name}`", meaning, "set" if os.environ.get(name, "").strip() else "–"]
    for name, meaning in machine.VARIABLES.items()
]
Markdown(to_markdown(["variable", "names", "here"], rows))

# %% [markdown]
# ## Installed versions and device

# %% tags=["hide-input"]
facts = dict(
    flat(environment(target=here.configuration.target, drafter=here.configuration.drafter))
)
if shutil.which("nvidia-smi"):
    asked = "name,driver_version,memory.total,clocks.max.sm,power.limit,ecc.mode.current"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"]
    print(subprocess.run(command, capture_output=True, text=True).stdout.strip())
shown = ("versions.", "jax.", "cpu.", "python", "platform", "target.sha256", "drafter.sha256")
facts = [[name, str(fact)[:60]] for name, fact in facts.items() if name.startswith(shown)]
Markdown(to_markdown(["fact", "value"], facts))

# %% [markdown]
# ## Precision of float32 products
#
# NVIDIA's tensor cores multiply float32 as TensorFloat-32 by default: ten bits of mantissa. Greedy texts of two
# engines then differ where no logits are tied. The validation computes with `jax_default_matmul_precision =
# "highest"`. The cell compares such a product with float64, and with operands rounded as TensorFloat-32.

# %%
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
print(f"  as JAX multiplies by default           {default:.1e}")
print(f"  operands of ten bits          {rounded:.1e}")
assert highest < 1e-5, "float32 is not float32 here, whatever was asked for"
assert rounded > 20 * highest, "the check could not tell TensorFloat-32 from float32"

# %% [markdown]
# ## Determinism of compiled programs
#
# Bits are compared between programs compiled with `validation.device.exact_options`. On a GPU these options keep the
# autotuner from choosing kernels by a stopwatch, and XLA from keeping bits of a bfloat16 that another program rounds
# away. The cell compiles a program twice and runs it twice each.

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
assert len(bits) == 1, "the same program gave other bits"
print(f"4 runs of 2 compilations, {len(bits)} result")

# %% [markdown]
# ## Memory for two engines
#
# To compare engines, both hold target and head at the same time. JAX takes what it needs up to its share
# (`XLA_CLIENT_MEM_FRACTION`), vLLM takes its share at its start (`EAGLE3_VLLM_MEMORY`). The plan is for Llama-3.1-8B
# with its EAGLE-3 head, batch 8, 2,048 tokens each, K = 5. Without a known device it is for an H100 and an H200,
# which are **not** this machine.

# %%
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
        "JAX": memory_plan(one, **asked, utilization=device.share_of_jax()),
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

# %% tags=["hide-input"]
parts = ("target_weights", "head_weights", "target_cache", "head_cache", "activations", "reserve")
figure, axes = plt.subplots(figsize=(8.4, 0.42 * len(found) + 1.4))
names, left_edge = [" · ".join(key) for key in found], np.zeros(len(found))
for part, colour in zip(parts, SERIES, strict=True):
    sizes = np.array([getattr(plan, part) / 1e9 for plan in found.values()])
    axes.barh(names, sizes, left=left_edge, color=colour, label=part.replace("_", " "))
    left_edge += sizes
axes.plot([plan.budget / 1e9 for plan in found.values()], names, "k|", markersize=16, label="share")
axes.invert_yaxis()
axes.set(xlabel="GB on one device, from data sheets", title=f"{NAME} and its head in two engines")
axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
plt.show()
for (name, weights, _), plan in found.items():
    assert abs(sum(getattr(plan, part) for part in parts) - plan.total) < 1.0
    if weights == "bfloat16" and accelerator_named(name).memory_bytes >= 140e9:
        assert plan.fits, "two engines in bfloat16 fit an H200"
for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION", "XLA_FLAGS"):
    print(f"{name} = {os.environ.get(name, '(not set)')}")
assert os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"), "it was set before the device was used"

# %% [markdown]
# ## Smallest end-to-end run
#
# A prompt runs through plain decoding and through a chain of three draft tokens in float32.

# %%
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
# ## Common mistakes
#
# A single compilation always repeats itself. What differs is what the autotuner picks at the next compilation, in the
# next process: kernels that are equally fast and add in another order. The check above therefore compiles twice.
#
# ## Exercises
#
# **1.** How many sequences of 4,096 tokens fit next to vLLM, in bfloat16, on the first device of the table?
#
# <details><summary>Answer</summary>
#
# `eagle3_jax.theory.bounds.largest_batch` computes it.
#
# </details>
#
# **2.** Why does a comparison of texts need float32 in both engines, although nobody serves in float32?
#
# <details><summary>Answer</summary>
#
# In bfloat16 two correct engines sum in another order and generate other texts wherever two logits are nearly tied.
# In float32 such ties are a thousand times rarer, so any difference is a bug.
#
# </details>

# %%
target = KNOWN_MODELS[NAME]
deployment = Deployment(target=target, head=usual_head(target), accelerator=devices[0])
fitting = largest_batch(deployment, context=4096, num_draft_tokens=5, utilization=0.97 - share)
print(f"1. {fitting} on a {devices[0].name}, by its data sheet")
assert fitting >= 1

# %% [markdown]
# ## What was claimed and checked
#
# - Products have all bits of float32, and the check would have seen TensorFloat-32.
# - A program compiled twice gives the same bits.
# - Two engines in bfloat16 fit a device of 140 GB or more, by the plan.
# - Plain decoding and a chain generate the same float32 text.
# - Variables with a typing error or without their counterpart are refused, each in one line.
#
# **Next:** [02](02_equality_with_vllm.ipynb), equality with vLLM.
