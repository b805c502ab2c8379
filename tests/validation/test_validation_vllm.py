"""Only what vLLM computed for the same engine is compared, to the token and the round."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3_jax.bench.memory import is_out_of_memory
from validation.engines.vllm.bridge import (
    Completion,
    EngineOptions,
    Generated,
    VLLMError,
    VLLMUnavailable,
    eagle3,
)
from validation.engines.vllm.server import Server, Servers
from validation.parity import Played, first_difference, stats_of


class Speculating(Server):
    """A server that nothing asks over a network; it drafts three tokens."""

    def __init__(self) -> None:
        self.model = "m"
        self.root = "/models/pair/target"
        self.speculates = True

    def counters(self) -> dict[str, Any]:
        return {"num_accepted_tokens_per_pos": [16, 15, 13]}


def test_a_server_is_compared_as_the_engine_that_it_is() -> None:
    servers = Servers.__new__(Servers)
    servers.servers = [Speculating()]
    assert servers.engine(EngineOptions(model="/elsewhere/target", speculative=eagle3("head", 3)))
    with pytest.raises(VLLMError, match=r"serves /models/pair/target, not /elsewhere/other"):
        servers.engine(EngineOptions(model="/elsewhere/other", speculative=eagle3("head", 3)))
    with pytest.raises(VLLMUnavailable, match="drafts 3 tokens, not 4"):
        servers.engine(EngineOptions(model="m", speculative=eagle3("head", 4)))
    with pytest.raises(VLLMUnavailable, match="--vllm-plain-url"):
        servers.engine(EngineOptions(model="m"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (VLLMError("ValueError: No available memory for the cache blocks."), True),
        (RuntimeError("size mismatch"), False),
        (AssertionError("the text says: out of memory"), False),
    ],
)
def test_errors_of_memory_are_distinguished_from_others(error: Exception, expected: bool) -> None:
    wrapped = ValueError("while loading")
    wrapped.__cause__ = error
    assert is_out_of_memory(error) is is_out_of_memory(wrapped) is expected


@pytest.mark.parametrize(
    ("tokens", "accepted", "difference"),
    [
        ([5, 6, 7], [1, 0], None),
        ([5, 6, 4], [1, 0], "new token 2: we wrote [7], vLLM [4]"),
        ([5, 6, 7], [1, 1], "round 1: we accepted [0] of [[8, 8]], vLLM [1]"),
        ([5, 6], [1, 0], "new token 2: we wrote [7], vLLM []"),
    ],
)
def test_the_first_difference_is_named(
    tokens: list[int], accepted: list[int], difference: str | None
) -> None:
    completions = [Completion(tokens=tokens, accepted=accepted)]
    theirs = Generated(completions=completions, seconds=1.0, counters={})
    ours = [Played([5, 6, 7], [1, 0], [[6, 9], [8, 8]])]
    text = first_difference(ours, theirs)
    assert text is None if difference is None else difference in str(text)


def test_rounds_are_counted_as_in_vllm() -> None:
    drafts = [[5, 6, 7], [8, 9, 10]]
    stats = stats_of([Played([], [2, 0], drafts), Played([], [1], drafts[:1])], 3).to_json()
    assert (stats["num_drafts"], stats["num_draft_tokens"]) == (3, 9)
    assert (stats["num_accepted_tokens"], stats["num_accepted_tokens_per_pos"]) == (3, [2, 1, 0])
