"""Reads and writes EAGLE-3 heads in the dialects of published ones, and checks them.

* ``eagle``: the official layout, ``midlayer.*`` (Li et al.); the configuration omits most settings.
* ``sglang``: SpecForge's layout with the same names; vLLM calls it the SafeAILab format.
* ``vllm``: the same, with every flag that vLLM reads.
* ``speculators``: ``layers.N.*``, with the sizes in ``transformer_layer_config``.
* ``modelopt``: ``layers.N.*``, with an ``eagle_config``.

Heads of grouped-query attention are read as engines' Llama and Qwen3 heads, heads of latent
attention as their DeepSeek heads (Kimi K2.5): there the norms of the latents have the other norms'
epsilon.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.conversion import blocks, draft_vocab, hf_config, rules
from eagle3_jax.conversion.errors import CheckpointError, TargetNeededError, short
from eagle3_jax.conversion.families import deepseek
from eagle3_jax.conversion.fields import Fields, agreed, read_from
from eagle3_jax.conversion.heads.head import (
    DRAFT_VOCABULARY,
    Check,
    HeadCheckpoint,
    HeadKind,
    Layout,
    Suspects,
    head_tensors,
    official_refusals,
    read_as,
    refuse_inexpressible,
)
from eagle3_jax.conversion.heads.layer_ids import entered_after, resolve, usual_layers
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.conversion.sidecars import read_object
from eagle3_jax.conversion.tensors import Signs, Stored
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.models.config import (
    DecoderConfig,
    Eagle3Config,
    GatedDelta,
    Latent,
    LayerConfig,
    RopeConfig,
    default_aux_layers,
    gated,
    grouped,
    uniform,
    with_window,
)

AUX = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")

# Switches of NVIDIA's exporter, each with the setting that means plain EAGLE-3.
_MODELOPT = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
# Settings that the code behind a layout ignores silently.
_SHAPE = ("qk_norm", "sliding_window", "attention_bias", "mlp_bias", "attention sinks")
_DROPPED = {"eagle": (*FLAGS, *_SHAPE), "sglang": ("norm_before_residual", *_SHAPE)}
# Of heads with latent attention. SGLang's read one layer, whose queries have a latent.
_DROPPED_LATENT = {
    "sglang": ("norm_before_residual", "norm_before_fc", "mlp_bias", "attention_bias"),
    "vllm": ("norm_before_fc", "mlp_bias", "attention_bias"),
}
_LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")

# A field with one of these words in its name changes the network. It is read, or known to mean
# nothing for a head, or refused.
_NETWORK = re.compile("window|sink|attn|attention|rope|rotary|norm|bias|scal|softcap|multiplier")
# Whether layers with a window have sinks, and layers without.
_SINKS = {
    "attention_sink_bias": (True, True),
    "add_swa_attention_sink_bias": (True, False),
    "add_full_attention_sink_bias": (False, True),
}
_READ_FIELDS = {
    *(*FLAGS, *_SINKS, "use_aux_norm", "rms_norm_eps", "attention_bias", "mlp_bias", "logit_scale"),
    *("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "rope_interleave"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("sliding_window", "use_sliding_window"),
}
# Of training, of other programs, of experts, which no head has, and of lists that layer_types
# replaces.
_OTHER_FIELDS = {
    *("attention_dropout", "attn_implementation", "_attn_implementation", "max_window_layers"),
    *("_attn_implementation_autoset", "norm_topk_prob", "routed_scaling_factor", "scoring_func"),
    *("attn_pdrop", "sliding_window_pattern", "sliding_window_non_causal"),
}


def head_rules(config: Eagle3Config) -> list[Rule]:
    """Returns the rules of the tensors by canonical names: ``layers.N`` in every dialect."""
    first, *later = config.layers
    norms = {
        "layers.0.input_layernorm": "first.embedding_norm",
        "layers.0.hidden_norm": "first.feature_norm",
        "norm": "norm",
    }
    if config.norm_before_fc:
        norms["input_norm"] = "input_norm"
    if config.fc_norm:
        norms |= {f"fc_norm.{chunk}": f"fc_norm.{chunk}" for chunk in range(len(config.aux_layers))}

    table = [rules.norm(source, path) for source, path in norms.items()]
    table += rules.linear("fc", "fc") + rules.linear("lm_head", "head")
    block = functools.partial(blocks.block, parts={Latent: deepseek.latent})
    table += block(first, "layers.0", "first", without="input")
    for index, layer in enumerate(later):
        table += block(layer, f"layers.{index + 1}", f"upper_layers.{index}")
    return table


def recognise(signs: Signs) -> bool:
    """Recognises EAGLE-3 by a norm that no other head has, or by ``fc`` with an output norm."""
    if signs.has(r"midlayer\.|layers\.\d+\.hidden_norm\.") or "Eagle3" in signs.architecture:
        return True
    if not signs.names and signs.config.get("draft_vocab_size") is not None:
        # Of the official config.json alone, whose architecture is Llama's.
        return True
    has_output = bool({"d2t", "t2d", "norm.weight"} & signs.names)
    return signs.method == "eagle3" or ("fc.weight" in signs.names and has_output)


def dialect(signs: Signs) -> str:
    """Returns the project whose conventions an EAGLE-3 or P-EAGLE head follows."""
    if is_speculators(signs.config):
        return "speculators"
    if signs.has(r"layers\.0\.") and isinstance(signs.config.get("eagle_config"), dict):
        return "modelopt"
    if "Eagle3" not in signs.architecture:
        return "eagle"
    # Files for vLLM have all flags; files for SGLang have only those that are set.
    return "vllm" if all(flag in signs.config for flag in FLAGS) else "sglang"


def is_speculators(values: Mapping[str, Any]) -> bool:
    """Tells whether a ``config.json`` is in the layout of speculators, with nested sizes."""
    return "speculators_model_type" in values or "transformer_layer_config" in values


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Reads an EAGLE-3 head in any dialect.

    The target is needed when the head does not name its auxiliary layers.
    """
    tensors = canonical(stored.tensors, stored.directory)
    config, aux_layers = described(stored.fields, tensors)
    tensors = _unfused(tensors, config)
    return read_fused(KIND, stored, tensors, config, aux_layers, head_rules(config), target)


