"""L5 and L8 compared with a recording of vLLM, also where vLLM cannot be installed.

The recording is of float32. Our float32 texts, rounds and log-probabilities must equal it but for ties. In bfloat16
the rule is L5's: every token is the reference's choice or approximately tied with it, and plain decoding allows as many
exceptions. A text is compared up to the place where it parts from vLLM's, because what follows continues another text.
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
from validation.agreement import ENGINES, Judged, too_many
from validation.engines.vllm.bridge import Completion, Tokens
from validation.engines.vllm.process import Process
from validation.forcing import log_probabilities, reference
from validation.internals import drafted
from validation.margin import FLOAT32_TOLERANCE, Agreement
from validation.parity import Played, parting, play
from validation.recorded import METHODS, NEW_TOKENS, PAIRS, Recording, decoder_of, directory_for_vllm, options_of, run
from validation.runs import RECORDED, RUN, Check
from validation.subject import Setting

BATCH = 20
RUN_AGAIN = 8  # prompts for which vLLM is run
# Nats, as for features and draft logits in L8: log-probabilities are sums of float32 in another order.
LOG_PROB_TOLERANCE = 1e-4
QUICK = ("plain", "chain of 5")
recorded_pairs = pytest.mark.parametrize("name", PAIRS, ids=[f"{RECORDED}: {name}" for name in PAIRS])


@functools.cache
def loaded(name: str, dtype: str) -> tuple[LoadedTarget, LoadedDrafter]:
    """The pair of a recording, whose files must be those that vLLM read."""
    pair = PAIRS[name]
    try:
        locate(pair.target, "target")
    except ValueError as error:
        pytest.skip(f"{name}: {error}")
    recorded = Recording.of(name).data["checkpoints"]
    assert pair.checkpoints() == recorded, f"{name} is not the checkpoint of the recording; record it again"
    return pair.load(dtype)


def rows_of(name: str, setting: Setting) -> list[int]:
    """Numbers of the compared prompts, whose tasks are mixed in every batch."""
    count = len(Recording.of(name).prompts)
    stride = -(-count // BATCH)
    starts = range(1 if setting.quick else stride)
    return [row for start in starts for row in range(start, count, stride)]


@functools.cache
def played(name: str, method: str, rows: tuple[int, ...]) -> list[Played]:
    """Our float32 texts and rounds of the prompts with these numbers; L5 and L8 share them."""
    prompts = Recording.of(name).prompts
    decoder = decoder_of(method, *loaded(name, "float32"))
    return play(decoder, [prompts[row] for row in rows], max_new_tokens=NEW_TOKENS, batch_size=BATCH)


@dataclasses.dataclass(frozen=True)
class Texts:
    """Our texts of one method next to vLLM's, each up to the place where they part, judged by our target."""

    method: str
    places: list[int | None]  #: Where each text parts; ``None`` where it does not.
    ours: Judged
    theirs: Judged

    @classmethod
    def of(
        cls, method: str, target: LoadedTarget, dtype: str, prompts: Sequence[Tokens], ours: Sequence[Tokens],
        theirs: Sequence[Tokens],
    ) -> Texts:  # fmt: skip
        """Judge both texts along vLLM's."""
        places = [parting(row, their_row) for row, their_row in zip(ours, theirs, strict=True)]
        ends = [NEW_TOKENS if place is None else place + 1 for place in places]
        ours = [row[:end] for row, end in zip(ours, ends, strict=True)]
        theirs = [row[:end] for row, end in zip(theirs, ends, strict=True)]
        judged = [
            Judged(f"{by}, {method}", "us", dtype, tokens, reference(target, prompts, theirs, tokens))
            for by, tokens in (("ours", ours), (RECORDED, theirs))
        ]
        return cls(method, places, *judged)

    @property
    def num_parted(self) -> int:
        """Texts that are another than vLLM's."""
        return sum(place is not None for place in self.places)

    def row(self) -> list[Any]:
        """A row of the table."""
        agreed = (self.ours.agreed, self.theirs.agreed)
        disagreements = sum(side.disagreements for side in agreed)
        largest = max(side.largest_gap for side in agreed)
        ties = [side.ties for side in agreed]
        return [self.method, len(self.places), agreed[0].tokens, self.num_parted, *ties, disagreements, largest]


COLUMNS = [
    "method", "prompts", "tokens", "texts that part", "ties of ours", "ties of vLLM's", "disagreements", "largest gap",
]  # fmt: skip


