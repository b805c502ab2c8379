"""Text in a terminal while it is written, with the accepted draft tokens in colour."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from eagle3_jax.cli._progress import spinner

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

    from eagle3_jax import Chunk, SpeculativeDecoder

ACCEPTED = "bold green"
_NOT_FINITE = (
    "not_finite: the target's logits are NaN or all minus infinity; check its weights and --dtype"
)

# Control characters as visible ones: a terminal would obey them, and an escape sequence can do
# anything.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}
_VISIBLE |= {code: 0xFFFD for code in range(0x80, 0xA0)}


class Printed(NamedTuple):
    """A stream that has been printed."""

    chunks: list[Chunk]  #: Its chunks.
    first_token: float  #: Time to the first token in seconds, without compilation.
    #: Time from the second round on, in seconds. Programs are compiled and loaded before it.
    warm_seconds: float
    preparing: float  #: Time in which programs were compiled, or read from the cache, in seconds.
    has_compiled: bool  #: Whether a program was compiled.

    @property
    def num_tokens(self) -> int:
        """Number of new tokens."""
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def num_warm_tokens(self) -> int:
        """Number of new tokens from the second round on; the first chunk is the prefill's token."""
        return sum(len(chunk.tokens) for chunk in self.chunks[2:])

    @property
    def preparation(self) -> str:
        """What the time ``preparing`` went to, in words."""
        return "compilation" if self.has_compiled else "reading compiled programs"

    def ending(self, limit: int) -> str:
        """Returns the reason why the text ended, in words."""
        reason = self.chunks[-1].finish_reason.name.lower()
        return {
            "not_finite": _NOT_FINITE,
            "length": f"stopped: reached --max-new-tokens {limit}",
        }.get(reason, reason)


def print_stream(
    console: Console, prompt: str, stream: Iterator[Chunk], tokenizer: Tokenizer | None
) -> Printed:
    """Prints a prompt and its continuation as it appears; token ids without a tokenizer."""
    import jax

    from eagle3_jax.measure.timing import CompileClock

    has_cache = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    step = "preparing programs for this length"
    if has_cache:
        step = f"{step}; the first time they are compiled"
    start = time.perf_counter()
    chunks: list[Chunk] = []
    with CompileClock() as clock:
        with spinner("reading the prompt") as now:
            clock.on_compiling = lambda: now.say(step)
            first = list(itertools.islice(stream, 1))
            first_token = time.perf_counter() - start - clock.seconds
            first += itertools.islice(stream, 1)

        warm = time.perf_counter()
        put(console, prompt, "dim")
        for chunk in itertools.chain(first, stream):
            for index, (token, piece) in enumerate(zip(chunk.tokens, chunk.pieces, strict=True)):
                style = ACCEPTED if index < chunk.num_accepted else ""
                put(console, piece if tokenizer else f" {token}", style)
            console.file.flush()
            chunks.append(chunk)
    has_compiled = clock.programs > clock.num_read
    warm_seconds = time.perf_counter() - warm
    return Printed(chunks, first_token, warm_seconds, clock.seconds, has_compiled)


def put(console: Console, text: str, style: str) -> None:
    """Prints exactly this text; in a terminal its control characters become visible ones."""
    from rich.segment import Segment, Segments

    # A segment is written as it is; higher levels of rich turn tabs into spaces and drop control
    # characters.
    visible = text.translate(_VISIBLE) if console.is_terminal else text
    console.print(Segments([Segment(visible, console.get_style(style))]), end="")


def hint(text: str) -> None:
    """Prints a dim line on the standard error, if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if console.is_terminal:
        put(console, f"{text}\n", "dim")


def describe_method(decoder: SpeculativeDecoder) -> list[str]:
    """Returns lines with the drafting method, the weights, and whether the output is lossless."""
    lines = [f"drafter: {decoder.method}"]
    weights = decoder.target.weights
    if weights != "dense":
        lines.append(f"weights: {weights}; lossless relative to the target with these weights")

    if decoder.invariant:
        lines.append("invariant: the bits of a token depend on the text before it alone")
    if decoder.drafter.note:
        lines.append(f"note: {decoder.drafter.note}")
    if not decoder.lossless:
        rule = type(decoder.loop.verifier).__name__
        lines.append(
            f"not lossless: drafts were accepted by {rule}; the text may differ from the"
            " target's own"
        )
    return lines