def read_fused(
    kind: HeadKind,
    stored: Stored,
    tensors: Mapping[str, np.ndarray],
    config: Eagle3Config,
    aux_layers: tuple[int, ...] | None,
    table: list[Rule],
    target: DecoderConfig | None,
    note: str = "",
) -> HeadCheckpoint:
    """Reads the tensors of an EAGLE-3 or P-EAGLE head after its description.

    Args:
        kind: The row of the head's method in the table.
        stored: The files of the head.
        tensors: Its tensors by canonical names.
        config: Its description.
        aux_layers: The auxiliary layers of the file; ``None`` if it names none.
        table: The rules of its tensors.
        target: The target that it drafts for; ``None`` if unknown.
        note: Tensors that were left out.
    """
    where = stored.where
    aux_layers, decided = resolve(
        aux_layers,
        stored.layer_ids,
        dialect=kind.dialect(stored.signs),
        num_target_layers=None if target is None else target.num_layers,
        where=where,
    )
    if aux_layers is not None:
        config = dataclasses.replace(config, aux_layers=aux_layers)

    head = read_as(
        kind,
        stored,
        config,
        table,
        tensors,
        target=target,
        extra_names=DRAFT_VOCABULARY,
        draft_to_target=draft_vocab.read(tensors, config, str(stored.directory)),
        note="; ".join(part for part in (note, decided) if part),
    )

    if aux_layers is not None:
        return head
    if target is None:
        raise TargetNeededError(
            f"{where} names no {AUX}; the default depends on the target, so give the target as well"
            " (--target)"
        )
    with read_from(where):
        config = dataclasses.replace(config, aux_layers=default_aux_layers(target.num_layers))
    return dataclasses.replace(head, config=config)


def named_aux_layers(top: Fields) -> tuple[int, ...] | None:
    """Returns the auxiliary layers that a configuration names, ascending; ``None`` without them.

    The numbers are those of the file. They may count entered or left layers
    (:mod:`eagle3_jax.conversion.heads.layer_ids`).
    """
    section = top.section("eagle_config")
    lists = {}
    for fields, name in ((top, AUX), (section, AUX), (section, "layer_ids")):
        layers = fields.indices(name, entries="layer numbers") or []
        if len(set(layers)) != len(layers):
            raise fields.wrong(name, "expected distinct layers")
        label = f"{name} in eagle_config" if fields is section else name
        # Engines keep them as a sorted set, so the order in the file has no meaning.
        lists[label] = tuple(sorted(layers)) or None
    return agreed(lists, top.where)


