"""Measures what a round costs on one GPU at the shape of Llama-3.1-8B; every figure is in one file.

    python examples/h200.py --output h200.json    # at most ten minutes; again: what is missing
    python examples/h200.py --output /tmp/rehearsal.json --rehearse    # tiny shapes on any device

No figure of a rehearsal counts. The parts run in the order of their value, each in a process with a
time limit. Every figure is written as soon as it is known, so a command that is cut off loses only
the current cell. `docs/gpu.md` explains how to read the file.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import glob
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import (
    DynamicTree,
    SimulatedAcceptance,
    SpeculativeDecoder,
    load_drafter,
    load_target,
)
from eagle3_jax.bench.random_models import random_pair
from eagle3_jax.bench.roofline import bandwidths, step_bytes
from eagle3_jax.bench.rounds import CompilerOptions, Pace, timed_rounds
from eagle3_jax.bench.step_costs import draft_seconds, target_seconds
from eagle3_jax.devices.compilation import keep_compiled_programs
from eagle3_jax.drafters import Plain
from eagle3_jax.load import precision_named
from eagle3_jax.measure.environment import environment, sha256_of_code
from eagle3_jax.measure.gpu import gpu_problem
from eagle3_jax.measure.records import failure, read_record, spread_of, write_record
from eagle3_jax.measure.tables import show, to_markdown
from eagle3_jax.measure.timing import CompileClock
from eagle3_jax.models.invariant import Tile, product_by_kernel
from eagle3_jax.verifiers.simulated import PUBLISHED_RATES

SCHEMA = 4
BUDGET = 570  # seconds of a command
LEAST = 20  # seconds in which a part can measure anything
# seconds at most for interpreter, imports and the start of the device; the clock of a part begins
# after them
START = 30
ROOM = 10  # seconds after those of a part until it is cut off
RATES = PUBLISHED_RATES["Llama-3.1-8B with its EAGLE-3 head on MT-Bench"]
CHAIN = 5
NODES = CHAIN + 1
TREES = {
    # As many tokens as the chain.
    f"tree of {NODES}": DynamicTree(num_nodes=NODES, max_depth=4, top_k=3),
    "tree of 60": DynamicTree(num_nodes=60, max_depth=7, top_k=10),
}
# Name of a figure to how kernels are stored.
WEIGHTS = {"bfloat16": "dense", "fp8": "fp8", "int8": "int8"}
INVARIANT = "invariant "  # before the name of a draft
TILES = {
    "the tile": Tile(),
    "16 rows": Tile(rows=16),
    "16 rows, 256 inputs": Tile(rows=16, inputs=256, stages=3),
    "16 rows, 128 outputs": Tile(rows=16, outputs=128),
    "16 rows, 32 outputs, 256 inputs": Tile(rows=16, outputs=32, inputs=256),
    "16 rows, 512 programs": Tile(rows=16, programs=512),
    "32 rows": Tile(rows=32),
    "3 stages": Tile(stages=3),
    "64 inputs": Tile(inputs=64, stages=6),
}
LARGEST = 64  # nodes: every cache has room for the largest draft, so that all have the same size
# The operations that XLA of jax 0.10.2 puts into command buffers (CUDA graphs) by default.
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
LOOPS_IN_GRAPHS = {"xla_gpu_enable_command_buffer": f"{GRAPHS},WHILE,CONDITIONAL"}
# Rounds per check of the host, and options of the compiler.
VARIANTS: dict[str, tuple[int, CompilerOptions]] = {
    "defaults": (1, {}),
    "loops in command buffers": (1, LOOPS_IN_GRAPHS),
    "products by cuBLAS": (1, {"xla_gpu_enable_triton_gemm": False}),
    "4 rounds a check": (4, {}),
    # XLA of jax 0.11 and later refuses the first option alone ahead of time (docs/gpu.md).
    "deterministic operations": (
        1,
        {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False},
    ),
    # A list of nothing that exists.
    "no command buffers": (1, {"xla_gpu_enable_command_buffer": "INVALID"}),
    "defaults, again": (1, {}),  # its difference from the first row is noise
    "no autotuning": (1, {"xla_gpu_autotune_level": 0}),
    "8 rounds a check": (8, {}),
    "loops in command buffers, 4 rounds a check": (4, LOOPS_IN_GRAPHS),
    "no excess precision": (1, {"xla_allow_excess_precision": False}),
    "nondeterministic ones excluded": (1, {"xla_gpu_exclude_nondeterministic_ops": True}),
}
# Without it a profile runs without command buffers and shows other launches than a run.
WHILE_PROFILED: CompilerOptions = {"xla_enable_command_buffers_during_profiling": True}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of what is measured; the most valuable come first, since the time may not suffice."""

    shape: str = "Llama-3.1-8B"
    num_layers: int | None = None
    repeats: int = 10
    # With the first one and the largest draft 128 slots, so that no prompt is padded.
    tokens: int = 63
    context: int = 2048  # slots of a cache, which a prompt fills
    contexts: tuple[int, ...] = (2048, 8192)
    nodes: tuple[int, ...] = (1, NODES, 4, 16, 64, 2, 8, 32)
    batches: tuple[int, ...] = (8, 32, 1, 16, 4)
    drafts: tuple[str, ...] = ("chain", "plain", "chain 3", *TREES)
    variants: tuple[str, ...] = tuple(VARIANTS)
    stream: int = 4 * 2**30  # bytes


