"""Where checkpoints come from: the package itself, a local directory, or the hub."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def bundled(part: str) -> Path:
    """Directory of a part of the pair that ships with the package: ``target`` or ``eagle3``."""
    return Path(str(resources.files("eagle3_jax") / "assets" / part))


def locate(source: str | Path | None, part: str) -> Path:
    """The local directory of a source; a hub id is downloaded once.

    Raises:
        ValueError: There is no such directory.
    """
    if source is None:
        return bundled(part)
    path = Path(source)
    if path.exists() or str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        if not path.is_dir():
            raise ValueError(f"{source} is not a directory; give a checkpoint directory or a hub id such as org/name")
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"{source} is no local directory, and hub ids need huggingface_hub: pip install 'eagle3-jax[hub]'"
        ) from None
    try:
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{source} is no local directory and could not be downloaded: {reason}") from None
