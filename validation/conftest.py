"""Options, what is being validated, and the report that every run writes."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import pytest

# Where pytest is started elsewhere, it has not read from pyproject.toml that helpers lie here.
sys.path.append(str(Path(__file__).parent.parent / "tests"))

import every_family
import support_record

from eagle3_jax.cli._compiled import keep_compiled_programs
from eagle3_jax.reporting.environment import committable, environment
from eagle3_jax.reporting.gpu import gpu_problem
from eagle3_jax.reporting.tables import write_text
from eagle3_jax.rivals.memory import SHARE_OF_VLLM, share_memory
from validation.aot.platforms import Platform
from validation.checks import Check, Verdict
from validation.device import Releases, give_back, products, reason_of_exhaustion
from validation.fixtures import maybe_vllm, subject  # noqa: F401
from validation.levels import BY_NAME
from validation.report import write
from validation.required import PATH, Counts, expected, without_case
from validation.runs import Report, verdict_lines
from validation.setting import Setting
from validation.vllm.fixtures import NOTES, RELEASES, vllm, vllm_process  # noqa: F401

REPORT = pytest.StashKey[Report]()
_CHECK = pytest.StashKey[Check]()
_STARTED = pytest.StashKey[float]()
_WRITTEN = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    support_record.pytest_addoption(parser)
    every_family.pytest_addoption(parser)
    group = parser.getgroup("validation")
    group.addoption("--gpu", action="store_true", help="validate on a CUDA device, in bfloat16 and float32, with speed")
    group.addoption(
        "--rehearse",
        action="store_true",
        help="with --gpu: run its flow on whatever device there is, with tiny models; nothing measured so counts",
    )
    group.addoption("--target", metavar="TARGET", help="directory or hub id of the target to validate")
    group.addoption("--drafter", metavar="DRAFTER", help="directory or hub id of its EAGLE-3 head")
    group.addoption("--prompts", metavar="FILE", action="append", default=[], help="JSONL of prompts; may be repeated")
    group.addoption("--vllm-python", metavar="PYTHON", help="interpreter of an environment with vLLM; see `make vllm`")
    group.addoption("--vllm-url", metavar="URL", help="running vLLM server with speculation, such as http://host:8000")
    group.addoption(
        "--vllm-plain-url", metavar="URL", help="running vLLM server of the same target without speculation"
    )
    group.addoption("--price-per-hour", type=float, metavar="USD", help="of the machine; adds cost per million tokens")
    group.addoption("--level", metavar="LEVEL", action="append", default=[], help="only this level; may be repeated")
    group.addoption(
        "--quick", action="store_true", help="one case of every check and few speeds; its levels are never green"
    )
    group.addoption(
        "--compilation-cache",
        metavar="DIR",
        help="where compiled programs are kept for the next run, or 'none'; with --gpu ~/.cache/eagle3-jax/compiled",
    )
    group.addoption(
        "--vllm-memory",
        type=float,
        default=SHARE_OF_VLLM,
        metavar="SHARE",
        help=f"of the GPU's memory, for vLLM; {SHARE_OF_VLLM} if left out, beside JAX's XLA_CLIENT_MEM_FRACTION",
    )
    group.addoption(
        "--aot",
        metavar="PLATFORM",
        action="append",
        default=[],
        help="compile ahead of time for cuda:h200, tpu:v6e:2x2, ..., of which none has to be here; may be repeated",
    )
    group.addoption(
        "--aot-all", action="store_true", help="with --aot: every model, draft and batch, which takes hours"
    )
    parser.addini(
        "validation_manifest",
        "table of the checks that each level must contain, or 'none' where other checks are tried out",
        default=str(PATH),
    )
    group.addoption("--report-dir", default=str(Path(__file__).parent / "report"), help="where the report is written")
    group.addoption("--complete", action="store_true", help="fail unless every level asked for ran in full")


@pytest.fixture(scope="session")
def setting(pytestconfig: pytest.Config) -> Setting:
    option = pytestconfig.getoption
    return Setting(
        gpu=option("--gpu"),
        rehearsal=option("--rehearse"),
        quick=option("--quick"),
        target=option("--target"),
        drafter=option("--drafter"),
        prompt_files=tuple(Path(name) for name in option("--prompts")),
        price_per_hour=option("--price-per-hour"),
    )


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Check:
    """Where a test keeps the numbers behind its verdict."""
    return request.node.stash[_CHECK]


@pytest.fixture(scope="module", autouse=True)
def _forget_programs(pytestconfig: pytest.Config) -> Iterator[None]:
    """A compiled program holds memory maps; thousands of them reach Linux's limit (65530), which ends the process.

    On a GPU, models and vLLM let go of their memory too: the next module needs it for others.
    """
    yield
    jax.clear_caches()
    gc.collect()
    if pytestconfig.getoption("--gpu"):
        pytestconfig.stash[RELEASES]()


@pytest.fixture(autouse=True)
def _as_exact_as_claimed(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--gpu``, products have all bits of float32, and what a check has left in memory is given back."""
    if not request.config.getoption("--gpu"):
        yield
        return
    with products(request.node.stash[_CHECK].level):
        yield
    if not request.config.getoption("--rehearse"):
        give_back()


