"""Measures what a round costs on one GPU at the shape of Llama-3.1-8B, and writes every figure to one JSON file.

    python examples/h200.py --output h200.json      # at most ten minutes; again: measures what is missing
    python examples/h200.py --output /tmp/rehearsal.json --rehearse     # tiny shapes on any device; no figure counts

The parts run in the order of their value, each in a process with a time limit. Every figure is written as soon as it is
known, so a command that is cut off loses only the cell under way. `docs/gpu.md` explains how to read the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import glob
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import DynamicTree, SimulatedAcceptance, SpeculativeDecoder, load_drafter, load_target
from eagle3_jax.bench.environment import environment, sha256_of_code
from eagle3_jax.bench.gpu import gpu_problem
from eagle3_jax.bench.random_models import random_pair
from eagle3_jax.bench.roofline import bandwidths, step_bytes
from eagle3_jax.bench.rounds import CompilerOptions, Pace, timed_rounds
from eagle3_jax.bench.step_costs import draft_seconds, target_seconds
from eagle3_jax.bench.tables import write_text
from eagle3_jax.bench.timing import CompileClock, Spread
from eagle3_jax.drafters import Plain
from eagle3_jax.files.writing import cache_directory
from eagle3_jax.load import precision_named
from eagle3_jax.verifiers.simulated import PUBLISHED_RATES

SCHEMA = 3
BUDGET = 570  # seconds of a command
LEAST = 20  # seconds in which a part can measure anything
ROOM = 10  # seconds that a part keeps before it is cut off
RATES = PUBLISHED_RATES["Llama-3.1-8B with its EAGLE-3 head on MT-Bench"]
CHAIN = 5
NODES = CHAIN + 1
TREES = {
    f"tree of {NODES}": DynamicTree(num_nodes=NODES, max_depth=4, top_k=3),  # as many tokens as the chain
    "tree of 60": DynamicTree(num_nodes=60, max_depth=7, top_k=10),
}
LARGEST = 64  # nodes of any draft: every cache has room for as many, so that all have the same size
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
    "deterministic operations": (1, {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}),
    "no command buffers": (1, {"xla_gpu_enable_command_buffer": "INVALID"}),  # a list of nothing that exists
    "defaults, again": (1, {}),  # its distance from the first row is noise
    "no autotuning": (1, {"xla_gpu_autotune_level": 0}),
    "8 rounds a check": (8, {}),
    "loops in command buffers, 4 rounds a check": (4, LOOPS_IN_GRAPHS),
    "no excess precision": (1, {"xla_allow_excess_precision": False}),
    "nondeterministic ones excluded": (1, {"xla_gpu_exclude_nondeterministic_ops": True}),
}
# Otherwise a profile takes command buffers apart and shows other launches than a run.
WHILE_PROFILED: CompilerOptions = {"xla_enable_command_buffers_during_profiling": True}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of what is measured; the most valuable ones come first, because the time may not suffice for all."""

    shape: str = "Llama-3.1-8B"
    num_layers: int | None = None
    repeats: int = 10
    tokens: int = 64
    context: int = 1024
    contexts: tuple[int, ...] = (4096, 256, 8192)
    nodes: tuple[int, ...] = (1, NODES, 4, 16, 64, 2, 8, 32)
    batches: tuple[int, ...] = (8, 32, 1, 16, 4)
    drafts: tuple[str, ...] = ("chain", "plain", "chain 3", *TREES)
    variants: tuple[str, ...] = tuple(VARIANTS)
    stream: int = 4 * 2**30  # bytes


FULL = Setting()
REHEARSAL = Setting(
    "Llama-tiny", num_layers=2, repeats=2, tokens=6, context=256, contexts=(384,), nodes=(1, NODES), batches=(2,),
    drafts=("chain", "plain", f"tree of {NODES}"), variants=("defaults", "no excess precision"), stream=2**20,
)  # fmt: skip


