"""A pytest plugin: runs of `pytest validation` on tests that are written for the occasion."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

# pytester forgets the modules that a run imports first, with their types, so these are imported before it.
import validation.conftest
from validation.runs import Report, load

with contextlib.suppress(ModuleNotFoundError):
    import validation.drawing  # noqa: F401

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def validate(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run tests as ``pytest validation`` would."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path))
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # which a run with --gpu sets, and which are put back
        monkeypatch.delenv(name)

    def run(
        source: str, *options: str, subprocess: bool = False, manifest: str = "none"
    ) -> tuple[pytest.RunResult, Report | None]:
        pytester.makepyfile(test_levels="import pytest\nlevel = pytest.mark.level\n" + source)
        launch = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        given = ["-p", "validation.conftest", "--report-dir", "out", "-o", f"validation_manifest={manifest}"]
        result = launch(*given, "-p", "no:cacheprovider", *options)
        return result, load("out") if Path("out").exists() else None

    return run
