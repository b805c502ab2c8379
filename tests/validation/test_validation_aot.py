"""Counts of optimized HLO, in programs that are small enough to count by hand, and missing compilers.

The texts in ``hlo/`` are outputs of the compilers for an H200 (``.cuda``) and a TPU v6e (``.tpu``),
without metadata.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from validation.aot import table
from validation.aot.__main__ import main
from validation.aot.hlo import Counts, Instruction, Module, count
from validation.aot.platforms import Platform
from validation.aot.programs import Case, Facts
from validation.aot.record import PATH, Measured, cases, load, save

HLO = Path(__file__).parent.parent / "hlo"
CACHE = (1, 8, 4096, 128)
TABLE = (32000, 512)
CACHE_BYTES = 2 * 8 * 4096 * 128


def text(name: str) -> str:
    return (HLO / f"{name}.txt").read_text()


def program(name: str) -> Counts:
    return count(text(name), [CACHE, TABLE])


def test_launches_of_loops_branches_and_asynchronous_operations() -> None:
    # fori_loop(0, 59, lambda i, x: tanh(x @ w) + i, x): each trip a product, a copy and the
    # counter.
    module = Module.parse(text("loop_of_59.cuda"))
    (loop,) = (
        instruction
        for instruction in module.computations[module.entry]
        if instruction.op == "while"
    )
    launched = lambda name: sum(
        step.op in ("fusion", "copy", "custom-call") for step in module.computations[name]
    )
    counts = program("loop_of_59.cuda")
    assert counts.launches == 59 * launched(loop.attribute(r"body=%([\w.]+)")) + launched(
        module.entry
    )
    assert counts.decisions == 0, "the host is not asked"
    assert program("loop_of_59.tpu").cycles >= 59 * 1040, (
        "the trip count of a TPU's loop is in its condition"
    )
    counts = program("cond.cuda")
    assert counts.launches == 2 + 3  # both branches: sort and double; sine, sum and add
    assert counts.decisions == 1
    counts = program("all_reduce.cuda")
    assert counts.launches == 4 + 1, "four fusions and the start of the sum; its end is no launch"
    assert counts.collectives == {"all-reduce": 1}
    assert counts.cache_collectives == 0


def test_a_round_is_the_body_of_the_loop_with_an_unknown_trip_count() -> None:
    """An open loop around a loop of three: a trip of the inner loop has a product, a copy and its counter."""
    # Inner: the counter, the product, a copy. Outer: a copy, its counter. The condition: a
    # reduction.
    assert count(text("rounds.cuda"), [], rounds=True).launches == 3 * 3 + 2 + 1
    # Before the loop: two copies, a sine, a sum.
    assert program("rounds.cuda").launches == 12 + 4
    assert program("rounds.cuda").decisions == 1
    with pytest.raises(ValueError, match="none of rounds"):
        count(text("loop_of_59.cuda"), [], rounds=True)


@pytest.mark.parametrize("version", ["0.11", "0.12"])
def test_an_all_reduce_that_is_a_fused_kernel_is_counted(version: str) -> None:
    """``tanh(x @ w) @ v`` on four devices. Since jax 0.11 an all-reduce starts as a fusion."""
    lines = text(f"all_reduce_fused_{version}.cuda")
    assert "all-reduce-start" not in lines
    assert "fusion-start(" in lines
    counts = count(lines, [(6, 512)])
    assert counts.collectives == {"all-reduce": 1}
    assert counts.cache_collectives == 1, "the shape was declared as a cache's"


@pytest.mark.parametrize(
    ("name", "cache_writes", "copied", "cache_collectives"),
    [
        ("update_donated.cuda", 0, 0, 0),
        ("update_kept.cuda", 1, CACHE_BYTES, 0),
        ("update_kept.tpu", 1, CACHE_BYTES, 0),  # copied through VMEM
        ("transposed.cuda", 1, CACHE_BYTES, 0),
        ("rewritten.cuda", 1, 0, 0),  # where(slots == i, new, cache) reads and writes all of it
        ("gathered.cuda", 0, 0, 1),
        ("table.tpu", 0, 0, 0),  # the embedding is prefetched into VMEM
    ],
)
def test_copies_and_rewrites_of_a_cache_or_a_table(
    name: str, cache_writes: int, copied: int, cache_collectives: int
) -> None:
    counts = program(name)
    assert (counts.cache_writes, counts.copied, counts.cache_collectives) == (
        cache_writes,
        copied,
        cache_collectives,
    )


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


# ---------------------------------------------------------------- records, platforms, misuse


def measured(launches: tuple[int, ...], case: Case | None = None) -> Measured:
    facts = []
    for layers, total in zip((3, 5), launches, strict=False):
        counts = Counts(launches=total, collectives={"all-reduce": 2 * layers, "all-gather": 6})
        facts.append(Facts(layers, counts, {"temp": 2**20, "alias": 99}, 100, {"compile": 1.0}))
    return Measured(case or Case(), facts, {"jax": "0.10.2"})


def test_two_depths_give_the_cost_of_a_layer_and_a_record_replaces_rows_of_the_same_case(
    tmp_path: Path,
) -> None:
    row = measured((281, 313))
    assert row.per_layer() == 16
    assert row.outside() == 233
    assert row.aliased == 0.99
    assert row.collectives_per_layer() == {"all-reduce": 2}
    file = tmp_path / "record.json"
    save([measured((10, 12)), measured((20, 24), Case(batch=8))], file, {"date": "then"})
    save([measured((10, 16))], file, {"date": "now"})
    rows = load(file)
    assert {name: row.per_layer() for name, row in rows.items()} == {
        Case().name: 3,
        Case(batch=8).name: 2,
    }
    assert rows[Case().name] == measured((10, 16))


def test_a_missing_or_wrong_compiler_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"jax": "0.10.2", "jax-cuda13-pjrt": "0.10.1"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    message = Platform.named("cuda:h200").missing()
    assert "\n" not in message
    assert "jax-cuda13-plugin is not installed, jax-cuda13-pjrt is 0.10.1" in message
    assert "--no-deps" in message
    assert "'jax-cuda13-plugin==0.10.2' 'jax-cuda13-pjrt==0.10.2'" in message
    installed |= {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2", "libtpu": "0.0.42.1"}
    assert not Platform.named("cuda:h200").missing()
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ['libtpu==0.0.42.*; extra == "tpu"']
    )
    assert not Platform.named("tpu:v6e:2x2").missing()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--platform", "cuda:../h200"],
            "there is no platform 'cuda:../h200' to compile for; use one of cuda:",
        ),
        (["--draft", "bush3"], "there is no draft 'bush3'"),
        (["--layers", "2"], "can be cut to 3 to 32"),
        (["--capacity", "64"], "no room for --prompt 128"),
    ],
)
def test_misuse_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.startswith("Error: ")
    assert message.count("\n") == 1


def test_the_tables_of_the_page_are_their_records() -> None:
    """To write them again: ``python -m validation.aot --table validation/results/aot.json``."""
    assert table.page(PATH) in (HLO.parent.parent / "docs" / "gpu.md").read_text()


def test_no_recorded_round_copies_a_cache_or_a_table_or_waits_for_the_host() -> None:
    rows = load()
    for every in (False, True):  # of every commit, and of --aot-all
        assert not [case.name for case in cases("cuda:h200", every=every) if case.name not in rows]
    for name, row in rows.items():
        counts = row.deep.counts
        assert counts.host == counts.cache_writes == counts.cache_collectives == 0, name
        assert row.aliased is None or row.aliased >= 0.99, name