FULL = Setting()
REHEARSAL = Setting(
    "Llama-tiny",
    num_layers=2,
    repeats=2,
    context=256,
    contexts=(384,),
    nodes=(1, NODES),
    batches=(2,),
    drafts=("chain", "plain", f"tree of {NODES}"),
    variants=("defaults", "no excess precision"),
    stream=2**20,
)


class Record:
    """The figures of one part. Every figure is written to the file of all parts at once."""

    def __init__(self, output: Path, part: str, seconds: float = float("inf")):
        self.output = output
        self.end = time.monotonic() + seconds
        self.result: dict[str, Any] = json.loads(output.read_text())
        self.figures: dict[str, Any] = self.result["parts"][part]["figures"]

    def add(self, name: str, figure: Any) -> None:
        """Writes one figure."""
        self.figures[name] = figure
        write_record(self.output, self.result)

    def remaining_seconds(self) -> float:
        """Returns the time that the part may still take."""
        return self.end - time.monotonic()


# -------------------------------------------------------------- cells: one timed configuration each

Cell = Callable[[], Pace]


@functools.cache
def pair(setting: Setting, weights: str = "dense") -> Any:
    """A target and a head with random weights, which compute in bfloat16."""
    precision = precision_named("bfloat16")
    return random_pair(
        setting.shape, precision=precision, num_layers=setting.num_layers, weights=weights
    )


@functools.cache
def decoder_of(
    setting: Setting, draft: str, rounds_per_check: int = 1, weights: str = "dense"
) -> SpeculativeDecoder:
    """A decoder for ``plain``, ``verify N``, ``chain``, ``chain K`` or one of :data:`TREES`.

    Dice accept drafts. After ``invariant`` it is invariant.
    """
    target, head = pair(setting, weights)
    invariant = draft.startswith(INVARIANT)
    draft = draft.removeprefix(INVARIANT)
    kind, _, number = draft.partition(" ")
    if kind in ("plain", "verify"):
        return SpeculativeDecoder(
            target, Plain(int(number or 1)), stop_tokens=(), invariant=invariant
        )

    options: dict[str, Any] = {
        "stop_tokens": (),
        "rounds_per_check": rounds_per_check,
        "invariant": invariant,
    }
    if kind == "chain":
        options["num_speculative_tokens"] = int(number or CHAIN)
    else:
        options["tree"] = TREES[draft]
    return SpeculativeDecoder(target, head, verifier=SimulatedAcceptance(RATES), **options)


def sizes(setting: Setting, batch: int = 1, context: int | None = None) -> dict[str, Any]:
    """Returns prompts that fill ``context`` slots but for the largest draft, and the limit."""
    limit = setting.tokens + 1  # the first token is the prefill's
    length = (context or setting.context) - limit - LARGEST
    return {"prompts": [[1 + row] * length for row in range(batch)], "max_new_tokens": limit}


