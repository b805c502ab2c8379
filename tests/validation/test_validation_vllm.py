"""Rounds of vLLM are compared to the token, and exhausted memory is not a verdict."""

from __future__ import annotations

import pytest

from eagle3_jax.measure.memory import is_out_of_memory
from validation.engines.vllm.bridge import Completion, Generated, VLLMError
from validation.parity import Played, first_difference


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
