"""Our texts and rounds next to those of a recording of vLLM.

A text is compared up to the place where it parts from vLLM's, because what follows continues
another text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from eagle3_jax import LoadedDrafter, LoadedTarget, SpeculativeDecoder
from eagle3_jax.files.sources import locate
from validation.agreement import Judged
from validation.engines.vllm.bridge import Tokens
from validation.forcing import reference
from validation.internals import drafted
from validation.margin import FLOAT32_TOLERANCE
from validation.parity import Played, parting, play
from validation.recorded import NEW_TOKENS, PAIRS, Recording, decoder_of
from validation.runs import RECORDED
from validation.subject import Setting

BATCH = 20


@functools.cache
def loaded(name: str, dtype: str) -> tuple[LoadedTarget, LoadedDrafter]:
    """The pair of a recording, whose files must be those that vLLM read."""
    pair = PAIRS[name]
    try:
        locate(pair.target, "target")
    except ValueError as error:
        pytest.skip(f"{name}: {error}")
    recorded = Recording.of(name).data["checkpoints"]
    assert pair.checkpoints() == recorded, (
        f"{name} is not the checkpoint of the recording; record it again"
    )
    return pair.load(dtype)


def rows_of(name: str, setting: Setting) -> tuple[int, ...]:
    """Numbers of the compared prompts, whose tasks are mixed in every batch.

    A CPU takes one batch, because SmolLM2's 60 prompts take it 20 minutes.
    """
    count = len(Recording.of(name).prompts)
    stride = -(-count // BATCH)
    starts = range(stride if setting.on_gpu and not setting.quick else 1)
    return tuple(row for start in starts for row in range(start, count, stride))


@functools.cache
def played(name: str, method: str, rows: tuple[int, ...]) -> list[Played]:
    """Our float32 texts and rounds of the prompts with these numbers; L5 and L8 share them."""
    prompts = Recording.of(name).prompts
    decoder = decoder_of(method, *loaded(name, "float32"))
    return play(
        decoder, [prompts[row] for row in rows], max_new_tokens=NEW_TOKENS, batch_size=BATCH
    )


def written(decoder: SpeculativeDecoder, prompts: Sequence[Tokens]) -> list[Tokens]:
    """Our texts, in batches."""
    starts = range(0, len(prompts), BATCH)
    batches = [
        decoder.generate(prompts[start : start + BATCH], max_new_tokens=NEW_TOKENS).tokens
        for start in starts
    ]
    return [tokens for batch in batches for tokens in batch]


@dataclasses.dataclass(frozen=True)
class Texts:
    """Our texts of one method next to vLLM's, up to where they part, judged by our target."""

    method: str
    places: list[int | None]  #: Where each text parts; ``None`` where it does not.
    ours: Judged
    theirs: Judged

    @classmethod
    def of(
        cls, method: str, target: LoadedTarget, dtype: str, prompts: Sequence[Tokens],
        ours: Sequence[Tokens], theirs: Sequence[Tokens],
    ) -> Texts:  # fmt: skip
        """Judge both texts along vLLM's."""
        places = [parting(row, their_row) for row, their_row in zip(ours, theirs, strict=True)]
        lengths = [NEW_TOKENS if position is None else position + 1 for position in places]
        ours = [row[:length] for row, length in zip(ours, lengths, strict=True)]
        theirs = [row[:length] for row, length in zip(theirs, lengths, strict=True)]
        scored = reference(target, prompts, theirs, ours)
        their_scored = scored if ours == theirs else reference(target, prompts, theirs)
        judged = (
            Judged(f"ours, {method}", "us", dtype, ours, scored),
            Judged(f"{RECORDED}, {method}", "us", dtype, theirs, their_scored),
        )
        return cls(method, places, *judged)

    @property
    def num_parted(self) -> int:
        """Texts that are another than vLLM's."""
        return sum(position is not None for position in self.places)

    def row(self) -> list[Any]:
        """A row of the table."""
        agreed = (self.ours.agreed, self.theirs.agreed)
        disagreements = sum(side.disagreements for side in agreed)
        largest = max(side.largest_gap for side in agreed)
        ties = [side.ties for side in agreed]

        return [
            self.method,
            len(self.places),
            agreed[0].tokens,
            self.num_parted,
            *ties,
            disagreements,
            largest,
        ]


@functools.cache
def in_float32(name: str, method: str, rows: tuple[int, ...]) -> Texts:
    """Our float32 texts of a method next to the recorded ones."""
    recording = Recording.of(name)
    theirs = recording.completions(method)
    ours = [row.tokens for row in played(name, method, rows)]
    prompts = [recording.prompts[row] for row in rows]
    target = loaded(name, "float32")[0]
    return Texts.of(method, target, "float32", prompts, ours, [theirs[row].tokens for row in rows])


@dataclasses.dataclass
class Rounds:
    """Rounds of one method next to the recorded ones."""

    compared: int = 0  #: Rounds that draft and accept as many tokens as vLLM's.
    accepted: int = 0  #: Draft tokens that they accept.
    ties: int = 0  #: Rounds with another count that a tie among the head's logits explains.
    unexplained: list[str] = dataclasses.field(default_factory=list)

    def compare(self, name: str, method: str, row: int, ours: Played) -> None:
        """Add a prompt, up to the first round with another count."""
        theirs = Recording.of(name).completions(method)[row]
        counts = [
            (len(draft), accepted)
            for draft, accepted in zip(ours.drafts, ours.accepted, strict=True)
        ]
        their_counts = list(zip(theirs.drafted or [], theirs.accepted or [], strict=True))

        pairs = zip(counts, their_counts, strict=False)
        different = next((at for at, pair in enumerate(pairs) if len(set(pair)) > 1), None)
        if different is None and len(counts) != len(their_counts):
            different = min(len(counts), len(their_counts))

        equal = counts[:different]
        self.compared += len(equal)
        self.accepted += sum(accepted for _, accepted in equal)
        if different is None:
            return

        pair = (counts[different : different + 1], their_counts[different : different + 1])
        tied = False
        if all(pair) and method != "n-grams" and pair[0][0][0] == pair[1][0][0]:
            # Of the first draft token that only one of both accepted, the two made another choice.
            step = min(side[0][1] for side in pair)
            tied = (
                draft_gap(name, method, Recording.of(name).prompts[row], different, step)
                <= FLOAT32_TOLERANCE
            )

        self.ties += tied
        if not tied:
            drafted_and_accepted = f"(drafted, accepted) is {pair[0]} here and {pair[1]} in vLLM"
            self.unexplained.append(
                f"{method}, prompt {row}, round {different}: {drafted_and_accepted}"
            )


def draft_gap(name: str, method: str, prompt: Tokens, number: int, step: int) -> float:
    """Distance of the head's two highest logits at a step of a round."""
    decoder = decoder_of(method, *loaded(name, "float32"))
    state = decoder.prefill([prompt], max_new_tokens=NEW_TOKENS)
    for _ in range(number):
        state = decoder.step(state).state
    _, logits = drafted(
        decoder.loop.drafter, decoder.drafter.params, state.drafter, state.keys, state.sampling
    )  # type: ignore[arg-type]
    second, highest = np.sort(np.asarray(logits[step]))[-2:]
    return float(highest - second)
