"""Random targets with a likely next token, and small heads trained on their text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import LoadedDrafter, LoadedTarget
from eagle3_jax.drafters import Eagle3Config, Eagle3Drafter
from eagle3_jax.models.config import GatedMLP, GroupedQuery, uniform
from eagle3_jax.topology import Chain
from eagle3_jax.training.batches import Frozen, TTTBatch
from eagle3_jax.training.loop import OptimizerConfig, Trainer
from eagle3_jax.training.methods import initial_head
from eagle3_jax.training.ttt import TTTConfig, ttt_loss

Tokens = list[int]
DEPTH = 3
ROWS = 8
OBJECTIVE = TTTConfig(num_steps=DEPTH, denominator="supervised")


VOCAB = 96  # of recipes that name no other
BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


class Recipe(NamedTuple):
    """A small model of a family."""

    model_type: str
    fields: dict[str, Any]
    seed: int


# Kernels of experts as products of [E, in] and not of [E, out] first.
_IN_FIRST = ("gpt_oss", "llama4_text")


def build(recipe: Recipe) -> Any:
    """The random model of a recipe. No norm is 1, and nothing is 0 that could be another number."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    has_text_config = "text_config" in recipe.fields
    config = AutoConfig.for_model(
        recipe.model_type, **({} if has_text_config else BASE) | recipe.fields
    )
    kind = AutoModelForImageTextToText if has_text_config else AutoModelForCausalLM
    model = eager(kind.from_config(config, attn_implementation="eager").float())
    tied = getattr(model.config, "tie_word_embeddings", False)
    generator = torch.Generator().manual_seed(recipe.seed)
    stored = ("correction_bias", "layer_scalar")
    buffers = [(name, value) for name, value in model.named_buffers() if name.endswith(stored)]
    for name, value in [*model.named_parameters(), *buffers]:
        noise = torch.randn(value.shape, generator=generator)
        with torch.no_grad():
            value.copy_(_noise(name, value, noise, recipe.model_type, tied=tied))
    return model


def _noise(name: str, value: Any, noise: Any, model_type: str, *, tied: bool) -> Any:
    if "norm" in name or name.endswith("layer_scalar"):
        # About one, or about zero where that is what the family starts from.
        return value + 0.2 * noise
    if name.endswith("sinks"):
        return 1.5 * noise
    if name.endswith(("A_log", "dt_bias")):
        return 0.5 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if "embed_tokens" in name:  # small where tied, lest the model only repeat its last token
        return (0.15 if tied else 0.7) * noise

    inputs = value.shape[1] if value.ndim == 3 and model_type in _IN_FIRST else value.shape[-1]
    sharp = name.endswith(("lm_head.weight", "gate.weight", "router.weight"))
    return noise * (1.3 + 1.3 * sharp) / math.sqrt(inputs)


def eager(model: Any) -> Any:
    """Make a model of transformers compute one expert after the other, as its source says."""
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("eager")
    return model.eval()


def write_peaked(recipe: Recipe, directory: Path, *, loudness: float) -> Path:
    """Write a random model that mostly follows one random cycle through its vocabulary.

    The layers make it leave the cycle, and the token then depends on the whole context.
    ``loudness`` is the standard deviation of the embedding: the larger, the fewer tokens the layers
    decide.
    """
    import torch

    model = build(recipe)
    embedding = model.get_input_embeddings().weight
    output = model.get_output_embeddings().weight
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
    """Prompts of distinct tokens, in which no n-gram repeats."""
    random = np.random.default_rng(seed)
    return [random.permutation(np.arange(3, vocab_size))[:length].tolist() for _ in range(count)]


def learned(
    target: LoadedTarget, prompts: list[Tokens], written: list[Tokens], *, steps: int
) -> tuple[LoadedDrafter, list[float]]:
    """Train a head of one layer on the text of a target of four, after prompts of one length.

    Returns:
        The head, which drafts chains, and its loss in every step.
    """
    like = target.model.config  # type: ignore[attr-defined]
    mixer = GroupedQuery(num_heads=like.width // 32, num_kv_heads=1, head_dim=32)
    config = Eagle3Config(
        vocab_size=like.vocab_size,
        width=like.width,
        layers=uniform(1, mixer, GatedMLP(width=2 * like.width)),
        norm_eps=1e-5,
        draft_vocab_size=like.vocab_size,
        target_width=like.width,
        aux_layers=(1, 2, 4),
        max_positions=like.max_positions,
    )

    drafter = Eagle3Drafter(config, Chain(DEPTH))
    tokens = jnp.asarray(
        [prompt + text for prompt, text in zip(prompts, written, strict=True)], jnp.int32
    )
    real = jnp.ones(tokens.shape, jnp.bool_)
    supervised = real.at[:, : len(prompts[0]) - 1].set(False)  # prompts are given
    everything = TTTBatch(tokens=tokens, attention_mask=real, loss_mask=supervised)

    embedding = target.model.tables(target.params).embedding  # type: ignore[attr-defined]
    frozen: Frozen = {
        "target_params": target.params,
        "embedding": embedding,
        "draft_to_target": None,
    }

    def loss(params: Any, batch: tuple[Frozen, TTTBatch]) -> tuple[jax.Array, dict[str, jax.Array]]:
        return ttt_loss(drafter, target.model, params, *batch, OBJECTIVE)  # type: ignore[arg-type]

    def batch_at(step: int) -> tuple[Frozen, TTTBatch]:
        rows = np.random.default_rng((0, step)).choice(len(tokens), ROWS, replace=False)
        return frozen, jax.tree.map(lambda leaf: leaf[rows], everything)

    trainer = Trainer(loss, OptimizerConfig(learning_rate=1e-2, num_steps=steps, warmup_steps=5))
    head: Any = initial_head(drafter, target, None, jax.random.key(0))
    losses = []
    with jax.numpy_dtype_promotion("standard"):  # optax's own arithmetic mixes types
        for state, metrics in trainer.run(trainer.start(head), batch_at, steps):
            losses.append(metrics["loss"])
            head = state.params

    ids = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
    return (
        LoadedDrafter(drafter, {"head": head, "embedding": embedding, "draft_to_target": ids}),
        losses,
    )
