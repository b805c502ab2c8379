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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import headline_page  # beside this file
import jax

from eagle3_jax import DynamicTree, SpeculativeDecoder, load_drafter, load_target
from eagle3_jax.bench.contenders import Contender, DecoderContender
from eagle3_jax.bench.environment import environment, sha256_of_code, sha256_of_prompts
from eagle3_jax.bench.run import measure
from eagle3_jax.bench.tables import write_text
from eagle3_jax.cli._compiled import default_directory
from eagle3_jax.engines.vllm.bridge import EngineOptions, eagle3
from eagle3_jax.engines.vllm.contender import VLLMContender
from eagle3_jax.engines.vllm.process import Process
from eagle3_jax.models.config import Eagle3Config
from eagle3_jax.prompts import Prompt, Renderer, in_turn, read_prompts
from eagle3_jax.sources import bundled, locate
from eagle3_jax.theory.accelerators import accelerator_named, custom_accelerator
from eagle3_jax.theory.bounds import round_bound
from eagle3_jax.theory.memory import Deployment

SCHEMA = 1
OURS = "ours"


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", help="Directory or hub id; the shipped target if left out.")
    add("--drafter", help="Of an EAGLE-3 head; the shipped one if left out.")
    add("--prompts", nargs="+", default=[], metavar="NAME=FILE", help="JSONL; the shipped prompts if left out.")
    add("--dtype", help="bfloat16 on accelerators, float32 on CPUs if left out.")
    add("--batches", type=int, nargs="+", metavar="B", help="1 2 4 8 16 32 64 if left out.")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    add("--chains", type=int, nargs="+", default=[3, 5], metavar="K", help="Lengths of chains, ours and vLLM's.")
    add("--tree", type=int, nargs=3, default=[60, 8, 10], metavar="N", help="Nodes, depth and top-k; 60 8 10.")
    add("--max-prompts", type=int, help="Of each set, or one batch where that is more; 80 if left out.")
    add("--max-new-tokens", type=int, help="For each prompt, whatever the tokens are; 256 if left out.")
    add("--repeats", type=int, help="Interleaved; 5 if left out.")
    add("--vllm-python", type=Path, help="Interpreter of an environment with vLLM; without it vLLM is left out.")
    add("--vllm-memory", type=float, default=0.45, help="Share of a GPU's memory for vLLM.")
    add("--output", type=Path, default=Path("headline"), help="Directory of headline.json, .md and .png.")
    add("--rehearse", action="store_true", help="Few prompts and tokens, and a record that says so.")
    given = parser.parse_args(arguments)
    if unnamed := [text for text in given.prompts if not all(text.partition("="))]:
        parser.error(f"--prompts {unnamed[0]}: expected NAME=FILE, such as gsm8k=test.jsonl")
    if min([1, *given.chains, *given.tree, *(given.batches or [])]) < 1 or min(given.temperatures) < 0:
        parser.error("--batches, --chains and --tree take numbers of at least 1, --temperatures of at least 0")
    small = {"batches": [1, 2], "max_prompts": 2, "max_new_tokens": 16, "repeats": 2}
    full = {"batches": [2**power for power in range(7)], "max_prompts": 80, "max_new_tokens": 256, "repeats": 5}
    for name, value in (small if given.rehearse else full).items():
        setattr(given, name, value if getattr(given, name) is None else getattr(given, name))
    given.dtype = given.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return given


