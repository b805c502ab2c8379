"""How large a drafter is that no formula of `eagle3_jax.theory` knows: counted from the shapes of its parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

from eagle3_jax.models.config import MOST, DecoderConfig
from eagle3_jax.theory.sizes import NOTHING, DrafterSizes, parameters, runs_of

# Fields of the configurations of heads that draft in one pass: Medusa, P-EAGLE, DFlash.
ONE_PASS = ("num_heads", "mask_token_id", "block_size")


def sizes_of_head(drafter: Any, method: str, target: DecoderConfig) -> DrafterSizes:
    """Of a head with a network of its own, without the embedding that it may bring.

    Matrices in layers are known by their formula; an output projection by its axis; a table that is looked up by its
    first axis; the rest (what fuses, blocks of Medusa, gates) is read in every pass and held in full everywhere.
    """
    import jax

    from eagle3_jax.sharding import VOCAB

    config = drafter.config
    is_axes = lambda leaf: isinstance(leaf, tuple)
    shapes = [leaf.shape for leaf in jax.tree.leaves(drafter.param_shapes())]
    axes = jax.tree.leaves(drafter.param_axes()["head"], is_leaf=is_axes)
    counted = {"output": 0, "embedding": 0, "vectors": 0, "matrices": 0}
    for shape, names in zip(shapes, axes, strict=True):
        size = 1
        for length in shape:
            size *= length
        if len(shape) < 2:
            counted["vectors"] += size
        elif any(getattr(axis, "name", None) == VOCAB for axis in names):
            counted["output"] += size
        else:
            counted["embedding" if shape[0] == config.vocab_size else "matrices"] += size
    runs = tuple(runs_of(config)) if hasattr(config, "layers") else ()
    layers = {name: sum(getattr(run.sizes, name) for run in runs) for name in ("query_output", "key_value", "mlp")}
    matrices = counted.pop("matrices")
    owned = dataclasses.replace(NOTHING, **counted, **layers, fusion=matrices - sum(layers.values()))
    borrowed = drafter.borrows_output and not getattr(config, "own_output", False)
    output = owned.output + (target.vocab_size * target.width if borrowed else 0)
    return DrafterSizes(
        method=method,
        runs=runs,
        read=dataclasses.replace(owned, output=output),
        owned=owned,
        num_features=len(config.aux_layers),
        target_width=config.target_width,
        max_positions=config.max_positions,
        is_parallel=any(hasattr(config, name) for name in ONE_PASS),
        longest=getattr(drafter, "longest", None),
    )


def sizes_of_model(draft: DecoderConfig, method: str, target: DecoderConfig, *, shared: bool = False) -> DrafterSizes:
    """Of a language model that drafts.

    Args:
        draft: Its description.
        method: In words.
        target: What it drafts for.
        shared: Whether all of it is the target's own.
    """
    read = parameters(draft)
    return DrafterSizes(
        method=method,
        runs=tuple(runs_of(draft)),
        read=read,
        owned=NOTHING if shared else read,
        num_features=0,
        target_width=target.width,
        max_positions=draft.max_positions,
        is_parallel=False,
    )


def sizes_of_text(method: str, target: DecoderConfig) -> DrafterSizes:
    """Of what looks at the text alone."""
    nothing = {"runs": (), "read": NOTHING, "owned": NOTHING, "num_features": 0}
    return DrafterSizes(method=method, **nothing, target_width=target.width, max_positions=MOST, is_parallel=True)
