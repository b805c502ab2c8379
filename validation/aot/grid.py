"""Which programs the level AOT compiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from validation.aot.programs import PROGRAMS, Case

ALL = {
    "target": ["Llama-3.1-8B", "Qwen3-8B", "Llama-3.3-70B"],
    "draft": ["chain5", "tree60"],
    "batch": [1, 8],
    "program": list(PROGRAMS),
    "sampled": [False, True],
}


def cases_of(
    *,
    platform: Sequence[str],
    target: Sequence[str],
    draft: Sequence[str],
    batch: Sequence[int],
    program: Sequence[str],
    sampled: Sequence[bool],
) -> Iterator[Case]:
    """Every combination.

    Raises:
        ValueError: A name is unknown.
    """
    for where, shape, name, shot, rows, warm in itertools.product(platform, target, program, draft, batch, sampled):
        yield Case(platform=where, target=shape, program=name, draft=shot, batch=rows, sampled=warm)


def few(platform: str) -> list[Case]:
    """What every commit is held to: minutes of two cores."""
    return [
        Case(platform=platform, program="step", draft="chain5"),
        Case(platform=platform, program="step", draft="chain5", sampled=True),
        Case(platform=platform, program="step", draft="tree60", batch=8),
        Case(platform=platform, program="generate", draft="chain5"),
    ]


def every(platform: str) -> list[Case]:
    """All of it: an hour or so for a GPU, more for a TPU."""
    return list(cases_of(platform=[platform], **ALL))
