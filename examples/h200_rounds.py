"""Rounds of a decoder at a true shape: random weights, drafts accepted by dice.

A cell is compiled, warmed up, timed and written at once. When all are, or when one more would not fit in the time, they
take turns for as long as there is time: figures of one turn are neighbours, and their ratios are taken.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from h200_setting import CHAIN, LARGEST, NODES, RATES, TREES, VARIANTS, Record, Setting  # beside this file
from scipy.stats import binomtest

from eagle3_jax import SimulatedAcceptance, SpeculativeDecoder
from eagle3_jax.decode import LoadedDrafter, LoadedTarget
from eagle3_jax.drafters import Plain
from eagle3_jax.load import precision_named
from eagle3_jax.measure.random_models import random_pair
from eagle3_jax.measure.roofline import step_bytes
from eagle3_jax.measure.rounds import CompilerOptions, Pace, timed_rounds
from eagle3_jax.measure.step_costs import draft_seconds, target_seconds
from eagle3_jax.measure.timing import CompileClock, Spread

Cell = Callable[[], Pace]
Turns = dict[str, list[Pace]]


@functools.cache
def pair(setting: Setting) -> tuple[LoadedTarget, LoadedDrafter]:
    """Random weights of the shape, in bfloat16."""
    return random_pair(setting.shape, precision=precision_named("bfloat16"), num_layers=setting.num_layers)


@functools.cache
def decoder_of(setting: Setting, draft: str, rounds_per_check: int = 1) -> SpeculativeDecoder:
    """``plain``, ``verify N``, ``chain``, ``chain K`` or one of :data:`TREES`, accepting as :data:`RATES` say."""
    target, head = pair(setting)
    if draft == "plain" or draft.startswith("verify "):
        nodes = 1 if draft == "plain" else int(draft.split()[1])
        return SpeculativeDecoder(target, Plain(nodes), stop_tokens=())
    length = int(draft.removeprefix("chain") or CHAIN) if draft.startswith("chain") else 0
    given: dict[str, Any] = {"num_speculative_tokens": length} if length else {"tree": TREES[draft]}
    dice = SimulatedAcceptance(RATES)
    return SpeculativeDecoder(target, head, stop_tokens=(), verifier=dice, rounds_per_check=rounds_per_check, **given)


def sizes(setting: Setting, *, batch: int = 1, context: int | None = None) -> dict[str, Any]:
    """Prompts, and the limit that gives caches of ``context`` slots."""
    context = context or setting.context
    return {"prompts": [[1 + row] * 8 for row in range(batch)], "max_new_tokens": context - 8 - LARGEST}


def pace(
    setting: Setting, draft: str, *, batch: int = 1, context: int | None = None, rounds_per_check: int = 1,
    options: CompilerOptions | None = None,
) -> Cell:  # fmt: skip
    """A cell that measures rounds of a decoder."""
    where = sizes(setting, batch=batch, context=context)

    def measured() -> Pace:
        decoder = decoder_of(setting, draft, rounds_per_check)
        return timed_rounds(decoder, **where, tokens=setting.tokens, compiler_options=options)

    return measured


def paces(
    setting: Setting, record: Record, cells: Mapping[str, Cell], base: str, prefix: str = "",
    after_turn: Callable[[Turns], None] = lambda turns: None,
) -> None:  # fmt: skip
    """Record the cells in their order, then in turns; what an earlier run has measured is left, but for the base."""
    known = {name for name in cells if "seconds_per_round" in record.figures.get(prefix + name, {})}
    if known == set(cells):
        return
    figures: dict[str, dict[str, Any]] = {}
    first: Turns = {}
    longest = 0.0
    for name, cell in cells.items():
        if name in known and name != base:
            continue
        if record.seconds_left < 1.2 * longest:  # the next one will take no less
            record.add(prefix + name, {"skipped": "no time was left; run the command again"})
            continue
        start = time.monotonic()
        try:
            with CompileClock() as clock:
                cell()
            cell()  # command buffers are recorded at the second run
            first[name] = [cell() for _ in range(setting.first)]
            figures[name] = {"compile_seconds": clock.seconds} | summary(first[name])
        except Exception as error:
            figures[name] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        longest = max(longest, time.monotonic() - start)
        record.add(prefix + name, figures[name])
        print(f"  {prefix}{name}: {told(figures[name])}", flush=True)
    turns: Turns = {name: [] for name in first}
    for repeat in range(setting.repeats if first else 0):
        start = time.monotonic()
        for name in list(turns) if repeat % 2 else list(turns)[::-1]:
            turns[name].append(cells[name]())
        for name, found in turns.items():
            one = figures[name] | summary(first[name] + found)
            if base in turns:
                one["round_in_bases"] = ratio_json([o.seconds_per_round for o in found],
                                                   [o.seconds_per_round for o in turns[base]])  # fmt: skip
                one["speed_in_bases"] = ratio_json([o.tokens_per_second for o in found],
                                                   [o.tokens_per_second for o in turns[base]])  # fmt: skip
            record.add(prefix + name, one)
        after_turn(turns)
        if record.seconds_left < 1.5 * (time.monotonic() - start):
            break


def summary(found: list[Pace]) -> dict[str, Any]:
    """Seconds of a round, tokens/s, and how many of each the last run had."""
    return {
        "seconds_per_round": seconds_json([one.seconds_per_round for one in found]),
        "tokens_per_second": seconds_json([one.tokens_per_second for one in found]),
        "rounds": found[-1].rounds,
        "tokens": found[-1].tokens,
    }


def told(figure: dict[str, Any]) -> str:
    """A cell in a line."""
    if "failed" in figure:
        return f"failed: {figure['failed'][:160]}"
    ms, speed = 1e3 * figure["seconds_per_round"]["median"], figure["tokens_per_second"]["median"]
    return f"{ms:.3f} ms a round, {speed:.1f} tokens/s, compiled in {figure['compile_seconds']:.1f} s"


def seconds_json(seconds: list[float]) -> dict[str, Any]:
    """Middle, spread and every value."""
    return Spread.of(seconds).to_json() | {"values": seconds}


def ratio_json(above: list[float], below: list[float]) -> dict[str, Any]:
    """Ratios of neighbours in time, and a sign test of their being 1."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    larger = sum(ratio > 1 for ratio in ratios)
    p = float(binomtest(larger, len(ratios)).pvalue)
    return Spread.of(ratios).to_json() | {"above_1": larger, "of": len(ratios), "p_of_sign_test": p}


