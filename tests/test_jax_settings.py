"""Generations under 64-bit types, a setting that a program makes for all of JAX.

Under ``jax_enable_x64`` the default of counts, sums and indices is int64; the loop carries int32.
The output has to equal that of the command line without this setting.
"""

from __future__ import annotations

import dataclasses
import json

import families
import jax
import numpy as np
import pytest
import tiny
from drafter_table import SAMPLED_TREE, TARGET, drafter_of
from target_table import ALL_TARGETS, FEW

from eagle3_jax import (
    BlockVerification,
    LoadedDrafter,
    SamplingParams,
    SimulatedAcceptance,
    SpeculationSchedule,
    SpeculativeDecoder,
    TypicalAcceptance,
)
from eagle3_jax import loop as loops
from eagle3_jax.drafters import NGram
from eagle3_jax.types import SamplingMode

PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6]]
# A greedy row, a sampled one and one that truncates: together they need the whole program.
MIXED = SamplingParams(
    temperature=np.array([0.0, 1.0, 0.8]), top_k=np.array([0, 0, 9]), top_p=np.array([1, 1, 0.9])
)
SAMPLED = "EAGLE-3 sampled chain"
# Options of a decoder, and its drafter.
OPTIONS = {
    "a schedule": ("EAGLE-3 chain", {"schedule": SpeculationSchedule(((1, 1, 3), (2, 2, 1)))}),
    "block verification": (SAMPLED, {"verifier": BlockVerification()}),
    "typical acceptance": ("EAGLE-3 static tree", {"verifier": TypicalAcceptance()}),
    "simulated acceptance": (SAMPLED, {"verifier": SimulatedAcceptance((0.9, 0.5, 0.1))}),
}
# The contract and the fingerprints trace every drafter; here each shape of draft is traced once.
DRAFTERS = (SAMPLED, "EAGLE-3 dynamic tree", "EAGLE-1 drawn tree", "suffixes")


def decoder(name: str) -> SpeculativeDecoder:
    if name == "a sampled tree":
        return SpeculativeDecoder(TARGET, SAMPLED_TREE)
    drafter, options = OPTIONS.get(name, (name, {}))
    return SpeculativeDecoder(TARGET, drafter_of(drafter), **options)


def check_traced(
    loop: loops.SpeculativeLoop, params: loops.LoopParams, sampling: SamplingParams | None = None
) -> None:
    with jax.enable_x64(True):
        batch = tiny.prompts(PROMPTS, limit=8, sampling=sampling)
        generate = lambda params, batch: jax.tree.leaves(loop.generate(params, batch, 64))
        outcome = jax.eval_shape(generate, params, batch)
    assert {leaf.dtype for leaf in outcome} == {np.dtype(np.int32)}


@pytest.mark.parametrize("name", [*DRAFTERS, "a sampled tree", *OPTIONS])
def test_a_sampled_batch_is_traced_under_64_bits_for(name: str) -> None:
    traced = decoder(name)
    check_traced(
        dataclasses.replace(traced.loop, sampling_mode=SamplingMode.TRUNCATED), traced.params, MIXED
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_a_generation_is_traced_under_64_bits_for:
        names = [name for name in ALL_TARGETS if "recurrence" not in name]
        families.parametrize(metafunc, names, {"gpt_oss", *FEW})


def test_a_generation_is_traced_under_64_bits_for(name: str) -> None:
    check_traced(*tiny.bind(ALL_TARGETS[name](), LoadedDrafter(NGram(3))))


def test_the_command_line_writes_the_same_under_64_bits(cli) -> None:
    def generated() -> list[int]:
        code, out, err = cli("generate", "def add(a, b):", "--max-new-tokens", 12, "--json")
        assert code == 0, err
        return json.loads(out)["token_ids"]

    with jax.enable_x64(True):
        in_64_bits = generated()
    assert in_64_bits == generated()
