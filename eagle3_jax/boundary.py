"""The drafter's boundary: what is checked and put right before the loop trusts a draft.

Whatever a drafter proposes, the output is the target's own as long as ``probs`` is what the tokens were drawn from,
given what was drawn before; a wrong ``probs`` changes the distribution of the output, and no check in the loop can see
it.

What can be seen without numbers (members, hashes, shapes, types) is a ``ValueError`` when the loop is built or traced.
What only numbers show (ids, parents, depths) is put right in every round, at the cost of a few integers a node.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from eagle3_jax.tree import Chain, Topology
from eagle3_jax.types import Draft, Drafter, DraftSampling, Verdict, Verifier

# What each part must have, and where it is explained.
_DRAFTER = ("num_nodes", "max_depth", "aux_layers", "init", "observe", "propose")
_TARGET = ("vocab_size", "init_cache", "__call__", "unembed")
_VERIFIER = ("lossless", "__call__")
# What the loop hands over by name.
_ASKED_OF_TARGETS, _ASKED_OF_VERIFIERS = ("aux_layers", "length"), ("warping", "max_depth")
_PAGE = "docs/extending.md"


@runtime_checkable
class Drafting(Protocol):
    """A drafter that can draft in more than one way."""

    def drafting(self, topology: Topology | None, draft_sampling: DraftSampling | None) -> Drafter[Any]:
        """The same drafter with another shape of draft or another way of drawing; ``None`` leaves that as it is.

        Raises:
            ValueError: It cannot draft so.
        """
        ...


def declares_chain(drafter: Drafter[Any]) -> bool:
    """Whether a drafter says ``is_chain``; one that says nothing drafts trees, which is exact for chains too."""
    return bool(getattr(drafter, "is_chain", False))


def require_drafter(drafter: Any) -> None:
    """Refuse what is no drafter.

    Raises:
        ValueError: It is a class, lacks a member, has no hash, or says something impossible about its drafts.
    """
    name = _require_part(drafter, "drafter", _DRAFTER)
    for member in ("num_nodes", "max_depth"):
        value = getattr(drafter, member)
        if not _is_whole(value) or value < 1:
            raise ValueError(f"{name}.{member} is {value!r}; expected a whole number of at least 1, as a property")
    layers = drafter.aux_layers
    if not isinstance(layers, tuple) or not all(_is_whole(layer) and layer >= 0 for layer in layers):
        raise ValueError(f"{name}.aux_layers is {layers!r}; expected a tuple of layers, as in (2, 16, 29), or ()")
    chain = getattr(drafter, "is_chain", False)
    if not isinstance(chain, bool):
        raise ValueError(f"{name}.is_chain is {chain!r}; expected True or False, as a property")
    if chain and drafter.num_nodes > drafter.max_depth + 1:
        raise ValueError(
            f"{name} is a chain of {drafter.num_nodes} nodes and says that its max_depth is {drafter.max_depth}; "
            f"expected {drafter.num_nodes - 1}"
        )


def require_target(target: Any) -> None:
    """Refuse what is no target.

    Raises:
        ValueError: It is a class, lacks a member, has no hash, or is not called as targets are.
    """
    _require_part(target, "target", _TARGET, _ASKED_OF_TARGETS)


def require_verifier(verifier: Any) -> None:
    """Refuse what is no acceptance rule.

    Raises:
        ValueError: It is a class, lacks a member, has no hash, is not called as rules are, or does not say whether it
            is lossless.
    """
    name = _require_part(verifier, "verifier", _VERIFIER, _ASKED_OF_VERIFIERS)
    if not isinstance(verifier.lossless, bool):
        raise ValueError(f"{name}.lossless is {verifier.lossless!r}; expected True or False, see {_PAGE}")


def require_shape(verifier: Verifier, drafter: Drafter[Any]) -> None:
    """Refuse trees for a rule that says ``chains_only``.

    Raises:
        ValueError: The drafter declares no chain.
    """
    if getattr(verifier, "chains_only", False) and not declares_chain(drafter):
        raise ValueError(
            f"{type(verifier).__name__} is defined for chains, and {type(drafter).__name__} drafts a tree (or does not "
            "say `is_chain`); draft a chain (num_speculative_tokens=K) or leave the rule out"
        )


def _require_part(part: Any, role: str, members: tuple[str, ...], asked: tuple[str, ...] = ()) -> str:
    """The name of a part's type, once it is found to be an instance with these members, arguments and a hash."""
    if isinstance(part, type):
        raise ValueError(f"the {role} is the class {part.__name__}; give an instance, {part.__name__}(...)")
    name = type(part).__name__
    missing = [member for member in members if not hasattr(part, member)]
    if missing:
        raise ValueError(f"{name} is no {role}: it has no {', '.join(missing)}; see {_PAGE}")
    takes = inspect.signature(part).parameters if asked else {}
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values()):
        unknown = [argument for argument in asked if argument not in takes]
        if unknown:
            raise ValueError(f"{name} is called without {', '.join(unknown)}, which every {role} is given; see {_PAGE}")
    try:
        hash(part)
    except TypeError:
        raise ValueError(
            f"{name} has no hash, which a static argument of the compiled loop needs; make it a frozen dataclass of "
            f"plain values and keep its arrays in params, see {_PAGE}"
        ) from None
    return name


