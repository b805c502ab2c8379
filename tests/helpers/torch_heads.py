"""A second implementation of EAGLE-1 and MTP in PyTorch, from the papers, without a cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import Drafted, Draw, StoredHead, TorchLayers, drawing, write_checkpoint


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
        return out | ({"embed_tokens.weight": draw(self.vocab, self.width)} if self.own_embedding else {})

    def config(self) -> dict[str, Any]:
        return super().config() | ({} if self.bias else {"bias": False}) | ({"qkv_bias": True} if self.qkv_bias else {})


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
        norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
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
    """Returns a function that runs a head over a whole sequence of embedded tokens and states from position 0."""
    return (TorchEagle1 if isinstance(head, Eagle1) else TorchMTP)(head, w).run


class TorchBlock(TorchLayers):
    def block(self, x: Any, name: str, *, normed: bool = True) -> Any:
        """Runs a block; ``normed`` tells whether it has a norm of its inputs."""
        x = x + self.attend(self.rms(x, f"{name}.input_layernorm") if normed else x, f"{name}.self_attn")
        return x + self.mlp(self.rms(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")


class TorchEagle1(TorchBlock):
    def run(self, embedded: Any, stream: Any) -> Any:
        x = self.linear(self.torch.cat([embedded, stream], -1), "fc")
        for layer in range(self.head.layers):
            x = self.block(x, f"layers.{layer}", normed=layer > 0)
        return x


class TorchMTP(TorchBlock):
    def run(self, embedded: Any, stream: Any) -> Any:
        torch = self.torch
        name = self.head.prefix
        embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        both = torch.cat([self.rms(embedded, f"{name}.enorm"), self.rms(stream, f"{name}.hnorm")], -1)
        x = self.block(self.linear(both, f"{name}.eh_proj"), name)
        return self.rms(x, f"{name}.shared_head.norm")


def drafted(
    head: Eagle1 | MTP,
    *,
    embedding: np.ndarray,
    output: np.ndarray,
    features: np.ndarray,
    tokens: np.ndarray,
    depth: int,
) -> Drafted:
    """Logits of every true pair and a greedy chain after the last.

    Args:
        head: The weights.
        embedding: ``[V D]``.
        output: ``[V D]``, the matrix that logits are read off.
        features: ``[T D]``, the target's final states at positions 0..T-1.
        tokens: ``[T]``, those *after* them.
        depth: Tokens to draft.
    """
    import torch

    weights = {name: torch.from_numpy(np.asarray(value, np.float32)) for name, value in head.tensors().items()}
    run = network(head, weights)
    table, matrix = (torch.from_numpy(np.array(array, np.float32)) for array in (embedding, output))
    ids = torch.from_numpy(np.array(tokens)).long()
    stream = torch.from_numpy(np.array(features, np.float32))
    first = None
    drafts = []
    for _ in range(depth):
        out = run(table[ids], stream)
        logits = out @ matrix.T
        first = logits if first is None else first
        drafts.append(int(logits[-1].argmax()))
        ids = torch.cat([ids, torch.tensor(drafts[-1:])])
        stream = torch.cat([stream, out[-1:]])
    return Drafted(first.numpy(), drafts)
