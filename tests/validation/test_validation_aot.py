"""What is read from optimised HLO, on programs small enough to count by hand, and platforms that are not here.

The texts in ``hlo/`` came out of the compilers for an H200 (``.cuda``) and a TPU v6e (``.tpu``), of functions of a few
lines; metadata was cut away.
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
from validation.aot.measure import PATH, Measured, few, load, measured_apart, save
from validation.aot.platforms import NotHere, Platform
from validation.aot.programs import Case, Facts

HLO = Path(__file__).parent.parent / "hlo"
CACHE = (1, 8, 4096, 128)
TABLE = (32000, 512)
CACHE_BYTES = 2 * 8 * 4096 * 128


def text(name: str) -> str:
    return (HLO / f"{name}.txt").read_text()


def whole(name: str) -> Part:
    return parts_of(text(name), rounds=False, caches=[CACHE], table=TABLE)["whole"]


# ---------------------------------------------------------------- launches


def test_a_loop_of_known_length_is_unrolled() -> None:
    """``fori_loop(0, 59, lambda i, x: tanh(x @ w) + i, x)``: each trip a product, a copy and the counter."""
    part = whole("loop_of_59.cuda")
    module = Module.parse(text("loop_of_59.cuda"))
    (loop,) = (one for one in module.computations[module.entry] if one.op == "while")
    body = [one.op for one in module.computations[module.loop(loop)[1]] if one.op in ("fusion", "copy", "custom-call")]
    outside = [one.op for one in module.computations[module.entry] if one.op in ("fusion", "copy", "custom-call")]
    assert len(body) >= 2
    assert part.launches == 59 * len(body) + len(outside)
    assert part.decisions == 0, "the host is not asked"


def test_a_tpu_does_not_say_how_long_its_loops_are_but_their_condition_does() -> None:
    module = Module.parse(text("loop_of_59.tpu"))
    (loop,) = (one for one in module.computations[module.entry] if one.op == "while")
    assert "known_trip_count" not in loop.operands and module.trip_count(loop) == 59
    assert whole("loop_of_59.tpu").cycles >= 59 * 1040, "cycles of a trip count as often"


def test_a_round_is_the_body_of_the_loop_that_nobody_knows_the_length_of() -> None:
    """An open loop around a loop of three: a trip of the inner one has a product, a copy and its counter."""
    parts = parts_of(text("rounds.cuda"), rounds=True, caches=[], table=TABLE)
    one_round = parts["round"]
    before = parts["before"]
    # Inner: the counter, the product, a copy. Outer: a copy, its counter. The condition: a reduction.
    assert one_round.launches == 3 * 3 + 2 + 1
    assert one_round.kinds == {"fusion": 3 * 2 + 1 + 1, "copy": 3 + 1}
    # Two copies, a sine, a sum.
    assert before.launches == 4 and before.decisions == 0
    assert whole("rounds.cuda").launches == 12 + 4 and whole("rounds.cuda").decisions == 1


def test_every_branch_of_a_conditional_counts_and_the_decision_is_the_hosts() -> None:
    part = whole("cond.cuda")
    assert part.launches == part.kinds["fusion"] == 2 + 3  # sort and double; sine, sum and add
    assert part.decisions == 1


def test_what_ends_an_asynchronous_operation_is_no_launch_of_its_own() -> None:
    part = whole("all_reduce.cuda")
    assert part.kinds == {"fusion": 4, "all-reduce-start": 1}
    assert part.collectives == {"all-reduce": 1} and part.cache_collectives == 0


@pytest.mark.parametrize("version", ["0.11", "0.12"])
def test_an_all_reduce_that_is_a_fused_kernel_is_counted(version: str) -> None:
    """Of ``tanh(x @ w) @ v`` on four devices: what jax 0.10 starts as an all-reduce, later ones start as a fusion."""
    lines = text(f"all_reduce_fused_{version}.cuda")
    assert "all-reduce-start" not in lines and "fusion-start(" in lines
    part = parts_of(lines, rounds=False, caches=[(6, 512)], table=TABLE)["whole"]
    assert part.collectives == {"all-reduce": 1}
    assert part.cache_collectives == 1, "of the shape that is named as a cache's here"
    assert part.kinds["fusion-start"] == 1


# ---------------------------------------------------------------- kernels that add


def test_kernels_that_add_are_found_in_the_scopes_of_the_target() -> None:
    """An RMSNorm and a product under ``target``, a product under ``verify``. The argmax there adds nothing."""
    lines = text("sums.cuda")
    totals = [kernels_that_add(lines, scopes).total() for scopes in (["target"], ["verify"], ["observe"], None)]
    assert totals == [2, 1, 1, 4]


def test_kernels_that_add_are_compared_without_names_and_without_the_order_of_parameters() -> None:
    lines = text("sums.cuda")
    renamed = re.sub(r"%([\w.\-]+)", r"%renamed_\1", lines)
    renamed = re.sub(r'op_name="(jit\(f\)/\w+)[^"]*"', r'op_name="\1/renamed"', renamed)
    exchanged = re.sub(r"(  %parameter_2 = .*\n)(  %parameter_0 = .*\n)", r"\2\1", lines)
    for other in (renamed, exchanged):
        assert other != lines and kernels_that_add(other) == kernels_that_add(lines)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"sizes":["8","16"]', '"sizes":["8","32"]'),
        ("bf16[1024,6]{0,1} dot(", "f32[1024,6]{0,1} dot("),
        ('"sizes":["16"]', '"sizes":["32"]'),
        ("constant(1e-06)", "constant(1e-05)"),
        ("multiply(%parameter_0, %mul.1)", "multiply(%parameter_0, %parameter_0)"),
        ("ROOT %reduce_sum.5.0 = f32[] add(", "ROOT %reduce_sum.5.0 = f32[] subtract("),
    ],
)
def test_a_kernel_that_adds_otherwise_is_seen(before: str, after: str) -> None:
    lines = text("sums.cuda")
    assert before in lines
    assert kernels_that_add(lines.replace(before, after)) != kernels_that_add(lines)


# ---------------------------------------------------------------- copies


def test_an_update_of_what_was_donated_copies_nothing() -> None:
    part = whole("update_donated.cuda")
    assert (part.cache_copies, part.cache_rewrites, part.copied) == (0, 0, 0)


@pytest.mark.parametrize("name", ["update_kept.cuda", "transposed.cuda", "update_kept.tpu"])
def test_a_copy_of_a_whole_cache_is_seen(name: str) -> None:
    """Kept by the caller, or laid out again; on the TPU by way of VMEM, and counted when it is back."""
    part = whole(name)
    assert part.cache_copies == 1 and part.copied == CACHE_BYTES


def test_a_cache_that_is_written_whole_or_gathered_is_seen() -> None:
    """``where(slots == i, new, cache)`` reads and writes all of it, where an update would do."""
    part = whole("rewritten.cuda")
    assert part.cache_copies == 0 and part.cache_rewrites == 1
    part = whole("gathered.cuda")
    assert part.collectives == {"all-gather": 1} and part.cache_collectives == 1


def test_a_table_looked_up_by_its_bits_is_copied_but_not_when_it_fits_into_fast_memory() -> None:
    """The compiler writes the bits of this small table into VMEM: a prefetch. One that stays in main memory counts."""
    assert whole("table.tpu").table_copies == 0
    slow = text("table.tpu").replace("u16[32000,512]{1,0:T(8,128)(2,1)S(1)} bitcast", "u16[32000,512]{1,0} bitcast")
    part = parts_of(slow, rounds=False, caches=[CACHE], table=TABLE)["whole"]
    assert part.table_copies == 1 and part.copied == 2 * 32000 * 512


# ---------------------------------------------------------------- the host


@pytest.mark.parametrize(
    ("name", "launched", "expected"),
    [
        # x [8, 64] and w [64, 64] are read, the product and a counter are written.
        ("loop_of_59.cuda", "gemm_fusion_dot_general.5", 4 * (8 * 64 + 64 * 64 + 1 + 8 * 64)),
        # A token's keys are read twice, old and new, and written once; a predicate and an index are read.
        ("update_donated.cuda", "loop_dynamic_update_slice_fusion", 3 * (8 * 128 * 2) + 1 + 4),
        ("update_kept.cuda", "copy.2", 2 * CACHE_BYTES),
        ("transposed.cuda", "wrapped_transpose", 2 * CACHE_BYTES),
    ],
)
def test_bytes_of_a_launch_by_hand(name: str, launched: str, expected: int) -> None:
    module = Module.parse(text(name))
    found = [one for computation in module.computations.values() for one in computation if one.name == launched]
    assert traffic(module, found[0], sizes_of(module)) == expected


def test_a_callback_is_two_transfers() -> None:
    assert whole("callback.tpu").host == 2


@pytest.mark.parametrize(
    ("op", "rest", "type"),
    [
        ("custom-call", 'custom_call_target="xla_ffi_python_gpu_callback"', "f32[8]{0}"),
        ("outfeed", "", "token[]"),
        ("copy-start", "", "(f32[8]{0:S(5)}, f32[8]{0}, u32[])"),
    ],
)
def test_work_of_the_host_is_seen(op: str, rest: str, type: str) -> None:
    assert is_of_the_host(Instruction("x", type, op, f"%y), {rest}"))


# ---------------------------------------------------------------- two depths, platforms, misuse


def measured(launches: tuple[int, ...], case: Case | None = None) -> Measured:
    facts = (
        Facts(layers, {"whole": Part(launches=count, collectives={"all-reduce": 2 * layers, "all-gather": 6})},
              {"compile": 1.0}, {"temp": 2**20, "alias": 99}, 100)
        for layers, count in zip((3, 5), launches, strict=False)
    )  # fmt: skip
    return Measured(case or Case(), tuple(facts), {"jax": "0.10.2"})


def test_a_layer_and_the_rest_follow_from_two_depths() -> None:
    row = measured((281, 313))
    assert row.per_layer("whole") == 16 and row.outside("whole") == 233
    assert row.aliased == 0.99 and row.collectives_per_layer("whole") == {"all-reduce": 2}
    assert measured((281,)).per_layer("whole") is None and measured((281,)).outside("whole") is None


def test_rows_of_a_record_take_the_place_of_those_of_the_same_case(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    save([measured((10, 12)), measured((20, 24), Case(batch=8))], file, {"date": "then"})
    save([measured((10, 16))], file, {"date": "now"})
    rows = load(file)
    assert {name: row.per_layer("whole") for name, row in rows.items()} == {Case().name: 3, Case(batch=8).name: 2}
    assert rows[Case().name] == measured((10, 16))


def test_a_compiler_that_is_missing_or_of_another_version_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"jax": "0.10.2", "jax-cuda13-pjrt": "0.10.1"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    said = Platform.named("cuda:h200").missing()
    assert said is not None and "\n" not in said
    assert "jax-cuda13-plugin is not installed, jax-cuda13-pjrt is 0.10.1" in said
    assert "--no-deps" in said and "'jax-cuda13-plugin==0.10.2' 'jax-cuda13-pjrt==0.10.2'" in said
    installed |= {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}
    assert Platform.named("cuda:h200").missing() is None
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ['libtpu==0.0.42.*; extra == "tpu"'])
    assert Platform.named("tpu:v6e:2x2").wheels == {"libtpu": "0.0.42.*"}
    installed["libtpu"] = "0.0.42.1"
    assert Platform.named("tpu:v6e:2x2").missing() is None
    installed["libtpu"] = "0.0.43"
    assert "libtpu is 0.0.43" in str(Platform.named("tpu:v6e:2x2").missing())


UNKNOWN = ["h200", "cuda:../h200", "tpu:v6e", "tpu:v6e:2", "rocm:mi300", ""]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(
            (["--platform", name], f"there is no platform {name!r} to compile for; use one of cuda:")
            for name in UNKNOWN
        ),
        (["--target", "Llama-9"], "there is no shape 'Llama-9'"),
        (["--draft", "bush3"], "there is no draft 'bush3'"),
        (["--program", "train"], "there is no program 'train'"),
        (["--layers", "2"], "can be cut to 3 to 32"),
        (["--layers", "few"], "expected a number of layers, or all"),
        (["--batch", "0"], "--batch is 0"),
        (["--capacity", "64"], "no room for --prompt 128"),
        (["--dtype", "float8"], "float8"),
    ],
)
def test_misuse_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said and said.startswith("Error: ") and said.count("\n") == 1


def test_without_the_compiler_the_process_that_compiles_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NotHere, match="jax-cuda13-plugin is not installed"):
        measured_apart(Case())


# ---------------------------------------------------------------- what is recorded


def test_the_tables_of_the_page_are_their_records() -> None:
    """To write them again: ``python -m validation.aot --table validation/results/aot.json``."""
    page = (HLO.parent.parent / "docs" / "gpu.md").read_text()
    assert table.page(PATH) in page


def test_no_recorded_round_copies_a_cache_or_a_table_or_waits_for_the_host() -> None:
    rows = load()
    assert not [case.name for case in few("cuda:h200") if case.name not in rows], "what every commit compiles"
    for name, row in rows.items():
        part = row.deep.parts[row.main]
        if row.case.program != "prefill":
            assert (part.host, part.cache_copies, part.cache_rewrites, part.table_copies) == (0, 0, 0, 0), name
            assert row.aliased is None or row.aliased >= 0.99, name
