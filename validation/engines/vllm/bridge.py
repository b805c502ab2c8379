"""The interface to vLLM: a worker process (``process.py``) or a server (``server.py``).

The worker imports it too, in the environment of vLLM, which has none of our packages.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Tokens = list[int]


class VLLMError(RuntimeError):
    """vLLM failed at what it was asked to do; the message says what and why, in one line."""


class VLLMUnavailable(RuntimeError):
    """There is no vLLM that could do what is asked for; a level skips with this reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One vLLM engine."""

    model: str  #: The target's directory or hub id.
    dtype: str = "float32"  #: ``float32``, ``bfloat16`` or ``float16``.
    #: vLLM's ``speculative_config``, such as ``{"method": "eagle3", "model": DIR,
    #: "num_speculative_tokens": 3}``; ``None`` for plain decoding.
    speculative: dict[str, Any] | None = None
    max_model_len: int = 512  #: Longest sequence, in tokens.
    max_num_seqs: int = 8  #: Largest batch.
    #: Share of a GPU's memory that vLLM may take; ``None`` for that of the process, and no meaning
    #: on a CPU.
    gpu_memory_utilization: float | None = None
    #: vLLM's name for it; ``dummy`` makes random weights, so that a directory needs no more than a
    #: ``config.json``.
    load_format: str = "auto"
    #: On a GPU, with the first of vLLM's two model runners: the one whose inside can be reached.
    first_runner: bool = False
    #: Run without torch.compile and CUDA graphs (vLLM's ``enforce_eager``): it starts sooner and
    #: its inside can be reached, but it is slower. Where speed is measured this is off.
    eager: bool = True
    log_probabilities: bool = False  #: Scores are log-probabilities instead of logits.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One prompt's result."""

    tokens: Tokens  #: New tokens only.
    #: Draft tokens accepted in each step after the prefill; ``None`` where nothing is drafted or
    #: unknown.
    accepted: list[int] | None = None
    drafted: list[int] | None = None  #: Draft tokens scheduled in each of these steps.
    first_token_seconds: float | None = (
        None  #: Time to first token; ``None`` where vLLM does not tell.
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """A batch's result."""

    completions: list[Completion]  #: One result for each prompt, in their order.
    seconds: float  #: Wall time of the whole batch, measured in vLLM's process.
    #: The four ``spec_decode_*`` counters of this call, without prefix; empty where nothing is
    #: drafted.
    counters: dict[str, Any]

    @property
    def outputs(self) -> list[Tokens]:
        """The new tokens of each prompt."""
        return [completion.tokens for completion in self.completions]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """Scores of given tokens: one entry per token of a sequence after its prompt."""

    best: Tokens  #: vLLM's own choice at each position, lowest id in a tie.
    #: 1 where no token has a higher logit, 2 where one has; of a lower token, vLLM's own rank.
    rank: list[int]
    #: Logit (or log-probability) of vLLM's choice minus that of the given token; 0 in agreement.
    gap: list[float]
    #: Logit of vLLM's choice, which fixes its unit in the last place; ``nan`` where only
    #: log-probabilities are known.
    best_value: list[float]


def score(logprobs: Sequence[dict[int, tuple[float, int]]], tokens: Tokens) -> Scored:
    """Scores of given tokens.

    ``logprobs`` has the log-probability and vLLM's rank of its two best tokens and of the given
    one.
    """
    scored = Scored(best=[], rank=[], gap=[], best_value=[])
    for entries, token in zip(logprobs, tokens, strict=True):
        highest, second = sorted((logit for logit, _ in entries.values()), reverse=True)[:2]
        value, rank = entries[token]
        scored.best.append(min(key for key, (logit, _) in entries.items() if logit == highest))
        # vLLM's rank counts equal logits as well, so that a token tied with others ranks after all
        # of them.
        scored.rank.append(1 if value == highest else 2 if value == second else rank)
        scored.gap.append(highest - value)
        scored.best_value.append(highest)
    return scored


@runtime_checkable
class Engine(Protocol):
    """One loaded model."""

    @property
    def options(self) -> EngineOptions:
        """What it was loaded with."""
        ...

    def generate(
        self,
        prompts: Sequence[Tokens],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Generated:
        """Complete prompts to the limit, without stop tokens. Row ``i`` has seed ``seed + i``."""
        ...

    def score(self, prompts: Sequence[Tokens], outputs: Sequence[Tokens]) -> list[Scored]:
        """Teacher-force the outputs after their prompts."""
        ...


@runtime_checkable
class VLLM(Protocol):
    """A vLLM that can load, or has loaded, engines."""

    #: ``vllm``, ``torch``, ``transformers``, ``device`` and the like, for the report.
    versions: dict[str, str]

    def engine(self, options: EngineOptions) -> Engine:
        """Load an engine; the one loaded before is dropped.

        Raises:
            VLLMUnavailable: This vLLM cannot be that engine (a server with another model, say).
            VLLMError: vLLM refused it.
        """
        ...


def eagle3(head: str | Path, num_speculative_tokens: int) -> dict[str, Any]:
    """The ``speculative_config`` of vLLM for an EAGLE-3 head."""
    return {
        "method": "eagle3",
        "model": str(head),
        "num_speculative_tokens": num_speculative_tokens,
    }


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The difference of two readings of the counters, which count as long as vLLM runs."""
    differences: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, list):
            pairs = itertools.zip_longest(value, before.get(name, []), fillvalue=0)
            differences[name] = [new - old for new, old in pairs]
        else:
            differences[name] = value - before.get(name, 0)
    return differences
