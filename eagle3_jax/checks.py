"""Checks of the target, the drafter and the verifier of a loop.

The output has the target's distribution for any draft, if ``probs`` is the distribution that each
token was sampled from, given the tokens sampled before it. A wrong ``probs`` changes the
distribution of the output, and no check in the loop can detect it; ``check_drafter`` does.

Members, hashes, shapes and types are checked when the loop is built or traced, with a
``ValueError``. Values of drafts (ids, parents, depths) are repaired in every round
(``eagle3_jax.tree.sanitize_draft``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eagle3_jax.cache import Cache
from eagle3_jax.files.jsonl import shown
from eagle3_jax.topology import Chain, Topology
from eagle3_jax.types import (
    Draft,
    Drafter,
    DraftSampling,
    SamplingMode,
    SamplingParams,
    TargetOutput,
    Verdict,
    Verifier,
)

_PAGE = "docs/extending.md"
_BOOL = (lambda value: isinstance(value, bool), "True or False, as a property")
_POSITIVE = (lambda value: is_whole(value, 1), "a whole number of at least 1, as a property")
_COUNT = (lambda value: is_whole(value, 0), "a whole number of at least 0, as a property")
_LAYERS = (
    lambda value: isinstance(value, tuple) and all(is_whole(layer, 0) for layer in value),
    "a tuple of layers, as in (2, 16, 29), or ()",
)
# For each role its members, with a test of those that are plain values, and the arguments that it
# is given by name.
_MEMBERS: dict[str, dict[str, tuple[Callable[[Any], bool], str] | None]] = {
    "drafter": (
        {"num_nodes": _POSITIVE, "max_depth": _POSITIVE, "aux_layers": _LAYERS}
        | dict.fromkeys(("init", "observe", "propose"))
    ),
    "target": dict.fromkeys(("vocab_size", "init_cache", "__call__", "unembed")),
    "verifier": {"lossless": _BOOL, "__call__": None},
}
_OPTIONAL = {"is_chain": _BOOL, "num_likeliest": _COUNT, "reads_cache": _BOOL}
_ARGUMENTS = {
    "drafter": (),
    "target": ("aux_layers", "length"),
    "verifier": ("sampling_mode", "max_depth"),
}
# Shape (letters as in `types.py`) and type of what a part returns; a target chooses its own type.
_RETURNED: dict[type, dict[str, tuple[str, Any]]] = {
    Draft: {
        "tokens": ("B N", np.int32),
        "parents": ("B N", np.int32),
        "valid": ("B N", np.bool_),
        "probs": ("B N V", np.float32),
    },
    Verdict: {
        "path": ("B G", np.int32),
        "num_accepted": ("B", np.int32),
        "next_token": ("B", np.int32),
    },
    TargetOutput: {"final": ("B T E", None), "features": ("B T A D", None)},
}


@runtime_checkable
class Drafting(Protocol):
    """A drafter that can draft in more than one way."""

    def with_topology(
        self, topology: Topology | None, draft_sampling: DraftSampling | None
    ) -> Drafter[Any]:
        """The same drafter with another draft shape or another way of sampling.

        ``None`` keeps the present one.

        Raises:
            ValueError: The drafter cannot draft like that.
        """
        ...


def takes_argument(part: Any, name: str) -> bool:
    """Returns whether a part, called as a function, takes an argument of this name."""
    return name in inspect.signature(part).parameters


def declares_chain(drafter: Drafter[Any]) -> bool:
    """Whether a drafter declares ``is_chain``.

    Without it the loop verifies trees, which is exact for chains too.
    """
    return bool(getattr(drafter, "is_chain", False))


def reads_cache(drafter: Drafter[Any]) -> bool:
    """Whether a drafter declares that it reads the target's cache."""
    return bool(getattr(drafter, "reads_cache", False))


