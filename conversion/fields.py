"""Typed fields of a JSON file. An error about a field names the field and the file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
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
    prefix: str = ""  #: The beginning of every name in the object, which callers leave out.

    def get(self, name: str) -> Any:
        """Returns the raw value; ``None`` when absent or null."""
        return self.values.get(self.prefix + name)

    def require(self, *names: str) -> None:
        """Refuses a file without these fields.

        Their defaults change the mathematics and differ by family.
        """
        for name in names:
            if self.prefix + name not in self.values:
                raise self._missing(name)

    def only(self, **supported: Any) -> None:
        """Refuses fields with another value than the supported one; absent fields pass."""
        for name, value in supported.items():
            stored = self.get(name)
            if stored is None:
                continue
            if stored != value or isinstance(stored, bool) != isinstance(value, bool):
                raise self.wrong(name, f"only {value!r} is supported")

    def one_of(
        self, name: str, choices: Collection[str], default: str | None = None, *, purpose: str = ""
    ) -> str:
        """Returns one of several texts.

        Args:
            name: Name of the field.
            choices: The allowed texts.
            default: The text of an absent field; ``None`` if the field is required.
            purpose: Purpose of the choices in messages, as in ``for an EAGLE-3 head``.
        """
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, str) or value not in choices:
            few = len(choices) < 4
            expected = " or ".join(map(repr, choices)) if few else f"one of {', '.join(choices)}"
            raise self.wrong(name, f"expected {expected} {purpose}".rstrip())
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """Returns a whole number."""
        return self._checked(name, default, _is_whole, "expected a whole number")

    def size(self, name: str, default: int | None = None) -> int:
        """Returns a whole number of at least one, and no more than a device can count."""
        return self._checked(name, default, _is_size, f"expected a whole number from 1 to {MOST:,}")

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a finite number."""
        return float(self._checked(name, default, _is_finite, "expected a finite number"))

    def optional_number(self, name: str) -> float | None:
        """Returns a finite number, or ``None`` when absent."""
        return None if self.get(name) is None else self.number(name)

    def optional_size(self, name: str) -> int | None:
        """Returns a size, or ``None`` when absent."""
        return None if self.get(name) is None else self.size(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns true or false."""
        return self._checked(
            name, default, lambda value: isinstance(value, bool), "expected true or false"
        )

    def words(self, name: str) -> list[str]:
        """Returns a list of texts; empty when absent."""
        return self._checked(
            name, [], _list_of(lambda word: isinstance(word, str)), "expected a list of texts"
        )

    def numbers(self, name: str) -> tuple[float, ...]:
        """Returns a list of finite numbers."""
        values = self._checked(
            name, None, _list_of(_is_finite), "expected a list of finite numbers"
        )
        return tuple(map(float, values))

    def indices(
        self, name: str, count: int | None = None, entries: str = "whole numbers"
    ) -> list[int] | None:
        """Returns a list of whole numbers from 0 to ``count - 1``; ``None`` when absent.

        ``entries`` is the name of the numbers in messages. Without a ``count`` the numbers have no
        upper bound.
        """
        if self.get(name) is None:
            return None

        def is_index(index: Any) -> bool:
            return _is_whole(index) and 0 <= index < (count or float("inf"))

        limits = "from 0 up" if count is None else f"from 0 to {count - 1}"
        return self._checked(
            name, None, _list_of(is_index), f"expected a list of {entries} {limits}"
        )

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Returns the token ids of a field that holds one or a list of them; empty when absent."""
        value = self._present(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(_is_whole(token) and 0 <= token < vocab_size for token in ids):
            raise self.wrong(name, f"expected token ids from 0 to {vocab_size - 1}")
        return tuple(ids)

    def section(self, name: str) -> Fields:
        """Returns a nested object; empty when absent."""
        values = self._checked(
            name, {}, lambda value: isinstance(value, dict), "expected an object"
        )
        return Fields(values, f"{self.where}, {name}")

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """Returns the error about the value of a field."""
        return CheckpointError(
            f"{self.where}: {self.prefix}{name} is {short(self.get(name))}; {expected}"
        )

    def _present(self, name: str, default: Any) -> Any:
        value = default if self.get(name) is None else self.get(name)
        if value is None:
            raise self._missing(name)
        return value

    def _checked(
        self, name: str, default: Any, is_valid: Callable[[Any], bool], expected: str
    ) -> Any:
        value = self._present(name, default)
        if not is_valid(value):
            raise self.wrong(name, expected)
        return value

    def _missing(self, name: str) -> CheckpointError:
        reason = "it changes the mathematics, so add it to the file"
        return CheckpointError(f"{self.where} has no {self.prefix}{name}; {reason}")


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


def _is_size(value: Any) -> bool:
    return _is_whole(value) and 1 <= value <= MOST


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -1e300 < value < 1e300


def _list_of(is_entry: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_entry, value))
