"""L9: speed beside every rival in the same run, and below what the hardware can do.

Nothing is asserted about who is faster. What is asserted makes the figures worth reading: nothing was compiled while
times were taken, every repeat wrote the same tokens, and nobody read memory faster than the device can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from eagle3_jax.cli._transformers import TransformersContender

from eagle3_jax import DynamicTree, LoadedTarget, SpeculationStats, SpeculativeDecoder
from eagle3_jax.analysis.bench import Contender, DecoderContender, Report, Row, Run, measure
from eagle3_jax.analysis.cost import cost_per_million_tokens
from eagle3_jax.analysis.random_models import REHEARSAL_SHAPES, SHAPES, bytes_needed, random_pair, why_not
from eagle3_jax.analysis.roofline import ceiling, step_bytes
from eagle3_jax.drafters import NGram
from eagle3_jax.rivals.vllm.bridge import VLLM, Engine, EngineOptions, VLLMUnavailable, eagle3
from validation.report import Check
from validation.subject import Pair, Subject

pytestmark = pytest.mark.level("L9")

CONTEXT = 100  # prompts are cut to their last tokens
TREE = DynamicTree(num_nodes=60, max_depth=8, top_k=10)
SMALL_TREE = DynamicTree(num_nodes=16, max_depth=4, top_k=4)
RIVALS_SEEN = 512  # positions that rivals reserve
COLUMNS = [
    "method", "precision", "batch", "tokens/s", "quartiles", "over plain", "quartiles", "τ", "TTFT p50 ms",
    "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms", "% of bandwidth", "cost of 1M tokens", "not run because",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        batches: Prompts decoded at once.
        chains: Lengths ``K``; 0 is plain decoding, and always there.
        tree: One tree.
        new_tokens: Per prompt.
        repeats: Interleaved.
        random_shapes: Of models with random weights.
        large: Bytes far beyond all caches.
    """

    batches: tuple[int, ...]
    chains: tuple[int, ...]
    tree: DynamicTree | None
    new_tokens: int
    repeats: int
    random_shapes: dict[str, Any]
    large: int


CPU = Plan((1, 8), (3,), None, 48, 3, {}, 2**27)
REHEARSAL = Plan((1, 4), (1, 2), SMALL_TREE, 8, 2, REHEARSAL_SHAPES, 2**24)
GPU = Plan((1, 4, 16, 64), (1, 2, 3, 4, 5, 6, 7), TREE, 128, 3, SHAPES, 2**32)


def plan_of(config: pytest.Config) -> Plan:
    if not config.getoption("--gpu"):
        return CPU
    return REHEARSAL if config.getoption("--rehearse") else GPU


@pytest.fixture
def plan(pytestconfig: pytest.Config) -> Plan:
    return plan_of(pytestconfig)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    plan = plan_of(metafunc.config)
    if "model" in metafunc.fixturenames:
        cases = [("pair", batch) for batch in plan.batches]
        cases += [(name, batch) for name in plan.random_shapes for batch in (1, 16)]
        metafunc.parametrize(
            ("model", "batch"), cases, ids=[f"{name.replace(' ', '-')}-batch-{batch}" for name, batch in cases]
        )
    if "vllm_chain" in metafunc.fixturenames:
        metafunc.parametrize("vllm_chain", (0, *plan.chains))


@dataclasses.dataclass
class VLLMContender:
    """A loaded engine of vLLM."""

    name: str
    dtype: str
    engine: Engine

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int) -> Run:
        """Time to first token as vLLM tells it, or of a run for one token where it does not."""
        done = self.engine.generate(prompts, max_new_tokens=max_new_tokens)
        told = [one.first_token_seconds for one in done.completions if one.first_token_seconds is not None]
        first = max(told) if told else self.engine.generate(prompts, max_new_tokens=1).seconds
        return Run(
            min(first, done.seconds), max(done.seconds - first, 1e-9), [one.tokens for one in done.completions],
            _stats(done.counters),
        )  # fmt: skip


def _stats(counters: dict[str, Any]) -> SpeculationStats | None:
    if not counters:
        return None
    names = [field.name for field in dataclasses.fields(SpeculationStats)]
    return SpeculationStats(**{name: np.asarray(counters[name]) for name in names})


def chain(pair: Pair, dtype: str, length: int) -> DecoderContender:
    """Our decoder; length 0 is plain decoding."""
    if length == 0:
        return DecoderContender(f"plain {dtype}", dtype, SpeculativeDecoder(pair[0], stop_tokens=()))
    decoder = SpeculativeDecoder(*pair, num_speculative_tokens=length, stop_tokens=())
    return DecoderContender(f"chain K={length}", dtype, decoder)


