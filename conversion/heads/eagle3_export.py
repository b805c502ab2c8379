"""EAGLE-3 heads out again, in the layouts that other engines load.

A layout that cannot express a head refuses it and names the flag: an engine that silently ignores one would still run,
with an acceptance that nobody can explain.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3_jax.conversion import draft_vocab, rules
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.heads.eagle3 import head_rules
from eagle3_jax.conversion.heads.head import HeadCheckpoint, Layout
from eagle3_jax.conversion.hf_config import bias_fields, head_window_fields, stack_fields
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.models.config import Eagle3Config, default_aux_layers, grouped


def layout(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """The head as ``eagle`` (the official code), ``sglang`` (SGLang and SpecForge) or ``vllm`` has it.

    Raises:
        CheckpointError: The dialect cannot express the head.
    """
    refusals = {"eagle": _eagle_refusals, "sglang": _sglang_refusals, "vllm": vllm_refusals}[dialect](checkpoint)
    if refusals:
        instead = "--to jax" if dialect == "vllm" else "--to vllm or --to jax"
        raise CheckpointError(f"the {dialect!r} layout cannot express {'; '.join(refusals)}; use {instead}")
    values = {"eagle": _eagle_fields, "sglang": _sglang_fields, "vllm": vllm_fields}[dialect](checkpoint)
    tensors = canonical_tensors(checkpoint, Eagle3Drafter(checkpoint.config), head_rules(checkpoint.config))
    return Layout(values, as_midlayer(tensors))


def is_default_aux(checkpoint: HeadCheckpoint) -> bool:
    """Whether an engine that hears nothing of auxiliary layers would choose these.

    Without knowledge of the target its depth is inferred from the last layer, ``L - 3``.
    """
    layers = checkpoint.config.aux_layers
    depth = checkpoint.num_target_layers or layers[-1] + 3
    try:
        return layers == default_aux_layers(depth)
    except ValueError:
        return False


def canonical_tensors(checkpoint: HeadCheckpoint, drafter: Any, table: list[rules.Rule]) -> dict[str, np.ndarray]:
    """The tensors with layers named ``layers.N``.

    Args:
        checkpoint: The head.
        drafter: Made of its configuration.
        table: Its rules.

    Raises:
        CheckpointError: The parameters do not fit the configuration, or an embedding is missing or misshapen.
    """
    config = checkpoint.config
    tensors = rules.write_params(table, checkpoint.head, drafter.param_shapes(), where=str(checkpoint.source))
    assert checkpoint.draft_to_target is not None
    tensors |= draft_vocab.write(checkpoint.draft_to_target, config.vocab_size, config.draft_vocab_size)
    if checkpoint.embedding is not None:
        embedding = np.asarray(checkpoint.embedding)
        if embedding.shape != (config.vocab_size, config.width):
            raise CheckpointError(
                f"the head's embedding has shape {embedding.shape}; expected {(config.vocab_size, config.width)}"
            )
        rules.check_float(embedding, "the head's embedding")
        tensors["embed_tokens.weight"] = embedding
    elif config.width != config.target_width:
        raise CheckpointError(
            f"the head's width {config.width} differs from the target's {config.target_width}, "
            "so it needs an embedding of its own"
        )
    return tensors


def as_midlayer(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors as all but speculators name them."""
    return {name.replace("layers.0.", "midlayer.", 1): value for name, value in tensors.items()}


