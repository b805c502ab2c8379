"""Finds checkpoints: bundled ones, local directories, published models and those of the hub."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

from eagle3_jax.files.published import PUBLISHED, fetch_published

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

#: The form of each named drafter: its name, or ``name=E`` with a whole number.
NAMED = {
    "ngram": "ngram",
    "suffix": "suffix",
    "layer-skip": "layer-skip=E",
    "mtp": "mtp",
    "none": "none",
}
#: The named drafter that is in the target's own files.
OWN_MODULES = "mtp"
FORMS = ", ".join(map(repr, NAMED.values()))
#: Prefix of a head: n-grams of at least two tokens draft if the text has a match, else the head.
LOOKUP_FIRST = "ngram+"


def bundled(part: str) -> Path:
    """Returns the path of a bundled checkpoint.

    Its name is ``target``, ``eagle3``, or a published model's name for that model's head.
    """
    return Path(str(resources.files("eagle3_jax") / "assets" / part))


def within(directory: Path) -> Path:
    """Returns the path to read for a directory.

    It is its GGUF file if it has no other weights, else the directory.

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


def locate(
    source: str | Path | None,
    part: str,
    fetched: tuple[str, ...] = FETCHED,
    *,
    suggest: Callable[[str], Mapping[str, str]] = lambda name: {},
) -> Path:
    """Returns the local directory or GGUF file of a source; for ``None``, the bundled ``part``.

    Published models and hub ids are downloaded once. The heads of published models are bundled.

    Args:
        source: Directory, GGUF file, short name of :data:`~eagle3_jax.files.published.PUBLISHED`,
            or hub id.
        part: ``target`` or ``eagle3``.
        fetched: Patterns of the files to download for a hub id.
        suggest: Returns the texts to suggest in place of an unknown name, by the names that it
            may have been meant for, in addition to published models and the path's neighbours.

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
    # The path may be too long, forbidden, or have a NUL.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{text[:80]!r} is not a directory that can be read ({reason})") from None

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
        published = {name: name for name in PUBLISHED}
        suggestions = {**suggest(path.name), **_neighbours(path), **published}
        raise ValueError(
            f"{name} is not a directory; give a checkpoint directory, a GGUF file, a hub id such as"
            f" org/name, or {' or '.join(PUBLISHED)}{did_you_mean(path.name, suggestions)}"
        )

    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"{source} is not a local directory, and hub ids need huggingface_hub: pip install"
            " 'eagle3-jax[hub]'"
        ) from None
    try:
        return Path(snapshot_download(text, allow_patterns=list(fetched)))
    # The hub's errors have no common type that is public.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{source} is not a local directory and could not be downloaded: {reason}"
        ) from None


def did_you_mean(name: str, suggestions: Mapping[str, str]) -> str:
    """Returns a question that ends the message about an unknown name; empty without a similar one.

    Args:
        name: The unknown name.
        suggestions: The text to suggest for each known name.
    """
    spellings = {known.lower(): text for known, text in suggestions.items()}
    similar = difflib.get_close_matches(name.lower(), spellings, n=1, cutoff=0.5)
    return f"; did you mean {spellings[similar[0]]}?" if similar else ""


def _neighbours(path: Path) -> dict[str, str]:
    """Returns the checkpoints next to a path that does not exist."""
    try:
        entries = list(path.parent.iterdir())
    except (OSError, ValueError):
        return {}
    return {
        entry.name: str(entry) for entry in entries if entry.suffix == ".gguf" or entry.is_dir()
    }


def is_named(source: str | None) -> bool:
    """Returns whether a source is a named drafter, with a number or without."""
    return (source or "").partition("=")[0] in NAMED


def without_lookup(source: str) -> str:
    """Returns the head of ``ngram+HEAD``, and any other source unchanged."""
    return source.removeprefix(LOOKUP_FIRST)


def parts_of(source: str) -> tuple[str, int]:
    """Returns the name and the number of a source; the number is 0 if the name takes none."""
    name, sign, number = source.partition("=")
    form = NAMED[name]
    takes = form != name
    if takes != bool(sign) or (takes and not (number.isdecimal() and len(number) < 10)):
        raise ValueError(
            f"drafter {source!r}: expected {form}{', such as ' + name + '=4' if takes else ''}"
        )
    return name, int(number or 0)


def similar_drafters(name: str) -> dict[str, str]:
    """Returns the forms of the named drafters, for :func:`locate`."""
    del name
    return {form: form for form in NAMED.values()}
