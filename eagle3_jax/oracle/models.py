"""Tiny models that mostly count upwards, with the head of each method, as Hugging Face directories.

Weights are random, except for those that read the last token: the target then prefers the token
after it, and so do the heads. So drafts are accepted and rejected without any training.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle3_jax.drafters import (
    DFlashConfig,
    Eagle1Config,
    Eagle3Config,
    MedusaConfig,
    MTPConfig,
    PEagleConfig,
)
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform
from eagle3_jax.models.decoder import DecoderTarget

VOCAB_SIZE = 64  # so that one uniform samples a token
_WIDTH = 32
_DRAFT_VOCAB_SIZE = 48
_MASK_TOKEN = VOCAB_SIZE - 1
_LAYER = uniform(1, GroupedQuery(num_heads=2, num_kv_heads=1, head_dim=_WIDTH), GatedMLP(width=64))
_QWEN_LAYER = uniform(
    1, GroupedQuery(num_heads=2, num_kv_heads=1, head_dim=_WIDTH, qk_norm=True), GatedMLP(width=64)
)
_QWEN2_LAYER = uniform(
    1, GroupedQuery(num_heads=2, num_kv_heads=1, head_dim=_WIDTH, qkv_bias=True), GatedMLP(width=64)
)
_STACK: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "width": _WIDTH,
    "max_positions": 128,
    "norm_eps": 1e-5,
}
_TARGET = DecoderConfig(layers=_LAYER * 3, **_STACK)
_DRAFT_MODEL = DecoderConfig(layers=_LAYER, **_STACK)
_FEATURES: dict[str, Any] = {"target_width": _WIDTH, "aux_layers": (1, 2, 3)}
_LAST_STATE: dict[str, Any] = {"num_target_layers": _TARGET.num_layers}

# The layout in which each head is written, and its description.
_HEADS: dict[str, tuple[str, Any]] = {
    "eagle3": (
        "vllm",
        Eagle3Config(layers=_LAYER, draft_vocab_size=_DRAFT_VOCAB_SIZE, **_FEATURES, **_STACK),
    ),
    "eagle1": ("vllm", Eagle1Config(layers=_LAYER, **_LAST_STATE, **_STACK)),
    "medusa": (
        "vllm",
        MedusaConfig(
            vocab_size=VOCAB_SIZE,
            draft_vocab_size=VOCAB_SIZE,
            target_width=_WIDTH,
            num_heads=4,
            **_LAST_STATE,
        ),
    ),
    "mtp": ("mimo", MTPConfig(layers=_QWEN2_LAYER, **_LAST_STATE, **_STACK)),
    "p-eagle": (
        "vllm",
        PEagleConfig(
            layers=_LAYER * 2,
            draft_vocab_size=VOCAB_SIZE,
            mask_token_id=_MASK_TOKEN,
            **_FEATURES,
            **_STACK,
        ),
    ),
    "dflash": (
        "vllm",
        DFlashConfig(
            layers=_QWEN_LAYER,
            draft_vocab_size=VOCAB_SIZE,
            mask_token=_MASK_TOKEN,
            block_size=5,
            **_FEATURES,
            **_STACK,
        ),
    ),
}


def write_models(directory: Path) -> None:
    """Writes the target, a draft model and the head of each method, one directory each."""
    from eagle3_jax.conversion import FAMILIES, TargetCheckpoint, write_target

    llama = FAMILIES["llama"]
    for number, (name, config) in enumerate(
        {"target": _TARGET, "draft_model": _DRAFT_MODEL}.items()
    ):
        params = _random(DecoderTarget(config).param_shapes(), seed=number)
        params["embedding"] = _embedding()
        params["head"]["kernel"] = _count(1)
        checkpoint = TargetCheckpoint(
            config=config,
            family=llama,
            params=params,
            stop_tokens=(),
            source=directory,
            dtype="float32",
        )
        write_target(checkpoint, directory / name)
    for method, (layout, config) in _HEADS.items():
        _write_head(directory, method, layout, config)


def _write_head(directory: Path, method: str, layout: str, config: Any) -> None:
    from eagle3_jax.conversion import HeadCheckpoint, write_head
    from eagle3_jax.conversion.heads import HEADS

    head = _random(HEADS[method].param_shapes(config), seed=0)
    size = getattr(config, "draft_vocab_size", VOCAB_SIZE)
    ids = np.sort(np.random.default_rng(0).permutation(VOCAB_SIZE)[:size]).astype(np.int32)
    _read_last_token(method, head, ids)
    checkpoint = HeadCheckpoint(
        method=method,
        config=config,
        head=head,
        draft_to_target=ids if size < VOCAB_SIZE else None,
        embedding=_embedding() if method in ("mtp", "p-eagle") else None,
        dialect="jax",
        source=directory,
        dtype="float32",
        num_target_layers=_TARGET.num_layers,
    )
    write_head(checkpoint, directory / method, layout)


def _random(shapes: Any, seed: int) -> Any:
    """Returns parameters: ones for norms, zeros for biases, else normal numbers.

    These are divided by the square root of the number of inputs.
    """
    random = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        name = path[-1].key
        if name in ("scale", "bias"):
            return np.full(leaf.shape, name == "scale", np.float32)
        return (random.normal(size=leaf.shape) / math.sqrt(leaf.shape[0])).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def _embedding() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(VOCAB_SIZE, _WIDTH)).astype(np.float32)


def _count(step: int) -> np.ndarray:
    """Returns an output matrix that finds the token ``step`` after the one that it reads."""
    return np.ascontiguousarray(np.roll(_embedding(), step, axis=0).T)


def _read_last_token(method: str, head: dict[str, Any], ids: np.ndarray) -> None:
    """Makes a head read the embedding of the last token, where the method has a way for it."""
    read = np.eye(_WIDTH, dtype=np.float32)
    # What is not the embedding of the last token has a small part, so that drafts differ.
    if method in ("eagle1", "mtp"):
        head["fc"]["kernel"] = np.concatenate([read, 0.3 * head["fc"]["kernel"][_WIDTH:]])
    elif method in ("eagle3", "p-eagle"):
        # Attention reads the embedding: queries and keys find their own position, values pass it
        # on.
        attention = head["first"]["attention"]
        passed = np.concatenate([read] * 4, axis=1)
        attention["qkv"]["kernel"] = np.concatenate(
            [passed, 0.1 * attention["qkv"]["kernel"][_WIDTH:]]
        )
        attention["o"]["kernel"] = np.concatenate([read, read]) / 2
        head["fc"]["kernel"] = 0.3 * head["fc"]["kernel"]
        head["head"]["kernel"] = np.ascontiguousarray(_count(1)[:, ids])
    elif method == "medusa":
        for step, output in enumerate(head["outputs"].values(), 2):
            output["kernel"] = _count(step)
