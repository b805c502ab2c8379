"""What `h200.py` measures: rounds at a true shape, and the device apart from them. Each part runs in its own process.

A cell is compiled, warmed up, timed and written at once. After all cells, or when the next one would not fit in the
time, cells take turns for as long as there is time. Figures of one turn are neighbors in time, and their ratios count.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import glob
import gzip
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import binomtest

from eagle3_jax import DynamicTree, SimulatedAcceptance, SpeculativeDecoder, load_drafter, load_target
from eagle3_jax.bench.environment import environment
from eagle3_jax.bench.gpu import gpu_problem
from eagle3_jax.bench.random_models import random_pair, shape_named
from eagle3_jax.bench.roofline import bandwidths, step_bytes
from eagle3_jax.bench.rounds import CompilerOptions, Pace, timed_rounds
from eagle3_jax.bench.step_costs import draft_seconds, target_seconds
from eagle3_jax.bench.timing import CompileClock, Spread
from eagle3_jax.cache import KeyValue
from eagle3_jax.decode import LoadedDrafter, LoadedTarget
from eagle3_jax.drafters import Plain
from eagle3_jax.engines.memory import share_memory
from eagle3_jax.load import precision_named
from eagle3_jax.models.attention import Segment
from eagle3_jax.models.attention import attention as core_attention
from eagle3_jax.models.config import gated, grouped
from eagle3_jax.models.flash import flash_attention
from eagle3_jax.models.memory import cache_mask
from eagle3_jax.verifiers.simulated import PUBLISHED_RATES
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
    """The sizes of everything. The most valuable come first, because the time may not suffice for all."""

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


# ---------------------------------------------------------------- cells

Cell = Callable[[], Pace]
Turns = dict[str, list[Pace]]


@functools.cache
def pair(setting: Setting) -> tuple[LoadedTarget, LoadedDrafter]:
    """Random weights of the shape, in bfloat16."""
    return random_pair(setting.shape, precision=precision_named("bfloat16"), num_layers=setting.num_layers)


@functools.cache
def decoder_of(setting: Setting, draft: str, rounds_per_check: int = 1) -> SpeculativeDecoder:
    """``plain``, ``verify N``, ``chain``, ``chain K`` or one of :data:`TREES`, accepting as :data:`RATES` say."""
    target, head = pair(setting)
    if draft == "plain" or draft.startswith("verify "):
        nodes = 1 if draft == "plain" else int(draft.split()[1])
        return SpeculativeDecoder(target, Plain(nodes), stop_tokens=())
    length = int(draft.removeprefix("chain") or CHAIN) if draft.startswith("chain") else 0
    given: dict[str, Any] = {"num_speculative_tokens": length} if length else {"tree": TREES[draft]}
    dice = SimulatedAcceptance(RATES)
    return SpeculativeDecoder(target, head, stop_tokens=(), verifier=dice, rounds_per_check=rounds_per_check, **given)


def sizes(setting: Setting, *, batch: int = 1, context: int | None = None) -> dict[str, Any]:
    """Prompts, and the limit that gives caches of ``context`` slots."""
    context = context or setting.context
    return {"prompts": [[1 + row] * 8 for row in range(batch)], "max_new_tokens": context - 8 - LARGEST}


def pace(
    setting: Setting, draft: str, *, batch: int = 1, context: int | None = None, rounds_per_check: int = 1,
    options: CompilerOptions | None = None,
) -> Cell:  # fmt: skip
    """A cell that measures rounds of a decoder."""
    where = sizes(setting, batch=batch, context=context)

    def measured() -> Pace:
        decoder = decoder_of(setting, draft, rounds_per_check)
        return timed_rounds(decoder, **where, tokens=setting.tokens, compiler_options=options)

    return measured


def paces(
    setting: Setting, record: Record, cells: Mapping[str, Cell], base: str, prefix: str = "",
    after_turn: Callable[[Turns], None] = lambda turns: None,
) -> None:  # fmt: skip
    """Record the cells in their order, then in turns. Cells of an earlier run are kept, except the base."""
    known = {name for name in cells if "seconds_per_round" in record.figures.get(prefix + name, {})}
    if known == set(cells):
        return
    figures: dict[str, dict[str, Any]] = {}
    first: Turns = {}
    longest = 0.0
    for name, cell in cells.items():
        if name in known and name != base:
            continue
        if record.seconds_left < 1.2 * longest:  # the next one will take no less
            record.add(prefix + name, {"skipped": "no time was left; run the command again"})
            continue
        start = time.monotonic()
        try:
            with CompileClock() as clock:
                cell()
            cell()  # command buffers are recorded at the second run
            first[name] = [cell() for _ in range(setting.first)]
            figures[name] = {"compile_seconds": clock.seconds} | summary(first[name])
        except Exception as error:
            figures[name] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        longest = max(longest, time.monotonic() - start)
        record.add(prefix + name, figures[name])
        print(f"  {prefix}{name}: {told(figures[name])}", flush=True)
    turns: Turns = {name: [] for name in first}
    for repeat in range(setting.repeats if first else 0):
        start = time.monotonic()
        for name in list(turns) if repeat % 2 else list(turns)[::-1]:
            turns[name].append(cells[name]())
        for name, found in turns.items():
            one = figures[name] | summary(first[name] + found)
            if base in turns:
                one["round_in_bases"] = ratio_json([o.seconds_per_round for o in found],
                                                   [o.seconds_per_round for o in turns[base]])  # fmt: skip
                one["speed_in_bases"] = ratio_json([o.tokens_per_second for o in found],
                                                   [o.tokens_per_second for o in turns[base]])  # fmt: skip
            record.add(prefix + name, one)
        after_turn(turns)
        if record.seconds_left < 1.5 * (time.monotonic() - start):
            break


def summary(found: list[Pace]) -> dict[str, Any]:
    """Seconds of a round, tokens/s, and how many of each the last run had."""
    return {
        "seconds_per_round": seconds_json([one.seconds_per_round for one in found]),
        "tokens_per_second": seconds_json([one.tokens_per_second for one in found]),
        "rounds": found[-1].rounds,
        "tokens": found[-1].tokens,
    }


def told(figure: dict[str, Any]) -> str:
    """A cell in a line."""
    if "failed" in figure:
        return f"failed: {figure['failed'][:160]}"
    ms, speed = 1e3 * figure["seconds_per_round"]["median"], figure["tokens_per_second"]["median"]
    return f"{ms:.3f} ms a round, {speed:.1f} tokens/s, compiled in {figure['compile_seconds']:.1f} s"


def seconds_json(seconds: list[float]) -> dict[str, Any]:
    """Middle, spread and every value."""
    return Spread.of(seconds).to_json() | {"values": seconds}


def ratio_json(above: list[float], below: list[float]) -> dict[str, Any]:
    """Ratios of neighbours in time, and a sign test of their being 1."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    larger = sum(ratio > 1 for ratio in ratios)
    p = float(binomtest(larger, len(ratios)).pvalue)
    return Spread.of(ratios).to_json() | {"above_1": larger, "of": len(ratios), "p_of_sign_test": p}


