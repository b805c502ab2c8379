"""How much memory of the host a divided target takes while it is loaded, shown with random weights.

    python examples/sharded_load.py                                  # 0.5 GB over 8 virtual devices of this CPU
    python examples/sharded_load.py --gigabytes 2 --mesh model=4,data=2
    python examples/sharded_load.py --gigabytes 2 --mesh none        # one device

Writes a checkpoint of bfloat16 weights in the layout of Hugging Face, and loads it in a fresh process that watches its
own memory (Linux: RssAnon, what is its alone; pages of mapped files are the system's, which takes them back when it
needs them). On virtual devices the shards themselves lie in the memory of the host, so what counts is by how much the
peak lies above what stays.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

WIDTH, HEADS, KV_HEADS, INNER, VOCAB = 2048, 16, 8, 5632, 32_000
_LAYER = WIDTH * (2 * WIDTH + 2 * WIDTH // 2 + 3 * INNER)  # weights of one


def write(folder: Path, gigabytes: float) -> int:
    """A Llama of about this size, on disk; returns the bytes of its largest array as it is stored."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * VOCAB * WIDTH) / _LAYER))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS, "vocab_size": VOCAB,
        "num_key_value_heads": KV_HEADS, "num_hidden_layers": layers, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    half = WIDTH * KV_HEADS // HEADS
    shapes = {"model.embed_tokens": (VOCAB, WIDTH), "lm_head": (VOCAB, WIDTH), "model.norm": (WIDTH,)}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
                "self_attn.k_proj": (half, WIDTH), "self_attn.v_proj": (half, WIDTH),
                "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH),
                "mlp.down_proj": (WIDTH, INNER), "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
            }.items()
        }  # fmt: skip
    rng = np.random.default_rng(0)
    draw = lambda shape: (rng.standard_normal(shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    save_file({f"{name}.weight": draw(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return 2 * max(VOCAB * WIDTH, 2 * INNER * WIDTH)


def load(folder: Path, mesh: str, dtype: str) -> dict[str, float]:
    """Megabytes that the process has for itself: before, at most, and after loading."""
    import jax

    import eagle3_jax as e3

    devices = None if mesh == "none" else e3.make_mesh(mesh)
    e3.load_target()  # whatever the first load of all brings along
    seen, done = [_private()], threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(_private())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    target = e3.load_target(folder, dtype=dtype, mesh=devices)
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(target.params) for shard in leaf.addressable_shards)
    return {"before": seen[0], "peak": max(seen), "after": _private(), "on devices": held / 1e6, "seconds": seconds}


def _private() -> float:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "this needs Linux"
    return int(found[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--mesh", default="model=4,data=2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(load(Path(options.load), options.mesh, options.dtype)))
        return
    devices = 1
    for size in re.findall(r"\d+", options.mesh):
        devices *= int(size)
    with tempfile.TemporaryDirectory() as folder:
        largest = write(Path(folder), options.gigabytes) / 1e6
        stored = (Path(folder) / "model.safetensors").stat().st_size / 1e6
        command = [sys.executable, __file__, "--load", folder, "--mesh", options.mesh, "--dtype", options.dtype]
        flags = f"--xla_force_host_platform_device_count={devices}"
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{stored:,.0f} MB on disk in bfloat16, the largest array {largest:,.0f} MB; loaded as {options.dtype}")
    print(f"mesh {options.mesh}: {found['on devices']:,.0f} MB on {devices} devices after {found['seconds']:.1f} s")
    print(
        "private memory of the process: "
        + ", ".join(f"{name} {found[name]:,.0f} MB" for name in found if name in ("before", "peak", "after"))
    )
    print(f"at the peak {found['peak'] - found['after']:,.0f} MB above what stays")


if __name__ == "__main__":
    main()
