"""A headless Chromium for tests of pages; without one the tests skip."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextlib.contextmanager
def browsing(*, width: int = 1280, height: int = 900, scheme: str = "light") -> Iterator[Any]:
    """Yields a page of playwright. An error of its script fails the test."""
    sync_api = pytest.importorskip(
        "playwright.sync_api",
        reason="playwright is not installed; pip install 'eagle3-jax[dev]' has it",
    )
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        pytest.skip(f"there is no browser: none of {', '.join(_PROGRAMS)} is on the PATH")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        errors: list[Any] = []
        page.on("pageerror", lambda error: errors.append(error))

        def listen(message: Any) -> None:
            # The status code of an answer is not an error of the page.
            is_refusal = message.text.startswith("Failed to load resource")
            if message.type == "error" and not is_refusal:
                errors.append(message.text)

        page.on("console", listen)
        yield page
        browser.close()
    assert errors == []
