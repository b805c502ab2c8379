"""The report of ``pytest validation``: what its verdicts may say, what it writes, what it shows."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from eagle3_jax.reporting.tables import Plot, Table
from validation.checks import Check, Verdict
from validation.comparison import compare
from validation.levels import LEVELS
from validation.report import main, write
from validation.runs import Report, load

ROOT = Path(__file__).parent.parent
PASSED, FAILED, PARTLY, NOT_RUN = Verdict.PASSED, Verdict.FAILED, Verdict.PARTLY, Verdict.NOT_RUN


def run_of(*verdicts: Verdict, level: str = "L5", **fields) -> Report:
    checks = [Check(level, f"check {i}", verdict, f"reason {i}") for i, verdict in enumerate(verdicts)]
    return Report(checks=checks, **fields)


def full_run(**fields) -> Report:
    return Report(checks=[Check(level.name, "all", PASSED) for level in LEVELS], **fields)


@pytest.fixture
def rich() -> Report:
    """A report with everything that a report can hold, some of it hostile."""
    check = Check("L8", "<script>alert(1)</script>", PASSED, seconds=2.5)
    check.number(tau=np.float32(3.25), rounds=np.int64(7), lost=float("nan"), bound=-math.inf, exact=np.bool_(True))
    check.table("by <K>", ["K", "τ"], [[np.int32(3), np.float64("inf")], [5, None]])
    check.plot("Line & $x$", "line", "K <tokens>", "τ (tokens)", {"<b>ours</b>": ([1, 2], [1.0, math.nan])})
    check.plot("Bars", "bar", "set", "speed (tokens/s)", {"a": (["x", "y"], [1, 2]), "b": (["y"], [3])})
    check.plot("Dots", "scatter", "position", "gap", {"a": (np.arange(2), np.ones(2))})
    return Report(
        environment={"versions": {"jax": "0.10"}, "path": Path("/home/somebody/model")},
        checks=[check, Check("L5", "against vLLM", NOT_RUN, "no <vLLM> here")],
        started="2026-01-01T00:00:00+00:00",
        seconds=3.5,
        command="pytest validation -k '<x>'",
        skipped=["test_y.py: could not import '<z>'"],
    )


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([PASSED], PASSED),
        ([PASSED, PASSED], PASSED),
        ([PASSED, FAILED, NOT_RUN], FAILED),
        ([NOT_RUN, FAILED], FAILED),
        ([PASSED, NOT_RUN], PARTLY),
        ([PASSED, PARTLY], PARTLY),
        ([PARTLY], PARTLY),
        ([NOT_RUN, NOT_RUN], NOT_RUN),
        ([], NOT_RUN),
    ],
)
def test_a_level_is_green_only_if_everything_ran_and_passed(verdicts: list[Verdict], expected: Verdict) -> None:
    assert run_of(*verdicts).levels["L5"].verdict == expected


def test_the_reason_of_a_level_names_what_did_not_pass() -> None:
    assert run_of(PASSED, FAILED, NOT_RUN)["L5"].reason == "check 1: reason 1"
    assert run_of(PASSED, NOT_RUN)["L5"].reason == "check 1: reason 1"
    assert run_of(PASSED)["L5"].reason == ""
    skipped = Report(checks=[Check("L5", name, reason="no vLLM") for name in "ab"])
    assert skipped["L5"].reason == "no vLLM"
    assert "deselected" in Report()["L5"].reason
    assert Report()["L7"].reason == "only with --gpu"
    assert "deselected" in Report(gpu=True)["L7"].reason


def test_a_run_passes_only_as_a_whole() -> None:
    assert full_run().verdict == PASSED and full_run().summary == "Every level passed."
    missing = full_run()
    missing.checks.pop(5)
    assert missing.verdict == PARTLY
    assert LEVELS[5].name in missing.summary and "not proven" in missing.summary
    assert full_run(skipped=["test_x.py: no torch"]).verdict == PARTLY
    assert full_run(errors=["test_x.py: SyntaxError"]).verdict == FAILED
    assert full_run(gpu=True, rehearsal=True).verdict == PARTLY
    assert full_run(gpu=True, rehearsal=True).summary.startswith("Rehearsal")
    assert Report().verdict == NOT_RUN and "Nothing" in Report().summary


def test_complete_asks_for_gpu_levels_only_in_a_run_with_a_gpu() -> None:
    without = [check for check in full_run().checks if check.level != "L7"]
    assert Report(checks=without).incomplete() == []
    assert [line.split()[0] for line in Report(checks=without, gpu=True).incomplete()] == ["L7"]
    assert full_run(skipped=["test_x.py: no torch"]).incomplete()


def test_numbers_of_a_level_are_found_by_name(rich: Report) -> None:
    assert rich["L8"].numbers["rounds"] == 7
    assert rich.table("L8", "by <K>").column("K") == [3, 5]
    with pytest.raises(KeyError, match="by <K>"):
        rich.table("L8", "by K")
    two = Report(checks=[Check("L0", name, numbers={"n": n, "once": 1}) for name, n in (("a", 10), ("b", 2000))])
    two.checks[1].numbers.pop("once")
    assert two["L0"].numbers == {"a: n": 10, "once": 1, "b: n": 2000}
    assert two["L0"].headline == "n 10 to 2,000, once 1"


def test_the_smallest_deviation_that_a_check_would_have_seen_stands_beside_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_of(PASSED, PASSED)
    report.checks[0].sees = "0.5 % rms of the cells' masses, in <L5>"
    again = Report.from_json(report.to_json())
    assert [check.sees for check in again.checks] == [report.checks[0].sees, ""]
    assert again["L5"].sees == [report.checks[0].sees]
    assert f"| L5 | check 0 | {report.checks[0].sees} |" in compare(report, again).to_markdown()
    write(report, tmp_path)
    assert main(["show", str(tmp_path)]) == 0
    assert f"would have seen: {report.checks[0].sees}" in capsys.readouterr().out
    pytest.importorskip("jinja2")
    page = (tmp_path / "report.html").read_text()
    assert page.count("would have seen") == 2, "among the levels and beside the check, and for no check without one"
    assert "in &lt;L5&gt;" in page


def test_a_report_from_before_deviations_were_kept_is_still_read() -> None:
    old = json.loads(run_of(PASSED).to_json())
    for check in old["checks"]:
        del check["sees"]
    assert Report.from_json(json.dumps(old))["L5"].sees == []


def test_data_that_cannot_be_shown_is_refused_where_it_is_given() -> None:
    check = Check("L0", "x")
    with pytest.raises(ValueError, match="2 columns"):
        check.table("t", ["a", "b"], [[1]])
    with pytest.raises(ValueError, match="line, bar or scatter"):
        check.plot("p", "pie", "x", "y", {})
    with pytest.raises(ValueError, match="2 xs and 1 ys"):
        check.plot("p", "bar", "x", "y", {"a": ([1, 2], [1])})


# ---------------------------------------------------------------- files


def strict(text: str) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_strict_and_says_the_verdicts(rich: Report) -> None:
    data = strict(rich.to_json())
    assert data["schema_version"] == 1
    assert data["checks"][0]["numbers"] == {"tau": 3.25, "rounds": 7, "lost": None, "bound": None, "exact": True}
    assert data["checks"][0]["tables"][0]["rows"] == [[3, None], [5, None]]
    assert data["levels"]["L8"]["verdict"] == "passed" and data["levels"]["L5"]["reason"] == "no <vLLM> here"
    assert data["environment"]["path"] == "model", "a directory of this machine is nobody's business"


def test_reading_gives_what_was_written(rich: Report) -> None:
    once = Report.from_json(rich.to_json())
    assert Report.from_json(once.to_json()) == once
    assert isinstance(once.checks[0].tables[0], Table) and isinstance(once.checks[0].plots[0], Plot)
    assert once.checks[0].plots[1].series == {"a": (["x", "y"], [1, 2]), "b": (["y"], [3])}
    assert [result.verdict for result in once.levels.values()] == [result.verdict for result in rich.levels.values()]


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run_of(PASSED), tmp_path)
    monkeypatch.setattr(Path, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(run_of(FAILED), tmp_path)
    assert load(tmp_path)["L5"].verdict == PASSED
    assert {path.name for path in tmp_path.iterdir()} <= {"report.json", "report.html"}


def test_without_jinja2_there_is_no_page_rather_than_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.html").write_text("of an earlier run")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    for name in ("validation.page", "eagle3_jax.reporting.drawing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert write(run_of(PASSED), tmp_path) == tmp_path / "report.json"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "not valid JSON"),
        ("[]", "schema version None"),
        ('{"schema_version": 2}', "schema version 2, and this program reads version 1"),
        ('{"schema_version": 1}', "not a validation report: KeyError"),
        (run_of(PASSED).to_json().replace('"passed"', '"excellent"'), "'excellent' is not a valid Verdict"),
        (run_of(PASSED).to_json().replace('"level": "L5"', '"level": "L99"'), "unknown level 'L99'"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load(tmp_path)
    assert "\n" not in str(error.value) and "report.json" in str(error.value)
    assert main(["show", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and message in printed.err


# ---------------------------------------------------------------- comparison


def test_comparing_two_runs_shows_verdicts_numbers_and_what_differed_around_them(tmp_path: Path) -> None:
    old = run_of(PASSED, environment={"date": "1", "versions": {"jax": "0.9", "numpy": "2"}})
    new = run_of(FAILED, environment={"date": "2", "versions": {"jax": "0.10", "numpy": "2"}})
    old.checks[0].number(tau=2.0, zero=0, gone=1, text="a|b", flag=True)
    new.checks[0].number(tau=np.float32(3.0), zero=5, come=float("nan"))
    found = compare(old, new)
    changed = [(change.level, change.old, change.new) for change in found.verdicts if change.old != change.new]
    assert changed == [("L5", PASSED, FAILED)] and len(found.verdicts) == len(LEVELS)
    assert [(row.name, row.old, row.new, row.ratio) for row in found.rows] == [
        ("tau", 2.0, 3.0, 1.5),
        ("zero", 0, 5, None),
        ("gone", 1, None, None),
    ]
    assert [(fact.name, fact.old, fact.new) for fact in found.facts] == [("versions.jax", "0.9", "0.10")]
    text = found.to_markdown()
    assert "| L5 | passed | failed | changed |" in text
    assert "| L5 | check 0 | tau | 2 | 3 | 1.5 |" in text
    assert "| versions.jax | 0.9 | 0.10 |" in text


def test_the_command_line_compares_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_of(PASSED), tmp_path / "a")
    write(run_of(NOT_RUN), tmp_path / "b")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b" / "report.json")]) == 0
    assert "| L5 | passed | not run | changed |" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "b")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(LEVELS) and any(line.startswith("NOT RUN     L5") for line in lines)


# ---------------------------------------------------------------- the page


def test_the_page_escapes_everything_and_loads_nothing(tmp_path: Path, rich: Report) -> None:
    pytest.importorskip("jinja2")
    page = write(rich, tmp_path).read_text()
    for hostile in ("<script", "<vLLM>", "<z>", "<x>", "<K>", "<tokens>", "<b>"):
        assert hostile not in page, hostile
    assert "&lt;script&gt;alert(1)" in page
    addresses = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)|url\(([^)]*)\)|@import""", page)
    assert all((one or other).startswith("#") for one, other in addresses), addresses


