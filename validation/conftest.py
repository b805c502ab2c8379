"""Options, what is being validated, and the report that every run writes."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from validation.levels import BY_NAME
from validation.report import Check, Report, Verdict

_CHECK = pytest.StashKey[Check]()
_REPORT = pytest.StashKey[Report]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("validation")
    group.addoption("--gpu", action="store_true", help="validate on a CUDA device, in bfloat16 and float32, with speed")
    group.addoption(
        "--rehearse",
        action="store_true",
        help="with --gpu: run its flow on whatever device there is, with tiny models; nothing measured so counts",
    )
    group.addoption("--target", metavar="TARGET", help="directory or hub id of the target to validate")
    group.addoption("--drafter", metavar="DRAFTER", help="directory or hub id of its EAGLE-3 head")
    group.addoption("--prompts", metavar="FILE", action="append", default=[], help="JSONL of prompts; may be repeated")
    group.addoption("--vllm-python", metavar="PYTHON", help="interpreter of an environment with vLLM; see `make vllm`")
    group.addoption("--vllm-url", metavar="URL", help="running vLLM server with speculation, such as http://host:8000")
    group.addoption("--vllm-plain-url", metavar="URL", help="running vLLM server of the same target without speculation")
    group.addoption("--price-per-hour", type=float, metavar="USD", help="of the machine; adds cost per million tokens")
    group.addoption("--report-dir", default=str(Path(__file__).parent / "report"), help="where the report is written")
    group.addoption("--complete", action="store_true", help="fail unless every level ran in full, as CI does")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is validated, and where.

    Attributes:
        gpu: A run with ``--gpu``.
        rehearsal: ``--gpu`` without a GPU: the flow, not the figures.
        target: Directory or hub id; ``None`` for the default.
        drafter: Directory or hub id; ``None`` for the default.
        prompt_files: JSONL files; empty for the default.
        price_per_hour: Of the machine.
    """

    gpu: bool
    rehearsal: bool
    target: str | None
    drafter: str | None
    prompt_files: tuple[Path, ...]
    price_per_hour: float | None


@pytest.fixture(scope="session")
def setting(pytestconfig: pytest.Config) -> Setting:
    option = pytestconfig.getoption
    return Setting(
        gpu=option("--gpu"),
        rehearsal=option("--rehearse"),
        target=option("--target"),
        drafter=option("--drafter"),
        prompt_files=tuple(Path(name) for name in option("--prompts")),
        price_per_hour=option("--price-per-hour"),
    )


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Check:
    """Where a test keeps the numbers behind its verdict."""
    return request.node.stash[_CHECK]
