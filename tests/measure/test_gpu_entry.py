"""A GPU that jax cannot use is reported in one line, and `make` installs a jax that can.

No GPU is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from eagle3_jax.measure import gpu

ROOT = Path(__file__).parent.parent.parent
COMMAND = f"pip install 'jax[cuda13]=={jax.__version__}'"


@pytest.fixture
def path_with_gpu(tmp_path: Path) -> str:
    """A PATH with an `nvidia-smi` that lists a GPU."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
    tool.chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def any_platform() -> Iterator[None]:
    """Removes the setting of the platform that JAX computes on."""
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", before)


def test_a_jax_for_cpus_on_a_machine_with_a_gpu_is_reported_with_the_package_to_install(
    any_platform: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "has_gpu", lambda: True)
    problem = gpu.gpu_problem()
    assert problem is not None and "\n" not in problem
    assert problem.endswith(f"sees only cpu, and an NVIDIA GPU is here; a jax with CUDA: {COMMAND}")

    with monkeypatch.context() as installed:
        installed.setattr(gpu, "_PLUGINS", ("json",))
        problem = gpu.gpu_problem()
        assert problem is not None and COMMAND not in problem
        assert "installed and does not start" in problem

    # Set by the user on purpose.
    jax.config.update("jax_platforms", "cpu")
    assert gpu.gpu_problem() is None
    problem = gpu.gpu_problem(required=True)
    assert problem is not None and problem.endswith("for JAX_PLATFORMS is cpu; unset it")

    monkeypatch.setattr(gpu, "on_gpu", lambda: True)
    assert gpu.gpu_problem(required=True) is None


def test_the_benchmark_refuses_and_the_doctor_warns(path_with_gpu: str) -> None:
    surroundings = {**os.environ, "PATH": path_with_gpu, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    surroundings.pop("JAX_PLATFORMS", None)

    def eagle3(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "eagle3_jax", *arguments]
        return subprocess.run(
            command, env=surroundings, cwd=ROOT, capture_output=True, text=True, check=False
        )

    done = eagle3("bench", "--rivals", "none")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: jax ") and COMMAND in done.stderr
    done = eagle3("doctor", "--json")
    assert done.returncode == 0 and COMMAND in done.stdout and '"warning"' in done.stdout


def test_make_installs_a_jax_with_cuda_where_a_gpu_is_used(path_with_gpu: str) -> None:
    def makes(*arguments: str, **environment: str) -> str:
        command = ["make", "-n", "VENV=build/no-such-venv", *arguments]
        return subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert "-e '.[validation,cuda]'" in makes("validation", "VALIDATION_FLAGS=--gpu --quick")
    for flags in ("", "--gpu --rehearse"):
        assert "-e '.[validation]'" in makes("validation", f"VALIDATION_FLAGS={flags}")
    assert "-e '.[test,cuda]'" in makes("gpu-notebooks", PATH=path_with_gpu)
    if not gpu.has_gpu():
        assert "-e '.[test]'" in makes("gpu-notebooks")


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_without_typer_the_command_line_says_so_in_one_line() -> None:
    done = python(
        "import sys; sys.modules['typer'] = None; import eagle3_jax.cli;"
        " sys.exit(eagle3_jax.cli.run(['bench']))"
    )
    assert (done.returncode, done.stderr) == (
        2,
        "error: the command line needs typer: pip install typer rich\n",
    )
