"""The architectures of llama.cpp that are read: metadata as ``config.json``, and names of tensors.

Metadata has fewer fields than ``config.json``. llama.cpp's source fixes the values that all models
of an architecture share. Here ``constants`` and the functions of an architecture set them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.gguf.header import Header
from eagle3_jax.models.config import RopeConfig
from eagle3_jax.models.rope import inverse_frequencies

ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
_ATTENTION_FACTOR = "rope.scaling.attn_factor"
_SIGMOID = 2  # llama.cpp's number for routers that apply a sigmoid


class Source(NamedTuple):
    """The header of a file, and its metadata by keys without the prefix of the architecture."""

    header: Header  #: The header of the file.
    fields: Fields  #: The metadata.

    @property
    def num_layers(self) -> int:
        """Number of blocks, at most the number of tensors."""
        count = self.fields.size("block_count")
        if count > len(self.header.tensors):
            raise self.fields.wrong("block_count", "the file has fewer tensors")
        return count

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        width = self.fields.size("embedding_length")
        heads = self.fields.size("attention.head_count")
        return self.fields.size("attention.key_length", max(width // heads, 1))

    def only(self, **supported: Any) -> None:
        """Refuses keys with another value than the supported one; absent keys pass.

        ``__`` replaces dots.
        """
        self.fields.only(**{name.replace("__", "."): value for name, value in supported.items()})


class Architecture(NamedTuple):
    """One architecture of llama.cpp."""

    name: str  #: The value of ``general.architecture``.
    model_type: str  #: The family that computes it.
    #: Fields of ``config.json`` by metadata key, in addition to :data:`_KEYS`. All keys are
    #: required.
    keys: Mapping[str, str] = {}
    #: Hugging Face names of a block's tensors by llama.cpp's names. They extend and override
    #: :data:`_NAMES`. A name may include ``.weight`` or ``.bias``.
    names: Mapping[str, str] = {}
    constants: Mapping[str, Any] = {}  #: Fields of ``config.json`` that metadata does not have.
    #: Computes further fields of ``config.json``.
    more: Callable[[Source], dict[str, Any]] = lambda source: {}
    #: Further keys that are allowed: ``more`` reads them, or they do not change the computation.
    known: tuple[str, ...] = ()
    #: Whether the converter reordered the rows of queries and keys for interleaved rotation.
    permuted: bool = False
    norm_offset: float = 0.0  #: The number that the converter added to the weights of norms.
    #: Whether ``value_length`` and ``rope.dimension_count`` must equal the head dimension.
    whole_heads: bool = True


_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
# Keys that every architecture may have: the functions below read them, or they do not change the
# computation.
_KNOWN = (
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.causal", "expert_count", "expert_used_count", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "vocab_size",
)  # fmt: skip
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OUTPUT_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WINDOWS = ("attention.sliding_window_pattern",)


def _biases(source: Source) -> dict[str, Any]:
    tensors = source.header.tensors
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _windows(source: Source, period: int) -> list[str]:
    """Returns the kinds of attention as ``layer_types``.

    Default: every ``period``-th layer has full attention.
    """
    slides = source.fields.get("attention.sliding_window_pattern")
    if not isinstance(slides, list):
        period = source.fields.size("attention.sliding_window_pattern", period)
        slides = [(layer + 1) % period > 0 for layer in range(source.num_layers)]
    return [
        "sliding_attention" if slide else "full_attention" for slide in slides[: source.num_layers]
    ]


def _rope(source: Source) -> dict[str, Any]:
    """Reads the rotary embedding as ``rope_theta`` and ``rope_scaling``."""
    fields = source.fields
    theta = fields.number("rope.freq_base", 10_000.0)
    # Phi-3's factors are tensors; its function reads them.
    kinds = ["none", "linear", "yarn"]
    if LONG_FACTORS in source.header.tensors:
        kinds.append("longrope")
    kind = fields.one_of("rope.scaling.type", kinds, "none")
    source.only(rope__scaling__yarn_ext_factor=1.0)

    scaling: dict[str, Any] | None = None
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
        if kind == "yarn":
            scaling |= {
                "original_max_position_embeddings": fields.size(
                    "rope.scaling.original_context_length"
                ),
                "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
                "attention_factor": fields.optional_number("rope.scaling.yarn_attn_factor"),
            }

    # The converter writes Llama 3.1's scaling as a tensor of divisors, without its parameters.
    if ROPE_FREQS in source.header.tensors:
        if scaling is not None:
            raise CheckpointError(
                f"{fields.where} holds {ROPE_FREQS} and scales its rotations as {kind!r} too"
            )
        scaling = _llama3(source, theta)

    return {"rope_theta": theta, "rope_scaling": scaling}


def _llama3(source: Source, theta: float) -> dict[str, Any] | None:
    """Returns the scaling of Llama 3.1, whose parameters must reproduce the file's divisors."""
    divisors = np.asarray(source.header.tensors[ROPE_FREQS]).ravel()
    sizes: dict[str, Any] = {
        "factor": float(str(divisors.max())),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }

    original = 8192
    expected = np.nan
    if divisors.size * 2 == source.head_dim:
        # RopeConfig refuses impossible numbers; then no divisor is as expected.
        with contextlib.suppress(ValueError):
            scaled = RopeConfig(
                type="llama3", theta=theta, original_max_positions=original, **sizes
            )
            frequencies, _ = inverse_frequencies(RopeConfig(theta=theta), source.head_dim)
            scaled_frequencies, _ = inverse_frequencies(scaled, source.head_dim)
            expected = frequencies / scaled_frequencies

    if not np.allclose(divisors, expected, rtol=1e-4):
        raise CheckpointError(
            f"{source.fields.where}: {ROPE_FREQS} is not what Llama 3.1 divides its frequencies by"
            " (factors 1 and 4 of 8192 positions); no other extension is read from it"
        )

    # A factor of 1 extends nothing.
    if sizes["factor"] == 1:
        return None
    return {"rope_type": "llama3", **sizes, "original_max_position_embeddings": original}


