"""What `h200.py` measures, a part in each process: decoding steps, rounds, flags, batches, contexts and attention.

Random weights of a true shape; acceptance by dice. Within a part everything takes turns, after a warm-up, and the
figures of one repeat are neighbours in time. `h200.py` starts the parts and reads what they write.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import verify_block_attention  # beside this file
from scipy.stats import binomtest

from eagle3_jax import DynamicTree, SimulatedAcceptance, SpeculativeDecoder
from eagle3_jax.decode import LoadedDrafter, LoadedTarget
from eagle3_jax.drafters import Plain
from eagle3_jax.load import precision_named
from eagle3_jax.measure.random_models import random_pair
from eagle3_jax.measure.roofline import bandwidths, step_bytes
from eagle3_jax.measure.rounds import CompilerOptions, timed_rounds
from eagle3_jax.measure.step_costs import draft_seconds, target_seconds
from eagle3_jax.measure.timing import CompileClock, Spread
from eagle3_jax.reporting.environment import environment
from eagle3_jax.writing import whole_file

# Per depth, the share of rounds that accept a draft token there and all before it. They add up to the lengths that
# vLLM has published for Llama-3.1-8B with its EAGLE-3 head on MT-Bench, 2.36 for K=2 to 3.54 for K=7.
RATES = (0.78, 0.58, 0.43, 0.29, 0.24, 0.14, 0.08)
CHAIN = 5
NODES = CHAIN + 1
TREES = {
    f"tree of {NODES}": DynamicTree(num_nodes=NODES, max_depth=4, top_k=3),  # the budget of the chain
    "tree of 60": DynamicTree(num_nodes=60, max_depth=7, top_k=10),
}
LARGEST = 64  # nodes of any draft here: the capacity leaves room for as many, so that it is the same for all
# XLA's list of what goes into command buffers (CUDA graphs) when nothing is said, read from jax 0.10.2.
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
VARIANTS: dict[str, tuple[int, CompilerOptions]] = {
    "as it is": (1, {}),
    "as it is, again": (1, {}),  # how far this one is from the first says what a difference means
    "4 rounds a check": (4, {}),
    "8 rounds a check": (8, {}),
    "loops in command buffers": (1, {"xla_gpu_enable_command_buffer": f"{GRAPHS},WHILE,CONDITIONAL"}),
    "loops in command buffers, 4 rounds a check": (
        4,
        {"xla_gpu_enable_command_buffer": f"{GRAPHS},WHILE,CONDITIONAL"},
    ),
    "no command buffers": (1, {"xla_gpu_enable_command_buffer": "INVALID"}),  # a list of nothing that exists
    # Alone, XLA of jax 0.11 and later refuses it ahead of time (docs/gpu.md).
    "deterministic operations": (1, {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}),
    "nondeterministic ones excluded": (1, {"xla_gpu_exclude_nondeterministic_ops": True}),
    "no excess precision": (1, {"xla_allow_excess_precision": False}),
    "products by cuBLAS": (1, {"xla_gpu_enable_triton_gemm": False}),
    "latency-hiding scheduler": (1, {"xla_gpu_enable_latency_hiding_scheduler": True}),
    "no autotuning": (1, {"xla_gpu_autotune_level": 0}),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How large everything is."""

    shape: str = "Llama-3.1-8B"
    num_layers: int | None = None
    repeats: int = 10
    tokens: int = 64
    context: int = 1024
    contexts: tuple[int, ...] = (256, 4096, 8192)
    nodes: tuple[int, ...] = (1, 2, 4, 6, 8, 16, 32, 64)
    batches: tuple[int, ...] = (1, 4, 16, 2, 8)
    trees: tuple[str, ...] = tuple(TREES)
    stream: int = 4 * 2**30
    variants: tuple[str, ...] = tuple(VARIANTS)
    rehearse: bool = False


FULL = Setting()
REHEARSAL = Setting(
    shape="Llama-tiny", num_layers=2, repeats=2, tokens=6, context=256, contexts=(384,), nodes=(1, NODES), batches=(2,),
    trees=(f"tree of {NODES}",), stream=2**20, variants=("as it is", "as it is, again", "no excess precision"),
    rehearse=True,
)  # fmt: skip


