"""Lossless EAGLE-3 speculative decoding in JAX.

Public are the names below and what `docs/api` documents by the path of its module; everything else may move. The first
group of `__all__` is enough to decode. Each name is imported at its first use, so `eagle3 --help` starts without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from eagle3_jax._unshaped import stand_in_for_jaxtyping

stand_in_for_jaxtyping()

if TYPE_CHECKING:
    from eagle3_jax import drafters
    from eagle3_jax.acceptance import Exact, verify, verify_greedy
    from eagle3_jax.cache import Cache, KeyValue, KeyValues, LayerCache
    from eagle3_jax.decode import SpeculativeDecoder
    from eagle3_jax.drafters.fallback import Fallback
    from eagle3_jax.load import load_drafter, load_target
    from eagle3_jax.loaded import LoadedDrafter, LoadedTarget
    from eagle3_jax.loop import SpeculativeLoop
    from eagle3_jax.models.processors import (
        LogitBias,
        LogitsProcessor,
        MinP,
        Penalty,
        TokenAutomaton,
        with_processors,
    )
    from eagle3_jax.prompts import apply_chat_template
    from eagle3_jax.results import Chunk, Generation, GenerationResult
    from eagle3_jax.sampling import draw, num_digits, probabilities, uniforms
    from eagle3_jax.schedule import SpeculationSchedule
    from eagle3_jax.sharding import make_mesh
    from eagle3_jax.state import GenerationState, LoopParams, Prompts, Round
    from eagle3_jax.stats import SpeculationStats
    from eagle3_jax.testing import ContractReport, check_drafter, check_target, check_verifier
    from eagle3_jax.topology import Chain, DynamicTree, StaticTree
    from eagle3_jax.types import (
        Draft,
        Drafter,
        DraftSampling,
        EmbeddingTables,
        FinishReason,
        Observation,
        SamplingMode,
        SamplingParams,
        TargetModel,
        TargetOutput,
        Verdict,
        Verifier,
    )
    from eagle3_jax.verifiers.block import BlockVerification
    from eagle3_jax.verifiers.simulated import SimulatedAcceptance
    from eagle3_jax.verifiers.typical import TypicalAcceptance

__version__ = "0.3.0"

__all__ = [  # noqa: RUF022 (in groups)
    # Every day: load, choose a draft, decode, read the result.
    "load_target",
    "load_drafter",
    "LoadedTarget",
    "LoadedDrafter",
    "SpeculativeDecoder",
    "SamplingParams",
    "apply_chat_template",
    "drafters",
    "Fallback",
    "Chain",
    "DynamicTree",
    "StaticTree",
    "DraftSampling",
    "SpeculationSchedule",
    "make_mesh",
    "GenerationResult",
    "Generation",
    "Chunk",
    "SpeculationStats",
    "FinishReason",
    # Logits processors.
    "with_processors",
    "LogitsProcessor",
    "LogitBias",
    "MinP",
    "Penalty",
    "TokenAutomaton",
    # Acceptance rules.
    "Exact",
    "BlockVerification",
    "TypicalAcceptance",
    "SimulatedAcceptance",
    "verify",
    "verify_greedy",
    # Parts to replace: the protocols, the values that they exchange, what a rule samples with, the checks.
    "TargetModel",
    "Drafter",
    "Verifier",
    "LayerCache",
    "Cache",
    "KeyValue",
    "KeyValues",
    "Draft",
    "EmbeddingTables",
    "Observation",
    "SamplingMode",
    "TargetOutput",
    "Verdict",
    "probabilities",
    "draw",
    "uniforms",
    "num_digits",
    "check_drafter",
    "check_target",
    "check_verifier",
    "ContractReport",
    # The loop by hand.
    "SpeculativeLoop",
    "LoopParams",
    "Prompts",
    "GenerationState",
    "Round",
]

# The imports above once more, for a running program; a test holds the two equal.
_NAMES = {
    "acceptance": "Exact verify verify_greedy",
    "verifiers.block": "BlockVerification",
    "cache": "Cache KeyValue KeyValues LayerCache",
    "testing": "ContractReport check_drafter check_target check_verifier",
    "decode": "SpeculativeDecoder",
    "drafters.fallback": "Fallback",
    "load": "load_drafter load_target",
    "loaded": "LoadedDrafter LoadedTarget",
    "loop": "SpeculativeLoop",
    "models.processors": "LogitBias LogitsProcessor MinP Penalty TokenAutomaton with_processors",
    "prompts": "apply_chat_template",
    "results": "Chunk Generation GenerationResult",
    "sampling": "draw num_digits probabilities uniforms",
    "schedule": "SpeculationSchedule",
    "sharding": "make_mesh",
    "verifiers.simulated": "SimulatedAcceptance",
    "state": "GenerationState LoopParams Prompts Round",
    "stats": "SpeculationStats",
    "topology": "Chain DynamicTree StaticTree",
    "types": "Draft Drafter DraftSampling EmbeddingTables FinishReason Observation SamplingMode SamplingParams "
    "TargetModel TargetOutput Verdict Verifier",
    "verifiers.typical": "TypicalAcceptance",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "drafters":
        return importlib.import_module("eagle3_jax.drafters")
    if name not in _HOME:
        raise AttributeError(f"module 'eagle3_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"eagle3_jax.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
