"""``pytest validation``: its options, its levels, and the report after every check."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import os
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from eagle3_jax.devices.compilation import keep_compiled_programs
from eagle3_jax.measure.environment import committable, environment
from eagle3_jax.measure.gpu import gpu_problem
from validation.aot.platforms import Platform
from validation.budget import MINUTES, Budget, Earlier, earlier_run, rank, sha256_of_options
from validation.decodings import forget_programs
from validation.device import products, reason_of_exhaustion, release_memory
from validation.engines.memory import SHARE_OF_VLLM, share_memory
from validation.fixtures import RELEASES, REPORT, setting, subject, vllm, vllm_process  # noqa: F401
from validation.levels import BY_NAME
from validation.report import write
from validation.runs import (
    DESELECTED,
    GPU_ONLY,
    RUN,
    Check,
    Report,
    Verdict,
    check_name,
    checks_in,
    verdict_lines,
)

_CHECK = pytest.StashKey[Check]()
_STARTED = pytest.StashKey[float]()
_WRITTEN = pytest.StashKey[Path]()
_BUDGET = pytest.StashKey[Budget]()  # of a run with a budget
_EARLIER = pytest.StashKey[Earlier]()
_TAKEN_OVER = pytest.StashKey[Check]()  # what an earlier run found of a check that failed
COLORS = {
    Verdict.PASSED: "green",
    Verdict.QUICK: "green",
    Verdict.FAILED: "red",
    Verdict.PARTLY: "yellow",
    Verdict.NOT_RUN: "light",
}
LONGEST_REASON = 500  # characters of a failure's message

# Options that decide which checks run and where records go; the result of a check depends on the
# others.
_OF_THE_RUN = ("--minutes", "--level", "--complete", "--report-dir", "--compilation-cache")
_FLAG: dict[str, Any] = {"action": "store_true"}
_FLOAT: dict[str, Any] = {"type": float}
_LIST: dict[str, Any] = {"action": "append", "default": []}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "--gpu": ("validate on a CUDA device, in bfloat16 and float32, with speed", _FLAG),
    "--rehearse": (
        "with --gpu: try its flow on any device with tiny models; no figure is a measurement",
        _FLAG,
    ),
    "--quick": (
        "one case of most checks, with fewer prompts, and few speeds; levels 'passed (quick)'",
        _FLAG,
    ),
    "--minutes": (
        (
            "end the run by then, start no check that is not expected to end, and continue the"
            f" earlier run of --report-dir; default {MINUTES:g} with --gpu --quick"
        ),
        _FLOAT | {"metavar": "N"},
    ),
    "--complete": ("fail unless every requested level ran in full", _FLAG),
    "--level": ("only this level; may be repeated", _LIST | {"metavar": "LEVEL"}),
    "--target": ("directory or hub id of the target to validate", {"metavar": "TARGET"}),
    "--drafter": ("directory or hub id of its EAGLE-3 head", {"metavar": "DRAFTER"}),
    "--prompts": ("JSONL of prompts; may be repeated", _LIST | {"metavar": "FILE"}),
    "--vllm-python": (
        "interpreter of an environment with vLLM; see `make vllm`",
        {"metavar": "PYTHON"},
    ),
    "--vllm-url": (
        "running vLLM server with speculation, such as http://host:8000",
        {"metavar": "URL"},
    ),
    "--vllm-plain-url": (
        "running vLLM server of the same target without speculation",
        {"metavar": "URL"},
    ),
    "--vllm-memory": (
        (
            f"share of the GPU's memory for vLLM; default {SHARE_OF_VLLM}, next to JAX's"
            " XLA_CLIENT_MEM_FRACTION"
        ),
        _FLOAT | {"metavar": "SHARE", "default": SHARE_OF_VLLM},
    ),
    "--price-per-hour": (
        "price of the machine in USD; adds the cost of a million tokens",
        _FLOAT | {"metavar": "USD"},
    ),
    "--compilation-cache": (
        (
            "directory of compiled programs for the next run, or 'none'; with --gpu"
            " ~/.cache/eagle3-jax/compiled"
        ),
        {"metavar": "DIR"},
    ),
    "--every-family": ("every family of targets, not one for each kind of layer", _FLAG),
    "--aot": (
        (
            "compile ahead of time for cuda:h200, tpu:v6e:2x2, ..., which need not be present; may"
            " be repeated"
        ),
        _LIST | {"metavar": "PLATFORM"},
    ),
    "--aot-all": ("with --aot: every recorded program, which takes an hour or more", _FLAG),
    "--report-dir": (
        "where the report is written",
        {"metavar": "DIR", "default": str(Path(__file__).parent / "report")},
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("validation")
    for name, (text, settings) in OPTIONS.items():
        group.addoption(name, help=text, **settings)


def pytest_configure(config: pytest.Config) -> None:
    """Refuses misuse before anything is loaded, and opens the report."""
    config.addinivalue_line(
        "markers", "level(name): the level of proof that a test belongs to, such as 'L5'"
    )
    config.addinivalue_line(
        "markers", "not_quick: other checks of a quick run see nearly the same errors"
    )

    # Found among other directories, which for pytest 8 is too late.
    if not hasattr(config.option, "rehearse"):
        raise pytest.UsageError(
            "validation has options of its own and must be named: pytest validation"
        )

    option = config.getoption
    report = Report(
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=committable(shlex.join(["pytest", *map(str, config.invocation_params.args)])),
        gpu=option("--gpu"),
        rehearsal=option("--rehearse"),
        quick=option("--quick"),
        options=sha256_of_options(
            {name: option(name) for name in OPTIONS if name not in _OF_THE_RUN}
            | {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "EAGLE3_ATTENTION")}
        ),
        aot=option("--aot"),
    )

    config.stash[REPORT] = report
    config.stash[_EARLIER] = Earlier([], {})
    config.stash[RELEASES] = []
    config.stash[_STARTED] = time.perf_counter()

    try:
        _refuse_misuse(config)
        if option("--gpu"):
            share_memory()
        if option("--collect-only"):
            return
        if option("--gpu") and not option("--rehearse") and (problem := gpu_problem(required=True)):
            raise ValueError(f"--gpu: {problem}; or add --rehearse to try the flow without a GPU")
        if option("--gpu") or option("--compilation-cache"):
            keep_compiled_programs(option("--compilation-cache"))
        report.environment |= environment(
            target=option("--target"), drafter=option("--drafter"), prompt_files=option("--prompts")
        )
        if price := option("--price-per-hour"):
            report.environment["price_per_hour"] = price

        if minutes := option("--minutes") or (
            MINUTES if option("--gpu") and option("--quick") else 0
        ):
            config.stash[_BUDGET] = Budget(minutes, config.stash[_STARTED] + 60 * minutes)
            config.stash[_EARLIER] = earlier_run(Path(option("--report-dir")), report)
            report.checks += config.stash[_EARLIER].checks
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def _refuse_misuse(config: pytest.Config) -> None:
    option = config.getoption
    for name in option("--level"):
        if name not in BY_NAME:
            raise ValueError(f"--level {name} is none of {', '.join(BY_NAME)}")
    if not 0 < option("--vllm-memory") < 1:
        raise ValueError(
            f"--vllm-memory must be a share between 0 and 1, not {option('--vllm-memory'):g}"
        )
    if option("--rehearse") and not option("--gpu"):
        raise ValueError("--rehearse is for a run with --gpu; give both")

    for name in option("--aot"):
        try:
            Platform.named(name)
        except ValueError as error:
            raise ValueError(f"--aot: {error}") from None
    for name in option("--prompts"):
        if not Path(name).is_file():
            raise ValueError(f"--prompts: there is no file {name}")
    for name in ("--price-per-hour", "--minutes"):
        number = option(name)
        if number is not None and not 0 < number < float("inf"):
            raise ValueError(f"{name} must be above zero, not {number:g}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Says what the budget is, and whether an earlier run is continued."""
    if _BUDGET not in config.stash:
        return []
    note = config.stash[_EARLIER].note
    return [
        f"validation: {config.stash[_BUDGET].minutes:g} minutes",
        *([f"validation: {note}"] if note else []),
    ]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Writes a report before anything runs, so that a run that is killed leaves one.

    SIGTERM, which time limits send, ends the run as Ctrl-C does: the report is written and vLLM's
    process ends.
    """
    if session.config.getoption("--collect-only"):
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    session.config.add_cleanup(lambda: signal.signal(signal.SIGTERM, previous))
    _write(session.config, "the run was cut off before its first check")


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Check:
    """The record of a test in the report, for the numbers that its verdict depends on."""
    record = request.node.stash[_CHECK]
    # Without vLLM the test was skipped before.
    if {"vllm", "vllm_process"} & set(request.fixturenames):
        record.numbers["compared with"] = RUN
    return record


@pytest.fixture(scope="module", autouse=True)
def _forget_programs(pytestconfig: pytest.Config) -> Iterator[None]:
    """Drops compiled programs, whose memory maps would reach Linux's limit (65530).

    On a GPU, models and vLLM free their memory too, for those of the next module.
    """
    yield
    forget_programs()
    jax.clear_caches()
    gc.collect()
    if pytestconfig.getoption("--gpu"):
        _free(pytestconfig)


def _free(config: pytest.Config) -> None:
    """Frees the memory of models and of vLLM."""
    for release in config.stash[RELEASES]:
        release()
    release_memory()


@pytest.fixture(autouse=True)
def _as_exact_as_claimed(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--gpu``, multiplies with all bits of float32, and frees the memory of each check."""
    if not request.config.getoption("--gpu"):
        yield
        return
    with products(request.node.stash[_CHECK].level):
        yield
    if not request.config.getoption("--rehearse"):
        release_memory()


