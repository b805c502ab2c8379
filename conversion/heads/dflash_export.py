"""The names of a block drafter's tensors, and the way out: as vLLM and speculators load them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3_jax.conversion import blocks, rules
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.heads.head import HeadCheckpoint, Layout
from eagle3_jax.conversion.hf_config import stack_fields
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.models.config import gated, grouped

if TYPE_CHECKING:
    import numpy as np

    from eagle3_jax.drafters.dflash import DFlashConfig


def head_rules(config: DFlashConfig) -> list[Rule]:
    """The rule table."""
    table = [*rules.linear("fc", "fc"), rules.norm("hidden_norm", "feature_norm"), rules.norm("norm", "norm")]
    for index, layer in enumerate(config.layers):
        table += blocks.block(layer, f"layers.{index}", f"blocks.{index}")
    if config.own_output:
        table += rules.linear("lm_head", "head")
    if config.markov is not None:
        table.append(Rule("markov_head.markov_w1.weight", "markov.before"))
        table += rules.linear("markov_head.markov_w2", "markov.after")
        if config.markov.type != "vanilla":
            name = {"gated": "gate", "rnn": "joint"}[config.markov.type]
            table += rules.linear(f"markov_head.{name}_proj", f"markov.{name}", bias=True)
    return table + (rules.linear("confidence_head.proj", "confidence", bias=True) if config.confidence else [])


def layout(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """The head as ``vllm`` (and z-lab's code, where it is plain DFlash) or ``speculators`` has it.

    Raises:
        CheckpointError: The dialect cannot express the head.
    """
    refusals = {"vllm": _vllm_refusals, "speculators": _speculators_refusals}[dialect](checkpoint)
    if refusals:
        raise CheckpointError(f"the {dialect!r} layout cannot express {'; '.join(refusals)}; use --to jax")
    values = {"vllm": _vllm_fields, "speculators": _speculators_fields}[dialect](checkpoint)
    return Layout(values, _tensors(checkpoint))


def _tensors(checkpoint: HeadCheckpoint) -> dict[str, np.ndarray]:
    import numpy as np

    from eagle3_jax.conversion import draft_vocab
    from eagle3_jax.drafters.dflash import DFlashDrafter

    config = checkpoint.config
    shapes = DFlashDrafter(config).param_shapes()
    tensors = rules.write_params(head_rules(config), checkpoint.head, shapes, where=str(checkpoint.source))
    if checkpoint.draft_to_target is not None:
        tensors |= draft_vocab.write(checkpoint.draft_to_target, config.vocab_size, config.draft_vocab_size)
    if checkpoint.embedding is not None:
        tensors["embed_tokens.weight"] = np.asarray(checkpoint.embedding)
    return tensors


def _vllm_refusals(checkpoint: HeadCheckpoint) -> list[str]:
    """What vLLM's models do not read."""
    config = checkpoint.config
    refusals = _common_refusals(config)
    if config.markov is None:
        refusals += ["from_anchor without markov"] * config.from_anchor
        refusals += ["a confidence without markov"] * (config.confidence is not None)
    elif config.markov.type != "vanilla":
        refusals.append(f"markov type {config.markov.type!r} (its bias is always the vanilla one)")
    return refusals


def _speculators_refusals(checkpoint: HeadCheckpoint) -> list[str]:
    """What speculators takes from the verifier, or has in one setting only."""
    config = checkpoint.config
    refusals = _common_refusals(config)
    refusals += ["causal (its full attention sees the whole block)"] * config.causal
    refusals += ["an embedding of its own (it takes the verifier's)"] * (checkpoint.embedding is not None)
    refusals += [f"target_width {config.target_width} beside width {config.width}"] * (
        config.target_width != config.width
    )
    if config.own_output and config.draft_vocab_size == config.vocab_size:
        refusals.append("an output projection of its own for the whole vocabulary (it takes the verifier's)")
    return refusals


def _common_refusals(config: DFlashConfig) -> list[str]:
    first, layer = config.aux_layers[0], config.layers[0]
    refusals = [f"aux_layers {config.aux_layers} (0 is no layer's output)"] * (first == 0)
    refusals += ["different biases of q, k, v and o"] * (grouped(layer).qkv_bias != grouped(layer).o_bias)
    refusals += ["layers without qk_norm"] * (not grouped(layer).qk_norm)
    return refusals + ["an MLP with biases"] * gated(layer).bias


def _geometry(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    config = checkpoint.config
    return {
        "model_type": "qwen3",
        **stack_fields(config, checkpoint.dtype),
        "attention_bias": grouped(config.layers[0]).qkv_bias,
        "layer_types": ["full_attention"] * config.num_layers,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }


def _spark_fields(config: DFlashConfig) -> dict[str, Any]:
    return {
        "markov_rank": 0 if config.markov is None else config.markov.rank,
        "markov_head_type": "vanilla" if config.markov is None else config.markov.type,
        "enable_confidence_head": config.confidence is not None,
        "confidence_head_with_markov": config.confidence == "markov",
    }


def _vllm_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    config = checkpoint.config
    ids = {"mask_token_id": config.mask_token, "target_layer_ids": [layer - 1 for layer in config.aux_layers]}
    values = {
        "architectures": ["DFlashDraftModel"],
        **_geometry(checkpoint),
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_width,
        "dflash_config": {**ids, "causal": config.causal, "use_aux_hidden_state": True},
    }
    if checkpoint.num_target_layers is not None:
        values["num_target_layers"] = checkpoint.num_target_layers
    if config.markov is not None:
        # Its DSpark reads these at the top level.
        anchor = {"sample_from_anchor": config.from_anchor, "dspark_bonus_anchor": not config.from_anchor}
        values |= {"architectures": ["Qwen3DSparkModel"], **ids, **_spark_fields(config), **anchor}
    return values


def _speculators_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    config = checkpoint.config
    spark = config.markov is not None or config.confidence is not None
    method = "dspark" if spark else "dflash"
    return {
        "architectures": ["DSparkDraftModel" if spark else "DFlashDraftModel"],
        "speculators_model_type": method,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_predicted}],
            # Who serves it fills in the target's directory; a head does not know it.
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": _geometry(checkpoint),
        "draft_vocab_size": config.draft_vocab_size,
        "aux_hidden_state_layer_ids": list(config.aux_layers),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.from_anchor,
        # vLLM takes its absence in one way and its default in the other.
        "sliding_window_non_causal": True,
        **(_spark_fields(config) if spark else {}),
    }