def _gemma(source: Source, period: int, largest: int) -> dict[str, Any]:
    """Reads Gemma, whose largest model (27B) scales scores by hidden_size / heads.

    The others scale scores by head_dim. Metadata does not tell: like llama.cpp, this recognises the
    largest model by its number of layers.
    """
    fields = source.fields
    scalar = source.head_dim
    if source.num_layers == largest:
        scalar = fields.size("embedding_length") // fields.size("attention.head_count")

    names = ("attn_logit_softcapping", "final_logit_softcapping")
    caps = {name: fields.number(name) for name in names if fields.get(name) is not None}
    return {"query_pre_attn_scalar": scalar, "layer_types": _windows(source, period), **caps}


def _gemma3(source: Source) -> dict[str, Any]:
    theta = source.fields.number("rope.freq_base", 1_000_000.0)
    local_theta = source.fields.number("rope.freq_base_swa", 10_000.0)
    return {**_gemma(source, 6, 62), "rope_theta": theta, "rope_local_base_freq": local_theta}


def _phi3(source: Source) -> dict[str, Any]:
    """Reads partial rotation, and ``longrope``, whose factors are tensors."""
    source.only(attention__value_length=source.head_dim)

    metadata = source.fields
    share = metadata.size("rope.dimension_count") / source.head_dim
    window = metadata.integer("attention.sliding_window", 0)
    fields: dict[str, Any] = {"partial_rotary_factor": share, "sliding_window": window or None}
    if not {LONG_FACTORS, SHORT_FACTORS} & source.header.tensors.keys():
        return fields

    source.only(rope__scaling__type="longrope")
    # Widened from float32, a factor would not be the publisher's decimal.
    factors: dict[str, Any] = {}
    for name, field in ((LONG_FACTORS, "long_factor"), (SHORT_FACTORS, "short_factor")):
        factors[field] = [
            float(str(factor)) for factor in np.asarray(source.header.tensor(name)).ravel()
        ]

    # transformers computes the factor from these lengths, so the file must have the same.
    original = metadata.size("rope.scaling.original_context_length")
    length = metadata.size("context_length")
    extension = np.log(max(length / original, 1.0)) / np.log(max(original, 2))
    expected = max(1.0, 1 + extension) ** 0.5
    if not np.isclose(metadata.number(_ATTENTION_FACTOR, expected), expected, rtol=1e-5):
        raise metadata.wrong(
            _ATTENTION_FACTOR, f"expected {expected:g}, which follows from its lengths"
        )

    scaling = {"rope_type": "longrope", **factors}
    return {**fields, "original_max_position_embeddings": original, "rope_scaling": scaling}


