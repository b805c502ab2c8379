"""EAGLE-3 heads in the dialects that published heads are stored in: reading.

* ``eagle``: the official layout, ``midlayer.*`` (Li et al.); the configuration is silent about most things.
* ``sglang``: SpecForge's, the same names; also what vLLM calls its SafeAILab format.
* ``vllm``: the same, with every flag that vLLM reads spelt out.
* ``speculators``: ``layers.N.*``, with the geometry nested in ``transformer_layer_config``.
* ``modelopt``: ``layers.N.*``, with an ``eagle_config``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_jax.conversion import blocks, rules
from eagle3_jax.conversion.errors import CheckpointError, TargetNeededError, short
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.heads.dialects import dialect_of
from eagle3_jax.conversion.heads.head import (
    HeadCheckpoint,
    HeadKind,
    Signs,
    Stored,
    Suspects,
    check_fit,
    read_embedding,
)
from eagle3_jax.conversion.heads.layer_ids import resolve
from eagle3_jax.conversion.hf_config import (
    read_head_windows,
    read_mixer,
    read_mlp,
    read_stack,
    refuse_quantised,
    refuse_unsupported,
    refuse_windows,
)
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.models.config import DecoderConfig, Eagle3Config, default_aux_layers, uniform, with_window

if TYPE_CHECKING:
    import numpy as np

_AUX = "eagle_aux_hidden_state_layer_ids"

# Switches of NVIDIA's exporter and the one setting of each that is EAGLE-3 as everyone else computes it.
_MODELOPT = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}


def head_rules(config: Eagle3Config) -> list[Rule]:
    """The rule table, in canonical names: layers are ``layers.N`` whatever the dialect calls them."""
    first, *rest = config.layers
    table = [
        *rules.linear("fc", "fc"),
        rules.norm("layers.0.input_layernorm", "first.embedding_norm"),
        rules.norm("layers.0.hidden_norm", "first.feature_norm"),
        *blocks.attention_and_mlp(first, "layers.0", "first"),
        rules.norm("norm", "norm"),
        *rules.linear("lm_head", "head"),
    ]
    for index, layer in enumerate(rest):
        table += blocks.block(layer, f"layers.{index + 1}", f"rest.{index}")
    if config.norm_before_fc:
        table.append(rules.norm("input_norm", "input_norm"))
    if config.fc_norm:
        table += [rules.norm(f"fc_norm.{chunk}", f"fc_norm.{chunk}") for chunk in range(len(config.aux_layers))]
    return table


def recognise(signs: Signs) -> bool:
    """By a norm that no other head has, by what the file says, or by an output projection beside the fusion."""
    if signs.has(r"midlayer\.|layers\.\d+\.hidden_norm\.") or "Eagle3" in signs.architecture:
        return True
    own = {"d2t", "t2d", "norm.weight"} & signs.names
    return signs.method == "eagle3" or ("fc.weight" in signs.names and bool(own))


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Read an EAGLE-3 head in any dialect.

    Args:
        stored: What lies on disk.
        target: What it drafts for; checked against the head, and needed when the head does not name its auxiliary
            layers.

    Raises:
        CheckpointError: It is incomplete, or does not fit the target; the message says why.
    """
    where = str(stored.directory / "config.json")
    tensors = canonical(stored.tensors, stored.directory)
    config, aux_layers = read_config(Fields(stored.config, where), lambda _: num_layers(tensors, where))
    return read_as(KIND, stored, tensors, config, aux_layers, head_rules(config), target)


def read_as(
    kind: HeadKind,
    stored: Stored,
    tensors: Mapping[str, np.ndarray],
    config: Eagle3Config,
    aux_layers: tuple[int, ...] | None,
    table: list[Rule],
    target: DecoderConfig | None,
    note: str = "",
) -> HeadCheckpoint:
    """A head of EAGLE-3's tensors, and perhaps more, once its description has been read.

    Args:
        kind: What it is.
        stored: What lies on disk.
        tensors: All that is there, in canonical names.
        config: Its description.
        aux_layers: Which features it reads, if it names them.
        table: Its rules.
        target: What it drafts for, see :func:`read`.
        note: What was left out so far.

    Raises:
        CheckpointError: It is incomplete, or does not fit the target; the message says why.
    """
    from eagle3_jax.conversion import draft_vocab

    directory, where = stored.directory, str(stored.directory / "config.json")
    refuse_quantised(Fields(stored.config, where))
    dialect, depth = dialect_of(stored.config, stored.tensors), None if target is None else target.num_layers
    aux_layers, decided = resolve(aux_layers, stored.layer_ids, dialect=dialect, num_target_layers=depth, where=where)
    if aux_layers is not None:
        config = dataclasses.replace(config, aux_layers=aux_layers)
    if target is not None:
        check_fit(config, aux_layers, target, str(directory))
    if "lm_head.weight" not in tensors:
        raise CheckpointError(
            f"{directory} has no lm_head.weight; {kind.label} heads have their own output projection "
            "(some engines would silently use the first rows of the target's)"
        )
    assert kind.classes is not None
    shapes = kind.classes()[1](config).param_shapes()
    known = (r"embed_tokens\.weight", "d2t", "t2d")
    head = rules.read_params(table, tensors, shapes, where=str(directory), known=known)
    draft_to_target = draft_vocab.read(
        tensors, vocab_size=config.vocab_size, draft_vocab_size=config.draft_vocab_size, where=str(directory)
    )
    embedding = read_embedding(config, tensors, directory)
    if aux_layers is None:
        if target is None:
            raise TargetNeededError(
                f"{where} names no {_AUX}; the default depends on the target, so give the target as well"
            )
        config = dataclasses.replace(config, aux_layers=_default_aux(target, where))
    return HeadCheckpoint(
        method=kind.name,
        config=config,
        head=head,
        draft_to_target=draft_to_target,
        embedding=embedding,
        dialect=dialect,
        source=directory,
        dtype=rules.main_dtype(head),
        num_target_layers=depth,
        note="; ".join(part for part in (note, decided) if part),
    )


