"""The experiments behind the tables of the documentation, one command each.

    python examples/experiments.py --help                  # all of them, with their times
    python examples/experiments.py acceptance --help       # the options of one
    python examples/experiments.py acceptance --output acceptance.json
    python examples/experiments.py chat-model --prompts mt_bench.jsonl humaneval.jsonl gsm8k.jsonl

Each prints a line as soon as a row is measured, and with ``--output`` writes the record after every
row, so that nothing is lost. Times are those of two CPU cores. ``--max-prompts 1`` tries it.

``llama-cpp`` needs another environment with llama.cpp, whose compilation takes ten minutes::

    python -m venv llama && llama/bin/pip install llama-cpp-python
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import inspect
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import sysconfig
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
from eagle3_jax.bench.results import Row
from eagle3_jax.bench.run import measure
from eagle3_jax.drafters import NGram, Suffix
from eagle3_jax.engine.engine import Engine
from eagle3_jax.files.sources import bundled, locate
from eagle3_jax.load import named_drafter
from eagle3_jax.measure.environment import committable, environment, sha256_of_prompts, source
from eagle3_jax.measure.records import spread_of, write_record
from eagle3_jax.models.layers import Precision, product, product_by_table
from eagle3_jax.models.quantised import Int8Kernel
from eagle3_jax.prompts.benchmark import Prompt, in_turn, read_prompts
from eagle3_jax.prompts.request import Request
from eagle3_jax.topology import tree_name
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import SamplingMode

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
SHIPPED = (
    CHAIN,
    Cell("tree of 60 nodes, 8 levels, top 10", "eagle3", {"tree": TREE}, 0.0, 128),
    NGRAMS,
    Cell("chain K=4, likeliest", "eagle3", LIKELIEST, 1.0, 64),
    Cell("chain K=4, sampled", "eagle3", SAMPLED, 1.0, 64),
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
    drafters = {"eagle3": head, "ngram": NGram()}

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


# N-grams and suffixes

LENGTH = 5  # of a draft
LOOKUPS = {
    "n-gram, up to 4": NGram(LENGTH),
    "n-gram, up to 24": NGram(LENGTH, max_ngram=24),
    "suffix": Suffix(LENGTH),
    "suffix, drafts end below 0.3": Suffix(LENGTH, min_probability=0.3),
}
# Modules that are written again, and the name that is changed in them.
MODULES = {
    "textwrap": "text",
    "bisect": "lo",
    "heapq": "heap",
    "sched": "event",
    "shlex": "state",
    "glob": "pathname",
}


def lookup(options: Options) -> Lines:
    """N-grams against suffixes: tokens a round when the text drafts itself, and what a draft costs.

    The texts are fixed (what the shipped target writes after its held-out prompts, and Python
    modules that are written again with a name changed, as an agent edits a file), so nothing but
    the drafter runs and counts repeat exactly.
    """
    rows: list[Record] = []
    record = {"about": environment(), "rows": rows}
    for kind, pairs in fixed_texts(options.max_prompts).items():
        lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
        text = np.zeros((len(pairs), max(lengths) + LENGTH + 1), np.int32)
        for row, (prompt, answer) in enumerate(pairs):
            text[row, : lengths[row]] = prompt + answer
        start = np.array([len(prompt) + 1 for prompt, _ in pairs], np.int32)
        end = np.array(lengths, np.int32)

        for name, drafter in LOOKUPS.items():
            rounds, drafted = replay(drafter, text, start, end)
            first_row = (text[:1], start[:1], end[:1])
            rounds_of_first, _ = replay(drafter, *first_row)  # and compiled
            begin = time.perf_counter()
            jax.block_until_ready(replay(drafter, *first_row))
            milliseconds = 1e3 * (time.perf_counter() - begin) / int(rounds_of_first[0])

            emitted = int((end - start).sum()) / int(rounds.sum())
            share = int(drafted.sum()) / int(rounds.sum())
            rows.append({"text": kind, "drafter": name, "tokens_per_round": emitted})
            rows[-1] |= {"drafted_per_round": share, "milliseconds": milliseconds}
            counts = f"{emitted:.3f} tokens and {share:.2f} drafted a round"
            yield f"{kind:32} {name:30} {counts}, {milliseconds:.2f} ms a draft", record


def fixed_texts(count: int) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Returns prompts and the texts that follow them, by kind."""
    target = e3.load_target(dtype="mixed")
    assert target.tokenizer is not None
    decoder = e3.SpeculativeDecoder(target, stop_tokens=())
    shipped = read_prompts(bundled("prompts.jsonl"), target, max_new_tokens=192)
    pairs: dict[str, list[tuple[list[int], list[int]]]] = {}
    for kind in ("code", "prose"):
        prompts = [prompt.tokens for prompt in shipped if prompt.category == kind]
        short = [tokens for tokens in prompts if len(tokens) < 300][:count]
        written = decoder.generate(short, max_new_tokens=192).tokens
        pairs[f"the shipped target, {kind}"] = list(zip(short, written, strict=True))

    stdlib = Path(sysconfig.get_path("stdlib"))
    again = pairs["a file again, one name changed"] = []
    for module, name in MODULES.items():
        text = (stdlib / f"{module}.py").read_text(encoding="utf-8")[:6000]
        renamed = re.sub(rf"\b{name}\b", "renamed", text)
        again.append((target.tokenizer.encode(text).ids, target.tokenizer.encode(renamed).ids))
    return pairs


