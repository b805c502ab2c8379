"""The models of Tunix as targets: their descriptions, and their parameters in both directions.

A table per family names each parameter of a block, and how it is made from Tunix's. The same table
gives Tunix's parameters back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eagle3_jax.models.config import (
    DecoderConfig,
    GatedMLP,
    GroupedQuery,
    LayerConfig,
    RopeConfig,
)

# The base of the rotation in Tunix's Llama 3 and Qwen 3, whose attention does not pass on the
# `rope_theta` of the configuration.
_FIXED_THETA = 1_000_000.0
# Longest text. Rotary positions have no end of their own, and Tunix's configurations name none.
_MAX_POSITIONS = 131_072


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A parameter of Tunix's.

    Attributes:
        name: Its path in a block or in the model, joined by dots.
        inputs: The axes that a product sums over. A low-rank update is ``A`` of these axes and the
            rank, times ``B`` of the rank and the other axes.
    """

    name: str
    inputs: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A parameter of ours, made from those of Tunix's.

    Attributes:
        name: Its path in a block or in the model, joined by dots.
        tensors: Those of Tunix's that it is made from.
        join: Makes it from their arrays.
        split: Makes their arrays from it.
    """

    name: str
    tensors: tuple[Tensor, ...]
    join: Callable[..., Array]
    split: Callable[[Array], Sequence[Array]]


def _same(name: str, tensor: Tensor) -> Rule:
    return Rule(name, (tensor,), lambda array: array, lambda array: (array,))


def _fused_mlp() -> Rule:
    """Gate and up of an MLP, whose columns alternate."""
    return Rule(
        "mlp.gate_up.kernel",
        (Tensor("mlp.gate_proj.kernel"), Tensor("mlp.up_proj.kernel")),
        lambda gate, up: jnp.stack([gate, up], axis=-1).reshape(gate.shape[0], -1),
        lambda both: tuple(jnp.moveaxis(both.reshape(both.shape[0], -1, 2), -1, 0)),
    )


def _output(name: str, mixer: GroupedQuery) -> Rule:
    """The output projection of attention."""
    heads = (mixer.num_heads, mixer.head_dim)
    return Rule(
        "attention.o.kernel",
        (Tensor(name, (0, 1)),),
        lambda array: array.reshape(-1, array.shape[-1]),
        lambda array: (array.reshape(*heads, -1),),
    )


def _fuse(queries: Array, keys: Array, values: Array, *, group: int) -> Array:
    """Joins ``[... N H]``, ``[... C H]`` and ``[... C H]`` to columns ``[C, group + 2, H]``."""
    *rows, num_kv_heads, size = keys.shape
    by_key_head = queries.reshape(*rows, num_kv_heads, group, size)
    both = [x.reshape(*rows, num_kv_heads, 1, size) for x in (keys, values)]
    return jnp.concatenate([by_key_head, *both], axis=-2).reshape(*rows, -1)


def _unfuse(fused: Array, mixer: GroupedQuery) -> tuple[Array, Array, Array]:
    """Takes :func:`_fuse` back."""
    *rows, _ = fused.shape
    columns = fused.reshape(*rows, mixer.num_kv_heads, mixer.group + 2, mixer.head_dim)
    queries = columns[..., : mixer.group, :].reshape(*rows, mixer.num_heads, mixer.head_dim)
    return queries, columns[..., mixer.group, :], columns[..., mixer.group + 1, :]


def _by_inputs(mixer: GroupedQuery) -> list[Rule]:
    """Attention of Llama and Qwen: projections ``[D N H]``, and in Qwen 2 biases ``[N·H]``."""
    size = mixer.head_dim
    rules = [
        Rule(
            "attention.qkv.kernel",
            tuple(Tensor(f"attn.{part}_proj.w") for part in "qkv"),
            lambda *parts: _fuse(*parts, group=mixer.group),
            lambda fused: _unfuse(fused, mixer),
        ),
        _output("attn.o_proj.w", mixer),
    ]
    if mixer.qkv_bias:
        rules.append(
            Rule(
                "attention.qkv.bias",
                tuple(Tensor(f"attn.{part}_bias") for part in "qkv"),
                lambda *parts: _fuse(
                    *(part.reshape(-1, size) for part in parts), group=mixer.group
                ),
                lambda fused: [part.reshape(-1) for part in _unfuse(fused, mixer)],
            )
        )
    if mixer.qk_norm:
        rules += [
            _same("attention.q_norm.scale", Tensor("attn.q_norm.w")),
            _same("attention.k_norm.scale", Tensor("attn.k_norm.w")),
        ]
    return rules


def _by_heads(mixer: GroupedQuery) -> list[Rule]:
    """Attention of Gemma 3: ``[N D H]`` and ``[2 C D H]``, or one ``[3 N D H]``."""

    def inputs_first(array: Array) -> Array:
        return jnp.moveaxis(array, -2, 0)

    def heads_first(array: Array) -> Array:
        return jnp.moveaxis(array, 0, -2)

    if mixer.num_heads == mixer.num_kv_heads:
        tensors = (Tensor("attn.qkv_einsum.w", (2,)),)
        rule = Rule(
            "attention.qkv.kernel",
            tensors,
            lambda qkv: _fuse(*(inputs_first(part) for part in qkv), group=mixer.group),
            lambda fused: (jnp.stack([heads_first(part) for part in _unfuse(fused, mixer)]),),
        )
    else:
        tensors = (Tensor("attn.q_einsum.w", (1,)), Tensor("attn.kv_einsum.w", (2,)))

        def split(fused: Array) -> tuple[Array, Array]:
            queries, *kv = (heads_first(part) for part in _unfuse(fused, mixer))
            return queries, jnp.stack(kv)

        rule = Rule(
            "attention.qkv.kernel",
            tensors,
            lambda q, kv: _fuse(*(inputs_first(part) for part in (q, *kv)), group=mixer.group),
            split,
        )

    return [
        rule,
        _output("attn.attn_vec_einsum.w", mixer),
        _same("attention.q_norm.scale", Tensor("attn._query_norm.scale")),
        _same("attention.k_norm.scale", Tensor("attn._key_norm.scale")),
    ]


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of Tunix's models.

    Attributes:
        config: Describes a model, from Tunix's configuration.
        attention: The rules of a block's attention.
        norms: Names of the norms of a block, by ours.
        norm: Name of the weights of a norm.
    """

    config: Callable[[Any], DecoderConfig]
    attention: Callable[[GroupedQuery], list[Rule]]
    norms: Mapping[str, str]
    norm: str

    def rules(self, config: DecoderConfig) -> dict[str, Rule]:
        """Returns the rule of every parameter by its path, with Tunix's paths in the model."""
        ours: dict[str, Rule] = {
            "embedding": _same("embedding", Tensor("embedder.input_embedding")),
            "norm.scale": _same("norm.scale", Tensor(f"final_norm.{self.norm}")),
        }
        if not config.tie_embeddings:
            ours["head.kernel"] = _same("head.kernel", Tensor("lm_head.w"))

        for index, layer in enumerate(config.layers):
            assert isinstance(layer.mixer, GroupedQuery)
            block = [*self.attention(layer.mixer), _fused_mlp()]
            block.append(_same("mlp.down.kernel", Tensor("mlp.down_proj.kernel")))
            for name, theirs in self.norms.items():
                block.append(_same(f"{name}.scale", Tensor(f"{theirs}.{self.norm}")))
            for rule in block:
                tensors = tuple(
                    dataclasses.replace(tensor, name=f"layers.{index}.{tensor.name}")
                    for tensor in rule.tensors
                )
                ours[f"blocks.{index}.{rule.name}"] = dataclasses.replace(rule, tensors=tensors)
        return ours


