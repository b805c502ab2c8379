"""The output of sampled drafts is the target's, for networks whose drafts depend on each other.

Each network declares distributions after every text of up to two new tokens. Every draft and every
decision of the acceptance rule is enumerated. That drafts are sampled as declared is a check of
their contract.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
from declared_distributions import Declared
from drafter_table import LATENT, WINDOWED, latent_layers

from eagle3_jax.decode import LoadedDrafter, LoadedTarget
from eagle3_jax.topology import Chain

pytestmark = pytest.mark.core

OPTIONS = {"topology": Chain(2), "draft_sampling": "probabilistic"}
NETWORKS: dict[str, Callable[[LoadedTarget], LoadedDrafter]] = {
    "MTP modules": lambda target: tiny.mtp(target, layers=(*tiny.layers(1), *LATENT), **OPTIONS),
    "DFlash, windows": lambda target: tiny.dflash(target, layers=WINDOWED, **OPTIONS),
    "DFlash2, two candidates": lambda target: tiny.dflash2(target, selector_top_k=2, **OPTIONS),
    "EAGLE-3 of latents": lambda target: tiny.eagle3(target, layers=latent_layers(1), **OPTIONS),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_output_has_the_targets_distribution(name: str) -> None:
    target = tiny.target(3)
    declared = Declared(target, NETWORKS[name](target))
    assert declared.distance(declared.sampled) < 1e-6
