"""How every test runs: shapes and types are checked at each call; nothing promotes by accident."""

from __future__ import annotations

import collections
import importlib.util
import os
import signal
import tempfile
import time
from pathlib import Path

# Compilation is most of what the suite costs, and without optimisation it costs half. What is
# claimed bit for bit must hold as users compile, too: XLA_FLAGS= pytest, as .ci/run has it. Before
# anything imports JAX.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import pytest
from jaxtyping import install_import_hook

# Before the first import of the library. It makes every annotated shape an assertion, here and in
# no other program.
try:
    import beartype  # noqa: F401

    UNCHECKED = ""
    install_import_hook("eagle3_jax", "beartype.beartype")
except ModuleNotFoundError:  # on a machine without the extras for tests
    UNCHECKED = "not checked, because beartype is not installed"

import jax

from eagle3_jax.decode import SpeculativeDecoder

# Tests and cases that run by night; the file says which.
SLOW = set(Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").splitlines())
MAPS_COUNTED = [time.monotonic()]

jax.config.update("jax_numpy_dtype_promotion", "strict")
# An array of fewer axes would broadcast along the first axes of another, meant or not: every new axis
# is written out. Users may set this for their program, too.
jax.config.update("jax_numpy_rank_promotion", "raise")

# It traces with shapes in place of arrays, which the checks refuse. Commands that tests start as
# programs of their own run it.
SpeculativeDecoder._compile = lambda self, loop, batch: None  # type: ignore[method-assign]

# Whatever a shell starts in the background ignores Ctrl-C, and hands that on to the commands that
# are interrupted here.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Compilation is most of what the suite costs; a second run on the same machine finds its programs
# here.
jax.config.update(
    "jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / "eagle3-jax-tests-compiled")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-fingerprints",
        action="store_true",
        help="Write the hashes of test_fingerprints.py.",
    )
    parser.addoption(
        "--record-api",
        action="store_true",
        help="Write the signatures of house/test_api.py.",
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `torch` where it is missing, and mark the tests of slow.txt.

    Of a test with several cases the first is not slow, unless slow.txt names the cases.
    """
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(pytest.mark.skip(reason="PyTorch is not installed"))

    items = [item for item in items if not item.get_closest_marker("slow")]
    tests = [f"{item.path.stem}::{getattr(item, 'originalname', item.name)}" for item in items]
    cases = collections.Counter(tests)
    seen: set[str] = set()

    for item, test in zip(items, tests, strict=True):
        case = f"{item.path.stem}::{item.name}"
        if case in SLOW or (test in SLOW and (test in seen or cases[test] == 1)):
            item.add_marker("slow")
        seen.add(test)


@pytest.fixture(scope="session", autouse=True)
def _report_shapes(record_testsuite_property):
    """Writes into the file of --junitxml that shapes were not checked."""
    if UNCHECKED:
        record_testsuite_property("shapes", UNCHECKED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if UNCHECKED:
        terminalreporter.write_line(f"Array shapes were {UNCHECKED}.")


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Programs of another module are of no use."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _few_memory_maps():
    """Keep far from Linux's limit of 65530 memory maps, which ends the process.

    A compiled program holds memory maps, and a suite has thousands of programs.
    """
    yield
    # 0.1 seconds to read, and a test that compiles for 10 seconds adds 3,000 of them.
    maps = Path("/proc/self/maps")
    if time.monotonic() - MAPS_COUNTED[0] > 10 and maps.exists():
        MAPS_COUNTED[0] = time.monotonic()
        if maps.read_bytes().count(b"\n") > 30_000:
            jax.clear_caches()


@pytest.fixture(scope="session")
def shipped():
    """The bundled target."""
    from eagle3_jax import load_target

    return load_target()


@pytest.fixture
def cli(capsys):
    """Exit code, standard output and standard error of a command line."""
    from eagle3_jax.cli import run

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def refused(cli):
    """The one line that a command line is refused with."""

    def call(*arguments: object) -> str:
        code, out, err = cli(*arguments)
        assert code == 2, (code, out, err)
        assert out == ""
        assert err.startswith("error: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1, err
        assert "Traceback" not in err
        return err

    return call