# ---------------------------------------------------------------- collection


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.name == GPU_ONLY and not config.getoption("--gpu") else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Records modules that could not be collected."""
    outcome = yield
    report = collector.config.stash[REPORT]
    if outcome.failed:
        report.errors.append(f"{collector.name}: {_shortened(str(outcome.longrepr))}")
    elif outcome.skipped:
        report.skipped.append(f"{collector.name}: {_skip_reason(outcome.longrepr)}")
    return outcome


def pytest_itemcollected(item: pytest.Item) -> None:
    """Adds a check to the report for every test, whether it will run or not."""
    marker = item.get_closest_marker("level")
    if marker is None:
        raise pytest.UsageError(
            f"{item.nodeid} belongs to no level; mark it, such as @pytest.mark.level('L5')"
        )
    if len(marker.args) != 1 or marker.args[0] not in BY_NAME:
        names = ", ".join(map(repr, marker.args)) or "nothing"
        raise pytest.UsageError(f"{item.nodeid}: level({names}) is none of {', '.join(BY_NAME)}")

    check = Check(marker.args[0], check_name(item.nodeid.partition("::")[2]))
    report = item.config.stash[REPORT]
    earlier = item.config.stash[_EARLIER]
    taken_over = next((taken for taken in earlier.checks if taken.key == check.key), None)
    if taken_over is None:
        report.checks.append(check)
    item.stash[_CHECK] = check = taken_over or check
    check.expected = earlier.seconds.get(check.key, 0.0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests of other levels and of a complete run; lists uncollected checks.

    A run with a budget takes the others by their value and leaves out those that passed in the run
    that it continues. One that failed runs again.
    """
    report = config.stash[REPORT]
    levels = config.getoption("--level")
    items_of_levels = [item for item in items if _CHECK in item.stash]  # other folders may run too
    present = {check.kind for check in report.checks}
    for folder in {item.path.parent for item in items_of_levels}:
        for level, name in sorted(checks_in(folder, gpu=report.gpu) - present):
            report.missing.setdefault(level, []).append(name)

    seen: set[tuple[str, str]] = set()
    deselected = []
    for item in items_of_levels:
        check = item.stash[_CHECK]
        reason = ""
        if not report.includes(BY_NAME[check.level]):
            reason = f"only with --{BY_NAME[check.level].only_with}"
        elif levels and check.level not in levels:
            reason = "deselected by --level"
        # The speeds of a quick run are selected by test_speed.py.
        elif config.getoption("--quick") and (
            item.get_closest_marker("not_quick") or (check.kind in seen and check.level != "L9")
        ):
            reason = DESELECTED
        else:
            seen.add(check.kind)

        if reason or check.verdict is Verdict.PASSED:
            deselected.append(item)
        if check.verdict is Verdict.NOT_RUN:
            check.reason = reason

    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in set(deselected)]
    if _BUDGET in config.stash:
        # Tests of one level stay in the order of their modules, which share compiled programs.
        items.sort(
            key=lambda item: rank(item.stash[_CHECK]) if _CHECK in item.stash else len(items)
        )


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if _CHECK in item.stash and item.stash[_CHECK].verdict is Verdict.NOT_RUN:
            item.stash[_CHECK].reason = item.stash[_CHECK].reason or "deselected"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Starts no check that is not expected to end in the budget.

    One that failed in an earlier run begins anew.
    """
    check = item.stash[_CHECK]
    if check.taken_over:
        item.stash[_TAKEN_OVER] = dataclasses.replace(check)
        vars(check).update(vars(Check(check.level, check.name, expected=check.expected)))
    if _BUDGET in item.config.stash and (reason := item.config.stash[_BUDGET].why_not(check)):
        _end(item.config, reason)


@pytest.hookimpl(wrapper=True, specname="pytest_runtest_setup")
def _setup_within_the_budget(item: pytest.Item) -> Iterator[None]:
    """Ends the fixtures of a check at the end of the budget; models and vLLM take long to start."""
    with _cut_off(item.config):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Ends a check at the end of the budget: its seconds were unknown, or it took longer."""
    with _cut_off(item.config):
        return (yield)


