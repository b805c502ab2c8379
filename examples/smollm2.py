"""A published chat model on this machine: the cost of a round, weights in int8, and the text of transformers.

The target is SmolLM2-135M-Instruct, or any other one. Prompts are JSONL files with ``turns`` or
``question``, such as those of MT-bench, HumanEval and GSM8K, one file a task. Quiet two cores take
about half an hour::

    python examples/smollm2.py mt_bench.jsonl humaneval.jsonl gsm8k.jsonl --output record.json
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eagle3_jax as e3
from eagle3_jax.files.sources import locate
from eagle3_jax.measure.environment import environment
from eagle3_jax.measure.records import write_record
from eagle3_jax.models.layers import Precision, product, product_by_table
from eagle3_jax.models.quantised import Int8Kernel
from eagle3_jax.prompts.benchmark import Prompt, in_turn, read_prompts
from eagle3_jax.tree import causal_mask

ROWS = (1, 2, 4, 6)  # of a verification
PREFILLS = (32, 128)
CONTEXT = 100
CAPACITY = 256
NEW_TOKENS = 32
BATCH = 8  # prompts that are answered together
FORMS = {
    "float32": ("float32", "dense"),
    "mixed": ("mixed", "dense"),
    "int8": ("float32", "int8"),
}  # dtype, weights
KERNELS = ("kernel", "gate_up", "down")  # names of the parameters that products read


def main() -> None:
    """Measures every part, prints it, and writes it; a file keeps the parts that are not measured again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", nargs="+", type=Path, help="JSONL files, one a task")
    parser.add_argument("--target", default="smollm2", help="[default: smollm2]")
    parser.add_argument(
        "--parts", default="rounds,start,divergence,texts", help="[default: all four]"
    )
    parser.add_argument(
        "--repeats", type=int, default=20, help="of every timing, interleaved  [default: 20]"
    )
    parser.add_argument(
        "--max-prompts", type=int, default=240, help="of the divergence  [default: 240]"
    )
    parser.add_argument(
        "--max-texts", type=int, default=60, help="compared with transformers  [default: 60]"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the record")
    options = parser.parse_args()

    parts: dict[str, Callable[[argparse.Namespace], Any]] = {
        "rounds": rounds, "start": start, "divergence": divergence, "texts": texts,
    }  # fmt: skip
    known = options.output is not None and options.output.exists()
    record = (
        json.loads(options.output.read_text(encoding="utf-8"))
        if known
        else {"target": options.target}
    )
    for name in options.parts.split(","):
        begin = time.monotonic()
        of_what = environment(target=options.target, prompt_files=options.prompts)
        record[name] = {"environment": of_what, **parts[name](options)}
        print(
            f"{name} ({time.monotonic() - begin:.0f} s): {json.dumps(record[name], indent=1)}",
            flush=True,
        )
        if options.output is not None:
            write_record(options.output, record)


def prompts_of(options: argparse.Namespace, target: e3.LoadedTarget, count: int) -> list[Prompt]:
    """Returns the first turns of the prompts through the chat template of the target, in turn from every task."""
    prompts = [
        prompt
        for file in options.prompts
        for prompt in read_prompts(file, target, max_new_tokens=NEW_TOKENS)
    ]
    return in_turn(prompts, count)


# The cost of a round


def rounds(options: argparse.Namespace) -> dict[str, Any]:
    """Times steps of a target, their products alone, and prefills; all take turns."""
    programs: dict[str, Callable[[], Any]] = {}
    for form, (dtype, weights) in FORMS.items():
        target = e3.load_target(options.target, dtype=dtype, weights=weights)
        for count in ROWS:
            programs[f"{form}, {count} rows"] = step_program(target, count)
            programs[f"{form}, {count} rows, products alone"] = products_program(
                target, count, count
            )
        for count in PREFILLS:
            programs[f"{form}, prefill of {count}"] = prefill_program(target, count)
            programs[f"{form}, prefill of {count}, products alone"] = products_program(
                target, count, 1
            )
    for program in programs.values():
        jax.block_until_ready(program())  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(options.repeats):
        for name, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program())
            seconds[name].append(time.perf_counter() - begin)
    figures: dict[str, dict[str, Any]] = {}
    for name, times in seconds.items():
        low, median, high = statistics.quantiles(times, n=4)
        figures[name] = {"milliseconds": 1e3 * median, "quartiles": [1e3 * low, 1e3 * high]}
    fastest = min(FORMS, key=lambda form: figures[f"{form}, 1 rows"]["milliseconds"])
    plain = np.asarray(seconds[f"{fastest}, 1 rows"])
    for form in FORMS:
        for count in ROWS:
            name = f"{form}, {count} rows"
            products = figures[f"{name}, products alone"]["milliseconds"]
            figures[name]["times_fastest_plain_step"] = float(np.median(seconds[name] / plain))
            figures[name]["outside_products"] = 1 - products / figures[name]["milliseconds"]
    return {
        "context": CONTEXT,
        "capacity": CAPACITY,
        "fastest_plain_step": fastest,
        "figures": figures,
    }


