"""Tiny block drafters on disk, and a second implementation of them in numpy, without a cache."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from checkpoints import NORMS, StoredHead, draft_vocabulary, drawing, write_checkpoint
from scipy.special import expit, softmax


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHead(StoredHead):
    """The options of a block drafter, by default those of a DFlash head as z-lab stores it."""

    target_width: int = 32
    draft_vocab: int = 61
    layers: int = 2
    ids: tuple[int, ...] = (1, 3, 6)  # layers whose outputs are meant
    block: int = 5
    mask: int = 60
    theta: float = 1e6
    causal: bool = False
    windows: tuple[bool, ...] = ()  # which layers slide
    window: int = 3  # the sliding_window of the file
    is_causal: bool | None = None  # z-lab's field
    from_anchor: bool = False
    rank: int = 0
    markov: str = "vanilla"
    confidence: str | None = None
    bias: bool = False
    own_output: bool = False
    own_embedding: bool = False

    def sees(self, layer: int, behind: np.ndarray, dialect: str = "vllm") -> np.ndarray:
        """Returns which keys a row attends to, by their distances behind it.

        The rule of the layout, as its project has it: z-lab's code, and transformers.
        """
        slides = bool(self.windows) and self.windows[layer]
        is_causal = self.causal
        if slides and dialect == "vllm":
            is_causal = self.is_causal is not False
        seen = behind >= 0 if is_causal else np.ones_like(behind, bool)
        if slides:
            seen &= (
                abs(behind) <= self.window
                if dialect == "transformers"
                else abs(behind) < self.window
            )
        return seen

    @property
    def predicted(self) -> int:
        return self.block if self.from_anchor else self.block - 1

    def tensors(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(self.seed)
        draw = drawing(random, self.dtype)
        width = self.width
        rank = self.rank

        out = {
            "fc.weight": draw(width, len(self.ids) * self.target_width),
            "hidden_norm.weight": draw(width, around=1),
            "norm.weight": draw(width, around=1),
        }

        for layer in range(self.layers):
            bias = "qkvo" if self.bias else ""
            out |= self.block_tensors(draw, f"layers.{layer}", norms=NORMS, bias=bias, qk_norm=True)

        if rank:
            out["markov_head.markov_w1.weight"] = 3 * draw(self.vocab, rank)
            out["markov_head.markov_w2.weight"] = 3 * draw(self.draft_vocab, rank)
        if self.markov == "gated":
            out |= {
                "markov_head.gate_proj.weight": draw(rank, width + rank),
                "markov_head.gate_proj.bias": draw(rank),
            }
        if self.markov == "rnn":
            out["markov_head.joint_proj.weight"] = draw(3 * rank, 2 * rank + width)
            out["markov_head.joint_proj.bias"] = draw(3 * rank)

        if self.confidence:
            out["confidence_head.proj.weight"] = draw(
                1, width + (rank if self.confidence == "markov" else 0)
            )
            out["confidence_head.proj.bias"] = draw(1)

        if self.own_embedding:
            out["embed_tokens.weight"] = draw(self.vocab, width)
        if self.own_output or self.draft_vocab < self.vocab:
            out["lm_head.weight"] = draw(self.draft_vocab, width)
        if self.draft_vocab < self.vocab:
            out |= draft_vocabulary(random, self.vocab, self.draft_vocab)

        return out

    def config(self, dialect: str = "vllm") -> dict[str, Any]:
        """Returns exactly the fields that z-lab, DeepSeek (DSpark) or speculators write."""
        sizes = self.geometry(
            model_type="qwen3",
            head_dim=self.head_dim,
            rope_theta=self.theta,
            attention_bias=self.bias,
            layer_types=["full_attention"] * self.layers,
            tie_word_embeddings=False,
        )
        if self.windows:
            sizes |= {
                "layer_types": [
                    "sliding_attention" if slides else "full_attention" for slides in self.windows
                ],
                "use_sliding_window": True,
                "sliding_window": self.window,
            }

        spark: dict[str, Any] = {}
        if self.rank:
            spark = {"markov_rank": self.rank, "markov_head_type": self.markov}
            spark |= {"enable_confidence_head": bool(self.confidence)}
            spark |= {"confidence_head_with_markov": self.confidence == "markov"}

        if dialect == "speculators":
            return {
                "architectures": ["DSparkDraftModel" if self.rank else "DFlashDraftModel"],
                "speculators_model_type": "dspark" if self.rank else "dflash",
                "transformer_layer_config": sizes,
                "draft_vocab_size": self.draft_vocab,
                "aux_hidden_state_layer_ids": [layer + 1 for layer in self.ids],
                "block_size": self.block,
                "mask_token_id": self.mask,
                "sample_from_anchor": self.from_anchor,
                "sliding_window_non_causal": self.is_causal is False,
                **spark,
            }

        ids: dict[str, Any] = {"mask_token_id": self.mask, "target_layer_ids": list(self.ids)}
        if dialect == "transformers":
            del sizes["vocab_size"]
            sizes.pop("use_sliding_window", None)
            return (
                sizes
                | ids
                | {
                    "model_type": "muse_glimmer_assistant",
                    "block_size": self.block,
                }
            )

        if self.is_causal is not None:
            sizes["is_causal"] = self.is_causal
        values = {"architectures": ["DFlashDraftModel"], "block_size": self.block, **sizes}
        if self.draft_vocab < self.vocab:
            values["draft_vocab_size"] = self.draft_vocab
        if self.rank:
            values |= {"architectures": ["Qwen3DSparkModel"], **ids, **spark}
            return values if self.from_anchor else values | {"sample_from_anchor": False}

        if self.causal:
            ids["causal"] = True
        if self.from_anchor:
            ids["sample_from_anchor"] = True
        return values | {"dflash_config": ids}

    def write(self, directory: Path, dialect: str = "vllm") -> Path:
        return write_checkpoint(directory, self.config(dialect), self.tensors())


class Block(NamedTuple):
    """A block: hidden states ``[K D]`` of rows that predict, and base logits ``[K W]``."""

    hidden: np.ndarray
    logits: np.ndarray


@functools.cache
def weights(head: BlockHead) -> dict[str, np.ndarray]:
    return {
        name.removesuffix(".weight"): value.astype(np.float64)
        for name, value in head.tensors().items()
    }


def run_block(
    head: BlockHead,
    embedding: np.ndarray,
    output: np.ndarray,
    features: np.ndarray,
    root: int,
    count: int,
    dialect: str = "vllm",
) -> Block:
    """Runs ``count`` predictions after ``features [n A Dt]`` of tokens before the root."""
    w = weights(head)
    eps = 1e-5
    known = len(features)
    rows = count + (not head.from_anchor)

    def rms(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[name]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[name].T + w.get(f"{name}.bias", 0.0)

    def turned(x: np.ndarray, first: int) -> np.ndarray:
        half = head.head_dim // 2
        angle = (first + np.arange(len(x)))[:, None] * head.theta ** (-np.arange(half) / half)
        cos = np.cos(angle)[:, None]
        sin = np.sin(angle)[:, None]
        a = x[..., :half]
        b = x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def heads(x: np.ndarray, name: str) -> np.ndarray:
        return linear(x, name).reshape(len(x), -1, head.head_dim)

    context = rms(features.reshape(known, -1).astype(np.float64) @ w["fc"].T, "hidden_norm")
    x = embedding.astype(np.float64)[[root, *[head.mask] * (rows - 1)]]
    behind = known + np.arange(rows)[:, None] - np.arange(known + rows)
    for layer in range(head.layers):
        name = f"layers.{layer}"
        a = rms(x, f"{name}.input_layernorm")
        attn = f"{name}.self_attn"
        q = turned(rms(heads(a, f"{attn}.q_proj"), f"{attn}.q_norm"), known)
        keys = [
            turned(rms(heads(y, f"{attn}.k_proj"), f"{attn}.k_norm"), at)
            for y, at in ((context, 0), (a, known))
        ]
        k = np.concatenate(keys).repeat(head.heads // head.kv_heads, 1)
        v = np.concatenate([heads(y, f"{attn}.v_proj") for y in (context, a)]).repeat(
            head.heads // head.kv_heads, 1
        )
        score = np.einsum("qhd,khd->hqk", q, k) / head.head_dim**0.5
        score[:, *np.nonzero(~head.sees(layer, behind, dialect))] = -np.inf
        x = x + linear(
            np.einsum("hqk,khd->qhd", softmax(score, -1), v).reshape(rows, -1), f"{attn}.o_proj"
        )
        y = rms(x, f"{name}.post_attention_layernorm")
        gate = linear(y, f"{name}.mlp.gate_proj")
        x = x + linear(
            gate * expit(gate) * linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj"
        )
    hidden = rms(x, "norm")[-count:]
    return Block(hidden, hidden @ (w["lm_head"] if "lm_head" in w else output.astype(np.float64)).T)


def biased(
    head: BlockHead, block: Block, root: int, tokens: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Logits ``[K W]`` and confidences ``[K]`` of a chain of target ids, each after its prefix."""
    w = weights(head)
    before = [root, *tokens][: len(block.logits)]
    logits = []
    confidence = []
    state = np.zeros(head.rank)

    for h, base, token in zip(block.hidden, block.logits, before, strict=True):
        read = m = w["markov_head.markov_w1"][token] if head.rank else np.zeros(0)
        if head.confidence:
            seen = np.concatenate([h, m]) if head.confidence == "markov" else h
            confidence.append(
                float(w["confidence_head.proj"][0] @ seen + w["confidence_head.proj.bias"][0])
            )

        if head.markov == "gated":
            gate = (
                w["markov_head.gate_proj"] @ np.concatenate([h, m])
                + w["markov_head.gate_proj.bias"]
            )
            read = expit(gate) * m
        elif head.markov == "rnn":
            joint = (
                w["markov_head.joint_proj"] @ np.concatenate([state, m, h])
                + w["markov_head.joint_proj.bias"]
            )
            gate, candidate, out = np.split(joint, 3)
            state = expit(gate) * state + (1 - expit(gate)) * np.tanh(candidate)
            read = np.tanh(out)

        logits.append(base + (w["markov_head.markov_w2"] @ read if head.rank else 0.0))

    return np.array(logits), expit(np.array(confidence))


def chosen_ids(head: BlockHead) -> np.ndarray:
    """Returns the target id of each draft id."""
    return head.tensors().get("d2t", np.zeros(head.draft_vocab, np.int64)) + np.arange(
        head.draft_vocab
    )


def greedy_chain(head: BlockHead, block: Block, root: int) -> list[int]:
    tokens = [0] * len(block.logits)
    for step in range(len(tokens)):
        tokens[step] = int(chosen_ids(head)[biased(head, block, root, tokens)[0][step].argmax()])
    return tokens