def keep(check: Check, texts: Sequence[Texts]) -> None:
    """Keep what was compared."""
    rows = [text.row() for text in texts]
    check.numbers["compared with"] = RECORDED
    check.table(f"{RECORDED}: texts in {texts[0].ours.dtype}", COLUMNS, rows)
    totals = [sum(row[column] for row in rows) for column in (2, 3, 6)]
    check.number(prompts=rows[0][1], tokens=totals[0], texts_that_part=totals[1], disagreements=totals[2])


def in_float32(name: str, rows: Sequence[int], method: str) -> Texts:
    recording = Recording.of(name)
    theirs = recording.completions(method)
    ours = [row.tokens for row in played(name, method, tuple(rows))]
    prompts = [recording.prompts[row] for row in rows]
    target = loaded(name, "float32")[0]
    return Texts.of(method, target, "float32", prompts, ours, [theirs[row].tokens for row in rows])


@pytest.mark.level("L5")
@recorded_pairs
def test_texts_are_equal_but_for_ties(check: Check, setting: Setting, name: str) -> None:
    """Where a text parts, our target must find both tokens tied."""
    rows = rows_of(name, setting)
    texts = [in_float32(name, rows, method) for method in (QUICK if setting.quick else METHODS)]
    keep(check, texts)
    unexplained = [
        f"{judged.by}: {judged.agreed.disagreements} tokens are neither our choice nor tied with it"
        for text in texts
        for judged in (text.ours, text.theirs)
        if judged.agreed.disagreements
    ]
    assert not unexplained, "; ".join(unexplained)


@pytest.mark.level("L5")
@recorded_pairs
def test_texts_in_bfloat16_differ_no_more_than_rounding_explains(check: Check, setting: Setting, name: str) -> None:
    recording = Recording.of(name)
    target, head = loaded(name, "bfloat16")
    rows = rows_of(name, setting)
    prompts = [recording.prompts[row] for row in rows]
    texts = []
    plain: list[Tokens] = []
    for method in METHODS if setting.on_gpu and not setting.quick else QUICK:
        ours = written(decoder_of(method, target, head), prompts)
        plain = plain or ours
        theirs = recording.completions(method)
        texts.append(Texts.of(method, target, "bfloat16", prompts, ours, [theirs[row].tokens for row in rows]))
    keep(check, texts)
    control = Judged("ours, plain", "us", "bfloat16", plain, reference(target, prompts, plain))
    unexplained = []
    for judged in [control, *(side for text in texts for side in (text.ours, text.theirs))]:
        if judged.wrong:
            unexplained.append(f"{judged.by}: {judged.wrong} tokens are too far below our choice for any rounding")
        for verdict in (Agreement.TIE, Agreement.DISAGREE):
            unexplained += too_many(judged, verdict, control.control(verdict))
    noise = {verdict: control.control(verdict) for verdict in (Agreement.TIE, Agreement.DISAGREE)}
    check.number(
        off_choice_of_plain_decoding=noise[Agreement.TIE].flips,
        off_choice_allowed=noise[Agreement.TIE].allowed(len(control.gaps), times=ENGINES),
        most_off_choice=max(side.control(Agreement.TIE).flips for text in texts for side in (text.ours, text.theirs)),
    )
    assert not unexplained, "; ".join(unexplained)


def written(decoder: SpeculativeDecoder, prompts: Sequence[Tokens]) -> list[Tokens]:
    """Our texts, in batches."""
    starts = range(0, len(prompts), BATCH)
    batches = [decoder.generate(prompts[start : start + BATCH], max_new_tokens=NEW_TOKENS).tokens for start in starts]
    return [tokens for batch in batches for tokens in batch]


@pytest.mark.level("L5")
@recorded_pairs
def test_log_probabilities_are_equal(check: Check, name: str) -> None:
    """Of every token of ten texts, prompts included, and of the likeliest token at its place."""
    target = loaded(name, "float32")[0]
    texts = Recording.of(name).texts
    ours = log_probabilities(target, [text.tokens for text in texts])
    differences = [
        np.abs(np.array([text.log_probs, text.highest]) - pair).max() for text, pair in zip(texts, ours, strict=True)
    ]
    check.numbers["compared with"] = RECORDED
    check.number(
        texts=len(texts),
        tokens=sum(len(text.log_probs) for text in texts),
        likeliest=sum(np.sum(np.equal(text.log_probs, text.highest)) for text in texts),
        nats_apart=max(differences),
        tolerance=LOG_PROB_TOLERANCE,
    )
    assert len(texts) > 0 and max(differences) < LOG_PROB_TOLERANCE


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
        counts = [(len(draft), accepted) for draft, accepted in zip(ours.drafts, ours.accepted, strict=True)]
        their_counts = list(zip(theirs.drafted or [], theirs.accepted or [], strict=True))
        different = next((at for at, pair in enumerate(zip(counts, their_counts)) if len(set(pair)) > 1), None)  # noqa: B905
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
            tied = draft_gap(name, method, Recording.of(name).prompts[row], different, step) <= FLOAT32_TOLERANCE
        self.ties += tied
        if not tied:
            drafted_and_accepted = f"(drafted, accepted) is {pair[0]} here and {pair[1]} in vLLM"
            self.unexplained.append(f"{method}, prompt {row}, round {different}: {drafted_and_accepted}")


