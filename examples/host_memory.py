"""Memory and seconds of the host while a checkpoint is loaded and converted.

It writes a random checkpoint in bfloat16, dense or with experts, and runs each task in a process of
its own, by turns. Memory is anonymous: pages of a mapped file, which the system can drop, do not
count. Copying the file is a task, too, and so is reading all of it by safetensors::

    python examples/host_memory.py /tmp/work --gigabytes 4 --output record.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle3_jax.measure.environment import environment
from eagle3_jax.measure.records import write_record

WIDTH = 2048
INNER = 8192
VOCABULARY = 32_000
EXPERTS = 64
EXPERT_INNER = 512
TASKS = ("copy", "safetensors", "load", "convert", "load native", "convert back", "rewrite")


def main() -> None:
    """Writes the checkpoints, runs every task and prints a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="a new directory, which is removed at the end")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--kinds", nargs="+", default=["dense", "experts"])
    parser.add_argument("--repeats", type=int, default=3, help="runs of every task, by turns")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--output", type=Path, help="file for the record")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    options = parser.parse_args()

    if options.task is not None:
        print(json.dumps(run_task(options.task, options.directory)))
        return

    rows = []
    for kind in options.kinds:
        folder = options.directory / kind
        size = write_checkpoint(folder / "model", kind, options.gigabytes * 1e9)
        runs: dict[str, list[dict[str, float]]] = {task: [] for task in options.tasks}
        for _ in range(options.repeats):
            for task in options.tasks:
                runs[task].append(in_own_process(task, folder))
        shutil.rmtree(folder)

        for task, measured in runs.items():
            row = {
                "checkpoint": kind,
                "task": task,
                "gigabytes": round(size / 1e9, 2),
                "seconds": round(statistics.median(run["seconds"] for run in measured), 2),
                "peak_over_file": round(max(run["peak_bytes"] for run in measured) / size, 3),
                "repeats": len(measured),
            }
            rows.append(row)
            print(*row.values(), flush=True)

    if options.output is not None:
        record = {"environment": environment(), "tasks": rows}
        write_record(options.output, record)


def in_own_process(task: str, folder: Path) -> dict[str, float]:
    """Runs a task in a new process, and returns its seconds and bytes."""
    command = [sys.executable, __file__, str(folder), "--task", task]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def run_task(task: str, folder: Path) -> dict[str, float]:
    """Returns the seconds of a task, and the most anonymous bytes above those before it."""
    work = prepared(task, folder)
    before = anonymous_bytes()
    peak = before
    is_done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.005):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    is_done.set()
    thread.join()
    del result
    return {"seconds": seconds, "peak_bytes": peak - before}


def prepared(task: str, folder: Path) -> Callable[[], Any]:
    """Imports what a task needs, and returns the function to measure."""
    model = folder / "model"
    native = folder / "native"
    if task == "copy":
        return lambda: shutil.copyfile(model / "model.safetensors", folder / "copy")
    if task == "safetensors":
        from safetensors.numpy import load_file

        return lambda: load_file(model / "model.safetensors")

    import jax
    import orbax.checkpoint

    import eagle3_jax as e3
    from eagle3_jax.conversion import convert

    del orbax
    jax.devices()
    if task.startswith("load"):
        source = native if task == "load native" else model
        return lambda: e3.load_target(source, dtype="bfloat16")

    source, destination, layout = {
        "convert": (model, native, "jax"),
        "convert back": (native, folder / "back", "vllm"),
        "rewrite": (model, folder / "rewritten", "vllm"),
    }[task]
    shutil.rmtree(destination, ignore_errors=True)
    return lambda: convert(source, destination, layout)


def anonymous_bytes() -> int:
    """Returns the anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def write_checkpoint(directory: Path, kind: str, num_bytes: float) -> int:
    """Writes a random checkpoint of about a size; returns the bytes of its tensors."""
    directory.mkdir(parents=True)
    layer = layer_shapes(kind)
    outer = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "lm_head.weight": (VOCABULARY, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    layer_bytes = sum(map(bytes_of, layer.values()))
    count = max(1, round((num_bytes - sum(map(bytes_of, outer.values()))) / layer_bytes))
    shapes = dict(outer)
    for index in range(count):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}

    config: dict[str, Any] = {
        "model_type": "llama" if kind == "dense" else "qwen3_moe",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": count,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    if kind != "dense":
        config |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": EXPERT_INNER,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    (directory / "config.json").write_text(json.dumps(config))

    header = {}
    stop = 0
    for name, shape in shapes.items():
        start = stop
        stop += bytes_of(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    random = np.random.default_rng(0)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, stop, 2**24):
            numbers = random.normal(0, 0.02, min(2**24, stop - start) // 2)
            file.write(numbers.astype(ml_dtypes.bfloat16).tobytes())
    return stop


def layer_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of a layer."""
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (WIDTH, WIDTH),
        "self_attn.k_proj.weight": (WIDTH // 2, WIDTH),
        "self_attn.v_proj.weight": (WIDTH // 2, WIDTH),
        "self_attn.o_proj.weight": (WIDTH, WIDTH),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    mlps = {"mlp": INNER}
    if kind != "dense":
        mlps = {f"mlp.experts.{index}": EXPERT_INNER for index in range(EXPERTS)}
        shapes |= {"self_attn.q_norm.weight": (128,), "self_attn.k_norm.weight": (128,)}
        shapes["mlp.gate.weight"] = (EXPERTS, WIDTH)
    for name, inner in mlps.items():
        shapes[f"{name}.gate_proj.weight"] = (inner, WIDTH)
        shapes[f"{name}.up_proj.weight"] = (inner, WIDTH)
        shapes[f"{name}.down_proj.weight"] = (WIDTH, inner)
    return shapes


def bytes_of(shape: tuple[int, ...]) -> int:
    """Returns the bytes of a tensor in bfloat16."""
    return int(np.prod(shape)) * 2


if __name__ == "__main__":
    main()
