"""``eagle3 generate``: text from a prompt, with the accepted draft tokens coloured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eagle3_jax.cli._compiled import CompilationCacheOption, keep_compiled_programs
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import (
    MOST_TOKENS,
    DrafterOption,
    DtypeOption,
    JsonOption,
    Request,
    TargetOption,
    check_writable,
    parse_ids,
    parse_schedule,
    parse_tree,
    read_drafter,
    read_requests,
    read_target,
    write_json,
)

if TYPE_CHECKING:
    from rich.console import Console

    from eagle3_jax import Generation, GenerationResult, SamplingParams, SpeculativeDecoder

EXAMPLE = """\b
Examples:
  eagle3 generate 'def fibonacci(n):' --max-new-tokens 64 --dtype mixed
  eagle3 generate --target ./llama --drafter ./head --prompts prompts.jsonl --json
  eagle3 generate --prompt-ids '[1, 2]' --tree num_nodes=60,max_depth=8,top_k=10 --trace rounds.json"""

_ACCEPTED = "bold green"
_MEASURED_PROMPTS = 8
_REPEATS = 3


@dataclasses.dataclass(frozen=True)
class _Job:
    """A checked command line.

    Attributes:
        decoder: Target and drafter.
        requests: Prompts as token ids.
        sampling: The same for all.
        seed: Of the random keys.
        batch_size: Prompts decoded at once.
        trace: Where every round is written.
    """

    decoder: SpeculativeDecoder
    requests: list[Request]
    sampling: SamplingParams
    seed: int
    batch_size: int
    trace: Path | None


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue.", show_default=False)] = None,
    *,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids to continue, as a JSON list: '[1, 2]'.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file: 'prompt' or 'prompt_ids', and optional 'max_new_tokens', a line.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to add.", min=1, max=MOST_TOKENS)] = 128,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Draft a chain of K tokens.")] = None,
    tree: Annotated[str | None, typer.Option(help="Draft a tree: num_nodes=60,max_depth=8,top_k=10.")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Draft a chain by how many rows run: '[[1,4,5],[5,16,3]]', or a file of `eagle3 tune`."),
    ] = None,
    draft_sampling: Annotated[
        Literal["greedy", "probabilistic"] | None,
        typer.Option(help="Draft the likeliest tokens, or draw them at the temperature (chains of a head only)."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most likely tokens; 0 for all.", max=2**31 - 1)] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the most likely tokens of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the random numbers.", min=0, max=2**32 - 1)] = 0,
    dtype: DtypeOption = "float32",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after stop tokens.")] = False,
    batch_size: Annotated[int, typer.Option(help="Prompts of a file decoded at once.", min=1)] = 1,
    trace: Annotated[Path | None, typer.Option(help="Write every round to this JSON file.")] = None,
    compilation_cache: CompilationCacheOption = None,
    compare: Annotated[bool, typer.Option(help="Measure the ratio to plain decoding at the end.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Continue prompts, exactly as the target would, in fewer steps.

    With --json each prompt gives one line: prompt_ids, token_ids (new tokens only), text, finish_reason,
    lossless, seconds (without compilation; of the whole batch with --batch-size above 1) and stats.
    """
    check_writable(trace)
    requests = _requests(prompt, prompt_ids, prompts, max_new_tokens)
    keep_compiled_programs(compilation_cache)

    from eagle3_jax import DraftSampling, SamplingParams, SpeculativeDecoder
    from eagle3_jax.decode import check_sampling

    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    check_sampling(sampling, 1)
    shape, lengths = parse_tree(tree), parse_schedule(schedule)
    with _status("loading", quiet=as_json):
        loaded = read_target(target, dtype)
        decoder = SpeculativeDecoder(
            loaded,
            read_drafter(drafter, target=loaded, target_source=target),
            num_speculative_tokens=num_speculative_tokens,
            tree=shape,
            schedule=lengths,
            draft_sampling=None if draft_sampling is None else DraftSampling(draft_sampling),
            stop_tokens=() if ignore_eos else None,
        )
    job = _Job(decoder, _encoded(decoder, requests), sampling, seed, batch_size, trace)
    if as_json:
        _print_json(job)
    else:
        _print_text(job, compare=compare)


def _requests(prompt: str | None, prompt_ids: str | None, prompts: Path | None, max_new_tokens: int) -> list[Request]:
    if sum(given is not None for given in (prompt, prompt_ids, prompts)) != 1:
        raise Misuse("give one of a PROMPT, --prompt-ids '[1, 2]' or --prompts FILE.jsonl")
    if prompts is not None:
        return read_requests(prompts, max_new_tokens)
    return [Request(parse_ids(prompt_ids) if prompt_ids is not None else prompt or "", max_new_tokens)]


def _encoded(decoder: SpeculativeDecoder, requests: list[Request]) -> list[Request]:
    """All prompts as ids, so that a bad one is refused before anything has been printed."""
    encoded = []
    for request in requests:
        try:
            encoded.append(dataclasses.replace(request, prompt=decoder.encode(request.prompt)))
        except ValueError as error:
            raise Misuse(f"{request.where}{error}") from None
    return encoded


def _chunks(job: _Job) -> Iterator[tuple[int, list[Request]]]:
    """Batches with their seeds.

    The first has the seed itself and the others one of their own, or equal prompts would give equal samples.
    """
    import numpy as np

    for index, start in enumerate(range(0, len(job.requests), job.batch_size)):
        derived = int(np.random.SeedSequence((job.seed, index)).generate_state(1)[0]) if index else job.seed
        yield derived, job.requests[start : start + job.batch_size]


