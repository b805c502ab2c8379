"""Static trees that papers and their code have published, by name.

``eagle1`` is the tree of EAGLE-1's code (``eagle/model/choices.py`` in github.com/SafeAILab/EAGLE, there
``mc_sim_7b_63``): 25 nodes below the root, up to 5 deep.
"""

from __future__ import annotations

from eagle3_jax.tree import StaticTree

# Paths of child ranks, all below ten: a digit for each level.
_PATHS = {
    "eagle1": "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001",
}

PUBLISHED_TREES = {
    name: StaticTree(tuple(tuple(map(int, path)) for path in paths.split())) for name, paths in _PATHS.items()
}