@functools.partial(jax.jit, static_argnames="drafter")
def replay(
    drafter: Any, text: jax.Array, start: jax.Array, end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rounds and drafted tokens of each row, if the target writes ``text[start:end]``."""

    def is_running(carry: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.any(carry[0] < end)

    def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        length, rounds, drafted = carry
        known = jnp.where(jnp.arange(text.shape[1]) < length[:, None], text, 0)
        state = drafter.init(None, *text.shape).replace(tokens=known, length=length)
        draft = drafter.propose(None, state, None, e3.SamplingParams())
        ahead = length[:, None] + jnp.arange(LENGTH)
        written = jnp.take_along_axis(text, jnp.minimum(ahead, text.shape[1] - 1), axis=1)
        right = (draft.tokens[:, 1:] == written) & draft.valid[:, 1:] & (ahead < end[:, None])
        accepted = jnp.cumprod(right.astype(jnp.int32), axis=1).sum(axis=1)
        running = length < end
        drafted = drafted + jnp.where(running, draft.valid[:, 1:].sum(axis=1), 0)
        return jnp.where(running, length + accepted + 1, length), rounds + running, drafted

    zero = jnp.zeros_like(start)
    _, rounds, drafted = jax.lax.while_loop(is_running, step, (start, zero, zero))
    return rounds, drafted


# Drafting methods

FIGURES = (
    "lossless",
    "same_texts",
    "num_draft_steps",
    "verify_cost",
    "draft_cost",
    "predicted_ratio",
    "ratio",
)


def methods(options: Options) -> Lines:
    """Every drafting method on the shipped target and its prompts: tokens a round, costs and speed.

    Each takes turns with plain decoding, one method after the other. Heads are directories as
    ``eagle3 train head --method NAME`` writes them, each named after its method; what needs no
    training and the shipped EAGLE-3 head take part by themselves. ``docs/recorded/write_tables.py``
    puts ``docs/recorded/methods.json`` into the pages.
    """
    target = e3.load_target(dtype=options.dtype)
    shipped = read_prompts(bundled("prompts.jsonl"), target, max_new_tokens=options.max_new_tokens)
    prompts = in_turn(shipped, options.max_prompts * len({prompt.category for prompt in shipped}))
    nodes, depth, top_k = options.tree
    tree = e3.DynamicTree(num_nodes=nodes, max_depth=depth, top_k=top_k)
    shapes: dict[str, dict[str, Any]] = {
        f"K={length}": {"num_speculative_tokens": length} for length in options.chains
    }
    shapes[tree_name(tree)] = {"tree": tree}

    heads = {name: source(str(path), "") for name, path in trained(options.heads).items()}
    tokens = [prompt.tokens for prompt in prompts]
    names = [prompt.name for prompt in prompts]
    record: Record = {
        "command": f"python examples/experiments.py {committable(options.command)}",
        "about": environment() | {"heads": heads},
        "prompts": {"names": names, "sha256": sha256_of_prompts(tokens)},
        "dtype": options.dtype,
        "named": options.named,
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "programs_after_warm_up": 0,
        "rows": [],
        "missing": [],
    }
    for method, drafter in drafters(target, options):
        plain = e3.SpeculativeDecoder(target, stop_tokens=())
        contenders = [DecoderContender("plain", options.dtype, plain)]
        for draft, shape in shapes.items():
            try:
                decoder = e3.SpeculativeDecoder(target, drafter, stop_tokens=(), **shape)
            except ValueError as error:
                missing = {"method": method, "draft": draft, "reason": str(error)}
                record["missing"].append(missing)
            else:
                contenders.append(DecoderContender(draft, options.dtype, decoder))
        report = measure(
            contenders,
            tokens,
            tasks=[prompt.category for prompt in prompts],
            max_new_tokens=options.max_new_tokens,
            repeats=options.repeats,
            baselines=["plain"],
            streams=0,
        )

        record["programs_after_warm_up"] += report.programs_after_warm_up
        parameters = num_parameters(drafter, target)
        for row in report.rows[1:]:
            names_of_row = {"method": method.partition("=")[0], "draft": row.name}
            record["rows"].append(names_of_row | {"parameters": parameters} | figures(row))
            yield f"{method} {row.name}: {row.ratio.median:.2f} times plain decoding", record
        # The programs of all methods together are more than a process may map.
        del contenders, report
        jax.clear_caches()


def drafters(target: e3.LoadedTarget, options: Options) -> Iterator[tuple[str, e3.LoadedDrafter]]:
    """Yields the methods by name; those without files first."""
    for name in options.named.split(","):
        drafter = named_drafter(name, target)
        assert drafter is not None, "plain decoding takes part anyway"
        if not isinstance(drafter, e3.LoadedDrafter):
            drafter = e3.LoadedDrafter(drafter, name=name)
        yield name, drafter

    # The shipped head, unless one is trained.
    directories: dict[str, Path | None] = {"eagle3": None} | trained(options.heads)
    for name, directory in directories.items():
        yield name, e3.load_drafter(directory, target=target)


def trained(heads: Path | None) -> dict[str, Path]:
    """Returns the directories of heads by method, without those that are still in training."""
    directories = sorted(heads.iterdir()) if heads else []
    return {path.name: path for path in directories if (path / "config.json").is_file()}


def num_parameters(drafter: e3.LoadedDrafter, target: e3.LoadedTarget) -> int:
    """Counts parameters of the drafter that are not the target's, without tables of ids."""
    # A transposed copy of the target's matrix, if it is tied.
    borrowed = drafter.params.get("output") if isinstance(drafter.params, dict) else None
    shared = {id(leaf) for leaf in jax.tree.leaves((target.params, borrowed))}
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(drafter.params) if id(leaf) not in shared}
    return sum(leaf.size for leaf in leaves.values() if jnp.issubdtype(leaf.dtype, jnp.floating))


