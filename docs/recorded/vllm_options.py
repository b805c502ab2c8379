"""What vLLM takes and counts, as JSON: options, keys of ``--speculative-config``, methods, data sets, metrics.

Run by the interpreter of an environment that holds vLLM, once per version; pages are checked against the record.

    PYTHON docs/recorded/vllm_options.py docs/recorded/vllm-0.32.0.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import typing
from pathlib import Path

import vllm
from vllm.benchmarks.serve import add_cli_args
from vllm.config import speculative
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main(output: Path) -> None:
    """Write the record."""
    serve = make_arg_parser(FlexibleArgumentParser())
    bench = FlexibleArgumentParser()
    add_cli_args(bench)
    (datasets,) = (action.choices for action in bench._actions if "--dataset-name" in action.option_strings)
    package = Path(vllm.__file__).parent
    found = {
        "version": "0.32.0",
        "serve": _options(serve),
        "bench serve": _options(bench),
        "datasets": sorted(datasets),
        "methods": _methods(speculative.SpeculativeMethod),
        "speculative_config": sorted(field.name for field in dataclasses.fields(speculative.SpeculativeConfig)),
        "metrics": sorted({name for path in (package / "v1").rglob("*.py") for name in _metrics(path)}),
    }
    output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return sorted({option for action in parser._actions for option in action.option_strings if option.startswith("-")})


def _methods(literal: object) -> list[str]:
    arguments = typing.get_args(literal)
    return sorted({name for one in arguments for name in ([one] if isinstance(one, str) else _methods(one))})


def _metrics(path: Path) -> set[str]:
    return set(re.findall(r'"(vllm:[a-z_]+)"', path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
