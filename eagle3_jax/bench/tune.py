"""The fastest draft for each batch size, from measured costs and acceptance.

A draft that is accepted for a mean acceptance length ``τ`` and takes ``v + G·c`` plain steps (``v``
to verify it, ``c`` for each of its ``G`` draft steps) is faster than plain decoding by ``S = τ / (v
+ G·c)``. ``τ`` depends on the text and the head and not on the batch; ``v`` and ``c`` grow with it,
so the best draft gets shorter and from some batch on plain decoding is fastest.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from eagle3_jax.bench.contenders import DecoderContender, Run, Tokens
from eagle3_jax.bench.rounds import count_rounds
from eagle3_jax.bench.step_costs import step_costs
from eagle3_jax.decode import LoadedDrafter, LoadedTarget, SpeculativeDecoder
from eagle3_jax.measure.timing import Spread
from eagle3_jax.schedule import SpeculationSchedule
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.theory.speedup import Rates, rates, rates_for_speedup, round_cost
from eagle3_jax.topology import DynamicTree, StaticTree, tree_name
from eagle3_jax.types import Drafter

# The last entry of a schedule, plain decoding, reaches at least this many rows.
_LARGEST = 512
_PLAIN = "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A draft and how much of it is accepted."""

    name: str  #: Name in reports: ``K=3``, or the size of a tree.
    num_draft_tokens: int  #: ``K`` of a chain, all nodes but the root of a tree.
    num_draft_steps: int  #: ``G``, draft steps in a round; ``K`` for a chain.
    is_chain: bool  #: Only chains fit into a schedule.
    mean_acceptance_length: float  #: ``τ``, tokens per round, measured with this shape.
    #: Share of rounds in which the token at each depth was accepted.
    acceptance_per_position: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Costs and gain of a draft at one batch size."""

    shape: Shape  #: The draft.
    verify_cost: float  #: ``v``, a verification in plain steps.
    draft_cost: float  #: ``c``, a draft step in plain steps.
    speedup: Spread  #: ``S``, paired by repeat.

    @classmethod
    def of(
        cls, shape: Shape, *, plain: ArrayLike, verify: ArrayLike, draft: ArrayLike
    ) -> Candidate:
        """The candidate from the seconds of a plain step, a verification and a draft step.

        Each has a number for every repeat. Costs are ratios within a repeat: a machine that slows
        down for a while slows the plain step as well.
        """
        verify_cost = np.divide(verify, plain)
        draft_cost = np.divide(draft, plain)
        gains = shape.mean_acceptance_length / (verify_cost + shape.num_draft_steps * draft_cost)
        return cls(
            shape=shape,
            verify_cost=Spread.of(verify_cost).median,
            draft_cost=Spread.of(draft_cost).median,
            speedup=Spread.of(gains),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchTuning:
    """All drafts at one batch size."""

    batch: int  #: Rows decoded at once.
    plain_step: Spread  #: Seconds of a step of plain decoding.
    candidates: tuple[Candidate, ...]  #: Every draft that was measured.

    @property
    def best(self) -> Candidate | None:
        """The draft to use; ``None`` for plain decoding."""
        return choose(self.candidates)

    @property
    def chains(self) -> list[Candidate]:
        """The candidates that are chains, since a schedule holds chains only."""
        return [candidate for candidate in self.candidates if candidate.shape.is_chain]

    @property
    def best_chain(self) -> Candidate | None:
        """The chain to use; ``None`` for plain decoding."""
        return choose(self.chains)

    @property
    def fastest(self) -> Candidate:
        """The draft of the largest ``S``, even if it does not pay off."""
        return max(self.candidates, key=median_speedup)


def median_speedup(candidate: Candidate) -> float:
    """Returns the median of ``S``."""
    return candidate.speedup.median


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """The draft of the largest ``S``, or a shorter one that is as good.

    ``None`` is plain decoding, if none pays off. A draft is as good if it reaches the first
    quartile of the largest ``S``: such a difference is within the spread of the repeats, and a
    shorter draft loses less when acceptance is lower. Plain decoding is the shortest, ``S = 1``.
    """
    bar = max(candidates, key=median_speedup).speedup.low if candidates else 0.0
    if bar <= 1.0:
        return None
    as_good = [candidate for candidate in candidates if median_speedup(candidate) >= bar]
    return min(
        as_good,
        key=lambda candidate: (candidate.shape.num_draft_tokens, -median_speedup(candidate)),
    )


def schedule_of(lengths: Sequence[tuple[int, int]]) -> SpeculationSchedule | None:
    """Returns a schedule of the best chain at each measured batch size.

    It is ``None`` when drafting pays off at none. An entry covers the sizes above the measured size
    before it, up to its own. Costs grow with the batch, so the best length at the upper end is the
    cautious choice for the sizes between. Above the largest measured size the last entry drafts
    nothing; without it, vLLM would continue with the last length.

    Args:
        lengths: ``(batch, K)`` with ascending batches; 0 is plain decoding.
    """
    if not any(length for _, length in lengths):
        return None

    entries: list[tuple[int, int, int]] = []
    plain = (max(_LARGEST, lengths[-1][0] + 1), 0)
    start = 1
    for length, equal in itertools.groupby([*lengths, plain], key=operator.itemgetter(1)):
        end = max(equal)[0]
        entries.append((start, end, length))
        start = end + 1
    return SpeculationSchedule(tuple(entries))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BreakEven:
    """The acceptance above which a chain is faster than plain decoding."""

    mean_acceptance_length: float  #: ``τ`` at which ``S`` is 1: the cost of a round in plain steps.
    #: The rates that give it; ``None`` where even a chain accepted in full is slower.
    needed: Rates | None
    measured: Rates  #: The rates of the measured ``τ``.


def break_even(candidate: Candidate) -> BreakEven:
    """Returns ``τ = v + K·c`` of a chain, with both acceptance rates."""
    shape = candidate.shape
    costs = {"verify_cost": candidate.verify_cost, "draft_cost": candidate.draft_cost}
    return BreakEven(
        mean_acceptance_length=round_cost(shape.num_draft_steps, **costs),
        needed=rates_for_speedup(1.0, num_draft_tokens=shape.num_draft_tokens, **costs),
        measured=rates(shape.mean_acceptance_length, shape.num_draft_tokens),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A prediction compared with a run."""

    batch: int  #: Rows decoded at once.
    shape: str  #: Name of the draft that was compared with plain decoding.
    speedup: float  #: Predicted ``S`` of a batch in which all rows are running.
    #: Mean share of rows that are running: rows of one batch finish at different times when they
    #: speculate, and a batch ends with its last row.
    rows_running: float
    measured: Spread  #: Ratio of decode times over all prompts, paired by repeat.

    @property
    def predicted(self) -> float:
        """Predicted value of ``measured``."""
        return self.speedup * self.rows_running


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """All measurements and their consequences."""

    batches: tuple[BatchTuning, ...]  #: In ascending order.
    #: Checks at the smallest and the largest batch size; empty without ``check``.
    checks: tuple[Check, ...]
    num_prompts: int  #: Prompts that acceptance was measured on.
    max_new_tokens: int  #: New tokens of each prompt.
    repeats: int  #: Interleaved repeats.

    @property
    def schedule(self) -> SpeculationSchedule | None:
        """The best chains by batch size; ``None`` when drafting pays off at none."""
        best = [(tuning.batch, tuning.best_chain) for tuning in self.batches]
        return schedule_of(
            [(batch, chain.shape.num_draft_tokens if chain else 0) for batch, chain in best]
        )

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; the first two are keys of vLLM's ``--speculative-config``."""
        schedule = self.schedule
        return {
            "num_speculative_tokens_per_batch_size": (
                None if schedule is None else schedule.to_lists()
            ),
            "num_speculative_tokens": None if schedule is None else schedule.max_length,
            "num_prompts": self.num_prompts,
            "max_new_tokens": self.max_new_tokens,
            "repeats": self.repeats,
            "batches": [_batch_to_json(tuning) for tuning in self.batches],
            "checks": [
                dataclasses.asdict(check) | {"predicted": check.predicted} for check in self.checks
            ],
        }


