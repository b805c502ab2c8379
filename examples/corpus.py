"""The corpus of the shipped pair: CPython's standard library and its documentation, tokenized.

    python examples/corpus.py corpus --docs cpython/Doc     # a minute
    eagle3 train target corpus target
    eagle3 train data target data corpus/train.jsonl --rewrite

A file is known by its name inside the corpus (``code/json/decoder.py``,
``docs/library/heapq.rst``). The held-out names are a fixed list that ships with the package, so
that no head is trained on the files that it is measured with. The directory holds
``tokenizer.json``, ``train.npy`` and ``heldout.npy`` (token ids), ``corpus.jsonl`` (every file with
its hash and its part), and ``train.jsonl`` (the documents to train on).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import runpy
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eagle3_jax.files.sources import bundled
from eagle3_jax.files.writing import whole_directory

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


def write_corpus(
    out: Path, documents: Sequence[Document], vocab_size: int, seed: int
) -> dict[str, int]:
    """Trains the tokenizer and writes all files. Returns the number of tokens by file."""
    train = [document for document in documents if not document.held_out]
    held_out = [document for document in documents if document.held_out]
    tokenizer = train_tokenizer((document.text for document in train), vocab_size)
    sizes = {}

    with whole_directory(out) as folder:
        save_tokenizer(tokenizer, folder)
        for name, part in (("train.npy", train), ("heldout.npy", held_out)):
            tokens = encode(tokenizer, part, seed)
            np.save(folder / name, tokens)
            sizes[name] = len(tokens)
        write_documents(folder / "train.jsonl", train)
        write_manifest(folder / "corpus.jsonl", documents)
    return sizes


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
    """Writes ``tokenizer.json``, and the configuration with which transformers and vLLM load it."""
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


def encode(tokenizer: Tokenizer, documents: Sequence[Document], seed: int) -> np.ndarray:
    """Returns one row of token ids: documents shuffled, each with :data:`END_OF_TEXT` behind it."""
    order = np.random.default_rng(seed).permutation(len(documents))
    encoded = tokenizer.encode_batch([documents[i].text for i in order])
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = [np.array([*row.ids, end], np.uint16) for row in encoded]
    return np.concatenate(pieces)


def write_documents(path: Path, documents: Sequence[Document]) -> None:
    """Writes documents as lines of JSON with ``name`` and ``text``, for ``eagle3 train data``."""
    _write_rows(path, [{"name": document.name, "text": document.text} for document in documents])


def write_manifest(path: Path, documents: Sequence[Document]) -> None:
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the documents and writes the corpus."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=Path, help="directory to create")
    add("--stdlib", type=Path, help="CPython's Lib; that of this interpreter if left out")
    add("--docs", type=Path, help="CPython's Doc; the topics of pydoc if left out")
    add("--vocab-size", type=int, default=4096, help="vocabulary of the tokenizer  [default: 4096]")
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.out.exists():
        parser.error(f"{options.out} exists already; name a new directory")
    if options.docs is not None and not options.docs.is_dir():
        parser.error(f"--docs {options.docs} is not a directory; give CPython's Doc folder")
    if not 257 <= options.vocab_size <= 65_536:
        parser.error(f"--vocab-size {options.vocab_size}: expected 257 to 65536")

    stdlib = options.stdlib or Path(sysconfig.get_path("stdlib"))
    documents = read_corpus(stdlib, options.docs)
    held_out = sum(document.held_out for document in documents)
    train = len(documents) - held_out
    if not train or not held_out:
        parser.error(
            f"--stdlib {stdlib} is not CPython's Lib: it holds {train} files to train on,"
            f" {held_out} held out"
        )
    sizes = write_corpus(options.out, documents, options.vocab_size, options.seed)
    print(
        f"wrote {options.out}: {train} files, {sizes['train.npy']:,} tokens; held out"
        f" {held_out} files, {sizes['heldout.npy']:,} tokens"
    )


if __name__ == "__main__":
    main()
