"""Texts that draft heads learn from."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Text(NamedTuple):
    """One text to learn from."""

    tokens: list[int]  #: Token ids.
    learn: list[bool]  #: For each token, whether the head learns to draft it.
    document: int  #: The first 8 bytes of the SHA-256 of the document; equal documents are learnt or held out together.


def document_hash(text: str) -> int:
    """Returns the first 8 bytes of the SHA-256 of a document as a number (most significant byte first)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
