"""DeepSeek V3 and R1, Kimi K2 and GLM-4.7-Flash; V3.2 and GLM-5, which have an index of keys.

The index chooses ``index_topk`` keys for each token. In a text of at most ``index_topk`` tokens it
chooses all keys. So a target with an index is read as a target without one, limited to that length.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from eagle3_jax.conversion import blocks, hf_config
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.families.family import BEHIND, Family, Wrapper
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.rules import Part, Rule, linear, norm
from eagle3_jax.models.config import DecoderConfig, Latent, LayerConfig, RopeConfig

_TYPES = _DENSE, _SPARSE = ("dense", "sparse")
# A field of the files whose mtp.* tensors are DSpark. num_nextn_predict_layers is 1 in all files.
SPARK = "dspark_block_size"
_INDEXER = r"model\.layers\.\d+\.self_attn\.indexer\..*"


def read_config(fields: Fields, *, by_types: bool = False) -> DecoderConfig:
    """Reads latent attention in every layer, with dense layers first and then experts."""
    # As in transformers: an absent field means true, null means false.
    interleaved = fields.flag("rope_interleave", default="rope_interleave" not in fields.values)
    return _decoder(fields, read_latent(fields, interleaved=interleaved), by_types)


def read_indexed(fields: Fields) -> DecoderConfig:
    """Reads a target with an index, limited to the length at which it chooses every key."""
    topk = fields.size("index_topk")
    config = _decoder(fields, read_latent(fields, interleaved=True, index_topk=topk), True)
    return dataclasses.replace(config, max_positions=min(config.max_positions, topk))


def _decoder(fields: Fields, mixer: Latent, by_types: bool) -> DecoderConfig:
    fields.require("n_shared_experts", "n_group", "topk_group")
    count = hf_config.read_num_layers(fields)
    types = hf_config.read_types(fields, _TYPES, count, name="mlp_layer_types") if by_types else []
    if types:
        mlps = hf_config.read_mlps(
            fields, [kind == _SPARSE for kind in types], hf_config.read_corrected
        )
    else:
        mlps = hf_config.read_corrected_mlps(fields)
    return hf_config.decoder_of(fields, [LayerConfig(mixer=mixer, mlp=mlp) for mlp in mlps])


def read_latent(fields: Fields, *, interleaved: bool, index_topk: int | None = None) -> Latent:
    """Reads latent attention; an index chooses ``index_topk`` keys, ``None`` without an index."""
    fields.require("q_lora_rank")  # null means that there is none
    heads = fields.size("num_attention_heads")
    if fields.size("num_key_value_heads", heads) != heads:
        raise fields.wrong(
            "num_key_value_heads",
            f"num_attention_heads is {heads}, and each head of latent attention has its own keys",
        )
    fields.only(mlp_bias=False)

    rope = hf_config.read_rope(fields, interleaved=interleaved)
    if rope.type not in ("default", "yarn"):
        raise CheckpointError(
            f"{fields.where}: rope type {rope.type!r} of latent attention; expected default or yarn"
        )

    nope_dim = fields.size("qk_nope_head_dim")
    rope_dim = fields.size("qk_rope_head_dim")
    scale = _scale(rope, nope_dim + rope_dim)
    with read_from(fields.where):
        return Latent(
            num_heads=heads,
            q_rank=fields.optional_size("q_lora_rank"),
            kv_rank=fields.size("kv_lora_rank"),
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=fields.size("v_head_dim"),
            rope=rope,
            scale=scale,
            bias=fields.flag("attention_bias"),
            index_topk=index_topk,
        )


def _scale(rope: RopeConfig, size: int) -> float | None:
    """Returns the scale of the scores; ``None`` for the usual one."""
    # yarn multiplies it by a squared factor, in addition to the factor of cosines.
    if rope.type != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
        return None
    factor = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return size**-0.5 * factor**2


def write_fields(config: DecoderConfig, *, by_types: bool = False) -> dict[str, Any]:
    """Returns the fields for :class:`Family`. The layer that drafts is not written."""
    mixer = config.layers[0].mixer
    if not isinstance(mixer, Latent):
        raise CheckpointError("this layout has latent attention in every layer; use --to jax")

    dense = hf_config.dense_layers(config)
    types = [_DENSE if layer in dense else _SPARSE for layer in range(config.num_layers)]

    # Without these two fields engines choose experts in another way.
    routing = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return {
        **latent_fields(mixer),
        **({"mlp_layer_types": types} if by_types else {}),
        "first_k_dense_replace": (*types, _SPARSE).index(_SPARSE),
        **routing,
        **hf_config.corrected_fields(hf_config.experts_of(config)),
        "num_nextn_predict_layers": 0,
    }


def refuse_v4(fields: Fields) -> None:
    """Refuses DeepSeek V4 and its successors, and says what their ``mtp.*`` tensors are."""
    if str(fields.get("model_type")).startswith("deepseek_v4"):
        drafter = "DSpark, not MTP" if SPARK in fields.values else "MTP"
        raise CheckpointError(
            f"{fields.where}: DeepSeek V4 is not read (hyper-connections, compressed attention);"
            f" nor are its mtp.* tensors, which are {drafter}, with the same layers"
        )


def latent_fields(mixer: Latent) -> dict[str, Any]:
    """Returns the fields of latent attention that :func:`read_latent` reads."""
    return {
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_heads,
        "q_lora_rank": mixer.q_rank,
        "kv_lora_rank": mixer.kv_rank,
        "qk_nope_head_dim": mixer.nope_dim,
        "qk_rope_head_dim": mixer.rope_dim,
        "head_dim": mixer.rope_dim,
        "v_head_dim": mixer.value_dim,
        "attention_bias": mixer.bias,
        "rope_interleave": mixer.rope.interleaved,
        **hf_config.rope_fields(mixer.rope),
    }


def refuse_to_write(config: DecoderConfig, *, label: str) -> dict[str, Any]:
    """Refuses to write a target whose index of keys was not read."""
    # No other program runs such a target without its index.
    del config
    raise CheckpointError(
        f"the Hugging Face layout of {label} has an index that chooses keys, which is not read and"
        " cannot be written; use --to jax"
    )


def latent(config: Latent, source: str, path: str) -> list[Rule]:
    """Returns the rules of latent attention, ``self_attn`` of a layer."""
    source = f"{source}.self_attn"
    path = f"{path}.attention"
    if config.q_rank is None:
        rules = linear(f"{source}.q_proj", f"{path}.q")
    else:
        rules = linear(f"{source}.q_a_proj", f"{path}.q_a", bias=config.bias)
        rules.append(norm(f"{source}.q_a_layernorm", f"{path}.q_a_norm"))
        rules += linear(f"{source}.q_b_proj", f"{path}.q_b")
    rules += linear(f"{source}.kv_a_proj_with_mqa", f"{path}.kv_a", bias=config.bias)
    rules.append(norm(f"{source}.kv_a_layernorm", f"{path}.kv_a_norm"))

    # The tensor has, for each head, the rows of its keys and then the rows of its values.
    size = config.nope_dim + config.value_dim
    sections = (("key_up", 0, config.nope_dim), ("value_up", config.nope_dim, size))
    for head in range(config.num_heads):
        start = head * size
        for name, first, last in sections:
            part = Part(leading=(head,), turned=name == "key_up")
            cut = Part(1, config.num_heads * size, 1, start + first, start + last)
            rules.append(
                Rule(
                    f"{source}.kv_b_proj.weight",
                    f"{path}.{name}",
                    transpose=True,
                    part=part,
                    cut=cut,
                )
            )
    return rules + linear(f"{source}.o_proj", f"{path}.o", bias=config.bias)


def _of_types(fields: Fields, count: int) -> dict[str, Any]:
    types = {"mlp_layer_types": [_SPARSE] * count} if fields.get("mlp_layer_types") else {}
    return {**types, "first_k_dense_replace": 0}


_rules = functools.partial(blocks.decoder, parts={Latent: latent})
_MODULES = BEHIND._replace(fields=_of_types)

FAMILIES = (
    *(
        Family(
            name,
            label,
            "DeepseekV3ForCausalLM",
            read_config,
            write_fields,
            _rules,
            modules=BEHIND,
        )
        for name, label in (("deepseek_v3", "DeepSeek V3"), ("kimi_k2", "Kimi K2"))
    ),
    Family(
        "glm4_moe_lite",
        "GLM-4.7-Flash",
        "Glm4MoeLiteForCausalLM",
        functools.partial(read_config, by_types=True),
        functools.partial(write_fields, by_types=True),
        _rules,
        modules=_MODULES,
    ),
    *(
        Family(
            name,
            label,
            architecture,
            read_indexed,
            functools.partial(refuse_to_write, label=label),
            _rules,
            excluded=(_INDEXER,),
            modules=_MODULES,
        )
        for name, label, architecture in (
            ("deepseek_v32", "DeepSeek V3.2", "DeepseekV32ForCausalLM"),
            ("glm_moe_dsa", "GLM-5", "GlmMoeDsaForCausalLM"),
        )
    ),
)
# Kimi K2.5 and later are published with an encoder of images.
WRAPPER = Wrapper(
    model_type="kimi_k25",
    label="Kimi K2.5",
    texts={"deepseek_v3": "deepseek_v3", "kimi_k2": "kimi_k2"},
    prefixes=(
        # transformers 5.23 writes the layers under this name.
        ("language_model.model.blocks.", "model.layers."),
        ("model.language_model.", "model."),
        ("language_model.", ""),
    ),
    ignored=(r"(model\.)?(vision_tower|mm_projector)\..*",),
)
