"""L9: speed next to every other engine in the same run, and below what the hardware can do.

The checks do not assert who is faster. They assert that the figures are valid: no program was
compiled during a measurement, every repeat wrote the same tokens, and no engine read memory faster
than the device can.

A GPU decodes the shipped pair out of its second cache and waits for launches most of the time, so
its speed there says nothing about larger models. The quoted speeds are those of the shapes of such
models, with random weights and drafts that are accepted by dice.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from eagle3_jax import DynamicTree, SpeculativeDecoder
from eagle3_jax.bench.contenders import Contender, DecoderContender
from eagle3_jax.bench.random_models import bytes_needed, random_pair, shape_named, why_not
from eagle3_jax.drafters import NGram
from eagle3_jax.measure.timing import CompileClock
from eagle3_jax.verifiers.simulated import SimulatedAcceptance
from validation.engines.vllm.bridge import VLLM, Engine, EngineOptions, VLLMUnavailable, eagle3
from validation.engines.vllm.contender import VLLMContender
from validation.fixtures import setting_of
from validation.runs import Check
from validation.speeds import (
    COLUMNS,
    chain,
    is_quoted,
    measure_and_keep,
    not_run,
    shared_dtype,
    transformers_or_why_not,
    tree,
)
from validation.subject import CONTEXT, Setting, Subject, some_prompts

pytestmark = pytest.mark.level("L9")

# of each draft token, given those before it, where weights are random; τ = 2.5 for a chain of 3
ACCEPTED = 0.7
TREE = DynamicTree(num_nodes=60, max_depth=8, top_k=10)
SMALL_TREE = DynamicTree(num_nodes=16, max_depth=4, top_k=4)
RIVALS_SEEN = 512  # positions that rivals reserve


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is measured."""

    batches: tuple[int, ...]  #: Prompts decoded at once.
    chains: tuple[int, ...]  #: Lengths ``K``; 0 is plain decoding, and always there.
    #: Draft lengths of vLLM. Each is a separate engine that takes minutes to load and compile.
    vllm_chains: tuple[int, ...]
    tree: DynamicTree | None  #: One tree.
    new_tokens: int  #: Per prompt.
    repeats: int  #: Interleaved.
    random_shapes: tuple[str, ...]  #: Names of shapes of models with random weights.
    random_batches: tuple[int, ...]  #: Rows decoded at once with these.
    random_chains: tuple[int, ...]  #: Lengths ``K`` with these.
    large: int  #: Bytes far beyond all caches.

    def measured(self, contenders: list[Contender], setting: Setting) -> dict[str, Any]:
        """Options of :func:`measure_and_keep`; the first contender is the baseline."""
        amounts = {"max_new_tokens": self.new_tokens, "repeats": self.repeats, "large": self.large}
        return amounts | {"baseline": contenders[0].name, "price": setting.price_per_hour}


CPU = Plan((1, 8), (3,), (0, 3), None, 48, 3, (), (), (), 2**27)
REHEARSAL = Plan(
    (1, 4), (1, 2), (0, 2), SMALL_TREE, 8, 2, ("Llama-tiny", "Qwen3-tiny"), (1, 16), (3,), 2**24
)
GPU_SHAPES = ("Llama-3.1-8B", "Llama-3.2-1B", "Qwen3-8B")
GPU = Plan(
    (1, 4, 16, 64),
    (1, 2, 3, 4, 5, 6, 7),
    (0, 3, 5),
    TREE,
    128,
    3,
    GPU_SHAPES,
    (1, 16),
    (1, 3, 5),
    2**32,
)


def plan_of(setting: Setting) -> Plan:
    plan = CPU if not setting.gpu else REHEARSAL if setting.rehearsal else GPU
    if not setting.quick:
        return plan
    shapes = plan.random_shapes[:2]
    new_tokens = min(plan.new_tokens, 24)
    return dataclasses.replace(
        plan, batches=(1,), chains=(3,), vllm_chains=(3,), tree=None, new_tokens=new_tokens,
        repeats=2, random_shapes=shapes, random_batches=(1,),
    )  # fmt: skip


@pytest.fixture
def plan(setting: Setting) -> Plan:
    return plan_of(setting)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    plan = plan_of(setting_of(metafunc.config))
    if "model" in metafunc.fixturenames:
        cases = [(name, batch) for name in plan.random_shapes for batch in plan.random_batches]
        cases += [("pair", batch) for batch in plan.batches]
        metafunc.parametrize(
            ("model", "batch"),
            cases,
            ids=[f"{name.replace(' ', '-')}-batch-{batch}" for name, batch in cases],
        )
    if "vllm_chain" in metafunc.fixturenames:
        metafunc.parametrize("vllm_chain", plan.vllm_chains)


