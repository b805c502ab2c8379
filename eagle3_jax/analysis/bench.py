"""How fast decoding is, measured fairly: interleaved, warm, with its spread, beside what the cost model predicts.

The model is ``S = τ / (v + G·c)`` (Leviathan et al., 2023, theorem 3.8, with a verification that is not free): ``τ``
tokens per round, ``v`` the cost of a verification and ``c`` that of a draft step, both in steps of plain decoding, and
``G`` draft steps in a round. All three are measured apart from the speed that they predict.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from eagle3_jax import loop as loops
from eagle3_jax.analysis.timing import CompileClock, Latency, Spread
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.drafters.plain import Plain
from eagle3_jax.loop import GenerationState, LoopParams, SpeculativeLoop
from eagle3_jax.models.decoder import causal_mask
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.types import Observation, SamplingParams

Tokens = list[int]


@dataclasses.dataclass(frozen=True)
class Run:
    """One batch of prompts decoded once.

    Attributes:
        prefill_seconds: From the prompts to the first token of every row.
        decode_seconds: All further tokens of all rows.
        tokens: New tokens of each row, the first included.
        stats: Counters, where something was drafted.
    """

    prefill_seconds: float
    decode_seconds: float
    tokens: list[Tokens]
    stats: SpeculationStats | None = None


@runtime_checkable
class Contender(Protocol):
    """Something that decodes, under a name.

    Attributes:
        name: In reports.
        dtype: Precision, in reports.
    """

    name: str
    dtype: str

    def run(self, prompts: Sequence[Tokens], max_new_tokens: int) -> Run:
        """Decode a batch greedily, to the limit whatever the tokens are."""
        ...


@dataclasses.dataclass
class DecoderContender:
    """A decoder of this library.

    Attributes:
        name: In reports.
        dtype: Precision, in reports.
        decoder: Without stop tokens, so that every contender writes as many tokens.
    """

    name: str
    dtype: str
    decoder: SpeculativeDecoder

    def run(self, prompts: Sequence[Tokens], max_new_tokens: int) -> Run:
        """Prefill, then the whole loop on the device, each waited for."""
        start = time.perf_counter()
        state = jax.block_until_ready(self.decoder.prefill(prompts, max_new_tokens=max_new_tokens))
        prefilled = time.perf_counter()
        state = jax.block_until_ready(loops.run(self.decoder.loop, self.decoder.params, state))
        decoded = time.perf_counter()
        tokens, length, stats = jax.device_get((state.tokens, state.length, state.stats))
        new = [tokens[row, len(prompt) : length[row]].tolist() for row, prompt in enumerate(prompts)]
        return Run(prefilled - start, decoded - prefilled, new, SpeculationStats.merge([stats]))


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """What a round consists of.

    Attributes:
        verify_seconds: One target forward over a draft, with acceptance and commit.
        draft_seconds: One draft step: taking in the truth and proposing, over the depth of the draft.
    """

    verify_seconds: float
    draft_seconds: float


@dataclasses.dataclass(frozen=True)
class Row:
    """The measurements of one contender.

    Attributes:
        name: Contender.
        dtype: Its precision.
        decode_tokens_per_second: Without the prefill and the first token, which it gives.
        total_tokens_per_second: Prefill included.
        ratio: Decode speed over that of the baseline in the same repeat.
        total_ratio: The same, prefill included.
        mean_acceptance_length: τ.
        draft_acceptance_rate: Accepted over drafted.
        acceptance_per_position: Share of drafts accepted up to each depth.
        num_draft_steps: ``G``, 0 for plain decoding.
        verify_cost: ``v``, verification over the baseline's step.
        draft_cost: ``c``, draft step over the baseline's step.
        predicted_ratio: ``τ / (v + G·c)``.
        first_token: Time to first token of a prompt in its batch.
        per_token: Time per output token after the first, of each batch in each repeat.
        compile_seconds: Of all programs, apart from every other number.
        same_output: Whether its tokens equal those of plain decoding in the same precision; ``None`` if there is none.
        repeatable: Whether every repeat wrote the same tokens.
    """

    name: str
    dtype: str
    decode_tokens_per_second: Spread
    total_tokens_per_second: Spread
    ratio: Spread
    total_ratio: Spread
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_per_position: list[float]
    num_draft_steps: int
    verify_cost: float | None
    draft_cost: float | None
    predicted_ratio: float | None
    first_token: Latency
    per_token: Latency
    compile_seconds: float
    same_output: bool | None
    repeatable: bool

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Report:
    """All rows and what they were measured on.

    Attributes:
        rows: In the order of the contenders.
        baseline: Name of the plain contender with the highest decode speed.
        num_prompts: Prompts decoded in each repeat.
        max_new_tokens: Tokens per prompt.
        repeats: Interleaved repeats, warm-up not counted.
        batch_size: Prompts decoded at once.
        programs_after_warm_up: Programs that had to be compiled while times were taken; 0, or the times are not fair.
    """

    rows: list[Row]
    baseline: str
    num_prompts: int
    max_new_tokens: int
    repeats: int
    batch_size: int
    programs_after_warm_up: int

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return dataclasses.asdict(self)


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    repeats: int,
    baselines: Sequence[str],
    batch_size: int = 1,
    cost_rounds: int = 32,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Report:
    """Run all contenders in turn on all prompts, ``repeats`` times after a warm-up.

    Turn about, not one after the other: a machine that slows down then slows all of them.

    Args:
        contenders: What to measure.
        prompts: Token ids.
        max_new_tokens: Per prompt; at least 2, since the first token is the prefill's.
        repeats: Measured passes.
        baselines: Names of the plain contenders; the fastest of them is what the others are compared with.
        batch_size: Prompts decoded at once; their number is a multiple of it.
        cost_rounds: Rounds over which :func:`step_costs` are averaged; 0 leaves them, and the prediction, out.
        on_progress: Called before each contender's pass with what is being done.

    Raises:
        ValueError: There is nothing to measure, or a batch would not be full.
    """
    if batch_size < 1 or len(prompts) % batch_size:
        raise ValueError(f"{len(prompts)} prompts do not fill batches of {batch_size}; give a multiple of it")
    if not prompts or repeats < 1 or max_new_tokens < 2:
        raise ValueError("a benchmark needs at least one prompt, one repeat and two new tokens")
    batches = [list(prompts[start : start + batch_size]) for start in range(0, len(prompts), batch_size)]
    compiling = {}
    for contender in contenders:
        on_progress(f"compiling {contender.name}")
        compiling[contender.name] = _warm_up(contender, batches, max_new_tokens, cost_rounds)
    runs: dict[str, list[list[Run]]] = {contender.name: [] for contender in contenders}
    costs: dict[str, list[StepCosts]] = {contender.name: [] for contender in contenders}
    with CompileClock() as clock:
        for repeat in range(repeats):
            for contender in contenders:
                on_progress(f"{contender.name}, repeat {repeat + 1} of {repeats}")
                runs[contender.name].append([contender.run(batch, max_new_tokens) for batch in batches])
                if isinstance(contender, DecoderContender) and cost_rounds:
                    cost = step_costs(contender.decoder, batches[0], max_new_tokens=max_new_tokens, rounds=cost_rounds)
                    costs[contender.name].append(cost)
    speeds = {name: [_decode_speed(passed) for passed in passes] for name, passes in runs.items()}
    baseline = max(baselines, key=lambda name: Spread.of(speeds[name]).median)
    plain_output = {c.dtype: [run.tokens for run in runs[c.name][0]] for c in contenders if c.name in baselines}
    rows = [
        _row(
            contender,
            runs=runs[contender.name],
            plain=runs[baseline],
            costs=costs[contender.name],
            compile_seconds=compiling[contender.name],
            plain_output=plain_output.get(contender.dtype),
        )
        for contender in contenders
    ]
    return Report(rows, baseline, len(prompts), max_new_tokens, repeats, batch_size, clock.programs)


def _warm_up(contender: Contender, batches: Sequence[list[Tokens]], max_new_tokens: int, cost_rounds: int) -> float:
    with CompileClock() as clock:
        for batch in batches:  # prompts of other lengths may need other programs
            contender.run(batch, max_new_tokens)
        if isinstance(contender, DecoderContender) and cost_rounds:
            step_costs(contender.decoder, batches[0], max_new_tokens=max_new_tokens, rounds=cost_rounds)
    return clock.seconds


def _row(
    contender: Contender,
    *,
    runs: list[list[Run]],
    plain: list[list[Run]],
    costs: list[StepCosts],
    compile_seconds: float,
    plain_output: list[list[Tokens]] | None,
) -> Row:
    decode, total = [_decode_speed(r) for r in runs], [_total_speed(r) for r in runs]
    plain_decode = [_decode_speed(r) for r in plain]
    step = len(plain[0][0].tokens) / Spread.of(plain_decode).median
    written = [[run.tokens for run in passed] for passed in runs]
    depth = _num_draft_steps(contender)
    stats = SpeculationStats.merge([run.stats for run in runs[0] if run.stats is not None] or [_no_stats()])
    tau = stats.mean_acceptance_length
    verify = Spread.of(cost.verify_seconds for cost in costs).median / step if costs else None
    draft = Spread.of(cost.draft_seconds for cost in costs).median / step if costs else None
    return Row(
        name=contender.name,
        dtype=contender.dtype,
        decode_tokens_per_second=Spread.of(decode),
        total_tokens_per_second=Spread.of(total),
        ratio=Spread.of(ours / theirs for ours, theirs in zip(decode, plain_decode, strict=True)),
        total_ratio=Spread.of(ours / _total_speed(theirs) for ours, theirs in zip(total, plain, strict=True)),
        mean_acceptance_length=tau,
        draft_acceptance_rate=stats.draft_acceptance_rate,
        acceptance_per_position=stats.acceptance_per_position if depth else [],
        num_draft_steps=depth,
        verify_cost=verify,
        draft_cost=draft,
        predicted_ratio=None if verify is None or draft is None else tau / (verify + depth * draft),
        first_token=Latency.of(run.prefill_seconds for passed in runs for run in passed),
        per_token=Latency.of(run.decode_seconds / (len(run.tokens[0]) - 1) for passed in runs for run in passed),
        compile_seconds=compile_seconds,
        same_output=None if plain_output is None else written[0] == plain_output,
        repeatable=all(passed == written[0] for passed in written),
    )


def _num_draft_steps(contender: Contender) -> int:
    if not isinstance(contender, DecoderContender) or isinstance(contender.decoder.loop.drafter, Plain):
        return 0
    return contender.decoder.loop.drafter.max_depth


def _no_stats() -> SpeculationStats:
    return SpeculationStats.zeros(1, 1)


def _decode_speed(runs: Sequence[Run]) -> float:
    return sum(len(row) - 1 for run in runs for row in run.tokens) / sum(run.decode_seconds for run in runs)


def _total_speed(runs: Sequence[Run]) -> float:
    return sum(len(row) for run in runs for row in run.tokens) / sum(
        run.prefill_seconds + run.decode_seconds for run in runs
    )


def step_costs(
    decoder: SpeculativeDecoder, prompts: Sequence[Tokens], *, max_new_tokens: int, rounds: int = 32
) -> StepCosts:
    """Time a decoder's verification and drafting apart from each other.

    Args:
        decoder: What to take apart.
        prompts: Where to start, a row each.
        max_new_tokens: Fixes the capacity, which the cost of attention depends on.
        rounds: Rounds averaged over.
    """
    drafter = decoder.loop.drafter
    rounds = min(rounds, max_new_tokens - 1)
    verifying = SpeculativeDecoder(decoder.target, Plain(drafter.num_nodes), stop_tokens=())
    state = verifying.prefill(prompts, max_new_tokens=max_new_tokens)
    state = state.replace(limit=jnp.minimum(state.limit, state.length + rounds))  # type: ignore[attr-defined]
    ready = jax.block_until_ready(state)  # or the prefill, still under way, would be timed too
    verify = _seconds(lambda: loops.run(verifying.loop, verifying.params, ready))
    if isinstance(drafter, Plain):
        return StepCosts(verify / rounds, 0.0)
    state = decoder.prefill(prompts, max_new_tokens=max_new_tokens)
    depth = drafter.max_depth + 1
    known = jnp.stack([jnp.resize(jnp.asarray(prompt, jnp.int32), (depth,)) for prompt in prompts])
    features = _features(decoder.loop, decoder.params, known)
    jax.block_until_ready((state, features))
    draft = _seconds(lambda: _draft_rounds(decoder.loop, decoder.params, state, features, rounds=rounds))
    return StepCosts(verify / rounds, draft / rounds / drafter.max_depth)


def _seconds(launch: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(launch())
    return time.perf_counter() - start


@functools.partial(jax.jit, static_argnames=("loop",))
def _features(loop: SpeculativeLoop, params: LoopParams, tokens: Int[Array, "B T"]) -> Float[Array, "B T A D"]:
    """Real features for the drafter to take in."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    mask = causal_mask(tokens.shape[1])
    return loop.target(params.target, tokens, positions, mask, aux_layers=loop.drafter.aux_layers).features


