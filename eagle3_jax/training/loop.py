"""The training loop of targets and draft heads: optax steps, orbax checkpoints, exact resume."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import struct

from eagle3_jax.files.writing import check_free, disk_full_named, orbax_quiet, remove_tree
from eagle3_jax.models.functional import Params

Batch = Any
Metrics = dict[str, jax.Array]
LossFn = Callable[[Params, Batch], tuple[jax.Array, Metrics]]


class NotFinite(ValueError):
    """A loss or a gradient is not a finite number."""


class TrainState(struct.PyTreeNode, kw_only=True):
    """Everything that a resumed run needs."""

    #: Optimiser steps taken: an array, or its shape and type while a checkpoint is restored.
    step: Any
    params: Params  #: The parameters that are trained.
    opt_state: Any  #: The optimiser's state.


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW or Muon with warm-up and cosine decay to zero."""

    #: ``adamw`` (Loshchilov & Hutter, 2019), or ``muon`` (Jordan et al., 2024), which
    #: orthogonalises the update of hidden matrices and leaves embeddings, norms and output
    #: projections to AdamW.
    method: str = "adamw"
    learning_rate: float = 3e-3  #: Peak learning rate.
    #: ``muon``: peak learning rate of the parameters that AdamW updates; default:
    #: ``learning_rate``.
    embedding_learning_rate: float | None = None
    num_steps: int = 1000  #: Length of the schedule, in steps.
    warmup_steps: int = 50  #: Steps of linear warm-up from zero.
    weight_decay: float = 0.05  #: Decoupled from the gradient.
    clip_norm: float = 1.0  #: Global gradient norm above which gradients are scaled down.

    def __post_init__(self) -> None:
        if self.method not in ("adamw", "muon"):
            raise ValueError(f"optimizer {self.method!r} is not known; use 'adamw' or 'muon'")
        if not 0 <= self.warmup_steps < self.num_steps:
            raise ValueError(
                f"{self.warmup_steps} warm-up steps of {self.num_steps} steps; expected fewer, so"
                " that some are left"
            )

        for name in ("learning_rate", "embedding_learning_rate", "clip_norm"):
            value = getattr(self, name)
            # NaN compares false, so it is refused too.
            if value is not None and not 1e-30 < value < 1e6:
                raise ValueError(f"{name} is {value}; expected a positive number below 1e6")
        if not 0 <= self.weight_decay < 1e6:
            raise ValueError(
                f"weight_decay is {self.weight_decay}; expected a number from 0 to 1e6"
            )

    def build(self) -> optax.GradientTransformation:
        """Returns the optimiser."""
        schedule = functools.partial(
            optax.warmup_cosine_decay_schedule,
            0.0,
            warmup_steps=self.warmup_steps,
            decay_steps=self.num_steps,
        )

        if self.method == "adamw":
            update = optax.adamw(
                schedule(self.learning_rate), b1=0.9, b2=0.95, weight_decay=self.weight_decay
            )
        else:
            update = optax.contrib.muon(
                schedule(self.learning_rate),
                weight_decay=self.weight_decay,
                adam_learning_rate=schedule(self.embedding_learning_rate or self.learning_rate),
                # Updates as large as AdamW's, so one learning rate serves both (Liu et al., 2025).
                consistent_rms=0.2,
                muon_weight_dimension_numbers=_hidden_matrices,  # type: ignore[arg-type]
            )
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), update)


def _hidden_matrices(params: Params) -> Any:
    return jax.tree_util.tree_map_with_path(_muon_dimensions, params)


def _muon_dimensions(path: tuple[Any, ...], leaf: jax.Array) -> Any:
    names = {str(getattr(entry, "key", entry)) for entry in path}
    hidden = leaf.ndim == 2 and names.isdisjoint({"embedding", "head", "markov", "selector"})
    return optax.contrib.MuonDimensionNumbers() if hidden else None