def mean_slots(setting: Setting, context: int) -> int:
    """Returns the mean number of committed slots of a row while its rounds are timed."""
    (prompt,) = sizes(setting, context=context)["prompts"]
    return len(prompt) + setting.tokens // 2


def cell(
    setting: Setting,
    draft: str,
    *,
    batch: int = 1,
    context: int | None = None,
    variant: str = "defaults",
    weights: str = "dense",
) -> Cell:
    """Returns a cell that times the rounds of a decoder."""
    rounds, compiler_options = VARIANTS[variant]
    options = sizes(setting, batch, context) | {
        "tokens": setting.tokens,
        "compiler_options": compiler_options,
    }
    return lambda: timed_rounds(decoder_of(setting, draft, rounds, weights), **options)


def measure(setting: Setting, record: Record, cells: dict[str, Cell]) -> None:
    """Times every cell and records it at once; then cells take turns.

    Ratios to the first one are recorded. Cells of an earlier run are not measured again, except the
    first, which the others are compared with.
    """
    base = next(iter(cells))
    missing = [name for name in cells if "seconds_per_round" not in record.figures.get(name, {})]
    if not missing:
        return

    names = [base, *(name for name in missing if name != base)]
    paces = time_each_once(record, {name: cells[name] for name in names})
    for _ in range(setting.repeats if paces else 0):
        start = time.monotonic()
        for name in paces:
            paces[name].append(cells[name]())
        for name in paces:
            record.add(
                name, record.figures[name] | summary(paces[name]) | ratios_to(base, name, paces)
            )
        if record.remaining_seconds() < 1.5 * (time.monotonic() - start):
            break


def time_each_once(record: Record, cells: dict[str, Cell]) -> dict[str, list[Pace]]:
    """Compiles and times every cell. Returns the paces, without failed and skipped ones."""
    paces: dict[str, list[Pace]] = {}
    longest = 0.0
    for name, run in cells.items():
        if record.remaining_seconds() < 1.2 * longest:  # the next one will take no less
            record.add(name, {"skipped": "no time was left; run the command again"})
            continue

        start = time.monotonic()
        try:
            with CompileClock() as clock:
                run()
            run()  # command buffers are recorded at the second run
            paces[name] = [run()]
            record.add(name, {"compile_seconds": clock.seconds} | summary(paces[name]))
            print(f"  {name}: {1e3 * paces[name][0].seconds_per_round:.3f} ms a round", flush=True)
        except Exception as error:
            record.add(name, failure(error))

        longest = max(longest, time.monotonic() - start)
    return paces


def summary(paces: list[Pace]) -> dict[str, Any]:
    return {
        "seconds_per_round": spread_of(pace.seconds_per_round for pace in paces),
        "tokens_per_second": spread_of(pace.tokens_per_second for pace in paces),
        "rounds": paces[-1].rounds,
        "tokens": paces[-1].tokens,
    }


def ratios_to(base: str, name: str, paces: dict[str, list[Pace]]) -> dict[str, Any]:
    """Returns round and speed of a cell over those of the first cell in the same turn."""
    if base not in paces:
        return {}
    pairs = list(zip(paces[name][1:], paces[base][1:], strict=True))
    return {
        "round_in_bases": spread_of(
            ours.seconds_per_round / first.seconds_per_round for ours, first in pairs
        ),
        "speed_in_bases": spread_of(
            ours.tokens_per_second / first.tokens_per_second for ours, first in pairs
        ),
    }


# ---------------------------------------------------------------- parts


def device(setting: Setting, record: Record) -> None:
    """Records the device, the error of a float32 product, and the bytes per second of memory."""
    record.add("environment", environment())
    factors = np.random.default_rng(0).standard_normal((2, 512, 512), np.float32)
    exact = np.matmul(*factors.astype(np.float64))
    as_in_the_library = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    product = np.asarray(jax.jit(as_in_the_library)(*factors), np.float64)
    error = np.abs(product - exact).max() / np.sqrt((exact**2).mean())
    record.add("error of float32", float(error))  # 1e-6 is float32, 1e-3 TensorFloat-32
    record.add("bytes_per_second", bandwidths(setting.stream))