@functools.partial(jax.jit, static_argnames=("loop", "rounds"))
def _draft_rounds(
    loop: SpeculativeLoop, params: LoopParams, state: GenerationState, features: Float[Array, "B T A D"], *, rounds: int
) -> Any:
    """Drafting without a target: the tokens proposed are taken in as if they were true."""
    drafter = loop.drafter

    def one(index: Array, known: Any) -> Any:
        draft = drafter.propose(params.drafter, known, state.keys, state.sampling)
        fed = draft.tokens[:, : features.shape[1]]
        seen = Observation(
            tokens=fed,
            features=jnp.roll(features, index, axis=1),  # different every time, or XLA would fuse them once for all
            length=jnp.ones_like(state.length),
            next_token=fed[:, -1],
        )
        return drafter.observe(params.drafter, known, seen)

    return lax.fori_loop(0, rounds, one, state.drafter)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A decoder against plain decoding with the same target in the same precision, prefill included.

    Attributes:
        tokens_per_second: Of the decoder.
        plain_tokens_per_second: Of plain decoding.
        ratio: Paired by repeat.
        is_plain: Whether the decoder is plain decoding itself; nothing was compared then.
        same_output: Whether both wrote the same tokens; ``None`` when they were sampled.
    """

    tokens_per_second: Spread
    plain_tokens_per_second: Spread
    ratio: Spread
    is_plain: bool
    same_output: bool | None


def compare_with_plain(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: Sequence[int],
    sampling: SamplingParams,
    seed: int,
    repeats: int,
) -> Comparison:
    """Decode the prompts one by one with and without speculation, interleaved, after a warm-up of both."""
    plain = SpeculativeDecoder(decoder.target, stop_tokens=decoder.loop.stop_tokens)
    is_plain = isinstance(decoder.loop.drafter, Plain)
    decoders = [plain] if is_plain else [plain, decoder]
    speeds: list[list[float]] = [[] for _ in decoders]
    outputs: list[list[Tokens]] = [[] for _ in decoders]
    for repeat in range(repeats + 1):  # the first one compiles
        for index, one in enumerate(decoders):
            results = [
                one.generate([prompt], max_new_tokens=[limit], sampling=sampling, seed=seed)
                for prompt, limit in zip(prompts, max_new_tokens, strict=True)
            ]
            outputs[index] = [result.tokens[0] for result in results]
            if repeat:
                count = sum(len(tokens) for tokens in outputs[index])
                speeds[index].append(count / sum(result.seconds for result in results))
    greedy = not jnp.any(jnp.asarray(sampling.temperature) > 0)
    return Comparison(
        tokens_per_second=Spread.of(speeds[-1]),
        plain_tokens_per_second=Spread.of(speeds[0]),
        ratio=Spread.of(ours / theirs for ours, theirs in zip(speeds[-1], speeds[0], strict=True)),
        is_plain=is_plain,
        same_output=outputs[-1] == outputs[0] if greedy else None,
    )