# Descriptions


def _mlp(config: Any, activation: Any = "silu") -> GatedMLP:
    return GatedMLP(width=config.hidden_dim, activation=activation)


def _by_layers(config: Any, mixer: GroupedQuery, *, tied: bool) -> DecoderConfig:
    """Describes Llama and Qwen, whose layers are equal."""
    layer = LayerConfig(mixer=mixer, mlp=_mlp(config))
    return DecoderConfig(
        vocab_size=config.vocab_size,
        width=config.embed_dim,
        layers=(layer,) * config.num_layers,
        max_positions=_MAX_POSITIONS,
        norm_eps=config.norm_eps,
        norm_kind="float32",
        tie_embeddings=tied,
    )


def _mixer(config: Any, theta: float, **features: Any) -> GroupedQuery:
    return GroupedQuery(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=RopeConfig(theta=theta),
        **features,
    )


def _llama3(config: Any) -> DecoderConfig:
    return _by_layers(config, _mixer(config, _FIXED_THETA), tied=config.weight_tying)


def _qwen2(config: Any) -> DecoderConfig:
    mixer = _mixer(config, float(config.rope_theta), qkv_bias=True)
    return _by_layers(config, mixer, tied=config.use_tied_embedding)


def _qwen3(config: Any) -> DecoderConfig:
    if config.num_experts is not None:
        raise ValueError(
            f"the policy has {config.num_experts} experts; Tunix's Qwen 3 has a table without"
            " experts only"
        )
    mixer = _mixer(config, _FIXED_THETA, qk_norm=True)
    return _by_layers(config, mixer, tied=config.use_tied_embedding)


