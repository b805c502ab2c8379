"""A published chat model in this library and in llama.cpp, which read the same file; they take turns on its prompts.

    python -m venv llama && llama/bin/pip install llama-cpp-python      # compiles llama.cpp: ten minutes of two cores
    python examples/llama_cpp.py mt_bench.jsonl humaneval.jsonl gsm8k.jsonl --llama-python llama/bin/python

Greedy, batch 1, stop tokens ignored. llama.cpp runs in a process of its own with a thread for each
core, once on the weights of the file and once on a copy of them in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import eagle3_jax as e3
from eagle3_jax.bench.contenders import Contender, DecoderContender, Run, Tokens
from eagle3_jax.bench.run import measure
from eagle3_jax.drafters import NGram
from eagle3_jax.files.sources import locate
from eagle3_jax.measure.environment import environment
from eagle3_jax.measure.records import write_record
from eagle3_jax.prompts.benchmark import in_turn, read_prompts

LENGTH = 3  # of a draft
# What the other interpreter runs: a line of token ids in, a line of seconds and new token ids out.
LLAMA = """
import ctypes, json, os, sys, time
import llama_cpp
path, copy = sys.argv[1:]
if copy:
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype, how.allow_requantize = 0, True
    if llama_cpp.llama_model_quantize(path.encode(), copy.encode(), ctypes.byref(how)):
        sys.exit("llama.cpp could not write the weights in float32")
cores = len(os.sched_getaffinity(0))
model = llama_cpp.Llama(copy or path, n_ctx=2048, n_threads=cores, n_threads_batch=cores, verbose=False)
print(llama_cpp.__version__, flush=True)
for line in sys.stdin:
    prompt, count = json.loads(line)
    model.reset()
    start = time.perf_counter()
    model.eval(prompt)
    tokens = [model.sample(temp=0.0)]
    prefilled = time.perf_counter()
    while len(tokens) < count:
        model.eval(tokens[-1:])
        tokens.append(model.sample(temp=0.0))
    print(json.dumps([prefilled - start, time.perf_counter() - prefilled, tokens]), flush=True)
"""


class LlamaContender(Contender):
    """llama.cpp in a process of another interpreter."""

    largest_batch = 1

    def __init__(self, name: str, dtype: str, python: Path, path: Path, copy: str = ""):
        """Loads a GGUF file.

        Args:
            name: Name in the report.
            dtype: Precision in the report.
            python: Interpreter with llama-cpp-python.
            path: The file.
            copy: Where to write a copy in float32 that is loaded instead; empty for the file
                itself.
        """
        self.name = name
        self.dtype = dtype
        command = [str(python), "-c", LLAMA, str(path), copy]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version = self._line()

    def run(self, prompts: Sequence[Tokens], max_new_tokens: int) -> Run:
        """Decodes the one prompt of a batch."""
        assert self._process.stdin is not None
        print(json.dumps([prompts[0], max_new_tokens]), file=self._process.stdin, flush=True)
        prefill_seconds, decode_seconds, tokens = json.loads(self._line())
        return Run(prefill_seconds, decode_seconds, [tokens])

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(
                f"error: llama.cpp ended with exit code {self._process.wait()}; its message is"
                " above"
            )
        return line


def main() -> None:
    """Measures every contender and writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", nargs="+", type=Path, help="JSONL files, one a task")
    parser.add_argument(
        "--llama-python", type=Path, required=True, help="Interpreter with llama-cpp-python"
    )
    parser.add_argument(
        "--target", default="smollm2", help="Name of a published model  [default: smollm2]"
    )
    parser.add_argument("--max-prompts", type=int, default=24, help="[default: 24]")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="[default: 64]")
    parser.add_argument("--repeats", type=int, default=3, help="[default: 3]")
    parser.add_argument(
        "--output", type=Path, default=Path("llama_cpp.json"), help="[default: llama_cpp.json]"
    )
    options = parser.parse_args()

    target = e3.load_target(options.target, dtype="float32", weights="int8")
    drafter = e3.Fallback.of(NGram(min_ngram=2), e3.load_drafter(options.target, target=target))
    plain = e3.SpeculativeDecoder(target, stop_tokens=())
    drafted = e3.SpeculativeDecoder(target, drafter, num_speculative_tokens=LENGTH, stop_tokens=())
    count = options.max_new_tokens
    prompts = [
        prompt
        for file in options.prompts
        for prompt in read_prompts(file, target, max_new_tokens=count)
    ]
    chosen = in_turn(prompts, options.max_prompts)
    with tempfile.TemporaryDirectory() as folder:
        path = locate(options.target, "target")
        in_file = LlamaContender(
            "llama.cpp, weights of the file", "Q4_1", options.llama_python, path
        )
        copy = f"{folder}/float32.gguf"
        in_float32 = LlamaContender(
            "llama.cpp, float32", "float32", options.llama_python, path, copy
        )
        contenders = [
            DecoderContender("plain", "int8", plain),
            DecoderContender(f"n-grams, else EAGLE-3, K={LENGTH}", "int8", drafted),
            in_file,
            in_float32,
        ]
        report = measure(
            contenders,
            [prompt.tokens for prompt in chosen],
            tasks=[prompt.category for prompt in chosen],
            max_new_tokens=count,
            repeats=options.repeats,
            baselines=["plain"],
            streams=0,
            on_result=print,
        )
    about = environment(target=options.target, drafter=options.target, prompt_files=options.prompts)
    record = {
        "about": about,
        "llama_cpp_python": in_file.version,
        "report": dataclasses.asdict(report),
    }
    write_record(options.output, record)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
