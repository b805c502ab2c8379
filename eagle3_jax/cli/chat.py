"""``eagle3 chat``: a conversation at a terminal, or questions from a pipe."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3_jax.chat.repetition import FEWEST, LONGEST, TIMES, Repetition, repetition_of
from eagle3_jax.cli._decoding import DraftOptions, SamplingOptions, open_decoder
from eagle3_jax.cli._errors import Misuse, one_line
from eagle3_jax.cli._options import (
    CompilationCacheOption,
    DtypeOption,
    ModelOptions,
    announce_input,
    grouped,
)
from eagle3_jax.cli._parts import chosen_models
from eagle3_jax.cli._progress import spinner
from eagle3_jax.cli._streaming import Printed, describe_method, hint, print_stream, put
from eagle3_jax.devices.compilation import keep_compiled_programs
from eagle3_jax.files.jsonl import STDIN
from eagle3_jax.prompts.request import MOST_TOKENS

if TYPE_CHECKING:
    from rich.console import Console

    from eagle3_jax import Chat, Chunk

EXAMPLE = """\b
Examples:
  eagle3 chat --target ./llama --drafter ./head --dtype mixed
  eagle3 chat --target ./llama --system 'Answer in French.' --temperature 0.7 --seed 1
  echo 'What is the capital of France?' | eagle3 chat --target ./llama"""

COMMANDS = """\
/reset  begins a new conversation
/help   lists these commands
/exit   ends the program, as Ctrl-D and an empty line do
Ctrl-C  ends an answer; the part that was written stays in the conversation
"""


@grouped
def chat(
    *,
    models: ModelOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    system: Annotated[
        str | None,
        typer.Option(help="System message. Default: the chat template's own, if it has one."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens of an answer.", min=1, max=MOST_TOKENS)
    ] = 512,
    stop_repeating: Annotated[
        bool,
        typer.Option(
            help=(
                f"End an answer that loops: its newest tokens are the same 1 to {LONGEST} tokens"
                f" {TIMES} times in a row or more, {FEWEST} tokens together."
            )
        ),
    ] = True,
    dtype: DtypeOption = None,
    compilation_cache: CompilationCacheOption = None,
) -> None:
    """Talk with a model that has a chat template.

    Answers appear as they are written, exactly as the target would write them, with the accepted
    draft tokens colored. Every line of a pipe is a question; blank lines are skipped. At a terminal
    /help lists the commands.
    """
    at_terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
    with _loading():
        models, dtype = chosen_models(models, dtype)
    with _loading(), spinner("loading"):
        keep_compiled_programs(compilation_cache)

        from eagle3_jax import Chat

        params = sampling.params()
        decoder = open_decoder(models, draft, dtype)
        if decoder.target.chat_template is None:
            raise Misuse(
                f"{decoder.target.name} has no chat template; name a model that has one with"
                " --target, or continue a text with eagle3 generate"
            )
        begin = functools.partial(
            Chat,
            decoder,
            system=system,
            max_new_tokens=max_new_tokens,
            sampling=params,
            seed=sampling.seed,
        )
        conversation = begin()

    if at_terminal or not decoder.lossless:
        for line in describe_method(decoder):
            say(line, stderr=not at_terminal)
    if at_terminal:
        put(_console(), f"{decoder.target.name}: /help lists commands, Ctrl-D ends\n\n", "dim")

    for line in _lines(at_terminal):
        if line == "/exit":
            return
        if line == "/reset":
            conversation = begin()
        elif re.fullmatch(r"/\w*", line):
            unknown = "" if line == "/help" else f"unknown command {line}; there are\n"
            put(_console(), f"{unknown}{COMMANDS}\n", "dim")
        else:
            answer = Answer(conversation, max_new_tokens, stop_repeating)
            answer.print_to(line, at_terminal=at_terminal)


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    """Says what Ctrl-C interrupts before the conversation begins."""
    try:
        yield
    except KeyboardInterrupt:
        hint("[interrupted while loading]")
        raise


def _lines(at_terminal: bool) -> Iterator[str]:
    """Yields the lines of the user.

    They are at a terminal those up to an empty one, from a pipe all that are not blank.
    """
    if not at_terminal:
        announce_input(STDIN)
        yield from (line.strip() for line in sys.stdin or () if line.strip())
        return

    with contextlib.suppress(ImportError):
        # `input` then edits lines and remembers them.
        import readline  # noqa: F401

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends)")
            continue
        if not line:
            return
        yield line


def _console(**options: Any) -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, **options)


def say(text: str, *, stderr: bool = False) -> None:
    """Prints a dim line; a terminal wraps it between words."""
    console = _console(stderr=stderr, style="dim")
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


class Answer:
    """One answer while it is written and printed."""

    def __init__(self, conversation: Chat, limit: int, stop_repeating: bool) -> None:
        """Prepares an answer.

        Args:
            conversation: The conversation that it continues.
            limit: Maximum number of its tokens.
            stop_repeating: Whether a loop ends it.
        """
        self._conversation = conversation
        self._limit = limit
        self._stops = stop_repeating
        self._tokens: list[int] = []
        self._num_chunks = 0
        self._step = "reading the prompt"
        self._repetition: Repetition | None = None

    def print_to(self, question: str, *, at_terminal: bool) -> None:
        """Prints the answer to a question.

        At a terminal Ctrl-C ends it, and a refusal is printed.
        """
        from eagle3_jax.measure.timing import CompileClock

        console = _console()
        tokenizer = self._conversation.decoder.target.tokenizer
        try:
            with CompileClock() as clock:
                clock.on_compiling = self._note_compiling
                chunks = self._watched(self._conversation.stream(question))
                printed = print_stream(console, "", chunks, tokenizer)
        except (KeyboardInterrupt, ValueError) as error:
            if not at_terminal:
                raise

            message = self._interruption()
            if isinstance(error, ValueError):
                message = f"error: {one_line(str(error))}"
            # The interrupted console would print its last text again.
            put(_console(), f"{message}\n\n", "dim")
            return

        put(console, "\n", "")
        if console.is_terminal:
            say(f"{_summary(printed, self._ending(printed))}\n")
        elif self._repetition is not None:
            say(f"[{self._ending(printed)}]", stderr=True)

    def _note_compiling(self) -> None:
        self._step = "compiling"

    def _watched(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yields the chunks up to a loop."""
        for chunk in chunks:
            self._tokens += chunk.tokens
            self._num_chunks += 1
            yield chunk
            self._repetition = repetition_of(self._tokens) if self._stops else None
            if self._repetition is not None:
                return

    def _interruption(self) -> str:
        """Returns what Ctrl-C interrupted; the second chunk begins to show the answer."""
        is_shown = self._num_chunks > 1
        return "\n[interrupted]" if is_shown else f"[interrupted while {self._step}]"

    def _ending(self, printed: Printed) -> str:
        """Returns the reason of the answer's end; empty for a stop token."""
        if self._repetition is not None:
            return f"stopped: {self._repetition}; --no-stop-repeating lets an answer go on"
        ending = printed.ending(self._limit)
        return "" if ending == "stop" else ending


def _summary(printed: Printed, ending: str) -> str:
    """Returns the size and speed of an answer in one line, after the reason of its end."""
    rounds = len(printed.chunks) - 1
    count = printed.num_tokens
    facts = [f"[{ending}]"] if ending else []
    facts.append(f"{count} token{'s' if count > 1 else ''}")

    # The first token comes with the prompt.
    if rounds:
        facts.append(f"{(count - 1) / rounds:.2f} tokens per round")
    if printed.num_warm_tokens:
        facts.append(f"{printed.num_warm_tokens / printed.warm_seconds:.1f} tokens/s")
    if printed.preparing >= 1:
        facts.append(f"{printed.preparation} ({printed.preparing:.0f} s) left out")
    return " · ".join(facts)