def figures(row: Row) -> Record:
    """Returns the figures of a row that the tables show or that judge it."""
    values = dataclasses.asdict(row)
    tasks = {task.pop("task"): task for task in values["tasks"]}
    for task in tasks.values():
        counters = task.pop("acceptance")
        task["mean_acceptance_length"] = counters and counters["mean_acceptance_length"]
    return {
        **{name: values[name] for name in FIGURES},
        "tokens_per_second": values["decode_tokens_per_second"],
        "tasks": tasks,
    }


# llama.cpp

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


def llama_cpp(options: Options) -> Lines:
    """A chat model here and in llama.cpp, which read the same file and take turns on its prompts.

    Greedy, batch 1, stop tokens ignored. llama.cpp runs in a process of its own with a thread for
    each core, once on the weights of the file and once on a copy of them in float32.
    """
    target = e3.load_target(options.target, dtype="float32", weights="int8")
    head = e3.load_drafter(options.target, target=target)
    drafter = e3.Fallback.of(NGram(min_ngram=2), head)
    plain = e3.SpeculativeDecoder(target, stop_tokens=())
    drafted = e3.SpeculativeDecoder(target, drafter, num_speculative_tokens=3, stop_tokens=())
    prompts = prompts_of(options.prompts, target, options.max_new_tokens)
    chosen = in_turn(prompts, options.max_prompts)

    python = options.llama_python
    path = locate(options.target, "target")
    with tempfile.TemporaryDirectory() as folder:
        in_file = LlamaContender("llama.cpp, weights of the file", "Q4_1", python, path)
        copy = f"{folder}/float32.gguf"
        in_float32 = LlamaContender("llama.cpp, float32", "float32", python, path, copy)
        report = measure(
            [
                DecoderContender("plain", "int8", plain),
                DecoderContender("n-grams, else EAGLE-3, K=3", "int8", drafted),
                in_file,
                in_float32,
            ],
            [prompt.tokens for prompt in chosen],
            tasks=[prompt.category for prompt in chosen],
            max_new_tokens=options.max_new_tokens,
            repeats=options.repeats,
            baselines=["plain"],
            streams=0,
            on_result=print,
        )
    about = environment(target=options.target, drafter=options.target, prompt_files=options.prompts)
    record = {"about": about, "llama_cpp_python": in_file.version}
    ratios = [f"{row.name} {row.ratio.median:.2f}" for row in report.rows]
    yield ", ".join(ratios), record | {"report": dataclasses.asdict(report)}


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

    # wait4 also returns the peak memory of this process.
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise ValueError(f"{' '.join(command)} failed")

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
    "rounds": round_costs,
    "start": command_times,
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
    "heads": {"type": Path, "help": "directory with a trained head per method, under its name"},
    "named": {"help": "drafters without files"},
    "chains": {
        "type": int,
        "nargs": "+",
        "metavar": "K",
        "help": "lengths, where heads reach them",
    },
    "tree": {"type": int, "nargs": 3, "metavar": "N", "help": "nodes, depth and top-k"},
    "dtype": {"help": "precision of the target"},
    "parts": {"nargs": "+", "choices": PARTS, "help": "what is measured"},
    "llama_python": {"type": Path, "help": "interpreter with llama-cpp-python"},
}
EXPERIMENTS = {
    "acceptance": Experiment(
        acceptance,
        "minutes; half an hour for 240 prompts of a chat model",
        {"target": None, "prompts": [], "max_prompts": None},
    ),
    "refilled": Experiment(refilled, "ten minutes", {"max_prompts": 64, "repeats": 3}),
    "lookup": Experiment(lookup, "a minute", {"max_prompts": 8}),
    "methods": Experiment(
        methods,
        "minutes for a method",
        {
            "heads": None,
            "named": "ngram,suffix,layer-skip=3",
            "chains": [3, 5, 7],
            "tree": [8, 5, 2],
            "dtype": "mixed",
            "max_prompts": 8,
            "max_new_tokens": 64,
            "repeats": 3,
        },
    ),
    "llama-cpp": Experiment(
        llama_cpp,
        "ten minutes",
        {
            "llama_python": REQUIRED,
            "target": "smollm2",
            "prompts": REQUIRED,
            "max_prompts": 24,
            "max_new_tokens": 64,
            "repeats": 3,
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
    options.command = shlex.join(words)
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
            if default and not is_required:
                shown = " ".join(map(str, default if isinstance(default, list) else [default]))
                argument |= {"default": default, "help": f"{argument['help']}  [default: {shown}]"}
            command.add_argument(f"--{option.replace('_', '-')}", required=is_required, **argument)

        command.add_argument("--output", type=Path, help="JSON file for the record")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
