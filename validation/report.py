"""Runs as JSON for machines and as one page for people.

    python -m validation.report show DIR          # the verdicts of an earlier run
    python -m validation.report compare OLD NEW   # what changed between two of them, as Markdown
    python -m validation.report page DIR          # write the page again, such as where matplotlib is installed
    python -m validation.report merge DIR... -o DIR   # one report of runs that each did a part

The page needs jinja2; without it there is the JSON alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eagle3_jax.reporting.tables import write_text
from validation.comparison import compare
from validation.merging import merge
from validation.runs import Report, load, verdict_lines


def write(report: Report, directory: str | Path) -> Path:
    """Write ``report.json`` and ``report.html``, each whole or not at all, and say where the best of them is.

    Without jinja2 there is no page, and an earlier one is removed: it would be another run's.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    data, page = directory / "report.json", directory / "report.html"
    write_text(data, report.to_json())
    # Numbers are read as a notebook would read them, so that page and JSON never differ.
    text = _page(Report.from_json(data.read_text("utf-8")))
    if text is None:
        page.unlink(missing_ok=True)
        return data
    write_text(page, text)
    return page


def _page(report: Report) -> str | None:
    try:
        from validation.page import render
    except ModuleNotFoundError as error:
        if error.name != "jinja2":
            raise
        return None
    return render(report)


def main(arguments: list[str] | None = None) -> int:
    """``python -m validation.report``."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.report", description="Earlier runs of pytest validation."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{show,compare,page,merge}")
    for name, text in (("show", "print the verdicts of a run"), ("page", "write the page of a run again")):
        commands.add_parser(name, help=text).add_argument("run", help="directory or report.json")
    comparing = commands.add_parser("compare", help="print what changed between two runs, as Markdown")
    comparing.add_argument("old", help="directory or report.json")
    comparing.add_argument("new", help="directory or report.json")
    merging = commands.add_parser("merge", help="write one report of runs that each did a part")
    merging.add_argument("part", nargs="+", help="directory or report.json")
    merging.add_argument("-o", "--output", required=True, metavar="DIR", help="where the merged report is written")
    options = parser.parse_args(arguments)
    try:
        if options.command == "compare":
            print(compare(load(options.old), load(options.new)).to_markdown(), end="")
            return 0
        if options.command == "merge":
            report = merge({part: load(part) for part in options.part})
            written = write(report, options.output)
            _print(report)
            print(f"Report: {written}")
            return 0
        report = load(options.run)
        if options.command == "page":
            directory = Path(options.run)
            written = write(report, directory if directory.is_dir() else directory.parent)
            if written.suffix != ".html":
                raise ValueError("the page needs jinja2: pip install 'eagle3-jax[validation]'")
            print(written)
            return 0
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    _print(report)
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
