"""Options that several commands share, their groups as dataclasses, and parsers of their values."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.files.jsonl import STDIN, parse_json, read_text, shown
from eagle3_jax.files.sources import FORMS
from eagle3_jax.files.writing import whole_file
from eagle3_jax.prompts.reading import check_token_ids

if TYPE_CHECKING:
    from eagle3_jax import DynamicTree, SpeculationSchedule, StaticTree

CHECKPOINT = "Directory, GGUF file or hub id"
# Also used by `eagle3 bench`, which takes several drafters.
DRAFTERS = (
    f"{CHECKPOINT} of a head or of a small language model, {FORMS}, 'ngram+HEAD' (the head where"
    " the text has no n-gram), or module:name of your own"
)
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        help=(
            f"{CHECKPOINT} of the target, or module:function of your own. Default: the bundled one."
        ),
    ),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help=(
            f"{DRAFTERS}. Default: the bundled head; with --target the head of smollm2 or ngram,"
            " where generate, chat and serve decode plainly on CPUs except with --weights int8 and"
            " serve with smollm2."
        ),
    ),
]
LayerIdsOption = Annotated[
    str | None,
    typer.Option(
        "--layer-ids",
        metavar="entering|leaving",
        help=(
            "Meaning of the layer numbers of an EAGLE-3 head, if its file leaves it open: features"
            " from the input (entering, vLLM) or the output (leaving, SGLang and SpecForge) of"
            " these layers."
        ),
    ),
]
VerifierOption = Annotated[
    str | None,
    typer.Option(
        "--verifier",
        help=(
            "Acceptance rule: 'block' (exact, for sampled chains), 'typical' (Medusa's, not"
            " lossless), or module:name of your own. Default: the exact token rule."
        ),
    ),
]
_DTYPE = "Precision: float32, bfloat16, or mixed (bfloat16 products summed in float32)."
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help=f"{_DTYPE}  [default: bfloat16 on a GPU for weights stored in it, else float32]",
    ),
]
MeasuredDtypeOption = Annotated[
    str | None, typer.Option("--dtype", help=f"{_DTYPE}  [default: bfloat16 on a GPU, else mixed]")
]
WeightsOption = Annotated[
    str,
    typer.Option(
        "--weights",
        help=(
            "Weights of target and drafter: dense, fp8 (8-bit kernels), fp8-dynamic (8-bit"
            " activations too), int8 (both; fastest on CPUs), or int4 (as a file of four bits"
            " stores them). Output is lossless relative to that target."
        ),
    ),
]
CompilationCacheOption = Annotated[
    str | None,
    typer.Option(
        "--compilation-cache",
        metavar="DIR",
        help=(
            "Directory that keeps compiled programs for the next run, or 'none'. Default:"
            " ~/.cache/eagle3-jax/compiled."
        ),
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The target and its drafter."""

    target: TargetOption = None
    drafter: DrafterOption = None
    layer_ids: LayerIdsOption = None
    weights: WeightsOption = "dense"


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command one option for every field of the dataclasses that it takes.

    Typer reads a signature and has no groups, so the wrapper has a flat signature; the command gets
    the dataclasses.
    """
    options: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind = parameter.annotation
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(kind, include_extras=True)
        members = inspect.signature(kind).parameters.values()
        options += [member.replace(annotation=hints[member.name]) for member in members]
        groups[name] = kind

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(
                **{field.name: values.pop(field.name) for field in dataclasses.fields(kind)}
            )
        command(**values)

    flat.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    flat.__annotations__ = {option.name: option.annotation for option in options}
    return flat


def measured_dtype(dtype: str | None) -> str:
    """Returns the precision to measure in.

    Its default is bfloat16 on a GPU, as in other engines, and mixed on a CPU.

    Raises:
        Misuse: This jax cannot use the GPU of this machine, so the figures would be those of a CPU.
    """
    from eagle3_jax.measure.gpu import gpu_problem, on_gpu

    problem = gpu_problem()
    if problem is not None:
        raise Misuse(f"{problem} (JAX_PLATFORMS=cpu measures the CPU)")
    return dtype or ("bfloat16" if on_gpu() else "mixed")


# Parsers

_LONGEST_NUMBER = 18  # digits; Python refuses to read thousands of them
_MOST_PATHS = 4096
_PATHS_FORM = "paths of child ranks such as '[[0],[1],[0,0]]', or a .json file with them"
_TREE_FORM = (
    "num_nodes=N,max_depth=G,top_k=K, for example num_nodes=60,max_depth=8,top_k=10; a published"
    f" tree such as medusa-63; or {_PATHS_FORM}"
)
_SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
_SCHEDULE_FORM = (
    f"[[first, last, K], ...] such as '[[1,4,5],[5,16,3]]', or a file with it under {_SCHEDULE_KEY}"
)


def parse_tree(text: str) -> DynamicTree | StaticTree:
    """Reads the three sizes of a tree, the name of a published tree, or paths of ranks as JSON.

    The sizes have the form ``num_nodes=60,max_depth=8,top_k=10``.
    """
    from eagle3_jax import DynamicTree
    from eagle3_jax.topology import PUBLISHED_TREES

    if text in PUBLISHED_TREES:
        return PUBLISHED_TREES[text]
    if text.lstrip().startswith("[") or text.endswith(".json"):
        return _static_tree(text)

    pairs = [part.partition("=") for part in text.split(",")]
    try:
        sizes = {name.strip(): int(number) for name, _, number in pairs}
    except ValueError:
        sizes = {}
    if sorted(sizes) != ["max_depth", "num_nodes", "top_k"] or len(pairs) > len(sizes):
        raise Misuse(f"--tree {text!r}: expected {_TREE_FORM}")
    try:
        return DynamicTree(**sizes)
    except ValueError as error:
        raise Misuse(f"--tree {text!r}: {error}") from None


def _static_tree(text: str) -> StaticTree:
    from eagle3_jax import StaticTree

    paths = _json_of("--tree", text, text.endswith(".json"), _PATHS_FORM)
    if not isinstance(paths, list) or not all(isinstance(path, list) and path for path in paths):
        raise Misuse(f"--tree {shown(text)} holds no list of paths; expected {_PATHS_FORM}")
    if len(paths) > _MOST_PATHS or not all(map(_is_rank, itertools.chain(*paths))):
        raise Misuse(
            f"--tree {shown(text)}: expected at most {_MOST_PATHS} paths of child ranks below"
            f" {_MOST_PATHS}"
        )
    try:
        return StaticTree(tuple(map(tuple, paths)))
    except ValueError as error:
        raise Misuse(f"--tree {shown(text)}: {error}") from None


def _is_rank(rank: Any) -> bool:
    return type(rank) is int and 0 <= rank < _MOST_PATHS


def parse_schedule(text: str) -> SpeculationSchedule:
    """Reads ``[[1,4,5],[5,16,3]]``, or a JSON file with such a list.

    ``eagle3 tune --output`` writes such a file.
    """
    from eagle3_jax import SpeculationSchedule

    is_file = not text.lstrip().startswith("[")
    if is_file:
        announce_input(text)
    value = _json_of("--schedule", text, is_file, _SCHEDULE_FORM)
    if isinstance(value, dict) and _SCHEDULE_KEY in value:
        value = value[_SCHEDULE_KEY]
        if value is None:
            raise Misuse(
                f"--schedule {text}: drafting paid off at no batch size there; use --drafter none"
            )
    if not isinstance(value, list):
        raise Misuse(f"--schedule {shown(text)} holds no schedule; expected {_SCHEDULE_FORM}")

    try:
        return SpeculationSchedule.from_lists(value)
    except ValueError as error:
        raise Misuse(f"--schedule {shown(text)}: {error}") from None


def _json_of(option: str, text: str, is_file: bool, form: str) -> Any:
    try:
        return parse_json(read_text(Path(text)) if is_file else text)
    except ValueError as error:
        raise Misuse(f"{option} {shown(text)} is not JSON ({error}); expected {form}") from None


def parse_numbers(
    text: str, option: str, *, least: int = 1, most: int = 100_000, or_none: bool = False
) -> list[int]:
    """Reads ``1-7``, ``1,3,5`` or ``1-3,8``, in ascending order, each once.

    With ``or_none`` it also reads ``none``.
    """
    if or_none and text == "none":
        return []

    values: set[int] = set()
    for part in text.split(","):
        bounds = part.strip().split("-")
        numbers = [
            int(bound) for bound in bounds if bound.isdecimal() and len(bound) <= _LONGEST_NUMBER
        ]
        has_form = len(numbers) == len(bounds) <= 2
        if not has_form or not least <= numbers[0] <= numbers[-1] <= most:
            hint = ", or 'none'" if or_none else ""
            raise Misuse(
                f"{option} {text!r}: expected whole numbers from {least} to {most}, such as '1-7'"
                f" or '1,3,5'{hint}"
            )
        values.update(range(numbers[0], numbers[-1] + 1))
    return sorted(values)


def parse_ids(text: str) -> list[int]:
    """Reads ``--prompt-ids '[1, 2]'``; the decoder checks whether the target has these ids."""
    try:
        ids = parse_json(text)
    except ValueError:
        ids = None
    if not isinstance(ids, list):
        raise Misuse(
            f"--prompt-ids {shown(text)} is not a JSON list of token ids; expected for example"
            " '[1, 2, 3]'"
        )
    return check_token_ids(ids, "--prompt-ids: ")


# Files


def announce_input(file: str | Path) -> None:
    """Tells the user at a terminal that the command is about to read from it."""
    if str(file) == STDIN and sys.stdin is not None and sys.stdin.isatty():
        print("reading from the terminal; end with Ctrl-D", file=sys.stderr)


def check_writable(path: Path | None) -> None:
    """Refuses an output file that could not be written, before any work is done."""
    # A device or a pipe is written to as it is.
    if path is None or (path.exists() and not path.is_file() and not path.is_dir()):
        return

    if path.is_dir():
        raise Misuse(f"{path} is a directory; give the name of a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise Misuse(f"{path} cannot be written: no permission")

    try:
        # The name of the temporary file that will be written; it can also be too long.
        tempfile.TemporaryDirectory(
            prefix=f".{path.name}.", suffix=".partial", dir=path.absolute().parent
        ).cleanup()
    except OSError as error:
        raise Misuse(f"{path} cannot be written: {error.strerror}") from None


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file that appears under its name only when complete."""
    with whole_file(path) as partial:
        partial.write_text(json.dumps(value) + "\n", encoding="utf-8")
