"""What `import eagle3_jax` offers, by use; `__init__.py` reads it, so each name is written once."""

# ruff: noqa: I001 (in groups)

# Every day: load, choose a draft, decode, read the result.
from eagle3_jax.load import load_target as load_target, load_drafter as load_drafter
from eagle3_jax.loaded import LoadedTarget as LoadedTarget, LoadedDrafter as LoadedDrafter
from eagle3_jax.decode import SpeculativeDecoder as SpeculativeDecoder
from eagle3_jax.types import (
    SamplingParams as SamplingParams,
    DraftSampling as DraftSampling,
    FinishReason as FinishReason,
)
from eagle3_jax.chat.conversation import Chat as Chat
from eagle3_jax.text.template import ChatTemplate as ChatTemplate
from eagle3_jax import drafters as drafters
from eagle3_jax.drafters.fallback import Fallback as Fallback
from eagle3_jax.topology import Chain as Chain, DynamicTree as DynamicTree, StaticTree as StaticTree
from eagle3_jax.schedule import SpeculationSchedule as SpeculationSchedule
from eagle3_jax.devices.sharding import make_mesh as make_mesh
from eagle3_jax.results import (
    GenerationResult as GenerationResult,
    Generation as Generation,
    Chunk as Chunk,
)
from eagle3_jax.stats import SpeculationStats as SpeculationStats
from eagle3_jax.devices.compilation import keep_compiled_programs as keep_compiled_programs

# Logits processors.
from eagle3_jax.processors.logits import (
    with_processors as with_processors,
    LogitsProcessor as LogitsProcessor,
    LogitBias as LogitBias,
    MinP as MinP,
    Penalty as Penalty,
    TokenAutomaton as TokenAutomaton,
)

# Acceptance rules.
from eagle3_jax.acceptance import Exact as Exact, verify as verify, verify_greedy as verify_greedy
from eagle3_jax.verifiers.block import BlockVerification as BlockVerification
from eagle3_jax.verifiers.typical import TypicalAcceptance as TypicalAcceptance
from eagle3_jax.verifiers.simulated import SimulatedAcceptance as SimulatedAcceptance

# Parts to replace: protocols, the values that they exchange, what a rule samples with, checks.
from eagle3_jax.types import (
    TargetModel as TargetModel,
    Drafter as Drafter,
    Verifier as Verifier,
    Draft as Draft,
    EmbeddingTables as EmbeddingTables,
    Observation as Observation,
    SamplingMode as SamplingMode,
    TargetOutput as TargetOutput,
    Verdict as Verdict,
)
from eagle3_jax.cache import (
    LayerCache as LayerCache,
    Cache as Cache,
    KeyValue as KeyValue,
    KeyValues as KeyValues,
)
from eagle3_jax.sampling import (
    probabilities as probabilities,
    draw as draw,
    uniforms as uniforms,
    num_digits as num_digits,
)
from eagle3_jax.testing import (
    check_drafter as check_drafter,
    check_target as check_target,
    check_verifier as check_verifier,
    ContractReport as ContractReport,
)

# The loop by hand.
from eagle3_jax.loop import SpeculativeLoop as SpeculativeLoop
from eagle3_jax.state import (
    LoopParams as LoopParams,
    Prompts as Prompts,
    GenerationState as GenerationState,
    Round as Round,
)

__version__: str
