"""Accelerators by name, as devices that can be compiled for and not run on.

``cuda:h200`` is one NVIDIA H200, ``tpu:v6e:2x2`` a host of four TPU v6e. JAX compiles for either
without one: the plugin brings the compiler, and a GPU is described by the text in ``specs/``.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax

from eagle3_jax.measure.environment import version

SPECS = Path(__file__).with_name("specs")
GPUS = sorted(path.stem for path in SPECS.glob("*.txtpb"))
_TPU = re.compile(r"v\d\w*:\d+x\d+(x\d+)?")


class NotHere(Exception):
    """The compiler for a platform is missing, or of another JAX; one line says what to do."""


class Platform(NamedTuple):
    """A kind of accelerator."""

    kind: str  #: ``cuda`` or ``tpu``.
    detail: str  #: ``h200`` of ``cuda:h200``, ``v6e:2x2`` of ``tpu:v6e:2x2``.

    @classmethod
    def named(cls, name: str) -> Platform:
        """Returns the platform of a name.

        Raises:
            ValueError: There is no such platform.
        """
        kind, _, detail = name.partition(":")
        if (kind == "cuda" and detail in GPUS) or (kind == "tpu" and _TPU.fullmatch(detail)):
            return cls(kind, detail)
        known = ", ".join(f"cuda:{gpu}" for gpu in GPUS)
        raise ValueError(
            f"there is no platform {name!r} to compile for; use one of {known}, or a TPU with its"
            " topology such as tpu:v6e:2x2 or tpu:v6e:1x1"
        )

    @property
    def wheels(self) -> dict[str, str]:
        """The version of each distribution that JAX needs, as ``0.10.2`` or ``0.0.42.*``."""
        if self.kind == "cuda":
            return dict.fromkeys(("jax-cuda13-plugin", "jax-cuda13-pjrt"), version("jax"))
        requirements = " ".join(importlib.metadata.requires("jax") or [])
        libtpu = re.search(r"libtpu\s*==\s*([\d.*]+)", requirements)
        return {"libtpu": libtpu[1] if libtpu else "*"}

    def missing(self) -> str:
        """Returns why this process cannot compile for it, and what to install; empty if it can."""
        wrong = []
        for wheel, required in self.wheels.items():
            installed = version(wheel)
            if not re.fullmatch(re.escape(required).replace(r"\*", ".*"), installed):
                wrong.append(f"{wheel} is {installed}")
        if not wrong:
            return ""

        pins = " ".join(f"'{wheel}=={required}'" for wheel, required in self.wheels.items())
        directory = str(plugins()).replace(str(Path.home()), "~", 1)
        return (
            f"{self.kind}:{self.detail} cannot be compiled for: {', '.join(wrong)}. Install outside"
            f" the environment: pip install --no-deps --target {directory} {pins}"
        )

    def devices(self, count: int) -> list[Any]:
        """Returns devices to place shapes on.

        GPUs as many as are needed, of a TPU at most those of its topology.

        Raises:
            NotHere: The compiler is missing.
            ValueError: The topology does not exist.
        """
        if reason := self.missing():
            raise NotHere(reason)
        from jax.experimental import topologies

        options: dict[str, Any]
        if self.kind == "cuda":
            spec = (SPECS / f"{self.detail}.txtpb").read_text("utf-8")
            options = {"target_config": spec, "topology": f"1x1x{count}"}
        else:
            options = {"topology_name": self.detail}
            if set(self.detail.partition(":")[2]) == {"1", "x"}:  # one chip, as in v6e:1x1
                options["chips_per_host_bounds"] = (1, 1, 1)
        try:
            topology = topologies.get_topology_desc(platform=self.kind, **options)
        except Exception as error:  # an error of the plugin, of any type
            raise ValueError(f"{self.kind}:{self.detail}: {str(error).splitlines()[0]}") from None
        return list(topology.devices)[:count]


def plugins() -> Path:
    """Returns where ``make aot`` puts the compilers for this JAX, outside every environment."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "eagle3-jax" / f"plugins-jax-{version('jax')}"


def find_compilers() -> None:
    """Adds the compilers to a process that compiles and runs nothing, before it uses JAX."""
    sys.path.append(str(plugins()))
    # No chip is used, and several processes may load the library of TPUs.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    jax.config.update("jax_platforms", "cpu")


if __name__ == "__main__":  # for the Makefile: where the compilers belong, and which
    platform = Platform.named(sys.argv[1])
    print(plugins(), *(f"{wheel}=={required}" for wheel, required in platform.wheels.items()))