def _take_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    new = TrainState(step=state.step + 1, params=params, opt_state=opt_state)
    return new, {"loss": loss, "grad_norm": optax.tree.norm(grads), **metrics}


class Trainer:
    """Runs an objective; resuming from a checkpoint continues with bit-identical losses."""

    def __init__(self, loss_fn: LossFn, optimizer: OptimizerConfig, directory: Path | None = None):
        """Prepares the step.

        Args:
            loss_fn: Returns a loss and metrics, from the parameters and a batch.
            optimizer: The optimiser.
            directory: Directory of the checkpoints; ``None``: none are written.
        """
        self._optimizer = optimizer.build()
        self._checkpoints = None
        if directory is not None:
            self._directory = Path(directory).absolute()
            with disk_full_named(self._directory):
                self._directory.mkdir(parents=True, exist_ok=True)
            self._remove_halves()
            options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
            self._checkpoints = ocp.CheckpointManager(self._directory, options=options)

        self._step = jax.jit(functools.partial(_take_step, loss_fn, self._optimizer))

    def start(self, params: Params) -> TrainState:
        """Returns the newest checkpoint if there is one, else a fresh state with ``params``."""
        # A compiled init keeps the state's leaves of the same kind (strong types) as a restored
        # one's.
        opt_state = jax.jit(self._optimizer.init)(params)
        fresh = TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=opt_state)
        if self._checkpoints is None or self._checkpoints.latest_step() is None:
            return fresh

        step = self._checkpoints.latest_step()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
        try:
            with orbax_quiet():
                restored: Any = self._checkpoints.restore(
                    step, args=ocp.args.StandardRestore(abstract)
                )
        # Orbax and TensorStore report damage and other shapes by many types of exceptions.
        except Exception as error:
            reason = " ".join(str(error).split())[:160]
            raise ValueError(
                f"{self._directory / str(step)} is damaged, or of a model of another shape"
                f" ({reason}); remove it to continue from the one before, or train elsewhere"
            ) from None
        return restored

    def run(
        self,
        state: TrainState,
        batch_at: Callable[[int], Batch],
        num_steps: int,
        save_every: int = 100,
    ) -> Iterator[tuple[TrainState, dict[str, float]]]:
        """Runs until ``num_steps``, yielding the state and its metrics after every step.

        ``batch_at`` maps a step to its batch, so that an interruption does not change the order of
        the data.

        Raises:
            NotFinite: The loss or the gradient of a step is not a finite number. The step is not
                taken.
        """
        for step in range(int(state.step), num_steps):
            after, metrics = self._step(state, batch_at(step))

            values = {name: float(value) for name, value in metrics.items()}
            if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
                raise NotFinite(
                    f"step {step + 1}: the loss is {values['loss']:.3g} and the norm of its"
                    f" gradient {values['grad_norm']:.3g}; {self._last_checkpoint()}. Lower the"
                    " learning rate"
                )

            state = after
            if (step + 1) % save_every == 0 or step + 1 == num_steps:
                self.save(state)
            yield state, values

    def _last_checkpoint(self) -> str:
        step = None if self._checkpoints is None else self._checkpoints.latest_step()
        if step is None:
            return "there is no checkpoint"
        return f"the last checkpoint is {self._directory / str(step)}"

    def save(self, state: TrainState) -> None:
        """Writes a checkpoint; it appears under its name only when complete.

        Raises:
            WriteError: The disk is full. The checkpoints before it are complete.
        """
        if self._checkpoints is None or self._checkpoints.latest_step() == int(state.step):
            return
        try:
            with disk_full_named(self._directory), orbax_quiet():
                check_free(self._directory, sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
                self._checkpoints.save(int(state.step), args=ocp.args.StandardSave(state))
                self._checkpoints.wait_until_finished()
        except BaseException:
            self._remove_halves()
            raise

    def _remove_halves(self) -> None:
        """Removes the files of a killed or failed save."""
        for path in self._directory.glob("*.orbax-checkpoint-tmp*"):
            remove_tree(path)
