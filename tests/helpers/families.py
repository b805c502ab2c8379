"""A random model of transformers for every family, the smallest with all of its features."""

from __future__ import annotations

import datetime
import functools
import math
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from checkpoints import LLAMA3

from validation.peaked import BASE, Recipe, build
from validation.peaked import VOCAB as VOCAB
from validation.peaked import eager as eager

# A night takes every third family that is not run at each commit, and three nights in a row take
# all. `FAMILIES=all` takes all at once, as before a release.
NIGHTS = 3


def parametrize(metafunc: pytest.Metafunc, names: Iterable[str], few: Collection[str]) -> None:
    """Parametrizes a test by ``name``: families in ``few``, and by night those of the day."""
    others = [name for name in names if name not in few]
    if os.environ.get("FAMILIES") != "all":
        others = others[datetime.date.today().toordinal() % NIGHTS :: NIGHTS]
    marks = {name: () for name in names if name in few} | dict.fromkeys(others, pytest.mark.slow)
    metafunc.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


PROMPTS = ((7, 3, 90, 14, 33, 8, 61, 25, 40, 11, 5), (50, 12, 81))
NEW_TOKENS = 60
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
_ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "num_key_value_heads": 4,
}  # fmt: skip
# An index of more keys than a text has tokens: what it chooses is everything.
_INDEX = {"index_topk": 128, "index_head_dim": 16, "index_n_heads": 8}
_DELTA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
_GEMMA4 = {
    "head_dim": 12, "global_head_dim": 20, "sliding_window": 5, "final_logit_softcapping": 6.0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "rope_theta": 1000.0},
    },
}  # fmt: skip
_LLAMA4 = {
    "head_dim": 12, "intermediate_size": 20, "intermediate_size_mlp": 40, "num_local_experts": 4,
    "num_experts_per_tok": 1, "attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5,
}  # fmt: skip


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def _mrope(theta: float) -> dict[str, Any]:
    return _rope(theta, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)


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
    "qwen3_moe": Recipe(
        "qwen3_moe",
        {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1], "decoder_sparse_step": 1}
        | _rope(1e6),
        48,
    ),
    "gpt_oss": Recipe(
        "gpt_oss",
        {
            "head_dim": 12, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 20,
            "sliding_window": 4, "swiglu_limit": 1.5, "rope_parameters": _YARN | {"truncate": False},
        },
        1,
    ),
    "glm4_moe": Recipe(
        "glm4_moe",
        {**_ROUTED, "head_dim": 12, "attention_bias": True, "use_qk_norm": True}
        | _rope(1e6, partial_rotary_factor=0.5),
        3,
    ),
    "llama4, norms": Recipe(
        "llama4_text",
        {
            **_LLAMA4, "interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layers": [1, 1, 0, 1],
            "attention_chunk_size": 5,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 1.0, "original_max_position_embeddings": 64,
            },
        },
        1,
    ),
    "llama4, every second": Recipe(
        "llama4_text",
        {
            **_LLAMA4, "interleave_moe_layer_step": 2, "use_qk_norm": False, "no_rope_layers": [1, 1, 1, 0],
            "attention_chunk_size": 6,
        }
        | _rope(5e5),
        3,
    ),
    "deepseek_v3": Recipe(
        "deepseek_v3",
        {
            **_ROUTED, **_LATENT, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        1,
    ),
    "deepseek_v3, halves": Recipe(
        "deepseek_v3",
        {
            **_ROUTED, **_LATENT, "q_lora_rank": None, "n_group": 2, "topk_group": 1, "norm_topk_prob": False,
            "rope_interleave": False, "num_nextn_predict_layers": 0,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        },
        1,
    ),
    "deepseek_v32": Recipe(
        "deepseek_v32",
        {
            **_ROUTED, **_LATENT, **_INDEX, "n_group": 4, "topk_group": 2,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        1,
    ),
    "glm4_moe_lite": Recipe(
        "glm4_moe_lite",
        {key: value for key, value in _ROUTED.items() if key != "first_k_dense_replace"}
        | {**_LATENT, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "mlp_layer_types": ["dense", *["sparse"] * 3]}
        | _rope(1e6),
        0,
    ),
    "glm_moe_dsa": Recipe(
        "glm_moe_dsa",
        {**_ROUTED, **_LATENT, **_INDEX, "indexer_types": ["full", "full", "shared", "full"]} | _rope(1e6),
        1,
    ),
    "qwen3_next": Recipe(
        "qwen3_next",
        {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1]}
        | _rope(1e7, partial_rotary_factor=0.25),
        28,
    ),
    "qwen3_5_text": Recipe("qwen3_5_text", _DELTA | _mrope(1e7), 1),
    "qwen3_5_moe_text": Recipe(
        "qwen3_5_moe_text",
        {**_EXPERTS, **_DELTA, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 24} | _mrope(1e7),
        3,
    ),
    "mellum": Recipe(
        "mellum",
        {
            **_EXPERTS, "head_dim": 12, "attention_bias": True, "norm_topk_prob": False, "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "dense", "sparse"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": _YARN,
            },
        },
        58,
    ),
    "gemma2": Recipe(
        "gemma2",
        {
            "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
        },
        1,
    ),
    "gemma3": Recipe(
        "gemma3_text",
        {
            "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            },
        },
        20,
    ),
    "gemma4": Recipe(
        "gemma4_text",
        {
            **_GEMMA4, "layer_types": ["sliding_attention", "full_attention"] * 2, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        },
        0,
    ),
    "gemma4, E": Recipe(
        "gemma4_text",
        {
            **_GEMMA4, "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
            "num_hidden_layers": 5, "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "attention_bias": True,
            "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCAB,
        },
        0,
    ),
    "olmo2": Recipe("olmo2", {"attention_bias": True}, 0),
    "granite": Recipe(
        "granite",
        {
            "attention_bias": True, "mlp_bias": True, "embedding_multiplier": 0.6, "attention_multiplier": 0.2,
            "residual_multiplier": 0.6, "logits_scaling": 1.6,
        },
        9,
    ),
    "phi3": Recipe("phi3", {"sliding_window": 5} | _rope(1e4, partial_rotary_factor=0.5), 0),
    "phi3, longrope": Recipe(
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.5, 2.5], "long_factor": [2.0, 4.0, 8.0],
            },
        },
        0,
    ),
    "cohere": Recipe(
        "cohere",
        {
            "use_qk_norm": True, "attention_bias": True, "logit_scale": 0.7, "layer_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        4,
    ),
    "cohere2": Recipe(
        "cohere2",
        {
            "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2, "logit_scale": 1.5,
            "layer_norm_eps": 1e-5,
        },
        1,
    ),
}  # fmt: skip