def text(setting: Setting, record: Record) -> None:
    """Compares the shipped pair's text in float32 with its head and without."""
    target = load_target(dtype="float32")
    prompt = "def read_config(filename):\n"
    new = setting.tokens + 2
    chain = SpeculativeDecoder(
        target, load_drafter(target=target), num_speculative_tokens=CHAIN, stop_tokens=()
    )
    plain = SpeculativeDecoder(target, stop_tokens=()).generate(prompt, max_new_tokens=new)
    ours = chain.generate(prompt, max_new_tokens=new)
    record.add("same text", plain.tokens == ours.tokens)
    record.add("mean_acceptance_length", ours.stats.mean_acceptance_length)


def weights(setting: Setting, record: Record) -> None:
    """Times a plain step, a round and a verification with kernels in bfloat16, FP8 and int8."""
    measured = record.result["parts"].get("device", {}).get("figures", {}).get("bytes_per_second")
    record.add("copy_bytes_per_second", (measured or bandwidths(setting.stream))["copy"])

    targets = {name: pair(setting, stored)[0] for name, stored in WEIGHTS.items()}
    slots = mean_slots(setting, setting.context)
    for name, context in (("weight_bytes", 0), ("step_bytes", slots)):
        record.add(
            name,
            {kind: step_bytes(target, rows=1, context=context) for kind, target in targets.items()},
        )

    # Verification comes last, because the time may not suffice for all nine programs.
    cells = {
        f"{kind}, {draft}": cell(setting, draft, weights=stored)
        for draft in ("plain", "chain", f"verify {NODES}")
        for kind, stored in WEIGHTS.items()
    }
    measure(setting, record, cells)


def bits_(setting: Setting, record: Record) -> None:
    """Decides why the bits of a chain and of plain decoding differ, and keeps the programs."""
    from validation import bits

    # A rehearsal tries the failing cell and the remedy.
    rehearsed: dict[str, Any] = {
        "tokens": 8,
        "comparisons": (bits.FAILING, "invariant: chain of 3 and plain"),
    }
    options = rehearsed if setting is REHEARSAL else {}

    def add(name: str, result: Mapping[str, Any]) -> None:
        record.add(name, result)
        print(f"  {name}: {bits.in_words(result)}", flush=True)

    bits.decide(add, record.output.with_suffix(".programs"), **options)


def invariant(setting: Setting, record: Record) -> None:
    """Times plain steps, verification and rounds of a chain with invariant decoding and without."""
    for batch in (1, *setting.batches[:2]):
        drafts = ("plain", f"verify {NODES}", "chain")[: 3 if batch == 1 else 2]
        both = [name for draft in drafts for name in (draft, INVARIANT + draft)]
        measure(
            setting,
            record,
            {f"batch {batch}, {draft}": cell(setting, draft, batch=batch) for draft in both},
        )


def tiles(setting: Setting, record: Record) -> None:
    """Times the products of all layers by XLA, and by the invariant kernel with several tiles."""
    matrices = [
        leaf for leaf in jax.tree.leaves(pair(setting)[0].params["blocks"]) if leaf.ndim == 2
    ]

    interpret = jax.default_backend() == "cpu"  # a rehearsal

    for count in (1, NODES, LARGEST):
        rows = jnp.ones((count, max(map(len, matrices))), jnp.bfloat16)
        cells = {f"{count} rows, XLA": products(jnp.matmul, matrices, rows)}
        for name, tile in TILES.items():
            by_kernel = functools.partial(
                product_by_kernel, dtype=jnp.bfloat16, tile=tile, interpret=interpret
            )
            cells[f"{count} rows, {name}"] = products(by_kernel, matrices, rows)
        measure(setting, record, cells)