def configured(
    drafter: Drafter[Any], topology: Topology | None, draft_sampling: DraftSampling | str | None
) -> Drafter[Any]:
    """The drafter with another draft shape or way of drawing, where it has one to choose.

    Raises:
        ValueError: It cannot draft so, or ``draft_sampling`` is no :class:`DraftSampling` and not the word of one.
    """
    require_drafter(drafter)
    if topology is None and draft_sampling is None:
        return drafter
    draft_sampling = None if draft_sampling is None else DraftSampling(draft_sampling)
    if isinstance(drafter, Drafting):
        return drafter.drafting(topology, draft_sampling)
    name = type(drafter).__name__
    if topology is not None:
        shape = "a chain" if isinstance(topology, Chain) else "a tree"
        raise ValueError(
            f"{name} cannot draft {shape} of another size: it has no method `drafting`; "
            "leave the option out or choose another drafter"
        )
    if draft_sampling is DraftSampling.PROBABILISTIC:
        raise ValueError(f"{name} has no distribution to draw from; leave draft_sampling out or load a draft head")
    return drafter


def require_rows(drafter: Drafter[Any], state: Any, batch: int) -> None:
    """Refuse a fresh state of which a row could not be taken.

    Raises:
        ValueError: A leaf is no array that leads with the batch.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        shape = getattr(leaf, "shape", None)
        if not shape or shape[0] != batch:
            raise ValueError(
                f"{type(drafter).__name__}.init gave state{jax.tree_util.keystr(path)} as {_described(leaf)}; expected "
                f"an array that leads with the batch, here {batch}; what belongs to no row goes into params"
            )


def like_before(drafter: Drafter[Any], before: Any, after: Any, method: str = "observe") -> Any:
    """The state that a method left, its types no weaker than before.

    Raises:
        ValueError: It has another structure, shape or type than the state that was given.
    """
    name = type(drafter).__name__
    one, other = jax.tree.structure(before), jax.tree.structure(after)
    if one != other:
        raise ValueError(
            f"{name}.{method} was given a state of {one} and returned {other}; expected the same structure"
        )
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if (np.shape(old), old.dtype) != (np.shape(new), getattr(new, "dtype", None)):
            raise ValueError(
                f"{name}.{method} was given state{jax.tree_util.keystr(path)} as {_described(old)} and returned "
                f"{_described(new)}; expected the same shape and type"
            )
    # A weak type would become a strong one on the way, and the next call another program.
    strong = lambda leaf: jnp.asarray(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf
    return jax.tree.map(strong, after)


def require_draft(drafter: Drafter[Any], draft: Any, *, batch: int, vocab_size: int) -> None:
    """Refuse what is no draft of the size announced.

    Raises:
        ValueError: It is something else, or an array of it has another shape or type.
    """
    name, shape = type(drafter).__name__, (batch, drafter.num_nodes)
    if not isinstance(draft, Draft):
        raise ValueError(f"{name}.propose returned {_described(draft)}; expected an eagle3_jax.Draft")
    wanted = {"tokens": (shape, np.int32), "parents": (shape, np.int32), "valid": (shape, np.bool_)}
    if draft.probs is not None:
        wanted["probs"] = ((*shape, vocab_size), np.float32)
    for field, (size, dtype) in wanted.items():
        value = getattr(draft, field)
        if getattr(value, "shape", None) != size or value.dtype != dtype:
            raise ValueError(
                f"{name}.propose gave {field} as {_described(value)}; expected {np.dtype(dtype).name}"
                f"{list(size)}: rows, nodes{', target ids' if field == 'probs' else ''}"
            )


def require_verdict(verifier: Verifier, verdict: Any, *, batch: int, max_depth: int) -> None:
    """Refuse what is no verdict on a draft of that depth.

    Raises:
        ValueError: It is something else, or an array of it has another shape or type.
    """
    name = type(verifier).__name__
    if not isinstance(verdict, Verdict):
        raise ValueError(f"{name} returned {_described(verdict)}; expected an eagle3_jax.Verdict, see {_PAGE}")
    for field, shape in (("path", (batch, max_depth)), ("num_accepted", (batch,)), ("next_token", (batch,))):
        value = getattr(verdict, field)
        if getattr(value, "shape", None) != shape or value.dtype != np.int32:
            raise ValueError(f"{name} gave {field} as {_described(value)}; expected int32{list(shape)}, see {_PAGE}")


def made_safe(draft: Draft, root: Int[Array, " B"], *, vocab_size: int, is_chain: bool) -> Draft:
    """A draft whose root, ids and parents are in order, whatever was proposed.

    Node 0 becomes the root. A node whose id the vocabulary does not have, or whose declared distribution is not finite,
    is marked invalid and holds the root's token, so that nothing is read out of range. In a declared chain every node's
    parent is the node before it; in a tree a parent that does not stand before its child becomes -1, which cuts the
    node off (see :func:`within_reach`).

    Args:
        draft: As proposed.
        root: The last committed token.
        vocab_size: ``V``.
        is_chain: Whether the drafter declared a chain.
    """
    node = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None, :]
    is_root = node == 0
    known = (draft.tokens >= 0) & (draft.tokens < vocab_size)
    if draft.probs is not None:
        # Decided by the distribution alone: to drop a node for the token that was drawn would bend the output's law.
        known &= jnp.isfinite(jnp.sum(draft.probs, axis=-1))
    if is_chain:
        parents = jnp.broadcast_to(node - 1, draft.parents.shape)
    else:
        topological = (draft.parents >= 0) & (draft.parents < node)
        parents = jnp.where(topological, draft.parents, -1)
    return draft.replace(  # type: ignore[attr-defined]
        tokens=jnp.where(is_root | ~known, root[:, None], draft.tokens),
        parents=parents,
        valid=is_root | (draft.valid & known),
    )


def within_reach(draft: Draft, mask: Bool[Array, "B N N"]) -> Draft:
    """A draft without the nodes that do not see the root: those too deep, and those that hang on no topological parent.

    Args:
        draft: Made safe.
        mask: Its ancestors, as far up as the drafter's ``max_depth``.
    """
    return draft.replace(valid=draft.valid & mask[:, :, 0])  # type: ignore[attr-defined]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _described(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype.name}{list(value.shape)}"
    return type(value).__name__
