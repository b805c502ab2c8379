"""A claim on docs/articles.md is attributed to an article only if the article's own words are in quotations.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "articles.md").read_text(encoding="utf-8")
ARTICLES = tomllib.loads((Path(__file__).parent / "quotations.toml").read_text(encoding="utf-8"))
VERDICTS = {"True", "Partly true", "Misleading", "False", "Outdated", "Unverified"}
NAMES = r"`(--[\w-]+|vllm:\w+|[A-Z_0-9]+=\d|\w*(?:speculative|spec_decode|accepted_tokens)\w*)"


def claims() -> Iterator[tuple[str, list[str], str, str]]:
    """Claim, sources, verdict and reason of each row."""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 4 and (found := re.fullmatch(r"\*\*([\w ]+)\*\*", cells[2])):
            yield cells[0], [] if cells[1] == "–" else cells[1].split(", "), found[1], cells[3]


def words_of(source: str) -> str:
    return "\n".join(ARTICLES[source]["quotations"])


@pytest.mark.parametrize("row", list(claims()), ids=lambda row: row[0][:40])
def test_a_claim_is_in_the_words_of_its_source(row: tuple[str, list[str], str, str]) -> None:
    claim, sources, verdict, _ = row
    assert verdict in VERDICTS
    quoted = [*re.findall(r"“([^”]+)”", claim), *re.findall(NAMES, claim)]
    assert quoted or not sources, "a source is named for words that are not quoted"
    for words in quoted if sources else []:
        assert any(words in words_of(source) for source in sources), f"{sources} do not say {words!r}"
    for source in sources:
        assert any(words in words_of(source) for words in quoted), f"no word of {source} is quoted"


def test_the_page_names_every_source_in_full() -> None:
    for name, article in ARTICLES.items():
        assert f"| **{name}** | [{article['title']}]({article['link']}) | {article['author']}, " in PAGE
    assert {source for _, sources, _, _ in claims() for source in sources} == set(ARTICLES)
