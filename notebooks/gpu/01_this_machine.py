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
# This notebook checks whether this machine is ready for the other three notebooks. It runs in
# seconds, on a GPU or a laptop CPU. It answers four questions:
#
# - Which numbers will be measured here, and which will come from a stand-in?
# - Do float32 products have float32 precision?
# - Does the same program give the same bits twice?
# - Do two engines fit into the memory?

# %% tags=["hide-input"]
import sys

sys.path.insert(0, "..")  # where first_cell, machine and pictures are

import first_cell

first_cell.start(repository=True, device=False)

import machine

here = machine.start()
here.banner("vLLM", "price")

# %% [markdown]
# The box above is at the top of every notebook of this series. A *real* part is the one that the
# notebook is about. A *stand-in* replaces a missing part: the shipped pair replaces weights, a CPU
# replaces a GPU, and the committed record of an earlier run replaces vLLM.
#
# ## Environment variables
#
# Set them before you start Jupyter or `make gpu-notebooks`. They have the meaning of the options of
# `pytest validation`. A misspelled variable raises an error. Otherwise the notebooks would silently
# measure the shipped pair.

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
Markdown(to_markdown(["variable", "meaning", "here"], rows))

# %% [markdown]
# ## Installed versions and device

# %% tags=["hide-input"]
facts = dict(
    flat(environment(target=here.configuration.target, drafter=here.configuration.drafter))
)
if shutil.which("nvidia-smi"):
    fields = "name,driver_version,memory.total,clocks.max.sm,power.limit,ecc.mode.current"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
    print(subprocess.run(command, capture_output=True, text=True).stdout.strip())
shown = ("versions.", "jax.", "cpu.", "python", "platform", "target.sha256", "drafter.sha256")
facts = [[name, str(fact)[:60]] for name, fact in facts.items() if name.startswith(shown)]
Markdown(to_markdown(["fact", "value"], facts))

# %% [markdown]
# ## Precision of float32 products
#
# NVIDIA's tensor cores multiply float32 as TensorFloat-32 by default, with ten bits of mantissa.
# Then greedy texts of two engines differ even without tied logits. The validation sets
# `jax_default_matmul_precision = "highest"`. The cell compares such a product with float64, and
# with operands rounded to TensorFloat-32.

# %%
rng = np.random.default_rng(0)
first_factor = rng.standard_normal((256, 1024), np.float32)
second_factor = rng.standard_normal((1024, 256), np.float32)
exact = first_factor.astype(np.float64) @ second_factor.astype(np.float64)


def apart(product):
    """Largest error over the root mean square of the exact product."""
    return float(np.abs(np.asarray(product, np.float64) - exact).max() / np.sqrt(np.mean(exact**2)))


