"""What a program sets for all of JAX, and what every generation must bear: 64-bit types, and no rank promotion.

Under ``jax_enable_x64`` counts, sums and indices are int64 where nothing else is said; the loop carries int32. Truth is
plain decoding without these settings: a greedy row of any drafter has its tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator

import every_family
import jax
import numpy as np
import pytest
import test_target_contract
import tiny
from test_drafter_contract import ALL_DRAFTERS, SAMPLED_TREE, TARGET

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
from eagle3_jax.drafters import NGram
from eagle3_jax.types import SamplingMode

PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6]]
# A greedy row, a sampled one, and one that is cut: together they need the whole program.
MIXED = SamplingParams(temperature=np.array([0.0, 1.0, 0.8]), top_k=np.array([0, 0, 9]), top_p=np.array([1, 1, 0.9]))
SAMPLED = "EAGLE-3 sampled chain"
DECODERS = {
    **{name: {"drafter": drafter} for name, drafter in ALL_DRAFTERS.items()},
    "a sampled tree": {"drafter": SAMPLED_TREE},
    "a schedule": {
        "drafter": ALL_DRAFTERS["EAGLE-3 chain"],
        "schedule": SpeculationSchedule(((1, 1, 3), (2, 2, 1))),
    },
    "block verification": {"drafter": ALL_DRAFTERS[SAMPLED], "verifier": BlockVerification()},
    "typical acceptance": {"drafter": ALL_DRAFTERS["EAGLE-3 static tree"], "verifier": TypicalAcceptance()},
    "simulated acceptance": {"drafter": ALL_DRAFTERS[SAMPLED], "verifier": SimulatedAcceptance((0.9, 0.5, 0.1))},
    "rounds between checks": {"drafter": ALL_DRAFTERS["n-grams"], "rounds_per_check": 2},
}
GREEDY = ("n-grams", "EAGLE-3 dynamic tree", "a schedule")


@contextlib.contextmanager
def strict() -> Iterator[None]:
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        yield


def tokens(name: str, sampling: SamplingParams | None = None) -> list[list[int]]:
    return SpeculativeDecoder(TARGET, **DECODERS[name]).generate(PROMPTS, max_new_tokens=8, sampling=sampling).tokens


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return tokens("plain")


@pytest.mark.parametrize("name", DECODERS)
def test_a_sampled_batch_is_traced_under_64_bits_for(name: str) -> None:
    decoder = SpeculativeDecoder(TARGET, **DECODERS[name])
    loop = dataclasses.replace(decoder.loop, sampling_mode=SamplingMode.TRUNCATED)
    with strict():
        batch = tiny.prompts(PROMPTS, limit=8, sampling=MIXED)
        outcome = jax.eval_shape(lambda *given: jax.tree.leaves(loop.generate(*given, 64)), decoder.params, batch)
    assert {leaf.dtype for leaf in outcome} == {np.dtype(np.int32)}


@pytest.mark.parametrize("name", GREEDY)
def test_a_greedy_batch_is_the_same_under_64_bits_by(name: str, plain: list[list[int]]) -> None:
    with strict():
        found = tokens(name)
    assert found == plain


@pytest.mark.parametrize("name", ["plain"])
def test_a_seed_writes_the_same_tokens_under_64_bits(name: str) -> None:
    with strict():
        found = tokens(name, MIXED)
    assert found == tokens(name, MIXED)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_a_generation_is_traced_under_64_bits_for:
        names = [name for name in test_target_contract.ALL_TARGETS if "recurrence" not in name]
        every_family.parametrize(metafunc, names, {"gpt_oss", *test_target_contract.FEW})


def test_a_generation_is_traced_under_64_bits_for(name: str) -> None:
    loop, params = tiny.bind(test_target_contract.ALL_TARGETS[name](), LoadedDrafter(NGram(3)))
    with strict():
        batch = tiny.prompts(PROMPTS, limit=8)
        outcome = jax.eval_shape(lambda *given: jax.tree.leaves(loop.generate(*given, 64)), params, batch)
    assert {leaf.dtype for leaf in outcome} == {np.dtype(np.int32)}


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
