"""Every drafting method against recorded runs of vLLM: tokens, and what each round accepted.

The heads are trained, so that what is accepted depends on every position, norm and layer.
``validation/drafters.py`` recorded the runs, and ``pytest validation`` compares them with a vLLM
that is running.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from eagle3_jax import SpeculativeDecoder
from eagle3_jax.decode import LoadedTarget
from eagle3_jax.load import load_target
from validation.drafters import (
    METHODS,
    NEW_TOKENS,
    PROMPTS,
    TARGET,
    mean_acceptance_length,
    recorded,
)
from validation.parity import Parity, play, stats_of

pytestmark = pytest.mark.core

# Without those that differ from another only in the length of a draft or in the layout of the file.
NAMES = [name for name in METHODS if name not in ("mtp_1", "p_eagle_speculators")]


@functools.cache
def target() -> LoadedTarget:
    return load_target(TARGET)


@pytest.mark.parametrize("name", NAMES)
def test_every_round_of_a_recorded_run_accepts_as_much(name: str, tmp_path: Path) -> None:
    """Compares one method with its recording; ``tmp_path`` is for files that have to be made."""
    method = METHODS[name]
    count = method.num_speculative_tokens
    drafter = method.drafter(target(), tmp_path)
    decoder = SpeculativeDecoder(target(), drafter, num_speculative_tokens=count, stop_tokens=())  # type: ignore[arg-type]
    ours = play(decoder, PROMPTS, max_new_tokens=NEW_TOKENS, batch_size=len(PROMPTS))
    parity = Parity(ours, recorded(name), stats_of(ours, count))
    assert parity.difference is None, parity.difference
    assert mean_acceptance_length(parity.theirs) > method.least