# ---------------------------------------------------------------- parts that measure rounds


def round_parts(setting: Setting, record: Record) -> None:
    """A plain step, a round of a chain, the target and the head alone; then other drafts."""
    record.add("step_bytes", step_bytes(pair(setting)[0], rows=1, context=setting.context))
    averaged = {**sizes(setting), "rounds": 2 if setting.rehearse else 16}
    alone = {"target alone": target_seconds, "draft step": draft_seconds}
    cells: dict[str, Cell] = {"plain step": pace(setting, "plain"), f"verify {NODES}": pace(setting, f"verify {NODES}")}
    cells["round"] = pace(setting, "chain")
    for name, seconds in alone.items():
        cells[name] = lambda seconds=seconds: Pace(seconds(decoder_of(setting, "chain"), **averaged), 1, 1)
    cells |= {draft: pace(setting, draft) for draft in setting.drafts if draft not in ("plain", "chain")}

    def shares(turns: Turns) -> None:
        if turns.keys() >= {"plain step", "round", *alone}:
            of = {name: [one.seconds_per_round for one in turns[name]] for name in turns}
            columns = zip(of["round"], of["target alone"], of["draft step"], strict=True)
            outside = [(whole - target - CHAIN * step) / whole for whole, target, step in columns]
            record.add("share outside target and head", seconds_json(outside))
            record.add("draft step in plain steps", ratio_json(of["draft step"], of["plain step"]))

    paces(setting, record, cells, "plain step", after_turn=shares)


