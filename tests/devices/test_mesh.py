"""A mesh of devices gives the same tokens with few collectives, and refuses in one line."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import pytest
import recurrent
import tiny
from checkpoints import TARGET, write_llama
from eight_devices import environment, run_on_eight_devices
from jax.sharding import AbstractMesh, PartitionSpec

import eagle3_jax as e3
from eagle3_jax.devices.sharding import MESH_AXES, make_mesh, param_shardings, row_shardings
from eagle3_jax.models.config import GatedMLP, GroupedQuery, uniform


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_on_eight_devices("on_a_mesh.py")


def test_eight_devices_write_what_one_writes(results: dict[str, Any]) -> None:
    assert results["same"] == dict.fromkeys(results["same"], True)
    assert len(results["same"]) == 17


def test_a_step_adds_twice_a_layer_and_moves_nothing_large(results: dict[str, Any]) -> None:
    """The target has two layers; the head's runs for two levels and once for accepted tokens."""
    steps = results["steps"]
    layers = 2 * (2 + 2 + 1)

    for name, step in steps.items():
        assert not step["moves"].keys() & {"collective-permute", "all-to-all", "reduce-scatter"}, (
            name
        )
        assert step["largest"] < step["keys"], name

    # The largest logit and the lowest id that has it: of three drafted tokens, of the verification.
    assert steps["chain"]["moves"] == {"all-reduce": layers + 2 * 4}

    # In addition: the sums of two levels of draft probabilities. A greedy verification looks for
    # its largest logits.
    assert steps["tree"]["moves"]["all-reduce"] == layers + 2 + 2
    assert steps["tree, sampled"]["moves"]["all-reduce"] == layers + 2

    # Every lookup in a divided table is one more: of two levels, of accepted tokens, of the target.
    assert steps["chain, tied"]["moves"]["all-reduce"] == layers + 2 * 4 + 4

    # Rows do not need each other.
    for name in ("n-gram, data=8", "chain, data=8"):
        assert steps[name]["moves"] == {}, name


def test_a_prefill_in_parts_moves_what_a_prefill_moves(results: dict[str, Any]) -> None:
    """Groups of four rows, one of each device of the data axis in turn: rows stay in place."""
    at_once, parts = results["prefills"]
    assert at_once == parts
    assert parts.keys() == {"all-reduce"}


def test_two_processes_print_what_one_prints(tmp_path: Path, cli: Any) -> None:
    """Two devices in each of two processes divide the two key heads of the bundled pair."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("def f(x):\n", "class Stack:\n"))
    )

    command = [
        "generate", "--prompts", prompts, "--json", "--batch-size", "2", "--max-new-tokens", "8",
    ]  # fmt: skip
    code, single_process, _ = cli(
        *command, "--trace", tmp_path / "alone.json", "--compilation-cache", "none"
    )
    assert code == 0

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    processes = []
    for index in range(2):
        options = [
            "--mesh", "model=2,data=2", "--trace", tmp_path / f"{index}.json",
            "--compilation-cache", "none",
        ]  # fmt: skip
        options += ["--distributed", f"coordinator=127.0.0.1:{port},processes=2,process={index}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        arguments = [sys.executable, "-m", "eagle3_jax", *map(str, [*command, *options])]
        processes.append(subprocess.Popen(arguments, env=environment(2), **pipes))

    (first, errors), (second, _) = (process.communicate(timeout=300) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], errors[-2000:]
    assert second == ""

    ids = lambda out: [json.loads(line)["token_ids"] for line in out.splitlines()]
    assert ids(first) == ids(single_process)
    assert (tmp_path / "0.json").read_text() == (tmp_path / "alone.json").read_text()
    assert not (tmp_path / "1.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--mesh", "model=2"],
            "--mesh model=2: a mesh of model=2,data=1 needs 2 devices and there is 1 (CPU)",
        ),
        (["--distributed", "auto"], "--distributed was given without --mesh"),
        (
            ["--distributed", "auto", "--mesh", "model=1"],
            "expected 'auto', or 'coordinator=HOST:PORT,processes=2",
        ),
        (
            ["--distributed", "coordinator=a:1,processes=2,process=2", "--mesh", "model=1"],
            "expected 0 to 1",
        ),
    ],
)
def test_the_command_line_says_in_one_line_what_is_wrong(
    options: list[str], message: str, refused: Any
) -> None:
    assert message in refused("generate", "x", *options)


def test_a_target_that_names_no_axes_is_held_whole_and_its_rows_are_divided() -> None:
    mesh = AbstractMesh((2, 4), MESH_AXES)
    target = recurrent.target()
    shardings = jax.tree.leaves(param_shardings(mesh, target.model, target.params))
    assert all(sharding.spec == PartitionSpec() for sharding in shardings)
    cache = target.model.init_cache(8, 16)
    # It is a tree of shardings where arrays are announced.
    with tiny.unchecked():
        of_rows = jax.tree.leaves(row_shardings(mesh, cache))
    assert {sharding.spec[0] for sharding in of_rows} == {"data"}


def test_what_is_shared_stays_one_array() -> None:
    target = tiny.target()
    decoder = e3.SpeculativeDecoder(
        target, tiny.eagle3(target), mesh=make_mesh(devices=jax.devices()[:1])
    )
    assert decoder.params.target["embedding"] is decoder.params.drafter["embedding"]


def test_the_host_holds_one_array_at_a_time(tmp_path: Path) -> None:
    """Tracemalloc counts numpy's arrays, and those of JAX only if they share numpy's memory."""
    layers = uniform(
        12, GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=64), GatedMLP(width=512)
    )

    config = dataclasses.replace(TARGET, width=256, layers=layers)
    mesh = make_mesh(devices=jax.devices()[:1])
    directory = write_llama(tmp_path / "target", config)
    e3.load_target(directory)

    for on in (None, mesh):
        tracemalloc.start()
        target = e3.load_target(directory, mesh=on)
        after, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        sizes = [leaf.nbytes for leaf in jax.tree.leaves(target.params)]
        assert peak - after < 3 * max(sizes) < sum(sizes) / 5
