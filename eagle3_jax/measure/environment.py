"""Environment and inputs of a run, without paths and environment variables, so that they may be published."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle3_jax import __version__
from eagle3_jax.files.versions import ROOT, git

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "scipy", "torch", "transformers")


def environment(
    *,
    target: str | None = None,
    drafter: str | None = None,
    prompt_files: Sequence[str | Path] = (),
) -> dict[str, Any]:
    """Returns versions, machine and inputs of a measurement.

    Args:
        target: Directory or hub id; ``None`` for the bundled target.
        drafter: Directory or hub id; ``None`` for the bundled head.
        prompt_files: Files of prompts; empty for the bundled prompts.
    """
    devices = jax.devices()
    memory = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"eagle3_jax": __version__, **{name: version(name) for name in PACKAGES}},
        "git": git(),
        "code": sha256_of_code(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"model": cpu_model(), "cores": os.cpu_count(), "memory_gib": memory},
        "jax": {
            "backend": jax.default_backend(),
            "device": devices[0].device_kind,
            "devices": len(devices),
            "runtime": str(devices[0].client.platform_version).strip().splitlines()[0],
        },
        "target": source(target, "target"),
        "drafter": source(drafter, "eagle3"),
        "prompts": [source(str(file), "") for file in prompt_files]
        or source(None, "prompts.jsonl"),
    }


def version(package: str) -> str:
    """Returns the installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def cpu_model() -> str:
    """Returns the name of the processor, as the kernel gives it."""
    try:
        match = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine() or "unknown"


def hardware() -> str:
    """Returns the processor or accelerator, their number and the version of jax as text."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        name = f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores"
    else:
        name = f"{device.device_kind}, 1 of {jax.device_count()}"
    return f"{name}, jax {jax.__version__}"


def source(name: str | None, part: str) -> dict[str, Any]:
    """Returns the name of a checkpoint or a prompt file, and its hash if it is on this machine.

    Args:
        name: Path, hub id or name of a published model; ``None`` for the bundled one.
        part: Part of the bundled pair.
    """
    from eagle3_jax.files.published import is_published
    from eagle3_jax.files.sources import bundled, locate

    if name is None:
        return {"name": "bundled", "sha256": sha256_of(bundled(part))}
    if is_published(name):
        return {"name": name, "sha256": sha256_of(locate(name, part))}
    path = Path(name).expanduser()
    if not path.exists():
        return {"name": committable(name), "sha256": None}
    return {"name": path.resolve().name, "sha256": sha256_of(path)}


def sha256_of(path: str | Path) -> str:
    """Returns the hash of a file, or of names and contents of configuration and weights of a checkpoint.

    Raises:
        ValueError: The directory holds no checkpoint.
    """
    path = Path(path)
    if path.is_file():
        return _digest(path)
    files = sorted(
        file for file in path.iterdir() if file.suffix in (".json", ".safetensors", ".bin")
    )
    if not files:
        raise ValueError(f"{path} holds no *.json, *.safetensors or *.bin")
    return _sha256_of_lines(f"{file.name}\0{_digest(file)}" for file in files)


def sha256_of_code() -> str:
    """Returns one hash of this library and, in a checkout, its tests and validation; uncommitted changes count."""
    folders = [ROOT / name for name in ("eagle3_jax", "tests", "validation")]
    files = [
        file
        for folder in folders
        for file in sorted(folder.rglob("*"))
        if file.suffix in (".py", ".toml")
    ]
    return _sha256_of_lines(
        f"{file.relative_to(ROOT).as_posix()}\0{_digest(file)}" for file in files
    )


def sha256_of_prompts(prompts: Sequence[str | Sequence[int] | np.ndarray]) -> str:
    """Returns one hash of prompts, in their order, as text or as token ids."""
    digest = hashlib.sha256()
    for prompt in prompts:
        if isinstance(prompt, str):
            text = "text\0" + prompt
        else:
            text = "ids\0" + ",".join(str(int(token)) for token in prompt)
        digest.update(
            hashlib.sha256(text.encode()).digest()
        )  # equal sizes, so prompts cannot run into each other
    return digest.hexdigest()


def committable(text: str) -> str:
    """Replaces absolute paths by base names and removes host names, so that a text may be published."""
    text = re.sub(r"(https?://)(?!localhost|127\.)[^\s/'\"]+", r"\1HOST", text)
    return re.sub(r"(?<![\w/.:])~?/(?:[^\s/'\"]+/)+", "", text)


def _sha256_of_lines(lines: Iterable[str]) -> str:
    text = "".join(f"{line}\n" for line in lines)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
