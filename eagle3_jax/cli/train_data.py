"""``eagle3 train data``: texts for a draft head, from somebody's documents or written by the target itself."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3_jax.cli._compiled import keep_compiled_programs
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import CompilationCacheOption
from eagle3_jax.cli._progress import progress_bar
from eagle3_jax.cli._training_files import DATA_RECORD, begin_data, fingerprint_of_file, read_all_texts, weights_of
from eagle3_jax.cli._training_run import MOST_ROWS, DtypeOption, SeedOption

if TYPE_CHECKING:
    from eagle3_jax.loaded import LoadedTarget
    from eagle3_jax.training.own_text import OwnTextConfig
    from eagle3_jax.training.texts import Text

_TEXTS_OF_A_SHARD = 256  # minutes of work that an interruption loses


@dataclasses.dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """How the target writes."""

    temperature: Annotated[
        float, typer.Option(help="Sampling temperature of answers that are not greedy.", min=0, max=1000)
    ] = 0.7
    greedy_share: Annotated[float, typer.Option(help="Share of answers that are greedy.", min=0, max=1)] = 0.5
    openings: Annotated[
        Path | None, typer.Option(help="Beginnings of questions for --self, one a line; half of them begin so.")
    ] = None
    opening_tokens: Annotated[
        int, typer.Option(help="Tokens of a 'text' that the target continues, with --rewrite.", min=1)
    ] = 64
    rows: Annotated[int, typer.Option(help="Texts written at once.", min=1, max=MOST_ROWS)] = 32


def data(
    target: Annotated[str, typer.Argument(help="Directory, GGUF file or name of the target.")],
    out: Annotated[Path, typer.Argument(metavar="DATA", help="Directory to write. The same command goes on there.")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="JSONL with 'messages', 'prompt' and 'completion', or 'text' in each line."),
    ] = None,
    *,
    own: Annotated[
        int, typer.Option("--self", help="Conversations that the target begins itself, questions included.", min=0)
    ] = 0,
    rewrite: Annotated[
        bool, typer.Option("--rewrite", help="Let the target write the answers of the files itself.")
    ] = False,
    length: Annotated[int, typer.Option(help="Most tokens of a text.", min=2)] = 512,
    held_out: Annotated[
        float, typer.Option(help="Share of the documents that is never learned, by their hash.", min=0, max=1)
    ] = 0.02,
    writing: WritingOptions,
    dtype: DtypeOption = "float32",
    seed: SeedOption = 0,
    compilation_cache: CompilationCacheOption = None,
) -> None:
    """Turn conversations into token ids with a mask of what a head learns: the answers.

    A head learns best from what the target itself writes: --rewrite and --self. The texts are in files of 256; an
    interruption loses the one that is being written.
    """
    from eagle3_jax import load_target
    from eagle3_jax.training.own_text import OwnTextConfig
    from eagle3_jax.training.texts import Texts

    keep_compiled_programs(compilation_cache)
    paths = files or []
    if not paths and not own:
        raise Misuse("there is nothing to write; give JSONL files, or --self N for conversations of the target's own")
    if rewrite and not paths:
        raise Misuse("--rewrite answers the prompts of files; give JSONL files")
    openings = () if writing.openings is None else _lines(writing.openings)
    loaded = load_target(target, dtype=dtype)
    if length > loaded.max_positions:
        raise Misuse(f"--length {length} is more than {loaded.name} holds: {loaded.holds}")
    config = OwnTextConfig(
        length=length,
        slots=writing.rows,
        temperature=writing.temperature,
        greedy_share=writing.greedy_share,
        seed=seed,
        openings=openings,
    )
    options = {
        "TARGET": weights_of(loaded.params),
        "FILES": [fingerprint_of_file(path) for path in paths],
        "--self": own,
        "--rewrite": rewrite,
        "--length": length,
        "--held-out": held_out,
        **{f"--{name.replace('_', '-')}": value for name, value in dataclasses.asdict(writing).items()},
        "--openings": None if writing.openings is None else fingerprint_of_file(writing.openings),
        "--dtype": dtype,
        "--seed": seed,
    }
    sources = [*_of_files(loaded, paths, config, writing, rewrite), *_of_its_own(loaded, own, config)]
    begin_data(out, options, len(sources))
    places = [out / f"texts-{number:05}.npz" for number in range(len(sources))]
    missing = [number for number, place in enumerate(places) if not place.exists()]
    dropped: collections.Counter[str] = collections.Counter()
    done = len(sources) - len(missing)
    with progress_bar("writing texts", len(sources), done) as (progress, task):
        for number in missing:
            texts = list(sources[number](dropped))
            Texts.of(texts).save(places[number])
            progress.advance(task)
            if progress.disable:
                typer.echo(f"{places[number].name}: {len(texts):,} texts")
    everything = read_all_texts(out)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
    kept = int(everything.held_out(held_out).sum())
    typer.echo(
        f"wrote {out}: {len(everything):,} texts, {int(everything.learn.sum()):,} tokens to learn, {kept:,} texts held out"
        + (f"; left out: {reasons}" if reasons else "")
    )


Shard = Callable[[collections.Counter[str]], Iterable["Text"]]  # writes the texts of a file, and counts what is dropped


def _of_files(
    target: LoadedTarget, paths: list[Path], config: OwnTextConfig, opening: int, rewrite: bool, dropped: Counter[str]
) -> list[Shard]:
    """The shards of the documents of files."""
    from eagle3_jax.training.documents import read_documents, read_prompts_to_answer
    from eagle3_jax.training.own_text import answers
    from eagle3_jax.training.texts import Text

    if not paths:
        return []
    if not rewrite:
        documents = read_documents(paths, target, length=config.length, dropped=dropped)
        return [lambda dropped: documents]
    prompts = read_prompts_to_answer(paths, target, length=config.length, dropped=dropped, opening=opening)

    def written(part: list[tuple[list[int], int]], first: int) -> Iterator[Text]:
        for index, answer in answers(target, [tokens for tokens, _ in part], config, first=first):
            tokens, document = part[index]
            yield Text([*tokens, *answer], [False] * len(tokens) + [True] * len(answer), document)