def as_tensor_float_32(x):
    """Ten bits of mantissa, rounded to nearest."""
    bits = x.view(np.uint32)
    return ((bits + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


with device.products("L5"):
    highest = apart(jnp.asarray(first_factor) @ jnp.asarray(second_factor))
default = apart(jnp.asarray(first_factor) @ jnp.asarray(second_factor))
rounded = apart(
    as_tensor_float_32(first_factor).astype(np.float64)
    @ as_tensor_float_32(second_factor).astype(np.float64)
)
print(f"largest error of a float32 product on {here.device}, relative to the result")
print(f"  in the validation           {highest:.1e}")
print(f"  default of JAX              {default:.1e}")
print(f"  with TensorFloat-32 inputs  {rounded:.1e}")
assert highest < 1e-5, "float32 products do not have float32 precision"
assert rounded > 20 * highest, "the check does not distinguish TensorFloat-32 from float32"

# %% [markdown]
# ## Determinism of compiled programs
#
# Comparisons of bits use programs compiled with `validation.device.exact_options`. On a GPU these
# options disable the choice of kernels by measured time. They also stop XLA from keeping excess
# precision of bfloat16 values. The cell compiles a program twice and runs each twice.

# %%
print("options of the compiler:", device.exact_options())


def step(x, w):
    return jax.nn.softmax(jnp.tanh(x @ w) @ w.T)


bits = set()
for _ in range(2):
    jax.clear_caches()
    program = jax.jit(step, compiler_options=device.exact_options())
    for _ in range(2):
        bits.add(
            np.asarray(program(jnp.asarray(first_factor), jnp.asarray(second_factor))).tobytes()
        )
assert len(bits) == 1, "the same program gives different bits"
print(f"4 runs of 2 compilations, {len(bits)} result")

# %% [markdown]
# ## Memory for two engines
#
# In a comparison, both engines hold target and head at the same time. JAX allocates memory on
# demand up to its share (`XLA_CLIENT_MEM_FRACTION`). vLLM allocates its share at its start
# (`EAGLE3_VLLM_MEMORY`). The plan is for Llama-3.1-8B with its EAGLE-3 head, batch 8, 2,048 tokens
# each, K = 5. On an unknown device the plan is for an H100 and an H200, which are **not** this
# machine.

# %%
NAME = "Llama-3.1-8B"
share = here.configuration.vllm_memory
devices = (
    [here.accelerator]
    if here.accelerator
    else [accelerator_named("H100"), accelerator_named("H200")]
)


def plans(accelerator, weights):
    """Memory plans of both engines, each in its share."""
    target = KNOWN_MODELS[NAME]
    cache = "float32" if weights == "float32" else "bfloat16"
    deployment = Deployment(
        target=target,
        head=usual_head(target),
        accelerator=accelerator,
        weights=weights,
        cache=cache,
        target_name=NAME,
    )
    load = {"batch": 8, "context": 2048, "num_draft_tokens": 5, "prefill_tokens": 2048}
    return {
        "JAX": memory_plan(deployment, **load, utilization=device.share_of_jax()),
        "vLLM": memory_plan(deployment, **load, utilization=share),
    }


plan_of = {
    (accelerator.name, weights, engine): plan
    for accelerator in devices
    for weights in ("bfloat16", "float32")
    for engine, plan in plans(accelerator, weights).items()
}
rows = [
    [*key, show(plan.total / 1e9), show(plan.budget / 1e9), "yes" if plan.fits else "NO"]
    for key, plan in plan_of.items()
]
Markdown(
    to_markdown(
        ["device (data sheet)", "weights", "engine", "GB needed", "GB available", "fits"], rows
    )
)

# %% tags=["hide-input"]
parts = ("target_weights", "head_weights", "target_cache", "head_cache", "activations", "reserve")
figure, axes = plt.subplots(figsize=(8.4, 0.42 * len(plan_of) + 1.4))
names = [" · ".join(key) for key in plan_of]
left_edge = np.zeros(len(plan_of))
for part, colour in zip(parts, SERIES, strict=True):
    sizes = np.array([getattr(plan, part) / 1e9 for plan in plan_of.values()])
    axes.barh(names, sizes, left=left_edge, color=colour, label=part.replace("_", " "))
    left_edge += sizes
axes.plot(
    [plan.budget / 1e9 for plan in plan_of.values()], names, "k|", markersize=16, label="share"
)
axes.invert_yaxis()
axes.set(
    xlabel="GB on one device, by data sheet", title=f"Memory of {NAME} and its head in two engines"
)
axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
plt.show()
for (name, weights, _), plan in plan_of.items():
    assert abs(sum(getattr(plan, part) for part in parts) - plan.total) < 1.0
    if weights == "bfloat16" and accelerator_named(name).memory_bytes >= 140e9:
        assert plan.fits, "two engines in bfloat16 fit into an H200"
for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION", "XLA_FLAGS"):
    print(f"{name} = {os.environ.get(name, '(not set)')}")
assert os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"), (
    "it must be set before the first use of the device"
)

# %% [markdown]
# ## Smallest end-to-end run
#
# The cell decodes one prompt in float32: without a drafter, and with a chain of three draft tokens.

# %%
pair = here.subject.pair("float32")
prompt = here.subject.prompt_tokens[0][-64:]
plain = SpeculativeDecoder(pair[0], stop_tokens=()).generate([prompt], max_new_tokens=24)
fast = SpeculativeDecoder(*pair, num_speculative_tokens=3, stop_tokens=()).generate(
    [prompt], max_new_tokens=24
)
assert fast.tokens == plain.tokens, "speculation changed the text"
print(
    f"{here.subject.name}: {len(fast.tokens[0])} tokens, same text; τ ="
    f" {fast.stats.mean_acceptance_length:.2f}"
)

# %% [markdown]
# ## Common mistakes
#
# **Checking determinism with one compilation.** One compiled program always repeats its result. In
# the next compilation the autotuner can choose another kernel of equal speed, which adds in a
# different order. So the check above compiles twice.
#
# ## Exercises
#
# **1.** How many sequences of 4,096 tokens fit next to vLLM, in bfloat16, on the first device of
# the table?
#
# <details><summary>Answer</summary>
#
# `eagle3_jax.theory.bounds.largest_batch` computes it.
#
# </details>
#
# **2.** Why does a comparison of texts need float32 in both engines, although servers use bfloat16?
#
# <details><summary>Answer</summary>
#
# In bfloat16, two correct engines add in a different order. Their texts differ where two logits are
# approximately tied. In float32 such ties are very rare, so a difference indicates a bug.
#
# </details>

# %%
target = KNOWN_MODELS[NAME]
deployment = Deployment(target=target, head=usual_head(target), accelerator=devices[0])
fitting = largest_batch(deployment, context=4096, num_draft_tokens=5, utilization=0.97 - share)
print(f"1. {fitting} sequences on a {devices[0].name}, by its data sheet")
assert fitting >= 1

# %% [markdown]
# ## Checked claims
#
# - Products have float32 precision. The check distinguishes TensorFloat-32.
# - A program compiled twice gives the same bits.
# - By the memory plan, two engines in bfloat16 fit into a device of 140 GB or more.
# - Plain decoding and a chain generate the same float32 text.
# - A misspelled variable and a variable without its counterpart each raise a one-line error.
#
# **Next:** [02](02_equality_with_vllm.ipynb), equality with vLLM.
