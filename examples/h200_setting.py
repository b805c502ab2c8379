"""What `h200.py` measures, how large, for how long, and where its figures go."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from eagle3_jax import DynamicTree
from eagle3_jax.measure.rounds import CompilerOptions
from eagle3_jax.simulated import PUBLISHED_RATES
from eagle3_jax.writing import whole_file

RATES = PUBLISHED_RATES["Llama-3.1-8B with its EAGLE-3 head on MT-Bench"]
CHAIN = 5
NODES = CHAIN + 1
TREES = {
    f"tree of {NODES}": DynamicTree(num_nodes=NODES, max_depth=4, top_k=3),  # the budget of the chain
    "tree of 60": DynamicTree(num_nodes=60, max_depth=7, top_k=10),
}
LARGEST = 64  # nodes of any draft here: the capacity leaves room for as many, so that it is the same for all
# XLA's list of what goes into command buffers (CUDA graphs) when nothing is said, read from jax 0.10.2.
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
LOOPS_IN_GRAPHS = {"xla_gpu_enable_command_buffer": f"{GRAPHS},WHILE,CONDITIONAL"}
NO_GRAPHS = {"xla_gpu_enable_command_buffer": "INVALID"}  # a list of nothing that exists
VARIANTS: dict[str, tuple[int, CompilerOptions]] = {
    "as it is": (1, {}),
    "loops in command buffers": (1, LOOPS_IN_GRAPHS),
    "products by cuBLAS": (1, {"xla_gpu_enable_triton_gemm": False}),
    "4 rounds a check": (4, {}),
    # Alone, XLA of jax 0.11 and later refuses it ahead of time (docs/gpu.md).
    "deterministic operations": (1, {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}),
    "no command buffers": (1, NO_GRAPHS),
    "as it is, again": (1, {}),  # how far this one is from the first says what a difference means
    "no autotuning": (1, {"xla_gpu_autotune_level": 0}),
    "8 rounds a check": (8, {}),
    "loops in command buffers, 4 rounds a check": (4, LOOPS_IN_GRAPHS),
    "no excess precision": (1, {"xla_allow_excess_precision": False}),
    "nondeterministic ones excluded": (1, {"xla_gpu_exclude_nondeterministic_ops": True}),
    "latency-hiding scheduler": (1, {"xla_gpu_enable_latency_hiding_scheduler": True}),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How large everything is. What is worth most comes first: the time may not suffice for all of it."""

    shape: str = "Llama-3.1-8B"
    num_layers: int | None = None
    first: int = 3
    repeats: int = 10
    tokens: int = 64
    context: int = 1024
    contexts: tuple[int, ...] = (4096, 256, 8192)
    nodes: tuple[int, ...] = (1, 6, 4, 16, 64, 2, 8, 32)
    batches: tuple[int, ...] = (8, 32, 1, 16, 4)
    drafts: tuple[str, ...] = ("plain", "chain", "chain 3", *TREES)
    stream: int = 4 * 2**30
    variants: tuple[str, ...] = tuple(VARIANTS)
    rehearse: bool = False


FULL = Setting()
REHEARSAL = Setting(
    shape="Llama-tiny", num_layers=2, first=1, repeats=2, tokens=6, context=256, contexts=(384,), nodes=(1, NODES),
    batches=(2,), drafts=("plain", "chain", f"tree of {NODES}"), stream=2**20,
    variants=("as it is", "as it is, again", "no excess precision"), rehearse=True,
)  # fmt: skip


class Record:
    """The figures of a part, in the file of the whole run as soon as they are known."""

    def __init__(self, output: Path, part: str, seconds: float = float("inf")):
        self.output, self.part = output, part
        self.end = time.monotonic() + seconds
        self.figures: dict[str, Any] = read(output)["parts"][part]["figures"]

    @property
    def seconds_left(self) -> float:
        """Until the part is cut off."""
        return self.end - time.monotonic()

    def add(self, name: str, figure: Any) -> None:
        """Write one more, or one anew."""
        self.figures[name] = figure
        whole = read(self.output)
        whole["parts"][self.part]["figures"] = self.figures
        write(self.output, whole)


def read(output: Path) -> dict[str, Any]:
    """What was measured until now."""
    return json.loads(output.read_text())


def write(output: Path, result: dict[str, Any]) -> None:
    """All of it, or what was there before."""
    with whole_file(output) as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
