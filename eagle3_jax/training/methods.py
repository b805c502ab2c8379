"""What can be trained for a target: one recipe for each method, all run by the same loop."""

from __future__ import annotations

from eagle3_jax.training import dflash, draft_model, head, medusa
from eagle3_jax.training.recipe import Recipe

# By the name that ``eagle3 train head --method`` takes.
RECIPES: dict[str, Recipe] = {
    "eagle3": head.RECIPE,
    "medusa": medusa.RECIPE,
    **dflash.RECIPES,
    "draft-model": draft_model.RECIPE,
}
