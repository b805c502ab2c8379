"""Random targets that are sure of their next token, and small heads that learn from their text."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from families import Recipe, build

from eagle3_jax import LoadedDrafter, LoadedTarget
from eagle3_jax.drafters import Eagle3Config, Eagle3Drafter
from eagle3_jax.models.config import GatedMLP, GroupedQuery, uniform
from eagle3_jax.training.batches import Frozen, TTTBatch
from eagle3_jax.training.head import RECIPE
from eagle3_jax.training.loop import OptimizerConfig, Trainer
from eagle3_jax.training.ttt import Teacher, TTTConfig, against, consult, unroll
from eagle3_jax.tree import Chain

Tokens = list[int]
DEPTH, ROWS = 3, 8
OBJECTIVE = TTTConfig(num_steps=DEPTH, denominator="supervised")


def write_peaked(recipe: Recipe, directory: Path, *, loudness: float) -> Path:
    """A random model in the layout of transformers, that mostly follows one random cycle through its vocabulary.

    What its layers add to the embedding makes it leave the cycle, where to depends on all that stands before.

    Args:
        recipe: Of its family; embeddings may not be tied.
        directory: Where to.
        loudness: Standard deviation of the embedding: the larger, the fewer tokens the layers decide.
    """
    import torch

    model = build(recipe)
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    words, width = embedding.shape
    generator = torch.Generator().manual_seed(recipe.seed)
    cycle = torch.randperm(words, generator=generator)
    directions = torch.randn((words, width), generator=generator)
    with torch.no_grad():
        embedding.copy_(loudness * directions)
        output[cycle.roll(-1)] = 12 / width * directions[cycle]
    model.save_pretrained(directory)
    return directory


def random_prompts(count: int, vocab_size: int, *, seed: int, length: int = 6) -> list[Tokens]:
    """Prompts of different tokens, so that nothing in them has been seen before."""
    random = np.random.default_rng(seed)
    return [random.permutation(np.arange(3, vocab_size))[:length].tolist() for _ in range(count)]


def head_config(vocab_size: int, width: int, max_positions: int) -> Eagle3Config:
    """The smallest head of the usual kind: one layer, all of the target's tokens, features of three layers of four."""
    return Eagle3Config(
        vocab_size=vocab_size,
        width=width,
        layers=uniform(1, GroupedQuery(num_heads=width // 32, num_kv_heads=1, head_dim=32), GatedMLP(width=2 * width)),
        norm_eps=1e-5,
        draft_vocab_size=vocab_size,
        target_width=width,
        aux_layers=(1, 2, 4),
        max_positions=max_positions,
    )


class Seen(NamedTuple):
    """A batch with what the target has to say of it, so that no target is part of the compiled step."""

    batch: TTTBatch
    teacher: Teacher
    features: jax.Array
    embedding: jax.Array


@functools.cache
def trainer_of(config: Eagle3Config, steps: int) -> Trainer:
    """One compiled step for heads of one shape, whatever their targets are."""
    drafter = Eagle3Drafter(config)

    def loss(params: Any, seen: Seen) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = unroll(drafter, params, seen.embedding, seen.features, seen.batch, DEPTH)
        return against(seen.teacher, logits, seen.batch, OBJECTIVE)

    return Trainer(loss, OptimizerConfig(learning_rate=1e-2, num_steps=steps, warmup_steps=5))


def learned(
    target: LoadedTarget, prompts: list[Tokens], written: list[Tokens], *, steps: int, seed: int = 0
) -> tuple[LoadedDrafter, list[float]]:
    """A head trained on what a target of four layers wrote behind prompts of one length.

    Returns:
        The head, which drafts chains, and its loss in every step.
    """
    like = target.model.config  # type: ignore[attr-defined]
    config = head_config(like.vocab_size, like.width, like.max_positions)
    drafter = Eagle3Drafter(config, Chain(DEPTH))
    tokens = jnp.asarray([prompt + text for prompt, text in zip(prompts, written, strict=True)], jnp.int32)
    real = jnp.ones(tokens.shape, jnp.bool_)
    supervised = real.at[:, : len(prompts[0]) - 1].set(False)  # nobody wrote the prompts
    embedding = target.model.tables(target.params).embedding  # type: ignore[attr-defined]
    frozen: Frozen = {"target_params": target.params, "embedding": embedding, "draft_to_target": None}
    everything = TTTBatch(tokens=tokens, attention_mask=real, loss_mask=supervised)
    teacher, features = jax.jit(
        lambda frozen, batch: consult(drafter, target.model, frozen, batch, DEPTH)  # type: ignore[arg-type]
    )(frozen, everything)

    def batch_at(step: int) -> Seen:
        rows = np.random.default_rng((seed, step)).choice(len(tokens), ROWS, replace=False)
        return Seen(*jax.tree.map(lambda leaf: leaf[rows], (everything, teacher, features)), embedding)

    trainer = trainer_of(config, steps)
    head: Any = RECIPE.start(drafter, target, None, jax.random.key(seed))
    losses = []
    with jax.numpy_dtype_promotion("standard"):  # optax's own arithmetic mixes types
        for state, metrics in trainer.run(trainer.start(head), batch_at, steps):
            losses.append(metrics["loss"])
            head = state.params
    ids = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
    return LoadedDrafter(drafter, {"head": head, "embedding": embedding, "draft_to_target": ids}), losses
