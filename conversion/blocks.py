"""The rules of the layers of targets and heads, by kind of mixer and of MLP.

A family gives the names that differ in its checkpoints. The rest follows from the description of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from eagle3_jax.conversion.rules import Part, Rule, in_turns, linear, norm
from eagle3_jax.models.config import DecoderConfig, Experts, GatedMLP, GroupedQuery, LayerConfig

# The rules of a mixer or an MLP, from its description, the name of its layer in the checkpoint and that in our
# parameters, as in ``model.layers.3`` and ``blocks.3``.
PartRules = Callable[[Any, str, str], list[Rule]]


def attention(config: GroupedQuery, source: str, path: str) -> list[Rule]:
    """Grouped-query attention, ``self_attn`` of a layer.

    With an output gate the projection of queries holds, head by head, the query and then its gate.
    """
    source = f"{source}.self_attn"
    path = f"{path}.attention"
    size = config.head_dim
    places = {"q": config.group, "k": 1, "v": 1} | ({"gate": config.group} if config.output_gate else {})
    rules = []
    for name, part in in_turns(config.num_kv_heads, size, places):
        halves = dict(in_turns(config.num_heads, size, {"q": 1, "gate": 1})) if config.output_gate else {}
        tensor = f"{source}.{'q' if name == 'gate' else name}_proj"
        rules += linear(tensor, f"{path}.qkv", bias=config.qkv_bias, part=part, cut=halves.get(name))
    rules += linear(f"{source}.o_proj", f"{path}.o", bias=config.o_bias)
    if config.qk_norm:
        rules += [norm(f"{source}.{name}_norm", f"{path}.{name}_norm") for name in "qk"]
    return [*rules, Rule(f"{source}.sinks", f"{path}.sinks")] if config.sinks else rules


def swiglu(width: int, source: str, path: str, *, bias: bool = False) -> list[Rule]:
    """A SwiGLU of ``gate_proj``, ``up_proj`` and ``down_proj``."""
    rules = []
    for name, part in in_turns(width, 1, {"gate": 1, "up": 1}):
        rules += linear(f"{source}.{name}_proj", f"{path}.gate_up", bias=bias, part=part)
    return rules + linear(f"{source}.down_proj", f"{path}.down", bias=bias)


def dense(config: GatedMLP, source: str, path: str) -> list[Rule]:
    """A SwiGLU, ``mlp`` of a layer."""
    return swiglu(config.width, f"{source}.mlp", f"{path}.mlp", bias=config.bias)


def separate(config: Experts, source: str, path: str) -> list[Rule]:
    """Experts with three tensors each, ``0.gate_proj.weight`` and so on."""
    rules = []
    for expert in range(config.num_experts):
        for name, part in in_turns(config.width, 1, {"gate": 1, "up": 1}):
            part = part._replace(leading=(expert,))
            rules.append(Rule(f"{source}.{expert}.{name}_proj.weight", f"{path}.gate_up", transpose=True, part=part))
        whole = Part(1, 1, 0, 0, 1, leading=(expert,))
        rules.append(Rule(f"{source}.{expert}.down_proj.weight", f"{path}.down", transpose=True, part=whole))
    return rules


def stacked(config: Experts, source: str, path: str, *, transpose: bool, in_halves: bool) -> list[Rule]:
    """Experts in the tensors ``gate_up_proj`` and ``down_proj``, with biases ``gate_up_proj_bias`` and so on.

    Args:
        config: The experts.
        source: The prefix of the two.
        path: The prefix in our parameters.
        transpose: Whether they are ``[E, out, in]``, instead of ``[E, in, out]``.
        in_halves: Whether all gates come before all ``up``, instead of in turns.
    """
    rules = []
    ours, theirs = (
        dict(in_turns(outer, inner, {"gate": 1, "up": 1})) for outer, inner in ((config.width, 1), (1, config.width))
    )
    pieces = [(ours[name], theirs[name]) for name in ours] if in_halves else [(None, None)]
    for part, cut in pieces:
        rules.append(Rule(f"{source}.gate_up_proj", f"{path}.gate_up", transpose=transpose, part=part, cut=cut))
        if config.bias:
            rules.append(Rule(f"{source}.gate_up_proj_bias", f"{path}.gate_up_bias", part=part, cut=cut))
    rules.append(Rule(f"{source}.down_proj", f"{path}.down", transpose=transpose))
    return [*rules, Rule(f"{source}.down_proj_bias", f"{path}.down_bias")] if config.bias else rules


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
    """A mixture of experts: the names of the mixture, of its router and of the MLP that every token goes through.

    ``kernels`` gives the rules of the experts themselves, which have the prefix ``experts``.
    """
    source = f"{source}.{name}"
    path = f"{path}.mlp"
    rules = linear(f"{source}.{router}", f"{path}.router", bias=config.bias)
    if config.router == "sigmoid":
        rules.append(Rule(f"{source}.{router}.e_score_correction_bias", f"{path}.correction"))
    rules += kernels(config, f"{source}.experts", path)
    if config.shared_width:
        rules += swiglu(config.shared_width, f"{source}.{shared}", f"{path}.shared")
    if config.shared_gate:
        rules += linear(f"{source}.{shared}_gate", f"{path}.shared_gate")
    return rules


# The names of a block's norms in the checkpoint and in our parameters, by their places.
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


def attention_and_mlp(
    config: LayerConfig, source: str, path: str, *, parts: Mapping[type, PartRules] = PARTS
) -> list[Rule]:
    """The parts of every block and its norms, except the norm of its inputs.

    ``parts`` has the rules of those kinds of mixer and of MLP that do not have the usual ones.
    """
    parts = {**PARTS, **parts}
    norms = _NORMS[config.norms].items()
    rules = [norm(f"{source}.{name}_layernorm", f"{path}.{ours}") for name, ours in norms if name != "input"]
    for part in (config.mixer, config.mlp):
        rules += parts[type(part)](part, source, path)
    return rules


def block(config: LayerConfig, source: str, path: str, *, parts: Mapping[type, PartRules] = PARTS) -> list[Rule]:
    """A whole block; see :func:`attention_and_mlp`."""
    first = [norm(f"{source}.input_layernorm", f"{path}.attention_norm")] if config.norms != "after" else []
    return [*first, *attention_and_mlp(config, source, path, parts=parts)]


def decoder(config: DecoderConfig, *, parts: Mapping[type, PartRules] = PARTS) -> list[Rule]:
    """A whole target in the names that the families share; see :func:`attention_and_mlp`."""
    table = [Rule("model.embed_tokens.weight", "embedding"), norm("model.norm", "norm")]
    for index, layer in enumerate(config.layers):
        table += block(layer, f"model.layers.{index}", f"blocks.{index}", parts=parts)
    return table if config.tie_embeddings else table + linear("lm_head", "head")
