"""Why the bits of a chain and of plain decoding differ on a GPU, in two minutes on it.

`examples/h200.py --only bits` runs it on the shipped pair in bfloat16. Every line compares two
runs, and says what a difference would mean.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from eagle3_jax import LoadedDrafter, SpeculativeDecoder, load_drafter, load_target
from eagle3_jax import loop as loops
from eagle3_jax.drafters import Plain
from eagle3_jax.files.sources import bundled
from eagle3_jax.loop import GenerationState, LoopParams, SpeculativeLoop
from eagle3_jax.models import flash
from eagle3_jax.topology import Chain
from validation.aot.same import compared, differences, text_of
from validation.decodings import batch_of, with_shape
from validation.device import DETERMINISTIC, ROUNDED_AS_WRITTEN
from validation.subject import Setting, choose, some_prompts

EXACT = DETERMINISTIC | ROUNDED_AS_WRITTEN
PROMPTS = 8
TOKENS = 128  # new ones of every prompt
CAPACITY = 256  # slots of every cache, so that all programs have the same shapes


class Run(NamedTuple):
    """How the prompts are decoded."""

    draft: int  #: Tokens of a chain; 0 for plain decoding.
    block: int = 1  #: Tokens of a block of plain decoding.
    batch: int = 1
    options: str = "exact"  #: A name of :data:`OPTIONS`.
    kernel: bool = True  #: Whether attention is by the kernel.
    invariant: bool = False
    again: int = 0  #: The same program, run again (1) or compiled again (2).


FAILING = "chain of 3 and blocks of 4"
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": EXACT,
    "default": {},
    "nondeterministic ones excluded": EXACT | {"xla_gpu_exclude_nondeterministic_ops": True},
    "cuBLAS, not cuBLASLt": EXACT | {"xla_gpu_enable_cublaslt": False},
}
CHAIN = Run(draft=3)
BLOCKS = Run(draft=0, block=4)
INVARIANT = Run(draft=0, options="default", invariant=True)


class Comparison(NamedTuple):
    """Two runs, and what a difference between them means."""

    first: Run
    second: Run
    meaning: str


def _both(meaning: str, **change: Any) -> Comparison:
    return Comparison(BLOCKS._replace(**change), CHAIN._replace(**change), meaning)


COMPARISONS = {
    "blocks of 4, run twice": Comparison(
        BLOCKS, BLOCKS._replace(again=1), "a kernel is not deterministic"
    ),
    "blocks of 4, compiled twice": Comparison(
        BLOCKS, BLOCKS._replace(again=2), "the compiler chooses otherwise each time"
    ),
    "chain of 3, run twice": Comparison(
        CHAIN, CHAIN._replace(again=1), "a kernel is not deterministic"
    ),
    FAILING: _both("the cell that failed in level L3 fails again"),
    "the same, batch 2": _both("it is not the padding of 4 rows to 8", batch=2),
    "the same, default options": _both("as users have it, the bits differ", options="default"),
    "the same, nondeterministic operations excluded": _both(
        "the cause is not a kernel that adds in a random order",
        options="nondeterministic ones excluded",
    ),
    "the same, cuBLAS": _both("it is not cuBLASLt", options="cuBLAS, not cuBLASLt"),
    "the same, attention by XLA": _both("it is not the attention kernel", kernel=False),
    "invariant: chain of 3 and plain": Comparison(
        INVARIANT, INVARIANT._replace(draft=3), "invariant fails"
    ),
    "invariant: chain of 5 and plain": Comparison(
        INVARIANT, INVARIANT._replace(draft=5), "invariant fails"
    ),
    "invariant: batch of 8 and plain": Comparison(
        INVARIANT, INVARIANT._replace(batch=8), "invariant fails in batches"
    ),
    "invariant: chain of 5 in a batch of 8 and plain": Comparison(
        INVARIANT, INVARIANT._replace(draft=5, batch=8), "invariant fails in batches"
    ),
    "invariant: compiled twice": Comparison(
        INVARIANT, INVARIANT._replace(again=2), "invariant depends on what the compiler chooses"
    ),
}


def decide(
    add: Callable[[str, Mapping[str, Any]], None],
    folder: Path,
    *,
    tokens: int = TOKENS,
    comparisons: Sequence[str] = tuple(COMPARISONS),
) -> None:
    """Makes every comparison, and saves the optimized programs of the failing cell.

    Args:
        add: Takes the name of a comparison and its result, as soon as it is known.
        folder: Where the programs are written, as files that :mod:`validation.aot.same` reads.
        tokens: New tokens of every prompt.
        comparisons: Names of :data:`COMPARISONS`; among them the failing cell.
    """
    prompts = some_prompts(choose(Setting()), PROMPTS)
    programs = Programs(tokens)
    chosen = {name: COMPARISONS[name] for name in comparisons}
    runs = dict.fromkeys(run for comparison in chosen.values() for run in comparison[:2])
    # Programs are compiled together on the cores of the host, and compared in the order of the
    # table.
    with concurrent.futures.ThreadPoolExecutor(8) as compilers:
        compiled = {run: compilers.submit(programs.compile, run) for run in runs if run.again != 1}

        @functools.cache
        def states_of(run: Run) -> list[GenerationState]:
            program = compiled[run._replace(again=0) if run.again == 1 else run]
            return programs.run(run, program.result(), prompts)

        for name, comparison in chosen.items():
            try:
                result = compare(states_of(comparison.first), states_of(comparison.second))
            except (
                Exception
            ) as error:  # of the compiler or the device: the other comparisons still tell something
                result = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            add(name, result | {"a difference means": comparison.meaning})

    folder.mkdir(parents=True, exist_ok=True)
    for part, index in (("prefill", 0), ("rounds", 1)):
        texts = {
            name: text_of(compiled[run].result()[index])
            for name, run in (("blocks", BLOCKS), ("chain", CHAIN))
        }
        for name, text in texts.items():
            (folder / f"{part}-{name}.hlo").write_text(text)
        names = compared(*texts.values())
        differing = differences(*texts.values())
        add(f"programs of the {part}", {"values": len(names), "by other kernels": differing})


class Programs:
    """The shipped pair, and its programs."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.target = load_target(bundled("target"), dtype="bfloat16")
        self.head = load_drafter(bundled("eagle3"), target=self.target)

    def loop(self, run: Run) -> tuple[SpeculativeLoop, LoopParams]:
        drafter = (
            with_shape(self.head, Chain(run.draft))
            if run.draft
            else LoadedDrafter(Plain(run.block))
        )
        if run.invariant:
            decoder = SpeculativeDecoder(self.target, drafter, invariant=True)
            return decoder.loop, decoder.params
        return SpeculativeLoop(self.target.model, drafter.drafter), LoopParams(
            self.target.params, drafter.params
        )

    def compile(self, run: Run) -> tuple[Any, Any]:
        """Returns the compiled prefill and rounds."""
        loop, params = self.loop(run)
        prompts = jax.eval_shape(lambda: batch_of([[0]] * run.batch, self.tokens))
        options = OPTIONS[run.options]
        kernel = flash.enabled(False) if not run.kernel else contextlib.nullcontext()
        with kernel, jax.default_matmul_precision("highest"):
            prefill = loops.prefill.lower(loop, params, prompts, capacity=CAPACITY)
            rounds = loops.run.lower(loop, params, prefill.out_info)
        return prefill.compile(options), rounds.compile(options)

    def run(
        self, run: Run, compiled: tuple[Any, Any], prompts: list[list[int]]
    ) -> list[GenerationState]:
        """Returns the final state of every batch."""
        _, params = self.loop(run)
        prefill, rounds = compiled
        batches = [
            prompts[start : start + run.batch] for start in range(0, len(prompts), run.batch)
        ]
        return [rounds(params, prefill(params, batch_of(batch, self.tokens))) for batch in batches]


