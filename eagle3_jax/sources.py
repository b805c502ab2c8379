"""Places of checkpoints: the package itself, a local directory, or the hub."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

# The advice for a file of llama.cpp.
NO_GGUF = "GGUF is not supported, so give the safetensors checkpoint that it was made from"
# The files that are fetched from the hub: configuration and tokenizer, chat template, weights.
FETCHED = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "*.safetensors", "*.bin", "medusa_lm_head.pt")


def bundled(part: str) -> Path:
    """Directory of a part of the pair that ships with the package: ``target`` or ``eagle3``."""
    return Path(str(resources.files("eagle3_jax") / "assets" / part))


def locate(source: str | Path | None, part: str, fetched: tuple[str, ...] = FETCHED) -> Path:
    """The local directory of a source. A hub id is downloaded once; ``None`` is the shipped ``part``.

    Args:
        source: Directory or hub id.
        part: ``target`` or ``eagle3``.
        fetched: The files of a hub id that are needed.

    Raises:
        ValueError: There is no such directory.
    """
    if source is None:
        return bundled(part)
    given, path = str(source), Path(source)
    if path.suffix == ".gguf":
        raise ValueError(f"{given[:200]}: {NO_GGUF}")
    try:
        if given and path.is_dir():
            return path
        exists = path.exists()
    except (OSError, ValueError) as error:  # too long, not permitted, a NUL
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{given[:80]!r} is no directory that can be read ({reason})") from None
    if not given or exists or given.count("/") != 1 or given.startswith((".", "/", "~")):
        name = given[:200] or "an empty name"
        raise ValueError(f"{name} is not a directory; give a checkpoint directory or a hub id such as org/name")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"{source} is no local directory, and hub ids need huggingface_hub: pip install 'eagle3-jax[hub]'"
        ) from None
    try:
        return Path(snapshot_download(given, allow_patterns=list(fetched)))
    except Exception as error:  # the hub's errors have no common type that is public
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{source} is no local directory and could not be downloaded: {reason}") from None