# ---------------------------------------------------------------- the report, kept up by hooks


def pytest_configure(config: pytest.Config) -> None:
    """Refuse misuse before anything is loaded, and open the report."""
    support_record.pytest_configure(config)
    config.addinivalue_line("markers", "level(name): the level of proof that a test belongs to, such as 'L5'")
    if not hasattr(config.option, "rehearse"):  # found among other directories, which for pytest 8 is too late
        raise pytest.UsageError("validation has options of its own and must be named: pytest validation")
    option = config.getoption
    for name in option("--level"):
        if name not in BY_NAME:
            raise pytest.UsageError(f"--level {name} is none of {', '.join(BY_NAME)}")
    if not 0 < option("--vllm-memory") < 1:
        raise pytest.UsageError(f"--vllm-memory must be a share between 0 and 1, not {option('--vllm-memory'):g}")
    if option("--gpu"):
        share_memory()
    if option("--rehearse") and not option("--gpu"):
        raise pytest.UsageError("--rehearse is for a run with --gpu; give both")
    if option("--gpu") and not option("--rehearse") and not option("--collect-only"):
        problem = gpu_problem(wanted=True)
        if problem is not None:
            raise pytest.UsageError(f"--gpu: {problem}; or add --rehearse to try the flow without a GPU")
    try:
        for name in option("--aot"):
            Platform.named(name)
    except ValueError as error:
        raise pytest.UsageError(f"--aot: {error}") from None
    for name in option("--prompts"):
        if not Path(name).is_file():
            raise pytest.UsageError(f"--prompts: there is no file {name}")
    price = option("--price-per-hour")
    if price is not None and not 0 < price < float("inf"):
        raise pytest.UsageError(f"--price-per-hour must be above zero, not {price:g}")
    config.stash[REPORT] = Report(
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=committable(shlex.join(["pytest", *map(str, config.invocation_params.args)])),
        gpu=option("--gpu"),
        rehearsal=option("--rehearse"),
        aot=option("--aot"),
        manifest=_manifest_of(config),
    )
    config.stash[RELEASES] = Releases()
    config.stash[_STARTED] = time.perf_counter()
    config.stash[NOTES] = config.stash[REPORT].environment
    if option("--collect-only"):
        return
    try:
        if option("--gpu") or option("--compilation-cache"):
            keep_compiled_programs(option("--compilation-cache"))
        config.stash[NOTES] |= environment(
            target=option("--target"), drafter=option("--drafter"), prompt_files=option("--prompts")
        )
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A speed at the shape of a large model is measured with ``--gpu`` alone."""
    return True if collection_path.name == "test_speed_simulated.py" and not config.getoption("--gpu") else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Keep the modules whose tests nobody will see: a level must not look better for lack of them."""
    found = yield
    report = collector.config.stash[REPORT]
    if found.failed:
        report.errors.append(f"{collector.name}: {_last_lines(str(found.longrepr))}")
    elif found.skipped:
        report.skipped.append(f"{collector.name}: {_skip_reason(found.longrepr)}")
    return found


