"""What a target must write in the loop: the text that it would write alone, whatever is drafted for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int, Key

from eagle3_jax.contract.report import Broken, NotRun
from eagle3_jax.contract.texts import LENGTHS, TargetSubject
from eagle3_jax.decode import LoadedDrafter, SpeculativeDecoder
from eagle3_jax.types import Draft, Observation, SamplingParams

_NEW = 12  # tokens written
_DRAFTS = {  # parents, and how many ids each node is off
    "a chain": ((-1, 0, 1, 2), (0, 0, 0, 0)),
    "a tree": ((-1, 0, 0, 1, 2, 4), (0, 1, 0, 0, 0, 0)),
}


@struct.dataclass(kw_only=True)
class _Place:
    """Where each row stands.

    Attributes:
        root: ``[B]``.
        length: ``[B]``, the root not counted.
    """

    root: Int[Array, " B"]
    length: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class _Scripted:
    """Proposes what its parameters ``[B S]`` say, and another token at every fourth place, so that both happen."""

    parents: tuple[int, ...]
    shifts: tuple[int, ...]
    vocab_size: int

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def levels(self) -> tuple[int, ...]:
        levels = [0]
        for parent in self.parents[1:]:
            levels.append(levels[parent] + 1)
        return tuple(levels)

    @property
    def max_depth(self) -> int:
        return max(self.levels)

    @property
    def is_chain(self) -> bool:
        return self.max_depth == self.num_nodes - 1

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return ()

    def init(self, params: Any, batch: int, capacity: int) -> _Place:
        zero = jnp.zeros((batch,), jnp.int32)
        return _Place(root=zero, length=zero)

    def observe(self, params: Any, state: _Place, seen: Observation) -> _Place:
        root = jnp.where(seen.length > 0, seen.next_token, state.root)
        return _Place(root=root, length=state.length + seen.length)

    def propose(self, params: Any, state: _Place, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        place = state.length[:, None] + jnp.array(self.levels, jnp.int32)[None, :]
        tokens = jnp.take_along_axis(params, jnp.minimum(place, params.shape[1] - 1), axis=1)
        wrong = jnp.array(self.shifts, jnp.int32)[None, :] + (place % 4 == 3).astype(jnp.int32)
        tokens = ((tokens + wrong) % self.vocab_size).at[:, 0].set(state.root)
        wide = lambda values: jnp.broadcast_to(jnp.asarray(values), tokens.shape)
        return Draft(tokens=tokens, parents=wide(np.array(self.parents, np.int32)), valid=wide(True))


def writes_its_own_text(subject: TargetSubject) -> str:
    """Greedy output with right and wrong drafts, chain and tree, is the likeliest token after every token."""
    target, start = subject.target, subject.text()
    script = subject.continuations(start, LENGTHS, _NEW)
    prompts = [start[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    said = []
    for shape, (parents, shifts) in _DRAFTS.items():
        drafter = LoadedDrafter(_Scripted(parents, shifts, target.vocab_size), jnp.asarray(script))
        result = SpeculativeDecoder(target, drafter, stop_tokens=()).generate(prompts, max_new_tokens=_NEW)
        written = start.copy()
        for row, tokens in enumerate(result.tokens):
            written[row, LENGTHS[row] : LENGTHS[row] + len(tokens)] = tokens
        logits = subject.plain(written)
        for row, tokens in enumerate(result.tokens):
            for index, token in enumerate(tokens):
                after = logits[row, LENGTHS[row] + index - 1]
                if after.max() - after[token] > subject.tolerance * subject.scale:
                    gap = (after.max() - after[token]) / subject.scale
                    raise Broken(
                        f"with {shape} drafted, row {row} writes id {token} as its token {index}; its likeliest is "
                        f"{after.argmax()}, by {gap:.1g} of the largest logit"
                    )
        accepted, drafted = int(result.stats.num_accepted_tokens), int(result.stats.num_draft_tokens)
        if not 0 < accepted < drafted:
            raise NotRun(f"the text is its own, but {accepted} of {drafted} tokens of {shape} were accepted")
        said.append(f"{accepted} of {drafted} tokens of {shape} accepted")
    return ", ".join(said)
