"""What the notebooks for GPUs read: a validation's report and a record of examples/h200.py.

    python -m notebooks.machine             # on a GPU: writes both
    python -m notebooks.machine --quick     # with options of `pytest validation`

The notebooks read both. Committed records replace what was not measured here, and a banner at the
top of each notebook names them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle3_jax.measure.environment import cpu_model
from eagle3_jax.measure.gpu import has_gpu
from eagle3_jax.measure.tables import Table
from eagle3_jax.theory.accelerators import KNOWN_ACCELERATORS, Accelerator
from validation.runs import Check, Report, Verdict, load
from validation.subject import SHIPPED

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "validation" / "results"
MEASURED = ROOT / "build" / "gpu"  # what was measured on this machine
REPORT = MEASURED / "report.json"
ROUNDS = MEASURED / "h200.json"
PRICE = "price_per_hour"  # in the environment of a report


class Part(NamedTuple):
    """One thing that the numbers depend on: its name, whether it is real, and its description."""

    name: str
    real: bool
    text: str


class Banner(NamedTuple):
    """Real parts and stand-ins."""

    parts: tuple[Part, ...]

    @property
    def missing(self) -> tuple[Part, ...]:
        """The stand-ins."""
        return tuple(part for part in self.parts if not part.real)

    def _repr_html_(self) -> str:
        edge = "#2a9d74"
        message = "All parts are real: these numbers are measurements of this machine."
        if self.missing:
            names = ", ".join(part.name for part in self.missing)
            edge = "#d97634"
            message = (
                f"Stand-ins: {names}. Do not quote their numbers as measurements of the real parts."
            )

        rows = "".join(
            f"<tr><td style='white-space:nowrap'>"
            f"{'&#10003; real' if part.real else '&#9888; stand-in'}</td>"
            f"<td><b>{html.escape(part.name)}</b></td>"
            f"<td style='text-align:left'>{html.escape(part.text)}</td></tr>"
            for part in self.parts
        )

        return (
            f"<div class='eagle3-banner' style='border-left:6px solid {edge};padding:.4em 1em;"
            f"margin:.5em 0;background:{edge}14'>"
            f"<b>{html.escape(message)}</b><table>{rows}</table></div>"
        )


class Result(NamedTuple):
    """A row of the table of verdicts at the top of the joined report."""

    name: str
    text: str
    real: bool

    def _repr_html_(self) -> str:
        kind = "measured here" if self.real else "rehearsal with stand-ins"
        cells = "".join(
            f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in (self.text, kind)
        )
        return (
            "<table><tr class='eagle3-result'>"
            f"<td><b>{html.escape(self.name)}</b></td>{cells}</tr></table>"
        )


class Figures(NamedTuple):
    """The figures of one part of examples/h200.py, and where they were measured."""

    figures: Mapping[str, Any]
    origin: str

    def seconds(self, cell: str) -> float:
        """Returns the median time of a round of a cell."""
        return self.figures[cell]["seconds_per_round"]["median"]


class Speed(NamedTuple):
    """A row of a table of level L9: the speed of one method at one batch size."""

    method: str
    batch: int
    tokens_per_second: float
    ratio: float  #: Over plain decoding of the same table, with quartiles ``low`` and ``high``.
    low: float
    high: float
    tau: float
    waits: Mapping[str, tuple[float, float]]  #: Milliseconds: median and 99th percentile.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What was measured on this machine, and the committed records of what was not."""

    report: Report  #: A run of the validation.
    is_own_report: bool  #: Whether it was written on this machine.
    own_rounds: Mapping[str, Any] | None  #: A record of examples/h200.py of this machine.

    @property
    def on_gpu(self) -> bool:
        """Whether the report is that of a GPU of this machine."""
        return self.is_own_report and self.report.gpu and not self.report.rehearsal

    @property
    def device(self) -> str:
        """Name of the device of the report, for figures and tables."""
        return _device_of(self.report)

    @property
    def accelerator(self) -> Accelerator | None:
        """Data sheet of this device; ``None`` for a CPU or an unknown device."""
        return datasheet_of(self.device) if self.on_gpu else None

    @property
    def price_per_hour(self) -> float:
        """Price per hour that the report was made with; default 1."""
        return self.report.environment.get(PRICE, 1.0)

    @property
    def price_named(self) -> str:
        """Description of the price for figures and tables."""
        assumed = "" if PRICE in self.report.environment else " (assumed)"
        return f"at {self.price_per_hour:g} per hour{assumed}"

    def checks(self, level: str, start: str) -> list[Check]:
        """Returns the checks of a level that passed and whose names start so.

        Raises:
            AssertionError: One of them failed.
        """
        named = [check for check in self.report[level].checks if check.name.startswith(start)]
        for check in named:
            assert check.verdict is not Verdict.FAILED, f"{check.name}: {check.reason}"
        return [check for check in named if check.verdict is Verdict.PASSED]

    @functools.cached_property
    def speeds(self) -> list[Speed]:
        """The speeds of level L9 whose baseline is plain decoding, in the first precision.

        On a GPU the shipped pair waits for launches, so a shape with random weights replaces it.
        """
        checks = self.checks("L9", "speed")
        tables = [table for check in checks for table in check.tables if _is_of_speeds(table)]
        if not tables:
            raise ValueError("the report has no speeds over plain decoding (level L9)")

        dtype = tables[0].rows[0][1]
        tables = [table for table in tables if table.rows[0][1] == dtype]
        models = [_model_of(table) for table in tables]
        chosen = [table for table, model in zip(tables, models, strict=True) if model == models[0]]
        # A method that was not measured has a row without a speed.
        rows = [row for table in chosen for row in table.rows if row[3] != ""]
        return list({tuple(row[:3]): _read_speed(row) for row in rows}.values())

    def rounds(self, part: str) -> Figures | None:
        """Returns the figures of a part of examples/h200.py; ``None`` if there are none."""
        figures = (self.own_rounds or {}).get("parts", {}).get(part, {}).get("figures")
        return Figures(figures, "this machine") if figures else _committed_rounds().get(part)

    def verdict(self, name: str, text: str, *, needs: str = "") -> Result:
        """Makes a row of the joined report, which depends on ``needs`` (see :meth:`banner`) too."""
        return Result(name, text, not self.banner(needs).missing)

    def banner(self, *also: str) -> Banner:
        """Real parts and stand-ins: device and pair, and ``vLLM``, ``rounds`` or ``price``."""
        source = described(self.report)
        device = self.device
        if not self.on_gpu:
            here = "a GPU that was not measured" if has_gpu() else f"no GPU: CPU: {cpu_model()}"
            device = (
                f"{here}; {'a run' if self.is_own_report else 'the committed record'} of {source}"
            )

        is_own_pair = SHIPPED not in self.report.compared
        pair = self.report.compared
        parts = [Part("device", self.on_gpu, device), Part("pair", is_own_pair, pair)]

        if "vLLM" in also:
            # The CPU build of vLLM has different kernels.
            facts = self.report.environment.get("vllm", {})
            is_real = self.on_gpu and facts.get("device", "cpu") != "cpu"
            text = f"vLLM {facts['vllm']}" if facts else "vLLM did not run"
            parts.append(Part("vLLM", is_real, f"{text}; {source}"))
        if "rounds" in also:
            origins = {part: figures.origin for part, figures in _committed_rounds().items()}
            committed = "; ".join(f"{part}: {origin}" for part, origin in origins.items())
            is_real = self.own_rounds is not None
            parts.append(Part("rounds", is_real, "this machine" if is_real else committed))
        if "price" in also:
            price = f"{self.price_per_hour:g} per hour"
            real = PRICE in self.report.environment
            unset = f"no --price-per-hour; {price}, so only ratios are valid"
            parts.append(Part("price", real, price if real else unset))
        return Banner(tuple(parts))


