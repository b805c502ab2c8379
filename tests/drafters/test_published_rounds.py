"""Rounds of drafters in their published layouts, as transformers drafted them.

The drafters are trained, so that a wrong norm, position, window or order of inputs changes what
they draft.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from eagle3_jax import SpeculativeDecoder, conversion
from eagle3_jax.decode import LoadedDrafter, LoadedTarget
from eagle3_jax.devices.sharding import to_host
from eagle3_jax.load import load_drafter, load_target
from eagle3_jax.models.config import with_window

pytestmark = pytest.mark.core

RECORDINGS = Path(__file__).parent.parent / "golden" / "published"
NEW_TOKENS = 40


class Recording(NamedTuple):
    """A target and a drafter whose rounds were recorded."""

    name: str  #: The folder of the recording.
    num_speculative_tokens: int
    drafter: str = "drafter"  #: A folder next to the target, or a named drafter.
    target: str = ""  #: The folder with the target; by default that of the recording.
    to: str = ""  #: The layout that the drafter is written in before it is loaded.


TABLE = {
    "DFlash, Muse Glimmer": Recording("dflash_muse_glimmer", 4),
    "DFlash, windows": Recording("dflash_qwen3", 5),
    "DFlash, windows in z-lab's layout": Recording("dflash_qwen3", 5, to="vllm"),
    "DFlash, full layers": Recording("dflash_qwen3_full", 4, target="dflash_qwen3"),
    "DFlash, z-lab's layout": Recording(
        "dflash_qwen3_full", 4, drafter="drafter_zlab", target="dflash_qwen3"
    ),
    "MTP of DeepSeek V3": Recording("deepseek_v3_mtp1", 1, drafter="mtp"),
    "two MTP modules of DeepSeek V3": Recording("deepseek_v3_mtp2", 2, drafter="mtp"),
    "MTP of GLM-4.5": Recording("glm4_moe_mtp1", 1, drafter="mtp"),
    "MTP of Mellum 2": Recording("mellum_mtp1", 1, drafter="mtp"),
    "Gemma 4's assistant, keys = values": Recording("gemma4_dense", 4),
    "Gemma 4's assistant, shared keys, clusters": Recording("gemma4_e", 3),
}
MODULES = {
    "qwen3_5": "MTP of Qwen3.5",
    "qwen3_5_moe": "MTP of Qwen3.5-MoE",
    "qwen3_next": "MTP of Qwen3-Next",
    "mimo": "MTP of MiMo",
    "glm4_moe_lite": "MTP of GLM-4.7-Flash",
}
# transformers does not run these modules. Three tokens a round are drafted by feeding back.
TWINS = {
    "MTP of Qwen3.5 with images": Recording(
        "qwen3_5_mtp1", 1, drafter="mtp", target="qwen3_5_wrapped"
    ),
    **{
        f"{label}, {count} a round": Recording(
            f"{name}_mtp{count}", count, drafter="mtp", target=f"{name}_mtp1"
        )
        for name, label in MODULES.items()
        for count in (1, 3)
    },
}


class DraftedRound(NamedTuple):
    """One round of one row."""

    length: int  #: Tokens of the text before it.
    candidates: list[int]
    matches: int


@functools.cache
def target_of(recording: Recording) -> LoadedTarget:
    return load_target(RECORDINGS / (recording.target or recording.name) / "target")


def drafter_of(recording: Recording) -> LoadedDrafter:
    target = target_of(recording)
    folder = RECORDINGS / recording.name / recording.drafter
    source = folder if folder.is_dir() else recording.drafter
    with tempfile.TemporaryDirectory() as temporary:
        if recording.to:
            source = Path(temporary) / recording.to
            conversion.convert(folder, source, recording.to, target.model.config)
        return load_drafter(source, target=target)


def decoder_of(recording: Recording, drafter: LoadedDrafter | None = None) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        target_of(recording),
        drafter or drafter_of(recording),
        num_speculative_tokens=recording.num_speculative_tokens,
        stop_tokens=(),
    )


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


def check_rounds(recording: Recording) -> None:
    """Compares every round with the recorded one, and the texts."""
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


@pytest.mark.parametrize("name", TABLE)
def test_every_round_drafts_and_accepts_as_transformers(name: str) -> None:
    check_rounds(TABLE[name])


def test_every_round_of_dflash2_is_that_of_a_twin_in_pytorch() -> None:
    check_rounds(Recording("dflash2_qwen3", 5, target="dflash_qwen3"))


@pytest.mark.parametrize("name", TWINS)
def test_every_round_of_modules_is_that_of_a_twin_in_pytorch(name: str) -> None:
    check_rounds(TWINS[name])


@pytest.mark.parametrize(
    ("name", "count"), [("DFlash, Muse Glimmer", 193), ("DFlash, windows", 179)]
)
def test_a_drafter_whose_windows_are_ignored_drafts_other_tokens(name: str, count: int) -> None:
    """Counts the recorded rounds that differ with full attention in every layer.

    And fewer of their tokens are accepted.
    """
    recording = TABLE[name]
    loaded = drafter_of(recording)
    layers = tuple(with_window(layer, None) for layer in loaded.drafter.config.layers)
    config = dataclasses.replace(loaded.drafter.config, layers=layers)
    drafter = dataclasses.replace(loaded.drafter, config=config)
    decoder = decoder_of(recording, dataclasses.replace(loaded, drafter=drafter))

    prompts = []
    rounds = []
    for row in recorded(recording):
        # The last token before a draft is the target's, which a prefill writes.
        text = row["prompt"] + row["greedy"]
        prompts += [text[: length - 1] for length, _, _ in row["rounds"]]
        rounds += row["rounds"]
    latest = next(decoder.rounds(prompts, max_new_tokens=2))
    drafted, accepted = to_host((latest.draft.tokens, latest.verdict.num_accepted))

    pairs = zip(drafted[:, 1:].tolist(), rounds, strict=True)
    num_other = sum(tokens[: len(candidates)] != candidates for tokens, (_, candidates, _) in pairs)
    assert num_other == count
    assert accepted.sum() < 0.85 * sum(matches for _, _, matches in rounds)
