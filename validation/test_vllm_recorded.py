"""L5 and L8 compared with a recording of vLLM, also where vLLM cannot be installed.

The recording is of float32. Our float32 texts, rounds and log-probabilities must equal it but for
ties. In bfloat16 the rule is L5's: every token is the reference's choice or approximately tied with
it, and plain decoding allows as many exceptions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from validation.agreement import ENGINES, Judged, too_many
from validation.engines.vllm.bridge import Completion, Tokens
from validation.engines.vllm.process import Process
from validation.forcing import log_probabilities, reference
from validation.margin import FLOAT32_TOLERANCE, WRONG_ULPS, Agreement
from validation.recorded import (
    METHODS,
    PAIRS,
    Recording,
    decoder_of,
    directory_for_vllm,
    options_of,
    run,
)
from validation.recorded_parity import Rounds, Texts, in_float32, loaded, played, rows_of, written
from validation.runs import RECORDED, RUN, Check
from validation.subject import Setting

RUN_AGAIN = 8  # prompts for which vLLM is run
QUICK = ("plain", "chain of 5")
recorded_pairs = pytest.mark.parametrize(
    "name", PAIRS, ids=[f"{RECORDED}: {name}" for name in PAIRS]
)


COLUMNS = [
    "method", "prompts", "tokens", "texts that part", "ties of ours", "ties of vLLM's",
    "disagreements", "largest gap",
]  # fmt: skip


def keep(check: Check, texts: Sequence[Texts]) -> None:
    """Keep what was compared."""
    rows = [text.row() for text in texts]
    check.numbers["compared with"] = RECORDED
    check.table(f"{RECORDED}: texts in {texts[0].ours.dtype}", COLUMNS, rows)
    totals = [sum(row[column] for row in rows) for column in (2, 3, 6)]
    check.number(
        prompts=rows[0][1], tokens=totals[0], texts_that_part=totals[1], disagreements=totals[2]
    )


@pytest.fixture(scope="module", autouse=True)
def _free() -> Iterator[None]:
    """Frees the models and forgets the texts."""
    yield
    for function in (loaded, played, in_float32):
        function.cache_clear()


@pytest.mark.level("L5")
@recorded_pairs
def test_texts_are_equal_but_for_ties(check: Check, setting: Setting, name: str) -> None:
    """Where a text parts, our target must find both tokens tied."""
    rows = rows_of(name, setting)
    texts = [in_float32(name, method, rows) for method in (QUICK if setting.quick else METHODS)]
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
def test_texts_in_bfloat16_differ_no_more_than_rounding_explains(
    check: Check, setting: Setting, name: str
) -> None:
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
        texts.append(
            Texts.of(
                method, target, "bfloat16", prompts, ours, [theirs[row].tokens for row in rows]
            )
        )
    keep(check, texts)

    # Plain decoding in bfloat16 departs from its own choice too; that is what is allowed.
    control = Judged("ours, plain", "us", "bfloat16", plain, reference(target, prompts, plain))
    unexplained = []
    for judged in [control, *(side for text in texts for side in (text.ours, text.theirs))]:
        if judged.wrong:
            unexplained.append(
                f"{judged.by}: {judged.wrong} tokens are too far below our choice for any rounding"
            )
        for verdict in (Agreement.TIE, Agreement.DISAGREE):
            unexplained += too_many(judged, verdict, control.control(verdict))

    noise = control.control(Agreement.TIE)
    most = max(
        side.control(Agreement.TIE).flips for text in texts for side in (text.ours, text.theirs)
    )
    tokens = len(control.gaps)
    check.number(
        off_choice_of_plain_decoding=noise.flips,
        off_choice_allowed=noise.allowed(tokens, times=ENGINES),
        most_off_choice=most,
    )
    check.sees = (
        f"in bfloat16 a token more than {WRONG_ULPS:g} units below the choice, "
        f"{noise.sees(tokens, times=ENGINES):.1%} of tokens that are not the choice"
    )

    assert not unexplained, "; ".join(unexplained)


@pytest.mark.level("L5")
@recorded_pairs
def test_log_probabilities_are_equal(check: Check, name: str) -> None:
    """Of every token of ten texts, prompts included, and of the likeliest token at its place."""
    target = loaded(name, "float32")[0]
    texts = Recording.of(name).texts
    ours = log_probabilities(target, [text.tokens for text in texts])
    differences = [
        np.abs(np.array([text.log_probs, text.highest]) - pair).max()
        for text, pair in zip(texts, ours, strict=True)
    ]

    check.numbers["compared with"] = RECORDED
    check.number(
        texts=len(texts),
        tokens=sum(len(text.log_probs) for text in texts),
        likeliest=sum(np.sum(np.equal(text.log_probs, text.highest)) for text in texts),
        nats_apart=max(differences),
        tolerance=FLOAT32_TOLERANCE,
    )
    assert len(texts) > 0 and max(differences) < FLOAT32_TOLERANCE


@pytest.mark.level("L8")
@recorded_pairs
def test_every_round_drafts_and_accepts_what_was_recorded(
    check: Check, setting: Setting, name: str
) -> None:
    """In float32. After a tie, rounds of that text are not compared."""
    rows = rows_of(name, setting)
    table = []
    unexplained = []
    for method in (
        ("chain of 5",) if setting.quick else [method for method in METHODS if METHODS[method]]
    ):
        text = in_float32(name, method, rows)
        rounds = Rounds()
        for row, ours, parted_at in zip(rows, played(name, method, rows), text.places, strict=True):
            if parted_at is None:
                rounds.compare(name, method, row, ours)

        unexplained += rounds.unexplained
        # Rounds of a text that parts are left out, which only a tie may do.
        if disagreements := text.ours.agreed.disagreements + text.theirs.agreed.disagreements:
            unexplained.append(
                f"{method}: {disagreements} tokens are neither our choice nor tied with it"
            )
        if not rounds.accepted:
            unexplained.append(
                f"{method}: nothing was accepted, so that equal counts prove nothing"
            )

        mean_length = 1 + rounds.accepted / max(rounds.compared, 1)
        table.append(
            [method, len(rows), rounds.compared, mean_length, text.num_parted, rounds.ties]
        )

    check.numbers["compared with"] = RECORDED
    columns = [
        "method",
        "prompts",
        "rounds",
        "tokens a round",
        "texts that part",
        "rounds with tied drafts",
    ]
    check.table(f"{RECORDED}: rounds in float32", columns, table)
    totals = [sum(line[column] for line in table) for column in (2, 4, 5)]
    check.number(
        prompts=len(rows), rounds=totals[0], texts_that_part=totals[1], tied_drafts=totals[2]
    )

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
    rows = range(0, len(recording.prompts), -(-len(recording.prompts) // RUN_AGAIN))
    prompts = [recording.prompts[row] for row in rows]
    table = []
    different = []

    with directory_for_vllm(PAIRS[name]) as target:
        for method in METHODS:
            options = dataclasses.replace(options_of(method, target, PAIRS[name].head), eager=True)
            again = [Completion(**row) for row in run(vllm_process, options, prompts)]
            before = [recording.completions(method)[row] for row in rows]
            num_equal = sum(map(Completion.__eq__, again, before))
            rounds = sum(len(row.accepted or []) for row in again)
            table.append(
                [method, len(prompts), sum(len(row.tokens) for row in again), rounds, num_equal]
            )
            different += [method] * (num_equal < len(prompts))

    check.table(
        f"{RUN}, next to {RECORDED}",
        ["method", "prompts", "tokens", "rounds", "equal in tokens and rounds"],
        table,
    )
    check.number(prompts=len(prompts), tokens=sum(line[2] for line in table))
    assert not different, f"vLLM writes something else than was recorded: {', '.join(different)}"