def step_program(target: e3.LoadedTarget, count: int) -> Callable[[], Any]:
    """Returns a verification of ``count`` tokens after 100 others: forward, logits, their largest, commit."""
    model: Any = target.model
    cache = model.init_cache(1, CAPACITY).replace(length=jnp.asarray([CONTEXT], jnp.int32))

    def step(params: Any, cache: Any, tokens: jax.Array) -> Any:
        positions = cache.length[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        output = model(params, tokens, positions, causal_mask(count), cache)
        largest = jnp.argmax(model.unembed(params, output.final), axis=-1)
        after = cache.commit(output.written, jnp.asarray([count], jnp.int32), None)
        return largest, after.replace(length=cache.length)

    compiled = jax.jit(step, donate_argnums=1)
    state = [jax.tree.map(jnp.copy, cache)]

    def run() -> Any:
        largest, state[0] = compiled(target.params, state[0], jnp.full((1, count), 7, jnp.int32))
        return largest

    return run


def prefill_program(target: e3.LoadedTarget, count: int) -> Callable[[], Any]:
    """Returns the prefill of a prompt of ``count`` tokens, with the logits of its last one."""
    model: Any = target.model
    tokens = jnp.full((1, count), 7, jnp.int32)
    positions = jnp.arange(count, dtype=jnp.int32)[None]

    @jax.jit
    def prefill(params: Any) -> jax.Array:
        return model.unembed(
            params, model(params, tokens, positions, causal_mask(count)).final[:, -1:]
        )

    return functools.partial(prefill, target.params)


def products_program(target: e3.LoadedTarget, count: int, logits: int) -> Callable[[], Any]:
    """Returns the products of ``count`` rows with every kernel in turn, and of ``logits`` rows with the output."""
    model: Any = target.model
    precision: Precision = model.precision
    leaves = jax.tree_util.tree_leaves_with_path(
        target.params, is_leaf=lambda leaf: isinstance(leaf, Int8Kernel)
    )
    kernels = [leaf for path, leaf in leaves if leaf.ndim == 2 and path[-1].key in KERNELS]
    tied = model.config.tie_embeddings

    @jax.jit
    def products(kernels: list[Any], embedding: Any) -> jax.Array:
        total = jnp.zeros(())
        for kernel in kernels:  # each waits for the one before it, as layers do
            rows = jnp.full((count, kernel.shape[0]), 0.5, precision.activations) + total
            total = product(rows, kernel, precision)[0, 0] * 1e-9
        if not tied:
            return total
        rows = jnp.full((logits, embedding.shape[1]), 0.5, precision.activations) + total
        return product_by_table(rows, embedding, precision)[0, 0]

    return functools.partial(products, kernels, target.params["embedding"])


# From the command to the first token


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Times a command to its first character and to its end, without and with compiled programs; measures memory."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for weights in ("dense", "int8"):
            for state in ("cold", "warm", "warm"):
                seconds, first, peak = timed_command(
                    ["generate", "--chat", "What is the capital of France?", "--target", options.target, "--weights",
                     weights, "--max-new-tokens", "32", "--compilation-cache", cache]
                )  # fmt: skip
                row = {
                    "weights": weights,
                    "compiled_programs": state,
                    "first_character_seconds": first,
                }
                rows.append({**row, "seconds": seconds, "peak_megabytes": peak})
    return {"rows": rows}


def timed_command(arguments: Sequence[str]) -> tuple[float, float, int]:
    """Runs a command of ``eagle3``. Returns its seconds, those to its first character, and the peak memory in MB."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "eagle3_jax", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 1)
    first = time.monotonic() - begin
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return time.monotonic() - begin, first, usage.ru_maxrss // 1024


# Divergence of distributions


def divergence(options: argparse.Namespace) -> dict[str, Any]:
    """Compares int8 with float32: distributions of the next token on greedy answers of float32, and the answers."""
    dense = e3.load_target(options.target)
    prompts = prompts_of(options, dense, options.max_prompts)
    answers = greedy(dense, prompts)
    int8 = e3.load_target(options.target, weights="int8")
    pairs = [
        compared(dense, int8, prompt.tokens, answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    nats = np.concatenate([pair[0] for pair in pairs])
    same = np.concatenate([pair[1] for pair in pairs])
    equal = [answer == text for answer, text in zip(answers, greedy(int8, prompts), strict=True)]
    return {
        "prompts": len(prompts),
        "tokens": len(nats),
        "mean_nats": float(nats.mean()),
        "median_nats": float(np.median(nats)),
        "p99_nats": float(np.quantile(nats, 0.99)),
        "same_likeliest_token": float(same.mean()),
        "equal_texts": sum(equal),
    }


def greedy(target: e3.LoadedTarget, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Returns the greedy answers of a target, in batches."""
    decoder = e3.SpeculativeDecoder(target)
    answers: list[list[int]] = []
    for start in range(0, len(prompts), BATCH):
        tokens = [prompt.tokens for prompt in prompts[start : start + BATCH]]
        answers += decoder.generate(tokens, max_new_tokens=NEW_TOKENS).tokens
    return answers


def compared(
    dense: e3.LoadedTarget, quantized: e3.LoadedTarget, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``KL(dense || quantized)`` in nats, and whether the most likely tokens are equal, by token."""
    text = [*prompt, *answer]
    padded = np.zeros((1, -(-len(text) // 64) * 64), np.int32)
    padded[0, : len(text)] = text
    positions = slice(len(prompt) - 1, len(text) - 1)
    first, second = (
        np.asarray(log_probs(target.model, target.params, padded), np.float64)[positions]
        for target in (dense, quantized)
    )
    nats = (np.exp(first) * (first - second)).sum(-1)
    return nats, first.argmax(-1) == second.argmax(-1)


@functools.partial(jax.jit, static_argnums=0)
def log_probs(model: Any, params: Any, tokens: np.ndarray) -> jax.Array:
    """Returns ``[T V]``, log-probabilities after every token of one text."""
    size = tokens.shape[1]
    output = model(params, tokens, jnp.arange(size, dtype=jnp.int32)[None], causal_mask(size))
    return jax.nn.log_softmax(model.unembed(params, output.final)[0])


# Texts of transformers


def texts(options: argparse.Namespace) -> dict[str, Any]:
    """Scores greedy answers in float32, drafted by n-grams, with transformers: is every token its most likely one?

    If it is, transformers writes the same text. Other tokens are listed with the distance of the
    two logits.
    """
    import torch
    from transformers import AutoModelForCausalLM

    path = locate(options.target, "target")
    directory = path.parent if path.is_file() else path
    gguf = {"gguf_file": path.name} if path.is_file() else {}
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **gguf)
    target = e3.load_target(options.target)
    decoder = e3.SpeculativeDecoder(target, e3.drafters.NGram())
    prompts = prompts_of(options, target, options.max_texts)
    parted = []
    drafts = 0
    tokens = 0
    for prompt in prompts:
        result = decoder.generate([prompt.tokens], max_new_tokens=NEW_TOKENS)
        answer = result.tokens[0]
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt.tokens, *answer]])).logits[
                0, len(prompt.tokens) - 1 : -1
            ]
        written = logits[torch.arange(len(answer)), torch.tensor(answer)]
        gaps = logits.max(-1).values - written
        drafts += int(result.stats.num_drafts)
        tokens += len(answer)
        different = (gaps > 0).nonzero().flatten().tolist()
        if different:
            first = different[0]
            parted.append(
                {"prompt": prompt.name, "token": first, "logits_apart": float(gaps[first])}
            )
    equal = len(prompts) - len(parted)
    return {
        "prompts": len(prompts),
        "equal": equal,
        "parted": parted,
        "drafts": drafts,
        "tokens": tokens,
    }


if __name__ == "__main__":
    main()