# What published Llamas differ in: heads, ties and rotations.
_SMALL_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMAS = {
    "llama, one key head": Recipe("llama", {"num_key_value_heads": 1, "head_dim": 16}, 0),
    "llama, heads of 80, tied": Recipe("llama", {"head_dim": 80, "tie_word_embeddings": True}, 0),
    "llama, llama3": Recipe("llama", {"head_dim": 16, "rope_parameters": LLAMA3}, 0),
    "llama, linear": Recipe(
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, 0
    ),
    "llama, yarn": Recipe("llama", {"head_dim": 16, "rope_parameters": _SMALL_YARN}, 0),
    "llama, yarn, every field": Recipe(
        "llama",
        {
            "head_dim": 32,
            "rope_parameters": _SMALL_YARN
            | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 2.0, "beta_slow": 0.5, "truncate": False},
        },
        0,
    ),
}  # fmt: skip


MUSE_GLIMMER = Recipe(
    "muse_glimmer_text",
    {
        "head_dim": 12, "sliding_window": 5, "qk_scale_factor": 1.7, "output_multiplier": 0.6,
        "final_logit_softcapping": 6.0, "post_norm_eps": 1e-3, "rms_norm_eps": 1e-5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "layer_rope_theta": [1e4, 1e4, 0, 0],
    }
    | _rope(1e4),
    0,
)  # fmt: skip
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "image_size": 28, "patch_size": 14, "head_dim": 8,
}  # fmt: skip


def _text(name: str, **more: Any) -> dict[str, Any]:
    """Returns the language model of a recipe as a wrapper's ``text_config``."""
    recipe = RECIPES[name]
    return {"model_type": recipe.model_type, **BASE, **recipe.fields, **more}