def _gemma3(config: Any) -> DecoderConfig:
    if config.vision_config is not None:
        raise ValueError("the policy is Gemma 3 with images; expected one of text (text_only=True)")
    scale = config.head_dim**-0.5
    if config.query_pre_attn_norm.name != "BY_ONE_OVER_SQRT_HEAD_DIM":
        scale = (config.embed_dim // config.num_heads) ** -0.5

    def mixer(index: int) -> GroupedQuery:
        # Of six layers the last attends to the whole text.
        is_local = (index + 1) % 6 > 0
        kind = "local" if is_local else "global"
        factor = getattr(config, f"{kind}_scale_factor")
        rope = RopeConfig(
            theta=float(getattr(config, f"{kind}_base_frequency")),
            type="default" if factor == 1.0 else "linear",
            factor=factor,
        )
        plain = _mixer(config, 1.0, qk_norm=True, scale=scale)
        window = config.sliding_window_size if is_local else None
        return dataclasses.replace(plain, rope=rope, window=window)

    mlp = _mlp(config, "gelu-tanh")
    mixers = [mixer(index) for index in range(config.num_layers)]
    return DecoderConfig(
        vocab_size=config.num_embed,
        width=config.embed_dim,
        layers=tuple(LayerConfig(mixer=mixer, mlp=mlp, norms="around") for mixer in mixers),
        max_positions=_MAX_POSITIONS,
        norm_eps=1e-6,
        norm_kind="zero-centred",
        tie_embeddings=True,
        embedding_scale=config.embed_dim**0.5,
    )


_NORMS_BEFORE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_NORMS_AROUND = {
    "attention_norm": "pre_attention_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "pre_ffw_norm",
    "mlp_post_norm": "post_ffw_norm",
}

#: The families by the class of Tunix's model.
FAMILIES: Mapping[str, Family] = {
    "tunix.models.llama3.model.Llama3": Family(_llama3, _by_inputs, _NORMS_BEFORE, "w"),
    "tunix.models.qwen2.model.Qwen2": Family(_qwen2, _by_inputs, _NORMS_BEFORE, "w"),
    "tunix.models.qwen3.model.Qwen3": Family(_qwen3, _by_inputs, _NORMS_BEFORE, "w"),
    "tunix.models.gemma3.model.Gemma3": Family(_gemma3, _by_heads, _NORMS_AROUND, "scale"),
}


@dataclasses.dataclass(frozen=True)
class Table:
    """The parameters of one model, in both directions.

    Attributes:
        config: The model's description.
        rules: The rule of each of our parameters, by its path.
        lora_alpha: ``alpha`` of low-rank updates, which are merged as ``W + alpha / rank · A B``;
            ``None`` if the model has none.
    """

    config: DecoderConfig
    rules: Mapping[str, Rule]
    lora_alpha: float | None = None

    def to_ours(self, state: Mapping[str, Array]) -> dict[str, Any]:
        """Returns our parameters, from Tunix's by path. It can be compiled.

        Raises:
            ValueError: A parameter is missing.
        """
        ours = {
            name: rule.join(*(self._merged(state, tensor) for tensor in rule.tensors))
            for name, rule in self.rules.items()
        }
        return _nested(ours)

    def to_theirs(self, params: Mapping[str, Any]) -> dict[str, Array]:
        """Returns Tunix's parameters by path, from ours."""
        ours = flat(params)
        theirs: dict[str, Array] = {}
        for name, rule in self.rules.items():
            names = [tensor.name for tensor in rule.tensors]
            theirs.update(zip(names, rule.split(ours[name]), strict=True))
        return theirs

    def check(self, names: Sequence[str]) -> None:
        """Raises unless Tunix's parameters are those of the table, low-rank updates aside.

        Raises:
            ValueError: One is missing or not known; the message names it.
        """
        expected = {tensor.name for rule in self.rules.values() for tensor in rule.tensors}
        present = {name for name in names if "_lora_" not in name}
        for name in sorted(expected - present):
            raise ValueError(f"the policy has no parameter {name}; expected it in this family")
        for name in sorted(present - expected):
            raise ValueError(
                f"the policy has a parameter {name}, which the table of its family does not know"
            )
        if self.lora_alpha is None and len(present) < len(names):
            raise ValueError(
                "the policy has low-rank updates; give SpeculativeRollout their lora_alpha"
            )

    def _merged(self, state: Mapping[str, Array], tensor: Tensor) -> Array:
        """Returns a parameter with its low-rank update, if it has one."""
        weight = state[tensor.name]
        a = state.get(f"{tensor.name}_lora_a")
        if a is None or self.lora_alpha is None:
            return weight
        b = state[f"{tensor.name}_lora_b"]
        inputs = [weight.shape[axis] for axis in tensor.inputs]
        outputs = [size for axis, size in enumerate(weight.shape) if axis not in tensor.inputs]
        update = a.reshape(-1, a.shape[-1]) @ b.reshape(b.shape[0], -1)
        update = jnp.moveaxis(update.reshape(*inputs, *outputs), range(len(inputs)), tensor.inputs)
        return weight + (self.lora_alpha / b.shape[0] * update).astype(weight.dtype)


def table_of(model: Any, lora_alpha: float | None = None) -> Table:
    """Returns the table of one of Tunix's models.

    Raises:
        ValueError: Its family has no table, or the model has a part that the table lacks.
    """
    # Qwix adds low-rank updates in a class of its own.
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__]
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        known = ", ".join(name.rsplit(".", 1)[1] for name in FAMILIES)
        raise ValueError(f"the policy is a {names[0]}; expected a model of Tunix's: {known}")
    config = family.config(model.config)
    return Table(config, family.rules(config), lora_alpha)


def flat(params: Any) -> dict[str, Array]:
    """Returns arrays by their paths, joined by dots."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {".".join(str(_entry(key)) for key in path): leaf for path, leaf in leaves}


def _entry(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))


def _nested(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Takes :func:`flat` back; blocks have numbers as keys."""
    tree: dict[Any, Any] = {}
    for name, array in arrays.items():
        *path, last = (int(part) if part.isdigit() else part for part in name.split("."))
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = array
    return tree
