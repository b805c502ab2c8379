"""Metrics of a server in the format of Prometheus, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from eagle3_jax.stats import SpeculationStats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_LABELS = ("model_name", "engine")
# Edges of histograms in seconds, as in vLLM.
# fmt: off
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)
_BETWEEN_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
_REQUEST = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
# fmt: on


class Metrics:
    """Counters, gauges and histograms in a registry of their own.

    So a process can hold several servers.
    """

    def __init__(
        self, model: str, *, max_depth: int, running: Callable[[], int], waiting: Callable[[], int]
    ) -> None:
        """Registers all metrics, at zero.

        Args:
            model: Name of the model, a label of every metric.
            max_depth: Longest draft.
            running: Returns the number of requests in slots.
            waiting: Returns the number of requests without a slot.
        """
        self._registry = CollectorRegistry()
        self._labels = (model, "0")
        self._prompt_tokens = self._metric(Counter, "prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = self._metric(Counter, "generation_tokens", "New tokens.")

        self._first_token = self._metric(
            Histogram,
            "time_to_first_token_seconds",
            "Time to the first token.",
            buckets=_FIRST_TOKEN,
        )
        self._between_tokens = self._metric(
            Histogram,
            "inter_token_latency_seconds",
            "Time between two chunks of a request.",
            buckets=_BETWEEN_TOKENS,
        )
        self._latency = self._metric(
            Histogram, "e2e_request_latency_seconds", "Time of a request.", buckets=_REQUEST
        )

        success = Counter(
            "vllm:request_success",
            "Ended requests.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        reasons = ("stop", "length", "abort", "error")
        self._success = {reason: success.labels(*self._labels, reason) for reason in reasons}

        per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Rounds in which the draft token at a position was accepted.",
            (*_LABELS, "position"),
            registry=self._registry,
        )
        self._rounds = [
            self._metric(Counter, "spec_decode_num_drafts", "Rounds with a draft."),
            self._metric(Counter, "spec_decode_num_draft_tokens", "Drafted tokens."),
            self._metric(Counter, "spec_decode_num_accepted_tokens", "Accepted draft tokens."),
            *[per_position.labels(*self._labels, str(depth)) for depth in range(max_depth)],
        ]

        self._counted = np.zeros(len(self._rounds), int)
        self._metric(Gauge, "num_requests_running", "Requests in slots.").set_function(running)
        self._metric(Gauge, "num_requests_waiting", "Requests without a slot.").set_function(
            waiting
        )

    def _metric(self, kind: type, name: str, text: str, **options: Any) -> Any:
        return kind(f"vllm:{name}", text, _LABELS, registry=self._registry, **options).labels(
            *self._labels
        )

    def count_rounds(self, totals: SpeculationStats) -> None:
        """Counts the drafts since the last call.

        Args:
            totals: Counters of the engine since its start.
        """
        sums = [totals.num_drafts, totals.num_draft_tokens, totals.num_accepted_tokens]
        counts = np.array([*sums, *np.asarray(totals.num_accepted_tokens_per_pos)], int)
        for counter, gain in zip(self._rounds, counts - self._counted, strict=True):
            counter.inc(int(gain))
        self._counted = counts

    def count_tokens(self, count: int, *, num_prompt: int, seconds: float, is_first: bool) -> None:
        """Counts the tokens of a chunk.

        Args:
            count: Number of new tokens.
            num_prompt: Tokens of the prompt.
            seconds: Time since the request came, or since the chunk before.
            is_first: Whether it is the first chunk of a request.
        """
        self._generation_tokens.inc(count)
        if is_first:
            self._prompt_tokens.inc(num_prompt)
        histogram = self._first_token if is_first else self._between_tokens
        histogram.observe(seconds)

    def count_end(self, reason: str, seconds: float) -> None:
        """Counts the end of a request.

        Args:
            reason: ``stop``, ``length``, ``abort`` or ``error``.
            seconds: Time since it came.
        """
        self._success[reason].inc()
        self._latency.observe(seconds)

    def text(self) -> bytes:
        """Returns all metrics in the text format 0.0.4."""
        return generate_latest(self._registry)
