"""A claim of docs/articles.md is an article's only if quotations.toml has the article's words."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "articles.md").read_text(encoding="utf-8")
ARTICLES = tomllib.loads((Path(__file__).parent / "quotations.toml").read_text(encoding="utf-8"))
# Names of options, metrics and variables count as quoted words.
NAMES = r"`(--[\w-]+|vllm:\w+|[A-Z_0-9]+=\d|\w*(?:speculative|spec_decode|accepted_tokens)\w*)"


def test_claims_are_in_the_words_of_their_sources() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines()]
    attributed = [
        row for row in rows if len(row) == 4 and row[2].startswith("**") and row[1] != "–"
    ]

    for claim, names, _, _ in attributed:
        sources = ["\n".join(ARTICLES[name]["quotations"]) for name in names.split(", ")]
        words = [*re.findall(r"“([^”]+)”", claim), *re.findall(NAMES, claim)]
        assert words, f"nothing is quoted: {claim}"
        assert [
            quotation for quotation in words if not any(quotation in source for source in sources)
        ] == []

    assert {name for row in attributed for name in row[1].split(", ")} == set(ARTICLES)