class Record:
    """The figures of one part. Every figure is written to the file of the whole run at once."""

    def __init__(self, output: Path, part: str, seconds: float = float("inf")):
        self.output = output
        self.part = part
        self.end = time.monotonic() + seconds
        self.figures: dict[str, Any] = read(output)["parts"][part]["figures"]

    def add(self, name: str, figure: Any) -> None:
        """Writes one figure."""
        self.figures[name] = figure
        whole = read(self.output)
        whole["parts"][self.part]["figures"] = self.figures
        write(self.output, whole)


def read(output: Path) -> dict[str, Any]:
    return json.loads(output.read_text())


def write(output: Path, result: dict[str, Any]) -> None:
    write_text(output, json.dumps(result, indent=1) + "\n")


# ---------------------------------------------------------------- cells: one timed configuration each

Cell = Callable[[], Pace]


@functools.cache
def pair(setting: Setting) -> Any:
    """A target and a head with random weights in bfloat16."""
    return random_pair(setting.shape, precision=precision_named("bfloat16"), num_layers=setting.num_layers)


@functools.cache
def decoder_of(setting: Setting, draft: str, rounds_per_check: int = 1) -> SpeculativeDecoder:
    """A decoder for ``plain``, ``verify N``, ``chain``, ``chain K`` or one of :data:`TREES`; dice accept drafts."""
    target, head = pair(setting)
    kind, _, number = draft.partition(" ")
    if kind in ("plain", "verify"):
        return SpeculativeDecoder(target, Plain(int(number or 1)), stop_tokens=())
    given: dict[str, Any] = (
        {"num_speculative_tokens": int(number or CHAIN)} if kind == "chain" else {"tree": TREES[draft]}
    )
    dice = SimulatedAcceptance(RATES)
    return SpeculativeDecoder(target, head, stop_tokens=(), verifier=dice, rounds_per_check=rounds_per_check, **given)


def sizes(setting: Setting, batch: int = 1, context: int | None = None) -> dict[str, Any]:
    """Prompts, and the limit that gives caches of ``context`` slots."""
    limit = (context or setting.context) - 8 - LARGEST
    return {"prompts": [[1 + row] * 8 for row in range(batch)], "max_new_tokens": limit}


def cell(
    setting: Setting, draft: str, *, batch: int = 1, context: int | None = None, variant: str = "defaults"
) -> Cell:
    """A cell that times the rounds of a decoder."""
    rounds, options = VARIANTS[variant]
    where = sizes(setting, batch, context)
    return lambda: timed_rounds(
        decoder_of(setting, draft, rounds), **where, tokens=setting.tokens, compiler_options=options
    )