def propose(
    drafter: Drafter[Any],
    params: Any,
    state: Any,
    keys: Any,
    sampling: SamplingParams,
    cache: Cache | None,
) -> Draft:
    """Calls ``propose`` of a drafter, with the target's cache if it reads that."""
    more: dict[str, Any] = {"cache": cache} if reads_cache(drafter) else {}
    return drafter.propose(params, state, keys, sampling, **more)


def check_parts(target: Any, drafter: Any, verifier: Any) -> None:
    """Checks the three parts of a loop, and that the verifier takes the drafter's drafts.

    Raises:
        ValueError: A part is a class, lacks a member, has no hash, or the parts do not fit
            together.
    """
    check_part(target, "target")
    check_part(drafter, "drafter")
    check_part(verifier, "verifier")
    if getattr(verifier, "chains_only", False) and not declares_chain(drafter):
        raise ValueError(
            f"{type(verifier).__name__} is defined for chains, and {type(drafter).__name__} drafts"
            " a tree (or does not say `is_chain`); draft a chain (num_speculative_tokens=K) or"
            " leave the rule out"
        )


def check_part(part: Any, role: str) -> None:
    """Checks that a part is a hashable instance with the members and arguments of its role.

    Raises:
        ValueError: It is not.
    """
    if isinstance(part, type):
        raise ValueError(
            f"the {role} is the class {part.__name__}; give an instance, {part.__name__}(...)"
        )
    name = type(part).__name__
    missing = [member for member in _MEMBERS[role] if not hasattr(part, member)]
    if missing:
        raise ValueError(f"{name} is not a {role}: it has no {', '.join(missing)}; see {_PAGE}")

    parameters = inspect.signature(part).parameters if _ARGUMENTS[role] else {}
    takes_any_name = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    unknown = [argument for argument in _ARGUMENTS[role] if argument not in parameters]
    if unknown and not takes_any_name:
        raise ValueError(
            f"{name} is called without {', '.join(unknown)}, which every {role} is given; see"
            f" {_PAGE}"
        )

    for member, expectation in (_MEMBERS[role] | _OPTIONAL).items():
        if expectation is None or not hasattr(part, member):
            continue
        is_expected, description = expectation
        value = getattr(part, member)
        if not is_expected(value):
            raise ValueError(f"{name}.{member} is {value!r}; expected {description}, see {_PAGE}")

    try:
        hash(part)
    except TypeError:
        raise ValueError(
            f"{name} has no hash, which a static argument of the compiled loop needs; make it a"
            f" frozen dataclass of plain values and keep its arrays in params, see {_PAGE}"
        ) from None

    if role == "drafter" and reads_cache(part) and not takes_argument(part.propose, "cache"):
        raise ValueError(
            f"{name} says reads_cache, and its propose takes no argument `cache`; add it, see"
            f" {_PAGE}"
        )
    if role == "drafter" and declares_chain(part) and part.num_nodes > part.max_depth + 1:
        raise ValueError(
            f"{name} is a chain of {part.num_nodes} nodes and says that its max_depth is"
            f" {part.max_depth}; expected {part.num_nodes - 1}"
        )


def configured(
    drafter: Drafter[Any], topology: Topology | None, draft_sampling: DraftSampling | str | None
) -> Drafter[Any]:
    """Returns the drafter with another draft shape or way of sampling, if it can choose.

    Raises:
        ValueError: It cannot draft like that, or ``draft_sampling`` is neither a
            :class:`DraftSampling` nor its word.
    """
    check_part(drafter, "drafter")
    if topology is None and draft_sampling is None:
        return drafter
    draft_sampling = None if draft_sampling is None else DraftSampling(draft_sampling)
    if isinstance(drafter, Drafting):
        return drafter.with_topology(topology, draft_sampling)

    name = type(drafter).__name__
    if topology is not None:
        raise ValueError(
            f"{name} cannot draft a {'chain' if isinstance(topology, Chain) else 'tree'} of another"
            " size: it has no method `with_topology`; leave the option out or choose another"
            " drafter"
        )
    if draft_sampling is DraftSampling.PROBABILISTIC:
        raise ValueError(
            f"{name} has no distribution to draw from; leave draft_sampling out or load a draft"
            " head"
        )
    return drafter