class Experiment:
    """The pair, the prompts and the record."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        self.target = load_target(given.target, dtype=given.dtype)
        self.drafter = load_drafter(given.drafter, target=self.target)
        self.sets = self._prompts()
        self.longest = max(len(prompt.tokens) for found in self.sets.values() for prompt in found)
        tree = DynamicTree(num_nodes=given.tree[0], max_depth=given.tree[1], top_k=given.tree[2])
        drafts: dict[str, Any] = {f"chain K={k}": {"num_speculative_tokens": k} for k in given.chains}
        drafts[f"tree N={tree.num_nodes}"] = {"tree": tree}
        drafting = lambda draft: SpeculativeDecoder(self.target, self.drafter, stop_tokens=(), **draft)
        self.decoders = {"plain": SpeculativeDecoder(self.target, stop_tokens=())}
        self.decoders |= {name: drafting(draft) for name, draft in drafts.items()}
        self.record = self._record()

    def _prompts(self) -> dict[str, list[Prompt]]:
        """Sets under their names; the categories of the shipped file are sets."""
        files = dict(text.partition("=")[::2] for text in self.given.prompts)
        renderer = Renderer.of(locate(self.given.target, "target"))
        limit = self.given.max_new_tokens
        read = lambda file: read_prompts(Path(file), self.target, renderer, max_new_tokens=limit)
        if files:
            return {name: in_turn(read(file), self.given.max_prompts) for name, file in files.items()}
        shipped = read(bundled("prompts.jsonl"))
        sets = {prompt.category: [one for one in shipped if one.category == prompt.category] for prompt in shipped}
        return {name: in_turn(found, self.given.max_prompts) for name, found in sets.items()}

    def _record(self) -> dict[str, Any]:
        """What earlier runs measured under the same conditions, or a record without cells."""
        names = ("dtype", "tree", "max_prompts", "max_new_tokens", "repeats")
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
        path = self.given.output / "headline.json"
        if not path.exists():
            return same | {"environment": about, "cells": {}}
        try:
            old = json.loads(path.read_text())
            other = [name for name in same if old.get(name) != json.loads(json.dumps(same[name]))]
        except (ValueError, AttributeError):
            raise ValueError(f"{path} is no record of this experiment; give another --output, or remove it") from None
        if other:
            raise ValueError(f"{path} holds a run with another {', '.join(other)}; give another --output")
        return old

    def batch_of(self, cell: Cell) -> list[list[int]]:
        """Token ids of full batches; prompts come again where there are fewer than a batch."""
        tokens = [prompt.tokens for prompt in self.sets[cell.prompts]]
        count = max(len(tokens) // cell.batch, 1) * cell.batch
        return [tokens[index % len(tokens)] for index in range(count)]

    def cells(self) -> list[Cell]:
        """All that are asked for; those of a vLLM engine are neighbours, since it is loaded once."""
        given = self.given
        rivals = [OURS, *(["plain", *(f"chain K={k}" for k in given.chains)] if given.vllm_python else [])]
        where = list(itertools.product(given.temperatures, sorted(given.batches)))
        return [Cell(rival, name, *at) for rival in rivals for name in self.sets for at in where]

    def is_measured(self, cell: Cell) -> bool:
        """Whether the record has it, of the same prompts."""
        found = self.record["cells"].get(cell.key, {})
        return "rows" in found and found["sha256_of_prompts"] == sha256_of_prompts(self.batch_of(cell))

    def run(self) -> None:
        """Measure what is missing; write the record after every cell."""
        missing = [cell for cell in self.cells() if not self.is_measured(cell)]
        for rival in dict.fromkeys(cell.rival for cell in missing):
            with contextlib.ExitStack() as closing:
                engine: Any = None
                for cell in [one for one in missing if one.rival == rival]:
                    start = time.monotonic()
                    try:
                        if rival != OURS and engine is None:
                            engine = self._engine(rival, closing)
                        found = self._measured(cell, engine)
                    except Exception as error:  # of one cell; the others are measured
                        found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
                    self.record["cells"][cell.key] = found | {"seconds": round(time.monotonic() - start, 1)}
                    write_text(self.given.output / "headline.json", json.dumps(self.record, indent=1) + "\n")
                    print(
                        f"{cell.key}: {found.get('failed', 'measured')}, {time.monotonic() - start:.0f} s", flush=True
                    )

    def _engine(self, rival: str, closing: contextlib.ExitStack) -> Any:
        """A vLLM engine, compiled, with the head where the rival drafts."""
        process = Process(self.given.vllm_python, threads=len(os.sched_getaffinity(0)))
        closing.callback(process.close)
        self.record["environment"]["vllm"] = process.versions
        head, length = locate(self.given.drafter, "eagle3"), 0 if rival == "plain" else int(rival.partition("=")[2])
        options = EngineOptions(
            model=str(locate(self.given.target, "target")),
            dtype="float32" if self.given.dtype == "mixed" else self.given.dtype,
            speculative=eagle3(head, length) if length else None,
            max_model_len=min(self.longest + self.given.max_new_tokens + 16, self.target.max_positions),
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
        names = list(self.decoders) if cell.rival == OURS else [cell.rival]
        contenders: list[Contender] = [
            DecoderContender(name, self.given.dtype, self.decoders[name], cell.temperature) for name in names
        ]
        if engine is not None:
            contenders.append(VLLMContender(f"vLLM {cell.rival}", self.given.dtype, engine, cell.temperature))
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
        kept = ("name", "decode_tokens_per_second", "total_tokens_per_second", "ratio", "acceptance", "first_token",
                "per_token", "bandwidth_share", "compile_seconds", "same_texts", "repeatable")  # fmt: skip
        rows = [{name: value for name, value in dataclasses.asdict(row).items() if name in kept} for row in report.rows]
        context = sum(map(len, prompts)) // len(prompts) + self.given.max_new_tokens // 2
        for row in rows:
            row["roofline"] = self._roofline(row, cell, context, report.bytes_per_second)
            if cell.temperature:
                row["same_texts"] = None  # sampled texts differ
        return cell._asdict() | {
            "rows": rows,
            "baseline": report.baseline,
            "num_prompts": len(prompts),
            "distinct_prompts": len(self.sets[cell.prompts]),
            "programs_after_warm_up": report.programs_after_warm_up,
            "bytes_per_second": report.bytes_per_second,
            "sha256_of_prompts": sha256_of_prompts(prompts),
        }

    def _roofline(self, row: dict[str, Any], cell: Cell, context: int, measured: float | None) -> dict[str, Any]:
        """The theory's upper bound at this τ, by the datasheet or the bandwidth measured here, and the share of it."""
        try:
            accelerator = accelerator_named(jax.devices()[0].device_kind)
        except ValueError:
            accelerator = custom_accelerator(gb_per_s=(measured or 1.0) / 1e9)
        method, tau = row["name"].removeprefix("vLLM "), (row["acceptance"] or {}).get("mean_acceptance_length", 1.0)
        config = getattr(self.drafter.drafter, "config", None)
        # The passes that draft a tree are left out, so its bound is the verification alone.
        head = config if method.startswith("chain") and isinstance(config, Eagle3Config) else None
        wide = "float32" if self.given.dtype == "float32" else "bfloat16"
        deployment = Deployment(
            target=self.target.model.config,  # type: ignore[attr-defined]
            head=head, accelerator=accelerator, weights=wide, cache=wide,
        )  # fmt: skip
        drafted = self.decoders[method].loop.drafter.num_nodes - 1
        bound = round_bound(deployment, batch=cell.batch, context=context, num_draft_tokens=drafted)
        most = bound.tokens_per_second(tau)
        share = row["decode_tokens_per_second"]["median"] / most
        return {"accelerator": accelerator.name, "tokens_per_second": most, "share": share}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then write the table and the plot of everything in the record."""
    given = parsed(arguments)
    try:
        experiment = Experiment(given)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    experiment.run()
    print(headline_page.write(experiment.record, given.output))
    if missing := [cell.key for cell in experiment.cells() if not experiment.is_measured(cell)]:
        raise SystemExit(f"error: {len(missing)} cells failed; the same command measures them again: {missing[0]}, ...")


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # vLLM needs its share of the GPU
    if kept := default_directory():
        jax.config.update("jax_compilation_cache_dir", str(kept))  # most of a first run is compiling
    main()