def named_aux_layers(top: Fields) -> tuple[int, ...] | None:
    """The auxiliary layers that a configuration names, ascending, or ``None``.

    They are as the file has them, whatever they count (:mod:`eagle3_jax.conversion.heads.layer_ids`).

    Raises:
        CheckpointError: The places that may name them disagree, or it is no list of distinct layers.
    """
    section = top.section("eagle_config")
    found = {}
    for fields, name in ((top, _AUX), (section, _AUX), (section, "layer_ids")):
        value = fields.get(name)
        if value is None or value == []:
            continue
        if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            raise CheckpointError(f"{fields.where}: {name} is {short(value)}; expected a list of layer numbers")
        if len(set(value)) != len(value) or min(value) < 0:
            raise CheckpointError(f"{fields.where}: {name} is {short(value)}; expected distinct layers from 0 up")
        # Engines keep them as a sorted set, so the order in the file has no meaning.
        found[f"{fields.where}: {name}"] = tuple(sorted(value))
    if len(set(found.values())) > 1:
        raise CheckpointError("; ".join(f"{k} is {list(v)}" for k, v in found.items()) + "; they must agree")
    return next(iter(found.values()), None)


def canonical(tensors: Mapping[str, np.ndarray], directory: Path) -> dict[str, np.ndarray]:
    """The tensors with layers named ``layers.N``.

    Raises:
        CheckpointError: Two names mean the same tensor.
    """
    renamed: dict[str, np.ndarray] = {}
    origin: dict[str, str] = {}
    for name, value in tensors.items():
        new = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
        if match := re.match(r"additional_layers\.(\d{1,9})\.(.*)", new):
            # SGLang's further layers call their only input norm hidden_norm.
            rest = match[2].replace("hidden_norm.", "input_layernorm.")
            new = f"layers.{int(match[1]) + 1}.{rest}"
        if new in renamed:
            raise CheckpointError(f"{directory} holds {origin[new]} and {name}, which mean the same tensor; remove one")
        renamed[new], origin[new] = value, name
    return renamed


def num_layers(tensors: Mapping[str, np.ndarray], where: str) -> int:
    """Layers of the head, from its tensors.

    The field ``num_hidden_layers`` is no witness: the official Vicuna-13B head says 40 and has one.
    """
    found = sorted({int(match[1]) for name in tensors if (match := re.match(r"layers\.(\d{1,9})\.", name))})
    if not found or found != list(range(len(found))):
        raise CheckpointError(
            f"{where}: the head's layers are numbered {found}; expected 0 up to the last without gaps"
        )
    return len(found)


def _switch(top: Fields, name: str, default: bool) -> bool:
    """A flag that stands at the top level or in ``eagle_config``."""
    section = top.section("eagle_config")
    if top.get(name) is not None and section.get(name) is not None and top.flag(name) != section.flag(name):
        raise CheckpointError(
            f"{top.where}: {name} is {top.flag(name)} but {section.flag(name)} in eagle_config; remove one"
        )
    return top.flag(name, section.flag(name, default))


