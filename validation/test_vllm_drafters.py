"""L8 for every other drafting method that vLLM's CPU build runs: equal counts.

There are no counts of what it does not run: trees, typical acceptance, DSpark, suffix decoding,
DeepSeek's MTP, block verification. Their distributions are enumerated and their networks compared
with others' in ``tests``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from eagle3_jax import SpeculativeDecoder, load_target
from validation import drafters
from validation.drafters import (
    METHODS,
    NEW_TOKENS,
    PROMPTS,
    TARGET,
    Drafter,
    mean_acceptance_length,
)
from validation.engines.vllm.process import Process
from validation.parity import Parity, parity_with
from validation.runs import Check

pytestmark = pytest.mark.level("L8")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_accepts_what_vllm_accepts(
    check: Check, vllm_process: Process, tmp_path: Path, name: str
) -> None:
    method = METHODS[name]
    target = load_target(TARGET)
    theirs, shipped = drafters.run(vllm_process, method, tmp_path)

    def compared(drafter: Drafter) -> Parity:
        count = method.num_speculative_tokens
        decoder = SpeculativeDecoder(target, drafter, num_speculative_tokens=count, stop_tokens=())  # type: ignore[arg-type]
        return parity_with(
            theirs, decoder, PROMPTS, max_new_tokens=NEW_TOKENS, batch_size=len(PROMPTS)
        )

    live = compared(method.drafter(target, tmp_path))
    wrong = compared(method.drafter(target, tmp_path, wrong=True))
    recorded = dataclasses.replace(live, theirs=drafters.recorded(name))

    check.number(
        tokens=sum(len(row.tokens) for row in live.ours),
        rounds=int(live.stats.num_drafts),
        mean_acceptance_length=mean_acceptance_length(theirs),
        **{f"with {method.error}": wrong.stats.mean_acceptance_length},
        **({} if shipped is None else {"vLLM as shipped": mean_acceptance_length(shipped)}),
    )

    assert live.difference is None, live.difference
    assert recorded.difference is None, f"vLLM's recorded run is another: {recorded.difference}"
    assert mean_acceptance_length(theirs) > method.least, (
        "accepted by chance, so equal counts prove little"
    )
    assert [row.tokens for row in wrong.ours] == [row.tokens for row in live.ours]
    assert [row.accepted for row in wrong.ours] != [row.accepted for row in live.ours], (
        f"{method.error}: not detected"
    )
