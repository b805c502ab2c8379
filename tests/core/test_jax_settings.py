"""What a program sets for all of JAX, and what every generation must bear: 64-bit types, and no rank promotion.

Under ``jax_enable_x64`` counts, sums and indices are int64 where nothing else is said; the loop carries int32. What
the command line writes without these settings is the truth.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator

import families
import jax
import numpy as np
import pytest
import test_target_contract
import tiny
from test_drafter_contract import SAMPLED_TREE, TARGET, drafter_of

from eagle3_jax import (
    BlockVerification,
    Exact,
    LoadedDrafter,
    SamplingParams,
    SimulatedAcceptance,
    SpeculationSchedule,
    SpeculativeDecoder,
    TypicalAcceptance,
    check_drafter,
    check_target,
    check_verifier,
)
from eagle3_jax import loop as loops
from eagle3_jax.drafters import NGram
from eagle3_jax.types import SamplingMode

PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6]]
# A greedy row, a sampled one, and one that is cut: together they need the whole program.
MIXED = SamplingParams(temperature=np.array([0.0, 1.0, 0.8]), top_k=np.array([0, 0, 9]), top_p=np.array([1, 1, 0.9]))
SAMPLED = "EAGLE-3 sampled chain"
# Options of a decoder, and its drafter.
OPTIONS = {
    "a schedule": ("EAGLE-3 chain", {"schedule": SpeculationSchedule(((1, 1, 3), (2, 2, 1)))}),
    "block verification": (SAMPLED, {"verifier": BlockVerification()}),
    "typical acceptance": ("EAGLE-3 static tree", {"verifier": TypicalAcceptance()}),
    "simulated acceptance": (SAMPLED, {"verifier": SimulatedAcceptance((0.9, 0.5, 0.1))}),
    "rounds between checks": ("n-grams", {"rounds_per_check": 2}),
}
# The contract and the fingerprints trace every drafter; here each kind of draft is traced once.
DRAFTERS = (SAMPLED, "EAGLE-3 dynamic tree", "EAGLE-1 drawn tree", "suffixes", "DSpark sampled chain", "layer skip")


@contextlib.contextmanager
def strict() -> Iterator[None]:
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        yield


def decoder(name: str) -> SpeculativeDecoder:
    if name == "a sampled tree":
        return SpeculativeDecoder(TARGET, SAMPLED_TREE)
    drafter, options = OPTIONS.get(name, (name, {}))
    return SpeculativeDecoder(TARGET, drafter_of(drafter), **options)


def check_traced(loop: loops.SpeculativeLoop, params: loops.LoopParams, sampling: SamplingParams | None = None) -> None:
    with strict():
        batch = tiny.prompts(PROMPTS, limit=8, sampling=sampling)
        outcome = jax.eval_shape(lambda *given: jax.tree.leaves(loop.generate(*given, 64)), params, batch)
    assert {leaf.dtype for leaf in outcome} == {np.dtype(np.int32)}


@pytest.mark.parametrize("name", [*DRAFTERS, "a sampled tree", *OPTIONS])
def test_a_sampled_batch_is_traced_under_64_bits_for(name: str) -> None:
    one = decoder(name)
    check_traced(dataclasses.replace(one.loop, sampling_mode=SamplingMode.TRUNCATED), one.params, MIXED)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_a_generation_is_traced_under_64_bits_for:
        names = [name for name in test_target_contract.ALL_TARGETS if "recurrence" not in name]
        families.parametrize(metafunc, names, {"gpt_oss", *test_target_contract.FEW})


def test_a_generation_is_traced_under_64_bits_for(name: str) -> None:
    check_traced(*tiny.bind(test_target_contract.ALL_TARGETS[name](), LoadedDrafter(NGram(3))))


def test_the_contract_is_checked_under_64_bits() -> None:
    with strict():
        for report in (
            check_drafter(NGram(3), TARGET),
            check_target(TARGET),
            check_verifier(Exact(), samples=1024),
        ):
            assert report.ok, str(report)


def test_the_command_line_writes_the_same_under_64_bits(cli) -> None:
    def rows() -> list[int]:
        code, out, err = cli("generate", "def add(a, b):", "--max-new-tokens", 12, "--json")
        assert code == 0, err
        return json.loads(out)["token_ids"]

    with strict():
        found = rows()
    assert found == rows()
