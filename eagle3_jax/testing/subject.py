"""The part whose contract is checked: a drafter, a target or an acceptance rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from eagle3_jax.checks import check_part
from eagle3_jax.testing.report import Broken

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A part under test, and the sizes of its checks.

    Attributes:
        part: The drafter, the target's model or the acceptance rule.
        params: Parameters of a drafter.
        target: The target that is tested, or that a drafter drafts for; a
            :class:`~eagle3_jax.LoadedTarget`. ``None`` for acceptance rules, whose target is a
            table.
        samples: Number of samples of the statistical checks.
        tolerance: Largest deviation of a logit, as a share of the largest logit; ``None``: by the
            target's precision.
        seed: Random seed of all inputs and keys.
    """

    part: Any
    params: Any = None
    target: Any = None
    samples: int = 32768
    tolerance: float | None = None
    seed: int = 0
    _results: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def random(self, *stream: int) -> np.random.Generator:
        """Returns the random numbers of one purpose."""
        return np.random.default_rng([self.seed, *stream])

    def random_tokens(self, *stream: int, shape: tuple[int, ...]) -> Int[np.ndarray, ...]:
        """Returns random token ids of the target."""
        tokens = self.random(*stream).integers(0, self.target.vocab_size, shape)
        return tokens.astype(np.int32)

    def once(self, compute: Callable[[Subject], Result]) -> Result:
        """Returns ``compute(subject)``, which runs at the first call only."""
        if compute not in self._results:
            self._results[compute] = compute(self)
        return self._results[compute]


def require_protocol(subject: Subject, role: str) -> None:
    """Checks that a part is an instance with every member of its role, and equal to itself."""
    check_part(subject.part, role)
    # A part is a static argument of compiled functions, which are looked up by hash and equality.
    if hash(subject.part) != hash(subject.part) or subject.part != subject.part:
        raise Broken(
            "its hash changes, or it is not equal to itself, so every call would compile anew"
        )


def mix_rows(chosen: Bool[np.ndarray, " B"], first: Any, second: Any) -> Any:
    """Returns the chosen rows of the arrays of ``first`` next to the other rows of ``second``."""

    def mix(first_leaf: Any, second_leaf: Any) -> Any:
        mask = chosen.reshape(-1, *[1] * (first_leaf.ndim - 1))
        where = np.where if isinstance(first_leaf, np.ndarray) else jnp.where
        return where(mask, first_leaf, second_leaf)

    return jax.tree.map(mix, first, second)


def repeat_row(tree: Any, row: int, times: int = 1) -> Any:
    """Returns a batch of arrays in which every row is the same row of ``tree``."""
    return jax.tree.map(lambda leaf: leaf[np.full(times, row)], tree)


def name_rows(rows: Collection[int]) -> str:
    """Returns "row 1" or "rows 1, 2"."""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows))}"


def has_low_precision(*trees: Any) -> bool:
    """Whether numbers of less than 32 bits are computed with.

    They are floating point numbers, or weights in int8, whose products round the activations too.
    The order of sums may then change a token.
    """
    leaves = jax.tree.leaves(trees)
    return any(
        leaf.dtype == jnp.int8
        or (jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4)
        for leaf in leaves
    )
