"""The page of published models says what the library says of each today."""

from __future__ import annotations

import published


def test_the_page_is_what_the_library_answers() -> None:
    assert published.PAGE.read_text(encoding="utf-8") == published.page(), (
        "run python docs/recorded/published.py"
    )
