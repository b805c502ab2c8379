"""The measurements behind a tuned schedule: acceptance of every draft, and its costs at every batch size."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from eagle3_jax import loop as loops
from eagle3_jax.decode import LoadedDrafter, LoadedTarget, SpeculativeDecoder
from eagle3_jax.measure.step_costs import StepCosts, step_costs
from eagle3_jax.measure.timing import Spread
from eagle3_jax.measure.tune import BatchTuning, Candidate, Shape, break_even, rules_of_thumb, schedule_of
from eagle3_jax.published_trees import tree_name
from eagle3_jax.schedule import SpeculationSchedule
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.tree import DynamicTree, StaticTree
from eagle3_jax.types import Drafter

_PLAIN = "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A prediction and what came of it.

    Attributes:
        batch: Rows decoded at once.
        shape: Name of the draft that was run against plain decoding.
        speedup: ``S`` as predicted for a batch in which all rows are running.
        rows_running: Share of them that are, on average: rows of one batch finish at different times when they
            speculate, and a batch is done when its last row is.
        measured: Ratio of decode times over all prompts, paired by repeat.
    """

    batch: int
    shape: str
    speedup: float
    rows_running: float
    measured: Spread

    @property
    def predicted(self) -> float:
        """What ``measured`` should be."""
        return self.speedup * self.rows_running


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Everything that was measured and what follows from it.

    Attributes:
        batches: In ascending order.
        checks: At the smallest and the largest batch size; empty when not asked for.
        num_prompts: Prompts that acceptance was measured on.
        max_new_tokens: Written for each.
        repeats: Interleaved repeats.
    """

    batches: tuple[BatchTuning, ...]
    checks: tuple[Check, ...]
    num_prompts: int
    max_new_tokens: int
    repeats: int

    @property
    def schedule(self) -> SpeculationSchedule | None:
        """The best chains by batch size; ``None`` when drafting pays at none."""
        best = [(one.batch, one.best_chain) for one in self.batches]
        return schedule_of([(batch, chain.shape.num_draft_tokens if chain else 0) for batch, chain in best])

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; the first two are keys of vLLM's ``--speculative-config``."""
        schedule = self.schedule
        return {
            "num_speculative_tokens_per_batch_size": None if schedule is None else schedule.to_lists(),
            "num_speculative_tokens": None if schedule is None else schedule.max_length,
            "num_prompts": self.num_prompts,
            "max_new_tokens": self.max_new_tokens,
            "repeats": self.repeats,
            "batches": [_batch_json(one) for one in self.batches],
            "rules": [dataclasses.asdict(rule) for one in self.batches for rule in rules_of_thumb(one)],
            "checks": [dataclasses.asdict(one) | {"predicted": one.predicted} for one in self.checks],
        }


def _batch_json(one: BatchTuning) -> dict[str, Any]:
    return dataclasses.asdict(one) | {
        "best": one.best.shape.name if one.best else _PLAIN,
        "best_chain": one.best_chain.shape.name if one.best_chain else _PLAIN,
        "break_even": {
            candidate.shape.name: dataclasses.asdict(break_even(candidate))
            for candidate in one.candidates
            if candidate.shape.is_chain
        },
    }


