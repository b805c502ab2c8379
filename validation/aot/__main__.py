"""Compile the programs of the loop for an accelerator that is not here, and say what they became.

python -m validation.aot --platform cuda:h200 --draft chain5 tree60 --program step      # per layer, by two depths
python -m validation.aot --platform cuda:h200 --program generate --layers all           # the whole model
python -m validation.aot --platform cuda:h200 --grid --record validation/results/aot.json
python -m validation.aot --table validation/results/aot.json                            # docs/gpu.md
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from eagle3_jax.bench.environment import git
from validation.aot import table
from validation.aot.measure import ALL, DEPTHS, Measured, cases_of, measured_apart, save
from validation.aot.platforms import NotHere

_MIB = 2**20


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m validation.aot", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--platform", nargs="+", default=["cuda:h200"], metavar="NAME", help="cuda:h200, cuda:h100, tpu:v6e:2x2, ...")
    add("--target", nargs="+", default=["Llama-3.1-8B"], metavar="SHAPE", help="shapes by name; no weight is made")
    add("--draft", nargs="+", default=["chain5"], help="plain, plain6 (block of 6), chain5 (K), tree60 (nodes)")
    add("--batch", nargs="+", type=int, default=[1], metavar="B")
    add("--program", nargs="+", default=["step"], help="prefill, step, generate")
    choices = ("no", "only", "both")
    add("--sampled", nargs="?", const="only", default="no", choices=choices, help="rows have temperatures")
    add("--layers", default="", metavar="N", help="one depth, or 'all'; left out, two depths, for what a layer costs")
    add("--dtype", default="bfloat16")
    add("--capacity", type=int, default=4096)
    add("--prompt", type=int, default=128)
    add("--mesh", default="", metavar="AXES", help="axes and sizes, such as model=4,data=2")
    add("--weights", default="dense", help="dense, fp8, fp8-dynamic: kernels of target and head")
    add("--grid", action="store_true", help=f"all that the level AOT holds: {', '.join(ALL['target'])}, and so on")
    add("--hlo", metavar="FILE", help="write the optimised HLO of the last program")
    add("--json", action="store_true", help="a line of JSON for each program")
    add("--record", type=Path, metavar="FILE", help="keep the rows, in place of those of the same programs")
    add("--table", type=Path, metavar="FILE", help="print a record as Markdown, no more")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Of the command; what was misused or is missing is one line on stderr, and 2."""
    options = _options(arguments)
    try:
        if options.table:
            print(table.page(options.table), end="")
            return 0
        for row in _measure(options):
            print(json.dumps(dataclasses.asdict(row)) if options.json else "\n".join(_lines(row)), flush=True)
            if options.record:
                save([row], options.record, _note())
    except (NotHere, ValueError, RuntimeError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(options: argparse.Namespace) -> Iterator[Measured]:
    if options.layers not in ("", "all") and not options.layers.isdigit():
        raise ValueError(f"--layers is {options.layers!r}; expected a number of layers, or all")
    layers = int(options.layers) if options.layers.isdigit() else None
    depths = None if options.layers else DEPTHS
    choices = {name: getattr(options, name) for name in ("platform", "target", "draft", "batch", "program")}
    choices["sampled"] = {"no": [False], "only": [True], "both": [False, True]}[options.sampled]
    fixed = {name: [getattr(options, name)] for name in ("dtype", "capacity", "prompt", "mesh", "weights")}
    for case in cases_of(**choices | (ALL if options.grid else {}) | fixed, layers=[layers]):
        yield measured_apart(case, depths, options.hlo)


def _lines(row: Measured) -> Iterator[str]:
    deep = row.deep
    yield f"{row.case.name}, {deep.layers} layers"
    for words, seconds in (("seconds", deep.seconds), ("CPU seconds", deep.cpu_seconds)):
        yield f"  {words}: " + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
    yield "  MiB: " + ", ".join(f"{name} {value / _MIB:,.1f}" for name, value in deep.memory.items())
    if row.aliased is not None:
        yield f"  state updated in place: {row.aliased:.1%}"
    for name, part in deep.parts.items():
        per_layer = row.per_layer(name)
        split = "" if per_layer is None else f" ({per_layer:g} a layer, {row.outside(name):g} outside)"
        yield f"  {name}: {part.launches} launches{split}; {_words(part.kinds)}"
        yield f"    by scope: {_words(part.scopes)}"
        yield (
            f"    host {part.host}, cache copies {part.cache_copies}, cache rewrites {part.cache_rewrites}, "
            f"table copies {part.table_copies}, copied {part.copied / _MIB:,.1f} MiB, "
            f"collectives {_words(part.collectives) or 'none'}, decisions {part.decisions}"
        )
        gigabytes = (row.per_layer(name, "bytes") or 0) / 1e9
        yield f"    main memory: {part.bytes / 1e9:.2f} GB" + f", {gigabytes:.2f} a layer" * bool(gigabytes)
        if part.cycles:
            yield f"    the compiler's estimate: {part.cycles / 1e6:.2f} million cycles"


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _note() -> dict[str, str]:
    facts = git()
    commit = facts["commit"][:7] if isinstance(facts, dict) else facts
    return {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit}


if __name__ == "__main__":
    sys.exit(main())
