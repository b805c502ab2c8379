"""The page of published models says what the library says of each today."""

from __future__ import annotations

import published_models


def test_the_page_is_what_the_library_answers() -> None:
    assert published_models.PAGE.read_text(encoding="utf-8") == published_models.page(), (
        "run python docs/recorded/published_models.py"
    )