def some_prompts(subject: Subject, count: int) -> list[list[int]]:
    """From all files in turn, each cut to its end; repeated where there are too few."""
    tokens = subject.prompt_tokens
    return [tokens[index * max(len(tokens) // count, 1) % len(tokens)][-CONTEXT:] for index in range(count)]


def test_speed(check: Check, subject: Subject, setting: Any, plan: Plan, model: str, batch: int) -> None:
    """Every way of decoding in turn on the same prompts."""
    if model != "pair":
        _random_model(check, setting, plan, model, batch)
        return
    dtype = subject.dtypes[0]
    pair = subject.pair(dtype)
    contenders: list[Contender] = [chain(pair, dtype, length) for length in (0, *plan.chains)]
    if plan.tree is not None:
        decoder = SpeculativeDecoder(*pair, tree=plan.tree, stop_tokens=())
        contenders.append(DecoderContender(f"tree N={plan.tree.num_nodes} G={plan.tree.max_depth}", dtype, decoder))
    contenders.append(DecoderContender("n-gram K=5", dtype, SpeculativeDecoder(pair[0], NGram(), stop_tokens=())))
    if not setting.gpu and batch == 1:
        contenders.append(chain(subject.pair("float32"), "float32", 0))
    missing: list[list[Any]] = []
    contenders += _transformers(subject, batch, setting, missing)
    prompts = some_prompts(subject, max(batch, 4))
    _measure(check, contenders, prompts, pair[0], plan, setting, batch=batch, missing=missing)


def _random_model(check: Check, setting: Any, plan: Plan, name: str, batch: int) -> None:
    """A shape whose weights mean nothing: what a step costs, not what is accepted."""
    config = plan.random_shapes[name]
    if not setting.rehearsal:
        needed = bytes_needed(config, batch=batch, capacity=2 * (CONTEXT + plan.new_tokens))
        reason = why_not(needed, jax.devices()[0].memory_stats())
        if reason is not None:
            check.table("Speed", COLUMNS, [_not_run(name, "bfloat16", batch, reason)])
            pytest.skip(f"{name} at batch {batch}: {reason}")
    pair = random_pair(name, config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (batch, CONTEXT)).tolist()
    contenders = [chain(pair, "bfloat16", length) for length in (0, 3)]
    check.number(note="random weights: drafts are accepted by chance only")
    _measure(check, contenders, tokens, pair[0], plan, setting, batch=batch, missing=[], cost_rounds=16)


@pytest.fixture
def engine(vllm: VLLM, subject: Subject, vllm_chain: int, plan: Plan) -> Engine:
    """vLLM in the precision that both can run: float32 on CPUs, bfloat16 on GPUs."""
    speculative = eagle3(subject.drafter_directory, vllm_chain) if vllm_chain else None
    options = EngineOptions(
        model=str(subject.target_directory),
        dtype=_shared_dtype(subject),
        speculative=speculative,
        max_model_len=RIVALS_SEEN,
        max_num_seqs=max(plan.batches),
    )
    try:
        return vllm.engine(options)
    except VLLMUnavailable as reason:
        pytest.skip(str(reason))


def _shared_dtype(subject: Subject) -> str:
    return "float32" if subject.dtypes[0] == "mixed" else "bfloat16"


def test_speed_beside_vllm(
    check: Check, subject: Subject, setting: Any, plan: Plan, vllm_chain: int, engine: Engine
) -> None:
    """vLLM holds one engine at a time, so each meets our plain decoding and our chain of its length in turn."""
    dtype = _shared_dtype(subject)
    pair = subject.pair(dtype)
    name = f"vLLM eagle3 K={vllm_chain}" if vllm_chain else "vLLM plain"
    for batch in plan.batches:
        contenders: list[Contender] = [chain(pair, dtype, length) for length in sorted({0, vllm_chain})]
        contenders.append(VLLMContender(name, dtype, engine))
        prompts = some_prompts(subject, max(batch, 4))
        _measure(check, contenders, prompts, pair[0], plan, setting, batch=batch, missing=[])


def _transformers(subject: Subject, batch: int, setting: Any, missing: list[list[Any]]) -> list[TransformersContender]:
    """``generate``, and its assisted generation by prompt lookup, which takes one prompt at a time."""
    dtype = _shared_dtype(subject)
    on_gpu = setting.gpu and not setting.rehearsal
    try:
        import torch

        if on_gpu and not torch.cuda.is_available():
            raise ImportError("this build of PyTorch does not see the GPU")
        plain = TransformersContender.load(subject.target_directory, dtype=dtype, device="cuda" if on_gpu else "cpu")
    except (ImportError, OSError, ValueError) as error:
        missing.append(_not_run("transformers generate", dtype, batch, str(error).splitlines()[0]))
        return []
    if batch > 1:
        missing.append(
            _not_run("transformers prompt lookup", dtype, batch, "assisted generation takes one prompt at a time")
        )
        return [plain]
    options = {"prompt_lookup_num_tokens": 5}
    return [plain, dataclasses.replace(plain, name="transformers prompt lookup", options=options)]


def _not_run(name: str, dtype: str, batch: int, reason: str) -> list[Any]:
    return [name, dtype, batch, *[""] * (len(COLUMNS) - 4), reason]


def _measure(
    check: Check,
    contenders: Sequence[Contender],
    prompts: list[list[int]],
    target: LoadedTarget,
    plan: Plan,
    setting: Any,
    *,
    batch: int,
    missing: list[list[Any]],
    cost_rounds: int = 0,
) -> None:
    """Measure, keep everything, then judge."""
    limits = [_ceiling(contenders, batch, plan)]
    report = measure(
        contenders,
        prompts[: len(prompts) // batch * batch],
        max_new_tokens=plan.new_tokens,
        repeats=plan.repeats,
        baselines=[contenders[0].name],
        batch_size=batch,
        cost_rounds=cost_rounds,
    )
    limits.append(_ceiling(contenders, batch, plan))  # a shared machine is not equally fast all the time
    most = max(limits)
    unknown = {one.name for one in contenders if isinstance(one, TransformersContender) and one.options}
    shares = {
        row.name: achieved(row, _target_of(row, contenders, target), batch) / most
        for row in report.rows
        if row.name not in unknown  # transformers does not say in how many rounds it wrote its tokens
    }
    _keep(check, report, shares, most, setting.price_per_hour, missing)
    too_fast = {name: share for name, share in shares.items() if share > 1}
    assert not too_fast, f"faster than {most / 1e9:.0f} GB/s can feed: {too_fast}; the clock or the tokens are wrong"
    assert report.programs_after_warm_up == 0
    for row in report.rows:
        assert row.repeatable or not _is_ours(row, contenders), f"{row.name} wrote other tokens in another repeat"


def _ceiling(contenders: Sequence[Contender], batch: int, plan: Plan) -> float:
    targets = {one.dtype: one.decoder.target for one in contenders if isinstance(one, DecoderContender)}
    return max(ceiling(target, rows=batch, context=CONTEXT, large=plan.large) for target in targets.values())


def _is_ours(row: Row, contenders: Sequence[Contender]) -> bool:
    return any(isinstance(one, DecoderContender) and one.name == row.name for one in contenders)


def _target_of(row: Row, contenders: Sequence[Contender], default: LoadedTarget) -> LoadedTarget:
    """The target in the row's precision, which says how many bytes a step reads."""
    own = (one.decoder.target for one in contenders if isinstance(one, DecoderContender) and one.dtype == row.dtype)
    return next(own, default)


def achieved(row: Row, target: LoadedTarget, batch: int) -> float:
    """Bytes per second that a method reads at least: target steps per second times what each of them reads.

    ``τ`` counts rounds in which something was drafted; the others write one token and read no less, so prompt lookup
    is credited with less than it reads, never with more.
    """
    steps = row.decode_tokens_per_second.median / batch / row.mean_acceptance_length
    return steps * step_bytes(target, rows=batch, context=0)


def _keep(
    check: Check, report: Report, shares: dict[str, float], most: float, price: float | None, missing: list[list[Any]]
) -> None:
    rows = [_cells(row, report, shares.get(row.name), price) for row in report.rows]
    batch = report.batch_size
    check.table(
        f"Speed at batch {batch}, {report.num_prompts} prompts of {CONTEXT} tokens, {report.max_new_tokens} new",
        COLUMNS,
        [*rows, *missing],
    )
    named = [row.name for row in report.rows]
    speeds = [row.decode_tokens_per_second.median for row in report.rows]
    check.number(**{f"bandwidth GB/s, batch {batch}": most / 1e9})
    check.number(**{f"tokens/s {name}, batch {batch}": speed for name, speed in zip(named, speeds, strict=True)})
    check.plot(f"Speed at batch {batch}", "bar", "method", "tokens/s", {"decoding": (named, speeds)})
    lengths = [row.num_draft_steps for row in report.rows if row.name.startswith("chain")]
    if len(lengths) > 1:
        ratios = [row.ratio.median for row in report.rows if row.name.startswith("chain")]
        series = {f"batch {batch}": ([0, *lengths], [1.0, *ratios])}
        check.plot(f"Speed-up over plain decoding at batch {batch}", "line", "K", "ratio", series)


def _cells(row: Row, report: Report, share: float | None, price: float | None) -> list[Any]:
    speed, ratio = row.decode_tokens_per_second, row.ratio
    cost = "" if price is None else cost_per_million_tokens(row.total_tokens_per_second.median, price)
    latencies = [1e3 * value for one in (row.first_token, row.per_token) for value in (one.p50, one.p99)]
    return [
        row.name, row.dtype, report.batch_size, speed.median, f"{speed.low:.4g} to {speed.high:.4g}",
        ratio.median, f"{ratio.low:.2f} to {ratio.high:.2f}", row.mean_acceptance_length, *latencies,
        "" if share is None else 100 * share, cost, "",
    ]  # fmt: skip