def canonical(tensors: Mapping[str, np.ndarray], directory: Path) -> dict[str, np.ndarray]:
    """Returns the tensors with layers named ``layers.N``."""
    return rules.renamed(tensors, _rename, directory)


def _rename(name: str) -> str:
    new = name.removeprefix("model.").replace(".attention_sink_bias", ".sinks")
    new = re.sub(r"^midlayer\.(\d{1,9})\.", r"layers.\1.", new)
    new = re.sub(r"^midlayer\.", "layers.0.", new)
    if match := re.match(r"aux_norm_(low|mid|high)\.", new):
        # The names of SGLang's first EAGLE-3.1 heads.
        chunk = ("low", "mid", "high").index(match[1])
        return f"fc_norm.{chunk}.{new[match.end() :]}"
    if match := re.match(r"additional_layers\.(\d{1,9})\.(.*)", new):
        # In SGLang's additional layers the only input norm is named hidden_norm.
        return f"layers.{int(match[1]) + 1}.{match[2].replace('hidden_norm.', 'input_layernorm.')}"
    return new


def _unfused(tensors: dict[str, np.ndarray], config: Eagle3Config) -> dict[str, np.ndarray]:
    """Returns the tensors with the first two products of latent attention apart.

    Engines keep both as one, and some files do as well: the rows of the queries' latent first.
    """
    parted = dict(tensors)
    for index, layer in enumerate(config.layers):
        mixer = layer.mixer
        if not isinstance(mixer, Latent) or mixer.q_rank is None:
            continue
        attention = f"layers.{index}.self_attn"
        for name in ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"):
            if (tensor := parted.pop(f"{attention}.{name}.weight", None)) is not None:
                rows = np.asarray(tensor)
                parted[f"{attention}.q_a_proj.weight"] = rows[: mixer.q_rank]
                parted[f"{attention}.kv_a_proj_with_mqa.weight"] = rows[mixer.q_rank :]
    return parted


def num_layers(tensors: Mapping[str, np.ndarray]) -> int:
    """Counts the layers of the head by its tensors.

    The field ``num_hidden_layers`` is unreliable: it is 40 for the official Vicuna-13B head, which
    has one layer.
    """
    return len(rules.numbers_in(tensors, r"layers\.(\d{1,9})\.")) or 1


def _switches(top: Fields) -> Fields:
    """Returns the flags at the top level and in ``eagle_config``."""
    section = top.section("eagle_config")
    flags = {}
    for name in ("use_aux_hidden_state", *FLAGS):
        stated = {name: top.get(name), f"{name} in eagle_config": section.get(name)}
        if name == "fc_norm":
            # Its first name.
            stated["use_aux_norm"] = top.get("use_aux_norm")
        flags[name] = agreed(stated, top.where)
    return Fields(flags, top.where)


def described(
    top: Fields, tensors: Mapping[str, np.ndarray]
) -> tuple[Eagle3Config, tuple[int, ...] | None]:
    """Reads the description of a head from its files; see :func:`read_config`."""
    return read_config(
        top,
        lambda _: num_layers(tensors),
        has_sinks=lambda layer: f"layers.{layer}.self_attn.sinks" in tensors,
    )


