"""Drafting methods, one file each.

All of them implement the protocol ``eagle3_jax.types.Drafter``.
"""

from eagle3_jax.drafters.dflash import DFlashConfig, DFlashDrafter, Markov
from eagle3_jax.drafters.dflash2 import DFlash2Config, DFlash2Drafter
from eagle3_jax.drafters.draft_model import DraftModel, DraftModelState, draft_model, layer_skip
from eagle3_jax.drafters.eagle1 import Eagle1Config, Eagle1Drafter
from eagle3_jax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from eagle3_jax.drafters.fallback import Fallback
from eagle3_jax.drafters.gemma4 import Gemma4AssistantConfig, Gemma4AssistantDrafter
from eagle3_jax.drafters.medusa import MedusaConfig, MedusaDrafter
from eagle3_jax.drafters.mtp import MTPConfig, MTPDrafter
from eagle3_jax.drafters.ngram import NGram
from eagle3_jax.drafters.p_eagle import PEagleConfig, PEagleDrafter
from eagle3_jax.drafters.plain import Plain, PlainState, Silent
from eagle3_jax.drafters.suffix import Suffix

__all__ = [
    "DFlash2Config",
    "DFlash2Drafter",
    "DFlashConfig",
    "DFlashDrafter",
    "DraftModel",
    "DraftModelState",
    "Eagle1Config",
    "Eagle1Drafter",
    "Eagle3Config",
    "Eagle3Drafter",
    "Fallback",
    "Gemma4AssistantConfig",
    "Gemma4AssistantDrafter",
    "MTPConfig",
    "MTPDrafter",
    "Markov",
    "MedusaConfig",
    "MedusaDrafter",
    "NGram",
    "PEagleConfig",
    "PEagleDrafter",
    "Plain",
    "PlainState",
    "Silent",
    "Suffix",
    "draft_model",
    "layer_skip",
]