class Record:
    """The figures of a part, on the disk as soon as they are known: a part that is cut off keeps what it had."""

    def __init__(self, path: Path):
        self.path, self.figures = path, {}

    def add(self, name: str, figure: Any) -> None:
        """Write one more."""
        self.figures[name] = figure
        with whole_file(self.path) as partial:
            partial.write_text(json.dumps(self.figures))
        print(f"  {name}", flush=True)


def turns(cells: Mapping[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Values of every cell, measured in turns; and of each its seconds of compiling, or why it failed."""
    about: dict[str, Any] = {}
    values: dict[str, list[Any]] = {}
    for name, cell in cells.items():
        try:
            with CompileClock() as clock:
                cell()
            cell()  # command buffers are recorded at the second run
            about[name] = {"compile_seconds": clock.seconds}
            values[name] = []
        except Exception as error:
            about[name] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    for repeat in range(repeats):
        for name in list(values) if repeat % 2 else list(values)[::-1]:
            values[name].append(cells[name]())
    return values, about


def seconds_json(seconds: list[float]) -> dict[str, Any]:
    """Middle, spread and every value."""
    return Spread.of(seconds).to_json() | {"values": seconds}


def ratio_json(above: list[float], below: list[float]) -> dict[str, Any]:
    """Ratios of neighbours in time, and a sign test of their being 1."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    larger = sum(ratio > 1 for ratio in ratios)
    p = float(binomtest(larger, len(ratios)).pvalue)
    return Spread.of(ratios).to_json() | {"above_1": larger, "of": len(ratios), "p_of_sign_test": p}


@functools.cache
def pair(setting: Setting) -> tuple[LoadedTarget, LoadedDrafter]:
    """Random weights of the shape, in bfloat16."""
    return random_pair(setting.shape, precision=precision_named("bfloat16"), num_layers=setting.num_layers)


def decoder_of(setting: Setting, draft: str, rounds_per_check: int = 1) -> SpeculativeDecoder:
    """``plain``, ``verify N``, ``chain`` or one of :data:`TREES`, accepting as :data:`RATES` say."""
    target, head = pair(setting)
    if draft == "plain" or draft.startswith("verify "):
        nodes = 1 if draft == "plain" else int(draft.split()[1])
        return SpeculativeDecoder(target, Plain(nodes), stop_tokens=())
    given: dict[str, Any] = {"num_speculative_tokens": CHAIN} if draft == "chain" else {"tree": TREES[draft]}
    dice = SimulatedAcceptance(RATES)
    return SpeculativeDecoder(target, head, stop_tokens=(), verifier=dice, rounds_per_check=rounds_per_check, **given)


def sizes(setting: Setting, *, batch: int = 1, context: int | None = None) -> dict[str, Any]:
    """Prompts, and the limit that gives caches of ``context`` slots."""
    context = context or setting.context
    return {"prompts": [[1 + row] * 8 for row in range(batch)], "max_new_tokens": context - 8 - LARGEST}


def pace(
    setting: Setting, draft: str, *, batch: int = 1, context: int | None = None, rounds_per_check: int = 1,
    options: CompilerOptions | None = None,
) -> Callable[[], Any]:  # fmt: skip
    """A cell that measures rounds of a decoder."""
    decoder, where = decoder_of(setting, draft, rounds_per_check), sizes(setting, batch=batch, context=context)
    return lambda: timed_rounds(decoder, **where, tokens=setting.tokens, compiler_options=options)


def paces(
    setting: Setting, record: Record, cells: Mapping[str, Callable[[], Any]], base: str, prefix: str = ""
) -> None:
    """Measure rounds in turns: seconds of a round, calls of the target, tokens/s, and ratios to a base."""
    values, about = turns(cells, setting.repeats)
    for name, one in about.items():
        if name in values:
            found = values[name]
            one["seconds_per_round"] = seconds_json([each.seconds_per_round for each in found])
            one["tokens_per_second"] = seconds_json([each.tokens_per_second for each in found])
            one["rounds"], one["tokens"] = found[-1].rounds, found[-1].tokens
            if base in values:
                other = values[base]
                rounds = [[each.seconds_per_round for each in both] for both in (found, other)]
                speeds = [[each.tokens_per_second for each in both] for both in (found, other)]
                one["round_in_bases"] = ratio_json(*rounds)
                one["speed_in_bases"] = ratio_json(*speeds)
        record.add(f"{prefix}{name}", one)


# The parts


def device(setting: Setting, record: Record) -> None:
    """What it is, and how fast it streams memory."""
    record.add("environment", environment())
    record.add("bytes_per_second", bandwidths(setting.stream))


def round_parts(setting: Setting, record: Record) -> None:
    """A plain step, and a round of a chain beside the target and the head alone."""
    target, _ = pair(setting)
    record.add("step_bytes", step_bytes(target, rows=1, context=setting.context))
    chain, averaged = decoder_of(setting, "chain"), {**sizes(setting), "rounds": 2 if setting.rehearse else 16}
    whole = {"plain step": "plain", f"verify {NODES}": f"verify {NODES}", "round": "chain"}
    cells: dict[str, Callable[[], float]] = {
        name: lambda cell=pace(setting, draft): cell().seconds_per_round for name, draft in whole.items()
    }
    cells["target alone"] = lambda: target_seconds(chain, **averaged)
    cells["draft step"] = lambda: draft_seconds(chain, **averaged)
    values, about = turns(cells, setting.repeats)
    for name, one in about.items():
        record.add(name, one | ({"seconds": seconds_json(values[name])} if name in values else {}))
    if values.keys() >= {"round", "target alone", "draft step", "plain step"}:
        columns = (values[name] for name in ("round", "target alone", "draft step"))
        outside = [(whole - alone - CHAIN * step) / whole for whole, alone, step in zip(*columns, strict=True)]
        record.add("share outside target and head", seconds_json(outside))
        record.add("draft step in plain steps", ratio_json(values["draft step"], values["plain step"]))


def verify(setting: Setting, record: Record) -> None:
    """Verification of 1, 2, ... tokens."""
    cells = {f"verify {nodes}": pace(setting, f"verify {nodes}") for nodes in setting.nodes}
    paces(setting, record, cells, "verify 1")


def variants(setting: Setting, record: Record) -> None:
    """Rounds of a chain under options of the compiler and of the loop."""
    cells = {
        name: pace(setting, "chain", rounds_per_check=VARIANTS[name][0], options=VARIANTS[name][1])
        for name in setting.variants
    }
    paces(setting, record, cells, "as it is")


def batches(setting: Setting, record: Record) -> None:
    """Chain against trees over batch sizes."""
    for batch in setting.batches:
        cells = {name: pace(setting, name, batch=batch) for name in ("plain", "chain", *setting.trees)}
        paces(setting, record, cells, "chain", f"batch {batch}, ")


def contexts(setting: Setting, record: Record) -> None:
    """Plain steps and verification over the slots of the caches."""
    for context in setting.contexts:
        cells = {name: pace(setting, name, context=context) for name in ("plain", f"verify {NODES}")}
        paces(setting, record, cells, "plain", f"{context} slots, ")


def attention(setting: Setting, record: Record) -> None:
    """The committed prefix by kernels of libraries, beside the core's attention."""
    for row in verify_block_attention.rows(rehearse=setting.rehearse):
        record.add(f"batch {row['batch']}, block of {row['block']}, {row['context']} slots", row)


def compilation(setting: Setting, record: Record) -> None:
    """Seconds to trace, lower and compile the rounds of a chain, with whatever the cache directory holds."""
    with CompileClock() as clock:
        first = pace(setting, "chain")()
    record.add("compile_seconds", clock.seconds)
    record.add("first_run_seconds", first.seconds)


PARTS: dict[str, Callable[[Setting, Record], None]] = {
    "device": device,
    "round": round_parts,
    "verify": verify,
    "variants": variants,
    "batches": batches,
    "contexts": contexts,
    "attention": attention,
    # Each of these has a process of its own and a cache directory that only they use, filled by the first.
    "compilation, nothing kept": compilation,
    "compilation, autotuning kept": compilation,
    "compilation, programs kept": compilation,
}


def clocks() -> str | None:
    """What the driver says of the GPU's clocks, heat and limits; ``None`` without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Measure one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    setting, record = REHEARSAL if given.rehearse else FULL, Record(given.output)
    if not given.rehearse and jax.default_backend() != "gpu":
        raise SystemExit(
            f"no GPU: the backend is {jax.default_backend()}; give --rehearse for tiny shapes on any device"
        )
    before = clocks()
    PARTS[given.part](setting, record)
    record.add("clocks", {"before": before, "after": clocks()})


if __name__ == "__main__":
    main()
