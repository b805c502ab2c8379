"""Pages, notebooks, commands and code avoid words that readers had to read twice."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
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
    # "There is no X" stays, and so do comparisons.
    r"(?<!there )(is|are|was|were) no (?!(longer|more|less|better|worse|deeper)\b)\w+": "is not a",
}
# Parts of names in snake case.
BANNED_PARTS = re.compile(
    r"(?<![a-z])(laws?|drawn|beside|planted|somebody|nobody|whoever)(?![a-z])", re.IGNORECASE
)
CODE = ("eagle3_jax", "conversion", "validation", "examples", "tests", "docs", "notebooks")
# The number of words that a folder still has. It may only fall.
REMAINING: dict[str, int] = {}
ALLOWED = r"law of total \w+|(Amdahl|Little)'s law|\]\([^)]*\)|https?://\S+"
CHECKED = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in BANNED), re.IGNORECASE)


def pages() -> Iterator[Path]:
    built = ("_build", "notebooks", "repository")
    yield from (
        path
        for path in (ROOT / "docs").rglob("*.md")
        if path.relative_to(ROOT / "docs").parts[0] not in built
    )
    yield from (
        ROOT / f"{name}README.md" for name in ("", "notebooks/", "notebooks/gpu/", "validation/")
    )
    yield from (ROOT / "notebooks").rglob("[0-9]*.ipynb")


def read(path: Path) -> str:
    """The prose of a page, or of the Markdown cells of a notebook."""
    if path.suffix == ".md":
        return prose_of(path.read_text(encoding="utf-8"))
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(
        prose_of("".join(cell["source"])) for cell in cells if cell["cell_type"] == "markdown"
    )


def find_banned_words(text: str) -> list[str]:
    """Each banned word with its neighbours."""
    text = " ".join(re.sub(ALLOWED, "", text).split())
    return [text[max(match.start() - 40, 0) : match.end() + 30] for match in CHECKED.finditer(text)]


def test_a_banned_word_is_found_and_an_allowed_one_is_not() -> None:
    assert find_banned_words("It hangs\non the machine, beside a law.") != []
    assert find_banned_words("A gap is no\nmeasure.") != []
    assert find_banned_words("There is no mask. A tree is no worse; it is no longer slow.") == []
    assert (
        find_banned_words("The law of total variance; `V` stands for the vocabulary; besides.")
        == []
    )


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in sorted(pages())]
)
def test_a_page_uses_plain_words(path: Path) -> None:
    assert find_banned_words(read(path)) == []


def test_the_help_of_commands_uses_plain_words() -> None:
    def check(command: Any) -> None:
        for text in (command.help, *(getattr(option, "help", None) for option in command.params)):
            assert find_banned_words(text or "") == [], command.name
        for subcommand in getattr(command, "commands", {}).values():
            check(subcommand)

    check(typer.main.get_command(app))


def read_code(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the words of each banned word in docstrings, in comments and in names."""
    # Words that a line break separates in a comment count too.
    words = " ".join(source.replace("#", " ").split())
    if not CHECKED.search(words) and not BANNED_PARTS.search(source):
        return

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            for words in find_banned_words(without_code(ast.get_docstring(node) or "")):
                yield node.body[0].lineno, words

    names = set()
    comment = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if (
            token.type == tokenize.NAME
            and BANNED_PARTS.search(token.string)
            and token.string not in names
        ):
            names.add(token.string)
            yield token.start[0], token.string
        elif token.type == tokenize.COMMENT:
            # A sentence may continue on the next line.
            comment += " " + token.string.lstrip("#: ")
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT) and comment:
            yield from (
                (token.start[0], words) for words in find_banned_words(without_code(comment))
            )
            comment = ""


def without_code(text: str) -> str:
    return re.sub(r"``.*?``|`[^`]*`", "", text, flags=re.DOTALL)


def test_a_banned_word_of_code_is_found_and_an_allowed_one_is_not() -> None:
    source = (
        "'The `law` of one.'\nthe_law = lawful = 1  # drawn\n# It hangs\n# on it.\n"
        "def f():\n    'Nobody.'\n"
    )
    words = [words for _, words in read_code(source)]
    assert words == ["Nobody.", "the_law", "drawn", "It hangs on it."]


@pytest.mark.parametrize("folder", CODE)
def test_code_uses_plain_words(folder: str) -> None:
    paths = [
        path
        for path in (ROOT / folder).rglob("*.py")
        if ROOT / "eagle3_jax" / "conversion" not in path.parents
    ]
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path in sorted(paths)
        for line, words in read_code(path.read_text(encoding="utf-8"))
    ]
    assert len(problems) <= REMAINING.get(folder, 0), "\n".join(problems)


def test_words_of_a_comment_may_be_on_two_lines() -> None:
    assert [words for _, words in read_code("# A gap is\n# no measure.\nx = 1\n")] == [
        "A gap is no measure."
    ]
