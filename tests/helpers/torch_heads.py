"""EAGLE-1 and MTP written down a second time, in PyTorch and from the papers: no cache, everything computed anew."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import Drafted, write_checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedbackHead:
    """What all of them have: a block of the target's width, and no vocabulary of their own."""

    width: int = 32
    vocab: int = 61
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    inner: int = 24
    layers: int = 1
    theta: float = 10_000.0
    qkv_bias: bool = False
    own_embedding: bool = True
    target_layers: int = 8
    dtype: Any = np.float32
    seed: int = 1

    def draw(self) -> Any:
        random = np.random.default_rng(self.seed)

        def draw(*shape: int, around: float = 0.0) -> np.ndarray:
            return (around + random.normal(0, 0.3, shape)).astype(np.float32).astype(self.dtype)

        return draw

    def block(self, name: str, draw: Any, norms: tuple[str, ...]) -> dict[str, np.ndarray]:
        out = {f"{name}.{norm}.weight": draw(self.width, around=1) for norm in norms}
        for key, heads in {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}.items():
            out[f"{name}.self_attn.{key}_proj.weight"] = draw(heads * self.head_dim, self.width)
            if self.qkv_bias:
                out[f"{name}.self_attn.{key}_proj.bias"] = draw(heads * self.head_dim)
        out[f"{name}.self_attn.o_proj.weight"] = draw(self.width, self.heads * self.head_dim)
        out[f"{name}.mlp.gate_proj.weight"] = draw(self.inner, self.width)
        out[f"{name}.mlp.up_proj.weight"] = draw(self.inner, self.width)
        out[f"{name}.mlp.down_proj.weight"] = draw(self.width, self.inner)
        return out

    def geometry(self) -> dict[str, Any]:
        values = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "torch_dtype": "float16",
        }
        return values if self.theta == 10_000.0 else values | {"rope_theta": self.theta}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle1(FeedbackHead):
    """In the official layout."""

    bias: bool = True

    def tensors(self) -> dict[str, np.ndarray]:
        draw = self.draw()
        out = {"fc.weight": draw(self.width, 2 * self.width)}
        if self.bias:
            out["fc.bias"] = draw(self.width)
        for layer in range(self.layers):
            norms = ("post_attention_layernorm",) + ("input_layernorm",) * (layer > 0)
            out |= self.block(f"layers.{layer}", draw, norms)
        return out | ({"embed_tokens.weight": draw(self.vocab, self.width)} if self.own_embedding else {})

    def config(self) -> dict[str, Any]:
        return self.geometry() | ({} if self.bias else {"bias": False}) | ({"qkv_bias": True} if self.qkv_bias else {})

    def write(self, directory: Path) -> Path:
        return write_checkpoint(directory, self.config(), self.tensors())


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTP(FeedbackHead):
    """In DeepSeek's names."""

    own_embedding: bool = False
    own_output: bool = False

    @property
    def prefix(self) -> str:
        return f"model.layers.{self.target_layers}"

    def tensors(self) -> dict[str, np.ndarray]:
        draw, name = self.draw(), self.prefix
        norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
        out = {f"{name}.eh_proj.weight": draw(self.width, 2 * self.width), **self.block(name, draw, norms)}
        if self.own_embedding:
            out[f"{name}.embed_tokens.weight"] = draw(self.vocab, self.width)
        if self.own_output:
            out[f"{name}.shared_head.head.weight"] = draw(self.vocab, self.width)
        return out

    def config(self) -> dict[str, Any]:
        values = {"num_hidden_layers": self.target_layers, "num_nextn_predict_layers": 1}
        return self.geometry() | values | ({"attention_bias": True} if self.qkv_bias else {})

    def write(self, directory: Path) -> Path:
        return write_checkpoint(directory, self.config(), self.tensors())


def network(head: Eagle1 | MTP, w: dict[str, Any]) -> Any:
    """One run over a whole sequence: what the head reads at positions 0.. , embedded tokens and states, and gives."""
    import torch

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w[f"{name}.weight"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))

    def turned(x: torch.Tensor) -> torch.Tensor:
        half = head.head_dim // 2
        angle = torch.arange(x.shape[0])[:, None] * head.theta ** (-torch.arange(half) / half)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        both = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
        return torch.cat([both.real, both.imag], -1)

    def attention(x: torch.Tensor, name: str) -> torch.Tensor:
        q, k, v = (linear(x, f"{name}.self_attn.{one}_proj").view(len(x), -1, head.head_dim) for one in "qkv")
        group = head.heads // head.kv_heads
        q, k, v = turned(q), turned(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        heads_first = [one.transpose(0, 1)[None] for one in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
        return linear(out[0].transpose(0, 1).reshape(len(x), -1), f"{name}.self_attn.o_proj")

    def mlp(x: torch.Tensor, name: str) -> torch.Tensor:
        gate = torch.nn.functional.silu(linear(x, f"{name}.mlp.gate_proj"))
        return linear(gate * linear(x, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")

    def eagle1(embedded: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        x = linear(torch.cat([embedded, stream], -1), "fc")
        for layer in range(head.layers):
            name = f"layers.{layer}"
            x = x + attention(rms(x, f"{name}.input_layernorm") if layer else x, name)
            x = x + mlp(rms(x, f"{name}.post_attention_layernorm"), name)
        return x

    def mtp(embedded: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        name = f"model.layers.{head.target_layers}"
        embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        both = torch.cat([rms(embedded, f"{name}.enorm"), rms(stream, f"{name}.hnorm")], -1)
        x = linear(both, f"{name}.eh_proj")
        x = x + attention(rms(x, f"{name}.input_layernorm"), name)
        x = x + mlp(rms(x, f"{name}.post_attention_layernorm"), name)
        return rms(x, f"{name}.shared_head.norm")

    return eagle1 if isinstance(head, Eagle1) else mtp


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
    table, matrix = (torch.from_numpy(np.array(one, np.float32)) for one in (embedding, output))
    ids, stream = torch.from_numpy(np.array(tokens)).long(), torch.from_numpy(np.array(features, np.float32))
    first, drafts = None, []
    for _ in range(depth):
        out = run(table[ids], stream)
        logits = out @ matrix.T
        first = logits if first is None else first
        drafts.append(int(logits[-1].argmax()))
        ids, stream = torch.cat([ids, torch.tensor(drafts[-1:])]), torch.cat([stream, out[-1:]])
    return Drafted(first.numpy(), drafts)