def start() -> Machine:
    """Reads the report and the record; loads no model.

    Raises:
        SystemExit: A file is damaged. The message is one line.
    """
    try:
        report = load(REPORT) if REPORT.is_file() else newest_record(RESULTS)
        rounds = json.loads(ROUNDS.read_text("utf-8")) if ROUNDS.is_file() else None
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None

    return Machine(report=report, is_own_report=REPORT.is_file(), own_rounds=rounds)


def main(options: Sequence[str]) -> int:
    """Runs the validation and examples/h200.py on a GPU; returns 1 if one of them fails."""
    if not has_gpu():
        print("There is no GPU, so the notebooks read the committed records.")
        return 0

    validation = ["-m", "pytest", "validation", "--gpu", f"--report-dir={MEASURED}", *options]
    measure = [str(ROOT / "examples" / "h200.py"), f"--output={ROUNDS}"]

    MEASURED.mkdir(parents=True, exist_ok=True)
    codes = [
        subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
        for command in (validation, measure)
    ]
    return int(any(codes))


def _is_of_speeds(table: Table) -> bool:
    is_over_plain = table.rows and table.rows[0][0].startswith("plain")
    return "Speed at batch" in table.title and "No claim" not in table.title and is_over_plain


def _model_of(table: Table) -> str:
    return table.title.partition("Speed at batch")[0]


