"""A second implementation of EAGLE-1 and MTP in PyTorch, from the papers, without a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import (
    Drafted,
    Draw,
    StoredHead,
    TorchLayers,
    draft_greedily,
    drawing,
    write_checkpoint,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedbackHead(StoredHead):
    """A block of the target's width, and no vocabulary of its own."""

    qkv_bias: bool = False
    own_embedding: bool = True
    target_layers: int = 8

    def draw(self) -> Draw:
        return drawing(np.random.default_rng(self.seed), self.dtype)

    @property
    def biased(self) -> str:
        return "qkv" if self.qkv_bias else ""

    def config(self) -> dict[str, Any]:
        rope = {} if self.theta == 10_000.0 else {"rope_theta": self.theta}
        return self.geometry(architectures=["LlamaForCausalLM"], model_type="llama", **rope)

    def write(self, directory: Path) -> Path:
        return write_checkpoint(directory, self.config(), self.tensors())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle1(FeedbackHead):
    """An EAGLE-1 head in the official layout."""

    bias: bool = True

    def tensors(self) -> dict[str, np.ndarray]:
        draw = self.draw()
        out = {"fc.weight": draw(self.width, 2 * self.width)}
        if self.bias:
            out["fc.bias"] = draw(self.width)
        for layer in range(self.layers):
            norms = ("post_attention_layernorm",) + ("input_layernorm",) * (layer > 0)
            out |= self.block_tensors(draw, f"layers.{layer}", norms=norms, bias=self.biased)
        return out | (
            {"embed_tokens.weight": draw(self.vocab, self.width)} if self.own_embedding else {}
        )

    def config(self) -> dict[str, Any]:
        return (
            super().config()
            | ({} if self.bias else {"bias": False})
            | ({"qkv_bias": True} if self.qkv_bias else {})
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTP(FeedbackHead):
    """An MTP module with DeepSeek's names."""

    own_embedding: bool = False
    own_output: bool = False

    @property
    def prefix(self) -> str:
        return f"model.layers.{self.target_layers}"

    def tensors(self) -> dict[str, np.ndarray]:
        draw = self.draw()
        name = self.prefix
        norms = (
            "enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm",
        )  # fmt: skip

        out = {f"{name}.eh_proj.weight": draw(self.width, 2 * self.width)}
        out |= self.block_tensors(draw, name, norms=norms, bias=self.biased)

        if self.own_embedding:
            out[f"{name}.embed_tokens.weight"] = draw(self.vocab, self.width)
        if self.own_output:
            out[f"{name}.shared_head.head.weight"] = draw(self.vocab, self.width)
        return out

    def config(self) -> dict[str, Any]:
        values = {"num_hidden_layers": self.target_layers, "num_nextn_predict_layers": 1}
        return super().config() | values | ({"attention_bias": True} if self.qkv_bias else {})


def network(head: Eagle1 | MTP, w: dict[str, Any]) -> Any:
    """Returns a function that runs a head over embedded tokens and states from position 0."""
    import torch

    layers = TorchLayers(head, w)

    def eagle1(embedded: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        x = layers.linear(torch.cat([embedded, stream], -1), "fc")
        for layer in range(head.layers):
            x = layers.block(x, f"layers.{layer}", fed=None if layer else x)
        return x

    def mtp(embedded: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        name = f"model.layers.{head.target_layers}"
        embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        both = torch.cat(
            [layers.rms(embedded, f"{name}.enorm"), layers.rms(stream, f"{name}.hnorm")], -1
        )
        x = layers.block(layers.linear(both, f"{name}.eh_proj"), name)
        return layers.rms(x, f"{name}.shared_head.norm")

    return eagle1 if isinstance(head, Eagle1) else mtp


def drafted(
    head: Eagle1 | MTP,
    tables: Sequence[np.ndarray],
    features: np.ndarray,
    tokens: np.ndarray,
    depth: int,
) -> Drafted:
    """Drafts with a head.

    Args:
        head: The weights.
        tables: The embedding and the matrix that logits are read off, both ``[V D]``.
        features: ``[T D]``, the target's final states at positions 0..T-1.
        tokens: ``[T]``, those *after* them.
        depth: Tokens to draft.
    """
    import torch

    weights = {
        name: torch.from_numpy(np.asarray(value, np.float32))
        for name, value in head.tensors().items()
    }
    run = network(head, weights)
    table, matrix, stream = (
        torch.from_numpy(np.array(array, np.float32)) for array in (*tables, features)
    )
    return draft_greedily(
        lambda ids, stream: run(table[ids], stream),
        lambda out: out @ matrix.T,
        tokens,
        stream,
        depth,
    )
