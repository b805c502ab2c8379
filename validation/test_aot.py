"""AOT: what a round becomes on an H200 or a TPU, compiled from shapes alone where there is neither.

A compiler's result, never a speed. Budgets are what ``results/aot.json`` says was reached, and five per cent.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest

from validation.aot.facts import Part, kernels_that_add
from validation.aot.hlo import Module
from validation.aot.measure import Measured, budget, every, few, load, measured_apart
from validation.aot.platforms import NotHere
from validation.aot.programs import SERVED, Case
from validation.runs import Check

pytestmark = pytest.mark.level("AOT")

ALIASED = 0.99  # of the state's bytes
_MIB = 2**20
_not_here: dict[str, NotHere] = {}
_NAMED = "python -m validation.aot {} --record validation/results/aot.json"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    if "case" not in metafunc.fixturenames:
        return
    chosen = every if option("--aot-all") else few
    cases = [case for platform in option("--aot") or ["cuda:h200"] for case in chosen(platform)]
    if metafunc.function is test_a_mesh_sums_twice_a_layer:
        cases = [case for case in cases if case.mesh]
    metafunc.parametrize("case", cases, ids=[case.name.replace(" ", "-") for case in cases])


@functools.cache
def _measured(case: Case) -> Measured | Exception:
    """What it became, or why it did not; neither is found out twice."""
    if case.platform in _not_here:
        return _not_here[case.platform]
    try:
        return measured_apart(case)
    except NotHere as reason:
        _not_here[case.platform] = reason
        return reason
    except (ValueError, RuntimeError) as error:
        return error


@pytest.fixture
def measured(case: Case) -> Measured:
    """Compiled once for all checks of a case, in a separate process."""
    measurement = _measured(case)
    if isinstance(measurement, NotHere):
        pytest.skip(str(measurement))
    if isinstance(measurement, Exception):
        pytest.fail(str(measurement), pytrace=False)
    return measurement


@pytest.fixture
def reached(case: Case) -> Measured:
    """What was recorded for it."""
    row = load().get(case.name)
    if row is None:
        pytest.fail(f"no record has a row for {case.name}: {_command(case)}", pytrace=False)
    return row


def test_the_host_has_no_part_in_it(measured: Measured, check: Check) -> None:
    hosts = {name: part.host for name, part in measured.deep.parts.items()}
    check.number(host_operations=sum(hosts.values()))
    assert not any(hosts.values()), f"transfers to or calls of the host: {hosts}"


def test_the_state_is_updated_in_place(measured: Measured, check: Check) -> None:
    """``step`` gives its state back in the memory that it came in; in ``generate`` a loop carries it."""
    if measured.aliased is None:
        check.number(state="carried by the loop" if measured.main == "round" else "made here")
        return
    check.number(share_updated_in_place=round(measured.aliased, 4))
    assert measured.aliased >= ALIASED, f"{measured.aliased:.1%} of the state's bytes; is it still donated?"


def test_nothing_large_is_copied(measured: Measured, reached: Measured, check: Check) -> None:
    """A round copies no cache and no table; what is made once may be copied as often as was recorded."""
    for name, part in measured.deep.parts.items():
        before = reached.deep.parts[name]
        check.number(**{f"copied MiB, {name}": round(part.copied / _MIB, 1)})
        for kind in ("cache_copies", "cache_rewrites", "table_copies"):
            allowed = 0 if _is_a_round(measured.case, name) else getattr(before, kind)
            assert getattr(part, kind) <= allowed, f"{getattr(part, kind)} {kind} in {name}; {allowed} are allowed"
        assert part.copied <= budget(before.copied), f"{part.copied:,} bytes in {name}, {before.copied:,} before"


def test_temporary_memory_is_bounded(measured: Measured, reached: Measured, check: Check) -> None:
    temp = measured.deep.memory["temp"]
    before = reached.deep.memory["temp"]
    check.number(temporary_mib=round(temp / _MIB, 1), temporary_mib_allowed=round(budget(before) / _MIB, 1))
    assert temp <= budget(before) + _MIB, f"{temp:,} bytes besides arguments and results, {before:,} before"


def test_launches_keep_within_their_budget(
    request: pytest.FixtureRequest, measured: Measured, reached: Measured, tmp_path: Path, check: Check
) -> None:
    """Launches per layer, from two depths, and outside the layers; bytes of main memory, an upper bound.

    In a chain of 5 at batch 1 the launches that add are also compared with those of plain decoding.
    """
    case = measured.case
    if case.platform.startswith("cuda") and case == Case(platform=case.platform, program="step", draft="chain5"):
        _assert_sums_of_plain_decoding(request, case, tmp_path, check)
    for name, part in measured.deep.parts.items():
        bytes_before = reached.deep.parts[name].bytes
        check.number(**{f"GB moved, {name}": round(part.bytes / 1e9, 2)})
        assert part.bytes <= budget(bytes_before), f"{name} moves {part.bytes:,} bytes, {bytes_before:,} before"
        counts = measured.per_layer(name), measured.outside(name)
        allowed = budget(reached.per_layer(name)), budget(reached.outside(name))
        check.number(**{f"launches a layer, {name}": counts[0], f"launches outside, {name}": counts[1]})
        for words, launches, most in zip(("a layer", "outside the layers"), counts, allowed, strict=True):
            assert (launches or 0) <= most, (
                f"{launches:g} launches {words} in {name}, {most} are allowed; by scope: {part.scopes}. "
                f"If that is worth it: {_command(measured.case)}"
            )
        collectives = reached.deep.parts[name].collectives
        for kind, count in part.collectives.items():
            assert count <= collectives.get(kind, 0), f"{count} {kind} in {name}, {collectives.get(kind, 0)} before"


def _assert_sums_of_plain_decoding(request: pytest.FixtureRequest, case: Case, directory: Path, check: Check) -> None:
    """The kernels that add are the same in verification and in plain decoding with blocks of the same size.

    So the logits of both are equal bit for bit if the device tiles equal kernels in the same way.
    """
    chain, plain = (
        kernels_that_add(
            _compiled(request, dataclasses.replace(case, draft=draft, layers=3), directory / draft)[1], scopes
        )
        # In plain decoding nothing but the target adds. So its kernels count even where the compiler lost their scope.
        for draft, scopes in (("chain5", ("target", "verify")), ("plain6", None))
    )
    check.number(kernels_that_add=chain.total(), kernels_that_add_in_plain_decoding=plain.total())
    different = {"chain5": chain - plain, "plain6": plain - chain}
    assert plain and chain == plain, {
        draft: [f"{count} x {kernel[:200]}" for kernel, count in kernels.items()]
        for draft, kernels in different.items()
    }


def test_a_mesh_sums_twice_a_layer(measured: Measured, check: Check) -> None:
    """After attention and after the MLP. No cache is sent, and no device passes data to its neighbour."""
    for name, part in measured.deep.parts.items():
        per_layer = measured.collectives_per_layer(name)
        check.number(**{f"{kind} a layer": count for kind, count in per_layer.items()}, **part.collectives)
        assert per_layer == {"all-reduce": 2}, f"a layer adds {per_layer} in {name}"
        assert not part.cache_collectives, f"{part.cache_collectives} collectives of caches in {name}"
        assert not part.collectives.get("collective-permute"), f"{part.collectives} in {name}"


@pytest.mark.parametrize("family", SERVED)
def test_a_family_compiles_for_a_mesh_and_asks_the_host_for_nothing(
    request: pytest.FixtureRequest, family: str, check: Check
) -> None:
    """Of its first layers; no collective moves what a layer keeps."""
    target, mesh = SERVED[family]
    part = _compiled(request, Case(platform=_gpu(request), target=target, draft="chain3", mesh=mesh, layers=5))[0]
    check.number(**part.collectives, launches=part.launches)
    assert not part.host and not part.cache_collectives, f"{part.host} transfers, {part.cache_collectives} of caches"
    # Loops over nodes carry recurrent states, which are not written in place as slots of a cache are.
    copied = part.copied if family == "qwen3_next" else part.cache_copies
    assert copied <= (8 * _MIB if family == "qwen3_next" else 0), f"{part.cache_copies} caches, {part.copied:,} bytes"


@pytest.mark.parametrize("weights", ["fp8", "fp8-dynamic"])
def test_products_of_fp8_weights_are_what_the_compiler_makes_of_them(
    request: pytest.FixtureRequest, weights: str, tmp_path: Path, check: Check
) -> None:
    """With dynamic activations the four products of a layer multiply FP8 by FP8; with weights alone none does.

    The head observes with five, and drafts one row at a time, for which the compiler makes other sums.
    """
    layers = 3
    case = Case(platform=_gpu(request), draft="chain3", weights=weights, layers=layers)
    _, text = _compiled(request, case, tmp_path / "hlo")
    products = Module.parse(text).products()
    in_fp8 = products.get(("f8e4m3fn", "f8e4m3fn"), 0)
    check.number(**{" × ".join(types): count for types, count in products.items()})
    assert in_fp8 == (4 * layers + 5 if weights == "fp8-dynamic" else 0), products
    # An FP8 kernel is not laid out in another type before it is multiplied.
    wide = re.search(r"(?:bf16|f32)\[(?:28672,4096|4096,28672)\]\S* (?:convert|fusion|copy)\(", _launched(text))
    assert wide is None, f"a kernel of the MLP becomes {wide[0]}"


def _launched(text: str) -> str:
    """What is launched on its own, line by line."""
    module = Module.parse(text)
    return "\n".join(
        f"{instruction.type} {instruction.op}({instruction.operands}"
        for instruction, _ in module.launches(module.entry)
    )


def _gpu(request: pytest.FixtureRequest) -> str:
    platforms = [name for name in request.config.getoption("--aot") or ["cuda:h200"] if name.startswith("cuda")]
    return platforms[0] if platforms else pytest.skip("about GPUs")


def _compiled(request: pytest.FixtureRequest, case: Case, hlo: Path | None = None) -> tuple[Part, str]:
    """A round of one depth, and its text where a file is named for it."""
    try:
        measurement = measured_apart(case, None, None if hlo is None else str(hlo))
    except NotHere as reason:
        pytest.skip(str(reason))
    return measurement.deep.parts["whole"], "" if hlo is None else hlo.read_text(encoding="utf-8")


def _is_a_round(case: Case, part: str) -> bool:
    return part == "round" or case.program == "step"


def _command(case: Case) -> str:
    words = f"--platform {case.platform} --target {case.target} --program {case.program} --draft {case.draft} "
    words += f"--batch {case.batch}" + " --sampled" * case.sampled + f" --mesh {case.mesh}" * bool(case.mesh)
    return _NAMED.format(words)