def _read_speed(row: Sequence[Any]) -> Speed:
    """Reads a row of a table with the columns of :data:`validation.speeds.COLUMNS`."""
    low, high = row[6].split(" to ")
    waits = {"TTFT": (row[8], row[9]), "TPOT": (row[10], row[11])}
    return Speed(row[0], row[2], row[3], row[5], float(low), float(high), row[7], waits)


@functools.cache
def _committed_rounds() -> dict[str, Figures]:
    """Parts of examples/h200.py that were measured on one H100 or one H200."""
    h100 = json.loads((RESULTS / "nvidia-h100.json").read_text("utf-8"))
    h200 = json.loads((RESULTS / "nvidia-h200.json").read_text("utf-8"))
    facts = {fact["name"]: fact for fact in h100["facts"]}

    device = {
        "error of float32": facts["float32"]["highest"],
        "bytes_per_second": {"copy": 1e12 * facts["bandwidth, copy"]["tb_per_second"]},
    }

    parts = {
        "device": Figures(device, f"{h100['device']}, {h100['date']}"),
        "round": Figures(h100["rounds"]["figures"], f"{h100['device']}, {h100['date']}"),
    }
    for part in ("bits", "weights"):
        parts[part] = Figures(h200["h200"][part], f"{h200['device']}, {h200['date']}")
    return parts


def datasheet_of(kind: str) -> Accelerator | None:
    """Finds the accelerator of a device name such as ``NVIDIA H100 80GB HBM3``; else ``None``."""
    words = set(re.split(r"[\s\-_/]+", kind.lower()))
    named = [
        accelerator
        for key, accelerator in KNOWN_ACCELERATORS.items()
        if set(key.split("-")) <= words
    ]
    return max(named, key=lambda accelerator: len(accelerator.name), default=None)


def newest_record(directory: Path) -> Report:
    """Loads the latest committed run of ``pytest validation``, one without a failure if any."""
    reports = []
    for file in directory.glob("*.json"):
        with contextlib.suppress(ValueError):  # a benchmark, a comparison
            reports.append(load(file))
    return max(reports, key=lambda report: (report.verdict is not Verdict.FAILED, report.started))


def described(record: Report) -> str:
    """Describes the date and the machine of a report."""
    rival = record.environment.get("vllm", {})
    engines = f", with vLLM {rival['vllm']} on {rival.get('device', 'a server')}" if rival else ""
    return f"{record.started[:10]}, {_device_of(record)}{engines}"


def _device_of(record: Report) -> str:
    facts = record.environment
    device = facts["jax"]["device"]
    cpu = facts["cpu"]
    return f"CPU: {cpu['model']}, {cpu['cores']} cores" if device == "cpu" else device


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
