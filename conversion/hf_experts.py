"""Fields of Hugging Face ``config.json`` files about mixtures of experts, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.models.config import DecoderConfig, Experts, GatedMLP, Router

# Names of the number of experts. transformers writes one of them where published files have the other.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_experts(fields: Fields, router: Router, *, width: str = "moe_intermediate_size", **features: Any) -> Experts:
    """A mixture of experts.

    Args:
        fields: The geometry; ``num_experts_per_tok`` and a number of experts are required.
        router: Of the family.
        width: The name of the inner width of an expert.
        features: Further arguments of :class:`Experts`.

    Raises:
        CheckpointError: A field is missing or malformed, or two numbers of experts contradict each other.
    """
    named = {name: fields.size(name) for name in _COUNTS if fields.get(name) is not None}
    if len(set(named.values())) != 1:
        said = " and ".join(f"{name} {count}" for name, count in named.items()) or f"none of {', '.join(_COUNTS)}"
        raise CheckpointError(f"{fields.where} has {said}; expected one number of experts")
    with read_from(fields.where):
        return Experts(
            num_experts=next(iter(named.values())),
            per_token=fields.size("num_experts_per_tok"),
            width=fields.size(width),
            router=router,
            **features,
        )


def read_corrected(fields: Fields) -> Experts:
    """The experts of DeepSeek V3 and of what followed it: sigmoids, a correction that chooses, groups, shared ones.

    Raises:
        CheckpointError: A field is missing or malformed, or says that experts are chosen in another way.
    """
    for name, value in {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}.items():
        if fields.get(name) not in (None, value):
            raise CheckpointError(f"{fields.where}: {name} is {short(fields.get(name))}; only {value!r} is supported")
    fields.require("norm_topk_prob")
    shared = fields.integer("n_shared_experts", 0)
    return read_experts(
        fields,
        "sigmoid",
        normalise=fields.flag("norm_topk_prob"),
        scaling=fields.number("routed_scaling_factor"),
        groups=fields.size("n_group", 1),
        kept_groups=fields.size("topk_group", 1),
        shared_width=fields.size("moe_intermediate_size") * shared,
    )


def corrected_fields(experts: Experts) -> dict[str, Any]:
    """The same on the way out."""
    shared, rest = divmod(experts.shared_width, experts.width)
    if rest:
        raise CheckpointError(
            f"a shared MLP of width {experts.shared_width} is not a whole number of experts of width {experts.width}; "
            "this layout cannot express that, use --to jax"
        )
    return {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.width,
        "n_shared_experts": shared,
        "n_group": experts.groups,
        "topk_group": experts.kept_groups,
        "norm_topk_prob": experts.normalise,
        "routed_scaling_factor": experts.scaling,
    }


def dense_or_sparse(
    num_layers: int, sparse: Callable[[int], bool], dense: Callable[[], GatedMLP], experts: Callable[[], Experts]
) -> Iterator[GatedMLP | Experts]:
    """The MLP of every layer; what no layer has is not read."""
    where = [sparse(layer) for layer in range(num_layers)]
    of = {kind: (experts if kind else dense)() for kind in set(where)}
    return (of[kind] for kind in where)


def size_fields(experts: Experts) -> dict[str, Any]:
    """How many experts there are, how many a token goes through, and their width, as Qwen's configurations say it."""
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.width,
    }


def experts_of(config: DecoderConfig) -> Experts:
    """The experts of a target, which are of one description in every layer that has them.

    Raises:
        CheckpointError: No layer has any.
    """
    found = next((layer.mlp for layer in config.layers if isinstance(layer.mlp, Experts)), None)
    if found is None:
        raise CheckpointError("a target without experts is of another family; use --to jax")
    return found


def dense_layers(config: DecoderConfig) -> list[int]:
    """The layers without experts."""
    return [index for index, layer in enumerate(config.layers) if isinstance(layer.mlp, GatedMLP)]
