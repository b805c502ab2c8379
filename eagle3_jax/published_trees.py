"""Published static trees, by name.

The trees of Medusa (Cai et al., 2024) are those of ``medusa/model/medusa_choices.py`` in
github.com/FasterDecoding/Medusa (Apache-2.0), chosen by its authors from measured accuracies of each head's candidates:
63 nodes below the root, up to 4 deep. ``medusa-63`` is their ``mc_sim_7b_63`` for any model; those of Vicuna and Zephyr
are for the heads published with these, trained together with the target, or alone (``stage1``).

``eagle-25`` is the tree of EAGLE-1's code (Li et al., 2024; Apache-2.0), which calls it ``mc_sim_7b_63`` too: 25 nodes
on five levels.
"""

from __future__ import annotations

from eagle3_jax.topology import DynamicTree, StaticTree

# Paths of child ranks, all below ten: a digit for each level.
_PATHS = {
    "eagle-25": "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001",
    "medusa-63": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90 000 "
        "001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200 0000 0001"
    ),
    "medusa-vicuna-7b": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 30 31 40 50 60 70 000 001 002 003 004 "
        "005 006 007 008 010 011 012 013 020 021 030 040 050 100 101 102 110 200 0000 0001 0002 0003 0010 0020 0100"
    ),
    "medusa-vicuna-13b": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 20 21 30 40 50 000 001 002 003 004 005 006 007 "
        "008 009 010 011 012 013 020 021 030 040 050 100 101 102 110 200 300 0000 0001 0002 0003 0010 0011 0020 0100 "
        "1000"
    ),
    "medusa-vicuna-33b": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 22 30 31 40 50 60 70 000 001 002 003 "
        "004 005 006 007 008 009 010 011 012 013 020 021 030 040 050 100 101 102 110 200 0000 0001 0002 0010 0100"
    ),
    "medusa-vicuna-7b-stage1": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 23 30 31 32 40 41 50 51 60 "
        "70 80 90 000 001 002 003 004 005 006 007 008 010 011 012 020 021 030 040 050 100 101 200 0000"
    ),
    "medusa-vicuna-13b-stage1": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 23 30 31 40 41 50 60 70 80 "
        "000 001 002 003 004 005 006 007 008 009 010 011 012 013 020 021 030 040 050 100 101 110 200 0000"
    ),
    "medusa-vicuna-33b-stage1": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 20 21 22 23 24 30 31 32 40 41 50 "
        "51 60 70 80 90 000 001 002 003 004 005 006 007 008 010 011 012 020 021 030 040 100 101 200"
    ),
    "medusa-zephyr": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 20 21 22 23 30 31 40 41 50 60 70 000 001 "
        "002 003 004 005 006 007 008 009 010 011 012 013 020 021 030 040 050 100 101 110 200 0000 0001 0010"
    ),
}

#: All published trees by name.
PUBLISHED_TREES = {
    name: StaticTree(tuple(tuple(map(int, path)) for path in paths.split())) for name, paths in _PATHS.items()
}


def tree_name(tree: DynamicTree | StaticTree) -> str:
    """The name of a tree in reports: its published name, or its size."""
    for name, published in PUBLISHED_TREES.items():
        if tree == published:
            return f"tree {name}"
    return f"tree N={tree.num_nodes} G={tree.max_depth}"