def verify(setting: Setting, record: Record) -> None:
    """Verification of 1, 2, ... tokens."""
    paces(setting, record, {f"verify {n}": pace(setting, f"verify {n}") for n in setting.nodes}, "verify 1")


def variants(setting: Setting, record: Record) -> None:
    """Rounds of a chain under options of the compiler and of the loop."""
    cells = {
        name: pace(setting, "chain", rounds_per_check=VARIANTS[name][0], options=VARIANTS[name][1])
        for name in setting.variants
    }
    paces(setting, record, cells, "as it is")


def batches(setting: Setting, record: Record) -> None:
    """Chains against trees and plain decoding over batch sizes."""
    for batch in setting.batches:
        cells = {draft: pace(setting, draft, batch=batch) for draft in setting.drafts}
        paces(setting, record, cells, "chain", f"batch {batch}, ")


def contexts(setting: Setting, record: Record) -> None:
    """Plain steps and verification over the slots of the caches."""
    for context in setting.contexts:
        cells = {name: pace(setting, name, context=context) for name in ("plain", f"verify {NODES}")}
        paces(setting, record, cells, "plain", f"{context} slots, ")


def compilation(setting: Setting, record: Record) -> None:
    """Seconds to trace, lower and compile the rounds of a chain, with the contents of the cache directory."""
    with CompileClock() as clock:
        first = pace(setting, "chain")()
    record.add("compile_seconds", clock.seconds)
    record.add("first_run_seconds", first.seconds)


# ---------------------------------------------------------------- parts that measure the device

LAUNCHES = 64  # in a round of a loop
PROMPT = "def read_config(filename):\n"
# Else a profile shows other launches than a run: command buffers are taken apart while one is taken.
WHILE_PROFILED: CompilerOptions = {"xla_enable_command_buffers_during_profiling": True}


def device(setting: Setting, record: Record) -> None:
    """What it is, how it multiplies float32, how fast it streams memory, and what a launch costs."""
    record.add("environment", environment())
    record.add("memory", jax.devices()[0].memory_stats())
    record.add("float32", products_of_float32())
    record.add("bytes_per_second", bandwidths(setting.stream))
    kinds: dict[str, CompilerOptions] = {"as it is": {}}
    if not setting.rehearse:
        kinds |= {"no command buffers": NO_GRAPHS, "loops in command buffers": LOOPS_IN_GRAPHS}
    for name, options in kinds.items():
        record.add(f"launch, {name}", seconds_json(launch_seconds(options, setting.repeats)))


def products_of_float32() -> dict[str, float]:
    """Largest error of a product over the size of its values: 1e-6 is float32, 1e-3 TensorFloat-32."""
    left, right = np.random.default_rng(0).standard_normal((2, 512, 512), np.float32)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    off = lambda product: float(np.abs(np.asarray(product, np.float64) - exact).max() / np.sqrt((exact**2).mean()))
    with jax.default_matmul_precision("highest"):
        highest = off(jax.jit(jnp.matmul)(left, right))
    return {"highest": highest, "unasked": off(jax.jit(lambda x, w: x @ w)(left, right))}


def launch_seconds(options: CompilerOptions, repeats: int) -> list[float]:
    """Seconds of one of many tiny kernels, each of which waits for the one before."""

    def round_of(x: jax.Array) -> jax.Array:
        for index in range(LAUNCHES):
            x = jax.lax.optimization_barrier(x * 1.0000001 + index)
        return x

    def rounds_of(x: jax.Array, rounds: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c[0] < rounds, lambda c: (c[0] + 1, round_of(c[1])), (0, x))[1]

    loop = jax.jit(rounds_of, compiler_options=dict(options) or None)
    x, rounds = jax.block_until_ready((jnp.ones(1024), jnp.int32(LAUNCHES)))

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(x, rounds))
        return (time.perf_counter() - start) / LAUNCHES**2

    return [seconds() for _ in range(repeats + 2)][2:]


