"""Planted bugs of block verification; part of the table in ``planted_bugs``."""

from __future__ import annotations

from collections.abc import Callable

import test_block_law
import test_thresholds
from mutants import Mutant

from eagle3_jax.block import _survivals, verify_block


def block_law(function: Callable, old: str, new: str, case: str = "a drawn chain") -> Mutant:
    return Mutant(function, old, new, test_block_law.check_block_law, (case,))


def thresholds(function: Callable, old: str, new: str) -> Mutant:
    return Mutant(function, old, new, test_thresholds.check_thresholds, ("the block rule", 28))


MUTANTS = {
    "a block ends at its first failure": block_law(
        verify_block,
        "count = jnp.max(jnp.where(passed, node, 0), axis=1)",
        "count = jnp.sum(jnp.cumprod((passed | (node == 0)).astype(jnp.int32), axis=1), axis=1) - 1",
    ),
    "the residual of a block forgets what has survived": block_law(
        verify_block,
        "left = jnp.take_along_axis(wanted, chosen, axis=1)[:, 0]",
        "left = jnp.take_along_axis(jnp.maximum(target_probs - following, 0.0), chosen, axis=1)[:, 0]",
    ),
    "the last token of a block passes like those before it": block_law(
        verify_block,
        "jnp.pad(following, ((0, 0), (0, 1), (0, 0)))",
        "jnp.concatenate([following, draft.probs[:, -1:]], axis=1)",
    ),
    "more than everything survives in a block": block_law(
        _survivals, "jnp.minimum(survivals[-1] * ratio[:, index], 1.0)", "survivals[-1] * ratio[:, index]"
    ),
    "the padding of a block was drawn, too": block_law(
        verify_block,
        "jnp.where(chained[:, 1:, None], draft.probs[:, 1:], 0.0)",
        "draft.probs[:, 1:]",
        "a chain cut short",
    ),
    "a block takes 1e-4 of every token away": thresholds(
        verify_block, "draft.probs[:, 1:], 0.0)", "jnp.maximum(draft.probs[:, 1:], 1e-4), 0.0)"
    ),
    "no draft of a block is taken for rarer than 1e-4": thresholds(_survivals, "jnp.finfo(jnp.float32).tiny", "1e-4"),
    "a thousandth that a block leaves is nothing": thresholds(
        verify_block, "keepdims=True) > 0", "keepdims=True) > 1e-3"
    ),
    "a thousandth that a block refuses is nothing": thresholds(
        verify_block, "passes = jnp.where(refused > 0,", "passes = jnp.where(refused > 1e-3,"
    ),
}
