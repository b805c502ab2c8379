"""Compiles programs for an accelerator that is not present, and prints their counts.

From two depths, for the cost of a layer, or from a complete model::

    python -m validation.aot --platform cuda:h200 --draft chain5 tree60 --program step
    python -m validation.aot --platform cuda:h200 --program generate --layers all
    python -m validation.aot --batch 8 --record validation/results/aot.json
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import sys
from pathlib import Path

from eagle3_jax.measure.environment import git
from eagle3_jax.measure.tables import flat, show
from eagle3_jax.models.quantised import WEIGHTS
from validation.aot.platforms import NotHere
from validation.aot.programs import OPTIONS, PROGRAMS, Case
from validation.aot.record import DEPTHS, measured, save


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m validation.aot", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add(
        "--platform",
        nargs="+",
        default=["cuda:h200"],
        metavar="NAME",
        help="cuda:h200, cuda:h100, tpu:v6e:2x2, ...",
    )
    add(
        "--target",
        nargs="+",
        default=["Llama-3.1-8B"],
        metavar="SHAPE",
        help="shapes by name; no weight is made",
    )
    add(
        "--draft",
        nargs="+",
        default=["chain5"],
        help="plain, plain6 (blocks), chain5 (K), never5, tree60 (nodes)",
    )

    add("--batch", nargs="+", type=int, default=[1], metavar="B")
    add("--program", nargs="+", default=["step"], choices=PROGRAMS)
    add("--sampled", action="store_true", help="rows have temperatures")
    add(
        "--layers",
        default="",
        metavar="N",
        help="one depth, or 'all'; left out, two depths, for the cost of a layer",
    )
    add("--capacity", type=int, default=4096)
    add("--prompt", type=int, default=128)
    add("--mesh", default="", metavar="AXES", help="axes and sizes, such as model=4,data=2")
    add("--weights", default="dense", choices=WEIGHTS, help="kernels of target and head")
    add(
        "--options",
        default="default",
        choices=OPTIONS,
        help="of the compiler: exact are those of L3",
    )
    add(
        "--invariant",
        action="store_true",
        help="the target as SpeculativeDecoder(..., invariant=True) has it",
    )
    add("--hlo", type=Path, metavar="FILE", help="write the optimized HLO of the last program")
    add(
        "--record",
        type=Path,
        metavar="FILE",
        help="write the rows in place of those of the same programs",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; a wrong option and a missing compiler are one line on stderr, and 2."""
    options = _options(arguments)
    try:
        _measure(options)
    except (NotHere, ValueError, RuntimeError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(options: argparse.Namespace) -> None:
    if options.layers not in ("", "all") and not options.layers.isdigit():
        raise ValueError(f"--layers is {options.layers!r}; expected a number of layers, or all")
    depths = [None] if options.layers else DEPTHS

    same = ("sampled", "capacity", "prompt", "mesh", "weights", "options", "invariant")
    fixed = {name: getattr(options, name) for name in same}
    fixed["layers"] = int(options.layers) if options.layers.isdigit() else None

    names = ("platform", "target", "draft", "batch", "program")
    for values in itertools.product(*(getattr(options, name) for name in names)):
        row, text = measured(Case(**fixed | dict(zip(names, values, strict=True))), depths)
        print(row.key)
        facts = dataclasses.asdict(row.deep) | {"aliased": row.aliased}
        if len(row.facts) > 1:
            facts |= {"launches_a_layer": row.per_layer(), "launches_outside": row.outside()}
        for name, value in flat(facts):
            print(f"  {name}: {show(value)}", flush=True)

        if options.hlo:
            options.hlo.write_text(text, encoding="utf-8")
        if options.record:
            save([row], options.record, _note())


def _note() -> dict[str, str]:
    facts = git()
    commit = facts["commit"][:7] if isinstance(facts, dict) else facts
    return {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit}


if __name__ == "__main__":
    sys.exit(main())
