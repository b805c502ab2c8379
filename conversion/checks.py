"""The findings of the doctor, and the check of a mask token, which several methods have."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

from eagle3_jax.conversion.files import read_json, read_tokenizer

Status = Literal["ok", "warning", "failure", "skipped"]


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: The part that was checked.
        status: ``ok``, ``warning`` (works, but probably not as meant), ``failure``, or ``skipped``.
        detail: The finding and, if something is wrong, what to do.
    """

    name: str
    status: Status
    detail: str


def mask_token(token: int, stop_tokens: tuple[int, ...], directory: Path) -> Check:
    """Checks whether texts may hold the token that stands for an unknown one.

    Args:
        token: Its id.
        stop_tokens: The target's.
        directory: The target's, whose tokenizer gives the tokens of texts.
    """
    name, detail, path = "mask token", f"id {token}", directory / "tokenizer.json"
    if token in stop_tokens:
        return Check(name, "warning", f"{detail}, which ends the target's answers; drafts of heads trained so are weak")
    tokenizer = read_tokenizer(path)
    if tokenizer is None:
        return Check(name, "ok", f"{detail}; without a tokenizer.json it is unknown whether texts hold it")
    added = read_json(path).get("added_tokens")
    special = {one.get("id") for one in added or () if isinstance(one, dict) and one.get("special")}
    word = {index: word for word, index in tokenizer.get_vocab().items()}.get(token)
    if token in special or word is None:
        what = "a special token" if token in special else "no token of the tokenizer's"
        return Check(name, "ok", f"{detail}, {what}: texts do not hold it")
    spelt = json.dumps(word, ensure_ascii=False)
    return Check(
        name, "warning", f"{detail} is {spelt}, which texts may hold; what follows it in a text is drafted worse"
    )
