"""Counts of optimized HLO, in programs that are small enough to count by hand.

The texts in ``hlo/`` are outputs of the compilers for an H200 (``.cuda``) and a TPU v6e (``.tpu``),
without metadata.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from validation.aot.hlo import Counts, Instruction, Module, count
from validation.aot.programs import Case, Facts
from validation.aot.record import Measured, load

HLO = Path(__file__).parent.parent / "hlo"
CACHE = (1, 8, 4096, 128)
TABLE = (32000, 512)
CACHE_BYTES = 2 * 8 * 4096 * 128


def text(name: str) -> str:
    return (HLO / f"{name}.txt").read_text()


def program(name: str) -> Counts:
    return count(text(name), [CACHE, TABLE])


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_loop_with_a_known_trip_count_is_unrolled(platform: str) -> None:
    """``fori_loop(0, 59, lambda i, x: tanh(x @ w) + i, x)``; on a TPU the condition has the 59."""
    module = Module.parse(text(f"loop_of_59.{platform}"))
    entry = module.computations[module.entry]
    (loop,) = (instruction for instruction in entry if instruction.op == "while")
    body = module.computations[loop.attribute(r"body=%([\w.]+)")]
    in_body, outside = (sum(step.is_launched for step in steps) for steps in (body, entry))
    counts = program(f"loop_of_59.{platform}")
    assert counts.launches == 59 * in_body + outside and in_body >= 3
    assert counts.decisions == 0, "the host is not asked"


def test_every_branch_and_the_start_of_an_asynchronous_operation_are_launched() -> None:
    counts = program("cond.cuda")
    assert counts.launches == 2 + 3  # both branches: sort and double; sine, sum and add
    assert counts.decisions == 1
    # Four fusions and the start of the sum. Its end is not a launch.
    assert program("all_reduce.cuda").launches == 4 + 1


def test_a_round_is_the_body_of_the_loop_with_an_unknown_trip_count() -> None:
    """An open loop around one of three trips, each a product, a copy and its counter."""
    # Inner: the counter, the product, a copy. Outer: a copy, its counter. The condition: a
    # reduction.
    assert count(text("rounds.cuda"), [], rounds=True).launches == 3 * 3 + 2 + 1
    # Before the loop: two copies, a sine, a sum.
    assert program("rounds.cuda").launches == 12 + 4
    assert program("rounds.cuda").decisions == 1
    with pytest.raises(ValueError, match="none of rounds"):
        count(text("loop_of_59.cuda"), [], rounds=True)


@pytest.mark.parametrize(
    ("name", "cache_writes", "copied"),
    [
        ("update_donated.cuda", 0, 0),
        ("update_kept.cuda", 1, CACHE_BYTES),
        ("update_kept.tpu", 1, CACHE_BYTES),  # copied through VMEM
        ("transposed.cuda", 1, CACHE_BYTES),
        ("rewritten.cuda", 1, 0),  # where(slots == i, new, cache) reads and writes all of it
        ("gathered.cuda", 1, 0),
        ("table.tpu", 0, 0),  # the embedding is prefetched into VMEM
    ],
)
def test_copies_and_rewrites_of_a_cache_or_a_table(
    name: str, cache_writes: int, copied: int
) -> None:
    counts = program(name)
    assert (counts.cache_writes, counts.copied) == (cache_writes, copied)


def test_a_table_that_is_copied_to_main_memory_is_detected() -> None:
    slow = text("table.tpu").replace(
        "u16[32000,512]{1,0:T(8,128)(2,1)S(1)} bitcast", "u16[32000,512]{1,0} bitcast"
    )
    counts = count(slow, [CACHE, TABLE])
    assert counts.cache_writes == 1
    assert counts.copied == 2 * 32000 * 512


def test_work_of_the_host_is_detected() -> None:
    assert program("callback.tpu").host == 2, "to the host and back"
    for op, operands, result in (
        ("custom-call", 'custom_call_target="xla_ffi_python_gpu_callback"', "f32[8]{0}"),
        ("outfeed", "", "token[]"),
        ("copy-start", "", "(f32[8]{0:S(5)}, f32[8]{0}, u32[])"),
    ):
        assert Instruction("x", result, op, f"%y), {operands}").uses_host, op


def test_two_depths_give_the_launches_of_a_layer_and_outside() -> None:
    memory = {"temp": 2**20, "alias": 99, "peak": 2**30}
    facts = [
        Facts(layers, Counts(launches=launches), memory, state=100)
        for layers, launches in ((3, 281), (5, 313))
    ]
    row = Measured(Case(), facts, {"jax": "0.10.2"})
    assert (row.per_layer(), row.outside(), row.aliased) == (16, 233, 0.99)


def test_no_recorded_round_copies_a_cache_or_a_table_or_waits_for_the_host() -> None:
    for name, row in load().items():
        counts = row.deep.counts
        assert counts.host == counts.cache_writes == 0, name
        assert row.aliased is None or row.aliased >= 0.99, name
