"""Draft lengths by batch size: vLLM's format, exact output through every change, one program."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from eagle3_jax import LoadedDrafter, SamplingParams, SpeculationSchedule, SpeculativeDecoder
from eagle3_jax import loop as loops
from eagle3_jax.drafters import NGram
from eagle3_jax.measure.timing import CompileClock
from eagle3_jax.topology import default_draft_length

GOLDEN = tiny.GOLDEN / "official"

SCHEDULE = SpeculationSchedule(((1, 2, 4), (3, 4, 2)))  # of five rows and more none
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11], [1, 3, 5], [2, 2, 2, 2], [9, 8]]
LIMITS = [5, 9, 13, 20, 28, 37, 40]


@pytest.fixture(scope="module")
def target():
    return tiny.target()


@pytest.fixture(scope="module", params=["eagle3", "ngram"])
def drafter(request, target):
    return NGram() if request.param == "ngram" else tiny.eagle3(target)


@pytest.mark.parametrize(
    ("batch", "length"),
    [(1, 5), (4, 5), (5, 3), (8, 3), (9, 3), (12, 1), (16, 1), (17, 0), (99, 0)],
)
def test_a_gap_carries_the_length_before_it_and_nothing_is_drafted_above_the_last_entry(
    batch, length
):
    schedule = SpeculationSchedule.from_lists([[1, 4, 5], [5, 8, 3], [12, 16, 1]])
    assert schedule.length_at(batch) == length


def test_steps_are_where_the_length_changes():
    schedule = SpeculationSchedule.from_lists([[1, 4, 5], [5, 8, 3], [9, 12, 3], [13, 16, 0]])
    assert schedule.steps(20) == [(20, 0), (12, 3), (4, 5)]
    assert schedule.steps(6) == [(6, 3), (4, 5)]
    # Found from the entries: counting down from a billion rows would take minutes.
    assert schedule.steps(10**9) == [(10**9, 0), (12, 3), (4, 5)]
    assert schedule.to_lists() == [[1, 4, 5], [5, 8, 3], [9, 12, 3], [13, 16, 0]]


def test_what_is_written_does_not_depend_on_the_schedule(target, drafter):
    """Greedy rows next to sampled ones have the text of plain decoding."""
    plain = SpeculativeDecoder(target)
    scheduled = SpeculativeDecoder(target, drafter, schedule=SCHEDULE)
    heat = np.where(np.arange(len(PROMPTS)) % 2, 0.8, 0.0)
    sampling = SamplingParams(temperature=heat.astype(np.float32))
    ours = scheduled.generate(PROMPTS, max_new_tokens=LIMITS, sampling=sampling)
    theirs = plain.generate(PROMPTS, max_new_tokens=LIMITS, sampling=sampling)
    for row, (scheduled_row, plain_row) in enumerate(zip(ours.rows, theirs.rows, strict=True)):
        assert len(scheduled_row.tokens) == LIMITS[row]
        assert scheduled_row.finish_reason == plain_row.finish_reason
        if heat[row] == 0:
            assert scheduled_row.tokens == plain_row.tokens


def played_by_steps(decoder: SpeculativeDecoder) -> Iterator[loops.Round]:
    state = decoder.prefill(PROMPTS, max_new_tokens=LIMITS)
    while np.any(state.running):
        latest = decoder.step(state)
        state = latest.state
        yield latest


def test_the_length_of_every_round_is_what_the_schedule_says(target):
    """The batch runs twice, so a length that was left comes back."""
    decoder = SpeculativeDecoder(target, tiny.eagle3(target), schedule=SCHEDULE)
    running = []
    lengths = []
    for rounds in (decoder.rounds(PROMPTS, max_new_tokens=LIMITS), played_by_steps(decoder)):
        rows = len(PROMPTS)
        for played in rounds:
            running.append(rows)
            lengths.append(np.asarray(played.draft.valid)[:, 1:].sum(1).max())
            rows = int(np.sum(played.state.running))
    assert lengths == [0 if rows > 4 else 2 if rows > 2 else 4 for rows in running]
    assert {2, 3, 4, 5} <= set(running), "both sides of every change"


def test_the_head_takes_in_every_token_while_it_is_silent(target):
    """After plain rounds the head has the state, and so the draft, of one that never was silent."""
    always = SpeculativeDecoder(target, tiny.eagle3(target), num_speculative_tokens=4)
    late = SpeculativeDecoder(
        target, tiny.eagle3(target), schedule=SpeculationSchedule(((1, 1, 4), (2, 9, 0)))
    )

    prompts = [[1, 2, 3], [7, 8]]
    limits = [30, 6]
    drafts = {}
    for name, decoder in (("always", always), ("late", late)):
        for played in decoder.rounds(prompts, max_new_tokens=limits):
            root = int(played.positions[0, 0])
            if bool(played.draft.valid[0, -1]):
                drafts.setdefault(root, {})[name] = np.asarray(played.draft.tokens[0]).tolist()

    pairs = [pair for pair in drafts.values() if len(pair) == 2]
    assert len(pairs) >= 5
    assert all(pair["always"] == pair["late"] for pair in pairs)


def test_a_stage_is_compiled_once_when_rows_come_and_go(target):
    jax.clear_caches()
    decoder = SpeculativeDecoder(target, tiny.eagle3(target), schedule=SCHEDULE)
    assert len(list(decoder.rounds(PROMPTS, max_new_tokens=LIMITS))) > 9
    assert loops.step._cache_size() == 3
    with CompileClock() as clock:
        list(decoder.rounds(PROMPTS, max_new_tokens=LIMITS))
    assert clock.programs == 0
    assert loops.step._cache_size() == 3


def test_a_traced_state_has_no_stage(target):
    decoder = SpeculativeDecoder(target, tiny.eagle3(target), schedule=SCHEDULE)
    state = decoder.prefill(PROMPTS, max_new_tokens=LIMITS)
    with pytest.raises(
        ValueError, match=r"not known while a program is traced; call `decoder.step\(state\)`"
    ):
        loops.step(decoder.loop, decoder.params, state)


def test_the_default_length_is_three_or_fewer_on_cpus_and_five_elsewhere() -> None:
    on_cpu = [default_draft_length(batch, "cpu") for batch in (1, 2, 3, 4, 5, 32, 33)]
    assert on_cpu == [3, 3, 2, 2, 1, 1, 0]
    in_int8 = [default_draft_length(batch, "cpu", "int8") for batch in (1, 2, 3, 4, 5)]
    assert in_int8 == [3, 3, 1, 1, 0]

    assert [
        default_draft_length(batch, platform) for batch in (1, 33) for platform in ("gpu", "tpu")
    ] == [5] * 4
    assert default_draft_length() == default_draft_length(1, jax.default_backend())


SHAPED = {
    "EAGLE-3": (tiny.eagle3, None),
    "a draft model": (tiny.draft_model, None),
    "n-grams": (lambda target: LoadedDrafter(NGram()), None),
    "Medusa": (tiny.medusa, 4),
    "DFlash": (tiny.dflash, 4),
}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", SHAPED)
def test_unasked_a_decoder_drafts_the_default_length_of_one_row(
    target: Any, name: str, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is that of `eagle3 generate` for batches of one.

    Blocks and several heads are drafted completely.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    make, own_length = SHAPED[name]
    head = make(target)
    if hasattr(head.drafter, "topology"):
        head = dataclasses.replace(head, drafter=dataclasses.replace(head.drafter, topology=None))

    drafter = SpeculativeDecoder(target, head).loop.drafter
    assert (
        drafter.max_depth == drafter.num_nodes - 1 == (own_length or {"cpu": 3, "gpu": 5}[platform])
    )
    assert drafter.is_chain

    explicit = SpeculativeDecoder(target, head, num_speculative_tokens=2).loop.drafter
    assert explicit.max_depth == 2


@pytest.mark.parametrize(
    ("rows", "options", "length"),
    [
        (2, (), 3),
        (5, (), 1),
        (5, ("--num-speculative-tokens", 5), 5),
        (33, (), 0),
        (33, ("--draft-sampling", "greedy"), 1),
    ],
)
def test_unasked_a_chain_is_as_long_as_pays_at_its_batch_size(
    rows: int, options: tuple, length: int, cli: Any, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [1, 17, 5]}\n' * rows)
    code, out, err = cli(
        "generate", "--target", GOLDEN / "target", "--drafter", GOLDEN / "eagle3",
        "--prompts", prompts, "--json",
        "--batch-size", rows, "--max-new-tokens", 4, "--ignore-eos", *options,
    )  # fmt: skip
    assert code == 0, err
    for line in out.splitlines():
        stats = json.loads(line)["stats"]
        assert stats["num_draft_tokens"] == length * stats["num_drafts"]
