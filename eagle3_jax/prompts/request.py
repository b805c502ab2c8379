"""One prompt with its limit and its sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.text.template import Messages

MOST_TOKENS = 1_000_000_000  # limits are 32-bit on the device


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt of a command line or a file."""

    prompt: str | list[int]  #: Text or token ids; the text of the last turn for a conversation.
    max_new_tokens: int  #: Maximum number of new tokens.
    where: str = ""  #: For error messages: empty, or the line of the file.
    #: The prompt's ``temperature``, ``top_k``, ``top_p``, ``seed`` and ``stop`` (a list of texts),
    #: if it sets them.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    messages: Messages | None = (
        None  #: The turns of a conversation; ``None`` for a prompt that is continued.
    )
