"""Files of ``eagle3 train``: the corpus, and the directory of a run, which can continue."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import write_json
from eagle3_jax.files.writing import disk_full_named

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from eagle3_jax.models.config import DecoderConfig
    from eagle3_jax.training.texts import Texts

CHECKPOINTS = "checkpoints"
_PARTIAL = ".partial"
# It ends a document of the corpus, and is the stop token of its target.
_END_OF_TEXT = "<|endoftext|>"
# The options of `eagle3 train data`, and how many shards there are when all are.
DATA_RECORD = "data.json"
# The options of a run, and its draft vocabulary. It is next to the checkpoints.
_RUN = "run.json"


def read_corpus(directory: Path) -> tuple[Any, Tokenizer]:
    """Reads the tokens to train on, and their tokenizer."""
    import numpy as np

    from eagle3_jax.conversion.files import read_tokenizer

    path = directory / "train.npy"
    tokenizer = read_tokenizer(directory / "tokenizer.json")
    if tokenizer is None or not path.is_file():
        raise Misuse(
            f"{directory} is not a corpus: it has no train.npy with token ids and no"
            " tokenizer.json; examples/corpus.py writes both"
        )
    try:
        tokens = np.load(path, mmap_mode="r")
        is_list = tokens.ndim == 1 and tokens.dtype.kind in "iu"
        fits = is_list and 0 <= tokens.min() <= tokens.max() < tokenizer.get_vocab_size()
    # The file may hold something else, be damaged, or be an archive.
    except (ValueError, EOFError, AttributeError):
        fits = False

    if not fits:
        raise Misuse(
            f"{path} is damaged, or holds no token ids of its tokenizer; write the corpus again"
        )
    return tokens, tokenizer


def shard_path(directory: Path, number: int) -> Path:
    """Returns the path of a file of texts in the directory of `eagle3 train data`."""
    return directory / f"texts-{number:05}.npz"


def begin_data(out: Path, options: Mapping[str, Any], shards: int) -> None:
    """Checks that `eagle3 train data` goes on with its first options.

    Those of a new directory are recorded.

    Raises:
        Misuse: The directory holds something else, or texts of other options. The message names
            them.
    """
    from eagle3_jax.conversion.files import read_json

    record = out / DATA_RECORD
    if out.exists() and not out.is_dir():
        raise Misuse(f"{out} is a file; name a directory")
    # A killed process leaves a partial directory. The next write of the same file removes it.
    others = [
        path for path in out.glob("*") if path != record and not path.name.endswith(".partial")
    ]

    if record.is_file() and any(out.glob("texts-*.npz")):
        _refuse_other_options(out, "texts", read_json(record), options)
    elif others:
        raise Misuse(
            f"{out} exists already and holds no texts of `eagle3 train data`; name a new directory"
        )
    else:
        write_json(record, {"options": options, "shards": shards})


def joined_texts(directory: Path) -> Texts:
    """Reads all texts of a directory, without those whose prompt is in an earlier file.

    A model that writes questions repeats some of them in another file.

    Raises:
        Misuse: The directory holds something else or is not finished.
    """
    import numpy as np

    from eagle3_jax.training.texts import Texts

    known: set[tuple[int, bytes]] = set()
    shards = []
    for number in range(_data_record(directory)["shards"]):
        shard = Texts.load(shard_path(directory, number))
        prompts = shard.prompts()
        is_new = np.array([prompt not in known for prompt in prompts], np.bool_)
        shards.append(shard.chosen(is_new))
        known.update(prompts)
    return Texts.joined(shards)


def read_texts(directory: Path) -> tuple[Texts, Texts]:
    """Reads the texts that `eagle3 train data` wrote: those to learn from, and held-out ones.

    Raises:
        Misuse: The directory holds something else or is not finished, or one of the two groups is
            empty.
    """
    texts = joined_texts(directory)
    is_held_out = texts.held_out(_data_record(directory)["options"]["--held-out"])
    groups = texts.chosen(~is_held_out), texts.chosen(is_held_out)
    if not len(groups[0]) or not len(groups[1]):
        raise Misuse(
            f"of the {len(texts)} texts in {directory} {len(groups[1])} are held out; both groups"
            " need some, so give more documents or another --held-out"
        )
    return groups


def _data_record(directory: Path) -> dict[str, Any]:
    """Reads the record of `eagle3 train data`: its options and the number of its files."""
    from eagle3_jax.conversion.files import read_json

    record = directory / DATA_RECORD
    if not record.is_file():
        raise Misuse(
            f"{directory} holds no texts to learn from; write them with `eagle3 train data TARGET"
            f" {directory} FILES`"
        )

    contents = read_json(record)
    match contents:
        case {"options": {"--held-out": float()}, "shards": int(shards)}:
            absent = [
                number for number in range(shards) if not shard_path(directory, number).is_file()
            ]
        case _:
            raise Misuse(f"{record} is damaged; write the texts again")
    if absent:
        raise Misuse(
            f"{directory} is not finished: {len(absent)} of {shards} files are absent; run the same"
            " `eagle3 train data`"
        )
    return contents


def check_trainable(shapes: Any) -> None:
    """Refuses a model if its training state alone is larger than the memory.

    The model is described by the shapes of its parameters.
    """
    import jax

    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    # Weights, gradients and two moments in float32.
    needed = 16 * total
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise Misuse(
            f"{total:,} parameters need {needed / 1e9:,.0f} GB to train and this machine has"
            f" {memory / 1e9:,.0f}; lower --layers, --width or --mlp-width"
        )


def refuse_finished(out: Path) -> None:
    """Refuses a directory that holds anything but the files of an interrupted run.

    The configuration is written last, so a run without one is not finished.
    """
    if out.exists() and not out.is_dir():
        raise Misuse(f"{out} is a file; name a directory")
    names = {entry.name for entry in out.iterdir()} if out.is_dir() else set()
    if names and (CHECKPOINTS not in names or "config.json" in names):
        raise Misuse(
            f"{out} exists already and holds more than the checkpoints of a run; name a new"
            " directory"
        )


def fingerprint(arrays: Any) -> str:
    """Returns a short hash of the arrays of a pytree, with their shapes and types."""
    import jax
    import numpy as np

    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(arrays):
        digest.update(f"{leaf.shape}{leaf.dtype}".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return f"sha256 {digest.hexdigest()[:12]}"


def fingerprint_of_file(path: Path) -> str:
    """Returns a short hash of the bytes of a file."""
    with path.open("rb") as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"


def weights_of(params: Any) -> str:
    """Returns a hash of the last row of every parameter of a model; training changes all rows."""
    import jax

    return fingerprint([leaf[-1:] if leaf.ndim else leaf for leaf in jax.tree.leaves(params)])


def same_run(out: Path, options: Mapping[str, Any], draft_to_target: Any = None) -> Any:
    """Checks that a run continues with its first options, and records those of a new run.

    Args:
        out: The directory of the run.
        options: Options that change the result, by their names on the command line.
        draft_to_target: ``[W]``, the draft vocabulary; ``None`` for all tokens.

    Returns:
        The draft vocabulary of the run.

    Raises:
        Misuse: ``out`` holds checkpoints of a run with other options. The message names them.
    """
    import numpy as np

    from eagle3_jax.conversion.files import read_json

    record = out / CHECKPOINTS / _RUN
    if not any(entry.name.isdecimal() for entry in record.parent.glob("*")):
        ids = None if draft_to_target is None else np.asarray(draft_to_target).tolist()
        write_json(record, {"options": options, "draft_to_target": ids})
        return draft_to_target

    begun = read_json(record)
    _refuse_other_options(out, "checkpoints", begun, options)
    try:
        ids = begun["draft_to_target"]
        return None if ids is None else np.asarray(ids, np.int32)
    except (KeyError, TypeError, ValueError):
        raise Misuse(f"{record} is damaged; name a new directory") from None


def _refuse_other_options(
    out: Path, contents: str, record: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Refuses to go on with other options than the record of the first run has."""
    begun = record.get("options")
    if not isinstance(begun, dict):
        raise Misuse(f"the record of {out} is damaged; name a new directory")

    differing = [
        f"{name} was {_shown(begun.get(name))} and is {_shown(value)}"
        for name, value in options.items()
        if begun.get(name) != value
    ]
    if differing:
        raise Misuse(
            f"{out} holds the {contents} of another run: {'; '.join(differing)}. Give the same to"
            " continue it, or name a new directory"
        )


