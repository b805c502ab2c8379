"""The rules of the layers of targets and heads, by kind of mixer and of MLP.

A family defines the tensor names that differ in its checkpoints. All others follow from the
description of a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from eagle3_jax.conversion.rules import COMPLETE, Part, Rule, in_turns, linear, norm
from eagle3_jax.models.config import DecoderConfig, Experts, GatedMLP, GroupedQuery, LayerConfig

# Returns the rules of a mixer or an MLP, from its description, the name of its layer in the
# checkpoint and its path in our parameters, as in ``model.layers.3`` and ``blocks.3``.
PartRules = Callable[[Any, str, str], list[Rule]]


def attention(config: GroupedQuery, source: str, path: str, *, gate: str = "q_proj") -> list[Rule]:
    """Returns the rules of grouped-query attention, ``self_attn`` of a layer.

    ``gate`` is the tensor of the output gate. By default the projection of queries holds, head by
    head, the query and then its gate.
    """
    source = f"{source}.self_attn"
    path = f"{path}.attention"
    size = config.head_dim

    # Without "v" the values are the keys; without both they are those of another layer.
    heads = {"q": config.group} | dict.fromkeys("kv"[: config.num_projected], 1)
    halves = {}
    if config.output_gate:
        heads["gate"] = config.group
        if gate == "q_proj":
            halves = dict(in_turns(config.num_heads, size, {"q": 1, "gate": 1}))

    rules = []
    for name, part in in_turns(config.num_kv_heads, size, heads):
        tensor = f"{source}.{gate if name == 'gate' else name + '_proj'}"
        rules += linear(
            tensor, f"{path}.qkv", bias=config.qkv_bias, part=part, cut=halves.get(name, COMPLETE)
        )

    rules += linear(f"{source}.o_proj", f"{path}.o", bias=config.o_bias)
    if config.qk_norm:
        names = "q" if config.shares_keys else "qk"
        rules += [norm(f"{source}.{name}_norm", f"{path}.{name}_norm") for name in names]
    if config.sinks:
        rules.append(Rule(f"{source}.sinks", f"{path}.sinks"))
    return rules


gated_attention = functools.partial(attention, gate="gate_proj")


def swiglu(width: int, source: str, path: str, *, bias: bool = False) -> list[Rule]:
    """Returns the rules of a SwiGLU of ``gate_proj``, ``up_proj`` and ``down_proj``."""
    rules = []
    for name, part in in_turns(width, 1, {"gate": 1, "up": 1}):
        rules += linear(f"{source}.{name}_proj", f"{path}.gate_up", bias=bias, part=part)
    return rules + linear(f"{source}.down_proj", f"{path}.down", bias=bias)


def alternating_halves(width: int) -> dict[Part, Part]:
    """Returns the parts of alternating gates and ups, and where a tensor has them.

    The tensor has all gates before all ups.
    """
    names = {"gate": 1, "up": 1}
    parts = (part for _, part in in_turns(width, 1, names))
    cuts = (cut for _, cut in in_turns(1, width, names))
    return dict(zip(parts, cuts, strict=True))


def dense(config: GatedMLP, source: str, path: str) -> list[Rule]:
    """Returns the rules of a SwiGLU, ``mlp`` of a layer."""
    return swiglu(config.width, f"{source}.mlp", f"{path}.mlp", bias=config.bias)


def separate(config: Experts, source: str, path: str) -> list[Rule]:
    """Returns the rules of experts with three tensors each, ``0.gate_proj.weight`` and so on."""
    rules = []
    for expert in range(config.num_experts):
        for name, part in in_turns(config.width, 1, {"gate": 1, "up": 1}):
            part = part._replace(leading=(expert,))
            rules.append(
                Rule(
                    f"{source}.{expert}.{name}_proj.weight",
                    f"{path}.gate_up",
                    transpose=True,
                    part=part,
                )
            )
        matrix = Part(leading=(expert,))
        rules.append(
            Rule(f"{source}.{expert}.down_proj.weight", f"{path}.down", transpose=True, part=matrix)
        )
    return rules


def stacked(
    config: Experts, source: str, path: str, *, transpose: bool, in_halves: bool
) -> list[Rule]:
    """Returns the rules of experts stacked in ``gate_up_proj`` and ``down_proj``.

    Their biases are ``gate_up_proj_bias`` and ``down_proj_bias``.

    Args:
        config: The experts.
        source: The prefix of the two tensors.
        path: The prefix in our parameters.
        transpose: Whether the tensors are ``[E, out, in]``, instead of ``[E, in, out]``.
        in_halves: Whether all gates come before all ``up``, instead of alternating.
    """
    rules = []
    pieces = {COMPLETE: COMPLETE}
    if in_halves:
        pieces = alternating_halves(config.width)
    for part, cut in pieces.items():
        rules.append(
            Rule(
                f"{source}.gate_up_proj", f"{path}.gate_up", transpose=transpose, part=part, cut=cut
            )
        )
        if config.bias:
            rules.append(
                Rule(f"{source}.gate_up_proj_bias", f"{path}.gate_up_bias", part=part, cut=cut)
            )

    rules.append(Rule(f"{source}.down_proj", f"{path}.down", transpose=transpose))
    if config.bias:
        rules.append(Rule(f"{source}.down_proj_bias", f"{path}.down_bias"))
    return rules


def experts(
    config: Experts,
    source: str,
    path: str,
    *,
    name: str = "mlp",
    router: str = "gate",
    shared: str = "shared_experts",
    kernels: PartRules = separate,
) -> list[Rule]:
    """Returns the rules of a mixture of experts.

    Args:
        config: The experts.
        source: The prefix of the layer.
        path: The prefix in our parameters.
        name: Name of the mixture in the layer.
        router: Name of the router in the mixture.
        shared: Name of the MLP that every token goes through.
        kernels: Returns the rules of the experts themselves, which have the prefix ``experts``.
    """
    source = f"{source}.{name}"
    path = f"{path}.mlp"
    rules = linear(f"{source}.{router}", f"{path}.router", bias=config.bias)
    if config.routing.has_correction:
        rules.append(Rule(f"{source}.{router}.e_score_correction_bias", f"{path}.correction"))
    rules += kernels(config, f"{source}.experts", path)
    if config.shared_width:
        rules += swiglu(config.shared_width, f"{source}.{shared}", f"{path}.shared")
    if config.shared_gate:
        rules += linear(f"{source}.{shared}_gate", f"{path}.shared_gate")
    return rules


# The names of a block's norms in the checkpoint and in our parameters, by the position of the
# norms.
_NORMS: dict[str, dict[str, str]] = {
    "before": {"input": "attention_norm", "post_attention": "mlp_norm"},
    "after": {"post_attention": "attention_post_norm", "post_feedforward": "mlp_post_norm"},
    "around": {
        "input": "attention_norm",
        "post_attention": "attention_post_norm",
        "pre_feedforward": "mlp_norm",
        "post_feedforward": "mlp_post_norm",
    },
    "parallel": {"input": "attention_norm"},
}
# The usual rules of each kind.
PARTS: dict[type, PartRules] = {GroupedQuery: attention, GatedMLP: dense, Experts: experts}


def block(
    config: LayerConfig,
    source: str,
    path: str,
    *,
    parts: Mapping[type, PartRules] = PARTS,
    without: str = "",
) -> list[Rule]:
    """Returns the rules of a block.

    ``parts`` has the rules of kinds of mixers and MLPs that differ from :data:`PARTS`. ``without``
    is the name of a norm that the block does not have.
    """
    rules = []
    for name, our_name in _NORMS[config.norms].items():
        if name != without:
            rules.append(norm(f"{source}.{name}_layernorm", f"{path}.{our_name}"))
    for part in (config.mixer, config.mlp):
        part_rules = {**PARTS, **parts}[type(part)]
        rules += part_rules(part, source, path)

    if config.input_width:
        rules += linear(f"{source}.per_layer_input_gate", f"{path}.input_gate")
        rules += linear(f"{source}.per_layer_projection", f"{path}.input_projection")
        rules.append(norm(f"{source}.post_per_layer_input_norm", f"{path}.input_norm"))
    if config.output_scale:
        rules.append(Rule(f"{source}.layer_scalar", f"{path}.output_scale"))
    return rules


def decoder(config: DecoderConfig, *, parts: Mapping[type, PartRules] = PARTS) -> list[Rule]:
    """Returns the rules of a target in the names that the families share; see :func:`block`."""
    table = [Rule("model.embed_tokens.weight", "embedding"), norm("model.norm", "norm")]
    for index, layer in enumerate(config.layers):
        table += block(layer, f"model.layers.{index}", f"blocks.{index}", parts=parts)
    if config.input_width:
        table.append(Rule("model.embed_tokens_per_layer.weight", "input_embedding"))
        table += linear("model.per_layer_model_projection", "input_projection")
        table.append(norm("model.per_layer_projection_norm", "input_norm"))
    return table if config.tie_embeddings else table + linear("lm_head", "head")
