"""What the device does apart from rounds of a large model: bytes, launches, products, one true text, a profile."""

from __future__ import annotations

import functools
import glob
import gzip
import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from h200_rounds import decoder_of, seconds_json, sizes
from h200_setting import CHAIN, LOOPS_IN_GRAPHS, NO_GRAPHS, Record, Setting

from eagle3_jax import SpeculativeDecoder, load_drafter, load_target
from eagle3_jax.cache import KeyValue, Segment, visible
from eagle3_jax.measure.random_models import shape_named
from eagle3_jax.measure.roofline import bandwidths
from eagle3_jax.measure.rounds import CompilerOptions, timed_rounds
from eagle3_jax.models.attention import attention as core_attention
from eagle3_jax.models.config import gated, grouped
from eagle3_jax.models.flash import flash_attention
from eagle3_jax.reporting.environment import environment

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
        seen = visible(jnp.tril(jnp.ones((1, fed, fed), jnp.bool_)), length, slots)
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
