"""Measures the acceptance of a drafter's first tokens by its target, without the decoding loop."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.checks import propose, reads_cache
from eagle3_jax.conversion.heads import HeadCheckpoint, make_drafter
from eagle3_jax.conversion.targets import TargetCheckpoint
from eagle3_jax.drafters.draft_model import DraftModel
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import BFLOAT16, FLOAT32, Precision
from eagle3_jax.topology import Chain
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import EmbeddingTables, Observation, SamplingParams

_DEPTH = 3  # number of draft positions measured for a drafter without a limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """Conditional acceptance of the draft positions."""

    #: Per position ``n``, the share of drafts whose token ``n`` is right, among drafts whose
    #: earlier tokens are right.
    rates: tuple[float, ...]
    counts: tuple[int, ...]  #: Per position, the number of drafts with all earlier tokens right.


def forced_agreement(
    target: TargetCheckpoint,
    draft: HeadCheckpoint | TargetCheckpoint,
    prompts: Sequence[Sequence[int]],
    *,
    num_cuts: int = 21,
) -> Agreement:
    """Drafts from every prefix of the target's greedy continuations (EAGLE's n-alpha on chains).

    This measures all draft positions of a drafter with a limit (the heads of Medusa, the rows of a
    block), and three positions of a drafter without one. A block is never shortened, because a
    block of fewer rows drafts other tokens.

    Args:
        target: The target.
        draft: The head, or the draft model.
        prompts: Token ids; at least two per prompt.
        num_cuts: Number of prefixes per prompt. Each is a greedy token longer than the previous
            one.
    """
    precision = FLOAT32 if target.dtype == "float32" else BFLOAT16
    model = DecoderTarget(target.config, precision)
    params = _place(target.params, precision)
    drafter, draft_params = _drafter(draft, model.tables(params), precision)
    reach = int(drafter.max_depth)

    # One length for all prompts, so that both functions compile once.
    length = max(map(len, prompts)) + num_cuts + reach
    offsets = np.arange(num_cuts)
    empty = drafter.init(draft_params, num_cuts, length + reach)
    right = np.zeros((reach + 1,), np.int64)
    for prompt in prompts:
        tokens = np.zeros((length,), np.int32)
        tokens[: len(prompt)] = prompt
        for last in range(len(prompt) - 1, len(prompt) + num_cuts + reach - 1):
            tokens[last + 1] = _greedy_token(model, params, tokens, last)

        # The root of a draft is the target's own token, and its draft ends inside the continuation.
        cuts = len(prompt) + offsets
        drafted = _drafted_after(
            model, drafter, params, draft_params, empty, tokens, cuts.astype(np.int32)
        )
        truth = tokens[cuts[:, None] + 1 + np.arange(reach)]
        # A token counts only if all tokens before it are right.
        accepted = np.cumprod(np.asarray(drafted) == truth, axis=1).sum(axis=0)
        right += np.concatenate([[cuts.size], accepted])

    counts = right.tolist()
    rates = tuple(after / before if before else 0.0 for before, after in itertools.pairwise(counts))
    return Agreement(rates=rates, counts=tuple(counts[:-1]))


@functools.partial(jax.jit, static_argnums=0)
def _greedy_token(
    model: DecoderTarget, params: Any, tokens: jax.Array, last: jax.Array
) -> jax.Array:
    """Returns the token after position ``last``.

    A pass over all tokens is slow, but there is no cache that could be wrong.
    """
    positions = jnp.arange(tokens.size)[None]
    out = model(params, tokens[None], positions, causal_mask(tokens.size))
    logits = model.unembed(params, out.final[:, last])
    return jnp.argmax(logits[0])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _drafted_after(
    model: DecoderTarget,
    drafter: Any,
    params: Any,
    draft_params: Any,
    state: Any,
    tokens: jax.Array,
    cuts: jax.Array,
) -> jax.Array:
    """Returns drafted tokens ``[rows reach]`` after the first ``cut + 1`` tokens, a row per cut."""
    positions = jnp.arange(tokens.size)[None]
    out = model(
        params, tokens[None], positions, causal_mask(tokens.size), aux_layers=drafter.aux_layers
    )

    rows = cuts.shape[0]
    row_tokens = jnp.broadcast_to(tokens, (rows, tokens.size))
    features = jnp.broadcast_to(out.features, (rows, *out.features.shape[1:]))
    seen = Observation(tokens=row_tokens, features=features, length=cuts, next_token=tokens[cuts])
    state = drafter.observe(draft_params, state, seen)
    keys = jax.random.split(jax.random.key(0), rows)
    cache = None
    if reads_cache(drafter):

        def of_rows(leaf: jax.Array) -> jax.Array:
            return jnp.broadcast_to(leaf, (rows, *leaf.shape[1:]))

        written = jax.tree.map(of_rows, out.written)
        cache = model.init_cache(rows, tokens.size).fill(written, cuts)
    draft = propose(drafter, draft_params, state, keys, SamplingParams(), cache)
    return draft.tokens[:, 1:]


def _drafter(
    draft: HeadCheckpoint | TargetCheckpoint, tables: EmbeddingTables, precision: Precision
) -> tuple[Any, Any]:
    """Returns the drafter, for chains of the measured depth, and its parameters."""
    if isinstance(draft, TargetCheckpoint):
        drafter: Any = DraftModel(DecoderTarget(draft.config, precision))
        params = _place(draft.params, precision)
    else:
        drafter, params = make_drafter(draft, tables, precision, None)
    chain = Chain(getattr(drafter, "longest", None) or _DEPTH)
    return drafter.with_topology(chain, None), params


def _place(params: Any, precision: Precision) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(precision.operands), params)
