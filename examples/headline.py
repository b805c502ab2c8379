"""The experiment of every speculative decoding paper, in one command: speed-up by task, temperature and batch.

    python examples/headline.py --vllm-python PYTHON                       # the shipped pair, its own prompts
    python examples/headline.py --target DIR --drafter DIR --vllm-python PYTHON \\
        --prompts mt-bench=question.jsonl humaneval=HumanEval.jsonl gsm8k=test.jsonl

Plain decoding, chains and a tree take turns; then each vLLM engine takes turns with our decoder of the same draft. A
cell is on the disk as soon as it is measured, and the same command measures what is missing. `docs/gpu.md` says
which files to download and how to read the result.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from eagle3_jax import DynamicTree, SpeculativeDecoder, load_drafter, load_target
from eagle3_jax.bench.contenders import Contender, DecoderContender
from eagle3_jax.bench.environment import environment, sha256_of_code, sha256_of_prompts
from eagle3_jax.bench.run import measure
from eagle3_jax.bench.tables import show, to_markdown, write_text
from eagle3_jax.files.prompts import Prompt, in_turn, read_prompts
from eagle3_jax.files.sources import bundled, locate
from eagle3_jax.files.writing import cache_directory
from validation.engines.vllm.bridge import EngineOptions, eagle3
from validation.engines.vllm.contender import VLLMContender
from validation.engines.vllm.process import Process

SCHEMA = 2
OURS = "ours"
KEPT = (
    "name", "decode_tokens_per_second", "total_tokens_per_second", "ratio", "acceptance", "first_token", "per_token",
    "bandwidth_share", "compile_seconds", "same_texts", "repeatable",
)  # fmt: skip
COLUMNS = [
    "prompts", "T", "batch", "method", "tokens/s", "over plain", "over vLLM", "τ", "accepted per position",
    "% of roofline", "same texts",
]  # fmt: skip


class Cell(NamedTuple):
    """What is measured at once: one set of prompts, temperature and batch, and who takes part."""

    rival: str
    prompts: str
    temperature: float
    batch: int

    @property
    def key(self) -> str:
        """Its name in the record."""
        return f"{self.prompts}, T={self.temperature:g}, batch {self.batch}, {self.rival}"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options, with what `--rehearse` makes smaller."""
    small = "--rehearse" in (sys.argv if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--target", help="Directory or hub id; the shipped target if left out.")
    add("--drafter", help="Of an EAGLE-3 head; the shipped one if left out.")
    add("--prompts", nargs="+", default=[], metavar="NAME=FILE", help="JSONL; the shipped prompts if left out.")
    add("--dtype", default="float32" if jax.default_backend() == "cpu" else "bfloat16")
    add("--weights", default="dense", help="As `eagle3 bench --weights`.")
    add("--batches", type=int, nargs="+", metavar="B", default=[1, 2] if small else [2**power for power in range(7)])
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    add("--chains", type=int, nargs="+", default=[3, 5], metavar="K", help="Lengths of chains, ours and vLLM's.")
    add("--tree", type=int, nargs=3, default=[60, 8, 10], metavar="N", help="Nodes, depth and top-k; 60 8 10.")
    add("--max-prompts", type=int, default=2 if small else 80, help="Of each set, or one batch where that is more.")
    add("--max-new-tokens", type=int, default=16 if small else 256, help="For each prompt, whatever the tokens are.")
    add("--repeats", type=int, default=2 if small else 5, help="Interleaved.")
    add("--vllm-python", type=Path, help="Interpreter of an environment with vLLM; without it vLLM is left out.")
    add("--vllm-memory", type=float, default=0.45, help="Share of a GPU's memory for vLLM.")
    add("--output", type=Path, default=Path("headline"), help="Directory of headline.json and headline.md.")
    add("--rehearse", action="store_true", help="Few prompts and tokens, and a record that says so.")
    given = parser.parse_args(arguments)
    if unnamed := [text for text in given.prompts if not all(text.partition("="))]:
        parser.error(f"--prompts {unnamed[0]}: expected NAME=FILE, such as gsm8k=test.jsonl")
    if min([1, *given.chains, *given.tree, *given.batches]) < 1 or min(given.temperatures) < 0:
        parser.error("--batches, --chains and --tree take numbers of at least 1, --temperatures of at least 0")
    return given


class Experiment:
    """The pair, the prompts and the record."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        self.path = given.output / "headline.json"
        self.target = load_target(given.target, dtype=given.dtype, weights=given.weights)
        self.drafter = load_drafter(given.drafter, target=self.target)
        self.sets = self._prompts()
        tree = DynamicTree(num_nodes=given.tree[0], max_depth=given.tree[1], top_k=given.tree[2])
        drafts: dict[str, Any] = {f"chain K={k}": {"num_speculative_tokens": k} for k in given.chains}
        drafts[f"tree N={tree.num_nodes}"] = {"tree": tree}
        self.decoders = {"plain": SpeculativeDecoder(self.target, stop_tokens=())}
        for name, draft in drafts.items():
            self.decoders[name] = SpeculativeDecoder(self.target, self.drafter, stop_tokens=(), **draft)
        self.record = self._record()

    def _prompts(self) -> dict[str, list[Prompt]]:
        """Sets under their names; the categories of the shipped file are sets."""
        read = lambda file: read_prompts(Path(file), self.target, max_new_tokens=self.given.max_new_tokens)
        sets = {name: read(file) for name, _, file in (text.partition("=") for text in self.given.prompts)}
        for prompt in [] if sets else read(bundled("prompts.jsonl")):
            sets.setdefault(prompt.category, []).append(prompt)
        return {name: in_turn(found, self.given.max_prompts) for name, found in sets.items()}

    def _record(self) -> dict[str, Any]:
        """What earlier runs measured under the same conditions, or a record without cells."""
        names = ("dtype", "weights", "tree", "max_prompts", "max_new_tokens", "repeats")
        about = environment(target=self.given.target, drafter=self.given.drafter)
        same = {
            "schema": SCHEMA,
            "rehearsal": self.given.rehearse,
            "code": sha256_of_code(),
            "device": f"{about['cpu']['model']}, {about['jax']['device']}",
            "target": about["target"],
            "drafter": about["drafter"],
            "options": {name: getattr(self.given, name) for name in names},
        }
        if not self.path.exists():
            return same | {"environment": about, "cells": {}}
        try:
            old = json.loads(self.path.read_text())
            other = [name for name in same if old.get(name) != same[name]]
        except (ValueError, AttributeError):
            raise ValueError(f"{self.path} is no record of this experiment; give another --output") from None
        if other:
            raise ValueError(f"{self.path} holds a run with another {', '.join(other)}; give another --output")
        return old

    def batch_of(self, cell: Cell) -> list[list[int]]:
        """Token ids of full batches; prompts come again where there are fewer than a batch."""
        tokens = [prompt.tokens for prompt in self.sets[cell.prompts]]
        count = max(len(tokens) // cell.batch, 1) * cell.batch
        return [tokens[index % len(tokens)] for index in range(count)]

    def missing(self) -> list[Cell]:
        """Cells that the record lacks; those of a vLLM engine are neighbours, since it is loaded once."""
        given = self.given
        cells = self.record["cells"]
        rivals = [OURS, *(["plain", *(f"chain K={k}" for k in given.chains)] if given.vllm_python else [])]
        every = itertools.starmap(Cell, itertools.product(rivals, self.sets, given.temperatures, sorted(given.batches)))
        same = lambda cell: cells.get(cell.key, {}).get("sha256_of_prompts") == sha256_of_prompts(self.batch_of(cell))
        return [cell for cell in every if not same(cell)]

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
                        found = self._measured(cell, engine)
                    except Exception as error:  # of one cell; the others are measured
                        found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
                    seconds = time.monotonic() - start
                    self.record["cells"][cell.key] = found | {"seconds": round(seconds, 1)}
                    write_text(self.path, json.dumps(self.record, indent=1) + "\n")
                    print(f"{cell.key}: {found.get('failed', 'measured')}, {seconds:.0f} s", flush=True)

    def _engine(self, rival: str, closing: contextlib.ExitStack) -> Any:
        """A vLLM engine, compiled, with the head where the rival drafts."""
        process = Process(self.given.vllm_python, threads=len(os.sched_getaffinity(0)))
        closing.callback(process.close)
        self.record["environment"]["vllm"] = process.versions
        head = locate(self.given.drafter, "eagle3")
        length = 0 if rival == "plain" else int(rival.partition("=")[2])
        longest = max(len(prompt.tokens) for found in self.sets.values() for prompt in found)
        options = EngineOptions(
            model=str(locate(self.given.target, "target")),
            dtype="float32" if self.given.dtype == "mixed" else self.given.dtype,
            speculative=eagle3(head, length) if length else None,
            max_model_len=min(longest + self.given.max_new_tokens + 16, self.target.max_positions),
            max_num_seqs=max(self.given.batches),
            gpu_memory_utilization=self.given.vllm_memory,
            eager=False,
        )
        engine = process.engine(options)
        if process.versions["device"] == "cpu" and length:  # the CPU build samples wrongly under speculation
            closing.enter_context(engine.repaired("sampling"))
        return engine

    def _measured(self, cell: Cell, engine: Any) -> dict[str, Any]:
        """One cell: contenders in turn, ratios of neighbours in time to plain decoding or to vLLM."""
        dtype = self.given.dtype
        heat = cell.temperature
        names = list(self.decoders) if cell.rival == OURS else [cell.rival]
        contenders: list[Contender] = [DecoderContender(name, dtype, self.decoders[name], heat) for name in names]
        if engine is not None:
            contenders.append(VLLMContender(f"vLLM {cell.rival}", dtype, engine, heat))
        prompts = self.batch_of(cell)
        report = measure(
            contenders,
            prompts,
            max_new_tokens=self.given.max_new_tokens,
            repeats=self.given.repeats,
            baselines=[contenders[0 if engine is None else -1].name],
            batch_size=cell.batch,
            cost_rounds=0,
            streams=0,
            large=2**24 if self.given.rehearse else 2**28 if jax.default_backend() == "cpu" else 2**31,
        )
        rows = [{name: value for name, value in dataclasses.asdict(row).items() if name in KEPT} for row in report.rows]
        for row in rows:
            row["same_texts"] = None if heat else row["same_texts"]  # sampled texts differ
        return cell._asdict() | {
            "rows": rows,
            "baseline": report.baseline,
            "num_prompts": len(prompts),
            "distinct_prompts": len(self.sets[cell.prompts]),
            "programs_after_warm_up": report.programs_after_warm_up,
            "bytes_per_second": report.bytes_per_second,
            "sha256_of_prompts": sha256_of_prompts(prompts),
        }


def table(record: dict[str, Any]) -> Iterator[list[str]]:
    """A row for each method and cell. Where vLLM took part, our own row gives only the ratio to it and equal texts."""
    cells = [cell for cell in record["cells"].values() if "rows" in cell]
    cells.sort(key=lambda cell: (cell["prompts"], cell["temperature"], cell["batch"], cell["rival"] != OURS))
    place = lambda cell, name: (cell["prompts"], cell["temperature"], cell["batch"], name)
    beside = {place(cell, row["name"]): row for cell in cells if cell["rival"] != OURS for row in cell["rows"]}
    for cell, row in ((one, row) for one in cells for row in one["rows"]):
        name = row["name"]
        ours = cell["rival"] == OURS
        found = row["acceptance"]
        if not ours and not name.startswith("vLLM"):
            continue
        other = beside.get(place(cell, name.removeprefix("vLLM ")))
        texts = (row if ours else other or row)["same_texts"]
        yield [
            cell["prompts"],
            f"{cell['temperature']:g}",
            str(cell["batch"]),
            name,
            spread(row["decode_tokens_per_second"]),
            spread(row["ratio"]) if ours and name != cell["baseline"] else "",
            spread(other["ratio"]) if ours and other else "",
            "" if found is None else f"{found['mean_acceptance_length']:.2f}",
            "" if found is None else " ".join(f"{share:.2f}" for share in found["per_position"]),
            "" if row["bandwidth_share"] is None else f"{100 * row['bandwidth_share']:.0f}",
            "" if texts is None or name == "plain" else f"{texts} of {cell['num_prompts']}",
        ]


def spread(one: dict[str, float]) -> str:
    """Median and quartiles."""
    low, middle, high = (show(float(f"{one[name]:.3g}")) for name in ("low", "median", "high"))
    return f"{middle} ({low}\N{EN DASH}{high})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, then writes the table of everything in the record."""
    given = parsed(arguments)
    try:
        experiment = Experiment(given)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    experiment.run()
    text = "A REHEARSAL: no figure counts.\n\n" * given.rehearse + to_markdown(COLUMNS, list(table(experiment.record)))
    print(text)
    write_text(given.output / "headline.md", text + "\n")
    if missing := experiment.missing():
        raise SystemExit(f"error: {len(missing)} cells failed; the same command measures them again: {missing[0].key}")


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # vLLM needs its share of the GPU
    if kept := cache_directory("compiled"):
        jax.config.update("jax_compilation_cache_dir", str(kept))  # most of a first run is compiling
    main()
