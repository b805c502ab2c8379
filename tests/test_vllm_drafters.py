"""Every drafting method beside recorded runs of vLLM: tokens, and what each round of each request accepted.

The heads are trained, so that what is accepted depends on every position, norm and layer; ``validation/drafters`` made
heads and runs, and ``pytest validation`` compares both with a vLLM that is running.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_jax import SpeculativeDecoder
from eagle3_jax.decode import LoadedTarget
from eagle3_jax.load import load_target
from validation.drafters.heads import NEW_TOKENS, PROMPTS, TARGET
from validation.drafters.methods import METHODS, Drafter, mean_acceptance_length, recorded
from validation.parity import Parity, play, stats_of


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target(TARGET)


def decoded(target: LoadedTarget, drafter: Drafter, name: str) -> Parity:
    """Ours beside the recording."""
    count = METHODS[name].num_speculative_tokens
    decoder = SpeculativeDecoder(target, drafter, num_speculative_tokens=count, stop_tokens=())  # type: ignore[arg-type]
    ours = play(decoder, PROMPTS, max_new_tokens=NEW_TOKENS, batch_size=len(PROMPTS))
    return Parity(ours, recorded(name), stats_of(ours, count))


# Without those that differ from another only in the length of a draft or in the layout of the file.
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("mtp_1", "p_eagle_speculators")])
def test_every_round_of_a_recorded_run_accepts_as_much(target: LoadedTarget, tmp_path: Path, name: str) -> None:
    method = METHODS[name]
    found = decoded(target, method.drafter(target, tmp_path), name)
    assert found.difference is None, found.difference
    assert mean_acceptance_length(found.theirs) > method.least