def _run(job: _Job, requests: list[Request], seed: int, rounds: list[dict[str, Any]] | None) -> GenerationResult:
    """One batch; its seconds without compilation."""
    from eagle3_jax.analysis.timing import CompileClock
    from eagle3_jax.cli._trace import record

    prompts, limits = [request.prompt for request in requests], [request.max_new_tokens for request in requests]
    start = time.perf_counter()
    with CompileClock() as clock:
        if rounds is None:
            result = job.decoder.generate(prompts, max_new_tokens=limits, sampling=job.sampling, seed=seed)
        else:
            traced = record(job.decoder, prompts, max_new_tokens=limits, sampling=job.sampling, seed=seed)
            rounds += traced.prompts
            result = traced.result
    return dataclasses.replace(result, seconds=time.perf_counter() - start - clock.seconds)


def _print_json(job: _Job) -> None:
    rounds = [] if job.trace is not None else None
    with _progress(len(job.requests)) as advance:
        for seed, requests in _chunks(job):
            result = _run(job, requests, seed, rounds)
            for row in result.rows:
                sys.stdout.write(json.dumps(_row_json(row, result)) + "\n")
                advance()
            sys.stdout.flush()
    if job.trace is not None:
        write_json(job.trace, {"prompts": rounds})


def _row_json(row: Generation, result: GenerationResult) -> dict[str, Any]:
    return {
        "prompt_ids": row.prompt_tokens,
        "token_ids": row.tokens,
        "text": row.text,
        "finish_reason": row.finish_reason.name.lower(),
        "lossless": result.lossless,
        "seconds": result.seconds,
        "stats": row.stats.to_json(),
    }


def _print_text(job: _Job, *, compare: bool) -> None:
    from rich.console import Console

    from eagle3_jax import SpeculationStats

    console = Console(highlight=False, soft_wrap=True)
    counters = []
    for seed, requests in _chunks(dataclasses.replace(job, batch_size=1)):
        counters.append(_stream(console, job, requests[0], seed))
    _summary(console, job, SpeculationStats.merge(counters))
    if compare:
        _comparison(console, job)
    if job.trace is not None:
        rounds: list[dict[str, Any]] = []
        with _status("writing the trace"):
            for seed, requests in _chunks(dataclasses.replace(job, batch_size=1)):
                _run(job, requests, seed, rounds)
        write_json(job.trace, {"prompts": rounds})


def _stream(console: Console, job: _Job, request: Request, seed: int) -> Any:
    """Print one prompt and its continuation as it appears; returns its counters."""
    from rich.text import Text

    tokenizer = job.decoder.target.tokenizer
    ids = [int(token) for token in request.prompt]
    console.print(Text(tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids)), "dim"), end="")
    stream = job.decoder.stream(ids, max_new_tokens=request.max_new_tokens, sampling=job.sampling, seed=seed)
    with _status("compiling"):
        chunk = next(stream)
    while True:
        for index, (token, piece) in enumerate(zip(chunk.tokens, chunk.pieces, strict=True)):
            style = _ACCEPTED if index < chunk.num_accepted else ""
            console.print(Text(piece if tokenizer else f" {token}", style), end="")
        console.file.flush()
        latest, chunk = chunk, next(stream, None)
        if chunk is None:
            break
    console.print(Text(f"\n[{latest.finish_reason.name.lower()}]\n", "dim"))
    return latest.stats


def _summary(console: Console, job: _Job, stats: Any) -> None:
    from rich.text import Text

    legend = Text.assemble(("accepted draft tokens", _ACCEPTED), " · the target's own tokens · ", ("prompt", "dim"))
    console.print(legend)
    if int(stats.num_draft_tokens):
        console.print(
            f"τ = {stats.mean_acceptance_length:.2f} tokens per round (1 + accepted / drafts: "
            f"{int(stats.num_accepted_tokens)} accepted in {int(stats.num_drafts)} drafts); "
            f"{stats.draft_acceptance_rate:.0%} of the drafted tokens accepted"
        )
        shares = " ".join(f"{share:.2f}" for share in stats.acceptance_per_position)
        console.print(f"accepted at depth 1, 2, ...: {shares}")


def _comparison(console: Console, job: _Job) -> None:
    """Tokens per second, and the ratio to plain decoding measured here and now."""
    from eagle3_jax.analysis.comparison import compare_with_plain
    from eagle3_jax.cli._hardware import hardware

    requests = job.requests[:_MEASURED_PROMPTS]
    with _status("measuring against plain decoding"):
        found = compare_with_plain(
            job.decoder,
            [[int(token) for token in request.prompt] for request in requests],
            max_new_tokens=[request.max_new_tokens for request in requests],
            sampling=job.sampling,
            seed=job.seed,
            repeats=_REPEATS,
        )
    speed, plain, ratio = found.tokens_per_second, found.plain_tokens_per_second, found.ratio
    if found.is_plain:
        console.print(f"{plain.median:.1f} tokens/s, plain decoding")
    else:
        console.print(
            f"{speed.median:.1f} tokens/s = {ratio.median:.2f}x plain decoding ({plain.median:.1f} tokens/s); "
            f"quartiles of the ratio {ratio.low:.2f} to {ratio.high:.2f}"
        )
    console.print(
        f"batch 1, prefill included, compilation excluded, median of {_REPEATS} interleaved runs over {len(requests)} "
        f"prompt{'s' if len(requests) > 1 else ''}; plain = the same target in the same precision; {hardware()}"
    )
    if found.same_output is not None and not found.is_plain:
        console.print(f"output equal to plain decoding, token for token: {'yes' if found.same_output else 'no'}")


@contextlib.contextmanager
def _status(text: str, *, quiet: bool = False) -> Iterator[None]:
    """A spinner on the standard error, where that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A progress bar on the standard error, where that is a terminal; yields what advances it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal or total == 1) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)
