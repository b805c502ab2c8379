"""``eagle3 tune``: the best draft length for every batch size, measured on this machine with these prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import (
    CompilationCacheOption,
    JsonOption,
    MeasuredDtypeOption,
    ModelOptions,
    announce_input,
    check_writable,
    grouped,
    measured_dtype,
    parse_numbers,
    parse_tree,
    print_json,
    print_table,
    write_json,
)
from eagle3_jax.cli._parts import fetch_first, read_drafter, read_target
from eagle3_jax.cli._progress import counted, spinner
from eagle3_jax.devices.compilation import keep_compiled_programs

if TYPE_CHECKING:
    from eagle3_jax.bench.timing import Spread
    from eagle3_jax.bench.tune import Tuning

EXAMPLE = """\b
Examples, the second for a first look:
  eagle3 tune --batch-sizes 1,4,16 --chains 1-5 --output schedule.json
  eagle3 tune --batch-sizes 1 --chains 1-3 --max-prompts 2 --repeats 2"""


@grouped
def tune(
    *,
    models: ModelOptions,
    dtype: MeasuredDtypeOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL file of prompts like yours. Default: the code prompts of the bundled pair."),
    ] = None,
    max_prompts: Annotated[
        int, typer.Option(help="Maximum number of prompts that acceptance is measured on.", min=1, max=100_000)
    ] = 8,
    batch_sizes: Annotated[str, typer.Option(help="Rows decoded at once: '1,4,16' or '1-4'.")] = "1,4,16",
    chains: Annotated[str, typer.Option(help="Chain lengths K: '1-7' or '1,3,5'.")] = "1-5",
    tree: Annotated[
        list[str] | None,
        typer.Option(help="A tree to measure too: num_nodes=60,max_depth=8,top_k=10; may be repeated."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens per prompt.", min=2, max=100_000)] = 64,
    repeats: Annotated[int, typer.Option(help="Interleaved measurements of every cost.", min=1, max=10_000)] = 5,
    check: Annotated[bool, typer.Option(help="Compare the fastest draft with plain decoding at the end.")] = True,
    output: Annotated[Path | None, typer.Option(help="Write schedule and measurements to this JSON file.")] = None,
    compilation_cache: CompilationCacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Choose the best K for every batch size by measurement.

    Prints a schedule in vLLM's form, num_speculative_tokens_per_batch_size, which `eagle3 generate --schedule` takes
    too, the acceptance at which each choice breaks even, and a check of the prediction.

    Ctrl-C ends the measurement; the batch sizes measured until then are reported.
    """
    sizes = parse_numbers(batch_sizes, "--batch-sizes", most=4096)
    lengths = parse_numbers(chains, "--chains")
    if models.drafter == "none":
        raise Misuse("--drafter none drafts nothing, so there is nothing to tune; name another drafter")
    check_writable(output)
    keep_compiled_programs(compilation_cache)

    from eagle3_jax import LoadedDrafter
    from eagle3_jax.bench import tune as tuning
    from eagle3_jax.bench.environment import hardware
    from eagle3_jax.files.prompts import in_turn, read_prompts
    from eagle3_jax.files.sources import bundled

    trees = [shape for shape in map(parse_tree, tree or []) if shape is not None]
    fetch_first(models.target, models.drafter)
    with spinner("loading") as now:
        dtype = measured_dtype(dtype)
        loaded = read_target(models.target, dtype, weights=models.weights)
        if prompts is not None:
            announce_input(prompts)
        read = read_prompts(prompts or bundled("prompts.jsonl"), loaded, max_new_tokens=max_new_tokens)
        asked = in_turn([one for one in read if prompts or one.category == "code"], max_prompts)
        head = read_drafter(models.drafter, target=loaded, target_source=models.target, layer_ids=models.layer_ids)
        assert head is not None
        batches = len(set(sizes))
        shapes = len(set(lengths)) + len(trees)
        now = counted(now, tuning.num_steps(shapes=shapes, batches=batches, repeats=repeats, check=check))
        found = tuning.tune(
            loaded,
            head,
            [one.tokens for one in asked],
            batches=sizes,
            chains=lengths,
            trees=trees,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            check=check,
            on_progress=now.say,
            on_result=now.tell,
        )
    precision = dtype if models.weights == "dense" else f"{dtype}, {models.weights}"
    method = head.described if isinstance(head, LoadedDrafter) else type(head).__name__
    about = {"hardware": hardware(), "dtype": dtype, "weights": models.weights, "drafter_method": method}
    written = about | found.to_json()
    if output is not None:
        write_json(output, written)
    if as_json:
        print_json(written)
    else:
        _print(found, f"{method}; {hardware()}; {precision}, greedy")
    if len(found.batches) < batches or (check and len(found.checks) < min(batches, 2)):
        measured = ", ".join(str(one.batch) for one in found.batches)
        typer.echo(f"interrupted: measured batch sizes {measured} of {batch_sizes}", err=True)
        raise typer.Exit(130)


