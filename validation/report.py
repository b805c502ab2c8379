"""Reports of earlier runs: show, compare, merge, and write the page.

    python -m validation.report show DIR          # print the verdicts of a run
    python -m validation.report compare OLD NEW   # print what changed between two runs, as Markdown
    python -m validation.report merge DIR... -o DIR   # write one report of runs that each did a part

The page needs jinja2; without it there is the JSON alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.bench.tables import flat, show, to_markdown, write_text
from validation.levels import BY_NAME
from validation.runs import Check, Report, Verdict, load, plain, verdict_lines

# A color is never alone: each verdict has a sign and its word.
SIGNS = {Verdict.PASSED: "✓", Verdict.FAILED: "✗", Verdict.PARTLY: "◐", Verdict.NOT_RUN: "○"}


def write(report: Report, directory: str | Path, *, page: bool = True) -> Path:
    """Write ``report.json`` and ``report.html``, each whole or not at all; returns the page, or the JSON without one.

    Without jinja2 an earlier page is removed, because it belongs to another run.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / "report.json"
    html = directory / "report.html"
    write_text(data, report.to_json())
    if not page:
        return data
    try:
        import jinja2
    except ModuleNotFoundError:
        html.unlink(missing_ok=True)
        return data
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["show"] = show
    # The page shows numbers as the JSON has them, so the two never differ.
    values = {"report": Report.from_json(data.read_text("utf-8")), "signs": SIGNS, "Verdict": Verdict, "flat": flat}
    write_text(html, environment.get_template("report.html.jinja").render(values))
    return html


# ---------------------------------------------------------------- two runs


def compare(old: Report, new: Report) -> str:
    """Markdown tables of verdicts, numbers, detectable deviations, and differences of the environment."""
    before = old.levels
    after = new.levels
    verdicts = [(name, before[name].verdict, after[name].verdict) for name in before]
    parts = [to_markdown(["level", "old", "new", ""], [[*one, "changed" * (one[1] != one[2])] for one in verdicts])]
    first = _numbers(old)
    second = _numbers(new)
    rows = []
    for key in sorted({**first, **second}, key=lambda key: list(BY_NAME).index(key[0])):  # stable within a level
        one = first.get(key)
        other = second.get(key)
        rows.append([*key, show(one), show(other), show(other / one if one and other is not None else None)])
    if rows:
        parts.append(to_markdown(["level", "check", "number", "old", "new", "ratio"], rows))
    if sees := [(check.level, check.name, check.sees) for check in new.checks if check.sees]:
        parts.append(to_markdown(["level", "check", "would have seen, with 90 % power"], sees))
    here = dict(flat(old.environment))
    there = dict(flat(new.environment))
    changed = [key for key in {**here, **there} if key != "date" and here.get(key) != there.get(key)]
    if changed:
        facts = [[key, show(here.get(key)), show(there.get(key))] for key in changed]
        parts.append(to_markdown(["environment", "old", "new"], facts))
    return "\n\n".join(parts) + "\n"


