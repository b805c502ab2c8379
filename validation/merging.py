"""One report of several runs that each did a part: a level or a case per command, where commands may not last long."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.reporting.tables import flat, show
from validation.checks import Check, Verdict
from validation.runs import Report

# What parts may differ in: when they ran, files beside the code (whose hash is another fact), the words of the hub, the
# kernel and the memory of hosts with the same processor and device, and what only some of them needed.
_NEVER_THE_SAME = ("date", "git.dirty", "subject.not the default", "platform", "cpu.memory_gib")
_WHERE_NEEDED = ("subject", "vllm", "vllm warning")
_WORST_FIRST = (Verdict.FAILED, Verdict.PARTLY, Verdict.PASSED)


def merge(parts: Mapping[str, Report]) -> Report:
    """All checks of all parts; where one ran in several of them, its latest run, or what was not passed.

    Args:
        parts: By the name under which messages speak of them; at least one.

    Raises:
        ValueError: Two of them are not of one kind of machine, of the same versions, of the same models.
    """
    reports = sorted(parts.values(), key=lambda report: report.started)
    _refuse_strangers(parts)
    found: dict[tuple[str, str], list[tuple[str, str, Check]]] = {}
    for name, report in parts.items():
        for check in report.checks:
            found.setdefault((check.level, check.name), []).append((report.started, name, check))
    environment: dict[str, Any] = {}
    for report in reports:
        environment |= report.environment
    return Report(
        environment=environment,
        checks=[_one_of(sorted(runs, key=lambda run: run[0])) for runs in found.values()],
        started=reports[0].started,
        seconds=sum(report.seconds for report in reports),
        command="python -m validation.report merge",
        gpu=reports[0].gpu,
        rehearsal=reports[0].rehearsal,
        aot=list(dict.fromkeys(platform for report in reports for platform in report.aot)),
        errors=list(dict.fromkeys(line for report in reports for line in report.errors)),
        skipped=list(dict.fromkeys(line for report in reports for line in report.skipped)),
        manifest=reports[0].manifest,
        parts=[command for report in reports for command in report.parts or [report.command]],
    )


def _refuse_strangers(parts: Mapping[str, Report]) -> None:
    first = next(iter(parts))
    known: dict[str, tuple[str, Any]] = {}
    for name, report in parts.items():
        facts = _identity(report)
        for key in {**{key: None for key in known}, **facts}:
            if key.partition(".")[0] in _WHERE_NEEDED and not (key in known and key in facts):
                continue
            other, there = known.get(key, (first, None))
            if facts.get(key) != there and name != first:
                raise ValueError(
                    f"{other} and {name} differ in {key} ({show(there)}, {show(facts.get(key))}); "
                    "only runs on the same device with the same versions and models can be merged"
                )
        known |= {key: (name, value) for key, value in facts.items() if key not in known}


def _identity(report: Report) -> dict[str, Any]:
    facts = {key: value for key, value in flat(report.environment) if key not in _NEVER_THE_SAME}
    manifest = {f"the manifest of {level}": repr(rows) for level, rows in report.manifest.items()}
    return facts | manifest | {"--gpu": report.gpu, "--rehearse": report.rehearsal}


def _one_of(runs: list[tuple[str, str, Check]]) -> Check:
    """What runs of the same check, oldest first, amount to."""
    ran = [(part, check) for _, part, check in runs if check.verdict is not Verdict.NOT_RUN]
    if not ran:
        told = [check for _, _, check in runs if not check.deselected]
        return (told or [check for _, _, check in runs])[-1]
    if len({check.verdict for _, check in ran}) == 1:
        return ran[-1][1]
    worst = next(check for verdict in _WORST_FIRST for _, check in reversed(ran) if check.verdict is verdict)
    story = "; ".join(f"{check.verdict} in {part}" for part, check in ran)
    told = f"{len(ran)} runs of it contradict each other ({story})"
    return dataclasses.replace(worst, reason=f"{told}: {worst.reason}" if worst.reason else told)