def _print(found: Tuning, setting: str) -> None:
    prompts = f"{found.num_prompts} prompt{'s' if found.num_prompts > 1 else ''}"
    amount = f"{prompts} x {found.max_new_tokens} new tokens, {found.repeats} interleaved repeats"
    typer.echo(f"{setting}; {amount}\n")
    _print_speedups(found)
    typer.echo(_NOTES)
    _print_break_evens(found)
    typer.echo("")
    for one in found.checks:
        running = f" = {one.speedup:.2f} x {one.rows_running:.2f} of the rows running"
        typer.echo(
            f"checked at batch {one.batch}, {one.shape}: predicted {one.predicted:.2f}"
            f"{'' if one.rows_running > 0.999 else running}; measured {_spread(one.measured)}"
        )
    schedule = found.schedule
    if schedule is None:
        typer.echo("\nNo chain pays at any of these batch sizes: decode plainly. There is no schedule.")
        return
    lists = schedule.to_lists()
    typer.echo("\nschedule of chains (for vLLM's --speculative-config, beside method and model):")
    keys = {"num_speculative_tokens": schedule.max_length, "num_speculative_tokens_per_batch_size": lists}
    typer.echo(json.dumps(keys))
    line = json.dumps(lists, separators=(",", ":"))
    typer.echo(f"eagle3 generate --schedule '{line}'")
    for one in found.batches:
        if one.best is not None and not one.best.shape.is_chain:
            typer.echo(
                f"At batch {one.batch} the {one.best.shape.name} is faster; a schedule, like vLLM, holds chains only."
            )


_NOTES = """
S = τ / (v + G·c) with quartiles, * the choice. τ: tokens per round, measured with each draft by itself; it does not
change with the batch. v, c: a verification and a draft step in plain steps. A shorter draft, or none, is chosen where
the difference is within the spread.
"""


def _spread(one: Spread) -> str:
    return f"{one.median:.2f} ({one.low:.2f}-{one.high:.2f})"


def _print_speedups(found: Tuning) -> None:
    rows = []
    for candidates in zip(*(one.candidates for one in found.batches), strict=True):
        pairs = zip(candidates, found.batches, strict=True)
        shape = candidates[0].shape
        gains = [f"{_spread(draft.speedup)}{' *' if draft is one.best else ''}" for draft, one in pairs]
        rows.append((shape.name, f"{shape.mean_acceptance_length:.2f}", *gains))
    rows.append(("plain", "", *("1" if one.best else "1 *" for one in found.batches)))
    titles = ("draft", "τ", *(f"batch {one.batch}" for one in found.batches))
    print_table(titles, rows, left=range(len(titles)))


def _print_break_evens(found: Tuning) -> None:
    from eagle3_jax.bench.tune import break_even

    of = "{:.2f}, is {:.2f}".format
    rows = []
    for one in found.batches:
        chain = one.best_chain or max(one.chains, key=lambda candidate: candidate.speedup.median)
        level = break_even(chain)
        needed = level.needed
        measured = level.measured
        rows.append(
            (
                str(one.batch),
                f"{1e3 * one.plain_step.median:.2f} ms",
                chain.shape.name,
                f"{chain.verify_cost:.2f}",
                f"{chain.draft_cost:.3f}",
                of(level.mean_acceptance_length, measured.mean_acceptance_length),
                "never" if needed is None else of(needed.draft_acceptance_rate, measured.draft_acceptance_rate),
                "" if needed is None else of(needed.conditional_acceptance_rate, measured.conditional_acceptance_rate),
            )
        )
    rates = ("draft acceptance rate", "conditional acceptance rate")
    titles = ("batch", "plain step", "chain", "v", "c", "breaks even at τ", *rates)
    print_table(titles, rows, left=range(len(titles)))
