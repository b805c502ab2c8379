"""``eagle3 generate``: text from a prompt, with the accepted draft tokens coloured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eagle3_jax.cli._compiled import CompilationCacheOption, keep_compiled_programs
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._job import Job, Task, status
from eagle3_jax.cli._mesh import DistributedOption, MeshOption, join, read_mesh
from eagle3_jax.cli._options import (
    DrafterOption,
    DtypeOption,
    JsonOption,
    LayerIdsOption,
    TargetOption,
    VerifierOption,
    WeightsOption,
    check_writable,
    parse_ids,
    parse_schedule,
    parse_tree,
    read_drafter,
    read_target,
    read_verifier,
    say_what_is_awaited,
    write_json,
)
from eagle3_jax.cli._own import own
from eagle3_jax.jsonl import STDIN, read_text
from eagle3_jax.prompts import MOST_TOKENS, Request, read_requests

if TYPE_CHECKING:
    from eagle3_jax import Drafter, Generation, GenerationResult, LoadedDrafter, SpeculativeDecoder

EXAMPLE = """\b
Examples:
  eagle3 generate 'def fibonacci(n):' --max-new-tokens 64 --dtype mixed
  eagle3 generate --target ./llama --drafter ./head --prompts prompts.jsonl --json
  eagle3 generate --prompt-ids '[1, 2]' --tree num_nodes=60,max_depth=8,top_k=10 --trace rounds.json"""


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; '-' reads it from the standard input.", show_default=False)
    ] = None,
    *,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    layer_ids: LayerIdsOption = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids to continue, as a JSON list: '[1, 2]'.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL file, or '-': 'prompt' or 'prompt_ids', and optional 'max_new_tokens', a line."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to add.", min=1, max=MOST_TOKENS)] = 128,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            help="Draft length K. Default: 5 (Medusa: one per head; DFlash: the block); on CPUs 3, fewer for batches "
            "above 2."
        ),
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option(help="Draft a tree: num_nodes=60,max_depth=8,top_k=10, a name such as medusa-63, or its paths."),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Draft a chain by how many rows run: '[[1,4,5],[5,16,3]]', or a file of `eagle3 tune`."),
    ] = None,
    draft_sampling: Annotated[
        Literal["greedy", "probabilistic"] | None,
        typer.Option(help="Draft the likeliest tokens, or draw them at the temperature (no dynamic trees)."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most likely tokens; 0 for all.", max=2**31 - 1)] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the most likely tokens of this mass.")] = 1.0,
    verifier: VerifierOption = None,
    seed: Annotated[
        int, typer.Option(help="Random seed; runs with one seed share their random numbers.", min=0, max=2**32 - 1)
    ] = 0,
    dtype: DtypeOption = "float32",
    weights: WeightsOption = "dense",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after stop tokens.")] = False,
    batch_size: Annotated[int, typer.Option(help="Prompts of a file decoded at once with --json.", min=1)] = 1,
    trace: Annotated[Path | None, typer.Option(help="Write every round to this JSON file.")] = None,
    mesh: MeshOption = None,
    distributed: DistributedOption = None,
    compilation_cache: CompilationCacheOption = None,
    compare: Annotated[bool, typer.Option(help="Measure the ratio to plain decoding at the end.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Continue prompts, exactly as the target would, in fewer steps.

    With --json each prompt gives one line: prompt_ids, token_ids (new tokens only), text, finish_reason,
    lossless, weights (of the target that this is relative to), drafter_method (what drafted, found from its files, and
    how much), seconds (without compilation; of the whole batch with --batch-size above 1) and stats.
    """
    check_writable(trace)
    requests = _requests(prompt, prompt_ids, prompts, max_new_tokens)
    keep_compiled_programs(compilation_cache)
    if not join(distributed, mesh) and trace is not None:
        trace = Path(os.devnull)  # all of them read every round; one writes

    from eagle3_jax import DraftSampling, SamplingParams, SpeculativeDecoder
    from eagle3_jax.sampling import check_sampling

    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    check_sampling(sampling, 1)
    shape, lengths = parse_tree(tree), parse_schedule(schedule)
    batches = _batches(len(requests), batch_size if as_json else 1)
    devices = read_mesh(mesh, batches)
    with status("loading", quiet=as_json):
        loaded = read_target(target, dtype, devices, weights=weights)
        head = read_drafter(drafter, target=loaded, target_source=target, layer_ids=layer_ids)
        chosen = any(said is not None for said in (num_speculative_tokens, shape, lengths))
        if not chosen and not own("--drafter", drafter):
            head = _for_rows(head, batches[0], least=0 if draft_sampling is None else 1)
        options = {"--num-speculative-tokens": num_speculative_tokens, "--tree": tree, "--schedule": schedule}
        with _naming(options):
            decoder = SpeculativeDecoder(
                loaded,
                head,
                num_speculative_tokens=num_speculative_tokens,
                tree=shape,
                schedule=lengths,
                draft_sampling=None if draft_sampling is None else DraftSampling(draft_sampling),
                stop_tokens=() if ignore_eos else None,
                verifier=read_verifier(verifier),
                mesh=devices,
            )
    job = Job(decoder, _encoded(decoder, requests), sampling, seed, batch_size, trace)
    if as_json:
        _print_json(job)
    else:
        from eagle3_jax.cli._streaming import print_text

        print_text(job, compare=compare)