@contextlib.contextmanager
def _cut_off(config: pytest.Config) -> Iterator[None]:
    """Skips what is left of a check when the budget is spent, as soon as Python runs again."""
    budget = config.stash.get(_BUDGET, None)
    if budget is None or budget.seconds_left() <= 0:  # then no check is started
        yield
        return

    previous = signal.signal(
        signal.SIGALRM, lambda *_: _end(config, f"{budget.spent} while it ran")
    )
    signal.setitimer(signal.ITIMER_REAL, budget.seconds_left())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _end(config: pytest.Config, reason: str) -> None:
    config.stash[REPORT].unfinished = config.stash[_BUDGET].spent
    pytest.skip(reason)


# ---------------------------------------------------------------- the report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Sets the verdict of a check from its test. Exhausted memory is not a failure."""
    outcome = yield
    check = item.stash[_CHECK]
    check.seconds += outcome.duration
    if outcome.failed and (reason := reason_of_exhaustion(call.excinfo.value)) is not None:
        outcome.outcome = "skipped"
        outcome.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {reason}")
        _free(item.config)

    if outcome.failed:
        message = (
            outcome.longrepr
            if isinstance(outcome.longrepr, str)
            else call.excinfo.exconly(tryshort=True)
        )
        phase = "" if outcome.when == "call" else f"{outcome.when}: "
        check.verdict = Verdict.FAILED
        check.reason = _shortened(f"{phase}{message}")
    elif outcome.skipped:
        check.verdict = Verdict.NOT_RUN
        check.reason = _skip_reason(outcome.longrepr)
        # It failed in an earlier run and did not run again, so it remains a failure.
        if _TAKEN_OVER in item.stash:
            vars(check).update(vars(item.stash[_TAKEN_OVER]))
    elif outcome.when == "call" and check.verdict is Verdict.NOT_RUN:
        check.verdict = Verdict.PASSED
    return outcome


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Writes the report after every check, so that a run that is killed leaves one too."""
    yield
    _write(item.config, "the run was cut off", page=False)


def _write(config: pytest.Config, unfinished: str, *, page: bool = True) -> Report:
    """Writes the report of a run that ends here.

    Args:
        config: Configuration of the run.
        unfinished: Why the run ends before its end; the reason of every check that did not run.
            Empty at the end.
        page: Whether to write the page too.
    """
    report = config.stash[REPORT]
    checks = [
        (
            dataclasses.replace(check, reason=check.reason or f"not finished: {unfinished}")
            if check.verdict is Verdict.NOT_RUN
            else check
        )
        for check in report.checks
    ]

    seconds = time.perf_counter() - config.stash[_STARTED]
    report = dataclasses.replace(report, checks=checks, seconds=seconds, unfinished=unfinished)
    try:
        config.stash[_WRITTEN] = write(report, config.getoption("--report-dir"), page=page)
    except OSError as error:
        pytest.exit(
            f"the report could not be written: {error}", returncode=pytest.ExitCode.TESTS_FAILED
        )
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Writes the report at the end of the run, also of one that was interrupted or stopped."""
    config = session.config
    if _WRITTEN not in config.stash:
        return
    if exitstatus == pytest.ExitCode.USAGE_ERROR:  # nothing was collected
        del config.stash[_WRITTEN]
        return

    report = config.stash[REPORT]
    stopped = any(check.verdict is Verdict.NOT_RUN and not check.reason for check in report.checks)
    interrupted = exitstatus == pytest.ExitCode.INTERRUPTED and not report.errors
    reason = (
        "the run was interrupted"
        if interrupted
        else "the run stopped early"
        if stopped
        else report.unfinished
    )

    config.stash[REPORT] = report = _write(config, reason)
    if exitstatus not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return

    # What was taken over counts as what ran.
    incomplete = config.getoption("--complete") and report.incomplete(config.getoption("--level"))
    if incomplete or any(check.verdict is Verdict.FAILED for check in report.checks):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif any(check.taken_over for check in report.checks):
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if _WRITTEN not in config.stash:
        return
    report = config.stash[REPORT]
    file = config.stash[_WRITTEN]

    terminalreporter.section("validation")
    for verdict, line in verdict_lines(report):
        terminalreporter.write_line(line, **{COLORS[verdict]: True})
    terminalreporter.write_line("")
    terminalreporter.write_line(report.summary, bold=True)
    terminalreporter.write_line(f"Compared: {report.compared}")
    terminalreporter.write_line(f"Report: {file}")
    if file.suffix != ".html":
        terminalreporter.write_line("No page: it needs jinja2, which is not installed.")
    if config.getoption("--complete") and (lines := report.incomplete(config.getoption("--level"))):
        terminalreporter.write_line("--complete: this run is not complete", red=True)
        for line in lines:
            terminalreporter.write_line(f"  {line}", red=True)


def _skip_reason(representation: object) -> str:
    text = representation[2] if isinstance(representation, tuple) else str(representation)
    return committable(text.removeprefix("Skipped: "))


def _shortened(message: str) -> str:
    """Returns the first lines of a failure's message, without private directories."""
    lines = [
        line.removeprefix("E  ").strip()
        for line in committable(message).strip().splitlines()
        if line.strip()
    ]
    return "\n".join(lines).removeprefix("AssertionError: ")[:LONGEST_REASON]
