"""L9: vLLM and this library at the shape of a large model, with acceptance by dice.

The cost of a round does not depend on what it accepts, so no checkpoint is needed. Both engines
must accept as many tokens as the dice say before their speeds are compared. A rehearsal has a small
shape, whose speed says nothing of large ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from eagle3_jax.bench.contenders import Contender
from eagle3_jax.bench.random_models import bytes_needed, random_pair, shape_named, why_not
from eagle3_jax.load import precision_named
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform
from eagle3_jax.verifiers.simulated import SimulatedAcceptance
from validation.engines.vllm.bridge import EngineOptions
from validation.engines.vllm.contender import VLLMContender
from validation.engines.vllm.process import Process
from validation.fixtures import setting_of
from validation.runs import Check
from validation.simulated import AcceptanceDistribution, synthetic, write_shape
from validation.speeds import chain, measure_and_keep
from validation.subject import CONTEXT, Setting

pytestmark = pytest.mark.level("L9")

ACCEPTED = 0.7  # of each draft token, given those before it
# over which acceptance is counted
ROWS = 64
NEW_TOKENS = 256
# Heads of 32, which vLLM's kernels for CPUs take.
SMALL = DecoderConfig(
    vocab_size=512,
    width=128,
    layers=uniform(8, GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=32), GatedMLP(width=256)),
    max_positions=512,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    setting = setting_of(metafunc.config)
    metafunc.parametrize("shape", ["Llama-3.1-8B" if setting.on_gpu else "small"])
    metafunc.parametrize("length", (0, 3, 5) if setting.on_gpu and not setting.quick else (3,))


def test_simulated_speed_next_to_vllm(
    check: Check, setting: Setting, vllm_process: Process, tmp_path: Path, shape: str, length: int
) -> None:
    """Both accept as the dice say; then they take turns."""
    on_gpu = shape != "small"
    config = shape_named(shape) if on_gpu else SMALL
    dtype, batches = ("bfloat16", (1, 16)) if on_gpu else ("float32", (1, 4))
    if on_gpu:
        needed = bytes_needed(config, batch=ROWS, capacity=2 * (CONTEXT + NEW_TOKENS))
        if reason := why_not(needed, jax.devices()[0].memory_stats()):
            pytest.skip(reason)

    pair = random_pair(config, precision=precision_named(dtype))
    dice = SimulatedAcceptance.of_conditional_rate(ACCEPTED, max(length, 1))
    target, head = write_shape(pair[0].model.config, pair[1].drafter.config, tmp_path, dtype=dtype)  # type: ignore[attr-defined]

    options = EngineOptions(
        model=str(target),
        dtype=dtype,
        speculative=synthetic(head, dice.rates) if length else None,
        max_model_len=CONTEXT + NEW_TOKENS + 32,
        max_num_seqs=ROWS,
        load_format="dummy",
        eager=not on_gpu,
    )

    ours = chain(pair, dtype, length, dice)
    name = f"vLLM K={length}, dummy weights" if length else "vLLM plain, dummy weights"
    theirs = VLLMContender(name, dtype, vllm_process.engine(options))

    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, CONTEXT)).tolist()
    if length:
        _check_acceptance(check, AcceptanceDistribution(dice.rates), [ours, theirs], prompts)

    for batch in batches:
        contenders: list[Contender] = [chain(pair, dtype, 0), *([ours] if length else []), theirs]
        measure_and_keep(
            check,
            contenders,
            prompts[:batch],
            batch=batch,
            baseline=theirs.name,
            price=setting.price_per_hour,
            title=(
                f"{shape}, random weights, each draft token accepted with probability {ACCEPTED},"
                " over vLLM: "
            ),
            max_new_tokens=128 if on_gpu else 32,
            repeats=5 if on_gpu else 2,
            large=2**32 if on_gpu else 2**24,
        )


def _check_acceptance(
    check: Check,
    distribution: AcceptanceDistribution,
    contenders: list[Any],
    prompts: list[list[int]],
) -> None:
    """Compares each engine's mean and every position with the rates."""
    rows = []
    for contender in contenders:
        counted = contender.run(prompts, NEW_TOKENS).stats
        rounds = int(np.sum(counted.num_drafts))
        rows.append(
            [contender.name, rounds, counted.mean_acceptance_length, *distribution.scores(counted)]
        )

    columns = [f"z of position {position}" for position in range(len(distribution.rates))]
    check.table(
        f"Acceptance by dice, {ACCEPTED} of each token",
        ["engine", "rounds", "τ", "z of τ", *columns],
        rows,
    )

    rounds = min(row[1] for row in rows)
    check.number(
        rounds=rounds,
        expected_length=1 + distribution.mean,
        largest_length_apart=max(abs(row[2] - 1 - distribution.mean) for row in rows),
        largest_z=max(abs(score) for row in rows for score in row[3:]),
        allowed_z=distribution.most,
    )
    check.sees = (
        f"{distribution.sees(rounds):.3f} tokens of the mean acceptance length of either engine"
    )

    assert all(abs(score) <= distribution.most for row in rows for score in row[3:]), (
        "an engine does not accept at the given rates"
    )
