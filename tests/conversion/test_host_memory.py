"""Loading and converting hold few tensors in memory, whatever the size of the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import same_params, write_llama
from safetensors.numpy import load_file

from eagle3_jax import conversion
from eagle3_jax.conversion import native, targets
from eagle3_jax.conversion.blocks import separate
from eagle3_jax.conversion.quantised.arrays import Shaped
from eagle3_jax.conversion.rules import Rule, read_params, write_params
from eagle3_jax.conversion.tensors import read_tensors
from eagle3_jax.models.config import Experts

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "host_memory.py"
# Of the checkpoint that the script writes, in bytes: 400 MB.
GIGABYTES = 0.4


@pytest.mark.slow
def test_memory_of_loading_and_converting(tmp_path: Path) -> None:
    """A second copy of the parameters would be 1 more; one of the largest array, 0.33."""
    record = tmp_path / "record.json"
    options = ["--gigabytes", str(GIGABYTES), "--repeats", "1", "--output", str(record)]
    subprocess.run([sys.executable, SCRIPT, str(tmp_path / "work"), *options], check=True)
    rows = json.loads(record.read_text())["tasks"]
    peaks = {row["task"]: row["peak_over_file"] for row in rows if row["checkpoint"] == "dense"}
    assert peaks["safetensors"] > 0.95
    assert 0.95 < peaks["load"] < 1.15
    # One array at a time. At this size the threads of Orbax hold as much as the model.
    assert peaks["rewrite"] < 0.5


def test_a_large_target_is_written_to_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    source = write_llama(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    total = sum(tensor.nbytes for tensor in tensors.values())
    monkeypatch.setattr(targets, "SHARD_BYTES", total // 3)
    conversion.convert(source, tmp_path / "sharded")

    files = sorted(path.name for path in (tmp_path / "sharded").glob("*.safetensors"))
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, 5)]
    sizes = [(tmp_path / "sharded" / name).stat().st_size for name in files]
    assert max(sizes) < total // 3 + 4096

    written = read_tensors(tmp_path / "sharded")
    assert written.keys() == tensors.keys()
    assert all(np.array_equal(written[name], tensor) for name, tensor in tensors.items())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "sharded")
    embedding = model.get_input_embeddings().weight.detach().numpy()
    np.testing.assert_array_equal(embedding, tensors["model.embed_tokens.weight"])


def test_a_native_checkpoint_is_written_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_llama(tmp_path / "source")
    monkeypatch.setattr(native, "GROUP_BYTES", 2000)
    conversion.convert(source, tmp_path / "native", "jax")
    groups = list((tmp_path / "native").glob("params*"))
    assert len(groups) > 3
    first = conversion.read_target(source)
    second = conversion.read_target(tmp_path / "native")
    assert same_params(first.params, second.params)

    (tmp_path / "native" / "params.2").rename(tmp_path / "away")
    with pytest.raises(conversion.CheckpointError, match=r"has no params\.2/ next to"):
        conversion.read_target(tmp_path / "native")


class CountedLeaf(Shaped):
    """A parameter that counts its reads."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self.num_reads = 0

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        self.num_reads += 1
        return self.array


def test_a_parameter_is_read_once_for_all_tensors_that_are_parts_of_it() -> None:
    """The tensors of an expert are parts of two stacks, by turns."""
    shapes = {"gate_up": jax.ShapeDtypeStruct((4, 6, 10), np.float32)}
    shapes["down"] = jax.ShapeDtypeStruct((4, 5, 6), np.float32)
    random = np.random.default_rng(0)
    leaves = {
        name: CountedLeaf(random.normal(size=leaf.shape).astype(np.float32))
        for name, leaf in shapes.items()
    }

    table = mixture_rules(4)
    tensors = write_params(table, leaves, shapes, where="here")
    arrays = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    assert [leaf.num_reads for leaf in leaves.values()] == [1, 1]
    again = read_params(table, arrays, shapes, where="here")
    assert all(np.array_equal(again[name], leaf.array) for name, leaf in leaves.items())


def mixture_rules(num_experts: int) -> list[Rule]:
    """Returns the rules of experts of width 5 that are stored one by one."""
    config = Experts(num_experts=num_experts, per_token=1, width=5, router="softmax")
    return [rule._replace(path=rule.path.removeprefix(".")) for rule in separate(config, "x", "")]


def test_names_are_matched_in_linear_time() -> None:
    """Counts calls of functions for 3,000 and for 6,000 tensors."""
    counts = []
    for num_experts in (1000, 2000):
        table = mixture_rules(num_experts)
        shapes = {"gate_up": jax.ShapeDtypeStruct((num_experts, 6, 10), np.float32)}
        shapes["down"] = jax.ShapeDtypeStruct((num_experts, 5, 6), np.float32)
        stored = {"gate": (5, 6), "up": (5, 6), "down": (6, 5)}
        tensors = {
            f"x.{expert}.{name}_proj.weight": np.broadcast_to(np.float32(0), shape)
            for expert in range(num_experts)
            for name, shape in stored.items()
        }
        count = 0

        def called(*event: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(called)
        read_params(table, tensors, shapes, where="here")
        sys.setprofile(None)
        counts.append(count)
    assert counts[0] < counts[1] < 2.1 * counts[0]