def check_rows(part: Any, state: Any, batch: int, *, origin: str = "init gave state") -> None:
    """Checks that every leaf of a fresh state or cache is an array with one entry per row.

    Raises:
        ValueError: A leaf is not.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if getattr(leaf, "shape", None) is None or leaf.shape[:1] != (batch,):
            raise ValueError(
                f"{type(part).__name__}.{origin}{jax.tree_util.keystr(path)} as {_described(leaf)};"
                f" expected an array that leads with the batch, here {batch}; what belongs to no"
                " row goes into params"
            )


def check_same(before: Any, after: Any, subject: str, verb: str) -> None:
    """Checks that a tree of arrays kept its structure, shapes and types.

    Args:
        before: The tree that a part was called with.
        after: The tree that it returned.
        subject: What was called, for the message.
        verb: What it did, for the message.

    Raises:
        ValueError: It did not; "SUBJECT as int32[2] VERB int32[2, 2]; expected the same".
    """
    structure_before = jax.tree.structure(before)
    structure_after = jax.tree.structure(after)
    if structure_before != structure_after:
        raise ValueError(
            f"{subject} of {structure_before} {verb} {structure_after}; expected the same structure"
        )

    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        if (np.shape(old), old.dtype) != (np.shape(new), getattr(new, "dtype", None)):
            raise ValueError(
                f"{subject}{jax.tree_util.keystr(path)} as {_described(old)} {verb}"
                f" {_described(new)}; expected the same shape and type"
            )


def checked_state(drafter: Drafter[Any], before: Any, after: Any, method: str = "observe") -> Any:
    """Returns the state that a method returned, strongly typed.

    Structure, shapes and types are checked.
    """
    check_same(before, after, f"{type(drafter).__name__}.{method} was given state", "and returned")

    # A weak type would become a strong one on the way, and the next call another program.
    def strong(leaf: Any) -> Any:
        return jnp.asarray(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf

    return jax.tree.map(strong, after)


def check_returned(giver: str, returned: Any, kind: type, **sizes: int) -> None:
    """Checks class, shapes and types of a returned value.

    Args:
        giver: Name of the part or of its method, with which messages begin.
        returned: The value.
        kind: The class that it must have: ``Draft``, ``Verdict`` or ``TargetOutput``.
        sizes: Sizes of the letters of shapes that are known, as ``B=2``.

    Raises:
        ValueError: One of them is wrong.
    """
    if not isinstance(returned, kind):
        described = _described(returned)
        raise ValueError(
            f"{giver} returned {described}; expected an eagle3_jax.{kind.__name__}, see {_PAGE}"
        )

    for field, (letters, dtype) in _RETURNED[kind].items():
        value = getattr(returned, field)
        if value is None and field == "probs":
            continue

        # Letters without a known size fit any size that the value has.
        shape = getattr(value, "shape", ())
        names = letters.split()
        known_sizes = dict(zip(names, shape, strict=False)) | sizes
        expected_shape = tuple(known_sizes.get(letter) for letter in names)
        has_type = dtype is None or getattr(value, "dtype", None) == dtype
        if shape != expected_shape or not has_type:
            expected = ("" if dtype is None else np.dtype(dtype).name) + str(list(expected_shape))
            raise ValueError(
                f"{giver} gave {field} as {_described(value)}; expected {expected}: {letters}, see"
                f" {_PAGE}"
            )


def check_draft(drafter: Drafter[Any], draft: Any, *, batch: int, vocab_size: int) -> None:
    """Checks shapes and types of a draft; raises ``ValueError``."""
    giver = f"{type(drafter).__name__}.propose"
    check_returned(giver, draft, Draft, B=batch, N=drafter.num_nodes, V=vocab_size)


def check_verdict(verifier: Verifier, verdict: Any, *, batch: int, max_depth: int) -> None:
    """Checks shapes and types of a verdict; raises ``ValueError``."""
    check_returned(type(verifier).__name__, verdict, Verdict, B=batch, G=max_depth)


def is_whole(value: Any, least: int) -> bool:
    """Returns whether a value is a whole number of at least ``least``, and not a boolean."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_integer and bool(value >= least)


