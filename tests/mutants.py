"""Bugs on demand: a piece of a function's source replaced, for as long as a check runs."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator

import jax

from eagle3_jax import loop as loops
from eagle3_jax.models import functional

ENTRY = "at the entry"  # in place of a quotation: the bug is a statement in front of all others


@contextlib.contextmanager
def planted(function: Callable, old: str, new: str) -> Iterator[None]:
    """Run with ``old`` replaced by ``new`` in the source of a function, and nothing compiled before reused."""
    inner = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(inner))
    source = source[source.index("def ") :]
    if old == ENTRY:
        tree = ast.parse(source)
        body = tree.body[0].body  # type: ignore[attr-defined]
        documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        body[int(documented) : int(documented)] = ast.parse(new).body
        source = ast.unparse(tree)
    else:
        assert source.count(old) == 1, f"{old!r} is not (once) in {inner.__qualname__}; the mutant has gone stale"
        source = source.replace(old, new)
    scope = dict(inner.__globals__)
    exec(compile("from __future__ import annotations\n" + source, inner.__code__.co_filename, "exec"), scope)
    original, compiled = inner.__code__, {name: getattr(loops, name) for name in ("prefill", "step", "run", "generate")}
    inner.__code__ = scope[inner.__name__].__code__
    for name, program in compiled.items():
        setattr(loops, name, _fresh(program))
    _forget(function)
    try:
        yield
    finally:
        inner.__code__ = original
        for name, program in compiled.items():
            setattr(loops, name, program)
        _forget(function)


def _fresh(program: Callable) -> Callable:
    """The program compiled anew."""
    plain = inspect.unwrap(program)
    again = functools.wraps(plain)(lambda *args, **options: plain(*args, **options))
    del again.__wrapped__
    return jax.jit(again, static_argnums=0, static_argnames="capacity" if "capacity" in _names(plain) else None)


def _names(function: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _forget(function: Callable) -> None:
    """What was traced of the layers, and compiled of a function that is itself a compiled one."""
    functional._apply.clear_cache()
    if hasattr(function, "clear_cache"):
        function.clear_cache()


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug and the check that must notice it.

    Attributes:
        function: Where it is planted.
        old: Source as it is, or :data:`ENTRY`.
        new: Source with the bug.
        check: Must fail with the bug and pass without.
        args: Its arguments.
        options: Its keyword arguments.
    """

    function: Callable
    old: str
    new: str
    check: Callable
    args: tuple = ()
    options: tuple[tuple[str, object], ...] = ()

    @property
    def place(self) -> str:
        """The function, as a reader finds it."""
        inner = inspect.unwrap(self.function)
        return f"{inner.__module__.removeprefix('eagle3_jax.')}.{inner.__qualname__}"

    @property
    def catcher(self) -> str:
        """The check, as one would call it."""
        named = [f"{name}={value!r}" for name, value in self.options]
        values = ", ".join([*map(repr, self.args), *named])
        return f"{self.check.__module__}.{self.check.__name__}({values})"

    def run(self) -> None:
        """The check."""
        self.check(*self.args, **dict(self.options))

    def bug(self) -> contextlib.AbstractContextManager[None]:
        """With the bug."""
        return planted(self.function, self.old, self.new)

    def seen_green(self) -> None:
        """Run the check by the same means without the bug, once: a check that always fails would catch everything."""
        if self._what not in _GREEN:
            with planted(self.function, self.old, "pass" if self.old == ENTRY else self.old):
                self.run()
            _GREEN.add(self._what)

    @property
    def _what(self) -> tuple:
        return self.check, self.args, self.options


_GREEN: set[tuple] = set()
