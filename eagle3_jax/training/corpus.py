"""Text for the shipped pair: the standard library of an installed CPython, split into training and held-out files.

A file is known by its name inside the corpus (``code/json/decoder.py``,
``docs/library/heapq.rst``). The held-out names are a fixed list that ships with the package, so
that no head is trained on the files that it is measured with.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eagle3_jax.files.sources import bundled

END_OF_TEXT = "<|endoftext|>"

# Generated tables, other people's packages and the test suite teach a small model little about
# writing Python.
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "encodings",
    "msilib",
    "pydoc_data",
    "__pycache__",
}
DOCS_FOLDERS = ("tutorial", "library", "reference", "howto", "faq")

# Rebuilding the corpus keeps the parts that the manifest of the shipped pair names.
_SHIPPED = map(json.loads, bundled("corpus.jsonl").read_text(encoding="utf-8").splitlines())
HELD_OUT = frozenset(row["name"] for row in _SHIPPED if row["part"] == "held-out")


@dataclasses.dataclass(frozen=True)
class Document:
    """One file of the corpus."""

    name: str  #: Its name inside the corpus.
    text: str  #: Its content.

    @property
    def held_out(self) -> bool:
        """Whether it is never trained on."""
        return self.name in HELD_OUT


def read_corpus(stdlib: Path, docs: Path | None = None) -> list[Document]:
    """Returns all documents, sorted by name.

    Args:
        stdlib: ``Lib`` of a CPython installation (``sysconfig.get_path("stdlib")``).
        docs: Folder of the documentation's reStructuredText (``Doc`` of a source tree, or
            ``_sources`` of a built manual); without it the prose is that of ``pydoc_data``.
    """
    prose = _topics(stdlib) if docs is None else _docs(docs)
    return sorted([*_code(stdlib), *prose], key=lambda document: document.name)


def _code(stdlib: Path) -> Iterator[Document]:
    for path in stdlib.rglob("*.py"):
        relative = path.relative_to(stdlib)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1]):
            try:
                yield Document(f"code/{relative.as_posix()}", path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:  # a handful of sources declare another encoding
                continue


def _docs(docs: Path) -> Iterator[Document]:
    for folder in DOCS_FOLDERS:
        for path in (docs / folder).rglob("*.rst*"):
            name = path.relative_to(docs).as_posix().removesuffix(".txt")
            yield Document(f"docs/{name}", path.read_text(encoding="utf-8"))


def _topics(stdlib: Path) -> Iterator[Document]:
    source = stdlib / "pydoc_data" / "topics.py"
    if not source.exists():
        return
    for topic, text in runpy.run_path(str(source))["topics"].items():
        yield Document(f"docs/topics/{topic}.rst", text)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE (Sennrich et al., 2016) with :data:`END_OF_TEXT` as token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes ``tokenizer.json``, and the configuration with which transformers and vLLM load it as it is."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )


def encode(tokenizer: Tokenizer, documents: list[Document], seed: int) -> np.ndarray:
    """Returns one long row of token ids, documents shuffled and each followed by :data:`END_OF_TEXT`."""
    order = np.random.default_rng(seed).permutation(len(documents))
    encoded = tokenizer.encode_batch([documents[i].text for i in order])
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = [np.array([*row.ids, end], np.uint16) for row in encoded]
    return np.concatenate(pieces)


def write_documents(path: Path, documents: list[Document]) -> None:
    """Writes the documents as lines of JSON with ``name`` and ``text``, as ``eagle3 train data`` reads them."""
    _write_rows(path, [{"name": document.name, "text": document.text} for document in documents])


def write_manifest(path: Path, documents: list[Document]) -> None:
    """Records every file with its hash, size and part, so that a rebuild can be compared."""
    rows = []
    for document in documents:
        content = document.text.encode()
        part = "held-out" if document.held_out else "train"
        sha256 = hashlib.sha256(content).hexdigest()
        rows.append({"name": document.name, "sha256": sha256, "bytes": len(content), "part": part})
    _write_rows(path, rows)


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
