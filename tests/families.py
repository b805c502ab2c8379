"""A tiny random model of transformers for every family of targets: the smallest that has all of its features."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

VOCAB, PROMPTS = 96, ((7, 3, 90, 14, 33, 8, 61, 25, 40, 11, 5), (50, 12, 81))
NEW_TOKENS = 60
BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip


class Recipe(NamedTuple):
    """The model type, what differs from the base, and a seed whose greedy text has no near tie."""

    model_type: str
    fields: dict[str, Any]
    seed: int


RECIPES = {
    "llama": Recipe("llama", {"attention_bias": True, "mlp_bias": True}, 0),
    "qwen2": Recipe("qwen2", {"tie_word_embeddings": True}, 3),
    "qwen2, windows": Recipe("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}, 1),
    "qwen3": Recipe("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}, 2),
    "qwen3, yarn, windows": Recipe(
        "qwen3",
        {
            "head_dim": 16,
            "rope_parameters": _YARN,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
        1,
    ),
    "mistral": Recipe("mistral", {"head_dim": 12, "sliding_window": 5}, 0),
    "ministral": Recipe(
        "ministral",
        {"head_dim": 12, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2},
        1,
    ),
    "ministral3": Recipe(
        "ministral3",
        {
            "head_dim": 12,
            "rope_parameters": _YARN
            | {
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
                "original_max_position_embeddings": 6,
            },
        },
        0,
    ),
}


class Truth(NamedTuple):
    """What transformers computes.

    Attributes:
        tokens: ``[T]``, a text of all prompts' words.
        logits: ``[T V]``.
        entering: ``[L+2 T D]``, the residual stream entering every layer, leaving the last, and after the final norm.
        continuations: The greedy tokens after each prompt, each by a forward over all that stands before it.
        margin: The smallest distance between the two largest logits of those.
    """

    tokens: np.ndarray
    logits: np.ndarray
    entering: np.ndarray
    continuations: list[list[int]]
    margin: float


def build(recipe: Recipe) -> Any:
    """The model; its norms are not one and its biases not zero."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(recipe.model_type, **BASE | recipe.fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(recipe.seed)
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if "norm" in name:
            noise = 1 + 0.2 * noise
        elif name.endswith("bias"):
            noise = 0.3 * noise
        elif "embed_tokens" in name:  # small where tied, lest the model only repeat its last token
            noise = (0.15 if model.config.tie_word_embeddings else 0.7) * noise
        else:
            noise = noise * (1.3 + 1.3 * ("lm_head" in name)) / math.sqrt(value.shape[-1])
        with torch.no_grad():
            value.copy_(noise)
    return model


@functools.cache
def truth(name: str) -> Truth:
    """Of one recipe."""
    import torch

    model = build(RECIPES[name])
    tokens = torch.tensor([[token for prompt in PROMPTS for token in prompt]])
    before_norm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True, use_cache=False)
        hook.remove()
        continuations, margin = [], math.inf
        for prompt in PROMPTS:
            text = torch.tensor([prompt])
            for _ in range(NEW_TOKENS):
                logits = model(text, use_cache=False).logits[0, -1]
                best, second = logits.topk(2).values
                margin = min(margin, float(best - second))
                text = torch.cat([text, logits.argmax()[None, None]], dim=1)
            continuations.append(text[0, len(prompt) :].tolist())
    # transformers gives the normed state in place of what leaves the last layer.
    entering = torch.cat([*out.hidden_states[:-1], before_norm[0], out.hidden_states[-1]])
    return Truth(tokens[0].numpy(), out.logits[0].numpy(), entering.numpy(), continuations, margin)
