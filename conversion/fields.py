"""Typed fields of a JSON file. A missing or malformed field is refused with its name and that of the file."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.models.config import MOST

Value = TypeVar("Value")


class Fields(NamedTuple):
    """A JSON object that knows its file, for messages.

    A field that is null counts as absent. A field without a default is required.
    """

    values: Mapping[str, Any]  #: The object.
    where: str  #: The file.

    def get(self, name: str) -> Any:
        """The raw value; ``None`` when absent or null."""
        return self.values.get(name)

    def require(self, *names: str) -> None:
        """Refuses a file without a field whose default changes the mathematics and differs by family."""
        for name in names:
            if name not in self.values:
                raise self._missing(name)

    def only(self, *, advice: str = "", **supported: Any) -> None:
        """Refuses fields with another value than the supported one; absent fields pass."""
        for name, value in supported.items():
            found = self.get(name)
            if found is not None and (found != value or isinstance(found, bool) != isinstance(value, bool)):
                raise self.wrong(name, f"only {value!r} is supported{advice and '; ' + advice}")

    def one_of(self, name: str, choices: Collection[str], default: str | None = None, *, purpose: str = "") -> str:
        """One of several texts; ``purpose`` says what the choices are for, as in ``for an EAGLE-3 head``."""
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, str) or value not in choices:
            expected = " or ".join(map(repr, choices)) if len(choices) < 4 else f"one of {', '.join(choices)}"
            raise CheckpointError(
                f"{self.where}: {name} is {short(value)}; expected {expected}{purpose and ' ' + purpose}"
            )
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        value = self._present(name, default)
        if not _is_whole(value):
            raise self.wrong(name, "expected a whole number")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of things: at least one, and no more than the device can count."""
        value = self.integer(name, default)
        if not 1 <= value <= MOST:
            raise self.wrong(name, f"expected a whole number from 1 to {MOST:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
            raise self.wrong(name, "expected a finite number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A finite number, or ``None`` when absent."""
        return None if self.get(name) is None else self.number(name)

    def optional_size(self, name: str) -> int | None:
        """A size, or ``None`` when absent."""
        return None if self.get(name) is None else self.size(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "expected true or false")
        return value

    def words(self, name: str) -> list[str]:
        """A list of texts; empty when absent."""
        value = self._present(name, [])
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.wrong(name, "expected a list of texts")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        value = self._present(name, None)
        if not isinstance(value, list):
            raise self.wrong(name, "expected a list of numbers")
        return tuple(Fields({name: one}, self.where).number(name) for one in value)

    def indices(self, name: str, count: int | None = None, what: str = "") -> list[int] | None:
        """A list of whole numbers from 0 up to ``count``; ``None`` when absent."""
        value = self.get(name)
        if value is None:
            return None
        bound = float("inf") if count is None else count
        if not isinstance(value, list) or not all(_is_whole(one) and 0 <= one < bound for one in value):
            wanted = f"{what or 'whole numbers'} from 0 {'up' if count is None else f'to {count - 1}'}"
            raise self.wrong(name, f"expected a list of {wanted}")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them; none when absent."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_whole(token) and 0 <= token < vocab_size for token in ids):
            raise self.wrong(name, f"expected token ids from 0 to {vocab_size - 1}")
        return tuple(ids)

    def section(self, name: str) -> Fields:
        """A nested object; empty when absent."""
        value = self._present(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, "expected an object")
        return Fields(value, f"{self.where}, {name}")

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """The refusal of a field's value."""
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


def agreed(found: Mapping[str, Value], where: str) -> Value | None:
    """The one value that several fields give; ``None`` when there is none. Values that are ``None`` do not count."""
    named = {name: value for name, value in found.items() if value is not None}
    if any(value != next(iter(named.values())) for value in named.values()):
        listed = " and ".join(f"{name} is {short(value)}" for name, value in named.items())
        raise CheckpointError(f"{where}: {listed}; they must agree, so remove the wrong one")
    return next(iter(named.values()), None)


@contextlib.contextmanager
def read_from(where: str) -> Iterator[None]:
    """Adds the name of the file to the refusal of a configuration that is built from it."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
