"""What can be trained for a target: one recipe for each method, all run by the same loop."""

from __future__ import annotations

from eagle3_jax.training import dflash, draft_model, eagle1, head, medusa, mtp, p_eagle
from eagle3_jax.training.recipe import Recipe

# By the name that ``eagle3 train head --method`` takes.
RECIPES: dict[str, Recipe] = {
    "eagle3": head.RECIPE,
    "eagle1": eagle1.RECIPE,
    "medusa": medusa.RECIPE,
    "mtp": mtp.RECIPE,
    "p-eagle": p_eagle.RECIPE,
    **dflash.RECIPES,
    "draft-model": draft_model.RECIPE,
}
