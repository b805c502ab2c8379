"""Writes the tables on the pages between their marks: ``python docs/recorded/write_tables.py``.

A test compares the pages with what this writes. The other files of this folder make the tables.
Numbers in prose are quotations: ``tests/docs/test_records.py`` compares them with the records.
"""

from __future__ import annotations

import json

import certificates
import chat_model
import equal_text
import expected
import gpu
import host
import loads
import methods
import options
import policy_runs
import speeds
import support
import validated
from page_tables import ROOT

from validation.aot.table import launches


def tables() -> dict[str, dict[str, str]]:
    """Returns the tables of each page by the names of their marks."""
    of_options = json.loads(options.RECORD.read_text(encoding="utf-8"))
    return {
        "README.md": {"speed": speeds.CHAT.short()},
        "docs/certify.md": {
            "power": certificates.power(),
            "alarms": certificates.alarms(),
            "bugs": certificates.bugs(),
        },
        "docs/engines.md": {"engines": certificates.engines()},
        "docs/checkpoints.md": {
            "families": support.families_of_targets(),
            "host": host.memory_and_seconds(),
            "host run": host.measured_on(),
        },
        "docs/choosing.md": {
            "draft lengths": speeds.CHAT.draft_lengths(),
            "equal text": equal_text.acceptance(),
            "equal text, speeds": equal_text.speeds(),
        },
        "docs/expectations.md": {"bound": expected.bound(), "compiled": expected.compiled()},
        "docs/gpu.md": {
            "rounds": gpu.rounds(),
            "chat model": gpu.chat_model(),
            "weights": gpu.weights(),
            "price": gpu.price(),
            "compiled": launches(),
        },
        "docs/methods/index.md": {
            "what they are": methods.what_they_are(),
            "files and proof": methods.files_and_proof(),
            "block rule": speeds.block_rule(),
        },
        "docs/methods/lookup.md": {"lookups": speeds.lookups()},
        "docs/methods/models.md": {"layer skip": speeds.layer_skip()},
        "docs/numbers.md": {
            "speed": speeds.CHAT.complete(),
            "tasks": speeds.CHAT.by_task(),
            "batches": speeds.batches(),
            "sampled": speeds.SAMPLED.by_task(),
            "small pair": speeds.SMALL.complete(),
            "acceptance": speeds.acceptance(),
            "chat model": chat_model.rounds(),
        },
        "docs/rollouts.md": {
            "acceptance": policy_runs.acceptance(),
            "run": policy_runs.measured_on(),
            "seconds": policy_runs.seconds(),
            "predictions": policy_runs.predictions(),
            "drift": policy_runs.drift(),
        },
        "docs/requests.md": {"cost": options.cost(of_options)},
        "docs/serving.md": {
            "servers": loads.servers(),
            "long prompts": loads.servers(long_prompts=True),
            "refilled": loads.refilled(),
        },
        **validated.parts(),
    }


def filled(text: str, marked: dict[str, str]) -> str:
    """Returns a page with its tables in their places.

    Raises:
        ValueError: A mark is missing.
    """
    for name, part in marked.items():
        begin = f"<!-- {name}: written by docs/recorded/write_tables.py -->"
        end = f"<!-- end of {name} -->"
        before, opened, remaining = text.partition(begin)
        _, closed, after = remaining.partition(end)
        if not opened or not closed:
            raise ValueError(f"there is no place for {name!r}: put {begin} and {end} around it")
        text = f"{before}{begin}\n\n{part}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    for page, marked in tables().items():
        path = ROOT / page
        path.write_text(filled(path.read_text(encoding="utf-8"), marked), encoding="utf-8")
