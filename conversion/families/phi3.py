"""Phi-3 and Phi-4: a Llama with one projection for q, k and v, and one for gate and up."""

from __future__ import annotations

import functools
from typing import Any

from eagle3_jax.conversion import blocks, hf_config
from eagle3_jax.conversion.families.family import Family
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.rules import Rule, in_turns, linear
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, grouped


def read_config(fields: Fields) -> DecoderConfig:
    """Reads a Phi. All layers have the window, if there is one, and some channels may not rotate.

    ``longrope`` has factors for short texts and for long texts. A loaded target is limited to short
    texts.
    """
    rope = hf_config.read_rope(fields, partial=1.0, types=("default", "longrope"))
    # transformers ignores the length among the rope parameters.
    if rope.type == "longrope":
        fields.size("original_max_position_embeddings")
    mixer = hf_config.read_mixer(fields, rope=rope)
    windows = hf_config.read_window_of_all(fields, fields.optional_size("sliding_window"))
    return hf_config.read_decoder(fields, mixer, hf_config.read_mlp(fields), windows=windows)


def write_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields for :class:`Family`."""
    mixer = grouped(config.layers[0])
    fields = {**hf_config.rope_fields(mixer.rope, partial=True), "sliding_window": mixer.window}
    original = None if mixer.rope is None else mixer.rope.original_max_positions
    return fields if original is None else {**fields, "original_max_position_embeddings": original}


def _attention(config: GroupedQuery, source: str, path: str) -> list[Rule]:
    all_heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    group_heads = {"q": config.group, "k": 1, "v": 1}
    cuts = dict(in_turns(1, config.head_dim, all_heads))
    rules = linear(f"{source}.self_attn.o_proj", f"{path}.attention.o")
    for name, part in in_turns(config.num_kv_heads, config.head_dim, group_heads):
        rules += linear(
            f"{source}.self_attn.qkv_proj", f"{path}.attention.qkv", part=part, cut=cuts[name]
        )
    return rules


def _mlp(config: GatedMLP, source: str, path: str) -> list[Rule]:
    rules = linear(f"{source}.mlp.down_proj", f"{path}.mlp.down")
    for part, cut in blocks.alternating_halves(config.width).items():
        rules += linear(f"{source}.mlp.gate_up_proj", f"{path}.mlp.gate_up", part=part, cut=cut)
    return rules


FAMILY = Family(
    model_type="phi3",
    label="Phi-3, Phi-4",
    architecture="Phi3ForCausalLM",
    read_config=read_config,
    write_fields=write_fields,
    rules=functools.partial(blocks.decoder, parts={GroupedQuery: _attention, GatedMLP: _mlp}),
)
