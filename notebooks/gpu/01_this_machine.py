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
# The four notebooks of this series measure nothing themselves. They read and explain two files:
#
# - the report of the [validation](../../docs/validation.md), `pytest validation --gpu`;
# - the record of [h200.py](../../examples/h200.py): times of rounds at the shape of Llama-3.1-8B.
#
# This notebook shows which files are read, and whether the machine computes what it should:
#
# - Which numbers are of this machine, and which come from a stand-in?
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
here.banner("vLLM", "rounds", "price")

# %% [markdown]
# The box above is at the top of every notebook of this series. A *real* part was measured on this
# machine. A *stand-in* is a committed record: of a validation on a CPU with the shipped pair, and
# of rounds on one H100 and one H200.
#
# ## Measure this machine
#
# `make gpu-notebooks` writes both files into `build/gpu` and runs the notebooks. In a checkout
# without make, and before you open the notebooks in Jupyter:
#
# ```bash
# python -m notebooks.machine             # all checks, then the rounds; run it again to continue
# python -m notebooks.machine --quick     # one case of most checks, in 14 minutes, then the rounds
# ```
#
# Other options are those of `pytest validation`: target and head, prompts, vLLM, the price of an
# hour.

# %% tags=["hide-input"]
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown
from pictures.style import SERIES

from eagle3_jax.measure.tables import flat, show, to_markdown
from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.bounds import largest_batch
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment, memory_plan
from validation.device import share_of_jax
from validation.engines.memory import SHARE_OF_VLLM
from validation.runs import Verdict, verdict_lines

# %% [markdown]
# ## Verdicts of the validation
#
# A level is a claim. It passed only if every one of its checks ran and passed.

# %%
print(machine.described(here.report))
print(here.report.summary, "\n")
for _, line in verdict_lines(here.report):
    print(line)
failed = [name for name, level in here.report.levels.items() if level.verdict is Verdict.FAILED]
assert not failed, f"levels that failed: {failed}"

# %% tags=["hide-input"]
shown = ("versions.", "jax.", "cpu.", "python", "platform", "target.sha256", "drafter.sha256")
facts = [
    [name, str(fact)[:60]] for name, fact in flat(here.report.environment) if name.startswith(shown)
]
Markdown(to_markdown(["fact of the report", "value"], facts))

# %% [markdown]
# ## Precision of float32 products
#
# NVIDIA's tensor cores multiply float32 as TensorFloat-32 by default, with ten bits of mantissa.
# The error of a product is then about 1e-3. Greedy texts of two engines differ even without tied
# logits. This library asks for all bits ([design notes](../../docs/design.md)). `h200.py` compares
# a product with float64.

# %%
device = here.rounds("device")
error = device.figures["error of float32"]
print(f"largest error of a float32 product, relative to the result: {error:.1e} ({device.origin})")
assert error < 1e-5, "float32 products do not have float32 precision"

# %% [markdown]
# ## Determinism of compiled programs
#
# Two compiled programs can add in a different order, so their bits may differ where the mathematics
# is equal. `h200.py` compares pairs of runs: the texts, and every key and value in the cache. A run
# or a compilation that is repeated must give the same bits. So must invariant decoding, with drafts
# and without, and in any batch.

# %%
bits = here.rounds("bits")
pairs = {name: pair for name, pair in bits.figures.items() if "texts that part" in pair}
rows = [
    [name, pair["texts that part"], pair["arrays that differ"], pair["a difference means"]]
    for name, pair in pairs.items()
]
for name, pair in pairs.items():
    if name.endswith("twice") or name.startswith("invariant"):
        assert not pair["texts that part"] and not pair["arrays that differ"], name
columns = ["pair of runs", "texts that differ", "arrays that differ", "a difference would mean"]
Markdown(f"Measured on {bits.origin}\n\n" + to_markdown(columns, rows))

# %% [markdown]
# ## Memory for two engines
#
# In a comparison, both engines hold target and head at the same time. JAX allocates memory on
# demand up to its share (`XLA_CLIENT_MEM_FRACTION`). vLLM allocates its share at its start
# (`--vllm-memory`). The plan is for Llama-3.1-8B with its EAGLE-3 head, batch 8, 2,048 tokens
# each, K = 5. On an unknown device the plan is for an H100 and an H200, which are **not** this
# machine.

# %%
NAME = "Llama-3.1-8B"
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
        "JAX": memory_plan(deployment, **load, utilization=share_of_jax()),
        "vLLM": memory_plan(deployment, **load, utilization=SHARE_OF_VLLM),
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

# %% [markdown]
# ## Common mistakes
#
# **Checking determinism with one compilation.** One compiled program always repeats its result. In
# the next compilation the autotuner can choose another kernel of equal speed, which adds in a
# different order. So `h200.py` compiles twice.
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
fitting = largest_batch(
    deployment, context=4096, num_draft_tokens=5, utilization=0.97 - SHARE_OF_VLLM
)
print(f"1. {fitting} sequences on a {devices[0].name}, by its data sheet")
assert fitting >= 1

# %% [markdown]
# ## Checked claims
#
# - No level of the report failed.
# - Products have float32 precision.
# - A run and a compilation that are repeated give the same bits. So does invariant decoding.
# - By the memory plan, two engines in bfloat16 fit into a device of 140 GB or more.
#
# **Next:** [02](02_equality_with_vllm.ipynb), equality with vLLM.
