"""Targets that go by a name, as their published ``config.json`` describes them."""

from __future__ import annotations

from collections.abc import Iterable

from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, RopeConfig, uniform
from eagle3_jax.theory.known_experts import KNOWN_EXPERTS


def known_name(name: str, names: Iterable[str]) -> str | None:
    """The one of these names that a name is, whatever its case; ``None`` when it is none of them."""
    return next((known for known in names if known.lower() == name.lower()), None)


def _llama(
    width: int,
    mlp_width: int,
    num_layers: int,
    num_heads: int,
    *,
    head_dim: int = 128,
    tied: bool = False,
    rope_factor: float = 8.0,
) -> DecoderConfig:
    """Llama 3.1 and its successors."""
    rope = RopeConfig(type="llama3", theta=500_000.0, factor=rope_factor, original_max_positions=8192)
    mixer = GroupedQuery(num_heads=num_heads, num_kv_heads=8, head_dim=head_dim, rope=rope)
    return DecoderConfig(
        vocab_size=128_256,
        width=width,
        layers=uniform(num_layers, mixer, GatedMLP(width=mlp_width)),
        max_positions=131_072,
        norm_eps=1e-5,
        tie_embeddings=tied,
    )


def _qwen3(width: int, mlp_width: int, num_layers: int, num_heads: int, *, tied: bool) -> DecoderConfig:
    rope = RopeConfig(theta=1_000_000.0)
    mixer = GroupedQuery(num_heads=num_heads, num_kv_heads=8, head_dim=128, rope=rope, qk_norm=True)
    return DecoderConfig(
        vocab_size=151_936,
        width=width,
        layers=uniform(num_layers, mixer, GatedMLP(width=mlp_width)),
        max_positions=40_960,
        norm_eps=1e-6,
        tie_embeddings=tied,
    )


def _mistral_7b(vocab_size: int, theta: float, window: int | None) -> DecoderConfig:
    mixer = GroupedQuery(num_heads=32, num_kv_heads=8, head_dim=128, rope=RopeConfig(theta=theta), window=window)
    return DecoderConfig(
        vocab_size=vocab_size,
        width=4096,
        layers=uniform(32, mixer, GatedMLP(width=14_336)),
        max_positions=32_768,
        norm_eps=1e-5,
    )


# The counts that follow from these are checked against the published checkpoints.
KNOWN_MODELS: dict[str, DecoderConfig] = {
    "Llama-3.2-1B": _llama(2048, 8192, 16, 32, head_dim=64, tied=True, rope_factor=32.0),
    "Llama-3.2-3B": _llama(3072, 8192, 28, 24, tied=True, rope_factor=32.0),
    "Llama-3.1-8B": _llama(4096, 14_336, 32, 32),
    "Llama-3.3-70B": _llama(8192, 28_672, 80, 64),
    "Llama-3.1-405B": _llama(16_384, 53_248, 126, 128),
    "Vicuna-13B": DecoderConfig(  # version 1.5
        vocab_size=32_000,
        width=5120,
        layers=uniform(40, GroupedQuery(num_heads=40, num_kv_heads=40, head_dim=128), GatedMLP(width=13_824)),
        max_positions=4096,
        norm_eps=1e-5,
    ),
    "Mistral-7B-v0.1": _mistral_7b(32_000, 10_000.0, window=4096),
    "Mistral-7B-v0.3": _mistral_7b(32_768, 1_000_000.0, window=None),
    "Qwen2.5-7B-Instruct": DecoderConfig(
        vocab_size=152_064,
        width=3584,
        layers=uniform(
            28,
            GroupedQuery(num_heads=28, num_kv_heads=4, head_dim=128, rope=RopeConfig(theta=1_000_000.0), qkv_bias=True),
            GatedMLP(width=18_944),
        ),
        max_positions=32_768,
        norm_eps=1e-6,
    ),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": _qwen3(4096, 12_288, 36, 32, tied=False),
    "Qwen3-14B": _qwen3(5120, 17_408, 40, 40, tied=False),
    "Qwen3-32B": _qwen3(5120, 25_600, 64, 64, tied=False),
    **KNOWN_EXPERTS,
}
