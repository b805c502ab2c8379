"""L8 and HF: the rules of vLLM and of transformers on the cases of ``eagle3 oracle``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from eagle3_jax.oracle import write_oracle
from validation.engines.vllm import process
from validation.engines.vllm.bridge import EngineOptions
from validation.fixtures import vllm_interpreter
from validation.runs import RUN, Check

DECIDE = Path(process.__file__).with_name("oracle.py")
# vLLM's options for the head of a case.
ENGINES = {
    "eagle3_greedy": {"method": "eagle3"},
    "medusa_greedy": {"method": "medusa"},
    "p_eagle_greedy": {"method": "eagle3", "parallel_drafting": True},
}
WRONG = 0.001  # of every declared distribution


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("oracle") / "out"
    write_oracle(out)
    return out


def compare(check: Check, folder: Path, verdicts: Path) -> list[str]:
    """Returns the lines of ``check.py`` about cases that differ, and counts what was compared."""
    arrays = np.load(verdicts)
    counts = [arrays[name] for name in arrays if name.endswith(".num_accepted")]
    check.number(cases=len(counts), verdicts=sum(count.size for count in counts))
    command = [sys.executable, folder / "check.py", folder, "--verdicts", verdicts]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if not line.endswith(": agrees")]


@pytest.mark.level("L8")
def test_vllms_rejection_sampler_decides_as_the_oracle(
    check: Check, pytestconfig: pytest.Config, folder: Path, tmp_path: Path
) -> None:
    python = vllm_interpreter(pytestconfig)
    check.numbers["compared with"] = RUN
    check.sees = f"a share of {WRONG:.1%} of every q that is uniform instead"
    for share in (WRONG, 0.0):
        command = [python, DECIDE, folder, tmp_path / "verdicts.npz", str(share)]
        subprocess.run(
            command, env=process.environment_of(threads=1), capture_output=True, check=True
        )
        differing = compare(check, folder, tmp_path / "verdicts.npz")
        assert bool(differing) == bool(share), differing


@pytest.mark.level("L8")
@pytest.mark.parametrize("name", ENGINES)
def test_vllms_engine_writes_and_accepts_what_the_oracle_says(
    check: Check, vllm_process: process.Process, folder: Path, name: str
) -> None:
    case = np.load(folder / "cases" / f"{name}.npz")
    head = json.loads(str(case["about"]))["head"]
    speculative = {
        **ENGINES[name],
        "model": str(folder / "models" / head),
        "num_speculative_tokens": 4,
    }
    options = EngineOptions(
        model=str(folder / "models" / "target"),
        max_model_len=128,
        speculative=speculative,
        first_runner=True,
    )

    starts = case["prompt_length"]
    prompts = [text[:start].tolist() for text, start in zip(case["text"], starts, strict=True)]
    output = vllm_process.engine(options).generate(prompts, max_new_tokens=24)
    check.number(rounds=case["num_accepted"].size, accepted=int(case["num_accepted"].sum()))

    for row, completion in enumerate(output.completions):
        written = case["text"][row, starts[row] : case["length"][-1, row]].tolist()
        assert completion.tokens[: len(written)] == written
        accepted = case["num_accepted"][:, row].tolist()
        assert completion.accepted is not None and completion.accepted[: len(accepted)] == accepted


def chains(folder: Path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The cases of chains by the token rule."""
    for path in sorted((folder / "cases").iterdir()):
        case = dict(np.load(path))
        is_chain = (case["parents"] == np.arange(case["parents"].shape[2]) - 1).all()
        if is_chain and json.loads(str(case["about"]))["rule"] == "token":
            yield path.stem, case


@pytest.mark.level("HF")
def test_transformers_speculative_sampling_decides_as_the_oracle(
    check: Check, folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    verdicts = {}
    for name, case in chains(folder):
        verdicts[f"{name}.num_accepted"] = np.zeros_like(case["num_accepted"])
        verdicts[f"{name}.next_token"] = np.zeros_like(case["next_token"])
        for row in np.ndindex(case["num_accepted"].shape):
            accepted, token = transformers_decides(
                {key: case[key][row] for key in ROW if key in case}
            )
            verdicts[f"{name}.num_accepted"][row] = accepted
            verdicts[f"{name}.next_token"][row] = token

    np.savez(tmp_path / "verdicts.npz", **verdicts)
    assert compare(check, folder, tmp_path / "verdicts.npz") == []


ROW = ("tokens", "valid", "q", "p", "accept", "choose")


def transformers_decides(row: dict[str, np.ndarray]) -> tuple[int, int]:
    """Returns the accepted count and the next token of one draft.

    Distributions are given as their logarithms.
    """
    import torch
    from transformers.generation import utils

    length = int(row["valid"][1:].sum())
    tokens = torch.from_numpy(row["tokens"][1 : length + 1].astype(np.int64))
    p = torch.from_numpy(row["p"][: length + 1])
    point_masses = torch.nn.functional.one_hot(tokens, p.shape[-1]).float()
    q = torch.from_numpy(row["q"][1 : length + 1]) if "q" in row else point_masses
    uniforms = torch.from_numpy(row["accept"][1 : length + 1])

    def sample(masses: torch.Tensor, num_samples: int) -> torch.Tensor:
        cumulative = masses.double().cumsum(dim=-1)
        return (
            (cumulative > float(row["choose"]) * cumulative[:, -1:])
            .int()
            .argmax(dim=-1, keepdim=True)
        )

    with (
        mock.patch.object(torch, "rand_like", return_value=uniforms),
        mock.patch.object(torch, "multinomial", sample),
    ):
        committed, accepted = utils._speculative_sampling(
            tokens[None], q.log()[None], length, p.log()[None]
        )
    return int(accepted), int(committed[0, -1])