def measure(setting: Setting, record: Record, cells: dict[str, Cell]) -> None:
    """Times every cell and records it at once; then cells take turns, and ratios to the first one are recorded.

    Cells of an earlier run are kept, except the first, which the others are compared with.
    """
    base = next(iter(cells))
    missing = [name for name in cells if "seconds_per_round" not in record.figures.get(name, {})]
    todo = [base, *(name for name in missing if name != base)] if missing else []
    turns: dict[str, list[Pace]] = {}
    longest = 0.0
    for name in todo:
        if record.end - time.monotonic() < 1.2 * longest:  # the next one will take no less
            record.add(name, {"skipped": "no time was left; run the command again"})
            continue
        start = time.monotonic()
        try:
            with CompileClock() as clock:
                cells[name]()
            cells[name]()  # command buffers are recorded at the second run
            turns[name] = [cells[name]()]
            record.add(name, {"compile_seconds": clock.seconds} | summary(turns[name]))
            print(f"  {name}: {1e3 * turns[name][0].seconds_per_round:.3f} ms a round", flush=True)
        except Exception as error:
            record.add(name, {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
        longest = max(longest, time.monotonic() - start)
    for _ in range(setting.repeats if turns else 0):
        start = time.monotonic()
        for name in turns:
            turns[name].append(cells[name]())
        for name, paces in turns.items():
            figure = record.figures[name] | summary(paces)
            if base in turns:  # of the runs in turns, which are neighbors in time
                ours = summary(paces[1:])
                theirs = summary(turns[base][1:])
                for ratio, kind in (("round_in_bases", "seconds_per_round"), ("speed_in_bases", "tokens_per_second")):
                    figure[ratio] = spread(np.divide(ours[kind]["values"], theirs[kind]["values"]).tolist())
            record.add(name, figure)
        if record.end - time.monotonic() < 1.5 * (time.monotonic() - start):
            break


def summary(paces: list[Pace]) -> dict[str, Any]:
    return {
        "seconds_per_round": spread([one.seconds_per_round for one in paces]),
        "tokens_per_second": spread([one.tokens_per_second for one in paces]),
        "rounds": paces[-1].rounds,
        "tokens": paces[-1].tokens,
    }


def spread(values: list[float]) -> dict[str, Any]:
    """Median, quartiles and every value."""
    return vars(Spread.of(values)) | {"values": values}


# ---------------------------------------------------------------- parts


def device(setting: Setting, record: Record) -> None:
    """Records the device, the error of a float32 product, and the bytes per second of memory."""
    record.add("environment", environment())
    left, right = np.random.default_rng(0).standard_normal((2, 512, 512), np.float32)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    error = np.abs(np.asarray(jax.jit(jnp.matmul)(left, right), np.float64) - exact).max() / np.sqrt((exact**2).mean())
    record.add("error of float32", float(error))  # 1e-6 is float32, 1e-3 TensorFloat-32
    record.add("bytes_per_second", bandwidths(setting.stream))


def text(setting: Setting, record: Record) -> None:
    """Compares the shipped pair's text in float32 with its head and without."""
    target = load_target(dtype="float32")
    prompt = "def read_config(filename):\n"
    new = setting.tokens + 2
    chain = SpeculativeDecoder(target, load_drafter(target=target), num_speculative_tokens=CHAIN, stop_tokens=())
    plain = SpeculativeDecoder(target, stop_tokens=()).generate(prompt, max_new_tokens=new)
    ours = chain.generate(prompt, max_new_tokens=new)
    record.add("same text", plain.tokens == ours.tokens)
    record.add("mean_acceptance_length", ours.stats.mean_acceptance_length)


def round_(setting: Setting, record: Record) -> None:
    """Times a plain step, a verification, a round of a chain, its target and its head alone, then trees."""
    record.add("step_bytes", step_bytes(pair(setting)[0], rows=1, context=setting.context))
    averaged = sizes(setting) | {"rounds": min(16, setting.tokens // 3)}
    cells: dict[str, Cell] = {name: cell(setting, name) for name in ("plain", f"verify {NODES}", "chain")}
    cells["target alone"] = lambda: Pace(target_seconds(decoder_of(setting, "chain"), **averaged), 1, 1)
    cells["draft step"] = lambda: Pace(draft_seconds(decoder_of(setting, "chain"), **averaged), 1, 1)
    measure(setting, record, cells | {draft: cell(setting, draft) for draft in setting.drafts[2:]})


def verify(setting: Setting, record: Record) -> None:
    """Times verification of 1, 2, ... tokens."""
    measure(setting, record, {f"verify {n}": cell(setting, f"verify {n}") for n in setting.nodes})


def variants(setting: Setting, record: Record) -> None:
    """Times rounds of a chain with options of the compiler and of the loop."""
    measure(setting, record, {name: cell(setting, "chain", variant=name) for name in setting.variants})


def batches(setting: Setting, record: Record) -> None:
    """Times chains, trees and plain decoding for several batch sizes."""
    for size in setting.batches:
        measure(setting, record, {f"batch {size}, {one}": cell(setting, one, batch=size) for one in setting.drafts})


def contexts(setting: Setting, record: Record) -> None:
    """Times plain steps and verification for several sizes of the caches."""
    for slots in setting.contexts:
        drafts = ("plain", f"verify {NODES}")
        measure(setting, record, {f"{slots} slots, {one}": cell(setting, one, context=slots) for one in drafts})


def compilation(setting: Setting, record: Record) -> None:
    """Times tracing, lowering and compiling the rounds of a chain."""
    with CompileClock() as clock:
        cell(setting, "chain")()
    record.add("compile_seconds", clock.seconds)


def profile(setting: Setting, record: Record) -> None:
    """Records the kernels of a plain step and of a round, with their times."""
    for draft in ("plain", "chain"):
        where = sizes(setting) | {"tokens": min(setting.tokens, 32), "compiler_options": WHILE_PROFILED}
        for _ in range(2):
            timed_rounds(decoder_of(setting, draft), **where)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                pace = timed_rounds(decoder_of(setting, draft), **where)
            record.add(draft, kernels(folder, pace.rounds) | {"seconds_per_round": pace.seconds_per_round})


def kernels(folder: str, rounds: int) -> dict[str, Any]:
    """Kernels of a trace, per round; the slowest 25 by name."""
    with gzip.open(glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)[0]) as file:
        events = json.load(file)["traceEvents"]
    lanes = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    seconds: dict[str, list[float]] = {}
    for event in events:
        if event.get("ph") == "X" and "GPU" in lanes.get(event["pid"], ""):
            seconds.setdefault(event["name"].rstrip("0123456789_."), []).append(1e-6 * event.get("dur", 0.0))
    slowest = sorted(seconds, key=lambda name: -sum(seconds[name]))[:25]
    return {
        "kernels_per_round": sum(map(len, seconds.values())) / rounds,
        "kernel_seconds_per_round": sum(map(sum, seconds.values())) / rounds,
        "slowest": {name[:80]: [len(seconds[name]) / rounds, sum(seconds[name]) / rounds] for name in slowest},
    }


XLA_ATTENTION = {"EAGLE3_ATTENTION": "xla"}
# Seconds at most, the function, and variables of its process. The first five fit into one command.
PARTS: dict[str, tuple[int, Callable[[Setting, Record], None], dict[str, str]]] = {
    "device": (60, device, {}),
    "text": (50, text, {}),
    "round": (230, round_, {}),
    "verify": (90, verify, {}),
    "variants": (140, variants, {}),
    "batches": (220, batches, {}),
    "contexts": (80, contexts, {}),
    "contexts, attention by XLA": (80, contexts, XLA_ATTENTION),
    "profile": (60, profile, {}),
    "compilation, nothing kept": (70, compilation, {"JAX_ENABLE_COMPILATION_CACHE": "false"}),
    "compilation, programs kept": (40, compilation, {}),
}


def clocks() -> str | None:
    """Clocks, temperature, power and throttling of the GPU; ``None`` without a driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    return subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True).stdout.strip()


# ---------------------------------------------------------------- the whole run


def main() -> None:
    """Measures what is missing and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("h200.json"))
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=f"Of: {', '.join(PARTS)}.")
    parser.add_argument("--again", action="store_true", help="Measure parts that are done already, too.")
    parser.add_argument("--rehearse", action="store_true", help="Tiny shapes, on any device.")
    parser.add_argument("--compilation-cache", type=Path, default=cache_directory("compiled"), metavar="DIR")
    parser.add_argument("--within", type=float, help=argparse.SUPPRESS)  # seconds: run the one part in this process
    given = parser.parse_args()
    setting = REHEARSAL if given.rehearse else FULL
    if given.within is not None:
        record = Record(given.output, given.only[0], given.within)
        before = clocks()
        PARTS[given.only[0]][1](setting, record)
        return record.add("clocks", [before, clocks()])
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the memory is for the processes of the parts
    if not given.rehearse and (problem := gpu_problem(wanted=True)):
        raise SystemExit(f"error: {problem}; --rehearse tries tiny shapes on any device")
    end = time.monotonic() + BUDGET
    result = begin(given.output, setting, rehearsal=given.rehearse)
    for name in given.only or PARTS:
        old = result["parts"].get(name, {})
        if old.get("status") == "done" and not given.again:
            continue
        result["parts"][name] = {"status": "cut off", "figures": {} if given.again else old.get("figures", {})}
        write(given.output, result)
        ended = run_part(name, given, end)
        result = read(given.output)
        result["parts"][name] |= ended
        result["ratios"] = ratios(result["parts"])
        write(given.output, result)
    print(shown(result))


def begin(output: Path, setting: Setting, *, rehearsal: bool) -> dict[str, Any]:
    """An earlier run of the same code, or a new record."""
    new = {"schema": SCHEMA, "rehearsal": rehearsal, "shape": setting.shape, "code": sha256_of_code()}
    if not output.exists():
        return new | {"parts": {}, "ratios": {}}
    try:
        old = read(output)
        other = [key for key in new if old.get(key) != new[key]]
    except (ValueError, AttributeError):
        other = ["kind"]
    if other:
        raise SystemExit(f"error: {output} holds a run of another {', '.join(other)}; give another --output")
    return old


def run_part(name: str, given: argparse.Namespace, end: float) -> dict[str, Any]:
    """Runs a part in its own process until its limit or the end of the budget, and says how it ended."""
    most, _, variables = PARTS[name]
    limit = min(most * (4 if given.rehearse else 1), end - time.monotonic())
    if limit < LEAST:
        return {"status": "not run: the budget was spent; run the command again"}
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | variables | {"PYTHONPATH": os.pathsep.join(paths)}
    if given.compilation_cache is not None:
        environ["JAX_COMPILATION_CACHE_DIR"] = str(given.compilation_cache)
        environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    command = [sys.executable, __file__, "--output", str(given.output), "--only", name]
    command += ["--within", f"{limit - ROOM:.0f}", *["--rehearse"] * given.rehearse]
    print(f"{name}, at most {limit:.0f} s", flush=True)
    try:
        done = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"status": f"cut off after {limit:.0f} s; run the command again"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        return {"status": f"failed: {lines[-1][:300]}"}
    figures = read(given.output)["parts"][name]["figures"].values()
    skipped = sum(isinstance(figure, dict) and "skipped" in figure for figure in figures)
    return {"status": f"in part: no time for {skipped} cells; run the command again" if skipped else "done"}


def ratios(parts: dict[str, Any]) -> dict[str, float]:
    """The figures that `docs/gpu.md` states an aim for, as far as they were measured."""
    figures = {name: part["figures"] for name, part in parts.items()}
    found = {"same text": figures["text"]["same text"]} if figures.get("text") else {}
    cells = figures.get("round", {})
    timed = {name: one for name, one in cells.items() if isinstance(one, dict) and "seconds_per_round" in one}
    seconds = {name: one["seconds_per_round"]["median"] for name, one in timed.items()}
    if "plain" in seconds and "bytes_per_second" in figures.get("device", {}):
        copied = figures["device"]["bytes_per_second"]["copy"]
        found["plain share of copy"] = cells["step_bytes"] / seconds["plain"] / copied
    if seconds.keys() >= {"plain", f"verify {NODES}"}:
        found["verify in plain steps"] = seconds[f"verify {NODES}"] / seconds["plain"]
    if seconds.keys() >= {"chain", "target alone", "draft step"}:
        parts_alone = seconds["target alone"] + CHAIN * seconds["draft step"]
        found["share outside target and head"] = 1 - parts_alone / seconds["chain"]
    return found


def shown(result: dict[str, Any]) -> str:
    """The result as text: ratios, cells, and the parts that are not done."""
    lines = ["", f"{result['shape']}, random weights, bfloat16" + ", a REHEARSAL: nothing counts" * result["rehearsal"]]
    lines += [f"  {name}: {value:.3f}" for name, value in result["ratios"].items()]
    lines += ["", "cell: ms a round; rounds and tokens/s in those of the first cell; calls of the target"]
    for part, one in result["parts"].items():
        for name, figure in one["figures"].items():
            if not isinstance(figure, dict):
                continue
            if "failed" in figure:
                lines.append(f"  {part}: {name:44} failed: {figure['failed'][:100]}")
            elif "rounds" in figure:
                ms = 1e3 * figure["seconds_per_round"]["median"]
                kinds = ("round_in_bases", "speed_in_bases")
                in_bases = " ".join(f"{figure.get(kind, {}).get('median', float('nan')):7.3f}" for kind in kinds)
                lines.append(f"  {part}: {name:44} {ms:9.3f} {in_bases} {figure['rounds']:4}")
    return "\n".join([*lines, *(f"{name}: {part['status']}" for name, part in result["parts"].items())])


if __name__ == "__main__":
    main()
