"""AOT: what a round becomes on an H200 or a TPU, compiled from shapes alone where there is neither.

A compiler's result, never a speed. Budgets are what ``results/aot.json`` says was reached, and five per cent.
"""

from __future__ import annotations

import functools

import pytest

from validation.aot import grid
from validation.aot.apart import measured_apart
from validation.aot.measured import Measured
from validation.aot.platforms import NotHere
from validation.aot.programs import Case
from validation.aot.record import budget, recorded
from validation.checks import Check

pytestmark = pytest.mark.level("AOT")

ALIASED = 0.99  # of the state's bytes
_MIB = 2**20
_not_here: dict[str, NotHere] = {}
_NAMED = "python -m validation.aot {} --record validation/results/aot.json"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    chosen = grid.every if option("--aot-all") else grid.few
    cases = [case for platform in option("--aot") or ["cuda:h200"] for case in chosen(platform)]
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
    """Compiled once for all checks of a case, in a process of its own."""
    found = _measured(case)
    if isinstance(found, NotHere):
        pytest.skip(str(found))
    if isinstance(found, Exception):
        pytest.fail(str(found), pytrace=False)
    return found


@pytest.fixture
def reached(case: Case) -> Measured:
    """What was recorded for it."""
    found = recorded(case)
    if found is None:
        pytest.fail(f"nobody recorded what is reached for {case.name}: {_command(case)}", pytrace=False)
    return found


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
        for what in ("cache_copies", "cache_rewrites", "table_copies"):
            allowed = 0 if _is_a_round(measured.case, name) else getattr(before, what)
            assert getattr(part, what) <= allowed, f"{getattr(part, what)} {what} in {name}; {allowed} are allowed"
        assert part.copied <= budget(before.copied), f"{part.copied:,} bytes in {name}, {before.copied:,} before"


def test_temporary_memory_is_bounded(measured: Measured, reached: Measured, check: Check) -> None:
    temp, before = measured.deep.memory["temp"], reached.deep.memory["temp"]
    check.number(temporary_mib=round(temp / _MIB, 1), temporary_mib_allowed=round(budget(before) / _MIB, 1))
    assert temp <= budget(before) + _MIB, f"{temp:,} bytes beside arguments and results, {before:,} before"


def test_launches_keep_within_their_budget(measured: Measured, reached: Measured, check: Check) -> None:
    """Per layer, from two depths, and outside the layers."""
    for name, part in measured.deep.parts.items():
        found = measured.per_layer(name), measured.outside(name)
        allowed = budget(reached.per_layer(name)), budget(reached.outside(name))
        check.number(**{f"launches a layer, {name}": found[0], f"launches outside, {name}": found[1]})
        for words, launches, most in zip(("a layer", "outside the layers"), found, allowed, strict=True):
            assert (launches or 0) <= most, (
                f"{launches:g} launches {words} in {name}, {most} are allowed; by scope: {part.scopes}. "
                f"If that is worth it: {_command(measured.case)}"
            )
        collectives = reached.deep.parts[name].collectives
        for kind, count in part.collectives.items():
            assert count <= collectives.get(kind, 0), f"{count} {kind} in {name}, {collectives.get(kind, 0)} before"


def _is_a_round(case: Case, part: str) -> bool:
    return part == "round" or case.program == "step"


def _command(case: Case) -> str:
    words = f"--platform {case.platform} --target {case.target} --program {case.program} --draft {case.draft} "
    return _NAMED.format(words + f"--batch {case.batch}" + " --sampled" * case.sampled)
