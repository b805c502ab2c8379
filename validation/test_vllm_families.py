"""L5 and L8 for every family of targets that vLLM's CPU build runs, with trained heads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from eagle3_jax import LoadedDrafter
from eagle3_jax.drafters import NGram
from validation.engines.vllm.process import Process
from validation.families import FAMILIES, Trial, trial
from validation.runs import Check

Trials = Callable[[str], Trial]


@pytest.fixture(scope="module")
def tried(vllm_process: Process, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    """Both engines with a family, once for all checks of it."""
    return functools.cache(
        lambda name: trial(vllm_process, FAMILIES[name], tmp_path_factory.mktemp(name))
    )


# Experts, latent attention, a recurrence; a family takes minutes of two cores, the others with
# --every-family.
FEW = ("qwen3_moe", "deepseek_v3", "qwen3_5")
# In bfloat16 one of its rounds drafts a token that nearly ties with another (docs/validation.md).
OTHER_COUNTS = ("qwen3_next",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Families that a check is made for."""
    if "name" in metafunc.fixturenames:
        counts = metafunc.function is test_a_draft_for_the_family_is_accepted_as_in_vllm
        every = metafunc.config.getoption("--every-family")
        names = [
            name
            for name in FAMILIES
            if (every or name in FEW) and not (counts and name in OTHER_COUNTS)
        ]
        metafunc.parametrize("name", names)


@pytest.mark.level("L5")
def test_a_target_of_the_family_agrees_with_vllm(check: Check, tried: Trials, name: str) -> None:
    tried_family = tried(name)
    plain = next(judged.outputs for judged in tried_family.judged if judged.by == "vLLM, plain")
    rows: list[list[Any]] = [
        [judged.by, judged.scored_by, *judged.agreed] for judged in tried_family.judged
    ]
    columns = ["written by", "scored by", "tokens", "ties", "disagreements", "largest gap"]
    check.table(FAMILIES[name].dtype, columns, rows)

    ties = sum(row[3] for row in rows)
    check.number(
        tokens=sum(row[2] for row in rows), ties=ties, disagreements=sum(row[4] for row in rows)
    )

    assert not any(row[4] for row in rows), (
        f"tokens that are neither the other's choice nor a tie: {rows}"
    )
    if FAMILIES[name].dtype == "float32" and not ties:
        assert all(judged.outputs == plain for judged in tried_family.judged)


@pytest.mark.level("L8")
def test_a_draft_for_the_family_is_accepted_as_in_vllm(
    check: Check, tried: Trials, name: str
) -> None:
    tried_family = tried(name)
    parity = tried_family.parity(tried_family.drafter)
    wrong = tried_family.parity(_wrong(tried_family.drafter))
    check.number(
        rounds=int(parity.stats.num_drafts),
        mean_acceptance_length=parity.stats.mean_acceptance_length,
        **{"with the injected error": wrong.stats.mean_acceptance_length},
    )
    assert parity.difference is None, parity.difference
    assert wrong.difference is not None, "not detected"


def _wrong(drafter: LoadedDrafter | NGram) -> LoadedDrafter | NGram:
    """The same drafter with an error: other layers, or the latest occurrence of an n-gram."""
    if isinstance(drafter, NGram):
        return dataclasses.replace(drafter, earliest=False)
    network: Any = drafter.drafter
    config = dataclasses.replace(network.config, aux_layers=(0, 2, 3))
    return dataclasses.replace(drafter, drafter=dataclasses.replace(network, config=config))
