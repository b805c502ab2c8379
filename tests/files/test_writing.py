"""A directory or file is complete or absent: after a full disk, kill -9, or another writer."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eagle3_jax import conversion
from eagle3_jax.cli import run
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli.train.files import refuse_finished
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.files.writing import WriteError, whole_directory, whole_file
from eagle3_jax.training.loop import OptimizerConfig, Trainer

ROOT = Path(__file__).parent.parent.parent
TARGET = Path(__file__).parent.parent / "golden" / "official" / "target"


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Simulates a full disk: longer files fail with the error of a full device or of this limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("layout", ["jax", "vllm"])
def test_a_conversion_onto_a_full_disk_is_refused_and_leaves_nothing(
    tmp_path: Path, capsys: Any, layout: str
) -> None:
    with files_of_at_most(50_000):
        code = run(["convert", str(TARGET), str(tmp_path / "out"), "--to", layout])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"error: disk full: {tmp_path / 'out'}; ")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError(122, "Disk quota exceeded"),
        OSError("131072 requested and 4096 written"),
        ValueError("RESOURCE_EXHAUSTED: Failed to write 7 bytes [os_error_code='28']"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=lambda error: type(error).__name__ + str(error)[:12],
)
def test_the_messages_of_all_libraries_for_a_full_disk_are_recognised(
    tmp_path: Path, error: Exception
) -> None:
    with (
        pytest.raises(WriteError, match=rf"^disk full: {tmp_path / 'out'}; "),
        whole_directory(tmp_path / "out"),
    ):
        raise error
    assert names(tmp_path) == []


def test_another_error_is_passed_on_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="another error"), whole_directory(tmp_path / "out"):
        raise RuntimeError("another error")
    assert names(tmp_path) == []


def test_what_a_thread_writes_after_the_removal_is_removed(tmp_path: Path) -> None:
    """After Ctrl-C, threads of Orbax may create their directories again."""

    def write_late(directory: Path) -> None:
        while directory.exists():
            time.sleep(0.01)
        time.sleep(0.1)
        (directory / "array").mkdir(parents=True)

    def write(threads: ThreadPoolExecutor) -> None:
        with whole_directory(tmp_path / "out") as directory:
            late.append(threads.submit(write_late, directory))
            raise KeyboardInterrupt

    late: list[Future[None]] = []
    with ThreadPoolExecutor(1) as threads, pytest.raises(KeyboardInterrupt):
        write(threads)
    late[0].result()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_refused_before_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(
        CheckpointError, match=r"^disk full: .* needs [0-9,]+ bytes and 10 are free"
    ):
        conversion.convert(TARGET, tmp_path / "out", "jax")
    assert names(tmp_path) == []


# Everything is written, and nothing has its final name yet.
WAIT_BEFORE_RENAMING = """
import sys, time
import eagle3_jax.conversion.native as native
from eagle3_jax.conversion import convert
native.copy_tokenizer = lambda *_: time.sleep(60)
convert(sys.argv[1], sys.argv[2], "jax")
"""


def test_a_killed_conversion_leaves_nothing_that_disturbs_the_next_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", WAIT_BEFORE_RENAMING, str(TARGET), str(out)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob(".out.*.partial/eagle3_jax.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    (partial,) = names(tmp_path)
    assert partial.startswith(".out.")

    conversion.convert(TARGET, out, "jax")
    assert names(tmp_path) == ["out"]
    conversion.read_target(out)


def test_a_directory_that_is_being_written_is_not_removed_as_abandoned(tmp_path: Path) -> None:
    with whole_directory(tmp_path / "out") as first:
        (first / "file").write_text("first")
        with pytest.raises(WriteError, match="appeared while"):  # noqa: PT012, SIM117
            with whole_directory(tmp_path / "out") as second:
                assert first.exists()
                assert second != first
                (tmp_path / "out").mkdir()
        (tmp_path / "out").rmdir()
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert names(tmp_path) == ["out"]


def test_a_file_is_replaced_through_links_and_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    (tmp_path / "link").symlink_to(file)
    with contextlib.suppress(KeyboardInterrupt), whole_file(tmp_path / "link") as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert file.read_text() == "before"

    with whole_file(tmp_path / "link") as partial:
        partial.write_text("after")
    assert file.read_text() == "after"
    assert (tmp_path / "link").is_symlink()

    os.mkfifo(tmp_path / "pipe")
    with whole_file(tmp_path / "pipe") as partial:
        assert partial == tmp_path / "pipe"
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path) == ["file", "link", "pipe"]


# ----------------------------------------------------------------------------------------- training


def trainer_in(directory: Path) -> Trainer:
    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        return jnp.sum((params["w"] - batch) ** 2), {}

    return Trainer(loss, OptimizerConfig(num_steps=10_000, warmup_steps=1), directory)


def parameters() -> dict[str, jax.Array]:
    return {"w": jnp.zeros((300, 300), jnp.float32)}


@jax.numpy_dtype_promotion("standard")  # optax's own arithmetic mixes types
def test_a_full_disk_leaves_the_previous_checkpoint_complete(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run")
    directory = tmp_path / "run"
    state = trainer.start(parameters())
    trainer.save(state)
    state = state.replace(step=state.step + 1)

    # Compressed, a table of one number is small.
    noise = jax.random.normal(jax.random.key(0), (300, 300))
    with pytest.raises(WriteError, match=r"^disk full: "), files_of_at_most(20_000):
        trainer.save(state.replace(params={"w": noise}))
    assert names(directory) == ["0"]

    trainer.save(state)
    # A killed process leaves this directory.
    (directory / "2.orbax-checkpoint-tmp").mkdir()
    assert int(trainer_in(directory).start(parameters()).step) == 1
    assert names(directory) == ["0", "1"]


@jax.numpy_dtype_promotion("standard")
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    trainer.save(trainer.start(parameters()))
    with pytest.raises(
        ValueError, match=rf"^{tmp_path / '0'} is damaged, or of a model of another shape \("
    ):
        trainer_in(tmp_path).start({"other": jnp.zeros((3,), jnp.float32)})


def test_a_run_that_was_killed_while_it_finished_can_be_repeated(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    (out / ".partial").mkdir()
    (out / "model.safetensors").write_bytes(b"")
    refuse_finished(out)
    (out / "config.json").write_text("{}")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cat.png").write_bytes(b"")
    for directory in (out, tmp_path / "pictures"):
        with pytest.raises(Misuse, match="exists already"):
            refuse_finished(directory)
