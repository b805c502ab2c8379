"""Medusa heads out again, in the layouts of their authors and of vLLM, and what both directions share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eagle3_jax.conversion import rules
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.files import read_json
from eagle3_jax.conversion.heads.head import HeadCheckpoint, Layout
from eagle3_jax.conversion.rules import Rule

if TYPE_CHECKING:
    import numpy as np

    from eagle3_jax.drafters.medusa import MedusaConfig


def head_rules(config: MedusaConfig) -> list[Rule]:
    """The rule table in vLLM's names."""
    table = []
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            table += rules.linear(f"blocks.{head}.layers.{layer}", f"blocks.{head}.layers.{layer}", bias=config.bias)
        if not config.shared_output:
            table += rules.linear(f"lm_heads.{head}", f"outputs.{head}")
    return table + rules.linear("lm_head", "outputs.0") if config.shared_output else table


def layout(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """The heads in one of the two layouts.

    Raises:
        CheckpointError: It cannot express them.
    """
    import numpy as np

    from eagle3_jax.drafters.medusa import MedusaDrafter

    config, where = checkpoint.config, str(checkpoint.source)
    shapes = MedusaDrafter(config).param_shapes()
    tensors = rules.write_params(head_rules(config), checkpoint.head, shapes, where=where)
    table = checkpoint.draft_to_target
    if config.draft_vocab_size == config.vocab_size and table is not None and np.any(np.diff(table) != 1):
        raise CheckpointError(f"{where}: draft_to_target reorders the whole vocabulary; reorder the outputs instead")
    refusals = (_official_refusals if dialect == "medusa" else _vllm_refusals)(config, tensors)
    if refusals:
        other = "vllm" if dialect == "medusa" else "jax"
        raise CheckpointError(f"the {dialect!r} layout cannot express {'; '.join(refusals)}; use --to {other}")
    if dialect == "vllm":
        if config.draft_vocab_size < config.vocab_size:
            tensors["token_map"] = np.asarray(checkpoint.draft_to_target, np.int64)
        return Layout(_vllm_fields(checkpoint), tensors)
    values = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        # Empty where it is not known: left out, the authors' code would take its default, Vicuna.
        "base_model_name_or_path": _base_model(checkpoint),
    }
    return Layout(values, _official_names(tensors, config.num_layers), "medusa_lm_head.safetensors")


def head_of_different_blocks(tensors: Mapping[str, np.ndarray], config: MedusaConfig) -> int | None:
    """The first head whose blocks, in vLLM's names, are not all one; ``None`` where none is."""
    import numpy as np

    for head in range(config.num_heads):
        for part in ("weight", "bias") if config.bias else ("weight",):
            first, *others = (tensors.get(f"blocks.{head}.layers.{n}.{part}") for n in range(config.num_layers))
            if not all(first is not None and other is not None and np.array_equal(first, other) for other in others):
                return head
    return None


def _official_refusals(config: MedusaConfig, tensors: Mapping[str, np.ndarray]) -> list[str]:
    """What the authors' code does not read."""
    refusals = []
    if config.shared_output:
        refusals.append("one output projection for all heads")
    if config.draft_vocab_size < config.vocab_size:
        refusals.append(f"a draft vocabulary of {config.draft_vocab_size}")
    if not config.bias:
        refusals.append("blocks without a bias (it would leave random ones)")
    if head_of_different_blocks(tensors, config) is not None:
        refusals.append(f"{config.num_layers} different blocks of a head (it repeats one)")
    return refusals


def _vllm_refusals(config: MedusaConfig, tensors: Mapping[str, np.ndarray]) -> list[str]:
    """What vLLM does not load."""
    del tensors
    if config.draft_vocab_size < config.vocab_size and not config.shared_output:
        return ["a draft vocabulary of heads that do not share their output projection (vLLM 0.32 fails to load it)"]
    return []


def _vllm_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    # No other name may have "num" with "heads" or "layers" in it: vLLM would take that one.
    config = checkpoint.config
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.target_width,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.shared_output,
        "dtype": checkpoint.dtype,
        "torch_dtype": checkpoint.dtype,
    }


def _official_names(tensors: Mapping[str, np.ndarray], num_layers: int) -> dict[str, np.ndarray]:
    named = {}
    for name, value in tensors.items():
        new = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
        named[re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{num_layers}.", new)] = value
    return named


def _base_model(checkpoint: HeadCheckpoint) -> str:
    path = checkpoint.source / "config.json"
    name = read_json(path).get("base_model_name_or_path") if path.is_file() else None
    return name if isinstance(name, str) else ""
