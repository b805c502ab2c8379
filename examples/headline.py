"""The experiment of every paper, in one command: speed-up by task, temperature and batch.

    python examples/headline.py --vllm-python PYTHON       # the shipped pair, its own prompts
    python examples/headline.py --target DIR --drafter DIR --vllm-python PYTHON \\
        --prompts mt-bench=question.jsonl humaneval=HumanEval.jsonl gsm8k=test.jsonl

Plain decoding, chains and a tree take turns; then each vLLM engine takes turns with our decoder of
the same draft. A cell is written as soon as it is measured, and the same command measures what is
missing. `docs/gpu.md` says which files to download and how to read the result.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from eagle3_jax import DynamicTree, SpeculativeDecoder, load_drafter, load_target
from eagle3_jax.bench.contenders import Contender, DecoderContender
from eagle3_jax.bench.run import measure
from eagle3_jax.devices.compilation import keep_compiled_programs
from eagle3_jax.files.sources import bundled, locate
from eagle3_jax.measure.environment import environment, sha256_of_code, sha256_of_prompts
from eagle3_jax.measure.records import failure, read_record, write_record
from eagle3_jax.measure.tables import show, to_markdown, write_text
from eagle3_jax.prompts.benchmark import Prompt, in_turn, read_prompts
from validation.engines.vllm.bridge import EngineOptions, eagle3
from validation.engines.vllm.contender import VLLMContender
from validation.engines.vllm.process import Process

SCHEMA = 2
OURS = "ours"
RECORDED = (
    "name", "decode_tokens_per_second", "total_tokens_per_second", "ratio", "acceptance",
    "first_token", "per_token", "bandwidth_share", "compile_seconds", "same_texts", "repeatable",
)  # fmt: skip
COLUMNS = [
    "prompts", "T", "batch", "method", "tokens/s", "over plain", "over vLLM", "τ",
    "accepted per position", "% of roofline", "same texts",
]  # fmt: skip


class Cell(NamedTuple):
    """One measurement: a set of prompts, a temperature, a batch size, and the contenders."""

    rival: str  #: :data:`OURS`, or the draft that a vLLM engine and our decoder have in common.
    prompts: str
    temperature: float
    batch: int

    @property
    def key(self) -> str:
        """Name in the record."""
        return f"{self.prompts}, T={self.temperature:g}, batch {self.batch}, {self.rival}"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options; `--rehearse` has smaller defaults."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--target", help="Directory or hub id; the shipped target if left out.")
    add("--drafter", help="Directory or hub id of an EAGLE-3 head; the shipped one if left out.")
    add(
        "--prompts",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="JSONL; the shipped prompts if left out.",
    )
    add("--dtype", default="float32" if jax.default_backend() == "cpu" else "bfloat16")
    add("--weights", default="dense", help="As `eagle3 bench --weights`.")
    add("--batches", type=int, nargs="+", metavar="B", default=[2**power for power in range(7)])
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    add(
        "--chains",
        type=int,
        nargs="+",
        default=[3, 5],
        metavar="K",
        help="Lengths of chains, ours and vLLM's.",
    )
    add(
        "--tree",
        type=int,
        nargs=3,
        default=[60, 8, 10],
        metavar="N",
        help="Nodes, depth and top-k; 60 8 10.",
    )
    add(
        "--max-prompts",
        type=int,
        default=80,
        help="Prompts of each set, or one batch where that is more.",
    )
    add(
        "--max-new-tokens",
        type=int,
        default=256,
        help="New tokens per prompt; stop tokens are ignored.",
    )
    add("--repeats", type=int, default=5, help="Interleaved repeats.")
    add(
        "--vllm-python",
        type=Path,
        help="Interpreter of an environment with vLLM; without it vLLM is left out.",
    )
    add("--vllm-memory", type=float, default=0.45, help="Share of a GPU's memory for vLLM.")
    add(
        "--output",
        type=Path,
        default=Path("headline"),
        help="Directory of headline.json and headline.md.",
    )
    add(
        "--rehearse", action="store_true", help="Few prompts and tokens, and a record that says so."
    )
    if "--rehearse" in (sys.argv if arguments is None else arguments):
        parser.set_defaults(batches=[1, 2], max_prompts=2, max_new_tokens=16, repeats=2)
    options = parser.parse_args(arguments)

    if unnamed := [text for text in options.prompts if not all(text.partition("="))]:
        parser.error(f"--prompts {unnamed[0]}: expected NAME=FILE, such as gsm8k=test.jsonl")
    if (
        min([1, *options.chains, *options.tree, *options.batches]) < 1
        or min(options.temperatures) < 0
    ):
        parser.error(
            "--batches, --chains and --tree take numbers of at least 1, --temperatures of at"
            " least 0"
        )
    return options


class Experiment:
    """The pair, the prompts and the record."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.path = options.output / "headline.json"
        self.target = load_target(options.target, dtype=options.dtype, weights=options.weights)
        self.drafter = load_drafter(options.drafter, target=self.target)
        self.sets = self._prompts()

        nodes, depth, top_k = options.tree
        drafts: dict[str, Any] = {
            f"chain K={k}": {"num_speculative_tokens": k} for k in options.chains
        }
        drafts[f"tree N={nodes}"] = {
            "tree": DynamicTree(num_nodes=nodes, max_depth=depth, top_k=top_k)
        }
        self.decoders = {"plain": SpeculativeDecoder(self.target, stop_tokens=())}
        for name, draft in drafts.items():
            self.decoders[name] = SpeculativeDecoder(
                self.target, self.drafter, stop_tokens=(), **draft
            )
        self.record = self._record()

    def _prompts(self) -> dict[str, list[Prompt]]:
        """Reads the sets of prompts by name; the categories of the shipped file are sets."""

        def read(file: str | Path) -> list[Prompt]:
            limit = self.options.max_new_tokens
            return read_prompts(Path(file), self.target, max_new_tokens=limit)

        sets = {
            name: read(file)
            for name, _, file in (text.partition("=") for text in self.options.prompts)
        }
        for prompt in [] if sets else read(bundled("prompts.jsonl")):
            sets.setdefault(prompt.category, []).append(prompt)
        return {name: in_turn(prompts, self.options.max_prompts) for name, prompts in sets.items()}

    def _record(self) -> dict[str, Any]:
        """Reads what earlier runs measured under the same conditions; else a new record."""
        names = ("dtype", "weights", "tree", "max_prompts", "max_new_tokens", "repeats")
        about = environment(target=self.options.target, drafter=self.options.drafter)
        conditions = {
            "schema": SCHEMA,
            "rehearsal": self.options.rehearse,
            "code": sha256_of_code(),
            "device": f"{about['cpu']['model']}, {about['jax']['device']}",
            "target": about["target"],
            "drafter": about["drafter"],
            "options": {name: getattr(self.options, name) for name in names},
        }

        return read_record(self.path, conditions) or conditions | {
            "environment": about,
            "cells": {},
        }

    def batch_of(self, cell: Cell) -> list[list[int]]:
        """Returns the token ids of full batches; prompts are repeated to fill one."""
        tokens = [prompt.tokens for prompt in self.sets[cell.prompts]]
        count = max(len(tokens) // cell.batch, 1) * cell.batch
        return [tokens[index % len(tokens)] for index in range(count)]

    def missing(self) -> list[Cell]:
        """Returns the cells that the record lacks.

        Those of a vLLM engine are neighbors, since it is loaded once.
        """
        options = self.options
        rivals = [OURS]
        if options.vllm_python:
            rivals += ["plain", *(f"chain K={k}" for k in options.chains)]
        axes = (rivals, self.sets, options.temperatures, sorted(options.batches))

        def is_missing(cell: Cell) -> bool:
            figures = self.record["cells"].get(cell.key, {})
            # A failed cell has no hash.
            return figures.get("sha256_of_prompts") != sha256_of_prompts(self.batch_of(cell))

        cells = itertools.starmap(Cell, itertools.product(*axes))
        return list(filter(is_missing, cells))

    def run(self) -> None:
        """Measures what is missing; writes the record after every cell."""
        for rival, cells in itertools.groupby(self.missing(), key=lambda cell: cell.rival):
            with contextlib.ExitStack() as closing:
                engine: Any = None
                for cell in cells:
                    start = time.monotonic()
                    try:
                        if rival != OURS and engine is None:
                            engine = self._engine(rival, closing)
                        figures = self._measure(cell, engine)
                    except Exception as error:  # of one cell; the others are measured
                        figures = failure(error)

                    seconds = time.monotonic() - start
                    self.record["cells"][cell.key] = figures | {"seconds": round(seconds, 1)}
                    write_record(self.path, self.record)
                    print(
                        f"{cell.key}: {figures.get('failed', 'measured')}, {seconds:.0f} s",
                        flush=True,
                    )

    def _engine(self, rival: str, closing: contextlib.ExitStack) -> Any:
        """Loads a vLLM engine, compiled, with the head where the rival drafts."""
        options = self.options
        process = Process(options.vllm_python, threads=len(os.sched_getaffinity(0)))
        closing.callback(process.close)
        self.record["environment"]["vllm"] = process.versions

        head = locate(options.drafter, "eagle3")
        length = 0 if rival == "plain" else int(rival.partition("=")[2])
        longest = max(len(prompt.tokens) for prompts in self.sets.values() for prompt in prompts)
        engine_options = EngineOptions(
            model=str(locate(options.target, "target")),
            dtype="float32" if options.dtype == "mixed" else options.dtype,
            speculative=eagle3(head, length) if length else None,
            max_model_len=min(longest + options.max_new_tokens + 16, self.target.max_positions),
            max_num_seqs=max(options.batches),
            gpu_memory_utilization=options.vllm_memory,
            eager=False,
        )
        engine = process.engine(engine_options)
        # The CPU build samples wrongly under speculation.
        if process.versions["device"] == "cpu" and length:
            closing.enter_context(engine.repaired("sampling"))
        return engine

    def _measure(self, cell: Cell, engine: Any) -> dict[str, Any]:
        """Measures one cell: contenders in turn, ratios to plain decoding or to vLLM."""
        options = self.options
        temperature = cell.temperature
        names = list(self.decoders) if cell.rival == OURS else [cell.rival]
        contenders: list[Contender] = [
            DecoderContender(name, options.dtype, self.decoders[name], temperature)
            for name in names
        ]
        baseline = contenders[0].name
        if engine is not None:
            baseline = f"vLLM {cell.rival}"
            contenders.append(VLLMContender(baseline, options.dtype, engine, temperature))

        prompts = self.batch_of(cell)
        large = 2**28 if jax.default_backend() == "cpu" else 2**31
        report = measure(
            contenders,
            prompts,
            max_new_tokens=options.max_new_tokens,
            repeats=options.repeats,
            baselines=[baseline],
            batch_size=cell.batch,
            cost_rounds=0,
            streams=0,
            large=2**24 if options.rehearse else large,
        )

        measured = map(dataclasses.asdict, report.rows)
        rows = [
            {name: figure for name, figure in row.items() if name in RECORDED} for row in measured
        ]
        for row in rows:
            row["same_texts"] = None if temperature else row["same_texts"]  # sampled texts differ
        return cell._asdict() | {
            "rows": rows,
            "baseline": report.baseline,
            "num_prompts": len(prompts),
            "distinct_prompts": len(self.sets[cell.prompts]),
            "programs_after_warm_up": report.programs_after_warm_up,
            "bytes_per_second": report.bytes_per_second,
            "sha256_of_prompts": sha256_of_prompts(prompts),
        }


def table(record: dict[str, Any]) -> list[list[str]]:
    """Returns a row for each method and cell.

    Next to vLLM our row gives only the ratio to it and the equal texts.
    """
    cells = [cell for cell in record["cells"].values() if "rows" in cell]
    cells.sort(key=lambda cell: (*setting_of(cell), cell["rival"] != OURS))

    next_to_vllm = {
        (*setting_of(cell), row["name"]): row
        for cell in cells
        if cell["rival"] != OURS
        for row in cell["rows"]
    }

    lines = []
    for cell in cells:
        for row in cell["rows"]:
            if cell["rival"] == OURS or row["name"].startswith("vLLM"):
                draft = row["name"].removeprefix("vLLM ")
                lines.append(table_row(cell, row, next_to_vllm.get((*setting_of(cell), draft))))
    return lines


def setting_of(cell: dict[str, Any]) -> tuple[str, float, int]:
    """Returns what the cells of ours and those next to vLLM have in common."""
    return cell["prompts"], cell["temperature"], cell["batch"]


def table_row(
    cell: dict[str, Any], row: dict[str, Any], next_to_vllm: dict[str, Any] | None
) -> list[str]:
    """Returns one row of the table.

    Args:
        cell: The cell of the record.
        row: A contender of the cell.
        next_to_vllm: Our decoder of the same draft in the cell in which it took turns with vLLM;
            ``None`` without one.
    """
    name = row["name"]
    ours = cell["rival"] == OURS
    acceptance = row["acceptance"]
    texts = (row if ours else next_to_vllm or row)["same_texts"]

    return [
        cell["prompts"],
        f"{cell['temperature']:g}",
        str(cell["batch"]),
        name,
        spread(row["decode_tokens_per_second"]),
        spread(row["ratio"]) if ours and name != cell["baseline"] else "",
        spread(next_to_vllm["ratio"]) if ours and next_to_vllm else "",
        f"{acceptance['mean_acceptance_length']:.2f}" if acceptance else "",
        " ".join(f"{share:.2f}" for share in acceptance["per_position"]) if acceptance else "",
        "" if row["bandwidth_share"] is None else f"{100 * row['bandwidth_share']:.0f}",
        "" if texts is None or name == "plain" else f"{texts} of {cell['num_prompts']}",
    ]


def spread(figure: dict[str, float]) -> str:
    """Returns median and quartiles as text."""
    low, middle, high = (show(float(f"{figure[name]:.3g}")) for name in ("low", "median", "high"))
    return f"{middle} ({low}\N{EN DASH}{high})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, then writes the table of everything in the record."""
    options = parsed(arguments)
    try:
        experiment = Experiment(options)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None

    experiment.run()

    warning = "A REHEARSAL: no figure counts.\n\n" * options.rehearse
    text = warning + to_markdown(COLUMNS, table(experiment.record))
    print(text)
    write_text(options.output / "headline.md", text + "\n")

    if missing := experiment.missing():
        raise SystemExit(
            f"error: {len(missing)} cells failed; the same command measures them again:"
            f" {missing[0].key}"
        )


if __name__ == "__main__":
    # vLLM needs its share of the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    keep_compiled_programs(None)  # most of a first run is compiling
    main()