def pytest_itemcollected(item: pytest.Item) -> None:
    """Every test belongs to a level and has its check in the report, whether it will run or not."""
    marker = item.get_closest_marker("level")
    if marker is None:
        raise pytest.UsageError(f"{item.nodeid} belongs to no level; mark it, such as @pytest.mark.level('L5')")
    if len(marker.args) != 1 or marker.args[0] not in BY_NAME:
        named = ", ".join(map(repr, marker.args)) or "nothing"
        raise pytest.UsageError(f"{item.nodeid}: level({named}) is none of {', '.join(BY_NAME)}")
    checks = item.config.stash[REPORT].checks
    name = item.nodeid.partition("::")[2].replace("::", ": ").replace("test_", "").replace("_", " ")
    if any(check.level == marker.args[0] and check.name == name for check in checks):
        name = f"{name} ({item.path.stem})"
    item.stash[_CHECK] = Check(level=marker.args[0], name=name)
    checks.append(item.stash[_CHECK])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Levels for GPUs only are not part of a run without one, nor is what ``--level`` and ``--quick`` leave out."""
    if REPORT not in config.stash:
        return
    option = config.getoption
    seen: set[tuple[str, str]] = set()
    out = []
    for item in items:
        if _CHECK not in item.stash:
            continue
        check = item.stash[_CHECK]
        kind = check.level, without_case(check.name)
        if not config.stash[REPORT].asks_for(BY_NAME[check.level]):
            check.reason = f"only with --{BY_NAME[check.level].only_with}"
        elif option("--level") and check.level not in option("--level"):
            check.reason = "deselected by --level"
        # Speeds have a plan for it; planted bugs try the checks, not the device.
        elif option("--quick") and (check.level == "MU" or (kind in seen and check.level != "L9")):
            check.reason = "deselected by --quick"
        else:
            seen.add(kind)
            continue
        out.append(item)
    if out:
        config.hook.pytest_deselected(items=out)
        gone = set(out)
        items[:] = [item for item in items if item not in gone]


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if _CHECK in item.stash:
            item.stash[_CHECK].reason = item.stash[_CHECK].reason or "deselected"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Read the verdict of a check from how its test went."""
    outcome = yield
    check = item.stash[_CHECK]
    check.seconds += outcome.duration
    if outcome.failed and (reason := reason_of_exhaustion(call.excinfo.value)) is not None:
        outcome.outcome, outcome.longrepr = "skipped", (str(item.path), item.location[1] or 0, f"Skipped: {reason}")
        item.config.stash[RELEASES]()
    if outcome.failed:
        message = outcome.longrepr if isinstance(outcome.longrepr, str) else call.excinfo.exconly(tryshort=True)
        if outcome.when != "call":  # the world around the test: which exception it was says more than its last words
            message = f"{outcome.when}: {call.excinfo.typename}: {call.excinfo.value}".splitlines()[0]
        check.verdict, check.reason = Verdict.FAILED, _last_lines(message)
    elif outcome.skipped:
        expected = getattr(outcome, "wasxfail", None)
        reason = _skip_reason(outcome.longrepr) if expected is None else f"expected to fail: {expected}"
        check.verdict, check.reason = Verdict.NOT_RUN, reason
    elif outcome.when == "call" and check.verdict is Verdict.NOT_RUN:
        check.verdict = Verdict.PASSED
    return outcome


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Keep what is known after every check, so that a run that is killed leaves a report, too."""
    yield
    config = item.config
    report = _ended(config.stash[REPORT], config, "not finished: the run was cut off")
    path = Path(config.getoption("--report-dir")) / "report.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, report.to_json())
    except OSError as error:
        pytest.exit(f"the report could not be written: {error}", returncode=pytest.ExitCode.TESTS_FAILED)


def _ended(report: Report, config: pytest.Config, reason: str) -> Report:
    """The report of a run that ends here, with a reason for each check that did not run."""
    silent = lambda check: check.verdict is Verdict.NOT_RUN and not check.reason
    checks = [dataclasses.replace(check, reason=reason) if silent(check) else check for check in report.checks]
    return dataclasses.replace(report, checks=checks, seconds=time.perf_counter() - config.stash[_STARTED])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the report, however the run ended; misuse is no run."""
    config, report = session.config, session.config.stash.get(REPORT, None)
    if report is None or config.getoption("--collect-only") or exitstatus == pytest.ExitCode.USAGE_ERROR:
        return
    interrupted = exitstatus == pytest.ExitCode.INTERRUPTED and not report.errors
    report = _ended(report, config, "not finished: the run " + ("was interrupted" if interrupted else "stopped before"))
    config.stash[REPORT] = report
    try:
        config.stash[_WRITTEN] = write(report, config.getoption("--report-dir"))
    except OSError as error:
        pytest.exit(f"the report could not be written: {error}", returncode=pytest.ExitCode.TESTS_FAILED)
    unfinished = config.getoption("--complete") and report.incomplete(config.getoption("--level"))
    if unfinished and exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _WRITTEN not in config.stash:
        return
    report, written = config.stash[REPORT], config.stash[_WRITTEN]
    colours = {Verdict.PASSED: "green", Verdict.FAILED: "red", Verdict.PARTLY: "yellow", Verdict.NOT_RUN: "light"}
    terminalreporter.section("validation")
    for verdict, line in verdict_lines(report):
        terminalreporter.write_line(line, **{colours[verdict]: True})
    terminalreporter.write_line("")
    terminalreporter.write_line(report.summary, bold=True)
    terminalreporter.write_line(f"Compared: {report.compared}")
    terminalreporter.write_line(f"Report: {written}")
    if written.suffix != ".html":
        terminalreporter.write_line("No page: it needs jinja2 (pip install 'eagle3-jax[validation]').")
    if config.getoption("--complete") and (missing := report.incomplete(config.getoption("--level"))):
        terminalreporter.write_line("--complete: this run is not complete", red=True)
        for line in missing:
            terminalreporter.write_line(f"  {line}", red=True)


def _manifest_of(config: pytest.Config) -> Counts:
    path = config.getini("validation_manifest")
    if path == "none":
        return {}
    mode = "rehearsal" if config.getoption("--rehearse") else "gpu" if config.getoption("--gpu") else "cpu"
    return expected(mode, Path(path))


def _skip_reason(representation: object) -> str:
    text = representation[2] if isinstance(representation, tuple) else str(representation)
    return committable(text.removeprefix("Skipped: "))


def _last_lines(message: str, limit: int = 500) -> str:
    """The end of a failure's message, where pytest compares, and its first line, where the test says what it means."""
    lines = [line.removeprefix("E  ").strip() for line in committable(message).strip().splitlines() if line.strip()]
    text = "\n".join(lines).removeprefix("AssertionError: ")
    if len(text) <= limit:
        return text
    first = lines[0][: limit // 2]
    return f"{first}\n…{text[len(first) + 2 - limit :]}"
