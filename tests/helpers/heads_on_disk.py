"""A tiny checkpoint of every method, for the target of ``checkpoints``, written with numpy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from block_heads import BlockHead
from checkpoints import TARGET, Head, edit_config, edit_tensors, write_checkpoint, write_llama
from convolved_heads import ConvolvedHead
from torch_heads import MTP, Eagle1

from eagle3_jax.models.config import uniform


def write_p_eagle(directory: Path) -> Path:
    """Writes a P-EAGLE head in vLLM's layout, with the mask token 57."""
    Head(own_embedding=True).write(directory, "sglang")
    state = np.random.default_rng(2).normal(size=(1, 1, 96)).astype(np.float32)
    edit_tensors(directory, mask_hidden=state)
    edit_config(directory, ptd_token_id=57)
    return directory


def write_medusa(directory: Path, heads: int = 3) -> Path:
    """Writes Medusa heads in vLLM's layout."""
    draw = lambda *shape: np.random.default_rng(3).normal(0, 0.3, shape).astype(np.float32)
    tensors = {f"blocks.{head}.layers.0.weight": draw(32, 32) for head in range(heads)}
    tensors |= {f"lm_heads.{head}.weight": draw(61, 32) for head in range(heads)}
    sizes = {"hidden_size": 32, "vocab_size": 61, "truncated_vocab_size": 61, "num_heads": heads}
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        **sizes,
        "num_hidden_layers": 1,
    }
    return write_checkpoint(directory, config, tensors)


def write_gemma4_assistant(directory: Path) -> Path:
    """Writes an assistant of one layer, in transformers' layout, that reads the last target layer."""
    draw = lambda *shape: np.random.default_rng(4).normal(0, 0.3, shape).astype(np.float32)
    shapes = {
        "pre_projection": (16, 64), "post_projection": (32, 16), "model.embed_tokens": (61, 16), "model.norm": (16,),
    }  # fmt: skip
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    inner = {f"{name}_layernorm": (16,) for name in norms}
    inner |= {"self_attn.q_proj": (32, 16), "self_attn.q_norm": (8,), "self_attn.o_proj": (16, 32)}
    inner |= {"mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in inner.items()}
    tensors = {f"{name}.weight": draw(*shape) for name, shape in shapes.items()}
    tensors["model.layers.0.layer_scalar"] = np.ones(1, np.float32)
    layers = {
        "model_type": "gemma4_text", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "global_head_dim": 8, "layer_types": ["full_attention"], "sliding_window": 8,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "max_position_embeddings": 64,
    }  # fmt: skip
    config = {"model_type": "gemma4_assistant", "backbone_hidden_size": 32, "text_config": layers}
    return write_checkpoint(directory, config, tensors)


def write_draft_model(directory: Path) -> Path:
    """Writes a draft model of two layers of the target's kind."""
    return write_llama(directory, dataclasses.replace(TARGET, layers=uniform(2, *_PARTS)), seed=5)


_PARTS = (TARGET.layers[0].mixer, TARGET.layers[0].mlp)

# They are called as they are where they are found.
EAGLE3 = "EAGLE-3 head (eagle layout)"
EAGLE31 = "EAGLE-3.1 head (vllm layout)"
P_EAGLE = "P-EAGLE head (sglang layout)"
EAGLE1 = "EAGLE-1/2 head (eagle layout)"
MTP_HEAD = "MTP head (deepseek layout)"
MEDUSA = "Medusa head (vllm layout)"
DFLASH = "DFlash head (vllm layout)"
ASSISTANT = "DFlash head (transformers layout)"
JETSPEC = "JetSpec head (vllm layout)"
DSPARK = "DSpark head (vllm layout)"
DFLASH2 = "DFlash2 head (vllm layout)"
GEMMA4 = "Gemma 4 assistant head (huggingface layout)"
DRAFT_MODEL = "draft model"
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    EAGLE3: Head().write,
    EAGLE31: lambda path: _as_vllm(Head(fc_norm=True, norm_output=True).write(path, "sglang")),
    P_EAGLE: write_p_eagle,
    EAGLE1: Eagle1().write,
    MTP_HEAD: MTP().write,
    MEDUSA: write_medusa,
    DFLASH: BlockHead().write,
    ASSISTANT: functools.partial(BlockHead(windows=(True, False)).write, dialect="transformers"),
    JETSPEC: BlockHead(causal=True).write,
    DSPARK: BlockHead(from_anchor=True, rank=4, confidence="markov").write,
    DFLASH2: ConvolvedHead().write,
    GEMMA4: write_gemma4_assistant,
    DRAFT_MODEL: write_draft_model,
}


def _as_vllm(directory: Path) -> Path:
    edit_config(directory, norm_before_residual=False, norm_before_fc=False)
    return directory
