"""Fields of a JSON file, typed: what is missing or malformed is refused by its name and that of the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.models.config import MOST


class Fields(NamedTuple):
    """A JSON object that says where it came from when a field is not as it should be.

    Attributes:
        values: The object.
        where: The file, for messages.
    """

    values: Mapping[str, Any]
    where: str

    def get(self, name: str) -> Any:
        """The raw value; ``None`` when absent or null."""
        return self.values.get(name)

    def require(self, *names: str) -> None:
        """Refuse a file in which a field is absent whose default changes the mathematics and differs by family."""
        for name in names:
            if name not in self.values:
                raise self._missing(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number; required when there is no default."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.where}: {name} is {short(value)}; expected a whole number")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of things, at least one and no more than the device can count; required without a default."""
        value = self.integer(name, default)
        if not 1 <= value <= MOST:
            raise CheckpointError(f"{self.where}: {name} is {short(value)}; expected a whole number from 1 to {MOST:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; required when there is no default."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
            raise CheckpointError(f"{self.where}: {name} is {short(value)}; expected a finite number")
        return float(value)

    def words(self, name: str) -> list[str]:
        """A list of texts, empty when absent."""
        value = self._present(name, [])
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise CheckpointError(f"{self.where}: {name} is {short(value)}; expected a list of texts")
        return value

    def indices(self, name: str, count: int) -> list[int] | None:
        """Which of ``count`` things a list names; ``None`` when absent."""
        value = self.values.get(name)
        if value is None:
            return None
        whole = isinstance(value, list) and not any(isinstance(one, bool) or not isinstance(one, int) for one in value)
        if not whole or not all(0 <= one < count for one in value):
            raise CheckpointError(
                f"{self.where}: {name} is {short(value)}; expected a list of whole numbers from 0 to {count - 1}"
            )
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or several; none when absent."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise CheckpointError(
                    f"{self.where}: {name} is {short(value)}; expected token ids from 0 to {vocab_size - 1}"
                )
        return tuple(ids)

    def optional_number(self, name: str) -> float | None:
        """A number, or ``None`` when absent."""
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name} is {short(value)}; expected true or false")
        return value

    def section(self, name: str) -> Fields:
        """A nested object, empty when absent."""
        value = self._present(name, {})
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {name} is {short(value)}; expected an object")
        return Fields(value, f"{self.where}, {name}")

    def _present(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self._missing(name)
        return value

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.where} has no {name}; it changes the mathematics, so add it to the file")


@contextlib.contextmanager
def read_from(where: str) -> Iterator[None]:
    """A configuration that is built of what a file says; what it refuses is refused with the name of the file."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