# The parts


def round_parts(setting: Setting, record: Record) -> None:
    """A plain step, and a round of a chain beside the target and the head alone; then other drafts."""
    record.add("step_bytes", step_bytes(pair(setting)[0], rows=1, context=setting.context))
    averaged = {**sizes(setting), "rounds": 2 if setting.rehearse else 16}
    alone = {"target alone": target_seconds, "draft step": draft_seconds}
    cells: dict[str, Cell] = {"plain step": pace(setting, "plain"), f"verify {NODES}": pace(setting, f"verify {NODES}")}
    cells["round"] = pace(setting, "chain")
    for name, seconds in alone.items():
        cells[name] = lambda seconds=seconds: Pace(seconds(decoder_of(setting, "chain"), **averaged), 1, 1)
    cells |= {draft: pace(setting, draft) for draft in setting.drafts if draft not in ("plain", "chain")}

    def shares(turns: Turns) -> None:
        if turns.keys() >= {"plain step", "round", *alone}:
            of = {name: [one.seconds_per_round for one in turns[name]] for name in turns}
            columns = zip(of["round"], of["target alone"], of["draft step"], strict=True)
            outside = [(whole - target - CHAIN * step) / whole for whole, target, step in columns]
            record.add("share outside target and head", seconds_json(outside))
            record.add("draft step in plain steps", ratio_json(of["draft step"], of["plain step"]))

    paces(setting, record, cells, "plain step", after_turn=shares)


def verify(setting: Setting, record: Record) -> None:
    """Verification of 1, 2, ... tokens."""
    paces(setting, record, {f"verify {n}": pace(setting, f"verify {n}") for n in setting.nodes}, "verify 1")


def variants(setting: Setting, record: Record) -> None:
    """Rounds of a chain under options of the compiler and of the loop."""
    cells = {
        name: pace(setting, "chain", rounds_per_check=VARIANTS[name][0], options=VARIANTS[name][1])
        for name in setting.variants
    }
    paces(setting, record, cells, "as it is")


def batches(setting: Setting, record: Record) -> None:
    """Chains against trees and plain decoding over batch sizes."""
    for batch in setting.batches:
        cells = {draft: pace(setting, draft, batch=batch) for draft in setting.drafts}
        paces(setting, record, cells, "chain", f"batch {batch}, ")


def contexts(setting: Setting, record: Record) -> None:
    """Plain steps and verification over the slots of the caches."""
    for context in setting.contexts:
        cells = {name: pace(setting, name, context=context) for name in ("plain", f"verify {NODES}")}
        paces(setting, record, cells, "plain", f"{context} slots, ")


def compilation(setting: Setting, record: Record) -> None:
    """Seconds to trace, lower and compile the rounds of a chain, with whatever the cache directory holds."""
    with CompileClock() as clock:
        first = pace(setting, "chain")()
    record.add("compile_seconds", clock.seconds)
    record.add("first_run_seconds", first.seconds)