def compare(first: list[GenerationState], second: list[GenerationState]) -> dict[str, Any]:
    """Compares texts, and the keys and values of what the texts have in common."""
    parted = []
    differing = []
    values = 0

    for row, (a, b) in enumerate(zip(_rows(first), _rows(second), strict=True)):
        common = _common(a.tokens, b.tokens)
        if common < max(len(a.tokens), len(b.tokens)):
            parted.append(common)
        # The last common token may not be in the cache yet.
        for layer, (ours, theirs) in enumerate(zip(a.cache, b.cache, strict=True)):
            equal = np.all(ours[:, : common - 1] == theirs[:, : common - 1], axis=(0, 2))
            values += ours[:, : common - 1].size
            if not equal.all():
                difference = {
                    "row": row,
                    "array": layer,
                    "slot": int(np.argmin(equal)),
                    "slots": int((~equal).sum()),
                }
                differing.append(difference)

    first_slots = sorted(differing, key=lambda entry: (entry["slot"], entry["array"]))
    return {
        "texts": len(_rows(first)), "texts that part": len(parted), "at tokens": parted,
        "values": values, "arrays that differ": len(differing), "the first": first_slots[:3],
    }  # fmt: skip


def in_words(result: Mapping[str, Any]) -> str:
    """Returns the result of a comparison, or of two programs, in one line."""
    if "failed" in result:
        return f"failed: {result['failed']}"
    if "by other kernels" in result:
        return f"{len(result['by other kernels'])} of {result['values']} values by other kernels"
    if not result["texts that part"] and not result["arrays that differ"]:
        return f"equal in {result['texts']} texts and {result['values']:,} values"

    first = ", ".join(
        f"array {entry['array']} from slot {entry['slot']}" for entry in result["the first"]
    )
    return (
        f"{result['texts that part']} of {result['texts']} texts part,"
        f" {result['arrays that differ']} arrays differ ({first}): {result['a difference means']}"
    )


class Row(NamedTuple):
    """A text with the bits of its keys and values."""

    tokens: np.ndarray
    cache: list[np.ndarray]  #: ``[C S H]`` of every layer: keys, then values.


def _rows(states: list[GenerationState]) -> list[Row]:
    """Returns the rows of all batches."""
    rows = []
    for state in states:
        both = [array for layer in state.cache.layers for array in (layer.keys, layer.values)]
        arrays = [np.asarray(array).view(np.uint16) for array in both]
        tokens = np.asarray(state.tokens)
        for row, end in enumerate(np.asarray(state.length)):
            rows.append(Row(tokens[row, :end], [array[row] for array in arrays]))
    return rows


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of tokens at the start that are equal."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size
