"""A run of ``eagle3 train``: its options, its progress, and the checkpoint that it leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import CompilationCacheOption
from eagle3_jax.cli._progress import progress_bar

if TYPE_CHECKING:
    from eagle3_jax.training.loop import OptimizerConfig, Trainer, TrainState

_MOST_STEPS = 1_000_000_000
# Rows of a batch.
MOST_ROWS = 65_536
SeedOption = Annotated[int, typer.Option(help="Random seed.", min=0, max=2**32 - 1)]
StepsOption = Annotated[int, typer.Option(help="Optimizer steps.", min=1, max=_MOST_STEPS)]
DtypeOption = Annotated[str, typer.Option(help="Precision of the products.")]
LearningRate = Annotated[float, typer.Option(help="Peak learning rate.")]
EmbeddingLearningRate = Annotated[
    float, typer.Option(help="Peak learning rate of the parameters that muon leaves to adamw.")
]
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
        """Returns the configuration for the trainer."""
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
    """Options of a run that do not change its result, and the stored type."""

    store: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type of the weights that are written.")
    ] = "bfloat16"
    save_every: Annotated[
        int,
        typer.Option(
            help="Steps between checkpoints; an interrupted run continues from the last one.",
            min=1,
            max=_MOST_STEPS,
        ),
    ] = 100
    compilation_cache: CompilationCacheOption = None


def named(group: Any) -> dict[str, Any]:
    """Returns the options of a group under their names on the command line."""
    return {
        f"--{name.replace('_', '-')}": value for name, value in dataclasses.asdict(group).items()
    }


def train(
    trainer: Trainer,
    params: Any,
    batch_at: Callable[[int], Any],
    *,
    steps: int,
    total: int,
    save_every: int,
    after_step: Callable[[TrainState, dict[str, float]], None] = lambda state, metrics: None,
    first_phase: bool = True,
) -> TrainState:
    """Trains from the last checkpoint to step ``steps``.

    Ctrl-C and SIGTERM save the last finished step.

    Args:
        trainer: The trainer, which writes the checkpoints.
        params: Parameters of step 0.
        batch_at: Maps a step to its batch.
        steps: Last step of this phase.
        total: Last step of the command.
        save_every: Number of steps between checkpoints.
        after_step: Called with the state and the metrics of each step.
        first_phase: Whether to print the step at which the command continues.

    Returns:
        The state after step ``steps``.
    """
    state = trainer.start(params)
    done = int(state.step)
    if done and first_phase:
        typer.echo(f"continuing from step {done}")

    with progress_bar("training", total, done) as (progress, task):
        try:
            for latest, metrics in trainer.run(state, batch_at, steps, save_every):
                state = latest
                text = _metrics(metrics)
                progress.update(task, advance=1, description=text)

                step = int(state.step)
                if progress.disable and (step % 10 == 0 or step == steps):
                    typer.echo(f"step {step} of {total} {text}")
                after_step(state, metrics)
        except (KeyboardInterrupt, SystemExit):
            trainer.save(state)
            typer.echo(
                f"interrupted at step {int(state.step)} of {total}; the same command continues"
                " there",
                err=True,
            )
            raise
    return state


def _metrics(metrics: dict[str, float]) -> str:
    """Returns loss, accuracy and τ in one line; the accuracies of an unrolled head as one list."""
    parts = [
        f"{name} {metrics[name]:.3f}"
        for name in ("loss", "accuracy", "simulated_tau")
        if name in metrics
    ]
    steps = [metrics[f"accuracy_{k}"] for k in range(len(metrics)) if f"accuracy_{k}" in metrics]
    if steps:
        parts.append("accuracy " + " ".join(f"{value:.2f}" for value in steps))
    return ", ".join(parts)


def parse_stages(
    text: str, steps: int, read: Callable[[str], Any], message: str
) -> list[tuple[int, Any]]:
    """Reads ``UNTIL:VALUE,...`` as pairs of last step and value; the last stage ends the run.

    Args:
        text: The text of the option.
        steps: Last step of the run.
        read: Reads a value.
        message: The error message for another form.
    """
    *parts, last = text.split(",")
    stages = []
    try:
        for part in parts:
            until, _, value = part.rpartition(":")
            stages.append((int(until), read(value)))
        final = read(last.rpartition(":")[2])
    except ValueError:
        raise Misuse(message) from None
    return [*(stage for stage in stages if stage[0] < steps), (steps, final)]
