"""Injects bugs: replaces a function of the library while a check runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax


@contextlib.contextmanager
def replaced(function: Callable, bug: Callable) -> Iterator[None]:
    """Calls ``bug(original, *arguments)`` wherever ``function`` is called.

    All compiled programs are forgotten before and after, so none of them hides the bug or keeps it.
    """
    jax.clear_caches()
    try:
        with swapped(function, bug):
            yield
    finally:
        jax.clear_caches()


@contextlib.contextmanager
def swapped(function: Callable, bug: Callable) -> Iterator[None]:
    """Replaces a function without clearing compiled programs, for a bug inside another one.

    Only the code of the function object changes. So every module that imported it sees the bug, and
    decorators and the checks of shapes and types around it stay.
    """
    inner: Any = inspect.unwrap(function)
    code = inner.__code__
    defaults = inner.__defaults__
    options = inner.__kwdefaults__
    original = types.FunctionType(
        code, inner.__globals__, inner.__name__, defaults, inner.__closure__
    )
    original.__kwdefaults__ = options

    def call(*arguments: Any, _bug: Any = None, **named: Any) -> Any:
        return _bug(*arguments, **named)

    inner.__code__ = call.__code__
    inner.__defaults__ = None
    inner.__kwdefaults__ = {"_bug": functools.partial(bug, original)}
    try:
        yield
    finally:
        inner.__code__ = code
        inner.__defaults__ = defaults
        inner.__kwdefaults__ = options


def inject_bug(function: Callable, old: str, new: str) -> contextlib.AbstractContextManager[None]:
    """Replaces a function by its own source with ``new`` in place of ``old``.

    Raises:
        AssertionError: The source does not contain ``old`` exactly once.
    """
    inner: Any = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(inner))
    source = source[source.index("def ") :]
    assert source.count(old) == 1, (
        f"{old!r} is not (once) in {inner.__qualname__}; the mutant has gone stale"
    )

    scope = dict(inner.__globals__)
    code = "from __future__ import annotations\n" + source.replace(old, new)
    exec(compile(code, inner.__code__.co_filename, "exec"), scope)

    return replaced(
        function, lambda original, *arguments, **named: scope[inner.__name__](*arguments, **named)
    )


def during(inner: Callable, bug: Callable) -> Callable:
    """Returns a bug of an outer function: ``bug`` replaces an inner one while it runs."""

    def outer(original: Callable, *arguments: Any, **named: Any) -> Any:
        with swapped(inner, bug):
            return original(*arguments, **named)

    return outer


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug and the check that must notice it."""

    function: Callable  #: The function of the library that the bug replaces.
    #: Called with the original function and its arguments; or two pieces of source for
    #: :func:`inject_bug`.
    bug: Callable | tuple[str, str]
    check: Callable  #: Must fail with the bug and pass without.
    args: tuple = ()  #: Its arguments.
    options: tuple[tuple[str, object], ...] = ()  #: Its keyword arguments.

    def run(self) -> None:
        """Runs the check."""
        self.check(*self.args, **dict(self.options))

    def injected(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the bug is injected."""
        if isinstance(self.bug, tuple):
            return inject_bug(self.function, *self.bug)
        return replaced(self.function, self.bug)

    def run_without_bug(self) -> None:
        """Runs the check once without a bug: a check that always fails would catch everything."""
        key = self.check, self.args, self.options
        if key not in _PASSED:
            self.run()
            _PASSED.add(key)


_PASSED: set[tuple] = set()
