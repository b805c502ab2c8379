"""``eagle3 tune``: the best draft length for every batch size, measured on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    write_json,
)
from eagle3_jax.cli._parts import (
    announced,
    fetch_first,
    measured_drafter,
    read_drafter,
    read_target,
)
from eagle3_jax.cli._printing import Page, cell_text, print_page, table_of
from eagle3_jax.cli._progress import counted, spinner
from eagle3_jax.devices.compilation import keep_compiled_programs
from eagle3_jax.measure.tables import Table

if TYPE_CHECKING:
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
        typer.Option(
            help="JSONL file of prompts like yours. Default: the code prompts of the bundled pair."
        ),
    ] = None,
    max_prompts: Annotated[
        int,
        typer.Option(
            help="Maximum number of prompts that acceptance is measured on.", min=1, max=100_000
        ),
    ] = 8,
    batch_sizes: Annotated[
        str, typer.Option(help="Rows decoded at once: '1,4,16' or '1-4'.")
    ] = "1,4,16",
    chains: Annotated[str, typer.Option(help="Chain lengths K: '1-7' or '1,3,5'.")] = "1-5",
    tree: Annotated[
        list[str] | None,
        typer.Option(
            help="A tree to measure too: num_nodes=60,max_depth=8,top_k=10; may be repeated."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="New tokens per prompt.", min=2, max=100_000)
    ] = 64,
    repeats: Annotated[
        int, typer.Option(help="Interleaved measurements of every cost.", min=1, max=10_000)
    ] = 5,
    check: Annotated[
        bool, typer.Option(help="Compare the fastest draft with plain decoding at the end.")
    ] = True,
    output: Annotated[
        Path | None, typer.Option(help="Write schedule and measurements to this JSON file.")
    ] = None,
    compilation_cache: CompilationCacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Choose the best K for every batch size by measurement.

    Prints a schedule in vLLM's form, num_speculative_tokens_per_batch_size, which `eagle3 generate
    --schedule` takes too, the acceptance at which each choice breaks even, and a check of the
    prediction.

    Ctrl-C ends the measurement; the batch sizes measured until then are reported.
    """
    sizes = parse_numbers(batch_sizes, "--batch-sizes", most=4096)
    lengths = parse_numbers(chains, "--chains")
    if models.drafter == "none":
        raise Misuse(
            "--drafter none drafts nothing, so there is nothing to tune; name another drafter"
        )
    check_writable(output)
    keep_compiled_programs(compilation_cache)

    from eagle3_jax import LoadedDrafter
    from eagle3_jax.bench import tune as tuning
    from eagle3_jax.files.sources import bundled
    from eagle3_jax.measure.environment import hardware
    from eagle3_jax.prompts.benchmark import in_turn, read_prompts

    trees = [parse_tree(text) for text in tree or []]
    fetch_first(models.target, models.drafter)
    drafter = models.drafter
    if drafter is None:
        drafter = announced(measured_drafter(models.target), models.target)

    with spinner("loading") as now:
        dtype = measured_dtype(dtype)
        loaded = read_target(models.target, dtype, weights=models.weights)
        if prompts is not None:
            announce_input(prompts)
        known = read_prompts(
            prompts or bundled("prompts.jsonl"), loaded, max_new_tokens=max_new_tokens
        )

        chosen = in_turn(
            [prompt for prompt in known if prompts or prompt.category == "code"], max_prompts
        )

        head = read_drafter(drafter, target=loaded, layer_ids=models.layer_ids)
        assert head is not None

        batches = len(set(sizes))
        shapes = len(set(lengths)) + len(trees)
        steps = tuning.num_steps(shapes=shapes, batches=batches, repeats=repeats, check=check)
        now = counted(now, steps)
        result = tuning.tune(
            loaded,
            head,
            [prompt.tokens for prompt in chosen],
            batches=sizes,
            chains=lengths,
            trees=trees,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            check=check,
            on_progress=now.say,
            on_result=now.tell,
        )

    method = head.described if isinstance(head, LoadedDrafter) else type(head).__name__
    about = {
        "hardware": hardware(),
        "dtype": dtype,
        "weights": models.weights,
        "drafter_method": method,
    }
    values = about | result.to_json()
    if output is not None:
        write_json(output, values)
    print_page(Page(values, _text(result, values)), as_json=as_json)

    if len(result.batches) < batches or (check and len(result.checks) < min(batches, 2)):
        measured = ", ".join(str(tuned.batch) for tuned in result.batches)
        typer.echo(f"interrupted: measured batch sizes {measured} of {batch_sizes}", err=True)
        raise typer.Exit(130)