def _eagle_refusals(checkpoint: HeadCheckpoint) -> list[str]:
    """What the official code does not read, or reads only in one setting."""
    config, layer = checkpoint.config, checkpoint.config.layers[0]
    mixer, rope = grouped(layer), grouped(layer).rope
    flags = {
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "qk_norm": mixer.qk_norm,
        "sliding_window": _has_window(config),
        **bias_fields(layer),
    }
    refusals = [name for name, is_set in flags.items() if is_set]
    if config.num_layers > 1:
        refusals.append(f"num_layers {config.num_layers} (it has one)")
    if mixer.head_dim * mixer.num_heads != config.width:
        refusals.append(f"head_dim {mixer.head_dim} (it takes width {config.width} over {mixer.num_heads} heads)")
    if not is_default_aux(checkpoint):
        refusals.append(f"aux_layers {config.aux_layers} (it always takes 2, L//2, L-3)")
    if rope is None or rope.type not in ("default", "linear"):
        refusals.append(f"rope type {rope and rope.type!r}")
    elif rope.type == "linear" and (rope.theta != 10_000.0 or rope.factor <= 1.0):
        refusals.append(
            f"linear rope with rope_theta {rope.theta:g} and factor {rope.factor:g} (it takes 10000, above 1)"
        )
    return refusals


def _sglang_refusals(checkpoint: HeadCheckpoint) -> list[str]:
    """What SGLang's ``llama_eagle3`` drops without a word."""
    config, layer = checkpoint.config, checkpoint.config.layers[0]
    flags = {
        "norm_before_residual": config.norm_before_residual,
        "qk_norm": grouped(layer).qk_norm,
        "sliding_window": _has_window(config),
        **bias_fields(layer),
    }
    refusals = [name for name, is_set in flags.items() if is_set]
    if config.num_layers > 1:
        # Its additional_layers start from the previous layer's MLP output without the residual stream.
        refusals.append(f"num_layers {config.num_layers} (its further layers drop the residual stream)")
    if config.aux_layers[0] == 1:
        refusals.append(f"aux_layers {config.aux_layers} (it takes a list that starts with 1 for layer outputs)")
    return refusals


def _has_window(config: Eagle3Config) -> bool:
    return any(grouped(layer).window is not None for layer in config.layers)


def vllm_refusals(checkpoint: HeadCheckpoint) -> list[str]:
    """What vLLM's Llama and Qwen3 heads do not read."""
    layer = checkpoint.config.layers[0]
    biases = bias_fields(layer) if grouped(layer).qk_norm else {}
    return [f"{name} together with qk_norm" for name, is_set in biases.items() if is_set]


def _common_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    config = checkpoint.config
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **stack_fields(config, checkpoint.dtype),
        **bias_fields(config.layers[0]),
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    # The official code takes the field itself as the sign that the head brings its embedding. SGLang replaces an
    # embedding of the target's width by the target's all the same.
    if config.target_width != config.width or checkpoint.embedding is not None:
        values["target_hidden_size"] = config.target_width
    return values


def _eagle_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    values: dict[str, Any] = _common_fields(checkpoint) | {"architectures": ["LlamaForCausalLM"]}
    del values["rope_parameters"], values["head_dim"]  # its configuration class knows neither
    if values["rope_scaling"]:  # it wants exactly these two keys
        values["rope_scaling"] = {"type": "linear", "factor": values["rope_scaling"]["factor"]}
    return values


def _sglang_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    config, values = checkpoint.config, _common_fields(checkpoint)
    for name in ("norm_output", "fc_norm", "norm_before_fc"):
        if getattr(config, name):
            values[name] = True
    # Versions differ in whether they count entering or leaving layers; left out, all of them take the same default.
    return values if is_default_aux(checkpoint) else values | _aux_fields(config.aux_layers)


def vllm_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    """``config.json`` with every flag that vLLM reads."""
    config = checkpoint.config
    values = _common_fields(checkpoint) | _aux_fields(config.aux_layers)
    for name in ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc"):
        values[name] = getattr(config, name)
    values["target_hidden_size"] = config.target_width
    if grouped(config.layers[0]).qk_norm:
        values |= {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
        values["use_sliding_window"] = _has_window(config)
    return values | head_window_fields(config)


def _aux_fields(aux_layers: tuple[int, ...]) -> dict[str, Any]:
    """Auxiliary layers in all three places: which of them is read depends on the engine, its version and the head."""
    ids = {"eagle_aux_hidden_state_layer_ids": list(aux_layers)}
    return {
        **ids,
        "num_aux_hidden_states": len(aux_layers),
        "eagle_config": {**ids, "use_aux_hidden_state": True},
    }
