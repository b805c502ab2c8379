"""Configurations of well-known targets, as their published ``config.json`` describes them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from eagle3_jax.models.config import (
    DecoderConfig,
    Experts,
    GatedDelta,
    GatedMLP,
    GroupedQuery,
    Latent,
    LayerConfig,
    QueryScaling,
    RopeConfig,
    uniform,
)


def known_name(name: str, names: Iterable[str]) -> str | None:
    """Returns the spelling of a name among the known names, in any case; ``None`` if it is not known."""
    return next((known for known in names if known.lower() == name.lower()), None)


def _uniform(
    width: int, mlp: int | Experts, num_layers: int, heads: tuple[int, int], head_dim: int = 128, **fields: Any
) -> DecoderConfig:
    """Equal layers of grouped queries.

    Args:
        width: Width of the residual stream.
        mlp: Inner width of a gated MLP, or experts.
        num_layers: Number of layers.
        heads: Numbers of query heads and of key heads.
        head_dim: Size of a head.
        fields: Further fields of :class:`GroupedQuery` and of :class:`DecoderConfig`.
    """
    mixer_fields = {name: fields.pop(name) for name in ("rope", "window", "qkv_bias", "qk_norm") if name in fields}
    num_heads, num_kv_heads = heads
    mixer = GroupedQuery(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **mixer_fields)
    layers = uniform(num_layers, mixer, mlp if isinstance(mlp, Experts) else GatedMLP(width=mlp))
    return DecoderConfig(width=width, layers=layers, **fields)


def _llama(*sizes: Any, rope_factor: float = 8.0, **fields: Any) -> DecoderConfig:
    """Llama 3.1 and its successors; the sizes are those of :func:`_uniform`."""
    rope = RopeConfig(type="llama3", theta=500_000.0, factor=rope_factor, original_max_positions=8192)
    return _uniform(*sizes, rope=rope, vocab_size=128_256, max_positions=131_072, norm_eps=1e-5, **fields)


def _qwen3(*sizes: Any, tied: bool = False) -> DecoderConfig:
    """Qwen3; the sizes are those of :func:`_uniform`."""
    rope = RopeConfig(theta=1_000_000.0)
    more = {"max_positions": 40_960, "tie_embeddings": tied}
    return _uniform(*sizes, rope=rope, qk_norm=True, vocab_size=151_936, norm_eps=1e-6, **more)


def _mistral_7b(vocab_size: int, theta: float, window: int | None) -> DecoderConfig:
    rope = RopeConfig(theta=theta)
    more = {"max_positions": 32_768, "norm_eps": 1e-5}
    return _uniform(4096, 14_336, 32, (32, 8), rope=rope, window=window, vocab_size=vocab_size, **more)


def _decoder(
    vocab_size: int, width: int, layers: Sequence[LayerConfig], max_positions: int, norm_eps: float, **more: Any
) -> DecoderConfig:
    more |= {"max_positions": max_positions, "norm_eps": norm_eps}
    return DecoderConfig(vocab_size=vocab_size, width=width, layers=tuple(layers), **more)


def _gpt_oss(num_layers: int, num_experts: int) -> DecoderConfig:
    mlp = Experts(num_experts=num_experts, per_token=4, width=2880, router="softmax-of-chosen", bias=True, limit=7.0)
    everywhere = GroupedQuery(
        num_heads=64, num_kv_heads=8, head_dim=64, qkv_bias=True, o_bias=True, sinks=True,
        rope=RopeConfig(type="yarn", theta=150_000.0, factor=32.0, original_max_positions=4096, truncate=False),
    )  # fmt: skip
    local = dataclasses.replace(everywhere, window=128)
    two = [LayerConfig(mixer=mixer, mlp=mlp) for mixer in (local, everywhere)]
    return _decoder(201_088, 2880, two * (num_layers // 2), 131_072, 1e-5, norm_kind="float32")


def _deepseek_v3() -> DecoderConfig:
    # Scores are divided by the root of their channels and multiplied with (0.1·ln 40 + 1)².
    mixer = Latent(
        num_heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128,
        scale=192**-0.5 * (1 + 0.1 * math.log(40)) ** 2,
        rope=RopeConfig(
            type="yarn", theta=10_000.0, factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0,
            interleaved=True,
        ),
    )  # fmt: skip
    experts = Experts(
        num_experts=256, per_token=8, width=2048, router="sigmoid", scaling=2.5, groups=8, kept_groups=4,
        shared_width=2048,
    )  # fmt: skip
    layers = uniform(3, mixer, GatedMLP(width=18_432)) + uniform(58, mixer, experts)
    return _decoder(129_280, 7168, layers, 163_840, 1e-6)


def _glm_4_5() -> DecoderConfig:
    rope = RopeConfig(theta=1_000_000.0, partial=0.5)
    mixer = GroupedQuery(num_heads=96, num_kv_heads=8, head_dim=128, rope=rope, qkv_bias=True, qk_norm=True)
    experts = Experts(num_experts=160, per_token=8, width=1536, router="sigmoid", scaling=2.5, shared_width=1536)
    layers = uniform(3, mixer, GatedMLP(width=12_288)) + uniform(89, mixer, experts)
    return _decoder(151_552, 5120, layers, 131_072, 1e-5)


def _llama4_maverick() -> DecoderConfig:
    rope = RopeConfig(theta=500_000.0, interleaved=True)
    scaling = QueryScaling(floor=8192, beta=0.1, offset=1)
    local = GroupedQuery(num_heads=40, num_kv_heads=8, head_dim=128, rope=rope, chunk=8192)
    everywhere = GroupedQuery(num_heads=40, num_kv_heads=8, head_dim=128, rope=None, query_scaling=scaling)
    dense = GatedMLP(width=16_384)
    experts = Experts(num_experts=128, per_token=1, width=8192, router="sigmoid-of-input", shared_width=8192)
    four = ((local, dense), (local, experts), (local, dense), (everywhere, experts))
    layers = [LayerConfig(mixer=mixer, mlp=mlp) for mixer, mlp in four] * 12
    return _decoder(202_048, 5120, layers, 1_048_576, 1e-5)


def _qwen3_next() -> DecoderConfig:
    rope = RopeConfig(theta=10_000_000.0, partial=0.25)
    attention = GroupedQuery(num_heads=16, num_kv_heads=2, head_dim=256, rope=rope, qk_norm=True, output_gate=True)
    recurrence = GatedDelta(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)
    experts = Experts(num_experts=512, per_token=10, width=512, router="softmax", shared_width=512, shared_gate=True)
    layers = (uniform(3, recurrence, experts) + uniform(1, attention, experts)) * 12
    return _decoder(151_936, 2048, layers, 262_144, 1e-6, norm_kind="zero-centred")


#: Configurations by name. The counts that follow from these are checked against the published checkpoints.
KNOWN_MODELS: dict[str, DecoderConfig] = {
    "Llama-3.2-1B": _llama(2048, 8192, 16, (32, 8), 64, tie_embeddings=True, rope_factor=32.0),
    "Llama-3.2-3B": _llama(3072, 8192, 28, (24, 8), tie_embeddings=True, rope_factor=32.0),
    "Llama-3.1-8B": _llama(4096, 14_336, 32, (32, 8)),
    "Llama-3.3-70B": _llama(8192, 28_672, 80, (64, 8)),
    "Llama-3.1-405B": _llama(16_384, 53_248, 126, (128, 8)),
    "Vicuna-13B": _uniform(5120, 13_824, 40, (40, 40), vocab_size=32_000, max_positions=4096, norm_eps=1e-5),  # 1.5
    "Mistral-7B-v0.1": _mistral_7b(32_000, 10_000.0, window=4096),
    "Mistral-7B-v0.3": _mistral_7b(32_768, 1_000_000.0, window=None),
    "Qwen2.5-7B-Instruct": _uniform(
        3584, 18_944, 28, (28, 4), rope=RopeConfig(theta=1_000_000.0), qkv_bias=True, vocab_size=152_064,
        max_positions=32_768, norm_eps=1e-6,
    ),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, (16, 8), tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, (16, 8), tied=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, (32, 8), tied=True),
    "Qwen3-8B": _qwen3(4096, 12_288, 36, (32, 8)),
    "Qwen3-14B": _qwen3(5120, 17_408, 40, (40, 8)),
    "Qwen3-32B": _qwen3(5120, 25_600, 64, (64, 8)),
    "Qwen3-30B-A3B": _qwen3(2048, Experts(num_experts=128, per_token=8, width=768, router="softmax"), 48, (32, 4)),
    "Qwen3-235B-A22B": _qwen3(4096, Experts(num_experts=128, per_token=8, width=1536, router="softmax"), 94, (64, 4)),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "DeepSeek-V3": _deepseek_v3(),
    "GLM-4.5": _glm_4_5(),
    "Llama-4-Maverick": _llama4_maverick(),
    "Qwen3-Next-80B-A3B": _qwen3_next(),
}  # fmt: skip
