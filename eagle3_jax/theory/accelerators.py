"""Accelerators by their datasheets, and the number formats that they hold."""

from __future__ import annotations

import dataclasses
import difflib
import math

# Bits per weight of the matrices inside the layers. int4 carries a 16-bit scale for every 128
# weights, mxfp4 one of 8 bits for every 32, nvfp4 one for every 16. The scales of fp8 and int8, one
# a row, are left out (a thousandth).
WEIGHT_BITS = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "fp8": 8.0,
    "int8": 8.0,
    "int4": 4.0 + 16 / 128,
    "mxfp4": 4.0 + 8 / 32,
    "nvfp4": 4.0 + 8 / 16,
}
CACHE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Limits of an accelerator."""

    name: str  #: Name for tables and messages.
    #: Capacity. Vendors' gigabytes are taken as ``10**9``, which is on the safe side.
    memory_bytes: float
    bandwidth_bytes_per_second: float  #: Memory bandwidth.
    #: Dense bfloat16 operations per second, summed in float32; without the doubling for sparse
    #: matrices.
    peak_flops: float
    #: Dense FP8 operations per second; ``None`` where products are not computed in FP8.
    peak_flops_fp8: float | None
    source: str  #: Publication of the figures.

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "bandwidth_bytes_per_second", "peak_flops", "peak_flops_fp8"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ValueError(f"{field} of {self.name} is {value:g}; expected a positive number")


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_AMD = "https://www.amd.com/en/products/accelerators/instinct/mi300"
_GOOGLE = "https://docs.cloud.google.com/tpu/docs"

# Name, GB, TB/s, bfloat16 and FP8 TFLOPS, source. Many datasheets print peaks for 2:4 sparse
# matrices; these are dense.
# fmt: off
_DATASHEETS: list[tuple[str, float, float, float, float | None, str]] = [
    ("B200", 180.0, 8.0, 2250.0, 4500.0,
     f"NVIDIA DGX B200, an eighth of the system: {_NVIDIA}/dgx-b200/"),
    ("H200", 141.0, 4.8, 989.0, 1979.0, f"NVIDIA H200 datasheet, SXM: {_NVIDIA}/h200/"),
    ("H100", 80.0, 3.35, 989.0, 1979.0, f"NVIDIA H100 datasheet, SXM5: {_NVIDIA}/h100/"),
    ("H100-NVL", 94.0, 3.9, 835.0, 1671.0, f"NVIDIA H100 datasheet, NVL: {_NVIDIA}/h100/"),
    ("H100-PCIe", 80.0, 2.0, 756.0, 1513.0, "NVIDIA H100 datasheet (first edition), PCIe"),
    ("A100-80GB", 80.0, 2.039, 312.0, None, f"NVIDIA A100 datasheet, 80 GB SXM4: {_NVIDIA}/a100/"),
    ("A100-40GB", 40.0, 1.555, 312.0, None, f"NVIDIA A100 datasheet, 40 GB SXM4: {_NVIDIA}/a100/"),
    ("L40S", 48.0, 0.864, 362.0, 733.0, f"NVIDIA L40S datasheet: {_NVIDIA}/l40s/"),
    ("L4", 24.0, 0.3, 121.0, 242.0,
     f"NVIDIA L4 datasheet, half of the sparse peaks: {_NVIDIA}/l4/"),
    ("RTX-5090", 32.0, 1.792, 209.5, 419.0, "NVIDIA RTX Blackwell whitepaper, sums in float32"),
    ("RTX-4090", 24.0, 1.008, 165.2, 330.3, "NVIDIA Ada whitepaper, sums in float32"),
    ("RTX-3090", 24.0, 0.936, 71.0, None, "NVIDIA GA102 whitepaper, sums in float32"),
    ("MI300X", 192.0, 5.3, 1307.4, 2614.9, f"AMD Instinct MI300X datasheet: {_AMD}/mi300x.html"),
    ("MI325X", 256.0, 6.0, 1307.4, 2614.9, f"AMD Instinct MI325X datasheet: {_AMD}/mi325x.html"),
    ("TPU-v5e", 16.0, 0.819, 197.0, None, f"Google Cloud documentation: {_GOOGLE}/v5e"),
    ("TPU-v5p", 95.0, 2.765, 459.0, None, f"Google Cloud documentation: {_GOOGLE}/v5p"),
    ("TPU-v6e", 32.0, 1.6, 918.0, None, f"Google Cloud documentation: {_GOOGLE}/v6e"),
]
# fmt: on
KNOWN_ACCELERATORS = {
    name.lower(): Accelerator(
        name, gigabytes * 1e9, bandwidth * 1e12, peak * 1e12, fp8 and fp8 * 1e12, source
    )
    for name, gigabytes, bandwidth, peak, fp8, source in _DATASHEETS
}


def accelerator_named(name: str) -> Accelerator:
    """Returns the accelerator of a name in any case; ``H100-SXM`` is the ``H100``.

    Raises:
        ValueError: No accelerator has this name.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    key = key.removeprefix("nvidia-").removesuffix("-sxm")
    if key in KNOWN_ACCELERATORS:
        return KNOWN_ACCELERATORS[key]

    near = difflib.get_close_matches(key, KNOWN_ACCELERATORS, n=1)
    known = ", ".join(accelerator.name for accelerator in KNOWN_ACCELERATORS.values())
    hint = f"; did you mean {KNOWN_ACCELERATORS[near[0]].name}?" if near else ";"
    raise ValueError(
        f"accelerator {name!r} is not known{hint} known are {known}; describe any other with"
        " --bandwidth-gb-per-s"
    )


def custom_accelerator(
    *,
    gb_per_s: float,
    tflops: float | None = None,
    memory_gb: float | None = None,
    base: Accelerator | None = None,
) -> Accelerator:
    """Returns an accelerator of some bandwidth, or a known one with measured figures.

    Args:
        gb_per_s: Bandwidth.
        tflops: Dense bfloat16 peak; without it nothing is limited by arithmetic.
        memory_gb: Capacity; without it everything fits.
        base: Source of the other figures.

    Raises:
        ValueError: A figure is not positive.
    """
    base = base or Accelerator("", math.inf, 1.0, math.inf, None, "")
    return Accelerator(
        name=f"{base.name} at {gb_per_s:g} GB/s".removeprefix(" at "),
        memory_bytes=base.memory_bytes if memory_gb is None else memory_gb * 1e9,
        bandwidth_bytes_per_second=gb_per_s * 1e9,
        peak_flops=base.peak_flops if tflops is None else tflops * 1e12,
        peak_flops_fp8=base.peak_flops_fp8 if tflops is None else None,
        source="given on the command line",
    )