def _described(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype.name}{list(value.shape)}"
    return type(value).__name__


def per_row(sampling: SamplingParams, batch: int) -> SamplingParams:
    """Broadcasts scalars to one value for each of ``batch`` rows.

    Raises:
        ValueError: ``sampling`` is not a :class:`SamplingParams`, or a parameter is neither one
            number nor one per row.
    """
    if not isinstance(sampling, SamplingParams):
        raise ValueError(
            f"sampling is {sampling!r:.40}; expected SamplingParams(temperature=..., top_k=...,"
            " top_p=...), or None for greedy decoding"
        )

    def rows(name: str, dtype: type) -> Array:
        value = np.asarray(getattr(sampling, name))
        # An integer of more than 64 bits, for example, is an object for numpy.
        if value.dtype == object:
            number = shown(getattr(sampling, name))
            raise ValueError(
                f"{name} is {number}; expected a number of at most 64 bits, or one for each row"
            )
        if value.shape not in ((), (batch,)):
            raise ValueError(
                f"{name} has shape {value.shape} for {batch} rows; give one number, or one for"
                " each row"
            )

        # A top_k above any vocabulary, and within 32 bits, means the same as a larger one.
        if dtype is np.int32:
            value = np.clip(value, -1, np.iinfo(np.int32).max)
        # Broadcast on the host: on the device each would be a program to compile.
        return jnp.asarray(np.broadcast_to(value.astype(dtype), (batch,)))

    return SamplingParams(
        temperature=rows("temperature", np.float32),
        top_k=rows("top_k", np.int32),
        top_p=rows("top_p", np.float32),
    )


def checked_sampling(sampling: SamplingParams, batch: int) -> SamplingParams:
    """Returns one checked value per row.

    Raises:
        ValueError: A value is out of range; the message says which one.
    """
    # Values that overflow in float32 are infinite and raise below.
    with np.errstate(over="ignore"):
        rows = per_row(sampling, batch)

    ranges = (
        (
            "temperature",
            rows.temperature,
            lambda x: 0 <= x < np.inf,
            "0 (greedy) or more, and finite",
        ),
        ("top_k", rows.top_k, lambda x: x >= 0, "0 (all tokens) or more"),
        ("top_p", rows.top_p, lambda x: (x > 0) & (x <= 1), "above 0 and at most 1"),
    )
    for name, values, is_in_range, description in ranges:
        for value in np.asarray(values):
            if not is_in_range(value):
                raise ValueError(f"{name} is {value:g}; expected {description}")
    return rows


def sampling_mode_of(sampling: SamplingParams) -> SamplingMode:
    """Returns the mode that covers all rows. Reads the parameters back from the device."""
    sampled = np.asarray(sampling.temperature) > 0
    has_top_k = np.asarray(sampling.top_k) > 0
    has_top_p = np.asarray(sampling.top_p) < 1
    truncated = sampled & (has_top_k | has_top_p)
    if truncated.any():
        return SamplingMode.TRUNCATED
    return SamplingMode.TEMPERATURE if sampled.any() else SamplingMode.GREEDY


def check_mode(mode: SamplingMode, needed: SamplingMode) -> None:
    """Checks that ``mode`` does the work of ``needed``; raises ``ValueError``."""
    # Modes are declared with the least work first.
    modes = list(SamplingMode)
    if modes.index(mode) < modes.index(needed):
        raise ValueError(
            f"sampling_mode is {mode.value!r}, and these sampling parameters need {needed.value!r};"
            f" choose {needed.value!r} or leave sampling_mode out"
        )