def read_config(top: Fields, layers_in: Callable[[Fields], int]) -> tuple[Eagle3Config, tuple[int, ...] | None]:
    """The head's description, and its auxiliary layers if it names them (a stand-in of three is in the description).

    Args:
        top: The ``config.json``.
        layers_in: The head's layers, from whatever knows them, given the part of the file that has the geometry.

    Raises:
        CheckpointError: A field is missing, malformed or unsupported.
    """
    nested, parallel = top.get("transformer_layer_config") is not None, top.get("speculators_model_type") == "peagle"
    geometry = top.section("transformer_layer_config") if nested else top
    where = geometry.where
    model_type = geometry.get("model_type")
    if model_type not in ("llama", "qwen3") and "LlamaForCausalLMEagle3" in top.words("architectures"):
        model_type = "llama"  # some name their target's type; engines go by the architecture
    if model_type not in ("llama", "qwen3"):
        raise CheckpointError(
            f"{where}: model_type is {short(model_type)}; expected 'llama' or 'qwen3' for an EAGLE-3 head"
        )
    if model_type == "qwen3" and geometry.get("head_dim") is None:
        raise CheckpointError(f"{where} has no head_dim, which Qwen3 does not derive from the width; add it")
    if not _switch(top, "use_aux_hidden_state", True):
        raise CheckpointError(
            f"{top.where}: use_aux_hidden_state is false; heads that read the target's final state are not supported"
        )
    section = top.section("eagle_config")
    for name, expected in _MODELOPT.items():
        if section.get(name) is not None and section.get(name) != expected:
            raise CheckpointError(
                f"{section.where}: {name} is {short(section.get(name))}; only {expected!r} is supported"
            )
    for fields in (top, geometry):
        refuse_unsupported(fields)
    if nested:
        refuse_windows(top)
    aux_layers = named_aux_layers(top)
    chunks = len(aux_layers) if aux_layers else 3
    for fields in (top, geometry):
        count = fields.integer("num_aux_hidden_states", chunks)
        if count != chunks:
            named = f"names {chunks} layers" if aux_layers else "names none (the default is three)"
            raise CheckpointError(
                f"{fields.where}: num_aux_hidden_states is {count} but {_AUX} {named}; they must agree"
            )
    bias, stack = geometry.flag("attention_bias"), read_stack(geometry)
    mixer = read_mixer(geometry, qkv_bias=bias, o_bias=bias, qk_norm=model_type == "qwen3")
    mlp = read_mlp(geometry, bias=geometry.flag("mlp_bias"))
    with read_from(top.where):
        layers = uniform(layers_in(geometry), mixer, mlp)
        windows = read_head_windows(geometry, len(layers), switched=model_type == "qwen3")
        config = Eagle3Config(
            **stack,
            layers=tuple(with_window(layer, window) for layer, window in zip(layers, windows, strict=True)),
            draft_vocab_size=top.integer("draft_vocab_size", stack["vocab_size"]),
            target_width=top.integer("target_hidden_size", stack["width"]),
            aux_layers=aux_layers or (0, 1, 2),
            # Of speculators' EAGLE-3 heads the default is True, everyone else's is False; vLLM does the same.
            norm_before_residual=_switch(top, "norm_before_residual", nested and not parallel),
            # In vLLM the EAGLE-3.1 feedback. Old SpecForge files meant the norm before lm_head by it, which every head
            # has; the file does not tell the two apart, so vLLM is followed and the doctor mentions it.
            norm_output=_switch(top, "norm_output", False),
            fc_norm=_switch(top, "fc_norm", False),
            norm_before_fc=_switch(top, "norm_before_fc", False),
        )
    return config, aux_layers


def stated_layers(top: Fields, geometry: Fields, target: DecoderConfig) -> int:
    """A head's layers as far as its ``config.json`` is a witness, where there are no tensors to count.

    The official layout has one whatever it says, and a copy of the target's number means nothing: the official
    Vicuna-13B head says 40, which its target has, and has one.

    Raises:
        CheckpointError: It is no number of layers.
    """
    said = geometry.size("num_hidden_layers", 1)
    return 1 if dialect_of(top.values, ()) == "eagle" or said >= target.num_layers else said


def classes() -> tuple[type, type]:
    """Of the configuration and of the drafter."""
    from eagle3_jax.drafters.eagle3 import Eagle3Drafter

    return Eagle3Config, Eagle3Drafter


def planned(top: Fields, target: DecoderConfig) -> Eagle3Config:
    """The head's description without its tensors."""
    return read_config(top, lambda geometry: stated_layers(top, geometry, target))[0]


def _default_aux(target: DecoderConfig, where: str) -> tuple[int, ...]:
    with read_from(where):
        return default_aux_layers(target.num_layers)


KIND = HeadKind(
    name="eagle3",
    label="EAGLE-3",
    recognise=recognise,
    classes=classes,
    read=read,
    read_config=planned,
    layouts=("eagle", "sglang", "vllm"),
    stacks={"rest": lambda config: config.num_layers - 1},
    dialect=dialect_of,
    variant=lambda config: "EAGLE-3.1" if config.norm_output and config.fc_norm else "EAGLE-3",
    suspects=Suspects(
        first="a lost d2t, other auxiliary layers, a shifted token, or a head of another target",
        later="the feedback norm (norm_output)",
    ),
)
