"""What the doctor finds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

from eagle3_jax.conversion.files import read_json

Status = Literal["ok", "warning", "failure", "skipped"]


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: What was looked at.
        status: ``ok``, ``warning`` (works, but probably not as meant), ``failure``, or ``skipped``.
        detail: What was found and, if something is wrong, what to do.
    """

    name: str
    status: Status
    detail: str


def mask_token(token: int, stop_tokens: tuple[int, ...], directory: Path) -> Check:
    """Whether texts may hold the token that stands for an unknown one.

    Args:
        token: Its id.
        stop_tokens: The target's.
        directory: The target's, whose tokenizer says which tokens texts are made of.
    """
    name, detail = "mask token", f"id {token}"
    if token in stop_tokens:
        return Check(name, "warning", f"{detail}, which ends the target's answers; drafts of heads trained so are weak")
    path = directory / "tokenizer.json"
    if not path.is_file():
        return Check(name, "ok", f"{detail}; without a tokenizer.json nobody knows whether texts hold it")
    added = read_json(path).get("added_tokens")
    special = {one.get("id") for one in added or () if isinstance(one, dict) and one.get("special")}
    vocabulary = _ids(path)
    if token in special or token not in vocabulary:
        what = "a special token" if token in special else "no token of the tokenizer's"
        return Check(name, "ok", f"{detail}, {what}: texts do not hold it")
    spelt = json.dumps(vocabulary[token], ensure_ascii=False)
    return Check(
        name, "warning", f"{detail} is {spelt}, which texts may hold; what follows it in a text is drafted worse"
    )


def _ids(path: Path) -> dict[int, str]:
    from eagle3_jax.conversion.vocabulary import read_tokenizer

    tokenizer = read_tokenizer(path)
    return {} if tokenizer is None else {index: word for word, index in tokenizer.get_vocab().items()}