def _qwen3_moe(source: Source) -> dict[str, Any]:
    layers = range(source.num_layers)
    dense = [
        layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in source.header.tensors
    ]
    return {**_biases(source), "mlp_only_layers": dense}


def _gpt_oss(source: Source) -> dict[str, Any]:
    scaling = _rope(source)["rope_scaling"]
    if scaling is not None:
        # Published gpt-oss models do not round the bounds of yarn.
        scaling["truncate"] = False
    return {"layer_types": _windows(source, 2), "rope_scaling": scaling}


def _granite(source: Source) -> dict[str, Any]:
    factors = {
        "attention_multiplier": source.fields.number("attention.scale", source.head_dim**-0.5),
        "embedding_multiplier": source.fields.number("embedding_scale", 1.0),
        "residual_multiplier": source.fields.number("residual_scale", 1.0),
        "logits_scaling": source.fields.number("logit_scale", 1.0),
    }
    return _biases(source) | factors


def _cohere(source: Source) -> dict[str, Any]:
    return {**_biases(source), "use_qk_norm": "blk.0.attn_q_norm.weight" in source.header.tensors}


def _deepseek(source: Source) -> dict[str, Any]:
    """Reads latent attention.

    Newer files have a head of the latent width, and the sizes of heads in ``*_mla`` keys.
    """
    metadata = source.fields
    metadata.require("expert_gating_func")
    source.only(expert_gating_func=_SIGMOID)

    rope_dim = metadata.size("rope.dimension_count")
    heads = metadata.size("attention.head_count")
    suffix = "" if metadata.get("attention.key_length_mla") is None else "_mla"
    value_dim = metadata.size(f"attention.value_length{suffix}")

    # Checked here, before the rules of all heads are built.
    name = "blk.0.attn_output.weight"
    columns = source.header.tensor(name).shape[-1]
    if columns != heads * value_dim:
        raise metadata.wrong("attention.head_count", f"{name} has {columns} columns")

    # The converter divides the published mscale_all_dim by 10.
    scaling = _rope(source)["rope_scaling"]
    multiplier = metadata.optional_number("rope.scaling.yarn_log_multiplier")
    if scaling is not None and multiplier is not None:
        scale = float(str(np.float32(multiplier * 10)))
        scaling |= {"mscale": scale, "mscale_all_dim": scale}

    return {
        "num_key_value_heads": heads,
        "head_dim": None,
        "q_lora_rank": metadata.optional_size("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": metadata.size(f"attention.key_length{suffix}") - rope_dim,
        "v_head_dim": value_dim,
        "norm_topk_prob": metadata.flag("expert_weights_norm"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count"),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "rope_scaling": scaling,
    }


def _mistral3(source: Source) -> dict[str, Any]:
    """Reads Ministral 3, which scales queries by position, or Mistral Small 3.1, which does not."""
    beta = source.fields.optional_number("attention.temperature_scale")
    if beta is None:
        return {"model_type": "mistral", "sliding_window": None}

    scale = source.fields.number("rope.scaling.yarn_log_multiplier")
    scaling = _rope(source)["rope_scaling"] or {}
    return {
        "rope_scaling": {
            **scaling,
            "mscale": scale,
            "mscale_all_dim": scale,
            "llama_4_scaling_beta": beta,
        }
    }


ARCHITECTURES: dict[str, Architecture] = {
    row.name: row
    for row in (
        Architecture(
            "llama", "llama", _RMS, more=_biases, known=("tensor_data_layout",), permuted=True
        ),
        Architecture(
            "mistral3",
            "ministral3",
            _RMS,
            more=_mistral3,
            known=("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
            permuted=True,
        ),
        Architecture(
            "qwen2", "qwen2", _RMS, constants={"use_sliding_window": False}, known=("pooling_type",)
        ),
        Architecture(
            "qwen3",
            "qwen3",
            _RMS,
            more=_biases,
            constants={"use_sliding_window": False},
            known=("pooling_type",),
        ),
        Architecture(
            "qwen3moe",
            "qwen3_moe",
            {**_RMS, **_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
            constants={"norm_topk_prob": True, "use_sliding_window": False},
            more=_qwen3_moe,
        ),
        Architecture(
            "gpt-oss",
            "gpt_oss",
            {
                **_RMS,
                **_EXPERTS,
                "expert_feed_forward_length": "intermediate_size",
                "attention.sliding_window": "sliding_window",
            },
            names={
                "post_attention_norm": "post_attention_layernorm",
                "ffn_gate_inp": "mlp.router",
                "attn_sinks.weight": "self_attn.sinks",
            },
            constants={"attention_bias": True, "swiglu_limit": 7.0},
            more=_gpt_oss,
            known=(*_WINDOWS, "feed_forward_length"),
        ),
        Architecture(
            "deepseek2",
            "deepseek_v3",
            {
                **_RMS,
                "expert_count": "n_routed_experts",
                "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_group_count": "n_group",
                "expert_group_used_count": "topk_group",
                "attention.kv_lora_rank": "kv_lora_rank",
            },
            names={
                "attn_q_a": "self_attn.q_a_proj",
                "attn_q_a_norm": "self_attn.q_a_layernorm",
                "attn_q_b": "self_attn.q_b_proj",
                "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
                "attn_kv_a_norm": "self_attn.kv_a_layernorm",
                "attn_kv_b": "self_attn.kv_b_proj",
                "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
                "ffn_up_shexp": "mlp.shared_experts.up_proj",
                "ffn_down_shexp": "mlp.shared_experts.down_proj",
                "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            },
            constants={"rope_interleave": True},
            more=_deepseek,
            known=(
                "attention.key_length_mla",
                "attention.value_length_mla",
                "attention.q_lora_rank",
                "expert_gating_func",
                "expert_weights_norm",
                "expert_weights_scale",
                "expert_shared_count",
                "leading_dense_block_count",
                "rope.scaling.yarn_log_multiplier",
            ),
            whole_heads=False,
        ),
        *(
            Architecture(
                name,
                model_type,
                {**_RMS, "attention.sliding_window": "sliding_window"},
                names={**_OUTPUT_NORMS, "ffn_norm": "pre_feedforward_layernorm"},
                more=more,
                known=(
                    *_WINDOWS,
                    "attn_logit_softcapping",
                    "final_logit_softcapping",
                    "rope.freq_base_swa",
                ),
                norm_offset=1.0,
            )
            for name, model_type, more in (
                ("gemma2", "gemma2", lambda source: _gemma(source, 2, 46)),
                ("gemma3", "gemma3_text", _gemma3),
            )
        ),
        Architecture("olmo2", "olmo2", _RMS, names=_OUTPUT_NORMS, more=_biases),
        Architecture(
            "granite",
            "granite",
            _RMS,
            more=_granite,
            known=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
            permuted=True,
        ),
        Architecture(
            "phi3",
            "phi3",
            _RMS,
            names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            more=_phi3,
            known=("attention.sliding_window", _ATTENTION_FACTOR),
            whole_heads=False,
        ),
        Architecture(
            "command-r",
            "cohere",
            {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
            more=_cohere,
        ),
        Architecture(
            "cohere2",
            "cohere2",
            {
                "attention.layer_norm_epsilon": "layer_norm_eps",
                "logit_scale": "logit_scale",
                "attention.sliding_window": "sliding_window",
            },
            more=lambda source: {**_biases(source), "layer_types": _windows(source, 4)},
            known=_WINDOWS,
        ),
    )
}
_DRAFTERS = ("eagle3", "dflash")


def architecture_of(header: Header) -> Architecture:
    """Returns the architecture of a file.

    Raises:
        CheckpointError: The architecture is unsupported, or the file has keys that are unknown for
            it.
    """
    path = header.path
    name = header.metadata.get("general.architecture")
    if isinstance(name, str) and name in _DRAFTERS:
        raise CheckpointError(
            f"{path} holds a draft head ({name}); heads are not read from GGUF, so give the"
            " directory of the head's safetensors checkpoint"
        )

    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture is {short(name)}; those that are read from GGUF are"
            f" {', '.join(ARCHITECTURES)}. Give the safetensors checkpoint that the file was made"
            " from"
        )

    row = ARCHITECTURES[name]
    known = {*_KEYS, *row.keys, *_KNOWN, *row.known}
    for key in header.metadata:
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in known:
            raise CheckpointError(
                f"{path}: {short(key)} is {short(header.metadata[key])}, which is not known here"
                " and may change the mathematics; give the safetensors checkpoint that the file"
                " was made from"
            )
    return row


def read_config(header: Header, row: Architecture) -> dict[str, Any]:
    """Returns the ``config.json`` of the model in a file, without token ids."""
    metadata = Fields(header.metadata, str(header.path), f"{row.name}.")
    source = Source(header, metadata)
    embedding = header.tensor("token_embd.weight")

    source.only(attention__causal=True)
    if "expert_count" in row.keys:
        _check_experts(source)
    else:
        source.only(expert_count=0, expert_used_count=0)
    if row.whole_heads:
        source.only(attention__value_length=source.head_dim, rope__dimension_count=source.head_dim)

    keys = {**_KEYS, **row.keys}
    metadata.require(*keys)
    num_heads = metadata.size("attention.head_count")
    return {
        "model_type": row.model_type,
        "vocab_size": embedding.shape[0],
        "head_dim": source.head_dim,
        "num_key_value_heads": metadata.size("attention.head_count_kv", num_heads),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **_rope(source),
        **{field: metadata.get(key) for key, field in keys.items()},
        **row.constants,
        **row.more(source),
    }


def _check_experts(source: Source) -> None:
    """Refuses a number of experts that differs from the stacks, before rules are built for it."""
    counts = {tensor.shape[0] for name, tensor in source.header.tensors.items() if "_exps." in name}
    if counts != {source.fields.size("expert_count")}:
        sizes = " and ".join(map(str, sorted(counts)[:3])) or "no"
        raise source.fields.wrong("expert_count", f"the file has stacks of {sizes} experts")


def layer_name(row: Architecture, name: str) -> str:
    """Returns the Hugging Face name of a tensor; an unknown name unchanged, to be refused later."""
    match = re.fullmatch(r"(blk\.(\d{1,9})\.)?(.+)\.(weight|bias)", name)
    if match is None:
        return name

    block, layer, stem, suffix = match.groups()
    names = {**_NAMES, **row.names} if block else _OUTSIDE
    translated = names.get(f"{stem}.{suffix}") or (
        f"{names[stem]}.{suffix}" if stem in names else None
    )
    if translated is None:
        return name
    return f"model.layers.{layer}.{translated}" if block else translated
