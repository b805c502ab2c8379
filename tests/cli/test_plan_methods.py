"""`eagle3 plan` for every method: its weights, what a round reads, what a token costs in caches."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_llama
from heads_on_disk import (
    ASSISTANT,
    CHECKPOINTS,
    DFLASH,
    DFLASH2,
    DRAFT_MODEL,
    DSPARK,
    EAGLE1,
    EAGLE3,
    EAGLE31,
    GEMMA4,
    JETSPEC,
    MEDUSA,
    MTP_HEAD,
    P_EAGLE,
)
from safetensors.numpy import load_file

from eagle3_jax.cli import run

# Bytes of a token's keys and values in a layer: 2 heads of 8 numbers, in bfloat16.
LAYER = 2 * 2 * 8 * 2
OUTPUT = 61 * 32
# Layers with a cache, and parameters of the target that a pass reads in addition to the drafter's.
BLOCKS = (DFLASH, ASSISTANT, JETSPEC, DSPARK, DFLASH2)
LAYERS = {MEDUSA: 0, GEMMA4: 0} | dict.fromkeys((*BLOCKS, DRAFT_MODEL), 2)
BORROWED = dict.fromkeys((EAGLE1, MTP_HEAD, *BLOCKS), OUTPUT)
ONE_PASS = (P_EAGLE, MEDUSA, *BLOCKS)
OWN_TABLES = (DRAFT_MODEL, GEMMA4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "target")


def plan(capsys: Any, page: str, target: Path, drafter: object, *options: str) -> dict[str, Any]:
    arguments = [
        "plan", page, "--target", str(target), "--drafter", str(drafter), "-K", "3",
        "--gpu", "H100"
    ]  # fmt: skip
    assert run([*arguments, *options, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def stored(directory: Path, *, without: tuple[str, ...]) -> int:
    """Counts the numbers in a file."""
    tensors = load_file(directory / "model.safetensors")
    return sum(
        math.prod(tensor.shape) for name, tensor in tensors.items() if not name.endswith(without)
    )


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_sizes_are_those_of_the_file(tmp_path: Path, target: Path, capsys: Any, name: str) -> None:
    drafter = CHECKPOINTS[name](tmp_path / "drafter")
    tables = () if name in OWN_TABLES else ("embed_tokens.weight", "d2t", "t2d")
    numbers = stored(drafter, without=tables)

    memory = plan(capsys, "memory", target, drafter)
    # EAGLE-3 and EAGLE-3.1 are of one size.
    assert memory["drafter_method"] == name.split(" (")[0].replace("EAGLE-3.1", "EAGLE-3")
    assert memory["drafter_parameters"] == numbers
    assert memory["bytes"]["head_weights"] == 2 * numbers
    assert memory["drafter_cache_bytes_per_token"] == LAYER * LAYERS.get(name, 1)

    looked_up = ("d2t", "t2d", "markov_w1.weight", "codebook")
    if name != GEMMA4:
        # It never looks up its own table, which is its output matrix.
        looked_up = (*looked_up, "embed_tokens.weight")
    read = stored(drafter, without=looked_up) + BORROWED.get(name, 0)
    context = 16
    k = 3
    passes = [k + 1] if name in ONE_PASS else [k + 1, *[1] * (k - 1)]
    before = [context, *[context + k + 1] * (len(passes) - 1)]
    slots = sum(old + new for old, new in zip(before, passes, strict=True))
    cached = slots * LAYER * LAYERS.get(name, 1)
    if name == ASSISTANT:
        # Its first layer sees three of the tokens before the block.
        cached -= (context - 3) * LAYER
    fused_once = 2 * 32 * 96 * (len(passes) - 1) if name in (EAGLE3, EAGLE31) else 0

    options = ("--batch-size", "1", "--context", "16")
    (line,) = plan(capsys, "roofline", target, drafter, *options)["accelerators"]
    assert line["bounds"][0]["draft_bytes"] == len(passes) * 2 * read - fused_once + cached


def test_what_has_no_files_adds_no_weights(target: Path, capsys: Any) -> None:
    skipped = plan(capsys, "memory", target, "layer-skip=3")
    assert skipped["drafter_parameters"] == skipped["bytes"]["head_weights"] == 0
    assert skipped["drafter_cache_bytes_per_token"] == 3 * LAYER
    (line,) = plan(capsys, "roofline", target, "layer-skip=3", "--batch-size", "1")["accelerators"]
    layers = 3 * (2 * 32 * (32 + 16) + 3 * 32 * 24 + 2 * 32)
    assert line["bounds"][0]["draft_bytes"] > 3 * 2 * (layers + OUTPUT)

    for name in ("ngram", "suffix"):
        (line,) = plan(capsys, "roofline", target, name, "--batch-size", "1")["accelerators"]
        assert (line["drafter_parameters"], line["bounds"][0]["draft_bytes"]) == (0, 0)
        assert line["bounds"][0]["draft_cost"] == 0


def test_a_configuration_alone_will_do(tmp_path: Path, target: Path, capsys: Any) -> None:
    """As of a hub id, of which nothing else is downloaded."""
    for name in (EAGLE1, MEDUSA, DRAFT_MODEL, P_EAGLE):
        directory = CHECKPOINTS[name](tmp_path / name.split()[0].replace("/", ""))
        from_files = plan(capsys, "memory", target, directory)
        (directory / "model.safetensors").unlink()
        assert plan(capsys, "memory", target, directory) == from_files