def products(multiply: Callable[[Any, Any], Any], matrices: list[Any], rows: Any) -> Cell:
    """Returns a cell that times one product of ``rows`` with every matrix."""

    @jax.jit
    def run(matrices: list[Any], rows: Any) -> list[Any]:
        return [multiply(rows[:, : len(matrix)], matrix) for matrix in matrices]

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(matrices, rows))
        return time.perf_counter() - start

    return lambda: Pace(statistics.median(seconds() for _ in range(8)), 1, 1)


def round_(setting: Setting, record: Record) -> None:
    """Times a plain step, a verification, a chain's round, its target and its head, then trees."""
    target, _ = pair(setting)
    record.add(
        "step_bytes", step_bytes(target, rows=1, context=mean_slots(setting, setting.context))
    )
    cells = {name: cell(setting, name) for name in ("plain", f"verify {NODES}", "chain")}
    cells["target alone"] = part_of_round(setting, target_seconds)
    cells["draft step"] = part_of_round(setting, draft_seconds)
    measure(setting, record, cells | {draft: cell(setting, draft) for draft in setting.drafts[2:]})


def part_of_round(setting: Setting, seconds: Callable[..., float]) -> Cell:
    """Returns a cell that times a part of a chain's round, averaged over rounds."""
    averaged = sizes(setting) | {"rounds": min(16, setting.tokens // 3)}
    return lambda: Pace(seconds(decoder_of(setting, "chain"), **averaged), 1, 1)


def verify(setting: Setting, record: Record) -> None:
    """Times verification of 1, 2, ... tokens."""
    measure(setting, record, {f"verify {n}": cell(setting, f"verify {n}") for n in setting.nodes})


def variants(setting: Setting, record: Record) -> None:
    """Times rounds of a chain with options of the compiler and of the loop."""
    measure(
        setting, record, {name: cell(setting, "chain", variant=name) for name in setting.variants}
    )


def batches(setting: Setting, record: Record) -> None:
    """Times chains, trees and plain decoding for several batch sizes."""
    for size in setting.batches:
        measure(
            setting,
            record,
            {
                f"batch {size}, {draft}": cell(setting, draft, batch=size)
                for draft in setting.drafts
            },
        )


def contexts(setting: Setting, record: Record) -> None:
    """Times plain steps and verification for several sizes of the caches."""
    for slots in setting.contexts:
        drafts = ("plain", f"verify {NODES}")
        measure(
            setting,
            record,
            {f"{slots} slots, {draft}": cell(setting, draft, context=slots) for draft in drafts},
        )


def compilation(setting: Setting, record: Record) -> None:
    """Times tracing, lowering and compiling the rounds of a chain."""
    with CompileClock() as clock:
        cell(setting, "chain")()
    record.add("compile_seconds", clock.seconds)


def profile(setting: Setting, record: Record) -> None:
    """Records the kernels of a plain step and of a round, with their times."""
    options = sizes(setting) | {
        "tokens": min(setting.tokens, 32),
        "compiler_options": WHILE_PROFILED,
    }

    for draft in ("plain", "chain"):
        decoder = decoder_of(setting, draft)
        for _ in range(2):
            timed_rounds(decoder, **options)

        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                pace = timed_rounds(decoder, **options)
            record.add(
                draft, kernels(folder, pace.rounds) | {"seconds_per_round": pace.seconds_per_round}
            )


def kernels(folder: str, rounds: int) -> dict[str, Any]:
    """Kernels of a trace, per round; the slowest 25 by name."""
    with gzip.open(glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)[0]) as file:
        events = json.load(file)["traceEvents"]
    lanes = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event.get("name") == "process_name"
    }

    seconds: dict[str, list[float]] = {}
    for event in events:
        if event.get("ph") == "X" and "GPU" in lanes.get(event["pid"], ""):
            seconds.setdefault(event["name"].rstrip("0123456789_."), []).append(
                1e-6 * event.get("dur", 0.0)
            )
    slowest = sorted(seconds, key=lambda name: -sum(seconds[name]))[:25]
    return {
        "kernels_per_round": sum(map(len, seconds.values())) / rounds,
        "kernel_seconds_per_round": sum(map(sum, seconds.values())) / rounds,
        "slowest": {
            name[:80]: [len(seconds[name]) / rounds, sum(seconds[name]) / rounds]
            for name in slowest
        },
    }