def _shown(value: Any) -> str:
    return "left out" if value is None else str(value)[:80]


# Finished models, written next to their checkpoints


def write_target(out: Path, data: Path, config: DecoderConfig, params: Any, *, dtype: str) -> None:
    """Writes a target as Hugging Face files, with the tokenizer of its corpus."""
    from eagle3_jax import conversion
    from eagle3_jax.conversion.families import FAMILIES

    stop = read_corpus(data)[1].token_to_id(_END_OF_TEXT)
    # The tokenizer is copied from the source.
    checkpoint = conversion.TargetCheckpoint(
        config=config,
        family=FAMILIES["llama"],
        params=_stored(params, dtype),
        stop_tokens=() if stop is None else (stop,),
        source=data,
        dtype=dtype,
    )
    with _finished(out) as folder:
        conversion.write_target(checkpoint, folder)


def write_draft_model(
    out: Path, target: Path, config: DecoderConfig, params: Any, *, dtype: str
) -> None:
    """Writes a draft model, with the family and the tokenizer of its target."""
    from eagle3_jax import conversion

    checkpoint = dataclasses.replace(
        conversion.read_target(target),
        config=config,
        params=_stored(params, dtype),
        source=target,
        dtype=dtype,
    )
    with _finished(out) as folder:
        conversion.write_target(checkpoint, folder)


def write_head(
    out: Path, config: Any, params: Any, draft_to_target: Any, *, dtype: str, num_target_layers: int
) -> None:
    """Writes a head in the usual layout of its method."""
    from eagle3_jax import conversion
    from eagle3_jax.conversion.heads import kind_of

    kind = kind_of(config)
    checkpoint = conversion.HeadCheckpoint(
        method=kind.name,
        config=config,
        head=_stored(params, dtype),
        draft_to_target=draft_to_target,
        embedding=None,
        dialect="jax",
        source=out / CHECKPOINTS,
        dtype=dtype,
        num_target_layers=num_target_layers,
    )
    with _finished(out) as folder:
        conversion.write_head(checkpoint, folder, kind.layouts[0])


def _stored(params: Any, dtype: str) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np

    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.dtype(dtype)), params)


@contextlib.contextmanager
def _finished(out: Path) -> Iterator[Path]:
    """Yields a directory whose files then move into ``out``.

    The configuration is the last, because loading needs it.
    """
    partial = out / _PARTIAL
    with disk_full_named(out):
        out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            yield partial
            for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
                path.replace(out / path.name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