def test_the_page_says_each_verdict_in_words(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    page = write(run_of(PASSED, NOT_RUN), tmp_path).read_text()
    section = re.search(r'<section id="L5">.*?</section>', page, re.DOTALL)[0]
    assert "partly run" in section and "reason 1" in section
    assert "Not run, so not proven" in page and "Every level passed" not in page
    rehearsal = write(full_run(gpu=True, rehearsal=True), tmp_path).read_text()
    assert "nothing measured here counts" in rehearsal


def test_long_tables_are_folded(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    report = run_of(PASSED)
    report.checks[0].table("long", ["i"], [[i] for i in range(31)])
    report.checks[0].table("short", ["i"], [[i] for i in range(30)])
    assert re.findall(r"<summary>(\d+) rows</summary>", write(report, tmp_path).read_text()) == ["31"]


def test_plots_are_drawn_into_the_page(tmp_path: Path, rich: Report) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    page = write(rich, tmp_path).read_text()
    assert page.count("<svg ") == 3 and 'aria-label="Bars: speed (tokens/s) over set"' in page
    drawing = re.search(r"<svg .*?</svg>", page, re.DOTALL)[0]
    assert "K &lt;tokens&gt;" in drawing and "currentColor" in drawing and "#010203" not in page


def test_without_matplotlib_the_page_has_the_numbers(
    tmp_path: Path, rich: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = write(rich, tmp_path).read_text()
    assert "<svg" not in page and page.count("matplotlib is not installed") == 3
    assert "K &lt;tokens&gt;" in page