def _numbers(report: Report) -> dict[tuple[str, str, str], float]:
    return {
        (check.level, check.name, name): value
        for check in report.checks
        if check.level in BY_NAME
        for name, value in plain(check.numbers).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


# ---------------------------------------------------------------- one report of several runs

# Facts that parts may differ in: the time, files next to the code (the code has its own hash), the words of the
# hub, and the kernel and the memory of hosts with the same processor and device.
_MAY_DIFFER = ("date", "git.dirty", "subject.not the default", "platform", "cpu.memory_gib")
_WHERE_NEEDED = ("subject", "vllm", "vllm warning")  # facts that only some parts have
_WORST_FIRST = (Verdict.FAILED, Verdict.PARTLY, Verdict.PASSED)


def merge(parts: Mapping[str, Report]) -> Report:
    """All checks of all parts. Of a check that ran in several parts, the latest run counts, or the worst verdict.

    Args:
        parts: Reports by the names that messages use for them; at least one.

    Raises:
        ValueError: Two of them have another kind of machine, other versions or other models.
    """
    reports = sorted(parts.values(), key=lambda report: report.started)
    _refuse_strangers(parts)
    found: dict[tuple[str, str], list[tuple[str, str, Check]]] = {}
    for name, report in parts.items():
        for check in report.checks:
            found.setdefault((check.level, check.name), []).append((report.started, name, check))
    environment: dict[str, Any] = {}
    for report in reports:
        environment |= report.environment
    joined = lambda name: list(dict.fromkeys(line for report in reports for line in getattr(report, name)))
    return dataclasses.replace(
        reports[0],
        environment=environment,
        checks=[_merge_check(sorted(runs, key=lambda run: run[0])) for runs in found.values()],
        seconds=sum(report.seconds for report in reports),
        command="python -m validation.report merge",
        errors=joined("errors"),
        skipped=joined("skipped"),
        aot=joined("aot"),
        parts=[command for report in reports for command in report.parts or [report.command]],
    )


def _refuse_strangers(parts: Mapping[str, Report]) -> None:
    first = next(iter(parts))
    known: dict[str, tuple[str, Any]] = {}
    for name, report in parts.items():
        facts = {key: value for key, value in flat(report.environment) if key not in _MAY_DIFFER}
        facts |= {f"the manifest of {level}": repr(rows) for level, rows in report.manifest.items()}
        facts |= {"--gpu": report.gpu, "--rehearse": report.rehearsal}
        for key in {**known, **facts}:
            if key.partition(".")[0] in _WHERE_NEEDED and not (key in known and key in facts):
                continue
            other, there = known.get(key, (first, None))
            if facts.get(key) != there and name != first:
                raise ValueError(
                    f"{other} and {name} differ in {key} ({show(there)}, {show(facts.get(key))}); "
                    "only runs on the same device with the same versions and models can be merged"
                )
        known |= {key: (name, value) for key, value in facts.items() if key not in known}


def _merge_check(runs: list[tuple[str, str, Check]]) -> Check:
    """One check of several runs, oldest first."""
    ran = [(part, check) for _, part, check in runs if check.verdict is not Verdict.NOT_RUN]
    if not ran:
        told = [check for _, _, check in runs if not check.deselected]
        return (told or [check for _, _, check in runs])[-1]
    if len({check.verdict for _, check in ran}) == 1:
        return ran[-1][1]
    worst = next(check for verdict in _WORST_FIRST for _, check in reversed(ran) if check.verdict is verdict)
    story = "; ".join(f"{check.verdict} in {part}" for part, check in ran)
    told = f"{len(ran)} runs of it contradict each other ({story})"
    return dataclasses.replace(worst, reason=f"{told}: {worst.reason}" if worst.reason else told)


# ---------------------------------------------------------------- the command line


def main(arguments: list[str] | None = None) -> int:
    """``python -m validation.report``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.report", description="Earlier runs of pytest validation."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{show,compare,merge}")
    showing = commands.add_parser("show", help="print the verdicts of a run")
    showing.add_argument("run", help="directory or report.json")
    comparing = commands.add_parser("compare", help="print what changed between two runs, as Markdown")
    comparing.add_argument("old", help="directory or report.json")
    comparing.add_argument("new", help="directory or report.json")
    merging = commands.add_parser("merge", help="write one report of runs that each did a part")
    merging.add_argument("part", nargs="+", help="directory or report.json")
    merging.add_argument("-o", "--output", required=True, metavar="DIR", help="where the merged report is written")
    options = parser.parse_args(arguments)
    try:
        if options.command == "compare":
            print(compare(load(options.old), load(options.new)), end="")
        elif options.command == "merge":
            report = merge({part: load(part) for part in options.part})
            written = write(report, options.output)
            _print(report)
            print(f"Report: {written}")
        else:
            _print(load(options.run))
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


def _print(report: Report) -> None:
    print(report.summary)
    print(f"Compared: {report.compared}")
    for _, line in verdict_lines(report):
        print(line)
    for result in report.levels.values():
        for deviation in result.sees:
            print(f"{result.level.name} would have seen: {deviation}")


if __name__ == "__main__":
    sys.exit(main())
