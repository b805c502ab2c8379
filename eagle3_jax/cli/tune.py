"""``eagle3 tune``: the best draft length for every batch size, measured on this machine with these prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3_jax.cli._compiled import keep_compiled_programs
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
    write_json,
)
from eagle3_jax.cli._parts import read_drafter, read_renderer, read_target
from eagle3_jax.cli._progress import counted, spinner

if TYPE_CHECKING:
    from rich.table import Table

    from eagle3_jax.bench.timing import Spread
    from eagle3_jax.bench.tune import Tuning

EXAMPLE = """\b
Examples, the second for a first look:
  eagle3 tune --batch-sizes 1,4,16 --chains 1-5 --output schedule.json
  eagle3 tune --batch-sizes 1 --chains 1-3 --max-prompts 2 --repeats 2"""

_WIDTH = 120


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
    sizes, lengths = parse_numbers(batch_sizes, "--batch-sizes", most=4096), parse_numbers(chains, "--chains")
    if models.drafter == "none":
        raise Misuse("--drafter none drafts nothing, so there is nothing to tune; name another drafter")
    check_writable(output)
    keep_compiled_programs(compilation_cache)

    from eagle3_jax import LoadedDrafter
    from eagle3_jax.bench import tune as tuning
    from eagle3_jax.bench.environment import hardware
    from eagle3_jax.prompts import in_turn, read_prompts
    from eagle3_jax.sources import bundled

    trees = [shape for shape in map(parse_tree, tree or []) if shape is not None]
    with spinner("loading") as now:
        dtype = measured_dtype(dtype)
        loaded = read_target(models.target, dtype, weights=models.weights)
        if prompts is not None:
            announce_input(prompts)
        file, renderer = prompts or bundled("prompts.jsonl"), read_renderer(models.target)
        read = read_prompts(file, loaded, renderer, max_new_tokens=max_new_tokens)
        asked = in_turn([one for one in read if prompts or one.category == "code"], max_prompts)
        head = read_drafter(models.drafter, target=loaded, target_source=models.target, layer_ids=models.layer_ids)
        assert head is not None
        batches, shapes = len(set(sizes)), len(set(lengths)) + len(trees)
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
    from rich.console import Console

    console = Console(highlight=False, width=max(Console().width, _WIDTH))
    prompts = f"{found.num_prompts} prompt{'s' if found.num_prompts > 1 else ''}"
    amount = f"{prompts} x {found.max_new_tokens} new tokens, {found.repeats} interleaved repeats"
    console.print(f"{setting}; {amount}\n")
    console.print(_speedups(found))
    console.print(_NOTES)
    console.print(_break_evens(found))
    console.print()
    console.print(_rules(found))
    console.print()
    for one in found.checks:
        running = f" = {one.speedup:.2f} x {one.rows_running:.2f} of the rows running"
        console.print(
            f"checked at batch {one.batch}, {one.shape}: predicted {one.predicted:.2f}"
            f"{'' if one.rows_running > 0.999 else running}; measured {_spread(one.measured)}",
            soft_wrap=True,
        )
    schedule = found.schedule
    if schedule is None:
        console.print("\nNo chain pays at any of these batch sizes: decode plainly. There is no schedule.")
        return
    lists = schedule.to_lists()
    console.print("\nschedule of chains (for vLLM's --speculative-config, beside method and model):")
    keys = {"num_speculative_tokens": schedule.max_length, "num_speculative_tokens_per_batch_size": lists}
    console.print(json.dumps(keys), soft_wrap=True, markup=False)
    line = json.dumps(lists, separators=(",", ":"))
    console.print(f"eagle3 generate --schedule '{line}'", soft_wrap=True, markup=False)
    for one in found.batches:
        if one.best is not None and not one.best.shape.is_chain:
            console.print(
                f"At batch {one.batch} the {one.best.shape.name} is faster; a schedule, like vLLM, holds chains only."
            )


_NOTES = """
S = τ / (v + G·c) with quartiles, * the choice. τ: tokens per round, measured with each draft by itself; it does not
change with the batch. v, c: a verification and a draft step in plain steps. A shorter draft, or none, is chosen where
the difference is within the spread.
"""


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table


def _spread(one: Spread) -> str:
    return f"{one.median:.2f} ({one.low:.2f}-{one.high:.2f})"


def _speedups(found: Tuning) -> Table:
    table = _table("draft", "τ", *(f"batch {one.batch}" for one in found.batches))
    for rows in zip(*(one.candidates for one in found.batches), strict=True):
        chosen = [" *" if row is one.best else "" for row, one in zip(rows, found.batches, strict=True)]
        gains = [_spread(row.speedup) + star for row, star in zip(rows, chosen, strict=True)]
        table.add_row(rows[0].shape.name, f"{rows[0].shape.mean_acceptance_length:.2f}", *gains)
    table.add_row("plain", "", *(f"1{'' if one.best else ' *'}" for one in found.batches))
    return table


def _break_evens(found: Tuning) -> Table:
    from eagle3_jax.bench.tune import break_even

    rates = ("draft acceptance rate", "conditional acceptance rate")
    table = _table("batch", "plain step", "chain", "v", "c", "breaks even at τ", *rates)
    of = "{:.2f}, is {:.2f}".format
    for one in found.batches:
        chain = one.best_chain or max(one.chains, key=lambda candidate: candidate.speedup.median)
        level = break_even(chain)
        needed, measured = level.needed, level.measured
        table.add_row(
            str(one.batch),
            f"{1e3 * one.plain_step.median:.2f} ms",
            chain.shape.name,
            f"{chain.verify_cost:.2f}",
            f"{chain.draft_cost:.3f}",
            of(level.mean_acceptance_length, measured.mean_acceptance_length),
            "never" if needed is None else of(needed.draft_acceptance_rate, measured.draft_acceptance_rate),
            "" if needed is None else of(needed.conditional_acceptance_rate, measured.conditional_acceptance_rate),
        )
    return table


def _rules(found: Tuning) -> Table:
    from eagle3_jax.bench.tune import rules_of_thumb

    table = _table("rule of thumb", "batch", "it says", "measured", "")
    rules = [rule for one in found.batches for rule in rules_of_thumb(one)]
    for rule in sorted(rules, key=lambda rule: rule.rule):
        verdict = "agrees" if rule.agrees else "disagrees"
        table.add_row(rule.rule, str(rule.batch), rule.rule_says, rule.measured, verdict)
    return table
