"""Trace a generation once, keep it as a file, and run it in a process that has no model code and traces nothing.

    python examples/export.py            # writes, runs in a fresh process, compares with the decoder

The file runs on every platform it was lowered for; the hardware need not be there when it is written. The weights are
arguments by name, so one file serves all checkpoints of a shape. Nothing is donated: a whole generation makes its
caches itself and is handed none. Needs `flatbuffers` (the extra `export`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPT = "def fibonacci(n):\n"


def write(folder: Path) -> dict[str, list[int]]:
    """The program and the weights of the bundled pair; returns a prompt with the decoder's own continuation."""
    import numpy as np
    from safetensors.numpy import save_file

    import eagle3_jax as e3
    from eagle3_jax.export import export_generation, parameters_of

    target = e3.load_target()
    decoder = e3.SpeculativeDecoder(target, e3.load_drafter(target=target), num_speculative_tokens=5)
    exported = export_generation(decoder, prompt_tokens=128, max_new_tokens=64, platforms=("cpu", "cuda"))
    exported.save(folder / "generation.zip")
    save_file({name: np.asarray(leaf) for name, leaf in parameters_of(decoder).items()}, folder / "weights.safetensors")
    prompt = decoder.encode(PROMPT)
    return {"prompt": prompt, "expected": decoder.generate(prompt, max_new_tokens=64).tokens[0]}


def read(folder: Path, prompt: list[int]) -> list[int]:
    """The continuation that the file writes."""
    import jax
    from safetensors.numpy import load_file

    from eagle3_jax.export import ExportedGeneration

    generation = ExportedGeneration.load(folder / "generation.zip")
    weights = jax.device_put(load_file(folder / "weights.safetensors"))
    (row,) = generation(weights, [prompt])
    assert "flax" not in sys.modules, "the file runs without the library's models"
    return row.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--read", nargs=2, metavar=("FOLDER", "PROMPT_IDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read(Path(options.read[0]), json.loads(options.read[1]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        made = write(Path(folder))
        size = (Path(folder) / "generation.zip").stat().st_size
        command = [sys.executable, __file__, "--read", folder, json.dumps(made["prompt"])]
        tokens = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if tokens != made["expected"]:
        sys.exit("the file and the decoder disagree")
    print(f"{size:,} bytes for cpu and cuda; {len(tokens)} tokens, equal to the decoder's, from a process without Flax")


if __name__ == "__main__":
    main()
