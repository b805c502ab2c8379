"""A random target, a head for it and batches, for tests of the training objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from eagle3_jax.loaded import LoadedTarget
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.topology import Chain
from eagle3_jax.training.batches import TTTBatch

VOCAB = 13
DRAFT_VOCAB = 7
STEPS = 3
DRAFT_TO_TARGET = jnp.array([0, 2, 3, 5, 8, 9, 12], jnp.int32)


class Pair(NamedTuple):
    """The arguments of the objective."""

    target: DecoderTarget
    drafter: Eagle3Drafter
    head: Any
    frozen: Any


def random_pair() -> Pair:
    """Returns a random target and head with grouped queries, and unlike widths if possible."""
    mixer = GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=6)
    config = DecoderConfig(vocab_size=VOCAB, width=16, layers=uniform(2, mixer, GatedMLP(width=24)))

    head = Eagle3Config(
        vocab_size=VOCAB,
        width=12,
        layers=uniform(1, mixer, GatedMLP(width=20)),
        norm_eps=1e-5,
        draft_vocab_size=DRAFT_VOCAB,
        target_width=16,
        aux_layers=(0, 1, 2),
    )

    target = DecoderTarget(config)
    drafter = Eagle3Drafter(head, Chain(STEPS))
    keys = jax.random.split(jax.random.key(0), 3)
    embedding = jax.random.normal(keys[2], (VOCAB, 12))

    frozen = {
        "target_params": target.init(keys[0]),
        "embedding": embedding,
        "draft_to_target": DRAFT_TO_TARGET,
    }
    # Large weights, so that attention and argmaxes depend on what is seen.
    return Pair(
        target, drafter, jax.tree.map(lambda leaf: 1.5 * leaf, drafter.init_params(keys[1])), frozen
    )


def make_batch(
    rows: int = 2, length: int = 6, *, seed: int = 0, padding: tuple[int, int] = (0, 0)
) -> TTTBatch:
    """Returns random tokens; the last row is padded by ``padding`` tokens on the left and right."""
    tokens = jax.random.randint(jax.random.key(seed), (rows, length), 0, VOCAB)
    real = np.ones((rows, length), bool)
    real[-1, : padding[0]] = False
    real[-1, length - padding[1] :] = False
    return TTTBatch(tokens=tokens, attention_mask=jnp.asarray(real), loss_mask=jnp.asarray(real))


def frozen_of(target: LoadedTarget, draft_to_target: Any = None) -> Any:
    """Returns the arrays of a target that an objective reads and never trains."""
    params = target.params
    return {
        "target_params": params,
        "embedding": params["embedding"],
        "draft_to_target": draft_to_target,
    }


def tau_of(hits: Sequence[Mapping[Any, bool]]) -> float:
    """Returns the tokens per round of greedy drafting, by its definition.

    Args:
        hits: For each draft position, whether the draft of a row hits. A row that does not count is
            left out.
    """
    tau = 1.0
    for depth in range(len(hits)):
        steps = hits[: depth + 1]
        counted = set.intersection(*map(set, steps))
        tau += float(np.mean([all(step[row] for step in steps) for row in counted]))
    return tau
