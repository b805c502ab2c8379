"""``eagle3 generate``: text from a prompt, with the accepted draft tokens colored."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from eagle3_jax.cli._decoding import DraftOptions, SamplingOptions, open_decoder
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._mesh import DistributedOption, MeshOption, join, read_mesh
from eagle3_jax.cli._options import (
    CompilationCacheOption,
    DtypeOption,
    JsonOption,
    ModelOptions,
    announce_input,
    check_writable,
    grouped,
    parse_ids,
    write_json,
)
from eagle3_jax.cli._parts import chosen_models
from eagle3_jax.cli._printing import Page, print_page
from eagle3_jax.cli._progress import progress_bar, spinner
from eagle3_jax.cli._streaming import ACCEPTED, Printed, describe_method, hint, print_stream, put
from eagle3_jax.devices.compilation import keep_compiled_programs
from eagle3_jax.files.jsonl import STDIN, read_text
from eagle3_jax.prompts.reading import read_requests
from eagle3_jax.prompts.request import MOST_TOKENS, Request

if TYPE_CHECKING:
    from rich.console import Console

    from eagle3_jax import Generation, SpeculativeDecoder
    from eagle3_jax.bench.comparison import Comparison

EXAMPLE = """\b
Examples:
  eagle3 generate 'def fibonacci(n):' --max-new-tokens 64 --dtype mixed
  eagle3 generate --chat 'What is the capital of France?' --target ./llama --drafter ./head
  eagle3 generate --target ./llama --drafter ./head --prompts prompts.jsonl --json
  eagle3 generate --prompt-ids '[1, 2]' --tree num_nodes=60,max_depth=8,top_k=10 --trace rounds.json"""  # noqa: E501


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The prompts and how much is added to them."""

    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to continue; '-' reads it from the standard input.", show_default=False
        ),
    ] = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Ask PROMPT as a question, through the target's chat template."
        ),
    ] = False
    prompt_ids: Annotated[
        str | None, typer.Option(help="Token ids to continue, as a JSON list: '[1, 2]'.")
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            help=(
                "JSONL file, or '-', with 'prompt', 'prompt_ids', 'messages', 'turns' or"
                " 'question' on each line, and optionally 'max_new_tokens', 'temperature',"
                " 'top_k', 'top_p', 'seed' and 'stop'."
            )
        ),
    ] = None
    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum number of new tokens per prompt.", min=1, max=MOST_TOKENS)
    ] = 128

    def read(self, sampling: OutputOptions) -> list[Request]:
        """Returns the prompts, with the sampling of the command line where a line does not say it.

        Raises:
            Misuse: None of the three options was given, or several, or --chat without a PROMPT.
        """
        if [self.prompt, self.prompt_ids, self.prompts].count(None) != 2:
            raise Misuse("give one of a PROMPT, --prompt-ids '[1, 2]' or --prompts FILE.jsonl")
        if self.chat and self.prompt is None:
            raise Misuse(
                "--chat asks a PROMPT; a line of --prompts has 'messages' instead, and token ids"
                " are used as they are"
            )

        announce_input(self.prompts or self.prompt or "")
        request = Request(
            prompt="",
            max_new_tokens=self.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stops=tuple(sampling.stop or ()),
        )

        if self.prompts is not None:
            return read_requests(self.prompts, request)
        if self.prompt_ids is not None:
            return [dataclasses.replace(request, prompt=parse_ids(self.prompt_ids))]
        text = read_text(Path(STDIN)) if self.prompt == STDIN else self.prompt or ""
        messages = [{"role": "user", "content": text}] if self.chat else None
        return [dataclasses.replace(request, prompt=text, messages=messages)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputOptions(SamplingOptions):
    """The choice of tokens, where they end, and their probabilities."""

    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue after stop tokens.")
    ] = False
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the output before this text; may be repeated. With --json."),
    ] = None
    logprobs: Annotated[
        int | None,
        typer.Option(
            help=(
                "Report the log-probability of every new token and of this many likeliest. With"
                " --json."
            )
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Precision, batches, devices and output."""

    dtype: DtypeOption = None
    batch_size: Annotated[
        int, typer.Option(help="Number of prompts of a file decoded at once with --json.", min=1)
    ] = 1
    mesh: MeshOption = None
    distributed: DistributedOption = None
    compilation_cache: CompilationCacheOption = None
    trace: Annotated[Path | None, typer.Option(help="Write every round to this JSON file.")] = None
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Decode up to eight prompts again, to measure the speed-up."
        ),
    ] = False
    as_json: JsonOption = False


@grouped
def generate(
    *,
    prompts: PromptOptions,
    models: ModelOptions,
    draft: DraftOptions,
    sampling: OutputOptions,
    running: RunOptions,
) -> None:
    """Continue prompts, exactly as the target would, in fewer steps.

    With --json each prompt gives one line: prompt_ids, token_ids (new tokens only), text,
    finish_reason, lossless, weights, drafter_method, seconds (without compilation; with
    --batch-size above 1 from the start of the first prompt to the end of this one), stats, and with
    --logprobs logprobs: for each token its logprob and top, pairs of token id and log-probability.
    """
    check_writable(running.trace)
    # Before the sampling is checked, which puts numbers on a device. Every process of a mesh reads
    # the rounds; the first one writes them.
    if not join(running.distributed, running.mesh) and running.trace is not None:
        running = dataclasses.replace(running, trace=Path(os.devnull))

    requests = prompts.read(sampling)
    has_stops = any(request.stops for request in requests)
    is_plain_json = running.as_json and running.trace is None
    if (has_stops or sampling.logprobs is not None) and not is_plain_json:
        raise Misuse("stop texts and --logprobs work with --json and without --trace")
    _check_sampling(requests)

    keep_compiled_programs(running.compilation_cache)

    rows = min(running.batch_size, len(requests)) if running.as_json else 1
    batches = [rows] if running.trace is None else _batches(len(requests), rows)
    mesh = read_mesh(running.mesh, batches)
    models, dtype = chosen_models(models, running.dtype)
    start = time.perf_counter()
    with spinner("loading", quiet=running.as_json):
        decoder = open_decoder(
            models,
            draft,
            dtype,
            batch=rows,
            mesh=mesh,
            stop_tokens=() if sampling.ignore_eos else None,
        )
    loading = time.perf_counter() - start

    template = decoder.target.chat_template
    if prompts.chat and template is None:
        raise Misuse(
            f"{decoder.target.name} has no chat template; leave --chat out to continue the text as"
            " it is"
        )

    # A bad prompt is refused before anything has been printed.
    encoded = [request.encoded(decoder.target) for request in requests]
    job = Job(decoder, requests, encoded, rows, sampling.logprobs, running)

    if running.as_json:
        _print_json(job)
        return
    if prompts.prompt is not None and not prompts.chat and template is not None:
        hint("the text is continued as it is; --chat asks it as a question")
    _print_text(job, loading)


def _check_sampling(requests: Sequence[Request]) -> None:
    """Refuses sampling that is out of range, before anything is loaded."""
    from eagle3_jax.checks import checked_sampling

    for request in requests:
        try:
            checked_sampling(request.sampling, 1)
        except ValueError as error:
            raise ValueError(f"{request.where}{error}") from None


def _batches(count: int, rows: int) -> list[int]:
    """Returns the number of prompts in each batch."""
    return [min(rows, count - start) for start in range(0, count, rows)]


class Job(NamedTuple):
    """A checked command line."""

    decoder: SpeculativeDecoder
    requests: list[Request]  #: Their prompts are what the user gave.
    encoded: list[Request]  #: The same with token ids.
    rows: int  #: Prompts that are decoded at once.
    logprobs: int | None
    running: RunOptions


class Ended(NamedTuple):
    """A prompt whose answer is complete."""

    number: int
    row: Generation
    seconds: float  #: Without compilation.


# JSON


def _print_json(job: Job) -> None:
    if job.running.trace is None:
        results = _results(job)
    else:
        rounds: list[dict[str, Any]] = []
        results = _traced(job, rounds)

    # Lines of prompts that ended before one above them in the file.
    lines: dict[int, str] = {}
    num_written = 0
    with progress_bar("prompts", len(job.encoded), with_output=True) as (bar, advanced):
        for ended in results:
            bar.advance(advanced)
            lines[ended.number] = json.dumps(_row_json(ended, job.decoder))
            while num_written in lines:
                sys.stdout.write(lines.pop(num_written) + "\n")
                num_written += 1
            sys.stdout.flush()

    if job.running.trace is not None:
        write_json(job.running.trace, {"prompts": rounds})


def _results(job: Job) -> Iterator[Ended]:
    """Yields each prompt as it ends. Its row goes to the next prompt."""
    from eagle3_jax.engine.refill import complete
    from eagle3_jax.measure.timing import CompileClock

    with CompileClock() as clock:
        start = time.perf_counter()
        answers = complete(job.decoder, job.encoded, slots=job.rows, logprobs=job.logprobs)
        for number, row in answers:
            now = time.perf_counter() - clock.seconds
            yield Ended(number, row, now - start)
            # With one row the next prompt begins now.
            if job.rows == 1:
                start = time.perf_counter() - clock.seconds


def _traced(job: Job, rounds: list[dict[str, Any]]) -> Iterator[Ended]:
    """Yields the prompts, one batch after the other, and appends their rounds to ``rounds``."""
    from eagle3_jax.engine.engine import sampling_of
    from eagle3_jax.measure.timing import CompileClock
    from eagle3_jax.measure.trace import record

    first = 0
    with CompileClock() as clock:
        for size in _batches(len(job.encoded), job.rows):
            batch = job.encoded[first : first + size]
            start = time.perf_counter() - clock.seconds
            traced = record(
                job.decoder,
                [request.tokens for request in batch],
                max_new_tokens=[request.max_new_tokens for request in batch],
                sampling=sampling_of(batch),
                seed=[request.seed for request in batch],
            )
            seconds = time.perf_counter() - clock.seconds - start
            rounds += traced.prompts
            for number, row in enumerate(traced.result.rows, first):
                yield Ended(number, row, seconds)
            first += size


def _row_json(ended: Ended, decoder: SpeculativeDecoder) -> dict[str, Any]:
    row = ended.row
    values = {
        "prompt_ids": row.prompt_tokens,
        "token_ids": row.tokens,
        "text": row.text,
        "finish_reason": row.finish_reason.name.lower(),
        "lossless": decoder.lossless,
        "weights": decoder.target.weights,
        "drafter_method": decoder.method,
        "seconds": ended.seconds,
        "stats": row.stats.to_json(),
    }
    if row.logprobs is not None:
        values["logprobs"] = [dataclasses.asdict(token) for token in row.logprobs]
    return values


# Text

_MEASURED_PROMPTS = 8
_REPEATS = 5
_SECONDS = 10.0


def _print_text(job: Job, loading: float) -> None:
    """Streams every prompt and prints a summary.

    With ``--compare`` it also prints a comparison with plain decoding.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    streams = [
        _stream(console, job.decoder, request, encoded)
        for request, encoded in zip(job.requests, job.encoded, strict=True)
    ]
    legend = Text.assemble(
        ("accepted draft tokens", ACCEPTED), " · the target's own tokens · ", ("prompt", "dim")
    )
    print_page(Page(None, [legend, *_summary(streams, loading), *describe_method(job.decoder)]))

    if job.running.compare:
        print_page(Page(None, _comparison(job)))
    if job.running.trace is not None:
        rounds: list[dict[str, Any]] = []
        with spinner("writing the trace"):
            list(_traced(job, rounds))
        write_json(job.running.trace, {"prompts": rounds})


def _stream(
    console: Console, decoder: SpeculativeDecoder, request: Request, encoded: Request
) -> Printed:
    """Prints one prompt and its continuation as it appears."""
    tokenizer = decoder.target.tokenizer
    limit = encoded.max_new_tokens
    stream = decoder.stream(
        encoded.tokens, max_new_tokens=limit, sampling=encoded.sampling, seed=encoded.seed
    )
    # A chat shows its turns, and token ids are shown as their text if there is a tokenizer.
    if isinstance(request.prompt, str):
        messages = request.messages if decoder.target.chat_template is not None else None
        turns = [f"{message['role']}: {message['content']}\n" for message in messages or ()]
        prompt = "".join([*turns, "assistant: "]) if turns else request.prompt
    else:
        prompt = " ".join(map(str, encoded.tokens))
        if tokenizer is not None:
            prompt = tokenizer.decode(encoded.tokens)

    printed = print_stream(console, prompt, stream, tokenizer)
    put(console, f"\n[{printed.ending(limit)}]\n\n", "dim")
    return printed


def _summary(streams: Sequence[Printed], loading: float) -> list[str]:
    """Returns the speed of all streams, and the acceptance if anything was drafted.

    Args:
        streams: Streams that were printed one after the other.
        loading: Time of loading in seconds.
    """
    from eagle3_jax import SpeculationStats

    count = sum(printed.num_tokens for printed in streams)
    first_token = statistics.median(printed.first_token for printed in streams)
    speed = f"{count} token{'s' if count > 1 else ''}; first token after {first_token:.2f} s"
    num_warm_tokens = sum(printed.num_warm_tokens for printed in streams)
    if num_warm_tokens:
        warm_seconds = sum(printed.warm_seconds for printed in streams if printed.num_warm_tokens)
        speed += (
            f", then {_speed(num_warm_tokens / warm_seconds)} tokens/s from the second round on"
        )

    preparing = sum(printed.preparing for printed in streams)
    step = next((printed for printed in streams if printed.has_compiled), streams[0]).preparation
    lines = [speed, f"before that: loading {loading:.1f} s, {step} {preparing:.1f} s"]

    stats = SpeculationStats.merge([printed.chunks[-1].stats for printed in streams])
    if int(stats.num_draft_tokens):
        lines.append(
            f"τ = {stats.mean_acceptance_length:.2f} tokens per round (1 + accepted / drafts: "
            f"{int(stats.num_accepted_tokens)} accepted in {int(stats.num_drafts)} drafts); "
            f"{stats.draft_acceptance_rate:.0%} of the drafted tokens accepted"
        )
        shares = " ".join(f"{share:.2f}" for share in stats.acceptance_per_position)
        lines.append(f"accepted at depth 1, 2, ...: {shares}")
    return lines


def _comparison(job: Job) -> list[str]:
    """Measures the ratio to plain decoding now, and returns it in two lines."""
    from eagle3_jax.bench.comparison import compare_with_plain
    from eagle3_jax.measure.environment import hardware

    requests = job.encoded[:_MEASURED_PROMPTS]
    first = requests[0]
    if any(request.sampling != first.sampling for request in requests):
        return ["no comparison with plain decoding: the lines of the file sample differently"]

    with spinner("measuring against plain decoding"):
        comparison = compare_with_plain(
            job.decoder,
            [request.tokens for request in requests],
            max_new_tokens=[request.max_new_tokens for request in requests],
            sampling=first.sampling,
            seed=first.seed,
            repeats=_REPEATS,
            seconds=_SECONDS,
        )
    if not comparison.is_plain and max(comparison.ratios) < 1:
        cheaper = "; on a CPU --weights int8 makes it cheaper"
        if job.decoder.target.weights == "int8":
            cheaper = ""
        hint(
            f"a verification costs more here than the drafts save{cheaper}; eagle3 tune finds the"
            " best draft length"
        )

    prompts = f"{len(requests)} prompt{'s' if len(requests) > 1 else ''}"
    return [
        speed_line(comparison),
        f"median of {len(comparison.ratios)} interleaved runs over {prompts} at batch 1, prefill"
        f" included, compilation excluded; {hardware()}",
    ]


def speed_line(comparison: Comparison) -> str:
    """Returns the speed-up, and whether the output is the same.

    The ratio is that of the printed speeds.
    """
    ours = _speed(comparison.tokens_per_second.median)
    plain = _speed(comparison.plain_tokens_per_second.median)
    if comparison.is_plain:
        return f"{plain} tokens/s, plain decoding"

    low = min(comparison.ratios)
    high = max(comparison.ratios)
    ratio = float(ours) / float(plain)
    if low <= 1 <= high:
        verdict = f"{ratio:.2f}x, no measurable difference from plain decoding"
    elif ratio > 1:
        verdict = f"{ratio:.2f}x faster than plain decoding"
    else:
        verdict = f"{ratio:.2f}x the speed of plain decoding"

    spread = (
        f"{ours} vs {plain} tokens/s; {low:.2f}x to {high:.2f}x in {len(comparison.ratios)} runs"
    )
    if comparison.same_output is None:
        return f"{verdict} ({spread})"
    return f"{verdict} ({spread}), identical output: {'yes' if comparison.same_output else 'no'}"


def _speed(tokens_per_second: float) -> str:
    """Returns a speed with at least three digits."""
    return f"{tokens_per_second:.1f}" if tokens_per_second >= 10 else f"{tokens_per_second:.3g}"
