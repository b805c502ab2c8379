"""Pages, notebooks and the help of commands avoid words that readers of earlier versions had to read twice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pages import prose_of

from eagle3_jax.cli._commands import app

ROOT = Path(__file__).parent.parent.parent
# Each pattern, and the words to write instead.
BANNED = {
    r"beside": "next to, compared with",
    r"dear(er|est|ly)?": "slow, expensive",
    r"hangs? on": "depends on",
    r"laws?": "distribution",
    r"planted": "injected",
    r"drawn": "sampled; a picture is made",
    r"whoever|somebody|nobody": "name the person or the thing",
    r"one's own": "your own, its own",
    r"stands(?! for\b)": "is",
    r"lies": "is",
    r"(nobody|what|where|who) says": "default, if X is set",
    r"refused by name": "unsupported",
    r"fall otherwise": "approximately tied logits",
    r"not nearly": "say the fact alone",
}
ALLOWED = r"law of total \w+|(Amdahl|Little)'s law|\]\([^)]*\)|https?://\S+"
CHECKED = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in BANNED), re.IGNORECASE)


def pages() -> Iterator[Path]:
    built = ("_build", "notebooks", "repository")
    yield from (path for path in (ROOT / "docs").rglob("*.md") if path.relative_to(ROOT / "docs").parts[0] not in built)
    yield from (ROOT / f"{name}README.md" for name in ("", "notebooks/", "notebooks/gpu/", "validation/"))
    yield from (ROOT / "notebooks").rglob("[0-9]*.ipynb")


def read(path: Path) -> str:
    """The prose of a page, or of the Markdown cells of a notebook."""
    if path.suffix == ".md":
        return prose_of(path.read_text(encoding="utf-8"))
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(prose_of("".join(cell["source"])) for cell in cells if cell["cell_type"] == "markdown")


def find_banned_words(text: str) -> list[str]:
    """Each banned word with its neighbours."""
    text = " ".join(re.sub(ALLOWED, "", text).split())
    return [text[max(found.start() - 40, 0) : found.end() + 30] for found in CHECKED.finditer(text)]


def test_a_banned_word_is_found_and_an_allowed_one_is_not() -> None:
    assert find_banned_words("It hangs\non the machine, beside a law.") != []
    assert find_banned_words("The law of total variance; `V` stands for the vocabulary; besides.") == []


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in sorted(pages())])
def test_a_page_uses_plain_words(path: Path) -> None:
    assert find_banned_words(read(path)) == []


def test_the_help_of_commands_uses_plain_words() -> None:
    def check(command: Any) -> None:
        for text in (command.help, *(getattr(one, "help", None) for one in command.params)):
            assert find_banned_words(text or "") == [], command.name
        for one in getattr(command, "commands", {}).values():
            check(one)

    check(typer.main.get_command(app))
