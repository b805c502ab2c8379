"""What several commands have in common: option types, and reading what they name."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._own import PAGE, called, own
from eagle3_jax.jsonl import STDIN, parse_json, read_text, shown
from eagle3_jax.named import FORMS, is_named, named_drafter
from eagle3_jax.prompts import whole_numbers
from eagle3_jax.reporting.tables import write_text

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from eagle3_jax import (
        DynamicTree,
        LoadedDrafter,
        LoadedTarget,
        SpeculationSchedule,
        StaticTree,
    )
    from eagle3_jax.types import Drafter, Verifier

TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Directory or hub id of the target, or module:function of your own; the bundled one when left out.",
    ),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help=f"Directory or hub id of a draft head or of a small language model, {FORMS}, or module:name of your own; "
        "the bundled head when left out.",
    ),
]
LayerIdsOption = Annotated[
    str | None,
    typer.Option(
        "--layer-ids",
        metavar="entering|leaving",
        help="What the numbers of an EAGLE-3 head's auxiliary layers count, where its file leaves it open: layers that "
        "are entered (vLLM) or left (SGLang, SpecForge).",
    ),
]
VerifierOption = Annotated[
    str | None,
    typer.Option(
        "--verifier",
        help="'block' (exact, for drawn chains), 'typical' (Medusa's, not lossless), or module:name of your own; the "
        "exact token rule when left out.",
    ),
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="float32, bfloat16, or mixed (bfloat16 products summed in float32).")
]
MeasuredDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32, bfloat16, or mixed (bfloat16 products summed in float32).  "
        "[default: bfloat16 on a GPU, else mixed]",
    ),
]
WeightsOption = Annotated[
    str,
    typer.Option(
        "--weights",
        help="dense, or fp8: the target's kernels in eight bits (fp8-dynamic: what they are multiplied with too). "
        "Lossless relative to that target.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: a .png or .svg file.")]

_LONGEST_NUMBER = 18  # digits; Python refuses to read thousands of them
_TREE_KEYS = ("num_nodes", "max_depth", "top_k")


def read_target(source: str | None, dtype: str, mesh: Mesh | None = None, *, weights: str = "dense") -> LoadedTarget:
    """The target that ``--target`` names."""
    from eagle3_jax import LoadedTarget, load_target

    if source == "":
        raise Misuse("--target is empty; name a directory or a hub id, or leave it out for the bundled target")
    part = own("--target", source)
    if part is None:
        return load_target(source, dtype=dtype, weights=weights, mesh=mesh)
    if weights != "dense":
        raise Misuse(f"--weights {weights}: --target {source} makes its own; leave --weights out")
    loaded = called("--target", part, "an eagle3_jax.LoadedTarget", dtype=dtype)
    if not isinstance(loaded, LoadedTarget):
        raise Misuse(f"--target {source} gave {type(loaded).__name__}; expected an eagle3_jax.LoadedTarget, see {PAGE}")
    return loaded


def read_drafter(
    source: str | None, *, target: LoadedTarget, target_source: str | None, layer_ids: str | None = None
) -> LoadedDrafter | Drafter[Any] | None:
    """The drafter that ``--drafter`` names; ``None`` for plain decoding."""
    from eagle3_jax import LoadedDrafter, load_drafter

    if source == "":
        raise Misuse("--drafter is empty; name a directory or a hub id, or leave it out for the bundled head")
    if source is not None and is_named(source):
        _refuse_layer_ids(layer_ids, source)
        return named_drafter(source, target)
    part = own("--drafter", source)
    if part is not None:
        _refuse_layer_ids(layer_ids, source)
        value: Any = part.value
        if isinstance(value, LoadedDrafter) or (hasattr(value, "propose") and not isinstance(value, type)):
            return value
        return called("--drafter", part, "an eagle3_jax.LoadedDrafter or a drafter", target=target)
    if source is None and target_source is not None:
        raise Misuse(
            "--target was given without --drafter, and the bundled head fits the bundled target only; "
            "add --drafter DIRECTORY, --drafter ngram or --drafter none"
        )
    return load_drafter(source, target=target, layer_ids=layer_ids)


def _refuse_layer_ids(layer_ids: str | None, source: str | None) -> None:
    if layer_ids is not None:
        raise Misuse(f"--layer-ids is about heads from files, and --drafter {source} has none; leave it out")


# Acceptance rules that have a name: public names of the library, built without arguments.
RULES = {"block": "BlockVerification", "typical": "TypicalAcceptance"}


def read_verifier(source: str | None) -> Verifier | None:
    """The acceptance rule that ``--verifier`` names; ``None`` for the exact one."""
    import eagle3_jax

    if source is None:
        return None
    if source in RULES:
        return getattr(eagle3_jax, RULES[source])()
    part = own("--verifier", source)
    if part is None:
        raise Misuse(
            f"--verifier {source}: expected {', '.join(map(repr, RULES))}, or one of your own, module:name; see {PAGE}"
        )
    return part.value


def parse_tree(text: str | None) -> DynamicTree | StaticTree | None:
    """``num_nodes=60,max_depth=8,top_k=10``, the name of a published tree, or paths of child ranks as JSON."""
    from eagle3_jax import DynamicTree
    from eagle3_jax.published_trees import PUBLISHED_TREES

    if text is None:
        return None
    if text in PUBLISHED_TREES:
        return PUBLISHED_TREES[text]
    if text.lstrip().startswith("[") or text.endswith(".json"):
        return _static_tree(text)
    values: dict[str, int] = {}
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign or name not in _TREE_KEYS or name in values:
            raise Misuse(f"--tree {text!r}: {part!r} is not one of {_tree_form()}")
        try:
            values[name] = int(value)
        except ValueError:
            raise Misuse(f"--tree {text!r}: {name} is {value!r}; expected a whole number") from None
    missing = [name for name in _TREE_KEYS if name not in values]
    if missing:
        raise Misuse(f"--tree {text!r}: {', '.join(missing)} missing; expected {_tree_form()}")
    try:
        return DynamicTree(**values)
    except ValueError as error:
        raise Misuse(f"--tree {text!r}: {error}") from None


def _static_tree(text: str) -> StaticTree:
    from eagle3_jax import StaticTree

    try:
        paths = parse_json(read_text(Path(text)) if text.endswith(".json") else text)
    except ValueError as error:
        raise Misuse(f"--tree {shown(text)} is not JSON ({error}); expected {_PATHS_FORM}") from None
    if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
        raise Misuse(f"--tree {shown(text)} holds no list of paths; expected {_PATHS_FORM}")
    if len(paths) > _MOST_PATHS:
        raise Misuse(f"--tree {shown(text)} has {len(paths)} paths; expected at most {_MOST_PATHS}")
    for path in paths:
        if not path or not all(type(rank) is int and 0 <= rank < _MOST_PATHS for rank in path):
            raise Misuse(f"--tree {shown(text)}: {shown(str(path))} is no path of child ranks; expected {_PATHS_FORM}")
    try:
        return StaticTree(tuple(map(tuple, paths)))
    except ValueError as error:
        raise Misuse(f"--tree {shown(text)}: {error}") from None


_MOST_PATHS = 4096
_PATHS_FORM = "paths of child ranks such as '[[0],[1],[0,0]]', or a .json file with them"


def _tree_form() -> str:
    return (
        "num_nodes=N,max_depth=G,top_k=K, for example num_nodes=60,max_depth=8,top_k=10; a published tree such as "
        f"medusa-63; or {_PATHS_FORM}"
    )


def parse_schedule(text: str | None) -> SpeculationSchedule | None:
    """``--schedule '[[1,4,5],[5,16,3]]'``, or a JSON file with such a list, as ``eagle3 tune --output`` writes it."""
    from eagle3_jax import SpeculationSchedule

    if text is None:
        return None
    is_file = not text.lstrip().startswith("[")
    if is_file:
        say_what_is_awaited(text)
    try:
        value = parse_json(read_text(Path(text)) if is_file else text)
    except ValueError as error:
        raise Misuse(f"--schedule {shown(text)} is not JSON ({error}); expected {_SCHEDULE_FORM}") from None
    if isinstance(value, dict) and _SCHEDULE_KEY in value:
        value = value[_SCHEDULE_KEY]
        if value is None:
            raise Misuse(f"--schedule {text}: drafting paid at no batch size there; use --drafter none")
    if not isinstance(value, list):
        raise Misuse(f"--schedule {shown(text)} holds no schedule; expected {_SCHEDULE_FORM}")
    try:
        return SpeculationSchedule.from_lists(value)
    except ValueError as error:
        raise Misuse(f"--schedule {shown(text)}: {error}") from None


_SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
_SCHEDULE_FORM = f"[[first, last, K], ...] such as '[[1,4,5],[5,16,3]]', or a file with it under {_SCHEDULE_KEY}"


def parse_numbers(text: str, option: str, *, least: int = 1, most: int = 100_000, or_none: bool = False) -> list[int]:
    """``1-7``, ``1,3,5`` or ``1-3,8``, in ascending order, each once; nothing for ``none`` where that is allowed."""
    if or_none and text == "none":
        return []
    found: set[int] = set()
    for part in text.split(","):
        bounds = part.strip().split("-")
        numbers = [int(bound) for bound in bounds if bound.isdecimal() and len(bound) <= _LONGEST_NUMBER]
        if len(numbers) != len(bounds) or len(bounds) > 2 or not least <= numbers[0] <= numbers[-1] <= most:
            raise Misuse(
                f"{option} {text!r}: expected whole numbers from {least} to {most}, such as '1-7' or '1,3,5'"
                + (", or 'none'" if or_none else "")
            )
        found.update(range(numbers[0], numbers[-1] + 1))
    return sorted(found)


def parse_ids(text: str) -> list[int]:
    """``--prompt-ids '[1, 2]'``; the decoder checks whether the target has them."""
    try:
        ids = parse_json(text)
    except ValueError:
        ids = None
    if not isinstance(ids, list):
        raise Misuse(f"--prompt-ids {shown(text)} is not a JSON list of token ids; expected for example '[1, 2, 3]'")
    return whole_numbers(ids, "--prompt-ids: ")


def say_what_is_awaited(file: str | Path) -> None:
    """Tell who sits at a terminal that a command is about to read from it."""
    if str(file) == STDIN and sys.stdin is not None and sys.stdin.isatty():
        print("reading from the terminal; end with Ctrl-D", file=sys.stderr)


def check_writable(path: Path | None) -> None:
    """Refuse an output file that could not be written, before any work is done."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise Misuse(f"{path} is a directory; give the name of a file")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise Misuse(f"{path} cannot be written: no permission")
        if not path.is_file():  # a device or a pipe is written to as it is
            return
    if not folder.is_dir():
        raise Misuse(f"{path} cannot be written: there is no directory {folder}")
    try:
        # As it will be written; a name can be too long as well.
        tempfile.TemporaryDirectory(prefix=f".{path.name}.", suffix=".partial", dir=folder).cleanup()
    except OSError as error:
        raise Misuse(f"{path} cannot be written: {error.strerror}") from None


def check_plot(path: Path | None) -> None:
    """Refuse a plot that could not be written, before any work is done."""
    if path is not None and path.suffix not in (".png", ".svg"):
        raise Misuse(f"--plot {path}: give the name of a .png or .svg file")
    check_writable(path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that appears under its name only when complete."""
    write_text(path, json.dumps(value) + "\n")


def finite(value: Any) -> Any:
    """The same with ``null`` for infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