def test_compilations_are_counted(check: Check) -> None:
    """The counter of compiled programs counts a program that is compiled, and nothing else."""
    double = jax.jit(lambda x: x * 2)
    with CompileClock() as first:
        double(np.float32(1.0)).block_until_ready()
    with CompileClock() as second:
        double(np.float32(2.0)).block_until_ready()
    check.number(programs=first.programs, seconds_compiling=first.seconds)
    assert first.programs == 1 and first.seconds > 0, "JAX no longer tells that it compiles"
    assert second.programs == 0


def test_speed(
    check: Check, subject: Subject, setting: Setting, plan: Plan, model: str, batch: int
) -> None:
    """Every way of decoding in turn on the same prompts."""
    if model != "pair":
        _random_model(check, setting, plan, model, batch)
        return

    dtype = subject.dtypes[0]
    pair = subject.pair(dtype)
    contenders: list[Contender] = [chain(pair, dtype, length) for length in (0, *plan.chains)]
    if plan.tree is not None:
        contenders.append(tree(pair, dtype, plan.tree))
    contenders.append(
        DecoderContender("n-gram K=5", dtype, SpeculativeDecoder(pair[0], NGram(5), stop_tokens=()))
    )
    if not setting.gpu and batch == 1:
        contenders.append(chain(subject.pair("float32"), "float32", 0))

    missing: list[list[Any]] = []
    contenders += transformers_or_why_not(subject, batch, setting, missing)
    prompts = some_prompts(subject, max(batch, 4))
    amounts = plan.measured(contenders, setting) | {"quoted": is_quoted(subject, setting)}
    measure_and_keep(check, contenders, prompts, batch=batch, missing=missing, **amounts)


def _random_model(check: Check, setting: Setting, plan: Plan, name: str, batch: int) -> None:
    """A shape with random weights, at simulated acceptance: rounds cost what they would."""
    shape = shape_named(name)
    if not setting.rehearsal:
        needed = bytes_needed(shape, batch=batch, capacity=2 * (CONTEXT + plan.new_tokens))
        reason = why_not(needed, jax.devices()[0].memory_stats())
        if reason is not None:
            check.table("Speed", COLUMNS, [not_run(name, "bfloat16", batch, reason)])
            pytest.skip(f"{name} at batch {batch}: {reason}")

    pair = random_pair(name)
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, (batch, CONTEXT)).tolist()
    contenders: list[Contender] = [
        chain(
            pair,
            "bfloat16",
            length,
            SimulatedAcceptance.of_conditional_rate(ACCEPTED, max(length, 1)),
        )
        for length in (0, *plan.random_chains)
    ]
    if plan.tree is not None:
        simulated = SimulatedAcceptance.of_conditional_rate(ACCEPTED, plan.tree.max_depth)
        contenders.append(tree(pair, "bfloat16", plan.tree, simulated))

    title = f"{name}, random weights, each draft token accepted with probability {ACCEPTED}: "
    amounts = plan.measured(contenders, setting)
    measure_and_keep(check, contenders, tokens, batch=batch, cost_rounds=16, title=title, **amounts)


@pytest.fixture
def engine(vllm: VLLM, subject: Subject, vllm_chain: int, plan: Plan) -> Engine:
    """vLLM in the precision that both can run: float32 on CPUs, bfloat16 on GPUs."""
    speculative = eagle3(subject.drafter_directory, vllm_chain) if vllm_chain else None
    options = EngineOptions(
        model=str(subject.target_directory),
        dtype=shared_dtype(subject.dtypes[0]),
        speculative=speculative,
        max_model_len=RIVALS_SEEN,
        max_num_seqs=max(plan.batches),
        eager=False,
    )
    try:
        return vllm.engine(options)
    except VLLMUnavailable as reason:
        pytest.skip(str(reason))


def test_speed_next_to_vllm(
    check: Check, subject: Subject, setting: Setting, plan: Plan, vllm_chain: int, engine: Engine
) -> None:
    """vLLM holds one engine, so each meets our plain decoding and our chain in turn."""
    dtype = shared_dtype(subject.dtypes[0])
    pair = subject.pair(dtype)
    name = f"vLLM eagle3 K={vllm_chain}" if vllm_chain else "vLLM plain"
    for batch in plan.batches:
        contenders: list[Contender] = [
            chain(pair, dtype, length) for length in sorted({0, vllm_chain})
        ]
        contenders.append(VLLMContender(name, dtype, engine))
        prompts = some_prompts(subject, max(batch, 4))
        amounts = plan.measured(contenders, setting) | {"quoted": is_quoted(subject, setting)}
        measure_and_keep(check, contenders, prompts, batch=batch, **amounts)
