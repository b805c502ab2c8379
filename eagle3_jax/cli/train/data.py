"""``eagle3 train data``: texts for a draft head, from documents or written by the target itself."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import CompilationCacheOption
from eagle3_jax.cli._parts import fetch_first
from eagle3_jax.cli._progress import progress_bar
from eagle3_jax.cli.train.files import (
    begin_data,
    fingerprint_of_file,
    joined_texts,
    shard_path,
    weights_of,
)
from eagle3_jax.cli.train.run import MOST_ROWS, DtypeOption, SeedOption, named
from eagle3_jax.devices.compilation import keep_compiled_programs

if TYPE_CHECKING:
    from eagle3_jax.loaded import LoadedTarget
    from eagle3_jax.training.own_text import Conversations, OwnTextConfig
    from eagle3_jax.training.texts import Text

# Minutes of work that an interruption loses.
_TEXTS_OF_A_SHARD = 256

# The option without which another one would do nothing.
_NEEDED = {
    "--opening-tokens": "--rewrite",
    "--most": "--rewrite",
    "--openings": "--self",
    "--temperature": "--rewrite or --self",
    "--greedy-share": "--rewrite or --self",
    "--rows": "--rewrite or --self",
}
_OPENING_TOKENS = 64

Dropped = collections.Counter[str]
# Makes the texts of one file, and counts those that are left out.
Shard = Callable[[Dropped], Iterable["Text"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """Texts that the target writes itself."""

    rewrite: Annotated[
        bool,
        typer.Option("--rewrite", help="Let the target write the answers in the files itself."),
    ] = False
    opening_tokens: Annotated[
        int | None,
        typer.Option(
            help=(
                "With --rewrite: number of tokens of a 'text' that the target continues."
                " Default: 64."
            ),
            min=1,
        ),
    ] = None
    most: Annotated[
        int | None,
        typer.Option(
            help="With --rewrite: maximum number of prompts, chosen at random. Default: all.", min=1
        ),
    ] = None
    openings: Annotated[
        Path | None,
        typer.Option(
            help="With --self: beginnings of questions, one per line, for half of the questions."
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Temperature of answers that are not greedy. Default: 0.7.", min=0, max=1000
        ),
    ] = None
    greedy_share: Annotated[
        float | None,
        typer.Option(help="Share of answers that are greedy. Default: 0.5.", min=0, max=1),
    ] = None
    rows: Annotated[
        int | None, typer.Option(help="Texts written at once. Default: 32.", min=1, max=MOST_ROWS)
    ] = None

    def check(self, conversations: int) -> None:
        """Refuses options without the option that they belong to.

        Args:
            conversations: The number of ``--self``.
        """
        has_self = conversations > 0
        present = {
            "--rewrite": self.rewrite,
            "--self": has_self,
            "--rewrite or --self": self.rewrite or has_self,
        }

        options = named(self)
        for field, needed in _NEEDED.items():
            if options[field] is not None and not present[needed]:
                raise Misuse(
                    f"{field} is an option of {needed}; give that as well, or leave {field} out"
                )


def data(
    target: Annotated[str, typer.Argument(help="Directory, GGUF file or name of the target.")],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="DATA", help="Directory to write; the same command continues there."
        ),
    ],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="JSONL with 'messages', 'prompt' and 'completion', or 'text' in each line."
        ),
    ] = None,
    *,
    conversations: Annotated[
        int,
        typer.Option(
            "--self",
            help="Number of conversations that the target writes, questions included.",
            min=0,
        ),
    ] = 0,
    writing: WritingOptions,
    length: Annotated[int, typer.Option(help="Maximum number of tokens of a text.", min=2)] = 512,
    held_out: Annotated[
        float,
        typer.Option(
            help="Share of the documents that are never learned, chosen by hash.", min=0, max=1
        ),
    ] = 0.02,
    dtype: DtypeOption = "float32",
    seed: SeedOption = 0,
    compilation_cache: CompilationCacheOption = None,
) -> None:
    """Turn conversations into token ids, with a mask of the answers, which a head learns.

    A head learns best from texts that the target wrote: --rewrite, --self. Texts go to files of
    256, and an interruption loses the file that is being written.
    """
    from eagle3_jax import load_target
    from eagle3_jax.training.own_text import OwnTextConfig
    from eagle3_jax.training.texts import Texts

    keep_compiled_programs(compilation_cache)
    paths = files or []
    if not paths and not conversations:
        raise Misuse(
            "there is nothing to write; give JSONL files, or --self N for conversations that the"
            " target writes"
        )
    if writing.rewrite and not paths:
        raise Misuse("--rewrite answers the prompts of files; give JSONL files")
    writing.check(conversations)

    # A file that is absent is refused before any loading.
    fingerprints = [fingerprint_of_file(path) for path in paths]
    openings = () if writing.openings is None else _lines(writing.openings)
    fetch_first(target)
    loaded = load_target(target, dtype=dtype)

    chosen = {
        "slots": writing.rows,
        "temperature": writing.temperature,
        "greedy_share": writing.greedy_share,
    }
    config = OwnTextConfig(
        length=length,
        seed=seed,
        openings=openings,
        **{name: value for name, value in chosen.items() if value is not None},  # type: ignore[arg-type]
    )

    options = {
        "TARGET": weights_of(loaded.params),
        "FILES": fingerprints,
        "--self": conversations,
        **named(writing),
        "--openings": None if writing.openings is None else fingerprint_of_file(writing.openings),
        "--length": length,
        "--held-out": held_out,
        "--dtype": dtype,
        "--seed": seed,
    }

    dropped: Dropped = collections.Counter()
    shards = _shards_of_files(loaded, paths, config, writing, dropped)
    shards += _shards_of_conversations(loaded, conversations, config)

    begin_data(out, options, len(shards))
    missing = [number for number in range(len(shards)) if not shard_path(out, number).exists()]
    with progress_bar("writing texts", len(shards), len(shards) - len(missing)) as (progress, task):
        for number in missing:
            texts = Texts.of(shards[number](dropped))
            texts.save(shard_path(out, number))
            progress.advance(task)
            if progress.disable:
                typer.echo(f"{number + 1} of {len(shards)}: {len(texts):,} texts")

    texts = joined_texts(out)
    reasons = ", ".join(f"{count:,} ({reason})" for reason, count in sorted(dropped.items()))
    typer.echo(
        f"wrote {out}: {len(texts):,} texts, {int(texts.learn.sum()):,} tokens to learn;"
        f" {int(texts.held_out(held_out).sum()):,} texts held"
        f" out{f'; left out now: {reasons}' if reasons else ''}"
    )


def _shards_of_files(
    target: LoadedTarget,
    paths: list[Path],
    config: OwnTextConfig,
    writing: WritingOptions,
    dropped: Dropped,
) -> list[Shard]:
    """Returns the shards of the documents of files."""
    import numpy as np

    from eagle3_jax.training.documents import read_documents, read_prompts_to_answer

    if not paths:
        return []
    if not writing.rewrite:
        # Reading takes seconds, so all documents are in one file. They are read before anything is
        # written.
        texts = list(read_documents(paths, target, length=config.length, dropped=dropped))
        return [lambda dropped: texts]

    opening = writing.opening_tokens or _OPENING_TOKENS
    prompts = read_prompts_to_answer(
        paths, target, length=config.length, dropped=dropped, opening=opening
    )
    if writing.most is not None and writing.most < len(prompts):
        order = np.random.default_rng(config.seed).permutation(len(prompts))
        prompts = [prompts[index] for index in order[: writing.most]]

    shards = []
    for first in range(0, len(prompts), _TEXTS_OF_A_SHARD):
        part = prompts[first : first + _TEXTS_OF_A_SHARD]
        shards.append(functools.partial(_answered, target, part, config, first))
    return shards


def _answered(
    target: LoadedTarget,
    prompts: list[tuple[list[int], int]],
    config: OwnTextConfig,
    first: int,
    dropped: Dropped,
) -> Iterator[Text]:
    """Yields prompts with the answers that the target writes."""
    from eagle3_jax.training.own_text import answers
    from eagle3_jax.training.texts import Text

    for index, answer in answers(target, [tokens for tokens, _ in prompts], config, first=first):
        tokens, document = prompts[index]
        if answer:
            yield Text([*tokens, *answer], [False] * len(tokens) + [True] * len(answer), document)
        else:
            dropped["loop"] += 1


def _shards_of_conversations(
    target: LoadedTarget, count: int, config: OwnTextConfig
) -> list[Shard]:
    """Returns the shards of conversations that the target writes."""
    from eagle3_jax.training.own_text import Conversations

    shards = []
    for first in range(0, count, _TEXTS_OF_A_SHARD):
        conversations = Conversations(
            target, config, min(_TEXTS_OF_A_SHARD, count - first), first=first
        )
        shards.append(functools.partial(_counted, conversations))
    return shards


def _counted(conversations: Conversations, dropped: Dropped) -> Iterator[Text]:
    yield from conversations
    dropped.update(conversations.dropped)


def _lines(path: Path) -> tuple[str, ...]:
    """Returns the lines of a text file that are not empty."""
    from eagle3_jax.files.jsonl import read_text

    lines = tuple(filter(None, map(str.strip, read_text(path).splitlines())))
    if not lines:
        raise Misuse(f"--openings {path} has no line with text")
    return lines
