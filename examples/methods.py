"""Every drafting method on one target and the same prompts: tokens a round, costs and speed.

Each method takes turns with plain decoding, in one process after the other methods.

Heads are directories as ``eagle3 train head --method NAME`` writes them, each named after its
method; what needs no training and the shipped EAGLE-3 head take part by themselves::

    python examples/methods.py --heads heads --output docs/recorded/methods.json
    python docs/recorded/write_tables.py # puts the record into the tables of README.md and docs/methods/index.md
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import eagle3_jax as e3
from eagle3_jax.bench.contenders import DecoderContender
from eagle3_jax.bench.results import Row
from eagle3_jax.bench.run import measure
from eagle3_jax.files.sources import bundled
from eagle3_jax.load import named_drafter
from eagle3_jax.measure.environment import committable, environment, sha256_of_prompts, source
from eagle3_jax.measure.records import write_record
from eagle3_jax.prompts.benchmark import in_turn, read_prompts
from eagle3_jax.topology import tree_name

RECORDED = (
    "lossless",
    "same_texts",
    "num_draft_steps",
    "verify_cost",
    "draft_cost",
    "predicted_ratio",
    "ratio",
)


def trained(heads: Path | None) -> dict[str, Path]:
    """Returns the directories of heads by method; a head that is still in training has no description yet."""
    directories = sorted(heads.iterdir()) if heads else []
    return {
        directory.name: directory
        for directory in directories
        if (directory / "config.json").is_file()
    }


def drafters(
    target: e3.LoadedTarget, heads: Path | None, named: str
) -> Iterator[tuple[str, e3.LoadedDrafter]]:
    """Yields the methods by name; those without files first."""
    for name in named.split(","):
        drafter = named_drafter(name, target)
        assert drafter is not None, "plain decoding takes part anyway"
        yield (
            name,
            drafter
            if isinstance(drafter, e3.LoadedDrafter)
            else e3.LoadedDrafter(drafter, name=name),
        )
    directories: dict[str, Path | None] = {"eagle3": None} | trained(
        heads
    )  # the shipped head, unless one is trained
    for name, directory in directories.items():
        yield name, e3.load_drafter(directory, target=target)


def num_parameters(drafter: e3.LoadedDrafter, target: e3.LoadedTarget) -> int:
    """Counts parameters of the drafter that it does not share with the target, without tables of ids."""
    borrowed = (
        drafter.params.get("output") if isinstance(drafter.params, dict) else None
    )  # a transposed copy, if tied
    shared = {id(leaf) for leaf in jax.tree.leaves((target.params, borrowed))}
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(drafter.params) if id(leaf) not in shared}
    return sum(leaf.size for leaf in leaves.values() if jnp.issubdtype(leaf.dtype, jnp.floating))


def recorded(row: Row, method: str, draft: str, parameters: int) -> dict[str, Any]:
    """Returns the figures of a row that the tables show or that judge it."""
    figures = dataclasses.asdict(row)
    tasks = {task.pop("task"): task for task in figures["tasks"]}
    for task in tasks.values():
        acceptance = task.pop("acceptance")
        task["mean_acceptance_length"] = acceptance and acceptance["mean_acceptance_length"]
    return {
        "method": method,
        "draft": draft,
        "parameters": parameters,
        **{name: figures[name] for name in RECORDED},
        "tokens_per_second": figures["decode_tokens_per_second"],
        "tasks": tasks,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measures and writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--heads", type=Path, help="directory with a trained head per method, under its name")
    add("--named", default="ngram,suffix,layer-skip=3", help="drafters without files")
    chains = "lengths; those that a head does not reach are left out"
    add("--chains", type=int, nargs="+", default=[3, 5, 7], metavar="K", help=chains)
    add("--tree", type=int, nargs=3, default=[8, 5, 2], metavar="N", help="nodes, depth and top-k")
    add("--dtype", default="mixed")
    add("--prompts", type=int, default=8, help="prompts of each kind")
    add("--max-new-tokens", type=int, default=64)
    add("--repeats", type=int, default=3)
    add("--output", type=Path, help="JSON file; standard output when left out")
    options = parser.parse_args(arguments)
    target = e3.load_target(dtype=options.dtype)
    shipped = read_prompts(bundled("prompts.jsonl"), target, max_new_tokens=options.max_new_tokens)
    prompts = in_turn(shipped, options.prompts * len({prompt.category for prompt in shipped}))
    nodes, depth, top_k = options.tree
    tree = e3.DynamicTree(num_nodes=nodes, max_depth=depth, top_k=top_k)
    shapes: dict[str, dict[str, Any]] = {
        f"K={k}": {"num_speculative_tokens": k} for k in options.chains
    }
    shapes[tree_name(tree)] = {"tree": tree}
    rows = []
    missing = []
    compiled_late = 0
    for method, drafter in drafters(target, options.heads, options.named):
        plain = e3.SpeculativeDecoder(target, stop_tokens=())
        contenders = [DecoderContender("plain", options.dtype, plain)]
        for draft, shape in shapes.items():
            try:
                decoder = e3.SpeculativeDecoder(target, drafter, stop_tokens=(), **shape)
            except ValueError as error:
                missing.append({"method": method, "draft": draft, "reason": str(error)})
                continue
            contenders.append(DecoderContender(f"{method} {draft}", options.dtype, decoder))
        report = measure(
            contenders,
            [prompt.tokens for prompt in prompts],
            tasks=[prompt.category for prompt in prompts],
            max_new_tokens=options.max_new_tokens,
            repeats=options.repeats,
            baselines=["plain"],
            streams=0,
            on_progress=lambda step: print(step, file=sys.stderr, flush=True),
        )
        compiled_late += report.programs_after_warm_up
        parameters = num_parameters(drafter, target)
        for row in report.rows:
            if row.name != "plain":
                draft = row.name.removeprefix(f"{method} ")
                rows.append(recorded(row, method.partition("=")[0], draft, parameters))
        # The programs of all methods together are more than a process may map.
        del contenders, report
        jax.clear_caches()
    heads = {name: source(str(directory), "") for name, directory in trained(options.heads).items()}
    command_line = shlex.join(sys.argv[1:] if arguments is None else arguments)
    record = {
        "command": f"python examples/methods.py {committable(command_line)}".strip(),
        "about": environment() | {"heads": heads},
        "prompts": {
            "names": [prompt.name for prompt in prompts],
            "sha256": sha256_of_prompts([prompt.tokens for prompt in prompts]),
        },
        "dtype": options.dtype,
        "named": options.named,
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "programs_after_warm_up": compiled_late,
        "rows": rows,
        "missing": missing,
    }
    if options.output is None:
        print(json.dumps(record, indent=1))
    else:
        write_record(options.output, record)


if __name__ == "__main__":
    main()
