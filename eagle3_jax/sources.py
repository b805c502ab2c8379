"""Places of checkpoints: the package itself, a local directory, a published model by its short name, or the hub."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from eagle3_jax.published import PUBLISHED, fetch_published

# The file that describes a native checkpoint.
NATIVE_FILE = "eagle3_jax.json"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
# The files that are fetched from the hub: configuration and tokenizer, chat template, weights.
FETCHED = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "*.safetensors", "*.bin", "medusa_lm_head.pt")


def bundled(part: str) -> Path:
    """Path of what ships with the package: ``target``, ``eagle3``, or the name of a published model, for its head."""
    return Path(str(resources.files("eagle3_jax") / "assets" / part))


def within(directory: Path) -> Path:
    """The path that is read for a directory: its GGUF file where it holds no other weights, and otherwise itself.

    Raises:
        ValueError: It holds several GGUF files.
    """
    try:
        names = {path.name for path in directory.iterdir()}
    except OSError as error:
        raise ValueError(f"{directory} cannot be read ({error.strerror or error})") from None
    files = sorted(name for name in names if name.endswith(".gguf"))
    if not files or NATIVE_FILE in names or any(name.endswith(_OTHER_WEIGHTS) for name in names):
        return directory
    if len(files) > 1:
        raise ValueError(f"{directory} holds {len(files)} GGUF files ({', '.join(files[:3])}); give the path of one")
    return directory / files[0]


def locate(source: str | Path | None, part: str, fetched: tuple[str, ...] = FETCHED) -> Path:
    """The local directory, or GGUF file, of a source. ``None`` is the shipped ``part``.

    A published model and a hub id are downloaded once; the head of a published model ships with the package.

    Args:
        source: Directory, GGUF file, short name of :data:`~eagle3_jax.published.PUBLISHED`, or hub id.
        part: ``target`` or ``eagle3``.
        fetched: The files of a hub id that are needed.

    Raises:
        ValueError: There is no such directory or file.
    """
    if source is None:
        return bundled(part)
    given = str(source)
    path = Path(source)
    try:
        exists = path.exists()
        is_directory = bool(given) and path.is_dir()
    except (OSError, ValueError) as error:  # too long, not permitted, a NUL
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{given[:80]!r} is no directory that can be read ({reason})") from None
    if is_directory:
        return within(path)
    if path.suffix == ".gguf":
        if not exists:
            raise ValueError(f"{given[:200]} does not exist; give the path of a GGUF file")
        return path
    if given in PUBLISHED and not exists:
        return fetch_published(given) if part == "target" else bundled(given)
    if not given or exists or given.count("/") != 1 or given.startswith((".", "/", "~")):
        name = given[:200] or "an empty name"
        raise ValueError(
            f"{name} is not a directory; give a checkpoint directory, a GGUF file, a hub id "
            f"such as org/name, or {' or '.join(PUBLISHED)}"
        )
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
