"""Accelerators by name, as devices that can be compiled for and not run on.

``cuda:h200`` is one NVIDIA H200, ``tpu:v6e:2x2`` a host of four TPU v6e. JAX compiles for either without one: the
plugin brings the compiler, and a GPU is described by the text in ``specs/``.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SPECS = Path(__file__).with_name("specs")
GPUS = tuple(sorted(path.stem for path in SPECS.glob("*.txtpb")))
_TPU = re.compile(r"v\d\w*:\d+x\d+(x\d+)?")

# What a process needs that compiles and runs nothing: no chip is asked for, and several may load the TPU's library.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


class NotHere(Exception):
    """The compiler for a platform is not installed, or is not of JAX's version; one line says what to do."""


@dataclasses.dataclass(frozen=True)
class Platform:
    """A kind of accelerator."""

    kind: str  #: ``cuda`` or ``tpu``.
    detail: str  #: ``h200`` of ``cuda:h200``, ``v6e:2x2`` of ``tpu:v6e:2x2``.

    @classmethod
    def named(cls, name: str) -> Platform:
        """The platform of that name.

        Raises:
            ValueError: There is none.
        """
        kind, _, detail = name.partition(":")
        if (kind == "cuda" and detail in GPUS) or (kind == "tpu" and _TPU.fullmatch(detail)):
            return cls(kind, detail)
        known = ", ".join(f"cuda:{gpu}" for gpu in GPUS)
        raise ValueError(
            f"there is no platform {name!r} to compile for; use one of {known}, or a TPU with its topology such as "
            "tpu:v6e:2x2 or tpu:v6e:1x1"
        )

    @property
    def name(self) -> str:
        """``cuda:h200``."""
        return f"{self.kind}:{self.detail}"

    def holds(self, count: int) -> bool:
        """Whether it has as many devices: of GPUs any number, of a TPU those of its topology."""
        return self.kind == "cuda" or math.prod(map(int, self.detail.partition(":")[2].split("x"))) >= count

    @property
    def wheels(self) -> dict[str, str]:
        """Distribution to the version that the installed JAX asks for, as ``0.10.2`` or ``0.0.42.*``."""
        version = importlib.metadata.version("jax")
        if self.kind == "cuda":
            return {"jax-cuda13-plugin": version, "jax-cuda13-pjrt": version}
        requirements = (re.match(r"libtpu\s*==\s*([\d.*]+)", line) for line in importlib.metadata.requires("jax") or [])
        return {"libtpu": next((match[1] for match in requirements if match), "*")}

    def missing(self) -> str | None:
        """Why this process cannot compile for it, and what to install; ``None`` where it can."""
        wrong = []
        for wheel, required in self.wheels.items():
            try:
                installed = importlib.metadata.version(wheel)
            except importlib.metadata.PackageNotFoundError:
                wrong.append(f"{wheel} is not installed")
                continue
            if not re.fullmatch(re.escape(required).replace(r"\*", ".*"), installed):
                wrong.append(f"{wheel} is {installed}")
        if not wrong:
            return None
        version = importlib.metadata.version("jax")
        needed = self.wheels.items()
        return (
            f"{self.name} cannot be compiled for: {', '.join(wrong)}, and jax {version} needs "
            f"{' and '.join(f'{wheel} {required}' for wheel, required in needed)}. Install outside the environment: "
            f"pip install --no-deps --target {str(plugins()).replace(str(Path.home()), '~', 1)} "
            f"{' '.join(repr(f'{wheel}=={required}') for wheel, required in needed)}"
        )

    def devices(self, count: int = 1) -> list[Any]:
        """Devices to place shapes on: one, or as many as a mesh has; of a TPU always all of its topology.

        Raises:
            NotHere: The compiler is missing.
            ValueError: The topology has fewer devices than that, or does not exist.
        """
        if reason := self.missing():
            raise NotHere(reason)
        from jax.experimental import topologies

        try:
            if self.kind == "cuda":
                spec = (SPECS / f"{self.detail}.txtpb").read_text("utf-8")
                devices = topologies.get_topology_desc(
                    platform="cuda", target_config=spec, topology=f"1x1x{count}"
                ).devices
            else:
                shape = self.detail.partition(":")[2]
                single = {"chips_per_host_bounds": (1, 1, 1)} if set(shape.split("x")) == {"1"} else {}
                devices = topologies.get_topology_desc(platform="tpu", topology_name=self.detail, **single).devices
        except Exception as error:  # the plugin's own, of whatever type
            raise ValueError(f"{self.name} with {count} devices: {str(error).splitlines()[0]}") from None
        if len(devices) < count:
            raise ValueError(f"{self.name} has {len(devices)} devices, and {count} are needed")
        return list(devices)


def plugins() -> Path:
    """Where ``make aot`` puts the compilers for this version of JAX: outside every environment, kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "eagle3-jax" / f"plugins-jax-{importlib.metadata.version('jax')}"


def environment_with_plugins(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that compiles: the compilers come last on its path."""
    path = [str(Path(__file__).resolve().parent.parent.parent), variables.get("PYTHONPATH", ""), str(plugins())]
    return {**variables, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, path))}


if __name__ == "__main__":  # for the Makefile: where the compilers belong, and which
    platform = Platform.named(sys.argv[1])
    print(plugins(), *(f"{wheel}=={version}" for wheel, version in platform.wheels.items()))