def read_config(
    top: Fields,
    layers_in: Callable[[Fields], int],
    *,
    has_sinks: Callable[[int], bool] = lambda layer: False,
) -> tuple[Eagle3Config, tuple[int, ...] | None]:
    """Reads the description of a head, and its auxiliary layers if it names them.

    Without auxiliary layers, the description has 0, 1, 2. ``layers_in`` returns the number of
    layers of the head from the section of the file with the sizes. ``has_sinks`` tells whether the
    tensors of a layer have sinks, for files without a field that does.
    """
    nested = top.get("transformer_layer_config") is not None
    geometry = top.section("transformer_layer_config") if nested else top
    model_type = _read_type(top, geometry)

    switches = _switches(top)
    if not switches.flag("use_aux_hidden_state", True):
        raise CheckpointError(
            f"{top.where}: use_aux_hidden_state is false; heads that read the target's final state"
            " are not supported"
        )
    top.section("eagle_config").only(**_MODELOPT)
    for fields in (top, geometry):
        hf_config.refuse_unsupported(fields)
        _refuse_unknown(fields)
    if nested:
        hf_config.refuse_windows(top)

    aux_layers = named_aux_layers(top)
    stack = hf_config.read_stack(geometry)

    # norm_output is the EAGLE-3.1 feedback, as in vLLM. In old SpecForge files it means the norm
    # before lm_head, which every head has. The files look the same, so the doctor mentions it.
    # The default of norm_before_residual is True in speculators' EAGLE-3 heads and False
    # elsewhere, as in vLLM.
    normed = nested and top.get("speculators_model_type") != "peagle"
    with read_from(top.where):
        flags = {
            name: switches.flag(name, normed and name == "norm_before_residual") for name in FLAGS
        }
        config = Eagle3Config(
            **stack,
            layers=_read_layers(geometry, model_type, layers_in(geometry), has_sinks),
            draft_vocab_size=top.integer("draft_vocab_size", stack["vocab_size"]),
            target_width=top.integer("target_hidden_size", stack["width"]),
            aux_layers=aux_layers or (0, 1, 2),
            **flags,
        )
    return config, aux_layers


def _refuse_unknown(fields: Fields) -> None:
    """Refuses fields that change the network by their names, and that are not read."""
    known = _READ_FIELDS | _OTHER_FIELDS
    for name, value in fields.values.items():
        # An empty or false value is a part that a head does not have.
        if value and name not in known and _NETWORK.search(name):
            raise CheckpointError(
                f"{fields.where}: {name} is {short(value)}, which is not read in an EAGLE-3 head;"
                " remove it if the head was trained without it"
            )


def _read_type(top: Fields, geometry: Fields) -> str:
    """Returns the ``model_type`` that says what layers a head has."""
    architecture = " ".join(top.words("architectures"))
    stated = geometry.get("model_type")
    is_latent = "Llama" not in architecture and stated in _LATENT_TYPES
    if "Deepseek" in architecture or is_latent:
        if is_speculators(top.values):
            raise CheckpointError(
                f"{top.where} has latent attention in speculators' layout, which engines read as a"
                " Llama head; give the head with its sizes at the top level"
            )
        return "deepseek_v3"
    is_llama = "LlamaForCausalLMEagle3" in top.words("architectures")
    return read_model_type(geometry, "for an EAGLE-3 head", is_llama=is_llama)


def _read_layers(
    fields: Fields, model_type: str, count: int, has_sinks: Callable[[int], bool]
) -> tuple[LayerConfig, ...]:
    """Reads the layers of a head of this type."""
    mlp = hf_config.read_mlp(fields, bias=fields.flag("mlp_bias"))
    if model_type in _LATENT_TYPES:
        return uniform(count, _read_latent(fields), mlp)

    is_qwen = model_type == "qwen3"
    mixer = hf_config.read_biased_mixer(fields, qk_norm=is_qwen, rope=_read_rope(fields))
    windows = hf_config.read_head_windows(fields, count, switched=is_qwen)
    layers = []
    for index, layer in enumerate(uniform(count, mixer, mlp)):
        layer = with_window(layer, windows[index])
        stated = [
            fields.flag(name) and parts[windows[index] is None]
            for name, parts in _SINKS.items()
            if fields.get(name) is not None
        ]
        sinks = any(stated) if stated else has_sinks(index)
        mixer = dataclasses.replace(grouped(layer), sinks=sinks)
        layers.append(dataclasses.replace(layer, mixer=mixer))
    return tuple(layers)


def _read_latent(fields: Fields) -> Latent:
    """Reads latent attention as engines' heads have it: without biases, windows or an index."""
    hf_config.refuse_windows(fields)
    fields.only(attention_bias=False, rope_interleave=True)
    if fields.get("index_topk") is not None:
        raise fields.wrong("index_topk", "heads with an index of keys are not supported")
    mixer = deepseek.read_latent(fields, interleaved=True)
    return dataclasses.replace(mixer, norm_eps=fields.number("rms_norm_eps"))


def _read_rope(fields: Fields) -> RopeConfig:
    """Reads the rotary embedding; mrope is the usual one, as heads draft text alone.

    A token of text has the same position in time, height and width.
    """
    values = dict(fields.values)
    for name in ("rope_parameters", "rope_scaling"):
        section = fields.section(name).values
        if "mrope" in (section.get("type"), section.get("rope_type")):
            values[name] = {**section, "type": "default", "rope_type": "default"}
    return hf_config.read_rope(
        Fields(values, fields.where), known=("mrope_section", "mrope_interleaved")
    )


