"""Acceptance of a head on held-out texts, while it is trained."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.drafters.base import NetworkDrafter
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.loaded import LoadedDrafter, LoadedTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.topology import Chain
from eagle3_jax.training.batches import Frozen, TTTBatch, batch_of
from eagle3_jax.training.features import Features
from eagle3_jax.training.rounds import accepted_in_rounds, draft_hits
from eagle3_jax.training.texts import Texts, buckets_of
from eagle3_jax.training.ttt import teacher_forward


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """Measures of a head on held-out texts.

    Attributes:
        target: The target.
        drafter: The head's drafter.
        frozen: Arrays that the objective reads and never trains.
        texts: The held-out texts.
        features: Their stored features; ``None``: the target runs.
        num_steps: Length of the chain that is evaluated.
    """

    target: LoadedTarget
    drafter: Any
    frozen: Frozen
    texts: Texts
    features: Features | None
    num_steps: int

    def in_one_pass(
        self, params: Params, most: int = 64, batch: int = 8
    ) -> dict[str, float] | None:
        """Returns tokens per round and acceptance by depth, read off the texts.

        :mod:`eagle3_jax.training.rounds` says how.

        Args:
            params: Parameters of the head.
            most: Largest number of texts that are read.
            batch: Texts per forward.

        Returns:
            ``tau``, the number of ``rounds``, and ``accepted_k``: the share of rounds that accept
            the ``k``-th draft, from 0. ``None`` for methods whose drafts are not an unrolled chain.
        """
        if not isinstance(self.drafter, Eagle3Drafter):
            return None

        accepted: list[int] = []
        length = self.texts.length[:most]
        for bucket in buckets_of(length):
            for offset in range(0, len(bucket.texts), batch):
                chosen = bucket.texts[offset : offset + batch]
                rows = batch_of(
                    self.texts, chosen, length=bucket.length, count=batch, features=self.features
                )
                hits = np.asarray(self._hits(params, self.frozen, rows))

                for row, index in enumerate(chosen):
                    answer = np.flatnonzero(self.texts.learn[self.texts.span(index)])
                    for first, end in _runs(answer):
                        accepted += accepted_in_rounds(hits[row], first, end)

        if not accepted:
            return None
        reached = {
            f"accepted_{k}": float(np.mean(np.array(accepted) > k)) for k in range(self.num_steps)
        }
        return {"tau": 1.0 + float(np.mean(accepted)), "rounds": len(accepted), **reached}

    def by_decoding(self, params: Params, most: int = 8, max_new_tokens: int = 64) -> float:
        """Returns the mean tokens per round of greedy answers to held-out prompts.

        Args:
            params: Parameters of the head.
            most: Largest number of prompts.
            max_new_tokens: Number of tokens of an answer.
        """
        prompts = []
        for index in range(min(most, len(self.texts))):
            span = self.texts.span(index)
            first = int(np.argmax(self.texts.learn[span]))
            prompts.append(self.texts.tokens[span][: max(first, 1)].tolist())

        drafter: Any = self.drafter
        if isinstance(self.drafter, NetworkDrafter):
            tables = self.target.model.tables(self.frozen["target_params"])  # type: ignore[attr-defined]
            params = drafter.assemble(
                params, tables, draft_to_target=self.frozen["draft_to_target"]
            )
        decoder = SpeculativeDecoder(
            self.target, LoadedDrafter(drafter, params), num_speculative_tokens=self.num_steps
        )
        return decoder.generate(prompts, max_new_tokens=max_new_tokens).stats.mean_acceptance_length

    @functools.cached_property
    def _hits(self) -> Any:
        return jax.jit(self._draft_hits)

    def _draft_hits(self, params: Params, frozen: Frozen, batch: TTTBatch) -> jax.Array:
        drafter = dataclasses.replace(self.drafter, topology=Chain(self.num_steps))
        _, features = teacher_forward(drafter, self.target.model, frozen, batch, 1)  # type: ignore[arg-type]
        ids = frozen["draft_to_target"]
        return draft_hits(
            drafter, params, frozen["embedding"], features, batch, ids, self.num_steps
        )


def _runs(indices: np.ndarray) -> list[tuple[int, int]]:
    """Returns the first index and the one after the last of every run of consecutive indices."""
    pieces = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
    return [(int(piece[0]), int(piece[-1]) + 1) for piece in pieces if len(piece)]
