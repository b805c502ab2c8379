"""The page of a report: one file that loads nothing, for wide and narrow screens, light and dark."""

from __future__ import annotations

from pathlib import Path

from eagle3_jax.reporting.drawing import render as fill_in
from validation.checks import Verdict
from validation.runs import Report

# A colour is never alone: each verdict has a sign and its word.
SIGNS = {Verdict.PASSED: "✓", Verdict.FAILED: "✗", Verdict.PARTLY: "◐", Verdict.NOT_RUN: "○"}


def render(report: Report) -> str:
    """The whole page."""
    template = Path(__file__).with_name("report.html.jinja")
    return fill_in(template, report=report, signs=SIGNS, Verdict=Verdict)