# Models of images and text, which are read as their language model.
WRAPPED = {
    "mistral3": Recipe(
        "mistral3",
        {"text_config": _text("ministral3"), "vision_config": _PIXTRAL, "tie_word_embeddings": False},
        2,
    ),
    # Its top level says that the embedding is tied, and its text_config says no.
    "mistral3, of mistral": Recipe(
        "mistral3",
        {
            "text_config": _text("mistral", sliding_window=None, tie_word_embeddings=False),
            "vision_config": _PIXTRAL, "tie_word_embeddings": True,
        },
        20,
    ),
    "kimi_k25": Recipe(
        "kimi_k25",
        {
            "text_config": _text("deepseek_v3", n_group=1, topk_group=1),
            "vision_config": {
                "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                "pos_emb_height": 4, "pos_emb_width": 4,
            },
            "projection_hidden_size": 16, "tie_word_embeddings": False,
        },
        10,
    ),
    "qwen3_vl": Recipe(
        "qwen3_vl",
        {
            "text_config": BASE | {"head_dim": 16} | _rope(1e6, mrope_section=[4, 2, 2], mrope_interleaved=True),
            "vision_config": {
                "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32,
                "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 4,
            },
            "tie_word_embeddings": True,
        },
        2,
    ),
    "gemma3, images": Recipe(
        "gemma3",
        {
            "text_config": _text("gemma3"),
            "vision_config": {
                "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                "image_size": 28, "patch_size": 14,
            },
            "mm_tokens_per_image": 4, "tie_word_embeddings": False,
        },
        0,
    ),
    # transformers has no class for its language model alone.
    "muse_glimmer": Recipe(
        "muse_glimmer",
        {
            "text_config": {"model_type": "muse_glimmer_text", **BASE, **MUSE_GLIMMER.fields},
            "vision_config": {
                "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "patch_temporal": 1,
                "max_position_embeddings": 16,
            },
            "image_token_id": 14, "video_token_id": 95, "out_hidden_size": 64, "projector_hidden_size": 16,
        },
        6,
    ),
    "gemma4, images": Recipe(
        "gemma4",
        {
            "text_config": _text("gemma4, E"),
            "vision_config": {
                "model_type": "gemma4_vision", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                "num_key_value_heads": 2, "intermediate_size": 32, "head_dim": 8, "position_embedding_size": 16,
            },
            "audio_config": None, "tie_word_embeddings": True,
        },
        0,
    ),
}  # fmt: skip


class Truth(NamedTuple):
    """The results of transformers."""

    tokens: np.ndarray  #: ``[T]``, a text of all prompts' words.
    logits: np.ndarray  #: ``[T V]``.
    #: ``[L+2 T D]``, the residual stream entering every layer, leaving the last, and after the
    #: final norm.
    entering: np.ndarray


@functools.cache
def _model(name: str) -> Any:
    return build((RECIPES | LLAMAS | WRAPPED)[name])


@functools.cache
def truth(name: str) -> Truth:
    """Computes the results of transformers for one recipe."""
    import torch

    model = _model(name)
    tokens = torch.tensor([[token for prompt in PROMPTS for token in prompt]])
    before_norm: list[torch.Tensor] = []
    decoder = getattr(model.model, "language_model", model.model)
    hook = decoder.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True, use_cache=False)
    hook.remove()
    # transformers gives the normed state in place of what leaves the last layer.
    entering = torch.cat([*out.hidden_states[:-1], before_norm[0], out.hidden_states[-1]])
    return Truth(tokens[0].numpy(), out.logits[0].numpy(), entering.numpy())


class Choices(NamedTuple):
    """The tokens that transformers would write after each prefix of a text."""

    #: The most probable token after the prompt, and after every token of the text but its last.
    tokens: list[int]
    margin: float  #: The smallest distance between the two largest logits of those.
    #: The smallest distance, in any layer, between the last expert chosen and the first that is
    #: not.
    routed: float


def choices(model: Any, prompt: Sequence[int], text: Sequence[int]) -> Choices:
    """Computes the most likely token after each prefix of a text: a greedy text has just these."""
    import torch

    gaps = [math.inf]
    topk = torch.topk

    def watched(scores: Any, k: int, *args: Any, **kwargs: Any) -> Any:
        if k < scores.shape[-1] and scores.is_floating_point():
            ordered = scores.sort(dim=-1, descending=True).values
            gaps.append(float((ordered[..., k - 1] - ordered[..., k]).nan_to_num(math.inf).min()))
        return topk(scores, k, *args, **kwargs)

    with torch.no_grad(), mock.patch.object(torch, "topk", watched):
        logits = model(torch.tensor([[*prompt, *text]]), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
    best, second = logits.topk(2).values.unbind(-1)
    return Choices(logits.argmax(-1).tolist(), float((best - second).min()), min(gaps))


def check_greedy(name: str, texts: Sequence[Sequence[int]]) -> None:
    """Checks that transformers writes these texts after :data:`PROMPTS`, by a clear margin."""
    for prompt, text in zip(PROMPTS, texts, strict=True):
        chosen = choices(_model(name), prompt, text)
        assert list(text) == chosen.tokens
        assert chosen.margin > 4e-3
        assert chosen.routed > 1e-4
