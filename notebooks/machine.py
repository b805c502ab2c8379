"""Selects the machine, models and vLLM of the notebooks for GPUs from environment variables.

A missing part (GPU, weights, vLLM) has a stand-in. A banner at the top of each notebook names the
stand-ins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from eagle3_jax.bench.environment import cpu_model
from eagle3_jax.bench.gpu import gpu_problem, has_gpu, on_gpu
from eagle3_jax.models.layers import PRECISIONS
from eagle3_jax.theory.accelerators import KNOWN_ACCELERATORS, Accelerator
from validation.device import environment_of_vllm
from validation.engines.memory import SHARE_OF_VLLM, share_memory
from validation.engines.vllm.bridge import VLLM, VLLMError
from validation.engines.vllm.process import Process
from validation.engines.vllm.server import Servers
from validation.fixtures import installed_python
from validation.runs import Report, Verdict, load
from validation.speeds import shared_dtype
from validation.subject import SHIPPED, Pair, Setting, Subject, choose

# Each corresponds to an option of `pytest validation`. Notebooks have no command line.
VARIABLES = {
    "EAGLE3_TARGET": "directory or hub id of the target",
    "EAGLE3_DRAFTER": "directory or hub id of its EAGLE-3 head",
    "EAGLE3_PROMPTS": f"JSONL files of prompts, joined by {os.pathsep!r}",
    "EAGLE3_DTYPE": f"main precision: {', '.join(PRECISIONS)}",
    "EAGLE3_VLLM_PYTHON": (
        "interpreter of an environment with vLLM; 'installed': the environment of `make vllm`"
    ),
    "EAGLE3_VLLM_URL": "running vLLM server with speculation, such as http://localhost:8000",
    "EAGLE3_VLLM_PLAIN_URL": "running vLLM server of the same target without speculation",
    "EAGLE3_VLLM_MEMORY": f"share of the GPU's memory for vLLM; default {SHARE_OF_VLLM}",
    "EAGLE3_PRICE_PER_HOUR": "price of the machine per hour, in any currency",
    "EAGLE3_ATTENTION": "xla: attention without the kernel; the library reads it",
}
_URLS = ("EAGLE3_VLLM_URL", "EAGLE3_VLLM_PLAIN_URL")
RESULTS = Path(__file__).resolve().parent.parent / "validation" / "results"
UNIT_PRICE = 1.0  # if EAGLE3_PRICE_PER_HOUR is not set


_ADDRESS = "the address of a server, such as http://localhost:8000"
_PYTHON = (
    "the file of a Python with vLLM, or 'installed' after `make vllm`; there is no file of this"
    " name"
)
# How a variable is read, which values are valid, and what was expected; other variables are any
# text.
_CHECKS: dict[str, tuple[Callable[[str], Any], Callable[[Any], bool], str]] = {
    "EAGLE3_PROMPTS": (
        lambda text: tuple(Path(name).expanduser() for name in text.split(os.pathsep) if name),
        lambda files: all(file.is_file() for file in files),
        "files; there is no file of this name",
    ),
    "EAGLE3_DTYPE": (str, PRECISIONS.__contains__, f"one of {', '.join(PRECISIONS)}"),
    "EAGLE3_VLLM_PYTHON": (
        lambda text: installed_python() if text == "installed" else Path(text).expanduser(), Path.is_file, _PYTHON
    ),
    **{name: (str, re.compile(r"https?://[^/]").match, _ADDRESS) for name in _URLS},
    "EAGLE3_VLLM_MEMORY": (float, lambda share: 0 < share < 1, "a share between 0 and 1"),
    "EAGLE3_PRICE_PER_HOUR": (float, lambda price: 0 < price < float("inf"), "a price above 0"),
    "EAGLE3_ATTENTION": (str, "xla".__eq__, "xla"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """The environment variables of :data:`VARIABLES` by the ends of their names; ``None`` for those that are not set."""

    target: str | None = None
    drafter: str | None = None
    prompts: tuple[Path, ...] = ()
    dtype: str | None = None
    vllm_python: Path | None = None
    vllm_url: str | None = None
    vllm_plain_url: str | None = None
    vllm_memory: float = SHARE_OF_VLLM
    price_per_hour: float | None = None
    attention: str | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Configuration:
        """Reads environment variables; an empty one counts as not set.

        Raises:
            ValueError: A variable is unknown or invalid. The message is one line with the expected
                value.
        """
        values: dict[str, Any] = {}
        for name in environ:
            if name.startswith("EAGLE3_") and name not in VARIABLES:
                raise ValueError(f"{name} is not known; the variables are {', '.join(VARIABLES)}")
            text = environ[name].strip()
            if not text or name not in VARIABLES:
                continue
            read, valid, expected = _CHECKS.get(name, (str, bool, ""))
            try:
                values[name] = read(text)
                wrong = not valid(values[name])
            except ValueError:
                wrong = True
            if wrong:
                raise ValueError(f"{name} is {text!r}; expected {expected}")
        pair = {"EAGLE3_TARGET", "EAGLE3_DRAFTER"}
        if len(pair & values.keys()) == 1:
            raise ValueError(f"a head fits one target only; set {(pair - values.keys()).pop()} too")
        if "EAGLE3_VLLM_PYTHON" in values and set(_URLS) & values.keys():
            raise ValueError("EAGLE3_VLLM_PYTHON and EAGLE3_VLLM_URL name two vLLMs; set one")
        return cls(
            **{name.removeprefix("EAGLE3_").lower(): value for name, value in values.items()}
        )


class Part(NamedTuple):
    """One thing that the numbers depend on: its name, whether it is real or a stand-in, and its description."""

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
            "<tr><td"
            f" style='white-space:nowrap'>{'&#10003; real' if part.real else '&#9888; stand-in'}</td><td><b>{html.escape(part.name)}</b></td><td"
            f" style='text-align:left'>{html.escape(part.text)}</td></tr>"
            for part in self.parts
        )
        return (
            f"<div class='eagle3-banner' style='border-left:6px solid {edge};padding:.4em"
            " 1em;margin:.5em"
            f" 0;background:{edge}14'><b>{html.escape(message)}</b><table>{rows}</table></div>"
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
            "<table><tr"
            f" class='eagle3-result'><td><b>{html.escape(self.name)}</b></td>{cells}</tr></table>"
        )


@dataclasses.dataclass(eq=False)
class Machine:
    """This machine, and the stand-ins for the parts that it lacks."""

    configuration: Configuration  #: From the environment.
    subject: Subject  #: Target, head and prompts.
    on_gpu: bool  #: Whether JAX computes on a GPU.
    has_gpu: bool  #: Whether there is an NVIDIA GPU, from which JAX may have been kept.

    @property
    def device(self) -> str:
        """Name of the device for figures and tables."""
        if self.on_gpu:
            return jax.devices()[0].device_kind
        return f"CPU: {cpu_model()}, {os.cpu_count()} cores"

    @property
    def accelerator(self) -> Accelerator | None:
        """Data sheet of this device; ``None`` for a CPU or an unknown device."""
        return datasheet_of(jax.devices()[0].device_kind) if self.on_gpu else None

    @property
    def dtype(self) -> str:
        """The main precision."""
        return self.subject.dtypes[0]

    @property
    def shared_dtype(self) -> str:
        """The main precision, or the nearest one that other engines support."""
        return shared_dtype(self.dtype)

    @property
    def pair(self) -> Pair:
        """Target and head in the main precision."""
        return self.subject.pair(self.dtype)

    @property
    def setting(self) -> Setting:
        """Setting of the validation for this configuration."""
        return _setting(self.configuration, self.on_gpu)

    @property
    def price_per_hour(self) -> float:
        """Price per hour; default 1."""
        return self.configuration.price_per_hour or UNIT_PRICE

    @property
    def price_named(self) -> str:
        """Description of the price for figures and tables."""
        assumed = "" if self.configuration.price_per_hour else " (assumed)"
        return f"at {self.price_per_hour:g} per hour{assumed}"

    def amount(self, *, cpu: Any, gpu: Any) -> Any:
        """Chooses the amount of work by device."""
        return gpu if self.on_gpu else cpu

    @functools.cached_property
    def vllm(self) -> VLLM | None:
        """The configured vLLM, connected at the first access; ``None`` without one.

        Raises:
            VLLMError: The configured vLLM does not answer. The message is one line with the reason.
        """
        configuration = self.configuration
        if urls := [
            url for url in (configuration.vllm_url, configuration.vllm_plain_url) if url is not None
        ]:
            return Servers(urls)
        if configuration.vllm_python is None:
            return None
        environment = environment_of_vllm() if self.on_gpu else {}
        return Process(
            configuration.vllm_python,
            environment=environment,
            memory_share=configuration.vllm_memory,
        )

    @property
    def vllm_process(self) -> Process | None:
        """The configured vLLM if it is a process of this machine."""
        return self.vllm if isinstance(self.vllm, Process) else None

    def draft_tokens(self, num_tokens: int) -> int:
        """``K`` for a comparison with vLLM: ``wanted``, or the fixed one of a running server."""
        if isinstance(self.vllm, Servers):
            for server in self.vllm.servers:
                if server.speculates:
                    return (
                        len(server.counters().get("num_accepted_tokens_per_pos", ())) or num_tokens
                    )
        return num_tokens

    @functools.cached_property
    def record(self) -> Report:
        """The newest committed run of the validation; replaces missing parts."""
        return newest_record(RESULTS)

    def exactly(self) -> None:
        """Sets products to float32 precision, as in the checks. Timings use the default precision."""
        if self.on_gpu:
            jax.config.update("jax_default_matmul_precision", "highest")

    def verdict(self, name: str, text: str, *, needs: str = "") -> Result:
        """Makes a row of the joined report. ``needs``: ``vLLM`` or ``price`` if the result depends on it."""
        return Result(name, text, not self.banner(needs).missing)

    def banner(self, *also: str) -> Banner:
        """Real parts and stand-ins: device, pair, and those of ``vLLM`` and ``price`` in ``also``."""
        device = f"no GPU: {self.device}"
        if self.on_gpu:
            device = f"{self.device}, 1 of {jax.device_count()}"
        elif self.has_gpu:
            device = f"JAX_PLATFORMS keeps jax from the NVIDIA GPU that is here: {self.device}"
        pair = f"{self.subject.name}, {self.dtype}"
        is_own_pair = self.subject.name != SHIPPED
        if not is_own_pair:
            why = self.subject.reason or "no weights set (EAGLE3_TARGET, EAGLE3_DRAFTER)"
            pair = f"{why}; the shipped pair, {self.dtype}"
        parts = [Part("device", self.on_gpu, device), Part("pair", is_own_pair, pair)]
        if "vLLM" in also:
            parts.append(self._vllm())
        if "price" in also:
            price = f"{self.price_per_hour:g} per hour"
            real = self.configuration.price_per_hour is not None
            unset = f"none set (EAGLE3_PRICE_PER_HOUR); {price}, so only ratios are valid"
            parts.append(Part("price", real, f"{price} (EAGLE3_PRICE_PER_HOUR)" if real else unset))
        return Banner(tuple(parts))

    def _vllm(self) -> Part:
        try:
            versions = self.vllm.versions if self.vllm is not None else None
        except VLLMError as error:
            raise SystemExit(f"error: {error}") from None
        if versions is None:
            why = "no vLLM set (EAGLE3_VLLM_PYTHON, EAGLE3_VLLM_URL)"
            return Part("vLLM", False, f"{why}; the committed record of {described(self.record)}")
        where = versions.get("device", "a server")
        # With a GPU, the CPU build of vLLM is a stand-in: it has different kernels.
        return Part(
            "vLLM", not (self.on_gpu and where == "cpu"), f"vLLM {versions['vllm']}, on {where}"
        )


def start(environ: Mapping[str, str] = os.environ) -> Machine:
    """Reads the environment and the machine and sets JAX's share of the memory; loads no model.

    Raises:
        SystemExit: A variable is invalid, or this jax cannot use the GPU of the machine. The
            message is one line.
    """
    try:
        configuration = Configuration.read(environ)
        share_memory()
        problem = gpu_problem()
        if problem is not None:
            raise ValueError(problem)
        gpu = on_gpu()
        subject = choose(_setting(configuration, gpu))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if configuration.dtype is not None:
        subject = dataclasses.replace(subject, dtypes=(configuration.dtype,))
    return Machine(configuration, subject, gpu, has_gpu())


def _setting(configuration: Configuration, gpu: bool) -> Setting:
    return Setting(
        gpu=gpu,
        quick=not gpu,
        target=configuration.target,
        drafter=configuration.drafter,
        prompt_files=configuration.prompts,
        price_per_hour=configuration.price_per_hour,
    )


def datasheet_of(kind: str) -> Accelerator | None:
    """Finds the accelerator of a device name such as ``NVIDIA H100 80GB HBM3``; ``None`` if it is unknown."""
    words = set(re.split(r"[\s\-_/]+", kind.lower()))
    named = [
        accelerator
        for key, accelerator in KNOWN_ACCELERATORS.items()
        if set(key.split("-")) <= words
    ]
    return max(named, key=lambda accelerator: len(accelerator.name), default=None)


def newest_record(directory: Path) -> Report:
    """Loads the latest committed run of ``pytest validation`` without a failure, or the latest of all."""
    reports = []
    for file in directory.glob("*.json"):
        with contextlib.suppress(ValueError):  # a benchmark, a comparison
            reports.append(load(file))
    return max(reports, key=lambda report: (report.verdict is not Verdict.FAILED, report.started))


def described(record: Report) -> str:
    """Describes the date and the machine of a report."""
    facts = record.environment
    cpu = facts["cpu"]
    device = facts["jax"]["device"]
    where = f"CPU: {cpu['model']}, {cpu['cores']} cores" if device == "cpu" else device
    rival = facts.get("vllm", {})
    engines = f", with vLLM {rival['vllm']} on {rival.get('device', 'a server')}" if rival else ""
    return f"{record.started[:10]}, {where}{engines}"
