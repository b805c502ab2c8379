"""Finds checkpoints: in the package, in a local directory, by the short name of a published model, or on the hub."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_jax.files.published import PUBLISHED, fetch_published

if TYPE_CHECKING:
    pass

# The file that describes a native checkpoint.
NATIVE_FILE = "eagle3_jax.json"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
# The files that are fetched from the hub: configuration and tokenizer, chat template, weights.
FETCHED = (
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "merges.txt",
    "*.safetensors",
    "*.bin",
    "medusa_lm_head.pt",
)


def bundled(part: str) -> Path:
    """Returns the path of a bundled checkpoint: ``target``, ``eagle3``, or a published model's name for its head."""
    return Path(str(resources.files("eagle3_jax") / "assets" / part))


def within(directory: Path) -> Path:
    """Returns the path to read for a directory: its GGUF file if it has no other weights, else the directory.

    Raises:
        ValueError: It has several GGUF files, or cannot be read.
    """
    try:
        names = {path.name for path in directory.iterdir()}
    except OSError as error:
        raise ValueError(f"{directory} cannot be read ({error.strerror or error})") from None
    files = sorted(name for name in names if name.endswith(".gguf"))
    if not files or NATIVE_FILE in names or any(name.endswith(_OTHER_WEIGHTS) for name in names):
        return directory
    if len(files) > 1:
        raise ValueError(
            f"{directory} holds {len(files)} GGUF files ({', '.join(files[:3])}); give the path"
            " of one"
        )
    return directory / files[0]


def locate(source: str | Path | None, part: str, fetched: tuple[str, ...] = FETCHED) -> Path:
    """Returns the local directory or GGUF file of a source; for ``None``, the bundled ``part``.

    Published models and hub ids are downloaded once. The heads of published models are bundled.

    Args:
        source: Directory, GGUF file, short name of :data:`~eagle3_jax.files.published.PUBLISHED`,
            or hub id.
        part: ``target`` or ``eagle3``.
        fetched: Patterns of the files to download for a hub id.

    Raises:
        ValueError: There is no such directory or file, or the download failed.
    """
    if source is None:
        return bundled(part)
    text = str(source)
    path = Path(source)
    try:
        exists = path.exists()
        is_directory = bool(text) and path.is_dir()
    except (OSError, ValueError) as error:  # too long, not permitted, a NUL
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{text[:80]!r} is no directory that can be read ({reason})") from None
    if is_directory:
        return within(path)
    if path.suffix == ".gguf":
        if not exists:
            raise ValueError(f"{text[:200]} does not exist; give the path of a GGUF file")
        return path
    if text in PUBLISHED and not exists:
        return fetch_published(text) if part == "target" else bundled(text)
    if not text or exists or text.count("/") != 1 or text.startswith((".", "/", "~")):
        name = text[:200] or "an empty name"
        raise ValueError(
            f"{name} is not a directory; give a checkpoint directory, a GGUF file, a hub id such as"
            " org/name, or"
            f" {' or '.join(PUBLISHED)}{did_you_mean(path.name, _suggestions(path, part))}"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"{source} is no local directory, and hub ids need huggingface_hub: pip install"
            " 'eagle3-jax[hub]'"
        ) from None
    try:
        return Path(snapshot_download(text, allow_patterns=list(fetched)))
    except Exception as error:  # the hub's errors have no common type that is public
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{source} is no local directory and could not be downloaded: {reason}"
        ) from None


def did_you_mean(name: str, suggestions: Mapping[str, str]) -> str:
    """Returns a question that ends the message about an unknown name; empty if no known name is similar.

    Args:
        name: The unknown name.
        suggestions: The text to suggest for each known name.
    """
    spellings = {known.lower(): text for known, text in suggestions.items()}
    similar = difflib.get_close_matches(name.lower(), spellings, n=1, cutoff=0.5)
    return f"; did you mean {spellings[similar[0]]}?" if similar else ""


def _suggestions(path: Path, part: str) -> dict[str, str]:
    """Returns the well-known targets, the directories next to a path that does not exist, and the names of ``part``."""
    from eagle3_jax.drafters.named import NAMED
    from eagle3_jax.theory.known_models import KNOWN_MODELS, known_name

    is_target = part == "target"
    known = known_name(path.name, KNOWN_MODELS)  # which only `eagle3 plan` takes
    suggestions = {
        name: f"the hub id of {name}" if name == known else name
        for name in KNOWN_MODELS
        if is_target
    }
    with contextlib.suppress(OSError, ValueError):
        neighbors = [
            entry for entry in path.parent.iterdir() if entry.suffix == ".gguf" or entry.is_dir()
        ]
        suggestions |= {entry.name: str(entry) for entry in neighbors}
    return suggestions | {
        name: name for name in (PUBLISHED if is_target else [*PUBLISHED, *NAMED.values()])
    }
