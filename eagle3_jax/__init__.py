"""EAGLE-3 speculative decoding in JAX: exact, compiled, small enough to read.

The names below are the public API; everything else may move.
"""

from eagle3_jax import drafters
from eagle3_jax.cache import KVCache
from eagle3_jax.decode import (
    Chunk,
    Generation,
    GenerationResult,
    LoadedDrafter,
    LoadedTarget,
    SpeculativeDecoder,
)
from eagle3_jax.load import load_drafter, load_target
from eagle3_jax.loop import GenerationState, LoopParams, Prompts, Round, SpeculativeLoop
from eagle3_jax.sampling import DraftSampling, Warping, probabilities
from eagle3_jax.schedule import SpeculationSchedule
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.tree import Chain, DynamicTree, StaticTree
from eagle3_jax.types import (
    Draft,
    Drafter,
    FinishReason,
    Observation,
    SamplingParams,
    TargetModel,
    TargetOutput,
    Verdict,
)
from eagle3_jax.verify import SimulatedAcceptance, verify, verify_greedy

__version__ = "0.1.0"

__all__ = [
    "Chain",
    "Chunk",
    "Draft",
    "DraftSampling",
    "Drafter",
    "DynamicTree",
    "FinishReason",
    "Generation",
    "GenerationResult",
    "GenerationState",
    "KVCache",
    "LoadedDrafter",
    "LoadedTarget",
    "LoopParams",
    "Observation",
    "Prompts",
    "Round",
    "SamplingParams",
    "SimulatedAcceptance",
    "SpeculationSchedule",
    "SpeculationStats",
    "SpeculativeDecoder",
    "SpeculativeLoop",
    "StaticTree",
    "TargetModel",
    "TargetOutput",
    "Verdict",
    "Warping",
    "drafters",
    "load_drafter",
    "load_target",
    "probabilities",
    "verify",
    "verify_greedy",
]
