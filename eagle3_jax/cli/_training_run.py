"""A training run at a terminal: from where its checkpoints stand to the end, with a bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from eagle3_jax.training.loop import Trainer, TrainState


def run(trainer: Trainer, params: Any, batch_at: Callable[[int], Any], *, steps: int, save_every: int) -> TrainState:
    """Run to the end from wherever the checkpoints stand; metrics go to a progress bar and to every tenth line."""
    state = trainer.start(params)
    done = int(state.step)
    if done:
        typer.echo(f"continuing from step {done}")
    with bar("training", steps, done) as (progress, task):
        for latest, metrics in trainer.run(state, batch_at, steps, save_every):
            state, shown = latest, _metrics(metrics)
            progress.update(task, advance=1, description=shown)
            step = int(state.step)
            if progress.disable and (step % 10 == 0 or step == steps):
                typer.echo(f"step {step} {shown}")
    return state


def _metrics(metrics: dict[str, float]) -> str:
    """The headline numbers; the accuracies of an unrolled head as one list."""
    shown = [f"{name} {metrics[name]:.3f}" for name in ("loss", "accuracy", "simulated_tau") if name in metrics]
    steps = [metrics[f"accuracy_{k}"] for k in range(len(metrics)) if f"accuracy_{k}" in metrics]
    if steps:
        shown.append("accuracy " + " ".join(f"{value:.2f}" for value in steps))
    return ", ".join(shown)


@contextlib.contextmanager
def activity(text: str) -> Iterator[None]:
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


@contextlib.contextmanager
def bar(text: str, total: int, done: int = 0) -> Iterator[tuple[Progress, TaskID]]:
    """A progress bar on the standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task(text, total=total, completed=done)
