"""A run of ``eagle3 train``: its options, its progress, and its end by a signal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eagle3_jax.cli._errors import Misuse, after_the_step
from eagle3_jax.cli._options import CompilationCacheOption
from eagle3_jax.cli._progress import progress_bar

if TYPE_CHECKING:
    from eagle3_jax.training.loop import OptimizerConfig, Trainer, TrainState

_MOST_STEPS = 1_000_000_000
MOST_ROWS = 65_536  # of a batch
SeedOption = Annotated[int, typer.Option(help="Random seed.", min=0, max=2**32 - 1)]
StepsOption = Annotated[int, typer.Option(help="Optimizer steps.", min=1, max=_MOST_STEPS)]
DtypeOption = Annotated[str, typer.Option(help="Precision of the products.")]
LearningRate = Annotated[float, typer.Option(help="Peak learning rate.")]
EmbeddingLearningRate = Annotated[float, typer.Option(help="Peak learning rate of what muon leaves to adamw.")]
WeightDecay = Annotated[float, typer.Option(help="Weight decay.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer; the defaults are those of a target."""

    optimizer: Annotated[str, typer.Option(help="muon or adamw.")] = "muon"
    learning_rate: LearningRate = 5e-3
    embedding_learning_rate: EmbeddingLearningRate = 3e-3
    warmup_steps: Annotated[
        int, typer.Option(help="Steps, part of --steps, in which the learning rate rises.", min=0)
    ] = 20
    weight_decay: WeightDecay = 0.05
    clip_norm: Annotated[float, typer.Option(help="Maximum norm of the gradient.")] = 1.0

    def schedule(self, steps: int) -> OptimizerConfig:
        """The configuration for the trainer."""
        from eagle3_jax.training.loop import OptimizerConfig

        options = dataclasses.asdict(self)
        return OptimizerConfig(method=options.pop("optimizer"), num_steps=steps, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadOptimizerOptions(OptimizerOptions):
    """The optimizer with the defaults of a head."""

    learning_rate: LearningRate = 4e-3
    embedding_learning_rate: EmbeddingLearningRate = 2e-3
    weight_decay: WeightDecay = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Everything of a run that does not change its result, except the stored type."""

    store: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the weights that are written.")] = (
        "bfloat16"
    )
    save_every: Annotated[
        int,
        typer.Option(
            help="Steps between checkpoints; an interrupted run continues from the last one.", min=1, max=_MOST_STEPS
        ),
    ] = 100
    compilation_cache: CompilationCacheOption = None


def named(group: Any) -> dict[str, Any]:
    """The options of a group as they are typed, with their values."""
    return {f"--{name.replace('_', '-')}": value for name, value in dataclasses.asdict(group).items()}


def train(
    trainer: Trainer,
    params: Any,
    batch_at: Callable[[int], Any],
    *,
    steps: int,
    of: int,
    save_every: int,
    after_step: Callable[[TrainState, dict[str, float]], None] = lambda state, metrics: None,
    first_phase: bool = True,
) -> TrainState:
    """Trains from the last checkpoint to step ``steps`` of ``of``; a signal leaves a checkpoint.

    The first phase of a command says where it continues; later ones begin where it ends.
    """
    state = trainer.start(params)
    done = int(state.step)
    if done and first_phase:
        typer.echo(f"continuing from step {done}")
    with progress_bar("training", of, done) as (progress, task), after_the_step() as leave_if_asked:
        try:
            for latest, metrics in trainer.run(state, batch_at, steps, save_every):
                state = latest
                shown = _metrics(metrics)
                progress.update(task, advance=1, description=shown)
                step = int(state.step)
                if progress.disable and (step % 10 == 0 or step == steps):
                    typer.echo(f"step {step} of {of} {shown}")
                after_step(state, metrics)
                leave_if_asked()
        except (KeyboardInterrupt, SystemExit):
            trainer.save(state)
            typer.echo(f"interrupted at step {int(state.step)} of {of}; the same command continues there", err=True)
            raise
    return state


def _metrics(metrics: dict[str, float]) -> str:
    """The headline numbers; the accuracies of an unrolled head as one list."""
    shown = [f"{name} {metrics[name]:.3f}" for name in ("loss", "accuracy", "simulated_tau") if name in metrics]
    steps = [metrics[f"accuracy_{k}"] for k in range(len(metrics)) if f"accuracy_{k}" in metrics]
    if steps:
        shown.append("accuracy " + " ".join(f"{value:.2f}" for value in steps))
    return ", ".join(shown)


def staged(text: str, steps: int, read: Callable[[str], Any], wrong: str) -> list[tuple[int, Any]]:
    """The stages of ``UNTIL:VALUE,...`` as pairs of last step and value; the last stage ends the run."""
    *parts, last = text.split(",")
    try:
        stages = [(int(until), read(value)) for until, _, value in (part.rpartition(":") for part in parts)]
        return [*(stage for stage in stages if stage[0] < steps), (steps, read(last.rpartition(":")[2]))]
    except ValueError:
        raise Misuse(wrong) from None