def text(setting: Setting, record: Record) -> None:
    """The shipped pair in float32: does it write the same text with its head and without?"""
    target, new = load_target(dtype="float32"), 8 if setting.rehearse else 96
    plain = SpeculativeDecoder(target, stop_tokens=()).generate(PROMPT, max_new_tokens=new)
    head = load_drafter(target=target)
    ours = SpeculativeDecoder(target, head, num_speculative_tokens=CHAIN, stop_tokens=()).generate(
        PROMPT, max_new_tokens=new
    )
    record.add("same text", plain.tokens == ours.tokens)
    record.add("mean_acceptance_length", ours.stats.mean_acceptance_length)


def floor(setting: Setting, record: Record) -> None:
    """The products of a step alone, by cuBLAS in one CUDA graph of PyTorch: what no step of these weights undercuts."""
    try:
        torch: Any = importlib.import_module("torch")
    except ModuleNotFoundError:
        record.add("not measured", "PyTorch is not installed")
        return
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not setting.rehearse:
        record.add("not measured", "this build of PyTorch does not see the GPU")
        return
    place = {"device": "cuda" if on_gpu else "cpu", "dtype": torch.bfloat16}
    config = shape_named(setting.shape)
    width, vocab = config.width, config.vocab_size
    heads, inner = grouped(config.layers[0]), gated(config.layers[0]).width
    queries = heads.num_heads * heads.head_dim
    columns = queries + 2 * heads.num_kv_heads * heads.head_dim
    made = lambda *shape: torch.randn(*shape, **place) * 0.02
    layers = [
        (made(width, columns), made(queries, width), made(width, 2 * inner), made(inner, width))
        for _ in config.layers[: setting.num_layers]
    ]
    unembed = made(width, vocab)

    def step(x: Any) -> Any:
        for qkv, out, gate_up, down in layers:
            x = x + (x @ qkv)[:, :queries] @ out
            hidden = x @ gate_up
            x = x + (torch.nn.functional.silu(hidden[:, :inner]) * hidden[:, inner:]) @ down
        return x @ unembed

    for rows in (1, 6, 32):
        x = made(rows, width)
        for _ in range(3):
            step(x)
        record.add(f"{rows} rows", seconds_json(torch_seconds(torch, lambda x=x: step(x), on_gpu, setting.repeats)))


def torch_seconds(torch: Any, run: Any, on_gpu: bool, repeats: int) -> list[float]:
    """Of a function, as a CUDA graph where there is a GPU."""
    if on_gpu:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found


