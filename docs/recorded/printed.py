"""Writes what README's first program prints, below it: ``python docs/recorded/printed.py``.

The program downloads a model, so a nightly test compares the two instead of every commit. CPUs with
other instructions round sums differently, and a greedy text parts where two tokens are nearly tied.
So its question is one for which they never are: the likeliest token is ahead by 0.4 or more at each
position, and programs for AVX-512, AVX2 and SSE 4.2 print the same.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

from page_tables import ROOT

README = ROOT / "README.md"
_SHOWN = re.compile(r"```py\n(?P<program>.*?)```\n\n```text\n(?P<output>.*?)```", re.DOTALL)


def shown() -> tuple[str, str]:
    """Returns the program on the page, and the words that it prints."""
    match = _SHOWN.search(README.read_text(encoding="utf-8"))
    if match is None:
        raise ValueError(f"{README} has no block of py with a block of text after it")
    return match["program"], " ".join(match["output"].split())


def printed() -> str:
    """Runs the program in a process of its own, and returns the words that it prints."""
    command = [sys.executable, "-c", shown()[0]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


if __name__ == "__main__":
    page = README.read_text(encoding="utf-8")
    start, end = _SHOWN.search(page).span("output")  # type: ignore[union-attr]
    words = textwrap.fill(printed(), 118)
    README.write_text(f"{page[:start]}{words}\n{page[end:]}", encoding="utf-8")
