"""L9 without weights: shapes that vLLM can read, simulated acceptance, and wrong rates that must be detected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_jax.bench.random_models import shape_named
from eagle3_jax.conversion.families import FAMILIES
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import usual_head
from eagle3_jax.stats import SpeculationStats
from validation.engines.vllm.synthetic import GreedyByDice
from validation.simulated import AcceptanceDistribution, write_shape

RATES = (0.7, 0.49, 0.343)


@pytest.mark.parametrize(("name", "family"), [("Llama-3.1-8B", "llama"), ("Qwen3-8B", "qwen3")])
def test_the_shape_that_vllm_reads_is_that_of_the_target(
    tmp_path: Path, name: str, family: str
) -> None:
    shape = shape_named(name)
    target, head = write_shape(shape, usual_head(shape), tmp_path, dtype="bfloat16")
    values = json.loads((target / "config.json").read_text())
    assert FAMILIES[family].read_config(Fields(values, "config.json")) == shape
    assert values["tie_word_embeddings"] is shape.tie_embeddings
    drafting = json.loads((head / "config.json").read_text())
    assert (drafting["draft_vocab_size"], drafting["hidden_size"]) == (32_000, shape.width)
    assert drafting["eagle_aux_hidden_state_layer_ids"] == list(usual_head(shape).aux_layers)
    assert not list(tmp_path.rglob("*.safetensors"))


def counted(rates: tuple[float, ...], rounds: int, seed: int) -> SpeculationStats:
    """Rounds that accept with these rates, from uniforms, one for each round."""
    dice = np.random.default_rng(seed).random(rounds)
    positions = np.array([(dice < rate).sum() for rate in rates])
    return SpeculationStats(
        num_drafts=np.array([rounds]),
        num_draft_tokens=np.array([rounds * len(rates)]),
        num_accepted_tokens=np.array([positions.sum()]),
        num_accepted_tokens_per_pos=positions[None],
    )


def test_dice_of_these_rates_pass_and_others_fail() -> None:
    """The declared deviation is detected nine times in ten, and a correct engine passes each time."""
    distribution = AcceptanceDistribution(RATES)
    rounds = 6000
    assert all(
        max(map(abs, distribution.scores(counted(RATES, rounds, seed)))) <= distribution.most
        for seed in range(200)
    )
    assert distribution.mean == pytest.approx(1.533) and distribution.deviation == pytest.approx(
        np.sqrt(3.885 - 1.533**2)
    )
    visible = distribution.sees(rounds)
    assert visible < 0.11
    off = tuple(np.array(RATES) * (1 + visible / distribution.mean))
    missed = sum(
        abs(distribution.scores(counted(off, rounds, seed))[0]) <= distribution.most
        for seed in range(200)
    )
    assert missed <= 40


def test_one_position_that_is_off_is_seen_although_the_mean_is_right() -> None:
    distribution = AcceptanceDistribution(RATES)
    scores = distribution.scores(counted((0.75, 0.49, 0.293), 6000, 0))
    assert abs(scores[0]) < distribution.most < abs(scores[1])


@pytest.mark.torch
def test_vllms_dice_on_a_cpu_are_those_of_its_kernel() -> None:
    """Three requests by hand: two of three accepted, all of two, and a padding draft that ends the second."""
    import torch

    output = torch.full((3, 4), -1, dtype=torch.int32)
    drafts = torch.tensor([10, 11, 12, 20, 21, 30, -1, 32])
    choices = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    uniforms = torch.tensor([0.1, 0.2, 0.9, 0.1, 0.1, 0.1, 0.0, 0.0], dtype=torch.float64)
    row_ends = torch.tensor([3, 5, 8])
    bonus = torch.tensor([[91], [92], [93]])
    GreedyByDice(None)(
        output, row_ends, drafts, choices, bonus, None, 3, uniforms, torch.tensor([0.5, 0.5, 0.5])
    )
    assert output.tolist() == [[10, 11, 3, -1], [20, 21, 92, -1], [30, 7, -1, -1]]
    with pytest.raises(ValueError, match="temperature 0"):
        GreedyByDice(None)(
            output, row_ends, drafts, choices, bonus, row_ends, 3, uniforms, torch.tensor([0.5])
        )
    called: list[tuple] = []
    arguments: list[Any] = [*range(8), None]
    GreedyByDice(lambda *passed: called.append(passed))(*arguments)
    assert called == [tuple(arguments)], "without rates the shipped kernel runs"
