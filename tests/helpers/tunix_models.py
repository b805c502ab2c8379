"""Tiny models of Tunix's own classes, with weights that make the next token depend on the text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl.rollout.base_rollout import CacheConfig

from eagle3_jax.tunix.policies import flat

VOCABULARY = 32
PAD = 0
BEGIN = 1
END = 2
SIZES = {"embed_dim": 16, "hidden_dim": 24, "num_heads": 4, "head_dim": 8}
DENSE = {"num_layers": 2, "vocab_size": VOCABULARY, "norm_eps": 1e-5, **SIZES}


def _llama3() -> nnx.Module:
    config = llama3.ModelConfig(num_kv_heads=2, rope_theta=500_000, weight_tying=False, **DENSE)
    return llama3.Llama3(config, rngs=nnx.Rngs(0))


def _qwen2() -> nnx.Module:
    config = qwen2.ModelConfig(num_kv_heads=2, rope_theta=10_000, use_tied_embedding=True, **DENSE)
    return qwen2.Qwen2(config, rngs=nnx.Rngs(0))


def _qwen3(**options: Any) -> nnx.Module:
    sizes = {"num_kv_heads": 2, "rope_theta": 1_000_000, **DENSE, **options}
    return qwen3.Qwen3(qwen3.ModelConfig(**sizes), rngs=nnx.Rngs(0))


def _gemma3(num_kv_heads: int = 2) -> nnx.Module:
    config = gemma3.ModelConfig(
        num_layers=6,
        num_embed=VOCABULARY,
        num_kv_heads=num_kv_heads,
        sliding_window_size=5,
        global_base_frequency=1_000_000,
        global_scale_factor=8.0,
        param_dtype=jnp.float32,
        **SIZES,
    )
    return gemma3.Gemma3(config, rngs=nnx.Rngs(0))


MODELS = {
    "Llama 3": _llama3,
    "Qwen 2": _qwen2,
    "Qwen 3": _qwen3,
    "Gemma 3": _gemma3,
    "Gemma 3, a key head each": lambda: _gemma3(4),
    "Gemma 3, one key head": lambda: _gemma3(1),
}


def policy(name: str, seed: int = 0, scale: float = 0.25) -> Any:
    """Returns a model that never writes the pad token, after which Tunix masks what it wrote."""
    model = MODELS[name]()
    nnx.update(model, random_state(model, seed, scale))
    return model


def random_state(model: nnx.Module, seed: int, scale: float = 0.25) -> nnx.State:
    """Returns random parameters for a model."""
    state = nnx.state(model, nnx.Param)
    key = jax.random.key(seed)
    arrays = flat(nnx.to_pure_dict(state))
    arrays_of_noise = {}
    for index, (name, array) in enumerate(arrays.items()):
        noise = jax.random.normal(jax.random.fold_in(key, index), array.shape, array.dtype)
        is_factor = array.ndim == 1 and name.endswith(".w")
        arrays_of_noise[name] = scale * noise + is_factor
    # The pad token has logits of 0, which are never the largest.
    if "lm_head.w" in arrays_of_noise:
        arrays_of_noise["lm_head.w"] = arrays_of_noise["lm_head.w"].at[:, PAD].set(0.0)
    else:
        name = "embedder.input_embedding"
        arrays_of_noise[name] = arrays_of_noise[name].at[PAD].set(0.0)
    return jax.tree.unflatten(jax.tree.structure(state), list(arrays_of_noise.values()))


def cache_config(model: Any, size: int) -> CacheConfig:
    """Returns the sizes of the cache of Tunix's vanilla engine."""
    config = model.config
    return CacheConfig(size, config.num_layers, config.num_kv_heads, config.head_dim)


class Letters:
    """A tokenizer of one token a letter."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) % (VOCABULARY - 3) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return BEGIN

    def eos_id(self) -> int | None:
        return END

    def pad_id(self) -> int:
        return PAD