def read_model_type(geometry: Fields, purpose: str, *, is_llama: bool = False) -> str:
    """Returns the family whose layers a head has: ``llama`` or ``qwen3``.

    ``is_llama`` means that the architecture is Llama. Some heads name the ``model_type`` of their
    target instead, and engines read the architecture.
    """
    if is_llama and geometry.get("model_type") not in ("llama", "qwen3"):
        return "llama"
    model_type = geometry.one_of("model_type", ("llama", "qwen3"), purpose=purpose)
    if model_type == "qwen3" and geometry.get("head_dim") is None:
        raise CheckpointError(
            f"{geometry.where} has no head_dim, which Qwen3 does not derive from the width; add it"
        )
    return model_type


def stated_layers(top: Fields, geometry: Fields, target: DecoderConfig) -> int:
    """Returns the number of layers of a head by its ``config.json``, for a file without tensors.

    The official layout always has one layer. A number that is copied from the target is ignored: it
    is 40 for the official Vicuna-13B head, which has one layer.
    """
    stated = geometry.size("num_hidden_layers", 1)
    is_official = dialect(Signs.read(top)) == "eagle"
    return 1 if is_official or stated >= target.num_layers else stated


def planned(top: Fields, target: DecoderConfig) -> Eagle3Config:
    """Reads the description of a head without its tensors."""
    return read_config(top, lambda geometry: stated_layers(top, geometry, target))[0]