class Part(NamedTuple):
    """Figures that one process measures."""

    seconds: int  #: Time to measure, start of the process excluded.
    measure: Callable[[Setting, Record], None]
    #: Environment variables of its process.
    variables: Mapping[str, str] = types.MappingProxyType({})


# The first five fit into one command.
PARTS = {
    "device": Part(40, device),
    # With the cache its second compilation would be the first.
    "bits": Part(150, bits_, {"JAX_ENABLE_COMPILATION_CACHE": "false"}),
    "text": Part(35, text),
    "weights": Part(100, weights),
    "invariant": Part(120, invariant),
    "tiles": Part(160, tiles),
    "round": Part(210, round_),
    "verify": Part(75, verify),
    "variants": Part(120, variants),
    "batches": Part(200, batches),
    "contexts": Part(80, contexts),
    "contexts, attention by XLA": Part(80, contexts, {"EAGLE3_ATTENTION": "xla"}),
    "profile": Part(50, profile),
    "compilation, nothing kept": Part(60, compilation, {"JAX_ENABLE_COMPILATION_CACHE": "false"}),
    "compilation, programs kept": Part(30, compilation),
}


def clocks() -> str | None:
    """Clocks, temperature, power and throttling of the GPU; ``None`` without a driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = (
        "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    )
    return subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()


# ---------------------------------------------------------------- all parts


def main() -> None:
    """Measures what is missing and prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("h200.json"))
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), metavar="PART", help=f"Of: {', '.join(PARTS)}."
    )
    parser.add_argument(
        "--again", action="store_true", help="Measure parts that are done already, too."
    )
    parser.add_argument("--rehearse", action="store_true", help="Tiny shapes, on any device.")
    parser.add_argument(
        "--compilation-cache", metavar="DIR", help="Directory of compiled programs, or none."
    )
    # Seconds: runs the one part in this process.
    parser.add_argument("--within", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    setting = REHEARSAL if options.rehearse else FULL
    if options.within is not None:
        (name,) = options.only
        measure_part(name, setting, options)
        return

    # The memory is for the processes of the parts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not options.rehearse and (problem := gpu_problem(required=True)):
        raise SystemExit(f"error: {problem}; --rehearse tries tiny shapes on any device")
    conditions = {
        "schema": SCHEMA,
        "rehearsal": options.rehearse,
        "shape": setting.shape,
        "code": sha256_of_code(),
    }
    try:
        result = read_record(options.output, conditions) or conditions | {"parts": {}, "ratios": {}}
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None

    end = time.monotonic() + BUDGET
    for name in options.only or PARTS:
        earlier = result["parts"].get(name, {})
        if earlier.get("status") == "done" and not options.again:
            continue
        figures = {} if options.again else earlier.get("figures", {})
        result["parts"][name] = {"status": "cut off", "figures": figures}
        write_record(options.output, result)
        status = run_part(name, options, end)
        result = json.loads(options.output.read_text())
        result["parts"][name]["status"] = status
        result["ratios"] = ratios(result["parts"])
        write_record(options.output, result)
    print(shown(result))


def measure_part(name: str, setting: Setting, options: argparse.Namespace) -> None:
    """Measures a part in this process, between two readings of the clocks."""
    keep_compiled_programs(options.compilation_cache)
    record = Record(options.output, name, options.within)
    before = clocks()
    PARTS[name].measure(setting, record)
    record.add("clocks", [before, clocks()])


def run_part(name: str, options: argparse.Namespace, end: float) -> str:
    """Runs a part in its own process until a limit. Returns how it ended."""
    part = PARTS[name]
    remaining = end - time.monotonic() - START - ROOM
    seconds = min(part.seconds * (4 if options.rehearse else 1), remaining)
    if seconds < LEAST:
        return "not run: the budget was spent; run the command again"

    command = [sys.executable, __file__, "--output", str(options.output), "--only", name]
    command += ["--within", f"{seconds:.0f}", *["--rehearse"] * options.rehearse]
    if options.compilation_cache is not None:
        command += ["--compilation-cache", options.compilation_cache]
    limit = seconds + START + ROOM
    print(f"{name}, at most {limit:.0f} s", flush=True)
    variables = os.environ | dict(part.variables)
    try:
        process = subprocess.run(
            command, env=variables, stderr=subprocess.PIPE, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return f"cut off after {limit:.0f} s; run the command again"

    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"it ended with code {process.returncode}"]
        return f"failed: {lines[-1][:300]}"
    figures = json.loads(options.output.read_text())["parts"][name]["figures"].values()
    skipped = sum(isinstance(figure, dict) and "skipped" in figure for figure in figures)
    return f"in part: no time for {skipped} cells; run the command again" if skipped else "done"


def ratios(parts: dict[str, Any]) -> dict[str, float]:
    """Returns the figures that `docs/gpu.md` states an aim for, as far as they were measured."""
    figures = collections.defaultdict(dict, {name: part["figures"] for name, part in parts.items()})
    rounds = figures["round"]
    timed = {
        name: figure
        for name, figure in rounds.items()
        if isinstance(figure, dict) and "rounds" in figure
    }
    seconds = {name: figure["seconds_per_round"]["median"] for name, figure in timed.items()}

    results = ratios_of_weights(figures["weights"])
    if "same text" in figures["text"]:
        results["same text"] = figures["text"]["same text"]
    if "plain" in seconds and "bytes_per_second" in figures["device"]:
        copied = figures["device"]["bytes_per_second"]["copy"]
        results["plain share of copy"] = rounds["step_bytes"] / seconds["plain"] / copied
    if seconds.keys() >= {"plain", f"verify {NODES}"}:
        results["verify in plain steps"] = seconds[f"verify {NODES}"] / seconds["plain"]
    if seconds.keys() >= {"chain", "target alone", "draft step"}:
        target_and_head = seconds["target alone"] + CHAIN * seconds["draft step"]
        results["share outside target and head"] = 1 - target_and_head / seconds["chain"]
    return results


def ratios_of_weights(figures: dict[str, Any]) -> dict[str, float]:
    """Returns speeds of plain decoding in those of bfloat16, and shares of a copy's bandwidth."""
    results = {}
    for kind in WEIGHTS:
        plain = figures.get(f"{kind}, plain", {})
        if "rounds" in plain:
            read = figures["step_bytes"][kind] / plain["seconds_per_round"]["median"]
            results[f"{kind}, plain share of copy"] = read / figures["copy_bytes_per_second"]
        if kind != "bfloat16" and "speed_in_bases" in plain:
            results[f"{kind}, plain in speeds of bfloat16"] = plain["speed_in_bases"]["median"]
    return results


def shown(result: dict[str, Any]) -> str:
    """Returns the result as text: ratios, cells, and the status of the parts."""
    lines = [
        "",
        f"{result['shape']}, random weights, bfloat16"
        + ", a REHEARSAL: nothing counts" * result["rehearsal"],
    ]
    lines += [f"  {name}: {value:.3f}" for name, value in result["ratios"].items()]

    cells = []
    for part, measured in result["parts"].items():
        for name, figure in measured["figures"].items():
            if not isinstance(figure, dict) or not figure.keys() & {"failed", "rounds"}:
                continue
            in_bases = [
                figure.get(f"{kind}_in_bases", {}).get("median") for kind in ("round", "speed")
            ]
            milliseconds = (
                1e3 * figure["seconds_per_round"]["median"]
                if "rounds" in figure
                else figure["failed"][:100]
            )
            cells.append([part, name, *map(show, (milliseconds, *in_bases, figure.get("rounds")))])
    lines += [
        "",
        to_markdown(
            ["part", "cell", "ms a round", "in first rounds", "in first speeds", "calls"], cells
        ),
        "",
    ]
    lines += [f"{name}: {part['status']}" for name, part in result["parts"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
