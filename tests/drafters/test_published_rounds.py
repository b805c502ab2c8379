"""Rounds of drafters in their published layouts, as transformers drafted them.

The drafters are trained, so that a wrong norm, position, window or order of inputs changes what
they draft.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from eagle3_jax import SpeculativeDecoder
from eagle3_jax.decode import LoadedTarget
from eagle3_jax.devices.sharding import to_host
from eagle3_jax.load import load_drafter, load_target

pytestmark = pytest.mark.core

RECORDINGS = Path(__file__).parent.parent / "golden" / "published"
NEW_TOKENS = 40


class Recording(NamedTuple):
    """A target and a drafter whose rounds were recorded."""

    name: str  #: The folder of the recording.
    num_speculative_tokens: int
    drafter: str = "drafter"  #: A folder next to the target, or a named drafter.
    target: str = ""  #: The folder with the target; by default that of the recording.


TABLE = {
    "DFlash, z-lab's layout": Recording(
        "dflash_qwen3_full", 4, drafter="drafter_zlab", target="dflash_qwen3"
    ),
    "Gemma 4's assistant, keys = values": Recording("gemma4_dense", 4),
    "Gemma 4's assistant, shared keys, clusters": Recording("gemma4_e", 3),
}


class DraftedRound(NamedTuple):
    """One round of one row."""

    length: int  #: Tokens of the text before it.
    candidates: list[int]
    matches: int


@functools.cache
def target_of(recording: Recording) -> LoadedTarget:
    return load_target(RECORDINGS / (recording.target or recording.name) / "target")


def decoder_of(recording: Recording) -> SpeculativeDecoder:
    target = target_of(recording)
    folder = RECORDINGS / recording.name / recording.drafter
    source = folder if folder.is_dir() else recording.drafter
    drafter = load_drafter(source, target=target)
    count = recording.num_speculative_tokens
    return SpeculativeDecoder(target, drafter, num_speculative_tokens=count, stop_tokens=())


def recorded(recording: Recording) -> list[dict[str, Any]]:
    return json.loads((RECORDINGS / recording.name / "rounds.json").read_text())["prompts"]


def drafted_rounds(
    decoder: SpeculativeDecoder, prompts: list[list[int]]
) -> tuple[list[list[DraftedRound]], list[list[int]]]:
    """Returns the rounds of every row, and its new tokens."""
    rounds: list[list[DraftedRound]] = [[] for _ in prompts]
    before = [len(prompt) + 1 for prompt in prompts]
    texts = np.zeros(0)
    for latest in decoder.rounds(prompts, max_new_tokens=NEW_TOKENS):
        fields = (latest.draft.tokens, latest.verdict.num_accepted, latest.state.length)
        candidates, matches, lengths = to_host(fields)
        texts = to_host(latest.state.tokens)
        for row, length in enumerate(lengths.tolist()):
            if length > before[row]:
                tokens = candidates[row, 1:].tolist()
                rounds[row].append(DraftedRound(before[row], tokens, int(matches[row])))
            before[row] = length

    new = [
        texts[row, len(prompt) : len(prompt) + NEW_TOKENS].tolist()
        for row, prompt in enumerate(prompts)
    ]
    return rounds, new


@pytest.mark.parametrize("name", TABLE)
def test_every_round_drafts_and_accepts_as_transformers(name: str) -> None:
    recording = TABLE[name]
    theirs = recorded(recording)
    prompts = [row["prompt"] for row in theirs]
    ours, texts = drafted_rounds(decoder_of(recording), prompts)
    assert texts == [row["greedy"] for row in theirs]

    num_equal = 0
    for row, our_rounds in zip(theirs, ours, strict=True):
        end = len(row["prompt"]) + NEW_TOKENS
        by_length = {drafted.length: drafted for drafted in our_rounds}
        for length, candidates, matches in row["rounds"]:
            drafted = by_length[length]
            # Near the end some methods draft no more tokens than are needed.
            assert drafted.candidates[: len(candidates)] == candidates, f"at {length} tokens"
            # At the end upstream does not count matches that are not needed.
            if length + len(candidates) < end:
                num_compared = min(drafted.matches, len(candidates))
                assert num_compared == matches, f"at {length} tokens"
            num_equal += 1
    assert num_equal == sum(len(row["rounds"]) for row in theirs) > 100
