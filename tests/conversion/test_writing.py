"""Nothing is ever half there: full disks, kill -9, Ctrl-C, and the run that comes after."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eagle3_jax import conversion
from eagle3_jax.cli import run
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._training_files import refuse_finished
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.files.writing import WriteError, whole_directory, whole_file
from eagle3_jax.training.loop import OptimizerConfig, Trainer

ROOT = Path(__file__).parent.parent.parent
OFFICIAL = Path(__file__).parent.parent / "golden" / "official"


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As on a full disk: every longer file fails to be written, with the error of a full device or of this limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# ---------------------------------------------------------------------------------------------------- the disk is full


@pytest.mark.parametrize("to", ["jax", "vllm"])
def test_a_conversion_onto_a_full_disk_says_so_and_leaves_nothing(tmp_path: Path, capsys: Any, to: str) -> None:
    with files_of_at_most(50_000):
        code = run(["convert", str(OFFICIAL / "target"), str(tmp_path / "out"), "--to", to])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"error: disk full: {tmp_path / 'out'}; ")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "says",
    [
        OSError(28, "No space left on device"),
        OSError(122, "Disk quota exceeded"),
        OSError("131072 requested and 4096 written"),
        ValueError("RESOURCE_EXHAUSTED: Failed to write 7 bytes [os_error_code='28']"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=lambda error: type(error).__name__ + str(error)[:12],
)
def test_every_library_says_disk_full_in_its_own_way(tmp_path: Path, says: Exception) -> None:
    with pytest.raises(WriteError, match=rf"^disk full: {tmp_path / 'out'}; "), whole_directory(tmp_path / "out"):
        raise says
    assert names(tmp_path) == []


def test_another_fault_is_not_called_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="something else"), whole_directory(tmp_path / "out"):
        raise RuntimeError("something else")
    assert names(tmp_path) == []


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(CheckpointError, match=r"^disk full: .* needs [0-9,]+ bytes and 10 are free"):
        conversion.convert(OFFICIAL / "target", tmp_path / "out", "jax")
    assert names(tmp_path) == []


# ---------------------------------------------------------------------------------------------------- it is interrupted


def started(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(seen: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not seen():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


CONVERT = """
import sys, time
import eagle3_jax.conversion.native as native, eagle3_jax.conversion.targets as targets
from eagle3_jax.cli import main
if sys.argv[1] == "late":  # all is written, and nothing has its name yet
    native.copy_tokenizer = targets.copy_tokenizer = lambda *_: time.sleep(60)
sys.argv[1:2] = ["convert"]
main()
"""


@pytest.mark.parametrize(
    ("how", "moment", "to"),
    [(signal.SIGKILL, "early", "jax"), (signal.SIGKILL, "late", "vllm"), (signal.SIGINT, "late", "jax")],
    ids=["killed early", "killed late", "Ctrl-C"],
)
def test_an_interrupted_conversion_leaves_nothing_that_the_next_one_minds(
    tmp_path: Path, how: signal.Signals, moment: str, to: str
) -> None:
    out = tmp_path / "out"
    process = started(CONVERT, moment, OFFICIAL / "target", out, "--to", to)
    weights = "eagle3_jax.json" if to == "jax" else "generation_config.json"
    wait_until(
        lambda: any(tmp_path.glob(f".out.*.partial/{weights}" if moment == "late" else ".out.*.partial")), process
    )
    process.send_signal(how)
    _, err = process.communicate()
    assert not out.exists()
    if how == signal.SIGINT:
        assert (process.returncode, names(tmp_path)) == (130, []), err
        assert "Traceback" not in err
    else:
        assert len(names(tmp_path)) == 1
    conversion.convert(OFFICIAL / "target", out, to)
    assert names(tmp_path) == ["out"]
    conversion.read_target(out)


def test_what_somebody_is_writing_is_not_taken_for_abandoned(tmp_path: Path) -> None:
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


def test_a_file_is_replaced_whole_through_links_and_devices_stay_devices(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("before")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    with contextlib.suppress(KeyboardInterrupt), whole_file(tmp_path / "link") as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert (tmp_path / "kept").read_text() == "before"
    with whole_file(tmp_path / "link") as partial:
        partial.write_text("after")
    assert (tmp_path / "kept").read_text() == "after"
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with whole_file(tmp_path / "pipe") as partial:
        assert partial == tmp_path / "pipe"
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert names(tmp_path) == ["kept", "link", "pipe"]


# ---------------------------------------------------------------------------------------------------- checkpoints


def trainer_in(directory: Path) -> Trainer:
    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        return jnp.sum((params["w"] - batch) ** 2), {}

    return Trainer(loss, OptimizerConfig(num_steps=10_000, warmup_steps=1), directory)


def parameters() -> dict[str, jax.Array]:
    return {"w": jnp.zeros((300, 300), jnp.float32)}


SAVE_FOR_EVER = f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "conversion")!r}]
import jax.numpy as jnp
from test_writing import trainer_in, parameters
trainer = trainer_in(Path(sys.argv[1]))
for _ in trainer.run(trainer.start(parameters()), lambda step: jnp.ones(()), 10_000, 1):
    pass
"""


@jax.numpy_dtype_promotion("standard")  # optax's own arithmetic mixes types
def test_a_run_killed_while_it_saves_continues_from_the_last_whole_checkpoint(tmp_path: Path) -> None:
    for _ in range(2):
        before = {int(name) for name in names(tmp_path) if name.isdecimal()}
        process = started(SAVE_FOR_EVER, tmp_path)
        wait_until(
            lambda before=before: any(
                int(name.split(".")[0]) > max(before, default=0) + 2 for name in names(tmp_path) if "tmp" in name
            ),
            process,
        )
        process.kill()
        process.communicate()
        whole = max(int(name) for name in names(tmp_path) if name.isdecimal())
        state = trainer_in(tmp_path).start(parameters())
        assert int(state.step) == whole > max(before, default=0)
        assert bool(jnp.isfinite(state.params["w"]).all() & (state.params["w"] > 0).all())
        assert all(name.isdecimal() for name in names(tmp_path)), "the half one is gone"


@jax.numpy_dtype_promotion("standard")
def test_a_checkpoint_on_a_full_disk_says_so_and_the_one_before_is_whole(tmp_path: Path) -> None:
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
    assert int(trainer_in(directory).start(parameters()).step) == 1


@jax.numpy_dtype_promotion("standard")
def test_a_checkpoint_that_does_not_fit_is_named(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    trainer.save(trainer.start(parameters()))
    with pytest.raises(ValueError, match=rf"^{tmp_path / '0'} is damaged, or of a model of another shape \("):
        trainer_in(tmp_path).start({"other": jnp.zeros((3,), jnp.float32)})


def test_a_run_that_was_killed_while_it_finished_may_be_run_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    (out / ".partial").mkdir()
    (out / "model.safetensors").write_bytes(b"")
    refuse_finished(out)
    (out / "config.json").write_text("{}")
    with pytest.raises(Misuse, match="exists already"):
        refuse_finished(out)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cat.png").write_bytes(b"")
    with pytest.raises(Misuse, match="exists already"):
        refuse_finished(tmp_path / "pictures")
