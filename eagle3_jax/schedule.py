"""Draft lengths by batch size, in vLLM's form, and the default draft length."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

_MOST_ROWS = 2**31 - 2  # rows are counted in 32 bits on the device


@dataclasses.dataclass(frozen=True)
class SpeculationSchedule:
    """Draft lengths by the number of active rows: vLLM's ``num_speculative_tokens_per_batch_size``.

    ``((1, 4, 5), (5, 16, 3))`` drafts 5 tokens for 1 to 4 active rows, 3 for 5 to 16, and none for more. As in vLLM, a
    gap between two entries has the length of the entry before it. After the last entry decoding is plain. (vLLM
    continues with the last length; a last entry such as ``(17, 512, 0)`` means the same in both.)

    Attributes:
        entries: ``(first, last, K)``: batch sizes ``first`` to ``last`` draft ``K`` tokens. Sizes start at 1 and
            ascend; ``K`` may be 0.
    """

    entries: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        reached = 0
        for entry in self.entries:
            first, last, length = entry
            if first <= reached or last < first or (reached == 0 and first != 1):
                raise ValueError(
                    f"schedule entry {list(entry)} is out of place; expected [first, last, K] with ascending batch "
                    "sizes that start at 1 and do not overlap, as in [[1, 4, 5], [5, 16, 3], [17, 512, 0]]"
                )
            if last > _MOST_ROWS:
                raise ValueError(f"schedule entry {list(entry)} reaches {last} rows; expected at most {_MOST_ROWS}")
            if length < 0:
                raise ValueError(f"schedule entry {list(entry)} drafts {length} tokens; expected 0 (none) or more")
            reached = last
        if self.max_length == 0:
            raise ValueError(f"the schedule {self.to_lists()} never drafts; leave it and the drafter out")

    @classmethod
    def from_lists(cls, entries: Sequence[Any]) -> SpeculationSchedule:
        """Reads vLLM's configuration.

        Raises:
            ValueError: An entry is not three whole numbers, or out of place.
        """
        for entry in entries:
            whole = isinstance(entry, list | tuple) and all(type(number) is int for number in entry)
            if not whole or len(entry) != 3:
                raise ValueError(f"schedule entry {entry!r} is not [first, last, K], three whole numbers")
        return cls(tuple((entry[0], entry[1], entry[2]) for entry in entries))

    def to_lists(self) -> list[list[int]]:
        """The schedule as vLLM's configuration."""
        return [list(entry) for entry in self.entries]

    @property
    def max_length(self) -> int:
        """The longest draft, vLLM's ``num_speculative_tokens``."""
        return max((length for _, _, length in self.entries), default=0)

    def length_at(self, batch: int) -> int:
        """``K`` for this number of active rows."""
        if batch > self.entries[-1][1]:
            return 0
        return next(length for first, _, length in reversed(self.entries) if first <= batch)

    def steps(self, largest: int) -> list[tuple[int, int]]:
        """Returns ``(most rows, K)`` for each change of ``K``, from ``largest`` rows down to 1."""
        ends = {end for first, last, _ in self.entries for end in (first - 1, last)}
        found: list[tuple[int, int]] = []
        for batch in sorted({largest, *(end for end in ends if 0 < end < largest)}, reverse=True):
            length = self.length_at(batch)
            if not found or found[-1][1] != length:
                found.append((batch, length))
        return found


# Measured with the shipped pair on two cores: never slower than plain decoding, in float32 and mixed (docs/numbers.md).
_ON_CPUS = SpeculationSchedule(((1, 2, 3), (3, 4, 2), (5, 32, 1)))
_ELSEWHERE = 5


def default_draft_length(batch: int = 1, platform: str | None = None) -> int:
    """Returns the default draft length ``K``: 5; on CPUs 3 for one or two rows, and fewer for more.

    DFlash drafts its whole block instead, and Medusa one token per head.

    Args:
        batch: Rows that start together.
        platform: Platform of the device, such as ``cpu``. Default: this process's default device.

    Returns:
        Tokens of a chain; 0 for plain decoding, on CPUs above 32 rows.
    """
    import jax

    platform = jax.default_backend() if platform is None else platform
    return _ON_CPUS.length_at(batch) if platform == "cpu" else _ELSEWHERE
