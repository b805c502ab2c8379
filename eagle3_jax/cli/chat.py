"""``eagle3 chat``: a conversation at a terminal, or questions from a pipe."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from eagle3_jax.cli._streaming import Printed, describe_method, print_stream, put
from eagle3_jax.devices.compilation import keep_compiled_programs
from eagle3_jax.files.jsonl import STDIN
from eagle3_jax.prompts.request import MOST_TOKENS

if TYPE_CHECKING:
    from rich.console import Console

    from eagle3_jax import Chat

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
    dtype: DtypeOption = None,
    compilation_cache: CompilationCacheOption = None,
) -> None:
    """Talk with a model that has a chat template.

    Answers appear as they are written, exactly as the target would write them, with the accepted
    draft tokens colored. Every line of a pipe is a question; blank lines are skipped. At a terminal
    /help lists the commands.
    """
    at_terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
    models, dtype = chosen_models(models, dtype)
    with spinner("loading"):
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
            _console(style="dim", stderr=not at_terminal).print(line, markup=False)
    if at_terminal:
        put(_console(), f"{decoder.target.name}: /help lists commands, Ctrl-D ends\n\n", "dim")

    for line in _lines(at_terminal):
        if line == "/exit":
            return
        if line == "/reset":
            conversation = begin()
        elif re.fullmatch(r"/\w*", line):
            put(_console(), COMMANDS, "dim")
        else:
            _answer(conversation, line, max_new_tokens, at_terminal=at_terminal)


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


def _answer(conversation: Chat, question: str, limit: int, *, at_terminal: bool) -> None:
    """Prints the answer to a question. At a terminal Ctrl-C ends it, and a refusal is printed."""
    console = _console()

    try:
        printed = print_stream(
            console, "", conversation.stream(question), conversation.decoder.target.tokenizer
        )
    except (KeyboardInterrupt, ValueError) as error:
        if not at_terminal:
            raise

        message = "\n[interrupted]"
        if isinstance(error, ValueError):
            message = f"error: {one_line(str(error))}"
        # The interrupted console would print its last text again.
        put(_console(), f"{message}\n\n", "dim")
        return

    put(console, "\n", "")
    if console.is_terminal:
        put(console, f"{_summary(printed, limit)}\n\n", "dim")


def _summary(printed: Printed, limit: int) -> str:
    """Returns the size and speed of an answer in one line.

    The reason of its end comes first, unless that is a stop token.
    """
    ending = printed.ending(limit)
    rounds = len(printed.chunks) - 1
    count = printed.num_tokens
    facts = [] if ending == "stop" else [f"[{ending}]"]
    facts.append(f"{count} token{'s' if count > 1 else ''}")

    # The first token comes with the prompt.
    if rounds:
        facts.append(f"{(count - 1) / rounds:.2f} tokens per round")
    if printed.num_warm_tokens:
        facts.append(f"{printed.num_warm_tokens / printed.warm_seconds:.1f} tokens/s")
    if printed.preparing >= 1:
        facts.append(f"{printed.preparation} ({printed.preparing:.0f} s) left out")
    return " · ".join(facts)