def attention(setting: Setting, record: Record) -> None:
    """Attention of all layers over their caches: the GPU's one kernel, and XLA's, in turns."""
    if setting.rehearse:
        points, layers, (heads, kv_heads, size), dtype = [(1, 4, 64)], 2, (4, 2, 16), jnp.float32
    else:
        points = [(batch, fed, slots) for slots in (2048, 8192) for batch in (1, 32) for fed in (6, 60)]
        layers, (heads, kv_heads, size), dtype = 32, (32, 8, 128), jnp.bfloat16
    kernel = functools.partial(flash_attention, scale=size**-0.5, interpret=jax.default_backend() == "cpu")
    xla = lambda queries, kv, seen, end: core_attention(queries, (Segment(kv, seen),))
    for batch, fed, slots in points:
        draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, dtype)
        queries = draw(0, batch, fed, heads, size)
        caches = [KeyValue(*(draw(2 * i + j, batch, kv_heads, slots, size) for j in (1, 2))) for i in range(layers)]
        length = jnp.full((batch,), slots // 2, jnp.int32)  # half full, as a cache is on average
        seen = cache_mask(jnp.tril(jnp.ones((1, fed, fed), jnp.bool_)), length, slots)
        figures: dict[str, Any] = {}
        programs = {name: _all_layers(one) for name, one in (("kernel", kernel), ("xla", xla))}
        for name, program in list(programs.items()):
            try:
                for _ in range(2):  # compiled; then its command buffers are recorded
                    jax.block_until_ready(program(queries, caches, seen, length + fed))
            except Exception as error:
                figures[name] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
                del programs[name]
        times: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(setting.repeats):
            for name, program in programs.items():
                start = time.perf_counter()
                jax.block_until_ready(program(queries, caches, seen, length + fed))
                times[name].append(time.perf_counter() - start)
        figures |= {name: seconds_json(seconds) for name, seconds in times.items()}
        record.add(f"batch {batch}, block of {fed}, {slots} slots", figures)


def _all_layers(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """One layer after the other, as in a model."""

    @jax.jit
    def run(queries: jax.Array, caches: list[KeyValue], seen: jax.Array, end: jax.Array) -> jax.Array:
        for kv in caches:
            queries = attend(queries, kv, seen, end).reshape(queries.shape)
        return queries

    return run


def profile(setting: Setting, record: Record) -> None:
    """Which kernels a plain step and a round consist of, and how much of its time no kernel runs."""
    for draft in ("plain", "chain"):
        decoder, where = decoder_of(setting, draft), {**sizes(setting), "tokens": min(setting.tokens, 32)}
        try:
            timed_rounds(decoder, **where, compiler_options=WHILE_PROFILED)
            options = WHILE_PROFILED
        except Exception as error:  # an XLA without this option
            record.add(f"{draft}, command buffers", f"taken apart: {' '.join(str(error).split())[:200]}")
            options = None
        for _ in range(2):
            timed_rounds(decoder, **where, compiler_options=options)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                pace = timed_rounds(decoder, **where, compiler_options=options)
            record.add(draft, kernels(folder, pace.rounds) | {"seconds_per_round": pace.seconds_per_round})


def kernels(folder: str, rounds: int) -> dict[str, Any]:
    """Kernels of the newest trace by time, per round."""
    found = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
    if not found:
        return {"failed": "the profiler wrote no trace.json.gz"}
    with gzip.open(max(found, key=os.path.getmtime)) as file:
        events = json.load(file)["traceEvents"]
    lanes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    seconds: dict[str, list[float]] = {}
    for event in events:
        if event.get("ph") == "X" and "GPU" in lanes.get(event["pid"], ""):
            seconds.setdefault(event["name"].rstrip("0123456789_."), []).append(1e-6 * event.get("dur", 0.0))
    by_time = sorted(seconds.items(), key=lambda item: -sum(item[1]))
    return {
        "kernels_per_round": sum(map(len, seconds.values())) / rounds,
        "kernel_seconds_per_round": sum(map(sum, seconds.values())) / rounds,
        "kernels": {name[:80]: {"per_round": len(all_of) / rounds, "seconds_per_round": sum(all_of) / rounds}
                    for name, all_of in by_time[:25]},
    }  # fmt: skip


# ---------------------------------------------------------------- one part

NO_GPU = 3  # the exit code
Part = Callable[[Setting, Record], None]

# Seconds for each. Each of the two groups fits into one command.
FIRST: dict[str, tuple[int, Part]] = {
    "device": (70, device),
    "text": (50, text),
    "round": (220, round_parts),
    "floor": (30, floor),
    "verify": (90, verify),
    "variants": (110, variants),
}
SECOND: dict[str, tuple[int, Part]] = {
    "batches": (200, batches),
    "profile": (60, profile),
    "contexts": (80, contexts),
    "attention": (60, attention),
    # Each of these has a process of its own and a cache directory that only they use, filled by the first.
    "compilation, nothing kept": (70, compilation),
    "compilation, autotuning kept": (60, compilation),
    "compilation, programs kept": (40, compilation),
}
PARTS = FIRST | SECOND


def clocks() -> str | None:
    """What the driver says of the GPU's clocks, heat and limits; ``None`` without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Measure one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("output", type=Path, help="The file of the whole run, which `h200.py` has begun.")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    if given.part == "floor":
        share_memory(beside_vllm=False)  # PyTorch needs it
    problem = None if given.rehearse else gpu_problem(wanted=True)
    if problem is not None:
        print(f"{problem}; --rehearse tries tiny shapes on any device", file=sys.stderr)
        return NO_GPU
    setting, record = REHEARSAL if given.rehearse else FULL, Record(given.output, given.part, given.seconds)
    before = clocks()
    PARTS[given.part][1](setting, record)
    record.add("clocks", {"before": before, "after": clocks()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
