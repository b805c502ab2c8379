"""``eagle3 bench``: how fast every way of decoding is, on this machine, now."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import (
    DrafterOption,
    DtypeOption,
    JsonOption,
    Request,
    TargetOption,
    parse_tree,
    read_drafter,
    read_requests,
    read_target,
)

if TYPE_CHECKING:
    from rich.table import Table

    from eagle3_jax import DynamicTree, LoadedTarget
    from eagle3_jax.analysis.bench import Contender, Report, Row
    from eagle3_jax.analysis.timing import Spread

EXAMPLE = "Example: eagle3 bench --max-prompts 4 --max-new-tokens 64 --repeats 5"


def bench(
    *,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    dtype: DtypeOption = "mixed",
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL file of prompts; the held-out code prompts of the bundled pair if left out."),
    ] = None,
    max_prompts: Annotated[int, typer.Option(help="Most prompts decoded in each repeat.", min=1)] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens written for each prompt.", min=2, max=100_000)] = 96,
    repeats: Annotated[int, typer.Option(help="Measured passes.", min=1)] = 5,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded at once.", min=1)] = 1,
    chains: Annotated[str, typer.Option(help="Chain lengths K to measure: 'FIRST-LAST' or '1,3,5'.")] = "1-7",
    tree: Annotated[str, typer.Option(help="The tree to measure.")] = "num_nodes=60,max_depth=8,top_k=10",
    as_json: JsonOption = False,
) -> None:
    """Measure plain decoding, chains, a tree, prompt lookup and transformers, interleaved on the same prompts."""
    from eagle3_jax.analysis.bench import measure

    lengths, shape = _chain_lengths(chains), parse_tree(tree)
    requests = _read_prompts(prompts, max_new_tokens)[:max_prompts]
    if len(requests) < batch_size:
        raise Misuse(
            f"--batch-size {batch_size} needs as many prompts, and there are {len(requests)}; see --max-prompts"
        )
    requests = requests[: len(requests) // batch_size * batch_size]  # no batch is left half full
    with _activity() as say:
        say("loading")
        loaded = read_target(target, dtype)
        ids = [_encode(loaded, request, max_new_tokens) for request in requests]
        plain = _plain(loaded, target, dtype)
        drafting = _drafting(loaded, target, drafter, dtype=dtype, lengths=lengths, tree=shape)
        reference, missing = _transformers(target)
        report = measure(
            [*plain, *drafting, *reference],
            ids,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            baselines=[contender.name for contender in plain],
            batch_size=batch_size,
            on_progress=say,
        )
    _print(report, missing, as_json=as_json)


def _read_prompts(path: Path | None, max_new_tokens: int) -> list[Request]:
    from eagle3_jax.load import bundled

    if path is not None:
        return read_requests(path, max_new_tokens)
    path = bundled("prompts.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [Request(row["prompt"], max_new_tokens) for row in _spread_out(rows) if row["kind"] == "code"]


def _spread_out(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """One prompt of every file first, then the second ones: few prompts should not all be of one file."""
    seen: dict[str, int] = {}
    turns = []
    for row in rows:
        file = row["name"].rpartition(":")[0]
        seen[file] = seen.get(file, 0) + 1
        turns.append(seen[file])
    return [row for _, row in sorted(zip(turns, rows, strict=True), key=lambda pair: pair[0])]


def _encode(target: LoadedTarget, request: Request, max_new_tokens: int) -> list[int]:
    from eagle3_jax import SpeculativeDecoder

    try:
        ids = SpeculativeDecoder(target).encode(request.prompt)
    except ValueError as error:
        raise Misuse(f"{request.where}{error}") from None
    if len(ids) + max_new_tokens > target.max_positions:
        raise Misuse(
            f"{request.where}the prompt has {len(ids)} tokens and with --max-new-tokens {max_new_tokens} exceeds the "
            f"target's {target.max_positions} positions; lower --max-new-tokens"
        )
    return ids


def _chain_lengths(text: str) -> list[int]:
    try:
        first, dash, last = text.partition("-")
        lengths = list(range(int(first), int(last) + 1)) if dash else [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise Misuse(f"--chains {text!r}: expected chain lengths such as '1-7' or '1,3,5'")
    return lengths


def _plain(loaded: LoadedTarget, source: str | None, dtype: str) -> list[Contender]:
    """Plain decoding in the asked precision and in float32; whichever is faster is the baseline."""
    from eagle3_jax import SpeculativeDecoder
    from eagle3_jax.analysis.bench import DecoderContender

    targets = {dtype: loaded}
    if dtype != "float32":
        targets["float32"] = read_target(source, "float32")
    return [
        DecoderContender(f"plain {name}", name, SpeculativeDecoder(one, stop_tokens=()))
        for name, one in targets.items()
    ]


def _drafting(
    loaded: LoadedTarget,
    target_source: str | None,
    drafter_source: str | None,
    *,
    dtype: str,
    lengths: list[int],
    tree: DynamicTree | None,
) -> list[Contender]:
    from eagle3_jax import LoadedDrafter, SpeculativeDecoder
    from eagle3_jax.analysis.bench import DecoderContender
    from eagle3_jax.drafters import NGram

    drafter = read_drafter(drafter_source, target=loaded, target_source=target_source)
    found: list[Contender] = []
    if isinstance(drafter, LoadedDrafter):
        for length in lengths:
            decoder = SpeculativeDecoder(loaded, drafter, num_speculative_tokens=length, stop_tokens=())
            found.append(DecoderContender(f"chain K={length}", dtype, decoder))
        if tree is not None:
            decoder = SpeculativeDecoder(loaded, drafter, tree=tree, stop_tokens=())
            found.append(DecoderContender(f"tree N={tree.num_nodes} G={tree.max_depth}", dtype, decoder))
    if drafter is not None:
        decoder = SpeculativeDecoder(loaded, NGram(), stop_tokens=())
        found.append(DecoderContender("n-gram K=5", dtype, decoder))
    return found


def _transformers(source: str | None) -> tuple[list[Contender], str]:
    """The transformers row, or why there is none."""
    from eagle3_jax.load import locate

    try:
        from eagle3_jax.cli._transformers import TransformersContender

        return [TransformersContender.load(locate(source, "target"))], ""
    except ImportError:
        return [], "transformers generate: not measured; pip install 'eagle3-jax[bench]'"
    except (OSError, ValueError) as error:
        return [], f"transformers generate: not measured; it cannot load the target ({str(error).split(chr(10))[0]})"


def _print(report: Report, missing: str, *, as_json: bool) -> None:
    from eagle3_jax.cli._hardware import hardware

    if as_json:
        typer.echo(json.dumps({"hardware": hardware(), "not_measured": missing or None, **report.to_json()}))
        return
    from rich.console import Console

    console = Console(highlight=False, width=max(Console().width, _WIDTH))  # a narrow terminal wraps, nothing is cut
    what = f"{report.num_prompts} prompts x {report.max_new_tokens} new tokens"
    console.print(f"{hardware()}; batch {report.batch_size}, greedy, {what}\n")
    console.print(_table(report))
    if missing:
        console.print(missing)
    console.print(_NOTES.format(baseline=report.baseline, repeats=report.repeats))


_WIDTH = 124
_NOTES = """
tok/s: new tokens after the first over the time of the decode loop; total: all new tokens over all time, prefill too.
ratio: tok/s over that of the baseline, {baseline}, in the same repeat: median (quartiles) of {repeats} repeats in turn.
τ: tokens per round, 1 + accepted / drafts. v: verification over the baseline's step. c: one draft step over it.
S: the ratio predicted by τ / (v + G·c), G draft steps a round; v and c are measured apart from the runs.
Warm-up and compilation are excluded; compile is their time for all programs of a row. Stop tokens are ignored.
same: the same tokens as plain decoding in that row's precision (bfloat16 sums may differ between block shapes).
n-gram and plain rows need no head. transformers: float32, eager PyTorch, its own cache."""


def _table(report: Report) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in (
        "method",
        "dtype",
        "tok/s",
        "ratio",
        "τ",
        "v",
        "c",
        "S",
        "total tok/s",
        "ratio",
        "same",
        "compile",
    ):
        table.add_column(title, justify="left" if title in ("method", "dtype") else "right", no_wrap=True)
    for row in report.rows:
        table.add_row(*_cells(row, is_baseline=row.name == report.baseline))
    return table


def _cells(row: Row, *, is_baseline: bool) -> list[str]:
    drafted = row.num_draft_steps > 0
    return [
        row.name,
        row.dtype,
        f"{row.decode_tokens_per_second.median:.1f}",
        "baseline" if is_baseline else _spread(row.ratio),
        f"{row.mean_acceptance_length:.2f}" if drafted else "",
        _number(row.verify_cost) if drafted else "",
        _number(row.draft_cost, 3) if drafted else "",
        _number(row.predicted_ratio) if drafted else "",
        f"{row.total_tokens_per_second.median:.1f}",
        "" if is_baseline else f"{row.total_ratio.median:.2f}",
        {None: "", True: "yes", False: "no"}[row.same_output],
        f"{row.compile_seconds:.1f} s" if row.compile_seconds else "",
    ]


def _spread(value: Spread) -> str:
    return f"{value.median:.2f} ({value.low:.2f}-{value.high:.2f})"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


@contextlib.contextmanager
def _activity() -> Iterator[Callable[[str], Any]]:
    """What is going on, on the standard error, where that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("starting") as status:
        yield lambda what: status.update(what)
