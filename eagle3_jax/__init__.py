"""Lossless EAGLE-3 speculative decoding in JAX.

The names below are the public API; everything else may move. Each is imported at its first use, so `eagle3 --help`
starts without JAX.
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

__all__ = [
    "BlockVerification",
    "Cache",
    "Chain",
    "Chunk",
    "ContractReport",
    "Draft",
    "DraftSampling",
    "Drafter",
    "DynamicTree",
    "EmbeddingTables",
    "Exact",
    "Fallback",
    "FinishReason",
    "Generation",
    "GenerationResult",
    "GenerationState",
    "KeyValue",
    "KeyValues",
    "LayerCache",
    "LoadedDrafter",
    "LoadedTarget",
    "LogitBias",
    "LogitsProcessor",
    "LoopParams",
    "MinP",
    "Observation",
    "Penalty",
    "Prompts",
    "Round",
    "SamplingMode",
    "SamplingParams",
    "SimulatedAcceptance",
    "SpeculationSchedule",
    "SpeculationStats",
    "SpeculativeDecoder",
    "SpeculativeLoop",
    "StaticTree",
    "TargetModel",
    "TargetOutput",
    "TokenAutomaton",
    "TypicalAcceptance",
    "Verdict",
    "Verifier",
    "apply_chat_template",
    "check_drafter",
    "check_target",
    "check_verifier",
    "drafters",
    "draw",
    "load_drafter",
    "load_target",
    "make_mesh",
    "num_digits",
    "probabilities",
    "uniforms",
    "verify",
    "verify_greedy",
    "with_processors",
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