def tune(
    target: LoadedTarget,
    drafter: LoadedDrafter | Drafter[Any],
    prompts: Sequence[list[int]],
    *,
    batches: Sequence[int],
    chains: Sequence[int],
    trees: Sequence[DynamicTree | StaticTree] = (),
    max_new_tokens: int,
    repeats: int,
    rounds: int = 16,
    check: bool = True,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Tuning:
    """Measure acceptance and costs of chains and trees, greedily and without stop tokens.

    ``τ`` is measured with every shape by itself. The rates of the longest chain would give that of a shorter one, if
    the rounds of both began at the same places in the text; they do not, and ``τ`` came out up to 6 % too low.

    Args:
        target: To be sped up.
        drafter: Its head, or a drafter without parameters.
        prompts: Token ids; repeated where a batch is larger.
        batches: Batch sizes.
        chains: Lengths ``K``.
        trees: Draft trees.
        max_new_tokens: For each prompt; more than the longest chain.
        repeats: Over which costs are medians; the shapes take turns.
        rounds: Over which each cost is averaged within a repeat.
        check: Run the fastest draft against plain decoding at the smallest and the largest batch size.
        on_progress: Told what is being done.

    Raises:
        ValueError: There is nothing to measure, or a draft is longer than the text.
    """
    sizes, lengths = sorted(set(batches)), sorted(set(chains))
    if not prompts or not sizes or sizes[0] < 1 or repeats < 1 or not (lengths or trees):
        raise ValueError("tuning needs at least one prompt, one batch size of 1 or more, one draft and one repeat")
    for depth in (*lengths, *(tree.max_depth for tree in trees)):
        if not 1 <= depth < max_new_tokens:
            raise ValueError(
                f"a draft of {depth} tokens does not fit {max_new_tokens} new tokens, the first of which is the "
                f"prefill's; give drafts of 1 to {max_new_tokens - 1}"
            )
    decoders = {
        f"K={k}": SpeculativeDecoder(target, drafter, num_speculative_tokens=k, stop_tokens=()) for k in lengths
    }
    for tree in trees:
        name = tree_name(tree) + (f" top {tree.top_k}" if isinstance(tree, DynamicTree) else "")
        decoders[name] = SpeculativeDecoder(target, drafter, tree=tree, stop_tokens=())
    shapes = {}
    for name, decoder in decoders.items():
        on_progress(f"acceptance of {name}")
        shapes[name] = _shape(name, decoder, _filled(prompts, min(len(prompts), sizes[-1])), max_new_tokens)
    bench = _Bench(
        plain=SpeculativeDecoder(target, stop_tokens=()),
        decoders=decoders,
        shapes=shapes,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        rounds=rounds,
        on_progress=on_progress,
    )
    found = tuple(bench.costs(size) for size in sizes)
    checked = {one.batch: one for one in (found[0], found[-1])} if check else {}
    checks = [bench.check(one) for one in checked.values()]
    return Tuning(
        batches=found,
        checks=tuple(checks),
        num_prompts=len(prompts),
        max_new_tokens=max_new_tokens,
        repeats=repeats,
    )


def _filled(prompts: Sequence[list[int]], size: int) -> list[list[list[int]]]:
    """Batches of exactly this size that hold every prompt; the last one is filled from the beginning."""
    count = -(-len(prompts) // size) * size
    cycled = [prompts[index % len(prompts)] for index in range(count)]
    return [cycled[start : start + size] for start in range(0, count, size)]


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One batch decoded: seconds after the prefill, counters, and rounds of each row."""

    seconds: float
    stats: SpeculationStats
    rounds: np.ndarray


def _decode(decoder: SpeculativeDecoder, batch: Sequence[list[int]], max_new_tokens: int) -> _Pass:
    state = jax.block_until_ready(decoder.prefill(batch, max_new_tokens=max_new_tokens))
    start = time.perf_counter()
    state = jax.block_until_ready(loops.run(decoder.loop, decoder.params, state))
    seconds = time.perf_counter() - start
    stats, length = jax.device_get((state.stats, state.length))
    written = length - np.array([len(prompt) for prompt in batch]) - 1
    # A head drafts in every round. Prompt lookup does not, and a round without a draft is not counted: its rounds are
    # what it wrote less what was accepted, but for the few accepted tokens that the limit cut off.
    return _Pass(seconds, stats, np.maximum(stats.num_drafts, written - stats.num_accepted_tokens))


def _shape(name: str, decoder: SpeculativeDecoder, batches: list[list[list[int]]], max_new_tokens: int) -> Shape:
    passes = [_decode(decoder, batch, max_new_tokens) for batch in batches]
    stats = SpeculationStats.merge([one.stats for one in passes])
    rounds = sum(int(one.rounds.sum()) for one in passes)
    return Shape(
        name=name,
        num_draft_tokens=decoder.loop.drafter.num_nodes - 1,
        num_draft_steps=decoder.loop.drafter.max_depth,
        is_chain=decoder.loop.is_chain,
        mean_acceptance_length=1.0 + int(stats.num_accepted_tokens) / rounds,
        acceptance_per_position=tuple(
            float(count) / rounds for count in np.atleast_1d(stats.num_accepted_tokens_per_pos)
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bench:
    """What is measured, and how often."""

    plain: SpeculativeDecoder
    decoders: dict[str, SpeculativeDecoder]
    shapes: dict[str, Shape]
    prompts: Sequence[list[int]]
    max_new_tokens: int
    repeats: int
    rounds: int
    on_progress: Callable[[str], None]

    def costs(self, size: int) -> BatchTuning:
        """Costs of every shape at one batch size."""
        batch = _filled(self.prompts, size)[0]
        deepest = max(self.decoders.values(), key=lambda decoder: decoder.loop.drafter.num_nodes)
        taken: dict[str, list[StepCosts]] = {name: [] for name in (_PLAIN, *self.decoders)}
        extra = []
        for repeat in range(self.repeats + 1):  # the first one compiles
            for name, decoder in ((_PLAIN, self.plain), *self.decoders.items()):
                what = f"repeat {repeat} of {self.repeats}" if repeat else "compiling"
                self.on_progress(f"batch {size}, {name}, {what}")
                cost = step_costs(decoder, batch, max_new_tokens=self.max_new_tokens, rounds=self.rounds)
                if repeat:
                    taken[name].append(cost)
            plain, drafting = (self._prefill_seconds(decoder, batch) for decoder in (self.plain, deepest))
            if repeat:
                extra.append(drafting - plain)
        steps = [cost.verify_seconds for cost in taken[_PLAIN]]
        return BatchTuning(
            batch=size,
            plain_step=Spread.of(steps),
            extra_prefill_seconds=max(0.0, Spread.of(extra).median),
            candidates=tuple(
                Candidate.of(
                    self.shapes[name],
                    plain=steps,
                    verify=[cost.verify_seconds for cost in taken[name]],
                    draft=[cost.draft_seconds for cost in taken[name]],
                )
                for name in self.decoders
            ),
        )

    def _prefill_seconds(self, decoder: SpeculativeDecoder, batch: list[list[int]]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(decoder.prefill(batch, max_new_tokens=self.max_new_tokens))
        return time.perf_counter() - start

    def check(self, found: BatchTuning) -> Check:
        """Run the fastest shape against plain decoding, in turn."""
        self.on_progress(f"checking the prediction at batch {found.batch}")
        fastest, batches = found.fastest, _filled(self.prompts, found.batch)
        decoder = self.decoders[fastest.shape.name]
        ratios, running = [], 1.0
        for repeat in range(self.repeats + 1):  # the first one compiles
            theirs = sum(_decode(self.plain, batch, self.max_new_tokens).seconds for batch in batches)
            ours = [_decode(decoder, batch, self.max_new_tokens) for batch in batches]
            running = sum(float(one.rounds.mean()) for one in ours) / sum(float(one.rounds.max()) for one in ours)
            if repeat:
                ratios.append(theirs / sum(one.seconds for one in ours))
        return Check(
            batch=found.batch,
            shape=fastest.shape.name,
            speedup=fastest.speedup.median,
            rows_running=running,
            measured=Spread.of(ratios),
        )
