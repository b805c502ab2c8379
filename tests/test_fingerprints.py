"""The programs have not changed: hashes of the lowered programs for one drafter of each kind.

A hash covers what XLA is given, so a move, a renamed function or another docstring keeps it. Where
a program is meant to change, ``pytest tests/test_fingerprints.py --record-fingerprints``
writes the hashes again; the commit says why.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import jax
import pytest
import tiny
from drafter_table import ALL_DRAFTERS, drafter_of

from eagle3_jax import loop as loops
from eagle3_jax.models.layers import BFLOAT16
from eagle3_jax.types import SamplingMode, SamplingParams

# The lane with PyTorch has the jax that lowered the recorded programs.
pytestmark = [pytest.mark.core, pytest.mark.torch]

PATH = Path(__file__).parent / "golden" / "fingerprints.json"
TARGETS = {"float32": tiny.target(13), "bfloat16": tiny.target(13, precision=BFLOAT16)}
CHAIN = "EAGLE-3 chain"
TREE = "EAGLE-3 dynamic tree"
PROGRAMS = {
    **{
        f"{name}, greedy": (name, SamplingMode.GREEDY, "float32")
        for name in ALL_DRAFTERS
        if "sampled" not in name
    },
    **{
        f"{name}, top-p": (name, SamplingMode.TRUNCATED, "float32")
        for name in ALL_DRAFTERS
        if "sampled" in name
    },
    **{
        f"{name}, top-p": (name, SamplingMode.TRUNCATED, "float32")
        for name in ("plain", CHAIN, TREE)
    },
    **{
        f"{name}, greedy, bfloat16": (name, SamplingMode.GREEDY, "bfloat16")
        for name in ("plain", "n-grams")
    },
}


def fingerprint(name: str) -> str:
    """Returns the hash of one generation, lowered and not compiled."""
    drafter, sampling_mode, precision = PROGRAMS[name]
    loop, params = tiny.bind(TARGETS[precision], drafter_of(drafter), sampling_mode=sampling_mode)
    prompts = tiny.prompts(
        [[1, 2, 3], [4]], limit=8, sampling=SamplingParams(temperature=1.0, top_k=3, top_p=0.9)
    )
    jax.clear_caches()  # names in a program depend on what was traced before it
    with tiny.unchecked():
        text = loops.generate.lower(loop, params, prompts, capacity=24).as_text()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


RECORD = json.loads(PATH.read_text(encoding="utf-8"))
# At every commit; the others by night, and before a change that is to keep all of them.
FEW = ("plain, greedy", f"{CHAIN}, greedy", f"{TREE}, top-p", "n-grams, greedy, bfloat16")


def test_every_program_is_recorded(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--record-fingerprints"):
        hashes = {name: fingerprint(name) for name in PROGRAMS}
        PATH.write_text(
            json.dumps({"jax": jax.__version__, "programs": hashes}, indent=1) + "\n",
            encoding="utf-8",
        )
        RECORD.update(jax=jax.__version__, programs=hashes)
    assert set(PROGRAMS) == set(RECORD["programs"])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in PROGRAMS]
)
def test_a_program_is_the_recorded_one(name: str) -> None:
    if RECORD["jax"] != jax.__version__:
        pytest.skip(
            f"the hashes are of programs that jax {RECORD['jax']} lowered; this is jax"
            f" {jax.__version__}"
        )
    assert fingerprint(name) == RECORD["programs"][name], (
        "if that is meant: pytest tests/test_fingerprints.py --record-fingerprints"
    )
