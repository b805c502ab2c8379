"""examples/nano_eagle3.py, a decoder in one file, gives the tokens and counts of the library."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import nano_eagle3 as nano
import numpy as np
import pytest
import tiny

import eagle3_jax as e3

PAIR = tiny.GOLDEN / "vllm"
SHAPES: dict[str, tuple[nano.Shape, dict[str, Any]]] = {
    "plain": (nano.Shape(0), {}),
    "chain": (nano.Shape(3), {"num_speculative_tokens": 3, "draft_sampling": "probabilistic"}),
    "tree": (nano.Shape(4, 12, 3), {"tree": e3.DynamicTree(num_nodes=12, max_depth=4, top_k=3)}),
}


def check_equal(directory: Path, shape: str, temperature: float, prompts: list[list[int]]) -> None:
    target = e3.load_target(directory / "target", dtype="float32")
    drafter = e3.load_drafter(directory / "eagle3", target=target)
    small, drafted = SHAPES[shape]
    with tiny.unchecked():
        decoder = e3.SpeculativeDecoder(target, drafter if drafted else None, **drafted)

    w, config = nano.load(directory / "target")
    head, of_head = nano.load(directory / "eagle3")
    config = config._replace(head_theta=of_head.theta)

    for seed, prompt in enumerate(prompts):
        with tiny.unchecked():
            request = {
                "max_new_tokens": 48,
                "sampling": e3.SamplingParams(temperature=temperature),
                "seed": seed,
            }
            row = decoder.generate(prompt, **request).rows[0]

        options = {
            "config": config,
            "shape": small,
            "max_new_tokens": 48,
            "temperature": temperature,
        }
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            state = nano.generate(w, head, jnp.array(prompt), seed, **options)

        assert np.asarray(state.text)[len(prompt) : int(state.length)].tolist() == row.tokens
        if drafted:
            assert int(state.rounds) == int(row.stats.num_drafts)
            assert int(state.accepted) == int(row.stats.num_accepted_tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_and_counts_are_those_of_the_library(shape: str, temperature: float) -> None:
    check_equal(PAIR, shape, temperature, [[1, 17, 230, 45, 9, 9, 301], [400, 3, 88]])


def test_the_head_has_a_rotary_base_of_its_own(tmp_path: Path) -> None:
    shutil.copytree(PAIR, tmp_path / "pair")
    path = tmp_path / "pair" / "eagle3" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 50.0}))
    check_equal(tmp_path / "pair", "chain", 0.0, [[1, 17, 230, 45, 9, 9, 301]])


def test_so_they_are_for_the_pair_that_it_runs() -> None:
    check_equal(nano.SHIPPED, "tree", 0.0, [[100, 200, 300]])
