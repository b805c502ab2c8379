"""Sampled tokens with the inputs of the statistics: index in the round, drafts, and ``p``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

from eagle3_jax import Chain, GenerationState, SamplingMode, SamplingParams, SpeculativeDecoder
from eagle3_jax.files.sources import bundled
from eagle3_jax.types import Draft

FIRST = -1  # index of the token from the prefill, which belongs to no round


@dataclasses.dataclass(frozen=True)
class Warpers:
    """Sampling parameters of one row; 0 and 1 switch top-k and top-p off."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    def __str__(self) -> str:
        truncation = f", top-k {self.top_k}" * (self.top_k > 0) + f", top-p {self.top_p:g}" * (
            self.top_p < 1
        )
        return f"T={self.temperature:g}{truncation}"


@struct.dataclass
class Emitted:
    """The ``n`` tokens of one row."""

    prompt: list[int] = struct.field(pytree_node=False)  #: Its prompt.
    tokens: Int[np.ndarray, " n"]  #: ``[n]``.
    #: ``[n]``, place in the round from 0 on; :data:`FIRST` for the first token.
    index: Int[np.ndarray, " n"]
    #: ``[n]``, whether everything drafted on its path had been accepted.
    bonus: Bool[np.ndarray, " n"]
    #: ``[n k]``, what was drafted for its place, -1 padded; at a bonus of a chain, what would have
    #: been.
    proposals: Int[np.ndarray, "n k"]
    #: ``[n V]``, the distribution that the proposal was sampled from; ``None`` for deterministic
    #: proposals.
    q: Float[np.ndarray, "n V"] | None


class Decision(NamedTuple):
    """How one token was emitted."""

    index: int  #: See :attr:`Emitted.index`.
    is_bonus: bool
    proposals: Int[np.ndarray, " k"]
    q: Float[np.ndarray, " V"] | None


def play(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    *,
    rows: Sequence[Warpers],
    max_new_tokens: int,
    seed: int,
) -> list[Emitted]:
    """Generate round by round through the compiled step, and keep what each decision depended on.

    A chain is drafted once more, one token longer, from the state before the round: the extra token
    is the draft for the place of the bonus.
    """
    sampling = SamplingParams(
        temperature=np.array([row.temperature for row in rows], np.float32),
        top_k=np.array([row.top_k for row in rows], np.int32),
        top_p=np.array([row.top_p for row in rows], np.float32),
    )

    state = decoder.prefill(prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    longer = _one_longer(decoder)
    first = Decision(FIRST, is_bonus=False, proposals=np.zeros(0, np.int32), q=None)
    decisions = [[first] for _ in prompts]
    while bool(np.any(state.running)):
        before = np.asarray(state.length)
        extended = None if longer is None else longer(decoder.params, state)
        played = decoder.step(state)
        state = played.state

        draft = jax.device_get(played.draft if extended is None else extended)
        drafted = np.asarray(played.draft.tokens)
        assert np.array_equal(draft.tokens[:, : drafted.shape[1]], drafted), (
            "the longer chain is another one"
        )

        count = np.asarray(state.length) - before
        path = np.asarray(played.verdict.path)
        for row in range(len(prompts)):
            for index in range(count[row]):
                node = 0 if index == 0 else path[row, index - 1]
                children = np.flatnonzero((draft.parents[row] == node) & draft.valid[row])
                below = children[children < drafted.shape[1]]
                q = None if draft.probs is None else draft.probs[row, children[0]].copy()
                decision = Decision(index, below.size == 0, draft.tokens[row, children], q)
                decisions[row].append(decision)

    tokens = np.asarray(state.tokens)
    return [_emitted(prompt, tokens[row], decisions[row]) for row, prompt in enumerate(prompts)]


def _one_longer(decoder: SpeculativeDecoder) -> Callable[[Any, GenerationState], Draft] | None:
    topology = getattr(decoder.loop.drafter, "topology", None)
    if not isinstance(topology, Chain):
        return None
    drafter = dataclasses.replace(
        decoder.loop.drafter, topology=Chain(topology.num_speculative_tokens + 1)
    )
    mode = SamplingMode.TRUNCATED  # anything but greedy
    loop = dataclasses.replace(decoder.loop, drafter=drafter, sampling_mode=mode)
    return jax.jit(lambda params, state: loop._propose(params, state)[0])


def _emitted(prompt: list[int], sequence: np.ndarray, decisions: list[Decision]) -> Emitted:
    index, bonus, proposals, distributions = zip(*decisions, strict=True)
    width = max(1, *map(len, proposals))
    padded = [[*tokens, *[-1] * (width - len(tokens))] for tokens in proposals]
    q = None
    if any(distribution is not None for distribution in distributions):
        without_draft = np.zeros_like(distributions[-1])
        q = np.stack(
            [
                without_draft if distribution is None else distribution
                for distribution in distributions
            ]
        )

    tokens = sequence[len(prompt) : len(prompt) + len(decisions)]
    return Emitted(prompt, tokens, np.array(index), np.array(bonus), np.array(padded, np.int32), q)


class Reference:
    """``p`` from transformers: the target in float32, teacher-forced, and its warpers."""

    def __init__(self, directory: Path | None = None) -> None:
        """Needs torch and transformers."""
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(
            directory or bundled("target"), dtype=torch.float32
        ).eval()

    def logits(self, rows: Sequence[Emitted]) -> list[np.ndarray]:
        """Returns the logits of each token of each row, ``[n V]``; rows share one forward."""
        sequences = [[*row.prompt, *row.tokens.tolist()] for row in rows]
        width = max(map(len, sequences))
        # Attention is causal.
        padded = [sequence + [0] * (width - len(sequence)) for sequence in sequences]
        with self._torch.inference_mode():
            logits = self._model(input_ids=self._torch.tensor(padded)).logits
        return [
            logits[index, len(row.prompt) - 1 : len(row.prompt) - 1 + len(row.tokens)].numpy()
            for index, row in enumerate(rows)
        ]

    def probabilities(
        self, logits: Float[np.ndarray, "n V"], warpers: Warpers
    ) -> Float[np.ndarray, "n V"]:
        """Temperature, top-k and top-p by transformers, then a softmax in float64."""
        from transformers.generation import (
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        scores = TemperatureLogitsWarper(warpers.temperature)(None, self._torch.tensor(logits))
        if warpers.top_k:
            scores = TopKLogitsWarper(warpers.top_k)(None, scores)
        if warpers.top_p < 1:
            scores = TopPLogitsWarper(warpers.top_p)(None, scores)
        return self._torch.softmax(scores.double(), dim=-1).numpy()


def at_an_edge(
    logits: Float[np.ndarray, "n V"], warpers: Warpers, *, slack: float = 3e-6
) -> Bool[np.ndarray, " n"]:
    """Where float32 rounding alone decides which tokens top-k or top-p keeps.

    They are left out whatever token was sampled there, so the statistics stay unbiased.
    """
    ranked = np.sort(logits.astype(np.float64), axis=1)[:, ::-1] / warpers.temperature
    close = np.zeros(len(ranked), bool)
    if warpers.top_k:
        close |= ranked[:, warpers.top_k - 1] - ranked[:, warpers.top_k] < 1e-4
        ranked = ranked[:, : warpers.top_k]
    if warpers.top_p < 1:
        mass = np.exp(ranked - ranked[:, :1])
        cumulative = np.cumsum(mass / mass.sum(axis=1, keepdims=True), axis=1)
        close |= np.abs(cumulative - warpers.top_p).min(axis=1) < slack
    return close
