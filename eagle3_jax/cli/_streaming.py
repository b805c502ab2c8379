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
_NOT_FINITE = "not_finite: the target's logits are NaN or all minus infinity; check its weights and --dtype"

# Control characters as visible ones: a terminal would obey them, and an escape sequence can do anything.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}
_VISIBLE |= {code: 0xFFFD for code in range(0x80, 0xA0)}


class Printed(NamedTuple):
    """A stream that has been printed."""

    chunks: list[Chunk]  #: All of it.
    seconds: float  #: Time that it took, without compilation.
    compiling: float  #: Seconds of compilation.

    def ending(self, limit: int) -> str:
        """The reason why the text ended, in words."""
        reason = self.chunks[-1].finish_reason.name.lower()
        return {"not_finite": _NOT_FINITE, "length": f"stopped: reached --max-new-tokens {limit}"}.get(reason, reason)


def print_stream(console: Console, prompt: str, stream: Iterator[Chunk], tokenizer: Tokenizer | None) -> Printed:
    """Prints a prompt and its continuation as it appears; token ids without a tokenizer."""
    import jax

    from eagle3_jax.bench.timing import CompileClock

    kept = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    compiling = "compiling: once per machine" if kept else "compiling"
    start = time.perf_counter()
    chunks: list[Chunk] = []
    with CompileClock() as clock:
        with spinner("reading the prompt") as now:
            clock.on_compiling = lambda: now.say(compiling)
            first = list(itertools.islice(stream, 2))  # after the second one everything has been compiled
            clock.on_compiling = None
        put(console, prompt, "dim")
        for chunk in itertools.chain(first, stream):
            for index, (token, piece) in enumerate(zip(chunk.tokens, chunk.pieces, strict=True)):
                put(console, piece if tokenizer else f" {token}", ACCEPTED if index < chunk.num_accepted else "")
            console.file.flush()
            chunks.append(chunk)
        return Printed(chunks, time.perf_counter() - start - clock.seconds, clock.seconds)


def put(console: Console, text: str, style: str) -> None:
    """Prints exactly this text; in a terminal, with its control characters made visible."""
    from rich.segment import Segment, Segments

    # A segment is written as it is; anything higher would turn tabs into spaces and drop control characters.
    shown = text.translate(_VISIBLE) if console.is_terminal else text
    console.print(Segments([Segment(shown, console.get_style(style))]), end="")


def hint(text: str) -> None:
    """Prints a dim line on the standard error, if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if console.is_terminal:
        put(console, f"{text}\n", "dim")


def print_method(console: Console, decoder: SpeculativeDecoder) -> None:
    """Prints the drafting method, and what its files left open or the output is relative to."""
    from rich.text import Text

    weights = decoder.target.weights
    console.print(Text(f"drafter: {decoder.method}"))
    if weights != "dense":
        console.print(Text(f"weights: {weights}; lossless relative to the target with these weights"))
    if decoder.drafter.note:
        console.print(Text(f"note: {decoder.drafter.note}"))
    if not decoder.lossless:
        rule = type(decoder.loop.verifier).__name__
        console.print(f"not lossless: drafts were accepted by {rule}; the text may differ from the target's own")