_NOTES = """\
S = τ / (v + G·c) with quartiles, * the choice. τ: tokens per round, measured for each draft separately; it does not
change with the batch. v, c: a verification and a draft step in plain steps. A shorter draft, or none, is chosen if
the difference is smaller than that between repeats."""  # noqa: E501


def _text(result: Tuning, values: dict[str, Any]) -> list[str | Table]:
    """Returns the speed-ups, the break-evens, the checks, and the schedule to copy."""
    precision = values["dtype"]
    if values["weights"] != "dense":
        precision += f", {values['weights']}"
    prompts = f"{result.num_prompts} prompt{'s' if result.num_prompts > 1 else ''}"
    size = f"{prompts} x {result.max_new_tokens} new tokens, {result.repeats} interleaved repeats"

    return [
        f"{values['drafter_method']}; {values['hardware']}; {precision}, greedy; {size}\n",
        _speedups(result),
        "\n" + _NOTES,
        table_of(
            "Acceptance at which the best chain breaks even", _break_evens(values), _BREAK_EVEN
        ),
        table_of("Check of the prediction", values["checks"], _CHECKS),
        *_schedule(result),
    ]


def _speedups(result: Tuning) -> Table:
    rows = []
    for candidates in zip(*(tuned.candidates for tuned in result.batches), strict=True):
        shape = candidates[0].shape
        row = [shape.name, f"{shape.mean_acceptance_length:.2f}"]
        for candidate, tuned in zip(candidates, result.batches, strict=True):
            mark = " *" if candidate is tuned.best else ""
            row.append(cell_text("speedup", vars(candidate.speedup)) + mark)
        rows.append(row)
    rows.append(["plain", "", *("1" if tuned.best else "1 *" for tuned in result.batches)])
    return Table("", ["draft", "τ", *(f"batch {tuned.batch}" for tuned in result.batches)], rows)


_BREAK_EVEN = {
    "batch": "batch",
    "plain step": "plain_step_seconds",
    "chain": "chain",
    "τ needed": "mean_acceptance_length",
    "draft acceptance rate": "needed.draft_acceptance_rate",
    "conditional acceptance rate": "needed.conditional_acceptance_rate",
    "τ measured": "measured.mean_acceptance_length",
}
_CHECKS = {
    "batch": "batch",
    "draft": "shape",
    "rows running": "rows_running",
    "predicted": "predicted",
    "measured": "measured",
}


def _break_evens(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the acceptance from which the best chain is faster than plain decoding, by batch."""
    rows = []
    for tuned in values["batches"]:
        levels = tuned["break_even"]
        chain = tuned["best_chain"] if tuned["best_chain"] in levels else next(iter(levels))
        step = tuned["plain_step"]["median"]
        rows.append(
            {"batch": tuned["batch"], "plain_step_seconds": step, "chain": chain, **levels[chain]}
        )
    return rows


def _schedule(result: Tuning) -> list[str]:
    """Returns the schedule in the forms of vLLM and of ``eagle3 generate``."""
    schedule = result.schedule
    if schedule is None:
        return [
            "\nNo chain pays off at any of these batch sizes: decode plainly. There is no schedule."
        ]

    entries = schedule.to_lists()
    keys = {
        "num_speculative_tokens": schedule.max_length,
        "num_speculative_tokens_per_batch_size": entries,
    }
    lines = [
        "\nschedule of chains (for vLLM's --speculative-config, next to method and model):",
        json.dumps(keys),
        f"eagle3 generate --schedule '{json.dumps(entries, separators=(',', ':'))}'",
    ]

    for tuned in result.batches:
        if tuned.best is not None and not tuned.best.shape.is_chain:
            tree = tuned.best.shape.name
            lines.append(
                f"At batch {tuned.batch} the {tree} is faster; a schedule, like vLLM, holds chains"
                " only."
            )
    return lines
