"""The comparison with recorded vLLM finds what differs, and tells a tie from an error."""

from __future__ import annotations

import dataclasses

import pytest

from validation import recorded_parity as checks
from validation.parity import Played
from validation.recorded import Recording

PAIR = "shipped pair"
METHOD = "chain of 3"
ROUND = 5


def recorded() -> Played:
    """What we would have played if it were what vLLM played: the first prompt."""
    row = Recording.of(PAIR).completions(METHOD)[0]
    return Played(
        row.tokens, list(row.accepted or []), [[0] * count for count in row.drafted or []]
    )


def test_a_round_with_another_count_is_an_error_unless_its_drafts_tie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = recorded()
    rounds = checks.Rounds()
    rounds.compare(PAIR, METHOD, 0, ours)
    assert (rounds.compared, rounds.unexplained) == (len(ours.accepted), [])
    ours.accepted[ROUND] = 3 - ours.accepted[ROUND]
    rounds = checks.Rounds()
    rounds.compare(PAIR, METHOD, 0, ours)
    assert rounds.compared == ROUND and len(rounds.unexplained) == 1 and not rounds.ties
    monkeypatch.setattr(checks, "FLOAT32_TOLERANCE", float("inf"))
    rounds = checks.Rounds()
    rounds.compare(PAIR, METHOD, 0, ours)
    assert rounds.compared == ROUND and not rounds.unexplained and rounds.ties == 1


@pytest.mark.parametrize("part", ["drafted", "one round less"])
def test_other_drafts_are_never_a_tie(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "FLOAT32_TOLERANCE", float("inf"))
    ours = recorded()
    if part == "drafted":
        ours.drafts[ROUND].pop()
    else:
        ours = dataclasses.replace(ours, accepted=ours.accepted[:-1], drafts=ours.drafts[:-1])
    rounds = checks.Rounds()
    rounds.compare(PAIR, METHOD, 0, ours)
    assert len(rounds.unexplained) == 1 and not rounds.ties


def test_a_token_that_vllm_did_not_write_is_found_in_float32() -> None:
    recording = Recording.of(PAIR)
    theirs = recording.completions(METHOD)[0].tokens
    ours = [*theirs[:7], theirs[7] + 1, *theirs[8:]]
    target = checks.loaded(PAIR, "float32")[0]
    texts = checks.Texts.of(METHOD, target, "float32", recording.prompts[:1], [ours], [theirs])
    assert texts.places == [7] and texts.ours.agreed.disagreements == 1
    assert texts.theirs.agreed == (8, 0, 0, 0.0)
    texts = checks.Texts.of(METHOD, target, "float32", recording.prompts[:1], [theirs], [ours])
    assert texts.theirs.agreed.disagreements == 1
