"""Typed fields of a JSON file. A missing or malformed field is an error that names the field and the file."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.models.config import MOST

Value = TypeVar("Value")


class Fields(NamedTuple):
    """A JSON object and, for messages, the name of its file.

    A field that is null counts as absent. A field without a default is required.
    """

    values: Mapping[str, Any]  #: The object.
    where: str  #: The name of the file.

    def get(self, name: str) -> Any:
        """Returns the raw value; ``None`` when absent or null."""
        return self.values.get(name)

    def require(self, *names: str) -> None:
        """Refuses a file without these fields. Their defaults change the mathematics and differ by family."""
        for name in names:
            if name not in self.values:
                raise self._missing(name)

    def only(self, *, advice: str = "", **supported: Any) -> None:
        """Refuses fields with another value than the supported one; absent fields pass."""
        for name, value in supported.items():
            stored = self.get(name)
            if stored is None:
                continue
            if stored != value or isinstance(stored, bool) != isinstance(value, bool):
                raise self.wrong(name, f"only {value!r} is supported{advice and '; ' + advice}")

    def one_of(self, name: str, choices: Collection[str], default: str | None = None, *, purpose: str = "") -> str:
        """Returns one of several texts.

        Args:
            name: Name of the field.
            choices: The allowed texts.
            default: The text of an absent field; ``None`` if the field is required.
            purpose: Purpose of the choices in messages, as in ``for an EAGLE-3 head``.
        """
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, str) or value not in choices:
            expected = f"one of {', '.join(choices)}"
            if len(choices) < 4:
                expected = " or ".join(map(repr, choices))
            raise CheckpointError(
                f"{self.where}: {name} is {short(value)}; expected {expected}{purpose and ' ' + purpose}"
            )
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """Returns a whole number."""
        value = self._present(name, default)
        if not _is_whole(value):
            raise self.wrong(name, "expected a whole number")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Returns a whole number of at least one, and no more than a device can count."""
        value = self.integer(name, default)
        if not 1 <= value <= MOST:
            raise self.wrong(name, f"expected a whole number from 1 to {MOST:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a finite number."""
        value = self._present(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not -1e300 < value < 1e300:
            raise self.wrong(name, "expected a finite number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Returns a finite number, or ``None`` when absent."""
        return None if self.get(name) is None else self.number(name)

    def optional_size(self, name: str) -> int | None:
        """Returns a size, or ``None`` when absent."""
        return None if self.get(name) is None else self.size(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns true or false."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "expected true or false")
        return value

    def words(self, name: str) -> list[str]:
        """Returns a list of texts; empty when absent."""
        value = self._present(name, [])
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.wrong(name, "expected a list of texts")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """Returns a list of finite numbers."""
        value = self._present(name, None)
        if not isinstance(value, list):
            raise self.wrong(name, "expected a list of numbers")
        return tuple(Fields({name: entry}, self.where).number(name) for entry in value)

    def indices(self, name: str, count: int | None = None, entries: str = "whole numbers") -> list[int] | None:
        """Returns a list of whole numbers from 0 to ``count - 1``; ``None`` when absent.

        ``entries`` is the name of the numbers in messages. Without a ``count`` the numbers have no upper bound.
        """
        value = self.get(name)
        if value is None:
            return None
        bound = float("inf") if count is None else count
        if not isinstance(value, list) or not all(_is_whole(index) and 0 <= index < bound for index in value):
            limits = "from 0 up" if count is None else f"from 0 to {count - 1}"
            raise self.wrong(name, f"expected a list of {entries} {limits}")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Returns the token ids of a field that holds one or a list of them; empty when absent."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [value]
        if value is None:
            ids = []
        if not all(_is_whole(token) and 0 <= token < vocab_size for token in ids):
            raise self.wrong(name, f"expected token ids from 0 to {vocab_size - 1}")
        return tuple(ids)

    def section(self, name: str) -> Fields:
        """Returns a nested object; empty when absent."""
        value = self._present(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, "expected an object")
        return Fields(value, f"{self.where}, {name}")

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """Returns the error about the value of a field."""
        return CheckpointError(f"{self.where}: {name} is {short(self.get(name))}; {expected}")

    def _present(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self._missing(name)
        return value

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.where} has no {name}; it changes the mathematics, so add it to the file")


def agreed(values: Mapping[str, Value], where: str) -> Value | None:
    """Returns the common value of several fields; ``None`` if none of them has a value.

    Args:
        values: The values by the names of the fields; ``None`` for a field without a value.
        where: The name of the file, for messages.

    Raises:
        CheckpointError: Two fields have different values.
    """
    present = {name: value for name, value in values.items() if value is not None}
    first = next(iter(present.values()), None)
    if any(value != first for value in present.values()):
        listed = " and ".join(f"{name} is {short(value)}" for name, value in present.items())
        raise CheckpointError(f"{where}: {listed}; they must agree, so remove the wrong one")
    return first


@contextlib.contextmanager
def read_from(where: str) -> Iterator[None]:
    """Adds the name of a file to errors about the configuration that is built from it."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