def _batch_to_json(tuning: BatchTuning) -> dict[str, Any]:
    best = tuning.best
    best_chain = tuning.best_chain
    return dataclasses.asdict(tuning) | {
        "best": best.shape.name if best else _PLAIN,
        "best_chain": best_chain.shape.name if best_chain else _PLAIN,
        "break_even": {
            chain.shape.name: dataclasses.asdict(break_even(chain)) for chain in tuning.chains
        },
    }


def tune(
    target: LoadedTarget,
    drafter: LoadedDrafter | Drafter[Any],
    prompts: Sequence[Tokens],
    *,
    batches: Sequence[int],
    chains: Sequence[int],
    trees: Sequence[DynamicTree | StaticTree] = (),
    max_new_tokens: int,
    repeats: int,
    rounds: int = 16,
    check: bool = True,
    on_progress: Callable[[str], None] = lambda step: None,
    on_result: Callable[[str], None] = lambda result: None,
) -> Tuning:
    """Measures acceptance and costs of chains and trees, greedily and without stop tokens.

    ``τ`` is measured with every shape separately. Computing it from the rates of the longest chain
    gave up to 6 % less, because rounds of chains of different length begin at different tokens of
    the text.

    Args:
        target: The target.
        drafter: Its head, or a drafter without parameters.
        prompts: Token ids; repeated where a batch is larger.
        batches: Batch sizes.
        chains: Chain lengths ``K``.
        trees: Draft trees.
        max_new_tokens: New tokens per prompt; more than the longest chain.
        repeats: Number of repeats, of which costs are medians; the shapes take turns.
        rounds: Number of rounds over which each cost is averaged within a repeat.
        check: Whether to compare the fastest draft with plain decoding at the smallest and the
            largest batch size.
        on_progress: Called with the current step; :func:`num_steps` is their number.
        on_result: Called with the acceptance of each shape and with the speedups at each batch
            size.

    Returns:
        All measurements. Ctrl-C after the first batch size ends them, and the batch sizes measured
        until then remain.

    Raises:
        ValueError: There is nothing to measure, or a draft is longer than the text.
    """
    sizes = sorted(set(batches))
    lengths = sorted(set(chains))
    if not prompts or not sizes or sizes[0] < 1 or repeats < 1 or not (lengths or trees):
        raise ValueError(
            "tuning needs at least one prompt, one batch size of 1 or more, one draft and one"
            " repeat"
        )
    for depth in (*lengths, *(tree.max_depth for tree in trees)):
        if not 1 <= depth < max_new_tokens:
            raise ValueError(
                f"a draft of {depth} tokens does not fit {max_new_tokens} new tokens, the first of"
                f" which is the prefill's; give drafts of 1 to {max_new_tokens - 1}"
            )

    decoder_of = functools.partial(SpeculativeDecoder, target, drafter, stop_tokens=())
    decoders = {_PLAIN: SpeculativeDecoder(target, stop_tokens=())}
    for k in lengths:
        decoders[f"K={k}"] = decoder_of(num_speculative_tokens=k)
    for tree in trees:
        suffix = f" top {tree.top_k}" if isinstance(tree, DynamicTree) else ""
        decoders[tree_name(tree) + suffix] = decoder_of(tree=tree)

    contenders = [DecoderContender(name, "", decoder) for name, decoder in decoders.items()]
    bench = _Bench(contenders, prompts, max_new_tokens, repeats, rounds, on_progress)

    shapes = []
    largest_batch = min(len(prompts), sizes[-1])
    for contender in contenders[1:]:
        shapes.append(bench.shape(contender, largest_batch))
        on_result(f"{contender.name}: τ {shapes[-1].mean_acceptance_length:.2f}")

    tunings: list[BatchTuning] = []
    checks: list[Check] = []
    try:
        for size in sizes:
            tunings.append(bench.costs(shapes, size))
            gains = ", ".join(
                f"{draft.shape.name} {median_speedup(draft):.2f}"
                for draft in tunings[-1].candidates
            )
            on_result(f"batch {size}: {gains} x plain decoding")
        if check:
            checked = tunings if len(tunings) == 1 else [tunings[0], tunings[-1]]
            checks += [bench.check(tuning) for tuning in checked]
    except KeyboardInterrupt:
        if not tunings:
            raise

    return Tuning(
        batches=tuple(tunings),
        checks=tuple(checks),
        num_prompts=len(prompts),
        max_new_tokens=max_new_tokens,
        repeats=repeats,
    )