def write(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """Writes a head for the official code (``eagle``), for SGLang and SpecForge, or for vLLM."""
    refuse_inexpressible(
        dialect, _refusals(checkpoint, dialect), "jax" if dialect == "vllm" else "vllm or --to jax"
    )
    write_fields = {"eagle": _eagle_fields, "sglang": _sglang_fields, "vllm": vllm_fields}[dialect]
    tensors = head_tensors(KIND, checkpoint, head_rules(checkpoint.config))
    return Layout(write_fields(checkpoint), as_midlayer(tensors))


def as_midlayer(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors by the names of all dialects except speculators'."""
    return {name.replace("layers.0.", "midlayer.", 1): value for name, value in tensors.items()}


def is_default_aux(checkpoint: HeadCheckpoint) -> bool:
    """Tells whether an engine would choose these auxiliary layers if the file names none.

    If the target's depth is unknown, it is inferred from the last layer, ``L - 3``.
    """
    layers = checkpoint.config.aux_layers
    return layers == usual_layers(checkpoint.num_target_layers or layers[-1] + 3)


def _refusals(checkpoint: HeadCheckpoint, dialect: str) -> dict[str, Any]:
    """Returns the settings that a layout cannot express, and whether the head has them."""
    config = checkpoint.config
    if any(isinstance(layer.mixer, Latent) for layer in config.layers):
        return _latent_refusals(config, dialect)
    if dialect == "vllm":
        return vllm_refusals(checkpoint)

    mixer = grouped(config.layers[0])
    layers = config.aux_layers
    settings = {name: getattr(config, name) for name in FLAGS}
    settings |= hf_config.bias_fields(config.layers[0])
    settings |= {"qk_norm": mixer.qk_norm, "sliding_window": _has_window(config)}
    settings |= {"attention sinks": _has_sinks(config)}
    dropped = {name: settings[name] for name in _DROPPED[dialect]}
    is_deep = config.num_layers > 1
    if dialect == "sglang":
        # Its additional_layers start from the MLP output of the previous layer without the residual
        # stream.
        return dropped | {
            f"num_layers {config.num_layers} (its further layers drop the residual stream)": (
                is_deep
            ),
            f"aux_layers {layers} (it takes a list that starts with 1 for layer outputs)": (
                layers[0] == 1
            ),
        }

    rope = mixer.rope or RopeConfig()
    linear = (
        f"linear rope with rope_theta {rope.theta:g} and factor {rope.factor:g} (it takes 10000,"
        " above 1)"
    )
    is_other_linear = rope.theta != 10_000.0 or rope.factor <= 1.0
    return dropped | {
        f"num_layers {config.num_layers} (it has one)": is_deep,
        f"aux_layers {layers} (it always takes 2, L//2, L-3)": not is_default_aux(checkpoint),
        linear: rope.type == "linear" and is_other_linear,
        **official_refusals(config, ("default", "linear")),
    }


def _latent_refusals(config: Eagle3Config, dialect: str) -> dict[str, Any]:
    """Returns what a layout cannot express of a head with latent attention."""
    if dialect == "eagle":
        return {"latent attention": True}
    first = config.layers[0]
    mixer = first.mixer
    settings: dict[str, Any] = {name: getattr(config, name) for name in FLAGS}
    settings |= {"mlp_bias": gated(first).bias, "attention_bias": getattr(mixer, "bias", False)}
    refused = {name: settings[name] for name in _DROPPED_LATENT[dialect]}
    refused["layers with different kinds of attention"] = len(set(config.layers)) > 1
    if not isinstance(mixer, Latent):
        return refused

    refused |= {
        f"norms of latents with epsilon {mixer.norm_eps:g} (it takes rms_norm_eps)": (
            mixer.norm_eps != config.norm_eps
        ),
        "channels that rotate in halves (it turns neighbours)": not mixer.rope.interleaved,
    }
    if dialect == "sglang":
        refused |= {
            f"num_layers {config.num_layers} (it has one)": config.num_layers > 1,
            "queries without a latent": mixer.q_rank is None,
            f"aux_layers {config.aux_layers} (it takes a list that starts with 1 for layer"
            " outputs)": config.aux_layers[0] == 1,
        }
    return refused


def _has_window(config: Eagle3Config) -> bool:
    return any(grouped(layer).window is not None for layer in config.layers)


def _has_sinks(config: Eagle3Config) -> bool:
    return any(grouped(layer).sinks for layer in config.layers)


def vllm_refusals(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    """Returns the settings that vLLM's heads do not read, and whether the head has them."""
    layer = checkpoint.config.layers[0]
    biases = hf_config.bias_fields(layer).items()
    refused = {
        f"{name} together with qk_norm": grouped(layer).qk_norm and is_set
        for name, is_set in biases
    }
    return refused | {"attention sinks": _has_sinks(checkpoint.config)}


def _common_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    config = checkpoint.config
    mixer = config.layers[0].mixer
    if isinstance(mixer, Latent):
        kind = {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            # As published. vLLM takes every head of type deepseek_v3 for MTP.
            "model_type": "kimi_k2",
            **deepseek.latent_fields(mixer),
        }
    else:
        kind = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **hf_config.bias_fields(config.layers[0]),
        }
    values = {
        **kind,
        **hf_config.stack_fields(config, checkpoint.dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    # For the official code the field means that the file contains an embedding. SGLang still
    # replaces an embedding of the target's width by the target's.
    if config.target_width != config.width or checkpoint.embedding is not None:
        values["target_hidden_size"] = config.target_width
    return values


def _eagle_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    values: dict[str, Any] = _common_fields(checkpoint) | {"architectures": ["LlamaForCausalLM"]}
    # The configuration class of the official code has neither, and expects exactly two keys of a
    # scaling.
    del values["rope_parameters"], values["head_dim"]
    if values["rope_scaling"]:
        values["rope_scaling"] = {"type": "linear", "factor": values["rope_scaling"]["factor"]}
    return values


def _sglang_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    config = checkpoint.config
    values = _common_fields(checkpoint)
    values |= {name: True for name in FLAGS[1:] if getattr(config, name)}
    # Some versions count entered layers and others left ones. Without the field, all versions use
    # the same default.
    return values if is_default_aux(checkpoint) else values | _aux_fields(config.aux_layers)


def vllm_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    """Returns a ``config.json`` with every flag that vLLM reads."""
    config = checkpoint.config
    values = _common_fields(checkpoint) | _aux_fields(config.aux_layers)
    values |= {name: getattr(config, name) for name in FLAGS}
    values["target_hidden_size"] = config.target_width
    if isinstance(config.layers[0].mixer, Latent):
        return values
    if grouped(config.layers[0]).qk_norm:
        values |= {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
        values["use_sliding_window"] = _has_window(config)
    return values | hf_config.head_window_fields(config)


def _aux_fields(aux_layers: tuple[int, ...]) -> dict[str, Any]:
    """Returns auxiliary layers in three fields; engines and their versions read different ones."""
    ids = {AUX: list(aux_layers)}
    nested = {**ids, "use_aux_hidden_state": True}
    return {**ids, "num_aux_hidden_states": len(aux_layers), "eagle_config": nested}


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """Checks layers, norms and rope, because a fault in them changes no shape."""
    return [_aux_layers(head), _norm_flags(head), _rope(target, head)]


def _head_fields(head: HeadCheckpoint) -> Fields:
    """Reads the ``config.json`` of a head; a native one has no such file, but all settings."""
    return Fields(read_object(head.source, "config.json"), str(head.source / "config.json"))


def _aux_layers(head: HeadCheckpoint) -> Check:
    name = "auxiliary layers"
    layers = head.config.aux_layers
    fields = _head_fields(head)
    named = named_aux_layers(fields) if fields.values else layers
    if named is None:
        # Official heads never name them.
        warning = f". If the head was trained on other layers its drafts are useless; add {AUX}"
        detail = f"{layers}, the default 2, L//2, L-3: config.json names none"
        return Check.report(name, detail, "" if head.dialect == "eagle" else warning)

    detail = f"{layers}, {'the' if is_default_aux(head) else 'not the'} default of this target"
    if named != layers:
        return Check.report(
            name, f"{detail}: {named} in config.json count layers left, as --layer-ids says"
        )
    if layers[0] != 1:
        return Check.report(name, detail)

    entered = entered_after(layers)
    default = (
        ", the default of this target" if entered == usual_layers(head.num_target_layers) else ""
    )
    warning = (
        ", starts with 1, as lists of layers left do; it is read as layers entered. If agreement is"
        " poor, try "
    )
    return Check.report(name, detail, f"{warning}--layer-ids leaving: {entered}{default}")


def _norm_flags(head: HeadCheckpoint) -> Check:
    warning = ""
    if head.dialect == "speculators" and _head_fields(head).get("norm_before_residual") is None:
        warning = "; norm_before_residual is not in config.json, and this layout's default is True"
    elif head.dialect == "sglang" and head.config.norm_output and not head.config.fc_norm:
        warning = (
            "; old SpecForge files meant the norm before lm_head by norm_output, not the EAGLE-3.1"
            " feedback. If the second draft token collapses, set it to false"
        )
    flags = ", ".join(f"{name} {getattr(head.config, name)}" for name in FLAGS)
    return Check.report("norm flags", flags, warning)


def _rope(target: Any, head: HeadCheckpoint) -> Check:
    rope = _rope_of(head.config)
    target_rope = _rope_of(target.config)
    detail = (
        f"head: {rope.type}, theta {rope.theta:g}; target: {target_rope.type}, theta"
        f" {target_rope.theta:g}"
    )
    if rope == target_rope:
        return Check.report("rope", detail)
    if head.dialect == "eagle" and rope.type == "default" and rope.theta == 10_000.0:
        reason = "Heads trained by the official code have theta 10000 whatever the target has"
        return Check.report("rope", f"{detail}. {reason}")

    warning = (
        ". If acceptance falls with the length of the text, set the head's rope to what it was"
        " trained with "
    )
    return Check.report("rope", detail, f"{warning}(the target's, or theta 10000)")


def _rope_of(config: Any) -> RopeConfig:
    """Returns the rotary embedding of the first layer with one, whatever channels are a pair."""
    mixers = (layer.mixer for layer in config.layers)
    ropes = (mixer.rope for mixer in mixers if not isinstance(mixer, GatedDelta))
    rope = next(filter(None, ropes), None) or RopeConfig()
    return dataclasses.replace(rope, interleaved=False)


KIND = HeadKind(
    name="eagle3",
    label="EAGLE-3",
    recognise=recognise,
    classes=(Eagle3Config, Eagle3Drafter),
    read=read,
    read_config=planned,
    write=write,
    layouts=("eagle", "sglang", "vllm"),
    stacks={"upper_layers": lambda config: config.num_layers - 1},
    dialect=dialect,
    variant=lambda config: "EAGLE-3.1" if config.norm_output and config.fc_norm else "EAGLE-3",
    examine=examine,
    suspects=Suspects(
        first="a lost d2t, other auxiliary layers, a shifted token, or a head of another target",
        later="the feedback norm (norm_output)",
    ),
)
