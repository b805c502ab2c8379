"""What is read from optimized HLO, on programs that are small enough to count by hand, and compilers that are missing.

The texts in ``hlo/`` are outputs of the compilers for an H200 (``.cuda``) and a TPU v6e (``.tpu``), without metadata.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from validation.aot import table
from validation.aot.__main__ import main
from validation.aot.facts import Part, is_of_the_host, kernels_that_add, parts_of, sizes_of, traffic
from validation.aot.hlo import Instruction, Module
from validation.aot.measure import PATH, Measured, few, load, save
from validation.aot.platforms import Platform
from validation.aot.programs import Case, Facts

HLO = Path(__file__).parent.parent / "hlo"
CACHE = (1, 8, 4096, 128)
TABLE = (32000, 512)
CACHE_BYTES = 2 * 8 * 4096 * 128


def text(name: str) -> str:
    return (HLO / f"{name}.txt").read_text()


def program(name: str) -> Part:
    return parts_of(text(name), rounds=False, caches=[CACHE], table=TABLE)["whole"]


def test_launches_of_loops_branches_and_asynchronous_operations() -> None:
    # fori_loop(0, 59, lambda i, x: tanh(x @ w) + i, x): each trip a product, a copy and the counter.
    module = Module.parse(text("loop_of_59.cuda"))
    (loop,) = (instruction for instruction in module.computations[module.entry] if instruction.op == "while")
    launched = lambda name: sum(step.op in ("fusion", "copy", "custom-call") for step in module.computations[name])
    part = program("loop_of_59.cuda")
    assert part.launches == 59 * launched(module.loop(loop)[1]) + launched(module.entry)
    assert part.decisions == 0, "the host is not asked"
    assert program("loop_of_59.tpu").cycles >= 59 * 1040, "the trip count of a TPU's loop is in its condition"
    part = program("cond.cuda")
    assert part.launches == part.kinds["fusion"] == 2 + 3  # both branches: sort and double; sine, sum and add
    assert part.decisions == 1
    part = program("all_reduce.cuda")
    assert part.kinds == {"fusion": 4, "all-reduce-start": 1}, "its end is no launch"
    assert part.collectives == {"all-reduce": 1} and part.cache_collectives == 0


def test_a_round_is_the_body_of_the_loop_with_an_unknown_trip_count() -> None:
    """An open loop around a loop of three: a trip of the inner loop has a product, a copy and its counter."""
    parts = parts_of(text("rounds.cuda"), rounds=True, caches=[], table=TABLE)
    # Inner: the counter, the product, a copy. Outer: a copy, its counter. The condition: a reduction.
    assert parts["round"].launches == 3 * 3 + 2 + 1
    assert parts["round"].kinds == {"fusion": 3 * 2 + 1 + 1, "copy": 3 + 1}
    # Two copies, a sine, a sum.
    assert parts["before"].launches == 4 and parts["before"].decisions == 0
    assert program("rounds.cuda").launches == 12 + 4 and program("rounds.cuda").decisions == 1


@pytest.mark.parametrize("version", ["0.11", "0.12"])
def test_an_all_reduce_that_is_a_fused_kernel_is_counted(version: str) -> None:
    """``tanh(x @ w) @ v`` on four devices. Since jax 0.11 an all-reduce starts as a fusion."""
    lines = text(f"all_reduce_fused_{version}.cuda")
    assert "all-reduce-start" not in lines and "fusion-start(" in lines
    part = parts_of(lines, rounds=False, caches=[(6, 512)], table=TABLE)["whole"]
    assert part.collectives == {"all-reduce": 1} and part.kinds["fusion-start"] == 1
    assert part.cache_collectives == 1, "the shape was declared as a cache's"


def test_kernels_that_add_are_found_by_scope_and_compared_without_names_and_order() -> None:
    """An RMSNorm and a product under ``target``, a product under ``verify``. The argmax there adds nothing."""
    lines = text("sums.cuda")
    totals = [kernels_that_add(lines, scopes).total() for scopes in (["target"], ["verify"], ["observe"], None)]
    assert totals == [2, 1, 1, 4]
    renamed = re.sub(r"%([\w.\-]+)", r"%renamed_\1", lines)
    renamed = re.sub(r'op_name="(jit\(f\)/\w+)[^"]*"', r'op_name="\1/renamed"', renamed)
    exchanged = re.sub(r"(  %parameter_2 = .*\n)(  %parameter_0 = .*\n)", r"\2\1", lines)
    for equal in (renamed, exchanged):
        assert equal != lines and kernels_that_add(equal) == kernels_that_add(lines)
    for before, after in (
        ('"sizes":["8","16"]', '"sizes":["8","32"]'),
        ("bf16[1024,6]{0,1} dot(", "f32[1024,6]{0,1} dot("),
        ("constant(1e-06)", "constant(1e-05)"),
        ("multiply(%parameter_0, %mul.1)", "multiply(%parameter_0, %parameter_0)"),
        ("ROOT %reduce_sum.5.0 = f32[] add(", "ROOT %reduce_sum.5.0 = f32[] subtract("),
    ):
        assert before in lines
        assert kernels_that_add(lines.replace(before, after)) != kernels_that_add(lines), after


def test_copies_and_rewrites_of_a_cache_or_a_table_are_detected() -> None:
    part = program("update_donated.cuda")
    assert (part.cache_copies, part.cache_rewrites, part.copied) == (0, 0, 0)
    for name in ("update_kept.cuda", "transposed.cuda", "update_kept.tpu"):  # on a TPU it is copied through VMEM
        part = program(name)
        assert part.cache_copies == 1 and part.copied == CACHE_BYTES, name
    part = program("rewritten.cuda")  # where(slots == i, new, cache) reads and writes all of it
    assert part.cache_copies == 0 and part.cache_rewrites == 1
    part = program("gathered.cuda")
    assert part.collectives == {"all-gather": 1} and part.cache_collectives == 1
    assert program("table.tpu").table_copies == 0, "a prefetch into VMEM"
    slow = text("table.tpu").replace("u16[32000,512]{1,0:T(8,128)(2,1)S(1)} bitcast", "u16[32000,512]{1,0} bitcast")
    part = parts_of(slow, rounds=False, caches=[CACHE], table=TABLE)["whole"]
    assert part.table_copies == 1 and part.copied == 2 * 32000 * 512


@pytest.mark.parametrize(
    ("name", "launched", "expected"),
    [
        # x [8, 64] and w [64, 64] are read, the product and a counter are written.
        ("loop_of_59.cuda", "gemm_fusion_dot_general.5", 4 * (8 * 64 + 64 * 64 + 1 + 8 * 64)),
        # A token's keys are read twice, old and new, and written once; a predicate and an index are read.
        ("update_donated.cuda", "loop_dynamic_update_slice_fusion", 3 * (8 * 128 * 2) + 1 + 4),
        ("update_kept.cuda", "copy.2", 2 * CACHE_BYTES),
    ],
)
def test_bytes_of_a_launch_by_hand(name: str, launched: str, expected: int) -> None:
    module = Module.parse(text(name))
    instructions = (step for computation in module.computations.values() for step in computation)
    assert traffic(module, next(step for step in instructions if step.name == launched), sizes_of(module)) == expected


def test_work_of_the_host_is_detected() -> None:
    assert program("callback.tpu").host == 2, "to the host and back"
    for op, operands, result in (
        ("custom-call", 'custom_call_target="xla_ffi_python_gpu_callback"', "f32[8]{0}"),
        ("outfeed", "", "token[]"),
        ("copy-start", "", "(f32[8]{0:S(5)}, f32[8]{0}, u32[])"),
    ):
        assert is_of_the_host(Instruction("x", result, op, f"%y), {operands}")), op


# ---------------------------------------------------------------- records, platforms, misuse


def measured(launches: tuple[int, ...], case: Case | None = None) -> Measured:
    facts = (
        Facts(layers, {"whole": Part(launches=count, collectives={"all-reduce": 2 * layers, "all-gather": 6})},
              {"compile": 1.0}, {"temp": 2**20, "alias": 99}, 100)
        for layers, count in zip((3, 5), launches, strict=False)
    )  # fmt: skip
    return Measured(case or Case(), tuple(facts), {"jax": "0.10.2"})


def test_two_depths_give_the_cost_of_a_layer_and_a_record_replaces_rows_of_the_same_case(tmp_path: Path) -> None:
    row = measured((281, 313))
    assert row.per_layer("whole") == 16 and row.outside("whole") == 233
    assert row.aliased == 0.99 and row.collectives_per_layer("whole") == {"all-reduce": 2}
    assert measured((281,)).per_layer("whole") is None and measured((281,)).outside("whole") is None
    file = tmp_path / "record.json"
    save([measured((10, 12)), measured((20, 24), Case(batch=8))], file, {"date": "then"})
    save([measured((10, 16))], file, {"date": "now"})
    rows = load(file)
    assert {name: row.per_layer("whole") for name, row in rows.items()} == {Case().name: 3, Case(batch=8).name: 2}
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
    assert message is not None and "\n" not in message
    assert "jax-cuda13-plugin is not installed, jax-cuda13-pjrt is 0.10.1" in message
    assert "--no-deps" in message and "'jax-cuda13-plugin==0.10.2' 'jax-cuda13-pjrt==0.10.2'" in message
    installed |= {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2", "libtpu": "0.0.42.1"}
    assert Platform.named("cuda:h200").missing() is None
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ['libtpu==0.0.42.*; extra == "tpu"'])
    assert Platform.named("tpu:v6e:2x2").missing() is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--platform", "cuda:../h200"], "there is no platform 'cuda:../h200' to compile for; use one of cuda:"),
        (["--draft", "bush3"], "there is no draft 'bush3'"),
        (["--layers", "2"], "can be cut to 3 to 32"),
        (["--capacity", "64"], "no room for --prompt 128"),
    ],
)
def test_misuse_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert words in message and message.startswith("Error: ") and message.count("\n") == 1


def test_the_tables_of_the_page_are_their_records() -> None:
    """To write them again: ``python -m validation.aot --table validation/results/aot.json``."""
    assert table.page(PATH) in (HLO.parent.parent / "docs" / "gpu.md").read_text()


def test_no_recorded_round_copies_a_cache_or_a_table_or_waits_for_the_host() -> None:
    rows = load()
    assert not [case.name for case in few("cuda:h200") if case.name not in rows], "every commit compiles these"
    for name, row in rows.items():
        part = row.deep.parts[row.main]
        if row.case.program != "prefill":
            assert (part.host, part.cache_copies, part.cache_rewrites, part.table_copies) == (0, 0, 0, 0), name
            assert row.aliased is None or row.aliased >= 0.99, name
