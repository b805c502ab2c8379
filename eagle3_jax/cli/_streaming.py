"""What ``eagle3 generate`` prints for people: the text as it appears, what was accepted, and how fast it was."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from eagle3_jax.cli._job import Job, Task, status
from eagle3_jax.cli._options import write_json

if TYPE_CHECKING:
    from rich.console import Console

    from eagle3_jax import SpeculationStats
    from eagle3_jax.measure.comparison import Comparison

_ACCEPTED = "bold green"
_MEASURED_PROMPTS = 8
_REPEATS = 5
_REASONS = {
    "NOT_FINITE": "not_finite: the target's logits are NaN or all minus infinity; check its weights and --dtype",
}

# A terminal would obey them: a carriage return writes over the prompt, an escape can do anything.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}
_VISIBLE |= {code: 0xFFFD for code in range(0x80, 0xA0)}


def print_text(job: Job, *, compare: bool) -> None:
    """Stream every prompt, sum up, and compare with plain decoding."""
    from rich.console import Console

    from eagle3_jax import SpeculationStats

    console = Console(highlight=False, soft_wrap=True)
    one_by_one = dataclasses.replace(job, batch_size=1)
    counters = [_stream(console, job, tasks[0], seed) for seed, tasks in one_by_one.chunks()]
    _summary(console, SpeculationStats.merge(counters))
    _method(console, job)
    if not job.decoder.lossless:
        rule = type(job.decoder.loop.verifier).__name__
        console.print(f"not lossless: drafts were accepted by {rule}, so this need not be the target's own text")
    if compare:
        _comparison(console, job)
    if job.trace is not None:
        rounds: list[dict[str, Any]] = []
        with status("writing the trace"):
            for seed, tasks in one_by_one.chunks():
                job.run(tasks, seed, rounds)
        write_json(job.trace, {"prompts": rounds})


def _stream(console: Console, job: Job, task: Task, seed: int) -> SpeculationStats:
    """Print one prompt and its continuation as it appears; returns its counters."""
    tokenizer = job.decoder.target.tokenizer
    stream = job.decoder.stream(task.tokens, max_new_tokens=task.max_new_tokens, sampling=job.sampling, seed=seed)
    with status("compiling, reading the prompt"):
        first = list(itertools.islice(stream, 2))  # with the second one everything has been compiled
    if task.text is not None:
        _put(console, task.text, "dim")
    else:
        _put(console, tokenizer.decode(task.tokens) if tokenizer else " ".join(map(str, task.tokens)), "dim")
    latest = first[0]
    for latest in itertools.chain(first, stream):
        for index, (token, piece) in enumerate(zip(latest.tokens, latest.pieces, strict=True)):
            _put(console, piece if tokenizer else f" {token}", _ACCEPTED if index < latest.num_accepted else "")
        console.file.flush()
    _put(console, f"\n[{_REASONS.get(latest.finish_reason.name, latest.finish_reason.name.lower())}]\n\n", "dim")
    return latest.stats


def _put(console: Console, text: str, style: str) -> None:
    """Exactly this text; in a terminal, with its control characters made visible."""
    from rich.segment import Segment, Segments

    # A segment is written as it is; anything higher would turn tabs into spaces and drop control characters.
    shown = text.translate(_VISIBLE) if console.is_terminal else text
    console.print(Segments([Segment(shown, console.get_style(style))]), end="")


def _summary(console: Console, stats: SpeculationStats) -> None:
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


def _method(console: Console, job: Job) -> None:
    """What drafted, and what reading it left out or assumed."""
    from rich.text import Text

    loaded, weights = job.decoder.drafter, job.decoder.target.weights
    console.print(Text(f"drafter: {job.decoder.method}"))
    if weights != "dense":
        console.print(Text(f"weights: {weights}; lossless relative to the target with these weights"))
    if loaded.note:
        console.print(Text(f"note: {loaded.note}"))


def _comparison(console: Console, job: Job) -> None:
    """Tokens per second, and the ratio to plain decoding measured here and now."""
    from eagle3_jax.cli._hardware import hardware
    from eagle3_jax.measure.comparison import compare_with_plain

    tasks = job.tasks[:_MEASURED_PROMPTS]
    with status("measuring against plain decoding (--no-compare skips it)"):
        found = compare_with_plain(
            job.decoder,
            [task.tokens for task in tasks],
            max_new_tokens=[task.max_new_tokens for task in tasks],
            sampling=job.sampling,
            seed=job.seed,
            repeats=_REPEATS,
        )
    console.print(speed_line(found))
    console.print(
        f"batch 1, prefill included, compilation excluded, median of {_REPEATS} interleaved runs over {len(tasks)} "
        f"prompt{'s' if len(tasks) > 1 else ''}; plain = the same target in the same precision; {hardware()}"
    )
    if found.same_output is not None and not found.is_plain:
        console.print(f"output equal to plain decoding, token for token: {'yes' if found.same_output else 'no'}")


def speed_line(found: Comparison) -> str:
    """Both speeds and their ratio: of the numbers as they are shown, so that a reader can divide them."""
    ours, plain = _speed(found.tokens_per_second.median), _speed(found.plain_tokens_per_second.median)
    if found.is_plain:
        return f"{plain} tokens/s, plain decoding"
    ratios = found.ratios
    spread = f"{min(ratios):.2f}x to {max(ratios):.2f}x in {len(ratios)} runs"
    if min(ratios) <= 1 <= max(ratios):
        spread = f"no measurable difference ({spread})"
    return f"{ours} tokens/s = {float(ours) / float(plain):.2f}x plain decoding ({plain} tokens/s); {spread}"


def _speed(tokens_per_second: float) -> str:
    """At least three digits, however slow."""
    return f"{tokens_per_second:.1f}" if tokens_per_second >= 10 else f"{tokens_per_second:.3g}"
