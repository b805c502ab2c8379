"""L9 without weights: shapes for vLLM, and acceptance at the simulated rates."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from eagle3_jax.conversion import HeadCheckpoint
from eagle3_jax.conversion.heads.eagle3 import vllm_fields
from eagle3_jax.conversion.hf_config import stack_fields
from eagle3_jax.models.config import DecoderConfig, Eagle3Config, grouped
from eagle3_jax.stats import SpeculationStats
from validation.engines.vllm.bridge import eagle3
from validation.statistics import smallest_shift

ALPHA = 1e-6  # of all positions and engines together


def write_shape(
    target: DecoderConfig, head: Eagle3Config, directory: Path, *, dtype: str
) -> tuple[Path, Path]:
    """Write the ``config.json`` of a Llama or Qwen3 shape and of its head.

    vLLM makes random weights for them.
    """
    name = "Qwen3" if grouped(target.layers[0]).qk_norm else "Llama"
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    fields = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        **stack_fields(target, dtype),
        "tie_word_embeddings": target.tie_embeddings,
        **tokens,
    }

    drafting = HeadCheckpoint(
        method="eagle3", config=head, head={}, draft_to_target=np.arange(head.draft_vocab_size),
        embedding=None, dialect="vllm", source=directory, dtype=dtype,
        num_target_layers=target.num_layers,
    )  # fmt: skip

    paths = directory / "target", directory / "eagle3"
    for path, values in zip(paths, (fields, vllm_fields(drafting)), strict=True):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(values, indent=1))
    return paths


@dataclasses.dataclass(frozen=True)
class AcceptanceDistribution:
    """Number of accepted tokens ``A`` of a round: ``P(A >= i) = rates[i - 1]``."""

    rates: Sequence[float]

    @property
    def mean(self) -> float:
        """Mean number of accepted tokens of a round."""
        return sum(self.rates)

    @property
    def deviation(self) -> float:
        """Standard deviation of that number: ``E[A^2] = sum (2 i - 1) P(A >= i)``."""
        second = sum((2 * position + 1) * rate for position, rate in enumerate(self.rates))
        return math.sqrt(second - self.mean**2)

    def scores(self, counted: SpeculationStats) -> list[float]:
        """Returns standard scores of the mean and of every position.

        Rounds are complete, so Wald's identity holds.
        """
        rounds = int(np.sum(counted.num_drafts))
        shares = np.array([counted.mean_acceptance_length - 1, *counted.acceptance_per_position])
        rates = np.array(self.rates)
        deviations = np.array([self.deviation, *np.sqrt(rates * (1 - rates))])
        scores = (shares - [self.mean, *rates]) / deviations
        return (math.sqrt(rounds) * scores).tolist()

    @property
    def most(self) -> float:
        """The largest score that chance explains, of two engines."""
        return float(stats.norm.isf(ALPHA / 2 / (2 * (1 + len(self.rates)))))

    def sees(self, rounds: int) -> float:
        """The smallest error of the mean, in tokens, that exceeds :attr:`most` with 90 % power."""
        return self.deviation * smallest_shift(rounds, self.most)


def synthetic(head: Path, rates: Sequence[float]) -> dict[str, Any]:
    """Returns vLLM's ``speculative_config`` of simulated acceptance."""
    simulation = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(rates)}
    return eagle3(head, len(rates)) | simulation