@contextlib.contextmanager
def _naming(options: dict[str, object]) -> Iterator[None]:
    """Name the option that was given in what the library says of it."""
    try:
        yield
    except ValueError as error:
        given = [f"{name} {value}" for name, value in options.items() if value is not None]
        raise Misuse(f"{', '.join(given)}: {error}" if given else str(error)) from None


def _requests(prompt: str | None, prompt_ids: str | None, prompts: Path | None, max_new_tokens: int) -> list[Request]:
    if sum(given is not None for given in (prompt, prompt_ids, prompts)) != 1:
        raise Misuse("give one of a PROMPT, --prompt-ids '[1, 2]' or --prompts FILE.jsonl")
    say_what_is_awaited(prompts or prompt or "")
    if prompts is not None:
        return read_requests(prompts, max_new_tokens)
    if prompt_ids is not None:
        return [Request(parse_ids(prompt_ids), max_new_tokens)]
    return [Request(read_text(Path(STDIN)) if prompt == STDIN else prompt or "", max_new_tokens)]


def _for_rows(
    head: LoadedDrafter | Drafter[Any] | None, batch: int, *, least: int
) -> LoadedDrafter | Drafter[Any] | None:
    """A drafter with the default length for batches of this size; none where that is 0.

    What drafts a whole block or all of its heads in one pass does so: other lengths are other networks, or no cheaper.
    """
    from eagle3_jax import Chain, LoadedDrafter
    from eagle3_jax.boundary import Drafting, configured
    from eagle3_jax.schedule import default_length

    drafter, length = head.drafter if isinstance(head, LoadedDrafter) else head, max(default_length(batch), least)
    if length == default_length() or not isinstance(drafter, Drafting) or hasattr(drafter, "longest"):
        return head
    if not length:
        return None
    shaped = configured(drafter, Chain(length), None)
    return dataclasses.replace(head, drafter=shaped) if isinstance(head, LoadedDrafter) else shaped


def _batches(prompts: int, batch_size: int) -> list[int]:
    """How many are decoded at once."""
    return [min(batch_size, prompts - start) for start in range(0, prompts, batch_size)]


def _encoded(decoder: SpeculativeDecoder, requests: list[Request]) -> list[Task]:
    """All prompts as ids, so that a bad one is refused before anything has been printed."""
    tasks = []
    for request in requests:
        try:
            tokens = [int(token) for token in decoder.encode(request.prompt)]
        except ValueError as error:
            raise Misuse(f"{request.where}{error}") from None
        text = request.prompt if isinstance(request.prompt, str) else None
        tasks.append(Task(tokens, text, request.max_new_tokens))
    return tasks


def _print_json(job: Job) -> None:
    rounds = [] if job.trace is not None else None
    with _progress(len(job.tasks)) as advance:
        for seed, tasks in job.chunks():
            result = job.run(tasks, seed, rounds)
            for row in result.rows:
                sys.stdout.write(json.dumps(_row_json(row, result, job.decoder)) + "\n")
                advance()
            sys.stdout.flush()
    if job.trace is not None:
        write_json(job.trace, {"prompts": rounds})


def _row_json(row: Generation, result: GenerationResult, decoder: SpeculativeDecoder) -> dict[str, Any]:
    return {
        "prompt_ids": row.prompt_tokens,
        "token_ids": row.tokens,
        "text": row.text,
        "finish_reason": row.finish_reason.name.lower(),
        "lossless": result.lossless,
        "weights": decoder.target.weights,
        "drafter_method": decoder.method,
        "seconds": result.seconds,
        "stats": row.stats.to_json(),
    }


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A progress bar on the standard error, where that alone is a terminal; yields what advances it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    # Where the lines of JSON go to the same terminal they are the progress, and a bar would write over them.
    off = not console.is_terminal or sys.stdout.isatty() or total == 1
    # Redirected, the standard output would be printed where the bar is: on the standard error.
    with Progress(console=console, transient=True, disable=off, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)
