"""Static trees that papers and their code have published."""

from __future__ import annotations

from eagle3_jax.tree import StaticTree

# The tree of EAGLE-1's code, which calls it mc_sim_7b_63: 25 drafted nodes on five levels.
EAGLE1 = StaticTree(
    (
        *((0,), (1,), (2,), (3,)),
        *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
        *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
        *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
        *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
    )
)
