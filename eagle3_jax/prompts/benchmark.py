"""Prompts of benchmarks: the lines of files, as token ids of a target.

A file has the lines of :mod:`eagle3_jax.prompts.reading`. A question goes through the chat template
of the target if it has one. The text of ``prompt`` is continued without a template.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_jax.files.jsonl import JsonRow, read_rows
from eagle3_jax.files.sources import bundled
from eagle3_jax.prompts.reading import FORM, read_request
from eagle3_jax.prompts.request import Request

if TYPE_CHECKING:
    from eagle3_jax.loaded import LoadedTarget


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt of a benchmark."""

    name: str  #: Name of the question, or file and line.
    category: str  #: Category of the question; the name of the file for other lines.
    #: Input of the target. For a conversation it is the first turn, because later turns depend on
    #: the answer.
    tokens: list[int]
    text: str | None  #: The text in the file, without a chat template; ``None`` for token ids.
    reference: str | None  #: A correct answer, if the file has one.
    max_new_tokens: int  #: Maximum number of new tokens.


def read_prompts(
    path: Path, target: LoadedTarget, *, max_new_tokens: int, length: int | None = None
) -> list[Prompt]:
    """Reads the prompts of a JSONL file.

    Args:
        path: The file.
        target: The target, whose tokenizer gives the token ids. If it has a chat template,
            questions go through it.
        max_new_tokens: Maximum number of new tokens for lines without ``max_new_tokens``.
        length: Length of every prompt, in tokens. Default: no change of lengths.

    Raises:
        ValueError: A line is malformed, or its prompt leaves no room in the target's context; the
            message names it.
    """
    prompts = []
    for row in read_rows(path, FORM):
        request = read_request(row, Request("", max_new_tokens))
        try:
            tokens = request.templated(target)
            if length is not None:
                if isinstance(tokens, str) and target.tokenizer is not None:
                    tokens = target.tokenizer.encode(tokens).ids
                tokens = resize_prompt(tokens, length) if isinstance(tokens, list) else tokens
            tokens = target.encode(tokens)
        except ValueError as error:
            raise ValueError(f"{row.where}{error}") from None
        if len(tokens) + request.max_new_tokens > target.max_positions:
            raise ValueError(
                f"{row.where}the prompt has {len(tokens)} tokens and is given"
                f" {request.max_new_tokens} more, but the target holds {target.holds}; leave the"
                " line out or shorten it"
            )
        prompts.append(_labelled(row, request, tokens, path.stem))
    return prompts


def _labelled(row: JsonRow, request: Request, tokens: list[int], file: str) -> Prompt:
    """Returns the prompt of a line with its name, its category and its reference."""
    labels = row.values
    names = [labels[key] for key in ("question_id", "name", "task_id") if key in labels]
    name = names[0] if names else _line_name(row)
    category = labels.get("category") or labels.get("kind") or file

    reference = labels.get("reference", labels.get("answer"))
    first = reference[0] if isinstance(reference, list) and reference else reference
    if first is not None and not isinstance(first, str):
        raise ValueError(f"{row.where}'reference' must be a text or a list of texts")
    text = request.prompt if isinstance(request.prompt, str) else None
    return Prompt(str(name), str(category), tokens, text, first or None, request.max_new_tokens)


def _line_name(row: JsonRow) -> str:
    """Returns file and line, without the folder."""
    return row.where.rpartition("/")[2].removesuffix(": ")


def resize_prompt(tokens: list[int], length: int) -> list[int]:
    """Returns a prompt of exactly ``length`` tokens.

    It is the end of a longer prompt, or a shorter prompt repeated.
    """
    if not tokens:
        return tokens
    repeats = -(-length // len(tokens))
    return (tokens * repeats)[-length:]


def random_prompts(count: int, vocab_size: int, length: int, *, seed: int = 0) -> list[Prompt]:
    """Returns prompts of ``length`` random token ids, equally likely.

    Their acceptance differs from that of text.
    """
    # Reading a file of prompts needs no numpy.
    import numpy as np

    ids = np.random.default_rng(seed).integers(0, vocab_size, (count, length)).tolist()
    return [
        Prompt(f"random {index}", "random", tokens, None, None, 0)
        for index, tokens in enumerate(ids)
    ]


def in_turn(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Chooses ``count`` prompts in turn from all categories and their sources.

    They are grouped by category.

    The source is the part of a name before its last colon, as in ``code/bisect.py:19``. Few prompts
    should not all come from one file, and a batch should have one category where there are enough
    prompts.
    """

    def by_turn(rows: Sequence[Prompt], key: Callable[[Prompt], str]) -> list[Prompt]:
        counts: collections.Counter[str] = collections.Counter()
        ranked = []
        for prompt in rows:
            counts[key(prompt)] += 1
            ranked.append((counts[key(prompt)], prompt))
        return [prompt for _, prompt in sorted(ranked, key=lambda pair: pair[0])]

    by_source = by_turn(
        prompts, lambda prompt: f"{prompt.category}/{prompt.name.rpartition(':')[0]}"
    )
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    chosen = by_turn(by_source, lambda prompt: prompt.category)[:count]
    return sorted(chosen, key=lambda prompt: categories.index(prompt.category))


def shipped() -> list[str]:
    """Returns the held-out prompts of the shipped pair, as text."""
    return [row.values["prompt"] for row in read_rows(bundled("prompts.jsonl"), FORM)]
