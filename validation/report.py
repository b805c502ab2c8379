"""Writes the record of a run, ``report.json``, and its page, which needs jinja2."""

from __future__ import annotations

from pathlib import Path

from eagle3_jax.measure.tables import flat, show, write_text
from validation.runs import Report, Verdict, load

# Colors are never used without a sign and a word.
SIGNS = {
    Verdict.PASSED: "✓",
    Verdict.QUICK: "✓",
    Verdict.FAILED: "✗",
    Verdict.PARTLY: "◐",
    Verdict.NOT_RUN: "○",
}


def write(report: Report, directory: str | Path, *, page: bool = True) -> Path:
    """Writes ``report.json`` and the page, each complete or not at all.

    Without jinja2 an earlier page is removed, because it belongs to another run.

    Returns:
        The file of the page, or of the JSON if no page was written.
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
    values = {"report": load(data), "signs": SIGNS, "Verdict": Verdict, "flat": flat}
    write_text(html, environment.get_template("report.html.jinja").render(values))
    return html
