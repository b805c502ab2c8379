"""Features and draft logits of every round, compared with those read from inside vLLM."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Key

from eagle3_jax import LoadedDrafter, SpeculativeDecoder
from eagle3_jax.drafters.eagle3 import Eagle3Drafter, Eagle3Head
from eagle3_jax.types import Draft, Observation, SamplingParams
from validation.engines.vllm.bridge import Tokens


@struct.dataclass(kw_only=True)
class RecordingState:
    """A drafter's state and its last observation."""

    inner: Any
    seen: Observation


@dataclasses.dataclass(frozen=True)
class Recording:
    """Wraps a drafter and keeps the last observation from the loop."""

    drafter: Eagle3Drafter

    num_nodes = property(lambda self: self.drafter.num_nodes)
    max_depth = property(lambda self: self.drafter.max_depth)
    aux_layers = property(lambda self: self.drafter.aux_layers)
    is_chain = property(lambda self: self.drafter.is_chain)

    def init(self, params: Any, batch: int, capacity: int) -> RecordingState:
        config = self.drafter.config
        none = jnp.zeros((batch,), jnp.int32)
        seen = Observation(
            tokens=jnp.zeros((batch, capacity), jnp.int32),
            features=jnp.zeros(
                (batch, capacity, len(config.aux_layers), config.target_width), jnp.float32
            ),
            length=none,
            next_token=none,
        )
        return RecordingState(inner=self.drafter.init(params, batch, capacity), seen=seen)

    def observe(self, params: Any, state: RecordingState, seen: Observation) -> RecordingState:
        fed = seen.tokens.shape[1]
        padded = Observation(  # as long as any observation, because a state keeps its shapes
            tokens=state.seen.tokens.at[:, :fed].set(seen.tokens),
            features=state.seen.features.at[:, :fed].set(seen.features.astype(jnp.float32)),
            length=seen.length,
            next_token=seen.next_token,
        )
        return RecordingState(inner=self.drafter.observe(params, state.inner, seen), seen=padded)

    def propose(
        self, params: Any, state: RecordingState, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        draft = self.drafter.propose(params, state.inner, keys, sampling)
        recording = (
            None if draft.state is None else RecordingState(inner=draft.state, seen=state.seen)
        )
        return dataclasses.replace(draft, state=recording)


@dataclasses.dataclass(frozen=True)
class Closeness:
    """How far two implementations are apart, over all rounds of a prompt."""

    rounds: int  #: Compared.
    features: (
        float  #: Largest difference of a feature, over the root mean square of vLLM's features.
    )
    logits: float  #: Largest difference of a draft logit, over that of vLLM's logits.
    drafts_differ: int  #: Rounds in which other tokens were drafted.


def recording(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """The same decoder with a head that keeps its observations."""
    drafter = decoder.loop.drafter
    assert isinstance(drafter, Eagle3Drafter)
    return SpeculativeDecoder(
        decoder.target,
        LoadedDrafter(Recording(drafter), decoder.drafter.params),
        stop_tokens=decoder.stop_tokens,
    )


def compare_with_recorded(
    decoder: SpeculativeDecoder,
    prompt: Tokens,
    recorded: list[dict[str, Any]],
    *,
    max_new_tokens: int,
    batch_size: int = 1,
) -> Closeness:
    """Replay a prompt and compare, round by round, what the head was fed and what it answered.

    ``decoder`` comes from :func:`recording`; a batch of copies reuses programs that were compiled
    for such a batch.
    """
    drafter = decoder.loop.drafter.drafter  # type: ignore[attr-defined]
    params = decoder.drafter.params
    draft_to_target = np.asarray(params["draft_to_target"])
    state = decoder.prefill([prompt] * batch_size, max_new_tokens=max_new_tokens)

    worst_features = worst_logits = 0.0
    differ = 0
    rounds = 0
    for theirs in recorded:
        # The last draft of a request is never verified, and we do not make it.
        if not bool(state.running[0]):
            break
        rounds += 1

        seen = state.drafter.seen
        count = int(seen.length[0])
        fed = np.asarray(seen.features[0, :count]).reshape(count, -1)
        assert np.asarray(seen.tokens[0, :count]).tolist() == theirs["tokens"][:count], (
            "the head was fed other tokens"
        )
        # The rows after these belong to refused drafts.
        worst_features = max(worst_features, _relative(fed, np.array(theirs["features"])[:count]))

        draft, logits = drafted(drafter, params, state.drafter.inner, state.keys, state.sampling)
        for ours, their_logits in zip(logits, theirs["logits"], strict=True):
            expected = np.array([their_logits[index] for index in draft_to_target])
            worst_logits = max(worst_logits, _relative(np.asarray(ours), expected))
        differ += np.asarray(draft.tokens[0, 1:]).tolist() != theirs["drafts"]
        state = decoder.step(state).state

    return Closeness(rounds, worst_features, worst_logits, differ)


def _relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.sqrt(np.mean(np.square(theirs))))


@functools.partial(jax.jit, static_argnums=0)
def drafted(
    drafter: Eagle3Drafter,
    params: Any,
    state: Any,
    keys: Key[Array, " B"],
    sampling: SamplingParams,
) -> tuple[Draft, list[Array]]:
    """A draft, and the logits ``[W]`` of row 0 at each of its steps."""
    step_logits: list[Array] = []
    original = Eagle3Head.logits

    def logits(head: Eagle3Head, output: Array) -> Array:
        values = original(head, output)
        step_logits.append(values[0, 0])
        return values

    with mock.patch.object(Eagle3Head, "logits", logits):
        draft = drafter.propose(params, state, keys, sampling)
    return draft, step_logits