def num_steps(*, shapes: int, batches: int, repeats: int, check: bool) -> int:
    """Returns the number of steps that :func:`tune` reports, for numbers of its arguments."""
    return shapes + batches * (repeats + 1) * (shapes + 1) + check * min(batches, 2)


def _filled(prompts: Sequence[Tokens], size: int) -> list[list[Tokens]]:
    """Returns batches of exactly this size with every prompt.

    The last one is filled with the first prompts.
    """
    endless = itertools.cycle(prompts)
    return [list(itertools.islice(endless, size)) for _ in range(0, len(prompts), size)]


def _rounds(run: Run) -> np.ndarray:
    """Counts the rounds of each row."""
    assert run.stats is not None
    after_prefill = [len(row) - 1 for row in run.tokens]
    return count_rounds(run.stats, np.array(after_prefill))


class _Bench(NamedTuple):
    """The measurements of plain decoding, the first contender, and of all drafts."""

    contenders: list[DecoderContender]
    prompts: Sequence[Tokens]
    max_new_tokens: int
    repeats: int
    rounds: int
    on_progress: Callable[[str], None]

    def decode(self, contender: DecoderContender, size: int) -> list[Run]:
        """Decodes all prompts in batches of a size."""
        return [contender.run(batch, self.max_new_tokens) for batch in _filled(self.prompts, size)]

    def shape(self, contender: DecoderContender, size: int) -> Shape:
        """Measures the acceptance of a draft."""
        self.on_progress(f"acceptance of {contender.name}")
        runs = self.decode(contender, size)
        loop = contender.decoder.loop
        stats = SpeculationStats.merge([run.stats for run in runs if run.stats is not None])
        rounds = sum(int(_rounds(run).sum()) for run in runs)
        per_position = np.atleast_1d(stats.num_accepted_tokens_per_pos) / rounds

        return Shape(
            name=contender.name,
            num_draft_tokens=loop.drafter.num_nodes - 1,
            num_draft_steps=loop.drafter.max_depth,
            is_chain=loop.is_chain,
            mean_acceptance_length=1.0 + int(stats.num_accepted_tokens) / rounds,
            acceptance_per_position=tuple(per_position.tolist()),
        )

    def costs(self, shapes: Sequence[Shape], size: int) -> BatchTuning:
        """Measures the costs of every draft at one batch size."""
        batch = _filled(self.prompts, size)[0]
        # Verification and draft step of each; the first repeat compiles.
        seconds = np.zeros((1 + self.repeats, len(self.contenders), 2))
        for repeat, index in np.ndindex(*seconds.shape[:2]):
            contender = self.contenders[index]
            step = f"repeat {repeat} of {self.repeats}" if repeat else "compiling"
            self.on_progress(f"batch {size}, {contender.name}, {step}")
            costs = step_costs(
                contender.decoder, batch, max_new_tokens=self.max_new_tokens, rounds=self.rounds
            )
            seconds[repeat, index] = [costs.verify_seconds, costs.draft_seconds]

        verify, draft = seconds[1:].T
        candidates = [
            Candidate.of(shape, plain=verify[0], verify=verify[index], draft=draft[index])
            for index, shape in enumerate(shapes, 1)
        ]
        return BatchTuning(
            batch=size, plain_step=Spread.of(verify[0]), candidates=tuple(candidates)
        )

    def check(self, tuning: BatchTuning) -> Check:
        """Compares the fastest draft with plain decoding; both take turns."""
        self.on_progress(f"checking the prediction at batch {tuning.batch}")
        fastest = tuning.fastest
        (contender,) = [
            contender for contender in self.contenders if contender.name == fastest.shape.name
        ]

        ratios = []
        running = 1.0
        # The first repeat compiles.
        for _ in range(self.repeats + 1):
            plain = self.decode(self.contenders[0], tuning.batch)
            drafted = self.decode(contender, tuning.batch)
            plain_seconds = sum(run.decode_seconds for run in plain)
            ratios.append(plain_seconds / sum(run.decode_seconds for run in drafted))
            rounds = np.array([_rounds(run) for run in drafted])
            running = float(rounds.mean(axis=1).sum() / rounds.max(axis=1).sum())

        return Check(
            batch=tuning.batch,
            shape=fastest.shape.name,
            speedup=fastest.speedup.median,
            rows_running=running,
            measured=Spread.of(ratios[1:]),
        )