def draft_gap(name: str, method: str, prompt: Tokens, number: int, step: int) -> float:
    """Distance of the head's two highest logits at a step of a round."""
    decoder = decoder_of(method, *loaded(name, "float32"))
    state = decoder.prefill([prompt], max_new_tokens=NEW_TOKENS)
    for _ in range(number):
        state = decoder.step(state).state
    _, logits = drafted(decoder.loop.drafter, decoder.drafter.params, state.drafter, state.keys, state.sampling)  # type: ignore[arg-type]
    second, highest = np.sort(np.asarray(logits[step]))[-2:]
    return float(highest - second)


@pytest.mark.level("L8")
@recorded_pairs
def test_every_round_drafts_and_accepts_what_was_recorded(check: Check, setting: Setting, name: str) -> None:
    """In float32. After a tie of draft tokens or of the target's, rounds of that text are not compared."""
    rows = rows_of(name, setting)
    table = []
    unexplained = []
    for method in ("chain of 5",) if setting.quick else [method for method in METHODS if METHODS[method]]:
        text = in_float32(name, rows, method)
        rounds = Rounds()
        for row, ours, place in zip(rows, played(name, method, tuple(rows)), text.places, strict=True):
            if place is None:
                rounds.compare(name, method, row, ours)
        unexplained += rounds.unexplained
        # Rounds of a text that parts are left out, which only a tie may do.
        if disagreements := text.ours.agreed.disagreements + text.theirs.agreed.disagreements:
            unexplained.append(f"{method}: {disagreements} tokens are neither our choice nor tied with it")
        if not rounds.accepted:
            unexplained.append(f"{method}: nothing was accepted, so that equal counts prove nothing")
        mean_length = 1 + rounds.accepted / max(rounds.compared, 1)
        table.append([method, len(rows), rounds.compared, mean_length, text.num_parted, rounds.ties])
    check.numbers["compared with"] = RECORDED
    columns = ["method", "prompts", "rounds", "tokens a round", "texts that part", "rounds with tied drafts"]
    check.table(f"{RECORDED}: rounds in float32", columns, table)
    totals = [sum(line[column] for line in table) for column in (2, 4, 5)]
    check.number(prompts=len(rows), rounds=totals[0], texts_that_part=totals[1], tied_drafts=totals[2])
    assert not unexplained, "; ".join(unexplained)


@pytest.mark.not_quick  # the recording holds what vLLM writes, and vLLM is compared elsewhere
@pytest.mark.level("L8")
@pytest.mark.parametrize("name", PAIRS, ids=[f"{RUN}: {name}" for name in PAIRS])
def test_the_recording_is_what_vllm_writes(check: Check, vllm_process: Process, name: str) -> None:
    """Tokens and rounds of a few prompts are those of the recording, for each method."""
    if vllm_process.versions["device"] != "cpu":
        pytest.skip(f"{RUN}: the recording is of a CPU, and on a GPU float32 rounds differently")
    loaded(name, "float32")
    recording = Recording.of(name)
    rows = range(0, len(recording.prompts), len(recording.prompts) // RUN_AGAIN)
    prompts = [recording.prompts[row] for row in rows]
    table = []
    different = []
    with directory_for_vllm(PAIRS[name]) as target:
        for method in METHODS:
            options = dataclasses.replace(options_of(method, target, PAIRS[name].head), eager=True)
            again = [Completion(**row) for row in run(vllm_process, options, prompts)]
            kept = [recording.completions(method)[row] for row in rows]
            num_equal = sum(map(Completion.__eq__, again, kept))
            table.append([method, len(prompts), sum(len(row.tokens) for row in again), num_equal])
            different += [method] * (num_equal < len(prompts))
    check.table(f"{RUN}, next to {RECORDED}", ["method", "prompts", "tokens", "equal in tokens and rounds"], table)
    check.number(prompts=len(prompts), tokens=sum(line[2] for line in table))
    assert not different, f"vLLM writes something else than was recorded: {', '.join(different)}"
