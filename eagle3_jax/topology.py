"""Topologies of drafts: a chain, a dynamic tree, a static tree; and the default length of a chain.

Topologies are static and checked when they are built.
"""

from __future__ import annotations

import dataclasses

# A dynamic tree keeps all scores of a round in memory at once.
_MOST_CANDIDATES = 2**20


@dataclasses.dataclass(frozen=True)
class Chain:
    """A draft in which every token follows the one before it.

    Attributes:
        num_speculative_tokens: ``K``, tokens drafted per round.
    """

    num_speculative_tokens: int

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens is {self.num_speculative_tokens}; expected at least 1 "
                "(for plain decoding leave the drafter out)"
            )

    @property
    def num_nodes(self) -> int:
        """``N``, root included."""
        return self.num_speculative_tokens + 1

    @property
    def max_depth(self) -> int:
        """``G``."""
        return self.num_speculative_tokens

    @property
    def num_expanded(self) -> int:
        """Number of nodes below the root that the draft network runs on.

        They are those that may get children.
        """
        return self.num_speculative_tokens - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicTree:
    """EAGLE-2's context-dependent tree.

    It expands the most likely nodes of each level, and keeps the most likely of all levels.

    Attributes:
        num_nodes: Nodes sent to the target, root included (the official ``total_token``).
        max_depth: Levels below the root (the official ``depth`` plus one).
        top_k: Nodes expanded per level, and children of each.
    """

    num_nodes: int
    max_depth: int
    top_k: int

    def __post_init__(self) -> None:
        for name, least in (("num_nodes", 2), ("max_depth", 1), ("top_k", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"tree {name} is {getattr(self, name)}; expected at least {least}")

        if self.num_candidates > _MOST_CANDIDATES:
            raise ValueError(
                f"a tree of max_depth={self.max_depth} and top_k={self.top_k} scores"
                f" {self.num_candidates} nodes in every round; expected at most {_MOST_CANDIDATES},"
                " so lower top_k or max_depth"
            )
        if self.num_nodes > self.num_candidates + 1:
            raise ValueError(
                f"a tree of num_nodes={self.num_nodes} does not fit: max_depth={self.max_depth} and"
                f" top_k={self.top_k} give at most {self.num_candidates + 1} nodes, root included;"
                " lower num_nodes or raise the others"
            )
        if self.num_nodes <= self.max_depth:
            raise ValueError(
                f"a tree of num_nodes={self.num_nodes} cannot be max_depth={self.max_depth} levels"
                f" deep; give num_nodes of at least {self.max_depth + 1} or a smaller max_depth"
            )

    @property
    def num_candidates(self) -> int:
        """Number of scored nodes: ``k`` on the first level, ``k²`` on every later level."""
        return self.top_k + (self.max_depth - 1) * self.top_k**2

    @property
    def num_expanded(self) -> int:
        """Number of nodes below the root that the draft network runs on.

        They are those that may get children.
        """
        return self.top_k * (self.max_depth - 1)


@dataclasses.dataclass(frozen=True)
class StaticTree:
    """A fixed tree as paths of child ranks, in the notation of Medusa and EAGLE-1.

    ``((0,), (1,), (0, 0))`` has the two most likely first tokens, and the most likely token after
    the first of them. Nodes are numbered by level, then in the order of their parents, then by
    rank.

    Attributes:
        paths: One path per node below the root.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.paths:
            raise ValueError("a static tree needs at least one path, for example ((0,),)")
        known = {(), *self.paths}
        for path in self.paths:
            if path[:-1] not in known or any(rank < 0 for rank in path):
                raise ValueError(f"path {path} has no parent {path[:-1]} in the tree; add it")
        if len(known) != len(self.paths) + 1:
            raise ValueError("a static tree names a path twice; give every path once")
        by_level = sorted(self.paths, key=lambda path: (len(path), path))
        object.__setattr__(self, "paths", tuple(by_level))

    @property
    def num_nodes(self) -> int:
        """``N``, root included."""
        return len(self.paths) + 1

    @property
    def max_depth(self) -> int:
        """``G``."""
        return max(len(path) for path in self.paths)

    @property
    def num_expanded(self) -> int:
        """Number of nodes below the root that the draft network runs on: those with children."""
        return len({path[:-1] for path in self.paths} - {()})

    @property
    def parents(self) -> tuple[int, ...]:
        """``[N]``, parent of each node, -1 at the root."""
        index = {(): 0} | {path: node for node, path in enumerate(self.paths, 1)}
        return (-1, *(index[path[:-1]] for path in self.paths))


Topology = Chain | DynamicTree | StaticTree


# The last batch size of each default length on CPUs. Measured with the shipped pair on two cores:
# never slower than plain decoding, in float32 and mixed (docs/numbers.md).
_ON_CPUS = {2: 3, 4: 2, 32: 1}
# With weights in int8 two to four rows cost about the same, so plain batches leave less to gain:
# measured with SmolLM2.
_ON_CPUS_IN_INT8 = {2: 3, 4: 1}


def default_draft_length(
    batch: int = 1, platform: str | None = None, weights: str = "dense"
) -> int:
    """Returns the default draft length ``K``: 5; on CPUs 3 for one or two rows, and fewer for more.

    DFlash drafts its whole block instead, and Medusa one token per head.

    Args:
        batch: Rows that start together.
        platform: Platform of the device, such as ``cpu``. Default: this process's default device.
        weights: How the weights are held, such as ``int8``.

    Returns:
        Tokens of a chain; 0 for plain decoding, on CPUs above 32 rows, or above 4 with weights in
        ``int8``.
    """
    # Here, because shapes are parsed before JAX is loaded.
    import jax

    if (platform or jax.default_backend()) != "cpu":
        return 5
    lengths = _ON_CPUS_IN_INT8 if weights == "int8" else _ON_CPUS
    return next((length for last, length in lengths.items() if batch <= last), 0)


# Paths of child ranks, all below ten: a digit for each level.
_PATHS = {
    "eagle-25": (
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    ),
    "medusa-63": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40"
        " 50 60 70 80 90 000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050"
        " 060 070 100 101 200 0000 0001"
    ),
    "medusa-vicuna-7b": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 30 31 40 50 60 70"
        " 000 001 002 003 004 005 006 007 008 010 011 012 013 020 021 030 040 050 100 101 102 110"
        " 200 0000 0001 0002 0003 0010 0020 0100"
    ),
    "medusa-vicuna-13b": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 20 21 30 40 50 000 001 002"
        " 003 004 005 006 007 008 009 010 011 012 013 020 021 030 040 050 100 101 102 110 200 300"
        " 0000 0001 0002 0003 0010 0011 0020 0100 1000"
    ),
    "medusa-vicuna-33b": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 22 30 31 40 50 60"
        " 70 000 001 002 003 004 005 006 007 008 009 010 011 012 013 020 021 030 040 050 100 101"
        " 102 110 200 0000 0001 0002 0010 0100"
    ),
    "medusa-vicuna-7b-stage1": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 23 30 31"
        " 32 40 41 50 51 60 70 80 90 000 001 002 003 004 005 006 007 008 010 011 012 020 021 030"
        " 040 050 100 101 200 0000"
    ),
    "medusa-vicuna-13b-stage1": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 23 30 31"
        " 40 41 50 60 70 80 000 001 002 003 004 005 006 007 008 009 010 011 012 013 020 021 030 040"
        " 050 100 101 110 200 0000"
    ),
    "medusa-vicuna-33b-stage1": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 20 21 22 23 24"
        " 30 31 32 40 41 50 51 60 70 80 90 000 001 002 003 004 005 006 007 008 010 011 012 020 021"
        " 030 040 100 101 200"
    ),
    "medusa-zephyr": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 20 21 22 23 30 31 40"
        " 41 50 60 70 000 001 002 003 004 005 006 007 008 009 010 011 012 013 020 021 030 040 050"
        " 100 101 110 200 0000 0001 0010"
    ),
}

#: All published trees by name.
PUBLISHED_TREES = {
    name: StaticTree(tuple(tuple(map(int, path)) for path in paths.split()))
    for name, paths in _PATHS.items()
}


def tree_name(tree: DynamicTree | StaticTree) -> str:
    """Returns the name of a tree in reports: its published name, or its size."""
    for name, published in PUBLISHED_TREES.items():
        if tree == published:
            return f"tree {name}"
    return f"tree N={tree.num_nodes} G={tree.max_depth}"
